"""Clean-up of a captured graph: nothing here changes a bit of any result."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from waterflow.errors import CaptureError
from waterflow.partition.capture.rng_ops import drop_idle
from waterflow.partition.guards.guarded_places import exact
from waterflow.partition.passes.operators import has_effect, is_view, schema_name, storage_id, written_by
from waterflow.partition.plan.probe import keeps_more

aten = torch.ops.aten

_PROFILER_MARKS = ("profiler::",)
# What changes the form of its argument, and what gives a view of that form.
IN_PLACE_VIEWS = {
    aten.as_strided_.default: aten.as_strided.default,
    aten.squeeze_.default: aten.squeeze.default,
    aten.squeeze_.dim: aten.squeeze.dim,
    aten.squeeze_.dims: aten.squeeze.dims,
    aten.t_.default: aten.t.default,
    aten.transpose_.default: aten.transpose.int,
    aten.unsqueeze_.default: aten.unsqueeze.default,
}


def clean_up(graph: fx.Graph) -> None:
    """Drop detaches, profiler marks, idle random states, dead nodes; make in-place views views, merge equal ones; copy lean results."""
    _views_out_of_place(graph)
    _drop_detaches(graph)
    _merge_views(graph)
    drop_idle(graph)
    _drop_dead(graph)
    _copy_results(graph)
    graph.lint()


def _views_out_of_place(graph: fx.Graph) -> None:
    # Nodes behind one refer to it already, and its argument keeps its form for views that merge with it.
    viewed: set[Any] = set()
    alone: set[Any] = {*graph.find_nodes(op="call_function", target=aten.detach.default)}  # views that autograd does not see
    turned: set[int] = set()  # storages of tensors that had other views then
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target in IN_PLACE_VIEWS:
            source = node.args[0]
            if source.op == "placeholder":
                raise CaptureError("a step changes the shape of a tensor that it was given; let it make a view, as x.t() does")
            if source in viewed or (is_view(source.target) and source not in alone):
                turned.add(storage_id(source.meta["val"]))
            else:
                alone.add(node)
            node.target = IN_PLACE_VIEWS[node.target]
        elif turned and any(storage_id(one.meta["val"]) in turned for one in written_by(node)):
            # Behind a write autograd makes views again: in a trace from what the tensor has become, else from its memory.
            raise CaptureError("a step writes into a tensor with views whose shape it has changed in place; view it anew: x.t()")
        if is_view(node.target):
            viewed.add(node.args[0])


def _drop_detaches(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        if node.target in (aten.detach.default, aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and schema_name(node.target).startswith(_PROFILER_MARKS):
            graph.erase_node(node)


def _merge_views(graph: fx.Graph) -> None:
    seen: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_view(node.target):
            continue
        source = node.args[0] if node.args else None
        if (
            node.target is aten.t.default
            and isinstance(source, fx.Node)
            and source.op == "call_function"
            and source.target is aten.t.default
        ):
            # t(t(x)) is x.
            node.replace_all_uses_with(source.args[0])
            graph.erase_node(node)
            continue
        key = (node.target, _freeze(node.args), _freeze(node.kwargs))
        # Views of one storage are the same memory, whatever is written in between.
        first = seen.setdefault(key, node)
        if first is not node:
            node.replace_all_uses_with(first)
            graph.erase_node(node)


def _freeze(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(map(_freeze, value))
    if isinstance(value, dict):
        return tuple((k, _freeze(v)) for k, v in value.items())
    return value if isinstance(value, fx.Node) else exact(value)


def _drop_dead(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op in ("placeholder", "output"):
            continue
        if (node.op == "get_attr" or not has_effect(node)) and not node.users:
            graph.erase_node(node)


def _copy_results(graph: fx.Graph) -> None:
    # A reduced loss may lie in memory as large as all its elements (probe.py). A copy of the scalar is handed out, so
    # that the rest is released with the step.
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    for node in output.all_input_nodes:
        if node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor) and keeps_more(node):
            with graph.inserting_after(node):
                copy = graph.call_function(aten.clone.default, (node,))
            copy.meta = {**node.meta, "val": torch.empty_like(node.meta["val"])}
            output.replace_input_with(node, copy)
