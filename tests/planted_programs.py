"""Small programs whose hidden state changes between two steps: one for each kind of place that a capture is guarded by."""

from __future__ import annotations

import logging
import math
import string
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

from tests.support import Trained, train_eager, train_step

CHANGED_BEFORE = 3  # the step before which the state changes
factor = 1.5  # a global that a step reads
level_of = logging.getLogger("waterflow_tests.planted")
many = [1.5] * 2000  # more than a capture looks into


class Slotted:
    """An object without a dict."""

    __slots__ = ("factor",)


class Scale:
    """An object whose class says something."""

    factor = 1.5

    def __init__(self) -> None:
        self.own = 1.0


class Net(nn.Module):
    """A layer and places for hidden state."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.factor = 1.5
        self.named = {"factor": 1.5}
        self.listed = [1.5]
        self.slotted = Slotted()
        self.slotted.factor = 1.5
        self.scale = Scale()
        self.array = np.array([1.5])
        self.register_buffer("beside", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


Act = Callable[[Net, Optimizer], Any]


@dataclass
class Program:
    """What a step computes beside the layer, and how its state changes; ``undo`` is for what outlives the model."""

    factor: Callable[[Net], Any] = lambda model: 1.0
    change: Act = lambda model, optimizer: None
    undo: Callable[[], None] = lambda: None
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 0.1})
    batches: Callable[[int], Any] | None = None
    step: Callable[[Any, Any], Any] | None = None

    def run(self, way: Any, **how: Any) -> Trained:
        """Train by ``train_eager`` or ``train_step``."""
        factor_of = self.factor  # alone: the step is not to hold what changes its state
        compute = self.step or (lambda model, batch: F.cross_entropy(model(batch[0]) * factor_of(model), batch[1]))

        def make() -> tuple[nn.Module, Optimizer]:
            model = Net()
            return model, SGD(model.parameters(), **self.options)

        def during(model: Any, optimizer: Optimizer) -> Callable[[int], None]:
            return lambda number: self.change(model, optimizer) if number == CHANGED_BEFORE else None

        try:
            trained: Trained = way(make, _batches(self.batches), step=compute, during=during, **how)
        finally:
            self.undo()
        return trained


def _batches(more: Callable[[int], Any] | None) -> list[Any]:
    random = torch.Generator().manual_seed(1)
    plain = [(torch.randn(5, 6, generator=random), torch.randint(4, (5,), generator=random)) for _ in range(5)]
    return [one if more is None else (*one, more(number)) for number, one in enumerate(plain)]


def eager_and_step(program: Program, **how: Any) -> tuple[Trained, Trained]:
    """Both ways of one program."""
    return program.run(train_eager), program.run(train_step, **how)


def _set(holder: Any, name: str, value: Any) -> Act:
    return lambda model, optimizer: setattr(holder, name, value)


def closure() -> Program:
    """A variable of an enclosing function."""
    held = 1.5

    def change(model: Net, optimizer: Optimizer) -> None:
        nonlocal held
        held = 2.0

    def undo() -> None:
        nonlocal held
        held = 1.5

    return Program(lambda model: held, change, undo)


def defaults() -> Program:
    """A function's defaults."""

    def scale(value: float = 1.5) -> float:
        return value

    return Program(lambda model: scale(), _set(scale, "__defaults__", (2.0,)), lambda: setattr(scale, "__defaults__", (1.5,)))


def _globals(value: float) -> None:
    globals()["factor"] = value


def _dict_of_scale(model: Net, optimizer: Optimizer) -> None:
    model.scale.__dict__ = {"own": 2.0}


def _hook(model: Net, optimizer: Optimizer) -> None:
    model.layer.weight.register_hook(lambda gradient: gradient * 2)


def _other_memory(model: Net, optimizer: Optimizer) -> None:
    model.beside.data = torch.ones(2)


def _entry_of_group(name: str, value: Any) -> Act:
    return lambda model, optimizer: optimizer.param_groups[0].update({name: value})


def _process_hook() -> Program:
    handles: list[Any] = []

    def change(model: Net, optimizer: Optimizer) -> None:
        handles.append(nn.modules.module.register_module_forward_hook(_doubled))

    return Program(change=change, undo=lambda: handles.pop().remove() if handles else None)


def _doubled(module: nn.Module, given: Any, result: Any) -> Any:
    return result * 2 if isinstance(module, nn.Linear) else None


def _of_number(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]) * batch[2], batch[1])


def _of_keys(model: Any, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]) * next(iter(batch[2])), batch[1])


def guarded() -> dict[str, Program]:
    """By kind of the C++ guards."""
    return {
        "entry": Program(lambda m: factor, lambda m, o: _globals(2.0), lambda: _globals(1.5)),
        "dict": Program(lambda m: m.named["factor"], lambda m, o: m.named.update(factor=2.0)),
        "items": Program(lambda m: m.listed[0], lambda m, o: m.listed.__setitem__(0, 2.0)),
        "cell": closure(),
        "member": Program(lambda m: m.slotted.factor, lambda m, o: setattr(m.slotted, "factor", 2.0)),
        "object": Program(lambda m: m.scale.own, _dict_of_scale),
        "function": defaults(),
        "cls": Program(lambda m: m.scale.factor, _set(Scale, "factor", 2.0), lambda: setattr(Scale, "factor", 1.5)),
        "bytes": Program(lambda m: float(m.array[0]), lambda m, o: m.array.__setitem__(0, 2.0)),
        "hooks": Program(change=_hook),
    }


def of_momentum(before: float, after: float) -> Program:
    """A number that may change, but not to or from zero."""
    return Program(change=_entry_of_group("momentum", after), options={"lr": 0.1, "momentum": before})


def of_key() -> dict[str, Program]:
    """By part of the structure key."""
    return {
        "model": Program(lambda m: m.factor, lambda m, o: setattr(m, "factor", 2.0)),
        "compute": closure(),
        "optimizer": Program(change=_entry_of_group("maximize", True)),
        "process": _process_hook(),
    }


def by_name() -> Program:
    """An entry of a module, whose name no code spells."""
    return Program(lambda m: getattr(math, "".join("tau")), _set(math, "tau", 2.0), _set_tau)


def _set_tau(value: float = math.tau) -> None:
    math.tau = value  # type: ignore[misc]


def of_class() -> Program:
    """What a library's class says, to which no name leads."""
    return Program(
        lambda m: 1.0 + len(getattr(string, "".join("Template")).delimiter),
        lambda m, o: setattr(string.Template, "delimiter", "%%"),
        lambda: setattr(string.Template, "delimiter", "$"),
    )


def of_forms() -> Program:
    """The shape of a tensor that no operation reads."""
    return Program(lambda m: m.beside.shape[0], _other_memory)


def of_batch() -> dict[str, Program]:
    """By what of a batch changes."""
    return {
        "a number": Program(batches=lambda number: 1.5 if number < CHANGED_BEFORE else 2.0, step=_of_number),
        "its keys": Program(batches=lambda number: {1 + number // CHANGED_BEFORE: torch.ones(1)}, step=_of_keys),
    }


def _twice(model: Net, optimizer: Optimizer) -> None:
    many[0] = 2.0
    many.append(3.0)


def _once() -> None:
    many[:] = [1.5] * 2000


def _first(model: Net) -> float:
    for value in many:
        return value
    return 0.0


def _unpacked(model: Net) -> float:
    first, *_ = many
    return first


def _tested(model: Net) -> float:
    return 1.0 if empty_later else 2.0


empty_later = [1.5] * 2000


def judged() -> dict[str, Program]:
    """By kind of an operation that the judge of traces refuses, as it reads what nobody guards."""
    digits = sys.get_int_max_str_digits()
    of_many = {
        "ITEM": lambda m: many[0],
        "ITERATE": _first,
        "UNPACK": _unpacked,
        "CONTAINS": lambda m: 1.0 + (3.0 in many),
        "BINARY": lambda m: (many * 2)[0],
        "COMPARE": lambda m: 1.0 + (many == [1.5] * 2000),
        "EXTEND": lambda m: max([*many, 0.0]),
    }
    found = {kind: Program(factor, _twice, _once) for kind, factor in of_many.items()}
    found["TEST"] = Program(_tested, lambda m, o: empty_later.clear(), lambda: empty_later.__setitem__(slice(None), [1.5] * 2000))
    found["CALL"] = Program(
        lambda m: sys.get_int_max_str_digits() / 1000,
        lambda m, o: sys.set_int_max_str_digits(digits + 1000),
        lambda: sys.set_int_max_str_digits(digits),
    )
    found["ATTRIBUTE"] = Program(lambda m: 1.0 + level_of.level, lambda m, o: level_of.setLevel(10), lambda: level_of.setLevel(0))
    return found
