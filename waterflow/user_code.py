"""Breaking off code of the user's, which no cancellation reaches: data, objectives, evaluation."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections import Counter
from collections.abc import Iterator

from waterflow.errors import JobCancelled


class UserCode:
    """The threads that run one job's or one trial's code. Thread-safe."""

    def __init__(self) -> None:
        self._inside: Counter[int] = Counter()
        self._ordered: set[int] = set()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """The calling thread can be broken off inside, and no later. May be nested."""
        thread = threading.get_ident()
        with self._lock:
            self._inside[thread] += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside[thread] -= 1
                if not self._inside[thread]:
                    del self._inside[thread]
                pending = thread not in self._inside and thread in self._ordered
                self._ordered -= {thread} if pending else set()
            if pending:
                _await_order(thread)

    def break_off(self) -> None:
        """Raise JobCancelled in all of them; a thread that waits in native code gets it when it comes back."""
        with self._lock:
            for thread in self._inside:
                self._ordered.add(thread)
                _raise_in(thread)


def _raise_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(JobCancelled))


def _await_order(thread: int) -> None:
    """Let an order that may still be on its way arrive here, and no later.

    It is given once more, which replaces one that is pending. Withdrawing it (with NULL) would leave the interpreter
    looking for it at every turn from then on.
    """
    with contextlib.suppress(JobCancelled):
        _raise_in(thread)
        while True:
            time.sleep(0)
