"""Values that a study is told for a trial's job, the jobs that fit a study, and the weights that it keeps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from waterflow.errors import StudyError
from waterflow.job import Job, JobResult, Results
from waterflow.run_stats import RunStats
from waterflow.study.history import StudyTimeline


class StudyTypeError(StudyError, TypeError):
    """A setting of a study has a type for which Optuna raises a TypeError."""


class NestedStudyError(StudyError, RuntimeError):
    """A study was run inside itself, for which Optuna raises a RuntimeError."""


class UnfitJobError(StudyError):
    """A job's value would not be what its study optimizes. Ends the study, whatever ``catch`` names."""


class UnfitCheckpointError(StudyError):
    """A trial cannot go on from its checkpoint. Ends the study, whatever ``catch`` names; the trial waits."""


def check_job(study: Any, job: Job) -> None:
    """Raise UnfitJobError, before ``job`` trains, if its value would not be what ``study`` optimizes."""
    if job.evaluate is not None:
        return
    directions = [direction.name.lower() for direction in study.directions]
    if len(directions) == 1 and directions[0] == "maximize":
        raise UnfitJobError(
            f"the study has direction='maximize' and job {job.name!r} has no evaluate=: its value would be its training loss, "
            "which the study would maximize. Pass Job(evaluate=), a function of the model that returns the number to "
            "maximize, or make the study with direction='minimize'"
        )
    if len(directions) > 1:
        raise UnfitJobError(
            f"the study has {len(directions)} objectives and evaluate of job {job.name!r} is missing, without which a job has 1 "
            f"number, its training loss (directions are {', '.join(directions)}): loss. Return one per objective from evaluate=, "
            "in their order"
        )


def value_of(study: Any, result: JobResult) -> Any:
    """Return the value, or values, of a completed job. Raises StudyError if their number is not that of the objectives."""
    count = len(study.directions)
    if count == 1:
        return result.value
    values = list(result.metrics[-1].values())
    if len(values) != count:
        raise StudyError(
            f"the study has {count} objectives and evaluate of job {result.name!r} returned {len(values)} number(s): "
            f"{', '.join(result.metrics[-1])}. Return one per objective, in their order"
        )
    return values


def best_of(study: Any) -> str:
    """Return text with the best value and its trial; empty if there is none, or several objectives."""
    if len(study.directions) > 1:
        return ""
    with contextlib.suppress(ValueError):
        return f"best {study.best_value:.6g} (trial {study.best_trial.number})"
    return ""


KeepWeights = Literal["best", "all", "none"]


def check_keep_weights(keep: Any) -> None:
    """Raise StudyError for an unknown setting."""
    if keep not in get_args(KeepWeights):
        raise StudyError(f"keep_weights must be one of {', '.join(map(repr, get_args(KeepWeights)))}; got {keep!r}")


def without_weights(result: JobResult) -> JobResult:
    """Return the result without its weights."""
    return result if result.state_dict is None else replace(result, state_dict=None)


class KeptResults:
    """Results by trial. Thread-safe.

    With ``keep="best"`` the weights of a trial are dropped as soon as the study was told a better one: those of this call's
    best trial remain, or of its Pareto front in a study with several objectives. Trials that were pruned, failed, or break a
    constraint never count.
    """

    def __init__(self, study: Any, keep: KeepWeights) -> None:
        self._study, self._keep = study, keep
        self._signs = [-1.0 if direction.name == "MAXIMIZE" else 1.0 for direction in study.directions]
        self._lock = threading.Lock()
        self._results: dict[int, JobResult] = {}
        self._best: dict[int, list[float]] = {}  # the best trials, and their values with signs such that less is better

    def add(self, number: int, result: JobResult) -> None:
        """Store the result of a trial's job, before or while the study is told."""
        # Kept until the study was told: only then is it known if it is the best.
        may_be_best = self._keep == "best" and result.status in ("completed", "unfinished")
        with self._lock:
            self._results[number] = result if self._keep == "all" or may_be_best else without_weights(result)

    def of(self, number: int) -> JobResult | None:
        """Return the result of a trial as it is kept now; None if it has none."""
        with self._lock:
            return self._results.get(number)

    def would_keep(self, value: float | list[float]) -> bool:
        """Return True if the weights of a completed trial with this value, or these values, may be kept."""
        with self._lock:
            worth = self._worth(value if isinstance(value, list) else [value])
            return self._keep == "all" or (
                self._keep == "best"
                and not any(worth != best and all(w >= b for w, b in zip(worth, best)) for best in self._best.values())
            )

    def with_weights(self) -> set[int]:
        """Return the numbers of the trials whose weights are kept."""
        with self._lock:
            return {number for number, result in self._results.items() if result.state_dict is not None}

    def told(self, number: int, values: list[float] | None) -> None:
        """Record that the study was told of a trial: ``values``, or None if it cannot be the best."""
        with self._lock:
            if self._keep != "best" or number not in self._results:
                return
            worth = self._worth(values or ())
            for other in list(self._best) if values is not None else ():
                if self._gives_way(other, self._best[other], number, worth):
                    del self._best[other]
                    self._results[other] = without_weights(self._results[other])
                elif self._gives_way(number, worth, other, self._best[other]):
                    values = None
            if values is None:
                self._results[number] = without_weights(self._results[number])
            else:
                self._best[number] = worth

    def _worth(self, values: Sequence[float]) -> list[float]:
        return [sign * value for sign, value in zip(self._signs, values)]

    def _gives_way(self, one: int, worth: list[float], other: int, worth_of_other: list[float]) -> bool:
        # Dominated: no better in any objective. Equal values: Optuna's own choice of the best decides, then the earlier
        # trial.
        if worth != worth_of_other:
            return all(mine >= theirs for mine, theirs in zip(worth, worth_of_other))
        if len(worth) > 1:
            return False  # both are on the front
        with contextlib.suppress(ValueError):
            return bool(self._study.best_trial.number != one)
        return one > other

    def in_order(self) -> Results:
        """Return all results, ordered by trial number."""
        return Results(result for _, result in sorted(self._results.items()))


@dataclass(frozen=True)
class StudySummary:
    """Counts and results of one call of ``optimize``; print it. ``results`` has the jobs of trials that returned one, by trial.

    Results that ``keep_weights`` names have their weights (``state_dict``); the others have None. ``states`` counts trials by
    their final state, ``run_again`` those that ran twice for lack of memory; ``pauses`` of trials took ``pausing`` seconds.
    ``stats`` and ``history`` are None if a cluster has trained. ``lane_busy`` is the share of ``seconds`` per lane.
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
    stats: RunStats | None = None
    run_again: int = 0
    pauses: int = 0
    pausing: float = 0.0
    history: StudyTimeline | None = None

    def timeline(self) -> StudyTimeline:
        """Return when trials ran and what they reported; it saves a picture. Raises StudyError for a study of a cluster."""
        if self.history is None:
            raise StudyError("a cluster has trained these trials, and keeps no record of when each one ran; leave cluster= out")
        return self.history

    def __repr__(self) -> str:
        ended = ", ".join(f"{count} {state}" for state, count in self.states.items())
        many = f"{self.trials} trials in {self.seconds:.1f} s, up to {self.most_at_once} at a time"
        again = f"{self.run_again} ran twice for lack of memory" if self.run_again else ""
        paused = f"{self.pauses} pauses, {self.pausing:.2g} s" if self.pauses else ""
        return "; ".join(filter(None, [many, ended, again, paused, self.best]))

    def __str__(self) -> str:
        told = str(self.history) if self.history else ""
        return "\n".join(filter(None, [repr(self), told, *(self.stats.lines_for("trials") if self.stats else ())]))
