"""What the user's code may read and call while a step is traced, and what makes it run eagerly, with the reason."""

from __future__ import annotations

import abc
import collections
import contextvars
import copy
import dataclasses
import enum
import functools
import itertools
import math
import operator
import os
import random
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import SGD, Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_in_torch_dispatch_mode

import waterflow as wf
from tests.program_runs import Eager
from tests.support import compare, images, same_bits
from waterflow import _C

BATCHES = images(4)
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("weight", default=1.0)
WEIGHT = 0.5
PRINT = print  # libraries that other tests import replace the builtin one
REGISTRY: dict[str, Any] = {"loss": F.cross_entropy, "weights": [0.5, 2.0]}
counted = itertools.count()


def make() -> tuple[nn.Module, Optimizer]:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    return model, SGD(model.parameters(), lr=0.05)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@functools.lru_cache
def cached(n: int) -> float:
    return 1.0 / n


class Kind(enum.Enum):
    ONE, TWO = 1.0, 2.0


@dataclasses.dataclass
class Settings:
    weight: float = 0.5
    names: tuple[str, ...] = ("a", "b")
    parts: dict[str, float] = dataclasses.field(default_factory=lambda: {"a": 0.5})

    @property
    def doubled(self) -> float:
        return self.weight * 2


class Weighted:
    base = 0.25

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.weight * self.base

    def __iter__(self) -> Iterator[float]:
        yield self.weight
        yield self.base


class Scope:
    def __enter__(self) -> float:
        return 0.5

    def __exit__(self, *given: object) -> None:
        pass


SETTINGS, WEIGHTED = Settings(), Weighted(0.5)


def _with_log(model: nn.Module, batch: Any) -> Any:
    log: list[Any] = []
    hidden = batch[0]
    for layer in model.children():
        hidden = layer(hidden)
        log.append(hidden.mean())
    named = {f"mean{i}": m.detach() for i, m in enumerate(log)}
    return F.cross_entropy(hidden, batch[1]) + sum(log), named


def _with_scope(model: nn.Module, batch: Any) -> torch.Tensor:
    with Scope() as weight, torch.no_grad():
        target = model(batch[0]).argmax(1)
    try:
        raise KeyError("a")
    except KeyError as error:
        weight += len(error.args)
    return F.cross_entropy(model(batch[0]), target) * weight


def _with_callbacks(model: nn.Module, batch: Any) -> torch.Tensor:
    weights = sorted(SETTINGS.parts.items(), key=operator.itemgetter(1))
    total = functools.reduce(operator.add, map(float, [w for _, w in weights]))
    first, *rest = WEIGHTED
    return loss_of(model, batch) * total * first + sum(p.abs().sum() for p in model.parameters()) * rest[0]


def _with_class(model: nn.Module, batch: Any) -> torch.Tensor:
    class Inner:
        scale = WEIGHT

        def of(self, value: torch.Tensor) -> torch.Tensor:
            return value * self.scale

    return Inner().of(loss_of(model, batch))


def _imports(model: nn.Module, batch: Any) -> torch.Tensor:
    import settings_of_a_test  # type: ignore[import-not-found]

    return loss_of(model, batch) * settings_of_a_test.parts[0]


CAPTURED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "a log of its own": _with_log,
    "contexts and exceptions": _with_scope,
    "callbacks of C functions": _with_callbacks,
    "a class made in the step": _with_class,
    "the environment": lambda model, batch: loss_of(model, batch) * len(os.environ.get("HOME", "")),
    "a list of a module that is imported in the step": _imports,
    "globals": lambda model, batch: loss_of(model, batch) * WEIGHT * REGISTRY["weights"][1],
    "a function of a registry": lambda model, batch: REGISTRY["loss"](model(batch[0]), batch[1]),
    "a dataclass with a property": lambda model, batch: loss_of(model, batch) * SETTINGS.doubled / len(SETTINGS.names),
    "an object that is called": lambda model, batch: WEIGHTED(loss_of(model, batch)),
    "an enumeration": lambda model, batch: loss_of(model, batch) * Kind.TWO.value + (Kind["ONE"] is Kind.ONE),
    "mathematics": lambda model, batch: loss_of(model, batch) * math.sqrt(2) + math.pi * np.sqrt(2.0),
    "a partial": lambda model, batch: functools.partial(F.cross_entropy, label_smoothing=0.1)(model(batch[0]), batch[1]),
    "text": lambda model, batch: loss_of(model, batch) * len(f"{WEIGHT:.2f}" + "-".join(SETTINGS.names).upper()),
    "tensors' methods": lambda model, batch: loss_of(model, batch) + model[0].weight.view(-1)[:3].square().sum() / batch[0].shape[0],
    "getattr": lambda model, batch: getattr(F, "cross_entropy")(model(batch[0]), batch[1]) * getattr(SETTINGS, "weight", 1.0),  # noqa: B009
    "comprehensions": lambda model, batch: loss_of(model, batch) * sum(w for w in [1.0, 2.0] if w > 1) * max({1, 2} | {3}),
}  # fmt: skip


@pytest.mark.parametrize("name", CAPTURED)
def test_what_is_captured(name: str) -> None:
    step = compare(make, BATCHES, step=CAPTURED[name]).step
    assert step is not None and step.opaque_reason is None


def _draws(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model, batch) * float(np.random.default_rng(0).random())


def _draws_of_its_own(model: nn.Module, batch: Any) -> torch.Tensor:
    return loss_of(model, batch) * random.Random(3).random()


def _changes_a_global(model: nn.Module, batch: Any) -> torch.Tensor:
    global told
    told = 1
    return loss_of(model, batch)


def _waits(model: nn.Module, batch: Any) -> torch.Tensor:
    with lock:
        return loss_of(model, batch)


lock = threading.Lock()
kept_weakly = weakref.ref(WEIGHTED)
model_elsewhere = weakref.WeakValueDictionary({"weights": WEIGHTED})
OPAQUE: dict[str, tuple[Callable[[nn.Module, Any], Any], str]] = {
    "time": (lambda model, batch: loss_of(model, batch) * (1 if time.perf_counter() else 2), "time.perf_counter"),
    "context": (lambda model, batch: loss_of(model, batch) * VARIABLE.get(), "ContextVar"),
    "print": (lambda model, batch: PRINT("a step") or loss_of(model, batch), "print"),
    "a generator": (_draws, "numpy.random"),
    "Python's generator": (_draws_of_its_own, "random"),
    "a cache": (lambda model, batch: loss_of(model, batch) * cached(2), "cached"),
    "a global": (_changes_a_global, "changes the global told"),
    "a lock": (_waits, "lock"),
    "a counter": (lambda model, batch: loss_of(model, batch) * next(counted), "count"),
    "identity": (lambda model, batch: loss_of(model, batch) * (id(model) % 7), "id"),
    "a file": (lambda model, batch: loss_of(model, batch) * len(open(os.devnull).read() or "a"), "open"),  # noqa: SIM115
    "weak references": (lambda model, batch: model_elsewhere["weights"](loss_of(model, batch)), "weak"),
    "a weak reference": (lambda model, batch: kept_weakly()(loss_of(model, batch)), "weakref"),
    "a method by name": (lambda model, batch: operator.methodcaller("mean")(loss_of(model, batch)), "methodcaller"),
    "names of the frame": (lambda model, batch: loss_of(model, batch) * len(globals()), "globals"),
    "frames": (lambda model, batch: loss_of(model, batch) * sys._getframe().f_lineno, "_getframe"),
    "executed text": (lambda model, batch: eval("loss(model, batch)", {"loss": loss_of, "model": model, "batch": batch}), "eval"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def settings(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    module = types.ModuleType("settings_of_a_test")
    module.parts, module.weight = [0.5], 0.5  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "settings_of_a_test", module)
    return module


@pytest.mark.parametrize("name", OPAQUE)
def test_what_is_not(name: str) -> None:
    function, reason = OPAQUE[name]
    model, optimizer = make()
    step = wf.Step(model, optimizer=optimizer, step=function)
    step(BATCHES[0])
    assert step.opaque_reason is not None and reason in step.opaque_reason
    assert __file__ in step.opaque_reason or name == "a counter", "the line is named"


def test_a_number_of_a_module_that_is_imported_in_the_step(settings: types.ModuleType) -> None:
    def function(model: nn.Module, batch: Any) -> torch.Tensor:
        import settings_of_a_test

        return loss_of(model, batch) * settings_of_a_test.weight

    def during(model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
        return lambda number: setattr(settings, "weight", 0.5 if number < 2 else 0.1)

    step = compare(make, BATCHES, step=function, during=during).step
    assert step is not None and step.opaque_reason is None


def test_an_entry_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the user's code names of a library is guarded."""
    model, _ = make()
    model[0].weight.requires_grad_(False)
    step = wf.Step(model, optimizer=SGD(model.parameters(), lr=0.0), step=lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    first = step(BATCHES[0])
    real = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda *given: real(*given) * 2)
    assert same_bits(step(BATCHES[0]), first * 2)


def test_two_jobs_that_differ_in_a_module_s_number(settings: types.ModuleType) -> None:
    """The second is not given the capture of the first."""

    def function(model: nn.Module, batch: Any) -> torch.Tensor:
        import settings_of_a_test

        return loss_of(model, batch) * settings_of_a_test.weight

    losses = []
    for weight in (1.0, 2.0, 1.0):
        settings.weight = weight  # type: ignore[attr-defined]
        torch.manual_seed(1)
        model, optimizer = make()
        losses.append(wf.Step(model, optimizer=optimizer, step=function)(BATCHES[0]))
    assert same_bits(losses[1], losses[0] * 2) and same_bits(losses[2], losses[0])


def _with_text(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = loss_of(model, batch)
    return loss * len(f"{loss}")


def _goes_on(model: nn.Module, batch: Any) -> torch.Tensor:
    try:
        weight = 1.0 if torch.equal(batch[0] * 2, batch[0]) else 0.5
    except Exception:
        weight = 3.0
    return loss_of(model, batch) * weight


REGISTERED: list[Any] = [abc.ABCMeta("Registered", (), {})]
BIG = types.SimpleNamespace(array=np.ones(100_000))
UNTRACED: dict[str, Callable[[nn.Module, Any], Any]] = {
    "a tensor's class": lambda model, batch: loss_of(model, batch) * (1.0 if type(batch[0]) is torch.Tensor else 0.5),
    "a tensor's class, as an attribute": lambda model, batch: loss_of(model, batch) * (batch[0].__class__ is torch.Tensor),
    "a tensor's text": _with_text,
    "where a tensor lies": lambda model, batch: loss_of(model, batch) * (1 + batch[0].storage_offset()),
    "an error of the trace": _goes_on,
    "a copy of what is not looked into": lambda model, batch: loss_of(model, batch) * float(copy.deepcopy(BIG).array[0]),
    "a state dict": lambda model, batch: loss_of(model, batch) * len(model.state_dict()),
    "a docstring": lambda model, batch: loss_of(model, batch) * len(cached.__doc__ or "a"),
}


@pytest.mark.needs_time("the error of a trace holds it, so that all objects are looked through")
@pytest.mark.parametrize("name", UNTRACED)
def test_what_a_trace_does_not_have(name: str) -> None:
    """It would see other values than an eager step, or none that are guarded."""
    batches = [(torch.cat([x, x], 1)[:, x.shape[1] :], y) for x, y in BATCHES]
    compare(make, batches, step=UNTRACED[name], opaque="")


def _warned() -> float:
    try:
        warnings.warn("a step", stacklevel=1)
    except UserWarning:
        return 0.1
    return 1.0


def _divided() -> float:
    try:
        return float(np.float64(1.0) / np.float64(0.0) > 0)
    except FloatingPointError:
        return 0.1


def _text_of_array() -> float:
    return float(str(np.array([0.123456]))[1:-1])


def _is_registered() -> float:
    return 0.1 if isinstance(Kind.ONE, REGISTERED[0]) else 1.0


SETTINGS_OF_THE_PROCESS: dict[str, tuple[Callable[[], float], Callable[[], Any], Callable[[], Any]]] = {
    "warnings": (_warned, lambda: warnings.simplefilter("ignore"), lambda: warnings.simplefilter("error")),
    "errors of NumPy's": (_divided, lambda: np.seterr(divide="ignore"), lambda: np.seterr(divide="raise")),
    "text of NumPy's": (_text_of_array, lambda: np.set_printoptions(8), lambda: np.set_printoptions(2)),
    "threads": (lambda: 1.0 / torch.get_num_threads(), lambda: torch.set_num_threads(1), lambda: torch.set_num_threads(2)),
    "an environment variable": (
        lambda: float(os.getenv("WATERFLOW_TEST_WEIGHT", "1.0")),
        lambda: os.environ.pop("WATERFLOW_TEST_WEIGHT", None),
        lambda: os.environ.update(WATERFLOW_TEST_WEIGHT="0.1"),
    ),
    "abstract classes": (
        _is_registered,
        lambda: REGISTERED.__setitem__(0, abc.ABCMeta("Registered", (), {})),
        lambda: REGISTERED[0].register(Kind),
    ),
    "nothing, distributed": (lambda: 1.0 - torch.distributed.is_initialized(), lambda: None, lambda: None),
}


@pytest.mark.parametrize("name", SETTINGS_OF_THE_PROCESS)
def test_a_setting_of_the_process(name: str) -> None:
    """What a step asks for is asked again before each call."""
    read, before, after = SETTINGS_OF_THE_PROCESS[name]
    threads = torch.get_num_threads()
    with warnings.catch_warnings(), np.errstate(), np.printoptions():

        def during(model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
            return lambda number: (before if number < 2 else after)()

        try:
            step = compare(make, BATCHES, step=lambda m, b: loss_of(m, b) * read(), during=during).step
        finally:
            torch.set_num_threads(threads)
            os.environ.pop("WATERFLOW_TEST_WEIGHT", None)
    assert step is not None and step.opaque_reason is None


@pytest.mark.parametrize(("owner", "name"), [(F, "relu"), (F, "cross_entropy"), (torch, "tanh"), (torch.Tensor, "square")])
def test_a_function_of_torch_s_that_is_replaced(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers call it, too; in a trace torch would call it by its name once more."""

    def function(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_of(model, batch) + torch.tanh(model[0].weight).square().sum()

    real = getattr(owner, name)

    def during(model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
        def change(number: int) -> None:
            value = real if number < 2 else lambda *given, **named: real(*given, **named) * 0.5
            monkeypatch.setattr(owner, name, value)

        return change

    compare(make, BATCHES, step=function, during=during, opaque=f"torch's {name} was replaced")


class Given(NamedTuple):
    images: torch.Tensor
    labels: torch.Tensor


def test_a_class_that_a_batch_brings() -> None:
    """What its class says is guarded."""

    def during(model: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
        return lambda number: setattr(Given, "weight", 1.0 if number < 2 else 0.1)

    batches = [Given(*batch) for batch in BATCHES]
    step = compare(make, batches, step=lambda m, b: loss_of(m, b) * b.weight, during=during).step
    assert step is not None and step.opaque_reason is None


def test_trials_that_differ_in_names() -> None:
    """A function's name is part of its key, as are the notes at a dataclass's fields."""

    def trial(name: str) -> set[str]:
        def measure(value: torch.Tensor) -> torch.Tensor:
            return value.detach().mean()

        @dataclasses.dataclass
        class Noted:
            a: float = dataclasses.field(default=1.0, metadata={"name": name})

        measure.__name__ = name
        model, optimizer = make()
        notes = Noted()

        def function(model: nn.Module, batch: Any) -> Any:
            (field,) = dataclasses.fields(notes)
            loss = loss_of(model, batch)
            return loss, {measure.__name__: measure(loss), field.metadata["name"] + "_noted": measure(loss)}

        return {*wf.Step(model, optimizer=optimizer, step=function)(BATCHES[0])[1]}

    assert trial("one") == {"one", "one_noted"} and trial("two") == {"two", "two_noted"}


def test_code_that_torch_keeps() -> None:
    """A hook of all modules is nothing that the step's key holds."""
    calls = collections.Counter[str]()

    def hook(module: nn.Module, given: Any) -> None:
        calls["hook"] += 1

    handle = register_module_forward_pre_hook(hook)
    try:
        model, optimizer = make()
        step = wf.Step(model, optimizer=optimizer, loss=F.cross_entropy)
        for batch in BATCHES:
            step(batch)
    finally:
        handle.remove()
    assert calls["hook"] >= 4 * len(BATCHES) and step.opaque_reason is not None


@pytest.mark.parametrize("twice", [lambda x: (x, x), lambda x: {"input": x, "target": x, "kind": "same"}])
def test_a_tensor_that_is_twice_in_a_batch_is_one(twice: Any) -> None:
    """So that a change of one changes the other, and ``is`` says so."""

    def compute(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y, *_ = batch.values() if isinstance(batch, dict) else batch
        x.mul_(0.5)
        return (model(x) - y).pow(2).mean() * (2.0 if x is y else 1.0)

    def train(make: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        step = make(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1, fused=True), step=compute)
        numbers = torch.Generator().manual_seed(1)
        losses = []
        for number in range(6):
            x = torch.randn(3, 4, generator=numbers)
            batch = twice(x)
            if number % 2:
                batch = {**batch, "target": x.clone()} if isinstance(batch, dict) else (x, x.clone())
            losses.append(step(batch))
        return [*losses, model.weight.detach()]

    assert all(map(same_bits, train(wf.Step), train(Eager())))


class DispatchMode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class FunctionMode(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchModeThatLeaves(DispatchMode):
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)


class FunctionModeThatLeaves(FunctionMode):
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)


ENTERED: list[Callable[[], Any]] = [
    torch.inference_mode, functools.partial(torch.device, "cpu"), torch._C.DisableTorchFunctionSubclass,
    DispatchMode, FunctionMode, DispatchModeThatLeaves, FunctionModeThatLeaves,
]  # fmt: skip


@pytest.mark.parametrize("enter", ENTERED, ids=str)
def test_what_a_refused_step_has_entered_is_left(enter: Callable[[], Any]) -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = loss_of(model, batch)
        with enter():
            PRINT(end="")
        return loss

    compare(make, BATCHES, opaque="print", step=step)
    assert not _C.modes_here() and not is_in_torch_dispatch_mode() and torch._C._is_torch_function_enabled()
