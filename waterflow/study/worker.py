"""Worker: a trial that runs on a thread, or waits for its turn."""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

from waterflow.executor.cancel import BREAK_OFF_SECONDS, STOP_SECONDS, UserCode, doing, stop_all
from waterflow.executor.program.ownership import cancel_steps
from waterflow.executor.stats import Account
from waterflow.job import Job, JobResult
from waterflow.study.optuna_compat import Trial, TrialState
from waterflow.training.checkpoint import Checkpoint
from waterflow.training.runner import JobRunner

logger = logging.getLogger("waterflow")

_REASON = "the deadline of the study has passed"


def _closed() -> threading.Lock:
    lock = threading.Lock()
    lock.acquire()
    return lock


@dataclass
class Worker:
    """A trial that runs or waits for its turn, and how it ended."""

    trial: Trial
    seed: int  # of its own random numbers, and of a job that has none
    account: Account
    alone: bool = False  # no other trial runs beside it
    again: bool = False  # it lacked memory before
    job: Job | None = None  # of a trial that was paused
    thread: threading.Thread | None = None
    code: UserCode = field(default_factory=UserCode)
    runner: JobRunner | None = None
    paused: Checkpoint | None = None  # what its job left, or goes on from
    aside: bool = False  # its job was paused, or its loop waits at the gate
    seconds: float = 0.0  # that it ran before
    pausing: float = 0.0  # seconds that its pauses took
    reported: bool = False  # it has made a report of which nothing was decided yet
    leaving: float | None = None  # when it was to be paused, on the clock of its thread
    stays: bool = False  # it cannot be paused
    unfinished: bool = False  # it is ended by the deadline or the timeout, and counts with its last report
    ends_since: float = 0.0  # seconds of the study at which it was to end
    stopped: bool = False  # it did not end between two steps,
    interrupted: bool = False  # nor by what it was doing,
    told_of: bool = False  # and a warning has said so
    gate: threading.Lock = field(default_factory=_closed)  # where a loop waits while better trials run
    value: Any = None
    result: JobResult | None = None
    state: TrialState | None = None
    error: BaseException | None = None
    told: threading.Event = field(default_factory=threading.Event)
    steps: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # that its objective made

    def end(self, now: float) -> None:
        """End it at the deadline, which has passed: between two steps, and later wherever it is. Called again until it has ended.

        ``now`` is in seconds of the study.
        """
        if not self.unfinished:
            self.unfinished, self.ends_since = True, now
            if self.runner is not None:
                self.runner.end(_REASON)
            else:
                stop_all([self], _REASON)
        late = now - self.ends_since
        if late > STOP_SECONDS:  # a step takes long, or code of the user's
            if not self.stopped:
                self.stopped = True
                stop_all([self], _REASON)
            self.interrupted = self.interrupted or self.code.break_off_user_code()
        if late > STOP_SECONDS + BREAK_OFF_SECONDS and not self.told_of:
            self.told_of = True
            logger.warning(
                "trial %d does not end at the deadline: it is %s. waterflow waits for it; Ctrl-C ends everything",
                self.trial.number,
                self.code.where(),
            )

    def stop(self, reason: str) -> None:
        """Cancel its job, or the steps of its loop, at the next boundary."""
        if self.runner is not None:
            self.runner.stop(reason)
        cancel_steps(self.steps, reason)

    def break_off(self) -> None:
        """Interrupt the trial's thread now."""
        (self.runner or self.code).break_off()
        self.open()

    @doing("waiting while trials that promise more run", interruptible=True)
    def wait(self) -> None:
        """Wait, on the thread of its loop, for its turn."""
        self.gate.acquire()

    def open(self) -> None:
        """Let its loop go on, if it waits."""
        with contextlib.suppress(RuntimeError):  # it does not
            self.gate.release()

    @property
    def loops(self) -> bool:
        """Return True if its thread runs a loop of the objective's own, which keeps it while it stands aside."""
        return self.thread is not None and self.runner is None

    def next_run(self, **changes: Any) -> Worker:
        """Return the same trial's next run."""
        made = Worker(self.trial, self.seed, Account(self.trial.number), self.alone, self.again)
        return replace(made, seconds=self.seconds, pausing=self.pausing, **changes)
