"""Many lanes: all of them share one memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from waterflow import _C


@pytest.fixture(params=[2, 3, 4, 8, 16])
def engine(request: pytest.FixtureRequest) -> Iterator[_C.Engine]:
    made = _C.Engine(lanes=request.param, threads_per_lane=1, capacity=100)
    yield made
    made.check()
    made.close()


class Held:
    """A step of one group that ends when it is told to."""

    def __init__(self, engine: _C.Engine, height: int) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.job = engine.add_job()
        self.engine = engine
        self.run = _C.opaque_run(height, self._work)
        engine.submit(self.job, self.run)

    def _work(self) -> None:
        self.began.set()
        assert self.go.wait(20)

    def end(self) -> None:
        self.go.set()
        self.engine.wait(self.run)
        self.run.outputs()

    @property
    def waits(self) -> bool:
        return not self.began.wait(0.1)


def test_as_many_steps_at_once_as_fit(engine: _C.Engine) -> None:
    steps = [Held(engine, 30) for _ in range(4)]
    at_once = min(3, engine.lanes)
    assert all(step.began.wait(10) for step in steps[:at_once])
    assert steps[at_once].waits and engine.held == 30 * at_once
    for step in steps:
        step.end()
    assert engine.held == 0 and engine.capacity == 100


def test_a_large_step_takes_what_another_leaves(engine: _C.Engine) -> None:
    steps = [Held(engine, 60), Held(engine, 30)]
    assert all(step.began.wait(10) for step in steps) and engine.held == 90
    late = Held(engine, 15)
    assert late.waits
    for step in (*steps, late):
        step.end()


def test_a_step_larger_than_all_memory_is_refused(engine: _C.Engine) -> None:
    with pytest.raises(ValueError, match="a step that reaches 101 bytes cannot run in 100 bytes"):
        Held(engine, 101)
    Held(engine, 100).end()


def test_a_lower_limit_holds_for_all_lanes_together(engine: _C.Engine) -> None:
    steps = [Held(engine, 40) for _ in range(2)]
    assert all(step.began.wait(10) for step in steps)
    assert not engine.set_capacity(50) and engine.capacity > 50
    late = Held(engine, 20)
    assert late.waits
    steps[0].end()
    assert late.waits  # 40 and 20 are too much
    steps[1].end()
    late.end()
    assert engine.capacity == 50
    assert engine.set_capacity(100) and engine.capacity == 100
