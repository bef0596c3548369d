"""Statistics: counts of steps and seconds of each job, and figures of an engine's lanes."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_END: Any = object()
# What torch's loaders in loops of the user's own take: rows of tensors one by one, rows that a data set of the user's makes, rows of
# tensors at once, or else.
LOADING = ("loading tensors", "loading rows", "loading at once", "loading batches")
# What jobs take: batches between their steps, rows that a data set of the user's makes while steps run, or else while steps run.
BETWEEN_CALLS = "between calls"  # what a thread computes between two calls of a Step
JOBS_LOADING = ("loading", "loading rows ahead", "loading ahead")


class Account(defaultdict[str, float]):
    """Counts and seconds of one step, job or trial. One thread writes it; an engine keeps it after the step has ended.

    The counts are ``steps``, ``eager steps``, ``captures``, and ``captures anew``: captures for a kind of batch that had been
    captured before. All other entries are seconds of the thread, by what it did; ``computed`` has its processor's seconds in them.
    """

    def __init__(self, who: int | str) -> None:
        super().__init__(int)
        self.computed: defaultdict[str, float] = defaultdict(float)
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
