"""Forms of a captured step that need less memory: they recompute activations, or keep them in host memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from waterflow.errors import MemoryLimitError
from waterflow.executor.program.capture_cache import CapturedStep, assemble, captures, owning
from waterflow.partition.capture.trace import Capture
from waterflow.partition.passes.offload import Offloading, choose_spilled, spill
from waterflow.partition.passes.rematerialize import Recomputation, choose, lowest, repeat
from waterflow.partition.passes.storages import StorageTable
from waterflow.partition.plan.liveness import lifetimes
from waterflow.partition.plan.offsets import MOST_WORK, place
from waterflow.partition.plan.plan import format_bytes


def form_of(plain: CapturedStep, height: int | None, offload: bool = False) -> CapturedStep:
    """Return ``form_for(...)``, made once; the step as captured without a height, and where it has nothing to recompute or offload."""
    if height is None or not (plain.capture.apart or offload):
        return plain
    key = plain.capture.number, plain.exact, height, offload
    return captures.get(key, lambda: form_for(plain, height, offload=offload))


Chosen = TypeVar("Chosen", Recomputation, Offloading)
_ATTEMPTS = 3
_LOOK = MOST_WORK // 20  # work of a trial placement; that of a plan is searched for longer, and is no higher


def form_for(captured: CapturedStep, height: int, *, offload: bool = False) -> CapturedStep:
    """Return a form of the step that is at most ``height`` bytes high by its graph: ``captured`` itself if it is.

    The form recomputes activations; with ``offload`` it keeps them in host memory if recomputing is not enough or not
    possible. The height is that of the placed memory; temporaries inside kernels come on top. Raises MemoryLimitError, whose
    ``needed`` is the lowest height that was found.
    """
    needed = whole = placed_height(captured)
    if whole <= height:
        return captured
    table = StorageTable(captured.capture.graph)
    # Recomputing first: by the cost model ResNet-50 at 0.9 of its height takes 0.12 ms for it, 0.68 ms for copies over PCIe 3.
    ways: list[Callable[[], CapturedStep]] = []
    if captured.capture.apart:
        ways.append(lambda: _lowered(captured, table, height, choose, lowest, _repeating))
    if offload:
        ways.append(lambda: _lowered(captured, table, height, choose_spilled, lambda t: choose_spilled(t, 0), _offloading))
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
        needed=needed,
        limit=height,
    )


def _lowered(
    captured: CapturedStep,
    table: StorageTable,
    height: int,
    choose: Callable[[StorageTable, int], Chosen],
    lowest: Callable[[StorageTable], Chosen],
    make: Callable[[CapturedStep, StorageTable, Chosen], CapturedStep],
) -> CapturedStep:
    # The choice counts live bytes, and the placement may end higher: the target is lowered by the difference, a few times.
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


def _offloading(captured: CapturedStep, table: StorageTable, chosen: Offloading) -> CapturedStep:
    made = _assembled(captured, spill(captured.capture, table, chosen))
    made.offloaded = replace(chosen.cost(), freed=captured.predicted.height - made.predicted.height)
    made.predicted = replace(made.predicted, offloaded=made.offloaded.held)
    return made


def _assembled(captured: CapturedStep, capture: Capture) -> CapturedStep:
    return owning(assemble(capture, captured.predicted.name, captured.keep, captured.exact))


def placed_height(captured: CapturedStep) -> int:
    """Return the height of a step by a trial placement, in bytes, including its outputs."""
    instructions = captured.lowered.instructions
    lives = lifetimes(captured.capture.graph, instructions)
    kept = sum(life.size for life in lives if life.kept)
    return max(captured.predicted.height, place(lives, len(instructions), work=_LOOK).height + kept)
