"""A job's safepoint: the table of its states and events, what those who ask are given, and who decides when it goes on."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

import pytest

from waterflow.errors import CheckpointError, JobCancelled
from waterflow.training.checkpoint import Checkpoint
from waterflow.training.safepoint import JobEnded, Request, Safepoint, State

WAIT = 30.0  # seconds
COPY, LATER = (Checkpoint("job", 0, steps, steps, {}) for steps in (1, 2))


class Job:
    """A safepoint, and a thread that stands at it in the place of a job's own."""

    def __init__(self, *events: str) -> None:
        self.point = Safepoint("job")
        self.stopped, self.room, self.looks = False, threading.Event(), 0
        self.thread = threading.Thread(target=self.stand, daemon=True)
        for event in events:
            self.do(event)

    def do(self, event: str) -> Any:
        """One of the columns of the table."""
        match event:
            case "copy" | "suspend" | "make way":
                return self.point.request(event)
            case "serve":
                return self.point.serve(lambda: COPY, suspend=False)
            case "stand":
                asked = list(self.point._requests)
                self.thread.start()
                return [made.result(WAIT) for made in asked]
            case "resume":
                self.point.resume()
                return self.joined()
            case "go on":
                return self.point.go_on()
            case "end":
                self.stopped = True
                return self.joined() if self.thread.is_alive() else self.point.end()

    def joined(self) -> None:
        self.thread.join(WAIT)
        assert not self.thread.is_alive()

    def stand(self) -> None:
        checkpoint = self.point.serve(lambda: COPY, suspend=True)
        assert checkpoint is COPY
        try:
            self.point.stand(checkpoint, self.check, self.has_room)
        except JobCancelled:
            self.point.end()

    def check(self) -> None:
        if self.stopped:
            raise JobCancelled("stopped")

    def has_room(self) -> bool:
        self.looks += 1
        return self.room.is_set()


BEFORE: dict[str, tuple[str, ...]] = {
    "RUNNING": (),
    "REQUESTED": ("suspend",),
    "SUSPENDED": ("suspend", "stand"),
    "RESUMING": ("suspend", "stand", "resume"),
    "ENDED": ("end",),
}
EVENTS = ("copy", "suspend", "make way", "serve", "stand", "resume", "go on", "end")
# The state behind each event; "-" where the job's thread is elsewhere, and cannot come to it.
TABLE = {
    #             copy         suspend      make way     serve        stand        resume      go on      end
    "RUNNING":   ("REQUESTED", "REQUESTED", "REQUESTED", "RUNNING",   "-",         "refused",  "-",       "ENDED"),
    "REQUESTED": ("REQUESTED", "REQUESTED", "REQUESTED", "REQUESTED", "SUSPENDED", "refused",  "-",       "ENDED"),
    "SUSPENDED": ("SUSPENDED", "SUSPENDED", "SUSPENDED", "-",         "-",         "RESUMING", "-",       "ENDED"),
    "RESUMING":  ("RESUMING",  "RESUMING",  "RESUMING",  "-",         "-",         "refused",  "RUNNING", "ENDED"),
    "ENDED":     ("ENDED",     "ENDED",     "ENDED",     "-",         "-",         "refused",  "-",       "-"),
}  # fmt: skip
CASES = [
    (state, event, after)
    for state, row in TABLE.items() for event, after in zip(EVENTS, row, strict=True) if after != "-"
]  # fmt: skip


@pytest.mark.parametrize(("state", "event", "after"), CASES)
def test_each_event_in_each_state(state: str, event: str, after: str) -> None:
    job = Job(*BEFORE[state])
    assert job.point.state is State[state]
    if after == "refused":
        with pytest.raises(CheckpointError, match="'job' is not suspended; only a suspended job can be resumed"):
            job.do(event)
        assert job.point.state is State[state]
    else:
        job.do(event)
        assert job.point.state is State[after]
    if job.point.state is State.SUSPENDED:
        job.do("end")


def test_the_table_has_all_states() -> None:
    assert [*TABLE] == [*BEFORE] == [state.name for state in State]


@pytest.mark.parametrize("events", [(), ("suspend", "stand", "resume")])
def test_requests_of_a_job_that_goes_on_wait_for_its_next_step(events: tuple[str, ...]) -> None:
    job = Job(*events)
    copy, suspend = job.do("copy"), job.do("suspend")
    with pytest.raises(CheckpointError, match="did not come to the end of a step within 0 s; wait longer, or ask again"):
        job.point.ask("copy", 0)
    job.point.go_on()
    assert job.point.state is State.REQUESTED and len(job.point._requests) == 2
    assert job.point.serve(lambda: LATER, suspend=False) is copy.result(0) is LATER
    assert not suspend.done()
    job.do("end")
    with pytest.raises(JobEnded, match="'job' has ended: its result has what it trained"):
        suspend.result(0)


def test_a_suspended_job_answers_at_once() -> None:
    job = Job("suspend", "stand")
    assert all(job.point.ask(what, 0) is COPY for what in ("copy", "suspend", "make way"))
    job.do("end")
    assert job.point.state is State.ENDED
    with pytest.raises(JobEnded):
        job.point.ask("copy", 0)


@pytest.mark.parametrize("suspend", [False, True])
def test_an_error_is_for_those_who_asked(suspend: bool) -> None:
    def refuse() -> Checkpoint:
        raise CheckpointError("no copy")

    job = Job()
    copy, stand, room = (job.do(what) for what in ("copy", "suspend", "make way"))
    assert job.point.serve(refuse, suspend=suspend) is None
    for made in [stand, room] if suspend else [copy]:
        with pytest.raises(CheckpointError, match="no copy"):
            made.result(0)
    assert job.point.state is State.REQUESTED  # by the others


# What was asked of a job before it stands, and then; it comes back by itself where nobody suspended it.
@pytest.mark.parametrize(
    ("before", "then", "comes_back"),
    [
        (("make way",), (), True),
        (("make way", "copy"), ("copy", "make way"), True),
        (("suspend",), ("make way",), False),
        (("make way", "suspend"), (), False),
        (("suspend", "make way"), (), False),
        (("make way",), ("suspend",), False),
    ],
)
def test_who_decides_when_it_goes_on(before: tuple[Request, ...], then: tuple[Request, ...], comes_back: bool) -> None:
    job = Job(*before, "stand", *then)
    job.room.set()
    if comes_back:
        job.joined()
        assert job.point.state is State.RESUMING and job.looks > 0
        return
    assert not job.point._comes_back
    job.do("resume")
    assert job.point.state is State.RESUMING


def test_who_took_the_request_back_is_not_waited_for() -> None:
    """Somebody gives up while the job's state is taken: it stands only as long as there is no room."""
    job = Job()
    given_up: list[Future[Checkpoint]] = []

    def make() -> Checkpoint:
        with pytest.raises(CheckpointError, match="did not come"):
            job.point.ask("suspend", 0)
        given_up.extend(job.point._requests)
        return COPY

    job.do("make way")
    checkpoint = job.point.serve(make, suspend=True)
    assert checkpoint is COPY and len(given_up) == 1
    job.room.set()
    job.point.stand(checkpoint, job.check, job.has_room)
    assert job.point.state is State.RESUMING and given_up[0].result(0) is COPY


def test_suspended_at_the_moment_in_which_it_comes_back() -> None:
    """Who is told that it stands still finds it so."""
    job, behind = Job("make way"), threading.Event()
    told: list[Checkpoint] = []

    def has_room() -> bool:
        told.append(job.point.ask("suspend", 0))
        return True

    def check() -> None:
        if told:
            behind.set()

    job.has_room, job.check = has_room, check  # type: ignore[method-assign]
    job.do("stand")
    assert behind.wait(WAIT)
    assert job.point.state is State.SUSPENDED and told == [COPY]
    job.do("resume")
