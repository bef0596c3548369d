"""What the jobs of one call have done, in figures and in a few lines for people."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from waterflow.executor.engine import Engine
from waterflow.partition.byte_counts import format_bytes

MOST_CAUSES = 3  # that are told
# A share of the time from which on it is worth a change, and the change.
FIRST = {
    "eager steps": (0.2, "mend the causes above"),
    "capturing": (0.25, "train longer with each kind of model and batch; fewer kinds, by padding and drop_last=True"),
    "loading": (0.3, "DataLoader(num_workers=1) or more, or Job(read_ahead=True)"),
    "evaluation": (0.3, "evaluate on larger batches, on fewer rows, or after more steps"),
    "waiting for memory": (0.2, "raise memory=, or take smaller batches"),
    "the rest": (0.4, "see what your code does beside step(batch); for loading there is DataLoader(num_workers=1)"),
}  # fmt: skip


@dataclass(frozen=True)
class RunFigures:
    """What the jobs of one call of ``optimize`` or ``train`` have done.

    ``captured_again`` of the captures were for batches of a kind that the job had captured, as it computes with something else now.
    ``eager`` has the causes for which steps ran eagerly, and how many of the ``jobs`` each concerned. ``shares`` tell what the time of
    jobs or trials went to: steps with their waits for lanes. ``peak`` are the most bytes that jobs claimed at once.
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

    @staticmethod
    def of(engine: Engine, first: int = 0) -> RunFigures:
        """By the accounts of ``engine`` from the ``first`` on."""
        accounts = engine.accounts[first:]
        spent: Counter[str] = Counter()
        for account in accounts:
            spent.update(dict(account))  # type: ignore[arg-type]  # numbers, whole or not
        return RunFigures(
            jobs=len({account.who for account in accounts if account.get("steps")}),
            steps=spent["steps"], eager_steps=spent["eager steps"], captures=spent["captures"],
            captured_again=spent["captures anew"],
            eager=Counter(cause for _, cause in {(a.who, a.cause) for a in accounts} if cause is not None), shares=_shares(spent),
            peak=engine.most_claimed, limit=engine.limit,
        )  # fmt: skip

    def lines(self, jobs: str) -> list[str]:
        """For people, who call the jobs ``jobs`` or ``trials``."""
        share = self.eager_steps / max(1, self.steps)
        again = f", {self.captured_again} of them anew" if self.captured_again else ""
        told = [f"{self.steps:,} steps, {100 * share:.0f} % of them eager; {self.captures} captures{again}"]
        told += [
            f"  {count} of {self.jobs} {jobs} ran eagerly: {cause}"
            for cause, count in self.eager.most_common(MOST_CAUSES)
        ]
        told += ["  and others for other causes"] * (len(self.eager) > MOST_CAUSES)
        order = sorted(self.shares.items(), key=lambda part: -part[1])
        told.append(f"time: {', '.join(f'{100 * part:.0f} % {what}' for what, part in order if part >= 0.005)}")
        told.append(f"memory: at most {format_bytes(self.peak)} of {format_bytes(self.limit)} claimed")
        shares = {**self.shares, "eager steps": share * self.shares["steps"]}
        what = max(FIRST, key=lambda what: shares[what] - FIRST[what][0])
        if shares[what] >= FIRST[what][0]:
            told.append(f"to change first: {what}, {100 * shares[what]:.0f} % of the time: {FIRST[what][1]}")
        return told


def _shares(spent: Mapping[str, float]) -> dict[str, float]:
    """Of the time of trials, or of jobs where there are none."""
    parts = {what: spent[what] for what in ("loading", "capturing", "evaluation", "waiting for memory")}
    all_, in_steps = max(spent["trials"], spent["jobs"], 1e-9), spent["calls"] + spent["jobs"]
    parts |= {"steps": in_steps - sum(parts.values()), "the rest": all_ - in_steps}
    return {what: max(0.0, seconds) / all_ for what, seconds in parts.items()}
