"""A captured step with operations repeated in its backward pass, in the place of what they made being held till then."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from waterflow.partition.capture import Capture
from waterflow.partition.operators import has_effect, repeated_arguments, storage_id, tensors_in, with_lazy_bits
from waterflow.partition.recompute import Recomputation
from waterflow.partition.storages import StorageTable


def repeat(capture: Capture, table: StorageTable, chosen: Recomputation) -> Capture:
    """The step with what was ``chosen`` made again where it is needed. Leaves ``capture`` as it is.

    Repeated operations belong to the backward phase and have what they repeat in ``meta["repeats"]``. They read what the
    first ones read, and whoever comes later reads what they make, through the same views.
    """
    return _Repeating(capture, table, chosen).run()


class _Repeating:
    """Copies the graph with repeated operations in it: in the backward pass they stand for storages that are gone before."""

    def __init__(self, capture: Capture, table: StorageTable, chosen: Recomputation) -> None:
        self.capture = capture
        self.table = table
        self.chosen = chosen
        self.graph = fx.Graph()
        self.copies: dict[fx.Node, fx.Node] = {}
        self.again: dict[fx.Node, fx.Node] = {}  # what stands for nodes of such storages once they are there again
        self.passing: dict[fx.Node, fx.Node] = {}  # and for those that only the chain under way makes
        self.flat: dict[int, torch.Tensor] = {}  # the memory of what is made again, as bytes
        self.rates: dict[tuple[str, str], tuple[str, str]] = {}
        self.mode = FakeTensorMode()

    def run(self) -> Capture:
        """The rewritten step."""
        at = 0
        for node in self.capture.graph.nodes:
            if node.op == "call_function" and not self.table.passes_on(node):
                self._before(at)
                at += 1
            elif self._comes_later(node):
                continue
            self.copies[node] = self.graph.node_copy(node, self._source)
        for node in reversed(list(self.graph.nodes)):
            if node.op == "call_function" and not node.users and not has_effect(node):
                self.graph.erase_node(node)
        self.graph.lint()
        names = {node.name: copy.name for node, copy in self.copies.items()}
        rates = {(names.get(name, name), argument): of for (name, argument), of in self.capture.dropout_rates.items()}
        groups = {names.get(name, name): group for name, group in self.capture.update_groups.items()}
        return replace(self.capture, graph=self.graph, update_groups=groups, dropout_rates=rates | self.rates)

    def _before(self, at: int) -> None:
        """The operations that are repeated there."""
        for number in self.chosen.chains.get(at, ()):
            node = self.table.operations[number]
            made = self._again(node, repeated_arguments(node))
            self._remember(node, made, at)
            for user in node.users:
                if user.target is operator.getitem and self._is_wanted(user, at):
                    self._remember(user, self._again(user, user.args, {node: made}), at)
            for (name, argument), rate in self.capture.dropout_rates.items():
                if name == node.name:
                    self.rates[made.name, argument] = rate
        self.passing.clear()

    def _is_wanted(self, node: fx.Node, at: int) -> bool:
        """Whether the chain before operation ``at`` runs for what this node returns, or uses it on the way."""
        numbers = self.table.of(node)
        return all(self.chosen.dropped.get(n) == at or self.table.is_transient(n) for n in numbers)

    def _remember(self, node: fx.Node, made: fx.Node, at: int) -> None:
        if self._is_wanted(node, at):
            self._home(node)[node] = made

    def _comes_later(self, node: fx.Node) -> bool:
        """Whether the backward pass looks here at something that is gone: it then looks where it uses it."""
        if node.op != "call_function" or node.meta["phase"] == "forward":
            return False
        return any(number in self.chosen.dropped for number in self.table.of(node))

    def _home(self, node: fx.Node) -> dict[fx.Node, fx.Node]:
        return self.again if any(number in self.chosen.dropped for number in self.table.of(node)) else self.passing

    def _source(self, node: fx.Node) -> fx.Node:
        """What stands for a node of the captured graph now. Views of what was made again are made when they are used."""
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
        """The same call once more, on what stands for its arguments now."""
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
        """A fake result in memory of its own, or in that of the argument that the first one shared its memory with."""
        if isinstance(value, (list, tuple)):
            return type(value)(self._value(item, tensors) for item in value)
        if not isinstance(value, torch.Tensor):
            return value
        number = storage_id(value)
        if number not in tensors:
            tensors[number] = self._memory(value.untyped_storage().nbytes(), value.device)
        return self._placed(value, self.flat[storage_id(tensors[number])])

    def _memory(self, size: int, device: torch.device) -> torch.Tensor:
        """Fake memory, as bytes."""
        with self.mode:
            flat = torch.empty(size, dtype=torch.uint8, device=device)
        self.flat[storage_id(flat)] = flat
        return flat

    def _placed(self, value: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
        """A fake tensor in the form of ``value``, in other memory."""
        with self.mode:
            made = flat.view(value.dtype).as_strided(value.shape, value.stride(), value.storage_offset())
            return with_lazy_bits(made, value)
