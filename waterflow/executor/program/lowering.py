"""Lowering: turns a captured graph into the executor's program, with numbered slots, positional arguments and last uses."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from waterflow import _C
from waterflow.errors import CaptureError
from waterflow.executor.program.kernel_selection import Mask, aliases, bypassed, faster_product, masks, short_form
from waterflow.partition.capture.fake_rules import is_update
from waterflow.partition.capture.optimizers import FIRST_STEP_FLAG, GROUP_NUMBERS
from waterflow.partition.capture.spec import GraphInput
from waterflow.partition.capture.trace import Capture
from waterflow.partition.passes.operators import is_random, is_view, storage_id, taking_generator, tensors_in

aten = torch.ops.aten

# Operations whose result is wrong, or an error, if their argument has other strides than the captured ones.
_STRIDE_BOUND = frozenset({aten.view.default, aten._unsafe_view.default, aten.as_strided.default, aten.view_as_real.default})


@dataclass(frozen=True)
class Lowered:
    """A program with its inputs and constants, by slot. ``instructions[i]`` is the graph node of instruction ``i``."""

    program: _C.Program
    inputs: tuple[GraphInput, ...]
    constants: tuple[tuple[int, torch.Tensor], ...]
    instructions: tuple[fx.Node, ...]


def lower(capture: Capture, exact: bool = True) -> Lowered:
    """Build the program of a captured step. Raises CaptureError for nodes that are no dispatcher calls.

    Without ``exact`` results may differ by rounding from those of the captured operations.
    """
    return _Lowering(capture, exact).run()


class _Lowering:
    def __init__(self, capture: Capture, exact: bool) -> None:
        self.capture = capture
        self.exact = exact
        self.inputs = list(capture.inputs)
        self.slots: dict[fx.Node, int] = {}
        self.constants: list[tuple[int, torch.Tensor]] = []

    def run(self) -> Lowered:
        nodes = list(self.capture.graph.nodes)
        placeholders = [node for node in nodes if node.op == "placeholder"]
        for slot, node in enumerate(placeholders):
            self.slots[node] = slot
        calls = [n for n in nodes if n.op == "call_function" and n.target is not operator.getitem]
        self.masks = masks(calls)
        self.done = {node for mask in self.masks.values() for node in (mask.filled, mask.divided)}
        self.numbers = self._group_numbers(calls)
        for node in nodes:
            if node.op == "get_attr":
                self.slots[node] = len(self.inputs) + len(self.constants)
                self.constants.append((self.slots[node], self.capture.constants[node.target]))
        inputs = len(self.inputs) + len(self.constants)

        fixed = self._fixed_views(calls)
        for node in calls:
            if node in fixed:
                self.slots[node] = inputs + fixed[node]
        next_slot = inputs + len(fixed)
        output = next(node for node in nodes if node.op == "output")
        outputs = list(output.args[0])
        self.bases = aliases(calls, fixed)
        idle = bypassed(self.bases, outputs)
        body = [node for node in calls if node not in fixed and node not in idle]
        results: dict[fx.Node, list[int]] = {}
        for node in body:
            if node in self.done:  # made in place
                self.slots[node] = self.slots[node.args[0]]
            else:
                results[node], next_slot = self._number_results(node, next_slot)
        for node in nodes:  # chains of getitem on what is no tensor list do not occur below autograd
            if node.target is operator.getitem and node not in self.slots:
                raise CaptureError(f"the graph indexes into {node.args[0]}, which is no operation's result")

        drops = self._last_uses(body, inputs + len(fixed), outputs)

        program = _C.Program(inputs=inputs, fixed=inputs + len(fixed), slots=next_slot)
        for node in fixed:
            self._add(program, node, [self.slots[node]], set(), view=True)
        for node in body:
            if node in self.bases:
                self._add_alias(program, node, results[node], drops[node])
            elif node in self.done:
                program.add_nothing(drops=sorted(drops[node]))
            elif node in self.masks:
                self._add_mask(program, self.masks[node], results[node], drops[node])
            else:
                self._add(program, node, results[node], drops[node], view=False)
        program.set_outputs(
            [self.slots[value] if isinstance(value, fx.Node) else -1 for value in outputs], self._shared(nodes, outputs)
        )
        program.set_written(sorted(self._raised(body)))
        program.set_not_graphed(self._not_graphed(placeholders, body))
        return Lowered(program, tuple(self.inputs), tuple(self.constants), tuple(body))

    # -- inputs that are numbers

    def _group_numbers(self, calls: Sequence[fx.Node]) -> dict[tuple[fx.Node, str], int]:
        # Each number of an update (a weight decay, a flag) is read from a slot, so that it may change without a new capture.
        slots: dict[tuple[int, str], int] = {}
        found = {}
        for node in calls:
            if not is_update(node.target):
                continue
            group = self.capture.update_groups[node.name]
            for argument in node.target._schema.arguments:
                if argument.name in GROUP_NUMBERS and isinstance(argument.type, torch.FloatType):
                    given = GraphInput("number", key=argument.name, group=group)
                elif argument.name == FIRST_STEP_FLAG:
                    given = GraphInput("flag", key=argument.name, group=group)
                else:
                    continue
                where = (group, argument.name)
                if where not in slots:
                    slots[where] = len(self.inputs)
                    self.inputs.append(given)
                found[node, argument.name] = slots[where]
        return found

    # -- views that outlive the step

    def _fixed_views(self, calls: Sequence[fx.Node]) -> dict[fx.Node, int]:
        # Views of persistent tensors are computed once, when the program is bound, and not in every step.
        persistent = {
            node
            for node, given in zip(self.slots, self.capture.inputs)
            if given.kind in ("parameter", "buffer", "state", "accumulator", "external")
        }
        fixed: dict[fx.Node, int] = {}
        for node in calls:
            if not is_view(node.target) or isinstance(node.meta.get("val"), (list, tuple)):
                continue
            if all(source in persistent or source in fixed for source in node.all_input_nodes):
                fixed[node] = len(fixed)
        return fixed

    # -- slots

    def _number_results(self, node: fx.Node, next_slot: int) -> tuple[list[int], int]:
        returns = node.target._schema.returns
        is_list = len(returns) == 1 and str(returns[0].type) == "List[Tensor]"
        if not is_list and len(returns) == 1:
            if not node.users:
                return [-1], next_slot
            self.slots[node] = next_slot
            return [next_slot], next_slot + 1
        count = len(node.meta["val"]) if is_list else len(returns)
        results = [-1] * count
        for user in node.users:
            if user.target is not operator.getitem:
                raise CaptureError(f"{user} takes all results of {node} at once")
            position = user.args[1]
            if results[position] < 0:
                results[position] = next_slot
                next_slot += 1
            self.slots[user] = results[position]
        return results, next_slot

    def _last_uses(self, body: Sequence[fx.Node], first: int, outputs: Sequence[Any]) -> dict[fx.Node, set[int]]:
        kept = {self.slots[value] for value in outputs if isinstance(value, fx.Node)}
        drops: dict[fx.Node, set[int]] = {}
        for node in reversed(body):
            sources = [self.bases[node]] if node in self.bases else node.all_input_nodes
            used = {self.slots[source] for source in sources}
            drops[node] = {slot for slot in used if slot >= first and slot not in kept}
            kept |= used
        return drops

    def _shared(self, nodes: Sequence[fx.Node], outputs: Sequence[Any]) -> list[bool]:
        # Outputs that share their storage with an input or an earlier output: the next step would change them under the
        # caller, so they are copied.
        taken = {
            storage_id(node.meta["val"])
            for node in nodes
            if node.op in ("placeholder", "get_attr") and isinstance(node.meta.get("val"), torch.Tensor)
        }
        shared = []
        for value in outputs:
            storage = storage_id(value.meta["val"]) if isinstance(value, fx.Node) else None
            shared.append(storage in taken)
            if storage is not None:
                taken.add(storage)
        return shared

    def _raised(self, body: Sequence[fx.Node]) -> Iterator[int]:
        # The inputs whose version counters a step raises, once for each time. Operators that change whole lists do not raise
        # those of fake tensors.
        yield from (slot for slot, given in enumerate(self.inputs) for _ in range(given.raised))
        for node in body:
            for argument, value in zip(node.target._schema.arguments, node.args):
                if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, (list, tuple)):
                    written = map(_base_of, value)
                    yield from (self.slots[base] for base in written if base.op == "placeholder")

    def _not_graphed(self, placeholders: Sequence[fx.Node], body: Sequence[fx.Node]) -> str:
        # The reason why the step cannot run as device graphs, or "". A graph launches kernels alone: an operator whose host
        # code does more would do it at capture only, and tensors elsewhere than on the device are read by the host.
        for node in body:
            if node.target.namespace not in ("aten", "prims"):
                return f"it calls {node.target}, which is none of torch's own operators"
        if any(given.kind == "batch" and given.raised for given in self.inputs):
            return "it changes its batch"
        given = list(zip(placeholders, self.inputs))
        devices = {n.meta["val"].device for n, g in given if g.kind == "parameter"}
        brought = ("batch", "rate")  # what each step brings along
        lasting = [n for n, g in given if g.kind not in brought and n.users]
        for node in (*lasting, *body):
            if any(tensor.device not in devices for tensor in tensors_in(node.meta.get("val"))):
                return f"{node} is not on the device of the parameters"
        return ""

    # -- instructions

    def _add(self, program: _C.Program, node: fx.Node, results: list[int], drops: set[int], *, view: bool) -> None:
        target = node.target
        given = {a.name: a.default_value for a in target._schema.arguments}
        given |= {a.name: value for a, value in zip(target._schema.arguments, node.args)} | dict(node.kwargs)
        random = is_random(target) and given.get("dropout_p") != 0.0  # attention counts as random, and may drop nothing
        if random:
            target = taking_generator(target) or target
        schema = target._schema
        values = [given.get(argument.name, argument.default_value) for argument in schema.arguments]
        target = short_form(target if self.exact else faster_product(target, values), values)
        schema = target._schema
        arguments: list[tuple[Any, ...]] = []
        moved: set[int] = set()
        for argument, value in zip(schema.arguments, values):
            number = self.numbers.get((node, argument.name))
            if number is not None:
                arguments.append(("slot", number, False))
            elif argument.name == "generator" and value is None and random:
                arguments.append(("generator",))
            elif isinstance(value, fx.Node):
                slot = self.slots[value]
                # At its last use a value moves into the call, which may free it early; not if it occurs there twice.
                once = sum(v is value for v in node.all_input_nodes) == 1 and _mentions(values, value) == 1
                last = slot in drops and once
                if last:
                    moved.add(slot)
                arguments.append(("slot", slot, last))
            elif isinstance(value, (list, tuple)) and any(isinstance(v, fx.Node) for v in value):
                kind = "optional" if "Optional[Tensor]" in str(argument.type) else "list"
                arguments.append((kind, [-1 if v is None else self.slots[v] for v in value]))
            elif str(argument.type) == "List[Optional[Tensor]]":
                arguments.append(("optional", [-1 for _ in value]))
            else:
                arguments.append(("constant", value))
        program.add(
            name=schema.name,
            overload=schema.overload_name,
            arguments=arguments,
            results=results,
            drops=sorted(drops - moved),
            expected=self._expected(node, values),
            result_is_list=len(schema.returns) == 1 and str(schema.returns[0].type) == "List[Tensor]",
            random=random,
            view=view,
        )

    def _add_mask(self, program: _C.Program, mask: Mask, results: list[int], drops: set[int]) -> None:
        # One operator for all three nodes of a mask, in the place of the first.
        like = self.slots[mask.empty.args[0]]
        schema = torch.ops.waterflow.dropout_mask.default._schema
        program.add(
            name=schema.name,
            overload=schema.overload_name,
            arguments=[("slot", like, like in drops), ("constant", mask.kept), ("generator",)],
            results=results,
            drops=sorted(drops - {like}),
            expected=[],
            result_is_list=False,
            random=True,
            view=False,
        )

    def _add_alias(self, program: _C.Program, node: fx.Node, results: list[int], drops: set[int]) -> None:
        made, base = node.meta["val"], self.bases[node].meta["val"]
        program.add_alias(
            source=self.slots[self.bases[node]],
            result=results[0],
            sizes=list(made.shape),
            strides=list(made.stride()),
            offset=made.storage_offset() - base.storage_offset(),
            expected=list(base.stride()),
            drops=sorted(drops),
        )

    def _expected(self, node: fx.Node, values: Sequence[Any]) -> list[tuple[int, int, list[int]]]:
        if node.target in _STRIDE_BOUND and isinstance(values[0], fx.Node):
            return [(0, -1, list(values[0].meta["val"].stride()))]
        if is_update(node.target):
            # The fused kernels walk parameters, gradients and state as raw memory, side by side.
            return [
                (1, i, list(parameter.meta["val"].stride()))
                for i, parameter in enumerate(values[0])
                if parameter.meta["val"].dim()
            ]
        return []


def _base_of(node: Any) -> fx.Node:
    while node.op == "call_function" and is_view(node.target):
        node = node.args[0]
    return node  # type: ignore[no-any-return]


def _mentions(values: Sequence[Any], node: fx.Node) -> int:
    count = 0
    for value in values:
        if value is node:
            count += 1
        elif isinstance(value, (list, tuple)):
            count += sum(v is node for v in value)
    return count
