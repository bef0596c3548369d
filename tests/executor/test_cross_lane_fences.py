"""Order on the device: nobody grows into ground that is still in use, and nobody waits for more than that needs."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, strategies as st

from tests.native import CrossLaneFences, OrderFault

SIZE = 140


def test_who_stays_clear_waits_for_nobody() -> None:
    order = CrossLaneFences()
    assert order.before(1, 50, SIZE) is None
    order.after(0, 90, 1)
    assert order.before(1, 50, SIZE) is None  # they touch, and share no byte
    assert order.before(1, 51, SIZE) == 1


def test_nobody_waits_twice() -> None:
    order = CrossLaneFences()
    order.after(0, 100, 1)
    assert order.before(1, 60, SIZE) == 1
    assert order.before(1, 120, SIZE) is None
    order.after(0, 100, 2)
    assert order.before(1, 60, SIZE) == 2


def test_the_latest_group_that_reached_so_far() -> None:
    order = CrossLaneFences()
    for event, peak in enumerate([100, 90, 10], 1):
        order.after(0, peak, event)
    assert order.before(1, 60, SIZE) == 2  # behind the first, too
    assert order.before(1, 60, SIZE) is None
    assert order.before(1, 135, SIZE) == 3


def test_what_rose_and_fell_within_a_group_counts() -> None:
    order = CrossLaneFences()
    order.after(0, 100, 1, held_after=20)
    assert order.before(1, 60, SIZE) == 1


def test_both_ends_on_their_own() -> None:
    order = CrossLaneFences()
    order.after(0, 100, 1)
    order.after(1, 100, 2)
    assert (order.before(0, 100, SIZE), order.before(1, 100, SIZE)) == (2, 1)
    assert (order.before(0, 100, SIZE), order.before(1, 100, SIZE)) == (None, None)


def test_a_later_group_stands_for_all_that_reached_less() -> None:
    order = CrossLaneFences()
    for event, peak in enumerate([10, 50, 30, 50, 0, 20], 1):
        order.after(0, peak, event)
    assert order.kept(0) == 2
    order.check()
    assert order.before(1, 100, SIZE) == 4


def test_little_is_kept() -> None:
    order = CrossLaneFences()
    many = 2 * CrossLaneFences.most
    for event in range(many):
        order.after(0, 3 * many - event, event)
    order.check()
    assert order.kept(0) == CrossLaneFences.most
    # The oldest were made one: the first of them still has to be waited for, by an event behind it.
    waited = order.before(1, 1, 3 * many)
    assert waited is not None and waited == many - CrossLaneFences.most
    assert order.before(1, 2 * many - 1, 3 * many) == many - 1


def test_what_the_host_knows_to_be_done_needs_no_wait() -> None:
    order = CrossLaneFences()
    for event, peak in enumerate([100, 90, 80], 1):
        order.after(0, peak, event)
    order.reached(0, 2)
    assert order.kept(0) == 1
    assert order.before(1, 55, SIZE) is None
    assert order.before(1, 140, SIZE) == 3
    order.reached(0, 3)
    order.reached(1, 3)


def test_what_is_no_end_and_no_peak() -> None:
    order = CrossLaneFences()
    with pytest.raises(ValueError, match="ends 0 and 1, not 2"):
        order.before(2, 1, SIZE)
    with pytest.raises(ValueError, match="cannot reach 141 bytes into an arena of 140"):
        order.before(0, 141, SIZE)
    with pytest.raises(ValueError, match="negative"):
        order.after(0, -1, 1)


@given(st.lists(st.tuples(st.integers(0, 1), st.sampled_from("aabbr"), st.integers(0, 20)), max_size=60))
def test_as_a_slow_oracle_says(calls: list[tuple[int, str, int]]) -> None:
    order = CrossLaneFences()
    issued: list[tuple[int, int, int]] = []  # end, peak, event
    waited = [0, 0]
    for event, (end, call, peak) in enumerate(calls, 1):
        if call == "a":
            order.after(end, peak, event)
            issued.append((end, peak, event))
        elif call == "r":
            done = event - peak
            order.reached(end, done)
            waited[1 - end] = max(waited[1 - end], done)
        else:
            crossing = [e for side, p, e in issued if side != end and p and p + peak > 20 and e > waited[end]]
            assert order.before(end, peak, 20) == (max(crossing) if crossing else None)
            waited[end] = max([waited[end], *crossing])
        order.check()


# -- random heights, lanes that stall


@dataclass
class Group:
    end: int
    peak: int
    start: float
    done: float
    known: int  # of the facing lane's groups, those that lie before this one


def random_case(seed: int, fault: OrderFault) -> list[Group]:
    """Groups of two facing lanes, issued in an order in which each peak fits beside what the other lane holds then."""
    draw = random.Random(seed)
    order, size = CrossLaneFences(fault), 100
    held, free_at, known = [0, 0], [0.0, 0.0], [-1, -1]
    made: list[Group] = []
    for _ in range(draw.randint(4, 24)):
        end = draw.randint(0, 1)
        room = size - held[1 - end]
        if room < held[end]:
            continue
        peak = draw.randint(held[end], room)
        after = draw.randint(0, peak)
        event = order.before(end, peak, size)
        start = free_at[end]
        if event is not None:
            start = max(start, next(g.done for n, g in enumerate(made) if n == event))
            known[end] = max(known[end], event)
        stall = draw.random() < 0.3
        done = start + draw.random() * (20 if stall else 1)
        order.after(end, peak, len(made), after)
        made.append(Group(end, peak, start, done, known[end]))
        held[end], free_at[end] = after, done
    return made


def unordered(groups: list[Group]) -> list[tuple[int, int]]:
    """Pairs that shared ground with nothing to order them; all pairs are looked at."""
    found = []
    for j, late in enumerate(groups):
        for i, early in enumerate(groups[:j]):
            if early.end != late.end and early.peak + late.peak > 100 and late.known < i:
                found.append((i, j))
    return found


def at_once(groups: list[Group]) -> bool:
    """Whether two groups that share ground really ran at the same time, as the lanes happened to stall."""
    return any(
        early.end != late.end and early.peak + late.peak > 100 and late.start < early.done
        for j, late in enumerate(groups) for early in groups[:j]
    )  # fmt: skip


def cases(full: bool) -> int:
    return 20_000 if full else 1_500


def test_no_random_case_is_unordered(full: bool) -> None:
    for seed in range(cases(full)):
        groups = random_case(seed, OrderFault.none)
        assert not unordered(groups), f"seed {seed}"
        assert not at_once(groups), f"seed {seed}"


def test_planted_heights_compared_at_events_instead_of_peaks(full: bool) -> None:
    made = [random_case(seed, OrderFault.heights_at_events) for seed in range(cases(full))]
    assert sum(bool(unordered(groups)) for groups in made) > 0.9 * len(made)
    assert sum(at_once(groups) for groups in made) > 0.9 * len(made)


def test_planted_dropped_waits(full: bool) -> None:
    made = [random_case(seed, OrderFault.dropped_waits) for seed in range(cases(full))]
    assert sum(bool(unordered(groups)) for groups in made) > 0.9 * len(made)
    assert sum(at_once(groups) for groups in made) > 0.8 * len(made)
