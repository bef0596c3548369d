"""``x.data = ...`` with memory that begins at the same byte: another shape, other strides, another type. And tensors that are swapped."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
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


class Normed(nn.Module):
    """Has tensors that a step trains, changes in place, changes by ``out=`` and only reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        with torch.no_grad():
            torch.add(self.total, y.mean(0), out=self.total)
        return ((y - 1).square() * self.scale * (1 + self.total.square())).mean()  # type: ignore[no-any-return]


def swapped(model: nn.Module, name: str) -> None:
    tensor = dict([*model.named_parameters(), *model.named_buffers()])[name]
    other = torch.linspace(0.1, 1.0, tensor.numel()).view(tensor.shape)
    torch.utils.swap_tensors(tensor, nn.Parameter(other) if tensor.requires_grad else other)


def loaded(model: nn.Module, name: str) -> None:
    model.load_state_dict({key: value / 2 if value.is_floating_point() else value for key, value in model.state_dict().items()})


def moved(model: nn.Module, name: str) -> None:
    model.to(torch.float64).to(torch.float32)


SWAPS = [*((swapped, name) for name in ("layers.0.weight", "layers.1.running_mean", "scale", "total")), (loaded, ""), (moved, "")]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("lane", [False, True], ids=["alone", "engine"])
@pytest.mark.parametrize(("change", "name"), SWAPS, ids=[name or change.__name__ for change, name in SWAPS])
def test_tensors_may_be_swapped_between_steps(
    change: Callable[[nn.Module, str], None], name: str, lane: bool, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by ``load_state_dict`` and ``to`` with ``torch.__future__.set_swap_module_params_on_conversion(True)``."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    torch.manual_seed(0)
    model = Normed()
    other = copy.deepcopy(model)
    optimizer, its_optimizer = (torch.optim.AdamW(m.parameters(), lr=0.01, fused=True) for m in (model, other))
    with wf.Engine(memory="256MiB", lanes=1) if lane else contextlib.nullcontext() as engine:
        step = wf.Step(other, optimizer=its_optimizer, engine=engine, accumulate=accumulate)
        for number in range(8):
            x = torch.randn(6 if number % 3 else 5, 8)
            if number in (4, 6):
                change(model, name)
                change(other, name)
            loss = model(x)
            (loss / accumulate).backward()
            expected = loss.detach()
            del loss  # torch swaps nothing that a graph still refers to
            if number % accumulate == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()
            assert same_bits(step((x,)), expected), number
        assert step.opaque_reason is None
    assert all(map(same_bits, model.state_dict().values(), other.state_dict().values()))
