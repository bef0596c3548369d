"""Opportunistic jobs that go on below their need: bits, memory that is really held, quotas that change, and refusals."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.support import MiB, run_steps, same_bits
from tests.test_priorities import WAIT, assert_same, in_thread, needs, until
from tests.test_recompute import Deep
from waterflow.allocator.counting import count_memory
from waterflow.errors import InvalidJobError, MemoryLimitError
from waterflow.executor.engine import Engine, within
from waterflow.executor.terms import Terms
from waterflow.partition.plan import Plan
from waterflow.runner import JobRunner
from waterflow.step_queue import STEPS_AHEAD

pytestmark = pytest.mark.slow


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.Flatten(), nn.Dropout(0.3),
            nn.Linear(16 * 64, 4),
        )  # fmt: skip


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(8, 32, num_layers=2, batch_first=True)
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.layers(x)[0]).mean(1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True) for _ in range(3))
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x.mean(1))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (Deep, (256, 32)),
    "cnn": (Convolutions, (32, 3, 16, 16)),
    "lstm": (Recurrent, (16, 24, 8)),
    "transformer": (Attention, (16, 24, 32)),
}


def batches(name: str, count: int = 8) -> list[Any]:
    random = torch.Generator().manual_seed(0)
    shape = MODELS[name][1]
    return [(torch.randn(shape, generator=random), torch.randint(4, shape[:1], generator=random)) for _ in range(count)]


def job(name: str = "mlp", **more: Any) -> wf.Job:
    settings = {"data": batches(name), "epochs": 3, "seed": 1, "loss": F.cross_entropy} | more
    return wf.Job(name, MODELS[name][0], optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), **settings)


def optimized(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = MODELS[name][0]()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def measure(name: str, quota: int, means: Any) -> None:
    """A few steps below a quota."""
    with Engine(lanes=1, memory="1GiB") as engine, within(engine), contextlib.suppress(MemoryLimitError):
        model, optimizer = optimized(name)
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer)
        step.hold_batches(STEPS_AHEAD)
        engine.set_priority(step, "opportunistic", quota, means)
        for batch in batches(name, 4):
            step(batch)


ALONE: dict[str, tuple[wf.JobResult, Plan, dict[str, Plan]]] = {}


def alone(name: str) -> tuple[wf.JobResult, Plan, dict[str, Plan]]:
    """What comes of it alone; its measured plan, and those of its lowest forms."""
    if name not in ALONE:
        with Engine(lanes=1, memory="1GiB") as engine:
            runner = JobRunner(job(name), engine)
            with within(engine):
                result = runner.run()
            assert runner.step is not None
            least = runner.step.least_plan
            plans = {}
            for means in ("spill", "recompute"):
                for _ in range(2):  # its profile may tell that the lowest form is not so low
                    measure(name, quota_of(runner.step.plan, least(means).height), means)
                plans[means] = least(means)
            ALONE[name] = result, runner.step.plan, plans
    return ALONE[name]


def quota_of(plan: Plan, height: int) -> int:
    return plan.persistent + STEPS_AHEAD * plan.batch + height


def between(name: str, share: float, means: str = "spill") -> int:
    """A quota between the lowest form and the whole step."""
    _, plan, low = alone(name)
    assert low[means].height < plan.height
    return quota_of(plan, low[means].height + int(share * (plan.height - low[means].height)))


@pytest.mark.parametrize("means", ["spill", "recompute"])
@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("name", MODELS)
def test_from_the_beginning(name: str, share: float, means: str) -> None:
    result, plan, low = alone(name)
    if low[means].height == plan.height:
        assert (name, means) == ("lstm", "recompute")  # recurrent layers are not called a second time
        return
    quota = between(name, share, means)
    with Engine(lanes=2, memory="1GiB") as engine:
        (mine,) = wf.train([job(name, priority="opportunistic", quota=quota, below_need=means)], engine=engine)
        assert engine.native.peak_held <= quota
        engine.native.check()
    assert_same(mine, result)
    assert mine.measured_peak is not None and mine.measured_peak + plan.batch <= quota
    assert (mine.spilled > 0) == (means == "spill") == (mine.to_dict()["spilled_bytes"] > 0)
    assert (mine.recomputed is not None) == (means == "recompute")


class Gates:
    """Batches that stop at some of them until the test lets them go."""

    def __init__(self, name: str, stops: tuple[int, ...]) -> None:
        self.batches = batches(name)
        self.stops = {at: (threading.Event(), threading.Event()) for at in stops}
        self.read = 0

    def __call__(self) -> Iterator[Any]:
        for batch in self.batches:
            if self.read in self.stops:
                reached, go = self.stops[self.read]
                reached.set()
                assert go.wait(WAIT)
            self.read += 1
            yield batch

    def reach(self, at: int) -> None:
        assert self.stops[at][0].wait(WAIT)

    def let_go(self, at: int) -> None:
        self.stops[at][1].set()


@pytest.mark.parametrize("asynchronous", [None, 3], ids=["plain", "asynchronous"])
@pytest.mark.parametrize("name", MODELS)
def test_quotas_that_change_on_the_way(name: str, asynchronous: int | None) -> None:
    result, plan, _ = alone(name)
    gates = Gates(name, (4, 9, 14, 19))
    quotas = {4: between(name, 0.7), 9: between(name, 0.0), 14: between(name, 0.5), 19: quota_of(plan, plan.height)}
    held: list[tuple[int, int, int]] = []
    with Engine(lanes=2, memory="1GiB", asynchronous=asynchronous) as engine:
        runner = JobRunner(job(name, data=gates, priority="opportunistic", below_need="spill"), engine)
        ends = in_thread(engine, runner)
        for at, quota in quotas.items():
            gates.reach(at)
            assert runner.step is not None
            (claim,) = engine._claims.values()
            held.append((claim.bytes + claim.height, runner.step.plan.spilled, runner.step.plan.height))
            runner.residence.set(quota=quota)
            gates.let_go(at)
        assert_same(ends(), result)
        assert runner.residence.times_left == 0
        assert runner.step is not None and runner.step.plan.spilled == 0
    before, first, second, third = held
    assert before[1] == 0 and 0 < first[1] <= second[1]
    assert third[1] <= second[1]
    assert all(now[0] <= quota for now, quota in zip(held[1:], quotas.values()))
    assert before[2] > first[2] >= second[2]


def test_memory_that_is_really_held() -> None:
    result, plan, _ = alone("mlp")
    gates = Gates("mlp", (4, 8, 20))
    quota = between("mlp", 0.2)
    with count_memory() as count, Engine(lanes=2, memory="1GiB", arenas=False) as engine:
        runner = JobRunner(job(data=gates, priority="opportunistic", below_need="spill"), engine)
        ends = in_thread(engine, runner)
        gates.reach(4)
        whole = count.peak
        runner.residence.set(quota=quota)
        gates.let_go(4)
        gates.reach(8)
        count.restart()
        gates.let_go(8)
        gates.reach(20)
        lower = count.peak
        gates.let_go(20)
        assert_same(ends(), result)
    batch = plan.batch * STEPS_AHEAD  # the test's own, made before
    assert lower + batch <= quota + 4096 < whole + batch  # losses that nobody has asked for


def test_a_quota_below_the_lowest_form_suspends_the_job() -> None:
    result, plan, low = alone("mlp")
    gates = Gates("mlp", (4, 9))
    with Engine(lanes=2, memory="1GiB") as engine:
        runner = JobRunner(job(data=gates, epochs=3, priority="opportunistic", below_need="spill"), engine)
        ends = in_thread(engine, runner)
        gates.reach(4)
        runner.residence.set(quota=quota_of(plan, low["spill"].height // 2))
        gates.let_go(4)
        until(lambda: runner.suspended)
        assert engine.claimed() == 0
        time.sleep(0.2)
        assert runner.suspended
        runner.residence.set(quota=between("mlp", 0.1))
        gates.reach(9)
        assert runner.step is not None and runner.step.plan.spilled > 0 and runner.residence.times_left == 1
        gates.let_go(9)
        assert_same(ends(), result)


def test_waiting_again_on_the_way() -> None:
    result, _, _ = alone("mlp")
    gates = Gates("mlp", (4, 9))
    with Engine(lanes=2, memory="1GiB") as engine:
        settings = {"priority": "opportunistic", "below_need": "spill", "quota": between("mlp", 0.1)}
        runner = JobRunner(job(data=gates, **settings), engine)
        ends = in_thread(engine, runner)
        gates.reach(4)
        runner.residence.set(below_need="wait")
        gates.let_go(4)
        until(lambda: runner.suspended)
        time.sleep(0.2)
        assert runner.suspended
        runner.residence.set(below_need="spill")
        gates.reach(9)
        assert runner.step is not None and runner.step.plan.spilled > 0
        runner.residence.set(priority="guaranteed")
        gates.let_go(9)
        mine = ends()
        assert_same(mine, result)
        assert mine.spilled > 0 and runner.step is not None and runner.step.plan.spilled == 0


def test_beside_a_guaranteed_job_that_leaves_less_than_it_needs() -> None:
    result, _, _ = alone("mlp")
    gates = Gates("mlp", (4, 9, 14))
    with Engine(lanes=2, memory="1GiB", reserve=0) as engine:
        runner = JobRunner(job(data=gates, priority="opportunistic", below_need="spill"), engine)
        ends = in_thread(engine, runner)
        gates.reach(4)
        large = engine.add_job("large")
        taken = engine.room - between("mlp", 0.3)
        claimed = threading.Thread(target=engine.claim, args=(large, needs("large", taken, 0)), daemon=True)
        claimed.start()
        time.sleep(0.1)
        gates.let_go(4)
        claimed.join(WAIT)
        gates.reach(9)  # it goes on beside it
        assert large in engine._claims
        assert runner.step is not None and runner.step.plan.spilled > 0
        assert engine.claimed() + runner.step.plan.height <= engine.room
        engine.remove_job(large)
        gates.let_go(9)
        gates.reach(14)
        assert runner.step.plan.spilled == 0
        gates.let_go(14)
        assert_same(ends(), result)


# -- steps in a loop of their own


@pytest.mark.parametrize("name", MODELS)
def test_a_loop_of_its_own(name: str) -> None:
    data = batches(name, 14)
    torch.manual_seed(3)
    plain = run_steps(*optimized(name), data, engine=None)
    quotas = {3: between(name, 0.5), 6: between(name, 0.0), 10: None}

    def during(engine: Engine, steps: list[wf.Step]) -> Any:
        def act(number: int) -> None:
            if number in quotas:
                engine.set_priority(steps[0], "opportunistic", quotas[number], "spill")

        return act

    with Engine(lanes=2, memory="1GiB") as engine, within(engine):
        torch.manual_seed(3)
        model, optimizer = optimized(name)
        step = wf.Step(
            model, loss=F.cross_entropy, optimizer=optimizer, generator=torch.Generator().manual_seed(5),
        )  # fmt: skip
        act, seen, results = during(engine, [step]), [], []
        for number, batch in enumerate(data):
            act(number)
            results.append(step(batch))
            seen.append((step.plan.spilled, step.plan.persistent + step.plan.batch + step.plan.height))
    torch.manual_seed(3)
    model, optimizer = optimized(name)
    with Engine(lanes=1, memory="1GiB") as engine:
        plain = run_steps(model, optimizer, data, engine=engine)
    assert all(same_bits(one, other) for one, other in zip(results, plain.results, strict=True))
    assert all(same_bits(one, other) for one, other in zip(step.model.parameters(), plain.model.parameters()))
    assert not any(spilled for spilled, _ in seen[:3] + seen[10:])
    assert all(spilled > 0 for spilled, _ in seen[3:10])
    for number, (_, held) in enumerate(seen[:10]):
        quota = quotas[6] if number >= 6 else quotas[3] if number >= 3 else None
        assert quota is None or held <= quota


def test_a_loop_of_its_own_is_refused_what_cannot_be() -> None:
    data = batches("mlp", 6)
    _, plan, low = alone("mlp")
    with Engine(lanes=2, memory="1GiB") as engine, within(engine):
        torch.manual_seed(3)
        model, optimizer = optimized("mlp")
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, generator=torch.Generator().manual_seed(5))
        results = [step(batch) for batch in data[:3]]
        quota = plan.persistent + plan.batch + low["spill"].height
        engine.set_priority(step, "opportunistic", quota - low["spill"].height // 2, "spill")
        for _ in range(2):
            with pytest.raises(
                MemoryLimitError, match=r"cannot be brought to .*it takes .* with all in host memory.*raise quota="
            ):
                step(data[3])
        engine.set_priority(step, "opportunistic", quota, "spill")
        results += [step(batch) for batch in data[3:]]
        assert step.plan.spilled > 0 and step.steps == 6
    torch.manual_seed(3)
    with Engine(lanes=1, memory="1GiB") as engine:
        plain = run_steps(*optimized("mlp"), data, engine=engine)
    assert all(same_bits(one, other) for one, other in zip(results, plain.results, strict=True))


# -- what is refused, and what is told


def test_a_first_quota_below_the_lowest_form_is_refused() -> None:
    _, plan, low = alone("mlp")
    quota = quota_of(plan, low["spill"].height // 2)
    with Engine(lanes=2, memory="1GiB") as engine, pytest.raises(MemoryLimitError, match="raise quota="):
        wf.train([job(priority="opportunistic", quota=quota, below_need="spill")], engine=engine)


def test_a_word_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidJobError, match="below_need must be 'wait', 'spill' or 'recompute'; got 'swap'"):
        wf.train([job(priority="opportunistic", below_need="swap")])


def test_a_word_that_is_none_is_refused_on_the_way_too() -> None:
    with Engine(lanes=2) as engine, within(engine):
        model, optimizer = optimized("mlp")
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer)
        with pytest.raises(InvalidJobError, match="below_need must be"):
            engine.set_priority(step, "opportunistic", None, "swap")  # type: ignore[arg-type]
        with pytest.raises(InvalidJobError, match="below_need must be"):
            JobRunner(job(), engine).residence.set(below_need="swap")  # type: ignore[arg-type]


def test_a_step_that_is_not_captured_waits() -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss if loss.item() >= 0 else -loss  # not captured

    settings = {"loss": None, "step": step}
    (result,) = wf.train([job(**settings)], lanes=1)
    with Engine(lanes=2, memory="1GiB") as engine:
        gates = Gates("mlp", (4,))
        runner = JobRunner(job(data=gates, priority="opportunistic", below_need="spill", **settings), engine)
        ends = in_thread(engine, runner)
        gates.reach(4)
        runner.residence.set(quota=4096)
        gates.let_go(4)
        until(lambda: runner.suspended)
        runner.residence.set(quota="1GiB")
        assert_same(ends(), result)
        assert runner.residence.times_left == 1


def test_figures_tell_of_host_memory() -> None:
    pytest.importorskip("prometheus_client")
    from waterflow.metrics import engine_text

    with Engine(lanes=2, memory="1GiB") as engine:
        gates = Gates("mlp", (9,))
        runner = JobRunner(
            job(data=gates, priority="opportunistic", quota=between("mlp", 0.2), below_need="spill"), engine
        )
        ends = in_thread(engine, runner)
        gates.reach(9)
        assert runner.step is not None
        told = [
            line for line in engine_text(engine).decode().splitlines() if line.startswith("waterflow_job_memory_host")
        ]
        assert told and float(told[0].split()[-1]) == runner.step.plan.spilled > 0
        gates.let_go(9)
        assert ends().spilled == runner.step.plan.spilled


# -- the book


def test_the_height_for_a_job() -> None:
    with Engine(lanes=2, memory="1GiB", reserve=0) as engine:
        first, other = engine.add_job("first"), engine.add_job("other")
        engine.set_terms(first, Terms("opportunistic", quota=500 * MiB, below_need="spill"))
        assert engine.height_for(first, 100 * MiB, 1 << 40) == 400 * MiB
        assert engine.height_for(first, 100 * MiB, 50 * MiB) == 50 * MiB
        assert engine.height_for(first, 600 * MiB, 50 * MiB) < 0
        engine.claim(other, needs("other", 700 * MiB, 50 * MiB))
        assert engine.height_for(first, 100 * MiB, 1 << 40) == (1024 - 700 - 50 - 100) * MiB
        engine.claim(first, needs("first", 100 * MiB, 150 * MiB))
        engine.set_terms(first, Terms("opportunistic", quota=200 * MiB, below_need="spill"))
        assert engine.above_quota(first)
        assert engine.height_for(first, 100 * MiB, 1 << 40) == 100 * MiB
        engine.lower(first, 100 * MiB)
        assert not engine.above_quota(first) and engine._claims[first].height == 100 * MiB
