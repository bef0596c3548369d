"""What a step tells of itself: its plan, heights, and counts."""

from __future__ import annotations

import logging
from collections import Counter

from waterflow import _C
from waterflow.errors import CaptureError
from waterflow.executor.account import Account
from waterflow.executor.capture_budget import NewKind
from waterflow.executor.variant import Variant
from waterflow.partition.plan import Plan
from waterflow.partition.profile import StepProfile
from waterflow.partition.recompute import Recomputed

logger = logging.getLogger("waterflow")
NEW_KINDS = "batches of ever new kinds; pad them to a few sizes, and make numbers tensors"


class StepFigures:
    """The figures of one job's step, as far as it has gone."""

    name: str
    steps = property(lambda self: int(self.account["steps"]), doc="Steps that have ended well.")
    eager_steps = property(lambda self: int(self.account["eager steps"]), doc="Of these.")

    def __init__(self, who: int | str) -> None:
        self.account = Account(who)
        self.predicted_height = 0
        self.measured_height = 0  # bytes that it was seen to reach above what persists; 0 until it was profiled
        self.most_spilled = 0  # bytes that a step held in host memory
        self.planned_requests = self.missed_requests = 0  # for memory: served where the plan says, or asked otherwise
        self.recomputed: Recomputed | None = None  # what the last step made again in its backward pass, and its cost
        self._last_plan: Plan | None = None

    @property
    def plan(self) -> Plan:
        """The plan of the batch shape that was trained last. Raises RuntimeError before the first call."""
        if self._last_plan is None:
            raise RuntimeError(f"step {self.name!r} has no plan before its first call")
        return self._last_plan.renamed(self.name)

    def _tell_eager(self, error: CaptureError, told: Counter[str]) -> None:
        """Steps run eagerly: say so where none of those that ``told`` has seen did for that cause."""
        some = isinstance(error, NewKind)
        self.account.cause = cause = NEW_KINDS if some else str(error)
        told[cause] += 1
        if told[cause] == 1:
            which = "batches of new kinds " if some else ""
            logger.warning("step %r runs %seagerly, about as fast as without waterflow: %s", self.name, which, error)

    def _note(self, variant: Variant) -> None:
        if self._last_plan is variant.planned.plan:
            return
        if (now := variant.captured.recomputed) != self.recomputed:
            self.recomputed = now
            logger.info("step %r recomputes: %s", self.name, now or "nothing")
        self._last_plan = variant.planned.plan
        self.predicted_height = max(self.predicted_height, variant.captured.predicted.height)
        self.measured_height = max(self.measured_height, variant.planned.measured_height)
        self.most_spilled = max(self.most_spilled, variant.planned.plan.spilled)

    def _note_run(self, run: _C.StepRun, variant: Variant, profiled: bool) -> None:
        """A captured step has ended well."""
        planned = variant.planned
        if profiled:
            planned.add_profile(StepProfile.of(run, variant.owner.spec.device))
        elif run.planned or run.missed:
            self.planned_requests += run.planned
            self.missed_requests += run.missed
            planned.count_misses(run.missed)
        self.measured_height = max(self.measured_height, planned.measured_height)
