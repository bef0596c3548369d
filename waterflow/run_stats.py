"""Where the time of one call of ``optimize`` or ``train`` went, and the one thing to change first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from waterflow.executor.engine import Engine
from waterflow.executor.stats import (
    AHEAD,
    BETWEEN,
    CALLS,
    JOBS_LOADING,
    LOADING,
    ROWS,
    ROWS_AHEAD,
    TENSORS,
    WAITING,
    WHOLE,
    Account,
)
from waterflow.units import format_bytes

ENOUGH_CAPTURES = 3  # of one job: a first call, one that accumulates, and one that updates
MOST_CAUSES = 3  # causes of eager steps that are printed
LOCK = "waiting for Python's lock"
OWN = "your code between steps"
_MAKE_BATCHES = "make whole batches: wf.DataLoader(TensorDataset(...), batch_transform=function of a batch)"
# For each part of the time: the share above which a change pays off, and the change to advise. Parts of what loads or is between
# steps hold their waits for Python's lock here.
FIRST = {
    "eager steps": (0.2, "mend the causes above"),
    "capturing": (0.25, "fewer kinds of batches, by padding and drop_last=True"),
    BETWEEN: (0.3, "Job(read_ahead=True), or one wf.SharedData for jobs that begin together"),
    ROWS_AHEAD: (0.3, _MAKE_BATCHES),
    TENSORS: (0.2, "wf.DataLoader in the place of torch's takes the rows of a batch at once"),
    ROWS: (0.3, _MAKE_BATCHES),
    WHOLE: (0.3, "load them once, before the study; or return a wf.Job(read_ahead=True), which loads while its steps run"),
    "evaluation": (0.3, "evaluate on larger batches, on fewer rows, or after more steps"),
    "waiting for memory": (0.2, "raise memory=, or take smaller batches"),
    OWN: (0.4, "see what your code does beside step(batch)"),
}
_PROCESSES = "pass processes= to wf.optimize, one for each core: each process has a lock of its own"


@dataclass(frozen=True)
class RunStats:
    """Counts and times of all jobs of one call of ``optimize`` or ``train``.

    ``captured_again`` of the ``captures`` repeated one for the same kind of batch, because the step now computes with something
    else. ``eager`` counts, by cause, the ``jobs`` with eager steps; ``short`` had nothing but ``waiting`` ones, of the
    ``eager_steps``, whose capture was not expected to pay. Without ``many_kinds`` no job was captured more often than a step
    needs. ``shares`` divides the time of jobs or trials; steps include their waits for lanes. What loads, and the code of
    objectives beside it and steps, is without its waits for Python's lock. These are estimated from how near such code has come
    to computing all the time, and ``of_lock`` divides them. ``lines`` has the line of the user's in which a part was seen most
    often. ``peak`` is the most bytes that jobs could hold at a time by their claims, ``limit`` the engine's limit.
    """

    jobs: int
    steps: int
    eager_steps: int
    captures: int
    captured_again: int
    eager: Counter[str]
    shares: Mapping[str, float]
    peak: int
    limit: int
    of_lock: Mapping[str, float] = field(default_factory=dict)
    lines: Mapping[str, str] = field(default_factory=dict)
    waiting: int = 0
    short: int = 0
    many_kinds: bool = True

    @staticmethod
    def of(engine: Engine, seconds: float, first: int = 0, lines: Mapping[str, str] | None = None) -> RunStats:
        """Return the stats of ``engine`` in ``seconds``, from its accounts with index ``first`` on."""
        accounts = engine.accounts[first:]
        spent, computed = Account(""), Account("")
        by_job, captured = Counter[int | str](), Counter[int | str]()
        for account in accounts:
            for total, part in ((spent, account), (computed, account.computed)):
                for what, count in part.items():
                    total[what] += count
            by_job[account.who] += int(account.get("captures", 0))
            captured[account.who] += int(account.get("steps", 0) - account.get(WAITING, 0))
        shares, of_lock = _shares(spent, computed, seconds)
        return RunStats(
            # A job that was suspended and came back has an account for each of its Steps; it counts once.
            jobs=len({account.who for account in accounts if account.get("steps")}),
            steps=int(spent["steps"]),
            eager_steps=int(spent["eager steps"]),
            captures=int(spent["captures"]),
            captured_again=int(spent["captures anew"]),
            eager=Counter(cause for _, cause in {(a.who, a.cause) for a in accounts} if cause is not None),
            shares=shares,
            peak=engine.reservations.most_claimed,
            limit=engine.limit,
            of_lock=of_lock,
            lines=lines or {},
            waiting=int(spent[WAITING]),
            many_kinds=max(by_job.values(), default=0) > ENOUGH_CAPTURES,
            short=sum(not captured[who] for who in {one.who for one in accounts if one.get(WAITING)}),
        )

    def lines_for(self, jobs: str) -> list[str]:
        """Return lines for people; ``jobs`` is the word for the jobs, such as ``trials``."""
        percent = -(-100 * self.eager_steps // max(1, self.steps))  # rounded up: 0 are none
        again = f", {self.captured_again} of them anew" if self.captured_again else ""
        told = [f"{self.steps:,} steps, {percent} % of them eager; {self.captures} captures{again}"]
        told += [f"  {count} of {self.jobs} {jobs} ran eagerly: {cause}" for cause, count in self.eager.most_common(MOST_CAUSES)]
        told += ["  and others for other causes"] * (len(self.eager) > MOST_CAUSES)
        told += [f"  {self.short} of {self.jobs} {jobs} were too short to pay for a capture"] * (self.short > 0)
        parts = Counter[str]()
        for what, share in self.shares.items():
            parts["loading" if what in (*JOBS_LOADING, *LOADING) else what] += share  # type: ignore[assignment]
        told.append(f"time: {', '.join(f'{100 * part:.0f} % {what}' for what, part in parts.most_common() if part >= 0.005)}")
        told.append(f"memory: at most {format_bytes(self.peak)} of {format_bytes(self.limit)} claimed")
        return told + self._first()

    def _first(self) -> list[str]:
        shares = {what: self.shares.get(what, 0.0) + self.of_lock.get(what, 0.0) for what in FIRST}
        # The time of eager steps is not measured apart: it is estimated by their share of the steps.
        shares["eager steps"] = (self.eager_steps - self.waiting) / max(1, self.steps) * self.shares.get("steps", 0.0)
        if not self.many_kinds:
            shares["capturing"] = 0.0
        # Advise on the one part that is furthest above its threshold; a list of advice would not be read.
        what = max(FIRST, key=lambda what: shares[what] - FIRST[what][0])
        if shares[what] < FIRST[what][0]:
            return []
        line = self.lines.get("loading" if what.startswith("loading") else what)
        at = f", most of it at {line}" if line else ""
        # Waits of a loader of torch's end with another loader, those of the user's code with other processes.
        advice = _PROCESSES if what in (OWN, ROWS) and self.of_lock.get(what, 0.0) >= 0.1 else FIRST[what][1]
        return [f"to change first: {what}, {100 * shares[what]:.0f} % of the time{at}: {advice}"]


def _shares(spent: Account, computed: Account, seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    # In a study the time of trials is the whole, as their own code counts, too; else the time of jobs.
    all_ = max(spent["trials"], spent["jobs"], 1e-9)
    wall = {what: spent[what] for what in (*JOBS_LOADING, "capturing", "evaluation", "waiting for memory")}
    wall["steps"] = spent[CALLS] + spent["jobs"] - sum(wall.values())
    wall |= {what: spent[what] for what in LOADING}
    wall[OWN] = spent["trials"] - sum(wall.values())
    own = computed["trials"] - sum(computed[what] for what in (CALLS, "jobs", *LOADING))
    # One thread at a time has the lock. The nearer the threads' code beside steps has come to one processor, the likelier were its
    # waits for the lock; more than one is code that releases it. Workers and other data may wait for anything.
    processor = {**{what: computed[what] for what in (*JOBS_LOADING, *LOADING)}, OWN: max(0.0, own)}
    held = max(0.0, 1.0 - abs(1.0 - sum(processor.values()) / max(seconds, 1e-9)))
    waits = {what: held * max(0.0, wall[what] - part) / all_ for what, part in processor.items()}
    of_lock = {what: part for what, part in waits.items() if what not in (AHEAD, WHOLE)}
    shares = {what: max(0.0, part / all_ - of_lock.get(what, 0.0)) for what, part in wall.items()}
    return {**shares, LOCK: sum(of_lock.values())}, of_lock
