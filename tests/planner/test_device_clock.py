"""Lanes that share a device's rates: by hand, and against fluid rates followed in fractions."""

from __future__ import annotations

from dataclasses import dataclass, field
from fractions import Fraction

import pytest
from hypothesis import given, strategies as st

from tests.native import DeviceClock
from waterflow._C import SimulatedStep

WHOLE = SimulatedStep.whole


@dataclass
class Item:
    lane: int
    nanoseconds: int
    memory: int = 0
    compute: int = 0
    after: list[int] = field(default_factory=list)


def run(lanes: int, items: list[Item]) -> tuple[list[tuple[int, int]], list[int]]:
    """Starts and ends of all items, and the order of their ends."""
    clock = DeviceClock(lanes)
    for number, item in enumerate(items):
        assert clock.add(item.lane, item.nanoseconds, item.memory, item.compute, item.after) == number
    order = []
    while (done := clock.next()) is not None:
        clock.check()
        number, lane, at = done
        assert lane == items[number].lane and at == clock.now == clock.end_of(number)
        order.append(number)
    return [(clock.start_of(i), clock.end_of(i)) for i in range(len(items))], order


def test_lanes_that_leave_each_other_room_run_at_full_speed() -> None:
    times, order = run(2, [Item(0, 100, WHOLE // 2, WHOLE), Item(1, 30, WHOLE // 2, 0), Item(1, 30)])
    assert times == [(0, 100), (0, 30), (30, 60)]
    assert order == [1, 2, 0]


@pytest.mark.parametrize("kind", ["memory", "compute"])
def test_two_that_need_all_take_turns(kind: str) -> None:
    # Both at half the speed until the first has done its 30; what then runs alone has 70 left.
    times, _ = run(2, [Item(0, 100, **{kind: WHOLE}), Item(1, 30, **{kind: WHOLE})])
    assert times == [(0, 130), (0, 60)]


def test_all_are_slowed_by_the_scarcer_rate() -> None:
    half = WHOLE // 2
    # Memory 1.5 times over, arithmetic 1.25 times: the item without shares is slowed like the others.
    times, _ = run(3, [Item(0, 60, WHOLE, half), Item(1, 60, half, 3 * WHOLE // 4), Item(2, 20)])
    assert times == [(0, 90), (0, 90), (0, 30)]


def test_items_come_after_others_and_after_their_lane() -> None:
    items = [Item(0, 10), Item(1, 5, after=[0]), Item(1, 5), Item(0, 1, after=[2, 0]), Item(2, 0, after=[1, 1])]
    times, order = run(3, items)
    assert times == [(0, 10), (10, 15), (15, 20), (20, 21), (15, 15)]
    assert order == [0, 1, 4, 2, 3]


def test_equal_ends_go_by_lane_and_no_time_is_no_time() -> None:
    times, order = run(3, [Item(2, 10), Item(1, 10), Item(0, 0), Item(0, 0, WHOLE), Item(0, 10)])
    assert times == [(0, 10), (0, 10), (0, 0), (0, 0), (0, 10)]
    assert order == [2, 3, 4, 1, 0]


def test_fractions_of_a_nanosecond_are_carried_on() -> None:
    # 1.5 times slowed, so that each item of one nanosecond takes one and a half.
    shared = [Item(1, 1, WHOLE // 2) for _ in range(10)]
    times, _ = run(2, [Item(0, 10, WHOLE), *shared])
    assert [end for _, end in times[1:]] == [1, 3, 4, 6, 7, 9, 10, 12, 13, 15]
    assert times[0] == (0, 15)


def test_what_is_added_later_starts_now() -> None:
    clock = DeviceClock(2)
    assert clock.next() is None
    clock.add(0, 10, WHOLE)
    assert clock.next() == (0, 0, 10)
    clock.add(1, 5, WHOLE, after=[0])
    clock.add(0, 5, WHOLE)
    assert (clock.start_of(1), clock.end_of(1), clock.start_of(2)) == (10, -1, 10)
    assert [clock.next(), clock.next(), clock.next()] == [(2, 0, 20), (1, 1, 20), None]


def fluid(lanes: int, items: list[Item]) -> list[tuple[Fraction, Fraction]]:
    """The slow way: what is left of every item, at speeds that are worked out anew after every end."""
    left = [Fraction(item.nanoseconds) for item in items]
    start: dict[int, Fraction] = {}
    end: dict[int, Fraction] = {}
    now = Fraction(0)
    while len(end) < len(items):
        running = []
        for lane in range(lanes):
            front = next((i for i, item in enumerate(items) if item.lane == lane and i not in end), None)
            if front is not None and all(i in end for i in items[front].after):
                running.append(front)
                start.setdefault(front, now)
        shares = [sum(Fraction(getattr(items[i], kind), WHOLE) for i in running) for kind in ("memory", "compute")]
        speed = 1 / max(Fraction(1), *shares)
        passed = min(left[i] / speed for i in running)
        now += passed
        for i in running:
            left[i] -= passed * speed
        for i in running:
            if left[i] == 0:
                end[i] = now
    return [(start[i], end[i]) for i in range(len(items))]


@st.composite
def mixes(draw: st.DrawFn) -> tuple[int, list[Item]]:
    lanes = draw(st.integers(1, 4))
    share = st.one_of(st.sampled_from([0, WHOLE // 2, WHOLE]), st.integers(0, WHOLE))
    items: list[Item] = []
    for number in range(draw(st.integers(1, 14))):
        after = draw(st.lists(st.integers(0, number - 1), max_size=3)) if number else []
        items.append(Item(draw(st.integers(0, lanes - 1)), draw(st.integers(0, 30)), draw(share), draw(share), after))
    return lanes, items


@given(mixes())
def test_random_mixes(mix: tuple[int, list[Item]]) -> None:
    lanes, items = mix
    times, order = run(lanes, items)
    exact = fluid(lanes, items)
    assert times == [(int(start), int(end)) for start, end in exact]
    ends = [exact[number][1] for number in order]
    assert ends == sorted(ends) and sorted(order) == list(range(len(items)))
    assert run(lanes, items) == (times, order)


def test_wrong_items_are_refused() -> None:
    clock = DeviceClock(2)
    with pytest.raises(ValueError, match="the device has 2 lanes; got 2"):
        clock.add(2, 1)
    with pytest.raises(ValueError, match="item 0 cannot come after 0"):
        clock.add(0, 1, after=[0])
    for wrong in [(-1, 0, 0), (1 << 43, 0, 0), (1, WHOLE + 1, 0), (1, 0, -1)]:
        with pytest.raises(ValueError, match="shares of 0 to 1000000 millionths"):
            clock.add(0, *wrong)
    with pytest.raises(IndexError):
        clock.start_of(0)
    with pytest.raises(ValueError, match="at least one lane"):
        DeviceClock(0)
    clock.check()
    assert clock.next() is None
