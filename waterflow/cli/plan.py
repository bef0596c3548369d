"""``waterflow plan``: the largest batches of jobs side by side, and the jobs that fit as they are; no GPU is needed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from waterflow.cli.config import TrainConfig
from waterflow.cli.output import Terminal, table
from waterflow.cli.references import ConfigError, blamed, find_function, meant, one_line
from waterflow.errors import CaptureError, InvalidJobError, MemoryLimitError, WaterflowError
from waterflow.executor.memory_limit import reserve_of
from waterflow.job import Job
from waterflow.partition.passes.rematerialize import Recomputed
from waterflow.partition.plan.plan import format_bytes
from waterflow.planner.feasibility import Feasibility, Need, feasible
from waterflow.planner.gpus import GPU
from waterflow.planner.report import save_report
from waterflow.planner.simulate import Clock
from waterflow.planner.step_sizes import SizedStep
from waterflow.training.batch_size import MaxBatchSize, device_of, find, sizes_of
from waterflow.training.fit_together import Together, fit_together
from waterflow.training.step_queue import STEPS_AHEAD
from waterflow.zoo import FULL

_ALSO_CALLED = {
    "bert-base": "bert",
    "bert-base-uncased": "bert",
    "vit-base": "vit",
    "vit_b_16": "vit",
    "inception": "inception_v3",
}


@dataclass(frozen=True)
class GPUPlan:
    """The plan for jobs on one device, counted as ``train`` with a limit of ``memory`` bytes counts.

    ``steps`` has each job's name, and its step with the job's own batch; ``feasibility`` the sets that train together.
    ``eager`` has, by name, the reasons why jobs cannot be captured; those are not planned. ``recomputed`` has what jobs
    recompute, or would, to fit alone. If not even the smallest batches of all fit together, ``largest`` is None, ``reason``
    says why, and ``hindrance`` is the job that needs most, with its step.
    """

    device: GPU | None
    memory: int
    steps: tuple[tuple[str, SizedStep], ...]
    feasibility: Feasibility
    eager: dict[str, str]
    recomputed: dict[int, Recomputed]
    largest: MaxBatchSize | None = None
    reason: str | None = None
    hindrance: tuple[str, SizedStep] | None = None

    @property
    def reserve(self) -> int:
        """Bytes of the memory that are the engine's reserve."""
        return self.memory - self.feasibility.room

    @property
    def fits(self) -> bool | None:
        """True if all jobs train together with their own batches; None if the memory of one is not known."""
        return False if not self.feasibility.fits else None if self.eager else True

    def verdict(self, number: int) -> str:
        """Return the verdict, in words, on the job with this index and its own batch."""
        recomputes = number in self.recomputed
        turns = self.feasibility.turns
        for turn, jobs in enumerate(turns):
            if number in jobs:
                waits = f"waits: set {turn + 1} of {len(turns)}"
                return ("fits" if turn == 0 else waits) + (", recomputing" if recomputes else "")
        return "fits alone with recompute" if recomputes else "does not fit"

    def explanation(self) -> list[str]:
        """Return the reasons, in sentences."""
        lines = []
        together = self.feasibility.together
        if together and len(self.steps) > 1:
            held, high = sum(job.held for job in together), max(together, key=lambda job: job.height)
            lines.append(
                f"with the batches that they have, {len(together)} of {len(self.steps)} jobs train together: all of them "
                f"hold {format_bytes(held)}, the highest step ({high.name}) takes {format_bytes(high.height)} more, of "
                f"{format_bytes(self.feasibility.room)}"
            )
        lines += [
            f"{name} cannot be captured: it would train eagerly, with memory that is not known before it runs: {why}"
            for name, why in self.eager.items()
        ]
        lines += [
            f"{name} with recompute='auto' and its batch of {step.size}: {self.recomputed[i]}"
            if self.verdict(i).startswith("fits alone")
            else f"{name} recomputes with its batch of {step.size}: {self.recomputed[i]}"
            for i, (name, step) in enumerate(self.steps)
            if i in self.recomputed
        ]
        lines += [
            f"{name} with its batch of {step.size} cannot be brought to its recompute=: its step is "
            f"{format_bytes(step.beyond or 0)} higher at best"
            for name, step in self.steps
            if not step.within
        ]
        lines += str(self.largest).splitlines() if self.largest is not None else []
        lines += [self.reason] if self.reason is not None else []
        return lines

    def save_report(self, path: Path) -> str:
        """Draw the largest batches, or the job that keeps the smallest from fitting; returns a description of the picture."""
        clock = Clock(self.device) if self.device is not None else None
        where = self.device.name if self.device is not None else None
        if self.largest is not None:
            self.largest.save_report(path, clock)
            return "the largest batches"
        if self.hindrance is None:
            raise InvalidJobError("there is nothing to draw: no job could be captured")
        name, step = self.hindrance
        save_report(path, [self.hindrance], limit=self.memory, reserve=self.reserve, gpu=where, clock=clock)
        return f"{name} alone with a batch of {step.size}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, sizes in bytes."""
        turns = self.feasibility.turns
        fit = {i for turn in turns for i in turn}
        jobs: list[dict[str, Any]] = [
            {
                "name": name,
                "batch": step.size,
                "held_bytes": step.held,
                "height_bytes": step.height,
                "verdict": self.verdict(i),
                "fits": i in fit,
                "recomputed": dataclasses.asdict(self.recomputed[i]) if i in self.recomputed else None,
            }
            for i, (name, step) in enumerate(self.steps)
        ]
        jobs += [
            {"name": name, "verdict": "trains eagerly", "fits": None, "opaque_reason": why} for name, why in self.eager.items()
        ]
        return {
            "gpu": self.device.name if self.device is not None else None,
            "memory_bytes": self.memory,
            "reserve_bytes": self.reserve,
            "batches_held": STEPS_AHEAD,
            "fits": self.fits,
            "jobs": jobs,
            "sets": [[need.name for need in self.feasibility.of(turn)] for turn in turns],
            "largest": self.largest.to_dict() if self.largest is not None else None,
            "reason": self.reason,
        }


def plan_for_gpu(
    jobs: Sequence[Job],
    *,
    copies: int = 1,
    gpu: str | GPU | None = None,
    memory: int | float | str | None = None,
    captured: Callable[[], None] = lambda: None,
) -> GPUPlan:
    """Capture the jobs' steps and find what fits; trains nothing. Arguments and errors as ``max_batch_size``.

    A job that cannot be captured does not keep the others from being planned. ``captured`` is called at each capture.
    """
    device, limit, context = device_of(gpu, memory)
    room = limit - reserve_of(limit)
    looked, eager = [], {}
    for job in jobs:
        try:
            looked.append(sizes_of(job, captured))
        except CaptureError as error:
            eager[job.name] = str(error)
        # Its text is for users already; errors of the user's code get the job's name.
        except WaterflowError:
            raise
        except Exception as error:
            raise InvalidJobError(f"job {job.name!r} cannot be planned: {one_line(error)}") from error
    # Copies are one object: each job is captured once, however many copies there are.
    sizes = [each for each in looked for _ in range(copies)]
    steps = [each.at(each.given) for each in sizes]
    names = [f"{each.step.name} {i + 1}" if copies > 1 else each.step.name for each in looked for i in range(copies)]
    largest = reason = hindrance = None
    try:
        largest = find(sizes, limit, context, Clock(device) if device is not None else None) if sizes else None
    except MemoryLimitError as error:
        reason = one_line(error)
        # Drawn by --report: the reader asks what stands in the way.
        smallest = [(each.step.name, each.smallest()) for each in looked]
        hindrance = max(smallest, key=lambda job: job[1].held + job[1].height)
    recomputed: dict[int, Recomputed] = {}
    for i, each in enumerate(sizes):
        cost = None
        if steps[i].held + steps[i].height > room > steps[i].held:
            with contextlib.suppress(MemoryLimitError):
                lower, cost = each.lowered(each.given, room - steps[i].held)
                # Only recompute="auto" lets the engine lower a step; for others the cost is advice.
                steps[i] = lower if each.step.recompute == "auto" else steps[i]
        # It fits as it is, or not even its state does: the cost is that of its own recompute=, if it has one.
        elif steps[i].within:
            cost = each.cost(each.given)
        recomputed |= {i: cost} if cost is not None else {}
    named = tuple(zip(names, steps))
    found = feasible([Need(name, step.held, step.height) if step.within else None for name, step in named], room)
    return GPUPlan(device, limit, named, found, eager, recomputed, largest, reason, hindrance)


def job_named(reference: str, folder: Path) -> Job:
    """Return the job of a zoo model's name, or of a function ``module:function`` that returns one. Raises ConfigError."""
    if ":" in reference:
        made = find_function(reference, folder, "--model")()
        if not isinstance(made, Job):
            raise ConfigError(f"--model: {reference} must return a waterflow.Job; it returned a {type(made).__name__}")
        return made
    model = FULL.get(_ALSO_CALLED.get(reference, reference))
    if model is None:
        raise ConfigError(
            f"--model: the zoo has no {reference!r}{meant(reference, FULL)}; or name a function that makes a job: module:function"
        )
    # The batch of 8 only gives the capture its shapes; the search finds the largest.
    return Job(name=reference, model=model.build, data=[model.batch(8, None)], step=model.step, optimizer=model.optimizer)


def renamed(jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs with a number appended to names that are not unique."""
    names = [job.name for job in jobs]
    return [
        dataclasses.replace(job, name=f"{job.name}-{names[:i].count(job.name) + 1}") if names.count(job.name) > 1 else job
        for i, job in enumerate(jobs)
    ]


def gpu_table(found: GPUPlan) -> Table:
    """Return a table with a row per job: its memory with its own batch, and its largest batch beside the others."""
    where = found.device.name if found.device is not None else "a device"
    columns = ("job", "batch", "held", "step", "", "largest batch", "alone", "ratio")
    title = f"{where}: {format_bytes(found.memory)} for jobs, {format_bytes(found.reserve)} of it reserve"
    made = table(title, columns, left=("job", ""))
    rows = found.largest.jobs if found.largest is not None else ()
    for i, (name, step) in enumerate(found.steps):
        sizes = (str(rows[i].size), str(rows[i].alone), f"{rows[i].ratio:.3f}") if rows else ("", "", "")
        held, height = format_bytes(step.held), format_bytes(step.height)
        made.add_row(name, str(step.size), held, height, found.verdict(i), *sizes)
    for name in found.eager:
        made.add_row(name, "", "", "", "trains eagerly: not known")
    return made


def here_table(found: Together) -> Table:
    """Return a table with a row per job: its plan, and its verdict."""
    columns = ("job", "persistent", "batch", "height", "peak", "operations", "groups", "")
    made = table("predicted, per job", columns, left=("job", ""))
    for job in found.jobs:
        p = job.plan
        sizes = [format_bytes(n) for n in (p.persistent, p.batch, p.height, p.peak)] if p is not None else [""] * 4
        counts = [str(p.operations), str(len(p.groups))] if p is not None else ["", ""]
        made.add_row(job.name, *sizes, *counts, job.verdict)
    return made


def show_gpu_plan(terminal: Terminal, found: GPUPlan, report: Path | None) -> None:
    """Print the plan for a GPU, and draw it if ``report`` is a path."""
    terminal.say(gpu_table(found))
    for line in found.explanation():
        terminal.say(line)
    if report is not None:
        what = found.save_report(report)
        terminal.say(f"[dim]drawn: {what}: {report}[/dim]")
    terminal.result(found.to_dict())


def show_plan_here(terminal: Terminal, settings: TrainConfig, groups: bool) -> None:
    """Print the plan for this machine. Jobs that fail or do not fit count as failures."""
    found = fit_together(settings.jobs, settings.memory, settings.max_concurrent)
    terminal.say(here_table(found))
    for line in found.explanation():
        terminal.say(line)
    for job in found.jobs:
        if groups and job.plan is not None:
            terminal.say("")
            terminal.say(str(job.plan))
        if job.error is not None:
            terminal.fail(blamed(job.name, job.error))
    terminal.result(found.to_dict(groups))
