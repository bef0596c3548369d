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
    the other, by their places; a job in none of them does not fit as it is. ``recomputed`` has what jobs make again, or
    would, to fit alone. ``beyond`` has the jobs whose steps cannot be as low as their ``recompute=`` says, each with the
    bytes that are too many. ``largest`` is None where not even the smallest batches of all fit together, for the ``reason``
    given.
    """

    device: GPU | None
    memory: int
    batches: tuple[int, ...]
    needs: tuple[Need, ...]
    turns: tuple[tuple[int, ...], ...]
    recomputed: dict[int, Recomputed]
    beyond: dict[int, int]
    largest: MaxBatchSize | None
    reason: str | None

    def verdict(self, number: int) -> str:
        """Of one job, with the batch that it has."""
        recomputes = number in self.recomputed
        for turn, jobs in enumerate(self.turns):
            if number in jobs:
                waits = f"waits: set {turn + 1} of {len(self.turns)}"
                return ("fits" if turn == 0 else waits) + (", recomputing" if recomputes else "")
        return "fits alone with recompute" if recomputes else "does not fit"

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
            if self.verdict(i).startswith("fits alone")
            else f"{self.needs[i].name} recomputes with its batch of {self.batches[i]}: {cost}"
            for i, cost in self.recomputed.items()
        ]
        lines += [
            f"{self.needs[i].name} with its batch of {self.batches[i]} cannot be brought to its recompute=: its step is "
            f"{format_bytes(more)} higher at best"
            for i, more in self.beyond.items()
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
             "verdict": self.verdict(i),
             "recomputed": dataclasses.asdict(self.recomputed[i]) if i in self.recomputed else None}
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
    largest = reason = None
    try:
        largest = find(sizes, limit, context, Clock(device) if device is not None else None)
    except MemoryLimitError as error:
        reason = one_line(error)
    recomputed: dict[int, Recomputed] = {}
    for i, each in enumerate(sizes):
        cost = None
        if steps[i].held + steps[i].offsets.height > limit > steps[i].held:
            with contextlib.suppress(MemoryLimitError):
                lower, cost = each.lowered(each.given, limit - steps[i].held)
                steps[i] = lower if each.step.recompute == "auto" else steps[i]
        elif steps[i].within:
            cost = each.cost(each.given)
        recomputed |= {i: cost} if cost is not None else {}
    needs = tuple(Need(name, step.held, step.offsets.height) for name, step in zip(names, steps))
    beyond = {i: step.beyond for i, step in enumerate(steps) if step.beyond is not None and step.beyond > 0}
    fit = [i for i in range(len(needs)) if i not in beyond]
    turns = tuple(tuple(fit[k] for k in turn) for turn in in_turns([needs[i] for i in fit], limit))
    batches = tuple(step.size for step in steps)
    return GPUPlan(device, limit, batches, needs, turns, recomputed, beyond, largest, reason)


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
