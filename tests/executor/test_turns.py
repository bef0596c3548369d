"""Who has a lane when more jobs want one than there are."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator

import pytest

from waterflow import _C

pytestmark = pytest.mark.slow

TURN = 0.040  # seconds: kTurnNs in engine_turns.cpp


@pytest.fixture
def engine() -> Iterator[_C.Engine]:
    made = _C.Engine(lanes=1, threads_per_lane=1, capacity=1 << 20, arenas=False, async_host=None)
    yield made
    made.close()


class Load:
    """Jobs whose steps sleep; what ran when, by job."""

    def __init__(self, engine: _C.Engine) -> None:
        self.engine = engine
        self.ran: list[tuple[int, float, float]] = []

    def add(self) -> int:
        return int(self.engine.add_job())

    def submit(self, job: int, seconds: float) -> _C.StepRun:
        def work() -> None:
            begin = time.perf_counter()
            time.sleep(seconds)
            self.ran.append((job, begin, time.perf_counter()))

        run = _C.opaque_run(0, work)
        self.engine.submit(job, run)
        return run

    def turns(self) -> list[tuple[int, float]]:
        """Job and seconds of each turn, in order."""
        return [
            (job, sum(end - begin for _, begin, end in steps))
            for job, steps in itertools.groupby(self.ran, key=lambda step: step[0])
        ]


def blocked(engine: _C.Engine, load: Load) -> threading.Event:
    """Keeps the lane until the event is set, so that all that is submitted meanwhile waits."""
    go = threading.Event()
    run = _C.opaque_run(0, go.wait)
    engine.submit(load.add(), run)
    return go


def test_a_job_goes_on_for_a_turn(engine: _C.Engine) -> None:
    load = Load(engine)
    go = blocked(engine, load)
    jobs = [load.add() for _ in range(3)]
    runs = [load.submit(job, 0.002) for _ in range(30) for job in jobs]
    go.set()
    for run in runs:
        engine.wait(run)
    turns = load.turns()
    assert len(turns) < 30  # of 90 steps
    assert {job for job, _ in turns[:3]} == set(jobs)
    assert all(seconds < 2.5 * TURN + 0.01 for _, seconds in turns[:-2])


def test_lanes_are_shared_by_time_not_by_steps(engine: _C.Engine) -> None:
    load = Load(engine)
    go = blocked(engine, load)
    long, short = load.add(), load.add()
    runs = [load.submit(long, 0.030) for _ in range(20)] + [load.submit(short, 0.003) for _ in range(200)]
    go.set()
    time.sleep(0.72)
    seconds = {job: sum(end - begin for each, begin, end in list(load.ran) if each == job) for job in (long, short)}
    assert 0.5 < seconds[long] / seconds[short] < 2.0
    for run in runs:
        engine.wait(run)


def test_who_comes_late_does_not_catch_up(engine: _C.Engine) -> None:
    load = Load(engine)
    first = load.add()
    runs = [load.submit(first, 0.005) for _ in range(60)]
    while len(load.ran) < 40:
        time.sleep(0.005)
    late = load.add()
    begin = len(load.ran)
    runs += [load.submit(late, 0.005) for _ in range(40)]
    for run in runs:
        engine.wait(run)
    before_the_first_ended = [job for job, _, _ in load.ran[begin:]]
    before_the_first_ended = before_the_first_ended[: len(before_the_first_ended) - before_the_first_ended[::-1].index(first)]
    assert before_the_first_ended.count(late) < 40


def test_a_job_that_pauses_keeps_nobody_waiting(engine: _C.Engine) -> None:
    """Its lane is not kept for it, and it gets its share all the same."""
    load = Load(engine)
    busy, slow = load.add(), load.add()
    runs = [load.submit(busy, 0.002) for _ in range(150)]
    begin = time.perf_counter()
    for _ in range(12):
        engine.wait(load.submit(slow, 0.002))
        time.sleep(0.010)
    took = time.perf_counter() - begin
    for run in runs:
        engine.wait(run)
    assert took < 12 * (0.012 + 2 * TURN)
    wall = load.ran[-1][2] - load.ran[0][1]
    assert sum(end - begin for _, begin, end in load.ran) > 0.7 * wall


def test_a_lane_is_not_kept_for_a_job_that_is_gone(engine: _C.Engine) -> None:
    load = Load(engine)
    go = blocked(engine, load)
    gone, other = load.add(), load.add()
    last = load.submit(gone, 0.001)
    waiting = load.submit(other, 0.001)
    go.set()
    engine.wait(last)
    engine.remove_job(gone)
    begin = time.perf_counter()
    engine.wait(waiting)
    assert time.perf_counter() - begin < 0.5
    engine.check()


def test_the_eldest_first(engine: _C.Engine) -> None:
    load = Load(engine)
    go = blocked(engine, load)
    jobs = [load.add() for _ in range(3)]
    runs = [load.submit(job, 0.004) for _ in range(30) for job in reversed(jobs)]
    engine.set_fifo_lanes(True)
    go.set()
    for run in runs:
        engine.wait(run)
    assert [job for job, _ in load.turns()] == jobs  # though each needs three turns


def test_others_have_what_the_eldest_leaves(engine: _C.Engine) -> None:
    engine.set_fifo_lanes(True)
    load = Load(engine)
    elder, younger = load.add(), load.add()
    runs = [load.submit(younger, 0.002) for _ in range(500)]
    for _ in range(4):
        time.sleep(0.02)
        engine.wait(load.submit(elder, 0.002))
    before = [job for job, _ in load.turns()]
    for run in runs:
        engine.wait(run)
    assert before == [younger, elder] * 4
