"""Which of an engine's opportunistic jobs have its memory, where it does not hold all of them whole: found by trying."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from waterflow.executor.lanes_in_use import Decision
from waterflow.executor.terms import Need

logger = logging.getLogger("waterflow")

LOOK_SECONDS = 0.05
# Over which speed is measured: at least, of each job, at most.
WINDOW_SECONDS, WINDOW_STEPS, LONGEST_SECONDS = 2.0, 8, 20.0
SETTLING_STEPS, SETTLING_SECONDS = 4, 10.0  # of each job before a window; what is not settled by then failed
FIRST_SECONDS = 5.0  # between two trials, at least
REST = 3  # times as long as a trial took
# Before all is tried again: twice as long after each round.
AGAIN_SECONDS, MOST_SECONDS = 300.0, 3600.0
GAIN = 1.1  # what a trial must bring

Set = frozenset[int]
Speeds = dict[int, float]  # steps a second


class MemoryControl:
    """Tries other sets of jobs in the place of those that hold memory, and keeps what raises the sum of normalized speeds. Thread-safe.

    Jobs share the height of the highest step, so what there is to decide is who is there: each one's bytes lower the
    steps of all. A job's normalized speed is its steps a second over those that it has where they are whole; of those for whom
    that is not known it is tried first. A set that seems better is compared with what was before a second time.
    ``give`` sets the most bytes that jobs may have, None for all that there is. Bits do not depend on it.
    """

    def __init__(
        self, decisions: list[Decision], give: Callable[[Mapping[int | None, int | None]], None],
        now: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self.decisions, self.now, self.next_look = decisions, now, 0.0
        self._give = give
        self._lock = threading.Lock()
        self._steps: Counter[int] = Counter()
        self._names: Mapping[int, str] = {}
        self._room = self._floor = 0
        self._needs: dict[int, Need] = {}
        self._given: dict[int | None, int | None] = {}
        self._base: Set = frozenset()
        self._trial: Set | None = None
        self._windows: list[Speeds] = []
        self._whole: dict[int, tuple[float, int]] = {}  # of those that were seen whole: the mean of so many windows
        self._most: Speeds = {}
        self._tried: set[Set] = set()
        self._again = self._due = self._trial_began = self._began = 0.0
        self._since: float | None = None  # where a window began; before that what was given takes effect
        self._counted: Counter[int] = Counter()
        self._restart({})

    def ended(self, job: int) -> None:
        """A step of it has."""
        if job in self._needs:
            self._steps[job] += 1

    def look(self, seen: Callable[[], tuple[dict[int, Need], int, int]], names: Mapping[int, str]) -> None:
        """Where a window is over: learn from it, and begin the next one.

        ``seen()``: the needs of the jobs that may be lowered, the bytes that they may hold together, and the height of others' steps.
        Without needs there is nothing to decide: what was given is taken back.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            self.next_look = self.now() + LOOK_SECONDS
            self._names = names
            self._look(*seen())
        finally:
            self._lock.release()

    def _look(self, needs: dict[int, Need], room: int, floor: int) -> None:
        if needs.keys() != self._needs.keys():
            self._restart(needs)
        self._needs, self._room, self._floor = needs, room, floor
        if len(needs) < 2 or self._height(frozenset(needs)) >= max(need.height for need in needs.values()):
            if self._given:
                self._restart(needs)
            return
        there = frozenset(job for job, need in needs.items() if need.held is not None)
        if self._given and self._given != {job: need.share for job, need in needs.items() if job in self._given}:
            self._taken_back(there)  # somebody could not go on with it
            return
        if self._given:
            self._apply()  # needs may have changed
        elif self._base != there:
            self._base = there
            self._begin()
        now, running = self.now(), self._running
        if self._since is None:
            settled = there == running and all(self._done(job) >= SETTLING_STEPS for job in running)
            if not settled and now < self._began + SETTLING_SECONDS:
                return
            if not settled and self._trial is not None and len(self._windows) == 1:
                self._decide({})
                return
            self._since, self._counted = now, self._steps.copy()
            return
        seconds = now - self._since
        few = min((self._done(job) for job in running), default=0) < WINDOW_STEPS
        if seconds < WINDOW_SECONDS or (few and seconds < LONGEST_SECONDS):
            return
        self._learn({job: self._done(job) / seconds for job in running}, now)

    @property
    def _running(self) -> Set:
        """Who is to be there in this window."""
        return self._trial if self._trial is not None and len(self._windows) == 1 else self._base

    def _done(self, job: int) -> int:
        return self._steps[job] - self._counted[job]

    def _learn(self, speeds: Speeds, now: float) -> None:
        for job, speed in speeds.items():
            need = self._needs[job]
            if speed > 0 and need.held is not None and need.held >= need.height:
                before, windows = self._whole.get(job, (0.0, 0))
                self._whole[job] = (before * windows + speed) / (windows + 1), windows + 1
            self._most[job] = max(speed, self._most.get(job, 0.0))
        if self._trial is not None:
            self._decide(speeds)
            return
        if now < self._due:
            self._begin()
            return
        trial = next(self._untried(), None)
        if trial is None:
            self._tried.clear()
            self._due, self._again = now + self._again, min(2 * self._again, MOST_SECONDS)
            self._begin()
            return
        self._trial, self._windows, self._trial_began = trial, [speeds], now
        self._begin()
        self._apply()

    def _decide(self, speeds: Speeds) -> None:
        """The second or third window of a trial: what is no better than before is undone at once."""
        assert self._trial is not None
        trial, now = self._trial, self.now()
        self._windows.append(speeds)
        scores = tuple(self._score(window) for window in self._windows)
        better = scores[1] > GAIN * max(scores[::2])
        if better and len(scores) == 2:
            self._begin()
            self._apply()
            return
        self.decisions.append(Decision(now, self._told(trial), better, scores))
        logger.info("%s", self.decisions[-1])
        self._tried |= {trial, self._base}
        if better:
            self._base, self._again = trial, AGAIN_SECONDS
        self._trial = None
        self._due = now + max(FIRST_SECONDS, REST * (now - self._trial_began))
        self._begin()
        self._apply()

    def _score(self, speeds: Speeds) -> float:
        return sum(
            speed / (self._whole[job][0] if job in self._whole else self._most[job])
            for job, speed in speeds.items()
            if speed > 0
        )

    def _told(self, jobs: Set) -> str:
        height = self._height(jobs)
        there = [
            f"{self._names.get(job, job)!r} {'whole' if self._needs[job].height <= height else 'lower'}"
            for job in sorted(jobs)
        ]
        waiting = [repr(self._names.get(job, job)) for job in sorted(self._needs.keys() - jobs)]
        return f"memory for {', '.join(there)}" + (f", none for {', '.join(waiting)}" if waiting else "")

    # -- sets of jobs

    def _untried(self) -> Iterator[Set]:
        """Who could be there instead."""
        jobs, base = sorted(self._needs), self._base
        whole = {job: self._around(job) for job in jobs}
        options = [whole[job] for job in jobs if job not in self._whole]
        options += [frozenset(jobs), *whole.values()]
        options += [base | {job} for job in jobs] + [base - {job} for job in jobs]
        for option in options:
            if option and option != base and option not in self._tried and self._height(option) > self._floor:
                yield option

    def _around(self, job: int) -> Set:
        """The job whole, and who fits beside it, those that are there first; nobody where it cannot be whole."""
        left = self._room - self._needs[job].height - self._needs[job].bytes
        if left < 0:
            return frozenset()
        found = {job}
        for other in sorted(self._needs, key=lambda each: (each not in self._base, self._needs[each].bytes, each)):
            if other != job and self._needs[other].bytes <= left:
                left -= self._needs[other].bytes
                found.add(other)
        return frozenset(found)

    def _height(self, jobs: Set) -> int:
        """What is left for steps."""
        return self._room - sum(self._needs[job].bytes for job in jobs)

    def _apply(self) -> None:
        jobs, height = self._running, self._height(self._running)
        given: dict[int | None, int | None] = {}
        for job, need in self._needs.items():
            given[job] = 0 if job not in jobs else None if height >= need.height else need.bytes + height
        if given != self._given:
            self._given = given
            self._give(given)

    # -- from the beginning

    def _begin(self) -> None:
        self._began, self._counted = self.now(), self._steps.copy()
        self._since = None

    def _taken_back(self, there: Set) -> None:
        if self._trial is not None:
            self._tried.add(self._trial)
        self._give(dict.fromkeys(self._given))
        self._given, self._trial, self._base = {}, None, there
        self._due = self.now() + FIRST_SECONDS
        self._begin()

    def _restart(self, needs: dict[int, Need]) -> None:
        """With these jobs, of whom nothing is known."""
        if self._given:
            self._give(dict.fromkeys(self._given.keys() | needs.keys()))
        self._needs, self._given, self._base, self._trial = needs, {}, frozenset(), None
        self._whole, self._most, self._tried = {}, {}, set()
        self._steps.clear()
        self._again, self._due = AGAIN_SECONDS, self.now() + FIRST_SECONDS
        self._begin()
