"""Stopping jobs: several at once, within a time, and when Python ends."""

from __future__ import annotations

import atexit
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

from waterflow import _C
from waterflow.executor.breakable_lock import leave_behind

if TYPE_CHECKING:
    from waterflow.runner import JobRunner

# Ctrl-C returns within two seconds: jobs get this long to come to a group boundary, then to be broken off.
STOP_SECONDS = 0.5
BREAK_OFF_SECONDS = 1.0
ORDER_AGAIN = 0.1


class CanBreakOff(Protocol):
    """Work of a thread."""

    def break_off(self) -> None:
        """Break off the user's code in it."""


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """A thread that comes back from native code while Python shuts down would abort the process."""
    _C.close_engines()
    deadline = time.monotonic() + BREAK_OFF_SECONDS
    for thread in list(_threads):
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(timeout=max(0.0, deadline - time.monotonic()))


def stop_all(runners: Iterable[JobRunner], reason: str) -> None:
    """Stop several jobs; does not wait for their groups to end."""
    for runner in runners:
        thread = threading.Thread(target=runner.stop, args=(reason,), daemon=True)
        _threads.add(thread)
        thread.start()


def join_all(threads: Iterable[threading.Thread | None], seconds: float) -> None:
    """Wait for threads that have been started, at most ``seconds`` for all of them."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        if thread is not None and thread.ident is not None:
            _threads.add(thread)
            thread.join(timeout=max(0.0, deadline - time.monotonic()))


def break_off_all(works: Sequence[CanBreakOff], threads: Iterable[threading.Thread | None], seconds: float) -> None:
    """Break off the user's code on ``threads``, and wait for them, at most ``seconds`` for all.

    The order is given again until they have ended: one that arrives inside of a finalizer, or of code that catches
    everything, is lost, and none is given to a thread that imports or captures. Those that stay are left behind, and nobody
    waits for what they hold.
    """
    waited_for = [thread for thread in threads if thread is not None]
    deadline = time.monotonic() + seconds
    while True:
        for work in works:
            work.break_off()
        left = max(0.0, deadline - time.monotonic())
        join_all(waited_for, min(ORDER_AGAIN, left))
        if not any(thread.is_alive() for thread in waited_for):
            return
        if left <= ORDER_AGAIN:
            break
    for thread in waited_for:
        if thread.is_alive():
            leave_behind(thread)


def let_go(error: BaseException) -> None:
    """Free what the frames behind an error hold (models, batches, the engine); its lines and files stay readable."""
    chain = [error]
    for link in chain:
        traceback.clear_frames(link.__traceback__)
        chain += [e for e in (link.__cause__, link.__context__) if e is not None and e not in chain]
