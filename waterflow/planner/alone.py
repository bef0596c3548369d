"""The largest batch of a job alone: as its step is, where it recomputes, and in the place of a batch that does not fit."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from waterflow.errors import MemoryLimitError, WaterflowError
from waterflow.executor.claiming import WhatFits
from waterflow.partition.recompute import Recomputed
from waterflow.planner.search import largest_claim, search_sizes
from waterflow.planner.sizes import Plannable, SizedStep, StepSizes


def what_fits(step: Plannable, room: int, batches: int, batch: Any, beyond: int = 0) -> WhatFits:
    """What fits into ``room`` bytes as an engine counts them, with ``batches`` held, of a step for which this batch is too large.

    ``beyond`` bytes of the step are not known to its graph: kernels' temporaries, as its profile showed. Nothing is run;
    takes a few captures. Where the step cannot be captured with other batches nothing is known, which is no error.
    """
    largest = least = recomputed = helps = None
    with contextlib.suppress(WaterflowError, RuntimeError):
        sizes, limit = StepSizes(step, batch, batches), room - beyond
        try:
            largest = largest_claim(sizes, limit).size
        except MemoryLimitError as error:
            largest, least = 0, (sizes.smallest().size, error.needed + beyond)
        if step.recompute == "auto":
            found = largest_recomputed(sizes, limit, largest)
            recomputed = found[0].size if found is not None else None
        elif step.recompute is None:
            height, helps = limit - sizes.at(sizes.given).held, False
            with contextlib.suppress(MemoryLimitError):
                helps = height > 0 and step.recomputed_for(batch, height) is not None
    return WhatFits(largest, least, recomputed, helps)


def largest_recomputed(sizes: StepSizes, limit: int, largest: int) -> tuple[SizedStep, Recomputed] | None:
    """The largest batch with which the job fits into ``limit`` bytes alone, when its step may be lowered to that.

    Returns the step with that batch in the form in which it fits, and what that makes again. ``largest`` is the one without it, 0
    where none fits. None where recomputing brings no larger batch.

    A graph that recomputes is another one at each size, as other activations are the cheapest. So each size that is looked
    at is captured and lowered as far as it can be. The lowest heights grow nearly evenly, and a line through them says
    where to look: some six sizes in all. The size that is returned is lowered as an engine would lower it, and fits; the
    next one does not. Larger ones might again, as what is made again is chosen greedily.
    """

    @functools.cache
    def needed(size: int) -> int:
        return sizes.at(size).held + sizes.lowest(size)

    def lowered(size: int) -> tuple[SizedStep, Recomputed] | None:
        height = limit - sizes.at(size).held
        if height <= 0:
            return None
        try:
            step, cost = sizes.lowered(size, height)
        except MemoryLimitError:
            return None
        return None if cost is None else (step, cost)

    low = largest or sizes.smallest().size
    if needed(low) <= limit:
        low = search_sizes(needed, low, limit, stride=low)
    found = lowered(low) if low > largest else None
    while (more := lowered(low + 1)) is not None:
        low, found = low + 1, more
    return found
