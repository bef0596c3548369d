"""A step with batches of any size: captured at a few, and on lines between those, by which a search finds its way."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch.utils import _pytree as pytree

from waterflow.errors import CaptureError, InvalidJobError, MemoryLimitError
from waterflow.partition.guards.step_key import of_torch
from waterflow.partition.passes.rematerialize import Recomputed
from waterflow.partition.plan.offsets import Footprint, Offsets
from waterflow.partition.plan.plan import Plan, make_plan
from waterflow.planner.simulate import SimulatedJob

_ANY_HEIGHT = 1 << 62


class Plannable(Protocol):
    """A step, as far as it is planned: a ``Step``, whose methods these are."""

    name: str
    recompute: int | Literal["auto"] | None

    def plan_for(self, batch: Any, recompute: int | None = None) -> Plan: ...  # noqa: D102
    def footprint_for(self, batch: Any, recompute: int | None = None) -> Footprint: ...  # noqa: D102
    def recomputed_for(self, batch: Any, recompute: int | None = None) -> Recomputed | None: ...  # noqa: D102


@dataclass(frozen=True)
class SizedStep:
    """A step with batches of one size. All in bytes.

    ``beyond`` is there for steps that recompute to stay below a height: what the lowest that can be made of them has more
    than that, or, negative, less. A step that is not ``within`` its height is as low as it can be. Its job holds
    ``batches_held`` batches at a time.
    """

    size: int
    footprint: Footprint
    beyond: int | None = None
    batches_held: int = 1

    @property
    def within(self) -> bool:
        """Whether it can be as low as it has to be."""
        return self.beyond is None or self.beyond <= 0

    @property
    def persistent(self) -> int:
        """Parameters, buffers and optimizer state."""
        return self.footprint.persistent

    @property
    def batch(self) -> int:
        """One batch."""
        return self.footprint.batch

    @property
    def held(self) -> int:
        """What the job holds on the device all the time."""
        return self.persistent + self.batches_held * self.batch

    @functools.cached_property
    def resident(self) -> int:
        """The most that is live at once in the step."""
        return self.footprint.live()

    @functools.cached_property
    def offsets(self) -> Offsets:
        """Where the step's memory lies."""
        return self.footprint.offsets()

    @functools.cached_property
    def groups(self) -> tuple[int, ...]:
        """The ends of the node groups into which the step is cut."""
        plan = make_plan("", self.footprint.memory(), persistent=self.persistent, batch=self.batch)
        return tuple(group.end for group in plan.groups)

    @functools.cached_property
    def height(self) -> int:
        """What an engine lets the step take: placed memory and what it hands out, or, if more, what is live unplaced."""
        kept = sum(life.size for life in self.footprint.lives if life.kept)
        return max(self.offsets.height + kept, self.peak)

    @functools.cached_property
    def peak(self) -> int:
        """The most of the step that is live at once, what it hands out and what kernels take included."""
        return max(memory.peak for memory in self.footprint.memory())

    @property
    def alone(self) -> int:
        """All that the job holds at its highest, where nothing is lost between its pieces."""
        return self.held + self.resident

    def job(self, name: str, steps: int, grouped: bool = False) -> SimulatedJob:
        """The job that trains such steps, each operation a group, or ``grouped`` as planned."""
        return SimulatedJob(
            name, self.offsets, self.held - self.batch, self.batch, steps, ends=self.groups if grouped else None,
            forward=self.footprint.forward,
        )  # fmt: skip


class StepSizes:
    """A step with batches of any size.

    ``batch`` is one to start from; the dimension that varies is the first one of its tensors that is most common. Their
    values are never read. A line through two captures says where to look; an answer is captured. Each job holds
    ``batches_held`` batches on the device all the time, and the next one comes while a step runs. Not thread-safe, as the step
    is not.
    """

    def __init__(self, step: Plannable, batch: Any, batches_held: int = 1) -> None:
        self.step = step
        self.batches_held = batches_held
        self.on_capture: Callable[[], None] = lambda: None
        self._leaves, self._form = pytree.tree_flatten(of_torch(batch))
        firsts = [t.shape[0] for t in self._leaves if isinstance(t, torch.Tensor) and t.dim() > 0]
        if not firsts:
            lists = any(isinstance(leaf, (int, float)) for leaf in self._leaves)
            advice = ": make its lists tensors, by torch.tensor" if lists else ""
            raise InvalidJobError(
                f"a batch of {step.name!r} must have a dimension that can vary; this one holds no tensor with one{advice}"
            )
        self.given = max(sorted(set(firsts)), key=firsts.count)
        self._captured: dict[int, SizedStep] = {}
        self._between: dict[int, SizedStep] = {}  # on lines through captures
        self._height: int | None = None  # that steps are brought to; None: as the step says

    @property
    def captures(self) -> int:
        """How many sizes were captured."""
        return len(self._captured)

    def at(self, size: int) -> SizedStep:
        """The step with batches of this size, as a line through the captures beside it says.

        Captured where there is no such line. Raises CaptureError where it cannot be captured.
        """
        if size in self._captured:
            return self._captured[size]
        if size not in self._between:
            found = self._from_line(size)
            if found is None:
                return self.captured(size)
            self._between[size] = self._sized(size, found)
        return self._between[size]

    def captured(self, size: int) -> SizedStep:
        """The same, captured."""
        if size not in self._captured:
            self._captured[size] = self._capture(size)
            self._between.clear()
        return self._captured[size]

    def _from_line(self, size: int) -> Footprint | None:
        nearest = sorted(self._captured, key=lambda known: (abs(known - size), known))
        if len(nearest) < 2:
            return None
        behind = (known for known in nearest if (known < size) != (nearest[0] < size))
        one, other = self._captured[nearest[0]], self._captured[next(behind, nearest[1])]
        if one.beyond is not None:  # other sizes recompute other things
            return None
        return one.footprint.on_line(one.size, other.footprint, other.size, size)

    def smallest(self) -> SizedStep:
        """With batches of one, or of two where normalization over the batch allows no single one."""
        try:
            return self.captured(1)
        except (CaptureError, RuntimeError):
            return self.captured(2)

    def _capture(self, size: int) -> SizedStep:
        self.on_capture()
        batch, most = self._batch(size), self.step.recompute
        if self._height is not None or not isinstance(most, int):
            return self._sized(size, self.step.footprint_for(batch, self._height))
        lowest = self.lowest(size)
        found = self.step.footprint_for(batch, max(most, lowest))
        return self._sized(size, found, lowest - most)

    def _sized(self, size: int, footprint: Footprint, beyond: int | None = None) -> SizedStep:
        return SizedStep(size, footprint, beyond, self.batches_held)

    def lowest(self, size: int) -> int:
        """The least height of a step with batches of this size, with all that can be recomputed."""
        self.on_capture()
        try:
            return self.step.plan_for(self._batch(size), 1).height
        except MemoryLimitError as error:
            return error.needed

    def without_recomputing(self) -> StepSizes:
        """The same step as it is where its height does not matter."""
        if not isinstance(self.step.recompute, int):
            return self
        batch = pytree.tree_unflatten(self._leaves, self._form)
        made = StepSizes(self.step, batch, batches_held=self.batches_held)
        made._height, made.on_capture = _ANY_HEIGHT, self.on_capture
        return made

    def lowered(self, size: int, height: int) -> tuple[SizedStep, Recomputed | None]:
        """The step with batches of this size, at most ``height`` bytes high, and what it then makes again; None for nothing.

        Raises MemoryLimitError, whose ``needed`` is the lowest height that was found.
        """
        batch = self._batch(size)
        found = self.step.footprint_for(batch, height)
        return self._sized(size, found), self.step.recomputed_for(batch, height)

    def cost(self, size: int) -> Recomputed | None:
        """What a step with batches of this size makes again as it is; None for nothing. Raises as ``lowered`` does."""
        return self.step.recomputed_for(self._batch(size), self._height)

    def _batch(self, size: int) -> Any:
        return pytree.tree_unflatten([self._resized(leaf, size) for leaf in self._leaves], self._form)

    def _resized(self, leaf: Any, size: int) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.shape[0] != self.given:
            return leaf
        if leaf.dim() <= 2 and not leaf.is_floating_point():  # a mask, whose values the step may ask for
            return leaf[torch.arange(size, device=leaf.device) % self.given]
        # Memory that is asked for and never touched.
        last = leaf.dim() == 4 and not leaf.is_contiguous() and leaf.is_contiguous(memory_format=torch.channels_last)
        form = torch.channels_last if last else torch.contiguous_format
        return torch.empty((size, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device, memory_format=form)
