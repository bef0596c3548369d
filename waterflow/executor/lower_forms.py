"""Forms of a job's steps that hold less than the steps need, and run where that is all the memory that there is."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass

from waterflow.errors import MemoryLimitError
from waterflow.executor.captured import CapturedStep, PlannedStep, captures
from waterflow.executor.recomputing import recomputing, spilling
from waterflow.partition.plan import Plan, format_bytes, opaque_plan
from waterflow.priority import BelowNeed

_ATTEMPTS = 4  # at a form that is as low as its profile then says


@dataclass(frozen=True)
class Whole:
    """A step on batches of one kind as it runs where there is room: what was captured, the form that it has then, and its plan.

    ``name`` is what captures of it are kept under.
    """

    name: Hashable
    plain: CapturedStep
    form: CapturedStep
    planned: PlannedStep

    @property
    def above_graph(self) -> int:
        """Bytes that profiles have shown to come on top of what the graph knows."""
        return max(0, self.planned.plan.height - self.form.predicted.height)


@dataclass(frozen=True)
class Low:
    """A form of the step ``of``, and the height for which it was made."""

    of: Hashable
    means: BelowNeed
    room: int
    form: CapturedStep


class LowerForms:
    """Finds or makes them. ``planned`` has the plan of a form."""

    def __init__(self, planned: Callable[[CapturedStep], PlannedStep]) -> None:
        self._planned = planned

    def at_most(self, whole: Whole, means: BelowNeed, room: int) -> Low:
        """One that is at most ``room`` bytes high.

        What the whole step's profile showed to come on top of its graph counts, until a form has a profile of its own. Raises
        MemoryLimitError, whose ``needed`` is the lowest height.
        """
        target = room - whole.above_graph
        for _ in range(_ATTEMPTS if room > 0 else 0):
            try:
                form = self._form(whole, means, target)
            except MemoryLimitError:
                break
            beyond = self._planned(form).plan.height - room
            if beyond <= 0:
                return Low(whole.name, means, room, form)
            target -= beyond
        low = self.lowest(whole, means)
        if low.room <= room:
            return Low(whole.name, means, room, low.form)
        done = "in host memory that can be there" if means == "spill" else "made again that can be"
        raise MemoryLimitError(
            f"a step of {format_bytes(whole.planned.plan.height)} cannot be brought to {format_bytes(room)}: it takes "
            f"{format_bytes(low.room)} with all {done}. Lower the batch size or raise quota=.",
            needed=low.room, limit=room,
        )  # fmt: skip

    def lowest(self, whole: Whole, means: BelowNeed) -> Low:
        """The lowest one, with its height as its room."""
        form = self._form(whole, means, None)
        plan = self._planned(form).plan
        return Low(whole.name, means, plan.height if plan.measured else plan.height + whole.above_graph, form)

    def lowest_plan(self, whole: Whole, means: BelowNeed) -> Plan:
        """What it claims."""
        plan, low = whole.planned.plan, self.lowest(whole, means)
        return opaque_plan(plan.name, min(plan.height, low.room), persistent=plan.persistent, batch=plan.batch)

    def _form(self, whole: Whole, means: BelowNeed, height: int | None) -> CapturedStep:
        if means == "spill":
            return captures.get((whole.name, "spill", height), lambda: spilling(whole.form, height))
        if not whole.plain.capture.apart:  # what repeated operations read may have changed
            return whole.form
        return captures.get((whole.name, "recompute", height), lambda: recomputing(whole.plain, height))
