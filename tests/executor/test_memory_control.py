"""Which opportunistic jobs have the memory that does not hold all of them whole: tried, measured, undone."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from waterflow.executor.lanes_in_use import Decision
from waterflow.executor.memory_control import AGAIN_SECONDS, MemoryControl
from waterflow.executor.terms import Need


@dataclass
class Job:
    """``lower``: its speed where its steps are lower, by the speed of whole ones."""

    bytes: int
    height: int
    lower: float
    speed: float = 50.0
    lowest: int = 0
    share: int | None = None
    held: int | None = None
    done: float = 0.0


@dataclass
class Machine:
    """Jobs that hold what they are given, as far as it goes; who comes first has it where nothing is given."""

    room: int
    jobs: dict[int, Job]
    noise: float = 0.0
    seed: int = 0
    seconds: float = 0.0
    guaranteed: bool = False
    changed: list[dict[int | None, int | None]] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.control = MemoryControl(self.decisions, self.give, lambda: self.seconds)

    def give(self, shares: Mapping[int | None, int | None]) -> None:
        self.changed.append(dict(shares))
        for job, share in shares.items():
            if job in self.jobs:
                self.jobs[job].share = share

    def settle(self) -> None:
        for each in self.jobs.values():
            if each.share is not None and each.held is not None and each.bytes + each.held > each.share:
                lower = each.share - each.bytes
                each.held = lower if lower >= each.lowest and lower >= 0 else None
        for each in self.jobs.values():
            others = [other for other in self.jobs.values() if other is not each and other.held is not None]
            left = self.room - each.bytes - sum(other.bytes for other in others)
            wanted = min(left, each.height, each.share - each.bytes if each.share is not None else left)
            if wanted >= each.lowest and wanted >= 0 and left >= max([wanted, *(other.held or 0 for other in others)]):
                each.held = max(wanted, each.held or 0)
        there = [each for each in self.jobs.values() if each.held is not None]
        assert sum(each.bytes for each in there) + max((each.held or 0 for each in there), default=0) <= self.room

    def seen(self) -> tuple[dict[int, Need], int, int]:
        if self.guaranteed:
            return {}, 0, 0
        return (
            {number: Need(each.bytes, each.height, each.held, each.share) for number, each in self.jobs.items()},
            self.room,
            0,
        )

    def run(self, seconds: float) -> list[Decision]:
        before = len(self.decisions)
        for _ in range(round(seconds / 0.02)):
            self.settle()
            self.seconds += 0.02
            for number, each in self.jobs.items():
                if each.held is not None:
                    speed = each.speed * (1.0 if each.held >= each.height else each.lower)
                    steps = int(each.done)
                    each.done += speed * 0.02 * (1 + self.noise * (2 * self.random.random() - 1))
                    for _ in range(int(each.done) - steps):
                        self.control.ended(number)
            if self.seconds >= self.control.next_look:
                self.control.look(self.seen, {number: f"job-{number}" for number in self.jobs})
        return self.decisions[before:]

    @property
    def there(self) -> set[int]:
        return {number for number, each in self.jobs.items() if each.held is not None}


def test_all_are_there_with_lower_steps_where_that_is_faster() -> None:
    machine = Machine(100, {1: Job(20, 70, 0.8), 2: Job(20, 70, 0.7)})
    machine.run(1)
    assert machine.there == {1}
    decisions = machine.run(120)
    assert machine.there == {1, 2} and all(each.held == 60 for each in machine.jobs.values())
    (kept,) = (decision for decision in decisions if decision.kept)
    assert kept.tried == "memory for 'job-1' lower, 'job-2' lower"
    assert kept.speeds == pytest.approx((1.0, 1.5, 1.0), abs=0.05)
    assert decisions[0].tried == "memory for 'job-2' whole, none for 'job-1'"  # how fast it is whole was not known
    assert not decisions[0].kept


def test_what_does_not_help_is_undone() -> None:
    machine = Machine(100, {1: Job(20, 70, 0.3), 2: Job(20, 70, 0.3)})
    decisions = machine.run(200)
    assert len(decisions) == 2 and not any(decision.kept for decision in decisions)
    assert machine.there == {1} and machine.jobs[1].held == 70
    assert machine.jobs[1].share is None and machine.jobs[2].share == 0


def test_the_job_that_gains_most_for_its_bytes_has_the_memory() -> None:
    # Two jobs are whole beside each other, three are not; the third's bytes cost the others more than it brings.
    jobs = {1: Job(40, 50, 0.3), 2: Job(10, 50, 0.3), 3: Job(10, 50, 0.3)}
    machine = Machine(95, jobs)
    machine.run(1)
    assert machine.there == {1} or machine.there == {1, 2, 3}
    machine.run(600)
    assert machine.there == {2, 3} and all(jobs[each].held == 50 for each in (2, 3))


def test_a_set_that_cannot_be_is_undone() -> None:
    machine = Machine(100, {1: Job(20, 70, 0.8), 2: Job(20, 70, 0.7, lowest=65)})
    decisions = machine.run(200)
    assert not any(decision.kept for decision in decisions) and machine.there == {1}


def test_a_window_without_a_step_is_no_speed() -> None:
    """Of a job that was evaluated for as long as it was whole, and is seen to train when it is lower."""
    machine = Machine(100, {1: Job(20, 70, 5e10, speed=1e-9), 2: Job(20, 70, 0.9)})
    machine.run(900)
    assert machine.there == {1, 2} and all(each.held == 60 for each in machine.jobs.values())


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("lower", [0.5, 0.52, 0.8])
def test_nothing_goes_back_and_forth_under_noise(lower: float, seed: int) -> None:
    machine = Machine(100, {1: Job(20, 70, lower), 2: Job(20, 70, lower)}, noise=0.4, seed=seed)
    decisions = machine.run(AGAIN_SECONDS)
    assert len(decisions) <= 3 and sum(decision.kept for decision in decisions) == (lower == 0.8)
    assert len(machine.run(2000)) <= 8 and sum(decision.kept for decision in machine.decisions) == (lower == 0.8)


def test_all_is_tried_again_after_a_growing_time() -> None:
    machine = Machine(100, {1: Job(20, 70, 0.3), 2: Job(20, 70, 0.3)})
    machine.run(200)
    assert not machine.run(100) and len(machine.run(150)) == 2
    assert not machine.run(400)
    for each in machine.jobs.values():
        each.lower = 0.9
    machine.run(400)
    assert machine.there == {1, 2}


def test_a_job_that_leaves_and_one_that_comes() -> None:
    machine = Machine(100, {1: Job(20, 70, 0.8), 2: Job(20, 70, 0.7)})
    machine.run(120)
    del machine.jobs[2]
    machine.run(1)
    assert machine.jobs[1].share is None and machine.jobs[1].held == 70
    machine.jobs[3] = Job(20, 70, 0.9)
    machine.run(1)
    assert machine.there == {1}
    machine.run(120)
    assert machine.there == {1, 3} and machine.decisions[-1].kept


@pytest.mark.parametrize("after", [8.0, 120.0])
def test_guaranteed_jobs_end_it(after: float) -> None:
    machine = Machine(100, {1: Job(20, 70, 0.8), 2: Job(20, 70, 0.7)})
    machine.run(after)
    assert any(each.share is not None for each in machine.jobs.values())
    machine.guaranteed = True
    machine.run(0.2)
    assert all(each.share is None for each in machine.jobs.values())
    assert not machine.run(60)


def test_shares_that_were_taken_back_are_not_given_again_soon() -> None:
    machine = Machine(100, {1: Job(20, 70, 0.8), 2: Job(20, 70, 0.7)})
    while machine.jobs[1].share != 80:
        machine.run(0.02)
    machine.give({1: None, 2: None})
    assert not machine.run(100) and all(each.share is None for each in machine.jobs.values())
    machine.run(AGAIN_SECONDS + 100)
    assert machine.there == {1, 2} and machine.jobs[1].share == 80


def test_nothing_is_tried_where_all_fit_or_one_is_alone() -> None:
    for machine in (Machine(120, {1: Job(20, 70, 0.8), 2: Job(20, 70, 0.7)}), Machine(60, {1: Job(20, 70, 0.8)})):
        assert not machine.run(100) and not machine.changed
