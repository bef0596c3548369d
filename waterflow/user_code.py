"""Breaking off code of the user's, which no cancellation reaches: data, objectives, evaluation."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import Counter
from collections.abc import Iterator

from waterflow.errors import JobCancelled


class UserCode:
    """The threads that run one job's or one trial's code. Thread-safe."""

    def __init__(self) -> None:
        self._inside: Counter[int] = Counter()
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
                    _raise_in(thread, None)  # what has not arrived yet

    def break_off(self) -> None:
        """Raise JobCancelled in all of them; a thread that waits in native code gets it when it comes back."""
        with self._lock:
            for thread in self._inside:
                _raise_in(thread, JobCancelled)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
