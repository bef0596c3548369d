"""Ours: every piece of memory placed in advance, two steps in one arena, admission by the banker's algorithm."""

from __future__ import annotations

from collections.abc import Sequence

from waterflow.errors import MemoryLimitError
from waterflow.executor.simulation import Clock, SimulatedJob, arena_of, simulate
from waterflow.planner.policies.base import Outcome, Policy


class Banker(Policy):
    """The engine's own way, operation by operation (``waterflow.executor.simulation``)."""

    name = "banker"

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock

    def run(self, jobs: Sequence[SimulatedJob], memory: int) -> Outcome:
        """Raises RaceError where an access has no order, which no job can bring about."""
        try:
            done = simulate(jobs, memory=memory, clock=self.clock)
        except MemoryLimitError as error:
            return Outcome(False, refused=str(error))
        return Outcome(True, done.peak, done.waits, done.overlap, done.speed)

    def fits(self, jobs: Sequence[SimulatedJob], memory: int) -> bool:
        """Jobs fit when the highest does: admission lets each finish, whatever the others hold."""
        arena = arena_of(jobs, memory)
        return arena > 0 and all(job.offsets.height <= arena for job in jobs)
