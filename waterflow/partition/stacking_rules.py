"""Operations on stacks of jobs' tensors: the same as ``torch.vmap`` makes, in fewer calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import fx

from waterflow.partition.operators import storage_id, tensors_in, written_by

aten = torch.ops.aten


class Stacking(Protocol):
    """What rules ask: arguments with all jobs in them; dropout rates of all jobs; storages that the step writes into."""

    rates: dict[Any, torch.Tensor]
    written: set[int]

    def stacked_args(self, node: fx.Node, rank: int | None = None) -> list[Any]:
        """Tensors of lower rank than ``rank`` (of one job's) get ones behind the first dimension."""

    def all_stacked(self, *sources: Any) -> bool:
        """Whether each is a node that has all jobs in it, or becomes so."""

    def rate_of(self, node: fx.Node) -> tuple[str, str] | None:
        """The dropout rate that an operation divides by."""


def is_pointwise(node: fx.Node) -> bool:
    """Whether an operation works element by element, on tensors of one type."""
    if torch.Tag.pointwise not in node.target.tags:  # type: ignore[union-attr]
        return False
    tensors = [t for source in node.all_input_nodes for t in tensors_in(source.meta["val"])]
    return len({t.dtype for t in tensors}) == 1 and all(t.dim() for t in tensors)


def pointwise(stacking: Stacking, node: fx.Node) -> Any:
    """The same operation on all jobs."""
    rank = max(t.dim() for source in node.all_input_nodes for t in tensors_in(source.meta["val"]))
    changed = written_by(node)
    if changed and not (stacking.all_stacked(*changed) and all(s.meta["val"].dim() == rank for s in changed)):
        return NotImplemented
    return node.target(*stacking.stacked_args(node, rank), **node.kwargs)  # type: ignore[operator]


def _mm(stacking: Stacking, node: fx.Node) -> Any:
    if not stacking.all_stacked(*node.args):
        return NotImplemented
    return aten.bmm.default(*stacking.stacked_args(node))


def _addmm(stacking: Stacking, node: fx.Node) -> Any:
    bias = node.args[0].meta["val"]  # type: ignore[union-attr]
    if not stacking.all_stacked(*node.args) or bias.dim() not in (1, 2) or node.kwargs:
        return NotImplemented
    return aten.baddbmm.default(*stacking.stacked_args(node, 2))


def _view(stacking: Stacking, node: fx.Node) -> Any:
    (x, *_) = stacking.stacked_args(node)
    sizes = [x.shape[0], *node.meta["val"].shape]
    try:
        return aten.view.default(x, sizes)
    except (RuntimeError, ValueError):  # all jobs' results lie otherwise than one's
        if storage_id(node.meta["val"]) in stacking.written:
            raise
        return aten.view.default(aten.clone.default(x, memory_format=torch.contiguous_format), sizes)


def _expand(stacking: Stacking, node: fx.Node) -> Any:
    (x, *_) = stacking.stacked_args(node, node.meta["val"].dim())
    return aten.expand.default(x, [x.shape[0], *node.meta["val"].shape])


def _transposed(stacking: Stacking, node: fx.Node) -> Any:
    (x,) = stacking.stacked_args(node)
    return aten.transpose.int(x, 1, 2) if x.dim() == 3 else x


def _permute(stacking: Stacking, node: fx.Node) -> Any:
    (x, dims) = stacking.stacked_args(node)
    return aten.permute.default(x, [0, *(1 + d % (x.dim() - 1) for d in dims)])


def _as_it_is(stacking: Stacking, node: fx.Node) -> Any:
    layout = node.kwargs.get("memory_format")
    if layout not in (None, torch.contiguous_format, torch.preserve_format):
        return NotImplemented
    if not stacking.all_stacked(*node.all_input_nodes):
        return NotImplemented
    return node.target(*stacking.stacked_args(node), **node.kwargs)  # type: ignore[operator]


def _by_dimension(*places: int) -> Callable[[Stacking, fx.Node], Any]:
    """Dimensions, or lists of them, stand at these places among the arguments; counted from the end they stay."""

    def rule(stacking: Stacking, node: fx.Node) -> Any:
        if len(node.args) <= max(places) or not stacking.all_stacked(*node.all_input_nodes):
            return NotImplemented
        args = stacking.stacked_args(node)
        if args[0].dim() == 1:  # a number of each job has no dimension, though its -1 and 0 are let pass
            return NotImplemented
        for place in places:
            given = args[place]
            if given is None or (isinstance(given, (list, tuple)) and not given):
                return NotImplemented
            args[place] = [_behind_jobs(d) for d in given] if isinstance(given, (list, tuple)) else _behind_jobs(given)
        return node.target(*args, **node.kwargs)  # type: ignore[operator]

    return rule


def _select_backward(stacking: Stacking, node: fx.Node) -> Any:
    gradient, sizes, dimension, index = stacking.stacked_args(node)
    return aten.select_backward.default(gradient, [gradient.shape[0], *sizes], _behind_jobs(dimension), index)


def _divide_by_rate(stacking: Stacking, node: fx.Node) -> Any:
    rates = stacking.rates.get(stacking.rate_of(node))
    if rates is None:
        return pointwise(stacking, node)
    (x, _) = stacking.stacked_args(node)
    return aten.div_.Tensor(x, aten.view.default(rates, [-1, *[1] * (x.dim() - 1)]))


def _behind_jobs(dimension: int) -> int:
    return dimension + 1 if dimension >= 0 else dimension


RULES: dict[Any, Callable[[Stacking, fx.Node], Any]] = {
    aten.mm.default: _mm,
    aten.addmm.default: _addmm,
    aten.view.default: _view,
    aten._unsafe_view.default: _view,
    aten.expand.default: _expand,
    aten.t.default: _transposed,
    aten.permute.default: _permute,
    **dict.fromkeys(
        (aten.clone.default, aten.empty_like.default, aten.zeros_like.default, aten.ones_like.default), _as_it_is
    ),
    aten.transpose.int: _by_dimension(1, 2),
    aten.select.int: _by_dimension(1),
    aten.unsqueeze.default: _by_dimension(1),
    aten.squeeze.dim: _by_dimension(1),
    aten.sum.dim_IntList: _by_dimension(1),
    aten.mean.dim: _by_dimension(1),
    aten._softmax.default: _by_dimension(1),
    aten._log_softmax.default: _by_dimension(1),
    aten._softmax_backward_data.default: _by_dimension(2),
    aten._log_softmax_backward_data.default: _by_dimension(2),
    aten.select_backward.default: _select_backward,
    aten.div_.Scalar: _divide_by_rate,
}
