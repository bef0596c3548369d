"""Writes checkpoints of the jobs of one ``train`` call while they run, beside them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, wait

from waterflow.boundary import JobEnded
from waterflow.checkpoint import Checkpoint
from waterflow.checkpoint_folder import Checkpoints
from waterflow.errors import CheckpointError
from waterflow.job import JobResult
from waterflow.runner import JobRunner

logger = logging.getLogger("waterflow")

LOOK_AGAIN = 0.05  # seconds
LAST_SECONDS = 0.7  # at Ctrl-C, which returns within two seconds


class Checkpointing:
    """A thread that asks jobs for their state when it is time, and writes what they give. Thread-safe.

    A job stands still only for the copy of its state.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._to = checkpoints
        self._lock = threading.Lock()
        self._files = threading.Lock()  # one file at a time
        self._running: dict[JobRunner, tuple[float, int]] = {}  # when the job was written last, and its steps then
        self._asked: dict[JobRunner, Future[Checkpoint]] = {}
        self._refused: set[JobRunner] = set()
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

    def begin(self, runner: JobRunner, at_once: bool) -> None:
        """A job begins; ``at_once``: its beginning cannot be made again from its seed."""
        with self._lock:
            self._running[runner] = (-float("inf") if at_once else time.monotonic(), runner.steps)

    def end(self, runner: JobRunner, result: JobResult) -> None:
        """It has ended. What ended well is written as its result."""
        with self._lock:
            self._running.pop(runner, None)
            self._asked.pop(runner, None)
        if result.status in ("completed", "pruned"):
            with self._files, self._told(result.name):
                self._to.finish(result)

    def last(self) -> None:
        """Write all that run, as far as time allows."""
        until = time.monotonic() + LAST_SECONDS
        with self._lock:
            asked = {self._asked.get(runner) or runner.ask_for_snapshot(): runner for runner in self._running}
        wait(asked, timeout=LAST_SECONDS)
        for made, runner in asked.items():
            if made.done() and time.monotonic() < until:
                self._save(runner, made)

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

    def _due(self, runner: JobRunner) -> bool:
        when, steps = self._running[runner]
        by_time = self._to.every is not None and time.monotonic() - when >= self._to.every
        return by_time or (self._to.steps is not None and runner.steps - steps >= self._to.steps)

    def _save(self, runner: JobRunner, made: Future[Checkpoint]) -> None:
        with self._files:
            with self._lock:
                self._asked.pop(runner, None)
                if runner not in self._running:
                    return  # its result has been written
            try:
                checkpoint = made.result()
            except JobEnded:
                return
            except CheckpointError as error:
                logger.warning("job %r trains without checkpoints: %s", runner.job.name, error)
                self._refused.add(runner)
                return
            with self._told(runner.job.name):
                self._to.save(checkpoint)
        with self._lock:
            if runner in self._running:
                self._running[runner] = (time.monotonic(), checkpoint.steps)

    @contextlib.contextmanager
    def _told(self, name: str) -> Iterator[None]:
        """A full disk is no reason to lose what is trained."""
        try:
            yield
        except (OSError, CheckpointError) as error:
            logger.warning("job %r could not be written: %s", name, error)
