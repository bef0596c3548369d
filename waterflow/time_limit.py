"""A limit for the wall time of a job, or of a trial: what hangs ends, and the others never notice."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol, TypeVar

from waterflow.errors import JobTimeoutError
from waterflow.executor.cancel import BREAK_OFF_SECONDS, STOP_SECONDS, UserCode, left_behind, let_go
from waterflow.executor.user_thread import UserThread
from waterflow.job import Job, JobResult

logger = logging.getLogger("waterflow")
T = TypeVar("T")

LOOK_AGAIN = 0.1  # seconds, between two looks at a limit that may have changed
_REMEDY = "Mend what hangs there, or raise the limit; None is no limit"
_local = threading.local()


def current_limit() -> TimeLimit | None:
    """The limit under which the calling thread works."""
    return getattr(_local, "limit", None)


class TimeLimit:
    """Ends one job or trial, which runs on the calling thread, when its time is over.

    It is asked to stop at its next boundary; then its user code (``code``) is broken off, once. Where it hangs outside of the
    interpreter, or catches all errors, it is told in which line, and its thread is waited for. A lane that runs code of it is
    not.
    """

    def __init__(
        self, seconds: float, who: str, setting: str, code: UserCode, stop: Callable[[str], None],
        progress: Callable[[], str] = str,
    ) -> None:  # fmt: skip
        self._who, self._code, self._stop, self._progress = who, code, stop, progress
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._deadline = self._began + seconds
        self._told = f"{setting}={seconds:g} s"
        self._paused = 0
        self._pause_began = 0.0
        self._done = threading.Event()
        self.error: JobTimeoutError | None = None  # once the limit was passed

    def shorten(self, seconds: float, who: str, setting: str) -> None:
        """From now on at most so many seconds, for a part of the same work."""
        with self._lock:
            if (deadline := time.monotonic() + seconds) < self._deadline:
                self._began, self._deadline = time.monotonic(), deadline
                self._who, self._told = who, f"{setting}={seconds:g} s"

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Time inside does not count. May be nested."""
        with self._lock:
            self._paused += 1
            if self._paused == 1:
                self._pause_began = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                self._paused -= 1
                if self._paused == 0:
                    self._deadline += time.monotonic() - self._pause_began

    def run(self, work: Callable[[], T]) -> T:
        """What ``work`` returns. Behind the limit ``error`` is raised in the place of that, and of what ``work`` raises.

        A JobResult is returned; see ``applied``.
        """
        me, outer = threading.current_thread(), current_limit()
        beside = UserThread(self._code.here)
        watch = threading.Thread(target=self._watch, args=(me, beside), daemon=True)
        watch.start()
        try:
            _local.limit = self
            with beside.here():
                made = work()
        except Exception as error:
            self._end(watch)
            if self.error is None:
                raise
            let_go(error)
            raise self.error from None
        finally:
            self._end(watch)
            _local.limit = outer
            left_behind.discard(me)
        if self.error is not None and not isinstance(made, JobResult):
            raise self.error
        return made

    def applied(self, result: JobResult) -> JobResult:
        """The result of a job that ended at the limit: it failed, of that."""
        if self.error is None or result.status == "completed" or result.error is self.error:
            return result
        told = "".join(traceback.format_exception(self.error))
        return replace(result, status="failed", error=self.error, traceback=told)

    def _left(self) -> float:
        with self._lock:
            return LOOK_AGAIN if self._paused else self._deadline - time.monotonic()

    def _end(self, watch: threading.Thread) -> None:
        self._done.set()
        watch.join()

    def _watch(self, thread: threading.Thread, beside: UserThread) -> None:
        while not self._done.wait(timeout=min(max(self._left(), 0.0), LOOK_AGAIN)):
            if self._left() <= 0:
                return self._stopped(thread, beside)

    def _stopped(self, thread: threading.Thread, beside: UserThread) -> None:
        where, progress = self._code.where(), self._progress()
        with self._lock:
            who, told, ran = self._who, self._told, time.monotonic() - self._began
        said = f"{who} ran longer than its limit {told} ({ran:.2f} s{progress}): it was {where}."
        self.error = JobTimeoutError(f"{said} {_REMEDY}")
        threading.Thread(target=self._stop, args=(f"over its limit {told}",), daemon=True).start()
        if self._done.wait(STOP_SECONDS):
            return
        until, ordered = time.monotonic() + BREAK_OFF_SECONDS, False
        while not self._done.wait(STOP_SECONDS / 10):
            ordered = ordered or self._code.break_off_user_code()
            if time.monotonic() > until:
                break
        else:
            return
        said += " This code could not be broken off, as it waits outside of the interpreter or catches all errors: "
        if beside.give_up():
            said += "its thread was left behind, and keeps what it holds of memory until it comes back, or the process ends."
            self.error = JobTimeoutError(f"{said} {_REMEDY}")
        else:
            left_behind.add(thread)
            said += "it is waited for. Ctrl-C ends everything."
        logger.warning("%s", said)


class _Runner(Protocol):
    """What is asked of a ``JobRunner`` with a time limit."""

    job: Job

    @property
    def progress(self) -> str:
        """Where it is, in words."""

    def stop(self, reason: str = "stopped") -> None:
        """End it at its next boundary."""


def run_job(runner: _Runner, work: Callable[[], JobResult], code: UserCode) -> JobResult:
    """What ``work`` returns, which trains a job, within its ``timeout``; within a trial's limit that is the shorter one."""
    seconds, who, setting = runner.job.timeout, f"job {runner.job.name!r}", "Job.timeout"
    if seconds is None:
        return work()
    if (outer := current_limit()) is not None:
        outer.shorten(seconds, who, setting)
        return work()
    limit = TimeLimit(seconds, who, setting, code, runner.stop, lambda: f", {runner.progress}")
    return limit.applied(limit.run(work))


def time_does_not_count() -> contextlib.AbstractContextManager[None]:
    """Inside, the time of the calling thread's limit, if it has one, stands still."""
    limit = current_limit()
    return limit.paused() if limit is not None else contextlib.nullcontext()
