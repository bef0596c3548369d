"""Promising: time goes to the trials that promise most; the others are paused, and run when nothing better waits."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

from waterflow.errors import StudyError
from waterflow.study.order.policy import Policy, TrialProgress


class Promising(Policy):
    """Asynchronous successive halving (Li et al. 2020, arXiv:1810.05934) that pauses where the original stops.

    Rungs are at 1, ``reduction``, ``reduction`` squared, ... reports. A trial that has come to a rung goes on while it is among
    the best ``1 / reduction`` of all that have come so far, or as good as the last of these. The highest rung is first, then the best
    value, then the latest trial. Then come new trials, and last those that wait at a rung, in the same order.
    """

    def __init__(self, reduction: int = 3) -> None:
        if not isinstance(reduction, int) or isinstance(reduction, bool) or reduction < 2:
            raise StudyError(f"reduction must be a whole number, 2 or more; got {reduction!r}")
        self.reduction = reduction

    def asks(self, trial: TrialProgress) -> bool:
        """See Policy."""
        return len(trial.reports) in self._rungs(len(trial.reports))

    def choose(self, trials: Sequence[TrialProgress], lanes: int) -> Sequence[TrialProgress]:
        """See Policy."""
        # Written for a thousand trials that wait: what takes a look at each of them is a comprehension.
        ready = [trial for trial in trials if trial.state == "ready"]
        rungs = self._rungs(max((len(trial.reports) for trial in ready), default=0))
        chosen = [trial for trial in ready if len(trial.reports) not in rungs]  # on their way to a rung
        waiting: list[TrialProgress] = []
        for rung in reversed(rungs):
            if len(chosen) >= lanes:
                return chosen[:lanes]
            here = [trial for trial in ready if len(trial.reports) == rung]
            if not here:
                continue
            values = sorted([_at(trial, rung) for trial in trials if len(trial.reports) >= rung])
            count = len(values) // self.reduction
            bar = values[-count] if count else math.inf
            promoted = [trial for trial in here if _at(trial, rung) >= bar]
            best = heapq.nlargest(lanes, promoted, key=lambda trial: (_at(trial, rung), trial.number))
            chosen += best
            waiting += heapq.nlargest(lanes, set(here).difference(promoted), key=lambda trial: (_at(trial, rung), trial.number))
        new = [trial for trial in trials if trial.state == "new"]
        return [*chosen, *new, *waiting][:lanes]

    def _rungs(self, reports: int) -> list[int]:
        found = [1]
        while found[-1] * self.reduction <= reports:
            found.append(found[-1] * self.reduction)
        return found


def _at(trial: TrialProgress, rung: int) -> float:
    value = trial.reports[rung - 1]
    return -math.inf if value != value else value  # NaN
