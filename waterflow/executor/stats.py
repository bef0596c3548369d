"""Statistics: counts of steps and seconds of each job, and figures of an engine's lanes."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_END: Any = object()
# What torch's loaders take in loops of the user's own: rows of tensors one by one, or at once; rows that a data set of the user's
# makes; or else.
LOADING = TENSORS, AT_ONCE, ROWS, WHOLE = "loading tensors", "loading at once", "loading rows", "loading batches"
# What jobs take: batches between their steps; while steps run, rows that a data set of the user's makes, or else.
JOBS_LOADING = BETWEEN, ROWS_AHEAD, AHEAD = "loading", "loading rows ahead", "loading ahead"
WAITING = "waiting for a capture"  # eager steps whose capture is not expected to pay, or not yet
CALLS, BETWEEN_CALLS = "calls", "between calls"  # of a Step or of evaluate(), by a loop of the user's own


class _Thread(threading.local):
    left = math.inf  # its processor's time at the end of its last call


_this = _Thread()


class Account(defaultdict[str, float]):
    """Counts and seconds of one step, job or trial. One thread writes it; an engine keeps it after the step has ended.

    The counts are ``steps``, ``eager steps``, those ``waiting for a capture``, ``captures``, and ``captures anew``: captures for a
    kind of batch that had been captured before. All other entries are seconds of the thread, by what it did; ``computed`` has its
    processor's seconds in them.
    """

    def __init__(self, who: int | str) -> None:
        super().__init__(int)
        self.computed: defaultdict[str, float] = defaultdict(float)
        self._looked_at = 0.0
        self.who = who  # a trial's number, or a job's name
        self.cause: str | None = None  # why its steps run eagerly, or some of them

    @contextlib.contextmanager
    def spending(self, what: str) -> Iterator[None]:
        """Add the time inside the context to the entry ``what``."""
        began, computed = time.perf_counter(), time.thread_time()
        try:
            yield
        finally:
            self[what] += time.perf_counter() - began
            self.computed[what] += time.thread_time() - computed

    @contextlib.contextmanager
    def leaving_out(self, what: str) -> Iterator[None]:
        """Do not count the time inside the context, which lies inside of ``spending(what)``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self[what] -= time.perf_counter() - began

    def begin_call(self) -> tuple[float, float]:
        """Note that the thread, in a loop of the user's own, calls what it comes back from at ``end_call``."""
        now = time.perf_counter(), time.thread_time()
        self.computed[BETWEEN_CALLS] += max(0.0, now[1] - _this.left)
        return now

    def end_call(self, began: tuple[float, float]) -> None:
        """Count the time since ``begin_call``, which returned ``began``."""
        _this.left = time.thread_time()
        self[CALLS] += time.perf_counter() - began[0]
        self.computed[CALLS] += _this.left - began[1]

    def in_python(self) -> float:
        """Return the processor's seconds between steps since the last look."""
        between = sum(self.computed.get(what, 0.0) for what in (BETWEEN_CALLS, *JOBS_LOADING))
        passed, self._looked_at = between - self._looked_at, between
        return passed

    def reading(self, batches: Iterator[Any], what: str) -> Iterator[Any]:
        """Yield ``batches``, and add the time that each takes to arrive to the entry ``what``, one of ``JOBS_LOADING``."""
        while True:
            with self.spending(what):
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch


@dataclass(frozen=True)
class EngineStats:
    """Figures of an engine's lanes: counts, seconds summed over lanes, and the most bytes that steps held at once.

    ``scheduling_seconds`` is the time inside admission and barriers, including waits for the engine's lock. ``graphs``
    counts device graphs (captured, launched, dropped because something had changed) and the bytes that they hold.
    """

    steps: int
    groups: int
    busy_seconds: float
    busy_by_lane: tuple[float, ...]
    scheduling_seconds: float
    peak_held: int
    graphs: dict[str, int]
