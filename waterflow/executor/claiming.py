"""What a step claims of its engine's memory before it runs, and what is tried where it does not fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils import _pytree as pytree

from waterflow.errors import MemoryLimitError
from waterflow.executor.captured import build
from waterflow.executor.engine import Engine
from waterflow.executor.fitting import largest_batch
from waterflow.executor.variants import Variant, Variants
from waterflow.partition.plan import Plan
from waterflow.partition.spec import StepSpec


def claim(
    engine: Engine, job: int, name: str, batches: int, variants: Variants, variant: Variant, spec: StepSpec,
    leaves: list[Any], batch_spec: pytree.TreeSpec | None,
) -> Variant:  # fmt: skip
    """Claim memory for the job's steps on such batches; returns the variant that it was claimed for.

    A step that may recompute becomes as low as it has to be to fit alone. Raises as ``Engine.claim`` does; a job that
    does not fit alone learns of the largest batch that does.
    """
    while variant.claimed is not (plan := variant.planned.plan):
        try:
            engine.claim(job, plan.renamed(name), batches=batches)
            variant.claimed = plan
        except MemoryLimitError as error:
            if error.largest_batch is not None or error.needed <= engine.room:
                raise
            held = plan.persistent + batches * plan.batch
            refuse = _refusal(engine, plan.renamed(name), held, batches, spec, leaves, batch_spec)
            try:
                lower = variants.lowered(variant, leaves, batch_spec, engine.room - held)
            except MemoryLimitError as out_of_reach:
                raise refuse(out_of_reach.needed) from None
            if lower is None:
                raise refuse(None) from None
            variant = lower
    return variant


def _refusal(
    engine: Engine, plan: Plan, held: int, batches: int, spec: StepSpec, leaves: list[Any],
    batch_spec: pytree.TreeSpec | None,
) -> Callable[[int | None], MemoryLimitError]:  # fmt: skip
    def claimed(cut: list[Any]) -> Plan:
        predicted = build(spec, cut, batch_spec).predicted
        return replace(predicted, batch=batches * predicted.batch)

    def refuse(lowest: int | None) -> MemoryLimitError:
        return engine.too_large(plan, held, largest_batch(leaves, claimed, engine.room), lowest)

    return refuse
