"""An engine's limit on a GPU: what it bounds, what it does not, and how heights are measured there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf

MiB = 1 << 20


class Needs(torch.autograd.Function):
    """Takes so many MiB for itself in its forward pass, and in its backward pass, which another thread runs."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor, before: int, after: int) -> torch.Tensor:
        context.after = after
        torch.empty(before * MiB, dtype=torch.uint8, device=x.device)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        torch.empty(context.after * MiB, dtype=torch.uint8, device=gradient.device)
        return gradient.clone(), None, None


def eager(before: int, after: int) -> Any:
    """Return a step function that cannot be captured."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        output = Needs.apply(model(batch[0]), before, after)
        assert output.sum().item() is not None
        return F.mse_loss(output, batch[1])

    return step


def small() -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    model = nn.Linear(64, 64).cuda()
    return model, torch.optim.SGD(model.parameters(), lr=0.01), (torch.randn(8, 64).cuda(), torch.randn(8, 64).cuda())


@pytest.mark.parametrize(("before", "after"), [(24, 3), (3, 24)])
def test_eager_steps_are_metered_on_their_device(before: int, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Else what is asked for is filled, and a stand-in's kernels may ask the host for as much.
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    model, optimizer, batch = small()
    with wf.Engine("cuda", memory="512MiB", lanes=2) as engine:
        step = wf.Step(model, step=eager(before, after), optimizer=optimizer, engine=engine)
        for _ in range(4):
            step(batch)
        assert step.opaque_reason is not None
        assert 24 * MiB <= step.measured_height <= 25 * MiB
        assert step.plan.height == step.measured_height
