"""``x.data = ...`` with memory that begins at the same byte: another shape, other strides, another type."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import waterflow as wf
from tests.support import same_bits


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("shift", torch.arange(64.0).reshape(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) + self.shift[:, 0] * len(self.shift)).tanh()[:, 0].sum()  # type: ignore[no-any-return]


def changes(tensor: Tensor, number: int) -> Tensor:
    """The same bytes, seen otherwise."""
    data = tensor.data
    return [data, data.t(), data, torch._neg_view(data), data.detach(), data.t()][number % 6]


@pytest.mark.parametrize("which", ["layer.weight", "shift", "both"])
def test_of_parameters_and_buffers(which: str, no_captures: Any) -> None:
    torch.manual_seed(0)
    model = Holder()
    other = copy.deepcopy(model)
    x = torch.randn(8, 8)
    optimizer, its_optimizer = (SGD(m.parameters(), lr=0.01, fused=True) for m in (model, other))
    step = wf.Step(other, optimizer=its_optimizer, step=lambda m, b: m(b))
    for number in range(6):
        for each in (model, other):
            for name in ("layer.weight", "shift") if which == "both" else (which,):
                tensor = dict([*each.named_parameters(), *each.named_buffers()])[name]
                if name == "shift" or number % 6 != 3:  # optimizers take no negative views
                    tensor.data = changes(tensor, number)
        optimizer.zero_grad()
        loss = model(x)
        loss.backward()
        optimizer.step()
        assert same_bits(step(x), loss), number
        assert all(same_bits(a, b) for a, b in zip(model.parameters(), other.parameters())), number
    assert step.opaque_reason is None


@pytest.mark.parametrize("reads", ["values", "shape alone"])
def test_of_tensors_from_outside_of_the_model(reads: str, no_captures: Any) -> None:
    torch.manual_seed(0)
    store, bank = torch.rand(32, 8), torch.empty(0)
    model = nn.Linear(8, 4)

    def compute(m: nn.Module, x: Tensor) -> Tensor:
        from_bank = bank[:, 0].sum() if reads == "values" else bank.shape[0]
        return m(x).pow(2).mean() * from_bank  # type: ignore[no-any-return]

    step = wf.Step(model, optimizer=SGD(model.parameters(), lr=0.0), step=compute)
    x = torch.randn(4, 8)
    views = [store[:4], store[:8], store[:16], store[:4].t(), store.view(-1)[:32].view(4, 8), store.view(-1)[:32].view(8, 4)]
    for view in (*views, *views):
        bank.data = view
        expected = compute(model, x)
        assert same_bits(step(x), expected)
    assert step.opaque_reason is None


def test_of_another_type(no_captures: Any) -> None:
    bits, held = torch.arange(8, dtype=torch.int32), torch.empty(0)
    model = nn.Linear(8, 4)

    def compute(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).sum() * 0 + held.to(torch.float64).sum()  # type: ignore[no-any-return]

    step = wf.Step(model, optimizer=SGD(model.parameters(), lr=0.0), step=compute)
    x = torch.randn(4, 8)
    for kind in (torch.float32, torch.int32, torch.float32):
        held.data = bits.view(torch.float32) if kind == torch.float32 else bits
        assert same_bits(step(x), compute(model, x))
