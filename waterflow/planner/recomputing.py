"""The largest batch of a job alone that recomputes where its step would not fit."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from waterflow.errors import MemoryLimitError
from waterflow.partition.recompute import Recomputed
from waterflow.planner.search import search_sizes
from waterflow.planner.sizes import SizedStep, StepSizes


@dataclass(frozen=True)
class LargestRecomputed:
    """The largest batch, its step in the form in which it fits, and what that makes again."""

    step: SizedStep
    cost: Recomputed

    @property
    def size(self) -> int:
        """The first dimension of the batch."""
        return self.step.size


def largest_recomputed(
    sizes: StepSizes, limit: int, largest: int, *, batches: int = 1, beyond: int = 0
) -> LargestRecomputed | None:
    """The largest batch with which the job fits into ``limit`` bytes alone, when its step may be lowered to that.

    ``largest`` is the one without it, 0 where none fits; ``batches`` are held at a time, and ``beyond`` bytes of a step are
    not known to its graph. None where recomputing brings no larger batch.

    A graph that recomputes is another one at each size, as other activations are the cheapest. So each size that is looked
    at is captured and lowered as far as it can be. The lowest heights grow nearly evenly, and a line through them says
    where to look: some six sizes in all. The size that is returned is lowered as an engine would lower it, and fits; the
    next one does not. Larger ones might again, as what is made again is chosen greedily.
    """

    def room(size: int) -> int:
        plain = sizes.at(size)
        return limit - plain.persistent - batches * plain.batch - beyond

    @functools.cache
    def needed(size: int) -> int:
        return limit - room(size) + sizes.lowest(size)

    def lowered(size: int) -> LargestRecomputed | None:
        if room(size) <= 0:
            return None
        try:
            step, cost = sizes.lowered(size, room(size))
        except MemoryLimitError:
            return None
        return LargestRecomputed(step, cost) if cost is not None else None

    low = largest or sizes.smallest().size
    if needed(low) <= limit:
        low = search_sizes(needed, low, limit, stride=low)
    found = lowered(low) if low > largest else None
    while (more := lowered(low + 1)) is not None:
        low, found = low + 1, more
    return found
