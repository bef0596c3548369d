"""Recomputation: chooses activations to drop after the forward pass, and makes them again for the backward pass.

Greedy, by seconds of repeated work per byte freed at the step's highest point, which moves as storages are dropped. A
dropped storage is made again once, right before the first operation of the backward pass that needs it; what its
operations read is kept until then, or is itself made again.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from waterflow.partition.capture.trace import Capture
from waterflow.partition.passes.operators import has_effect, repeated_arguments, storage_id, tensors_in, with_lazy_bits
from waterflow.partition.passes.storages import INPUT, StorageTable
from waterflow.partition.plan.costs import operation_cost
from waterflow.partition.plan.plan import format_bytes

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
    """A number of operations, the bytes that they move, and the floating-point operations of matrices and convolutions."""

    operations: int = 0
    bytes: int = 0
    flops: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.operations + other.operations, self.bytes + other.bytes, self.flops + other.flops)

    @property
    def seconds(self) -> float:
        """The time of this work by the model of a V100."""
        calls = self.operations * _SECONDS_PER_CALL
        return calls + self.bytes / _BYTES_PER_SECOND + self.flops / _FLOPS_PER_SECOND


@dataclass(frozen=True)
class Recomputed:
    """The recomputation in a step, for users: its gain and its cost.

    ``freed`` are bytes at the step's highest point; ``operations`` counts the repeated ones. Shares are relative to the
    bytes that the step moves, and to the floating-point operations of its matrices and convolutions, both without
    repeated ones.
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
    """A choice of storages to drop, and its cost. Bytes are those of live storages, without temporaries inside kernels.

    ``chains`` has the operations to repeat before an operation, in order; ``dropped`` maps each storage to the
    operation before which it is made again. Numbers are those of the step's StorageTable.
    """

    chains: dict[int, tuple[int, ...]]
    dropped: dict[int, int]
    peak_before: int
    peak: int
    repeated: Work
    step: Work

    def cost(self) -> Recomputed:
        """Return the choice's cost and gain, for users."""
        return Recomputed(
            self.peak_before - self.peak,
            self.repeated.operations,
            self.repeated.bytes / max(1, self.step.bytes),
            self.repeated.flops / max(1, self.step.flops),
        )


def choose(table: StorageTable, limit: int) -> Recomputation:
    """Drop storages until the step's peak is at most ``limit`` bytes, or as near to it as possible (the result's ``peak``)."""
    search = _Search(table, limit)
    search.run()
    return search.result()


def lowest(table: StorageTable) -> Recomputation:
    """Return the choice with the lowest peak, found by bisection over limits.

    The limit bounds how much may be made again at one place, so a lower limit does not always end at a lower peak.
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
    """Return the work of one operation."""
    cost = operation_cost(node)
    return Work(1, cost.bytes, cost.flops)


class _Search:
    def __init__(self, table: StorageTable, limit: int) -> None:
        self.table = table
        self.limit = limit
        # Memory is counted in two slots an operation: for what is made again before it, and for itself. While a chain
        # runs, its highest point counts for all of it.
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
        """Return the choice that the search has reached."""
        repeated = sum((self.work[at] for chain in self._chains.values() for at in chain), Work())
        chains = {before: chain for before, chain in self._chains.items() if chain}
        total = sum(self.work, Work())
        return Recomputation(chains, dict(self._need), self.peak_before, self.peak, repeated, total)

    def run(self) -> None:
        """Drop storages until the peak is within the limit, or until none is left that would lower it."""
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
        # The cheapest per byte first. Slots: where the storage would be gone.
        return [rest for _, *rest in sorted(rated)]  # type: ignore[misc]

    # -- chains: what is repeated before one operation

    def _chain(self, roots: Iterable[int]) -> tuple[tuple[int, ...], int, frozenset[int]] | None:
        table = self.table
        # Returns the operations that make ``roots``, the most bytes that live while they run, and what else they read.
        # None if the chain is too long.
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
        # Kept only if it lowers the present top, and lifts nothing above the limit that was within it.
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
        changed = {number}
        self._set(self._need, number, need)
        self._set(self._roots, need, self._roots.get(need, frozenset()) | {number})
        # A chain reads storages that may be dropped themselves: those are made before it, and their old chains shrink.
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
        storage = self.table.storages[number]
        end = 2 * (len(self.table.operations) - 1 if storage.kept else storage.death) + 1
        end = max([end, *(2 * before for before in self._read_before.get(number, ()))])
        ranges: tuple[tuple[int, int], ...] = ((2 * storage.birth + 1, end),)
        if number in self._need:
            ranges = ((2 * storage.birth + 1, 2 * self.table.last_forward(number) + 1), (2 * self._need[number] + 1, end))
        for begin, last in self._ranges.get(number, ()):
            self._memory[begin : last + 1] -= storage.size
        for begin, last in ranges:
            self._memory[begin : last + 1] += storage.size
        self._set(self._ranges, number, ranges)

    def _set(self, table: dict, key: int, value: object) -> None:  # type: ignore[type-arg]
        missing = key not in table
        old = table.get(key)
        # _drop takes a failed attempt back by these.
        self._undo.append(lambda: table.pop(key) if missing else table.__setitem__(key, old))
        table[key] = value


def repeat(capture: Capture, table: StorageTable, chosen: Recomputation) -> Capture:
    """Return the step with the ``chosen`` storages made again where they are needed. Leaves ``capture`` as it is.

    Repeated operations belong to the backward phase, and name the node that they repeat in ``meta["repeats"]``. They
    read what the first ones read; later operations read their results, through the same views.
    """
    return _Repeating(capture, table, chosen).run()


class Rewriting:
    """Copies a step's graph and adds operations: in the backward pass these stand for the storages ``gone`` before it."""

    def __init__(self, capture: Capture, table: StorageTable, gone: Container[int]) -> None:
        self.capture = capture
        self.table = table
        self.gone = gone
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.again: dict[fx.Node, fx.Node] = {}  # what stands for nodes of such storages once they are there again
        self.passing: dict[fx.Node, fx.Node] = {}  # and for those that only the chain under way makes
        self.flat: dict[int, torch.Tensor] = {}  # the memory of what is made again, as bytes
        self.mode = FakeTensorMode()

    def before(self, at: int) -> None:
        """Add the operations that must come before operation ``at`` of the table."""
        raise NotImplementedError

    def run(self) -> Capture:
        """Return the rewritten step."""
        at = 0
        for node in self.capture.graph.nodes:
            if node.op == "call_function" and not self.table.passes_on(node):
                self.before(at)
                at += 1
            elif self._comes_later(node):
                continue
            self.copies[node] = self.graph.node_copy(node, self._source)
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users and not has_effect(node):
                self.graph.erase_node(node)
        self.graph.lint()
        names = {node.name: copy.name for node, copy in self.copies.items()}
        groups = {names.get(name, name): group for name, group in self.capture.update_groups.items()}
        return replace(self.capture, graph=self.graph, update_groups=groups)

    def _comes_later(self, node: fx.Node) -> bool:
        # A view in the backward pass of a storage that is gone is made where it is used: here its memory may be absent.
        if node.op != "call_function" or node.meta["phase"] == "forward":
            return False
        return any(number in self.gone for number in self.table.of(node))

    def _home(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        return self.again if any(number in self.gone for number in self.table.of(node)) else self.passing

    def _source(self, node: fx.Node) -> fx.Node:
        # The node that stands for ``node`` now. Views of what was made again are made at their first use.
        found = self.again.get(node) or self.passing.get(node)
        if found is not None:
            return found
        if self.table.passes_on(node):
            base = node.args[0]
            assert isinstance(base, fx.Node)
            source = self._source(base)
            if source is not self.copies.get(base):
                home = self._home(node)
                home[node] = self._again(node, node.args, {base: source})
                return home[node]
        return self.copies[node]

    def _again(self, node: fx.Node, args: tuple[Any, ...], known: Mapping[fx.Node, fx.Node] | None = None) -> fx.Node:
        given = dict(known or {})

        def source(of: fx.Node) -> fx.Node:
            if of not in given:
                given[of] = self._source(of)
            return given[of]

        args, kwargs = fx.node.map_arg((args, dict(node.kwargs)), source)
        made = self.graph.create_node("call_function", node.target, args, kwargs, f"{node.name}_again")
        tensors = {
            storage_id(one): other
            for old, new in given.items()
            for one, other in zip(tensors_in(old.meta["val"]), tensors_in(new.meta["val"]))
        }
        value = self._value(node.meta["val"], tensors)
        made.meta = node.meta | {"val": value, "phase": "backward", "repeats": node.name}
        return made

    def _value(self, value: Any, tensors: dict[int, torch.Tensor]) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self._value(item, tensors) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        # In memory of its own, or in that of the argument that the first result shared its memory with.
        number = storage_id(value)
        if number not in tensors:
            tensors[number] = self.memory(value.untyped_storage().nbytes(), value.device)
        return self.placed(value, self.flat[storage_id(tensors[number])])

    def memory(self, size: int, device: torch.device) -> torch.Tensor:
        """Return fake memory of ``size`` bytes."""
        with self.mode:
            flat = torch.empty(size, dtype=torch.uint8, device=device)
        self.flat[storage_id(flat)] = flat
        return flat

    def placed(self, value: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """Return a fake tensor with the form of ``value``, in the memory ``flat``."""
        with self.mode:
            made = flat.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())
            return with_lazy_bits(made, value)


class _Repeating(Rewriting):
    def __init__(self, capture: Capture, table: StorageTable, chosen: Recomputation) -> None:
        super().__init__(capture, table, chosen.dropped)
        self.chosen = chosen

    def before(self, at: int) -> None:
        """Add the operations that are repeated before operation ``at``."""
        for number in self.chosen.chains.get(at, ()):
            node = self.table.operations[number]
            made = self._again(node, repeated_arguments(node))
            self._remember(node, made, at)
            for user in node.users:
                if user.target is operator.getitem and self._is_wanted(user, at):
                    self._remember(user, self._again(user, user.args, {node: made}), at)
        self.passing.clear()

    def _is_wanted(self, node: fx.Node, at: int) -> bool:
        # A repeated operation may return several results. Only those are used that the chain runs for, or that it reads
        # on its way; others may still be alive.
        numbers = self.table.of(node)
        return all(self.chosen.dropped.get(n) == at or self.table.is_transient(n) for n in numbers)

    def _remember(self, node: fx.Node, made: fx.Node, at: int) -> None:
        if self._is_wanted(node, at):
            self._home(node)[node] = made
