"""Cancellation: finds out where a thread is, interrupts the user's code in it, and enforces time limits.

The user's code (data, objectives, evaluation) does not poll for cancellation, so an exception is raised in its thread. Our own
code ends at the next boundary, and is interrupted only where it is marked by ``doing``. Code that hangs outside of the
interpreter cannot be interrupted: its thread is abandoned (``left_behind``), and neither lanes nor turns wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import inspect
import linecache
import logging
import math
import os
import sys
import sysconfig
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Protocol, TypeVar

import torch

from waterflow import _C
from waterflow.errors import JobCancelled, JobTimeoutError

logger = logging.getLogger("waterflow")

# Ctrl-C returns within two seconds: jobs have this long to reach a group boundary, and then to end after the exception.
STOP_SECONDS = 0.5
BREAK_OFF_SECONDS = 1.0
ORDER_AGAIN = 0.1

_OURS = str(Path(__file__).parent.parent) + os.sep
_LIBRARIES = (sysconfig.get_paths()["stdlib"] + os.sep, str(Path(torch.__file__).parent) + os.sep)
_INSTALLED = ("site-packages", "dist-packages")
_IMPORTING = "<frozen importlib"  # Python would keep the lock of a module for ever whose import is broken off

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")


# -- where a thread stands

READING = "reading its data"

_doing: dict[CodeType, str] = {}
_interruptible: set[CodeType] = set()
_to_the_end: set[CodeType] = set()


def doing(what: str, interruptible: bool | None = None) -> Callable[[F], F]:
    """Return a decorator that marks a function, or all methods of a class, with ``what`` it does, for error messages.

    If ``interruptible`` is True, a thread may be interrupted in that code although it is ours. If False, nothing that is called
    from there may be interrupted.
    """
    marked = {None: set[CodeType](), True: _interruptible, False: _to_the_end}[interruptible]

    def mark(made: F) -> F:
        for function in vars(made).values() if isinstance(made, type) else [made]:
            if (code := getattr(inspect.unwrap(function), "__code__", None)) is not None:
                _doing[code] = what
                marked.add(code)
        return made

    return mark


def _frames(thread: int) -> list[FrameType]:
    frame = sys._current_frames().get(thread)
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _is_ours(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OURS)


def _is_library(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    if file.startswith("<"):
        return True
    # Installed packages lie below the standard library's folder, and count as the user's code.
    library, ours = _LIBRARIES
    return file.startswith(ours) or (file.startswith(library) and not any(name in file for name in _INSTALLED))


def is_users(frame: FrameType) -> bool:
    """Return True if the frame runs a file of the user's own: no installed package's either."""
    installed = any(name in frame.f_code.co_filename for name in _INSTALLED)
    return not (installed or _is_ours(frame) or _is_library(frame))


def activity(frame: FrameType) -> str | None:
    """Return what the frame is marked to do (``doing``); other code of ours has "", and code that is not ours None."""
    return _doing.get(frame.f_code, "" if _is_ours(frame) else None)


def must_go_on(thread: int) -> bool:
    """Return True if interrupting the thread would harm others: it imports a module, or runs code marked as not interruptible."""
    codes = [frame.f_code for frame in _frames(thread)]
    return any(code in _to_the_end or code.co_filename.startswith(_IMPORTING) for code in codes)


def in_user_code(thread: int) -> bool:
    """Return True if the thread can be interrupted now: it runs the user's code, or a library called from there."""
    if must_go_on(thread):
        return False
    mine = next((frame for frame in _frames(thread) if not _is_library(frame)), None)
    return mine is not None and (not _is_ours(mine) or mine.f_code in _interruptible)


def where(thread: int) -> str:
    """Describe what the thread does, with the line of the user's code that it is in, if there is one."""
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

_begun: Future[None] | None = None
_beginning = threading.Lock()


def begin_import() -> Future[None]:
    """Begin to import, on another thread, what torch imports when a process makes its first optimizer.

    That import takes seconds, in which the job's thread could not be interrupted. An import that is interrupted, by Ctrl-C too,
    leaves modules broken for the process, so it does not run on the calling thread. The future has what the import raises.
    """
    global _begun
    with _beginning:
        if _begun is None or (_begun.done() and _begun.exception() is not None):
            _begun = future = Future[None]()

            def work() -> None:
                try:
                    importlib.import_module("torch._dynamo")
                    future.set_result(None)
                except BaseException as error:
                    future.set_exception(error)

            # Not a daemon: a daemon thread that is inside of a library when Python ends would abort the process.
            threading.Thread(target=work, daemon=False).start()
        return _begun


class UserCode:
    """The threads that run one job's or one trial's code, which can be interrupted together. Thread-safe."""

    def __init__(self) -> None:
        self._inside: Counter[int] = Counter()
        self._ordered: set[int] = set()
        self._over = False
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def here(self) -> Iterator[None]:
        """Register the calling thread inside the context: it can be interrupted there, and no later. May be nested.

        Raises JobCancelled if ``break_off()`` was called before: a thread that begins late would never be interrupted.
        """
        # Not in the constructor: that may run on a thread that others wait for.
        imported = begin_import()
        while not (self._over or imported.done()):
            with time_does_not_count():
                wait([imported], ORDER_AGAIN)  # not registered yet, the thread sees for itself that it is interrupted
        thread = threading.get_ident()
        with self._lock:
            if self._over:
                raise JobCancelled("it was interrupted before it began")
            imported.result()
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
            # If the exception struck on the way in, the generator is closed by the garbage collector, perhaps on another thread.
            if pending and threading.get_ident() == thread:
                _await_order(thread)

    def break_off(self) -> None:
        """Raise JobCancelled in all registered threads; a thread that waits in native code gets it when it returns to Python.

        A thread that must go on (``must_go_on``) is skipped: the caller repeats the call until the threads have ended.
        """
        with self._lock:
            self._over = True
            for thread in self._inside:
                if not must_go_on(thread):
                    self._ordered.add(thread)
                    _raise_in(thread)

    def break_off_user_code(self) -> bool:
        """Raise JobCancelled in the registered threads that run the user's code; return True if there were any."""
        with self._lock:
            threads = [thread for thread in self._inside if in_user_code(thread)]
            for thread in threads:
                self._ordered.add(thread)
                _raise_in(thread)
        return bool(threads)

    def where(self) -> str:
        """Describe what the threads do: of one that runs the user's code, if there is one, with the line."""
        with self._lock:
            threads = sorted(self._inside, key=in_user_code)
        return where(threads[-1]) if threads else "about to begin or to end"


def _raise_in(thread: int) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(JobCancelled))


def _await_order(thread: int) -> None:
    # An exception that is still pending must arrive here, and no later. It is raised again until it arrives, as one that strikes
    # in a finalizer is lost; a second one replaces a pending first. Withdrawing it (with NULL) instead would leave the
    # interpreter checking for it at every turn from then on.
    with contextlib.suppress(JobCancelled):
        while True:
            _raise_in(thread)
            time.sleep(0)


# -- several at once, and when Python ends


class Work(Protocol):
    """A job or a trial that runs on a thread."""

    def stop(self, reason: str) -> None:
        """End the work at its next boundary, and wait for that."""

    def break_off(self) -> None:
        """Interrupt the user's code in it."""


left_behind: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # abandoned: no thread waits for them or their locks
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    # A thread that returns from native code while Python shuts down would abort the process.
    _C.close_engines()
    deadline = time.monotonic() + BREAK_OFF_SECONDS
    for thread in list(_threads):
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(timeout=max(0.0, deadline - time.monotonic()))


def stop_all(runners: Iterable[Work], reason: str) -> None:
    """Call ``stop(reason)`` of each job on a thread of its own; do not wait for them."""
    for runner in runners:
        thread = threading.Thread(target=runner.stop, args=(reason,), daemon=True)
        _threads.add(thread)
        thread.start()


def join_all(threads: Iterable[threading.Thread | None], seconds: float) -> None:
    """Wait for those of ``threads`` that have been started, at most ``seconds`` for all of them together."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        if thread is not None and thread.ident is not None:
            _threads.add(thread)
            thread.join(timeout=max(0.0, deadline - time.monotonic()))


def break_off_all(works: Sequence[Work], threads: Iterable[threading.Thread | None], seconds: float) -> None:
    """Interrupt the user's code on ``threads`` and wait for them, at most ``seconds`` for all together.

    The exception is raised again until they have ended: one that strikes in a finalizer, or in code that catches everything, is
    lost, and a thread that imports or captures is not interrupted. Threads that remain are added to ``left_behind``.
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


# -- waiting for threads that may be abandoned
#
# An exception from another thread may strike at the beginning of any Python function and after any call: also inside of
# threading's events and conditions, which would then stay locked. A plain lock in a ``with`` is released.


class Turn:
    """A lock (``with turn:``) that passes on if the thread that has it ends, or is abandoned (``left_behind``)."""

    def __init__(self) -> None:
        self._guard, self._freed = threading.Lock(), threading.Lock()
        self._holder: threading.Thread | None = None

    @doing("waiting for another job's code", interruptible=True)
    def __enter__(self) -> None:
        try:
            while not self._taken():
                self._freed.acquire(timeout=ORDER_AGAIN)
        except BaseException:  # raised by another thread, perhaps just after the turn was taken
            self.__exit__()
            raise

    def _taken(self) -> bool:
        with self._guard:
            holder = self._holder
            if holder is not None and holder.is_alive() and holder not in left_behind:
                return False
            self._holder = threading.current_thread()
            return True

    def __exit__(self, *error: object) -> None:
        with self._guard:
            if self._holder is not threading.current_thread():
                return  # this thread was abandoned, and another one has the turn
            self._holder = None
            if self._freed.locked():
                self._freed.release()


class LentLane:
    """A lane's task whose ``work`` is done by the thread that made this object, while the lane waits.

    If the work hangs, the lane goes on once that thread is abandoned (``left_behind``). ``lent_to`` has the thread meanwhile.
    """

    def __init__(self, work: Callable[[], object], lent_to: set[int]) -> None:
        self._work, self._lent_to = work, lent_to
        self._thread = threading.current_thread()
        self._here, self._over = threading.Lock(), threading.Lock()
        self._error: BaseException | None = None
        self._here.acquire()
        self._over.acquire()

    def __call__(self) -> None:
        """Wait, on the lane, until the work is done. Raises what it raises, or JobCancelled if its thread is abandoned."""
        self._here.release()
        while not self._over.acquire(timeout=ORDER_AGAIN):
            if self._thread in left_behind:
                raise JobCancelled("its thread did not end and was abandoned")
        error, self._error = self._error, None
        if error is not None:
            raise error

    def use(self, run: _C.StepRun) -> None:
        """Do the work, on the thread that made this object, as soon as ``run`` (the run of this task) has a lane."""
        try:
            while not self._here.acquire(timeout=ORDER_AGAIN):
                if run.done:  # it was cancelled
                    return
            self._lent_to.add(threading.get_ident())
            try:
                self._work()
            except BaseException as error:
                self._error = error
            finally:
                self._lent_to.discard(threading.get_ident())
        finally:
            self._over.release()


# -- time limits

LOOK_AGAIN = 0.1  # seconds after which a limit, which may have changed, is read again
_REMEDY = "Correct the code that hangs there, or raise the limit; None is no limit"
_local = threading.local()


def has_limit() -> bool:
    """Return True if the calling thread's work has a time limit."""
    return getattr(_local, "limit", None) is not None


def time_does_not_count() -> contextlib.AbstractContextManager[None]:
    """Return a context in which the time limit of the calling thread, if it has one, is paused."""
    return _local.limit.paused() if has_limit() else contextlib.nullcontext()


def limited(
    seconds: float | None,
    who: str,
    setting: str,
    work: Callable[[], T],
    code: UserCode,
    stop: Callable[[str], None],
    progress: Callable[[], str] = str,
    late: Callable[[T, JobTimeoutError], T] | None = None,
    before: float = 0.0,
) -> T:
    """Run ``work`` on the calling thread within ``seconds`` and return its result; of nested limits the earliest counts.

    ``before`` of the seconds have passed, in runs before.

    When the time is over, ``stop`` asks the work to end at its next boundary; after that its user code is interrupted, once. If
    it hangs outside of the interpreter, or catches all errors, a warning names its line, and the call waits for it.

    Raises JobTimeoutError after the limit, in the place of the work's result or error. With ``late``, the call returns
    ``late(result, error)`` for work that ended late without an error of its own.
    """
    if seconds is None:
        return work()
    told = f"{who} ran longer than its limit {setting}={seconds:g} s"
    if has_limit():
        _local.limit.shorten(seconds, told, before)
        return work()
    return _Limit(seconds, told, code, stop, progress, before).run(work, late)


class _Limit:
    def __init__(
        self, seconds: float, told: str, code: UserCode, stop: Callable[[str], None], progress: Callable[[], str], before: float
    ) -> None:
        self._code, self._stop, self._progress = code, stop, progress
        self._done = threading.Event()
        self._error: JobTimeoutError | None = None  # once the limit was passed
        self._deadline = math.inf
        self.shorten(seconds, told, before)

    def shorten(self, seconds: float, told: str, before: float) -> None:
        # Of nested limits the one that ends first stays, also after the inner work has ended.
        began = time.monotonic() - before
        if began + seconds < self._deadline:
            self._told, self._began, self._deadline = told, began, began + seconds

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        began, deadline = time.monotonic(), self._deadline
        self._deadline = math.inf
        try:
            yield
        finally:
            self._deadline = deadline + time.monotonic() - began

    def run(self, work: Callable[[], T], late: Callable[[T, JobTimeoutError], T] | None) -> T:
        me = threading.current_thread()
        watch = threading.Thread(target=self._watch, args=(me,), daemon=True)
        watch.start()
        try:
            _local.limit = self
            made = work()
        except Exception as error:
            self._end(watch)
            if self._error is None:
                raise
            let_go(error)
            raise self._error from None
        finally:
            self._end(watch)
            _local.limit = None
            left_behind.discard(me)
        if self._error is None:
            return made
        if late is None:
            raise self._error
        return late(made, self._error)

    def _end(self, watch: threading.Thread) -> None:
        self._done.set()
        watch.join()

    def _watch(self, thread: threading.Thread) -> None:
        while (left := self._deadline - time.monotonic()) > 0:
            if self._done.wait(min(left, LOOK_AGAIN)):
                return
        ran, where = time.monotonic() - self._began, self._code.where()
        said = f"{self._told} ({ran:.2f} s{self._progress()}): it was {where}."
        self._error = JobTimeoutError(f"{said} {_REMEDY}")
        threading.Thread(target=self._stop, args=("over its time limit",), daemon=True).start()
        if self._done.wait(STOP_SECONDS):
            return
        until, ordered = time.monotonic() + BREAK_OFF_SECONDS, False
        while not self._done.wait(ORDER_AGAIN):
            ordered = ordered or self._code.break_off_user_code()
            if time.monotonic() > until:
                left_behind.add(thread)
                why = "This code could not be interrupted, as it waits outside of the interpreter or catches all errors"
                logger.warning("%s %s; waterflow waits for it. Ctrl-C ends everything.", said, why)
                return


def let_go(error: BaseException) -> None:
    """Release the objects that the frames of an error refer to (models, batches, the engine); the traceback stays readable."""
    chain = [error]
    for link in chain:
        traceback.clear_frames(link.__traceback__)
        chain += [e for e in (link.__cause__, link.__context__) if e is not None and e not in chain]
