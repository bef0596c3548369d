"""What one call of ``optimize`` did, for its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from waterflow.job import Results
from waterflow.run_figures import RunFigures


@dataclass(frozen=True)
class StudySummary:
    """What one call of ``optimize`` did; print it. ``results`` holds the jobs of trials that returned one, by trial.

    Weights (``state_dict``) are in the results that ``keep_weights`` names, and None in the others. ``states`` counts trials by
    how they ended; ``figures`` are None where a cluster's devices have trained.
    """

    trials: int
    seconds: float
    steps: int
    captures: int
    most_at_once: int
    lane_busy: tuple[float, ...]
    results: Results = field(default_factory=Results)
    states: Mapping[str, int] = field(default_factory=dict)
    best: str = ""
    figures: RunFigures | None = None

    def __repr__(self) -> str:
        ended = ", ".join(f"{count} {state}" for state, count in self.states.items())
        many = f"{self.trials} trials in {self.seconds:.1f} s, up to {self.most_at_once} at a time"
        return "; ".join(filter(None, [many, ended, self.best]))

    def __str__(self) -> str:
        return "\n".join([repr(self), *(self.figures.lines("trials") if self.figures else ())])
