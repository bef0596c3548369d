"""Safepoint: between two steps a running job serves other threads: it is copied, or suspended until it resumes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from enum import Enum
from typing import Literal

from waterflow import _C
from waterflow.errors import CheckpointError
from waterflow.training.checkpoint import Checkpoint

POLL_SECONDS = 0.05
# Copy the job's state; suspend it until resume() is called; suspend it until there is room for it again.
Request = Literal["copy", "suspend", "make way"]

# REQUESTED: a request waits for the end of the job's step. SUSPENDED: the job's state is in host memory. RESUMING: the job takes
# its state back.
State = Enum("State", "RUNNING REQUESTED SUSPENDED RESUMING ENDED")


class JobEnded(CheckpointError):
    """The job has ended, so there is no state between two steps any more."""


class Safepoint:
    """Requests of other threads, and the job's own thread that serves them. Thread-safe.

    Only the job's thread calls ``serve``, ``stand``, ``stand_by``, ``go_on`` and ``end``.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._lock = threading.Lock()  # not held while a future is settled: its callbacks take the engine's locks
        self._changed = threading.Condition(self._lock)
        self._state = State.RUNNING
        self._requests: dict[Future[Checkpoint], Request] = {}
        self._answer: Checkpoint | Exception | None = None  # for requests of a job that is suspended or has ended
        self.flag = _C.Flag()  # raised for the job to look at its requests, and whether it is held or to end
        self._comes_back = False  # without resume(): all requests wanted only its memory

    @property
    def state(self) -> State:
        """The job's state now."""
        return State.REQUESTED if self._requests and self._state is State.RUNNING else self._state

    def request(self, what: Request) -> Future[Checkpoint]:
        """Request ``what`` at the end of the job's step. Returns a future with the job's state, or a CheckpointError."""
        made: Future[Checkpoint] = Future()
        with self._lock:
            self._requests[made], answer = what, self._answer
            self._comes_back &= what != "suspend"
            self.flag.raised = True
            self._changed.notify_all()
        if answer is not None:
            self._settle([made], answer)
        return made

    def ask(self, what: Request, timeout: float | None) -> Checkpoint:
        """Request ``what`` and return the state. Raises CheckpointError, and withdraws the request, after ``timeout`` seconds."""
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
        """Return the state from ``make`` if a copy is requested, or with ``suspend`` a suspension; else None.

        Requests for a copy are answered here, the others in ``stand``. An error of ``make`` is raised in the requesters.
        """
        with self._lock:
            asked = [made for made, what in self._requests.items() if (what != "copy") == suspend]
        if not asked:
            return None
        try:
            # Outside the lock: it copies the whole state, and other threads must be able to request meanwhile.
            checkpoint = make()
        except Exception as error:
            self._settle(asked, error)
            return None
        if not suspend:
            self._settle(asked, checkpoint)
        return checkpoint

    def stand(self, checkpoint: Checkpoint, check: Callable[[], None], has_room: Callable[[], bool]) -> None:
        """Wait until ``resume()``, or, if requests wanted only memory, until ``has_room()`` returns True.

        ``check`` is called meanwhile; an exception from it ends the wait.
        """
        self._settle(self._requests, checkpoint, State.SUSPENDED)
        room = False
        while True:
            with self._lock:
                if room and self._comes_back:
                    self._state, self._answer = State.RESUMING, None
                if self._state is not State.RESUMING:
                    self._changed.wait(POLL_SECONDS)  # or until something has changed
                if self._state is State.RESUMING:
                    return
            check()
            # Outside the lock, as it takes the engine's locks. A suspend() since then clears _comes_back, so it is
            # checked again above.
            room = self._comes_back and has_room()

    def stand_by(self, check: Callable[[], None], held: Callable[[], bool]) -> None:
        """Wait while ``held()`` returns True, or until there is a request; ``check`` is as in ``stand``."""
        while True:
            with self._lock:
                if self._changed.wait_for(lambda: self._requests or not held(), POLL_SECONDS):
                    return
            check()

    def look_again(self) -> None:
        """Let the job look whether it is held, or to end."""
        with self._lock:
            self.flag.raised = True
            self._changed.notify_all()

    def resume(self) -> None:
        """Resume a suspended job. Raises CheckpointError if it is not suspended."""
        with self._lock:
            if self._state is not State.SUSPENDED:
                raise CheckpointError(f"job {self._job!r} is not suspended; only a suspended job can be resumed")
            self._state, self._answer = State.RESUMING, None
            self._changed.notify_all()

    def go_on(self) -> None:
        """Mark the job as running: it has its state back."""
        self._state = State.RUNNING

    def end(self) -> None:
        """Fail all requests, now and later: the job comes to no safepoint any more."""
        ended = JobEnded(f"job {self._job!r} has ended: its result has what it trained")
        self._settle(self._requests, ended, State.ENDED)

    def _settle(self, asked: Iterable[Future[Checkpoint]], answer: Checkpoint | Exception, state: State | None = None) -> None:
        with self._lock:
            # From here on later requests get the same answer at once.
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
