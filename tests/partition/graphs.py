"""Captured steps of the zoo, and running a graph node by node on real tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from benchmarks.zoo import SMALL
from waterflow.executor.program import eager
from waterflow.partition.capture.trace import Capture, StepSpec, capture_step


def spec_of(name: str, **options: Any) -> tuple[StepSpec, list[Any], Any]:
    """What is needed to capture a small model of the zoo, batch size 2."""
    zoo = SMALL[name]
    torch.manual_seed(0)
    model = zoo.build()
    holder, compute = eager.compose(model, None, zoo.step)
    given = {"update": True, "accumulate": 1, "clip_norm": None, "clip_value": None, "autocast": None} | options
    spec = StepSpec(
        model=holder, compute_loss=compute, optimizer=zoo.optimizer(model.parameters()), device=torch.device("cpu"),
        **given,
    )  # fmt: skip
    batch = zoo.batch(2, torch.Generator().manual_seed(1))
    leaves, structure = pytree.tree_flatten(batch)
    return spec, leaves, structure


def capture_of(name: str, **options: Any) -> Capture:
    return capture_step(*spec_of(name, **options))


def instructions_of(graph: fx.Graph) -> list[fx.Node]:
    """The operations of a graph, in order."""
    return [node for node in graph.nodes if node.op == "call_function" and node.target is not operator.getitem]


def interpret(
    graph: fx.Graph, inputs: list[Any], constants: dict[str, Any], after: Callable[[fx.Node, Any], None] | None = None
) -> Any:
    """Runs a graph in the plainest way, and lets each value go behind its last user."""
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            last[source] = node
    result = None
    for node in graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
        elif node.op == "get_attr":
            values[node] = constants[node.target]
        elif node.op == "call_function":
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: values[n])
            values[node] = node.target(*args, **kwargs)
        else:
            result = fx.node.map_arg(node.args[0], lambda n: values[n])
        if after is not None:
            after(node, values)
        for source in {node, *node.all_input_nodes}:
            if last.get(source, source) is node or (source is node and node not in last):
                values.pop(source, None)
    return result


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    yield from (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))
