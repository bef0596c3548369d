"""Whose code runs in a step is told by the file that it comes from, whatever it says of itself."""

from __future__ import annotations

import datetime
import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

import waterflow as wf
from tests.support import images
from waterflow.partition.guards.code_refs import in_library

BATCH = images(1)[0]


@pytest.fixture(autouse=True)
def _afresh(no_captures: Any) -> None:
    """No verdict is taken over from an earlier test."""


def losses(step: Callable[[nn.Module, Any], torch.Tensor], model: nn.Module, between: Any = lambda: None) -> wf.Step:
    """Five steps that change no weight, each with the bits of the eager one."""
    made = wf.Step(model, optimizer=SGD(model.parameters(), lr=0.0, fused=True), step=step)
    for _ in range(5):
        mine = made(BATCH).item()
        assert mine == step(model, BATCH).item()
        between()
    return made


def divided(count: list[int]) -> Callable[[Any], Any]:
    """Makes what divides the results of a function by a number that it looks up."""

    def around(original: Any) -> Any:
        @functools.wraps(original)
        def patched(*given: Any, **named: Any) -> Any:
            return original(*given, **named) / count[0]

        return patched

    return around


@pytest.mark.parametrize(
    ("owner", "name", "layer"),
    [(F, "gelu", nn.GELU()), (F, "relu", nn.ReLU()), (nn.LayerNorm, "forward", nn.LayerNorm(4)), (nn.Linear, "forward", nn.Tanh())],
    ids=["gelu", "relu", "LayerNorm", "Linear"],
)  # fmt: skip
def test_what_a_user_puts_around_a_function_of_torchs_is_the_users(
    owner: Any, name: str, layer: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``functools.wraps`` gives it the name and the module of torch's."""
    count = [1]
    monkeypatch.setattr(owner, name, divided(count)(getattr(owner, name)))

    def more() -> None:
        count[0] += 1

    losses(lambda m, b: F.cross_entropy(m(b[0]), b[1]), nn.Sequential(nn.Linear(6, 4), layer), more)


def test_what_a_library_puts_around_a_users_function_is_the_users() -> None:
    """It calls that, and says its name."""

    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * factors[0]

    factors = [1.0]
    quiet = torch.no_grad()(scale)
    assert not in_library(quiet) and in_library(torch.optim.SGD.step) and not in_library(losses)

    def double() -> None:
        factors[0] *= 2

    step = losses(lambda m, b: F.cross_entropy(m(b[0]) * quiet(b[0].mean()), b[1]), nn.Linear(6, 4), double)
    assert step.opaque_reason is None


@pytest.mark.parametrize("name", ["now", "utcnow", "today"])
@pytest.mark.filterwarnings("ignore:.*utcnow")
def test_methods_of_classes_in_c_are_not_torchs(name: str) -> None:
    model = nn.Linear(6, 4)
    seen = []

    def compute(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(getattr(datetime.datetime, name)())
        return F.cross_entropy(model(batch[0]), batch[1])

    step = wf.Step(model, optimizer=SGD(model.parameters(), lr=0.0, fused=True), step=compute)
    for number in range(3):
        step(BATCH)
        assert len(seen) == number + 1  # each step asks
    assert f"datetime.{name}" in (step.opaque_reason or "")


def test_static_methods_in_c_are_taken_for_what_they_belong_to() -> None:
    table = {"a": "b"}

    def compute(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) * len("ab".translate(str.maketrans(table)))

    assert losses(compute, nn.Linear(6, 4)).opaque_reason is None


SOURCE = """
import torch.nn as nn
EPOCH = 0
class Held:
    factor = 1.0
class Net(nn.Module):
    def __init__(self): super().__init__(); self.linear = nn.Linear(6, 4)
    def forward(self, x): return self.linear(x) / (1 + EPOCH)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], Any]]:
    """Makes modules of the user's own, under any name."""
    names: dict[str, Any] = {}
    monkeypatch.syspath_prepend(str(tmp_path))

    def make(name: str, file: str) -> Any:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(SOURCE)
        names[name] = sys.modules.pop(name, None)
        return importlib.import_module(name)

    yield make
    for name, before in names.items():
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before


@pytest.mark.parametrize(
    ("name", "file"),
    [("calendar", "calendar.py"), ("code", "code.py"), ("sched", "sched/__init__.py"), ("peft", "peft/__init__.py"),
     ("einops", "einops.py")],
)  # fmt: skip
def test_a_users_own_module_may_be_called_as_a_library_is(name: str, file: str, modules: Callable[[str, str], Any]) -> None:
    module = modules(name, file)

    def later() -> None:
        module.EPOCH += 1

    step = losses(lambda m, b: F.cross_entropy(m(b[0]), b[1]), module.Net(), later)
    assert step.opaque_reason is None


def test_a_users_module_may_be_called_as_machinery_is(modules: Callable[[str, str], Any]) -> None:
    """Objects of the classes of optuna, queues and logging are not looked into; those of a module ``queue_of_mine`` are."""
    module = modules("queue_of_mine", "queue_of_mine.py")
    held = module.Held()

    def later() -> None:
        held.factor += 1.0

    step = losses(lambda m, b: F.cross_entropy(m(b[0]), b[1]) * held.factor, nn.Linear(6, 4), later)
    assert step.opaque_reason is None


def test_code_without_a_path_is_of_the_module_that_it_runs_in() -> None:
    """As in programs that were frozen into one file, and of functions that a library makes from text."""
    space: dict[str, Any] = {"__name__": "here", "__file__": torch.__file__}
    for file in ("torch/nn/made.py", "<string>"):
        exec(compile("def made(): pass", file, "exec"), space)
        assert in_library(space["made"])
    exec(compile("def made(): pass", "<string>", "exec"), own := {"__name__": "torch"})
    assert not in_library(own["made"])


def test_a_class_says_what_it_likes() -> None:
    class Scale(nn.Module):
        factor = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.factor

    Scale.__module__ = "torch.nn.modules.activation"
    assert not in_library(Scale) and in_library(nn.ReLU)


def operator(gradient: Any, name: str) -> Any:
    @torch.library.custom_op(f"whose_code::{name}", mutates_args=())
    def scale(x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * 1.0

    scale.register_fake(lambda x, factor: torch.empty_like(x))
    scale.register_autograd(gradient, setup_context=_keep)
    return scale


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.factor = inputs[1]


def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
    return gradient * ctx.factor, None


def weights(step: Callable[[nn.Module, Any], torch.Tensor], between: Callable[[], None]) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    models = [nn.Linear(6, 4), nn.Linear(6, 4)]
    models[1].load_state_dict(models[0].state_dict())
    one, other = (SGD(m.parameters(), lr=0.1, fused=True) for m in models)
    made = wf.Step(models[0], optimizer=one, step=step)
    made(BATCH), _eager(models[1], other, step)
    between()
    made(BATCH), _eager(models[1], other, step)
    return models[0].weight, models[1].weight, made.opaque_reason


def _eager(model: nn.Module, optimizer: SGD, step: Any) -> None:
    step(model, BATCH).backward()
    optimizer.step()
    optimizer.zero_grad()


def test_the_gradient_of_an_operator_may_use_what_it_is_given() -> None:
    scale = operator(_backward, "given")
    mine, theirs, why = weights(lambda m, b: F.cross_entropy(scale(m(b[0]), 2.0), b[1]), lambda: None)
    assert torch.equal(mine, theirs) and why is None


@pytest.mark.parametrize("way", ["closure", "default"])
def test_the_gradient_of_an_operator_holds_something_that_changes(way: str) -> None:
    held = {"factor": 1.0}
    if way == "closure":
        scale = operator(lambda ctx, g: (g * held["factor"], None), way)
    else:
        scale = operator(lambda ctx, g, held=held: (g * held["factor"], None), way)
    step = lambda m, b: F.cross_entropy(scale(m(b[0]), 2.0), b[1])  # noqa: E731
    mine, theirs, why = weights(step, lambda: held.update(factor=0.0))
    assert torch.equal(mine, theirs)
    assert "pass them to the operator as arguments" in why


def test_the_gradient_of_an_operator_is_registered_anew() -> None:
    scale = operator(_backward, "anew")

    def anew() -> None:
        scale.register_autograd(lambda ctx, g: (g * 0.0, None), setup_context=_keep)

    mine, theirs, why = weights(lambda m, b: F.cross_entropy(scale(m(b[0]), 2.0), b[1]), anew)
    assert torch.equal(mine, theirs) and why is None
