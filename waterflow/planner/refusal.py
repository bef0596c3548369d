"""What is said of a job that does not fit alone: the largest batch that does, and whether recomputing helps."""

from __future__ import annotations

import contextlib
from typing import Any

from torch.utils import _pytree as pytree

from waterflow.errors import MemoryLimitError, WaterflowError
from waterflow.executor.claiming import WhatFits
from waterflow.planner.recomputing import largest_recomputed
from waterflow.planner.search import largest_claim
from waterflow.planner.sizes import Plannable, SizedStep, StepSizes


def what_fits(
    step: Plannable, room: int, batches: int, leaves: list[Any], batch_spec: pytree.TreeSpec | None, beyond: int = 0
) -> WhatFits:
    """What fits into ``room`` bytes as an engine counts them, with ``batches`` held, of a step for which this batch is too large.

    ``beyond`` bytes of the step are not known to its graph: kernels' temporaries, as its profile showed. Nothing is run;
    takes a few captures. Where the step cannot be captured with other batches nothing is known, which is no error.
    """
    batch = tuple(leaves) if batch_spec is None else pytree.tree_unflatten(leaves, batch_spec)

    def needs(sized: SizedStep) -> int:
        height = max(memory.peak for memory in sized.footprint.memory())
        return sized.persistent + batches * sized.batch + height + beyond

    largest = least = recomputed = helps = None
    with contextlib.suppress(WaterflowError, RuntimeError):
        sizes = StepSizes(step, batch)
        try:
            largest = largest_claim(sizes, room, needs).size
        except MemoryLimitError as error:
            smallest = sizes.smallest()
            largest, least = 0, (smallest.size, error.needed)
        if step.recompute == "auto":
            found = largest_recomputed(sizes, room, largest or 0, batches=batches, beyond=beyond)
            recomputed = found.size if found is not None else None
        elif step.recompute is None:
            given = sizes.at(sizes.given)
            height = room - needs(given) + max(memory.peak for memory in given.footprint.memory())
            helps = height > 0 and _can_be_lowered(step, batch, height)
    return WhatFits(largest, least, recomputed, helps)


def _can_be_lowered(step: Plannable, batch: Any, height: int) -> bool:
    try:
        return step.recomputed_for(batch, height) is not None
    except MemoryLimitError:
        return False
