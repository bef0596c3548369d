"""Breaking off code of the user's, which no cancellation reaches: data, objectives, evaluation."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from waterflow.errors import JobCancelled
from waterflow.stacks import in_user_code, must_go_on, where

_imported = threading.Event()


def import_ahead() -> None:
    """Import what torch imports when a process makes its first optimizer: it takes seconds, in which no order arrives.

    Nor does Ctrl-C arrive in it, as modules whose imports end in the middle are broken for the process: another thread imports.
    """
    if _imported.is_set():
        return
    failed: list[BaseException] = []

    def work() -> None:
        try:
            importlib.import_module("torch._dynamo")
            _imported.set()
        except BaseException as error:
            failed.append(error)
        over.set()

    over = threading.Event()
    # Not a daemon: one that is inside of a library when Python ends would abort the process.
    threading.Thread(target=work, daemon=False).start()
    over.wait()
    if failed:
        raise failed[0]


class UserCode:
    """The threads that run one job's or one trial's code. Thread-safe."""

    def __init__(self) -> None:
        self._inside: Counter[int] = Counter()
        self._ordered: set[int] = set()
        self._over = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """The calling thread can be broken off inside, and no later. May be nested.

        Raises JobCancelled where that has happened already: a thread that begins late would be left behind in it.
        """
        import_ahead()  # here, and not where this object is made: that may be a thread which others hear from
        thread = threading.get_ident()
        with self._lock:
            if self._over:
                raise JobCancelled("it was broken off before it began")
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
            # Where an order arrived on the way in, this runs when the collector comes to it: perhaps on a thread that has none.
            if pending and threading.get_ident() == thread:
                _await_order(thread)

    def break_off(self) -> None:
        """Raise JobCancelled in all of them; a thread that waits in native code gets it when it comes back.

        A thread that must go on is passed over. Whoever waits for it gives the order again.
        """
        with self._lock:
            self._over = True
            for thread in self._inside:
                if not must_go_on(thread):
                    self._ordered.add(thread)
                    _raise_in(thread)

    def break_off_user_code(self) -> None:
        """The same for those of them that are in code of the user's, and not in ours: others train on in it."""
        with self._lock:
            for thread in self._inside:
                if in_user_code(thread):
                    self._ordered.add(thread)
                    _raise_in(thread)

    def where(self) -> str:
        """What its threads do; where one of them is in code of the user's, the line."""
        with self._lock:
            threads = sorted(self._inside, key=in_user_code)
        return where(threads[-1]) if threads else "about to begin or to end"


def _raise_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(JobCancelled))


def _await_order(thread: int) -> None:
    """Let an order that may still be on its way arrive here, and no later.

    It is given again, which replaces one that is pending, until it arrives: one that arrives in a finalizer is lost.
    Withdrawing it (with NULL) would leave the interpreter looking for it at every turn from then on.
    """
    with contextlib.suppress(JobCancelled):
        while True:
            _raise_in(thread)
            time.sleep(0)


@contextlib.contextmanager
def remembered_interrupts() -> Iterator[Callable[[], None]]:
    """Within, a Ctrl-C whose KeyboardInterrupt is swallowed on the way (by a finalizer, say) is not lost.

    Yields a function that raises it again, to be called now and then on the same thread.
    """
    mine = threading.current_thread() is threading.main_thread()
    if not mine or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: None
        return
    pressed: list[int] = []

    def remember(number: int, frame: Any) -> None:
        pressed.append(number)
        signal.default_int_handler(number, frame)

    def check() -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, remember)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
