"""Jobs that make way from wherever they wait, and those that cannot."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.executor.test_policy import WAIT, assert_same, batches, in_thread, job, needs, until
from tests.support import MiB
from waterflow.executor import reservations
from waterflow.executor.engine import Engine
from waterflow.executor.policy import GUARANTEED, Preempted, ResourcePolicy
from waterflow.training.runner import JobRunner

LARGER = [*batches(8), *batches(4, rows=4096), *batches(8)]


@pytest.fixture(autouse=True)
def all_warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="waterflow")


class Held:
    """Batches that stop before one of them, until they are let go."""

    def __init__(self, at: int, in_pass: int = 1) -> None:
        self.at, self.in_pass = at, in_pass
        self.reached, self.go = threading.Event(), threading.Event()
        self.passes = 0

    def __call__(self) -> Iterator[Any]:
        self.passes += 1
        return self.read(self.passes)

    def read(self, number: int) -> Iterator[Any]:
        for at, batch in enumerate(LARGER):
            if at == self.at and number == self.in_pass:
                self.reached.set()
                assert self.go.wait(WAIT)
            yield batch


class HeldPlace(Held):
    """The same, which knows its place."""

    place = 0

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        self.place = 0 if self.place == len(LARGER) else self.place
        for batch in self.rest(self.passes):
            self.place += 1
            yield batch

    def rest(self, number: int) -> Iterator[Any]:
        for at, batch in enumerate(self.read(number)):
            if at >= self.place:
                yield batch

    def state_dict(self) -> dict[str, Any]:
        return {"place": self.place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = state["place"]


KINDS: dict[str, Callable[[Held], Any]] = {
    "function": lambda held: held, "place": lambda held: held,
    "shared": lambda held: wf.SharedData(held), "eager": lambda held: held,
}  # fmt: skip


@contextlib.contextmanager
def squeezed(runner: JobRunner, held: Held, engine: Engine) -> Iterator[threading.Event]:
    """A guaranteed job leaves the waiting one what it has and no more, then wants that, too; the event tells that it got it."""
    assert held.reached.wait(WAIT) and runner.step is not None and runner.step.job is not None
    mine = engine.reservations._claims[runner.step.job]
    guaranteed, again, has = engine.add_job("guaranteed"), threading.Event(), threading.Event()
    least = engine.reservations.room - mine.bytes - mine.height - 65536

    def claim() -> None:
        engine.reservations.claim(guaranteed, needs("guaranteed", least - 4096, 4096))
        again.set()
        until(lambda: engine.reservations.waits(runner._thread))
        engine.reservations.claim(guaranteed, needs("guaranteed", engine.reservations.room - 8192, 4096))
        has.set()

    thread = threading.Thread(target=claim, daemon=True)
    thread.start()
    assert again.wait(WAIT)
    held.go.set()
    try:
        yield has
    finally:
        engine.remove_job(guaranteed)
        thread.join(WAIT)


def not_captured(model: nn.Module, batch: Any) -> Any:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return loss if loss.item() >= 0 else -loss


def away_and_back(engine: Engine, runner: JobRunner, held: Held) -> tuple[wf.JobResult, wf.Checkpoint]:
    """What a job that another one needs room of ends with, and its copy from while it was away."""
    result = in_thread(engine, runner)
    with squeezed(runner, held, engine) as has:
        assert has.wait(WAIT)
        until(lambda: runner.suspended)
        assert len(engine.reservations._claims) == 1
        copy = runner.ask_for_snapshot().result(WAIT)
    ended = result()
    assert runner.lease.times_left == 1
    return ended, copy


@pytest.mark.parametrize("kind", KINDS)
def test_a_job_that_waits_for_more_makes_way(kind: str) -> None:
    settings: dict[str, Any] = {"accumulate": 3, "priority": "opportunistic"}
    if kind == "eager":
        settings |= {"loss": None, "step": not_captured}
    alone = wf.train([job("job", data=LARGER, **settings)], lanes=1)[0]
    with Engine(lanes=2, memory="200MiB") as engine:
        held = HeldPlace(6) if kind == "place" else Held(6)
        runner = JobRunner(job("job", data=KINDS[kind](held), **settings), engine)
        ended, copy = away_and_back(engine, runner, held)
        assert_same(ended, alone)
    other = HeldPlace(-1) if kind == "place" else Held(-1)
    resumed = JobRunner(job("job", data=KINDS[kind](other), **settings), resume=copy)
    assert_same(resumed.run(), alone)


def evaluate(model: nn.Module) -> float:
    x = torch.linspace(-1, 1, 64).repeat(40_000, 1)
    return float(model(x).square().mean())


def test_a_job_that_waits_to_be_evaluated_makes_way() -> None:
    settings = {"evaluate": evaluate, "priority": "opportunistic", "epochs": 3}
    alone = wf.train([job("job", data=LARGER, **settings)], lanes=1)[0]
    with Engine(lanes=2, memory="400MiB") as engine:
        held = Held(19, in_pass=1)
        runner = JobRunner(job("job", data=held, **settings), engine)
        runner._evaluation._height = 60 * MiB  # as it was seen to need before
        ended, copy = away_and_back(engine, runner, held)
        assert_same(ended, alone)
        assert ended.metrics == alone.metrics
    resumed = JobRunner(job("job", data=Held(-1), **settings), resume=copy).run()
    assert_same(resumed, alone)
    assert resumed.metrics == alone.metrics


def test_a_quota_that_leaves_no_room_to_evaluate_suspends_the_job() -> None:
    settings = {"evaluate": evaluate, "priority": "opportunistic", "epochs": 3}
    alone = wf.train([job("job", data=LARGER, **settings)], lanes=1)[0]
    with Engine(lanes=2, memory="400MiB") as engine:
        held = Held(19)
        runner = JobRunner(job("job", data=held, **settings), engine)
        runner._evaluation._height = 60 * MiB  # as it was seen to need before
        result = in_thread(engine, runner)
        assert held.reached.wait(WAIT) and runner.step is not None and runner.step.job is not None
        mine = engine.reservations._claims[runner.step.job]
        runner.lease.set(quota=mine.bytes + mine.height + MiB)  # enough to train
        held.go.set()
        until(lambda: runner.suspended)
        runner.lease.set(quota="400MiB")
        ended = result()
        assert_same(ended, alone)
        assert ended.metrics == alone.metrics and runner.lease.times_left == 1


def test_a_job_that_was_suspended_at_the_end_of_an_epoch_is_evaluated() -> None:
    settings: dict[str, Any] = {"evaluate": evaluate, "epochs": 3}
    alone = wf.train([job("job", **settings)], lanes=1)[0]
    with Engine(lanes=2, memory="400MiB") as engine:
        runner = JobRunner(job("job", **settings), engine)
        wished, ended = threading.Event(), 0

        def held() -> Iterator[Any]:
            nonlocal ended
            for at, batch in enumerate(batches()):
                if at == 23:
                    ended += 1
                    if ended == 2:
                        threading.Thread(target=lambda: (runner.suspend(WAIT), runner.resume()), daemon=True).start()
                        until(lambda: runner._safepoint._requests)
                        wished.set()
                yield batch

        runner.job.data = held
        runner.job.check()
        result = in_thread(engine, runner)
        assert wished.wait(WAIT)
        assert_same(result(), alone)


def test_of_opportunistic_jobs_that_wait_for_one_another_one_makes_way() -> None:
    with Engine(lanes=2, memory=1000 * MiB, reserve=0) as engine:
        told = threading.Event()
        first, second = engine.add_job("first"), engine.add_job("second")
        policy = ResourcePolicy("opportunistic", preempt=told.set, at_boundary=threading.get_ident())
        engine.set_policy(first, ResourcePolicy("opportunistic", preempt=lambda: None))
        engine.set_policy(second, policy)
        claims = threading.Thread(
            target=lambda: [engine.reservations.claim(first, needs("first", size * MiB, MiB)) for size in (200, 700)], daemon=True
        )
        engine.reservations.claim(second, needs("second", 400 * MiB, MiB))
        claims.start()
        until(lambda: engine.reservations.waits(claims.ident))
        with pytest.raises(Preempted, match="'second' is preempted"):
            engine.reservations.claim(second, needs("second", 850 * MiB, MiB))
        assert told.is_set()
        engine.remove_job(second)
        claims.join(WAIT)
        assert engine.reservations.claimed() == 700 * MiB


# -- those who cannot


class NoState:
    """A scheduler that nobody can copy."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        pass


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "cannot be preempted" in record.getMessage()]


def test_a_job_whose_state_cannot_be_saved_stays_and_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with Engine(lanes=2, memory="200MiB") as engine:
        runner = JobRunner(job("plain", epochs=1000, priority="opportunistic", scheduler=NoState), engine)
        result = in_thread(engine, runner)
        until(lambda: runner.steps > 3)
        assert runner.step is not None and runner.step.job is not None
        own, priorities = runner.step.job, list[tuple[int, bool]]()
        set_priority = engine.reservations._set_priority

        def noted(number: int, opportunistic: bool) -> None:
            priorities.append((number, opportunistic))
            set_priority(number, opportunistic)

        engine.reservations._set_priority = noted  # type: ignore[method-assign]
        late = engine.add_job("late")
        claims = threading.Thread(
            target=engine.reservations.claim, args=(late, needs("late", engine.reservations.room - 8192, 4096)), daemon=True
        )
        claims.start()
        until(lambda: bool(warnings(caplog)))
        steps = runner.steps
        until(lambda: runner.steps > steps + 20)  # it goes on
        assert claims.is_alive() and not runner.suspended
        assert priorities[-1] == (own, True) and (own, False) in priorities and not engine.reservations._lent
        runner.stop()
        result()
        claims.join(WAIT)
        assert engine.reservations._claims.keys() == {late}
        (told,) = warnings(caplog)
        assert "job 'plain'" in told and "NoState, has no state_dict" in told


def test_who_could_not_make_way_is_asked_again(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with Engine(lanes=2, memory=1000 * MiB, reserve=0) as engine:
        asked: list[int] = []
        holder = engine.add_job("holder")
        policy = ResourcePolicy("opportunistic", preempt=lambda: asked.append(1))
        engine.set_policy(holder, policy)
        engine.reservations.claim(holder, needs("holder", 600 * MiB, MiB))

        def ask() -> int:
            engine.reservations.ask_for_turn(needs("late", 600 * MiB, MiB), GUARANTEED, 1, time.monotonic())
            return len(asked)

        assert ask() == 1 and ask() == 1  # it has not answered
        engine.reservations.cannot_be_preempted(holder, "no")
        assert ask() == 1
        engine.set_policy(holder, policy)
        assert ask() == 2
        monkeypatch.setattr(reservations, "ASK_AGAIN", 0.0)
        engine.reservations.cannot_be_preempted(holder, "no")
        assert ask() == 3
        assert len(warnings(caplog)) == 1


def test_lent_priority_is_taken_back_where_the_guaranteed_job_gives_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(timeout: float) -> None:
        raise KeyboardInterrupt

    with Engine(lanes=2, memory=1000 * MiB, reserve=0) as engine:
        holder, late = engine.add_job("holder"), engine.add_job("late")
        engine.set_policy(holder, ResourcePolicy("opportunistic", preempt=lambda: None))
        engine.reservations.claim(holder, needs("holder", 600 * MiB, MiB))
        lent: list[bool] = []
        set_priority = engine.reservations._set_priority
        engine.reservations._set_priority = lambda number, now: (lent.append(now), set_priority(number, now))[1]  # type: ignore[method-assign]
        monkeypatch.setattr(engine.reservations._changed, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.reservations.claim(late, needs("late", 600 * MiB, MiB))
        assert lent == [False, True]


@pytest.mark.needs_time("it looks for a moment that nothing happens")
def test_a_step_in_a_loop_of_its_own_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with Engine(lanes=2, memory="200MiB") as engine:
        model = nn.Linear(64, 4)
        step = wf.Step(
            model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), engine=engine, name="mine"
        )
        engine.set_priority(step, "opportunistic")
        step(batches(1)[0])
        late = engine.add_job("late")
        claims = threading.Thread(
            target=engine.reservations.claim, args=(late, needs("late", engine.reservations.room - 8192, 4096)), daemon=True
        )
        claims.start()
        until(lambda: bool(warnings(caplog)))
        time.sleep(0.3)
        (told,) = warnings(caplog)
        assert "job 'mine'" in told and "a loop of its own" in told and "as a Job" in told
        assert claims.is_alive()
        step.close()
        claims.join(WAIT)
        assert engine.reservations._claims.keys() == {late}


# -- pages


def test_pages_stay_for_jobs_that_come_one_after_another() -> None:
    with Engine(lanes=1, memory="200MiB", mode="lanes") as engine:
        held: list[int] = []
        jobs = [job(f"job-{n}", epochs=1) for n in range(3)]
        wf.train(jobs, engine=engine, max_concurrent=1, callbacks=[lambda _: held.append(engine.native.pages_in_use)])
        assert all(held) and engine.native.pages_in_use == 0
        with pytest.raises(ZeroDivisionError), engine.reservations.retain_pages():
            wf.train(jobs[:1], engine=engine)
            assert engine.native.pages_in_use
            raise ZeroDivisionError
        assert engine.native.pages_in_use == 0
