"""What was there before a step: a step() that was replaced, hooks of all optimizers, what is kept, and what things are the same."""

from __future__ import annotations

import functools
import operator
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
def test_the_step_of_all_optimizers_of_a_class_is_replaced(when: int, named: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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


# -- what things are the same


def output(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


class Held:
    """Tensors outside of the step; ``last`` is one that the step before was given."""

    def __init__(self) -> None:
        self.tensors = [x for x, _ in images(5, seed=2)]
        self.last: torch.Tensor | None = None

    def keep(self, batch: Any) -> None:
        self.last = batch[0]


def _outside(held: Held, model: nn.Module, batch: Any) -> torch.Tensor:
    return output(model, batch[0]) * (5.0 if batch[0] is held.tensors[3] else 1.0)


def _any_outside(held: Held, model: nn.Module, batch: Any) -> torch.Tensor:
    return output(model, batch[0]) * (5.0 if any(batch[0] is one for one in held.tensors[3:]) else 1.0)


def _last(held: Held, model: nn.Module, batch: Any) -> torch.Tensor:
    return output(model, batch[0]) * (5.0 if batch[0] is not held.last else 1.0)


def _buffer(held: Held, model: nn.Module, batch: Any) -> torch.Tensor:
    return output(model, batch[0]) * (5.0 if batch[0] is model.proto else 1.0)


def _in_a_dict(held: Held, model: nn.Module, batch: Any) -> torch.Tensor:
    return output(model, batch[0]) * held.factors.get(batch[0], 1.0)  # type: ignore[attr-defined,no-any-return]


def _by_the_operator(held: Held, model: nn.Module, batch: Any) -> torch.Tensor:
    return output(model, batch[0]) * (5.0 if operator.is_(batch[0], held.tensors[3]) else 1.0)


def _at_a_key(held: Held, model: nn.Module, batch: Any) -> torch.Tensor:
    try:
        return output(model, batch[0]) * held.factors[batch[0]]  # type: ignore[attr-defined]
    except KeyError:
        return output(model, batch[0])


def _in_a_set(held: Held, model: nn.Module, batch: Any) -> torch.Tensor:
    return output(model, batch[0]) * (5.0 if batch[0] in held.chosen else 1.0)  # type: ignore[attr-defined]


@pytest.mark.parametrize("step", [_outside, _any_outside, _last, _buffer, _by_the_operator, _in_a_dict, _at_a_key, _in_a_set])
def test_which_object_a_tensor_of_the_batch_is(step: Any) -> None:
    """Each step has the eager one's bits, whichever tensors it is given."""
    held = Held()
    model = nn.Linear(6, 4)
    model.register_buffer("proto", torch.randn(8, 6))
    held.factors = {held.tensors[3]: 5.0}  # type: ignore[attr-defined]
    held.chosen = {held.tensors[3]}  # type: ignore[attr-defined]
    compute = functools.partial(step, held)
    made = wf.Step(model, optimizer=SGD(model.parameters(), lr=0.0, fused=True), step=compute)
    for x in (*held.tensors[:2], held.tensors[1], held.tensors[3], model.proto):
        want = compute(model, (x,)).detach()
        assert torch.equal(made((x,)).detach(), want)
        held.keep((x,))
    assert made.opaque_reason is not None and ("which object" in made.opaque_reason or "identity" in made.opaque_reason)


def test_which_lists_of_a_batch_are_one() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return output(model, batch["q"][0]) * (5.0 if batch["q"] is batch["k"] else 1.0)

    model = nn.Linear(6, 4)
    made = wf.Step(model, optimizer=SGD(model.parameters(), lr=0.0, fused=True), step=step)
    q = [BATCHES[0][0]]
    for batch in ({"q": q, "k": [BATCHES[0][0]]}, {"q": q, "k": q}):
        assert torch.equal(made(batch).detach(), step(model, batch).detach())
    assert "which object" in (made.opaque_reason or "")


def test_a_parameter_that_is_reached_in_two_ways() -> None:
    """A trace shows another tensor in the place of the module's, and not in the place of the list's."""

    def making_tied() -> tuple[nn.Module, Optimizer]:
        model, optimizer = making()()
        holder[:] = [model.weight]
        return model, optimizer

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) * (0.5 if model.weight is holder[0] else 1.0)

    holder: list[Any] = []
    compare(making_tied, BATCHES, step=step, opaque="which object")


def test_two_tensors_of_the_batch_may_be_one() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return output(model, batch["q"] + batch["k"]) * (5.0 if batch["q"] is batch["k"] else 1.0)

    x = [x for x, _ in BATCHES]
    compare(making(), [{"q": x[0], "k": x[1]}, {"q": x[2], "k": x[2]}, {"q": x[3], "k": x[0]}], step=step)


class Attention(nn.Module):
    """torch's own compares its arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.MultiheadAttention(6, 2)
        self.last = nn.Linear(6, 4)
        self.mode = self.other = ["sum"]
        self.weight = None

    def forward(self, x: torch.Tensor, y: Any = None) -> torch.Tensor:
        if y is not None or self.weight is x:
            x = x + y
        h, _ = self.mix(x, x, x)
        g = h if self.mode is self.other else x
        return self.last(g + (x if h is not g else h))


def test_what_may_be_compared() -> None:
    """None, what the step made, and what the key knows; and whatever torch compares."""
    compare(making(Attention), BATCHES)
