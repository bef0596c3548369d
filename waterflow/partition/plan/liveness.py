"""Liveness on storages: the memory of a step after each of its operations, before any has run.

Views share one storage, so storages are followed, not tensors. A storage is born by the operation that returns it first
and dies after the last operation that uses any of its views. Inputs outlive the step and are not counted.
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
    """Bytes of the step's memory at an operation's highest point (``peak``) and after it; ``traffic``: bytes moved."""

    peak: int
    after: int
    traffic: int


@dataclass(frozen=True, slots=True)
class Lifetime:
    """A piece of memory that a step makes: the operation of its birth, its last operation, and its size in bytes.

    A ``kept`` piece is an output, which outlives the step. ``reads`` and ``writes`` are the operations that touch it,
    in order; views only pass it on.
    """

    birth: int
    death: int
    size: int
    kept: bool = False
    reads: tuple[int, ...] = field(default=(), compare=False)
    writes: tuple[int, ...] = field(default=(), compare=False)


@dataclass(frozen=True)
class Followed:
    """The lifetimes of a step's storages, keyed by ``storage_id``; those of temporaries; and the storages of each node's results."""

    storages: dict[int, Lifetime]
    temporaries: list[Lifetime]
    of: dict[fx.Node, list[int]]

    def lives(self) -> list[Lifetime]:
        """Return the lifetimes of storages and temporaries."""
        return [*self.storages.values(), *self.temporaries]


def lifetimes(graph: fx.Graph, instructions: Sequence[fx.Node]) -> list[Lifetime]:
    """Return the lifetimes of the storages that a step makes, and of the temporaries of operators that are probed.

    Other kernels' own temporaries are not known before the step has been profiled.
    """
    return follow(graph, instructions).lives()


def follow(graph: fx.Graph, instructions: Sequence[fx.Node]) -> Followed:
    """Follow storages through ``instructions``, the operations in order; returns storages and temporaries apart."""
    position = {node: i for i, node in enumerate(instructions)}
    inputs = {
        storage_id(t) for node in graph.nodes if node.op in ("placeholder", "get_attr") for t in tensors_in(node.meta.get("val"))
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
                # Host memory is not part of the device's height.
                size[storage] = 0 if lies_in_host(node) else tensor.untyped_storage().nbytes()
                reads[storage], writes[storage] = [], [at]
        if at is not None and (found := told.get(node)) is not None:
            # Shape rules call some workspaces empty; a probe has asked for the real size.
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
                # A view extends the life of a storage, but touches none of its bytes.
                if not passes_on and used_at not in touched[-1:]:
                    touched.append(used_at)
    output = next(node for node in graph.nodes if node.op == "output")
    kept = {storage for source in output.all_input_nodes for storage in of[source]}
    # An output lives to the step's end, though no operation uses it.
    for storage in kept & death.keys():
        death[storage] = len(instructions) - 1
    made = {s: Lifetime(birth[s], death[s], size[s], s in kept, tuple(reads[s]), tuple(writes[s])) for s in birth}
    beside = ((position[node], found.temporary) for node, found in told.items() if found.temporary)
    return Followed(made, [Lifetime(at, at, more, writes=(at,)) for at, more in beside], of)


def operation_memory(graph: fx.Graph, instructions: Sequence[fx.Node]) -> list[OperationMemory]:
    """Return the predicted memory of each instruction, from the graph alone."""
    return held_by(lifetimes(graph, instructions), [bytes_moved(node) for node in instructions])


def held_by(lives: Iterable[Lifetime], traffic: Sequence[int]) -> list[OperationMemory]:
    """Return the memory of each operation of a step with these lifetimes. ``traffic`` has the bytes that each operation moves."""
    born: list[int] = [0] * len(traffic)
    died: list[int] = [0] * len(traffic)
    for life in lives:
        born[life.birth] += life.size
        died[life.death] += life.size
    held = 0
    memory = []
    for new, gone, moved in zip(born, died, traffic):
        # A kernel allocates its results before it releases what dies with it.
        peak = held + new
        held = peak - gone
        memory.append(OperationMemory(peak, held, moved))
    return memory
