"""A cluster in virtual time: the scheduler and policies of a live one, fed by a workload. Times are seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeAlias

from waterflow.cluster.book import Entry
from waterflow.cluster.devices import Device
from waterflow.cluster.scaling import LINEAR, Scaling
from waterflow.cluster.scheduler import Scheduler
from waterflow.cluster.submission import Action, Move, Report, Resize, Start, Stop, Submission
from waterflow.errors import WorkloadError

Speeds: TypeAlias = Callable[[Device, Sequence[Entry]], Sequence[float]]  # of each resident against alone there
_IDLE_TICKS = 10_000  # ticks in a row without a change, nothing running, after which the simulation gives up


@dataclass(frozen=True)
class Overheads:
    """Seconds for which a submission occupies its devices without progress.

    ``resume`` covers suspend and resume together and is paid at the resume. Actions that a policy takes back within one
    moment cost once.
    """

    start: float = 0.0
    resume: float = 0.0
    move: float = 0.0
    grow: float = 0.0
    shrink: float = 0.0


@dataclass(frozen=True, slots=True)
class JobRecord:
    """The outcome of one submission: times in seconds, and counts."""

    id: str
    tenant: str
    model: str | None
    devices: int
    duration: float
    submitted: float
    first_start: float
    ended: float
    ran: float  # on devices, overheads included
    service: float  # device-seconds
    preemptions: int
    milestone: float | None = None  # when it reached the milestone

    @property
    def completion(self) -> float:
        """Seconds from its submission to its end."""
        return self.ended - self.submitted

    @property
    def waited(self) -> float:
        """Seconds of its completion without devices."""
        return self.completion - self.ran


@dataclass(frozen=True)
class Simulated:
    """The result of a workload under a policy.

    ``occupied`` gives, for each time at which something happened, the number of devices that are in use from then on.
    """

    jobs: list[JobRecord]
    devices: int
    occupied: list[tuple[float, int]]


class _Run:
    """The progress of a submission: ``left`` seconds alone on the devices asked for, at ``since``."""

    __slots__ = (
        "alone",
        "count",
        "devices",
        "entry",
        "first_start",
        "left",
        "milestone",
        "passed",
        "placed",
        "rate",
        "since",
        "submission",
        "version",
    )

    def __init__(self, entry: Entry, submission: Submission) -> None:
        self.entry = entry
        entry.rate = 1.0
        self.submission = submission
        self.left = submission.duration or 0.0
        self.rate = 1.0
        self.alone = 1.0  # its rate on its devices without neighbours
        self.count = 0
        self.devices: list[Device] = []  # kept where neighbours slow each other down
        self.placed = False  # its devices are new, and its end not yet known
        self.since = 0.0  # later than now while an overhead lasts
        self.version = 0  # of its entry in the queue of ends; other versions there are stale
        self.first_start = -1.0
        self.milestone = -1.0  # ``left`` at the milestone; below 0: there is none
        self.passed: float | None = None  # the time at which it reached the milestone


class Simulator:
    """Runs one workload on one scheduler, which must be new.

    ``speeds`` returns the speeds of the residents of one device relative to alone; without it no job slows another one down.
    A submission on several devices goes at the pace of its slowest. ``utilization`` is the share of time in which a
    submission alone keeps each of its devices busy; the scheduler receives it in reports, also for shared devices: neighbours
    that ask for more than a device has keep it busy all the time. ``milestone`` is the progress of a submission, in seconds
    alone, whose time the record tells. A run that is stopped without being suspended begins anew.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        overheads: Overheads | None = None,
        scaling: Scaling = LINEAR,
        speeds: Speeds | None = None,
        utilization: Callable[[Submission], float] | None = None,
        milestone: Callable[[Submission], float] | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._overheads = overheads or Overheads()
        self._free_of_charge = self._overheads == Overheads()
        self._scaling = scaling
        self._speeds = speeds
        self._utilization = utilization
        self._milestone = milestone
        self._now = 0.0
        self._runs: dict[str, _Run] = {}
        self._ends: list[tuple[float, int, int, _Run]] = []  # time, order of submission, version
        self._touched: dict[Device, None] = {}
        self._paces: dict[Device, dict[str, float]] = {}
        self._jobs: list[JobRecord] = []

    def run(self, workload: Iterable[Submission]) -> Simulated:
        """Simulate until the last submission has ended. Raises SubmissionError or WorkloadError for one that can never run."""
        scheduler, ends, jobs = self._scheduler, self._ends, self._jobs
        arrivals = sorted(workload, key=lambda submission: submission.submitted)
        devices = scheduler.book.devices.total
        for submission in arrivals:
            if submission.duration is None:
                raise WorkloadError(f"submission {submission.id!r} has no duration; a simulation needs one")
        large = [submission for submission in arrivals if submission.devices > devices]
        if large:
            largest = max(large, key=lambda submission: submission.devices)
            raise WorkloadError(
                f"{len(large)} of {len(arrivals)} jobs ask for more than the {devices} devices that there are (job "
                f"{largest.id!r} for {largest.devices}). Take a cluster of {largest.devices} or more, or leave them out"
            )
        arrivals.reverse()
        infinity = float("inf")
        idle = 0
        book = scheduler.book
        occupied: list[tuple[float, int]] = []
        while True:
            # A heap cannot move its entries: a changed end is pushed anew, and the stale one dropped here.
            while ends and ends[0][2] != ends[0][3].version:
                heappop(ends)
            tick = scheduler.next_tick
            now = min(
                ends[0][0] if ends else infinity,
                arrivals[-1].submitted if arrivals else infinity,
                infinity if tick is None else tick,
            )
            if not ends and not arrivals:
                if not book.entries:
                    break
                idle += 1
                if now == infinity or idle > _IDLE_TICKS:
                    self._stuck()
            else:
                idle = 0
            self._now = now = max(now, self._now)
            # All ends and arrivals of one moment reach the scheduler before it decides, ends first: their devices are
            # free then.
            while ends and ends[0][0] <= now:
                run, version = ends[0][3], ends[0][2]
                heappop(ends)
                if version == run.version:
                    self._end(run)
            while arrivals and arrivals[-1].submitted <= now:
                submission = arrivals.pop()
                scheduler.submit(now, submission, False)
                run = self._runs[submission.id] = _Run(book.entries[submission.id], submission)
                if self._milestone is not None:
                    run.milestone = max(0.0, run.left - self._milestone(submission))
            self._carry_out(scheduler.tick(now))
            book.changed.clear()  # nobody writes rows
            occupied.append((now, book.occupied))
        jobs.sort(key=lambda job: job.submitted)
        return Simulated(jobs, devices, occupied)

    # -- parts

    def _end(self, run: _Run) -> None:
        entry, submission, now = run.entry, run.submission, self._now
        if run.milestone >= 0:
            self._advance(run)
            run.passed = run.passed or now
        if self._speeds is not None:
            self._touch(run, [])
        self._scheduler.ended(now, entry.id, False)
        del self._runs[entry.id]
        record = JobRecord(
            entry.id,
            entry.tenant,
            submission.model,
            submission.devices,
            submission.duration or 0.0,
            submission.submitted,
            run.first_start,
            now,
            entry.on_devices,
            entry.service,
            entry.preemptions,
            run.passed,
        )
        self._jobs.append(record)

    def _carry_out(self, actions: list[Action]) -> None:
        now, runs = self._now, self._runs
        for action in actions:
            run = runs[action.id]
            kind = type(action)
            if kind is Start:
                run.since = now
                if not self._free_of_charge:
                    overheads = self._overheads
                    run.since += overheads.start if run.first_start < 0 else overheads.resume
                if run.first_start < 0:
                    run.first_start = now
                self._place(run)
            elif kind is Stop:
                self._advance(run)
                if isinstance(action, Stop) and not action.suspend:
                    self._begin_anew(run)
                run.version += 1
                if self._speeds is not None:
                    self._touch(run, [])
            elif kind is Move or kind is Resize:
                self._advance(run)
                pause = self._pause(run, action)
                run.since = max(run.since, now) + pause
                self._place(run)
            elif self._speeds is not None:
                self._touch(run, run.devices)
        if self._touched:
            self._settle()

    def _pause(self, run: _Run, action: Action) -> float:
        overheads = self._overheads
        if isinstance(action, Resize):
            return overheads.grow if len(action.places) > run.count else overheads.shrink
        return overheads.move

    def _advance(self, run: _Run) -> None:
        seconds = self._now - run.since
        if seconds > 0:
            left = run.left - seconds * run.rate
            if run.passed is None and left <= run.milestone and run.rate > 0:
                run.passed = run.since + (run.left - run.milestone) / run.rate
            run.left = left
            run.since = self._now

    def _begin_anew(self, run: _Run) -> None:
        run.left = run.submission.duration or 0.0
        run.entry.done = 0.0

    def _place(self, run: _Run) -> None:
        devices = run.entry.devices
        asked = run.submission.devices
        run.count = len(devices)
        run.alone = 1.0 if run.count == asked else self._scaling(run.submission, run.count)
        if self._speeds is not None:
            self._touch(run, devices)
            run.placed = True
        else:
            self._set_rate(run, run.alone)

    def _set_rate(self, run: _Run, rate: float) -> None:
        # A new place is reported even at the same rate: the scheduler must hear the utilization there.
        if rate != run.rate or (run.placed and self._utilization is not None):
            run.rate = rate
            done = 1 - run.left / run.submission.duration if run.submission.duration else 1.0
            busy = None if self._utilization is None else self._utilization(run.submission)
            self._scheduler.report(self._now, run.entry.id, Report(progress=done, rate=rate, utilization=busy), False)
        run.version += 1
        if rate > 0:
            end = run.since + (run.left if rate == 1.0 else run.left / rate)
            # Rounding must not put an end before now.
            heappush(self._ends, (max(end, self._now), run.entry.order, run.version, run))

    def _touch(self, run: _Run, devices: list[Device]) -> None:
        for device in (*run.devices, *devices):
            self._touched[device] = None
        run.devices = devices

    def _settle(self) -> None:
        # Once for all actions of a decision: a device that several of them touch gets new speeds once.
        assert self._speeds is not None
        runs, changed = self._runs, dict[str, _Run]()
        for device in self._touched:
            residents = device.residents
            paces = self._speeds(device, residents) if residents else ()
            self._paces[device] = {entry.id: pace for entry, pace in zip(residents, paces, strict=True)}
            for entry in residents:
                changed[entry.id] = runs[entry.id]
        for run in changed.values():
            rate = run.alone * min(self._paces[device][run.entry.id] for device in run.devices)
            if rate != run.rate or run.placed:
                self._advance(run)
                self._set_rate(run, rate)
                run.placed = False
        self._touched.clear()

    def _stuck(self) -> None:
        waiting = list(self._scheduler.book.entries.values())
        shown = ", ".join(f"{entry.id!r} ({entry.wanted} devices)" for entry in waiting[:3])
        raise WorkloadError(
            f"at {self._now:.0f} s nothing runs and policy {self._scheduler.policy.name!r} starts none of "
            f"{len(waiting)} waiting submissions: {shown}"
        )
