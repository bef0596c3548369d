"""Products of matrices by another library, where bits may differ and it is measured to be faster here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from waterflow.executor.measured import is_faster

aten, ours = torch.ops.aten, torch.ops.waterflow

LEAST_WORK = 1 << 18  # multiplications: smaller products are over before the way to them is

_Layout = tuple[torch.Size, tuple[int, ...]]


def faster_product(target: Any, values: Sequence[Any]) -> Any:
    """The operator to call in the place of ``target`` with the same arguments; results may differ by rounding."""
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
    return is_faster(("product", *layouts), lambda: _ways(*layouts))


def _layout(node: fx.Node) -> _Layout:
    return node.meta["val"].shape, node.meta["val"].stride()


def _ways(bias: _Layout | None, left: _Layout, right: _Layout) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
    a, b = (torch.empty_strided(*layout).fill_(0.5) for layout in (left, right))
    if bias is None:
        return lambda: aten.mm(a, b), lambda: ours.mm(a, b)
    c = torch.empty_strided(*bias).fill_(0.5)
    return lambda: aten.addmm(c, a, b), lambda: ours.addmm(c, a, b)
