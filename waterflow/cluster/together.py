"""Which jobs go to a device together: sets that the planner says fit, found before anything is handed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from waterflow.errors import CaptureError, MemoryLimitError
from waterflow.executor.memory_limit import reserve_of
from waterflow.job import Job
from waterflow.partition.plan import format_bytes
from waterflow.planner.sets import Need, in_turns
from waterflow.step_queue import STEPS_AHEAD
from waterflow.together import step_and_batch


@dataclass(frozen=True)
class JobSet:
    """Jobs that train together on one device, and the bytes that they need there at most; 0: not known."""

    jobs: tuple[Job, ...]
    memory: int


def need_of(job: Job) -> Need | None:
    """What a job takes of a device: makes its model, reads one batch, captures its step. None where it cannot be captured."""
    job.check()
    step, batch = step_and_batch(job)
    try:
        plan = step.plan_for(batch)
    except CaptureError:
        return None
    return Need(job.name, plan.persistent + STEPS_AHEAD * plan.batch, plan.height)


def memory_of(jobs: Sequence[Job]) -> int:
    """Bytes that jobs need on a device that they share: all that they hold, and the highest step. 0 where that is not known.

    A limit must be higher by the engine's reserve, which is no job's.
    """
    needs = [need_of(job) for job in jobs]
    known = [need for need in needs if need is not None]
    return _together(known) if len(known) == len(needs) else 0


def sets_that_fit(jobs: Sequence[Job], memory: int) -> list[JobSet]:
    """All jobs, in sets that each fit on a device of ``memory`` bytes: as many together as there can be, then of the rest.

    Jobs whose steps cannot be captured are alone. Raises MemoryLimitError for a job that does not even fit alone.
    """
    room = memory - reserve_of(memory)
    found = [need_of(job) for job in jobs]
    for need in found:
        if need is not None and need.peak > room:
            raise MemoryLimitError(
                f"job {need.name!r} needs {format_bytes(need.peak)}, and a device of {format_bytes(memory)} leaves "
                f"{format_bytes(room)} for jobs (the rest is the reserve). Lower its batch size, or let it recompute",
                needed=need.peak, limit=memory,
            )  # fmt: skip
    places = [place for place, need in enumerate(found) if need is not None]
    known = [need for need in found if need is not None]
    sets = [[places[i] for i in chosen] for chosen in in_turns(known, room)]
    made = [
        JobSet(tuple(jobs[i] for i in chosen), _together([n for i in chosen if (n := found[i])])) for chosen in sets
    ]
    return [*made, *(JobSet((job,), 0) for job, need in zip(jobs, found) if need is None)]


def _together(needs: Sequence[Need]) -> int:
    return sum(need.held for need in needs) + max((need.height for need in needs), default=0)
