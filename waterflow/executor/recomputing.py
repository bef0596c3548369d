"""A captured step brought below a number of bytes: by making activations again, or by holding them in host memory meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from waterflow.errors import MemoryLimitError
from waterflow.executor.captured import CapturedStep, assemble
from waterflow.partition.capture import Capture
from waterflow.partition.liveness import lifetimes
from waterflow.partition.offsets import MOST_WORK, place
from waterflow.partition.plan import format_bytes
from waterflow.partition.recompute import Recomputation, choose, lowest
from waterflow.partition.repeat import repeat
from waterflow.partition.spill import Spilling, choose_spilled, spill
from waterflow.partition.storages import StorageTable

Chosen = TypeVar("Chosen", Recomputation, Spilling)
_ATTEMPTS = 3
_LOOK = MOST_WORK // 20  # a placement to look at; plans are searched longer, and come out no higher


def recomputing(captured: CapturedStep, limit: int | None) -> CapturedStep:
    """The same step with a height of at most ``limit`` bytes, as far as the graph knows it: ``captured`` itself if it has.

    With None it is as low as it can be. The height is that of the placed memory; temporaries inside kernels come on top. Raises
    MemoryLimitError, whose ``needed`` is the lowest height that was found.
    """

    def make(table: StorageTable, chosen: Recomputation) -> CapturedStep:
        made = _assembled(captured, repeat(captured.capture, table, chosen))
        # First calls that only the backward pass had a use for have gone: a little more may be free than was counted on.
        made.recomputed = replace(chosen.cost(), freed=captured.predicted.height - made.predicted.height)
        return made

    remedy = "can be recomputed. Lower the batch size, or allow more with recompute=."
    return _brought_below(captured, limit, choose, lowest, make, remedy)


def spilling(captured: CapturedStep, limit: int | None) -> CapturedStep:
    """As ``recomputing``, with activations in host memory from the forward to the backward pass instead of made again."""

    def make(table: StorageTable, chosen: Spilling) -> CapturedStep:
        made = _assembled(captured, spill(captured.capture, table, chosen))
        made.recomputed = captured.recomputed
        made.spilled = replace(chosen.cost(), freed=captured.predicted.height - made.predicted.height)
        made.predicted = replace(made.predicted, spilled=made.spilled.held)
        return made

    remedy = "can go to host memory. Lower the batch size, or raise the quota."
    return _brought_below(captured, limit, choose_spilled, lambda table: choose_spilled(table, 0), make, remedy)


def _brought_below(
    captured: CapturedStep, limit: int | None, choose: Callable[[StorageTable, int], Chosen],
    lowest: Callable[[StorageTable], Chosen], make: Callable[[StorageTable, Chosen], CapturedStep], remedy: str,
) -> CapturedStep:  # fmt: skip
    height = placed_height(captured)
    if limit is not None and height <= limit:
        return captured
    table = StorageTable(captured.capture.graph)
    if limit is None:
        made = make(table, lowest(table))
        return made if placed_height(made) < height else captured
    target = limit
    for _ in range(_ATTEMPTS):
        chosen = choose(table, target)
        if chosen.peak > target:
            break
        made = make(table, chosen)
        beyond = placed_height(made) - limit
        if beyond <= 0:
            return made
        target -= beyond
    made = make(table, lowest(table))
    needed = min(placed_height(made), height)
    if needed <= limit:
        return made
    raise MemoryLimitError(
        f"step {captured.predicted.name!r} cannot be brought to a height of {format_bytes(limit)}: it is "
        f"{format_bytes(height)} high, and {format_bytes(needed)} with all that {remedy}",
        needed=needed, limit=limit,
    )  # fmt: skip


def _assembled(captured: CapturedStep, capture: Capture) -> CapturedStep:
    return assemble(capture, captured.predicted.name, captured.keep, captured.exact)


def placed_height(captured: CapturedStep) -> int:
    """The furthest byte of a step, what it hands out included."""
    instructions = captured.lowered.instructions
    lives = lifetimes(captured.capture.graph, instructions)
    kept = sum(life.size for life in lives if life.kept)
    return max(captured.predicted.height, place(lives, len(instructions), work=_LOOK).height + kept)
