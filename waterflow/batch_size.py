"""``max_batch_size``: the largest batches at which jobs train together, on any GPU, without one.

Steps are captured and never run. What the figures mean: ``planner/search.py``.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from waterflow.errors import InvalidJobError
from waterflow.executor.memory_limit import parse_memory
from waterflow.executor.presets import GPU, gpu
from waterflow.executor.simulation import Clock, Simulated, SimulatedJob, simulate
from waterflow.job import Job
from waterflow.partition.plan import format_bytes
from waterflow.partition.recompute import Recomputed
from waterflow.planner.recomputing import largest_recomputed
from waterflow.planner.report import save_report
from waterflow.planner.search import LargestBatch, LargestMix, largest_batch, largest_mix, run_copies
from waterflow.planner.sets import Need, in_turns, largest_set
from waterflow.planner.sizes import Batches, SizedStep, StepSizes
from waterflow.together import step_and_batch


@dataclass(frozen=True)
class RecomputedBatch:
    """The largest batch of a job that recomputes and trains alone, ``without`` recomputing, and what it costs."""

    size: int
    without: int
    cost: Recomputed


@dataclass(frozen=True)
class JobBatch:
    """One job's largest batch beside the others, and alone. Bytes.

    ``limit`` is the share of its room alone that is left beside what the others hold all the time: parameters, optimizer
    state and a batch of each. ``recomputed`` is there for a job whose ``recompute=`` changes the batch that fits alone.
    """

    name: str
    size: int
    alone: int
    limit: float
    persistent: int
    batch: int
    height: int
    recomputed: RecomputedBatch | None = None

    @property
    def ratio(self) -> float:
        """The batch beside the others as a share of the one alone."""
        return self.size / self.alone


@dataclass(frozen=True)
class MaxBatchSize:
    """The largest batches of jobs side by side in ``memory`` bytes; ``context`` bytes of the GPU were held back.

    ``run`` is the simulated run with those batches, its times a model; None for a job alone. ``steps`` has each job's step.
    """

    jobs: tuple[JobBatch, ...]
    memory: int
    context: int
    run: Simulated | None
    steps: tuple[SizedStep, ...] = field(default=(), repr=False)

    @property
    def size(self) -> int:
        """The batch of every job. Raises ValueError where they differ."""
        sizes = {job.size for job in self.jobs}
        if len(sizes) > 1:
            raise ValueError(f"jobs have batches of their own: {', '.join(f'{j.name} {j.size}' for j in self.jobs)}")
        return sizes.pop()

    def save_report(self, path: str | os.PathLike[str], clock: Clock | None = None) -> None:
        """Draw a few steps with these batches: the arena's two stacks, the lanes, and the highest peak by line; a PNG."""
        names = [job.name for job in self.jobs]
        save_report(path, list(zip(names, self.steps)), memory=self.memory, clock=clock)

    def __str__(self) -> str:
        held = f", beside {format_bytes(self.context)} for the CUDA context" if self.context else ""
        lines = [f"largest batches in {format_bytes(self.memory)}{held}"]
        for job, copies in Counter(self.jobs).items():
            beside = (
                f", {job.ratio:.1%} of {job.alone} alone (the limit: {job.limit:.1%})" if len(self.jobs) > 1 else ""
            )
            lines.append(
                f"  {f'{copies} x ' if copies > 1 else ''}{job.name}: {job.size}{beside}; each holds "
                f"{format_bytes(job.persistent)} and a batch of {format_bytes(job.batch)}, a step takes "
                f"{format_bytes(job.height)} more"
            )
            if job.recomputed is not None:
                again = job.recomputed
                lines.append(f"  {job.name} alone, recomputing: {again.size}, {again.without} without; {again.cost}")
        if self.run is not None:
            lines.append(
                f"  simulated, every access checked: peak {format_bytes(self.run.peak)}; by a model of the GPU's rates "
                f"two lanes are busy {self.run.overlap:.0%} of the time, {self.run.speed:.2f} times as fast as in turns"
            )
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, bytes throughout."""
        made: dict[str, Any] = {
            "memory_bytes": self.memory, "context_bytes": self.context,
            "jobs": [asdict(job) | {"ratio": job.ratio} for job in self.jobs],
        }  # fmt: skip
        if self.run is not None:
            made["model"] = {"overlap": self.run.overlap, "speed": self.run.speed}
            made["peak_bytes"] = self.run.peak
        return made


def max_batch_size(
    jobs: Job | Sequence[Job], *, copies: int = 1, gpu: str | GPU | None = None,
    memory: int | float | str | None = None,
) -> MaxBatchSize:  # fmt: skip
    """The largest batches at which all jobs, ``copies`` of each, train side by side on one device.

    Makes each model and reads one batch of its data, captures a few steps, and runs none: the jobs are simulated on the
    device with the engine's own placement and admission, every access checked. Different jobs get the same share of the
    batch that each could train alone.

    A job with ``recompute=`` in bytes is planned with steps of that height. With ``"auto"`` an engine lowers a step only
    where it would not fit alone, so that side by side nothing changes: ``JobBatch.recomputed`` has the larger batch alone
    (how it is found, and how far it can be trusted: ``planner/recomputing.py``).

    Args:
        jobs: One job, or several.
        copies: How many of each.
        gpu: A preset such as ``"v100-32g"`` (``waterflow.executor.presets``), whose context is held back.
        memory: Bytes, or text such as ``"24GiB"``: of a device that has no preset, or less of one that has.

    At the result the next larger batches do not fit: where memory grows along a line, as it does between what is captured,
    none above does. Raises InvalidJobError for settings that cannot be, MemoryLimitError where not even the smallest batches fit, and
    CaptureError for a job whose step cannot be captured: its memory is not known before it runs.
    """
    given = [jobs] if isinstance(jobs, Job) else list(jobs)
    if not given or copies < 1:
        raise InvalidJobError(f"there must be a job, and a copy of it; got {len(given)} job(s), copies={copies}")
    device, limit, context = device_of(gpu, memory)
    looked: dict[int, StepSizes] = {}
    for job in given:
        if id(job) not in looked:
            job.check()
            looked[id(job)] = StepSizes(*step_and_batch(job))
    sizes = [looked[id(job)] for job in given for _ in range(copies)]
    return find(sizes, limit, context, Clock(device) if device is not None else None)


def find(sizes: Sequence[StepSizes], limit: int, context: int = 0, clock: Clock | None = None) -> MaxBatchSize:
    """The same of steps that are there already; ``sizes`` has one for each job, equal jobs the same one."""
    if len(sizes) == 1:
        alone = largest_batch(sizes[0], memory=limit)
        row = _row(sizes[0], alone.step, alone, 1.0, _recomputed(sizes[0], alone))
        return MaxBatchSize((row,), limit, context, None, (alone.step,))
    found = largest_mix(sizes, memory=limit, clock=clock)
    again = {each: _recomputed(each, alone) for each, alone in dict(zip(sizes, found.alone)).items()}
    rows = [_row(*row, again[row[0]]) for row in zip(sizes, found.steps, found.alone, found.limits)]
    return MaxBatchSize(tuple(rows), limit, context, found.run, found.steps)


def _row(
    sizes: StepSizes, step: SizedStep, alone: LargestBatch, limit: float, recomputed: RecomputedBatch | None
) -> JobBatch:
    height = step.offsets.height
    return JobBatch(sizes.step.name, step.size, alone.size, limit, step.persistent, step.batch, height, recomputed)


def _recomputed(sizes: StepSizes, alone: LargestBatch) -> RecomputedBatch | None:
    """The largest batch alone of a job that may recompute; None where it does not differ from the one without."""
    if sizes.step.recompute == "auto":
        found = largest_recomputed(sizes, alone.memory, alone.size)
        return RecomputedBatch(found.size, alone.size, found.cost) if found is not None else None
    cost = sizes.cost(alone.size)
    if cost is None:
        return None
    return RecomputedBatch(alone.size, largest_batch(sizes.without_recomputing(), memory=alone.memory).size, cost)


def device_of(name: str | GPU | None, memory: int | float | str | None) -> tuple[GPU | None, int, int]:
    """The GPU, the bytes that jobs may use, and those that its context takes. Raises InvalidJobError."""
    if name is None:
        if memory is None:
            raise InvalidJobError("the device must be known: pass gpu='v100-32g' or another preset, or memory='24GiB'")
        return None, parse_memory(memory), 0
    device = name if isinstance(name, GPU) else gpu(name)
    limit = device.usable if memory is None else parse_memory(memory, device.usable)
    if limit > device.usable:
        raise InvalidJobError(
            f"memory={memory!r} is more than {device.name} has for jobs: {format_bytes(device.usable)}, beside "
            f"{format_bytes(device.context)} for the CUDA context; lower it"
        )
    return device, limit, device.context


__all__ = [
    "GPU",
    "Batches",
    "Clock",
    "JobBatch",
    "LargestBatch",
    "LargestMix",
    "MaxBatchSize",
    "Need",
    "RecomputedBatch",
    "Simulated",
    "SimulatedJob",
    "SizedStep",
    "StepSizes",
    "find",
    "gpu",
    "in_turns",
    "largest_batch",
    "largest_mix",
    "largest_recomputed",
    "largest_set",
    "max_batch_size",
    "run_copies",
    "simulate",
]
