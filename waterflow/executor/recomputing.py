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


def form_for(captured: CapturedStep, height: int, *, offload: bool = False) -> CapturedStep:
    """The same step with a height of at most ``height`` bytes, as far as the graph knows it: ``captured`` itself if it has.

    It makes activations again; with ``offload`` it holds them in host memory where that is not enough, or cannot be done. The
    height is that of the placed memory; temporaries inside kernels come on top. Raises MemoryLimitError, whose ``needed`` is
    the lowest height that was found.
    """
    needed = whole = placed_height(captured)
    if whole <= height:
        return captured
    table = StorageTable(captured.capture.graph)
    # Made again first: by the model of time ResNet-50 at 0.9 of its height takes 0.12 ms for that, 0.68 ms for copies by PCIe 3.
    ways: list[Callable[[], CapturedStep]] = []
    if captured.capture.apart:
        ways.append(lambda: _lowered(captured, table, height, choose, lowest, _repeating))
    if offload:
        ways.append(
            lambda: _lowered(captured, table, height, choose_spilled, lambda t: choose_spilled(t, 0), _offloading)
        )
    for way in ways:
        made = way()
        reached = placed_height(made)
        if reached <= height:
            return made
        needed = min(needed, reached)
    done = "can be recomputed or held in host memory" if offload else "can be recomputed"
    remedy = "raise the quota" if offload else "allow more with recompute="
    raise MemoryLimitError(
        f"step {captured.predicted.name!r} cannot be brought to a height of {format_bytes(height)}: it is "
        f"{format_bytes(whole)} high, and {format_bytes(needed)} with all that {done}. Lower the batch size, or {remedy}.",
        needed=needed, limit=height,
    )  # fmt: skip


def _lowered(
    captured: CapturedStep, table: StorageTable, height: int, choose: Callable[[StorageTable, int], Chosen],
    lowest: Callable[[StorageTable], Chosen], make: Callable[[CapturedStep, StorageTable, Chosen], CapturedStep],
) -> CapturedStep:  # fmt: skip
    """One at most so high, or as low as it becomes this way."""
    target = height
    for _ in range(_ATTEMPTS):
        chosen = choose(table, target)
        if chosen.peak > target:
            break
        made = make(captured, table, chosen)
        beyond = placed_height(made) - height
        if beyond <= 0:
            return made
        target -= beyond
    return make(captured, table, lowest(table))


def _repeating(captured: CapturedStep, table: StorageTable, chosen: Recomputation) -> CapturedStep:
    made = _assembled(captured, repeat(captured.capture, table, chosen))
    # First calls that only the backward pass had a use for have gone: a little more may be free than was counted on.
    made.recomputed = replace(chosen.cost(), freed=captured.predicted.height - made.predicted.height)
    return made


def _offloading(captured: CapturedStep, table: StorageTable, chosen: Spilling) -> CapturedStep:
    made = _assembled(captured, spill(captured.capture, table, chosen))
    made.spilled = replace(chosen.cost(), freed=captured.predicted.height - made.predicted.height)
    made.predicted = replace(made.predicted, spilled=made.spilled.held)
    return made


def _assembled(captured: CapturedStep, capture: Capture) -> CapturedStep:
    return assemble(capture, captured.predicted.name, captured.keep, captured.exact)


def placed_height(captured: CapturedStep) -> int:
    """The furthest byte of a step, what it hands out included."""
    instructions = captured.lowered.instructions
    lives = lifetimes(captured.capture.graph, instructions)
    kept = sum(life.size for life in lives if life.kept)
    return max(captured.predicted.height, place(lives, len(instructions), work=_LOOK).height + kept)
