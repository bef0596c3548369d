"""What became of the steps and the time of one job, for whoever sums them up."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_END: Any = object()


class Account(defaultdict[str, float]):
    """Of a step, a job or a trial: what ``who`` did. One thread writes it; an engine keeps it when the step has gone.

    Counts are ``steps``, ``eager steps``, ``captures``, and ``captures anew``: of these those for batches of a kind that there was one
    for. All else are seconds of the thread, by what it did.
    """

    def __init__(self, who: int | str) -> None:
        super().__init__(int)
        self.who = who  # a trial's number, or a job's name
        self.cause: str | None = None  # why its steps run eagerly, or some of them

    @contextlib.contextmanager
    def spending(self, what: str) -> Iterator[None]:
        """What the thread does inside is ``what``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self[what] += time.perf_counter() - began

    def reading(self, batches: Iterator[Any]) -> Iterator[Any]:
        """``batches``; the time that each takes to come is time of ``loading``."""
        while True:
            with self.spending("loading"):
                batch = next(batches, _END)
            if batch is _END:
                return
            yield batch


@dataclass(frozen=True)
class EngineStats:
    """What an engine's lanes did: counts, seconds summed over lanes, and the most bytes that steps held at once.

    ``scheduling_seconds`` is the time inside admission and barriers, waiting for the engine's lock included. ``graphs``
    counts device graphs: captured, launched, dropped as something had changed; and the bytes that they hold.
    """

    steps: int
    groups: int
    busy_seconds: float
    busy_by_lane: tuple[float, ...]
    scheduling_seconds: float
    peak_held: int
    graphs: dict[str, int]
