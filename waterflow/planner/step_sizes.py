"""A step with batches of any size: captured at a few sizes, and interpolated between them to guide a search."""

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
    """The part of ``Step``'s interface that planning uses."""

    name: str
    recompute: int | Literal["auto"] | None

    def plan_for(self, batch: Any, recompute: int | None = None) -> Plan: ...  # noqa: D102
    def footprint_for(self, batch: Any, recompute: int | None = None) -> Footprint: ...  # noqa: D102
    def recomputed_for(self, batch: Any, recompute: int | None = None) -> Recomputed | None: ...  # noqa: D102


@dataclass(frozen=True)
class SizedStep:
    """A step with batches of one size. All values are bytes.

    ``beyond`` is set for a step that recomputes to stay below a height: its lowest possible height minus that height. A step
    that is not ``within`` is as low as it can be. The job holds ``batches_held`` batches at a time.
    """

    size: int
    footprint: Footprint
    beyond: int | None = None
    batches_held: int = 1

    @property
    def within(self) -> bool:
        """Return True if the step can be as low as it has to be."""
        return self.beyond is None or self.beyond <= 0

    @property
    def persistent(self) -> int:
        """Bytes of parameters, buffers and optimizer state."""
        return self.footprint.persistent

    @property
    def batch(self) -> int:
        """Bytes of one batch."""
        return self.footprint.batch

    @property
    def held(self) -> int:
        """Bytes that the job holds on the device all the time."""
        return self.persistent + self.batches_held * self.batch

    @functools.cached_property
    def resident(self) -> int:
        """The most bytes that are live at once in the step."""
        return self.footprint.live()

    @functools.cached_property
    def offsets(self) -> Offsets:
        """The offsets at which the step's memory is placed."""
        return self.footprint.offsets()

    @functools.cached_property
    def groups(self) -> tuple[int, ...]:
        """The ends of the step's node groups, as operation indices."""
        plan = make_plan("", self.footprint.memory(), persistent=self.persistent, batch=self.batch)
        return tuple(group.end for group in plan.groups)

    @functools.cached_property
    def height(self) -> int:
        """Bytes that an engine reserves for the step: placed memory and outputs, or the live bytes unplaced if more."""
        kept = sum(life.size for life in self.footprint.lives if life.kept)
        return max(self.offsets.height + kept, self.peak)

    @functools.cached_property
    def peak(self) -> int:
        """The most bytes that are live at once, outputs and temporaries of kernels included."""
        return max(memory.peak for memory in self.footprint.memory())

    @property
    def alone(self) -> int:
        """Bytes that the job needs at its highest point if placement loses none."""
        return self.held + self.resident

    def job(self, name: str, steps: int, grouped: bool = False) -> SimulatedJob:
        """Return a job that trains ``steps`` such steps; with ``grouped`` in the plan's groups, else an operation per group."""
        return SimulatedJob(
            # SimulatedJob counts one batch itself, as it is copied during the step before.
            name,
            self.offsets,
            self.held - self.batch,
            self.batch,
            steps,
            ends=self.groups if grouped else None,
            forward=self.footprint.forward,
        )


class StepSizes:
    """Captures a step with batches of any size. Not thread-safe, as the step is not.

    ``batch`` is one to start from; the dimension that varies is the most common first dimension of its tensors (without one:
    InvalidJobError). Integer tensors of one or two dimensions keep their values, repeated; no other values are read. Each job
    holds ``batches_held`` batches on the device all the time; the next one arrives while a step runs.
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
        # A tie goes to the smaller dimension, so that equal batches give equal searches.
        self.given = max(sorted(set(firsts)), key=firsts.count)
        self._captured: dict[int, SizedStep] = {}
        self._between: dict[int, SizedStep] = {}  # on lines through captures
        self._height: int | None = None  # bytes to lower steps to; None: the step's own recompute=

    @property
    def captures(self) -> int:
        """The number of sizes that were captured."""
        return len(self._captured)

    def at(self, size: int) -> SizedStep:
        """Return the step with batches of this size, interpolated from captures beside it.

        Captures the step if there is no such line. Raises CaptureError if it cannot be captured.
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
        """Return the step with batches of this size, captured. Raises CaptureError."""
        if size not in self._captured:
            self._captured[size] = self._capture(size)
            # A new capture gives better lines: drop what the old ones said.
            self._between.clear()
        return self._captured[size]

    def _from_line(self, size: int) -> Footprint | None:
        nearest = sorted(self._captured, key=lambda known: (abs(known - size), known))
        if len(nearest) < 2:
            return None
        # The nearest capture, and the nearest one on the other side of it if there is one: interpolate rather than
        # extrapolate.
        behind = (known for known in nearest if (known < size) != (nearest[0] < size))
        one, other = self._captured[nearest[0]], self._captured[next(behind, nearest[1])]
        if one.beyond is not None:  # other sizes recompute other things
            return None
        return one.footprint.on_line(one.size, other.footprint, other.size, size)

    def smallest(self) -> SizedStep:
        """Return the step with batches of one, or of two if it refuses one (batch normalization does)."""
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
        """Return the least height, in bytes, of a step with batches of this size that recomputes all it can."""
        self.on_capture()
        try:
            # A limit of one byte recomputes everything; the error has the lowest height that was reached.
            return self.step.plan_for(self._batch(size), 1).height
        except MemoryLimitError as error:
            return error.needed

    def without_recomputing(self) -> StepSizes:
        """Return the same sizes for the step without a limit on its height."""
        if not isinstance(self.step.recompute, int):
            return self
        batch = pytree.tree_unflatten(self._leaves, self._form)
        made = StepSizes(self.step, batch, batches_held=self.batches_held)
        made._height, made.on_capture = _ANY_HEIGHT, self.on_capture
        return made

    def lowered(self, size: int, height: int) -> tuple[SizedStep, Recomputed | None]:
        """Return the step with batches of this size lowered to ``height`` bytes, and what it recomputes; None for nothing.

        Raises MemoryLimitError, whose ``needed`` is the lowest height that was found.
        """
        batch = self._batch(size)
        found = self.step.footprint_for(batch, height)
        return self._sized(size, found), self.step.recomputed_for(batch, height)

    def cost(self, size: int) -> Recomputed | None:
        """Return what a step with batches of this size recomputes as it is; None for nothing. Raises as ``lowered``."""
        return self.step.recomputed_for(self._batch(size), self._height)

    def _batch(self, size: int) -> Any:
        return pytree.tree_unflatten([self._resized(leaf, size) for leaf in self._leaves], self._form)

    def _resized(self, leaf: Any, size: int) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or leaf.shape[0] != self.given:
            return leaf
        if leaf.dim() <= 2 and not leaf.is_floating_point():  # a mask or labels: the step may read values
            return leaf[torch.arange(size, device=leaf.device) % self.given]
        # Pages of memory that is never touched cost nothing: huge batches can be captured.
        last = leaf.dim() == 4 and not leaf.is_contiguous() and leaf.is_contiguous(memory_format=torch.channels_last)
        form = torch.channels_last if last else torch.contiguous_format
        return torch.empty((size, *leaf.shape[1:]), dtype=leaf.dtype, device=leaf.device, memory_format=form)
