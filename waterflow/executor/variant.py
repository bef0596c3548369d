"""One captured form of a job's step, for batches of one kind, bound to the job's tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from waterflow import _C
from waterflow.errors import CaptureError, InvalidJobError
from waterflow.executor.audited import Code
from waterflow.executor.batch_copies import Ranges, copies_of
from waterflow.executor.binding import Owner
from waterflow.executor.captured import CapturedStep, PlannedStep
from waterflow.executor.first_updates import Members
from waterflow.partition.plan import Plan
from waterflow.partition.questions import Answers, answers_of

if TYPE_CHECKING:
    from waterflow.executor.engine import Engine

# The batch, whether the step updates, settings of the process, the parameters that have gradients from earlier calls, and
# what the batch answers to what the step asks of its values.
Key = tuple[Hashable, bool, Hashable, frozenset[str], Answers]


@dataclass
class Whole:
    """A step on batches of one kind as it is where there is room; ``plain`` is what was captured, and no form is below ``lowest``."""

    key: Hashable
    plain: CapturedStep
    planned: PlannedStep
    lowest: int = 0


@dataclass
class Variant:
    """The step for batches of one shape: what was captured for it, bound to this job.

    ``plain`` is what was captured, ``captured`` the same or a lower form of it; ``whole`` is the step where there is room.
    """

    key: Key
    plain: CapturedStep
    captured: CapturedStep
    planned: PlannedStep
    binding: _C.Binding
    slots: list[int]
    leaves: list[int]
    structure: tuple[Hashable, int]  # what the step is made of, and which capture of it this is
    code: Code
    owner: Owner
    moved: Members
    whole: Whole
    seen: int | None = None  # of its engine's changes
    # Memory of which a batch is copied, as it may change before the batch is read for the last time; and of which no batch
    # may be, as operations that are made again would read it when it has changed.
    changed_early: Ranges = field(default_factory=lambda: Ranges(()))
    changed_between: Ranges = field(default_factory=lambda: Ranges(()))
    guarded: bool = False  # whether there is such memory
    asked_not: Ranges = field(default_factory=lambda: Ranges(()))  # where values of a batch may not be asked for
    claimed: Plan | None = None

    def settled(self, engine: Engine) -> bool:
        """Whether there is memory for it, and nothing has changed since."""
        return self.claimed is self.planned.plan and self.seen == engine.changes

    def answers(self, leaves: list[Any]) -> Answers:
        """Those of its key, where it is for this batch. Raises CaptureError for a batch that the step may change."""
        questions = self.plain.capture.questions
        asked = (leaves[leaf] for question in questions for leaf in question.leaves)
        if questions and (self.plain.changed_leaves or any(map(self.asked_not.have, asked))):
            raise CaptureError("the step asks for values of a batch that lies in what it changes; pass a copy of it")
        return answers_of(questions, self.key[4], leaves)

    def given(self, leaves: list[Any], before_copies: Callable[[], None] | None) -> list[Any]:
        """The batch's tensors, in the order of ``slots``; copies of those that lie where the step changes something.

        ``before_copies`` is called before any is made: a step that still runs may change them, too.
        """
        given = [leaves[i] for i in self.leaves]
        if not self.guarded:
            return given
        inside = [i for i, tensor in enumerate(given) if self.changed_early.have(tensor)]
        if any(map(self.changed_between.have, given)):
            raise InvalidJobError(
                "a step that recomputes must find its batch as it was: a tensor of this one lies in a buffer that the step "
                "changes; pass a copy of it, or recompute=None"
            )
        if not inside:
            return given
        if before_copies is not None:
            before_copies()
        for i, copy in zip(inside, copies_of([given[i] for i in inside])):
            given[i] = copy
        return given
