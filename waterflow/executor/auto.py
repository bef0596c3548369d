"""How many trials to have under way: as many as memory and measured throughput allow."""

from __future__ import annotations

import time
from collections.abc import Callable


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
