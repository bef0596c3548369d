"""A step with batches of any size: captured at a few, and at all others known from lines through those."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from waterflow.errors import CaptureError, InvalidJobError, MemoryLimitError
from waterflow.executor.simulation import SimulatedJob
from waterflow.partition.footprint import Footprint
from waterflow.partition.offsets import Offsets
from waterflow.partition.plan import make_plan
from waterflow.partition.recompute import Recomputed
from waterflow.partition.structure import of_torch

if TYPE_CHECKING:
    from waterflow.step import Step

_MOST_LINES = 4
_ANY_HEIGHT = 1 << 62
_APART = 8  # times: the further, the less a rounded size tilts a line


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
        return max(self.offsets.height + kept, *(memory.peak for memory in self.footprint.memory()))

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
    values are never read. The step is captured with two sizes. As long as those differ in nothing but bytes, others lie
    on lines through them, and ``captured`` shows whether they really do; where a capture says otherwise, a new line begins,
    and after a few of them every size is captured. Not thread-safe, as the step is not.

    Each job holds ``batches_held`` batches on the device all the time, and the next one comes while a step runs.

    The second size is larger than the given one, or, with ``downwards``, smaller, for batches that are too large as they
    are. A step that recomputes to stay below so many bytes has other graphs for other sizes: each is captured.
    """

    def __init__(self, step: Step, batch: Any, downwards: bool = False, batches_held: int = 1) -> None:
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
        # Where normalization over the batch allows no single sample, two are the least.
        self.second = max(min(2, self.given), self.given // _APART) if downwards else _APART * self.given
        self._captured: dict[int, SizedStep] = {}
        self._believed: dict[int, SizedStep] = {}
        self._asked: dict[int, SizedStep] = {}  # on a line that holds, with what only operators know asked of them
        self._on_line: list[int] = []  # captured sizes that lie on one line; the first two make it
        self._lines = 1
        self._exact = True
        self._from = 0  # the line holds for no smaller size
        self._height: int | None = None  # that steps are brought to; None: as the step says

    @property
    def captures(self) -> int:
        """How many sizes were captured."""
        return len(self._captured)

    def at(self, size: int) -> SizedStep:
        """The step with batches of this size. Raises CaptureError where it cannot be captured."""
        known = self._captured.get(size) or self._asked.get(size) or self._believed.get(size)
        if known is not None:
            return known
        if not self._captured:
            self.captured(self.given)
            self.captured(self.second)
        found = self._from_line(size)
        if found is None:
            return self.captured(size)
        return self._believed.setdefault(size, self._sized(size, found))

    def captured(self, size: int) -> SizedStep:
        """The same, captured; where it does not lie on the line that others were believed to lie on, those are forgotten.

        Between captures on a line that a third one confirms, it is enough to ask what hides its memory from shapes.
        """
        if size in self._captured:
            return self._captured[size]
        if self._confirmed(size):
            return self._ask(size)
        made = self._captured[size] = self._capture(size)
        self._believed.pop(size, None)
        if made.beyond is not None:
            return made
        line = self._on_line
        if len(line) < 2:
            fits = not line or made.footprint.same_shape(self._captured[line[0]].footprint)
        else:
            expected = self._from_line(size)
            fits = expected is not None and expected.same_shape(made.footprint)
            if fits and expected is not None:
                distance = expected.asking().distance(made.footprint)
                fits = distance <= self._tolerance()
                self._exact &= distance == 0
        if fits:
            line.append(size)
        elif size > min(line):
            self._begin_line(size)
        else:  # small batches are often computed in another way: nothing is believed of them
            self._from = min(line)
            self._believed = {known: step for known, step in self._believed.items() if known > self._from}
        return made

    def known(self, size: int) -> bool:
        """Whether this size was captured, or lies between captures on a line that a third one confirms."""
        if size in self._captured or size in self._asked:
            return True
        return self._confirmed(size) and not self._captured[self._on_line[0]].footprint.hidden

    def _confirmed(self, size: int) -> bool:
        line = self._on_line
        return self._exact and len(line) > 2 and min(line) < size < max(line)

    def _ask(self, size: int) -> SizedStep:
        step = self.at(size)
        if step.footprint.hidden and size not in self._asked:
            step = self._asked[size] = self._sized(size, step.footprint.asking())
            self._believed.clear()  # what lies near it is known better now
        return step

    def smallest(self) -> SizedStep:
        """With batches of one, or of two where normalization over the batch allows no single one."""
        try:
            return self.captured(1)
        except (CaptureError, RuntimeError):
            return self.captured(2)

    def _from_line(self, size: int) -> Footprint | None:
        if len(self._on_line) < 2 or self._lines > _MOST_LINES or size < self._from:
            return None
        one, other = (self._captured[known] for known in self._on_line[:2])
        if one.footprint.hidden:  # rounded sizes are nearest to a short line
            near = {known: self._captured.get(known) or self._asked[known] for known in (*self._on_line, *self._asked)}
            one, other = (near[known] for known in sorted(near, key=lambda known: (abs(known - size), known))[:2])
        return one.footprint.on_line(one.size, other.footprint, other.size, size)

    def _tolerance(self) -> int:
        """Bytes that a capture may differ from the line: a hundredth of what one more sample takes.

        Kernels round the sizes of their workspaces. Such a line is good for looking around, and answers are captured.
        """
        one, other = (self._captured[known] for known in self._on_line[:2])
        return (other.alone - one.alone) // (other.size - one.size) // 100

    def _begin_line(self, size: int) -> None:
        """Another one, for this size and larger ones."""
        self._lines += 1
        self._on_line = [size]
        self._exact, self._from = True, 0
        self._believed.clear()
        self._asked.clear()

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
