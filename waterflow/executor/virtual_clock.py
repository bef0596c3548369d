"""Virtual steps: an order of events that follows the work done, never the wall clock."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class _Belonging(threading.local):
    engine: Any = None
    worker: int | None = None


here = _Belonging()


def current_worker() -> int | None:
    """The number under which the calling thread's work is known to its engine's virtual clock."""
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
        """A worker begins at virtual time ``time``."""
        with self._guard:
            self._times[worker] = time

    def advance(self, worker: int) -> None:
        """The worker begins its next step."""
        with self._guard:
            self._times[worker] += 1
            if self._waiting:
                self._changed.notify_all()

    def time(self, worker: int) -> int:
        """Steps begun by the worker, from the beginning of the study."""
        with self._guard:
            return self._times[worker]

    @contextlib.contextmanager
    def turn(self, worker: int) -> Iterator[None]:
        """Wait until it is the worker's turn, and hold everyone else's events back meanwhile. May be nested."""
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
        """The worker waits for another to leave: until then its time does not hold anybody up.

        Its next turn comes after that. False where all order was given up, and turns come at once.
        """
        with self._guard:
            self._suspended.add(worker)
            self._changed.notify_all()
            return not self._broken

    def leave(self, worker: int) -> None:
        """The worker is done; whoever is suspended goes on from this moment."""
        with self._guard:
            ended = self._times.pop(worker, 0)
            for other in self._suspended:
                self._times[other] = max(self._times[other], ended)
            self._suspended.clear()
            self._changed.notify_all()

    def open(self) -> None:
        """Give up all order: nobody waits any more (the study is being interrupted)."""
        with self._guard:
            self._broken = True
            self._changed.notify_all()
