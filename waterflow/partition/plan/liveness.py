"""Liveness on storages: what a step holds after each of its operations, before any has run.

Views share one storage, so storages are followed, not tensors. A storage is born by the operation that returns it
first and dies behind the last operation that uses any of its views. Inputs outlive the step and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torch import fx

from waterflow.partition.passes.operators import is_view, lies_in_host, storage_id, tensors_in, written_by
from waterflow.partition.plan.costs import bytes_moved
from waterflow.partition.plan.probe import hidden_memory


@dataclass(frozen=True, slots=True)
class OperationMemory:
    """Bytes of one operation: at its highest, and once it is done, both counting the whole step so far.

    ``traffic`` counts the bytes that it moves.
    """

    peak: int
    after: int
    traffic: int


@dataclass(frozen=True, slots=True)
class Lifetime:
    """Memory that a step makes: the operations that it is born with and dies behind, and its size in bytes.

    What a caller keeps (``kept``: outputs of the step) outlives it. ``reads`` and ``writes`` are the operations that
    touch it, in order; views only pass it on.
    """

    birth: int
    death: int
    size: int
    kept: bool = False
    reads: tuple[int, ...] = field(default=(), compare=False)
    writes: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Followed:
    """What a step makes: the life of each storage, by its identity; temporaries; and the storages behind each node."""

    storages: dict[int, Lifetime]
    temporaries: list[Lifetime]
    of: dict[fx.Node, list[int]]

    def lives(self) -> list[Lifetime]:
        """All of it."""
        return [*self.storages.values(), *self.temporaries]


def lifetimes(graph: fx.Graph, instructions: Sequence[fx.Node]) -> list[Lifetime]:
    """The storages that a step makes, and the temporaries of operators that are probed, each with its life.

    Other kernels' own temporaries are not known before the step has been profiled.
    """
    return follow(graph, instructions).lives()


def follow(graph: fx.Graph, instructions: Sequence[fx.Node]) -> Followed:
    """The same, storages apart from temporaries."""
    position = {node: i for i, node in enumerate(instructions)}
    inputs = {
        storage_id(t)
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr")
        for t in tensors_in(node.meta.get("val"))
    }
    told = dict(hidden_memory(instructions))
    birth: dict[int, int] = {}
    death: dict[int, int] = {}
    size: dict[int, int] = {}
    reads: dict[int, list[int]] = {}
    writes: dict[int, list[int]] = {}
    of: dict[fx.Node, list[int]] = {}
    for node in graph.nodes:
        tensors = list(tensors_in(node.meta.get("val")))
        of[node] = list(map(storage_id, tensors))
        if node.op != "call_function":
            continue
        at = position.get(node)
        for tensor, storage in zip(tensors, of[node]):
            if storage in inputs:
                continue
            if at is not None and storage not in birth:
                birth[storage] = death[storage] = at
                size[storage] = 0 if lies_in_host(node) else tensor.untyped_storage().nbytes()
                reads[storage], writes[storage] = [], [at]
        if at is not None and (found := told.get(node)) is not None:
            for tensor, actual in zip(tensors, found.results):
                size[storage_id(tensor)] = actual
        used_at = position.get(node)
        if used_at is None:
            continue
        passes_on, written = is_view(node.target), written_by(node)
        for source in node.all_input_nodes:
            for storage in of[source]:
                if storage not in death:
                    continue
                death[storage] = max(death[storage], used_at)
                touched = writes[storage] if source in written else reads[storage]
                if not passes_on and used_at not in touched[-1:]:
                    touched.append(used_at)
    output = next(node for node in graph.nodes if node.op == "output")
    kept = {storage for source in output.all_input_nodes for storage in of[source]}
    for storage in kept & death.keys():
        death[storage] = len(instructions) - 1
    made = {s: Lifetime(birth[s], death[s], size[s], s in kept, tuple(reads[s]), tuple(writes[s])) for s in birth}
    beside = ((position[node], found.temporary) for node, found in told.items() if found.temporary)
    return Followed(made, [Lifetime(at, at, more, writes=(at,)) for at, more in beside], of)


def operation_memory(graph: fx.Graph, instructions: Sequence[fx.Node]) -> list[OperationMemory]:
    """Predicted memory of each instruction, from the graph alone."""
    return held_by(lifetimes(graph, instructions), [bytes_moved(node) for node in instructions])


def held_by(lives: Iterable[Lifetime], traffic: Sequence[int]) -> list[OperationMemory]:
    """Memory of each operation of a step that makes these; ``traffic`` is what each operation moves."""
    born: list[int] = [0] * len(traffic)
    died: list[int] = [0] * len(traffic)
    for life in lives:
        born[life.birth] += life.size
        died[life.death] += life.size
    held = 0
    memory = []
    for new, gone, moved in zip(born, died, traffic):
        peak = held + new
        held = peak - gone
        memory.append(OperationMemory(peak, held, moved))
    return memory
