"""``max_batch_size``: the largest batches at which jobs train together, on any GPU, without having one.

Steps are captured and never run. Memory is counted as ``train`` counts it: the engine's reserve is set aside, and each job
holds as many batches as it submits ahead. ``planner/search.py`` describes the search.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from numbers import Integral
from typing import Any, Literal

from torch import nn

from waterflow.errors import CaptureError, InvalidJobError, MemoryLimitError, explained
from waterflow.executor.memory_limit import parse_limit, reserve_of
from waterflow.job import Job
from waterflow.partition.passes.rematerialize import Recomputed
from waterflow.partition.plan.plan import format_bytes
from waterflow.planner.feasibility import Need, feasible, largest_set
from waterflow.planner.gpus import GPU, gpu
from waterflow.planner.report import save_report
from waterflow.planner.search import LargestBatch, LargestMix, largest_batch, largest_mix, largest_recomputed, run_copies
from waterflow.planner.simulate import Clock, SimulatedJob, SimulatedRun, simulate
from waterflow.planner.step_sizes import SizedStep, StepSizes
from waterflow.training.fit_together import step_and_batch
from waterflow.training.step_queue import STEPS_AHEAD

_LEAST_BARE = 1 << 20  # bytes: less must be a mistake, such as memory=24 for 24 GiB


@dataclass(frozen=True)
class RecomputedBatch:
    """The largest batch of a job that recomputes and trains alone, ``without`` recomputing, and the cost of it."""

    size: int
    without: int
    cost: Recomputed


@dataclass(frozen=True)
class JobBatch:
    """One job's largest batch beside the others (``size``) and ``alone``. All else in bytes; ``batch`` is one of its batches.

    ``room_beside_largest`` is the share of its room alone that would be left if every other job held its largest batches alone
    all the time. All have smaller ones, so ``ratio`` may be above it. ``recomputed`` is set if ``recompute=`` changes the job's
    largest batch alone.
    """

    name: str
    size: int
    alone: int
    room_beside_largest: float
    persistent: int
    batch: int
    height: int
    recompute: int | Literal["auto"] | None = None
    recomputed: RecomputedBatch | None = None

    @property
    def ratio(self) -> float:
        """The batch beside the others as a share of the batch alone."""
        return self.size / self.alone


@dataclass(frozen=True)
class MaxBatchSize:
    """The largest batches of jobs side by side, as ``train`` with a limit of ``memory`` bytes admits them.

    ``reserve`` bytes of the limit are the engine's; ``context`` bytes of the GPU are not in the limit. Each job holds
    ``batches_held`` batches. ``run`` is the simulated run with these batches, None for a single job; its times are a model.
    ``steps`` has each job's step.
    """

    jobs: tuple[JobBatch, ...]
    memory: int
    context: int
    run: SimulatedRun | None
    reserve: int = 0
    batches_held: int = STEPS_AHEAD
    steps: tuple[SizedStep, ...] = field(default=(), repr=False)

    @property
    def size(self) -> int:
        """The batch size of every job. Raises ValueError if they differ."""
        sizes = {job.size for job in self.jobs}
        if len(sizes) > 1:
            raise ValueError(f"jobs have batches of their own: {', '.join(f'{j.name} {j.size}' for j in self.jobs)}")
        return sizes.pop()

    def save_report(self, path: str | os.PathLike[str], clock: Clock | None = None) -> None:
        """Draw a few steps with these batches as a PNG: the arena's two stacks, the lanes, and the highest peak by line."""
        names = [job.name for job in self.jobs]
        numbered = [f"{name} {names[:i].count(name) + 1}" if names.count(name) > 1 else name for i, name in enumerate(names)]
        where = None if clock is None else clock.gpu.name
        save_report(path, list(zip(numbered, self.steps)), limit=self.memory, reserve=self.reserve, gpu=where, clock=clock)

    def __str__(self) -> str:
        held = f", beside {format_bytes(self.context)} for the CUDA context" if self.context else ""
        lines = [f"largest batches in {format_bytes(self.memory)}, {format_bytes(self.reserve)} of it the reserve{held}"]
        for job, copies in Counter(self.jobs).items():
            beside = f", {job.ratio:.1%} of {job.alone} alone" if len(self.jobs) > 1 else ""
            lines.append(
                f"  {f'{copies} x ' if copies > 1 else ''}{job.name}: {job.size}{beside}; each holds "
                f"{format_bytes(job.persistent)} and {self.batches_held} batches of {format_bytes(job.batch)}, a step takes "
                f"{format_bytes(job.height)} more"
            )
            if job.recomputed is not None:
                again = job.recomputed
                lines.append(f"  {job.name} alone, recomputing: {again.size}, {again.without} without; {again.cost}")
            elif job.recompute == "auto":
                lines.append(f"  {job.name} alone, recomputing: no larger batch than {job.alone} fits")
        if len(self.jobs) > 1 and any(job.recompute == "auto" for job in self.jobs):
            lines.append(
                "  side by side no step recomputes: with recompute='auto' one does only where it would not fit alone; "
                "recompute= with a height, such as '2GiB', makes it lower beside others, too"
            )
        lines.append(
            "  counted as train(memory=) does, except temporaries of kernels: a job's first steps show them, and "
            "beside convolutions they can be a few percent of the step"
        )
        if self.run is not None:
            lines.append(
                f"  simulated, every access checked: peak {format_bytes(self.run.peak)}; by a model of the GPU's rates "
                f"two lanes are busy {self.run.overlap:.0%} of the time, {self.run.speed:.2f} times as fast as taking turns"
            )
            if round(self.run.speed, 2) < 1:
                lines.append("  by that model two lanes are slower than taking turns here: train(lanes=1) lets them do so")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; sizes in bytes."""
        made: dict[str, Any] = {
            "memory_bytes": self.memory,
            "reserve_bytes": self.reserve,
            "context_bytes": self.context,
            "batches_held": self.batches_held,
            "jobs": [asdict(job) | {"ratio": job.ratio} for job in self.jobs],
        }
        if self.run is not None:
            made["model"] = {"overlap": self.run.overlap, "speed": self.run.speed}
            made["peak_bytes"] = self.run.peak
        return made


@explained("max_batch_size", 'max_batch_size([job_a, job_b], gpu="a100-40g")', InvalidJobError)
def max_batch_size(
    jobs: Job | Sequence[Job], *, copies: int = 1, gpu: str | GPU | None = None, memory: int | float | str | None = None
) -> MaxBatchSize:
    """Return the largest batches at which all jobs, ``copies`` of each, train side by side on one device.

    Makes each model and reads one batch of its data, captures a few steps, and runs none: the jobs are simulated on the device
    with the engine's own placement and admission, and every access is checked. Different jobs get the same share of the batch
    that each could train alone. ``train`` with the same ``memory=`` and these batches runs all of them at the same time, as far
    as graphs tell: temporaries of kernels show only in the first steps.

    A job with ``recompute=`` in bytes is planned with steps of that height. With ``"auto"`` an engine lowers a step only if it
    would not fit alone, so nothing changes side by side; ``JobBatch.recomputed`` has the larger batch alone
    (``planner/search.py`` says how far it can be trusted).

    Args:
        jobs: One job, or several.
        copies: The number of copies of each.
        gpu: A preset such as ``"v100-32g"`` (``waterflow.planner.gpus``), whose context is set aside.
        memory: Bytes, or text such as ``"24GiB"``: for a device without a preset, or to use less of one.

    The next larger batches do not fit; nor do any larger ones, if memory grows linearly between captured sizes, as it does.
    Raises InvalidJobError for invalid settings, MemoryLimitError if not even the smallest batches fit, and CaptureError for a
    job whose step cannot be captured: its memory is not known before it runs.
    """
    given: list[Any] = [jobs] if isinstance(jobs, (Job, nn.Module)) else list(jobs)
    for job in given:
        if not isinstance(job, Job):
            raise InvalidJobError(
                f"max_batch_size takes jobs; got a {type(job).__name__}. Say what it is trained with: "
                "wf.Job(name='net', model=lambda: net, data=loader, optimizer=..., loss=...)"
            )
    if not given or isinstance(copies, bool) or not isinstance(copies, Integral) or copies < 1:
        raise InvalidJobError(
            f"there must be a job, and a whole number of copies of it; got {len(given)} job(s), copies={copies!r}"
        )
    device, limit, context = device_of(gpu, memory)
    # By identity: a job that is given twice is captured once.
    looked = {number: _looked_at(job) for number, job in {id(job): job for job in given}.items()}
    sizes = [looked[id(job)] for job in given for _ in range(copies)]
    return find(sizes, limit, context, Clock(device) if device is not None else None)


def _looked_at(job: Job) -> StepSizes:
    try:
        return sizes_of(job)
    except CaptureError as error:
        why = f"job {job.name!r} cannot be captured, and its memory is not known before it runs: {error.reason}"
        raise CaptureError(why, error.where) from None


def sizes_of(job: Job, captured: Callable[[], None] = lambda: None) -> StepSizes:
    """Return the job's step with batches of any size, as ``train`` runs it; ``captured`` is called at each capture.

    Raises CaptureError if the step cannot be captured with the job's own batch.
    """
    job.check()
    made = StepSizes(*step_and_batch(job), batches_held=STEPS_AHEAD)
    made.on_capture = captured
    made.at(made.given)
    return made


def find(sizes: Sequence[StepSizes], limit: int, context: int = 0, clock: Clock | None = None) -> MaxBatchSize:
    """Return the largest batches of captured steps: one of ``sizes`` per job, the same object for equal jobs."""
    reserve = reserve_of(limit)
    try:
        return _find(sizes, limit, reserve, context, clock)
    except MemoryLimitError as error:
        kept = f"{format_bytes(limit)}, {format_bytes(reserve)} of it the reserve"
        raise MemoryLimitError(f"{error} (it is {kept})", needed=error.needed + reserve, limit=limit) from None


def _find(sizes: Sequence[StepSizes], limit: int, reserve: int, context: int, clock: Clock | None) -> MaxBatchSize:
    room = limit - reserve
    if len(sizes) == 1:
        alone = largest_batch(sizes[0], memory=room, claimed=True)
        row = _row(sizes[0], alone.step, alone, 1.0, _recomputed(sizes[0], alone))
        return MaxBatchSize((row,), limit, context, None, reserve, steps=(alone.step,))
    found = largest_mix(sizes, memory=room, clock=clock, claimed=True)
    # Equal jobs are one object: each is searched once.
    again = {each: _recomputed(each, alone) for each, alone in dict(zip(sizes, found.alone)).items()}
    rows = [_row(*row, again[row[0]]) for row in zip(sizes, found.steps, found.alone, found.limits)]
    return MaxBatchSize(tuple(rows), limit, context, found.run, reserve, steps=found.steps)


def _row(sizes: StepSizes, step: SizedStep, alone: LargestBatch, limit: float, recomputed: RecomputedBatch | None) -> JobBatch:
    return JobBatch(
        sizes.step.name, step.size, alone.size, limit, step.persistent, step.batch, step.height, sizes.step.recompute, recomputed
    )


def _recomputed(sizes: StepSizes, alone: LargestBatch) -> RecomputedBatch | None:
    # None if recomputing does not change the largest batch alone.
    if sizes.step.recompute == "auto":
        found = largest_recomputed(sizes, alone.memory, alone.size)
        return RecomputedBatch(found[0].size, alone.size, found[1]) if found is not None else None
    cost = sizes.cost(alone.size)
    if cost is None:
        return None
    without = largest_batch(sizes.without_recomputing(), memory=alone.memory, claimed=True)
    return RecomputedBatch(alone.size, without.size, cost)


def device_of(name: str | GPU | None, memory: int | float | str | None) -> tuple[GPU | None, int, int]:
    """Return the GPU, the bytes that jobs may use, and the bytes of its context. Raises InvalidJobError."""
    if name is None:
        if memory is None:
            raise InvalidJobError("the device must be known: pass gpu='v100-32g' or another preset, or memory='24GiB'")
        return None, parse_limit(memory, least=_LEAST_BARE), 0
    device = name if isinstance(name, GPU) else gpu(name)
    limit = device.usable if memory is None else parse_limit(memory, device.usable, _LEAST_BARE)
    if limit > device.usable:
        raise InvalidJobError(
            f"memory={memory!r} is more than {device.name} has for jobs: {format_bytes(device.usable)}, beside "
            f"{format_bytes(device.context)} for the CUDA context; lower it"
        )
    return device, limit, device.context


__all__ = [
    "GPU",
    "Clock",
    "JobBatch",
    "LargestBatch",
    "LargestMix",
    "MaxBatchSize",
    "Need",
    "RecomputedBatch",
    "SimulatedJob",
    "SimulatedRun",
    "SizedStep",
    "StepSizes",
    "feasible",
    "find",
    "gpu",
    "largest_batch",
    "largest_mix",
    "largest_recomputed",
    "largest_set",
    "max_batch_size",
    "run_copies",
    "simulate",
]
