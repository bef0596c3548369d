"""Keys of steps: equal for equal code, structure and settings; different, hashable and finite for all else."""

from __future__ import annotations

import copy
import threading
import time
import types
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.zoo import SMALL
from tests.support import Net
from waterflow.partition.guards.cache_key import Fingerprint, tensor_key
from waterflow.partition.guards.settings import ambient_key


def key(value: Any) -> Any:
    return Fingerprint().of(value)


PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3)
    | st.tuples(inner, inner),
    max_leaves=8,
)  # fmt: skip


@given(PLAIN)
def test_equal_values_have_equal_keys(value: Any) -> None:
    one, other = key(value), key(copy.deepcopy(value))
    assert one == other and hash(one) == hash(other)


def typed(value: Any) -> Any:
    """A value with the type of each of its parts; floats to the last bit."""
    if isinstance(value, (list, tuple)):
        return (type(value), *map(typed, value))
    if isinstance(value, dict):
        return (dict, *((k, typed(v)) for k, v in value.items()))
    return (type(value), value.hex() if isinstance(value, float) else value)


@given(PLAIN, PLAIN)
def test_different_values_have_different_keys(one: Any, other: Any) -> None:
    assert (key(one) == key(other)) == (typed(one) == typed(other))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SMALL))
def test_models_of_the_zoo(name: str) -> None:
    """Two of a kind have one key, and it is found quickly: it is asked for whenever something was replaced."""
    models = [SMALL[name].build() for _ in range(2)]
    start = time.perf_counter()
    one, other = map(key, models)
    assert time.perf_counter() - start < 2.0
    assert one == other and hash(one) == hash(other)


def test_no_two_models_of_the_zoo_are_alike() -> None:
    names = ["mlp_dropout", "cnn_bn", "vit", "bert", "gpt2", "lstm", "lstm_cell"]
    assert len({key(SMALL[name].build()) for name in names}) == len(names)


def test_cycles_end() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    other: list[Any] = [1]
    other.append(other)
    assert key(loop) == key(other)
    model = Net()
    model.parent = [model]  # type: ignore[assignment]
    assert hash(key(model)) is not None

    class Node:
        def __init__(self) -> None:
            self.next = self

    assert hash(key(Node())) is not None


def test_sharing_shows() -> None:
    one, other = [0], [0]
    assert key([one, one]) != key([one, other])
    layer = nn.Linear(2, 2)
    assert key(nn.Sequential(layer, layer)) != key(nn.Sequential(layer, nn.Linear(2, 2)))


def test_functions() -> None:
    def make(factor: float, default: float = 1.0) -> Any:
        def function(x: float, y: float = default, *, z: float = default) -> float:
            return x * factor * y * z

        return function

    assert key(make(1.0)) == key(make(1.0))
    assert key(make(1.0)) != key(make(2.0))
    assert key(make(1.0)) != key(make(1.0, 2.0))
    assert key(eval("lambda x: x + 1")) == key(eval("lambda x: x + 1")) != key(eval("lambda x: x + 2"))
    assert key(F.relu) == key(F.relu) != key(F.gelu)
    one, same, other = (partial(F.relu, inplace=value) for value in (True, True, False))
    assert key(one) == key(same) != key(other)


def test_functions_that_call_each_other() -> None:
    space: dict[str, Any] = {}
    exec("def odd(n): return n and even(n - 1)\ndef even(n): return not n or odd(n - 1)", space)
    assert hash(key(space["odd"])) is not None


def test_a_cell_that_is_not_filled_yet() -> None:
    def outer() -> Any:
        def inner() -> float:
            return later

        found = key(inner)
        later = 1.0
        return found, key(inner)

    before, after = outer()
    assert before != after


def test_identity_counts_where_nothing_can_be_seen() -> None:
    class Closed:
        __slots__ = ()

    one, other = Closed(), Closed()
    assert key(one) == key(one) != key(other)
    for value in (torch.Generator(), torch.ones(2), object(), types.ModuleType("m")):
        assert key(value) == key(value)
    assert key(torch.ones(2).to_sparse()) != key(torch.ones(2).to_sparse())
    assert key(torch.Generator()) != key(torch.Generator())


def test_what_counts_by_identity_never_comes_again() -> None:
    """An address may be given to another object: that must not be taken for the first."""
    found = set()
    for _ in range(100):
        found |= {key(torch.Generator()), key(torch.ones(2).to_sparse())}
    assert len(found) == 200
    fingerprint = Fingerprint()
    fingerprint.of(object())
    assert len(fingerprint.keep) == 1, "no weak reference to this one, so it must live on"


def test_a_key_does_not_keep_a_model() -> None:
    """What the key of a capture keeps is kept as long as the capture: no parameter may be among it."""
    fingerprint = Fingerprint()
    model = Net()
    parameters = {id(p) for p in model.parameters()}
    fingerprint.of(model)
    assert not any(id(value) in parameters or isinstance(value, nn.Module) for value in fingerprint.keep)


def test_tensors_by_shape_in_modules() -> None:
    x = torch.ones(4, 6)
    assert tensor_key(x) == tensor_key(torch.zeros(4, 6))
    different = [x.t(), x.double(), x[:, ::2], x.clone().requires_grad_(), torch.ones(4, 7), x.to("meta")]
    assert len({tensor_key(t) for t in [x, *different]}) == 7


@dataclass
class Settings:
    rate: float
    names: tuple[str, ...] = ()


def test_objects() -> None:
    assert key(Settings(1.0)) == key(Settings(1.0)) != key(Settings(2.0))
    assert key(Settings(1.0, ("a",))) != key(Settings(1.0, ("b",)))
    assert key({"a": 1, "b": 2}) != key({"a": 2, "b": 1})
    assert key({3, 1, 2}) == key({1, 2, 3}) != key({1, 2})


def test_what_is_around() -> None:
    plain = ambient_key("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert ambient_key("cpu") != plain
    assert ambient_key("cpu") == plain
    with sdpa_kernel(SDPBackend.MATH):
        assert ambient_key("cpu") != plain
    assert ambient_key("cpu") == plain
    torch.set_default_dtype(torch.float64)
    try:
        assert ambient_key("cpu") != plain
    finally:
        torch.set_default_dtype(torch.float32)


def test_it_tells_what_it_looked_into() -> None:
    """What it did not look into may change, and nobody would see."""
    lock, box, names = threading.Lock(), types.SimpleNamespace(value=[1.0]), types.ModuleType("settings")
    fingerprint = Fingerprint()
    fingerprint.of([lock, box, names, F.relu, nn.Linear, len, box.value.append])
    assert [fingerprint.cover(value) for value in (box, box.value, vars(box)["value"], 1.0)] == ["whole"] * 4
    assert [fingerprint.cover(value) for value in (lock, names)] == ["identity"] * 2
    assert [fingerprint.cover(value) for value in (F.gelu, F.relu, nn.Linear)] == [None, "library", "library"]
    assert set(fingerprint.opaque) >= {id(lock), id(names)} and fingerprint.cover(object()) is None


def test_it_tells_which_entries_of_a_module_it_looked_into() -> None:
    settings = types.ModuleType("settings")
    settings.scale, settings.shift = 1.0, 2.0  # type: ignore[attr-defined]
    space: dict[str, Any] = {"settings": settings}
    exec("def scaled(x): return settings.scale * x", space)
    fingerprint = Fingerprint()
    fingerprint.of(space["scaled"])
    assert fingerprint.cover(settings, "scale") == "whole" == fingerprint.cover(space, "settings")
    assert fingerprint.cover(settings, "shift") is None


def test_keys_do_not_tell_whether_another_thread_traces() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    keys = [Fingerprint(model).of(model)]

    def traced(x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as beside:
            keys.append(beside.submit(lambda: Fingerprint(model).of(model)).result())
        return x + 1

    make_fx(traced)(torch.ones(2))
    assert keys[0] == keys[1]
