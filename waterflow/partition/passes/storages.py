"""The storages of a captured step: the operations that make, read and change each, and those that could make it again.

Time is counted in operations: calls that are more than a view. A view only passes on the storage that it refers to.
"""

from __future__ import annotations

import functools
import operator
from bisect import bisect_left
from dataclasses import dataclass, field

from torch import fx

from waterflow.partition.passes.operators import is_repeatable, running_statistics, storage_id, tensors_in, written_by
from waterflow.partition.plan.probe import hidden_memory

INPUT = -1  # the birth of what is there before the step


@dataclass
class Storage:
    """One piece of memory: its bytes, the operation of its birth, and the operations that read and write it, in order.

    The birth counts as a write. A ``kept`` storage outlives the step.
    """

    size: int
    birth: int
    reads: list[int] = field(default_factory=list)
    writes: list[int] = field(default_factory=list)
    kept: bool = False

    @property
    def death(self) -> int:
        """The last operation that touches the storage."""
        return max([self.birth, *self.reads[-1:], *self.writes[-1:]])


class StorageTable:
    """The storages of a captured graph by number, and the effect of each operation on them.

    ``reads``, ``writes`` and ``makes`` have, for each operation, the storages that it reads, changes and makes;
    ``temporary`` the bytes that a probed operator holds beside its results. Operations before ``backward`` are the
    forward pass, those from ``update`` on the update.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.storages: list[Storage] = []
        self.operations: list[fx.Node] = []
        self.reads: list[list[int]] = []
        self.writes: list[list[int]] = []
        self.makes: list[list[int]] = []
        self._numbers: dict[int, int] = {}
        self._recipes: dict[int, tuple[int, ...] | None] = {}
        for node in graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                self._new(node, INPUT)
            elif node.op == "output":
                for source in node.all_input_nodes:
                    for number in self.of(source):
                        self.storages[number].kept = True
            elif not self.passes_on(node):
                self._add(node)
        phases = [node.meta["phase"] for node in self.operations]
        self.backward = next((i for i, phase in enumerate(phases) if phase != "forward"), len(phases))
        self.update = next((i for i, phase in enumerate(phases) if phase == "update"), len(phases))
        self.temporary = [0] * len(self.operations)
        position = {node: i for i, node in enumerate(self.operations)}
        for node, hidden in hidden_memory(self.operations):
            self.temporary[position[node]] = hidden.temporary
            for tensor, size in zip(tensors_in(node.meta["val"]), hidden.results):
                self.storages[self._numbers[storage_id(tensor)]].size = size

    def of(self, node: fx.Node) -> list[int]:
        """Return the storages of a node's results."""
        found = (self._numbers.get(storage_id(tensor)) for tensor in tensors_in(node.meta.get("val")))
        return list(dict.fromkeys(number for number in found if number is not None))

    def passes_on(self, node: fx.Node) -> bool:
        """Return whether a call makes and changes nothing: it is a view, or takes one of several results."""
        if node.op != "call_function":
            return False
        if node.target is operator.getitem:
            return True
        if node.target._schema.is_mutable:
            return False
        made = [storage_id(tensor) for tensor in tensors_in(node.meta.get("val"))]
        given = {storage_id(t) for source in node.all_input_nodes for t in tensors_in(source.meta.get("val"))}
        return bool(made) and given.issuperset(made)

    def _new(self, node: fx.Node, birth: int) -> list[int]:
        made = []
        for tensor in tensors_in(node.meta.get("val")):
            # A node may return views of storages that exist already.
            if self._numbers.setdefault(storage_id(tensor), len(self.storages)) == len(self.storages):
                made.append(len(self.storages))
                self.storages.append(Storage(tensor.untyped_storage().nbytes(), birth))
        return made

    def _add(self, node: fx.Node) -> None:
        at = len(self.operations)
        changed = written_by(node) | running_statistics(node)
        self.operations.append(node)
        self.makes.append(self._new(node, at))
        touched = {source: self.of(source) for source in node.all_input_nodes}
        self.reads.append(list(dict.fromkeys(number for numbers in touched.values() for number in numbers)))
        written = [number for source, numbers in touched.items() if source in changed for number in numbers]
        self.writes.append(list(dict.fromkeys(written)))
        for number in self.reads[at]:
            self.storages[number].reads.append(at)
        for number in self.makes[at] + self.writes[at]:
            self.storages[number].writes.append(at)

    # -- what the backward pass needs, and making it again

    @functools.cached_property
    def saved(self) -> dict[int, int]:
        """The storages that the forward pass makes for the backward pass, with the operation there that needs each first."""
        found = {}
        for number, storage in enumerate(self.storages):
            if storage.birth == INPUT or storage.birth >= self.backward or storage.kept:
                continue
            later = [at for at in storage.reads if at >= self.backward]
            if later:
                found[number] = later[0]
        return found

    def last_forward(self, number: int) -> int:
        """Return the last operation of the forward pass that touches a storage which that pass made."""
        storage = self.storages[number]
        reads = storage.reads[: bisect_left(storage.reads, self.backward)]
        return max([storage.writes[-1], *reads[-1:]])

    def recipe(self, number: int) -> tuple[int, ...] | None:
        """Return the operations that make a storage, in its state at the end of the forward pass, once more.

        Returns None if they must not be repeated: what they read has changed since, or they change something else. The
        update changes parameters, and comes after everything that is made again.
        """
        if number not in self._recipes:
            self._recipes[number] = self._find_recipe(number)
        return self._recipes[number]

    def is_transient(self, number: int) -> bool:
        """Return whether the backward pass never touches a storage that can be made again: a chain that reads it makes it."""
        return self.storages[number].death < self.backward and self.recipe(number) is not None

    def _find_recipe(self, number: int) -> tuple[int, ...] | None:
        storage = self.storages[number]
        if storage.birth == INPUT or storage.kept or storage.writes[-1] >= self.backward:
            return None
        for at in storage.writes:
            node = self.operations[at]
            # A repeated normalization leaves its running statistics out (repeated_arguments).
            statistics = {n for source in running_statistics(node) for n in self.of(source)}
            if not is_repeatable(node) or not set(self.writes[at]) <= {number} | statistics:
                return None
            for read in set(self.reads[at]) - statistics - {number}:
                if any(at <= write < self.update for write in self.storages[read].writes):
                    return None
        return tuple(storage.writes)
