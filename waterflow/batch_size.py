"""The largest batch: how much of one each copy of a job can train, when several share the memory of a device.

Steps are captured at the sizes that are asked for, never run; then all copies are simulated side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.utils import _pytree as pytree

from waterflow.errors import CaptureError, InvalidJobError, MemoryLimitError
from waterflow.executor.memory_limit import parse_memory
from waterflow.executor.simulation import Clock, Simulated, SimulatedJob, arena_of, simulate
from waterflow.partition.offsets import Offsets
from waterflow.partition.plan import format_bytes
from waterflow.step import Step

Batches = Literal["job", "lane"]

_SIMULATED_STEPS = 3
_MOST_BATCH = 1 << 24
_FURTHEST = 64  # times the largest known size: how far a line is trusted


@dataclass(frozen=True)
class SizedStep:
    """A step with batches of one size, in bytes. ``resident`` is the most that is live at once, ``offsets`` where.

    ``groups`` are the ends of its plan's node groups. ``copied`` are bytes of a batch that come with the step, at its
    beginning: they are then among ``offsets``, and ``batch``, what the job holds between steps, is 0.
    """

    size: int
    persistent: int
    batch: int
    resident: int
    offsets: Offsets
    groups: tuple[int, ...]
    copied: int = 0

    @property
    def alone(self) -> int:
        """All that the job holds at its highest, where nothing is lost between its pieces."""
        return self.persistent + self.batch + self.resident

    def job(self, name: str, steps: int, grouped: bool = False) -> SimulatedJob:
        """The job that trains such steps, each operation a group, or ``grouped`` as planned."""
        ends = self.groups if grouped else None
        return SimulatedJob(name, self.offsets, self.persistent, self.batch, steps, ends, self.copied)


class StepSizes:
    """A step with batches of any size: captured once for each size that is asked for.

    ``batch`` is one to start from; the dimension that varies is the first one of its tensors that is most common. Their
    values are never read. Not thread-safe, as the step is not.

    With ``batches="job"`` each job holds one batch on the device all the time, and the next one comes while a step runs.
    With ``"lane"`` only a job in mid-step does: its batch comes at the step's beginning, which waits for it, lies in the
    lane's end of the arena, and gives its ground back behind the last operation that reads it.
    """

    def __init__(self, step: Step, batch: Any, batches: Batches = "job") -> None:
        if batches not in ("job", "lane"):
            raise InvalidJobError(f'batches are held by a "job" or a "lane"; got {batches!r}')
        self.step = step
        self.batches = batches
        self._leaves, self._form = pytree.tree_flatten(batch)
        firsts = [t.shape[0] for t in self._leaves if isinstance(t, torch.Tensor) and t.dim() > 0]
        if not firsts:
            raise InvalidJobError("a batch must have a dimension that can vary; this one holds no tensor with one")
        self.given = max(sorted(set(firsts)), key=firsts.count)
        self._known: dict[int, SizedStep] = {}

    @property
    def captures(self) -> int:
        """How many sizes were looked at."""
        return len(self._known)

    def at(self, size: int) -> SizedStep:
        """The step with batches of this size. Raises CaptureError where it cannot be captured."""
        if size not in self._known:
            batch = pytree.tree_unflatten([self._resized(leaf, size) for leaf in self._leaves], self._form)
            by_lane = self.batches == "lane"
            plan, offsets = self.step.plan_for(batch), self.step.offsets_for(batch, with_batch=by_lane)
            held, copied = (0, plan.batch) if by_lane else (plan.batch, 0)
            resident = max(offsets.resident, default=0)
            self._known[size] = SizedStep(
                size, plan.persistent, held, resident, offsets, tuple(g.end for g in plan.groups), copied
            )
        return self._known[size]

    def smallest(self) -> SizedStep:
        """With batches of one, or of two where normalization over the batch allows no single one."""
        try:
            return self.at(1)
        except (CaptureError, RuntimeError):
            return self.at(2)

    def _resized(self, leaf: Any, size: int) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.shape[0] != self.given:
            return leaf
        # Memory that is asked for and never touched.
        last = leaf.dim() == 4 and not leaf.is_contiguous() and leaf.is_contiguous(memory_format=torch.channels_last)
        form = torch.channels_last if last else torch.contiguous_format
        return torch.empty((size, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device, memory_format=form)


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch of each of ``copies`` equal jobs in ``memory`` bytes, and what they take with it.

    ``run`` is the simulated run of all copies with that batch; None for a job alone, which is counted by its live bytes.
    """

    copies: int
    memory: int
    step: SizedStep
    run: Simulated | None

    @property
    def size(self) -> int:
        """The first dimension of the batch."""
        return self.step.size

    def limit_for(self, copies: int) -> float:
        """What of this job's room would be left for its step beside ``copies`` that hold as much as it all the time.

        With W for persistent state and one batch: (M - N W) / (M - W).
        """
        held = self.step.persistent + self.step.batch
        return (self.memory - copies * held) / (self.memory - held)

    def lossless_for(self, copies: int) -> float:
        """The share of this batch that each of ``copies`` could train if no byte were lost between their pieces.

        Takes memory, but for the persistent state, as proportional to the batch.
        """
        step = self.step
        room, alone = self.memory - copies * step.persistent, self.memory - step.persistent
        return room / alone * (step.batch + step.resident) / (copies * step.batch + step.resident)


def largest_batch(
    sizes: StepSizes, *, memory: int | float | str, copies: int = 1, beside: Sequence[SimulatedJob] = (),
    steps: int = _SIMULATED_STEPS,
) -> LargestBatch:  # fmt: skip
    """The largest batch with which ``copies`` jobs of this step train side by side in ``memory``.

    Two lanes share one arena; each copy holds its persistent state on the device, and one batch unless ``sizes`` says
    otherwise, the next batch waits in host memory, and operations are issued one by one. Jobs ``beside`` them keep the
    batches that they have. A single job with none beside it is counted by the bytes that are live at once.

    The search assumes that a larger batch needs no less, within the rounding of placement: the size that it returns fits,
    and the next one does not. With that size ``steps`` steps of all copies are then simulated.

    Raises MemoryLimitError where not even the smallest batch fits, CaptureError for a step that cannot be captured.
    """
    limit = parse_memory(memory)
    if copies < 1:
        raise InvalidJobError(f"at least one copy of a job has to be there; got copies={copies}")

    def needed(size: int) -> int:
        return _needed(sizes.at(size), copies, beside)

    smallest = sizes.smallest()
    if needed(smallest.size) > limit:
        raise MemoryLimitError(
            f"{copies} job(s) of step {sizes.step.name!r} with a batch of {smallest.size} need "
            f"{format_bytes(needed(smallest.size))}, the limit is {format_bytes(limit)}; train fewer at a time or raise "
            "memory=",
            needed=needed(smallest.size), limit=limit,
        )  # fmt: skip
    found = sizes.at(_search(needed, smallest.size, max(sizes.given, smallest.size + 1), limit))
    if copies == 1 and not beside:
        return LargestBatch(copies, limit, found, None)
    run = run_copies(sizes, found.size, memory=limit, copies=copies, beside=beside, steps=steps)
    return LargestBatch(copies, limit, found, run)


def run_copies(
    sizes: StepSizes, size: int, *, memory: int | float | str, copies: int, beside: Sequence[SimulatedJob] = (),
    steps: int = _SIMULATED_STEPS, grouped: bool = False, seed: int = 0, clock: Clock | None = None,
) -> Simulated:  # fmt: skip
    """Simulate ``steps`` steps of ``copies`` jobs with batches of this size, and the jobs ``beside`` them.

    Each operation is a group, or, ``grouped``, the copies' plans are followed. Raises as ``simulate`` does.
    """
    jobs = [*(sizes.at(size).job(f"{sizes.step.name}-{i}", steps, grouped) for i in range(copies)), *beside]
    return simulate(jobs, memory=parse_memory(memory), seed=seed, clock=clock)


def _needed(step: SizedStep, copies: int, beside: Sequence[SimulatedJob]) -> int:
    if copies == 1 and not beside:
        return step.alone
    jobs = [step.job("", 1)] * copies + list(beside)
    return max(job.offsets.height for job in jobs) - arena_of(jobs, 0)


def _search(needed: Callable[[int], int], low: int, high: int, limit: int) -> int:
    """The largest size that fits; ``low`` does, ``high`` may not. Each size costs a capture: guided by lines."""

    def line(otherwise: int) -> int:
        """Where a line through both ends reaches the limit."""
        climb = needed(high) - needed(low)
        return low + (limit - needed(low)) * (high - low) // climb if climb > 0 else otherwise

    rounds = 0
    while needed(high) <= limit:
        rounds += 1
        further = max(line(2 * high), high if rounds < 3 else 2 * high) + 1
        low, high = high, min(further, _FURTHEST * high)
        if high > _MOST_BATCH:
            raise InvalidJobError(
                f"batches of {low} still fit into {format_bytes(limit)}: this step's memory does not grow"
            )
    rounds = 0
    while high - low > 1:
        rounds += 1
        middle = (low + high) // 2
        guess = line(middle) if rounds % 3 else middle  # now and then halved, for what is no line
        guess = min(max(guess, low + 1), high - 1)
        for size in (guess, guess + 1):  # a line that ends at the true place is confirmed by the size behind it
            if size < high and needed(size) <= limit:
                low = size
            else:
                high = min(high, size)
                break
    return low
