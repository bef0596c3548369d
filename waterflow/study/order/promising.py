"""Promising: time goes to the trials that promise most; the others are paused, and run when nothing better waits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from waterflow.errors import StudyError
from waterflow.study.order.policy import Policy, TrialProgress


class Promising(Policy):
    """Asynchronous successive halving (Li et al. 2020, arXiv:1810.05934) that pauses where the original stops.

    Rungs are at 1, ``reduction``, ``reduction`` squared, ... reports. A trial that has come to a rung goes on while it is among
    the best ``1 / reduction`` of all that have come so far. Of those the highest rung is first, then the best value, then the
    latest trial. Then come new trials, and last those that wait at a rung, in the same order.
    """

    def __init__(self, reduction: int = 3) -> None:
        if not isinstance(reduction, int) or isinstance(reduction, bool) or reduction < 2:
            raise StudyError(f"reduction must be a whole number, 2 or more; got {reduction!r}")
        self.reduction = reduction

    def choose(self, trials: Sequence[TrialProgress], lanes: int) -> Sequence[TrialProgress]:
        """See Policy."""
        ready = [trial for trial in trials if trial.state == "ready"]
        rungs = [self._rung(len(trial.reports)) for trial in ready]
        chosen = [trial for trial, rung in zip(ready, rungs) if len(trial.reports) != rung]  # between two rungs
        if len(chosen) >= lanes:
            return chosen[:lanes]
        bars = {rung: self._bar(trials, rung) for rung in {*rungs}}
        at_rung = [(rung, *_standing(trial, rung), trial) for trial, rung in zip(ready, rungs) if len(trial.reports) == rung]
        at_rung.sort(key=lambda one: one[:3], reverse=True)
        promoted = [trial for rung, value, number, trial in at_rung if (value, number) >= bars[rung]]
        new = [trial for trial in trials if trial.state == "new"]
        waiting = [trial for rung, value, number, trial in at_rung if (value, number) < bars[rung]]
        return [*chosen, *promoted, *new, *waiting][:lanes]

    def _rung(self, reports: int) -> int:
        rung = 1
        while rung * self.reduction <= reports:
            rung *= self.reduction
        return rung

    def _bar(self, trials: Sequence[TrialProgress], rung: int) -> tuple[float, float]:
        # The standing of the last trial that is promoted; none is before `reduction` trials have come.
        there = sorted(_standing(trial, rung) for trial in trials if len(trial.reports) >= rung)
        count = len(there) // self.reduction
        return there[-count] if count else (math.inf, math.inf)


def _standing(trial: TrialProgress, rung: int) -> tuple[float, float]:
    value = trial.reports[rung - 1]
    return (-math.inf if math.isnan(value) else value), trial.number
