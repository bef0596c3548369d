"""Captures are shared between equal jobs, and between no others."""

from __future__ import annotations

import enum
import math
import threading
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

import waterflow as wf
from benchmarks.zoo import SMALL
from tests.support import MiB, Net, compare, images
from waterflow.executor.engine import Engine, within


@pytest.fixture(autouse=True)
def captures(no_captures: Any) -> Iterator[Any]:
    yield no_captures


def making(model: Callable[[], nn.Module], optimizer: Any = None) -> Any:
    def make() -> tuple[nn.Module, Optimizer]:
        made = model()
        return made, (optimizer or partial(AdamW, lr=0.01))(made.parameters())

    return make


def test_a_second_job_of_the_same_kind_captures_nothing(captures: Any) -> None:
    for seed in range(3):
        compare(making(partial(Net, dropout=0.3)), images(3), seed=seed)
    assert (captures.captures, captures.hits) == (1, 2)


@pytest.mark.slow
def test_a_hit_is_fast(captures: Any) -> None:
    zoo = SMALL["lstm_cell"]
    seconds = []
    for seed in range(4):
        torch.manual_seed(seed)
        model = zoo.build()
        job = wf.Step(model, step=zoo.step, optimizer=zoo.optimizer(model.parameters()))
        batch = zoo.batch(2, torch.Generator().manual_seed(seed))
        start = time.perf_counter()
        job(batch)
        seconds.append(time.perf_counter() - start)
    assert captures.captures == 1
    assert min(seconds[1:]) < seconds[0] / 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlp_dropout", "cnn_bn", "vit", "bert", "gpt2", "lstm", "lstm_cell", "mamba", "tacotron2"])
def test_models_of_the_zoo_are_captured_once(name: str, captures: Any) -> None:
    zoo = SMALL[name]
    batch = zoo.batch(2, torch.Generator().manual_seed(0))
    for _ in range(2):
        model = zoo.build()
        wf.Step(model, step=zoo.step, optimizer=zoo.optimizer(model.parameters()))(batch)
    assert (captures.captures, captures.hits) == (1, 1)


def test_jobs_that_start_at_once_capture_once(captures: Any) -> None:
    jobs = []
    for seed in range(6):
        torch.manual_seed(seed)
        model = Net(width=24)
        jobs.append(wf.Step(model, loss=F.cross_entropy, optimizer=AdamW(model.parameters(), lr=0.01)))
    threads = [threading.Thread(target=job, args=images(1)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [job.steps for job in jobs] == [1] * 6
    assert captures.captures == 1 and captures.hits == 5


def scaled_net(factor: float) -> type[nn.Module]:
    class Scaled(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * factor

    return Scaled


def attributed_net(factor: float) -> type[nn.Module]:
    class Scaled(Net):
        scale = factor

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    return Scaled


def property_net(factor: float) -> type[nn.Module]:
    class Scaled(Net):
        @property
        def scale(self) -> float:
            return factor

        @staticmethod
        def twice(x: torch.Tensor) -> torch.Tensor:
            return 2 * x

        @classmethod
        def times(cls, x: torch.Tensor, scale: float) -> torch.Tensor:
            return x * scale

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.times(self.twice(super().forward(x)), self.scale)

    return Scaled


def static_net(factor: float) -> type[nn.Module]:
    class Scaled(Net):
        @staticmethod
        def times(x: torch.Tensor) -> torch.Tensor:
            return factor * x

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.times(super().forward(x))

    return Scaled


def default_net(factor: float) -> type[nn.Module]:
    class Scaled(Net):
        def forward(self, x: torch.Tensor, scale: float = factor) -> torch.Tensor:
            return super().forward(x) * scale

    return Scaled


def based_net(factor: float) -> type[nn.Module]:
    return type("Scaled", (scaled_net(factor),), {})


def patched_net(factor: float) -> type[nn.Module]:
    Patched.forward = lambda self, x: Net.forward(self, x) * factor  # type: ignore[method-assign]
    return Patched


class Patched(Net):
    pass


NOTEBOOK = """
from tests.support import Net
def times(x): return x * {factor}
class Layer:
    def __call__(self, x): return x * {other}
class Scaled(Net):
    def forward(self, x): return Layer()(times(super().forward(x)))
"""


def cell_net(factor: float, where: str) -> type[nn.Module]:
    """Defined in a notebook whose cell is run again, with another number in a function or in a class."""
    numbers = {"factor": 1.0, "other": 1.0, where: factor}
    exec(NOTEBOOK.format(**numbers), notebook.__dict__)
    return notebook.Scaled


notebook = types.ModuleType("notebook")


KINDS = {
    "closed over": scaled_net,
    "class attribute": attributed_net,
    "property": property_net,
    "static method": static_net,
    "default": default_net,
    "base class": based_net,
    "method replaced": patched_net,
    "notebook's function": partial(cell_net, where="factor"),
    "notebook's class": partial(cell_net, where="other"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_classes_that_differ_in_a_number(kind: str, captures: Any) -> None:
    for factor in (1.0, 2.0, 1.0):
        compare(making(KINDS[kind](factor)), images(3))
    assert captures.captures in (2, 3)


@pytest.mark.parametrize("kind", ["closed over", "class attribute", "default"])
def test_class_defined_anew_in_every_trial(kind: str, captures: Any) -> None:
    """Equal code with equal values is shared, though the class objects differ."""
    for _ in range(3):
        compare(making(KINDS[kind](3.0)), images(2))
    assert captures.captures == 1


DIFFERENT: dict[str, tuple[Any, Any]] = {
    "dropout": (partial(Net, dropout=0.2), partial(Net, dropout=0.3)),
    "width": (partial(Net, width=8), partial(Net, width=9)),
    "activation": (lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU()), lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh())),
    "tied or not": (
        lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)),
        lambda: nn.Sequential(*[nn.Linear(6, 6)] * 2, nn.Linear(6, 4)),
    ),
    "frozen or not": (Net, lambda: frozen(Net())),
    "evaluated or not": (Net, lambda: Net().eval()),
    "negative zero": (lambda: slope(0.0), lambda: slope(-0.0)),
    "order of layers": (
        lambda: nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.ReLU()),
        lambda: nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Tanh()),
    ),
    "int or float": (lambda: Powered(2), lambda: Powered(2.5)),
    "enumeration": (lambda: Powered(Power.two), lambda: Powered(Power.three)),
    "nested settings": (lambda: Powered({"of": [1, 2]}), lambda: Powered({"of": [1, 3]})),
    "set of names": (lambda: Powered({"a", "b"}), lambda: Powered({"a", "b", "c"})),
    "data class": (lambda: Powered(Setting(2.0)), lambda: Powered(Setting(3.0))),
    "slots": (lambda: Powered(Slotted(2.0)), lambda: Powered(Slotted(3.0))),
    "function": (lambda: Powered(math.sqrt), lambda: Powered(math.exp)),
    "lambda": (lambda: Powered(lambda: 2.0), lambda: Powered(lambda: 3.0)),
    "tensor": (lambda: Powered(torch.tensor(2.0)), lambda: Powered(torch.tensor(3.0))),
    "double": (Net, lambda: Mixed().double()),
    "hook": (Net, lambda: hooked(Net())),
}


def frozen(model: Net) -> Net:
    model.first.requires_grad_(False)
    return model


def hooked(model: Net) -> Net:
    model.first.register_forward_hook(lambda module, args, output: output * 2)
    return model


def slope(value: float) -> nn.Module:
    class Slope(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.value = nn.Linear(6, 4), value

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.atan2(self.layer(x) * 0 + self.value, torch.full((), -1.0)) + self.layer(x)

    return Slope()


class Mixed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.last.weight.dtype))


class Power(enum.Enum):
    two = 2
    three = 3


@dataclass(frozen=True)
class Setting:
    value: float


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value: float) -> None:
        self.value = value


class Powered(Net):
    """Reads a number out of whatever it was given."""

    def __init__(self, given: Any) -> None:
        super().__init__()
        self.given = given

    def exponent(self) -> Any:
        given = self.given
        if isinstance(given, dict):
            return sum(given["of"])
        if isinstance(given, set):
            return len(given)
        if callable(given):
            return given(1.7) if given in (math.sqrt, math.exp) else given()
        return getattr(given, "value", given)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).abs().add(0.1).pow(self.exponent())


@pytest.mark.parametrize("kind", DIFFERENT)
def test_models_that_differ(kind: str, captures: Any) -> None:
    for model in DIFFERENT[kind]:
        compare(making(model), images(3))
    # A tensor that is neither parameter nor buffer is an input of its own.
    assert captures.captures == (1 if kind == "tensor" else 2)


@pytest.mark.parametrize("kind", ["dropout", "enumeration", "nested settings", "set of names", "data class"])
def test_models_that_do_not_differ(kind: str, captures: Any) -> None:
    for _ in range(2):
        compare(making(DIFFERENT[kind][0]), images(2))
    assert captures.captures == 1


OPTIMIZERS = {
    "class": (partial(Adam, lr=0.01, weight_decay=0.1), partial(AdamW, lr=0.01, weight_decay=0.1)),
    "decoupled": (
        partial(Adam, lr=0.01, weight_decay=0.1),
        partial(Adam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    ),
    "amsgrad": (partial(AdamW, lr=0.01), partial(AdamW, lr=0.01, amsgrad=True)),
    "maximize": (partial(SGD, lr=0.01), partial(SGD, lr=0.01, maximize=True)),
    "nesterov": (partial(SGD, lr=0.1, momentum=0.9), partial(SGD, lr=0.1, momentum=0.9, nesterov=True)),
    "momentum": (partial(SGD, lr=0.1), partial(SGD, lr=0.1, momentum=0.9)),
    "groups": (
        partial(SGD, lr=0.1),
        lambda parameters: SGD([{"params": [p], "lr": 0.1 / (i + 1)} for i, p in enumerate(parameters)]),
    ),
    "order": (partial(SGD, lr=0.1), lambda parameters: SGD([*parameters][::-1], lr=0.1)),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_optimizers_that_differ(kind: str, captures: Any) -> None:
    for optimizer in OPTIMIZERS[kind]:
        compare(making(Net, optimizer), images(4))
    assert captures.captures == 2


def test_numbers_of_optimizers_are_shared(captures: Any) -> None:
    for rate in (0.1, 0.2):
        compare(making(Net, partial(AdamW, lr=rate, weight_decay=rate, betas=(rate, 0.9), eps=rate)), images(3))
        compare(making(Net, partial(SGD, lr=rate, momentum=rate, dampening=rate)), images(3))
    assert captures.captures == 2


OPTIONS = {
    "accumulate": ({}, {"accumulate": 2}),
    "clip": ({"clip_grad_norm": 0.01}, {"clip_grad_norm": 0.02}),
    "clip value": ({"clip_grad_value": 0.01}, {"clip_grad_value": 0.02}),
    "autocast": ({}, {"autocast": torch.bfloat16}),
    "loss": ({"loss": F.cross_entropy}, {"loss": F.multi_margin_loss}),
    "partial": tuple({"loss": partial(F.cross_entropy, label_smoothing=s)} for s in (0.1, 0.2)),
    "module": tuple({"loss": nn.CrossEntropyLoss(label_smoothing=s)} for s in (0.1, 0.2)),
    "weights": tuple({"loss": nn.CrossEntropyLoss(weight=torch.tensor(w))} for w in ([1.0] * 4, [1.0, 2.0, 3.0, 4.0])),
}


@pytest.mark.parametrize("kind", OPTIONS)
def test_options_that_differ(kind: str) -> None:
    for options in OPTIONS[kind]:
        compare(making(Net), images(4), **options)


def test_losses_that_close_over_different_values(captures: Any) -> None:
    for weight in (1.0, 2.0, 1.0):
        compare(making(Net), images(3), loss=lambda output, target: weight * F.cross_entropy(output, target))  # noqa: B023
    assert captures.captures == 2


def test_losses_that_close_over_different_tensors() -> None:
    for value in (1.0, 2.0):
        weight = torch.full((4,), value)
        compare(making(Net), images(3), loss=lambda output, target: F.cross_entropy(output * weight, target))  # noqa: B023


def test_losses_that_close_over_different_modules() -> None:
    """Distillation: the teacher is not the student's own, and each student has another one."""
    for seed in (1, 2):
        torch.manual_seed(seed)
        teacher = Net().eval().requires_grad_(False)

        def step(model: nn.Module, batch: Any, teacher: nn.Module = teacher) -> torch.Tensor:
            return F.mse_loss(model(batch[0]), teacher(batch[0]))

        compare(making(Net), images(4), step=step)
        compare(making(Net), images(4), step=lambda m, b: F.mse_loss(m(b[0]), teacher(b[0])))  # noqa: B023


def test_methods_of_different_objects() -> None:
    class Scale:
        def __init__(self, value: float) -> None:
            self.value = value

        def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.value * F.cross_entropy(output, target)

        __call__ = loss

    for value in (1.0, 2.0):
        compare(making(Net), images(3), loss=Scale(value).loss)
        compare(making(Net), images(3), loss=Scale(value))


constant = 1.0
settings = types.SimpleNamespace(scale=1.0)
listed = [1.0]
modular = types.ModuleType("modular")


def helper() -> float:
    return constant


READERS: dict[str, Callable[[], float]] = {
    "number": lambda: constant,
    "object": lambda: settings.scale,
    "list": lambda: listed[0],
    "module": lambda: modular.scale,
    "through a function": lambda: helper(),
    "through a lambda": lambda: (lambda: constant)(),
    "default type": lambda: 1.0 + torch.zeros(()).element_size(),
}


def set_constants(value: float) -> None:
    global constant
    constant = settings.scale = listed[0] = modular.scale = value


@pytest.mark.parametrize("kind", READERS)
def test_globals_changed_between_captures(kind: str) -> None:
    read = READERS[kind]
    try:
        for value in (1.0, 3.0):
            set_constants(value)
            if kind == "default type":
                torch.set_default_dtype(torch.float32 if value == 1.0 else torch.float64)
            batches = [(x.to(torch.get_default_dtype()), y) for x, y in images(3)]
            compare(making(Net), batches, loss=lambda output, target: read() * F.cross_entropy(output, target))
    finally:
        torch.set_default_dtype(torch.float32)


def test_shared_between_engines_and_lanes(captures: Any) -> None:
    for lanes in (1, 2):
        with Engine(memory=64 * MiB, lanes=lanes) as engine, within(engine):
            compare(making(Net), images(3), engine=engine)
    compare(making(Net), images(3))
    assert captures.captures == 1


def test_one_job_in_many_shapes_beside_another() -> None:
    """Jobs share a capture and still have accumulators and state of their own."""
    batches = [images(1, size=size, seed=size)[0] for size in (8, 3, 8, 3)]
    ends = [compare(making(Net), batches, accumulate=2, seed=seed) for seed in (1, 2)]
    assert not torch.equal(ends[0].results[-1], ends[1].results[-1])
