"""The virtual clock of deterministic studies: orders events by the steps that workers have begun, not by time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any


class _Belonging(threading.local):
    engine: Any = None
    worker: int | None = None
    policy: Any = None  # of the steps that it makes
    before_step: Callable[[], None] | None = None  # called before each step; it may wait


here = _Belonging()


def current_worker() -> int | None:
    """Return the calling thread's number in its engine's virtual clock, or None."""
    return here.worker


class VirtualClock:
    """Lets several workers act on shared state in the order of their virtual times.

    Each worker's time counts the training steps that it has begun. An event of a worker may happen once every other
    worker has come so far that its own next event must lie later; ties go to the lower number (conservative
    discrete-event simulation, Chandy and Misra 1979). The same work then gives the same order of events, however
    fast each worker runs. Thread-safe.
    """

    def __init__(self) -> None:
        self._times: dict[int, int] = {}
        self._suspended: set[int] = set()
        self._holder: int | None = None
        self._depth = 0
        self._waiting = 0
        # Entered directly: an exception from outside (Ctrl-C, breaking off) may strike inside of Condition.__enter__, which
        # is Python code, and would leave the lock behind.
        self._guard = threading.RLock()
        self._changed = threading.Condition(self._guard)
        self._broken = False

    def join(self, worker: int, time: int) -> None:
        """Add ``worker`` at virtual time ``time``."""
        with self._guard:
            self._times[worker] = time

    def advance(self, worker: int) -> None:
        """Count one more step that ``worker`` has begun; none of one that has left."""
        with self._guard:
            if worker in self._times:
                self._times[worker] += 1
            if self._waiting:
                self._changed.notify_all()

    def knows(self, worker: int) -> bool:
        """Return True if ``worker`` has joined, and has not left."""
        with self._guard:
            return worker in self._times

    def latest(self) -> int:
        """Return the virtual time of the worker that has come furthest."""
        with self._guard:
            return max(self._times.values(), default=0)

    def time(self, worker: int) -> int:
        """Return the virtual time of ``worker``: the steps that it has begun, plus the time at which it joined."""
        with self._guard:
            return self._times[worker]

    @contextlib.contextmanager
    def turn(self, worker: int) -> Iterator[None]:
        """Wait for the turn of ``worker``, and keep all other workers' events back inside the context. May be nested."""
        with self._guard:
            self._waiting += 1
            try:
                while not self._may_act(worker):
                    self._changed.wait()
            finally:
                self._waiting -= 1
            self._holder = worker
            self._depth += 1
        try:
            yield
        finally:
            with self._guard:
                self._depth -= 1
                if self._depth == 0:
                    self._holder = None
                self._changed.notify_all()

    def _may_act(self, worker: int) -> bool:
        if self._broken or self._holder == worker:
            return True
        if self._holder is not None:
            return False
        if worker in self._suspended:
            return False
        mine = (self._times.get(worker, 0), worker)
        return all((t, w) >= mine for w, t in self._times.items() if w not in self._suspended)

    def suspend(self, worker: int) -> bool:
        """Let the other workers go on without ``worker``, which waits for one of them to leave.

        Its next turn comes after that. Returns False if the clock was opened, so that there is nothing to wait for.
        """
        with self._guard:
            self._suspended.add(worker)
            self._changed.notify_all()
            return not self._broken

    def leave(self, worker: int) -> None:
        """Remove ``worker``; suspended workers continue at its virtual time, if theirs is earlier."""
        with self._guard:
            ended = self._times.pop(worker, 0)
            for other in self._suspended:
                self._times[other] = max(self._times[other], ended)
            self._suspended.clear()
            self._changed.notify_all()

    def open(self) -> None:
        """Give up the order of events, as the study is being interrupted: no worker waits any more."""
        with self._guard:
            self._broken = True
            self._changed.notify_all()
