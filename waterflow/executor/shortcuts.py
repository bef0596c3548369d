"""Shorter ways to the same bits: what torch's operators do before they reach a kernel, done once instead.

A step of a launch-bound model spends most of its time on the way to kernels. Nothing here changes which kernel runs on
which numbers, or runs one of another arithmetic.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx

from waterflow.partition.operators import is_view, storage_id

aten = torch.ops.aten

# The Scalar overloads wrap their number into a tensor at each call, and go on as the Tensor overloads.
_OF_TENSORS = {
    getattr(aten, name).Scalar: getattr(aten, name).Tensor
    for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")
}
# Returns an alias, though its schema does not say so.
_UNDECLARED_VIEWS = frozenset({aten._unsafe_view.default})


def short_form(target: Any, values: Sequence[Any]) -> Any:
    """The operator to call in the place of ``target`` with the same arguments."""
    if target in _OF_TENSORS:
        return _OF_TENSORS[target]
    if target is aten._foreach_add_.Scalar and isinstance(values[1], (int, float)) and _are_counters(values[0]):
        return torch.ops.waterflow.count_up_.default
    return target


def wraps_numbers(target: Any) -> bool:
    """Whether numbers in the arguments of ``target`` are wrapped into tensors by its short form."""
    return target in _OF_TENSORS


def _are_counters(nodes: Sequence[fx.Node]) -> bool:
    return all(
        value.numel() == 1 and value.dtype == torch.float32 and value.device.type == "cpu"
        for value in (node.meta["val"] for node in nodes)
    )


def aliases(calls: Sequence[fx.Node], apart: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Views that are made directly, from sizes and strides, and the node whose memory each looks at.

    A view of a view looks at the first one's base. Left out are those that are ``apart``, and memory that an operation
    behind them writes into: there a base with other strides than the captured ones could not be replaced by a copy.
    """
    written = {
        storage_id(value.meta["val"]): at
        for at, node in enumerate(calls)
        for argument, values in zip(node.target._schema.arguments, node.args)
        if argument.alias_info is not None and argument.alias_info.is_write
        for value in (values if isinstance(values, (list, tuple)) else [values])
        if isinstance(value, fx.Node)
    }
    bases: dict[fx.Node, fx.Node] = {}
    for at, node in enumerate(calls):
        if node in apart or not (is_view(node.target) or node.target in _UNDECLARED_VIEWS):
            continue
        source, made = node.args[0], node.meta.get("val")
        given = source.meta.get("val") if isinstance(source, fx.Node) else None
        if (
            isinstance(made, torch.Tensor)
            and isinstance(given, torch.Tensor)
            and made.dtype == given.dtype
            and not made.is_complex()
            and made.layout == given.layout == torch.strided
            and storage_id(made) == storage_id(given)
            and written.get(storage_id(made), -1) < at
        ):
            bases[node] = bases.get(source, source)
    return bases


def bypassed(bases: dict[fx.Node, fx.Node], outputs: Collection[Any]) -> set[fx.Node]:
    """Views that nobody looks at any more, because their own views look at the base."""
    return {node for node in bases if node not in outputs and all(user in bases for user in node.users)}
