"""Predict the memory that jobs need, and which of them fit together: captured and planned, never trained."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from waterflow.errors import CaptureError, InvalidJobError, MemoryLimitError
from waterflow.executor.data.loader import Batches
from waterflow.executor.data.shared import SharedData
from waterflow.executor.engine import Engine
from waterflow.job import Job
from waterflow.partition.passes.rematerialize import Recomputed
from waterflow.partition.plan.plan import Plan, format_bytes
from waterflow.planner.feasibility import Feasibility, Need, needed
from waterflow.planner.search import what_fits
from waterflow.step import Step
from waterflow.step_arguments import device_of
from waterflow.training.build import model_of, optimizer_of
from waterflow.training.shards.step import ShardedStep
from waterflow.training.step_queue import STEPS_AHEAD, step_of

ANY_ROOM = 1 << 62


@dataclass(frozen=True)
class Forecast:
    """A prediction for one job alone, before training. ``plan`` is None if the job cannot be captured.

    ``recomputed`` is what its step recomputes, if it may and has to.
    """

    name: str
    plan: Plan | None = None
    recomputed: Recomputed | None = None
    verdict: str = ""
    error: Exception | None = None
    opaque_reason: str | None = None

    @property
    def need(self) -> Need | None:
        """The memory that the job needs while it trains, with the batches that it holds; None if not known."""
        plan = self.plan
        return None if plan is None else Need(self.name, plan.persistent + STEPS_AHEAD * plan.batch, plan.height)

    def to_dict(self, groups: bool) -> dict[str, Any]:
        """Return plain values for JSON, sizes in bytes; with ``groups`` the node groups of the plan, too."""
        made: dict[str, Any] = {
            "name": self.name,
            "verdict": self.verdict,
            "opaque_reason": self.opaque_reason,
            "error": None if self.error is None else f"{type(self.error).__name__}: {self.error}",
        }
        if self.recomputed is not None:
            made["recomputed"] = dataclasses.asdict(self.recomputed)
        if self.plan is not None:
            made |= {
                "persistent_bytes": self.plan.persistent,
                "batch_bytes": self.plan.batch,
                "height_bytes": self.plan.height,
                "predicted_peak_bytes": self.plan.peak,
                "operations": self.plan.operations,
            }
            if groups:
                made["groups"] = [dataclasses.asdict(g) | {"kind": g.kind} for g in self.plan.groups]
        return made


@dataclass(frozen=True)
class Together:
    """The jobs that would train at the same time under a limit of ``limit`` bytes, and why."""

    limit: int
    lanes: int
    jobs: tuple[Forecast, ...]
    feasibility: Feasibility

    def explanation(self) -> list[str]:
        """Return the reasons, in sentences."""
        room, together = self.feasibility.room, self.feasibility.together
        lines = [
            f"limit {format_bytes(self.limit)}, {format_bytes(self.limit - room)} of it reserve: "
            f"{format_bytes(room)} for jobs, on {self.lanes} lanes"
        ]
        lines += [f"{job.name} recomputes: {job.recomputed}" for job in self.jobs if job.recomputed is not None]
        lines += [f"{job.name} cannot be captured: {job.opaque_reason}" for job in self.jobs if job.opaque_reason]
        if together:
            free = room - sum(job.held for job in together)
            heights = sorted(job.height for job in together)
            lines.append(
                f"together: {', '.join(job.name for job in together)}. Parameters, optimizer state and {STEPS_AHEAD} batches of "
                f"each take {format_bytes(room - free)}, which leaves {format_bytes(free)} for steps; the largest reaches "
                f"{format_bytes(heights[-1])}."
            )
            steps = min(self.lanes, len(heights))
            side_by_side = sum(heights[-steps:])
            if steps > 1 and side_by_side <= free:
                lines.append(f"Any {steps} steps fit side by side ({format_bytes(side_by_side)} at most): none waits.")
            elif steps > 1:
                lines.append(
                    f"The {steps} largest steps at their peaks would take {format_bytes(side_by_side)}: there node "
                    "groups wait until another step has given memory back."
                )
        return lines

    def to_dict(self, groups: bool) -> dict[str, Any]:
        """Return plain values for JSON, sizes in bytes; with ``groups`` the node groups of each plan, too."""
        together = self.feasibility.together
        return {
            "limit_bytes": self.limit,
            "room_bytes": self.feasibility.room,
            "lanes": self.lanes,
            "together": [job.name for job in together],
            "claimed_bytes": sum(job.held for job in together),
            "fits": None if any(job.opaque_reason for job in self.jobs) else self.feasibility.fits,
            "jobs": [job.to_dict(groups) for job in self.jobs],
        }


def fit_together(jobs: Iterable[Job], memory: int | float | str | None = None, max_concurrent: int | None = None) -> Together:
    """Capture each job's step and find, in the order given, the jobs that can run beside those before them.

    Makes each model and reads one batch of its data. If that fails for a job, its forecast has the error.
    """
    with Engine(memory=memory) as engine:
        at_once = max_concurrent if max_concurrent is not None else 2 * engine.lanes
        looked: list[Forecast] = []
        # In the order given, as train() starts jobs; not the largest set that fits.
        taken: dict[int, Need] = {}
        for job in jobs:
            try:
                found = forecast(job, engine.limit, engine.reservations.room)
            except Exception as error:
                found = Forecast(job.name, verdict="fails", error=error)
            if found.need is not None and found.error is None:
                if needed([*taken.values(), found.need]) > engine.reservations.room:
                    verdict = "waits for memory: until one of the others has ended"
                elif len(taken) >= at_once:
                    verdict = f"waits for its turn: max_concurrent is {at_once}"
                else:
                    verdict = "fits"
                    taken[len(looked)] = found.need
                found = dataclasses.replace(found, verdict=verdict)
            looked.append(found)
    turns = (tuple(taken),) if taken else ()
    feasibility = Feasibility(engine.reservations.room, tuple(found.need for found in looked), turns)
    return Together(engine.limit, engine.lanes, tuple(looked), feasibility)


def forecast(job: Job, limit: int = ANY_ROOM, room: int = ANY_ROOM) -> Forecast:
    """Return the forecast of one job alone under ``limit`` bytes, ``room`` of them for jobs; lowered if it may recompute.

    Makes its model and reads one batch of its data. If the job does not fit, ``error`` says what would. Errors of the user's
    code are raised.
    """
    job.check()
    step, batch = step_and_batch(job)
    try:
        plan, recomputed = step.plan_for(batch), step.recomputed_for(batch)
    except CaptureError as error:
        why = "runs eagerly: memory unknown before its first step"
        return Forecast(job.name, verdict=why, opaque_reason=str(error))
    held, lowest = plan.persistent + STEPS_AHEAD * plan.batch, None
    if held + plan.height > room and step.recompute == "auto":
        height = max(0, room - held)
        try:
            plan, recomputed = step.plan_for(batch, height), step.recomputed_for(batch, height)
        except MemoryLimitError as error:
            lowest = error.needed
    if held + plan.height <= room:
        return Forecast(job.name, plan, recomputed)
    refused = what_fits(step, room, STEPS_AHEAD, batch).error(limit, room, plan, held, lowest)
    return Forecast(job.name, plan, recomputed, "does not fit", refused)


def step_and_batch(job: Job) -> tuple[Step, Any]:
    """Return the job's step, not yet called, and the first batch of its data. Raises InvalidJobError."""
    if isinstance(job.data, Iterator):
        raise InvalidJobError(
            f"data of job {job.name!r} is an iterator, which can be read only once: a plan would take a batch that training "
            "then lacks. Pass a list, a DataLoader, or a function that makes a fresh iterator"
        )
    # Values do not matter here, but a prediction must not draw from the process's generator.
    numbers = torch.Generator().manual_seed(job.seed or 0)
    model = model_of(job)
    optimizer = optimizer_of(job, model)
    generator = torch.Generator(device) if (device := device_of(model, optimizer)).type == "cuda" else numbers
    step = step_of(job, model, optimizer, generator, engine=None)
    data = job.data
    source = data.reader() if isinstance(data, SharedData) else Batches(job.name, data, numbers)
    with contextlib.closing(source) as batches:
        batch = next(iter(batches.epoch()))
        return step, step.first_part(job.name, batch) if isinstance(step, ShardedStep) else batch
