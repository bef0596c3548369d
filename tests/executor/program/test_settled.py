"""A settled step sees all that Python's slower call sees: after each change its bits are those of a plain loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Distribution
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import waterflow as wf
from waterflow.errors import JobCancelled
from waterflow.executor.policy import ResourcePolicy

STEPS, CHANGE = 30, 15

Change = Callable[[nn.Module, torch.optim.Optimizer], Any]


class Net(nn.Module):
    """Takes a tensor, a dict or a tuple of them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer, self.scale = nn.Linear(4, 8), nn.Linear(8, 2), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(torch.tanh(self.inner(x.to(self.inner.weight.dtype)))) * self.scale


def loss(model: nn.Module, batch: Any) -> Any:
    x, y = batch.values() if isinstance(batch, dict) else batch
    value = F.mse_loss(model(x), y)
    return value, {"doubled": value.detach() * 2}


def made() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)


def batches(form: Callable[[Any, Any], Any], rows: Callable[[int], int] = lambda number: 6) -> list[Any]:
    numbers = torch.Generator().manual_seed(0)
    return [form(torch.randn(rows(n), 4, generator=numbers), torch.randn(rows(n), 2, generator=numbers)) for n in range(STEPS)]


def plainly(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[Any], Any]:
    def step(batch: Any) -> Any:
        value, metrics = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach(), metrics

    return step


def settles(step: wf.Step) -> bool:
    return step._settled is not None


def trained(step: Callable[[Any], Any], change: Callable[[], Any], given: list[Any]) -> list[float]:
    found = []
    with contextlib.ExitStack() as around:
        for number, batch in enumerate(given):
            if number == CHANGE:
                if isinstance(step, wf.Step):
                    assert settles(step)
                if isinstance(context := change(), contextlib.AbstractContextManager):
                    around.enter_context(context)
            value, metrics = step(batch)
            found += [float(value), float(metrics["doubled"])]
    return found


def new_data(model: Any, _: Any) -> None:
    model.inner.weight.data = model.inner.weight.data * 0.5


def new_parameter(model: Any, optimizer: Any) -> None:
    optimizer.state[made := nn.Parameter(torch.ones(2))] = optimizer.state.pop(model.outer.bias)
    model.outer.bias = optimizer.param_groups[0]["params"][3] = made


class Doubling(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return made * 2 if function is torch.tanh else made


@contextlib.contextmanager
def other_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def without_checks() -> Iterator[None]:
    before = Distribution._validate_args
    Distribution.set_default_validate_args(not before)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


CHANGES: dict[str, Change] = {
    "nothing": lambda model, optimizer: None,
    "other data": new_data,
    "another parameter": new_parameter,
    "a frozen parameter": lambda model, optimizer: model.inner.bias.requires_grad_(False),
    "a learning rate": lambda model, optimizer: optimizer.param_groups[0].update(lr=0.01),
    "momentum": lambda model, optimizer: optimizer.param_groups[0].update(momentum=0.0),
    "an attribute": lambda model, optimizer: setattr(model, "scale", 2.0),
    "a hook of a module": lambda model, optimizer: model.inner.register_forward_hook(lambda *given: given[-1] * 2) and None,
    "a hook of a tensor": lambda model, optimizer: model.inner.weight.register_hook(lambda gradient: gradient * 2) and None,
    "gradients": lambda model, optimizer: setattr(model.inner.weight, "grad", None),
    "a function mode": lambda model, optimizer: Doubling(),
    "autocast": lambda model, optimizer: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "a default type": lambda model, optimizer: other_default(),
    "checks of distributions": lambda model, optimizer: without_checks(),
    "a method": lambda model, optimizer: setattr(model, "forward", lambda x: model.outer(model.inner(x))),
}


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("what", CHANGES)
def test_changes_are_seen(what: str, inside: bool) -> None:
    given = batches(lambda x, y: (x, y))
    model, optimizer = made()
    expected = trained(plainly(model, optimizer), lambda: CHANGES[what](model, optimizer), given)
    ours, optimizer_of_ours = made()
    with wf.Engine("cpu", memory="256MiB", lanes=2) if inside else contextlib.nullcontext() as engine:
        step = wf.Step(ours, step=loss, optimizer=optimizer_of_ours, engine=engine, audit=10**6)
        assert trained(step, lambda: CHANGES[what](ours, optimizer_of_ours), given) == expected
        step.close()
    assert all(torch.equal(one, other) for one, other in zip(ours.parameters(), model.parameters()))


FORMS: dict[str, list[Any]] = {
    "tuples": batches(lambda x, y: (x, y)),
    "lists": batches(lambda x, y: [x, y]),
    "dicts": batches(lambda x, y: {"x": x, "y": y}),
    "other rows": batches(lambda x, y: (x, y), lambda number: 6 if number < 20 else 5),
    "lists in the place of tuples": [[*b] if n > 20 else b for n, b in enumerate(batches(lambda x, y: (x, y)))],
    "other types": [(b[0].double(), b[1]) if n > 20 else b for n, b in enumerate(batches(lambda x, y: (x, y)))],
    "other strides": [(b[0].t().contiguous().t(), b[1]) if n > 20 else b for n, b in enumerate(batches(lambda x, y: (x, y)))],
    "other keys": [{"z": b["x"], "y": b["y"]} if n > 20 else b for n, b in enumerate(batches(lambda x, y: {"x": x, "y": y}))],
}


@pytest.mark.parametrize("form", FORMS)
def test_batches_of_each_form(form: str) -> None:
    expected = trained(plainly(*made()), lambda: None, FORMS[form])
    model, optimizer = made()
    assert trained(wf.Step(model, step=loss, optimizer=optimizer, audit=10**6), lambda: None, FORMS[form]) == expected


def test_a_batch_that_lies_over_the_weights() -> None:
    def over(model: Any, number: int) -> Any:
        x = model.inner.weight.detach()[:6] if number > 20 else torch.ones(6, 4)
        return x, torch.zeros(6, 2)

    found = []
    for kind in (plainly, lambda model, optimizer: wf.Step(model, step=loss, optimizer=optimizer, audit=10**6)):
        model, optimizer = made()
        step = kind(model, optimizer)
        found.append([float(step(over(model, number))[0]) for number in range(STEPS)])
    assert found[0] == found[1]


def test_what_never_settles() -> None:
    def asks(model: nn.Module, batch: Any) -> Any:
        value = F.mse_loss(model(batch[0]), batch[1])
        return value * 2 if bool((batch[0] > 0).all()) else value

    for settings in ({"step": loss, "accumulate": 2}, {"step": asks}):
        model, optimizer = made()
        step = wf.Step(model, optimizer=optimizer, audit=10**6, **settings)
        for batch in batches(lambda x, y: (x, y)):
            step(batch)
            assert not settles(step)


def test_audits_that_are_due_are_made() -> None:
    model, optimizer = made()
    step = wf.Step(model, step=loss, optimizer=optimizer, audit=7)
    for batch in batches(lambda x, y: (x, y)):
        step(batch)
    assert step.audit.steps == STEPS and step.audit.passed == -(-STEPS // 7) and step.steps == STEPS


def test_a_step_that_fails_counts_for_audits() -> None:
    steps = []
    for settled in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, audit=10**6)
        good, bad = (torch.ones(3, 2, dtype=torch.long), torch.zeros(3, dtype=torch.long)), torch.full((3, 2), 9)
        for _ in range(10):
            step(good)
        assert settles(step)
        step._settled = step._settled if settled else None
        with pytest.raises(IndexError):
            step((bad, good[1]))
        assert not settles(step)
        step(good)
        steps.append((step.audit.steps, step.steps, float(step(good))))
    assert steps[0] == steps[1]


def test_an_engine_that_changes_its_mind() -> None:
    given = batches(lambda x, y: (x, y))
    with wf.Engine("cpu", memory="256MiB", lanes=1) as engine:
        model, optimizer = made()
        step = wf.Step(model, step=loss, optimizer=optimizer, engine=engine, audit=10**6)
        for batch in given:
            step(batch)
        assert settles(step) and step._settled.holds()  # type: ignore[union-attr]
        assert step.job is not None
        engine.set_policy(step.job, ResourcePolicy("opportunistic", 128 << 20))
        assert not step._settled.holds()  # type: ignore[union-attr]
        step(given[0])
        step(given[0])
        assert settles(step) and step._settled.holds()  # type: ignore[union-attr]
        other = wf.Step(made()[0], step=loss, optimizer=torch.optim.SGD(made()[0].parameters(), lr=0.1), engine=engine)
        other.close()
        step(given[0])
        step.close()
        with pytest.raises(JobCancelled):
            step(given[0])
