"""What others ask of a running job from their own threads: a copy of its state, to stand still, and to go on."""

from __future__ import annotations

import threading
from concurrent.futures import Future

from waterflow.boundary import Boundary
from waterflow.checkpoint import Checkpoint
from waterflow.errors import CheckpointError
from waterflow.executor.engine import Engine
from waterflow.job import Job
from waterflow.residence import Residence


class Asked:
    """The part of a ``JobRunner`` that hands such wishes to the job's boundary."""

    job: Job
    engine: Engine | None
    residence: Residence
    _boundary: Boundary
    _thread: int | None  # the job's own, while it runs
    _between: bool  # the job's own thread stands between two steps

    def _checkpoint(self, move: bool = False) -> Checkpoint:
        raise NotImplementedError

    def snapshot(self, timeout: float | None = None) -> Checkpoint:
        """A copy of the job's whole state behind the step that it does now. Its other steps wait for that.

        Raises CheckpointError where the job ends before, where it comes to no boundary within ``timeout`` seconds, and for
        jobs that nobody could go on with (data that can be read only once). On the job's own thread: in ``on_epoch`` alone.
        """
        if threading.get_ident() != self._thread:
            return self._boundary.await_answer(self.ask_for_snapshot(), timeout)
        if not self._between:
            raise CheckpointError(
                f"job {self.job.name!r} cannot be copied in the middle of a step or of its evaluation"
            )
        return self._checkpoint()

    def ask_for_snapshot(self) -> Future[Checkpoint]:
        """The same without waiting for it."""
        return self._boundary.ask(False)

    def suspend(self, timeout: float | None = None) -> Checkpoint:
        """Stand still behind the step that it does now: the job's state leaves the device, what it claimed is given back.

        Model and optimizer keep no memory until ``resume()``; ``stop()`` brings them back, too. Raises as ``snapshot`` does,
        but suspends jobs whose data can be read only once: the checkpoint then has no place in it.
        """
        if threading.get_ident() == self._thread:
            raise CheckpointError(f"job {self.job.name!r} cannot suspend itself: nobody would be left to resume it")
        if self.engine is not None and self.engine.clock is not None:
            raise CheckpointError(
                f"job {self.job.name!r} belongs to a deterministic study, whose other jobs would wait for it; ask for a "
                "snapshot, or study with deterministic=False"
            )
        with self.residence.kept_away():
            return self._boundary.await_answer(self._boundary.ask(True), timeout)

    def resume(self) -> None:
        """Let a suspended job go on. Raises CheckpointError for one that is not suspended."""
        self._boundary.go()

    @property
    def suspended(self) -> bool:
        """Whether the job stands still until ``resume()``."""
        return self._boundary.suspended
