"""Which jobs go to a device together: sets that the planner says fit, found before anything is handed in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from waterflow.errors import CaptureError, MemoryLimitError
from waterflow.executor.memory_limit import reserve_of
from waterflow.job import Job
from waterflow.partition.plan import format_bytes
from waterflow.planner.feasibility import Need, feasible, needed
from waterflow.together import need_of, step_and_batch


@dataclass(frozen=True)
class JobSet:
    """Jobs that train together on one device, and the bytes that they need there at most; 0: not known."""

    jobs: tuple[Job, ...]
    memory: int


def _need(job: Job) -> Need | None:
    """What a job takes of a device: makes its model, reads one batch, captures its step. None where it cannot be captured."""
    job.check()
    step, batch = step_and_batch(job)
    try:
        return need_of(step.plan_for(batch))
    except CaptureError:
        return None


def memory_of(jobs: Sequence[Job]) -> int:
    """Bytes that jobs need on a device that they share: all that they hold, and the highest step. 0 where that is not known.

    A limit must be higher by the engine's reserve, which is no job's.
    """
    needs = [_need(job) for job in jobs]
    known = [need for need in needs if need is not None]
    return needed(known) if len(known) == len(needs) else 0


def sets_that_fit(jobs: Sequence[Job], memory: int) -> list[JobSet]:
    """All jobs, in sets that each fit on a device of ``memory`` bytes: as many together as there can be, then of the rest.

    Jobs whose steps cannot be captured are alone. Raises MemoryLimitError for a job that does not even fit alone.
    """
    room = memory - reserve_of(memory)
    found = [_need(job) for job in jobs]
    for need in found:
        if need is not None and need.peak > room:
            raise MemoryLimitError(
                f"job {need.name!r} needs {format_bytes(need.peak)}, and a device of {format_bytes(memory)} leaves "
                f"{format_bytes(room)} for jobs (the rest is the reserve). Lower its batch size, or let it recompute",
                needed=need.peak, limit=memory,
            )  # fmt: skip
    places = [place for place, need in enumerate(found) if need is not None]
    fit = feasible([need for need in found if need is not None], room)
    made = [JobSet(tuple(jobs[places[i]] for i in turn), needed(fit.of(turn))) for turn in fit.turns]
    return [*made, *(JobSet((job,), 0) for job, need in zip(jobs, found) if need is None)]
