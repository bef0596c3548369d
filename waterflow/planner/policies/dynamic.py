"""Our order of operations without our placement: one best-fit pool."""

from __future__ import annotations

from collections.abc import Sequence

from waterflow import _C
from waterflow.executor.pool_replay import pool_steps, unplaced_steps
from waterflow.executor.simulation import Clock, SimulatedJob, arena_of, run
from waterflow.planner.policies.base import Outcome, Policy, held_by, no_room


class Dynamic(Policy):
    """Admission takes a step to be as high as its live bytes; what it lets through asks one best-fit pool.

    The pool serves requests in the order in which the simulation issued their operations, as one stream would. Jobs fit
    if every request is served. Its speed is not modelled: the order on the device that reuse asks for would be one of
    single pieces.
    """

    name = "dynamic"

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()

    def run(self, jobs: Sequence[SimulatedJob], memory: int) -> Outcome:
        """All steps of the jobs in ``memory`` bytes."""
        if (refused := no_room(jobs, memory)) is not None:
            return refused
        arena = arena_of(jobs, memory)
        highest = max(max(job.offsets.resident, default=0) for job in jobs)
        if highest > arena:
            return Outcome(False, refused=f"{highest:,} bytes are live at once, and {arena:,} are left for steps")
        issued = run(unplaced_steps(jobs, self.clock), arena, clock=self.clock)
        pool = _C.replay_spans(pool_steps(jobs, self.clock), issued, arena)
        return Outcome(not pool.refused, held_by(jobs) + pool.peak, refused=pool.refused)
