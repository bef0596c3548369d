"""Batches of all shapes: what a step's code finds in one is what the caller put there."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

import waterflow as wf


class Pair(collections.namedtuple("Pair", "x")):
    weight: Any = 1.0


class Word(str):
    weight: Any = 1.0


@dataclass
class Dropping:
    x: torch.Tensor
    weight: Any = field(default=1.0)


pytree.register_dataclass(Dropping, field_names=["x"], drop_field_names=["weight"])


class Registered:
    def __init__(self, x: torch.Tensor, weight: Any = 1.0) -> None:
        self.x, self.weight = x, weight


pytree.register_pytree_node(Registered, lambda one: ([one.x], None), lambda parts, _: Registered(*parts))


class Whole:
    def __init__(self, x: torch.Tensor, weight: Any = 1.0) -> None:
        self.x, self.weight, self.both = x, weight, [x, weight]


pytree.register_pytree_node(Whole, lambda one: ([one.x], one.weight), lambda parts, weight: Whole(*parts, weight))


class Number(np.float64):
    weight: Any = 1.0


def with_number(weight: Any) -> Any:
    number = Number(2.0)
    number.weight = weight
    return {"x": torch.ones(2, 4), "word": number}


def with_cycle(weight: Any) -> Any:
    batch = of(Pair)(weight)
    batch.parts = [weight]
    batch.parts.append(batch.parts)
    return batch


def with_word(weight: Any) -> Any:
    word = Word("word")
    word.weight = weight
    return {"x": torch.ones(2, 4), "word": word}


def in_order(weight: Any) -> Any:
    batch: Any = collections.OrderedDict(x=torch.ones(2, 4))
    batch.weight = weight
    return batch


def of(kind: type) -> Callable[[Any], Any]:
    def made(weight: Any) -> Any:
        batch = kind(torch.ones(2, 4))
        if weight != 1.0 or kind is Whole:
            batch.__init__(batch.x, weight) if kind is Whole else setattr(batch, "weight", weight)
        return batch

    return made


def weight_of(batch: Any) -> Any:
    return batch["word"].weight if isinstance(batch, dict) and "word" in batch else batch.weight


MADE: dict[str, Callable[[Any], Any]] = {
    "a namedtuple's subclass": of(Pair),
    "a dropped field": of(Dropping),
    "a registered class": of(Registered),
    "all handed over": of(Whole),
    "text with an attribute": with_word,
    "a dict in order": in_order,
    "a number with an attribute": with_number,
    "a list that contains itself": with_cycle,
}


@pytest.mark.parametrize("what", MADE)
def test_what_a_batch_holds_beside_its_leaves(what: str) -> None:
    """As in a loop where it changes; one that hands over all that it holds stays captured."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch["x"] if isinstance(batch, dict) else batch.x
        return model(x).mean() * 0 + weight_of(batch)

    model = nn.Linear(4, 1)
    job = wf.Step(model, step=step, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    weights = [1.0, 1.0, 0.1, 0.2, 0.1]
    assert [float(job(MADE[what](weight))) for weight in weights] == pytest.approx(weights)
    if what in ("all handed over", "text with an attribute"):
        assert job.opaque_reason is None
    elif job.opaque_reason is not None:
        assert any(word in job.opaque_reason for word in ("weight", "contains itself", "Number"))


@pytest.mark.parametrize("kind", [Pair, Registered, Dropping])
def test_a_class_that_holds_nothing_more_is_captured(kind: Any) -> None:
    """Registered in the usual way, without names for its parts, and with batches of several shapes."""
    model = nn.Linear(4, 1)
    job = wf.Step(model, step=lambda m, b: m(b.x).mean(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for rows in range(1, 12):
        job(kind(torch.ones(rows, 4)))
    assert job.opaque_reason is None and job.steps == 11


def test_a_step_that_writes_an_attribute_of_its_batch() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        batch.weight = 0.5
        return model(batch.x).mean() * 0 + 1.0

    model = nn.Linear(4, 1)
    job = wf.Step(model, step=step, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    batches = [of(Registered)(1.0) for _ in range(3)]
    assert [float(job(batch)) for batch in batches] == [1.0] * 3
    assert [batch.weight for batch in batches] == [0.5] * 3
