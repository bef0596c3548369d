"""More than two lanes: how memory is shared out among arenas."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from waterflow import _C


@pytest.fixture
def engine() -> Iterator[_C.Engine]:
    made = _C.Engine(lanes=4, threads_per_lane=1, capacity=100)
    yield made
    made.check()
    made.close()


class Held:
    """A step of one group that ends when it is told to."""

    def __init__(self, engine: _C.Engine, height: int) -> None:
        self.began, self.go = threading.Event(), threading.Event()
        self.job = engine.add_job()
        self.engine = engine
        self.run = _C.opaque_run(_C.GroupPlan(ends=[1], peak=[height], after=[0]), self._work)
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


def test_equal_shares_while_all_fit(engine: _C.Engine) -> None:
    steps = [Held(engine, 25) for _ in range(4)]
    assert all(step.began.wait(10) for step in steps) and engine.held == 100
    for step in steps:
        step.end()
    assert engine.held == 0 and engine.capacity == 100


def test_the_largest_job_has_the_first_arena(engine: _C.Engine) -> None:
    large = Held(engine, 80)
    assert large.began.wait(10)
    small = Held(engine, 20)
    assert small.began.wait(10)
    middle = Held(engine, 30)  # the others share 20
    assert middle.waits and engine.held == 100
    large.end()
    assert middle.began.wait(10)
    middle.end()
    small.end()


def test_shares_that_shrink_wait_for_steps_that_stand_on_them(engine: _C.Engine) -> None:
    first, second = Held(engine, 40), Held(engine, 45)
    assert first.began.wait(10) and second.began.wait(10)
    large = Held(engine, 90)
    assert large.waits
    first.end()
    assert large.waits
    second.end()
    assert large.began.wait(10) and engine.held == 90
    large.end()


def test_a_step_larger_than_all_memory_is_refused(engine: _C.Engine) -> None:
    with pytest.raises(ValueError, match="a step that reaches 101 bytes cannot run in 100 bytes"):
        Held(engine, 101)
    Held(engine, 100).end()


def test_a_lower_limit_holds_for_all_arenas_together(engine: _C.Engine) -> None:
    steps = [Held(engine, 20) for _ in range(4)]
    assert all(step.began.wait(10) for step in steps)
    assert not engine.set_capacity(50) and engine.capacity > 50
    late = Held(engine, 20)
    for step in steps[:2]:
        assert late.waits
        step.end()
    late.end()
    for step in steps[2:]:
        step.end()
    assert engine.capacity == 50
    assert engine.set_capacity(100) and engine.capacity == 100
