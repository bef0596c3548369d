"""Guaranteed and opportunistic jobs, from Job to result: bits, memory, making way and coming back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.support import MiB, same_bits
from waterflow.errors import InvalidJobError, MemoryLimitError
from waterflow.executor.engine import Engine, within
from waterflow.executor.policy import ResourcePolicy
from waterflow.partition.plan.plan import Plan, opaque_plan
from waterflow.training.runner import JobRunner

WAIT = 30.0  # seconds


def batches(count: int = 24, rows: int = 16) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(rows, 64, generator=generator), torch.randint(4, (rows,), generator=generator))
            for _ in range(count)]  # fmt: skip


def job(name: str, width: int = 64, **more: Any) -> wf.Job:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 4))

    settings = {"loss": F.cross_entropy, "data": batches(), "epochs": 2, "seed": 1} | more
    return wf.Job(name=name, model=model, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), **settings)


def assert_same(one: wf.JobResult, other: wf.JobResult) -> None:
    assert one.status == other.status == "completed", (one.traceback, other.traceback)
    assert one.losses == other.losses
    assert one.state_dict is not None and other.state_dict is not None
    assert all(same_bits(one.state_dict[key], other.state_dict[key]) for key in one.state_dict)


def needs(name: str, persistent: int, height: int) -> Plan:
    return opaque_plan(name, height, persistent=persistent, batch=0)


def in_thread(engine: Engine, runner: JobRunner) -> Callable[[], wf.JobResult]:
    """Starts it; what is returned waits for its result."""
    found: list[wf.JobResult] = []

    def run() -> None:
        with within(engine):
            found.append(runner.run())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> wf.JobResult:
        thread.join(WAIT)
        assert found, "the job did not end"
        return found[0]

    return result


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.needs_time("the README promises the bits of jobs of both priorities")
def test_jobs_of_both_priorities_end_as_alone() -> None:
    jobs = [job(f"{priority}-{n}", seed=n, priority=priority)
            for priority in ("guaranteed", "opportunistic") for n in range(2)]  # fmt: skip
    together = wf.train(jobs, lanes=2)
    for each in jobs:
        assert_same(together[each.name], wf.train([each], lanes=1)[0])


@pytest.mark.needs_time("it looks for a moment that nothing happens")
def test_an_opportunistic_job_makes_way_and_comes_back() -> None:
    alone = wf.train([job("small", epochs=6)], lanes=1)[0]
    with Engine(lanes=2, memory="200MiB") as engine:
        go, reached = threading.Event(), threading.Event()

        def slow() -> Any:
            for number, batch in enumerate(batches()):
                if number == 6:
                    reached.set()
                    go.wait(WAIT)
                yield batch

        runner = JobRunner(job("small", epochs=6, data=slow, priority="opportunistic"), engine)
        result = in_thread(engine, runner)
        assert reached.wait(WAIT)
        held = engine.reservations.claimed()
        assert held > 0
        large = engine.add_job("large")
        claimed = threading.Thread(
            target=engine.reservations.claim,
            args=(large, needs("large", engine.reservations.room // 2, engine.reservations.room // 2 - held // 2)),
            daemon=True,
        )  # fmt: skip
        claimed.start()
        time.sleep(0.2)
        assert claimed.is_alive()  # it waits for the end of a step
        go.set()
        claimed.join(WAIT)
        assert not claimed.is_alive()
        until(lambda: runner.suspended)
        assert engine.reservations.claimed() == engine.reservations._claims[large].bytes
        engine.remove_job(large)
        assert_same(result(), alone)
        assert runner.lease.times_left >= 1


def test_guaranteed_jobs_do_not_make_way() -> None:
    with Engine(lanes=2, memory="200MiB") as engine:
        go = threading.Event()

        def slow() -> Any:
            for number, batch in enumerate(batches()):
                if number == 2:
                    go.wait(WAIT)
                yield batch

        runner = JobRunner(job("first", epochs=1, data=slow), engine)
        result = in_thread(engine, runner)
        until(lambda: engine.reservations.claimed() > 0)
        late = engine.add_job("late")
        plan = needs("late", engine.reservations.room // 2, engine.reservations.room // 2)
        assert not engine.reservations.would_fit(plan)
        threading.Timer(0.2, go.set).start()
        engine.reservations.claim(late, plan)  # waits for its end
        assert result().status == "completed" and runner.lease.times_left == 0


def test_an_opportunistic_claim_leaves_room_for_a_guaranteed_step() -> None:
    with Engine(lanes=2, memory="1GiB", reserve=0) as engine:
        guaranteed, other = engine.add_job("guaranteed"), engine.add_job("other")
        engine.set_policy(other, ResourcePolicy("opportunistic"))
        engine.reservations.claim(guaranteed, needs("guaranteed", 600 * MiB, 100 * MiB))
        assert not engine.reservations.has_room(other, 400 * MiB, 100 * MiB)
        engine.reservations.claim(other, needs("other", 200 * MiB, 100 * MiB))


@pytest.mark.needs_time("it looks for a moment that nothing happens")
def test_a_lowered_quota_suspends_a_job_until_it_is_raised() -> None:
    alone = wf.train([job("job", epochs=40)], lanes=1)[0]
    with Engine(lanes=2, memory="1GiB") as engine:
        runner = JobRunner(job("job", epochs=40, priority="opportunistic", quota="500MiB"), engine)
        result = in_thread(engine, runner)
        until(lambda: runner.steps > 3)
        runner.lease.set(quota=1)
        until(lambda: runner.suspended)
        steps = runner.steps
        assert engine.reservations.claimed() == 0
        time.sleep(0.2)
        assert runner.steps == steps
        runner.lease.set(quota="1GiB")
        assert_same(result(), alone)


@pytest.mark.slow
@pytest.mark.parametrize("priority", ["guaranteed", "opportunistic"])
def test_jobs_that_do_not_fit_together_take_turns(priority: str) -> None:
    jobs = [job(f"job-{n}", width=2048, seed=n, epochs=40, priority=priority) for n in range(2)]
    alone = [wf.train([each], lanes=1)[0] for each in jobs]
    most = max(result.measured_peak or 0 for result in alone)
    with Engine(lanes=2, memory=int(1.5 * most), reserve=0, quantum=0.05) as engine:
        runners = [JobRunner(each, engine) for each in jobs]
        results = [in_thread(engine, runner) for runner in runners]
        for result, reference in zip(results, alone, strict=True):
            assert_same(result(), reference)
        assert sum(runner.lease.times_left for runner in runners) >= 2


@pytest.mark.parametrize("quantum", [0, -1.0])
def test_a_quantum_is_positive(quantum: float) -> None:
    with pytest.raises(InvalidJobError, match="quantum must be positive"):
        Engine(quantum=quantum)


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
def test_the_priority_of_a_running_job_changes() -> None:
    alone = wf.train([job("job", epochs=20)], lanes=1)[0]
    with Engine(lanes=2, memory="1GiB") as engine:
        runner = JobRunner(job("job", epochs=20), engine)
        result = in_thread(engine, runner)
        for priority in ("opportunistic", "guaranteed", "opportunistic"):
            until(lambda: runner.steps > 2)
            runner.lease.set(priority)  # type: ignore[arg-type]
            time.sleep(0.05)
        assert_same(result(), alone)


def test_a_quota_is_kept_for_a_guaranteed_job() -> None:
    with Engine(lanes=2, memory="1GiB", reserve=0) as engine:
        job_ = engine.add_job("guaranteed")
        engine.set_policy(job_, ResourcePolicy("guaranteed", quota=800 * MiB))
        engine.reservations.claim(job_, needs("guaranteed", 100 * MiB, 50 * MiB))
        assert engine.reservations.claimed() == 750 * MiB
        assert not engine.reservations.would_fit(needs("other", 50 * MiB, 300 * MiB))


def test_more_than_its_quota_is_refused() -> None:
    with pytest.raises(MemoryLimitError, match=r"quota of 1\.0 KiB.*raise quota="):
        wf.train([job("job", priority="opportunistic", quota=1024)])


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"priority": "high"}, "'guaranteed' or 'opportunistic'; got 'high'"),
     ({"quota": "much"}, "quota must be bytes"),
     ({"quota": 1.5}, r"bytes as a whole number, a share in \(0, 1\].*got 1\.5"),
     ({"quota": "4TiB"}, "exceeds the engine's limit")],
)  # fmt: skip
def test_bad_settings_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidJobError, match=told):
        wf.train([job("job", **settings)])


def test_one_lane_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="waterflow"):
        wf.train([job("job", epochs=1, priority="opportunistic")], lanes=1)
    assert [record for record in caplog.records if "pass lanes=2" in record.getMessage()]


def test_a_step_in_a_loop_of_its_own() -> None:
    with Engine(lanes=2) as engine:
        model = nn.Linear(64, 4)
        step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), engine=engine)
        engine.set_priority(step, "opportunistic")
        for batch in batches(4):
            step(batch)
        assert engine.interference is not None
        with pytest.raises(InvalidJobError, match="priority must be"):
            engine.set_priority(step, "low")  # type: ignore[arg-type]
        other = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(InvalidJobError, match="a Step of this engine"):
            engine.set_priority(other, "opportunistic")


def test_a_job_that_makes_way_does_not_wait_for_lanes() -> None:
    with Engine(lanes=1, memory="200MiB", mode="lanes") as engine:
        runner = JobRunner(job("small", width=512, epochs=400, priority="opportunistic"), engine)
        result = in_thread(engine, runner)
        until(lambda: runner.steps > 3)
        busy = JobRunner(job("busy", width=64, data=lambda: (b for b in batches() * 50), epochs=10000), engine)
        ends = in_thread(engine, busy)
        until(lambda: busy.steps > 50)  # it has the lane, and never leaves it
        large = engine.add_job("large")
        rest = engine.reservations.room - engine.reservations.claimed()
        claimed = threading.Thread(target=engine.reservations.claim, args=(large, needs("large", rest - 4096, 4096)), daemon=True)
        claimed.start()
        claimed.join(5)
        late = claimed.is_alive()
        busy.stop()
        claimed.join(WAIT)
        engine.remove_job(large)
        runner.stop()
        ends(), result()
        assert not late


def test_smaller_steps_do_not_take_room_from_larger_ones_of_the_same_job() -> None:
    with Engine(lanes=2, memory="1GiB", reserve=0) as engine:
        first = engine.add_job("first")
        engine.set_policy(first, ResourcePolicy(quota=800 * MiB))
        engine.reservations.claim(first, needs("first", 100 * MiB, 500 * MiB))
        engine.reservations.claim(first, needs("first", 100 * MiB, 50 * MiB))
        assert engine.reservations._claims[first].height == 500 * MiB
        assert not engine.reservations.would_fit(needs("other", 250 * MiB, 10 * MiB))
        engine.reservations.claim(first, needs("first", 100 * MiB, 600 * MiB))
        assert engine.reservations.claimed() == 200 * MiB


def test_a_job_that_is_just_leaving_is_not_asked() -> None:
    with Engine(lanes=2, memory="1GiB", reserve=0) as engine:
        leaving, late = engine.add_job("leaving"), engine.add_job("late")
        engine.set_policy(leaving, ResourcePolicy("opportunistic"))
        engine.reservations.claim(leaving, needs("leaving", 600 * MiB, 50 * MiB))
        engine.native.remove_job(leaving)
        engine.reservations._policies.pop(leaving, None)  # as remove_job() does before it gives the claim back
        with pytest.raises(MemoryLimitError):
            engine.reservations.claim(late, needs("late", 600 * MiB, 50 * MiB))


@pytest.mark.needs_time("it looks for a moment that nothing happens")
def test_a_suspended_job_does_not_come_back_by_itself() -> None:
    with Engine(lanes=2, memory="1GiB") as engine:
        runner = JobRunner(job("job", epochs=40, priority="opportunistic"), engine)
        result = in_thread(engine, runner)
        until(lambda: runner.steps > 3)
        leave = runner.lease.leave
        request = runner._safepoint.request

        def told_meanwhile(what: Any) -> Any:
            runner._safepoint.request = request  # type: ignore[method-assign]
            leave()
            return request(what)

        runner._safepoint.request = told_meanwhile  # type: ignore[method-assign]
        runner.suspend(WAIT)
        time.sleep(0.3)
        assert runner.suspended
        runner.resume()
        assert result().status == "completed"


def test_going_on_twice_at_once_is_no_error() -> None:
    with Engine(lanes=2, memory="1GiB") as engine:
        runner = JobRunner(job("job", epochs=40, priority="opportunistic"), engine)
        result = in_thread(engine, runner)
        until(lambda: runner.steps > 3)
        would_fit = engine.reservations.would_fit

        def and_others_resume_it(*args: Any) -> bool:
            runner.resume()
            return would_fit(*args)

        engine.reservations.would_fit = and_others_resume_it  # type: ignore[method-assign]
        runner.lease.leave()
        assert result().status == "completed", result().traceback


@pytest.mark.needs_time("it looks for a moment that nothing happens")
def test_a_job_that_left_and_became_guaranteed_has_room_made_for_it() -> None:
    with Engine(lanes=2, memory="200MiB", mode="lanes") as engine:
        runner = JobRunner(job("first", width=128, epochs=40, priority="opportunistic"), engine)
        result = in_thread(engine, runner)
        until(lambda: runner.steps > 3)
        asked = threading.Event()
        runner.lease.leave()
        until(lambda: runner.suspended)
        other = engine.add_job("other")
        engine.set_policy(other, ResourcePolicy("opportunistic", preempt=lambda: (asked.set(), engine.remove_job(other))))
        engine.reservations.claim(other, needs("other", engine.reservations.room - 4096, 4096))
        time.sleep(0.2)
        assert runner.suspended and not asked.is_set()
        runner.lease.set("guaranteed")
        came = asked.wait(5)
        if not came:
            engine.remove_job(other)
        assert result().status == "completed" and came


def test_all_lanes_are_in_use_each_time_an_opportunistic_job_comes() -> None:
    with Engine(lanes=2, memory="1GiB") as engine:
        for _ in range(2):
            each = engine.add_job("job")
            engine.set_policy(each, ResourcePolicy("opportunistic"))
            assert engine.native.active_lanes == 2
            engine.remove_job(each)
            engine.native.set_active_lanes(1)  # as is measured to be faster for the others


@pytest.mark.slow
def test_a_guaranteed_job_does_not_wait_for_data_that_an_opportunistic_one_has_not_read() -> None:
    shared = wf.SharedData(batches(200))
    began = time.perf_counter()
    jobs = [job("guaranteed", data=shared, epochs=1), job("opportunistic", data=shared, epochs=1, priority="opportunistic")]
    results = wf.train(jobs, lanes=1)
    assert all(result.status == "completed" for result in results)
    assert results["guaranteed"].seconds < 5, time.perf_counter() - began


@pytest.mark.slow
def test_the_first_look_at_an_eager_step_holds_up_no_guaranteed_claim() -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss if loss.item() >= 0 else -loss  # not captured

    with Engine(lanes=1, memory="1GiB", mode="lanes") as engine:
        busy = JobRunner(job("busy", data=lambda: (b for b in batches() * 50), epochs=10000), engine)
        ends = in_thread(engine, busy)
        until(lambda: busy.steps > 50)  # it has the lane, and never leaves it
        settings = {"loss": None, "step": step, "priority": "opportunistic"}
        eager = JobRunner(job("eager", epochs=1, **settings), engine)
        result = in_thread(engine, eager)
        until(lambda: bool(engine.reservations._looking))
        time.sleep(0.1)
        late = engine.add_job("late")
        claimed = threading.Thread(target=engine.reservations.claim, args=(late, needs("late", 1 * MiB, 1 * MiB)), daemon=True)
        steps = busy.steps
        claimed.start()
        claimed.join(5)
        waits = claimed.is_alive()
        until(lambda: busy.steps > steps)  # it trains all the time
        busy.stop()
        ends(), result()
        assert not waits
