"""Planned offsets: no two pieces that live at once share a byte, and the height is near what is live."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from benchmarks.zoo import SMALL
from tests.partition.graphs import capture_of, instructions_of
from waterflow import _C
from waterflow.partition.plan.liveness import Lifetime, lifetimes, operation_memory
from waterflow.partition.plan.offsets import ALIGNMENT, Offsets, place, planned, resident

OPERATIONS = 12


@st.composite
def lives(draw: Any) -> list[Lifetime]:
    made = []
    for _ in range(draw(st.integers(0, 30))):
        birth = draw(st.integers(0, OPERATIONS - 1))
        death = draw(st.integers(birth, OPERATIONS - 1))
        made.append(Lifetime(birth, death, draw(st.integers(0, 4000)), draw(st.booleans())))
    return made


def overlapping(offsets: Offsets) -> list[tuple[int, int]]:
    """Pairs of pieces that share a byte while both live: none, or the plan is wrong. Quadratic."""
    found = []
    pieces = list(zip(offsets.lives, offsets.offsets))
    for i, (one, at) in enumerate(pieces):
        for j, (other, there) in enumerate(pieces[:i]):
            together = one.birth <= other.death and other.birth <= one.death
            if together and at < there + other.size and there < at + one.size:
                found.append((j, i))
    return found


@given(lives(), st.sampled_from([0, 10_000_000]))
@settings(max_examples=300, deadline=None)
def test_no_two_that_live_at_once_share_a_byte(given_lives: list[Lifetime], work: int) -> None:
    made = place(given_lives, OPERATIONS, work=work)
    assert not overlapping(made)
    assert all(at % ALIGNMENT == 0 and life.size % ALIGNMENT == 0 for life, at in zip(made.lives, made.offsets))
    for at in range(OPERATIONS):
        ends = [o + life.size for life, o in zip(made.lives, made.offsets) if life.birth <= at <= life.death]
        assert made.heights[at] == max(ends, default=0)
        assert made.resident[at] == sum(life.size for life in made.lives if life.birth <= at <= life.death)
        assert made.heights[at] >= made.resident[at]
        later = [o + life.size for life, o in zip(made.lives, made.offsets) if life.birth <= at < life.death]
        assert made.after()[at] == max(later, default=0)
    assert place(given_lives, OPERATIONS, work=work) == made  # the same plan every time


def test_a_stack_has_no_excess() -> None:
    nested = [Lifetime(i, 20 - i, 64 * (i + 1)) for i in range(10)]
    made = place(nested, 21)
    assert made.excess == 1.0 and made.area_excess == 1.0


def test_what_outlives_the_step_has_no_offset() -> None:
    made = place([Lifetime(0, 3, 100, kept=True), Lifetime(0, 3, 100), Lifetime(1, 1, 0)], 4)
    assert made.lives == (Lifetime(0, 3, 128),) and made.offsets == (0,)


def test_an_empty_step() -> None:
    assert place([], 0).height == 0 and place([], 0).excess == 0
    assert place([], 3).heights == (0, 0, 0)


@pytest.mark.parametrize("life", [(0, 3, 8), (2, 1, 8), (-1, 1, 8), (0, 1, -8)])
def test_a_life_outside_of_the_step(life: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="does not lie within a step of 3 operations"):
        _C.place([life], 3, 0)


def test_promotion_helps_where_an_order_leaves_holes() -> None:
    # By death, the small late one lies lowest and keeps the large ones from meeting.
    pieces = [Lifetime(0, 4, 640), Lifetime(3, 8, 64), Lifetime(5, 7, 640), Lifetime(4, 5, 64)]
    once, searched = place(pieces, 9, work=0), place(pieces, 9)
    assert searched.height <= once.height and searched.excess == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_small_models(name: str) -> None:
    capture = capture_of(name)
    instructions = instructions_of(capture.graph)
    found = lifetimes(capture.graph, instructions)
    made = place(found, len(instructions))
    exact = operation_memory(capture.graph, instructions)
    assert resident(found, len(instructions)) == [m.peak for m in exact]
    assert made.excess <= 1.1  # of pieces of a few hundred bytes; usual sizes: benchmarks/offsets.py
    assert sum(life.size for life in planned(found)) == sum(life.size for life in made.lives)


@given(lives(), st.data())
def test_a_moved_piece_is_seen(given_lives: list[Lifetime], data: Any) -> None:
    made = place(given_lives, OPERATIONS)
    if not made.lives:
        return
    moved = list(made.offsets)
    piece = data.draw(st.integers(0, len(moved) - 1))
    moved[piece] = max(0, moved[piece] + data.draw(st.sampled_from([-64, -1, 1, 64, 640])))
    wrong = replace(made, offsets=tuple(moved))
    pieces = list(zip(made.lives, moved))
    heights = tuple(
        max((o + life.size for life, o in pieces if life.birth <= at <= life.death), default=0)
        for at in range(OPERATIONS)
    )  # fmt: skip
    if overlapping(wrong):
        with pytest.raises(ValueError, match="may not share a byte while both live"):
            wrong.check()
    elif heights != made.heights:
        with pytest.raises(ValueError, match="heights must tell how far a step reaches"):
            wrong.check()
    else:
        wrong.check()


def test_a_wrong_plan_is_seen() -> None:
    pieces = (Lifetime(0, 2, 128), Lifetime(2, 3, 64))
    assert overlapping(Offsets(pieces, (0, 64), (), ())) == [(0, 1)]
    assert not overlapping(Offsets(pieces, (0, 128), (), ()))
