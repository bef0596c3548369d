"""Settled steps: all that Python decides before a step was decided at an earlier one of its kind, and is only compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributions import Distribution

from waterflow import _C
from waterflow.executor.audit import Audit
from waterflow.executor.engine import Engine
from waterflow.executor.program.bound_step import BoundStep
from waterflow.executor.program.capture_cache import PlannedStep
from waterflow.partition.guards.node_hooks import Registered


@dataclass(frozen=True)
class Counts:
    """Counts that were read before the decisions of a step, which hold while the counts are the same."""

    engine: Engine | None
    claims: int  # changes of the engine's claims and policies
    hooks: int  # that autograd's nodes were given

    @classmethod
    def now(cls, engine: Engine | None) -> Counts:
        """Return them as they are."""
        return cls(engine, 0 if engine is None else engine.reservations.changes, Registered.last)


@dataclass(eq=False)
class Settled:
    """A step that needs Python's decisions no more while it ``holds()``; ``call`` compares the rest, and runs it."""

    call: _C.StepCall
    bound_step: BoundStep
    planned: PlannedStep
    audit: Audit
    counts: Counts
    until: int  # the number of the captured step before which no audit is due
    checks: Any  # whether distributions check their arguments

    @classmethod
    def of(
        cls, bound_step: BoundStep, planned: PlannedStep, audit: Audit, counts: Counts, job: int, threads: int, batch: Any
    ) -> Settled | None:
        """Return the settled form of a step that has just begun on such a batch; None if Python must decide at each step.

        ``counts`` is what its decisions were made from.
        """
        plans, until, engine = bound_step.plans, audit.quiet_until(bound_step), counts.engine
        settings: Any = bound_step.key[2]  # see ``ambient_key``
        ambient, checks = settings
        asks = bound_step.key[4] or bound_step.plain.capture.questions or isinstance(ambient, tuple)
        if asks or bound_step.reduced or plans.wants_profile or plans.now is not planned or until <= audit.steps + 1:
            return None
        known = bound_step.call
        if known is None or known[0] is not planned or known[1] is not type(batch):
            call = _C.StepCall(
                bound_step.binding,
                planned.native,
                bound_step.slots,
                bound_step.leaves,
                batch,
                ambient,
                [bound_step.changed_early.spans, bound_step.changed_between.spans],
                threads,
                job,
                None if engine is None else engine.native,
            )
            known = bound_step.call = planned, type(batch), call
        return cls(known[2], bound_step, planned, audit, counts, until, checks) if known[2].knows_form else None

    def holds(self) -> bool:
        """Return True if nothing that is Python's to compare has changed."""
        plans, engine = self.bound_step.plans, self.counts.engine
        return (
            self.audit.steps + 1 < self.until
            and plans.now is self.planned
            and not plans.wants_profile
            and not self.bound_step.code.fault
            and Registered.last == self.counts.hooks
            and Distribution._validate_args is self.checks
            and (engine is None or engine.reservations.changes == self.counts.claims)
            and (engine is None or not (engine.lent_to or engine.reservations.clock))
        )

    @property
    def left(self) -> int:
        """The number of steps that may run before an audit is due."""
        return self.until - self.audit.steps - 1
