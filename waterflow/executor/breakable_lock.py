"""A lock for code of the user's: its waiters can be broken off, and it outlives a holder that never gives it back."""

from __future__ import annotations

import threading

from waterflow.executor.cancel import doing, left_behind

_LOOK_SECONDS = 0.1  # an exception that another thread raises here arrives between two looks


class BreakableLock:
    """``with lock:``, on one thread at a time.

    A holder that was left behind, or that ended without giving it back as it was broken off at that very moment, holds it
    no longer: whoever waits goes on.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # which knows whether it is the calling thread's
        self._holder: threading.Thread | None = None
        self._guard = threading.Lock()

    # An exception from elsewhere arrives behind a call, at the beginning of a function of Python's or on the way back in a
    # loop, and nowhere else: what is done between two of these is done as a whole.

    @doing("waiting for another job's code", interruptible=True)
    def __enter__(self) -> None:
        me = threading.current_thread()
        while True:
            lock = self._lock
            try:
                if lock.acquire(timeout=_LOOK_SECONDS):
                    if lock is self._lock:
                        self._holder = me
                        return
                    lock.release()
            except BaseException:  # it may have arrived when the lock had just been taken
                try:  # noqa: SIM105
                    lock.release()
                except RuntimeError:  # it is not this thread's
                    pass
                raise
            self._look_after(lock)

    def __exit__(self, *error: object) -> None:
        me, lock = threading.current_thread(), self._lock
        try:  # noqa: SIM105
            lock.release()
        except RuntimeError:  # this thread was left behind, and others went on
            pass
        if self._holder is me:
            self._holder = None

    def _look_after(self, lock: threading.RLock) -> None:
        holder = self._holder
        if holder is None or (holder.is_alive() and holder not in left_behind):
            return
        with self._guard:
            if self._lock is lock and self._holder is holder:
                self._lock, self._holder = threading.RLock(), None
