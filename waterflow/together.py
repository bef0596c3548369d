"""What jobs would need, and which of them fit together: captured and planned, never trained."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from waterflow.building import model_of, optimizer_of
from waterflow.errors import CaptureError, InvalidJobError, MemoryLimitError
from waterflow.executor.data import Batches
from waterflow.executor.engine import Engine
from waterflow.executor.shared_data import SharedData
from waterflow.job import Job
from waterflow.partition.plan import Plan, format_bytes
from waterflow.partition.recompute import Recomputed
from waterflow.partition.structure import flatten
from waterflow.planner.refusal import what_fits
from waterflow.step import Step
from waterflow.step_queue import STEPS_AHEAD


@dataclass
class Forecast:
    """What is known of one job before it is trained. ``plan`` is None where it cannot be captured.

    ``recomputed`` is what the job makes again, where it may and has to.
    """

    name: str
    plan: Plan | None = None
    recomputed: Recomputed | None = None
    verdict: str = ""
    error: Exception | None = None
    opaque_reason: str | None = None

    def to_dict(self, groups: bool) -> dict[str, Any]:
        """Plain values for JSON, bytes throughout."""
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


@dataclass
class Together:
    """Which jobs would be under way at the same time under a limit, and why. All in bytes."""

    limit: int
    room: int
    lanes: int
    max_concurrent: int
    jobs: list[Forecast] = field(default_factory=list)
    together: list[str] = field(default_factory=list)
    claimed: int = 0
    heights: list[int] = field(default_factory=list)

    def explanation(self) -> list[str]:
        """Why, in sentences."""
        lines = [
            f"limit {format_bytes(self.limit)}, {format_bytes(self.limit - self.room)} of it reserve: "
            f"{format_bytes(self.room)} for jobs, on {self.lanes} lanes"
        ]
        lines += [f"{job.name} recomputes: {job.recomputed}" for job in self.jobs if job.recomputed is not None]
        lines += [f"{job.name} cannot be captured: {job.opaque_reason}" for job in self.jobs if job.opaque_reason]
        if self.together:
            lines.append(
                f"together: {', '.join(self.together)}. Parameters, optimizer state and {STEPS_AHEAD} batches of each "
                f"take {format_bytes(self.claimed)}, which leaves {format_bytes(self.room - self.claimed)} for steps; "
                f"the largest reaches {format_bytes(max(self.heights))}."
            )
            side_by_side = sum(sorted(self.heights)[-self.lanes :])
            steps = min(self.lanes, len(self.heights))
            if steps > 1 and side_by_side <= self.room - self.claimed:
                lines.append(f"Any {steps} steps fit side by side ({format_bytes(side_by_side)} at most): none waits.")
            elif steps > 1:
                lines.append(
                    f"The {steps} largest steps at their peaks would take {format_bytes(side_by_side)}: there node "
                    "groups wait until another step has given memory back."
                )
        return lines

    def to_dict(self, groups: bool) -> dict[str, Any]:
        """Plain values for JSON, bytes throughout."""
        return {
            "limit_bytes": self.limit,
            "room_bytes": self.room,
            "lanes": self.lanes,
            "together": self.together,
            "claimed_bytes": self.claimed,
            "fits": None if any(job.opaque_reason for job in self.jobs) else len(self.together) == len(self.jobs),
            "jobs": [job.to_dict(groups) for job in self.jobs],
        }


def fit_together(
    jobs: Iterable[Job], memory: int | float | str | None = None, max_concurrent: int | None = None
) -> Together:
    """Capture each job's step and see, in the order given, who could be under way beside those before it.

    Makes each model and reads one batch of its data. A job that fails to do so has the error in its forecast.
    """
    with Engine(memory=memory) as engine:
        at_once = max_concurrent if max_concurrent is not None else 2 * engine.lanes
        found = Together(engine.limit, engine.room, engine.lanes, at_once)
        for job in jobs:
            forecast = Forecast(job.name)
            found.jobs.append(forecast)
            try:
                _look_at(job, forecast, found, engine)
            except CaptureError as error:
                forecast.opaque_reason = str(error)
                forecast.verdict = "runs eagerly: memory unknown before its first step"
            except Exception as error:
                forecast.error, forecast.verdict = error, "fails"
        found.claimed = engine.claimed()
    return found


def _look_at(job: Job, forecast: Forecast, found: Together, engine: Engine) -> None:
    job.check()
    step, batch = step_and_batch(job)
    forecast.plan, forecast.recomputed = step.plan_for(batch), step.recomputed_for(batch)
    held = _as_claimed(forecast.plan)
    lowest = None
    if held.peak > engine.room and step.recompute == "auto":
        height = max(0, engine.room - held.persistent - held.batch)
        try:
            forecast.plan, forecast.recomputed = step.plan_for(batch, height), step.recomputed_for(batch, height)
            held = _as_claimed(forecast.plan)
        except MemoryLimitError as error:
            lowest = error.needed
    if held.peak > engine.room:
        leaves, form, _ = flatten(batch)
        fits = what_fits(step, engine.room, STEPS_AHEAD, leaves, form)
        forecast.error = fits.error(engine, forecast.plan, held.persistent + held.batch, lowest)
        forecast.verdict = "does not fit"
    elif not engine.would_fit(held):
        forecast.verdict = "waits for memory: until one of the others has ended"
    elif len(found.together) >= found.max_concurrent:
        forecast.verdict = f"waits for its turn: max_concurrent is {found.max_concurrent}"
    else:
        engine.claim(engine.add_job(job.name), held)
        forecast.verdict = "fits"
        found.together.append(job.name)
        found.heights.append(held.height)


def _as_claimed(plan: Plan) -> Plan:
    """With the batches that a running job holds."""
    return dataclasses.replace(plan, batch=STEPS_AHEAD * plan.batch)


def step_and_batch(job: Job) -> tuple[Step, Any]:
    """The job's step, made and not called, and the first batch of its data. Raises InvalidJobError, as ``train`` does."""
    if isinstance(job.data, Iterator):
        raise InvalidJobError(
            f"data of job {job.name!r} is an iterator, which can be read only once: a plan would take a batch that training "
            "then lacks. Pass a list, a DataLoader, or a function that makes a fresh iterator"
        )
    numbers = torch.Generator().manual_seed(job.seed or 0)
    model = model_of(job)
    step = Step(
        model, optimizer=optimizer_of(job, model), loss=job.loss, step=job.step, accumulate=job.accumulate,
        clip_grad_norm=job.clip_grad_norm, clip_grad_value=job.clip_grad_value, autocast=job.autocast,
        recompute=job.recompute, generator=numbers, name=job.name,
    )  # fmt: skip
    data = job.data
    source = data.reader() if isinstance(data, SharedData) else Batches(job.name, data, numbers)
    with contextlib.closing(source) as batches:
        return step, next(iter(batches.epoch()))
