"""Numbers for objects that count by identity."""

from __future__ import annotations

import gc
import itertools

import pytest

from waterflow.partition.guards import guarded_places
from waterflow.partition.guards.guarded_places import token_of


class Thing:
    """Something that can be referred to weakly."""


def test_no_two_objects_have_the_same_one() -> None:
    seen = set()
    for _ in range(100):
        things = [Thing() for _ in range(10)]  # at addresses of those before
        seen |= {token_of(thing) for thing in things}
        assert [token_of(thing) for thing in things] == [token_of(thing) for thing in things]
    assert len(seen) == 1000
    gc.collect()


def test_threads_that_ask_at_once_are_told_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one asks, and is told, between this one's question and its answer."""
    thing, told, numbers = Thing(), [], itertools.count(10**9)  # type: ignore[var-annotated]

    class Asked:
        def __next__(self) -> int:
            number = next(numbers)
            if number == 10**9:
                told.append(token_of(thing))
            return number

    monkeypatch.setattr(guarded_places, "_next_token", Asked())
    assert token_of(thing) == told[0] == token_of(thing)


def test_what_cannot_be_referred_to() -> None:
    assert token_of(1.5) is None
