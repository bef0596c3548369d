"""Jobs that are held: they begin no step, keep what they have until others need it, can be copied, and go on with the same bits."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.executor.test_policy import WAIT, assert_same, batches, in_thread, job, needs, until
from tests.support import MiB
from waterflow.executor.cancel import time_does_not_count
from waterflow.executor.engine import Engine, within
from waterflow.executor.policy import Preempted, ResourcePolicy
from waterflow.training.engine_lease import LoopLease
from waterflow.training.runner import JobRunner
from waterflow.training.safepoint import State


def held(engine: Engine, yields: bool = True, **settings: Any) -> tuple[JobRunner, Callable[[], wf.JobResult]]:
    """A job that has trained, and is held; and what waits for its result."""
    runner = JobRunner(job("job", **settings), engine)
    result = in_thread(engine, runner)
    until(lambda: runner.steps > 3)
    runner.lease.hold(True, yields)
    return runner, result


def standing(runner: JobRunner) -> int:
    """The steps of a held job, once it stands."""
    runner.snapshot(WAIT)  # it is served at its safepoint
    return runner.steps


def test_a_held_job_begins_no_step_and_goes_on_with_the_same_bits() -> None:
    alone = wf.train([job("job", epochs=40)], lanes=1)[0]
    with Engine(lanes=2, memory="200MiB") as engine:
        runner, result = held(engine, epochs=40)
        steps, copy = standing(runner), runner.snapshot(WAIT)
        assert copy.steps == steps == standing(runner)
        assert len(engine.reservations) == 1 and not runner.suspended  # it keeps its memory
        runner.lease.hold(False)
        assert_same(result(), alone)
    assert_same(JobRunner(job("job", epochs=40), resume=copy).run(), alone)


def total(model: nn.Module) -> float:
    return float(model(batches(1)[0][0]).sum())


@pytest.mark.parametrize("seed", range(4))
def test_jobs_that_are_held_at_any_moment_have_their_bits(seed: int) -> None:
    numbers = random.Random(seed)
    kinds: list[dict[str, Any]] = [
        {"epochs": 20}, {"epochs": 20, "priority": "opportunistic"}, {"epochs": 15, "evaluate": total},
    ]  # fmt: skip
    alone = [wf.train([job(f"job-{n}", **kind)], lanes=1)[0] for n, kind in enumerate(kinds)]
    with Engine(lanes=2, memory="200MiB") as engine:
        runners = [JobRunner(job(f"job-{n}", **kind), engine) for n, kind in enumerate(kinds)]
        results = [in_thread(engine, runner) for runner in runners]
        for _ in range(30):
            chosen = numbers.choice(runners)
            chosen.lease.hold(numbers.random() < 0.6)
            seen = sum(runner.begun for runner in runners) + numbers.randrange(8)
            # None goes on that has ended, nor one that is held.
            still = [runner for runner in runners if not runner.lease.policy.held]
            until(lambda: sum(r.begun for r in runners) >= seen or all(r._safepoint.state is State.ENDED for r in still))  # noqa: B023
        for runner in runners:
            runner.lease.hold(False)
        for result, expected in zip(results, alone, strict=True):
            ended = result()
            assert_same(ended, expected)
            assert ended.metrics == expected.metrics


@pytest.mark.parametrize("priority", ["guaranteed", "opportunistic"])
def test_a_held_job_leaves_for_whoever_needs_its_memory(priority: Any) -> None:
    alone = wf.train([job("job", epochs=40)], lanes=1)[0]
    with Engine(lanes=2, memory="200MiB") as engine:
        runner, result = held(engine, epochs=40)  # guaranteed: it would leave for nobody
        standing(runner)
        other = engine.add_job("other")
        engine.set_policy(other, ResourcePolicy(priority))
        engine.reservations.claim(other, needs("other", engine.reservations.room - 8192, 4096))
        until(lambda: runner.suspended)
        assert runner.suspend(WAIT).steps == runner.steps
        engine.remove_job(other)
        runner.resume()
        assert standing(runner) == runner.steps  # there is room, and it does not go on by itself
        runner.lease.hold(False)
        assert_same(result(), alone)


def test_a_job_that_is_held_for_a_measurement_gives_nothing_up() -> None:
    with Engine(lanes=2, memory="200MiB") as engine:
        runner, result = held(engine, epochs=40, priority="opportunistic", yields=False)
        standing(runner)
        other = engine.add_job("other")
        engine.set_policy(other, ResourcePolicy("opportunistic"))
        wants = needs("other", engine.reservations.room - 8192, 4096)
        claims = threading.Thread(target=engine.reservations.claim, args=(other, wants), daemon=True)
        claims.start()
        until(lambda: engine.reservations.waits(claims.ident))
        assert standing(runner) == runner.steps and not runner.suspended
        runner.lease.hold(True)
        claims.join(WAIT)
        assert not claims.is_alive()
        engine.remove_job(other)
        runner.lease.hold(False)
        assert result().status == "completed"


def test_a_job_held_at_the_end_of_an_epoch_can_be_copied_before_its_evaluation() -> None:
    settings: dict[str, Any] = {"epochs": 3, "evaluate": total}
    alone = wf.train([job("job", **settings)], lanes=1)[0]
    with Engine(lanes=2, memory="200MiB") as engine:
        reached = threading.Event()

        def data() -> Iterator[Any]:
            yield from batches()
            if not reached.is_set():
                runner.lease.hold(True)
                reached.set()

        runner = JobRunner(job("job", data=data, **settings), engine)
        result = in_thread(engine, runner)
        assert reached.wait(WAIT)
        copy = runner.snapshot(WAIT)
        assert copy.steps == 24 and not copy.state["metrics"]
        runner.lease.hold(False)
        ended = result()
        assert_same(ended, alone)
        assert ended.metrics == alone.metrics
    resumed = JobRunner(job("job", **settings), resume=copy).run()
    assert_same(resumed, alone)
    assert resumed.metrics == alone.metrics


def test_a_job_that_left_comes_back_only_when_it_goes_on() -> None:
    with Engine(lanes=2, memory="200MiB") as engine:
        runner, result = held(engine, epochs=40)
        standing(runner)
        other = engine.add_job("other")
        engine.reservations.claim(other, needs("other", engine.reservations.room - 8192, 4096))
        engine.remove_job(other)
        until(lambda: runner.suspended)
        assert not runner.lease.has_room()
        runner.lease.hold(False)
        assert result().status == "completed" and runner.lease.times_left == 1


def test_a_held_job_that_waits_for_memory_takes_none() -> None:
    with Engine(lanes=2, memory="200MiB") as engine:
        first = engine.add_job("first")
        engine.reservations.claim(first, needs("first", engine.reservations.room - 8192, 4096))
        runner = JobRunner(job("job"), engine)
        result = in_thread(engine, runner)
        until(lambda: engine.reservations.waits(runner._thread))
        runner.lease.hold(True)
        until(lambda: not engine.reservations.waits(runner._thread))
        engine.remove_job(first)
        assert standing(runner) == 0 and len(engine.reservations) == 0
        runner.lease.hold(False)
        assert result().status == "completed"


def test_a_claim_of_a_held_job_away_from_its_boundary_waits() -> None:
    with Engine(lanes=2, memory="200MiB") as engine:
        number, policy, claimed = engine.add_job("job"), ResourcePolicy(), threading.Event()
        engine.set_policy(number, policy)
        policy.goes_on.clear()

        def claim() -> None:
            engine.reservations.claim(number, needs("job", 4096, 4096))
            claimed.set()

        threading.Thread(target=claim, daemon=True).start()
        policy.at_boundary = threading.get_ident()
        with pytest.raises(Preempted):
            engine.reservations.claim(number, needs("job", 4096, 4096))
        policy.at_boundary = None
        assert not claimed.is_set()
        policy.goes_on.set()
        engine.reservations.look_again()
        assert claimed.wait(WAIT)


def test_the_time_that_a_job_is_held_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    paused = threading.Event()

    def noted() -> contextlib.AbstractContextManager[None]:
        paused.set()
        return time_does_not_count()

    monkeypatch.setattr("waterflow.training.runner.time_does_not_count", noted)
    with Engine(lanes=2, memory="200MiB") as engine:
        runner = JobRunner(job("job", epochs=1000, timeout=3600), engine)
        result = in_thread(engine, runner)
        until(lambda: runner.steps > 3)
        assert not paused.is_set()
        runner.lease.hold(True)
        assert paused.wait(WAIT)
        runner.stop()
        assert result().status == "cancelled"


def test_readers_of_the_same_data_do_not_wait_for_a_held_job() -> None:
    data = wf.SharedData(lambda: iter(batches()))
    alone = wf.train([job("job", epochs=10)], lanes=1)[0]
    with Engine(lanes=2, memory="200MiB") as engine:
        runners = [JobRunner(job(name, data=data, epochs=10), engine) for name in ("job", "other")]
        runners[0].lease.hold(True)
        results = [in_thread(engine, runner) for runner in runners]
        assert results[1]().status == "completed" and runners[0].steps == 0
        runners[0].lease.hold(False)
        assert_same(results[0](), alone)


def test_a_held_job_can_be_suspended_and_stopped() -> None:
    with Engine(lanes=2, memory="200MiB") as engine:
        runner, result = held(engine, epochs=1000)
        assert runner.suspend(WAIT).steps == runner.steps
        runner.stop("over")
        assert result().status == "cancelled"


class Loop:
    """A loop of the user's own on a thread of its own, within a lease."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.lease, self.losses = engine, LoopLease("loop", engine), list[float]()
        self.begun, self.over = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()
        assert self.begun.wait(WAIT)

    def run(self) -> None:
        with within(self.engine, policy=self.lease.policy):
            torch.manual_seed(0)
            model = nn.Linear(64, 4)
            step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
            self.lease.steps = [step]
            self.step = step
            for batch in self.batches():
                self.losses.append(float(step(batch)))
                self.begun.set()

    def batches(self) -> Iterator[Any]:
        while not self.over.is_set():
            yield batches(1)[0]


def test_a_loop_has_priority_quota_and_hold_of_its_lease() -> None:
    with Engine(lanes=2, memory="200MiB") as engine:
        loop = Loop(engine)
        assert loop.step.job is not None
        loop.lease.set("opportunistic", quota="100MiB")
        policy = engine.reservations.policy_of(loop.step.job)
        assert policy is loop.lease.policy and policy.opportunistic and policy.quota == 100 * MiB
        loop.lease.hold(True)
        until(lambda: loop.thread.ident is not None and _waits_held(loop.thread))
        seen = len(loop.losses)
        assert loop.step.steps == seen
        loop.lease.hold(False)
        until(lambda: len(loop.losses) > seen)
        loop.over.set()
        loop.thread.join(WAIT)
        assert not loop.thread.is_alive()


def test_a_job_that_a_loop_returns_has_what_its_lease_was_told() -> None:
    with Engine(lanes=2, memory="200MiB") as engine:
        loop = LoopLease("trial", engine)
        loop.set("opportunistic")
        loop.hold(True)
        runner = JobRunner(job("job"), engine)
        loop.hand_on(runner.lease)
        assert runner.lease.policy.opportunistic and runner.lease.policy.held
        loop.set(quota="50MiB")
        loop.hold(False)
        assert runner.lease.policy.quota == 50 * MiB and not runner.lease.policy.held


def _waits_held(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "wait_while_held":
            return True
        frame = frame.f_back
    return False


def test_a_held_loop_gives_up_where_its_memory_is_needed() -> None:
    with Engine(lanes=2, memory="200MiB") as engine:
        loop, asked = Loop(engine), threading.Event()
        loop.lease.give_up = asked.set
        loop.lease.hold(True)
        other = engine.add_job("other")
        wants = needs("other", engine.reservations.room - 8192, 4096)
        claims = threading.Thread(target=engine.reservations.claim, args=(other, wants), daemon=True)
        claims.start()
        assert asked.wait(WAIT)
        loop.over.set()
        loop.lease.hold(False)
        loop.thread.join(WAIT)
        loop.step.close()
        claims.join(WAIT)
        assert not claims.is_alive()
