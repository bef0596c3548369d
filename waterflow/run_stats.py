"""Where the time of one call of ``optimize`` or ``train`` went, and the one thing to change first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from waterflow.executor.engine import Engine
from waterflow.executor.stats import JOBS_LOADING, LOADING, Account
from waterflow.units import format_bytes

MOST_CAUSES = 3  # causes of eager steps that are printed
LOCK = "waiting for Python's lock"
OWN = "your code between steps"
# For each part of the time: the share above which a change pays off, and the change to advise. Parts of what loads or is between
# steps hold their waits for Python's lock here.
FIRST = {
    "eager steps": (0.2, "mend the causes above"),
    "capturing": (0.25, "train longer with each kind of model and batch; fewer kinds, by padding and drop_last=True"),
    "loading": (0.3, "Job(read_ahead=True), or one wf.SharedData for jobs that begin together"),
    "loading rows ahead": (0.3, "make whole batches: wf.DataLoader(TensorDataset(...), batch_transform=function of a batch)"),
    "loading tensors": (0.2, "wf.DataLoader in the place of torch's takes the rows of a batch at once"),
    "loading rows": (0.3, "make whole batches: wf.DataLoader(TensorDataset(...), batch_transform=function of a batch)"),
    "loading batches": (
        0.3,
        "load them once, before the study; or return a wf.Job(read_ahead=True), which loads while its steps run",
    ),
    "evaluation": (0.3, "evaluate on larger batches, on fewer rows, or after more steps"),
    "waiting for memory": (0.2, "raise memory=, or take smaller batches"),
    OWN: (0.4, "see what your code does beside step(batch)"),
    LOCK: (0.4, "run this program once for each core, over one storage of the study: each process has a lock of its own"),
}


@dataclass(frozen=True)
class RunStats:
    """Counts and times of all jobs of one call of ``optimize`` or ``train``.

    ``captured_again`` of the ``captures`` repeated one for the same kind of batch, because the step now computes with something
    else. ``eager`` counts, by cause, the ``jobs`` with eager steps. ``shares`` divides the time of jobs or trials; steps
    include their waits for lanes. What loads, and the code of objectives beside it and steps, is without its waits for Python's lock;
    these are estimated: where that code has computed for as long as the call took, all of its waits were for the lock. ``of_lock``
    divides them. ``lines`` has the line of the user's in which a part was seen most often. ``peak`` is the most bytes that jobs could
    hold at a time by their claims, ``limit`` the engine's limit.
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

    @staticmethod
    def of(engine: Engine, seconds: float, first: int = 0, lines: Mapping[str, str] | None = None) -> RunStats:
        """Return the stats of ``engine`` in ``seconds``, from its accounts with index ``first`` on."""
        accounts = engine.accounts[first:]
        spent, computed = Account(""), Account("")
        for account in accounts:
            for total, part in ((spent, account), (computed, account.computed)):
                for what, count in part.items():
                    total[what] += count
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
        )

    def lines_for(self, jobs: str) -> list[str]:
        """Return lines for people; ``jobs`` is the word for the jobs, such as ``trials``."""
        percent = -(-100 * self.eager_steps // max(1, self.steps))  # rounded up: 0 are none
        again = f", {self.captured_again} of them anew" if self.captured_again else ""
        told = [f"{self.steps:,} steps, {percent} % of them eager; {self.captures} captures{again}"]
        told += [f"  {count} of {self.jobs} {jobs} ran eagerly: {cause}" for cause, count in self.eager.most_common(MOST_CAUSES)]
        told += ["  and others for other causes"] * (len(self.eager) > MOST_CAUSES)
        parts = Counter[str]()
        for what, share in self.shares.items():
            parts["loading" if what in (*JOBS_LOADING, *LOADING) else what] += share  # type: ignore[assignment]
        told.append(f"time: {', '.join(f'{100 * part:.0f} % {what}' for what, part in parts.most_common() if part >= 0.005)}")
        told.append(f"memory: at most {format_bytes(self.peak)} of {format_bytes(self.limit)} claimed")
        return told + self._first(percent)

    def _first(self, percent: int) -> list[str]:
        shares = {what: self.shares.get(what, 0.0) + self.of_lock.get(what, 0.0) for what in FIRST}
        # The time of eager steps is not measured apart: it is estimated by their share of the steps.
        shares["eager steps"] = percent / 100 * self.shares.get("steps", 0.0)
        # Another loader ends waits that are the loader's; other processes those of code between steps.
        shares[LOCK] = shares[OWN] if self.of_lock.get(OWN, 0.0) >= 0.1 else 0.0
        # Advise on the one part that is furthest above its threshold; a list of advice would not be read.
        what = max(FIRST, key=lambda what: (shares[what] - FIRST[what][0], what == LOCK))
        if shares[what] < FIRST[what][0]:
            return []
        part = OWN if what == LOCK else what
        line = self.lines.get("loading" if part.startswith("loading") else part)
        at = f", most of it at {line}" if line else ""
        return [f"to change first: {part}, {100 * shares[what]:.0f} % of the time{at}: {FIRST[what][1]}"]


def _shares(spent: Account, computed: Account, seconds: float) -> tuple[dict[str, float], dict[str, float]]:
    # In a study the time of trials is the whole, as their own code counts, too; else the time of jobs.
    all_ = max(spent["trials"], spent["jobs"], 1e-9)
    parts = {what: spent[what] for what in (*JOBS_LOADING, "capturing", "evaluation", "waiting for memory")}
    beside = {what: (spent[what], computed[what]) for what in (*JOBS_LOADING, *LOADING)}
    outer = [time["trials"] - sum(time[what] for what in ("calls", "jobs", *LOADING)) for time in (spent, computed)]
    beside[OWN] = max(0.0, outer[0]), max(0.0, outer[1])
    # One thread at a time has the lock: where such code has computed all the time, its waits were for the lock.
    held = min(1.0, sum(processor for _, processor in beside.values()) / max(seconds, 1e-9))
    of_lock = {what: held * max(0.0, wall - processor) for what, (wall, processor) in beside.items()}
    steps = spent["calls"] + spent["jobs"] - sum(parts.values())
    parts |= {what: wall - of_lock[what] for what, (wall, _) in beside.items()}
    parts |= {"steps": steps, LOCK: sum(of_lock.values())}
    shares = {what: max(0.0, part) / all_ for what, part in parts.items()}
    return shares, {what: part / all_ for what, part in of_lock.items()}
