"""``torch.set_flush_denormal`` holds for the thread that calls it, and for the steps that are handed in there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

import waterflow as wf
from tests.support import During, MiB, Trained, assert_same, same_bits, train_eager, train_step
from waterflow import _C
from waterflow.executor.engine import Engine

pytestmark = pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor has no such setting")
SMALL = 1e-39  # times a number near 1
Make = Callable[[], tuple[nn.Module, SGD]]


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(params=["alone", "engine"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine | None]:
    if request.param == "alone":
        yield None
        return
    with Engine(memory=256 * MiB, lanes=2) as made:
        yield made


class Tiny(nn.Module):
    """Makes denormal numbers in its forward pass; ``reads`` makes it opaque."""

    def __init__(self, reads: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((300, 300), 0.75))
        self.reads = reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reads:
            x = x * (1.0 if x.sum().item() > 0 else 2.0)
        small = x * self.weight * SMALL
        return (small * 1e38 * self.weight).sum()


def _make(reads: bool) -> Make:
    def make() -> tuple[nn.Module, SGD]:
        model = Tiny(reads)
        return model, SGD(model.parameters(), lr=0.1)

    return make


def _batches() -> list[Any]:
    random = torch.Generator().manual_seed(1)
    return [torch.rand(300, 300, generator=random) + 0.1 for _ in range(5)]


def _setting(flush: dict[int, bool]) -> During:
    return lambda model, optimizer: lambda number: torch.set_flush_denormal(flush[number]) if number in flush else None


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("flush", [{0: True}, {2: True}, {2: True, 4: False}], ids=str)
def test_steps_have_the_setting_of_their_caller(flush: dict[int, bool], reads: bool, engine: Engine | None) -> None:
    def run(way: Any, during: During, **how: Any) -> Trained:
        torch.set_flush_denormal(False)
        trained: Trained = way(_make(reads), _batches(), step=lambda m, b: m(b), during=during, **how)
        return trained

    eager = run(train_eager, _setting(flush))
    never = run(train_eager, _setting({}))
    mine = run(train_step, _setting(flush), engine=engine)
    assert_same(mine, eager)
    assert not all(same_bits(one, never.tensors()[name]) for name, one in eager.tensors().items())
    assert mine.step is not None and (mine.step.opaque_reason is not None) is reads


@pytest.mark.parametrize("flush", [True, False])
def test_all_threads_of_a_lane_have_it(flush: bool) -> None:
    """Of an eager step's threads those have it that its caller's thread began later; a step's on a lane have it always."""
    with Engine(memory=256 * MiB, lanes=1, threads_per_lane=2) as engine:
        model, optimizer = _make(False)()
        step = wf.Step(model, step=lambda m, b: m(b), optimizer=optimizer, engine=engine)
        for now in (not flush, flush):
            torch.set_flush_denormal(now)
            loss = step.submit(torch.rand(300, 300)).result()
            assert (loss.item() == 0.0) is now
        assert step.opaque_reason is None


def test_a_lane_is_as_before_behind_a_step() -> None:
    with Engine(memory=256 * MiB, lanes=1) as engine:
        seen = []
        for flush in (True, False, True):
            torch.set_flush_denormal(flush)
            model = nn.Linear(6, 4)
            optimizer = SGD(model.parameters(), lr=0.1)

            def looking(m: nn.Module, batch: Any) -> torch.Tensor:
                seen.append(_C.denormals_here() != 0)
                return F.cross_entropy(m(batch), torch.zeros(5, dtype=torch.int64))

            wf.Step(model, step=looking, optimizer=optimizer, engine=engine).submit(torch.ones(5, 6)).result()
        assert seen == [True, False, True]


@pytest.mark.parametrize("flush", [True, False])
def test_a_job_with_a_time_limit_has_it_too(flush: bool) -> None:
    """Its own thread does its opaque steps, while a lane stands still."""
    torch.set_flush_denormal(flush)
    seen = []

    def looking(m: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(_C.denormals_here() != 0)
        return F.mse_loss(m(batch[0]), batch[1])

    data = [(torch.ones(5, 6), torch.ones(5, 4))] * 3
    optimizer = functools.partial(SGD, lr=0.1)
    job = wf.Job("timed", model=lambda: nn.Linear(6, 4), data=data, step=looking, optimizer=optimizer, timeout=60.0)
    wf.train([job], memory=256 * MiB)
    assert seen and all(one is flush for one in seen)
