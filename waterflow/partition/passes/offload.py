"""Offloading: chooses activations to keep in host memory between forward and backward pass, and moves them in the graph.

Each is copied to the host after its last use in the forward pass, and back right before its first use in the backward
pass. Nothing is computed again, so random and unrepeatable results move, too. Host memory is not part of the step's
height.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from waterflow.partition.capture.trace import Capture
from waterflow.partition.passes.operators import lazy_bits, storage_id, written_by
from waterflow.partition.passes.rematerialize import Rewriting
from waterflow.partition.passes.storages import INPUT, StorageTable
from waterflow.partition.plan.plan import format_bytes

_LEAST_SHARE = 1 / 4096  # of the highest point, that a storage must have


@dataclass(frozen=True)
class Offloaded:
    """The memory that a step keeps on the host: the most bytes at once, bytes copied each way, bytes freed at the peak."""

    held: int
    moved: int
    freed: int

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.freed)} less at the peak for {format_bytes(self.held)} in host memory, "
            f"{format_bytes(self.moved)} copied each way"
        )


@dataclass(frozen=True)
class Offloading:
    """A choice of storages to move. ``moves`` maps a storage's number in the StorageTable to two operations.

    The storage leaves after the first operation, and is back for the second. Bytes are those of live storages, without
    temporaries inside kernels.
    """

    moves: dict[int, tuple[int, int]]
    peak_before: int
    peak: int
    held: int
    moved: int

    def cost(self) -> Offloaded:
        """Return the choice's cost and gain, for users."""
        return Offloaded(self.held, self.moved, self.peak_before - self.peak)


def choose_spilled(table: StorageTable, limit: int) -> Offloading:
    """Choose storages until the step's peak is at most ``limit`` bytes, or as near to it as possible (the result's ``peak``).

    Greedy: at the highest point, which moves, the storage goes that frees most bytes over most operations. Afterwards
    storages stay that the limit does not need moved.
    """
    memory = _live(table)
    before = int(memory.max(initial=0))
    open_ = _candidates(table, before)
    chosen: dict[int, tuple[int, int]] = {}
    while (peak := int(memory.max(initial=0))) > limit:
        top = int(memory.argmax())
        there = [number for number, (behind, need) in open_.items() if behind < top < need]
        if not there:
            break
        best = max(there, key=lambda number: (_area(table, number, open_[number]), -number))
        behind, need = chosen[best] = open_.pop(best)
        memory[behind + 1 : need] -= table.storages[best].size
    most = max(peak, limit)
    for number in sorted(chosen, key=lambda number: (-table.storages[number].size, number)):
        behind, need = chosen[number]
        if int(memory[behind + 1 : need].max()) + table.storages[number].size <= most:
            memory[behind + 1 : need] += table.storages[number].size
            del chosen[number]
    moved = sum(table.storages[number].size for number in chosen)
    return Offloading(chosen, before, int(memory.max(initial=0)), _held(table, chosen), moved)


def _live(table: StorageTable) -> np.ndarray:
    memory = np.array(table.temporary, dtype=np.int64)
    for storage in table.storages:
        if storage.birth != INPUT:
            memory[storage.birth : len(memory) if storage.kept else storage.death + 1] += storage.size
    return memory


def _held(table: StorageTable, chosen: dict[int, tuple[int, int]]) -> int:
    memory = np.zeros(len(table.operations), dtype=np.int64)
    for number, (behind, need) in chosen.items():
        # From the start of the copy there to the end of the copy back.
        memory[behind:need] += table.storages[number].size
    return int(memory.max(initial=0))


def _area(table: StorageTable, number: int, gone: tuple[int, int]) -> int:
    return table.storages[number].size * (gone[1] - gone[0] - 1)


def _candidates(table: StorageTable, peak: int) -> dict[int, tuple[int, int]]:
    found = {}
    for number, need in table.saved.items():
        storage, behind = table.storages[number], table.last_forward(number)
        if storage.size >= max(1, _LEAST_SHARE * peak) and need - behind > 1 and carriers(table, number):
            found[number] = behind, need
    return found


def carriers(table: StorageTable, number: int) -> list[fx.Node]:
    """Return, in order, the nodes that stand for a whole storage in its original form; empty if it cannot move.

    A storage can move if only operations of the forward pass change it, each of which returns it or nothing.
    """
    storage = table.storages[number]
    birth = table.operations[storage.birth]
    made = [birth]
    if not isinstance(birth.meta["val"], torch.Tensor):
        made = [node for node in birth.users if node.target is operator.getitem and table.of(node) == [number]]
    if not made or storage.writes[-1] >= table.backward:
        return []
    for at in storage.writes[1:]:
        node = table.operations[at]
        if table.of(node) and _changed(table, node, number) is None:
            return []
        if table.of(node) and _same_form(node, made[0]):
            made.append(node)
    return made if all(_same_form(node, made[0]) for node in made) else []


def _changed(table: StorageTable, node: fx.Node, number: int) -> fx.Node | None:
    if table.of(node) != [number] or not isinstance(node.meta["val"], torch.Tensor):
        return None
    # An operation in place returns its argument: the node stands for the storage from then on.
    return next((source for source in written_by(node) if _same_form(source, node)), None)


def _same_form(one: fx.Node, other: fx.Node) -> bool:
    first, second = one.meta["val"], other.meta["val"]
    form = [(t.dtype, t.shape, t.stride(), t.storage_offset(), lazy_bits(t)) for t in (first, second)]
    return storage_id(first) == storage_id(second) and form[0] == form[1]


def spill(capture: Capture, table: StorageTable, chosen: Offloading) -> Capture:
    """Return the step with the ``chosen`` storages in host memory meanwhile. Leaves ``capture`` as it is."""
    return _Moving(capture, table, chosen).run()


class _Moving(Rewriting):
    def __init__(self, capture: Capture, table: StorageTable, chosen: Offloading) -> None:
        super().__init__(capture, table, chosen.moves)
        self.whole = {number: carriers(table, number) for number in chosen.moves}
        self.waiting = sorted((behind, number) for number, (behind, _) in chosen.moves.items())
        self.needed: dict[int, list[int]] = defaultdict(list)
        for number, (_, need) in sorted(chosen.moves.items()):
            self.needed[need].append(number)
        self.away: dict[int, fx.Node] = {}

    def before(self, at: int) -> None:
        """Add the copies to the host after the operation before, and copies back for operation ``at``."""
        ready = [(behind, n) for behind, n in self.waiting if behind < at and self.whole[n][-1] in self.copies]
        for _, number in ready:
            whole = self.whole[number][-1]
            self.away[number] = self._copy(number, whole, "to_host", (self._source(whole),), torch.device("cpu"))
        self.waiting = [one for one in self.waiting if one not in ready]
        for number in self.needed.pop(at, ()):
            whole = self.whole[number][-1]
            device = whole.meta["val"].device
            back = self._copy(number, whole, "from_host", (self.away.pop(number), device), device)
            back.meta["phase"] = self.table.operations[at].meta["phase"]
            self.again.update(dict.fromkeys(self.whole[number], back))
            for changed in self.table.storages[number].writes[1:]:
                node = self.table.operations[changed]
                source = _changed(self.table, node, number)
                if source is not None and node not in self.again:
                    self.again[node] = self._source(source)

    def _copy(self, number: int, whole: fx.Node, name: str, args: tuple[Any, ...], device: torch.device) -> fx.Node:
        target = getattr(torch.ops.waterflow, name).default
        made = self.graph.create_node("call_function", target, args, {}, f"{whole.name}_{name}")
        value = self.placed(whole.meta["val"], self.memory(self.table.storages[number].size, device))
        made.meta = {key: whole.meta[key] for key in ("phase", "line", "module", "job") if key in whole.meta}
        made.meta["val"] = value
        return made
