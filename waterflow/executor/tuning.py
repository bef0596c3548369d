"""How many lanes are in use: as many as get the most work done, found by trying."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from waterflow import _C

logger = logging.getLogger("waterflow")

WINDOW_SECONDS, WINDOW_STEPS = 0.25, 8  # over which speed is measured, at least
FIRST_SECONDS, MOST_SECONDS = 5.0, 300.0  # of work between two trials; twice as long after each that brought nothing
LEAST_WINDOWS = 20  # of work for each window of a trial
BUSY = 0.6  # share of a window that lanes must work: else jobs wait for something that lanes cannot help
GAIN = 1.05  # what a trial must bring


@dataclass(frozen=True)
class Decision:
    """What was tried, and whether it was kept; no ``speeds`` where nothing was. ``at`` on the clock of ``time.perf_counter``, in seconds.

    ``speeds``: before, with it, and where there is a third without it again; normalized, and in sum of all jobs.
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
    """Tries half as many lanes, down to jobs that take turns on one, and twice as many again. Thread-safe.

    A trial is one window between two windows of what was before, so that what drifts does not count for it; it ends where jobs come or
    go, or where lanes stand idle: work counts, not time. Bits do not depend on lanes.
    """

    native: _C.Engine
    decisions: list[Decision]
    now: Callable[[], float] = time.perf_counter
    next_look: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.count = self.native.lanes
        self._pause = FIRST_SECONDS
        self._due = FIRST_SECONDS  # seconds of work before the next trial
        self._jobs = 0
        self._down = True
        self._trial: int | None = None
        self._windows: list[float] = []
        self._restart()

    def begin(self, eager: int, jobs: int) -> None:
        """``eager`` of the jobs run without captures: until something was tried they take turns, as their Python code must anyway."""
        with self._lock:
            count = 1 if 2 * eager > jobs else self.native.lanes
            if count != self.count and not self.decisions:
                self.count = count
                self._restart()

    def poll(self, jobs: int) -> None:
        """Where a window is over: learn from it, and begin the next one. ``jobs`` is how many are in the engine now."""
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
        wall, work = now - self._since, self._work()
        if self._trial is None and work < self._due:
            self._restart(self._due - work)
            return
        if self.native.steps_done - self._steps < WINDOW_STEPS:
            self.next_look = now + WINDOW_SECONDS
            return
        in_use = self._trial if self._trial is not None and len(self._windows) == 1 else self.count
        if (work - self._worked) * self.native.lanes < BUSY * wall * in_use:
            if self._trial is not None:
                self._due = work + self._pause
            self._restart()
            return
        if not self._windows and work < LEAST_WINDOWS * wall:
            self._due = LEAST_WINDOWS * wall
            return
        self._trial = self._trial or self._other()
        if self._trial is None:
            self._due = math.inf
            return
        self._windows.append((self.native.progress_ns - self._progress) * 1e-9 / wall)
        if len(self._windows) == 3:
            self._decide(now, wall)
            return
        self.native.set_active_lanes(self._trial if len(self._windows) == 1 else self.count)
        self._begin(WINDOW_SECONDS)

    def _other(self) -> int | None:
        """What to try: half as many, or twice as many, in turn."""
        fewer, more = self.count // 2, min(2 * self.count, self.native.lanes)
        found = [count for count in ((fewer, more) if self._down else (more, fewer)) if count not in (0, self.count)]
        return found[0] if found else None

    def _decide(self, now: float, wall: float) -> None:
        assert self._trial is not None
        before, tried, after = self._windows
        kept = tried > GAIN * max(before, after)
        what = "taking turns on one lane" if self._trial == 1 else f"{self._trial} lanes"
        self.decisions.append(Decision(now, what, kept, (before, tried, after)))
        logger.info("%s", self.decisions[-1])
        self._down = kept == (self._trial < self.count)
        if kept:
            self.count = self._trial
        self._pause = FIRST_SECONDS if kept else min(2 * self._pause, MOST_SECONDS)
        self._due = self._work() + max(self._pause, LEAST_WINDOWS * wall)
        self._restart()

    def _work(self) -> float:
        """Seconds that all lanes together have worked, over their number."""
        return sum(self.native.lane_busy_ns) * 1e-9 / self.native.lanes

    def _restart(self, seconds: float = 0.0) -> None:
        self._trial, self._windows = None, []
        self.native.set_active_lanes(self.count)
        self._begin(max(seconds, WINDOW_SECONDS))

    def _begin(self, seconds: float) -> None:
        self._since, self._steps, self._progress = self.now(), self.native.steps_done, self.native.progress_ns
        self._worked, self.next_look = self._work(), self._since + seconds


class AutoConcurrency:
    """Raises and lowers the number of trials under way by what the lanes are seen to do.

    ``progress_ns`` counts the work done, in nanoseconds that it takes alone: lanes that stand in each other's way are
    busy and do less. Begins with one trial per lane. While lanes stand idle for more than a tenth of the time it tries
    one more, and keeps it if lanes then work more than before; a trial more that brought nothing is taken back and not tried again
    for a while. Never more than four per lane.
    """

    WINDOW_SECONDS = 0.5
    ENOUGH = 0.9
    GAIN = 0.05

    def __init__(
        self, lanes: int, progress_ns: Callable[[], int], now: Callable[[], float] = time.perf_counter
    ) -> None:
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
        """Look at the lanes, of which ``in_use`` take steps; returns how many trials may be under way from now on.

        Steps that run eagerly take turns on one lane: their trials then run one after the other.
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
            return self.limit  # not yet what was asked for: nothing to learn
        if self._before_raise is not None:
            if share < self._before_raise + self.GAIN and self.limit > in_use:
                self.limit -= 1
                self._hold_until = now + 20 * self.WINDOW_SECONDS
            self._before_raise = None
        elif share < self.ENOUGH and self.limit < self.most and memory_allows and now >= self._hold_until:
            self._before_raise = share
            self.limit += 1
        return self.limit
