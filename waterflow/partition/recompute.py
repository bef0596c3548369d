"""Which activations to drop after the forward pass and to make again where the backward pass needs them.

Greedy, by seconds of repeated work per byte that it frees at the step's highest point, which moves as storages are dropped.
A dropped storage is made again once, right before the first operation of the backward pass that needs it; what its
operations read is kept until then, or is itself made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from torch import fx

from waterflow.partition.costs import operation_cost
from waterflow.partition.plan import format_bytes
from waterflow.partition.storages import INPUT, StorageTable

# The model of time, for choosing among storages: a V100 in single precision, and what a call costs.
_BYTES_PER_SECOND = 900e9
_FLOPS_PER_SECOND = 15e12
_SECONDS_PER_CALL = 5e-6
_LONGEST_CHAIN = 128  # operations repeated at one place
_MOST_CHANGES = 32  # chains built anew for one storage
_MOST_ROUNDS = 2  # times that storages are tried which could not be dropped before
_MOST_LIMITS = 6  # tried for the lowest peak; one is tried for steps of many operations
_MANY_OPERATIONS = 10_000


@dataclass(frozen=True)
class Work:
    """Operations with the bytes that they move and the floating-point operations that matrices and convolutions take."""

    operations: int = 0
    bytes: int = 0
    flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.operations + other.operations, self.bytes + other.bytes, self.flops + other.flops)

    @property
    def seconds(self) -> float:
        """By the model of time."""
        calls = self.operations * _SECONDS_PER_CALL
        return calls + self.bytes / _BYTES_PER_SECOND + self.flops / _FLOPS_PER_SECOND


@dataclass(frozen=True)
class Recomputed:
    """What a step makes again, and what that costs.

    ``freed`` are bytes at the step's highest point; ``operations`` counts those that are repeated. Shares are of what the
    step moves, and of the floating-point operations of its matrices and convolutions, without what is repeated.
    """

    freed: int
    operations: int
    share_of_bytes: float
    share_of_flops: float

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.freed)} less at the peak for {self.operations} repeated operations, "
            f"{self.share_of_bytes:.1%} of the bytes moved and {self.share_of_flops:.1%} of the flops"
        )


@dataclass(frozen=True)
class Recomputation:
    """What to drop, and what it costs. Bytes are those of live storages, without temporaries inside kernels.

    ``chains`` has the operations to repeat before an operation, in order; ``dropped`` the storages, each with the operation
    before which it is made again. Numbers are those of the step's StorageTable.
    """

    chains: dict[int, tuple[int, ...]]
    dropped: dict[int, int]
    peak_before: int
    peak: int
    repeated: Work
    step: Work

    def cost(self) -> Recomputed:
        """For users."""
        return Recomputed(
            self.peak_before - self.peak, self.repeated.operations, self.repeated.bytes / max(1, self.step.bytes),
            self.repeated.flops / max(1, self.step.flops),
        )  # fmt: skip


def choose(table: StorageTable, limit: int) -> Recomputation:
    """Drop as much as brings the step's peak to ``limit`` bytes, or as near to it as can be: see ``peak``."""
    search = _Search(table, limit)
    search.run()
    return search.result()


def lowest(table: StorageTable) -> Recomputation:
    """The lowest peak that is found, with several limits.

    The limit bounds how much may be made again at one place, so a lower one does not always end lower.
    """
    best = choose(table, 0)
    low, high = 0, best.peak
    for _ in range(_MOST_LIMITS - 1 if len(table.operations) < _MANY_OPERATIONS else 0):
        middle = (low + high) // 2
        found = choose(table, middle)
        best = min(best, found, key=lambda r: r.peak)
        low, high = (low, middle) if found.peak <= middle else (middle, high)
    return best


def work_of(node: fx.Node) -> Work:
    """What one operation moves and computes."""
    cost = operation_cost(node)
    return Work(1, cost.bytes, cost.flops)


class _Search:
    """The state of one search. Memory is counted in two slots an operation: what is made again before it, and itself.

    ``_memory`` has the live bytes of each slot. Each storage has its ranges of slots; while a chain runs, what it makes
    counts as the highest point of the chain.
    """

    def __init__(self, table: StorageTable, limit: int) -> None:
        self.table = table
        self.limit = limit
        self.work = [work_of(node) for node in table.operations]
        self._memory = np.zeros(2 * len(table.operations) + 1, dtype=np.int64)
        self._ranges: dict[int, tuple[tuple[int, int], ...]] = {}
        self._need: dict[int, int] = {}  # of dropped storages: the operation before which each is made again
        self._roots: dict[int, frozenset[int]] = {}  # the dropped storages of each such operation
        self._chains: dict[int, tuple[int, ...]] = {}
        self._chain_peak: dict[int, int] = {}
        self._chain_reads: dict[int, frozenset[int]] = {}
        self._read_before: dict[int, frozenset[int]] = {}  # by storage: the operations before which chains read it
        self._undo: list[Callable[[], None]] = []
        for number, storage in enumerate(table.storages):
            if storage.birth != INPUT:
                self._lay(number)
        for at, size in enumerate(table.temporary):
            self._memory[2 * at + 1] += size
        self.peak_before = self.peak

    @property
    def peak(self) -> int:
        """The most bytes that are live at once."""
        return int(self._memory.max(initial=0))

    def result(self) -> Recomputation:
        """What was found."""
        repeated = sum((self.work[at] for chain in self._chains.values() for at in chain), Work())
        chains = {before: chain for before, chain in self._chains.items() if chain}
        total = sum(self.work, Work())
        return Recomputation(chains, dict(self._need), self.peak_before, self.peak, repeated, total)

    def run(self) -> None:
        """Drop storages until the peak is within the limit, or none is left that would lower it."""
        candidates = self._candidates()
        begin = np.array([begin for _, begin, _ in candidates], dtype=np.int64)
        end = np.array([end for _, _, end in candidates], dtype=np.int64)
        is_open = np.ones(len(candidates), dtype=bool)
        rejected: list[int] = []
        rounds, dropped_since = 1, False
        while (peak := self.peak) > self.limit:
            top = int(self._memory.argmax())
            found = np.flatnonzero(is_open & (begin < top) & (top < end))
            if not len(found):
                if not dropped_since or rounds >= _MOST_ROUNDS:
                    return
                is_open[rejected] = True
                rejected.clear()
                rounds, dropped_since = rounds + 1, False
                continue
            best = int(found[0])
            is_open[best] = False
            if candidates[best][0] in self._need:
                continue
            if self._drop(candidates[best][0], top, peak):
                dropped_since = True
            else:
                rejected.append(best)

    def _candidates(self) -> list[tuple[int, int, int]]:
        """Storages that could be dropped, the cheapest per byte first, each with the slots between which it would be gone."""
        table = self.table
        rated = []
        for number, need in table.saved.items():
            storage, recipe = table.storages[number], table.recipe(number)
            if recipe is None or need >= table.update or storage.size == 0:
                continue
            chain = self._chain([number])
            if chain is not None:
                seconds = sum((self.work[at] for at in chain[0]), Work()).seconds
                rated.append((seconds / storage.size, number, 2 * self.table.last_forward(number) + 1, 2 * need))
        return [rest for _, *rest in sorted(rated)]  # type: ignore[misc]

    # -- chains: what is repeated before one operation

    def _chain(self, roots: Iterable[int]) -> tuple[tuple[int, ...], int, frozenset[int]] | None:
        """Operations that make these storages, the most bytes that live while they run, and what else they read.

        None for chains that are too long.
        """
        table = self.table
        made, waiting = set(roots), list(roots)
        kept = frozenset(made)
        operations: set[int] = set()
        reads: set[int] = set()
        while waiting:
            recipe = table.recipe(waiting.pop())
            assert recipe is not None
            operations.update(recipe)
            if len(operations) > _LONGEST_CHAIN:
                return None
            for at in recipe:
                for number in table.reads[at]:
                    if number in made or table.storages[number].birth == INPUT:
                        continue
                    if table.is_transient(number):
                        made.add(number)
                        waiting.append(number)
                    else:
                        reads.add(number)
        order = tuple(sorted(operations))
        last: dict[int, int] = {}
        for at in order:
            last.update(dict.fromkeys(table.reads[at], at))
            last.update(dict.fromkeys(table.makes[at], at))
        live = peak = 0
        for at in order:
            live += sum(table.storages[number].size for number in table.makes[at])
            peak = max(peak, live)
            over = {n for n in (*table.reads[at], *table.makes[at]) if last[n] == at and n not in kept}
            live -= sum(table.storages[n].size for n in over if n in made or n in table.makes[at])
        return order, peak, frozenset(reads)

    # -- dropping one storage, and taking it back

    def _drop(self, number: int, top: int, peak: int) -> bool:
        """Drop a storage if that lowers the peak, and lifts nothing above the limit that was within it."""
        before = self._memory.copy()
        self._undo.clear()
        need = min([self.table.saved[number], *self._read_before.get(number, ())])
        if self._make_before(number, need):
            now = self._memory
            if now[top] < before[top] and now.max() <= peak and not np.any((now > self.limit) & (before <= self.limit)):
                return True
        for step in reversed(self._undo):
            step()
        self._memory = before
        return False

    def _make_before(self, number: int, need: int) -> bool:
        """Make a storage again before operation ``need``, and before it everything dropped that this takes."""
        changed = {number}
        self._set(self._need, number, need)
        self._set(self._roots, need, self._roots.get(need, frozenset()) | {number})
        stale = [need]
        changes = 0
        while stale:
            before = stale.pop()
            chain = self._chain(self._roots[before])
            changes += 1
            if chain is None or changes > _MOST_CHANGES:
                return False
            operations, peak, reads = chain
            self._memory[2 * before] += peak - self._chain_peak.get(before, 0)
            old = self._chain_reads.get(before, frozenset())
            self._set(self._chains, before, operations)
            self._set(self._chain_peak, before, peak)
            self._set(self._chain_reads, before, reads)
            for other in old - reads:
                self._set(self._read_before, other, self._read_before[other] - {before})
            for other in reads - old:
                self._set(self._read_before, other, self._read_before.get(other, frozenset()) | {before})
            changed |= old ^ reads
            late = [other for other in reads if self._need.get(other, before) > before]
            for other in late:
                there = self._need[other]
                self._set(self._roots, there, self._roots[there] - {other})
                self._set(self._need, other, before)
                self._set(self._roots, before, self._roots[before] | {other})
                changed.add(other)
                stale.append(there)
            if late:
                stale.append(before)
        for other in changed:
            self._lay(other)
        return True

    def _lay(self, number: int) -> None:
        """Count a storage in the slots in which it lives."""
        storage = self.table.storages[number]
        end = 2 * (len(self.table.operations) - 1 if storage.kept else storage.death) + 1
        end = max([end, *(2 * before for before in self._read_before.get(number, ()))])
        ranges: tuple[tuple[int, int], ...] = ((2 * storage.birth + 1, end),)
        if number in self._need:
            ranges = (
                (2 * storage.birth + 1, 2 * self.table.last_forward(number) + 1),
                (2 * self._need[number] + 1, end),
            )
        for begin, last in self._ranges.get(number, ()):
            self._memory[begin : last + 1] -= storage.size
        for begin, last in ranges:
            self._memory[begin : last + 1] += storage.size
        self._set(self._ranges, number, ranges)

    def _set(self, table: dict, key: int, value: object) -> None:  # type: ignore[type-arg]
        """Change an entry, in a way that can be taken back."""
        missing = key not in table
        old = table.get(key)
        self._undo.append(lambda: table.pop(key) if missing else table.__setitem__(key, old))
        table[key] = value
