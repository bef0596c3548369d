"""Numbers for objects that count by identity."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator

import pytest

from waterflow.partition.tokens import token_of


class Thing:
    """Something that can be referred to weakly."""


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_no_two_objects_have_the_same_one() -> None:
    seen = set()
    for _ in range(100):
        things = [Thing() for _ in range(10)]  # at addresses of those before
        seen |= {token_of(thing) for thing in things}
        assert [token_of(thing) for thing in things] == [token_of(thing) for thing in things]
    assert len(seen) == 1000
    gc.collect()


def test_threads_that_ask_at_once_are_told_the_same(hasty: None) -> None:
    things = [Thing() for _ in range(3000)]
    start, told = threading.Barrier(4), [[] for _ in range(4)]  # type: ignore[var-annotated]

    def ask(mine: list[int | None]) -> None:
        start.wait()
        mine += [token_of(thing) for thing in things]

    threads = [threading.Thread(target=ask, args=(mine,)) for mine in told]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(mine == told[0] for mine in told)
    assert len(set(told[0])) == len(things)


def test_what_cannot_be_referred_to() -> None:
    assert token_of(1.5) is None
