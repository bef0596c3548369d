"""Steps whose tensors lie on the same bytes, and batches that lie where a step changes something: as eager has it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.support import same_bits

DEPTH, WIDTH = 8, 32


class Deep(nn.Module):
    """Gradients are the larger part of its memory, and two buffers lie on the same bytes."""

    def __init__(self, overlapping: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        bank = torch.ones(4, WIDTH)
        self.register_buffer("bank", bank)
        self.register_buffer("row", bank[3] if overlapping else torch.ones(WIDTH), persistent=False)

    def forward(self, x: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x) + self.row)
            self.bank.mul_(1.01)
        return x + beside.sum()


def losses(
    take: Any, overlapping: bool = False, steps: int = 5, ahead: bool = False, rows: int = 2, **options: Any
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Deep(overlapping)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
    captured = options.pop("captured", True)

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.mse_loss(model(batch[0], batch[2]), batch[1])

    def eager(batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        return value.detach()

    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(wf.Engine(memory="1GiB", lanes=1)) if ahead else None
        step = wf.Step(model, step=loss, optimizer=optimizer, engine=engine, **options) if captured else None
        generator = torch.Generator().manual_seed(1)
        made = []
        if step is not None and ahead:
            step.hold_batches(2)
        for _ in range(steps):
            x, y = (torch.randn(rows, WIDTH, generator=generator) for _ in range(2))
            batch = (x, y, take(model, optimizer))
            if step is None:
                made.append(eager(batch))
            else:
                made.append(step.submit(batch) if ahead else step(batch))
        return [one.result() if ahead else one for one in made]


def nothing(model: Deep, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return torch.zeros(1)


def a_weight(model: Deep, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return model.layers[-1].weight.detach()  # type: ignore[return-value]


def part_of_a_weight(model: Deep, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return torch.from_numpy(model.layers[-1].weight.detach().numpy()[3])  # type: ignore[union-attr]  # a storage of its own


def momentum(model: Deep, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    weight = model.layers[-1].weight
    return optimizer.state[weight].get("momentum_buffer", torch.zeros(WIDTH, WIDTH))  # type: ignore[index]


def buffer(model: Deep, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    return model.bank  # type: ignore[return-value]


def assert_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    assert len(one) == len(other) and all(same_bits(a, b) for a, b in zip(one, other))


@pytest.mark.parametrize("options", [{}, {"recompute": 1}, {"recompute": 1, "early_updates": False}], ids=str)
@pytest.mark.parametrize("overlapping", [False, True])
@pytest.mark.parametrize("take", [nothing, a_weight, part_of_a_weight, momentum])
def test_as_eager(take: Any, overlapping: bool, options: dict[str, Any]) -> None:
    rows = 256 if "recompute" in options else 2  # activations are to be the larger part then
    expected = losses(take, overlapping, captured=False, rows=rows)
    try:
        found = losses(take, overlapping, rows=rows, **options)
    except wf.MemoryLimitError as error:  # the lowest that there is
        found = losses(take, overlapping, rows=rows, **(options | {"recompute": error.needed}))
    assert_same(found, expected)


def test_a_batch_that_is_a_buffer_which_the_step_changes() -> None:
    assert_same(losses(buffer), losses(buffer, captured=False))
    with pytest.raises(wf.MemoryLimitError) as refused:
        losses(nothing, rows=256, recompute=1)
    wanted = refused.value.needed
    with pytest.raises(wf.InvalidJobError, match="lies in a buffer that the step changes"):
        losses(buffer, rows=256, recompute=wanted)


@pytest.mark.parametrize("take", [a_weight, part_of_a_weight])
def test_a_step_handed_in_behind_another(take: Any) -> None:
    assert_same(losses(take, ahead=True, steps=12), losses(take, captured=False, steps=12))


def test_what_cannot_recompute_and_does_not_fit_is_refused() -> None:
    model = Deep(overlapping=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    with wf.Engine(memory="1MiB", lanes=1, reserve=0) as engine, wf.within(engine):
        step = wf.Step(model, step=lambda m, b: m(b, b).sum(), optimizer=optimizer, recompute="auto")
        with pytest.raises(wf.MemoryLimitError, match="raise memory="):
            step(torch.randn(4096, WIDTH))


@pytest.mark.parametrize("own_region", [False, True])
@pytest.mark.parametrize("opaque", [False, True])
def test_autocast_casts_a_weight_once(own_region: bool, opaque: bool) -> None:
    """Used twice, its gradients are added in the narrow type, as eager does."""

    def forward(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if opaque and x.sum().item() > 1e9:
            return x
        region = torch.autocast("cpu", torch.bfloat16) if own_region else contextlib.nullcontext()
        with region:
            x = model(torch.tanh(model(x)))
        with torch.autocast("cpu", torch.bfloat16) if own_region else contextlib.nullcontext():
            return model(model(x)).float()

    def train(captured: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        autocast = None if own_region else torch.bfloat16
        step = wf.Step(model, step=lambda m, b: forward(m, b).pow(2).mean(), optimizer=optimizer, autocast=autocast)
        made = []
        for _ in range(4):
            x = torch.randn(8, 16)
            if captured:
                made.append(step(x))
                continue
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16) if autocast is not None else contextlib.nullcontext():
                value = forward(model, x).pow(2).mean()
            value.backward()
            optimizer.step()
            made.append(value.detach())
        return [*made, model.weight.detach().clone()]

    assert_same(train(True), train(False))
