"""Two steps that face each other in a tight arena, while limits change, results are kept, and steps run within steps."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support import Trained, assert_same, run_steps
from waterflow import _C
from waterflow.executor.engine import Engine
from waterflow.partition.plan.plan import Plan, opaque_plan

Act = Callable[[torch.Tensor], None]
act: list[Act | None] = [None]


@torch.library.custom_op("waterflow_tests::acting", mutates_args=())
def acting(x: torch.Tensor) -> torch.Tensor:
    result = x * 2
    if act[0] is not None:
        act[0](result)
    return result


acting.register_fake(lambda x: torch.empty_like(x))
acting.register_autograd(lambda ctx, grad: grad * 2)


@pytest.fixture(autouse=True)
def _quiet_operator() -> Iterator[None]:
    yield
    act[0] = None
    gc.collect()
    assert _C.detached_bytes() == 0


@pytest.fixture(params=[None, 3], ids=["plain", "asynchronous"])
def asynchronous(request: pytest.FixtureRequest) -> int | None:
    return request.param


class Wide(nn.Module):
    def __init__(self, depth: int = 4, width: int = 256) -> None:
        super().__init__()
        self.first, self.last = (
            nn.Sequential(*[m for _ in range(depth) for m in (nn.Linear(width, width), nn.ReLU())]) for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(acting(self.first(x)))


def compute(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


BATCH = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0))


def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Wide()
    return model, torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)


def alone(seed: int, steps: int) -> tuple[Trained, Plan]:
    with Engine(memory="1GiB", lanes=1) as engine:
        trained = run_steps(*made(seed), [BATCH] * steps, step=compute, seed=seed, engine=engine)
        assert trained.step is not None
        return trained, trained.step.plan


def side_by_side(engine: Engine, steps: int, meanwhile: Callable[[], None] = lambda: None) -> list[Trained]:
    jobs = [made(seed) for seed in range(2)]
    results: list[Any] = [None, None]

    def work(seed: int) -> None:
        results[seed] = run_steps(*jobs[seed], [BATCH] * steps, step=compute, seed=seed, engine=engine)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        meanwhile()
        time.sleep(0.001)
    engine.native.check()
    return results


@pytest.mark.slow
def test_a_limit_that_is_raised_while_two_steps_face_each_other(asynchronous: int | None) -> None:
    """The arena was made for the lower limit: what is above it comes when one of the two is over."""
    references = [alone(seed, 30) for seed in range(2)]
    plan = references[0][1]
    persistent = plan.persistent + plan.batch
    memory = 2 * persistent + int(2.3 * plan.height)
    draw = random.Random(0)
    with Engine(memory=memory, lanes=2, reserve=0, asynchronous=asynchronous) as engine:
        third = engine.add_job("third")

        def toggle() -> None:
            engine.reservations.claim(third, opaque_plan("third", 0, persistent=plan.height, batch=0))
            time.sleep(draw.random() * 0.02)
            engine.native.check()
            engine.reservations.release(third)
            time.sleep(draw.random() * 0.02)

        for trained, (reference, _) in zip(side_by_side(engine, 30, toggle), references):
            assert_same(trained, reference)


@pytest.mark.slow
def test_what_is_kept_is_safe_from_the_neighbour() -> None:
    """Its ground is given back by the plan, before the step is over."""
    (_, plan) = alone(0, 4)
    kept: list[tuple[torch.Tensor, torch.Tensor]] = []
    calls = [0]

    def keep(result: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] > 12 and calls[0] % 7 == 0:
            kept.append((result, result.clone()))

    act[0] = keep
    memory = 2 * (plan.persistent + plan.batch) + int(1.2 * plan.height)
    with Engine(memory=memory, lanes=2, reserve=0) as engine:
        side_by_side(engine, 30)
        assert len(kept) > 4 and engine.native.detached == len(kept)
    assert all(torch.equal(result, copy) for result, copy in kept)


@pytest.mark.needs_time("real steps beside each other, again and again")
@pytest.mark.parametrize("arenas", [None, False, True])
def test_a_step_within_a_step(arenas: bool | None) -> None:
    """An operator of a planned step trains another model: alone, and in engines with and without arenas."""
    reference, _ = alone(0, 8)
    inner_engine = Engine(memory="256MiB", lanes=1, arenas=arenas) if arenas is not None else None
    torch.manual_seed(7)
    inner = nn.Sequential(*[m for _ in range(12) for m in (nn.Linear(64, 64), nn.ReLU())])
    step = wf.Step(
        inner, step=compute, optimizer=torch.optim.SGD(inner.parameters(), lr=0.1), engine=inner_engine
    )  # fmt: skip
    data = torch.randn(64, 64)
    for _ in range(4):
        step(data)
    act[0] = lambda _: step(data) and None
    with Engine(memory="256MiB", lanes=1) as engine:
        trained = run_steps(*made(0), [BATCH] * 8, step=compute, seed=0, engine=engine)
        assert engine.native.placed[0] > 0
    assert_same(trained, reference)
    step.close()
    if inner_engine is not None:
        inner_engine.close()


def test_a_result_kept_at_every_step() -> None:
    """Hundreds of ranges are left behind, and found again."""
    kept: list[torch.Tensor] = []
    act[0] = lambda result: kept.append(result)
    torch.manual_seed(0)
    model = Wide(depth=1, width=16)
    with Engine(memory="64MiB", lanes=1) as engine:
        step = wf.Step(model, step=compute, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), engine=engine)
        for number in range(600):
            # Kept at every second step alone, or it would belong to the plan.
            act[0] = kept.append if number > 4 and number % 2 else None
            step(torch.ones(8, 16))
        assert engine.native.detached > 256
    assert all(bool(torch.isfinite(result).all()) for result in kept)


def resident() -> int:
    with open("/proc/self/statm") as fields:
        return int(fields.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.slow
def test_what_was_left_behind_goes_when_it_is_dropped() -> None:
    kept: list[torch.Tensor] = []
    calls = [0]

    def keep(result: torch.Tensor) -> None:
        calls[0] += 1
        if calls[0] in (6, 8):
            kept.append(result)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), Acting(), nn.Linear(256, 1))
    act[0] = keep
    with Engine(memory="1GiB", lanes=1) as engine:
        step = wf.Step(model, step=compute, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), engine=engine)
        for _ in range(10):
            step(torch.ones(50_000, 256))
        assert engine.native.detached == 2
    held = resident()
    kept.clear()
    assert held - resident() > 80 << 20
    assert not _C.lanes_are_installed()


class Acting(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return acting(x)


def test_a_lower_limit_takes_pages_back() -> None:
    _, plan = alone(0, 4)
    memory = 2 * (plan.persistent + plan.batch) + 3 * plan.height
    with Engine(memory=memory, lanes=2, reserve=0) as engine:
        side_by_side(engine, 6)
        third = engine.add_job("third")
        engine.reservations.claim(third, opaque_plan("third", 0, persistent=int(2.9 * plan.height), batch=0))
        assert engine.native.pages_in_use <= engine.native.capacity + 8192
