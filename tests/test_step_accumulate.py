"""Which gradients count in an update: those of the window's calls, and no others; clipped in the order of the optimizer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import waterflow as wf
from tests.support import same_bits


class Heads(nn.Module):
    """A body and two heads; the batch says which of them are used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, which: str) -> torch.Tensor:
        hidden = self.body(x).relu()
        return torch.stack([getattr(self, name)(hidden).pow(2).mean() for name in which.split()]).sum()


def captured(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(*batch)  # type: ignore[no-any-return]


def opaque(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = model(*batch)
    return loss if loss.item() < 1e9 else -loss  # type: ignore[no-any-return]


def mixed(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cannot be captured for batches of five."""
    return (opaque if len(batch[0]) == 5 else captured)(model, batch)


STEPS = {"captured": captured, "opaque": opaque, "mixed": mixed}


def eager(model: nn.Module, optimizer: Optimizer, compute: Any, count: int, norm: float | None, value: float | None) -> Any:
    """The loop that everybody writes."""
    calls = 0

    def step(batch: Any) -> torch.Tensor:
        nonlocal calls
        if calls % count == 0:
            optimizer.zero_grad()
        loss = compute(model, batch)
        (loss / count if count > 1 else loss).backward()
        calls += 1
        if calls % count == 0:
            trained = [p for group in optimizer.param_groups for p in group["params"]]
            if norm is not None:
                nn.utils.clip_grad_norm_(trained, norm)
            if value is not None:
                nn.utils.clip_grad_value_(trained, value)
            optimizer.step()
        return loss.detach()

    return step


def compare(
    make: Callable[[], tuple[nn.Module, Optimizer]], batches: list[Any], compute: Any, *, count: int = 1,
    norm: float | None = None, value: float | None = None, during: Callable[[int, nn.Module], None] | None = None,
) -> wf.Step:  # fmt: skip
    """Train in both ways; all bits must be equal, and no gradient be left."""
    torch.manual_seed(0)
    model, optimizer = make()
    torch.manual_seed(0)
    other, its_optimizer = make()
    reference = eager(model, optimizer, compute, count, norm, value)
    step = wf.Step(other, optimizer=its_optimizer, step=compute, accumulate=count, clip_grad_norm=norm, clip_grad_value=value)
    for number, batch in enumerate(batches):
        for each in (model, other):
            if during is not None:
                during(number, each)
        assert same_bits(reference(batch), step(batch)), f"loss of call {number}"
        assert all(p.grad is None for p in other.parameters())
        for (name, one), two in zip(model.named_parameters(), other.parameters()):
            assert same_bits(one, two), f"{name} after call {number}"
    for one, two in zip(model.parameters(), other.parameters()):
        mine, its = optimizer.state.get(one, {}), its_optimizer.state.get(two, {})
        kept = {key: entry for key, entry in its.items() if entry is not None}
        assert mine.keys() == kept.keys()
        assert all(same_bits(entry, kept[key]) for key, entry in mine.items())
    return step


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.02, weight_decay=0.1, fused=True)


def heads(optimizer: Callable[[nn.Module], Optimizer] = adamw) -> Callable[[], tuple[nn.Module, Optimizer]]:
    def make() -> tuple[nn.Module, Optimizer]:
        model = Heads()
        return model, optimizer(model)

    return make


def batches(uses: list[str], sizes: list[int] | None = None) -> list[Any]:
    numbers = torch.Generator().manual_seed(1)
    return [(torch.randn((sizes or [4] * len(uses))[i], 6, generator=numbers), use) for i, use in enumerate(uses)]


USES = {
    "not in the last": ["one two", "one two", "one", "one two", "two", "one"],
    "in one call only": ["one", "one", "two", "one", "two", "one"],
    "not in the window": ["one", "one", "one", "one two", "one", "two"],
    "in none": ["one"] * 6,
}


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("uses", USES)
@pytest.mark.parametrize("norm", [None, 0.05])
def test_parameters_that_only_some_calls_use(kind: str, uses: str, norm: float | None, no_captures: Any) -> None:
    sizes = [4, 4, 4, 4, 5, 4] if kind == "mixed" else None
    step = compare(heads(), batches(USES[uses], sizes), STEPS[kind], count=3, norm=norm)
    assert (step.opaque_reason is None) == (kind == "captured")


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("at", [1, 2, 3])
@pytest.mark.parametrize("freeze", [True, False])
def test_freezing_in_a_window(kind: str, at: int, freeze: bool, no_captures: Any) -> None:
    def during(number: int, model: nn.Module) -> None:
        model.one.requires_grad_(freeze if number < at else not freeze)

    sizes = [4, 4, 4, 4, 4, 5, 4, 4, 4] if kind == "mixed" else None
    compare(heads(), batches(["one two"] * 9, sizes), STEPS[kind], count=3, norm=0.05, during=during)


def test_a_sum_of_gradients_begins_with_the_first(no_captures: Any) -> None:
    """A gradient of -0.0 stays one: momentum keeps its sign."""

    class Zero(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.tensor([-0.0, 1.0]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.weight * x).sum()

    def make() -> tuple[nn.Module, Optimizer]:
        model = Zero()
        return model, SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    compare(make, [(torch.tensor([-0.0, -0.0]),)] * 4, captured, count=2)


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("count", [1, 2])
def test_gradients_that_somebody_else_left_do_not_count(kind: str, count: int, no_captures: Any) -> None:
    def during(number: int, model: nn.Module) -> None:
        if number % count == 0:
            model(torch.ones(2, 6), "one two").backward()

    compare(heads(), batches(["one two", "one"] * 3, [4, 4, 4, 5, 4, 4]), STEPS[kind], count=count, during=during)


def test_the_other_network_of_a_pair_leaves_nothing_behind(no_captures: Any) -> None:
    """The generator's backward pass puts gradients into the discriminator, which its own update must not see."""
    torch.manual_seed(0)
    pair = nn.Linear(4, 8), nn.Linear(8, 1)
    data = [(torch.randn(4, 8), torch.randn(4, 4)) for _ in range(4)]

    def score(out: torch.Tensor, label: float) -> torch.Tensor:
        return F.binary_cross_entropy_with_logits(out, torch.full((4, 1), label))

    def train(way: str) -> list[torch.Tensor]:
        maker, judge = map(copy.deepcopy, pair)
        noted = (lambda loss: loss if loss.item() < 1e9 else -loss) if way == "opaque" else (lambda loss: loss)

        def judged(model: nn.Module, batch: Any) -> torch.Tensor:
            return noted(score(model(batch[0]), 1.0) + score(model(maker(batch[1]).detach()), 0.0))  # type: ignore[no-any-return]

        def made(model: nn.Module, batch: Any) -> torch.Tensor:
            return noted(score(judge(model(batch[1])), 1.0))  # type: ignore[no-any-return]

        steps = []
        for model, compute in ((judge, judged), (maker, made)):
            optimizer = SGD(model.parameters(), lr=0.1, fused=True)
            if way == "eager":
                steps.append(eager(model, optimizer, compute, 1, None, None))
            else:
                steps.append(wf.Step(model, optimizer=optimizer, step=compute))
        for batch in data:
            for step in steps:
                step(batch)
        return [p.detach() for model in (maker, judge) for p in model.parameters()]

    expected = train("eager")
    for way in ("captured", "opaque"):
        assert all(map(same_bits, expected, train(way))), way


# -- clipping over groups


class Mixed(nn.Module):
    """Parameters of two types, one that is frozen, and one that no gradient reaches."""

    def __init__(self, double: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.frozen, self.idle = nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 8)
        self.wide = nn.Linear(8, 8, dtype=torch.float64 if double else None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.wide(self.frozen(x).to(self.wide.weight.dtype)).float().pow(2).mean()


def groups(model: Any) -> Optimizer:
    """In another order than the model's; one has a single tensor."""
    layers = model.layers
    params = [
        {"params": [*layers[5].parameters(), *layers[0].parameters(), *model.idle.parameters()], "lr": 0.01},
        {"params": [model.wide.weight]},
        {"params": [*layers[3].parameters(), *model.frozen.parameters(), *layers[1].parameters()]},
        {"params": [*layers[2].parameters(), model.wide.bias, *layers[4].parameters()]},
    ]
    return AdamW(params, lr=0.02, fused=True)


@pytest.mark.parametrize("kind", ["captured", "opaque"])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("clip", [(0.003, None), (None, 1e-4), (0.003, 1e-4)], ids=str)
def test_clipping_goes_through_groups_in_their_order(
    kind: str, double: bool, count: int, clip: tuple[float | None, float | None], no_captures: Any
) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = Mixed(double)
        return model, groups(model)

    given = [(torch.randn(16, 8, generator=torch.Generator().manual_seed(n)),) for n in range(6)]
    step = compare(make, given, STEPS[kind], count=count, norm=clip[0], value=clip[1])
    assert (step.opaque_reason is None) == (kind == "captured")


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("clip", [0.003, math.inf])
@pytest.mark.parametrize("own", [False, True])
def test_the_norm_before_clipping_is_a_metric_of_calls_that_update(kind: str, count: int, clip: float, own: bool) -> None:
    def compute(model: nn.Module, batch: Any) -> Any:
        return STEPS[kind](model, batch), {"grad_norm": batch[0].sum()} if own else {}

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(Mixed(False))
    optimizer = groups(models[0])
    step = wf.Step(models[1], optimizer=groups(models[1]), step=compute, accumulate=count, clip_grad_norm=clip, audit=1)
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for call in range(1, 7):
        batch = (torch.randn(16 if call < 5 else 5, 8, generator=torch.Generator().manual_seed(call)),)
        (STEPS[kind](models[0], batch) / count).backward()
        expected = {"grad_norm": batch[0].sum()} if own else {}
        if call % count == 0:
            expected = {"grad_norm": nn.utils.clip_grad_norm_(trained, clip)} | expected
            optimizer.step()
            optimizer.zero_grad()
        _, metrics = step(batch)
        assert metrics.keys() == expected.keys() and all(same_bits(metrics[name], expected[name]) for name in expected)
    assert (step.opaque_reason is None) == (kind == "captured")
