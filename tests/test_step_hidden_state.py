"""Values that a step reads from every kind of place: a change between two steps is noticed, and trials that differ share nothing."""

from __future__ import annotations

import array
import collections
import enum
import functools
import math
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.support import Net, same_bits


@pytest.fixture(autouse=True)
def _afresh(no_captures: Any) -> None:
    """No verdict is taken over from an earlier test."""


@dataclass
class Place:
    """Where a number lies: ``make`` puts it there, ``read`` is what the step does with the place, ``change`` replaces the number."""

    make: Callable[[float], Any]
    read: Callable[[Any], float]
    change: Callable[[Any, float], Any]


class Box:
    shared = 1.0

    def __init__(self, value: float = 0.0) -> None:
        self.value = value

    def get(self) -> float:
        return self.value


class Slotted:
    __slots__ = ("__hidden", "value")

    def __init__(self, value: float) -> None:
        self.value = self.__hidden = value

    def put(self, value: float) -> None:
        self.__hidden = value

    def hidden(self) -> float:
        return self.__hidden


class ListOf(list[float]):
    pass


class TupleOf(tuple[float, ...]):
    value: float


class DictOf(dict[str, float]):
    value: float

    def __getitem__(self, key: str) -> float:
        return 2.0 * super().__getitem__(key)


class IntOf(int):
    value: float


class FloatOf(float):
    value: float

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 0


class StrOf(str):
    value: float


class SetOf(frozenset[float]):
    value: float


class Kind(enum.Enum):
    ONLY = 1


def holding(kind: Any, *content: Any) -> Callable[[float], Any]:
    def make(value: float) -> Any:
        made = kind(*content)
        made.value = value
        return made

    return make


def attribute(make: Callable[[float], Any]) -> Place:
    return Place(make, lambda place: place.value, lambda place, value: setattr(place, "value", value))


def entry(make: Callable[[float], Any], key: Any) -> Place:
    return Place(make, lambda place: place[key], lambda place, value: place.__setitem__(key, value))


def function_with(value: float) -> Any:
    def function(given: float = value, *, named: float = value) -> tuple[float, float]:
        return given, named

    function.value = value  # type: ignore[attr-defined]
    return function


def coded(value: float) -> Any:
    return eval(f"lambda: {value}")


def wrapped(value: float) -> Any:
    @functools.wraps(coded(value))
    def outer() -> float:
        return outer.__wrapped__()  # type: ignore[attr-defined,no-any-return]

    return outer


def ordered(value: float) -> Any:
    other = 1.25 - value
    return collections.OrderedDict([("a", value), ("b", other)] if value == 1.0 else [("b", value), ("a", other)])


def make_class(value: float) -> Any:
    class Meta(type):
        def __len__(cls) -> int:
            return 1

    class Settings(metaclass=Meta):
        scale = value

    return Settings


def with_class(value: float) -> Any:
    class One(Box):
        shared = value

    return One()


def as_module(value: float) -> Any:
    module = types.ModuleType("settings_of_a_test")
    module.value = value  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    return module


def imported(place: Any) -> float:
    import settings_of_a_test  # type: ignore[import-not-found]

    return settings_of_a_test.value  # type: ignore[no-any-return]


def imported_from(place: Any) -> float:
    from settings_of_a_test import value

    return value  # type: ignore[no-any-return]


def chained(value: float) -> Any:
    return collections.ChainMap({}, {"a": value})


def proxied(value: float) -> Any:
    return types.MappingProxyType({"a": value})


def put_behind(place: Any, value: float) -> None:
    place.maps[1]["a"] = value


def in_module(value: float) -> Any:
    module = nn.Module()
    module.part = nn.Identity()
    module.part.value = value
    return module


def replace_part(place: Any, value: float) -> None:
    place.part = in_module(value).part


def in_environment(value: float) -> Any:
    os.environ["VALUE_OF_A_TEST"] = str(value)


def shown(value: float) -> Any:
    box = Box(value)
    return box.get


def kept_weakly(value: float) -> Any:
    box = Box(value)
    return box, weakref.ref(box)


def turned(place: Any, value: float) -> None:
    place.__dict__ = {"value": value}


def other_class(place: Any, value: float) -> None:
    place.__class__ = type(with_class(value))


def array_of(value: float) -> Any:
    return np.array([value, 3.0])


def put_first(place: Any, value: float) -> None:
    place[0] = value


def scaled_member(value: float) -> Any:
    Kind.ONLY.scale = value  # type: ignore[attr-defined]
    return Kind.ONLY


PLACES = {
    "attribute of a function": attribute(function_with),
    "default of a function": Place(function_with, lambda f: f()[0], lambda f, v: setattr(f, "__defaults__", (v,))),
    "named default of a function": Place(function_with, lambda f: f()[1], lambda f, v: f.__kwdefaults__.update(named=v)),
    "other named defaults of a function": Place(
        function_with, lambda f: f()[1], lambda f, v: setattr(f, "__kwdefaults__", {"named": v})
    ),
    "code of a function": Place(coded, lambda f: f(), lambda f, v: setattr(f, "__code__", coded(v).__code__)),
    "wrapped function": Place(wrapped, lambda f: f(), lambda f, v: setattr(f, "__wrapped__", coded(v))),
    "list": entry(lambda value: [value], 0),
    "attribute of a list": attribute(holding(ListOf)),
    "attribute of a tuple": attribute(holding(TupleOf)),
    "attribute of an int": attribute(holding(IntOf, 1)),
    "attribute of a float": attribute(holding(FloatOf, 1.0)),
    "attribute of a str": attribute(holding(StrOf, "a")),
    "attribute of a frozenset": attribute(holding(SetOf)),
    "attribute of a dict": attribute(holding(DictOf)),
    "entry of a dict with its own way to read": entry(lambda value: DictOf(a=value), "a"),
    "order of a dict": Place(
        lambda value: {"a": value, "b": 1.25 - value},
        lambda place: next(iter(place.values())),
        lambda place, value: place.__setitem__("a", place.pop("a")),
    ),
    "order of an OrderedDict": Place(
        ordered, lambda place: next(iter(place.values())), lambda place, value: place.move_to_end(next(iter(place)))
    ),
    "factory of a defaultdict": Place(
        lambda value: collections.defaultdict(coded(value)),
        lambda place: place.default_factory(),
        lambda place, value: setattr(place, "default_factory", coded(value)),
    ),
    "set": Place(
        lambda value: {"a" if value == 1.0 else "b"},
        lambda place: 1.0 if "a" in place else 0.25,
        lambda place, value: (place.add("b"), place.remove("a")),
    ),
    "deque": entry(lambda value: collections.deque([value, 1.0], maxlen=2), 0),
    "UserDict": entry(lambda value: collections.UserDict(a=value), "a"),
    "ChainMap": Place(chained, lambda place: place["a"], put_behind),
    "bytearray": Place(
        lambda value: bytearray([int(4 * value)]),
        lambda place: place[0] / 4,
        lambda place, value: place.__setitem__(0, int(4 * value)),
    ),
    "array": entry(lambda value: array.array("d", [value]), 0),
    "memoryview": entry(lambda value: memoryview(array.array("d", [value])), 0),
    "NumPy's array": Place(array_of, lambda place: float(place[0]), put_first),
    "part of NumPy's array": Place(lambda value: np.array([value] * 6)[::2], lambda place: float(place[0]), put_first),
    "NumPy's array of objects": Place(lambda value: np.array([value, None]), lambda place: place[0], put_first),
    "object": attribute(Box),
    "all attributes of an object": Place(Box, lambda place: place.value, turned),
    "class of an object": Place(with_class, lambda place: place.shared, other_class),
    "attribute that hides one of the class": Place(
        lambda value: Box() if value == 1.0 else holding_shared(value),
        lambda place: place.shared,
        lambda place, value: setattr(place, "shared", value),
    ),
    "slot": attribute(Slotted),
    "hidden slot": Place(Slotted, lambda place: place.hidden(), lambda place, value: place.put(value)),
    "class": Place(make_class, lambda place: place.scale, lambda place, value: setattr(place, "scale", value)),
    "metaclass": Place(
        make_class,
        lambda place: place.scale if len(place) == 1 else 0.25,
        lambda place, value: setattr(type(place), "__len__", lambda cls: 2),
    ),
    "member of an enum": Place(scaled_member, lambda place: place.scale, lambda place, value: setattr(place, "scale", value)),
    "keyword of a partial": Place(
        lambda value: functools.partial(dict, a=value),
        lambda place: place()["a"],
        lambda place, value: place.keywords.update(a=value),
    ),
    "object of a bound method": Place(shown, lambda place: place(), lambda place, value: setattr(place.__self__, "value", value)),
    "object of a builtin method": Place(
        lambda value: [value].__getitem__, lambda place: place(0), lambda place, value: place.__self__.__setitem__(0, value)
    ),
    "SimpleNamespace": attribute(lambda value: types.SimpleNamespace(value=value)),
    "imported module": Place(as_module, imported, lambda place, value: setattr(place, "value", value)),
    "imported name": Place(as_module, imported_from, lambda place, value: setattr(place, "value", value)),
    "attribute of a tensor": attribute(lambda value: holding(torch.ones, 2)(value)),
    "part of another module": Place(in_module, lambda place: place.part.value, replace_part),
    "environment": Place(
        in_environment, lambda place: float(os.environ["VALUE_OF_A_TEST"]), lambda place, value: in_environment(value)
    ),
}


def holding_shared(value: float) -> Any:
    box = Box()
    box.shared = value
    return box


BATCHES = [(torch.randn(4, 6), torch.randint(0, 3, (4,))) for _ in range(4)]


def trained(place: Place, eager: bool, values: Iterator[float] | list[float], first: float = 1.0) -> Any:
    """Losses of steps whose loss is scaled by what lies in the place, the parameters behind them, and why it was not captured."""
    torch.manual_seed(0)
    model, held, read = Net(), place.make(first), place.read
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

    def compute(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) * read(held)

    step = None if eager else wf.Step(model, optimizer=optimizer, step=compute)
    losses = []
    for batch, value in zip(BATCHES, values):
        if value != first:
            place.change(held, value)
            first = value
        if step is not None:
            losses.append(step(batch))
            continue
        loss = compute(model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())], None if step is None else step.opaque_reason


@pytest.mark.parametrize("name", sorted(PLACES))
def test_changed_between_two_steps(name: str) -> None:
    place = PLACES[name]
    expected, _ = trained(place, True, [1.0, 1.0, 0.25, 0.25])
    given, reason = trained(place, False, [1.0, 1.0, 0.25, 0.25])
    assert all(map(same_bits, given, expected)) and reason is None
    assert not same_bits(expected[-1], trained(place, True, [1.0] * 4)[0][-1]), "the change must show"


@pytest.mark.parametrize("name", sorted(PLACES))
def test_two_trials_that_differ_in_it(name: str) -> None:
    place = PLACES[name]
    for value in (1.0, 0.25, 1.0):
        expected, _ = trained(place, True, [value] * 2, value)
        given, reason = trained(place, False, [value] * 2, value)
        assert all(map(same_bits, given, expected)) and reason is None


class Counting(nn.Module):
    """Counts its own calls in a place, and computes with the number."""

    def __init__(self, held: Any, count: Callable[[Any], float]) -> None:
        super().__init__()
        self.linear, self.held, self.count = nn.Linear(6, 3), held, count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) / self.count(self.held)


def added(place: Any) -> float:
    place[0] += 1
    return float(place[0])


def called(function: Any) -> float:
    function.calls = getattr(function, "calls", 0) + 1
    return float(function.calls)


def turned_over(place: Any) -> float:
    place.move_to_end(next(iter(place)))
    return float(next(iter(place.values())))


def exchanged(place: Any) -> float:
    number = place.pop() + 1.0
    place.add(number)
    return number


COUNTERS: dict[str, tuple[Callable[[], Any], Callable[[Any], float]]] = {
    "bytearray": (lambda: bytearray(1), added),
    "array": (lambda: array.array("i", [0]), added),
    "NumPy's array": (lambda: np.zeros(1), added),
    "NumPy's array of objects": (lambda: np.array([0, None]), added),
    "deque": (lambda: collections.deque([0]), added),
    "set": (lambda: {0.0}, exchanged),
    "function": (lambda: function_with(1.0), called),
    "object": (lambda: types.SimpleNamespace(), called),
    "list of a class": (lambda: ListOf([0.0]), added),
    "OrderedDict": (lambda: collections.OrderedDict(a=1.0, b=2.0, c=3.0), turned_over),
    "tensor": (lambda: torch.ones(2), called),
    "parameter": (lambda: nn.Parameter(torch.ones(2)), called),
}


@pytest.mark.parametrize("name", sorted(COUNTERS))
@pytest.mark.parametrize("hook", [False, True], ids=["", "with a hook"])
def test_a_step_that_counts_in_it_runs_eagerly(name: str, hook: bool) -> None:
    """A module that has a hook before its forward, too: of such a module only what torch's own hooks put there comes anew."""
    make, count = COUNTERS[name]

    def run(eager: bool) -> Any:
        torch.manual_seed(0)
        model = Counting(make(), count)
        if hook:
            model.register_forward_pre_hook(lambda module, given: None)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        step = None if eager else wf.Step(model, optimizer=optimizer, loss=F.cross_entropy)
        losses = []
        for x, y in BATCHES:
            if step is not None:
                losses.append(step((x, y)))
                continue
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses, step

    (expected, _), (given, step) = run(True), run(False)
    assert all(map(same_bits, given, expected)) and step.opaque_reason is not None


@pytest.mark.parametrize("value", [0.0, -0.0, math.nan, 1, 1.0, True])
def test_numbers_count_by_their_bits(value: Any) -> None:
    """-0.0 is not 0.0, 1 neither 1.0 nor True, and NaN equals itself: no capture is made for it again."""
    place = Place(lambda _: [value], lambda held: 1.0 if str(held[0]) == str(value) else 0.0, lambda *_: None)
    expected, _ = trained(place, True, [1.0] * 2)
    for _ in range(2):
        assert all(map(same_bits, trained(place, False, [1.0] * 2)[0], expected))


def test_a_patch_of_a_librarys_class_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(eager: bool) -> Any:
        place = Place(lambda value: None, lambda held: 1.0, lambda held, value: patch(value))

        def patch(value: float) -> None:
            plain = nn.Linear.forward
            monkeypatch.setattr(nn.Linear, "forward", lambda self, x: plain(self, x) * value)

        found = trained(place, eager, [1.0, 1.0, 0.25, 0.25])[0]
        monkeypatch.undo()
        return found

    assert all(map(same_bits, run(False), run(True)))


def test_a_patch_of_a_librarys_function_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(eager: bool) -> Any:
        def patch(held: Any, value: float) -> None:
            monkeypatch.setattr(torch.special, "expit", lambda x: x * value)

        place = Place(lambda value: None, lambda held: torch.special.expit(torch.ones(())), patch)  # type: ignore[arg-type,return-value]
        found = trained(place, eager, [1.0, 1.0, 0.25, 0.25])[0]
        monkeypatch.undo()
        return found

    assert all(map(same_bits, run(False), run(True)))
