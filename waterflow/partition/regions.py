"""Regions of a captured step: operations that one piece of native code can stand for, and the graph that calls it.

Left outside are random operations, the update, whatever changes what the step does not make itself, and operations with
numbers that may differ from step to step. These keep their order among each other, so that equal generators draw equal
numbers; they move to where they cut the step least. Random numbers need no more than a shape, and are drawn before a region
that uses them.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from waterflow.partition.capture import Capture
from waterflow.partition.operators import (
    is_random,
    is_repeatable,
    lazy_bits,
    running_statistics,
    storage_id,
    tensors_in,
    written_by,
)

aten = torch.ops.aten

LEAST_OPERATIONS = 8  # a region of fewer is not worth a call
# Inductor adds these up with atomic operations where several threads are allowed: other bits each time.
_ATOMIC = frozenset({aten.embedding_dense_backward.default})
_EMPTY = frozenset({aten.empty_like.default, aten.new_empty.default})
# Views whose schemas hide it: Inductor would lose what is changed in place through them.
_OPEN_VIEWS = {
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}


@dataclass(frozen=True)
class Region:
    """Operations between which nothing else happens, as a module of their own.

    ``inputs`` and ``outputs`` are nodes of the step's graph. Outputs lie in memory that is made inside, each in its own.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    module: fx.GraphModule


@dataclass(frozen=True)
class Loaded:
    """A region's native code: the number that ``waterflow::compiled`` takes, and bytes held beside outputs at most.

    ``same`` has outputs, by position, that come in the memory of what has equal numbers: of one of inputs and outputs, counted
    through in this order.
    """

    number: int
    temporary: int
    same: Mapping[int, int]


@dataclass(frozen=True)
class Compiled:
    """What became of compiling a step.

    ``operations`` of ``of`` were put into ``regions``, of ``found`` that could be; ``speedup`` is what these were measured to
    gain when they were compiled, over the same operations as captured. ``reason`` says why regions are not used.
    """

    operations: int
    of: int
    regions: int
    found: int
    speedup: float = 1.0
    seconds: float = 0.0
    reason: str | None = None

    def __str__(self) -> str:
        told = f"{self.operations} of {self.of} operations in {self.regions} of {self.found} regions"
        if self.regions:
            told += f", {self.speedup:.2f} times as fast as captured"
        return told if self.reason is None else f"{told}; {self.reason}"


class Regions:
    """The regions of a captured step, which stays as it is. Forward and backward pass have their own."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self._nodes = list(capture.graph.nodes)
        self._storages = {n: [storage_id(t) for t in tensors_in(n.meta.get("val"))] for n in self._nodes}
        self._birth: dict[int, fx.Node] = {}
        self._looking: set[fx.Node] = set()  # views, and single results of operations with several
        for node in self._nodes:
            if node.op != "output" and self._looks(node):
                self._looking.add(node)
            for storage in self._storages[node]:
                born = self._birth.setdefault(storage, node)
                if node.target is operator.getitem and born is node.args[0]:
                    self._birth[storage] = node
        self._calls = [n for n in self._nodes if n.op == "call_function" and n not in self._looking]
        numbers = {name for name, _ in capture.dropout_rates}
        self._plain = {n for n in self._calls if not self._can_be_compiled(n) or n.name in numbers}
        self._stages = self._settle()
        self.found = self._find()

    # -- what may be compiled

    def _looks(self, node: fx.Node) -> bool:
        if node.target is operator.getitem:
            return True
        if node.op != "call_function" or node.target._schema.is_mutable:  # type: ignore[union-attr]
            return False
        given = {storage for source in node.all_input_nodes for storage in self._storages[source]}
        made = self._storages[node]
        return bool(made) and given.issuperset(made)

    def _can_be_compiled(self, node: fx.Node) -> bool:
        if not is_repeatable(node) or running_statistics(node) or node.target in _ATOMIC | _EMPTY:
            return False
        if node.meta["phase"] == "update":
            return False
        made = list(tensors_in(node.meta.get("val")))
        if not made or any(t.is_complex() or t.layout != torch.strided or t.device.type != "cpu" for t in made):
            return False
        if any(any(lazy_bits(t)) for n in (node, *node.all_input_nodes) for t in tensors_in(n.meta.get("val"))):
            return False  # Inductor reads memory as it stands there
        written = written_by(node)
        if written:
            return written == {node.args[0]} and len(made) == 1 and len(node.target._schema.returns) == 1  # type: ignore[union-attr]
        given = {storage for source in node.all_input_nodes for storage in self._storages[source]}
        return given.isdisjoint(self._storages[node])

    # -- stages: in turn, operations that are called as they are, and those of one region

    def _settle(self) -> dict[fx.Node, int]:
        """Only what a region makes may be changed in it: other changes happen outside."""
        while True:
            stages = self._stage()
            outside = {
                node
                for node in self._calls
                if node not in self._plain
                for source in written_by(node)
                for storage in self._storages[source]
                if stages.get(self._maker(storage)) != stages[node]
            }
            if not outside:
                return stages
            self._plain |= outside

    def _maker(self, storage: int) -> fx.Node:
        node = self._birth[storage]
        return node.args[0] if node.target is operator.getitem else node  # type: ignore[return-value]

    def _stage(self) -> dict[fx.Node, int]:
        """The earliest stage of each operation: odd ones are compiled, even ones are not."""
        stages: dict[fx.Node, int] = {}
        writer: dict[int, fx.Node] = {}
        readers: dict[int, list[fx.Node]] = defaultdict(list)
        last_random: fx.Node | None = None
        backward = 0
        for node in self._calls:
            plain = node in self._plain
            behind: set[fx.Node] = set()
            changed = {s for source in written_by(node) | running_statistics(node) for s in self._storages[source]}
            read = set() if node.target in _EMPTY else {s for n in node.all_input_nodes for s in self._storages[n]}
            for storage in read | changed:
                if storage in writer:
                    behind.add(writer[storage])
            for storage in changed:
                behind.update(readers.pop(storage, ()))
            if is_random(node.target):
                behind |= {last_random} if last_random is not None else set()
                last_random = node
            stage = max((stages[d] + ((d in self._plain) != plain) for d in behind), default=0 if plain else 1)
            if not plain and node.meta["phase"] != "forward":
                if not backward:
                    forward = (s for n, s in stages.items() if n.meta["phase"] == "forward")
                    backward = (max(forward, default=-1) + 1) | 1
                stage = max(stage, backward)
            stages[node] = stage
            for storage in changed | set(self._storages[node]):
                writer[storage] = node
            for storage in read - changed:
                readers[storage].append(node)
        return stages

    # -- regions

    def _find(self) -> dict[int, Region]:
        members: dict[int, list[fx.Node]] = defaultdict(list)
        for node in self._calls:
            if node not in self._plain:
                members[self._stages[node]].append(node)
        users: dict[int, set[int]] = defaultdict(set)  # stages in which a storage is used, and -1 for the end
        for node in self._nodes:
            if node in self._stages or node.op == "output":
                for source in node.all_input_nodes:
                    for storage in self._storages[source]:
                        users[storage].add(self._stages.get(node, -1))
        found = {stage: self._region(stage, nodes, users) for stage, nodes in sorted(members.items())}
        return {stage: r for stage, r in found.items() if len(r.nodes) >= LEAST_OPERATIONS and r.outputs}

    def _region(self, stage: int, nodes: Sequence[fx.Node], users: Mapping[int, set[int]]) -> Region:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        inputs: list[fx.Node] = []

        def source(of: fx.Node) -> fx.Node:
            if of not in copies:
                if of in self._looking and (self._is_view(of) or of.args[0] in copies):
                    copies[of] = graph.node_copy(of, source)
                    copies[of].target = _OPEN_VIEWS.get(of.target, of.target)  # type: ignore[call-overload]
                else:
                    inputs.append(of)
                    with graph.inserting_before(next(iter(graph.nodes), graph._root)):
                        copies[of] = graph.placeholder(f"given_{len(inputs)}")
            return copies[of]

        for node in nodes:
            copies[node] = graph.node_copy(node, source)
        inputs.reverse()  # each placeholder was put before the others
        members = set(nodes)
        made = ((storage, birth) for storage, birth in self._birth.items() if self._maker(storage) in members)
        outputs = [birth for storage, birth in made if users[storage] - {stage}]
        graph.output(tuple(source(birth) for birth in outputs))
        graph.eliminate_dead_code()
        graph.lint()
        return Region(tuple(nodes), tuple(inputs), tuple(outputs), fx.GraphModule(nn.Module(), graph))

    def _is_view(self, node: fx.Node) -> bool:
        return node.target is not operator.getitem or node.args[0] in self._looking

    # -- the graph that calls them

    def replaced(self, loaded: Mapping[int, Loaded]) -> Capture:
        """The step with calls of native code in the place of the regions that are ``loaded``, by stage."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        inside = {node: stage for stage in loaded for node in self.found[stage].nodes}

        def source(of: fx.Node) -> fx.Node:
            if of not in copies:
                if of in inside:  # it changed its argument, which it returns
                    return source(of.args[0])  # type: ignore[arg-type]
                copies[of] = graph.node_copy(of, source)  # looks at something, where it is used first
            return copies[of]

        for node in self._nodes:
            if node.op in ("placeholder", "get_attr"):
                copies[node] = graph.node_copy(node, source)
        in_order = sorted(self._calls, key=lambda n: self._stages[n])
        called: set[int] = set()
        for node in in_order:
            stage = inside.get(node)
            if stage is None:
                copies[node] = self._copy(graph, node, source)
            elif stage not in called:
                called.add(stage)
                copies |= self._call(graph, self.found[stage], loaded[stage], source)
        output = next(node for node in self._nodes if node.op == "output")
        graph.node_copy(output, source)
        for node in reversed(list(graph.nodes)):
            if node.op == "call_function" and node.target is operator.getitem and not node.users:
                graph.erase_node(node)
        graph.lint()
        names = {node.name: copy.name for node, copy in copies.items()}
        groups = {names[name]: group for name, group in self._capture.update_groups.items() if name in names}
        rates = {(names[n], a): rate for (n, a), rate in self._capture.dropout_rates.items() if n in names}
        return replace(self._capture, graph=graph, update_groups=groups, dropout_rates=rates)

    def _copy(self, graph: fx.Graph, node: fx.Node, source: Any) -> fx.Node:
        if node.target not in _EMPTY:
            return graph.node_copy(node, source)
        value = node.meta["val"]  # what it was to be like may not be there yet
        made = graph.call_function(
            aten.empty_strided.default, (list(value.shape), list(value.stride())),
            {"dtype": value.dtype, "device": value.device},
        )  # fmt: skip
        made.meta = dict(node.meta)
        return made

    def _call(self, graph: fx.Graph, region: Region, native: Loaded, source: Any) -> dict[fx.Node, fx.Node]:
        call = graph.call_function(
            torch.ops.waterflow.compiled.default, (native.number, [source(given) for given in region.inputs])
        )
        everything, given = (*region.inputs, *region.outputs), len(region.inputs)
        values = [everything[native.same.get(n, given + n)].meta["val"] for n in range(len(region.outputs))]
        phase = region.nodes[0].meta["phase"]
        call.meta = {"val": values, "phase": phase, "module": f"{len(region.nodes)} compiled operations",
                     "temporary": native.temporary}  # fmt: skip
        made: dict[fx.Node, fx.Node] = {}
        for position, node in enumerate(region.outputs):
            if position in native.same:
                twin = everything[native.same[position]]
                made[node] = graph.call_function(aten.clone.default, (made[twin] if twin in made else source(twin),))
            else:
                made[node] = graph.call_function(operator.getitem, (call, position))
            made[node].meta = dict(node.meta)
        return made
