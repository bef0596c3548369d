"""Ending what runs: where a thread stands, breaking off code of the user's in it, and waiting for threads within a time.

Code of the user's hears of no cancellation: data, objectives, evaluation. Our own comes to a boundary, and is not broken off
but where it says so itself, by ``doing``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import inspect
import linecache
import os
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

import torch

from waterflow import _C, partition
from waterflow.errors import JobCancelled

# Ctrl-C returns within two seconds: jobs get this long to come to a group boundary, then to be broken off.
STOP_SECONDS = 0.5
BREAK_OFF_SECONDS = 1.0
ORDER_AGAIN = 0.1

_OURS = str(Path(__file__).parent.parent) + os.sep
_LIBRARIES = (sysconfig.get_paths()["stdlib"] + os.sep, str(Path(torch.__file__).parent) + os.sep)
_INSTALLED = ("site-packages", "dist-packages")
# Python would keep the lock of a module for ever whose import is broken off; an exception that comes out of some of the
# Python functions that torch calls in a trace ends the process.
_TO_THE_END = ("<frozen importlib", str(Path(partition.__file__).parent) + os.sep)

F = TypeVar("F", bound=Callable[..., Any])


# -- where a thread stands

_doing: dict[CodeType, str] = {}
_interruptible: set[CodeType] = set()


def doing(what: str, interruptible: bool = False) -> Callable[[F], F]:
    """A decorator: a thread in the function, or in a method of the class, does ``what``.

    If ``interruptible``, it can be broken off there, too, where it waits for a library or for code of the user's.
    """

    def mark(made: F) -> F:
        for function in vars(made).values() if isinstance(made, type) else [made]:
            if (code := getattr(inspect.unwrap(function), "__code__", None)) is not None:
                _doing[code] = what
                _interruptible.update([code] if interruptible else [])
        return made

    return mark


def _frames(thread: int) -> list[FrameType]:
    """The innermost first."""
    frame = sys._current_frames().get(thread)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def _is_library(frame: FrameType) -> bool:
    """Python's own, or torch's."""
    file = frame.f_code.co_filename
    if file.startswith("<"):
        return True
    library, ours = _LIBRARIES
    return file.startswith(ours) or (file.startswith(library) and not any(name in file for name in _INSTALLED))


def must_go_on(thread: int) -> bool:
    """Whether breaking the thread off would harm others: it imports, or it captures a step."""
    return any(frame.f_code.co_filename.startswith(_TO_THE_END) for frame in _frames(thread))


def in_user_code(thread: int) -> bool:
    """Whether the thread can be broken off where it is: in code of the user's, or in a library that this called.

    Not where it must go on.
    """
    if must_go_on(thread):
        return False
    mine = next((frame for frame in _frames(thread) if not _is_library(frame)), None)
    return mine is not None and (not _is_ours(mine) or mine.f_code in _interruptible)


def where(thread: int) -> str:
    """What the thread does, with the line of the user's code, where there is one."""
    frames = _frames(thread)
    what = next((_doing[frame.f_code] for frame in frames if frame.f_code in _doing), None)
    if not in_user_code(thread):
        return what or "waiting for its turn, or for memory"
    mine = next((frame for frame in frames if not _is_ours(frame) and not _is_library(frame)), None)
    if mine is None:
        return what or "in code of a library"
    file, line = mine.f_code.co_filename, mine.f_lineno
    text = linecache.getline(file, line).strip()
    return f"{what or 'in its own code'}, at {file}:{line} in {mine.f_code.co_name}" + (f": {text}" if text else "")


# -- breaking off

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

    def break_off_user_code(self) -> bool:
        """The same for those of them that are in code of the user's, and not in ours: others train on in it. Whether there were any."""
        with self._lock:
            threads = [thread for thread in self._inside if in_user_code(thread)]
            for thread in threads:
                self._ordered.add(thread)
                _raise_in(thread)
        return bool(threads)

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


# -- several at once, and when Python ends


class Work(Protocol):
    """What a thread does: a job, or a trial."""

    def stop(self, reason: str) -> None:
        """End it at its next boundary, and wait for that."""

    def break_off(self) -> None:
        """Break off the user's code in it."""


left_behind: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # nobody waits for them, nor for what they hold
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """A thread that comes back from native code while Python shuts down would abort the process."""
    _C.close_engines()
    deadline = time.monotonic() + BREAK_OFF_SECONDS
    for thread in list(_threads):
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(timeout=max(0.0, deadline - time.monotonic()))


def stop_all(runners: Iterable[Work], reason: str) -> None:
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


def break_off_all(works: Sequence[Work], threads: Iterable[threading.Thread | None], seconds: float) -> None:
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
            left_behind.add(thread)


def let_go(error: BaseException) -> None:
    """Free what the frames behind an error hold (models, batches, the engine); its lines and files stay readable."""
    chain = [error]
    for link in chain:
        traceback.clear_frames(link.__traceback__)
        chain += [e for e in (link.__cause__, link.__context__) if e is not None and e not in chain]
