"""The counter barrier, against a model that knows its parties by name."""

from __future__ import annotations

import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

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
        assert (barrier.waiting_for, barrier.parties) == (2, 2)


def test_roots_wait_for_nobody() -> None:
    barrier = CounterBarrier(0)
    for _ in range(2):
        assert barrier.open
        barrier.pass_()
    barrier.add_party()
    assert not barrier.open
    assert barrier.arrive()


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


def test_the_last_one_missing_leaves() -> None:
    barrier = CounterBarrier(3)
    barrier.arrive()
    barrier.arrive()
    assert barrier.remove_party()
    assert barrier.open and barrier.parties == 2
    barrier.pass_()
    assert barrier.waiting_for == 2


def test_nobody_left_to_leave() -> None:
    barrier = CounterBarrier(1)
    barrier.arrive()
    with pytest.raises(RuntimeError, match="no party left"):
        barrier.remove_party()
    with pytest.raises(RuntimeError, match="no party left"):
        CounterBarrier(0).remove_party()


def test_parties_cannot_be_negative() -> None:
    with pytest.raises(ValueError, match="-1"):
        CounterBarrier(-1)


class Rounds(RuleBasedStateMachine):
    """Parties have names here; each comes once a round, and may leave only before it has come."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = CounterBarrier(0)
        self.members: set[int] = set()
        self.arrived: set[int] = set()
        self.names = 0
        self.rounds = 0

    def missing(self) -> set[int]:
        return self.members - self.arrived

    @rule()
    def join(self) -> None:
        self.names += 1
        self.members.add(self.names)
        self.barrier.add_party()

    @precondition(lambda self: self.missing())
    @rule()
    def arrive(self) -> None:
        self.arrived.add(min(self.missing()))
        assert self.barrier.arrive() == (not self.missing())

    @precondition(lambda self: self.missing())
    @rule()
    def leave(self) -> None:
        self.members.remove(max(self.missing()))
        assert self.barrier.remove_party() == (not self.missing())

    @precondition(lambda self: not self.missing())
    @rule()
    def go(self) -> None:
        self.barrier.pass_()
        self.arrived.clear()
        self.rounds += 1

    @rule()
    def start_over(self) -> None:
        self.barrier.rearm()
        self.arrived.clear()

    @precondition(lambda self: self.missing())
    @rule()
    def go_early(self) -> None:
        with pytest.raises(RuntimeError):
            self.barrier.pass_()

    @precondition(lambda self: not self.missing())
    @rule()
    def come_late(self) -> None:
        with pytest.raises(RuntimeError):
            self.barrier.arrive()
        with pytest.raises(RuntimeError):
            self.barrier.remove_party()

    @invariant()
    def agrees(self) -> None:
        assert self.barrier.parties == len(self.members)
        assert self.barrier.waiting_for == len(self.missing())
        assert self.barrier.open == (not self.missing())


TestRounds = Rounds.TestCase
