"""What was there before a step: a step() that was replaced, hooks of all optimizers, what is kept, and what things are the same."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import waterflow as wf
from tests.support import compare, images

BATCHES = images(4)


@pytest.fixture(autouse=True)
def _afresh(no_captures: Any) -> None:
    """No verdict is taken over from an earlier test."""


def making(build: Callable[[], nn.Module] = lambda: nn.Linear(6, 4)) -> Callable[[], tuple[nn.Module, Optimizer]]:
    def make() -> tuple[nn.Module, Optimizer]:
        model = build()
        return model, SGD(model.parameters(), lr=0.1, fused=True)

    return make


# -- what an update is


def clamped(step: Any, named: bool) -> Any:
    """A ``step()`` that does more than the optimizer's, in the place of it."""

    def replaced(*given: Any, **more: Any) -> Any:
        result = step(*given, **more)
        optimizer = getattr(step, "__self__", None) or given[0]
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data.clamp_(-0.01, 0.01)
        return result

    return functools.wraps(step)(replaced) if named else replaced


@pytest.mark.parametrize("named", [False, True], ids=["plain", "wraps"])
@pytest.mark.parametrize("when", [0, 2])
def test_an_optimizers_step_is_replaced(when: int, named: bool) -> None:
    def during(model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
        def act(number: int) -> None:
            if number == when:
                optimizer.step = clamped(optimizer.step, named)  # type: ignore[method-assign]

        return act

    compare(making(), BATCHES, during=during, opaque="step() of the SGD was replaced")


@pytest.mark.parametrize("named", [False, True], ids=["plain", "wraps"])
@pytest.mark.parametrize("when", [0, 2])
def test_the_step_of_all_optimizers_of_a_class_is_replaced(
    when: int, named: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def during(model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
        monkeypatch.undo()

        def act(number: int) -> None:
            if number == when:
                monkeypatch.setattr(SGD, "step", clamped(SGD.step, named))

        return act

    compare(making(), BATCHES, during=during, opaque="step() of the SGD was replaced")


@pytest.mark.parametrize("register", [register_optimizer_step_pre_hook, register_optimizer_step_post_hook])
@pytest.mark.parametrize("when", [0, 2])
def test_a_hook_of_all_optimizers(when: int, register: Any) -> None:
    def more(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.data.mul_(0.5)

    handles = []

    def during(model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
        while handles:
            handles.pop().remove()
        return lambda number: handles.append(register(more)) if number == when else None

    try:
        compare(making(), BATCHES, during=during, opaque="has step hooks")
    finally:
        handles.pop().remove()


@pytest.mark.parametrize("when", [0, 2])
def test_a_schedulers_wrapper_is_torchs_own(when: int) -> None:
    def during(model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
        made: list[StepLR] = []

        def act(number: int) -> None:
            if number == when:
                made.append(StepLR(optimizer, 1))

        return act

    compare(making(), BATCHES, during=during)


# -- what is kept


def parametrized() -> nn.Module:
    model = nn.Linear(6, 4)
    parametrize.register_parametrization(model, "weight", nn.Tanh())
    return model


def twice(model: Any, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1]) + model.weight.pow(2).sum() * 0.01


def test_parametrized_tensors_that_are_kept_around_steps() -> None:
    trained = []
    for wrap in (False, True):
        torch.manual_seed(0)
        model, optimizer = making(parametrized)()
        step = wf.Step(model, optimizer=optimizer, step=twice) if wrap else None
        for number, batch in enumerate(BATCHES):
            with parametrize.cached() if number >= 2 else torch.enable_grad():
                if step is not None:
                    step(batch)
                    continue
                twice(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
        trained.append(model.parametrizations.weight.original)
    assert torch.equal(*trained)
    assert step is not None and "parametrize.cached()" in (step.opaque_reason or "")


def test_parametrized_tensors_that_are_kept_within_a_step() -> None:
    def cached(model: Any, batch: Any) -> torch.Tensor:
        with parametrize.cached():
            return twice(model, batch)

    compare(making(parametrized), BATCHES, step=cached)


def scaled(model: nn.Module, batch: Any, factor: float) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1]) * factor


@pytest.mark.parametrize("part", ["function", "keywords"])
def test_a_partial_is_filled_anew(part: str) -> None:
    step = functools.partial(scaled, factor=1.0)

    def negative(model: nn.Module, batch: Any, factor: float) -> torch.Tensor:
        return -scaled(model, batch, factor)

    def during(model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
        def act(number: int) -> None:
            if number in (0, 2):
                function = negative if number and part == "function" else scaled
                factor = 0.1 if number and part == "keywords" else 1.0
                step.__setstate__((function, (), {"factor": factor}, None))  # type: ignore[attr-defined]

        return act

    compare(making(), BATCHES, step=step, during=during)


def test_a_step_fills_a_partial_anew() -> None:
    inner = functools.partial(scaled, factor=1.0)

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        inner.__setstate__((scaled, (), {"factor": inner.keywords["factor"] * 2}, None))  # type: ignore[attr-defined]
        return inner(model, batch)

    def during(model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
        inner.__setstate__((scaled, (), {"factor": 1.0}, None))  # type: ignore[attr-defined]
        return lambda number: None

    compare(making(), BATCHES, step=step, during=during, opaque="__setstate__")
