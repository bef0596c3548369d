"""Kernel selection: which operator a program calls for each operation of the graph.

Our own kernels and aliases keep the bits; only with ``exact=False`` may matrix products use a library that rounds otherwise.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from waterflow.partition.guards.guarded_places import exact
from waterflow.partition.passes.operators import is_view, lazy_bits, storage_id

aten, ours = torch.ops.aten, torch.ops.waterflow

LEAST_WORK = 1 << 18  # multiplications; in smaller products the dispatch takes longer than the kernel
REPEATS = 5
GAIN = 1.1  # a lesser speedup may be noise

_Layout = tuple[torch.Size, tuple[int, ...]]
_Way = Callable[[], Tensor]

_found: dict[Hashable, bool] = {}  # measured once for all products that are alike
_one_at_a_time = threading.Lock()


def faster_product(target: Any, values: Sequence[Any]) -> Any:
    """Return the operator to call instead of ``target`` with the same arguments; results may differ by rounding."""
    if target is aten.mm.default:
        left, right = values[:2]
        if _is_faster(None, left, right):
            return ours.mm.default
    elif target is aten.addmm.default:
        bias, left, right, *factors = values
        if factors == [1, 1] and bias.meta["val"].dim() == 1 and _is_faster(bias, left, right):
            return ours.addmm.default
    return target


def _is_faster(bias: fx.Node | None, left: fx.Node, right: fx.Node) -> bool:
    a, b = left.meta["val"], right.meta["val"]
    plain = all(t.device.type == "cpu" and t.dtype == torch.float32 and not t.is_conj() for t in (a, b))
    if (
        not plain
        or not (torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled)
        or a.shape[0] * a.shape[1] * b.shape[1] < LEAST_WORK
    ):
        return False
    layouts = (None if bias is None else _layout(bias), _layout(left), _layout(right))
    key = (*layouts, torch.get_num_threads())
    with _one_at_a_time:  # measurements at the same time would disturb each other
        if key not in _found:
            _found[key] = measure(*_ways(*layouts))
        return _found[key]


def measure(first: _Way, second: _Way) -> bool:
    """Return True if the second function is measured to be faster than the first by more than ``GAIN``."""
    best = [float("inf")] * 2
    for _ in range(REPEATS):
        for number, way in enumerate((first, second)):
            begin = time.perf_counter()
            way()
            best[number] = min(best[number], time.perf_counter() - begin)
    return best[1] * GAIN < best[0]


def _layout(node: fx.Node) -> _Layout:
    return node.meta["val"].shape, node.meta["val"].stride()


def _ways(bias: _Layout | None, left: _Layout, right: _Layout) -> tuple[_Way, _Way]:
    a, b = (torch.empty_strided(*layout).fill_(0.5) for layout in (left, right))
    if bias is None:
        return lambda: aten.mm(a, b), lambda: ours.mm(a, b)
    c = torch.empty_strided(*bias).fill_(0.5)
    return lambda: aten.addmm(c, a, b), lambda: ours.addmm(c, a, b)


aten = torch.ops.aten

# The Scalar overloads wrap their number into a tensor at each call, and go on as the Tensor overloads.
_OF_TENSORS = {
    getattr(aten, name).Scalar: getattr(aten, name).Tensor
    for name in ("add", "add_", "sub", "sub_", "mul", "mul_", "div", "div_")
}
# Kernels of our own for tensors of float32 on the CPU, of at least one element.
_OF_FLOATS = {
    aten.relu.default: "relu",
    aten.threshold_backward.default: "threshold_backward",
    aten._safe_softmax.default: "_safe_softmax",
    aten.max_pool2d_with_indices.default: "max_pool2d_with_indices",
    aten.mm.default: "small_mm",
    aten.addmm.default: "small_addmm",
    aten.sum.dim_IntList: "sum_of_few_rows",
}
_OF_EQUAL_SHAPES = {aten.mul.Tensor: "mul", aten.add.Tensor: "add"}
# Returns an alias, though its schema does not say so.
_UNDECLARED_VIEWS = frozenset({aten._unsafe_view.default})


def short_form(target: Any, values: Sequence[Any]) -> Any:
    """Return the operator to call instead of ``target`` with the same arguments, for the same bits in less time."""
    ours = _own_kernel(target, values)
    if ours is not None:
        return getattr(torch.ops.waterflow, ours).default
    if target in _OF_TENSORS:
        return _OF_TENSORS[target]
    if target is aten._foreach_add_.Scalar and isinstance(values[1], (int, float)) and _are_counters(values[0]):
        return torch.ops.waterflow.count_up_.default
    return target


def _own_kernel(target: Any, values: Sequence[Any]) -> str | None:
    # Chosen by what the graph knows of the arguments. Our operators check the tensors themselves, too, and call torch's kernel
    # for those that they are not made for.
    if target is aten.bernoulli_.float:
        return "bernoulli_" if _is_plain(values[0], (torch.float32, torch.float64)) else None
    if not values or not _is_plain(values[0], (torch.float32,)):
        return None
    if target in _OF_EQUAL_SHAPES:
        same = _is_plain(values[1], (torch.float32,)) and _looks_like(values[0], values[1])
        return _OF_EQUAL_SHAPES[target] if same and (len(values) == 2 or values[2] == 1) else None
    if target is aten.mul.Scalar:
        return "mul_number" if type(values[1]) in (int, float) else None
    if target is aten.clone.default:
        return "clone" if values[1] == torch.contiguous_format else None
    return _OF_FLOATS.get(target)


def _is_plain(value: Any, dtypes: Collection[torch.dtype]) -> bool:
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or any(lazy_bits(tensor)):
        return False
    return tensor.device.type == "cpu" and tensor.dtype in dtypes


def _looks_like(one: fx.Node, other: fx.Node) -> bool:
    first, second = one.meta["val"], other.meta["val"]
    return bool(first.shape == second.shape and first.stride() == second.stride())


@dataclass(frozen=True)
class Mask:
    """The three nodes that make a dropout mask: an empty tensor, filled with ones and zeros, divided by the share kept."""

    empty: fx.Node
    filled: fx.Node
    divided: fx.Node

    @property
    def kept(self) -> float:
        """The share of ones."""
        return _share(self.filled)


def _share(filled: fx.Node) -> Any:
    return filled.args[1] if len(filled.args) > 1 else 0.5  # the default is left out


def masks(calls: Sequence[fx.Node]) -> dict[fx.Node, Mask]:
    """Return the masks that one operator can make, by the node of their empty tensor.

    The three nodes follow each other directly, no other node uses the first two, and both numbers are the same constant.
    """
    found = {}
    for empty, filled, divided in zip(calls, calls[1:], calls[2:]):
        if (
            empty.target is aten.empty_like.default
            and filled.target is aten.bernoulli_.float
            and divided.target in (aten.div_.Scalar, aten.div_.Tensor)
            and not empty.kwargs.keys() - {"pin_memory"}
            and not filled.kwargs
            and len(empty.args) == 1
            and filled.args[0] is empty
            and exact(divided.args) == exact((filled, _share(filled)))
            and type(_share(filled)) is float
            and list(empty.users) == [filled]
            and list(filled.users) == [divided]
            and _is_plain(empty.args[0], (torch.float32, torch.float64))
        ):
            found[empty] = Mask(empty, filled, divided)
    return found


def _are_counters(nodes: Sequence[fx.Node]) -> bool:
    return all(
        value.numel() == 1 and value.dtype == torch.float32 and value.device.type == "cpu"
        for value in (node.meta["val"] for node in nodes)
    )


def aliases(calls: Sequence[fx.Node], apart: Collection[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Return the views that a program makes directly from sizes and strides, each with the node that is its base.

    The base of a view of a view is the first one's base. Views that are ``apart`` are left out. So are views of memory that a
    later operation writes to, unless the view is the only one: if the base had other strides than the captured ones, it
    could not be replaced by a copy.
    """
    written = {
        storage_id(value.meta["val"]): at
        for at, node in enumerate(calls)
        for argument, values in zip(node.target._schema.arguments, node.args)
        if argument.alias_info is not None and argument.alias_info.is_write
        for value in (values if isinstance(values, (list, tuple)) else [values])
        if isinstance(value, fx.Node)
    }
    first: dict[Any, fx.Node] = {}
    for node in calls:
        if isinstance(node.meta.get("val"), torch.Tensor):
            first.setdefault(storage_id(node.meta["val"]), node)
    bases: dict[fx.Node, fx.Node] = {}
    sole: set[fx.Node] = set()  # the only views of memory that is written later: they are the bases of their own views
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
            and made.is_neg() == given.is_neg()
            and made.layout == given.layout == torch.strided
            and storage_id(made) == storage_id(given)
        ):
            memory = storage_id(made)
            if written.get(memory, -1) < at:
                bases[node] = source if source in sole else bases.get(source, source)
            elif first[memory] is source and len(first[memory].users) == 1:
                bases[node] = source
                sole.add(node)
    return bases


def bypassed(bases: dict[fx.Node, fx.Node], outputs: Collection[Any]) -> set[fx.Node]:
    """Return the views that are not used any more, because their own views use the base."""
    return {
        node for node in bases if node not in outputs and all(user in bases and bases[user] is not node for user in node.users)
    }
