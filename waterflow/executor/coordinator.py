"""The local coordinator of one device: opportunistic jobs get what guaranteed ones do not miss.

After AntMan's local coordinator (Xiao et al., OSDI 2020, 3.3): the time of a guaranteed job's steps is watched, opportunistic
work is let go faster step by step while nothing suffers, and cut at once when it does.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

ALONE_STEPS, ALONE_SECONDS = 16, 0.06  # of a guaranteed job without others, at least
BESIDE = 4  # times as long a window beside opportunistic work
SETTLED = 3  # times as long again once the rate has been found
SETTLING = 8  # comparisons until then
KEPT = 24  # comparisons that the rate is found from
FIRST_RATE, LEAST_RATE, RAISE = 0.1, 0.02, 0.1
STEADY = 0.05  # by how much a job's median alone may differ before and after: else the machine has changed
TOO_LONG, FAR_TOO_LONG = 4, 8  # times what is allowed: of a whole window, and of the first steps of one
TAIL = 0.98  # the slowest steps of the last ones, with and without others: so many at most, and at least
TAIL_STEPS, LEAST_TAIL_STEPS = 2048, 64
AWAY_SECONDS = 1.0  # a guaranteed job without a step for longer is not protected, or for twice its longest of late


class Lanes(Protocol):
    """What is asked of an engine's lanes."""

    def set_rates(self, beside: float, between: float) -> None:
        """Shares of time for opportunistic work: while guaranteed steps run, and between them."""

    def take_step_times(self) -> Sequence[tuple[int, int, int, int]]:
        """(job, could begin, ended, busy) of guaranteed steps since the last call, in nanoseconds."""


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
        """Whether enough has been compared."""
        return len(self._seen) >= SETTLING

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
class Coordinator:
    """Watches guaranteed steps with and without opportunistic work, window by window, and sets its rate. Thread-safe."""

    lanes: Lanes
    allowed: Allowed = Allowed()
    now: Callable[[], float] = time.perf_counter
    slowdown: float = 0.0  # of the median, as last seen
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.control = RateControl(self.allowed)
        self._times: dict[int, list[int]] = defaultdict(list)  # of guaranteed jobs, in this window
        self._alone: dict[int, float] = {}  # medians of the last window alone, and of the one beside others since
        self._seen: dict[int, float] = {}
        self._tails: dict[int, tuple[deque[float], deque[float]]] = {}  # alone and beside, over the window's median
        self._last: dict[int, tuple[float, float]] = {}  # of guaranteed jobs: when a step ended, the longest of late
        self._jobs: frozenset[int] = frozenset()
        self._beside = False
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

    def look(self) -> None:
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
        if self._free:
            self._free = False
            self._begin(False)
            return
        if self._beside and not self._last.keys() <= self._jobs:  # one came: nothing is known of it
            self._seen = {}
            self._begin(False)
            return
        if self._beside and now >= self._next_check and self._suffers():
            self.control.cut()
            self._times.clear()  # seen at a moment that was chosen for being slow: no measurement
            self._seen = {}
            self._begin(False)
            return
        share = (BESIDE * (SETTLED if self.control.settled else 1)) if self._beside else 1
        if now - self._since < ALONE_SECONDS * share:
            return
        if min(len(self._times[job]) for job in self._last) < ALONE_STEPS * share:  # nobody's strain is passed over
            return
        self._turn()

    def _suffers(self) -> bool:
        """Whether half a short window is enough to see that steps take far too long."""
        self._next_check = self.now() + ALONE_SECONDS / 2
        most = 1 + FAR_TOO_LONG * self.allowed.median
        return any(
            job in self._alone and len(times) >= ALONE_STEPS // 2 and statistics.median(times) > most * self._alone[job]
            for job, times in self._times.items()
        )

    def _turn(self) -> None:
        """A window is over: one beside others is compared with those before and behind it."""
        now = {job: statistics.median(times) for job, times in self._times.items()}
        if self._beside:
            self._seen = now
        else:
            if frozenset(now) != self._jobs:
                self._jobs = frozenset(now)
                self.control.forget()
                self._tails.clear()
            elif self._seen:
                self._compare(self._alone, self._seen, now)
            self._alone, self._seen = now, {}
        for job, times in self._times.items():
            kept = self._tails.setdefault(job, (deque(maxlen=TAIL_STEPS), deque(maxlen=TAIL_STEPS)))
            kept[self._beside].extend(time / now[job] for time in times)
        self._begin(not self._beside)

    def _compare(self, before: dict[int, float], beside: dict[int, float], after: dict[int, float]) -> None:
        slower, tails = [], []
        for job in before.keys() & beside.keys() & after.keys():
            if abs(after[job] / before[job] - 1) > STEADY:
                continue
            slower.append(2 * beside[job] / (before[job] + after[job]) - 1)
            tails.append(self._tail(job))
        if slower:
            self.slowdown = max(slower)
            known = [tail for tail in tails if tail is not None]
            self.control.learn(self.slowdown, max(known, default=None), of_all=len(slower) == len(after))

    def _tail(self, job: int) -> float | None:
        """How much longer than a median step the slowest ones take beside others; None where there were too few of them."""
        kept = self._tails[job]
        if min(map(len, kept)) < LEAST_TAIL_STEPS:
            return None
        without, with_others = (sorted(steps)[int(TAIL * len(steps))] for steps in kept)
        return with_others / without - 1

    def _begin(self, beside: bool) -> None:
        self._beside = beside
        rate = self.control.rate if beside else 0.0
        self.lanes.set_rates(rate, rate)
        self._times.clear()
        self._since = self.now()
        self._next_check = self._since + ALONE_SECONDS / 4
        self._since_ns = int(self._since * 1e9)
