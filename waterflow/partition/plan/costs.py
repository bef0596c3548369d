"""The cost of each operation of a captured step on a device: bytes, arithmetic, launches, counted from the graph alone.

A device's rates turn costs into time (``planner/gpus.py``): a model of cost, not a measurement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

from waterflow.partition.passes.operators import is_view, schema_name, storage_id, tensors_in, written_by

aten = torch.ops.aten

# Ask for memory and write nothing to it.
_ALLOCATE = frozenset(
    f"aten::{name}" for name in ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")
)
# What one launch of torch's kernels over lists of tensors takes (multi_tensor_apply with four lists, as Adam's): so many
# tensors, and so many chunks of them.
_TENSORS_PER_LAUNCH = 36
_CHUNKS_PER_LAUNCH = 320
_CHUNK = 65_536  # elements


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one operation: bytes that it reads and writes, floating-point operations, kernels that it starts."""

    bytes: int = 0
    flops: int = 0
    launches: int = 0


def operation_cost(node: fx.Node) -> Cost:
    """Return the cost of one instruction of a captured step.

    Operations without a formula in ``torch.utils.flop_counter`` count no arithmetic: elementwise work, reductions and
    normalizations are bound by the bytes that they move.
    """
    if not _starts_kernel(node):
        return Cost()
    return Cost(bytes_moved(node), _flops(node), _launches(node))


def bytes_moved(node: fx.Node) -> int:
    """Return the bytes that an operation reads and writes, each tensor once each way; 0 if it starts no kernel."""
    if not _starts_kernel(node):
        return 0
    written = list(tensors_in(node.meta.get("val")))
    if not written:  # updates of lists in place return nothing
        written = [t for source in written_by(node) for t in tensors_in(source.meta.get("val"))]
    read = [t for source in node.all_input_nodes for t in tensors_in(source.meta.get("val"))]
    return sum(t.numel() * t.element_size() for t in (*written, *read))


def _starts_kernel(node: fx.Node) -> bool:
    # Views and bare allocations are work of the host alone.
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False  # getitem
    if target._schema.is_mutable:
        return True
    if is_view(target) or schema_name(target) in _ALLOCATE:
        return False
    # Some views are not declared as such, as aten::_unsafe_view: all that they return lies in what they were given.
    given = {storage_id(t) for source in node.all_input_nodes for t in tensors_in(source.meta.get("val"))}
    made = [storage_id(t) for t in tensors_in(node.meta.get("val"))]
    return not made or not given.issuperset(made)


def _launches(node: fx.Node) -> int:
    lists = [value for value in node.args if isinstance(value, (list, tuple)) and value]
    if not node.target._schema.is_mutable or not lists or not isinstance(lists[0][0], fx.Node):  # type: ignore[union-attr]
        return 1
    # Updates of lists of tensors need several launches; every other operation counts as one.
    tensors = [t for source in lists[0] for t in tensors_in(source.meta.get("val"))]
    chunks = sum(-(-t.numel() // _CHUNK) for t in tensors)
    return max(-(-len(tensors) // _TENSORS_PER_LAUNCH), -(-chunks // _CHUNKS_PER_LAUNCH))


def _flops(node: fx.Node) -> int:
    formula = _FORMULAS.get(schema_name(node.target)) or flop_registry.get(node.target.overloadpacket)  # type: ignore[union-attr]
    if formula is None:
        return 0
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return int(formula(*args, **kwargs, out_val=node.meta["val"]))


def _recurrent(input: torch.Tensor, weight: torch.Tensor, hidden: torch.Tensor, *_: Any, **__: Any) -> int:
    # One product with the input's weights, and one with the hidden state's, for each place in time.
    return 2 * input.shape[0] * input.shape[1] * (weight.numel() + hidden.numel())


def _recurrent_backward(*args: Any, **kwargs: Any) -> int:
    # Gradients of the inputs, and of the weights.
    return 2 * _recurrent(*args, **kwargs)


# Operators of the CPU that torch has no formulas for.
_FORMULAS: dict[str, Callable[..., int]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": flop_registry[aten._scaled_dot_product_flash_attention],
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": flop_registry[
        aten._scaled_dot_product_flash_attention_backward
    ],
    "aten::mkldnn_rnn_layer": _recurrent,
    "aten::mkldnn_rnn_layer_backward": _recurrent_backward,
}
