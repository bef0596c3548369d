"""The book of an arena's pages, against a map of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, strategies as st

from tests.native import PageLedger


def test_pages_stay_behind_a_step_until_they_are_given_back() -> None:
    pages = PageLedger(100, page=10)
    assert pages.begin(0, 35, capacity=100) and pages.standing(0)
    pages.grow(0, 35)
    pages.grow(0, 12)
    assert (pages.pages, pages.needed, pages.spare(0)) == (40, 40, (20, 40))
    pages.finish(0)
    assert (pages.pages, pages.needed, pages.spare(0)) == (40, 0, (0, 40))
    pages.give_back(0, 30)
    assert pages.pages == 30


def test_pages_that_were_given_back_below_a_step_do_not_come_back_with_less() -> None:
    pages = PageLedger(100, page=10)
    pages.begin(0, 35, capacity=100)
    pages.grow(0, 35)
    pages.grow(0, 25)
    pages.give_back(0, 30)
    pages.grow(0, 12)
    assert (pages.pages, pages.spare(0)) == (30, (20, 30))
    pages.check()


def test_a_device_that_runs_behind_keeps_what_was_reached() -> None:
    pages = PageLedger(100, page=10, behind=True)
    pages.begin(1, 35, capacity=100)
    pages.grow(1, 35)
    pages.grow(1, 0)
    assert pages.spare(1) == (40, 40)
    pages.finish(1)
    assert pages.spare(1) == (0, 40)


def test_there_a_step_keeps_what_it_has_reached_itself_and_no_more() -> None:
    pages = PageLedger(100, page=10, behind=True)
    pages.begin(0, 80, capacity=100)
    pages.grow(0, 80)
    pages.finish(0)
    pages.begin(0, 10, capacity=100)
    pages.grow(0, 10)
    assert pages.pages == 80 and pages.spare(0) == (10, 80)


def test_both_ends_take_pages_from_each_other_where_not_all_fit() -> None:
    pages = PageLedger(200)
    assert pages.begin(0, 60, capacity=100)
    assert pages.fit(1, 60, capacity=100) == 100
    pages.resize(100)
    assert pages.begin(1, 60, capacity=100)
    assert pages.needed == 100 and pages.fit(0, 60, capacity=100) == 100
    for end in (0, 1):
        pages.grow(end, 60 if end == 0 else 40)
    pages.grow(0, 40)
    pages.grow(1, 60)
    assert pages.pages == 100
    pages.check()


def test_it_is_larger_where_both_fit() -> None:
    pages = PageLedger(200)
    pages.resize(50)
    pages.begin(0, 40, capacity=100)
    assert pages.fit(1, 50, capacity=100) == 90
    assert pages.needed_with(1, 50, capacity=100) == 90


def test_the_end_that_would_move_stays() -> None:
    pages = PageLedger(200)
    pages.begin(1, 60, capacity=100)
    assert pages.fit(0, 60, capacity=100) == 200 and pages.needed_with(0, 60, capacity=100) == 120
    with pytest.raises(RuntimeError, match="resized under the step"):
        pages.resize(100)


def test_more_capacity_comes_when_two_steps_cannot_meet() -> None:
    pages = PageLedger(200)
    pages.resize(100)
    pages.begin(0, 60, capacity=100)
    assert pages.capacity_up_to(180) == 180
    pages.begin(1, 60, capacity=100)
    assert pages.capacity_up_to(180) == 100
    pages.finish(0)
    assert pages.capacity_up_to(180) == 180
    assert not pages.begin(0, 60, capacity=180) and not pages.standing(0)  # it would meet the other


def test_a_page_lies_between_them_on_a_device_that_has_each_twice() -> None:
    pages = PageLedger(200, page=10, apart=10, behind=True)
    assert pages.room == 190 and pages.begin(0, 60, capacity=100)
    assert pages.fit(1, 60, capacity=100) == 110
    pages.resize(110)
    assert pages.begin(1, 60, capacity=100)


def test_its_size_has_bounds() -> None:
    """The addresses that it has, and what a step that stands at end 0 needs, also where the limit is lower by now."""
    pages = PageLedger(100)
    assert pages.begin(1, 60, 200)
    pages.finish(1)
    assert pages.fit(0, 60, 200) == 100
    pages = PageLedger(100)
    assert pages.begin(0, 80, 100)
    assert pages.fit(1, 10, 50) == 100


def test_a_new_size_takes_the_pages_beyond_it_and_those_of_end_1() -> None:
    pages = PageLedger(100)
    for end in (0, 1):
        assert pages.begin(end, 50, 100)
        pages.grow(end, 50)
        pages.finish(end)
    pages.resize(30)
    pages.resize(100)
    assert pages.pages == 30


def test_a_step_that_exceeds_the_arena_reaches_its_end() -> None:
    pages = PageLedger(100, behind=True)
    assert pages.begin(0, 100, 100)
    pages.grow(0, 150)
    assert (pages.pages, pages.spare(0)) == (100, (100, 100))


def test_two_steps_that_share_a_byte_are_found() -> None:
    pages = PageLedger(100)
    pages.begin(0, 60, capacity=100)
    pages.begin(1, 60, capacity=100)
    pages.grow(0, 60)
    pages.grow(1, 41)
    with pytest.raises(RuntimeError, match="two steps hold 60 and 41 bytes of 100"):
        pages.check()


@dataclass
class Map:
    """Page by page from end 0: whether it is there, and how far each end's step has bytes."""

    pages: PageLedger
    page: int
    behind: bool
    there: list[bool] = field(default_factory=list)
    reached: list[int] = field(default_factory=lambda: [0, 0])  # by the steps that stand there
    held: list[int] = field(default_factory=lambda: [0, 0])

    def of(self, end: int, bytes_from: int, until: int) -> range:
        """The pages between two distances from an end."""
        first, last = -(-bytes_from // self.page) if bytes_from else 0, -(-until // self.page)
        count = len(self.there)
        return range(first, last) if end == 0 else range(count - last, count - first)

    def grow(self, end: int, held: int) -> None:
        for at in self.of(end, 0, held):
            self.there[at] = True
        self.held[end], self.reached[end] = held, max(self.reached[end], held)
        self.pages.grow(end, held)

    def in_use(self, end: int) -> range:
        return self.of(end, 0, self.reached[end] if self.behind else self.held[end])

    def give_back(self, end: int, keep: int) -> None:
        least, until = self.pages.spare(end)
        start = min(until, least + keep * self.page)
        if start >= until:
            return
        for at in self.of(end, start, until):
            assert at not in self.in_use(0) and at not in self.in_use(1)
            self.there[at] = False
        self.pages.give_back(end, start)


@given(st.randoms(use_true_random=False), st.booleans(), st.sampled_from([1, 4]))
def test_random_runs_keep_to_a_map_of_the_pages(chance: random.Random, behind: bool, page: int) -> None:
    most, capacity = 40 * page, chance.randint(10, 40) * page
    pages = PageLedger(most, page=page, behind=behind)
    told = Map(pages, page, behind, [False] * 40)
    heights = [0, 0]
    for _ in range(60):
        end = chance.randrange(2)
        if not pages.standing(end):
            height = chance.randint(1, capacity)
            needed, wanted = pages.needed_with(end, height, capacity), pages.fit(end, height, capacity)
            if wanted != pages.size:
                for at in told.of(1, 0, pages.spare(1)[1]):
                    told.there[at] = False
                told.there = (told.there + [False] * 40)[: wanted // page]
                pages.resize(wanted)
            if pages.begin(end, height, capacity):
                heights[end], told.held[end], told.reached[end] = height, 0, 0
                assert pages.needed == needed
        elif chance.random() < 0.3:
            pages.finish(end)
            told.held[end] = told.reached[end] = 0
        else:
            told.grow(end, chance.randint(0, min(heights[end], capacity - told.held[1 - end])))
        if chance.random() < 0.3:
            told.give_back(chance.randrange(2), chance.randrange(3))
        if chance.random() < 0.2:
            wanted = chance.randint(max(1, sum(told.held)), most)
            capacity = min(wanted, pages.capacity_up_to(wanted)) if wanted > capacity else wanted
        pages.check()
        assert sum(told.there) * page <= pages.pages
        for each in (0, 1):
            assert all(told.there[at] for at in told.in_use(each))
    for end in (0, 1):
        told.give_back(end, 0)
    assert sum(told.there) == len({*told.in_use(0), *told.in_use(1)}), "pages that nobody needs cannot be given back"
