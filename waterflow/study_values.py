"""What a study is told of a trial that returned a job: which jobs it can take, and their numbers."""

from __future__ import annotations

from typing import Any

from waterflow.errors import StudyError
from waterflow.job import Job, JobResult


class UnfitJobError(StudyError):
    """A job that says nothing of what its study looks for. It ends the study, whatever ``catch`` names."""


def check_job(study: Any, job: Job) -> None:
    """Raise UnfitJobError, before ``job`` trains, where its value would not be what ``study`` looks for."""
    if job.evaluate is not None:
        return
    directions = [direction.name.lower() for direction in study.directions]
    if len(directions) == 1 and directions[0] == "maximize":
        raise UnfitJobError(
            f"the study has direction='maximize' and job {job.name!r} has no evaluate=: its value would be its training loss, of "
            "which the study would look for the largest. Pass Job(evaluate=), a function of the model that returns the number to "
            "maximize, or make the study with direction='minimize'"
        )
    if len(directions) > 1:
        raise UnfitJobError(
            f"the study has {len(directions)} objectives and evaluate of job {job.name!r} is missing, without which a job has 1 "
            f"number, its training loss (directions are {', '.join(directions)}): loss. Return one per objective from evaluate=, "
            "in their order"
        )


def value_of(study: Any, result: JobResult) -> Any:
    """The number, or the numbers, that a job which has ended is worth. Raises StudyError where they are too few or too many."""
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
