"""A step that keeps tensors where nobody looks runs eagerly, and nothing of the trace stays there."""

from __future__ import annotations

import collections
import functools
import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

import waterflow as wf
from tests.support import Net, compare, images
from waterflow.partition.capture import leaks
from waterflow.partition.guards import code_refs

# A library's code, into which no fingerprint looks, and which is taken to keep nothing.
SOURCE = """
import collections, functools, torch

kept = {}
rows = collections.deque()
found = set()
attribute = None
class Held:
    last = None
held = Held()

def made(n):
    return torch.tril(torch.ones(n, n))

@functools.lru_cache
def cached(n):
    return made(n)

@functools.lru_cache
def cached_parts(n):
    return [{"mask": made(n)}, (made(n), n)]

def in_dict(n):
    if n not in kept:
        kept[n] = made(n)
    return kept[n]

def in_default(n, known=[]):
    if not known:
        known.append(made(n))
    return known[0]

def in_deque(n):
    rows.append(made(n))
    return sum(rows) / len(rows)

def in_set(n):
    found.add(made(n))
    return sum(found) / len(found)

def in_global(n):
    global attribute
    if attribute is None:
        attribute = made(n)
    return attribute

def in_class(n):
    if Held.last is None:
        Held.last = made(n)
    return Held.last

def in_object(n):
    held.last = made(n)
    return held.last
"""


@pytest.fixture(autouse=True)
def _afresh(no_captures: Any) -> None:
    """No verdict is taken over from an earlier test."""


@pytest.fixture
def library() -> Iterator[Callable[[], Any]]:
    """Makes the library anew."""

    def load() -> Any:
        module = types.ModuleType("keeping_library")
        module.__file__ = code_refs.__file__
        sys.modules["keeping_library"] = module
        exec(compile(SOURCE, code_refs.__file__, "exec"), module.__dict__)
        return module

    pure = code_refs.PACKAGES
    code_refs.PACKAGES = pure | {"keeping_library"}
    yield load
    code_refs.PACKAGES = pure
    sys.modules.pop("keeping_library", None)


def making() -> tuple[nn.Module, Optimizer]:
    model = Net()
    return model, SGD(model.parameters(), lr=0.05, fused=True)


def stepping(mask: Callable[[int], Any]) -> Callable[[nn.Module, Any], torch.Tensor]:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        found = mask(8)
        return F.cross_entropy((found[1][0] if isinstance(found, list) else found) @ model(batch[0]), batch[1])

    return step


# What the first, eager step fills, the next ones find: they are captured.
FILLED = ["cached", "cached_parts", "in_dict", "in_default"]
KEPT = {"in_deque": "a deque", "in_set": "a set", "in_object": "object of Held.last"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*FILLED, *KEPT])
def test_places_in_libraries(kind: str, library: Any) -> None:
    """Each run begins with a library that keeps nothing; losses show what the steps found there."""

    def make() -> tuple[nn.Module, Optimizer]:
        library()
        return making()

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        import keeping_library  # type: ignore[import-not-found]

        return stepping(getattr(keeping_library, kind))(model, batch)

    compare(make, images(4), opaque=KEPT.get(kind), step=step)
    left = vars(sys.modules["keeping_library"])
    assert type(left["made"](2)) is torch.Tensor and not any(map(fake, [*left["rows"], *left["found"]]))
    assert len(left["rows"]) == (4 if kind == "in_deque" else 0)


def fake(tensor: torch.Tensor) -> bool:
    return type(tensor) is not torch.Tensor


def test_while_gradients_gather(library: Any) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        library()
        return making()

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        import keeping_library

        return stepping(keeping_library.cached)(model, batch)

    compare(make, images(4), opaque="the cache of cached", step=step, accumulate=2)


@pytest.mark.parametrize(("kind", "place"), [("in_global", "keeping_library.attribute"), ("in_class", "Held.last")])
def test_places_that_had_something_else(kind: str, place: str, library: Any) -> None:
    """What an attribute was is not known: whoever reads it is told where the tensor lies."""
    module = library()
    model, optimizer = making()
    mask = getattr(module, kind)
    job = wf.Step(model, step=stepping(mask), optimizer=optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(2):
        with pytest.raises(wf.StepError, match=rf"{place}\. Fill that place before the first step"):
            job(images(1)[0])
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
    module.attribute = module.Held.last = None
    assert job(images(1)[0]).isfinite()


def test_a_cache_of_the_users_own() -> None:
    @functools.lru_cache
    def mask(n: int) -> torch.Tensor:
        return torch.tril(torch.ones(n, n))

    def make() -> tuple[nn.Module, Optimizer]:
        mask.cache_clear()
        return making()

    compare(make, images(3), opaque="mask", step=stepping(mask))
    assert not fake(mask(8)) and mask.cache_info().misses == 1


_kept: dict[int, torch.Tensor] = {}


def _in_dict(n: int) -> torch.Tensor:
    if n not in _kept:
        _kept[n] = torch.tril(torch.ones(n, n))
    return _kept[n]


class _Holder:
    last: torch.Tensor | None = None


class _Below(_Holder):
    pass


def _in_base(n: int) -> torch.Tensor:
    if _Below.last is None:
        _Holder.last = torch.tril(torch.ones(n, n))
    assert _Below.last is not None
    return _Below.last


def _in_class(n: int) -> torch.Tensor:
    _Below.last = torch.tril(torch.ones(n, n)) if "last" not in vars(_Below) else _Below.last
    assert _Below.last is not None
    return _Below.last


def _in_default(n: int, known: list[torch.Tensor] = []) -> torch.Tensor:  # noqa: B006
    if not known:
        known.append(torch.tril(torch.ones(n, n)))
    return known[0]


@pytest.mark.parametrize("mask", [_in_dict, _in_base, _in_class, _in_default], ids=lambda mask: mask.__name__)
def test_the_users_own_places(mask: Callable[[int], torch.Tensor]) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        _kept.clear()
        _Holder.last = None
        if "last" in vars(_Below):
            del _Below.last
        (_in_default.__defaults__ or ([],))[0].clear()
        return making()

    # What is filled once is there at the next try.
    compare(make, images(5), opaque="" if mask is _in_class else None, step=stepping(mask))


def test_a_deque_that_is_closed_over() -> None:
    rows: collections.deque[torch.Tensor] = collections.deque(maxlen=5)

    def mask(n: int) -> torch.Tensor:
        rows.append(torch.tril(torch.ones(n, n)))
        return torch.stack(list(rows)).sum(0)

    def make() -> tuple[nn.Module, Optimizer]:
        rows.clear()
        return making()

    compare(make, images(5), opaque="", step=stepping(mask))
    assert len(rows) == 5


def test_a_capture_that_fails_leaves_nothing(library: Any) -> None:
    module = library()

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = stepping(module.cached_parts)(model, batch)
        return loss * 2 if loss.item() > 1.5 else loss

    compare(making, images(3), opaque="step reads the values", step=step)
    assert not fake(module.cached(2))


def test_nothing_is_searched_where_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looking through all of Python's objects takes longer than a capture."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Dropout(), nn.Linear(144, 4))
    collected: list[int] = []
    monkeypatch.setattr(leaks.gc, "collect", lambda generation=2: collected.append(generation))
    job = wf.Step(model, loss=F.cross_entropy, optimizer=SGD(model.parameters(), lr=0.1))
    job(images(1, shape=(3, 8, 8))[0])
    assert collected == [0] and gc.isenabled()


def test_nothing_is_searched_where_a_trace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither what it raised nor what that came from holds its tensors."""
    collected: list[int] = []
    collect = gc.collect
    monkeypatch.setattr(leaks.gc, "collect", lambda generation=2: collected.append(generation) or collect(generation))

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss * 2 if loss.item() > 1.5 else loss

    model, optimizer = making()
    job = wf.Step(model, step=step, optimizer=optimizer)
    job(images(1)[0])
    assert job.opaque_reason is not None and 2 not in collected
