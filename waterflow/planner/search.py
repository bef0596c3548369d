"""Find the largest batches of jobs that train side by side: search over sizes, then check the answer in a simulated run."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from waterflow.errors import InvalidJobError, MemoryLimitError, WaterflowError
from waterflow.executor.memory_limit import parse_memory
from waterflow.executor.program.reserve_step import WhatFits
from waterflow.partition.capture.substitution import no_collections
from waterflow.partition.passes.rematerialize import Recomputed
from waterflow.partition.plan.plan import format_bytes
from waterflow.planner.simulate import Clock, SimulatedJob, SimulatedRun, arena_of, simulate
from waterflow.planner.step_sizes import Plannable, SizedStep, StepSizes

_LEAST_STEPS, _MOST_STEPS, _OPERATIONS = 3, 12, 40_000  # simulated, of each job
_MOST_BATCH = 1 << 36
_APART = 8  # samples for each of the given batch: the further, the less a rounded size tilts a line
_FURTHEST = 64  # times the largest known size: how far a line is trusted


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch of each of ``copies`` equal jobs in ``memory`` bytes.

    ``step`` is the step with that batch. ``run`` is the simulated run of all copies; it is None for a single job, which is
    counted by its live bytes and not simulated.
    """

    copies: int
    memory: int
    step: SizedStep
    run: SimulatedRun | None

    @property
    def size(self) -> int:
        """The first dimension of the batch."""
        return self.step.size


@dataclass(frozen=True)
class LargestMix:
    """The largest batches of different jobs side by side, each the same share of that job's largest batch alone.

    ``run`` is the simulated run of all jobs.
    """

    memory: int
    alone: tuple[LargestBatch, ...]
    steps: tuple[SizedStep, ...]
    run: SimulatedRun

    @property
    def limits(self) -> tuple[float, ...]:
        """For each job, the share of its room for steps that is left beside what the other jobs hold."""
        held = sum(one.step.held for one in self.alone)
        return tuple((self.memory - held) / (self.memory - one.step.held) for one in self.alone)


def largest_batch(
    sizes: StepSizes,
    *,
    memory: int | float | str,
    copies: int = 1,
    beside: Sequence[SimulatedJob] = (),
    steps: int | None = None,
    clock: Clock | None = None,
    claimed: bool = False,
) -> LargestBatch:
    """Return the largest batch with which ``copies`` jobs of this step train side by side in ``memory``.

    Two lanes share one arena. Each copy holds its persistent state and ``sizes.batches_held`` batches on the device; its next
    batch waits in host memory. Operations are issued one by one. Jobs ``beside`` the copies keep their batches. A single job
    with none beside it is counted by its live bytes, for comparison with other systems; with ``claimed`` steps are counted as
    an engine counts them at admission: placed, and with the memory that they hand out.

    The search assumes that a larger batch needs no less memory, within the rounding of placement: the size it returns fits, and
    the next one does not. Then ``steps`` steps of all copies are simulated with that size; by default as many as reach a steady
    state within about a second.

    Raises MemoryLimitError if not even the smallest batch fits, CaptureError for a step that cannot be captured.
    """
    limit = parse_memory(memory)
    if copies < 1:
        raise InvalidJobError(f"at least one copy of a job has to be there; got copies={copies}")
    found = _largest([sizes] * copies, [1] * copies, limit, lambda steps: _needed(steps, beside, limit, claimed))[0]
    if copies == 1 and not beside:
        return LargestBatch(copies, limit, found, None)
    run = run_copies(sizes, found.size, memory=limit, copies=copies, beside=beside, steps=steps, clock=clock)
    return LargestBatch(copies, limit, found, run)


def largest_mix(
    jobs: Sequence[StepSizes], *, memory: int | float | str, clock: Clock | None = None, claimed: bool = False
) -> LargestMix:
    """Return the largest batches with which different jobs train side by side; see ``largest_batch``.

    Each batch is the same share of the job's largest batch alone, so that no job is starved. Raises as ``largest_batch``.
    """
    limit = parse_memory(memory)
    if not jobs:
        raise InvalidJobError("there must be a job to look for a batch of; got none")
    alone = {id(job): largest_batch(job, memory=limit, claimed=claimed) for job in jobs}
    each = tuple(alone[id(job)] for job in jobs)
    found = _largest(jobs, [one.size for one in each], limit, lambda steps: _needed(steps, (), limit, claimed))
    named = [(f"{job.step.name}-{i}", step) for i, (job, step) in enumerate(zip(jobs, found))]
    count = _enough_steps(found)
    run = simulate([step.job(name, count) for name, step in named], memory=limit, clock=clock)
    return LargestMix(limit, each, tuple(found), run)


def run_copies(
    sizes: StepSizes,
    size: int,
    *,
    memory: int | float | str,
    copies: int,
    beside: Sequence[SimulatedJob] = (),
    steps: int | None = None,
    grouped: bool = False,
    clock: Clock | None = None,
) -> SimulatedRun:
    """Simulate ``steps`` steps of ``copies`` jobs with batches of ``size``, beside the jobs in ``beside``.

    Each operation is a group of its own; with ``grouped`` the node groups of the plan are used. Raises as ``simulate``.
    """
    step = sizes.at(size)
    count = steps if steps is not None else _enough_steps([step] * copies)
    jobs = [*(step.job(f"{sizes.step.name}-{i}", count, grouped) for i in range(copies)), *beside]
    return simulate(jobs, memory=parse_memory(memory), clock=clock)


def _enough_steps(steps: Sequence[SizedStep]) -> int:
    # The bound on simulated operations keeps a run within about a second; below 3 steps a run would be mostly its start
    # and end.
    operations = sum(step.footprint.operations for step in steps)
    return max(_LEAST_STEPS, min(_MOST_STEPS, _OPERATIONS // operations))


def largest_claim(sizes: StepSizes, limit: int) -> SizedStep:
    """Return the step with the largest batch that an engine admits alone before placement. Raises as ``largest_batch``."""
    return _largest([sizes], [1], limit, lambda steps: max(steps[0].held + steps[0].peak, _least(steps, limit)))[0]


# Garbage collection is off during a search: it took a fifth of the CPU time of one.
@no_collections()
def _largest(
    jobs: Sequence[StepSizes], parts: Sequence[int], limit: int, needs: Callable[[list[SizedStep]], int]
) -> list[SizedStep]:
    """Return each job's step at the largest size at which all fit; sizes stay proportional to ``parts``."""
    most = max(parts)
    lead = jobs[parts.index(most)]
    smallest: dict[int, int] = {}

    def sized(size: int, captured: bool = False) -> list[SizedStep]:
        steps = []
        for job, part in zip(jobs, parts):
            own = size * part // most
            if own < 2 and part < most and id(job) not in smallest:  # not every step has batches of one
                smallest[id(job)] = job.smallest().size
            own = max(smallest.get(id(job), 1), own)
            steps.append(job.captured(own) if captured else job.at(own))
        return steps

    def needed(size: int) -> int:
        return needs(sized(size))

    # The given batch is known to capture; batches of one are not (batch norm), and are tried only if the given one does
    # not fit.
    low, stride = lead.given, _APART * lead.given
    if needed(low) > limit:
        smallest.update((id(job), job.smallest().size) for job in {id(job): job for job in jobs}.values())
        low, stride = smallest[id(lead)], max(1, low - smallest[id(lead)])
        if needed(low) > limit:
            raise _too_small(jobs, sized(low), needed(low), limit)
    # Lines between captures guide the search, but only captured sizes may be the answer: oneDNN's recurrent layers
    # round their workspaces, so that a line misses by a few KB. The size after the answer is captured, too, where that
    # error could have decided.
    while True:
        size = search_sizes(needed, low, limit, stride)
        said = needed(size)
        steps = sized(size, captured=True)
        off = abs(needs(steps) - said)  # the line's error here
        if off and limit < needed(size + 1) <= limit + off:
            sized(size + 1, captured=True)
        if needs(steps) <= limit < needed(size + 1):
            return steps


def _needed(steps: Sequence[SizedStep], beside: Sequence[SimulatedJob], limit: int, claimed: bool) -> int:
    """Return the bytes that these jobs need together. A result above the limit is a lower bound."""
    if len(steps) == 1 and not beside and not claimed:
        return max(steps[0].alone, _least(steps, limit))
    held = sum(step.held for step in steps) + sum(job.persistent + job.batch for job in beside)
    least = max(held + max(step.resident for step in steps), _least(steps, limit))
    # Placement is the slow part; a set whose live bytes already exceed the limit is not placed.
    if least > limit:
        return least
    # Copies of one step are placed once.
    distinct = {id(step): step for step in steps}.values()
    jobs = [step.job("", 1) for step in distinct]
    height = max(job.offsets.height for job in (*jobs, *beside))
    needed = max(least, height - arena_of([*(step.job("", 1) for step in steps), *beside], 0))
    return max(needed, held + max(step.height for step in steps)) if claimed else needed


def _least(steps: Sequence[SizedStep], limit: int) -> int:
    # A step that cannot be brought to its recompute= height must count as not fitting, by as much as it is too high, so
    # that the search still has a slope to follow. 0 if no step has such a height.
    return max((limit + step.beyond for step in steps if step.beyond is not None), default=0)


def _too_small(jobs: Sequence[StepSizes], steps: Sequence[SizedStep], needed: int, limit: int) -> MemoryLimitError:
    for job, step in zip(jobs, steps):
        allowed = job.step.recompute
        if step.beyond is not None and not step.within and isinstance(allowed, int):
            return MemoryLimitError(
                f"even the smallest batches must fit: {job.step.name!r} with a batch of {step.size} is "
                f"{format_bytes(step.beyond)} higher at best than its recompute= of {format_bytes(allowed)} says. "
                f"Allow at least {format_bytes(allowed + step.beyond)}, its lowest height",
                needed=needed,
                limit=limit,
            )
    what = ", ".join(f"{job.step.name!r} with a batch of {step.size}" for job, step in zip(jobs, steps))
    held = sum(step.persistent for step in steps)
    remedy = "train fewer at a time" if len(jobs) > 1 else "make the model smaller"
    return MemoryLimitError(
        f"even the smallest batches must fit: {what} need {format_bytes(needed)}, {format_bytes(held)} of it parameters, "
        f"buffers and optimizer state; the limit is {format_bytes(limit)}. {remedy.capitalize()} or raise memory=",
        needed=needed,
        limit=limit,
    )


def search_sizes(needed: Callable[[int], int], low: int, limit: int, stride: int = 1) -> int:
    """Return the largest size with ``needed(size) <= limit``. ``low`` must fit.

    ``needed`` is expensive, so lines through known sizes choose the next size; the first line is ``stride`` long. Raises
    InvalidJobError if memory does not grow with the size.
    """

    def line(low: int, high: int, otherwise: int) -> int:
        # The size at which a line through (low, high) reaches the limit.
        climb = needed(high) - needed(low)
        return low + (limit - needed(low)) * (high - low) // climb if climb > 0 else otherwise

    high, rounds = low + stride, 0
    while needed(high) <= limit:
        rounds += 1
        # After three rounds at least double: a line of nearly no slope would approach the limit in tiny steps.
        # _FURTHEST caps how far a line is trusted.
        further = max(line(low, high, 2 * high), high if rounds < 3 else 2 * high) + 1
        low, high = high, min(further, _FURTHEST * high)
        if high > _MOST_BATCH:
            raise InvalidJobError(f"batches of {low} still fit into {format_bytes(limit)}: this step's memory does not grow")
    rounds = 0
    while high - low > 1:
        rounds += 1
        middle = (low + high) // 2
        guess = line(low, high, middle) if rounds % 3 else middle  # every third round halves, in case it is no line
        guess = min(max(guess, low + 1), high - 1)
        for size in (guess, guess + 1):  # an exact line is confirmed by the next size
            if size < high and needed(size) <= limit:
                low = size
            else:
                high = min(high, size)
                break
    return low


def what_fits(step: Plannable, room: int, batches: int, batch: Any, beyond: int = 0) -> WhatFits:
    """Return which batches of ``step`` would fit into ``room`` bytes, as an engine counts them, if ``batch`` does not.

    ``batches`` is the number of batches that the job holds. ``beyond`` bytes of the step are not in its graph: temporaries of
    kernels, as its profile showed. Runs nothing, but captures the step a few times. Fields that cannot be found, because the
    step cannot be captured with other batches, are None; that is no error.
    """
    largest = least = recomputed = helps = None
    # This only improves the text of an error that is about to be raised: it must never raise another one.
    with contextlib.suppress(WaterflowError, RuntimeError):
        sizes, limit = StepSizes(step, batch, batches), room - beyond
        try:
            largest = largest_claim(sizes, limit).size
        except MemoryLimitError as error:
            largest, least = 0, (sizes.smallest().size, error.needed + beyond)
        if step.recompute == "auto":
            found = largest_recomputed(sizes, limit, largest)
            recomputed = found[0].size if found is not None else None
        elif step.recompute is None:
            # The job does not recompute: find out if recompute='auto' is worth advising.
            height, helps = limit - sizes.at(sizes.given).held, False
            with contextlib.suppress(MemoryLimitError):
                helps = height > 0 and step.recomputed_for(batch, height) is not None
    return WhatFits(largest, least, recomputed, helps)


def largest_recomputed(sizes: StepSizes, limit: int, largest: int) -> tuple[SizedStep, Recomputed] | None:
    """Return the step with the largest batch that fits into ``limit`` bytes alone if it may recompute, and its cost.

    ``largest`` is the largest batch without recomputing, 0 if none fits. Returns None if recomputing allows no larger batch.

    Each size has another graph, as other activations are the cheapest to recompute. So each size that the search visits is
    captured and lowered as far as possible. The lowest heights grow almost linearly, and a line through them finds the answer
    in about six sizes. The returned size is lowered as an engine would lower it, and fits; the next one does not. Larger ones
    might fit again, as activations are chosen greedily.
    """

    @functools.cache
    def needed(size: int) -> int:
        return sizes.at(size).held + sizes.lowest(size)

    def lowered(size: int) -> tuple[SizedStep, Recomputed] | None:
        height = limit - sizes.at(size).held
        if height <= 0:
            return None
        try:
            step, cost = sizes.lowered(size, height)
        except MemoryLimitError:
            return None
        return None if cost is None else (step, cost)

    low = largest or sizes.smallest().size
    if needed(low) <= limit:
        low = search_sizes(needed, low, limit, stride=low)
    found = lowered(low) if low > largest else None
    # The lowest height is a bound of the greedy pass with a limit of one byte; with the real limit the pass may end
    # lower, so the next sizes are tried until one fails.
    while (more := lowered(low + 1)) is not None:
        low, found = low + 1, more
    return found
