"""Steps at planned addresses: what they leave behind, what they ask otherwise, and what others notice of it."""

from __future__ import annotations

import gc
import os
import random
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf
from tests.native import count_memory
from tests.support import Net, Trained, assert_same, images, run_steps, train_eager
from waterflow import _C
from waterflow.executor.engine import Engine

STEPS = 14


class Odd:
    """An operator that does at some steps what it did not do when it was profiled."""

    def __init__(self) -> None:
        self.calls = 0
        self.kept: list[torch.Tensor] = []
        self.keep_at: set[int] = set()
        self.extra_from = 10**9

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls >= self.extra_from:
            assert torch.empty(12345).numel() == 12345
        result = x * 2
        if self.calls in self.keep_at:
            self.kept.append(result)
        return result


odd = Odd()


@torch.library.custom_op("waterflow_tests::odd", mutates_args=())
def odd_operator(x: torch.Tensor) -> torch.Tensor:
    return odd(x)


odd_operator.register_fake(lambda x: torch.empty_like(x))
odd_operator.register_autograd(lambda ctx, grad: grad * 2)


class WithOdd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 64), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(odd_operator(self.first(x).relu()))


@pytest.fixture(autouse=True)
def _fresh(no_captures: Any) -> Iterator[None]:
    odd.__init__()  # type: ignore[misc]
    yield
    odd.__init__()  # type: ignore[misc]
    gc.collect()
    assert _C.detached_bytes() == 0


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = WithOdd()
    return model, torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-2))


def batches(count: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(16, 32, generator=generator), torch.arange(16) % 10) for _ in range(count)]


def trained_in(engine: Engine) -> Trained:
    torch.manual_seed(5)
    made = make()
    return run_steps(*made, batches(), loss=F.cross_entropy, seed=5, engine=engine)


@pytest.fixture(params=[None, 3], ids=["plain", "asynchronous"])
def asynchronous(request: pytest.FixtureRequest) -> int | None:
    return request.param


@pytest.mark.parametrize("lanes", [1, 2])
def test_what_a_step_leaves_behind_keeps_its_bytes(lanes: int, asynchronous: int | None) -> None:
    """An operator keeps results that died within the step when it was profiled."""
    alone = train_eager(make, batches(), loss=F.cross_entropy)
    odd.__init__()  # type: ignore[misc]
    odd.keep_at = {6, 7, 11}
    with Engine(memory="256MiB", lanes=lanes, asynchronous=asynchronous) as engine:
        trained = trained_in(engine)
        assert_same(trained, alone)
        assert engine.native.detached == 3 and _C.detached_bytes() == 3 * 16 * 64 * 4
        engine.native.check()
        kept = [t.clone() for t in odd.kept]
        del odd.kept[1]
        assert _C.detached_bytes() == 2 * 16 * 64 * 4
    # They outlive the engine, too.
    assert all(torch.equal(t, odd_) for t, odd_ in zip([kept[0], kept[2]], odd.kept))
    expected = train_eager_results()
    assert all(torch.equal(t, expected[call - 1]) for t, call in zip(odd.kept, (6, 11)))


def train_eager_results() -> list[torch.Tensor]:
    """What the operator returns at each step, in eager training."""
    seen: list[torch.Tensor] = []
    kept, odd.kept = odd.kept, []
    calls, odd.calls, odd.keep_at = odd.calls, 0, set(range(1, STEPS + 1))
    train_eager(make, batches(), loss=F.cross_entropy)
    seen, odd.kept, odd.calls = [t.detach() for t in odd.kept], kept, calls
    return seen


def test_requests_that_were_not_planned_are_counted_and_profiled_again(asynchronous: int | None) -> None:
    alone = train_eager(make, batches(), loss=F.cross_entropy)
    odd.__init__()  # type: ignore[misc]
    odd.extra_from = 5
    with Engine(memory="256MiB", lanes=1, asynchronous=asynchronous) as engine:
        trained = trained_in(engine)
        assert_same(trained, alone)
        step = trained.step
        assert step is not None
        # Steps 5 to 8 ask for one more; then two profiles, and a plan that has it.
        assert step.missed_requests == 4 and step.planned_requests > 0
        assert engine.native.placed[1:] == (4, 4 * 12345 * 4)


def test_results_tell_of_requests() -> None:
    data = [images(1, size=8)[0] for _ in range(6)]
    job = wf.Job("net", Net, data=data, loss=F.cross_entropy, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), seed=0)
    (result,) = wf.train([job], lanes=1)
    assert result.planned_requests > 0 and result.missed_requests == 0
    assert result.to_dict()["planned_requests"] == result.planned_requests


def test_losses_are_the_callers_to_keep_and_change() -> None:
    with Engine(memory="256MiB", lanes=1) as engine:
        model, optimizer = make()
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
        losses = []
        for batch in batches():
            losses.append(step(batch))
            seen = [float(loss) for loss in losses[:-1]]
            losses[-1].mul_(1.0)
            assert [float(loss) for loss in losses[:-1]] == seen
        assert engine.native.detached == 0 and engine.native.placed[0] > 0


def test_other_threads_have_torchs_own_memory() -> None:
    """While lanes run, tensors of other threads live on after the engine."""
    stop, made = threading.Event(), []

    def work() -> None:
        draw = random.Random(0)
        while not stop.is_set():
            made.append(torch.full((draw.randint(1, 5000),), len(made), dtype=torch.int32))
            if len(made) > 500:
                del made[draw.randrange(len(made))]

    thread = threading.Thread(target=work)
    thread.start()
    with Engine(memory="256MiB", lanes=2) as engine:
        trained_in(engine)
    stop.set()
    thread.join()
    assert all(bool((t == t[0]).all()) for t in made)


def test_torchs_own_allocator_is_put_back() -> None:
    before = _C.lanes_are_installed()
    with Engine(memory="64MiB", lanes=1):
        with Engine(memory="64MiB", lanes=2):
            assert _C.lanes_are_installed()
        assert _C.lanes_are_installed()
    assert _C.lanes_are_installed() == before
    with Engine(memory="64MiB", lanes=1, arenas=False):
        assert _C.lanes_are_installed() == before


def test_forked_children_have_torchs_own_memory() -> None:
    with Engine(memory="256MiB", lanes=2) as engine:
        trained = trained_in(engine)
        child = os.fork()
        if child == 0:
            good = not _C.lanes_are_installed() and torch.ones(1000).sum().item() == 1000
            os._exit(0 if good else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert _C.lanes_are_installed() and trained.step is not None


def test_loaders_with_workers() -> None:
    data = TensorDataset(torch.randn(96, 32), torch.arange(96) % 10)

    def job(name: str) -> wf.Job:
        return wf.Job(
            name, WithOdd, data=lambda: DataLoader(data, batch_size=16, num_workers=2), loss=F.cross_entropy, epochs=2,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1), seed=1,
        )  # fmt: skip

    results = wf.train([job("a"), job("b")], lanes=2)
    assert [r.status for r in results] == ["completed"] * 2 and results[0].losses == results[1].losses


@pytest.mark.parametrize("outer", [True, False])
def test_the_witness_counts_planned_memory(outer: bool) -> None:
    """Whichever of the two allocators came first."""
    engine = None if outer else Engine(memory="256MiB", lanes=1)
    with count_memory() as count:
        engine = engine or Engine(memory="256MiB", lanes=1)
        trained = trained_in(engine)
        assert trained.step is not None
        (batch,) = batches(1)
        count.restart()
        base = count.current
        trained.step(batch)
        height = trained.step.plan.height
        assert height * 0.9 <= count.peak - base <= height
    engine.close()
    del trained
    assert not _C.lanes_are_installed()


def arena_pages() -> int:
    """Bytes of pages that the process's arenas have, as the system counts them."""
    total = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if "waterflow-arena" in os.readlink(entry):
                total += os.stat(entry).st_blocks * 512
        except OSError:
            continue
    return total


class Wide(nn.Module):
    """Holds a few MiB in its steps."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(256, 256), nn.ReLU())])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def of_output(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch)


def seeded(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Wide(6)


def heights(depths: list[int], batch: torch.Tensor) -> list[wf.Plan]:
    plans = []
    for depth in depths:
        model = Wide(depth)
        step = wf.Step(model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3))
        for _ in range(3):
            step(batch)
        plans.append(step.plan)
    return plans


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_pages_stay_within_the_limit(seed: int, asynchronous: int | None) -> None:
    """Jobs that come and go, larger than half of the arena: pages pass from one end to the other."""
    draw = random.Random(seed)
    batch = torch.randn(2048, 256)
    depths = [draw.choice([2, 4, 8]) for _ in range(6)]
    plans = heights(depths, batch)
    largest = max(plan.height for plan in plans)
    limit = max(p.persistent + p.batch for p in plans) * 2 + largest + largest // 3
    jobs = [
        wf.Job(
            f"{number}", lambda depth=depth: Wide(depth), data=[batch] * 6, seed=number,
            optimizer=lambda p: torch.optim.SGD(p, lr=1e-3),
        )
        for number, depth in enumerate(depths)
    ]  # fmt: skip
    seen = []
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            seen.append(arena_pages())

    watcher = threading.Thread(target=watch)
    watcher.start()
    os.environ.pop("WATERFLOW_ASYNCHRONOUS", None)
    if asynchronous is not None:
        os.environ["WATERFLOW_ASYNCHRONOUS"] = str(asynchronous)
    try:
        results = wf.train(jobs, memory=limit, lanes=2, max_concurrent=3)
    finally:
        os.environ.pop("WATERFLOW_ASYNCHRONOUS", None)
        stop.set()
        watcher.join()
    assert [r.status for r in results] == ["completed"] * 6, [r.error for r in results]
    assert 0 < max(seen) <= limit
    assert arena_pages() == 0


def behind(seed: int) -> int | None:
    """How a device runs that shows a missing wait: behind its host, by stalls from a seed."""
    return seed


@pytest.mark.needs_time("real steps on a device that stalls: the only place where a missing wait changes numbers")
def test_a_device_that_runs_behind_shows_a_missing_wait() -> None:
    """Numbers go wrong without a wait: the asynchronous mode finds what the plain one cannot.

    That heights are compared at peaks is proven where every access is checked (``test_device_order.py``).
    """
    find_a_missing_wait(range(1, 20))


def find_a_missing_wait(seeds: Iterable[int]) -> None:
    batch = torch.randn(2048, 256)
    (plan,) = heights([6], batch)

    def train(fault: str, seed: int) -> list[Trained]:
        capacity = plan.height + plan.height // 4
        engine = Engine(memory=capacity + 2 * (plan.persistent + plan.batch), lanes=2, reserve=0, asynchronous=behind(seed))
        engine.native.close()
        engine.native = _C.Engine(
            lanes=2,
            threads_per_lane=1,
            capacity=engine.reservations.room,
            arenas=True,
            async_host=behind(seed),
            fault=getattr(_C.OrderFault, fault),
        )
        results: list[Any] = [None, None]

        models = [seeded(number) for number in range(2)]

        def work(number: int) -> None:
            model = models[number]
            optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
            results[number] = run_steps(model, optimizer, [batch] * 8, step=of_output, seed=number, engine=engine)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        engine.close()
        return results

    def differ(one: list[Trained], other: list[Trained]) -> bool:
        try:
            for mine, theirs in zip(one, other):
                assert_same(mine, theirs)
        except AssertionError:
            return True
        return False

    right = train("none", 1)
    assert not differ(right, train("none", 2))
    assert any(differ(right, train("dropped_waits", seed)) for seed in seeds)
