"""Which jobs go to a device together: sets that the planner says fit, found before anything is handed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from waterflow.executor.memory_limit import reserve_of
from waterflow.job import Job
from waterflow.planner.feasibility import feasible, needed
from waterflow.training.fit_together import forecast


@dataclass(frozen=True)
class JobSet:
    """Jobs that train together on one device, and the bytes that they need there at most; 0: not known."""

    jobs: tuple[Job, ...]
    memory: int


def memory_of(jobs: Sequence[Job]) -> int:
    """Bytes that jobs need on a device that they share: all that they hold, and the highest step. 0 where that is not known.

    A limit must be higher by the engine's reserve, which is no job's.
    """
    known = [need for job in jobs if (need := forecast(job).need) is not None]
    return needed(known) if len(known) == len(jobs) else 0


def sets_that_fit(jobs: Sequence[Job], memory: int) -> list[JobSet]:
    """All jobs, in sets that each fit on a device of ``memory`` bytes: as many together as there can be, then of the rest.

    Jobs whose steps cannot be captured are alone. Raises MemoryLimitError for a job that does not even fit alone.
    """
    room = memory - reserve_of(memory)
    found = [forecast(job, memory, room) for job in jobs]
    for one in found:
        if one.error is not None:
            raise one.error
    fit = feasible([one.need for one in found], room)
    made = [JobSet(tuple(jobs[i] for i in turn), needed(fit.of(turn))) for turn in fit.turns]
    return [*made, *(JobSet((job,), 0) for job, one in zip(jobs, found) if one.need is None)]
