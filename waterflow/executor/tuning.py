"""Tuning by trials: the number of lanes in use, and the number of trials of a study that run at once."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from waterflow import _C

logger = logging.getLogger("waterflow")

WINDOW_SECONDS, WINDOW_STEPS = 0.25, 8  # the least over which speed is measured
FIRST_SECONDS, MOST_SECONDS = 5.0, 300.0  # seconds of work between two trials; doubled after each trial without a gain
LEAST_WINDOWS = 20  # windows' worth of work for each window of a trial, so that a bad trial costs little
BUSY = 0.6  # share of a window that lanes must work: else jobs wait for something else, such as data
GAIN = 1.05  # the speedup that a trial must show to be kept; below is noise


@dataclass(frozen=True)
class Decision:
    """A setting that was tried, and whether it was kept.

    ``at`` is in seconds of ``time.perf_counter``. ``speeds`` are those of all jobs together, in seconds of work alone per second:
    before the trial, during it, and, if measured, after it; empty for a report of which nothing was tried.
    """

    at: float
    tried: str
    kept: bool
    speeds: tuple[float, ...]

    def __str__(self) -> str:
        before, with_it, *again = (f"{speed:.4g}" for speed in self.speeds)
        then = f", then {again[0]}" if again else ""
        return f"{self.tried}: {'kept' if self.kept else 'not kept'} (speed {with_it}, {before} before{then})"


@dataclass
class LanesInUse:
    """Chooses the number of lanes in use by trials of half as many, down to one, and of twice as many. Thread-safe.

    A trial is one window between two windows of the setting before, so that drift of the machine does not count for it. It is
    given up if jobs come or go, or if lanes are idle that jobs and memory would allow to work. Of those that work already half as
    many are tried. The results of steps do not depend on the number of lanes.
    """

    native: _C.Engine
    decisions: list[Decision]
    now: Callable[[], float] = time.perf_counter
    next_look: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.count = self.native.lanes
        self._pause = FIRST_SECONDS  # of work by each lane, from ``_decided`` seconds of work by all to the next trial
        self._decided, self._least = 0.0, 0.0  # and no trial before ``_least`` of them
        self._jobs = 0
        self._down = True
        self._trial: int | None = None
        self._windows: list[float] = []
        self._restart()

    def begin(self, one: bool) -> None:
        """Start on ``one`` lane, or on all, until a trial was made."""
        # Python runs one thread at a time, and each call of torch hands the lock over: two lanes of eager steps took 1.5 to
        # 2.1 times as long as a plain loop (docs/experiments/lanes.md).
        with self._lock:
            count = 1 if one else self.native.lanes
            if count != self.count and not self.decisions:
                self.count = count
                self._restart()

    def poll(self, jobs: int) -> None:
        """Learn from the present window if it is over, and begin the next one. ``jobs`` is their number in the engine now."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._look(jobs)
        finally:
            self._lock.release()

    def _look(self, jobs: int) -> None:
        now = self.now()
        if now < self.next_look:
            return
        if jobs != self._jobs or jobs < 2:  # other jobs, other speeds; alone a job has its lane
            self._jobs = jobs
            self._restart()
            return
        wall, work, lanes = now - self._since, self._work(), min(self.count, jobs)
        due = max(self._decided + self._pause * lanes, self._least)
        if self._trial is None and work < due:
            self._restart((due - work) / lanes)
            return
        if self.native.steps_done - self._steps < WINDOW_STEPS:
            self.next_look = now + WINDOW_SECONDS
            return
        in_use = self._trial if self._trial is not None and len(self._windows) == 1 else self.count
        working, may_work = (work - self._worked) / wall, min(in_use, jobs)
        if self.native.waiting_for_room:
            may_work = min(may_work, max(1, round(working)))
        if working < BUSY * may_work:
            self._decided = self._decided if self._trial is None else work
            self._restart()
            return
        if not self._windows and work < LEAST_WINDOWS * wall * lanes:
            self._least = LEAST_WINDOWS * wall * lanes
            return
        self._trial = self._trial or self._other(may_work)
        if self._trial is None:
            self._decided = work
            self._restart()
            return
        self._windows.append((self.native.progress_ns - self._progress) * 1e-9 / wall)
        if len(self._windows) == 3:
            self._decide(now, wall)
            return
        self.native.set_active_lanes(self._trial if len(self._windows) == 1 else self.count)
        self._begin(WINDOW_SECONDS)

    def _other(self, working: int) -> int | None:
        # Half as many or twice as many, in the direction that was better last. More have work only if all lanes in use have.
        fewer, more = working // 2, min(2 * self.count, self.native.lanes) if working == self.count < self._jobs else 0
        found = [count for count in ((fewer, more) if self._down else (more, fewer)) if count not in (0, self.count)]
        return found[0] if found else None

    def _decide(self, now: float, wall: float) -> None:
        assert self._trial is not None
        before, tried, after = self._windows
        kept = tried > GAIN * max(before, after)  # a machine that drifts is faster on one side of the trial
        what = "taking turns on one lane" if self._trial == 1 else f"{self._trial} lanes"
        self.decisions.append(Decision(now, what, kept, (before, tried, after)))
        logger.info("%s", self.decisions[-1])
        self._down = kept == (self._trial < self.count)
        if kept:
            self.count = self._trial
        self._pause = FIRST_SECONDS if kept else min(2 * self._pause, MOST_SECONDS)
        self._decided = self._work()
        self._least = self._decided + LEAST_WINDOWS * wall * min(self.count, self._jobs)
        self._restart()

    def _work(self) -> float:
        # Seconds of all lanes together: while they are idle no trial comes nearer.
        return sum(self.native.lane_busy_ns) * 1e-9

    def _restart(self, seconds: float = 0.0) -> None:
        self._trial, self._windows = None, []
        self.native.set_active_lanes(self.count)
        self._begin(max(seconds, WINDOW_SECONDS))

    def _begin(self, seconds: float) -> None:
        self._since, self._steps, self._progress = self.now(), self.native.steps_done, self.native.progress_ns
        self._worked, self.next_look = self._work(), self._since + seconds


class InPython:
    """Tells whether jobs are mostly in Python, where one thread runs at a time: eager, or loading and between their steps."""

    MOST, LESS = 0.6, 0.4  # of the time: it begins above the first, and ends below the second
    LEAST_SECONDS = 0.1

    def __init__(self) -> None:
        self._so, self._between, self._busy = False, 0.0, 0.0  # since the last decision; before it

    def update(self, between: float, busy: float, eager: int, jobs: int) -> bool:
        """Return it for ``jobs``, of which some are ``eager``.

        ``between`` are the seconds since the last call that they have computed between their steps, ``busy`` those of lanes so far.
        """
        self._between += between
        whole = self._between + busy - self._busy
        if whole >= self.LEAST_SECONDS:
            self._so = self._between > (self.LESS if self._so else self.MOST) * whole
            self._between, self._busy = 0.0, busy
        return self._so or 2 * eager > jobs


class AutoConcurrency:
    """Adjusts the number of a study's trials that run at once to the work that the lanes are measured to do.

    ``progress_ns`` counts the work done, in nanoseconds that it takes alone: lanes that slow each other down are busy and do
    less. It begins with one trial per lane. While lanes are idle for more than a tenth of the time it tries one trial more,
    and keeps it if the lanes then do more work than before; if not, it goes back and waits before it tries again. There are
    never more than four trials per lane.
    """

    WINDOW_SECONDS = 0.5
    ENOUGH = 0.9
    GAIN = 0.05

    def __init__(self, lanes: int, progress_ns: Callable[[], int], now: Callable[[], float] = time.perf_counter) -> None:
        self.limit = lanes
        self.most = 4 * lanes
        self._in_use = lanes
        self._progress_ns = progress_ns
        self._now = now
        self._since = now()
        self._busy = progress_ns()
        self._before_raise: float | None = None
        self._hold_until = 0.0

    def update(self, running: int, memory_allows: bool, in_use: int) -> int:
        """Return the number of trials that may run at once from now on; ``running`` do now, and ``in_use`` lanes take steps.

        If most steps run eagerly, one lane is in use, and their trials run one after the other.
        """
        now = self._now()
        if in_use != self._in_use:
            self.limit = min(self.limit, in_use) if in_use < self._in_use else max(self.limit, in_use)
            self._in_use, self._before_raise = in_use, None
            self._since, self._busy = now, self._progress_ns()
        if now - self._since < self.WINDOW_SECONDS:
            return self.limit
        busy = self._progress_ns()
        share = (busy - self._busy) * 1e-9 / (now - self._since) / in_use
        self._since, self._busy = now, busy
        if running < self.limit:
            return self.limit  # fewer trials run than are allowed, so the measurement says nothing of the limit
        if self._before_raise is not None:
            if share < self._before_raise + self.GAIN and self.limit > in_use:
                self.limit -= 1
                self._hold_until = now + 20 * self.WINDOW_SECONDS
            self._before_raise = None
        elif share < self.ENOUGH and self.limit < self.most and memory_allows and now >= self._hold_until:
            self._before_raise = share
            self.limit += 1
        return self.limit
