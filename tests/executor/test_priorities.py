"""Guaranteed and opportunistic jobs on the lanes of one engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from tests.executor.test_turns import Load, blocked
from waterflow import _C

WAIT = 10.0  # seconds


def wait(engine: _C.Engine, run: _C.StepRun) -> None:
    engine.wait(run)
    run.outputs()


@pytest.fixture
def engine() -> Iterator[_C.Engine]:
    made = _C.Engine(lanes=2, intra_op=1, capacity=1 << 20, arenas=False)
    yield made
    made.close()


def test_guaranteed_steps_go_first() -> None:
    engine = _C.Engine(lanes=1, intra_op=1, capacity=1 << 20, arenas=False)
    load = Load(engine)
    go = blocked(engine, load)
    first, second = load.add(), load.add()
    engine.set_opportunistic(first, True)
    runs = [load.submit(first, 0.01), load.submit(second, 0.01)]
    go.set()
    for run in runs:
        wait(engine, run)
    assert [job for job, *_ in load.ran] == [second, first]
    engine.close()


def test_a_lane_is_left_for_a_guaranteed_job(engine: _C.Engine) -> None:
    load = Load(engine)
    guaranteed = load.add()
    wait(engine, load.submit(guaranteed, 0.001))  # it is there
    others = [load.add() for _ in range(2)]
    for job in others:
        engine.set_opportunistic(job, True)
    runs = [load.submit(job, 0.3) for job in others]
    time.sleep(0.05)
    began = time.perf_counter()
    wait(engine, load.submit(guaranteed, 0.001))
    assert time.perf_counter() - began < 0.1  # no opportunistic step was in its way
    for run in runs:
        wait(engine, run)


def test_lanes_of_a_guaranteed_job_that_left_are_open(engine: _C.Engine) -> None:
    load = Load(engine)
    guaranteed = load.add()
    wait(engine, load.submit(guaranteed, 0.001))
    engine.remove_job(guaranteed)
    others = [load.add() for _ in range(2)]
    for job in others:
        engine.set_opportunistic(job, True)
    runs = [load.submit(job, 0.2) for job in others]
    for run in runs:
        wait(engine, run)
    (_, begin, end), (_, begin2, end2) = load.ran[1:]
    assert begin2 < end and begin < end2  # side by side


def test_an_opportunistic_step_must_fit_beside_the_largest_guaranteed_one() -> None:
    engine = _C.Engine(lanes=2, intra_op=1, capacity=100, arenas=False)
    begun: list[str] = []

    def run(job: int, name: str, height: int, go: threading.Event | None = None) -> _C.StepRun:
        def work() -> None:
            begun.append(name)
            if go is not None:
                go.wait(WAIT)

        made = _C.opaque_run(_C.GroupPlan(ends=[1], peak=[height], after=[0]), work)
        engine.submit(job, made)
        return made

    guaranteed, other = int(engine.add_job()), int(engine.add_job())
    engine.set_opportunistic(other, True)
    wait(engine, run(guaranteed, "guaranteed", 60))
    late = run(other, "opportunistic", 50)
    time.sleep(0.1)
    assert begun == ["guaranteed"]  # it would fit now, and the next guaranteed step then would not
    wait(engine, run(guaranteed, "again", 60))
    assert begun == ["guaranteed", "again"]
    engine.remove_job(guaranteed)
    wait(engine, late)
    small = int(engine.add_job())
    wait(engine, run(small, "small", 50))
    wait(engine, run(other, "beside", 50))  # 50 + 50 fit
    engine.close()


def test_waiting_opportunistic_jobs_do_not_hold_up_guaranteed_ones() -> None:
    admission = _C.Admission(100)
    assert admission.try_issue(1, [60], [0])
    assert not admission.try_issue(2, [60], [0], opportunistic=True)
    admission.wait(2, opportunistic=True)
    admission.complete(1)
    assert admission.try_issue(3, [60], [0])  # overtakes it
    admission.complete(3)
    assert not admission.must_yield(1)
    assert admission.try_issue(1, [60], [0])


def test_waiting_within_a_class_has_its_turn() -> None:
    admission = _C.Admission(100)
    assert admission.try_issue(1, [60], [0], opportunistic=True)
    admission.wait(2, opportunistic=True)
    admission.complete(1)
    assert admission.try_issue(3, [30], [0], opportunistic=True)  # overtakes 2, once
    assert admission.must_yield(1, opportunistic=True) and not admission.must_yield(1)


def share_of_time(engine: _C.Engine, seconds: float) -> float:
    """How much of the time an opportunistic job's short steps ran, while a guaranteed one is in a long step."""
    load = Load(engine)
    guaranteed, other = load.add(), load.add()
    engine.set_opportunistic(other, True)
    long = load.submit(guaranteed, seconds)
    while engine.held < 0 or not engine.queued(guaranteed):
        time.sleep(0.001)
    began = time.perf_counter()
    count = 0
    while not long.done:
        engine.wait(load.submit(other, 0.005))
        count += 1
    return sum(end - begin for job, begin, end in load.ran if job == other) / (time.perf_counter() - began)


@pytest.mark.parametrize("rate", [0.2, 0.5])
def test_opportunistic_work_keeps_to_its_rate(engine: _C.Engine, rate: float) -> None:
    engine.set_rates(rate, rate)
    assert share_of_time(engine, 1.0) == pytest.approx(rate, rel=0.35)


def test_without_a_limit_it_runs_all_the_time(engine: _C.Engine) -> None:
    assert share_of_time(engine, 0.3) > 0.8


def test_a_rate_of_nothing_stops_it_and_a_cancelled_job_does_not_wait_for_it(engine: _C.Engine) -> None:
    load = Load(engine)
    guaranteed, other = load.add(), load.add()
    engine.set_opportunistic(other, True)
    engine.set_rates(0.0, 0.0)
    long = load.submit(guaranteed, 0.5)
    time.sleep(0.05)
    run = load.submit(other, 0.001)
    time.sleep(0.1)
    assert not run.done
    began = time.perf_counter()
    engine.cancel(other, "stopped")
    assert time.perf_counter() - began < 0.2 and not long.done
    wait(engine, long)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_rates_are_shares(engine: _C.Engine, rate: float) -> None:
    with pytest.raises(ValueError, match="share of time"):
        engine.set_rates(rate, 1.0)


def test_only_guaranteed_steps_are_timed_where_there_are_others(engine: _C.Engine) -> None:
    load = Load(engine)
    guaranteed, other = load.add(), load.add()
    wait(engine, load.submit(guaranteed, 0.001))
    assert engine.take_step_times() == []  # nobody asks
    engine.set_opportunistic(other, True)
    wait(engine, load.submit(other, 0.001))
    wait(engine, load.submit(guaranteed, 0.02))
    ((job, ready, ended, busy),) = engine.take_step_times()
    assert job == guaranteed and 0.02 <= (ended - ready) * 1e-9 < 0.5 and busy <= ended - ready
    assert engine.take_step_times() == []
