"""A captured step brought below a number of bytes by making activations again."""

from __future__ import annotations

from dataclasses import replace

from waterflow.errors import MemoryLimitError
from waterflow.executor.captured import CapturedStep, assemble
from waterflow.partition.liveness import lifetimes
from waterflow.partition.offsets import MOST_WORK, place
from waterflow.partition.plan import format_bytes
from waterflow.partition.recompute import Recomputation, choose, lowest
from waterflow.partition.repeat import repeat
from waterflow.partition.storages import StorageTable

_ATTEMPTS = 3
_LOOK = MOST_WORK // 20  # a placement to look at; plans are searched longer, and come out no higher


def form_for(captured: CapturedStep, height: int) -> CapturedStep:
    """The same step with a height of at most ``height`` bytes, as far as the graph knows it: ``captured`` itself if it has.

    The height is that of the placed memory; temporaries inside kernels come on top. Raises MemoryLimitError, whose ``needed`` is
    the lowest height that was found.
    """
    before = placed_height(captured)
    if before <= height:
        return captured
    table = StorageTable(captured.capture.graph)
    target = height
    for _ in range(_ATTEMPTS):
        chosen = choose(table, target)
        if chosen.peak > target:
            break
        made = _repeating(captured, table, chosen)
        beyond = placed_height(made) - height
        if beyond <= 0:
            return made
        target -= beyond
    made = _repeating(captured, table, lowest(table))
    needed = min(placed_height(made), before)
    if needed <= height:
        return made
    raise MemoryLimitError(
        f"step {captured.predicted.name!r} cannot be brought to a height of {format_bytes(height)}: it is "
        f"{format_bytes(before)} high, and {format_bytes(needed)} with all that can be recomputed. Lower the batch size, or allow "
        "more with recompute=.",
        needed=needed, limit=height,
    )  # fmt: skip


def _repeating(captured: CapturedStep, table: StorageTable, chosen: Recomputation) -> CapturedStep:
    made = assemble(repeat(captured.capture, table, chosen), captured.predicted.name, captured.keep, captured.exact)
    # First calls that only the backward pass had a use for have gone: a little more may be free than was counted on.
    made.recomputed = replace(chosen.cost(), freed=captured.predicted.height - made.predicted.height)
    return made


def placed_height(captured: CapturedStep) -> int:
    """The furthest byte of a step, what it hands out included."""
    instructions = captured.lowered.instructions
    lives = lifetimes(captured.capture.graph, instructions)
    kept = sum(life.size for life in lives if life.kept)
    return max(captured.predicted.height, place(lives, len(instructions), work=_LOOK).height + kept)
