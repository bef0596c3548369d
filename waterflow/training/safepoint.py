"""Between two of its steps a running job does what other threads ask: it is copied, or stands still until it is to go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from enum import Enum
from typing import Literal

from waterflow.errors import CheckpointError
from waterflow.training.checkpoint import Checkpoint

POLL_SECONDS = 0.05
# To copy the job's state; to stand still until somebody resumes it; to stand still until there is room for it again.
Request = Literal["copy", "suspend", "make way"]

# A job is requested while something is asked of it that waits for the end of its step, suspended while it stands still with its
# state in host memory, and resuming while it takes that back.
State = Enum("State", "RUNNING REQUESTED SUSPENDED RESUMING ENDED")


class JobEnded(CheckpointError):
    """There is no state between two steps any more."""


class Safepoint:
    """Requests of other threads, and the job's own thread that serves them. Thread-safe.

    The job's thread alone calls ``serve``, ``stand``, ``go_on`` and ``end``.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._lock = threading.Lock()  # not held while a future is settled: its callbacks take locks of the engine's
        self._changed = threading.Condition(self._lock)
        self._state = State.RUNNING
        self._requests: dict[Future[Checkpoint], Request] = {}
        self._answer: Checkpoint | Exception | None = None  # to all who ask of a job that stands still, or has ended
        self._comes_back = False  # a suspended job, by itself: all who asked for that wanted room

    @property
    def state(self) -> State:
        """Where the job is now."""
        return State.REQUESTED if self._requests and self._state is State.RUNNING else self._state

    def request(self, what: Request) -> Future[Checkpoint]:
        """Ask for something at the end of the job's step, without waiting: for its state then, or a CheckpointError."""
        made: Future[Checkpoint] = Future()
        with self._lock:
            self._requests[made], answer = what, self._answer
            self._comes_back &= what != "suspend"
        if answer is not None:
            self._settle([made], answer)
        return made

    def ask(self, what: Request, timeout: float | None) -> Checkpoint:
        """The same, and wait for it. Raises CheckpointError where that takes longer, in seconds, and takes the request back."""
        made = self.request(what)
        with self._lock:
            settled = self._changed.wait_for(lambda: made not in self._requests, timeout)
            self._requests.pop(made, None)
        if settled:
            return made.result()
        raise CheckpointError(
            f"job {self._job!r} did not come to the end of a step within {timeout} s; wait longer, or ask again"
        )

    def serve(self, make: Callable[[], Checkpoint], suspend: bool) -> Checkpoint | None:
        """Return what ``make`` makes, where the job is asked for a copy, or with ``suspend`` to stand still.

        Those who asked for a copy are given it; the others when the job stands. An error of ``make`` is theirs.
        """
        with self._lock:
            asked = [made for made, what in self._requests.items() if (what != "copy") == suspend]
        if not asked:
            return None
        try:
            checkpoint = make()
        except Exception as error:
            self._settle(asked, error)
            return None
        if not suspend:
            self._settle(asked, checkpoint)
        return checkpoint

    def stand(self, checkpoint: Checkpoint, check: Callable[[], None], has_room: Callable[[], bool]) -> None:
        """Stand still until somebody resumes the job, or ``has_room`` where it only made room. ``check`` may raise to end it."""
        self._settle(self._requests, checkpoint, State.SUSPENDED)
        room = False
        while True:
            with self._lock:
                if room and self._comes_back:
                    self._state, self._answer = State.RESUMING, None
                if self._changed.wait_for(lambda: self._state is State.RESUMING, POLL_SECONDS):
                    return
            check()
            room = self._comes_back and has_room()

    def resume(self) -> None:
        """Let a suspended job go on. Raises CheckpointError for one that is not suspended."""
        with self._lock:
            if self._state is not State.SUSPENDED:
                raise CheckpointError(f"job {self._job!r} is not suspended; only a suspended job can be resumed")
            self._state, self._answer = State.RESUMING, None
            self._changed.notify_all()

    def go_on(self) -> None:
        """The job has its state back."""
        self._state = State.RUNNING

    def end(self) -> None:
        """The job comes to no safepoint any more."""
        ended = JobEnded(f"job {self._job!r} has ended: its result has what it trained")
        self._settle(self._requests, ended, State.ENDED)

    def _settle(
        self, asked: Iterable[Future[Checkpoint]], answer: Checkpoint | Exception, state: State | None = None
    ) -> None:
        """Answer those of them that still wait; from then on the job is in ``state``, where all have the same answer."""
        with self._lock:
            if state is not None:
                self._state, self._answer = state, answer
                self._comes_back = "suspend" not in self._requests.values()
            waiting = [made for made in list(asked) if self._requests.pop(made, None) is not None]
            self._changed.notify_all()
        for made in waiting:
            if isinstance(answer, Exception):
                made.set_exception(answer)
            else:
                made.set_result(answer)
