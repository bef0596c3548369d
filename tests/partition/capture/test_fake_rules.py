"""Shapes and strides while tracing are those that kernels return."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from waterflow.partition.capture.fake_rules import TracingMode

aten = torch.ops.aten

Arguments = Callable[[Tensor, Tensor], tuple[Any, ...]]
OPERATORS: dict[Any, Arguments] = {
    aten.mse_loss_backward.default: lambda x, y: (torch.tensor(1.0), x, y, 1),
    aten.smooth_l1_loss_backward.default: lambda x, y: (torch.tensor(1.0), x, y, 1, 0.5),
    aten.huber_loss_backward.default: lambda x, y: (torch.tensor(1.0), x, y, 1, 0.5),
    aten.binary_cross_entropy_backward.default: lambda x, y: (torch.tensor(1.0), x, y, None, 1),
    aten._softmax_backward_data.default: lambda x, y: (x, y, -1, torch.float32),
    aten._log_softmax_backward_data.default: lambda x, y: (x, y, -1, torch.float32),
    aten.hardtanh_backward.default: lambda x, y: (x, y, 0.2, 0.8),
    aten.hardswish_backward.default: lambda x, y: (x, y),
    aten.hardsigmoid_backward.default: lambda x, y: (x, y),
    aten.elu_backward.default: lambda x, y: (x, 1.0, 1.0, 1.0, False, y),
    aten.softplus_backward.default: lambda x, y: (x, y, 1.0, 20.0),
    aten.leaky_relu_backward.default: lambda x, y: (x, y, 0.1, False),
    aten.threshold_backward.default: lambda x, y: (x, y, 0),
    aten.gelu_backward.default: lambda x, y: (x, y),
    aten.silu_backward.default: lambda x, y: (x, y),
    aten.tanh_backward.default: lambda x, y: (x, y),
    aten.sigmoid_backward.default: lambda x, y: (x, y),
    aten.relu.default: lambda x, y: (x,),
    aten.gelu.default: lambda x, y: (x,),
    aten.silu.default: lambda x, y: (x,),
    aten.tanh.default: lambda x, y: (x,),
    aten.sigmoid.default: lambda x, y: (x,),
    aten.add.Tensor: lambda x, y: (x, y),
    aten.sub.Tensor: lambda x, y: (x, 2),
    aten.mul.Tensor: lambda x, y: (x, 1j),
    aten.div.Tensor: lambda x, y: (y, x.to(torch.float64)),
    aten._log_softmax.default: lambda x, y: (x, 1, False),
    aten._softmax.default: lambda x, y: (x, -1, False),
    aten.bmm.default: lambda x, y: (x, y.transpose(1, 2)),
    aten.baddbmm.default: lambda x, y: (y[0, :, :6], x, y.transpose(1, 2)),
    aten.mm.default: lambda x, y: (x[0], y[0].t()),
    aten.addmm.default: lambda x, y: (y[0, 0, :6], x[0], y[0].t()),
    aten.expand.default: lambda x, y: (x[:, :1], [4, 6, 8]),
    aten.transpose.int: lambda x, y: (x, 0, 1),
    aten.select.int: lambda x, y: (x, 1, 2),
    aten.slice.Tensor: lambda x, y: (x, 1, 1, 5, 2),
    aten.unsqueeze.default: lambda x, y: (x, 1),
    aten.sum.dim_IntList: lambda x, y: (x, [1]),
    aten.mean.dim: lambda x, y: (x, [0, 2], True),
    aten.max_pool2d_with_indices.default: lambda x, y: (x[None], [2, 2], [2, 2]),
    aten.avg_pool2d.default: lambda x, y: (x[None], [2, 2], [1, 1]),
    aten.native_layer_norm.default: lambda x, y: (x, [8], None, None, 1e-5),
    aten.native_dropout.default: lambda x, y: (x, 0.5, True),
}
PLACES = {"plain": torch.rand(4, 6, 8), "transposed": torch.rand(4, 8, 6).transpose(1, 2), "sliced": torch.rand(4, 12, 8)[:, ::2]}


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
@pytest.mark.parametrize("places", list(product(PLACES, PLACES)), ids="-".join)
def test_strides_are_those_of_kernels(operator: Any, places: tuple[str, str]) -> None:
    arguments = OPERATORS[operator](PLACES[places[0]], PLACES[places[1]])
    _compare(operator, *arguments)


MATRICES = {"plain": torch.rand(6, 5), "transposed": torch.rand(5, 6).t(), "double": torch.rand(6, 5, dtype=torch.float64)}


@pytest.mark.parametrize("places", MATRICES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_the_loss_of_a_classifier_has_the_forms_that_kernels_return(places: str, weighted: bool, reduction: int) -> None:
    scores, right = MATRICES[places], torch.tensor([0, 1, 2, 3, 4, 0])
    weight = torch.rand(5, dtype=scores.dtype) if weighted else None
    loss, total = aten.nll_loss_forward.default(scores, right, weight, reduction, -100)
    _compare(aten.nll_loss_forward.default, scores, right, weight, reduction, -100)
    _compare(aten.nll_loss_backward.default, loss, scores, right, weight, reduction, -100, total)


@pytest.mark.parametrize(
    ("operator", "arguments"),
    [
        (aten.nll_loss_forward.default, (torch.rand(6, 5), torch.zeros(4, dtype=torch.int64), None, 1, -100)),
        (aten.addmm.default, (torch.rand(5), torch.rand(6, 3), torch.rand(4, 5))),
        (aten._log_softmax.default, (torch.rand(6, 5), 2, False)),
        (aten.add.Tensor, (torch.rand(6, 5), torch.rand(4, 5))),
        (aten.view.default, (torch.rand(6, 5), [7, 5])),
    ],
    ids=lambda value: str(value) if callable(value) else "",
)
def test_what_kernels_refuse_is_refused(operator: Any, arguments: tuple[Any, ...]) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        operator(*arguments)
    mode = TracingMode()
    with mode, pytest.raises((RuntimeError, IndexError)):
        operator(*_stand_ins(mode, arguments))


def test_views_share_the_memory_of_what_they_show() -> None:
    mode = TracingMode()
    x = mode.like(torch.rand(4, 6))
    with mode:
        shown = [x.view(24), x.t(), x.detach(), x[1], x.unsqueeze(0), x.transpose(0, 1), x.expand(2, 4, 6)]
        product = x.mm(x.t())
    assert all(one.untyped_storage()._cdata == x.untyped_storage()._cdata for one in shown)
    assert product.untyped_storage()._cdata != x.untyped_storage()._cdata


def _stand_ins(mode: TracingMode, arguments: Any) -> Any:
    return tree_map(lambda value: mode.from_tensor(value) if isinstance(value, Tensor) else value, arguments)


def _compare(operator: Any, *arguments: Any) -> None:
    made = [(t.shape, t.stride(), t.dtype) for t in tree_leaves(operator(*arguments))]
    mode = TracingMode()
    with mode:
        traced = [(t.shape, t.stride(), t.dtype) for t in tree_leaves(operator(*_stand_ins(mode, arguments)))]
    assert traced == made


def test_a_broadcast_target_is_left_to_torch() -> None:
    x, target, one = torch.rand(4, 6), torch.rand(4, 1), torch.tensor(1.0)
    made = aten.mse_loss_backward.default(one, x, target, 1)
    mode = TracingMode()
    with mode:
        traced = aten.mse_loss_backward.default(*(mode.from_tensor(t) for t in (one, x, target)), 1)
    assert traced.shape == made.shape
