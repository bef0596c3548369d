"""The local interference of one device: opportunistic jobs get what guaranteed ones do not miss.

After AntMan's local interference (Xiao et al., OSDI 2020, 3.3): the time of a guaranteed job's steps is watched, opportunistic
work is let go faster step by step while nothing suffers, and cut at once when it does.

A machine that others use changes its own speed, by a third and within tenths of a second. So windows with and without opportunistic
work are short and come in turns, each with is compared with those right before and behind it, and what counts is the median of the pairs
in which the machine was steadiest.
"""

from __future__ import annotations

import itertools
import logging
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from waterflow.executor.tuning import Decision

PAIRS = 8  # windows without opportunistic work and beside it, in turns: one comparison, of its steadiest half
ALONE_STEPS, ALONE_SECONDS = 2, 0.02  # of each guaranteed job in a window without, at least
BESIDE = 4  # times as long a window beside opportunistic work
SETTLED = 3  # times as long again once the rate has been found
SETTLING = 6  # comparisons in which it has not changed much
KEPT = 24  # comparisons that the rate is found from
FIRST_RATE, LEAST_RATE, RAISE = 0.1, 0.02, 0.1
TOO_LONG, FAR_TOO_LONG = 4, 8  # times what is allowed: in a comparison, and in the first steps of one window
STRIKES = 2  # windows in a row with steps that took far too long beside others, and not behind them: the rate is cut
TAIL = 0.98  # the slowest steps of the last ones, with and without others
TAIL_STEPS, LEAST_TAIL_STEPS = 2048, 64  # so many of them are kept at most, and needed at least
MOST_TAIL_STEPS = 128  # from one comparison
AWAY_SECONDS = 1.0  # a guaranteed job without a step for longer is not protected, or for twice its longest of late


Medians = dict[int, float]  # by job, in nanoseconds


class ThrottledLanes(Protocol):
    """What is asked of an engine's lanes."""

    def set_rates(self, beside: float, between: float) -> None:
        """Shares of time for opportunistic work: while guaranteed steps run, and between them."""

    def take_step_times(self) -> Sequence[tuple[int, int, int, int]]:
        """(job, could begin, ended, busy) of guaranteed steps since the last call, in nanoseconds."""

    @property
    def opportunistic_ns(self) -> int:
        """For how long opportunistic steps have been under way so far, in nanoseconds."""


@dataclass(frozen=True)
class Allowed:
    """By how much the steps of guaranteed jobs may take longer, as shares: the median, and those of the tail."""

    median: float = 0.03
    tail: float = 0.08


@dataclass
class RateControl:
    """Finds the largest rate at which guaranteed steps take no longer than is allowed.

    What is measured is noisy and nearly proportional to the rate: the slowdown per rate is a median of the last comparisons, in which
    those at higher rates, where more of it is to be seen, count for more.
    """

    allowed: Allowed = Allowed()
    rate: float = FIRST_RATE
    _seen: deque[tuple[float, float, float | None]] = field(default_factory=lambda: deque(maxlen=KEPT))

    def learn(self, median: float, tail: float | None, of_all: bool = True) -> None:
        """At the present rate the median of guaranteed steps was so much longer, and their tail where it is known, as shares.

        What is not known ``of_all`` guaranteed jobs never raises the rate.
        """
        strained = median > self.allowed.median or (tail is not None and tail > self.allowed.tail)
        if not of_all and not strained:
            return
        self._seen.append((self.rate, median, tail))
        wanted = min(
            _largest_rate([(rate, seen) for rate, seen, _ in self._seen], self.allowed.median),
            _largest_rate([(rate, seen) for rate, _, seen in self._seen if seen is not None], self.allowed.tail),
        )
        if median > TOO_LONG * self.allowed.median:
            wanted = min(wanted, self.rate / 2)
        self.rate = max(LEAST_RATE, min(wanted, self.rate + (RAISE if of_all else 0.0), 1.0))

    def cut(self) -> None:
        """Steps take far too long, whatever was learnt."""
        self.rate = max(LEAST_RATE, self.rate / 2)

    @property
    def settled(self) -> bool:
        """Whether the rate has been found: in the last comparisons it has hardly changed."""
        rates = [rate for rate, _, _ in itertools.islice(reversed(self._seen), SETTLING)]
        return len(rates) == SETTLING and max(rates) - min(rates) < RAISE

    def forget(self) -> None:
        """Other jobs: what was learnt does not hold for them."""
        self._seen.clear()
        self.rate = min(self.rate, FIRST_RATE)


def _largest_rate(seen: list[tuple[float, float]], allowed: float) -> float:
    """From slowdowns at rates: the rate at which what is allowed would be reached, 1 at most."""
    slopes = sorted((slower / rate, rate * rate) for rate, slower in seen)
    half, slope = sum(weight for _, weight in slopes) / 2, 0.0
    for slope, weight in slopes:  # noqa: B007
        half -= weight
        if half <= 0:
            break
    return allowed / slope if slope > allowed else 1.0


@dataclass
class InterferenceController:
    """Watches guaranteed steps with and without opportunistic work, window by window, and sets its rate. Thread-safe."""

    lanes: ThrottledLanes
    allowed: Allowed = Allowed()
    now: Callable[[], float] = time.perf_counter
    slowdown: float = 0.0  # of the median, as last seen
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.control = RateControl(self.allowed)
        self._times: dict[int, list[int]] = defaultdict(list)  # of guaranteed jobs, in this window
        self._windows: list[dict[int, list[int]]] = []  # of this comparison: alone, beside, alone ...
        self._alone: Medians = {}  # of the last window alone
        self._suspect: Medians = {}  # of one beside others that was ended because steps took far too long
        self._strikes = 0  # such windows in a row
        self._tails: dict[int, tuple[deque[float], deque[float]]] = {}  # alone and beside, over the comparison's median
        self._last: dict[int, tuple[float, float]] = {}  # of guaranteed jobs: when a step ended, the longest of late
        self._jobs: frozenset[int] = frozenset()
        self._free = True
        self._begin(False)
        self.lanes.set_rates(1.0, 1.0)

    @property
    def rate(self) -> float:
        """The share of time that opportunistic work has beside guaranteed steps."""
        return 1.0 if self._free else self.control.rate

    @property
    def present(self) -> frozenset[int]:
        """Guaranteed jobs that come for steps."""
        return frozenset(self._last)

    def poll(self) -> None:
        """Where a window is over: learn from it. Called when a step has ended, of whichever job."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._look()
        finally:
            self._lock.release()

    def _look(self) -> None:
        now = self.now()
        for job, ready, ended, _ in self.lanes.take_step_times():
            longest = max((ended - ready) * 1e-9, 0.9 * self._last[job][1] if job in self._last else 0.0)
            self._last[job] = (now, longest)
            if ready >= self._since_ns:
                self._times[job].append(ended - ready)
        for job in [j for j, (last, longest) in self._last.items() if now - last > max(AWAY_SECONDS, 2 * longest)]:
            del self._last[job]
            self._times.pop(job, None)  # the others' windows do not wait for it
        if not self._last:
            if not self._free:
                self._free = True
                self.lanes.set_rates(1.0, 1.0)
            return
        if self._free or (self._alone and not self._last.keys() <= self._jobs):  # nothing is known of who came
            self._free = False
            self._alone, self._suspect, self._strikes = {}, {}, 0
            del self._windows[len(self._windows) // 2 * 2 :]  # one alone comes now
            self._begin(False)
        elif self._beside and now >= self._next_check and self._seem_to_suffer():
            self._begin(False)
        else:
            share = (BESIDE * (SETTLED if self.control.settled else 1)) if self._beside else 1 if self._alone else PAIRS
            steps = min(len(self._times[job]) for job in self._last)  # nobody's strain is passed over
            if now - self._since >= ALONE_SECONDS * share and steps >= ALONE_STEPS * share:
                self._turn()

    def _seem_to_suffer(self) -> bool:
        """Whether the first steps of this window take far too long, against those of the window before."""
        self._next_check = self.now() + ALONE_SECONDS / 2
        first = _medians({job: times for job, times in self._times.items() if len(times) >= ALONE_STEPS})
        self._suspect = first if self._far_too_long(first, self._alone) else {}
        return bool(self._suspect)

    def _far_too_long(self, beside: Medians, alone: Medians) -> bool:
        most = 1 + FAR_TOO_LONG * self.allowed.median
        return any(beside[job] > most * alone[job] for job in beside.keys() & alone.keys())

    def _turn(self) -> None:
        """A window is over, and with the last of a comparison something is learnt."""
        if not self._beside:
            before, self._alone = self._alone, _medians(self._times)
            if self._suspect:  # no measurement: it was ended at a moment chosen for being slow
                slowest = {job: max(median, before.get(job, 0.0)) for job, median in self._alone.items()}
                if self._far_too_long(self._suspect, slowest):  # and the machine itself has not become as slow
                    self._strikes += 1
                if self._strikes == STRIKES:
                    self.control.cut()
                    self._strikes = 0
                self._suspect = {}
                self._windows.pop()  # the one before it
            if self._alone.keys() != self._jobs:
                self._jobs = frozenset(self._alone)
                self.control.forget()
                self._tails.clear()
                self._windows = []
        else:
            self._strikes = 0
        if self._beside and self.lanes.opportunistic_ns - self._others_ns < (self.now() - self._since) * 5e8:
            self._windows.pop()  # beside nobody for more than half of it: of no use, as is the one before
        else:
            self._windows.append(dict(self._times))
        if len(self._windows) > 2 * PAIRS:
            self._compare()
            del self._windows[:-1]
        self._begin(not self._beside)

    def _compare(self) -> None:
        slower, tails = [], []
        medians = [_medians(times) for times in self._windows]
        jobs = frozenset.intersection(*map(frozenset, medians))
        for job in jobs:
            seen = [window[job] for window in medians]
            pairs = sorted(
                (abs(after / before - 1), 2 * beside / (before + after) - 1)
                for before, beside, after in zip(seen[::2], seen[1::2], seen[2::2], strict=False)
            )
            slower.append(statistics.median(each for _, each in pairs[: PAIRS // 2]))  # while the machine was steadiest
            tails.append(self._tail(job))
        if slower:
            self.slowdown = max(slower)
            known = [tail for tail in tails if tail is not None]
            self.control.learn(self.slowdown, max(known, default=None), of_all=jobs == self._jobs)

    def _tail(self, job: int) -> float | None:
        """How much longer the slowest steps take beside others, beyond what chance makes likely; None where there were too few of them.

        All steps of a comparison are taken over the median of all of them: what the machine does to both is seen in both.
        """
        steps = [[time for times in self._windows[first:-1:2] for time in times[job]] for first in (False, True)]
        median = statistics.median(itertools.chain(*steps))
        kept = self._tails.setdefault(job, (deque(maxlen=TAIL_STEPS), deque(maxlen=TAIL_STEPS)))
        for of_late, times in zip(kept, steps, strict=True):
            of_late.extend(time / median for time in times[:: -(-len(times) // MOST_TAIL_STEPS)])
        if min(map(len, kept)) < LEAST_TAIL_STEPS:
            return None
        without, with_others = (_quantile(of_late, sigmas) for of_late, sigmas in zip(kept, (1, -1), strict=True))
        return with_others / without - 1

    def _begin(self, beside: bool) -> None:
        self._beside = beside
        rate = self.control.rate if beside else 0.0
        self.lanes.set_rates(rate, rate)
        self._times.clear()
        self._since = self.now()
        self._next_check = self._since + ALONE_SECONDS / 2
        self._since_ns = int(self._since * 1e9)
        self._others_ns = self.lanes.opportunistic_ns


def _medians(times: dict[int, list[int]]) -> Medians:
    return {job: statistics.median(each) for job, each in times.items()}


def _quantile(steps: Sequence[float], sigmas: int) -> float:
    """The tail's, moved by so many standard deviations of how many of the steps lie behind it (a binomial count)."""
    share = TAIL + sigmas * (TAIL * (1 - TAIL) / len(steps)) ** 0.5
    return sorted(steps)[min(int(share * len(steps)), len(steps) - 1)]


logger = logging.getLogger("waterflow")

STARVED_SECONDS = 30.0
LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Starved(Decision):
    """Not a trial: an opportunistic job had no step for long, as guaranteed jobs kept all lanes."""

    told: str = ""

    def __str__(self) -> str:
        return self.told


@dataclass
class Starvation:
    """Looks now and then how long each opportunistic job has had no step. Thread-safe; each is told of once."""

    decisions: list[Decision]
    queued: Callable[[int], int]  # steps that a job waits for
    lanes: int
    now: Callable[[], float] = time.perf_counter
    _since: dict[int, float] = field(default_factory=dict)  # when a job's last step ended, or it was first seen to wait
    _told: set[int] = field(default_factory=set)
    next_look: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ended(self, job: int) -> None:
        """A step of it has."""
        self._since.pop(job, None)

    def poll(self, opportunistic: Collection[int], guaranteed: Collection[int], names: dict[int, str]) -> None:
        """At what is in the engine; of the ``guaranteed`` jobs those that come for steps all the time."""
        now = self.now()
        if now < self.next_look or not self._lock.acquire(blocking=False):
            return
        try:
            self.next_look = now + LOOK_SECONDS
            self._look(now, opportunistic, guaranteed, names)
        finally:
            self._lock.release()

    def _look(
        self, now: float, opportunistic: Collection[int], guaranteed: Collection[int], names: dict[int, str]
    ) -> None:
        starve = len(guaranteed) >= self.lanes
        waiting = {job for job in opportunistic if starve and self._waits(job)}
        self._since = {job: self._since.get(job, now) for job in waiting}
        self._told &= set(opportunistic)
        for job in sorted(waiting - self._told):
            seconds = now - self._since[job]
            if seconds >= STARVED_SECONDS:
                self._told.add(job)
                others = ", ".join(repr(names.get(each, each)) for each in sorted(guaranteed))
                lanes = "the one lane" if self.lanes == 1 else f"all {self.lanes} lanes"
                what = f"opportunistic job {names.get(job, job)!r} has had no step for {seconds:.0f} s"
                told = (
                    f"{what}: guaranteed jobs ({others}) keep {lanes}; pass lanes={len(guaranteed) + 1}, or train fewer "
                    "guaranteed jobs at once"
                )
                self.decisions.append(Starved(now, what, False, (), told))
                logger.warning("%s", told)

    def _waits(self, job: int) -> bool:
        try:
            return self.queued(job) > 0
        except ValueError:  # it has left
            return False
