"""What a captured step does with its gradients is what eager training does, wherever their memory comes from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

import waterflow as wf
from tests.support import compare

SIZES = 67, 129


class Two(nn.Module):
    """Two parameters of one shape beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (nn.Parameter(torch.randn(SIZES)) for _ in range(2))
        self.layer = nn.Linear(SIZES[1], SIZES[1])


class Turned(Two):
    """One of them lies in memory by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(self.one.detach().t().contiguous().t())


class Hands(torch.autograd.Function):
    """The sum of ``given``, which is the gradient of the first argument itself, and not a copy of it."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given)
        return given.sum()

    @staticmethod
    def backward(ctx: Any, _: torch.Tensor) -> Any:
        return *ctx.saved_tensors, None


def handed(model: Two, x: torch.Tensor) -> Any:
    hidden = torch.tanh(x)
    return Hands.apply(model.one, hidden) + model.layer(x).pow(2).mean(), {"hidden": hidden}


STEPS = {
    "of two parameters": lambda model, x: F.mse_loss(model.layer(model.one + model.other), x),
    "of one element": lambda model, x: model.one.sum() + model.layer(x).pow(2).mean(),
    "turned": lambda model, x: (model.one.t() * x.t().contiguous()).sum() + model.layer(x).pow(2).mean(),
    "parts of one": lambda model, x: torch.cat([model.one, model.other], 1).mul(torch.cat([x, x], 1)).sum(),
    "the batch": lambda model, x: Hands.apply(model.one, x) + model.layer(x).pow(2).mean(),
    "a metric": handed,
}


def batches(count: int = 4) -> list[torch.Tensor]:
    numbers = torch.Generator().manual_seed(3)
    return [torch.randn(SIZES, generator=numbers) for _ in range(count)]


def making(kind: type[nn.Module]) -> Any:
    def make() -> tuple[nn.Module, Optimizer]:
        model = kind()
        return model, AdamW(model.parameters(), lr=0.02, fused=True)

    return make


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("model", [Two, Turned])
@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.05}, {"clip_grad_value": 0.01},
                                     {"clip_grad_norm": 0.05, "accumulate": 2}], ids=str)  # fmt: skip
def test_clipping_changes_nothing_else(kind: str, model: type[nn.Module], options: dict[str, Any]) -> None:
    given = batches()
    compare(making(model), given, step=STEPS[kind], **options)
    assert all(map(torch.equal, given, batches()))


# -- backward passes inside


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(SIZES[1], 16), nn.Linear(16, 16)


def again(function: Any, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(function, x, use_reentrant=True)  # type: ignore[no-any-return]


def penalized(model: Layers, x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    model.first(leaf).pow(2).sum().backward()
    assert leaf.grad is not None
    return model.first(leaf.grad).pow(2).mean()


def aside(model: Layers, x: torch.Tensor) -> torch.Tensor:
    leaf = x.clone().requires_grad_()
    model.first(leaf).pow(2).sum().backward(inputs=[leaf])
    assert leaf.grad is not None
    return model.first(leaf.grad).pow(2).mean()


INSIDE = {
    "checkpoint first": (lambda model, x: again(model.first, x.clone().requires_grad_()).pow(2).mean(), "reentrant"),
    "checkpoint behind": (lambda model, x: again(model.last, model.first(x)).pow(2).mean(), "reentrant"),
    "backward": (penalized, "calls backward() inside"),
    "backward for another": (aside, None),
}


@pytest.mark.parametrize("kind", INSIDE)
def test_gradients_from_inside_are_not_lost(kind: str, no_captures: Any) -> None:
    step, reason = INSIDE[kind]
    compare(making(Layers), batches(), step=step, opaque=reason)


def test_a_gradient_that_is_one_number_spread_out() -> None:
    """Kernels of updates walk gradients as raw memory: one without strides of its own is copied before."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scales = nn.Parameter(torch.linspace(-1, 1, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.scales.sum() * x

    x = torch.arange(1.0, 5.0)
    model, reference = Scaled(), Scaled()
    step = wf.Step(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), step=lambda m, b: m(b).sum())
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, fused=True)
    for _ in range(2):
        step(x)
        optimizer.zero_grad()
        reference(x).sum().backward()
        optimizer.step()
    assert torch.equal(model.scales, reference.scales)
