"""Liveness on storages: what a step holds after each of its operations, before any has run.

Views share one storage, so storages are followed, not tensors. A storage is born by the operation that returns it
first and dies behind the last operation that uses any of its views. Inputs outlive the step and are not counted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from waterflow.partition.operators import is_view, written_by
from waterflow.partition.probe import hidden_memory


@dataclass(frozen=True)
class OperationMemory:
    """Bytes of one operation: at its highest, and once it is done. Both count the whole step so far."""

    peak: int
    after: int
    traffic: int


@dataclass(frozen=True)
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


def tensors_of(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in what an operation takes or returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_of(item)


def storage_id(tensor: torch.Tensor) -> int:
    """Identity of the memory behind a (fake) tensor."""
    return tensor.untyped_storage()._cdata


def lifetimes(graph: fx.Graph, instructions: Sequence[fx.Node]) -> list[Lifetime]:
    """The storages that a step makes, and the temporaries of operators that are probed, each with its life.

    Other kernels' own temporaries are not known before the step has been profiled.
    """
    position = {node: i for i, node in enumerate(instructions)}
    inputs = {
        storage_id(t)
        for node in graph.nodes
        if node.op in ("placeholder", "get_attr")
        for t in tensors_of(node.meta.get("val"))
    }
    hidden = dict(hidden_memory(instructions))
    birth: dict[int, int] = {}
    death: dict[int, int] = {}
    size: dict[int, int] = {}
    reads: dict[int, list[int]] = {}
    writes: dict[int, list[int]] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        at = position.get(node)
        for tensor in tensors_of(node.meta.get("val")):
            storage = storage_id(tensor)
            if storage in inputs:
                continue
            if at is not None and storage not in birth:
                birth[storage] = death[storage] = at
                size[storage] = tensor.untyped_storage().nbytes()
                reads[storage], writes[storage] = [], [at]
        if at is not None and node in hidden:
            for tensor, actual in zip(tensors_of(node.meta["val"]), hidden[node].results):
                size[storage_id(tensor)] = actual
        used_at = position.get(node)
        if used_at is None:
            continue
        passes_on, written = is_view(node.target), written_by(node)
        for source in node.all_input_nodes:
            for tensor in tensors_of(source.meta.get("val")):
                storage = storage_id(tensor)
                if storage not in death:
                    continue
                death[storage] = max(death[storage], used_at)
                touched = writes[storage] if source in written else reads[storage]
                if not passes_on and used_at not in touched[-1:]:
                    touched.append(used_at)
    output = next(node for node in graph.nodes if node.op == "output")
    kept = {storage_id(t) for source in output.all_input_nodes for t in tensors_of(source.meta.get("val"))}
    for storage in kept & death.keys():
        death[storage] = len(instructions) - 1
    lives = [Lifetime(birth[s], death[s], size[s], s in kept, tuple(reads[s]), tuple(writes[s])) for s in birth]
    for node, beside in hidden.items():
        if beside.temporary:
            at = position[node]
            lives.append(Lifetime(at, at, beside.temporary, writes=(at,)))
    return lives


def operation_memory(graph: fx.Graph, instructions: Sequence[fx.Node]) -> list[OperationMemory]:
    """Predicted memory of each instruction, from the graph alone."""
    born: list[int] = [0] * len(instructions)
    died: list[int] = [0] * len(instructions)
    for life in lifetimes(graph, instructions):
        born[life.birth] += life.size
        died[life.death] += life.size
    held = 0
    memory = []
    for i, node in enumerate(instructions):
        peak = held + born[i]
        held = peak - died[i]
        memory.append(OperationMemory(peak, held, traffic(node)))
    return memory


def traffic(node: fx.Node) -> int:
    """Bytes that an operation reads and writes, each tensor once; none for a view."""
    if is_view(node.target):
        return 0
    total = sum(t.numel() * t.element_size() for t in tensors_of(node.meta.get("val")))
    for source in node.all_input_nodes:
        total += sum(t.numel() * t.element_size() for t in tensors_of(source.meta.get("val")))
    return total
