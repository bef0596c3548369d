"""A limit for the wall time of a job, or of a trial: what hangs ends, and the others never notice."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol, TypeVar

import torch

from waterflow import _C
from waterflow.errors import JobTimeoutError
from waterflow.executor.belonging import current_engine, current_worker, within
from waterflow.executor.cancel import BREAK_OFF_SECONDS, STOP_SECONDS, UserCode, left_behind, let_go
from waterflow.executor.user_thread import UserThread
from waterflow.job import Job, JobResult

logger = logging.getLogger("waterflow")
T = TypeVar("T")

LOOK_AGAIN = 0.1  # seconds, between two looks at a limit that may have changed
_local = threading.local()


def current_limit() -> TimeLimit | None:
    """The limit under which the calling thread works."""
    return getattr(_local, "limit", None)


class TimeLimit:
    """Runs one job or trial on a thread of its own, and ends it when its time is over.

    It is asked to stop; then its user code is broken off (``code``); and a thread that even then does not come back, as it waits
    outside of the interpreter, is left to itself. Our own code is never broken off: it comes to its next boundary.
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
        self._beside: UserThread | None = None
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

    def run(self, work: Callable[[], T], give_up: Callable[[JobTimeoutError], T]) -> T:
        """What ``work`` returns. Behind the limit ``error`` is set and raised in the place of what ``work`` raises.

        ``give_up`` is called in its place where its thread does not come back.
        """
        made: list[T] = []
        failed: list[BaseException] = []
        context, engine, worker = contextvars.copy_context(), current_engine(), current_worker()
        threads = torch.get_num_threads()

        def inner() -> None:
            try:
                _C.set_threads_here(threads)
                _local.limit = self
                belongs = within(engine, worker) if engine is not None else contextlib.nullcontext()
                with belongs, UserThread(self._code.here).here() as self._beside:
                    made.append(context.run(work))
            except BaseException as error:
                failed.append(error)
            finally:
                self._done.set()

        thread = threading.Thread(target=inner, name=threading.current_thread().name, daemon=True)
        thread.start()
        try:
            while not self._done.wait(timeout=min(max(self._left(), 0.0), LOOK_AGAIN)):
                if self._left() <= 0:
                    self._end()
                    break
        except BaseException:  # Ctrl-C
            self._ask_to_stop("interrupted")
            self._done.wait(STOP_SECONDS)
            self._code.break_off()
            if not self._done.wait(BREAK_OFF_SECONDS):
                left_behind.add(thread)
            raise
        if not self._done.is_set():
            assert self.error is not None
            left_behind.add(thread)
            return give_up(self.error)
        thread.join(BREAK_OFF_SECONDS)
        if not failed:
            return made[0]
        if self.error is not None and isinstance(failed[0], Exception):
            let_go(failed[0])
            raise self.error
        raise failed[0]

    def applied(self, result: JobResult) -> JobResult:
        """The result of a job that ended at the limit: it failed, of that."""
        if self.error is None or result.status == "completed" or result.error is self.error:
            return result
        told = "".join(traceback.format_exception(self.error))
        return replace(result, status="failed", error=self.error, traceback=told)

    def _left(self) -> float:
        with self._lock:
            return LOOK_AGAIN if self._paused else self._deadline - time.monotonic()

    def _end(self) -> None:
        where, progress = self._code.where(), self._progress()
        with self._lock:
            who, told, ran = self._who, self._told, time.monotonic() - self._began
        alone = self._stopped(f"over its limit {told}")
        said = f"{who} ran longer than its limit {told} ({ran:.2f} s{progress}): it was {where}."
        if alone:
            said += (
                " This code could not be broken off, as it waits outside of the interpreter or catches all errors: its thread was "
                "left behind, and keeps what it holds of memory until it comes back, or the process ends."
            )
            logger.warning("%s", said)
        self.error = JobTimeoutError(f"{said} Mend what hangs there, or raise the limit; None is no limit")

    def _ask_to_stop(self, reason: str) -> None:
        """Without waiting for the group that runs to end."""
        threading.Thread(target=self._stop, args=(reason,), daemon=True).start()

    def _stopped(self, reason: str) -> bool:
        """End the work; whether a thread of it was left behind."""
        self._ask_to_stop(reason)
        if self._done.wait(STOP_SECONDS):
            return False
        until = time.monotonic() + BREAK_OFF_SECONDS
        while time.monotonic() < until:
            self._code.break_off_user_code()
            if self._done.wait(STOP_SECONDS / 10):
                return False
        if self._beside is not None and self._beside.give_up():
            self._done.wait(STOP_SECONDS)
        return True


class _Runner(Protocol):
    """What is asked of a ``JobRunner`` with a time limit."""

    job: Job

    @property
    def progress(self) -> str:
        """Where it is, in words."""

    def stop(self, reason: str = "stopped") -> None:
        """End it at its next boundary."""

    def abandon(self, error: JobTimeoutError) -> JobResult:
        """End it without its thread."""


def run_job(runner: _Runner, work: Callable[[], JobResult], code: UserCode) -> JobResult:
    """What ``work`` returns, which trains a job, within its ``timeout``; within a trial's limit that is the shorter one."""
    seconds, who, setting = runner.job.timeout, f"job {runner.job.name!r}", "Job.timeout"
    if seconds is None:
        return work()
    if (outer := current_limit()) is not None:
        outer.shorten(seconds, who, setting)
        return work()
    limit = TimeLimit(seconds, who, setting, code, runner.stop, lambda: f", {runner.progress}")
    return limit.applied(limit.run(work, runner.abandon))


def time_does_not_count() -> contextlib.AbstractContextManager[None]:
    """Inside, the time of the calling thread's limit, if it has one, stands still."""
    limit = current_limit()
    return limit.paused() if limit is not None else contextlib.nullcontext()
