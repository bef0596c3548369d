"""Admission: never above the limit, never stuck, nobody left behind; decisions as a slow oracle takes them."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.native import Admission

Profile = tuple[list[int], list[int]]


def draw_profile(draw: random.Random, most: int, groups: int = 6) -> Profile:
    """Heights of a step: any shape, not only the mountain of a training step."""
    peaks, afters, before = [], [], 0
    for _ in range(draw.randint(1, groups)):
        after = draw.randint(0, most)
        peaks.append(draw.randint(max(before, after), most))
        afters.append(after)
        before = after
    return peaks, afters


@st.composite
def profiles(draw: st.DrawFn, most: int = 12) -> Profile:
    peaks, afters, before = [], [], 0
    for _ in range(draw(st.integers(1, 4))):
        after = draw(st.integers(0, most))
        peaks.append(draw(st.integers(max(before, after), most)))
        afters.append(after)
        before = after
    return peaks, afters


@dataclass
class Running:
    """A job in mid-step, as the oracle sees it."""

    peaks: list[int]
    afters: list[int]
    next: int = 0
    in_flight: bool = False

    def settled(self) -> int:
        return self.afters[self.next - 1] if self.next else 0

    def held(self) -> int:
        return self.peaks[self.next] if self.in_flight else self.settled()


def can_all_finish(running: list[Running], capacity: int) -> bool:
    """Try every order: each in turn runs all that is left of its step beside what the others hold then.

    Groups in flight end first; they need nothing more.
    """
    positions = [(job, job.next + job.in_flight) for job in running]
    for order in itertools.permutations(positions):
        held = {id(job): job.afters[at - 1] if at else 0 for job, at in positions}
        if all(run_alone(job, at, held, capacity) for job, at in order):
            return True
    return False


def run_alone(job: Running, at: int, held: dict[int, int], capacity: int) -> bool:
    for peak, after in zip(job.peaks[at:], job.afters[at:]):
        if sum(held.values()) - held[id(job)] + peak > capacity:
            return False
        held[id(job)] = after
    held[id(job)] = 0
    return True


@dataclass
class Oracle:
    """Slow, obvious book-keeping beside the real one."""

    capacity: int
    running: dict[int, Running] = field(default_factory=dict)
    # Who waits, oldest first, and how many steps of others have started since.
    waiting: dict[int, int] = field(default_factory=dict)
    pending: int | None = None

    def held(self) -> int:
        return sum(job.held() for job in self.running.values())

    def may(self, job: int, profile: Profile) -> bool:
        starts = job not in self.running
        if starts and (self.pending is not None or self.must_yield(job)):
            return False
        mine = Running(*profile) if starts else self.running[job]
        others = [each for number, each in self.running.items() if number != job]
        if sum(each.held() for each in others) + mine.peaks[mine.next] > self.capacity:
            return False
        issued = Running(mine.peaks, mine.afters, mine.next, in_flight=True)
        return can_all_finish([*others, issued], self.capacity)

    def must_yield(self, job: int) -> bool:
        urgent = [number for number, overtaken in self.waiting.items() if overtaken]
        return bool(urgent) and urgent[0] != job

    def issue(self, job: int, profile: Profile) -> None:
        if job not in self.running:
            self.running[job] = Running(*profile)
            for other in self.waiting:
                self.waiting[other] += other != job
        self.running[job].in_flight = True
        self.waiting.pop(job, None)

    def complete(self, job: int) -> bool:
        mine = self.running[job]
        mine.in_flight = False
        mine.next += 1
        ended = mine.next == len(mine.peaks)
        if ended:
            del self.running[job]
        self.adopt()
        return ended

    def release(self, job: int) -> None:
        self.running.pop(job, None)
        self.waiting.pop(job, None)
        self.adopt()

    def set_capacity(self, capacity: int) -> bool:
        self.pending = capacity
        self.adopt()
        return self.pending is None

    def adopt(self) -> None:
        if self.pending is None:
            return
        fits = self.held() <= self.pending and can_all_finish(list(self.running.values()), self.pending)
        if self.pending >= self.capacity or fits:
            self.capacity, self.pending = self.pending, None


class Decisions(RuleBasedStateMachine):
    """Every decision of the real admission is the one that the oracle takes, in any order of calls."""

    JOBS = 4

    @initialize(capacity=st.integers(6, 24))
    def begin(self, capacity: int) -> None:
        self.real, self.oracle = Admission(capacity), Oracle(capacity)
        self.profiles: dict[int, Profile] = {}

    def in_flight(self) -> list[int]:
        return [job for job, running in self.oracle.running.items() if running.in_flight]

    @rule(job=st.integers(0, JOBS - 1), profile=profiles(), wait=st.booleans())
    def try_issue(self, job: int, profile: Profile, wait: bool) -> None:
        if job in self.in_flight():
            with pytest.raises(RuntimeError, match="already has a group in flight"):
                self.real.try_issue(job, *profile)
            return
        if job in self.oracle.running:
            profile = self.profiles[job]
        expected = self.oracle.may(job, profile)
        assert self.real.must_yield(job) == self.oracle.must_yield(job)
        assert self.real.try_issue(job, *profile) == expected
        if expected:
            self.profiles[job] = profile
            self.oracle.issue(job, profile)
        elif wait:
            self.real.wait(job)
            self.oracle.waiting.setdefault(job, 0)

    @precondition(lambda self: self.in_flight())
    @rule(which=st.integers(0, JOBS - 1))
    def complete(self, which: int) -> None:
        flying = self.in_flight()
        job = flying[which % len(flying)]
        assert self.real.complete(job) == self.oracle.complete(job)

    @rule(job=st.integers(0, JOBS - 1))
    def complete_too_early(self, job: int) -> None:
        if job not in self.in_flight():
            with pytest.raises(RuntimeError, match="no group in flight"):
                self.real.complete(job)

    @rule(job=st.integers(0, JOBS))
    def release(self, job: int) -> None:
        self.real.release(job)
        self.oracle.release(job)

    @rule(capacity=st.integers(0, 30))
    def set_capacity(self, capacity: int) -> None:
        assert self.real.set_capacity(capacity) == self.oracle.set_capacity(capacity)

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "real"):
            return
        self.real.check()
        assert self.real.held == self.oracle.held() <= self.real.capacity
        assert self.real.capacity == self.oracle.capacity
        assert self.real.pending_capacity == self.oracle.pending
        assert sorted(self.real.waiting()) == sorted(self.oracle.waiting)
        for job in range(self.JOBS):
            running = self.oracle.running.get(job)
            assert self.real.in_step(job) == (running is not None)
            assert self.real.held_by(job) == (running.held() if running else 0)
            assert self.real.groups_left(job) == (len(running.peaks) - running.next if running else 0)

    @invariant()
    def never_stuck(self) -> None:
        """With nothing in flight, some job in mid-step may always go on."""
        if not hasattr(self, "real") or not self.oracle.running or self.in_flight():
            return
        assert any(self.oracle.may(job, self.profiles[job]) for job in self.oracle.running)


TestDecisions = Decisions.TestCase
TestDecisions.settings = settings(stateful_step_count=40)


class Driver:
    """Lanes that run jobs as the engine does: it offers room to those that wait, then starts new steps."""

    def __init__(self, draw: random.Random, lanes: int, capacity: int, make: Callable[[int], Admission] = Admission) -> None:
        self.draw = draw
        self.lanes = lanes
        self.admission = make(capacity)
        self.jobs: dict[int, list[Profile]] = {}  # the steps that are left
        self.ready: list[int] = []
        self.running: dict[int, int] = {}  # the groups that are done
        self.flying: list[int] = []
        self.overtaken: dict[int, int] = {}
        self.older: dict[int, int] = {}  # how many waited already when this one began to wait
        self.next_job = 0
        self.ended = 0

    def arrive(self) -> None:
        most = self.admission.pending_capacity or self.admission.capacity
        # Most jobs are small beside the limit; now and then one needs all of it.
        size = most if self.draw.random() < 0.2 else max(1, most // self.draw.randint(2, 5))
        self.jobs[self.next_job] = [draw_profile(self.draw, size) for _ in range(self.draw.randint(1, 4))]
        self.ready.append(self.next_job)
        self.next_job += 1

    def leave(self, job: int) -> None:
        self.admission.release(job)
        del self.jobs[job]
        self.overtaken.pop(job, None)
        self.running.pop(job, None)
        for group in (self.ready, self.flying):
            if job in group:
                group.remove(job)

    def change_limit(self, capacity: int) -> None:
        for job in [j for j in self.ready if max(self.jobs[j][0][0]) > capacity]:
            self.leave(job)
        for job in list(self.jobs):
            self.jobs[job] = [s for i, s in enumerate(self.jobs[job]) if i == 0 or max(s[0]) <= capacity]
        self.admission.set_capacity(capacity)

    def wait(self, job: int) -> None:
        self.admission.wait(job)
        if job not in self.overtaken:
            self.older[job] = len(self.overtaken)
            self.overtaken[job] = 0

    def grant(self, job: int) -> bool:
        starts = job not in self.running
        if starts and len(self.running) >= self.lanes:
            return False
        urgent = [number for number, count in self.overtaken.items() if count]
        if not self.admission.try_issue(job, *self.jobs[job][0]):
            self.wait(job)
            return False
        if starts:
            self.verify_turn(job, urgent)
            self.ready.remove(job)
            self.running[job] = 0
        self.overtaken.pop(job, None)
        for other in self.overtaken:
            self.overtaken[other] += starts
        self.flying.append(job)
        return True

    def offer(self) -> None:
        for job in self.admission.waiting():
            self.grant(job)
        for job in list(self.ready):
            if len(self.running) < self.lanes:
                self.grant(job)

    def complete(self, job: int) -> None:
        self.flying.remove(job)
        if self.admission.complete(job):
            assert self.running[job] + 1 == len(self.jobs[job].pop(0)[0])
            del self.running[job]
            if self.jobs[job]:
                self.ready.append(job)
            else:
                del self.jobs[job]
                self.ended += 1
        else:
            self.running[job] += 1
            if self.admission.waiting():
                self.wait(job)
            else:
                self.grant(job)
        self.offer()

    def verify_turn(self, job: int, urgent: list[int]) -> None:
        """``job`` begins a step, while ``urgent`` ones wait that were overtaken."""
        assert not urgent or urgent[0] == job, "a step started before one that had been overtaken"

    def verify(self) -> None:
        self.admission.check()
        assert all(count <= 1 + self.older[job] for job, count in self.overtaken.items()), "overtaken again and again"
        assert self.admission.held <= self.admission.capacity
        if self.jobs and not self.flying:
            raise AssertionError(f"stuck: {self.jobs} wait for ever in {self.admission.capacity}")

    def verify_end(self) -> None:
        assert self.admission.held == 0 and not self.admission.waiting(), "something is held when all has ended"

    def run(self, events: int, *, limits: bool) -> None:
        for _ in range(events):
            choice = self.draw.random()
            if choice < 0.25:
                self.arrive()
            elif choice < 0.3 and self.jobs:
                self.leave(self.draw.choice(sorted(self.jobs)))
            elif choice < 0.4 and limits:
                self.change_limit(self.draw.randint(10, 100))
            elif self.flying:
                self.complete(self.draw.choice(self.flying))
                self.verify()
                continue
            self.offer()
            self.verify()
        for _ in range(100_000):
            if not self.jobs or not self.flying:
                break
            self.complete(self.draw.choice(self.flying))
            self.verify()
        assert not self.jobs, "some never end"
        self.verify_end()


@pytest.mark.needs_time("random loads in short: never above the limit, never stuck")
@given(draw=st.randoms(use_true_random=False), lanes=st.integers(1, 5))
def test_every_job_ends(draw: random.Random, lanes: int) -> None:
    driver = Driver(draw, lanes, capacity=draw.randint(10, 100))
    driver.run(60, limits=False)


@pytest.mark.needs_time("random loads in short: never above the limit, never stuck")
@given(draw=st.randoms(use_true_random=False), lanes=st.integers(1, 5))
def test_every_job_ends_while_the_limit_changes(draw: random.Random, lanes: int) -> None:
    driver = Driver(draw, lanes, capacity=draw.randint(10, 100))
    driver.run(60, limits=True)


@pytest.mark.slow
def test_many_random_loads() -> None:
    """Plain random cases, for they are cheaper than drawn ones: 1,500 loads of 80 events."""
    for seed in range(1500):
        draw = random.Random(seed)
        try:
            Driver(draw, draw.randint(1, 6), draw.randint(10, 200)).run(80, limits=seed % 2 == 0)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


@pytest.mark.campaign
def test_very_many_random_loads() -> None:
    for seed in range(10_000, 60_000):
        draw = random.Random(seed)
        try:
            Driver(draw, draw.randint(1, 6), draw.randint(10, 200)).run(80, limits=seed % 2 == 0)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


# -- planted faults


class TooMuch(Admission):
    """Lets a tenth more in than there is."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity + max(1, capacity // 10))
        self.told = capacity

    @property
    def capacity(self) -> int:
        return self.told


class Unsafe(Admission):
    """Looks at what is held now, not at whether all could still finish."""

    def __init__(self, capacity: int) -> None:
        super().__init__(1 << 60)
        self.told = capacity

    @property
    def capacity(self) -> int:
        return self.told

    def try_issue(self, job: int, peak: list[int], after: list[int], opportunistic: bool = False) -> bool:
        following = len(peak) - self.groups_left(job) if self.in_step(job) else 0
        if self.held - self.held_by(job) + peak[following] > self.told:
            return False
        return super().try_issue(job, peak, after, opportunistic)


class NoTurns(Admission):
    """Forgets who was overtaken: whoever waits is as if it had come just now."""

    def try_issue(self, job: int, peak: list[int], after: list[int], opportunistic: bool = False) -> bool:
        waiting = self.waiting()
        for other in waiting:
            if not self.in_step(other):
                self.release(other)
        issued = super().try_issue(job, peak, after, opportunistic)
        for other in waiting:
            if other != job or not issued:
                self.wait(other)
        return issued


class Leak(Admission):
    """Keeps what a job holds that leaves in mid-step: another stands for it, which never ends."""

    def release(self, job: int) -> None:
        held = self.held_by(job)
        super().release(job)
        if held:
            super().try_issue(-1 - job, [held], [held])


FAULTS: dict[str, tuple[type[Admission], str]] = {
    "too much": (TooMuch, "<="),
    "unsafe": (Unsafe, "stuck"),
    "no turns": (NoTurns, "a step started before one that had been overtaken|overtaken again and again"),
    "leak": (Leak, "something is held|stuck"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault: str) -> None:
    make, sign = FAULTS[fault]
    found = []
    for seed in range(60):
        draw = random.Random(seed)
        try:
            Driver(draw, draw.randint(2, 6), draw.randint(10, 200), make).run(80, limits=False)
        except AssertionError as error:
            found.append(str(error))
    assert len(found) > 15 and any(re.search(sign, each) for each in found), found[:3]


# -- single cases


def test_heights_that_cannot_be() -> None:
    admission = Admission(10)
    for peak, after in ([], []), ([5], [6]), ([5, 4], [5, 4]), ([5], [-1]), ([5, 6], [5]):
        with pytest.raises(ValueError, match=r"group|peak"):
            admission.try_issue(0, peak, after)
    assert not admission.in_step(0) and admission.held == 0
    with pytest.raises(ValueError, match="negative"):
        Admission(-1)
    with pytest.raises(ValueError, match="negative"):
        admission.set_capacity(-1)


def test_two_mountains_that_would_block_each_other() -> None:
    """Each could take another step up, and then neither could reach its peak."""
    admission = Admission(10)
    step = ([4, 8, 4], [4, 4, 0])
    assert admission.try_issue(0, *step)
    assert not admission.try_issue(1, *step), "both would hold 4, and none could ever reach 8"
    admission.complete(0)
    assert admission.try_issue(0, *step)
    admission.complete(0)
    assert admission.try_issue(0, *step)
    assert admission.try_issue(1, *step), "the first needs no more than it holds"
    admission.check()


def test_a_large_job_is_not_overtaken_for_ever() -> None:
    admission = Admission(10)
    small, large = ([4], [0]), ([9], [0])
    assert admission.try_issue(0, *small)
    assert not admission.try_issue(2, *large)
    admission.wait(2)
    assert admission.try_issue(1, *small), "one step may overtake it"
    admission.complete(0)
    assert admission.must_yield(0) and not admission.must_yield(2)
    assert not admission.try_issue(0, *small), "and no second one"
    admission.complete(1)
    assert not admission.try_issue(1, *small)
    assert admission.try_issue(2, *large)
    admission.complete(2)
    assert admission.try_issue(0, *small) and admission.try_issue(1, *small)


@pytest.mark.parametrize("patience", [1, 2, 6])
def test_it_is_overtaken_as_often_as_it_has_patience(patience: int) -> None:
    admission = Admission(10, patience)
    small, large = ([4], [0]), ([9], [0])
    assert admission.try_issue(0, *small)
    admission.wait(2)
    running = 0
    for _ in range(patience):
        assert not admission.try_issue(2, *large)
        assert admission.try_issue(1 - running, *small)
        admission.complete(running)
        running = 1 - running
    assert not admission.try_issue(1 - running, *small) and admission.must_yield(1 - running)
    admission.complete(running)
    assert admission.try_issue(2, *large)


def test_a_step_under_way_goes_on_beside_one_that_was_overtaken() -> None:
    admission = Admission(10)
    assert admission.try_issue(0, [4, 4], [4, 0])
    admission.wait(1)
    admission.try_issue(2, [1], [0])
    assert admission.must_yield(0)
    admission.complete(0)
    assert admission.try_issue(0, [4, 4], [4, 0])


def test_nearest_to_its_end_first() -> None:
    admission = Admission(100)
    for job, groups in ((0, 5), (1, 2), (2, 3)):
        assert admission.try_issue(job, [1] * groups, [1] * groups)
        admission.complete(job)
    for job in (3, 0, 1, 2):
        admission.wait(job)
    assert admission.waiting() == [1, 2, 0, 3]


def test_a_lower_limit_waits_for_a_state_that_is_safe_under_it() -> None:
    admission = Admission(20)
    step = ([8, 12, 3], [8, 3, 0])
    assert admission.try_issue(0, *step)
    assert not admission.set_capacity(10)
    assert (admission.capacity, admission.pending_capacity) == (20, 10)
    assert not admission.try_issue(1, [1], [0]), "no step starts meanwhile"
    admission.complete(0)
    assert admission.pending_capacity == 10, "12 bytes are still to come"
    assert admission.try_issue(0, *step)
    admission.complete(0)
    assert (admission.capacity, admission.pending_capacity) == (10, None)
    assert admission.try_issue(1, [1], [0])


def test_a_higher_limit_holds_at_once_and_replaces_a_lower_one() -> None:
    admission = Admission(20)
    admission.try_issue(0, [15, 18], [15, 0])
    assert not admission.set_capacity(10)
    assert admission.set_capacity(30)
    assert (admission.capacity, admission.pending_capacity) == (30, None)
    assert admission.try_issue(1, [12], [0])
