"""Interference control on one device: limits opportunistic work so that guaranteed steps are hardly slower than alone.

After AntMan's local coordinator (Xiao et al., OSDI 2020, 3.3): the times of guaranteed steps are measured, the rate of
opportunistic work is raised step by step while they do not suffer, and cut at once when they do.

A machine that others use changes its own speed, by a third and within tenths of a second. So windows with and without
opportunistic work are short and alternate; each window with it is compared with the windows right before and after it, and
the median of the pairs in which the machine was steadiest counts (docs/experiments/lanes.md).
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

logger = logging.getLogger("waterflow")

PAIRS = 8  # windows without and with opportunistic work, alternating, in one comparison; its steadiest half counts
ALONE_STEPS, ALONE_SECONDS = 2, 0.02  # of each guaranteed job in a window without opportunistic work, at least
BESIDE = 4  # a window with opportunistic work is so many times longer
SETTLED = 3  # and so many times again once the rate has been found
SETTLING = 6  # comparisons in which the rate has hardly changed, after which it counts as found
KEPT = 24  # comparisons from which the rate is found
FIRST_RATE, LEAST_RATE, RAISE = 0.1, 0.02, 0.1
TOO_LONG, FAR_TOO_LONG = 4, 8  # times what is allowed: in a comparison, and in the first steps of one window
# Windows in a row whose steps took far too long beside others, and not in the window after it, before the rate is cut: a
# single one is mostly the machine itself.
STRIKES = 2
TAIL = 0.98  # the slowest steps of the last ones, with and without others
TAIL_STEPS, LEAST_TAIL_STEPS = 2048, 64  # so many of them are kept at most, and needed at least
MOST_TAIL_STEPS = 128  # from one comparison
# A guaranteed job without a step for this long, and for twice its longest recent step, is not protected.
AWAY_SECONDS = 1.0


Medians = dict[int, float]  # by job, in nanoseconds


class ThrottledLanes(Protocol):
    """The part of an engine's lanes that interference control uses."""

    def set_rates(self, beside: float, between: float) -> None:
        """Set the shares of time for opportunistic work: while guaranteed steps run, and between them."""

    def take_step_times(self) -> Sequence[tuple[int, int, int, int]]:
        """Return (job, ready, ended, busy) of the guaranteed steps since the last call, in nanoseconds."""

    @property
    def opportunistic_ns(self) -> int:
        """Nanoseconds for which opportunistic steps have been under way so far."""


@dataclass(frozen=True)
class Allowed:
    """The slowdown that guaranteed jobs may have, as shares of the step's time alone: of the median, and of the tail."""

    median: float = 0.03
    tail: float = 0.08


@dataclass
class RateControl:
    """Finds the largest rate at which guaranteed steps take no longer than is allowed.

    The measured slowdown is noisy and nearly proportional to the rate. So the slowdown per rate is a weighted median of the
    last comparisons, in which those at higher rates, where the slowdown is larger than the noise, count for more.
    """

    allowed: Allowed = Allowed()
    rate: float = FIRST_RATE
    _seen: deque[tuple[float, float, float | None]] = field(default_factory=lambda: deque(maxlen=KEPT))

    def learn(self, median: float, tail: float | None, of_all: bool = True) -> None:
        """Adjust the rate to the slowdown seen at it: of the median and, if known, of the tail, as shares.

        A comparison that is not ``of_all`` guaranteed jobs never raises the rate.
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
        """Halve the rate at once, as steps take far too long."""
        self.rate = max(LEAST_RATE, self.rate / 2)

    @property
    def settled(self) -> bool:
        """True if the rate has hardly changed in the last comparisons."""
        rates = [rate for rate, _, _ in itertools.islice(reversed(self._seen), SETTLING)]
        return len(rates) == SETTLING and max(rates) - min(rates) < RAISE

    def forget(self) -> None:
        """Drop all comparisons, as the guaranteed jobs have changed."""
        self._seen.clear()
        self.rate = min(self.rate, FIRST_RATE)


def _largest_rate(seen: list[tuple[float, float]], allowed: float) -> float:
    # From pairs (rate, slowdown): the rate, at most 1, at which the slowdown would reach what is allowed. The slope is the
    # median weighted by the square of the rate.
    slopes = sorted((slower / rate, rate * rate) for rate, slower in seen)
    half, slope = sum(weight for _, weight in slopes) / 2, 0.0
    for slope, weight in slopes:  # noqa: B007
        half -= weight
        if half <= 0:
            break
    return allowed / slope if slope > allowed else 1.0


@dataclass
class InterferenceController:
    """Measures guaranteed steps with and without opportunistic work, in alternating windows, and sets its rate. Thread-safe."""

    lanes: ThrottledLanes
    allowed: Allowed = Allowed()
    now: Callable[[], float] = time.perf_counter
    slowdown: float | None = None  # of the median, as last seen beside these guaranteed jobs
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.control = RateControl(self.allowed)
        self._times: dict[int, list[int]] = defaultdict(list)  # of guaranteed jobs, in this window
        self._windows: list[dict[int, list[int]]] = []  # of this comparison: alone, beside, alone ...
        self._alone: Medians = {}  # of the last window alone
        self._suspect: Medians = {}  # of a window beside others that was ended early, as steps took far too long
        self._strikes = 0  # such windows in a row
        self._tails: dict[int, tuple[deque[float], deque[float]]] = {}  # alone and beside, over the comparison's median
        self._last: dict[int, tuple[float, float]] = {}  # of guaranteed jobs: when a step ended, the longest of late
        self._jobs: frozenset[int] = frozenset()
        self._free = True
        self._begin(False)
        self.lanes.set_rates(1.0, 1.0)

    @property
    def rate(self) -> float:
        """The share of time that opportunistic work is given while guaranteed steps run."""
        return 1.0 if self._free else self.control.rate

    @property
    def present(self) -> frozenset[int]:
        """The guaranteed jobs that have had a step lately."""
        return frozenset(self._last)

    def poll(self) -> None:
        """Learn from the present window if it is over. Called when a step of any job has ended."""
        if not self._lock.acquire(blocking=False):  # another thread polls already; lanes do not wait for it
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
                self._free, self.slowdown = True, None
                self.lanes.set_rates(1.0, 1.0)
            return
        if self._free or (self._alone and not self._last.keys() <= self._jobs):  # nothing is known of the job that came
            self._free = False
            self._alone, self._suspect, self._strikes = {}, {}, 0
            del self._windows[len(self._windows) // 2 * 2 :]  # one alone comes now
            self._begin(False)
        elif self._beside and now >= self._next_check and self._seem_to_suffer():
            self._begin(False)
        else:
            share = (BESIDE * (SETTLED if self.control.settled else 1)) if self._beside else 1 if self._alone else PAIRS
            steps = min(len(self._times[job]) for job in self._last)  # a window lasts until each job has its steps
            if now - self._since >= ALONE_SECONDS * share and steps >= ALONE_STEPS * share:
                self._turn()

    def _seem_to_suffer(self) -> bool:
        # The window is ended early where its first steps take far too long, against those of the window before.
        self._next_check = self.now() + ALONE_SECONDS / 2
        first = _medians({job: times for job, times in self._times.items() if len(times) >= ALONE_STEPS})
        self._suspect = first if self._far_too_long(first, self._alone) else {}
        return bool(self._suspect)

    def _far_too_long(self, beside: Medians, alone: Medians) -> bool:
        most = 1 + FAR_TOO_LONG * self.allowed.median
        return any(beside[job] > most * alone[job] for job in beside.keys() & alone.keys())

    def _turn(self) -> None:
        if not self._beside:
            before, self._alone = self._alone, _medians(self._times)
            # A window that was ended early is no measurement, as its end was chosen for being slow: learning from such
            # windows took the rate to 0.1 where 0.3 was right.
            if self._suspect:
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
                self.slowdown = None
                self._tails.clear()
                self._windows = []
        else:
            self._strikes = 0
        if self._beside and self.lanes.opportunistic_ns - self._others_ns < (self.now() - self._since) * 5e8:
            self._windows.pop()  # no opportunistic step for more than half of it: of no use, as is the window before it
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
        # By how much the slowest steps take longer beside others, beyond one standard deviation of chance on either side (with
        # two, a p99 of +18 % went unseen); None with too few steps. All steps of a comparison are divided by their common
        # median: divided by each window's own, long windows, in which the machine changes its speed, looked slower.
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
    # The quantile of the tail, moved by ``sigmas`` standard deviations of the count of steps beyond it, which is binomial.
    share = TAIL + sigmas * (TAIL * (1 - TAIL) / len(steps)) ** 0.5
    return sorted(steps)[min(int(share * len(steps)), len(steps) - 1)]


STARVED_SECONDS = 30.0
LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Starved(Decision):
    """The report that an opportunistic job had no step for long, as guaranteed jobs kept all lanes. Nothing was tried."""

    told: str = ""

    def __str__(self) -> str:
        return self.told


@dataclass
class Starvation:
    """Warns, once for each, of opportunistic jobs that have had no step for ``STARVED_SECONDS``. Thread-safe."""

    decisions: list[Decision]
    queued: Callable[[int], int]  # steps that a job waits for
    lanes: int
    now: Callable[[], float] = time.perf_counter
    _since: dict[int, float] = field(default_factory=dict)  # when a job's last step ended, or it was first seen to wait
    _told: set[int] = field(default_factory=set)
    next_look: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ended(self, job: int) -> None:
        """Note that a step of ``job`` has ended."""
        self._since.pop(job, None)

    def poll(self, opportunistic: Collection[int], guaranteed: Collection[int], names: dict[int, str]) -> None:
        """Check the ``opportunistic`` jobs of the engine; ``guaranteed`` are the jobs that have had steps lately."""
        now = self.now()
        if now < self.next_look or not self._lock.acquire(blocking=False):
            return
        try:
            self.next_look = now + LOOK_SECONDS
            self._look(now, opportunistic, guaranteed, names)
        finally:
            self._lock.release()

    def _look(self, now: float, opportunistic: Collection[int], guaranteed: Collection[int], names: dict[int, str]) -> None:
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
