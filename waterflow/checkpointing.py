"""Writes checkpoints of the jobs of one ``train`` call while they run, beside them."""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait

from waterflow.checkpoint import Checkpoint
from waterflow.checkpoint_folder import Checkpoints, steps_of
from waterflow.job import JobResult
from waterflow.runner import JobRunner
from waterflow.safepoint import JobEnded

logger = logging.getLogger("waterflow")

LOOK_AGAIN = 0.05  # seconds
RESULTS_AGAIN = 10.0  # seconds
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MOST_NAMED = 5
LAST_SECONDS = 0.5  # at Ctrl-C, which returns within two seconds


class Checkpointing:
    """A thread that asks jobs for their state when it is time, and writes what they give. Thread-safe.

    A job stands still only for the copy of its state. What cannot be written, as on a full disk, ends no job: a warning says so
    once, later checkpoints are tried again, and at the end another one names the jobs whose last checkpoint is old.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._to = checkpoints
        self._lock = threading.Lock()
        self._files = threading.Lock()  # one file at a time
        self._running: dict[JobRunner, tuple[float, int]] = {}  # when the job was written last, and its steps then
        self._asked: dict[JobRunner, Future[Checkpoint]] = {}
        self._refused: set[JobRunner] = set()
        self._unwritten: dict[str, Exception] = {}  # jobs whose last checkpoint or result could not be written, and why
        self._results: dict[str, JobResult] = {}  # of them, those that have ended well
        self._said: set[object] = set()  # causes that there was a warning of
        self._again = 0.0  # when results are tried again
        self._hurry = False  # Ctrl-C was pressed
        self._over = threading.Event()

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Within, jobs are written."""
        thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            if not self._hurry:
                self._write_results()
            self._say_what_is_old()

    def begin(self, runner: JobRunner, at_once: bool) -> None:
        """A job begins; ``at_once``: its beginning cannot be made again from its seed."""
        with self._lock:
            self._running[runner] = (time.monotonic(), runner.begun)
            if at_once:
                self._asked[runner] = runner.ask_for_snapshot()

    def end(self, runner: JobRunner, result: JobResult) -> None:
        """It has ended. What ended well is written as its result."""
        with self._lock:
            self._running.pop(runner, None)
            self._asked.pop(runner, None)
        if result.status in ("completed", "pruned"):
            with self._files:
                self._finish(result)

    def last(self) -> None:
        """Write all that run, as far as time allows."""
        self._hurry = True
        until = time.monotonic() + LAST_SECONDS
        with self._lock:
            asked = {self._asked.get(runner) or runner.ask_for_snapshot(): runner for runner in self._running}
        wait(asked, timeout=LAST_SECONDS)
        for made, runner in asked.items():
            if made.done() and time.monotonic() < until:
                self._save(runner, made, durable=False)  # the process ends, not the machine

    def _work(self) -> None:
        while not self._over.wait(timeout=LOOK_AGAIN):
            with self._lock:
                due = [runner for runner in self._running if runner not in self._refused and self._due(runner)]
                for runner in due:
                    if runner not in self._asked:
                        self._asked[runner] = runner.ask_for_snapshot()
                done = [(runner, made) for runner, made in self._asked.items() if made.done()]
            for runner, made in done:
                self._save(runner, made)
            if self._results and time.monotonic() >= self._again:
                self._write_results()

    def _due(self, runner: JobRunner) -> bool:
        when, steps = self._running[runner]
        by_time = self._to.every is not None and time.monotonic() - when >= self._to.every
        return by_time or (self._to.steps is not None and runner.begun - steps >= self._to.steps)

    def _save(self, runner: JobRunner, made: Future[Checkpoint], durable: bool = True) -> None:
        with self._files:
            with self._lock:
                self._asked.pop(runner, None)
                if runner not in self._running:
                    return  # its result has been written
            try:
                checkpoint = made.result()
            except JobEnded:
                return
            except Exception as error:  # its own, or of the user's state_dict()
                logger.warning("job %r trains without checkpoints: %s", runner.job.name, error)
                self._refused.add(runner)
                return
            self._attempt(runner.job.name, lambda: self._to.save(checkpoint, durable=durable))
        with self._lock:
            if runner in self._running:
                self._running[runner] = (time.monotonic(), checkpoint.steps)

    # -- what cannot be written

    def _attempt(self, name: str, write: Callable[[], None]) -> bool:
        """Whether it could be written; if not, the file that was there before is there still."""
        try:
            write()
        except Exception as error:
            self._unwritten[name] = error
            of_all = isinstance(error, OSError | RuntimeError)  # of the disk, most likely
            cause = (type(error), getattr(error, "errno", None)) if of_all else name
            log = logger.info if cause in self._said else logger.warning
            self._said.add(cause)
            advice = ". Training goes on, and later checkpoints are tried again"
            advice += f": free space in {self._to.folder}" if getattr(error, "errno", None) in FULL else ""
            log("job %r could not be written: %s%s", name, error, advice)
            return False
        if self._unwritten.pop(name, None) is not None:
            logger.info("job %r could be written again", name)
        return True

    def _finish(self, result: JobResult) -> None:
        if self._attempt(result.name, lambda: self._to.finish(result)):
            self._results.pop(result.name, None)
        else:
            self._results[result.name] = result

    def _write_results(self) -> None:
        """Once more, of those that could not be written."""
        with self._files:
            for result in list(self._results.values()):
                self._finish(result)
        self._again = time.monotonic() + RESULTS_AGAIN

    def _say_what_is_old(self) -> None:
        if not self._unwritten:
            return
        told = []
        for name in self._unwritten:
            states = self._to.states(name)
            told.append(f"{name!r} ({f'step {steps_of(states[-1])}' if states else 'none'})")
        many = ", ".join(told[:MOST_NAMED]) + (f" and {len(told) - MOST_NAMED} more" if len(told) > MOST_NAMED else "")
        logger.warning(
            "the last checkpoints in %s are old, or missing, for what came later could not be written (%s): %s. What was trained is "
            "in the results of this call; a second call would train again from these steps",
            self._to.folder, next(reversed(self._unwritten.values())), many,
        )  # fmt: skip
