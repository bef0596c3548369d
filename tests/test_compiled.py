"""Steps with regions compiled by torch's Inductor: numbers, random numbers, memory, lanes, and what happens without it."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config
import torch.nn.functional as F
from torch import nn
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

import waterflow as wf
from tests.partition.test_regions import Net
from tests.support import Trained, assert_same, same_bits
from waterflow.executor import compiling
from waterflow.executor.captured import captures
from waterflow.executor.compile_worker import Answer
from waterflow.executor.variants import Variant

aten = torch.ops.aten
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # compilers are slow where cores are taken
BATCHES = [(torch.randn(6, 8, dtype=torch.float64), torch.randint(4, (6,))) for _ in range(3)]


def loss(model: nn.Module, batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """With what dropout leaves of ones, so that masks can be seen."""
    x, y = batch
    return F.cross_entropy(model(x), y), {"mask": F.dropout(torch.ones_like(x), 0.5)}


def make(seed: int = 0, **settings: Any) -> tuple[nn.Module, torch.optim.Optimizer, wf.Step]:
    """A step of its own random numbers."""
    torch.manual_seed(seed)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    generator = torch.Generator().manual_seed(100 + seed)
    return model, optimizer, wf.Step(model, step=loss, optimizer=optimizer, generator=generator, **settings)


def trained(compile: str | None, seed: int = 0, steps: int = 7) -> Trained:
    """After some steps, alone."""
    return train(make(seed, compile=compile), steps)


def train(made: tuple[nn.Module, torch.optim.Optimizer, wf.Step], steps: int) -> Trained:
    """Some steps of what was made."""
    model, optimizer, step = made
    return Trained([step(BATCHES[i % 3]) for i in range(steps)], model, optimizer, step)


def variant_of(step: wf.Step) -> Variant:
    """The only one."""
    (variant,) = step._variants._variants.values()
    return variant


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Lanes have one, and so has what is compared with them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def fresh_captures() -> Iterator[None]:
    """Nothing was compiled before, nor is what the test makes left behind."""
    kept = dict(captures._entries)
    captures.clear()
    yield
    captures.clear()
    captures._entries.update(kept)


# -- numbers


def test_a_compiled_step_computes_what_the_captured_one_does() -> None:
    plain, native = trained(None), trained("inductor-always")
    told = native.step.compiled  # type: ignore[union-attr]
    assert (
        told is not None and told.regions == told.found == 2 and told.reason is None and "2 of 2 regions" in str(told)
    )
    assert native.step is not None
    lowered = variant_of(native.step).captured.lowered
    calls = [node.target for node in lowered.instructions].count(torch.ops.waterflow.compiled.default)
    assert calls == 2 and len(lowered.program) <= told.of - told.operations + calls
    for name, tensor in plain.tensors().items():
        torch.testing.assert_close(native.tensors()[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


def test_masks_are_those_of_the_captured_step() -> None:
    plain, native = trained(None), trained("inductor-always")
    for (_, one), (_, other) in zip(plain.results, native.results):
        assert same_bits(one["mask"], other["mask"])
    assert plain.step.generator.get_state().equal(native.step.generator.get_state())  # type: ignore[union-attr]


def test_inductor_reads_masks_before_they_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why random operations stay outside: a kernel sums up a mask that ``bernoulli_`` and ``div_`` have yet to fill."""
    if not torch.__version__.startswith("2.13"):
        pytest.skip("seen in torch 2.13")
    monkeypatch.delenv("CI", raising=False)  # with it set, Inductor refuses div_

    def draw(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        made = aten._softmax.default(x, -1, False)
        mask = aten.div_.Scalar(aten.bernoulli_.float(aten.full_like.default(made, float("nan")), 0.5), 0.5)
        return aten.mul.Tensor(made, mask), aten.sum.default(mask)

    x = torch.randn(64, 64)
    with torch.no_grad(), torch._inductor.config.patch(fallback_random=True, force_disable_caches=True):
        graph = make_fx(draw, tracing_mode="fake", decomposition_table=select_decomp_table())(x)
        native = compile_fx_inner(graph, [x])
        torch.manual_seed(0)
        wanted = draw(x)[1]
        torch.manual_seed(0)
        assert native([x])[1] < wanted / 2


class Halves(nn.Module):
    """Changes one half of what a layer makes, through a view whose schema hides that it is one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tanh of small numbers changes them so little that a rough comparison does not see it."""
        one, other = self.first(x).unsafe_chunk(2, 1)
        one = one.tanh_() * other.tanh()
        return self.last((one * one + one).tanh() * one.exp())


@pytest.mark.parametrize("rows", [1, 6], ids=["expanded", "plain"])
def test_changes_through_views_that_schemas_hide(rows: int) -> None:
    def steps(compile: str | None) -> Trained:
        torch.manual_seed(0)
        model = Halves().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, compile=compile)  # type: ignore[arg-type]
        batch = (3 * torch.randn(rows, 8, dtype=torch.float64)).expand(6, 8), torch.tensor([1]).expand(6)
        return Trained([step(batch) for _ in range(4)], model, optimizer, step)

    plain, native = steps(None), steps("inductor-always")
    told = native.step.compiled  # type: ignore[union-attr]
    assert told is not None and told.regions == told.found == 2
    for name, tensor in plain.tensors().items():
        torch.testing.assert_close(native.tensors()[name], tensor, rtol=1e-9, atol=1e-11, msg=name)


def test_the_working_directory_does_not_stand_in_for_the_package(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "waterflow").mkdir()
    (tmp_path / "waterflow" / "__init__.py").write_text("raise ImportError('sources that were not built')")
    monkeypatch.chdir(tmp_path)
    assert compiling._ask([]) == []


def test_a_compiled_job_among_others_ends_with_the_bits_that_it_has_alone() -> None:
    def jobs() -> list[wf.Job]:
        return [
            wf.Job(
                name=str(n), model=lambda: Net().double(), step=loss, data=BATCHES * 4, seed=n,
                optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), compile="inductor-always" if n < 3 else None,
            )
            for n in range(5)
        ]  # fmt: skip

    together = wf.train(jobs(), lanes=2, max_concurrent=5)
    for number, job in enumerate(jobs()):
        (alone,) = wf.train([job], lanes=1)
        other = together[str(number)]
        assert (other.compiled is not None) == (alone.compiled is not None) == (number < 3)
        assert alone.losses == other.losses and other.missed_requests == 0 and alone.planned_requests > 0
        for name, tensor in alone.state_dict.items():
            assert same_bits(tensor, other.state_dict[name]), name
    assert together["0"].to_dict()["compiled"]["regions"] == 2


def test_a_step_is_compiled_once_for_all_that_are_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    trained("inductor-always", steps=1)
    monkeypatch.setattr(compiling, "_ask", lambda tasks: pytest.fail("it was compiled before"))
    assert trained("inductor-always", seed=1, steps=1).step.compiled.regions == 2  # type: ignore[union-attr]


# -- memory and lanes


def test_the_prediction_counts_what_native_code_holds() -> None:
    step = trained("inductor-always").step
    assert step is not None and step.measured_height > 0
    assert 0.97 * step.measured_height <= step.predicted_height <= 1.05 * step.measured_height


def test_native_code_that_does_not_fit_is_not_used() -> None:
    plain, native = trained(None).step, trained("inductor-always").step
    assert plain is not None and native is not None and plain.measured_height < native.measured_height
    low, high = plain.plan.peak, native.plan.peak
    with wf.Engine(memory=(low + high) // 2, reserve=0, lanes=1) as engine:
        told = train(make(0, compile="inductor-always", engine=engine), 4).step.compiled  # type: ignore[union-attr]
        assert told is not None and told.regions == 0 and "more memory" in str(told)
    with wf.Engine(memory=low // 2, reserve=0, lanes=1) as engine, pytest.raises(wf.MemoryLimitError):
        train(make(0, compile="inductor-always", engine=engine), 4)


def test_native_code_runs_without_the_interpreter_lock() -> None:
    before = sys.getswitchinterval()
    with wf.Engine(lanes=2) as engine:
        steps = [make(seed, compile="inductor-always", engine=engine)[2] for seed in range(2)]
        for step in steps:
            for i in range(4):
                step(BATCHES[i % 3])
        try:
            sys.setswitchinterval(1000.0)
            pending = [step.submit(BATCHES[0]) for step in steps for _ in range(3)]
            end = time.perf_counter() + 1.0
            while time.perf_counter() < end and not all(p.run.done for p in pending):  # type: ignore[union-attr]
                pass  # this thread keeps the interpreter
            assert all(p.run.done for p in pending)  # type: ignore[union-attr]
        finally:
            sys.setswitchinterval(before)
        for one in pending:
            one.result()


def test_one_region_runs_on_many_threads_at_once() -> None:
    reference = trained("inductor-always", seed=3, steps=40)
    begun = [make(3, compile="inductor-always") for _ in range(6)]
    made: list[Trained] = []
    threads = [threading.Thread(target=lambda one=one: made.append(train(one, 40))) for one in begun]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(made) == 6
    for one in made:
        assert_same(one, reference)


def test_others_capture_and_train_while_one_compiles(monkeypatch: pytest.MonkeyPatch, fresh_captures: None) -> None:
    asked, answer = threading.Event(), threading.Event()

    def ask(tasks: list[Any]) -> list[Answer]:
        asked.set()
        assert answer.wait(60)
        return [Answer(error="not today")] * len(tasks)

    monkeypatch.setattr(compiling, "_ask", ask)
    waiting = threading.Thread(target=lambda: trained("inductor"))
    waiting.start()
    try:
        assert asked.wait(60)
        assert trained(None).step.steps == 7  # type: ignore[union-attr]
    finally:
        answer.set()
        waiting.join()


# -- what is not used


@pytest.mark.parametrize("way", ["slower", "failed"])
def test_regions_that_are_slower_or_fail_run_as_captured(
    way: str, monkeypatch: pytest.MonkeyPatch, fresh_captures: None, caplog: pytest.LogCaptureFixture
) -> None:
    answer = Answer(path="/nowhere", seconds=(1.0, 2.0)) if way == "slower" else Answer(error="broken: so it is")
    monkeypatch.setattr(compiling, "_ask", lambda tasks: [answer] * len(tasks))
    monkeypatch.setattr(compiling, "_told", set())
    caplog.set_level(logging.WARNING, logger="waterflow")
    native = trained("inductor")
    told = native.step.compiled  # type: ignore[union-attr]
    assert told is not None and told.regions == told.operations == 0 and told.found == 2
    assert told.reason == ("none was faster" if way == "slower" else "broken: so it is")
    assert [r.getMessage().count("broken") for r in caplog.records if r.levelname == "WARNING"] == [1] * (
        way == "failed"
    )
    assert not any("C++" in r.getMessage() for r in caplog.records)
    assert_same(native, trained(None))


def test_without_a_compiler_steps_run_as_captured(
    monkeypatch: pytest.MonkeyPatch, fresh_captures: None, caplog: pytest.LogCaptureFixture, tmp_path: Any
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiling, "_told", set())
    caplog.set_level(logging.WARNING, logger="waterflow")
    first, second = trained("inductor-always"), trained("inductor")
    assert first.step.compiled.regions == second.step.compiled.regions == 0  # type: ignore[union-attr]
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warned) == 1 and "C++ compiler" in warned[0] and "compile=None" in warned[0]
    assert_same(first, trained(None))


def test_a_step_of_a_few_operations_is_left_as_it_is() -> None:
    model = nn.Linear(3, 1)
    step = wf.Step(model, loss=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), compile="inductor")
    step((torch.randn(4, 3), torch.randn(4, 1)))
    assert step.compiled is not None and step.compiled.found == 0 and "belong together" in str(step.compiled)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compile": "triton"}, "compile must be 'inductor', 'inductor-always' or None; got 'triton'"),
        ({"compile": True}, "compile must be"),
        ({"compile": "inductor", "recompute": "auto"}, "exclude each other"),
    ],
)
def test_what_cannot_be_asked_for(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(wf.InvalidJobError, match=message):
        make(**settings)
