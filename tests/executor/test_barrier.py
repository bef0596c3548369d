"""The counter barrier, against a model that knows its parties by name."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.native import CounterBarrier


def test_opens_at_the_last_arrival() -> None:
    barrier = CounterBarrier(3)
    assert [barrier.arrive() for _ in range(3)] == [False, False, True]
    assert barrier.open and barrier.waiting_for == 0


def test_rearms_itself_once_it_is_passed() -> None:
    barrier = CounterBarrier(2)
    for _ in range(3):
        assert not barrier.open
        barrier.arrive()
        assert barrier.arrive()
        barrier.pass_()
        assert barrier.waiting_for == 2


def test_roots_wait_for_nobody() -> None:
    barrier = CounterBarrier(0)
    for _ in range(2):
        assert barrier.open
        barrier.pass_()


def test_cannot_be_passed_early() -> None:
    barrier = CounterBarrier(2)
    barrier.arrive()
    with pytest.raises(RuntimeError, match="1 arrival"):
        barrier.pass_()
    assert barrier.waiting_for == 1


def test_nobody_arrives_twice() -> None:
    barrier = CounterBarrier(1)
    barrier.arrive()
    with pytest.raises(RuntimeError, match="open"):
        barrier.arrive()
    assert barrier.open


def test_rearm_forgets_the_round() -> None:
    barrier = CounterBarrier(3)
    barrier.arrive()
    barrier.rearm()
    assert barrier.waiting_for == 3


class Rounds(RuleBasedStateMachine):
    """Parties have names here; each comes once a round."""

    @initialize(parties=st.integers(0, 4))
    def begin(self, parties: int) -> None:
        self.barrier = CounterBarrier(parties)
        self.parties, self.missing = parties, set(range(parties))

    @precondition(lambda self: self.missing)
    @rule()
    def arrive(self) -> None:
        self.missing.pop()
        assert self.barrier.arrive() == (not self.missing)

    @precondition(lambda self: not self.missing)
    @rule()
    def go(self) -> None:
        self.barrier.pass_()
        self.missing = set(range(self.parties))

    @rule()
    def start_over(self) -> None:
        self.barrier.rearm()
        self.missing = set(range(self.parties))

    @precondition(lambda self: self.missing)
    @rule()
    def go_early(self) -> None:
        with pytest.raises(RuntimeError):
            self.barrier.pass_()

    @precondition(lambda self: not self.missing)
    @rule()
    def come_late(self) -> None:
        with pytest.raises(RuntimeError):
            self.barrier.arrive()

    @invariant()
    def agrees(self) -> None:
        if hasattr(self, "barrier"):
            assert self.barrier.waiting_for == len(self.missing)
            assert self.barrier.open == (not self.missing)


TestRounds = Rounds.TestCase
