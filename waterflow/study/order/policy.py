"""Policy: chooses which trials run; and what it knows of each trial."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal


@dataclass(slots=True, eq=False)
class TrialProgress:
    """A trial as a policy sees it.

    ``reports`` are in the order of their steps, and larger is better in each study. A ``ready`` trial waits, or has just made a
    report and asks whether it may go on; a ``new`` one would begin; ``ended`` ones are there to be compared with.
    """

    number: int
    reports: list[float] = field(default_factory=list)
    state: Literal["new", "ready", "running", "ended"] = "ready"


class Policy(ABC):
    """Decides which trials run. It keeps no state of its own, so that equal trials are ordered equally."""

    @abstractmethod
    def choose(self, trials: Sequence[TrialProgress], lanes: int) -> Sequence[TrialProgress]:
        """Return at most ``lanes`` of the new and the ready trials, the first to run first.

        Running trials go on; they are asked about at their next report.
        """

    def asks(self, trial: TrialProgress) -> bool:
        """Return False if a running trial that has just made a report goes on, whatever the others promise."""
        return True
