"""Waterwave-s (section 5.1.3 of the same paper): two groups per job, cut in two ways; the better one counts."""

from __future__ import annotations

from collections.abc import Sequence

from waterflow.errors import InvalidJobError
from waterflow.executor.simulation import Clock, SimulatedJob
from waterflow.planner.policies.base import Outcome, Policy
from waterflow.planner.policies.waterwave import NodeGroups, cut_in_two, run_in_pairs


class WaterwaveS(Policy):
    """Steps cut at their peak, or where the backward pass begins. Jobs must tell where that is (``forward``)."""

    name = "waterwave-s"

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock

    def run(self, jobs: Sequence[SimulatedJob], memory: int) -> Outcome:
        """The better of both cuts. Raises InvalidJobError for a job that does not tell where its forward pass ends."""
        at_peak = run_in_pairs(jobs, [_at_peak(job) for job in jobs], memory, self.clock)
        at_backward = run_in_pairs(jobs, [_at_backward(job) for job in jobs], memory, self.clock)
        return max((at_peak, at_backward), key=lambda outcome: (outcome.fits, outcome.speed or 0.0))


def _at_peak(job: SimulatedJob) -> NodeGroups:
    resident = job.offsets.resident
    return cut_in_two(job.offsets, min(resident.index(max(resident)) + 1, len(resident) - 1))


def _at_backward(job: SimulatedJob) -> NodeGroups:
    operations = len(job.offsets.heights)
    if job.forward is None or not 0 < job.forward < operations:
        raise InvalidJobError(
            f"waterwave-s cuts a step where its backward pass begins; job {job.name!r} of {operations} operations says "
            f"{job.forward}; make it with forward=, from Plan.forward"
        )
    return cut_in_two(job.offsets, job.forward)
