"""Opportunistic jobs for which guaranteed ones leave no lane: the user is told."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from waterflow.executor.lanes_in_use import Decision

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
class Starving:
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

    def look(self, opportunistic: Collection[int], guaranteed: Collection[int], names: dict[int, str]) -> None:
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
