"""PausedStates: states of jobs that stand aside, in host memory as far as jobs leave it, the others on disk."""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
import threading
import time
from collections.abc import Iterator

from waterflow.errors import CheckpointError
from waterflow.executor.engine import Engine
from waterflow.training.checkpoint import Checkpoint
from waterflow.training.checkpoint_dir import Checkpoints

logger = logging.getLogger("waterflow")

SHARE = 0.25  # of the engine's memory, at most


class PausedStates:
    """States by name. They count against the engine's memory, and leave it once a job waits for that. Used by one thread.

    On disk they are in ``files``, or in a temporary folder.
    """

    def __init__(self, engine: Engine, files: Checkpoints | None) -> None:
        self._reservations = engine.reservations
        # In a deterministic study a job may not find its memory earlier or later by the time that it takes to write.
        self._most = int(SHARE * engine.reservations.room) if engine.reservations.clock is None else 0
        self._files = files
        self._every = math.inf if files is None else files.every or math.inf
        self._in_memory: dict[str, Checkpoint] = {}
        self._since: dict[str, float] = {}
        self._unwritten: dict[str, Checkpoint] = {}  # claimed no more: jobs that wait for their memory would wait for ever
        self._jobs: dict[str, str] = {}  # of the states on disk
        self._give_way = threading.Event()
        self._left = contextlib.ExitStack()

    @contextlib.contextmanager
    def opened(self) -> Iterator[PausedStates]:
        """Forget all states at the end."""
        with self._left:
            yield self
            self._in_memory.clear()
            self._since.clear()
            self._hold()

    def put(self, name: str, state: Checkpoint) -> None:
        """Keep a state. One that must be written and cannot be stays in memory, which a warning says."""
        self._in_memory[name], self._since[name] = state, time.monotonic()
        if not self._hold():
            self._write(name)

    def take(self, name: str) -> Checkpoint:
        """Return a state, which is kept no longer. Raises CheckpointError, OSError."""
        self._since.pop(name, None)
        if (state := self._in_memory.pop(name, None) or self._unwritten.pop(name, None)) is not None:
            self._hold()
            return state
        found = self._folder().last(name, self._jobs.pop(name))
        assert found is not None
        return found

    def make_way(self) -> None:
        """Write all states if a job waits for their memory."""
        if self._give_way.is_set():
            self.write()

    def write_old(self) -> None:
        """Write a state that has been in memory as long as a job may go without a checkpoint, if the study survives."""
        if self._since and time.monotonic() - min(self._since.values()) >= self._every:
            self._write(min(self._since, key=self._since.__getitem__))

    def write(self, seconds: float = math.inf) -> None:
        """Write the states that are in memory, as far as so many seconds allow."""
        until = time.monotonic() + seconds
        for name in list(self._in_memory):
            if time.monotonic() < until:
                self._write(name)
        self._give_way.clear()

    def _write(self, name: str) -> None:
        state = self._in_memory.pop(name)
        del self._since[name]
        try:
            self._folder().save(name, state, durable=False)
        except (OSError, CheckpointError) as error:
            logger.warning(
                "the state of job %r, which was paused, stays in memory, as it could not be written: %s", state.job, error
            )
            self._unwritten[name] = state
        self._jobs[name] = state.job
        self._hold()

    def _hold(self) -> bool:
        held = sum(state.nbytes for state in self._in_memory.values())
        return held <= self._most and self._reservations.hold(held, self._give_way.set)

    def _folder(self) -> Checkpoints:
        if self._files is None:
            self._files = Checkpoints(self._left.enter_context(tempfile.TemporaryDirectory(prefix="waterflow-paused-")), keep=1)
        return self._files
