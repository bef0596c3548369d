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


def job(rows: int, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, tuple[torch.Tensor, torch.Tensor]]:
    """Return a model of many layers, whose step is high beside its state, with its optimizer and a batch."""
    torch.manual_seed(seed)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.ReLU())]).cuda()
    batch = torch.randn(rows, 32).cuda(), torch.randn(rows, 32).cuda()
    return model, torch.optim.Adam(model.parameters(), lr=2**-7, fused=True), batch


def start_measuring() -> int:
    """Return the bytes that the user holds."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_reserved()


def bytes_of(count: int) -> torch.Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cuda")


def train(engine: wf.Engine, steps: int = 4, rows: int = 48_000, seed: int = 0) -> wf.Step:
    model, optimizer, batch = job(rows, seed)
    step = wf.Step(model, loss=F.mse_loss, optimizer=optimizer, engine=engine, name=f"job {seed}")
    for _ in range(steps):
        step(batch)
    return step


def test_arenas_and_pool_have_the_limit_together() -> None:
    before = start_measuring()
    with wf.Engine("cuda", memory="128MiB", lanes=2) as engine:
        step = train(engine)
        assert step.plan.height > 56 * MiB, "twice that would be too much"
        assert engine.native.placed[0] > 0, "planned steps came after those that were served from the pool"
        assert torch.cuda.max_memory_reserved() - before <= engine.limit


def test_what_the_user_holds_neither_fails_an_engine_nor_counts() -> None:
    first = bytes_of(200 * MiB)
    before = start_measuring()
    with wf.Engine("cuda", memory="128MiB", lanes=2) as engine:
        second = bytes_of(150 * MiB)
        step = train(engine)
        assert engine.native.placed[0] > 0 and step.opaque_reason is None
        assert torch.cuda.max_memory_reserved() - before - second.nbytes <= engine.limit
        del first, second
        train(engine, seed=1)
    assert torch.cuda.max_memory_reserved() - before - 150 * MiB <= engine.limit


def test_a_limit_ends_with_its_engine() -> None:
    with wf.Engine("cuda", memory="64MiB", lanes=2) as engine:
        train(engine, rows=4000)
    assert bytes_of(300 * MiB).nbytes == 300 * MiB


def test_a_step_that_wants_more_is_refused_and_the_next_one_runs() -> None:
    before = start_measuring()
    model, optimizer, batch = small()
    with wf.Engine("cuda", memory="128MiB", lanes=2) as engine:
        step = wf.Step(model, step=eager(200, 1), optimizer=optimizer, engine=engine)
        with pytest.raises(torch.OutOfMemoryError, match=r"memory= of the engines on the device is 128.0 MiB"):
            step(batch)
        assert torch.isfinite(wf.Step(model, step=eager(80, 1), optimizer=optimizer, engine=engine)(batch))
        train(engine)
        assert torch.cuda.max_memory_reserved() - before <= engine.limit


def test_what_a_library_keeps_for_a_lane_counts() -> None:
    kept: list[torch.Tensor] = []  # as cuBLAS keeps a workspace for each stream

    def step_with_workspace(model: nn.Module, batch: Any) -> torch.Tensor:
        if not kept:
            kept.append(bytes_of(24 * MiB))
        return eager(1, 1)(model, batch)

    before = start_measuring()
    model, optimizer, batch = small()
    with wf.Engine("cuda", memory="128MiB", lanes=1) as engine:
        wf.Step(model, step=step_with_workspace, optimizer=optimizer, engine=engine)(batch)
        with pytest.raises(torch.OutOfMemoryError):
            wf.Step(model, step=eager(110, 1), optimizer=optimizer, engine=engine)(batch)
        train(engine)
        assert torch.cuda.max_memory_reserved() - before <= engine.limit


def test_two_engines_have_the_sum_of_their_limits() -> None:
    before = start_measuring()
    with wf.Engine("cuda", memory="128MiB", lanes=2) as one, wf.Engine("cuda", memory="128MiB", lanes=2) as other:
        steps = [train(one), train(other, seed=1)]
        assert all(step.plan.height > 56 * MiB for step in steps)
        assert one.native.placed[0] > 0 and other.native.placed[0] > 0
        assert 128 * MiB < torch.cuda.max_memory_reserved() - before <= 256 * MiB
