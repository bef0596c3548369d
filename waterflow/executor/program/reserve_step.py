"""Claims of a step on its engine's memory before it runs, and the forms of it that are tried if it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from waterflow.errors import MemoryLimitError
from waterflow.executor.engine import Engine
from waterflow.executor.program.bound_step import BoundStep, BoundSteps
from waterflow.executor.program.capture_cache import PlannedStep
from waterflow.executor.program.step_future import StepFuture
from waterflow.executor.reservations import too_large
from waterflow.partition.plan.plan import Plan, format_bytes


@dataclass(frozen=True)
class WhatFits:
    """The batches that would fit instead of one that does not, as far as they are known.

    ``largest`` is the first dimension of the largest batch that fits without more recomputing, ``recomputed`` that of the
    largest that fits with as much recomputing as needed. If not even the smallest batch fits, ``largest`` is 0, and ``least``
    is (its size, the bytes that it needs). ``helps`` says, of a step that may not recompute, whether its batch would fit with
    ``recompute="auto"``. None: not known.
    """

    largest: int | None = None
    least: tuple[int, int] | None = None
    recomputed: int | None = None
    helps: bool | None = None

    def error(self, limit: int, room: int, plan: Plan, held: int, lowest: int | None = None) -> MemoryLimitError:
        """Return the error for a job of this ``plan``, which needs ``held`` bytes between steps.

        ``room`` are the bytes of the ``limit`` that jobs may claim; ``lowest`` is the least height by recomputing.
        """
        told = []
        if lowest is not None:
            told.append(f"recomputing brings the step to {format_bytes(lowest)} at best")
        if self.recomputed is not None and self.recomputed != self.largest:
            without = f"{self.largest} without recomputing" if self.largest else "none without recomputing"
            told.append(f"the largest batch that fits is {self.recomputed}, {without}")
        elif self.largest:
            told.append(f"the largest batch that fits is {self.largest}")
        if self.helps is not None:
            told.append("with recompute='auto' this one fits" if self.helps else "recompute='auto' would not be enough")
        none_fits = self.least is not None and not self.largest and not self.recomputed
        if self.least is not None and none_fits:
            size, needed = self.least
            told.insert(
                0,
                f"not even a batch of {size} fits: it needs at least {format_bytes(needed)}, "
                f"{format_bytes(plan.persistent)} of it for parameters, buffers and optimizer state",
            )
        smaller = "Make the model smaller" if none_fits else "Lower the batch size"
        more = ", pass recompute='auto', or" if self.helps else " or"
        said = "".join(f"; {part}" for part in told) + f". {smaller}{more} raise memory=."
        return too_large(plan, held, limit, room, self.recomputed or self.largest or None, said)


# A function of a batch that does not fit, and of the bytes of its step beyond its graph's, which returns what would fit.
Search = Callable[[Any, int], WhatFits]


@dataclass(frozen=True)
class StepClaims:
    """The claims of a job for its steps, of which some may be ``under_way``, on the memory of ``engine``."""

    engine: Engine
    job: int
    name: str
    bound_steps: BoundSteps
    under_way: Sequence[StepFuture]

    def claim(
        self, batches: int, bound_step: BoundStep, leaves: list[Any], batch_spec: pytree.TreeSpec | None, search: Search
    ) -> tuple[BoundStep, PlannedStep]:
        """Claim memory for steps on this kind of batch; return the form of the step that has memory, and its plan then.

        A step that may recompute is brought to the height at which it fits alone. Raises as ``Reservations.claim``; the error
        for a job that does not fit alone names what ``search`` finds. Steps under way end before the job claims less than before.
        """
        reservations = self.engine.reservations
        limit = reservations.policy_of(self.job).limit
        bound_step = self._within_quota(batches, bound_step, leaves, batch_spec)
        last = self.under_way[-1].run if self.under_way else None
        while not reservations.covers(self.job, (planned := bound_step.plans.now).plan, batches):
            plan = planned.plan
            try:
                reservations.claim(self.job, plan.renamed(self.name), batches=batches, last=last)
                return bound_step, planned
            except MemoryLimitError as error:
                if (now := reservations.policy_of(self.job).limit) != limit:  # the quota was changed meanwhile
                    limit, bound_step = now, self._within_quota(batches, bound_step, leaves, batch_spec)
                    continue
                if error.needed <= reservations.room:  # it fits alone: its quota, or other jobs, are in the way
                    raise
                held = plan.persistent + batches * plan.batch
                lower = lowest = None
                try:
                    lower = self.bound_steps.lowered(bound_step, leaves, batch_spec, reservations.room - held)
                except MemoryLimitError as out_of_reach:
                    lowest = out_of_reach.needed
                if lower is None:
                    beyond = max(0, plan.height - bound_step.captured.predicted.height)
                    batch = tuple(leaves) if batch_spec is None else pytree.tree_unflatten(leaves, batch_spec)
                    found = search(batch, beyond)
                    limit = self.engine.limit
                    raise found.error(limit, reservations.room, plan.renamed(self.name), held, lowest) from None
                bound_step = lower
        return bound_step, planned

    def _within_quota(
        self, batches: int, bound_step: BoundStep, leaves: list[Any], batch_spec: pytree.TreeSpec | None
    ) -> BoundStep:
        # The step in the form that fits in the job's quota; an opportunistic job's reduced step stays so until there is room
        # for the whole one. If the claim exceeds a lowered quota, steps under way end, and the claim comes down to the form's
        # height. If no form fits, the step is returned as it is: the claim raises, or asks the job to leave.
        reservations, whole = self.engine.reservations, bound_step.whole.plans.plan
        needed = whole.persistent + batches * whole.batch
        most = reservations.most_height(self.job, needed)
        room = whole.height if most is None else min(most, whole.height)
        goes_whole = room == whole.height and bound_step.reduced
        opportunistic = reservations.policy_of(self.job).opportunistic
        if goes_whole and opportunistic and not reservations.has_room(self.job, needed, room):
            return bound_step  # it stays in its reduced form until there is room for the whole one
        fitting = self.bound_steps.within(bound_step, leaves, batch_spec, room)
        if fitting is None:
            return bound_step
        if reservations.above_quota(self.job):
            if self.under_way:
                self.engine.native.wait(self.under_way[-1].run)
            reservations.lower(self.job, fitting.plans.plan.height)
        return fitting
