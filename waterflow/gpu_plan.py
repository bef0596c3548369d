"""Plans for a GPU that need not be there: the largest batches of jobs side by side, and which of them fit as they are."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waterflow.batch_size import MaxBatchSize, device_of, find
from waterflow.errors import MemoryLimitError
from waterflow.executor.presets import GPU
from waterflow.executor.simulation import Clock
from waterflow.job import Job
from waterflow.partition.plan import format_bytes
from waterflow.partition.recompute import Recomputed
from waterflow.planner.sets import Need, in_turns
from waterflow.planner.sizes import StepSizes
from waterflow.references import ConfigError, find_function, meant, one_line
from waterflow.together import step_and_batch


@dataclass(frozen=True)
class GPUPlan:
    """What was found for jobs on one device. Bytes.

    ``needs`` is what each job takes with the batch that it has, ``turns`` the sets of jobs that train together, one after
    the other, by their places; a job in none of them does not fit, unless ``recomputed`` has what it would have to make
    again. ``largest`` is None where not even the smallest
    batches of all fit together, for the ``reason`` given.
    """

    device: GPU | None
    memory: int
    batches: tuple[int, ...]
    needs: tuple[Need, ...]
    turns: tuple[tuple[int, ...], ...]
    recomputed: dict[int, Recomputed]
    largest: MaxBatchSize | None
    reason: str | None

    def verdict(self, number: int) -> str:
        """Of one job, with the batch that it has."""
        if number in self.recomputed:
            return "fits alone with recompute"
        for turn, jobs in enumerate(self.turns):
            if number in jobs:
                return "fits" if turn == 0 else f"waits: set {turn + 1} of {len(self.turns)}"
        return "does not fit"

    def explanation(self) -> list[str]:
        """Why, in sentences."""
        lines = []
        if self.turns and len(self.needs) > 1:
            together = [self.needs[i] for i in self.turns[0]]
            held, high = sum(job.held for job in together), max(together, key=lambda job: job.height)
            lines.append(
                f"with the batches that they have, {len(together)} of {len(self.needs)} jobs train together: all of them "
                f"hold {format_bytes(held)}, the highest step ({high.name}) takes {format_bytes(high.height)} more, of "
                f"{format_bytes(self.memory)}"
            )
        lines += [
            f"{self.needs[i].name} with recompute='auto' and its batch of {self.batches[i]}: {cost}"
            for i, cost in self.recomputed.items()
        ]
        lines += str(self.largest).splitlines() if self.largest is not None else []
        lines += [self.reason] if self.reason is not None else []
        return lines

    def save_report(self, path: Path) -> None:
        """Draw the largest batches; nothing where there are none."""
        if self.largest is not None:
            self.largest.save_report(path, Clock(self.device) if self.device is not None else None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, bytes throughout."""
        jobs = [
            {"name": need.name, "batch": batch, "held_bytes": need.held, "height_bytes": need.height,
             "verdict": self.verdict(i)}
            for i, (need, batch) in enumerate(zip(self.needs, self.batches))
        ]  # fmt: skip
        return {
            "gpu": self.device.name if self.device is not None else None, "memory_bytes": self.memory, "jobs": jobs,
            "sets": [[self.needs[i].name for i in turn] for turn in self.turns],
            "largest": self.largest.to_dict() if self.largest is not None else None, "reason": self.reason,
        }  # fmt: skip


def plan_for_gpu(
    jobs: Sequence[Job], *, copies: int = 1, gpu: str | GPU | None = None, memory: int | float | str | None = None
) -> GPUPlan:
    """Capture the jobs' steps and find what fits; trains nothing. Arguments and errors are ``max_batch_size``'s."""
    device, limit, context = device_of(gpu, memory)
    looked = []
    for job in jobs:
        job.check()
        looked.append(StepSizes(*step_and_batch(job)))
    sizes = [each for each in looked for _ in range(copies)]
    steps = [each.at(each.given) for each in sizes]
    names = [f"{each.step.name} {i + 1}" if copies > 1 else each.step.name for each in looked for i in range(copies)]
    needs = tuple(Need(name, step.held, step.offsets.height) for name, step in zip(names, steps))
    largest = reason = None
    try:
        largest = find(sizes, limit, context, Clock(device) if device is not None else None)
    except MemoryLimitError as error:
        reason = one_line(error)
    recomputed: dict[int, Recomputed] = {}
    for i, (each, step, need) in enumerate(zip(sizes, steps, needs)):
        if need.peak > limit:
            with contextlib.suppress(MemoryLimitError):
                cost = each.recomputed(step.size, limit - step.held)
                recomputed |= {i: cost} if cost is not None else {}
    batches = tuple(step.size for step in steps)
    return GPUPlan(device, limit, batches, needs, tuple(in_turns(needs, limit)), recomputed, largest, reason)


def job_named(reference: str, folder: Path) -> Job:
    """The job of a model: a name of the zoo in the source tree, or a function ``module:function`` that makes a job."""
    if ":" in reference:
        made = find_function(reference, folder, "--model")()
        if not isinstance(made, Job):
            raise ConfigError(f"--model: {reference} must return a waterflow.Job; it returned a {type(made).__name__}")
        return made
    try:
        zoo = importlib.import_module("benchmarks.zoo").FULL
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"--model: {reference!r} is a name of the zoo, which comes with the source tree ({one_line(error)}); run from "
            "a clone, or name a function that makes a job: module:function"
        ) from None
    if reference not in zoo:
        raise ConfigError(f"--model: the zoo has no {reference!r}{meant(reference, zoo)}")
    model = zoo[reference]
    return Job(
        name=reference, model=model.build, data=[model.batch(8, None)], step=model.step, optimizer=model.optimizer
    )


def renamed(jobs: Sequence[Job]) -> list[Job]:
    """Jobs of equal names with a number each."""
    names = [job.name for job in jobs]
    return [
        dataclasses.replace(job, name=f"{job.name}-{names[:i].count(job.name) + 1}")
        if names.count(job.name) > 1
        else job
        for i, job in enumerate(jobs)
    ]
