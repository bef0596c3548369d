"""The speeds of the jobs on one device, beside others against alone, measured in windows of their own steps."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

WINDOW_SECONDS, WINDOW_STEPS = 0.5, 5  # a window has both at least
ALONE_SECONDS = 5.0  # for one window alone of a job that has always had company
SOLO, BESIDE = 5, 3  # windows, of which the median counts


@dataclass(frozen=True)
class Seen:
    """The steps that a job has done so far, and the seconds that it has ``waited`` for memory.

    It ``trains`` unless it begins, has ended, or is held. ``protected``: it is never held for the sake of others.
    """

    steps: int
    waited: float
    trains: bool
    protected: bool = False


@dataclass(frozen=True)
class Pace:
    """Steps a second; that as a share of the pace alone, None if it is not known; the share of the time spent waiting for memory."""

    pace: float = 0.0
    rate: float | None = None
    waited: float = 0.0


@dataclass
class _Job:
    seen: Seen
    company: frozenset[Hashable] = frozenset()
    solo: deque[float] = field(default_factory=lambda: deque(maxlen=SOLO))
    beside: deque[float] = field(default_factory=lambda: deque(maxlen=BESIDE))
    told: Pace = Pace()
    began: bool = False  # it has done a step
    tried: bool = False  # to give it a window alone
    seconds: float = 0.0  # of its window
    steps: int = 0
    waited: float = 0.0
    others: int = 0  # steps of held jobs in it, which were under way

    def begin_window(self) -> None:
        self.seconds, self.steps, self.waited, self.others = 0.0, 0, 0.0, 0

    def end_window(self) -> None:
        pace = self.steps / self.seconds
        if not self.company and not self.others:
            self.solo.append(pace)
        self.beside.append(pace)
        rate = median(self.beside) / median(self.solo) if self.solo and self.company else 1.0 if self.solo else None
        self.told = Pace(pace, rate, min(1.0, self.waited / self.seconds))
        self.begin_window()


class Paces:
    """Windows of the jobs of one device. A clock passes the time in, in seconds; not thread-safe.

    A window goes on over turns in which its job is held, and is dropped when its company changes: the other jobs that train. A rate
    is the median pace of the last windows beside this company over that of the last windows alone. ``alone`` is the job that is to
    be measured alone now, while all others are held: one that has done steps, and never without company.
    """

    def __init__(self) -> None:
        self._jobs: dict[Hashable, _Job] = {}
        self._looked = 0.0
        self._training: frozenset[Hashable] = frozenset()
        self.alone: Hashable | None = None
        self._until = 0.0

    def of(self, job: Hashable) -> Pace:
        """Return what is known of a job's pace."""
        return self._jobs[job].told if job in self._jobs else Pace()

    def look(self, now: float, seen: Mapping[Hashable, Seen]) -> None:
        """Take up what all jobs of the device have done until ``now``."""
        seconds, self._looked = now - self._looked, now
        self._jobs = {job: self._jobs.get(job) or _Job(one) for job, one in seen.items()}
        training = frozenset(job for job, one in seen.items() if one.trains)
        # Counts of other threads: one may look smaller for a moment.
        done = {id: max(0, one.steps - self._jobs[id].seen.steps) for id, one in seen.items()}
        under_way = sum(steps for id, steps in done.items() if id not in training)
        for id, one in seen.items():
            job, before = self._jobs[id], self._jobs[id].seen
            job.seen = replace(one, steps=before.steps + done[id])
            job.began |= done[id] > 0
            if id not in training:
                continue
            if (company := training - {id}) != job.company:
                job.company, job.told = company, Pace(job.told.pace)
                job.beside.clear()
                job.begin_window()
            elif training == self._training:  # in an interval in which somebody came, left or was held, nobody is measured
                job.seconds += seconds
                job.steps += done[id]
                job.waited += max(0.0, one.waited - before.waited)
                job.others += under_way
                if job.seconds >= WINDOW_SECONDS and job.steps >= WINDOW_STEPS:
                    job.end_window()
        self._training = training
        self._choose(now, seen)

    def _choose(self, now: float, seen: Mapping[Hashable, Seen]) -> None:
        protected = any(one.protected for one in seen.values())
        if self.alone is not None:
            one = self._jobs.get(self.alone)
            if one is None or one.solo or protected or not one.seen.trains or now >= self._until:
                if one is not None and now < self._until:
                    one.tried = bool(one.solo)  # it was not given its time
                self.alone = None
        if self.alone is None and not protected and len(self._training) > 1:
            jobs = ((id, self._jobs[id]) for id in seen if id in self._training)
            self.alone = next((id for id, job in jobs if job.began and not (job.solo or job.tried)), None)
            if self.alone is not None:
                self._jobs[self.alone].tried = True
                self._until = now + ALONE_SECONDS
