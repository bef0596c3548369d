"""What a job claims that may hold less than it needs: lower steps for as long as that lasts, then whole ones again."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from torch.utils import _pytree as pytree

from waterflow.errors import MemoryLimitError
from waterflow.executor.engine import Engine
from waterflow.executor.pending import Pending
from waterflow.executor.terms import Terms
from waterflow.executor.variants import Variant, Variants
from waterflow.partition.plan import Plan

logger = logging.getLogger("waterflow")

# A lower form goes higher only where that is worth another one: by this share of the whole step's height.
_WORTH = 1 / 8
_ATTEMPTS = 4  # at room that others may be quicker to take


def has_room(engine: Engine, job: int, variant: Variant, batches: int) -> bool:
    """Whether the whole step fits now."""
    plan = variant.whole.planned.plan
    return engine.height_for(job, plan.persistent + batches * plan.batch, plan.height) >= plan.height


class Lowering:
    """The steps of one job on batches of one kind, in an engine with such terms for it."""

    def __init__(
        self, engine: Engine, job: int, name: str, batches: int, variants: Variants, leaves: list[Any],
        batch_spec: pytree.TreeSpec | None, under_way: Sequence[Pending],
    ) -> None:  # fmt: skip
        self._engine, self._job, self._name, self._batches = engine, job, name, batches
        self._variants, self._leaves, self._batch_spec = variants, leaves, batch_spec
        self._under_way = under_way
        self._terms: Terms = engine.terms_of(job)

    def claim(self, variant: Variant) -> Variant:
        """Claim memory for as high a step as there may be; returns the variant to run.

        A lower step stays as it is as long as it fits, and goes whole or much higher where there is room for that. Where not even the
        lowest form has room, it waits for it. A job whose quota was lowered below its lowest form is asked to make way; raises
        MemoryLimitError where nobody could ever ask it. Raises as ``Engine.claim`` does otherwise.
        """
        for _ in range(_ATTEMPTS):
            seen = self._engine.changes
            try:
                found = self._try(variant)
            except MemoryLimitError:
                if variant.claimed is None:
                    break
                if not self._engine.leave(self._job):
                    if self._engine.take_back_shares():
                        continue
                    if self._terms.make_way is None:
                        raise
                variant.seen = seen  # it leaves, or stays as it is where it cannot
                return variant
            if found is not None:
                found.seen = seen
                return found
        return self._wait(variant)

    def _try(self, variant: Variant) -> Variant | None:
        """The variant, if memory for it could be claimed at once; MemoryLimitError where not even the lowest has room."""
        means = self._terms.below_need
        whole = variant.whole.planned.plan
        self._engine.note_need(self._job, self._needed(whole), whole.height)
        room = self._engine.height_for(self._job, self._needed(whole), whole.height)
        if room >= whole.height:
            return self._variants.whole(variant, self._leaves, self._batch_spec) if self._take(whole) else None
        if not self._is_right(variant, room):
            variant = self._variants.at_most(variant, self._leaves, self._batch_spec, means, room)
            logger.info(
                "step %r goes on below its need: %s",
                self._name,
                variant.captured.spilled or variant.captured.recomputed,
            )
        return variant if self._take(variant.planned.plan) else None

    def _is_right(self, variant: Variant, room: int) -> bool:
        """Whether a lower form stays, though there may be a little more room for another one."""
        low, height = variant.low, variant.planned.plan.height
        most = (low.room if low is not None else 0) + _WORTH * variant.whole.planned.plan.height
        return low is not None and low.means == self._terms.below_need and height <= room < most

    def _take(self, plan: Plan) -> bool:
        try:
            if self._engine.above_quota(self._job):
                if self._under_way:
                    self._engine.native.wait(self._under_way[-1].run)
                self._engine.lower(self._job, plan.height)
            self._engine.claim(self._job, plan.renamed(self._name), batches=self._batches, patient=False)
        except MemoryLimitError:
            return False
        return True

    def _wait(self, variant: Variant) -> Variant:
        variant = self._variants.at_least(variant, self._leaves, self._batch_spec, self._terms.below_need)
        seen = self._engine.changes
        self._engine.claim(self._job, variant.planned.plan.renamed(self._name), batches=self._batches)
        variant.seen = seen
        return variant

    def _needed(self, plan: Plan) -> int:
        return plan.persistent + self._batches * plan.batch
