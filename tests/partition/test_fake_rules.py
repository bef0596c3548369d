"""Shapes and strides while tracing are those that kernels return."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from waterflow.partition.fake_rules import TracingMode

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
    aten.native_layer_norm.default: lambda x, y: (x, [8], None, None, 1e-5),
    aten.native_dropout.default: lambda x, y: (x, 0.5, True),
}
PLACES = {
    "plain": torch.rand(4, 6, 8),
    "transposed": torch.rand(4, 8, 6).transpose(1, 2),
    "sliced": torch.rand(4, 12, 8)[:, ::2],
}


@pytest.mark.parametrize("operator", OPERATORS, ids=str)
@pytest.mark.parametrize("places", list(product(PLACES, PLACES)), ids="-".join)
def test_strides_are_those_of_kernels(operator: Any, places: tuple[str, str]) -> None:
    arguments = OPERATORS[operator](PLACES[places[0]], PLACES[places[1]])
    made = [(t.shape, t.stride(), t.dtype) for t in tree_leaves(operator(*arguments))]
    mode = TracingMode()
    fake = tree_map(lambda value: mode.from_tensor(value) if isinstance(value, Tensor) else value, arguments)
    with mode:
        traced = [(t.shape, t.stride(), t.dtype) for t in tree_leaves(operator(*fake))]
    assert traced == made


def test_a_broadcast_target_is_left_to_torch() -> None:
    x, target, one = torch.rand(4, 6), torch.rand(4, 1), torch.tensor(1.0)
    made = aten.mse_loss_backward.default(one, x, target, 1)
    mode = TracingMode()
    with mode:
        traced = aten.mse_loss_backward.default(*(mode.from_tensor(t) for t in (one, x, target)), 1)
    assert traced.shape == made.shape
