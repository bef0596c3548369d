"""Device graphs on the stand-in for a GPU's driver, whose graphs are made of the same operations at the same addresses:
what is launched again is bit for bit what would have been issued, and goes where anything that it relied on changes."""

from __future__ import annotations

import gc
import logging
import threading
import warnings
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from tests.allocator.fake_cuda import FakeCuda
from waterflow import _C
from waterflow.executor import engine as engines
from waterflow.executor.program import capture_budget

STEPS = 10
Batch = tuple[torch.Tensor, torch.Tensor]
Ran = tuple[list[float], dict[str, torch.Tensor], torch.Tensor]
Between = Callable[[int, wf.Step], None]


@pytest.fixture
def fake(tmp_path: Path) -> FakeCuda:
    return FakeCuda(tmp_path)


@pytest.fixture(autouse=True)
def on_cuda(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Engines that are made now have their lanes on the stand-in."""

    def native(settings: dict[str, Any], arenas: bool) -> Any:
        handles = [fake.new_stream() for _ in range(settings["lanes"])]
        device = _C.CudaDevice(0, 0, fake.path)
        return _C.Engine(**{**settings, "async_host": None}, arenas=arenas, cuda=device, handles=handles)

    monkeypatch.setattr(engines, "_native", native)
    monkeypatch.delenv("WATERFLOW_DEVICE_GRAPHS", raising=False)
    yield
    gc.collect()
    assert "captures" not in fake.held(), "a capture was left open"


def model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.3), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten(),
        nn.Linear(8 * 144, 32), nn.Dropout(0.2), nn.Linear(32, 10),
    )  # fmt: skip


def batches(seed: int = 0, count: int = STEPS) -> list[Batch]:
    numbers = torch.Generator().manual_seed(seed)
    return [(torch.randn(16, 3, 16, 16, generator=numbers), torch.randint(0, 10, (16,), generator=numbers)) for _ in range(count)]


def make_step(engine: wf.Engine, seed: int = 0, **settings: Any) -> wf.Step:
    network = model(seed)
    optimizer = settings.pop("optimizer", lambda p: torch.optim.Adam(p, lr=1e-3))(network.parameters())
    numbers = torch.Generator().manual_seed(100 + seed)
    settings = {"loss": F.cross_entropy, "generator": numbers} | settings
    return wf.Step(network, optimizer=optimizer, engine=engine, **settings)


def train(step: wf.Step, seed: int = 0, between: Between | None = None, given: list[Batch] | None = None) -> Ran:
    """Losses, which are looked at when all are there; the model's state; and where its random numbers stand."""
    losses = []
    for index, batch in enumerate(given or batches(seed)):
        if between is not None:
            between(index, step)
        losses.append(step(batch))
    state = {key: value.clone() for key, value in step.model.state_dict().items()}
    return [float(loss) for loss in losses], state, step._bound_steps._generator.get_state()


def same(one: Ran, other: Ran) -> bool:
    states = all(torch.equal(one[1][key], other[1][key]) for key in one[1])
    return one[0] == other[0] and states and torch.equal(one[2], other[2])


def plainly(between: Between | None = None, given: list[Batch] | None = None, **settings: Any) -> Ran:
    with wf.Engine(memory="512MiB", lanes=1, device_graphs=False) as engine:
        ran = train(make_step(engine, **settings), 0, between, given)
        assert not any(engine.stats().graphs.values())
    return ran


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_the_same_bits_with_and_without(lanes: int, fake: FakeCuda) -> None:
    results: dict[bool, list[Any]] = {}
    for graphs in (True, False):
        fake.forget_calls()
        with wf.Engine(memory="512MiB", lanes=lanes, device_graphs=graphs) as engine:
            found: list[Any] = [None] * lanes
            steps = [make_step(engine, seed) for seed in range(lanes)]

            def work(index: int, steps: list[wf.Step] = steps, found: list[Any] = found) -> None:
                found[index] = train(steps[index], index)

            threads = [threading.Thread(target=work, args=(index,)) for index in range(lanes)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            results[graphs] = found
            counts = engine.stats().graphs
            engine.native.check()
        assert fake.count("cuGraphLaunch") == counts["launched"]
        assert (counts["captured"] > 0) == (counts["launched"] > 0) == graphs
    assert all(map(same, results[True], results[False]))


def test_what_is_launched_again_asks_for_no_memory_and_calls_no_operation(fake: FakeCuda) -> None:
    with wf.Engine(memory="512MiB", lanes=1) as engine:
        step = make_step(engine)
        train(step)
        before, groups = engine.native.placed, engine.stats().groups
        fake.forget_calls()
        train(step)
        counts = engine.stats().graphs
        assert engine.native.placed == before
        assert fake.count("cuStreamBeginCapture") == 0 and fake.count("cuLaunchHostFunc") == 0
        assert fake.count("cuGraphLaunch") * 2 > engine.stats().groups - groups
        assert counts["dropped"] == 0 and counts["bytes"] > 16 * 3 * 16 * 16 * 4


def test_captures_are_of_the_thread_alone_and_on_a_stream_of_their_own(fake: FakeCuda) -> None:
    with wf.Engine(memory="512MiB", lanes=1) as engine:
        train(make_step(engine))
    calls = fake.calls()
    captured = {c.split("(")[1].rstrip(")") for c in calls if c.startswith("cuStreamBeginCapture")}
    launched = {c.split(",")[1].rstrip(")") for c in calls if c.startswith("cuGraphLaunch")}
    assert len(captured) == len(launched) == 1
    stream, mode = captured.pop().split(",")
    assert mode == "1" and stream not in launched


def test_a_learning_rate_takes_effect_at_once() -> None:
    def schedule(index: int, step: wf.Step) -> None:
        step.optimizer.param_groups[0]["lr"] = 1e-3 / (1 + index)

    expected = plainly(schedule)
    with wf.Engine(memory="512MiB", lanes=1) as engine:
        step = make_step(engine)
        assert same(train(step, 0, schedule), expected)
        assert engine.stats().graphs["launched"] > 0 and engine.stats().graphs["dropped"] == 0
        constant = train(make_step(engine))
    assert constant[0] != expected[0], "the schedule changes losses"


def test_an_update_whose_numbers_change_is_called_between_graphs() -> None:
    def decay(index: int, step: wf.Step) -> None:
        step.optimizer.param_groups[0]["weight_decay"] = 0.1 if index < 6 else 0.3

    settings = {"optimizer": lambda p: torch.optim.AdamW(p, lr=1e-3)}
    given = batches(0, 12)
    expected = plainly(decay, given, **settings)
    with wf.Engine(memory="512MiB", lanes=1) as engine:
        step = make_step(engine, **settings)
        assert same(train(step, 0, decay, given), expected)
        counts = engine.stats().graphs
        assert counts["captured"] > counts["dropped"] > 0, "once, and never again"

    def every_time(index: int, step: wf.Step) -> None:
        step.optimizer.param_groups[0]["betas"] = (0.9 - 0.01 * index, 0.999)

    expected = plainly(every_time)
    with wf.Engine(memory="512MiB", lanes=1) as engine:
        step = make_step(engine)
        assert same(train(step, 0, every_time), expected)
        counts = engine.stats().graphs
        assert counts["launched"] > counts["captured"] > 0 and counts["dropped"] == 0


def test_a_job_on_another_lane_is_captured_there_and_finds_its_first_graphs_again() -> None:
    given = batches(0, 24)
    expected = plainly(given=given)
    counts: list[dict[str, int]] = []
    blocks, gate, inside = threading.Event(), threading.Event(), threading.Event()
    library = torch.library.Library("aten", "IMPL")

    def erf(x: torch.Tensor) -> torch.Tensor:
        if blocks.is_set():
            inside.set()
            gate.wait(60)
        return x + 0

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is a kernel already
        library.impl("erf", erf, "CPU", allow_override=True)
    with wf.Engine(memory="512MiB", lanes=2) as engine:
        # A step that is launched on a lane, and stays there: beside one that is not there would be no capture.
        layer = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        other = wf.Step(layer, step=lambda model, x: model(x).erf().sum(), optimizer=optimizer, engine=engine)
        for _ in range(6):
            other(torch.ones(3, 4))
        assert engine.stats().graphs["launched"] > 0
        counts.append(engine.stats().graphs)

        def between(index: int, step: wf.Step) -> None:
            if index == 8:
                blocks.set()
                threads.append(threading.Thread(target=other, args=(torch.ones(3, 4),)))
                threads[0].start()
                inside.wait(60)
            if index == 16:
                gate.set()
                threads[0].join()
            if index in (8, 16):
                counts.append(engine.stats().graphs)

        threads: list[threading.Thread] = []
        step = make_step(engine)
        assert same(train(step, 0, between, given), expected)
        counts.append(engine.stats().graphs)
    library._destroy()
    captured = [after["captured"] - before["captured"] for before, after in pairwise(counts)]
    assert captured[0] == captured[1] > 0 == captured[2] and counts[-1]["dropped"] == 0
    assert all(after["launched"] > before["launched"] for before, after in pairwise(counts))


def test_a_new_plan_is_captured_anew() -> None:
    given = batches(0, 16)

    def again(index: int, step: wf.Step) -> None:
        if index == 8:
            for variant in step._bound_steps._bound_steps.values():
                variant.plans.wants_profile = True

    expected = plainly(given=given)
    with wf.Engine(memory="512MiB", lanes=1) as engine:
        step = make_step(engine)
        assert same(train(step, 0, again, given), expected)
        counts = engine.stats().graphs
        assert counts["captured"] > counts["dropped"] > 0


def test_tensors_that_are_replaced_are_bound_and_captured_anew() -> None:
    def replace(index: int, step: wf.Step) -> None:
        if index == 5:
            weight = next(step.model.parameters())
            weight.data = weight.data.clone() * 0.5

    given = batches(0, 12)
    expected = plainly(replace, given)
    with wf.Engine(memory="512MiB", lanes=1) as engine:
        step = make_step(engine)
        assert same(train(step, 0, replace, given), expected)
        counts = engine.stats().graphs
        assert counts["captured"] == 2 * counts["dropped"] > 0


CALLS = ("cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate")


@pytest.mark.parametrize("name", CALLS[:2])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_capture_that_was_spoiled_is_made_again(name: str, nth: int, fake: FakeCuda) -> None:
    given = batches(0, 2 * STEPS)
    expected = plainly(given=given)
    fake.fail(name, nth, 901)
    with wf.Engine(memory="512MiB", lanes=1) as engine:
        step = make_step(engine)
        assert same(train(step, 0, given=given), expected)
        assert engine.stats().graphs["launched"] > 0


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("nth", [1, 3])
def test_a_capture_that_fails_leaves_the_step_as_it_is(
    name: str, nth: int, fake: FakeCuda, caplog: pytest.LogCaptureFixture
) -> None:
    expected = plainly()
    fake.fail(name, nth, 999)
    with caplog.at_level(logging.INFO, "waterflow"), wf.Engine(memory="512MiB", lanes=1) as engine:
        step = make_step(engine, name="mine")
        assert same(train(step, 0), expected)
        counts = engine.stats().graphs
        assert counts == {"captured": 0, "launched": 0, "dropped": 0, "bytes": 0}
        engine.stats()
    told = [r.getMessage() for r in caplog.records if "without device graphs" in r.getMessage()]
    assert len(told) == 1 and "job 'mine'" in told[0] and "failed" in told[0]
    assert "graphs" not in fake.held()


def test_a_launch_that_fails_ends_the_job_and_no_other(fake: FakeCuda) -> None:
    with wf.Engine(memory="512MiB", lanes=1) as engine:
        step = make_step(engine)
        train(step)
        fake.fail("cuGraphLaunch", 2, 700)
        with pytest.raises(Exception, match="cuGraphLaunch"):
            train(step)
        other = train(make_step(engine, 1), 1)
    with wf.Engine(memory="512MiB", lanes=1, device_graphs=False) as engine:
        assert same(train(make_step(engine, 1), 1), other)


def test_limits_that_change_meanwhile() -> None:
    """Pages go and come back behind the same addresses."""
    given = batches(0, 30)
    expected = plainly(given=given)
    with wf.Engine(memory="512MiB", lanes=2) as engine:
        step = make_step(engine)
        full = engine.native.capacity

        def between(index: int, step: wf.Step) -> None:
            if index >= 8:
                least = step.plan.height + (1 << 20)
                engine.native.set_capacity(least if index % 3 else full)

        assert same(train(step, 0, between, given), expected)
        counts = engine.stats().graphs
        assert counts["launched"] > 20 and counts["dropped"] == 0
        engine.native.check()


def test_a_job_that_leaves_frees_its_graphs(fake: FakeCuda) -> None:
    with wf.Engine(memory="512MiB", lanes=1) as engine:
        step, other = make_step(engine), make_step(engine, 1)
        train(step)
        train(other)
        held = fake.held()["graphs"]
        step.close()
        assert 0 < fake.held()["graphs"] < held
        counts = engine.stats().graphs
        assert counts["dropped"] == held - fake.held()["graphs"] and counts["bytes"] > 0
        other.close()
        assert "graphs" not in fake.held() and engine.stats().graphs["bytes"] == 0
        assert step is not other  # both live on: it is the job that left


def test_closing_the_engine_frees_them_while_steps_live_on(fake: FakeCuda) -> None:
    engine = wf.Engine(memory="512MiB", lanes=2)
    step = make_step(engine)
    train(step)
    assert fake.held()["graphs"] > 0
    engine.close()
    assert "graphs" not in fake.held()
    assert fake.held()["streams"] == 2, "lanes' streams stay torch's, those of captures are gone"
    assert step is not None


def test_few_bindings_of_a_job_have_graphs_at_once(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_budget, "FREE_CAPTURES", 100)
    with wf.Engine(memory="512MiB", lanes=1) as engine:
        step = make_step(engine)
        for size in range(4, 16):
            train(step, given=[(images[:size].clone(), labels[:size].clone()) for images, labels in batches(0, 5)])
        counts = engine.stats().graphs
        assert counts["dropped"] > 0
        assert 0 < fake.held()["graphs"] == counts["captured"] - counts["dropped"]


def test_gradients_summed_over_several_batches() -> None:
    expected = plainly(given=batches(0, 16), accumulate=2)
    with wf.Engine(memory="512MiB", lanes=1) as engine:
        step = make_step(engine, accumulate=2)
        assert same(train(step, given=batches(0, 16)), expected)
        assert engine.stats().graphs["launched"] > 0


def test_copies_of_batches_come_from_the_reserve(caplog: pytest.LogCaptureFixture) -> None:
    expected = plainly()
    with caplog.at_level(logging.INFO, "waterflow"), wf.Engine(memory="512MiB", lanes=1, reserve=128 << 10) as engine:
        step = make_step(engine)
        assert same(train(step), expected)
        assert engine.stats().graphs["captured"] == 0
    assert "the reserve has 32768 left for device graphs" in caplog.text


def test_a_batch_at_an_odd_address_runs_as_it_is() -> None:
    """Kernels are chosen by alignment: the copy at an even address might be read by another one."""
    odd = []
    for images, labels in batches():
        room = torch.empty(images.numel() + 1)
        odd.append((room[1:].view_as(images).copy_(images), labels))
    given = [batch if index % 2 else odd[index] for index, batch in enumerate(batches())]
    expected = plainly(given=given)
    with wf.Engine(memory="512MiB", lanes=1) as engine:
        step = make_step(engine)
        train(step, 1)
        before = engine.stats()
        train(step, given=odd)
        after = engine.stats()
        assert after.graphs == before.graphs and after.steps == before.steps + STEPS
    with wf.Engine(memory="512MiB", lanes=1) as engine:
        step = make_step(engine)
        assert same(train(step, given=given), expected)
        assert engine.stats().graphs["launched"] > 0


@torch.library.custom_op("wf_graphs_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@twice.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


twice.register_autograd(lambda ctx, grad: grad * 2)


def changes_batch(network: nn.Module, batch: Batch) -> torch.Tensor:
    batch[0].mul_(0.5)
    return F.cross_entropy(network(batch[0]), batch[1])


def calls_python(network: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(twice(network(batch[0])), batch[1])


@pytest.mark.parametrize(
    ("function", "why"),
    [(changes_batch, "it changes its batch"), (calls_python, "it calls wf_graphs_test.twice.default, which is none")],
)
def test_steps_that_graphs_cannot_hold(function: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = plainly(loss=None, step=function)
    with caplog.at_level(logging.INFO, "waterflow"), wf.Engine(memory="512MiB", lanes=1) as engine:
        step = make_step(engine, loss=None, step=function)
        assert same(train(step), expected)
        assert engine.stats().graphs["captured"] == 0
    assert why in caplog.text


def test_the_environment_turns_them_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATERFLOW_DEVICE_GRAPHS", "0")
    with wf.Engine(memory="512MiB", lanes=1) as engine:
        train(make_step(engine))
        assert engine.stats().graphs["captured"] == 0


# -- the device


def test_other_threads_go_on_while_one_captures(fake: FakeCuda) -> None:
    device = _C.CudaDevice(0, 0, fake.path)
    stream, other = device.add_stream(), device.add_stream()
    event = device.record(other)
    device.begin_capture(stream)
    results: list[Any] = []

    def elsewhere() -> None:
        base = device.reserve(device.granularity)
        results.extend([device.complete(event), device.grow(base, device.granularity)])
        device.shrink(base, device.granularity)
        device.unreserve(base, device.granularity)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert results == [True, True]
    graph = device.end_capture(stream)
    device.launch(graph, other)
    device.destroy(graph)
    device.forget(event)
    assert "graphs" not in fake.held()


def test_what_a_capture_cannot_stand_ends_it(fake: FakeCuda) -> None:
    device = _C.CudaDevice(0, 0, fake.path)
    stream, other = device.add_stream(), device.add_stream()
    before = device.record(other)
    device.begin_capture(stream)
    with pytest.raises(_C.CudaError, match="cuStreamWaitEvent"):
        device.wait(stream, before)
    with pytest.raises(_C.CudaError, match=r"cuStreamEndCapture\(stream \d+\) failed.*cannot be done while a CUDA graph"):
        device.end_capture(stream)
    device.begin_capture(stream)
    device.finish()  # waits for streams, and not for the device
    device.destroy(device.end_capture(stream))
    assert "captures" not in fake.held() and "graphs" not in fake.held()
