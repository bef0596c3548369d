"""Keys tell values apart by type and bits."""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import waterflow as wf
from tests.support import same_bits
from waterflow.partition.guards.batch_reads import free_places, with_values
from waterflow.partition.guards.cache_key import Fingerprint
from waterflow.partition.guards.guarded_places import exact
from waterflow.partition.guards.step_key import flatten


@dataclasses.dataclass(frozen=True)
class Setting:
    scale: float


class Level(enum.IntEnum):
    one = 1


APART: list[Any] = [
    0, 0.0, -0.0, False, 0j, complex(-0.0, 0.0), complex(0.0, -0.0), np.float64(0.0), np.float64(-0.0), np.float32(0.0), "0",
    1, 1.0, True, Level.one, np.int64(1), (1,), (1.0,), (True,), frozenset({0.0}), frozenset({-0.0}), Setting(0.0), Setting(-0.0),
    None, float("nan"), b"0",
]  # fmt: skip


@pytest.mark.parametrize("key", [exact, lambda value: Fingerprint().of(value)], ids=["exact", "fingerprint"])
def test_all_are_apart(key: Callable[[Any], Any]) -> None:
    for one, other in itertools.combinations(APART, 2):
        assert key(one) != key(other), (one, other)


@pytest.mark.parametrize("make", [lambda: float("nan"), lambda: (float("nan"), -0.0), lambda: Setting(float("nan"))])
def test_equal_bits_are_equal(make: Callable[[], Any]) -> None:
    assert exact(make()) == exact(make()) and hash(exact(make())) == hash(exact(make()))


def as_read(*batch: Any) -> Any:
    """The key of a batch whose leaves the step reads."""
    leaves, form, key = flatten(batch)
    return key, with_values((), free_places(leaves, form), leaves)


def test_batches_are_apart() -> None:
    x = torch.ones(2)
    # NumPy's numbers are Python's in a batch.
    plain = [one for one in APART if one is None or type(one) in (bool, int, float, complex, str, bytes)]
    for one, other in itertools.combinations(plain, 2):
        assert as_read(x, one) != as_read(x, other)
    for one, other in itertools.combinations([0, 0.0, -0.0, False], 2):
        assert flatten({one: x})[2] != flatten({other: x})[2]
        assert flatten([{"a": {one: x}}])[2] != flatten([{"a": {other: x}}])[2]
    nan = float("nan")
    assert as_read(x, nan) == as_read(x, float("nan"))


def test_a_number_in_the_batch_keeps_its_sign(no_captures: Any) -> None:
    model = nn.Linear(4, 2)
    step = wf.Step(model, optimizer=SGD(model.parameters(), lr=0.1), step=lambda m, b: (m(b[0]) * 0 + 1).sum() * b[1])
    x = torch.randn(3, 4)
    for number in (0.0, -0.0, 0.0, -0.0):
        assert same_bits(step((x, number)), torch.tensor(6.0) * number)


class Signed(nn.Module):
    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 2), scale

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * 0 + 1).sum() * self.scale  # type: ignore[no-any-return]


@pytest.mark.parametrize("change", [(0.0, -0.0), (1, True), ((0.0,), (-0.0,))], ids=str)
def test_a_step_that_changes_an_attribute_in_sign_or_type_alone_is_not_captured(change: Any, no_captures: Any) -> None:
    class Turning(Signed):
        def forward(self, x: Tensor) -> Tensor:
            self.scale = change[1] if self.scale is change[0] else change[0]
            return self.layer(x).sum()  # type: ignore[no-any-return]

    model = Turning(change[0])
    step = wf.Step(model, optimizer=SGD(model.parameters(), lr=0.1), step=lambda m, x: m(x))
    for _ in range(5):  # it might be a setting that is filled in once
        step(torch.randn(3, 4))
    assert "changes scale" in str(step.opaque_reason)
    assert model.scale is change[1]


def test_models_that_differ_in_a_sign_share_nothing(no_captures: Any) -> None:
    x = torch.randn(3, 4)
    for scale in (0.0, -0.0, 0, complex(0.0, -0.0).real):
        model = Signed(scale)
        step = wf.Step(model, optimizer=SGD(model.parameters(), lr=0.1), step=lambda m, b: m(b))
        assert same_bits(step(x), torch.tensor(6.0) * scale)
