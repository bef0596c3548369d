"""Fifo: trials run to their end in the order in which they began."""

from __future__ import annotations

from collections.abc import Sequence

from waterflow.study.order.policy import Policy, TrialProgress


class Fifo(Policy):
    """First come, first served."""

    def asks(self, trial: TrialProgress) -> bool:
        """See Policy."""
        return False

    def choose(self, trials: Sequence[TrialProgress], lanes: int) -> Sequence[TrialProgress]:
        """See Policy."""
        ready = [trial for trial in trials if trial.state == "ready"]
        return [*ready, *(trial for trial in trials if trial.state == "new")][:lanes]
