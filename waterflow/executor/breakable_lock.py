"""A lock for code of the user's, whose waiters can be broken off."""

from __future__ import annotations

import threading

_LOOK_SECONDS = 0.1  # an exception that another thread raises here arrives between two looks


class BreakableLock:
    """``with lock:``, on one thread at a time. Not reentrant."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        while not self._lock.acquire(timeout=_LOOK_SECONDS):
            pass

    def __exit__(self, *error: object) -> None:
        self._lock.release()
