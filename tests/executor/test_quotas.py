"""Opportunistic jobs whose quota is below their need: bits, memory that is really held, quotas that change, and refusals."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.executor.test_policy import WAIT, assert_same, in_thread, needs, until
from tests.native import count_memory
from tests.support import MiB, run_steps, same_bits
from tests.test_recompute import Deep
from waterflow.errors import MemoryLimitError
from waterflow.executor.engine import Engine, within
from waterflow.executor.policy import ResourcePolicy
from waterflow.partition.plan.plan import Plan
from waterflow.training.runner import JobRunner
from waterflow.training.step_queue import STEPS_AHEAD

pytestmark = pytest.mark.slow


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.GELU(), nn.Flatten(), nn.Dropout(0.3),
            nn.Linear(16 * 64, 4),
        )  # fmt: skip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 2, 64, 0.1, batch_first=True) for _ in range(3))
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x.mean(1))


class Recurrent(nn.Module):
    """Its layers are no operations that can be called a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(8, 32, num_layers=2, batch_first=True)
        self.last = nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(x)[0][:, -1])


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (Deep, (256, 32)),
    "cnn": (Convolutions, (32, 3, 16, 16)),
    "transformer": (Attention, (16, 24, 32)),
}
NO_STEP = 1024  # bytes: no step of these models is so low
RECURRENT = {"lstm": (Recurrent, (16, 48, 8))}


def batches(name: str, count: int = 8) -> list[Any]:
    random = torch.Generator().manual_seed(0)
    shape = (MODELS | RECURRENT)[name][1]
    return [(torch.randn(shape, generator=random), torch.randint(4, shape[:1], generator=random)) for _ in range(count)]


def job(name: str = "mlp", **more: Any) -> wf.Job:
    settings = {"data": batches(name), "epochs": 3, "seed": 1, "loss": F.cross_entropy} | more
    return wf.Job(name, (MODELS | RECURRENT)[name][0], optimizer=lambda p: torch.optim.AdamW(p, lr=1e-3), **settings)


def optimized(name: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = MODELS[name][0]()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


ALONE: dict[str, tuple[wf.JobResult, Plan, int]] = {}


def alone(name: str) -> tuple[wf.JobResult, Plan, int]:
    """What comes of it alone; its measured plan, and the height of its lowest form."""
    if name not in ALONE:
        result, step = trained(job(name))
        with pytest.raises(MemoryLimitError) as refused:
            step.plan_for(batches(name, 1)[0], 0)
        _, low = trained(job(name, recompute=refused.value.needed))
        ALONE[name] = result, step.plan, low.plan.height
    return ALONE[name]


def trained(one: wf.Job) -> tuple[wf.JobResult, wf.Step]:
    with Engine(lanes=1, memory="1GiB") as engine, within(engine):
        runner = JobRunner(one, engine)
        result = runner.run()
        assert runner.step is not None
        return result, runner.step


def quota_of(plan: Plan, height: int) -> int:
    return plan.persistent + STEPS_AHEAD * plan.batch + height


def between(name: str, share: float) -> int:
    """A quota between the lowest form and the whole step."""
    _, plan, low = alone(name)
    assert low < plan.height
    return quota_of(plan, low + int(share * (plan.height - low)))


@pytest.mark.parametrize("share", [0.2, 0.6])
@pytest.mark.parametrize("name", MODELS)
def test_from_the_beginning(name: str, share: float) -> None:
    result, plan, _ = alone(name)
    quota = between(name, share)
    for _ in range(2):  # a form's own profile may tell that it is not low enough
        with Engine(lanes=2, memory="1GiB") as engine:
            (mine,) = wf.train([job(name, priority="opportunistic", quota=quota)], engine=engine)
            assert engine.native.peak_held <= quota
            engine.native.check()
        assert_same(mine, result)
    assert mine.measured_peak is not None and mine.measured_peak + plan.batch <= quota
    assert mine.recomputed is not None


def test_what_cannot_be_made_again_is_held_in_host_memory() -> None:
    result, step = trained(job("lstm"))
    quota = quota_of(step.plan, int(0.8 * step.plan.height))
    with Engine(lanes=2, memory="1GiB") as engine:
        (mine,) = wf.train([job("lstm", priority="opportunistic", quota=quota)], engine=engine)
        assert engine.native.peak_held <= quota
        engine.native.check()
    assert_same(mine, result)
    assert mine.offloaded > 0 and mine.recomputed is None and result.offloaded == 0
    with pytest.raises(MemoryLimitError, match=r"recompute="):
        step.plan_for(batches("lstm", 1)[0], int(0.8 * step.plan.height))


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
    gates = Gates(name, (4, 9, 14, 19, 22))
    quotas = {4: between(name, 0.7), 9: between(name, 0.2), 14: between(name, 0.5), 19: quota_of(plan, plan.height)}
    held: list[tuple[int, bool, int]] = []
    with Engine(lanes=2, memory="1GiB", asynchronous=asynchronous) as engine:
        runner = JobRunner(job(name, data=gates, priority="opportunistic"), engine)
        ends = in_thread(engine, runner)
        for at in gates.stops:
            gates.reach(at)
            step = runner.step
            assert step is not None
            (claim,) = engine.reservations._claims.values()
            held.append((claim.bytes + claim.height, step.recomputed is not None, step.plan.height))
            if at in quotas:
                runner.lease.set(quota=quotas[at])
            gates.let_go(at)
        assert_same(ends(), result)
        assert runner.lease.times_left == 0
    assert [reduced for _, reduced, _ in held] == [False, True, True, True, False]
    assert all(now[0] <= quota for now, quota in zip(held[1:], quotas.values(), strict=True))
    heights = [height for _, _, height in held]
    assert heights[2] < heights[1] < heights[0] == heights[4] and heights[2] <= heights[3]


def test_memory_that_is_really_held() -> None:
    result, plan, _ = alone("mlp")
    gates = Gates("mlp", (4, 8, 20))
    quota = between("mlp", 0.2)
    with count_memory() as count, Engine(lanes=2, memory="1GiB", arenas=False) as engine:
        runner = JobRunner(job(data=gates, priority="opportunistic"), engine)
        ends = in_thread(engine, runner)
        gates.reach(4)
        whole = count.peak
        runner.lease.set(quota=quota)
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
    result, plan, _ = alone("mlp")
    gates = Gates("mlp", (4, 9))
    with Engine(lanes=2, memory="1GiB") as engine:
        runner = JobRunner(job(data=gates, priority="opportunistic"), engine)
        ends = in_thread(engine, runner)
        gates.reach(4)
        runner.lease.set(quota=quota_of(plan, NO_STEP))
        gates.let_go(4)
        until(lambda: runner.suspended)
        assert engine.reservations.claimed() == 0
        time.sleep(0.2)
        assert runner.suspended
        runner.lease.set(quota=between("mlp", 0.2))
        gates.reach(9)
        assert runner.step is not None and runner.step.recomputed is not None and runner.lease.times_left == 1
        gates.let_go(9)
        assert_same(ends(), result)


def test_one_that_becomes_guaranteed_is_whole() -> None:
    result, _, _ = alone("mlp")
    gates = Gates("mlp", (4, 9))
    with Engine(lanes=2, memory="1GiB") as engine:
        runner = JobRunner(job(data=gates, priority="opportunistic", quota=between("mlp", 0.2)), engine)
        ends = in_thread(engine, runner)
        gates.reach(4)
        assert runner.step is not None and runner.step.recomputed is not None
        runner.lease.set(priority="guaranteed")
        gates.let_go(4)
        gates.reach(9)
        assert runner.step.recomputed is None
        gates.let_go(9)
        assert_same(ends(), result)


def test_it_stays_reduced_until_there_is_room() -> None:
    result, plan, _ = alone("mlp")
    quota = between("mlp", 0.2)
    gates = Gates("mlp", (4, 9, 14))
    with Engine(lanes=2, memory="1GiB", reserve=0) as engine:
        runner = JobRunner(job(data=gates, priority="opportunistic", quota=quota), engine)
        ends = in_thread(engine, runner)
        gates.reach(4)
        large = engine.add_job("large")
        engine.reservations.claim(large, needs("large", engine.reservations.room - quota, 0))
        runner.lease.set(quota=quota_of(plan, plan.height))
        gates.let_go(4)
        gates.reach(9)
        assert runner.step is not None and runner.step.recomputed is not None
        engine.remove_job(large)
        gates.let_go(9)
        gates.reach(14)
        assert runner.step.recomputed is None and runner.lease.times_left == 0
        gates.let_go(14)
        assert_same(ends(), result)


def test_a_quota_that_is_lowered_while_the_job_is_away() -> None:
    result, _, _ = alone("mlp")
    gates = Gates("mlp", (4, 9))
    with Engine(lanes=2, memory="1GiB", reserve=0) as engine:
        runner = JobRunner(job(data=gates, priority="opportunistic"), engine)
        ends = in_thread(engine, runner)
        gates.reach(4)
        large = engine.add_job("large")
        claims = threading.Thread(
            target=engine.reservations.claim, args=(large, needs("large", engine.reservations.room, 0)), daemon=True
        )
        claims.start()
        gates.let_go(4)
        claims.join(WAIT)
        assert large in engine.reservations._claims
        runner.lease.set(quota=between("mlp", 0.4))
        engine.remove_job(large)
        gates.reach(9)
        assert runner.step is not None and runner.step.recomputed is not None and runner.lease.times_left == 1
        gates.let_go(9)
        assert_same(ends(), result)


# -- steps in a loop of their own


@pytest.mark.parametrize("name", MODELS)
def test_a_loop_of_its_own(name: str) -> None:
    data = batches(name, 14)
    quotas = {3: between(name, 0.5), 6: between(name, 0.2), 10: None}
    with Engine(lanes=2, memory="1GiB") as engine, within(engine):
        torch.manual_seed(3)
        model, optimizer = optimized(name)
        step = wf.Step(
            model, loss=F.cross_entropy, optimizer=optimizer, generator=torch.Generator().manual_seed(5),
        )  # fmt: skip
        seen, results = [], []
        for number, batch in enumerate(data):
            if number in quotas:
                engine.set_priority(step, "opportunistic", quotas[number])
            results.append(step(batch))
            seen.append((step.recomputed is not None, step.plan.persistent + step.plan.batch + step.plan.height))
    torch.manual_seed(3)
    model, optimizer = optimized(name)
    with Engine(lanes=1, memory="1GiB") as engine:
        plain = run_steps(model, optimizer, data, engine=engine)
    assert all(same_bits(one, other) for one, other in zip(results, plain.results, strict=True))
    assert all(same_bits(one, other) for one, other in zip(step.model.parameters(), plain.model.parameters()))
    assert [reduced for reduced, _ in seen] == 3 * [False] + 7 * [True] + 4 * [False]
    for number, (_, held) in enumerate(seen[:10]):
        quota = quotas[6] if number >= 6 else quotas[3] if number >= 3 else None
        assert quota is None or held <= quota


def test_a_loop_of_its_own_keeps_what_it_holds_where_no_form_fits() -> None:
    data = batches("mlp", 6)
    _, plan, low = alone("mlp")
    quota = plan.persistent + plan.batch + low + (plan.height - low) // 2
    with Engine(lanes=2, memory="1GiB") as engine, within(engine):
        torch.manual_seed(3)
        model, optimizer = optimized("mlp")
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, generator=torch.Generator().manual_seed(5))
        results = [step(batch) for batch in data[:3]]
        engine.set_priority(step, "opportunistic", plan.persistent + plan.batch + NO_STEP)
        results.append(step(data[3]))
        assert step.recomputed is None and engine.reservations.above_quota(step.job)  # type: ignore[arg-type]
        engine.set_priority(step, "opportunistic", quota)
        results += [step(batch) for batch in data[4:]]
        assert step.recomputed is not None and not engine.reservations.above_quota(step.job)  # type: ignore[arg-type]
    torch.manual_seed(3)
    with Engine(lanes=1, memory="1GiB") as engine:
        plain = run_steps(*optimized("mlp"), data, engine=engine)
    assert all(same_bits(one, other) for one, other in zip(results, plain.results, strict=True))


# -- what is refused, and who waits


def test_a_first_quota_below_the_lowest_form_is_refused() -> None:
    _, plan, _ = alone("mlp")
    quota = quota_of(plan, NO_STEP)
    with Engine(lanes=2, memory="1GiB") as engine, pytest.raises(MemoryLimitError, match="raise quota="):
        wf.train([job(priority="opportunistic", quota=quota)], engine=engine)


def test_a_step_that_is_not_captured_waits() -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss if loss.item() >= 0 else -loss  # not captured

    settings = {"loss": None, "step": step}
    (result,) = wf.train([job(**settings)], lanes=1)
    with Engine(lanes=2, memory="1GiB") as engine:
        gates = Gates("mlp", (4,))
        runner = JobRunner(job(data=gates, priority="opportunistic", **settings), engine)
        ends = in_thread(engine, runner)
        gates.reach(4)
        runner.lease.set(quota=4096)
        gates.let_go(4)
        until(lambda: runner.suspended)
        runner.lease.set(quota="1GiB")
        assert_same(ends(), result)
        assert runner.lease.times_left == 1


# -- the book


def test_what_a_quota_leaves() -> None:
    with Engine(lanes=2, memory="1GiB", reserve=0) as engine:
        first, other = engine.add_job("first"), engine.add_job("other")
        assert engine.reservations.most_height(first, 100 * MiB) is None
        engine.set_policy(first, ResourcePolicy("opportunistic", quota=500 * MiB))
        assert engine.reservations.most_height(first, 100 * MiB) == 400 * MiB
        engine.reservations.claim(other, needs("other", 700 * MiB, 50 * MiB))
        assert engine.reservations.has_room(first, 100 * MiB, 174 * MiB) and not engine.reservations.has_room(
            first, 100 * MiB, 175 * MiB
        )
        engine.reservations.claim(first, needs("first", 100 * MiB, 150 * MiB))
        assert engine.reservations.most_height(first, MiB) == 400 * MiB and engine.reservations.has_room(first, MiB, 150 * MiB)
        engine.set_policy(first, ResourcePolicy("opportunistic", quota=200 * MiB))
        assert engine.reservations.above_quota(first)
        engine.reservations.lower(first, 100 * MiB)
        assert not engine.reservations.above_quota(first) and engine.reservations._claims[first].height == 100 * MiB


def test_a_quota_that_is_lowered_while_the_first_step_claims() -> None:
    expected, plan, low = alone("mlp")
    with Engine(lanes=2, memory="1GiB") as engine:
        runner = JobRunner(job(priority="opportunistic"), engine)
        claim, lowered = engine.reservations.claim, threading.Event()

        def lowered_first(*given: Any, **more: Any) -> None:
            if not lowered.is_set():
                lowered.set()
                runner.lease.set(quota=quota_of(plan, low))
            claim(*given, **more)

        engine.reservations.claim = lowered_first  # type: ignore[method-assign]
        result = in_thread(engine, runner)()
        assert lowered.is_set()
        assert_same(result, expected)
