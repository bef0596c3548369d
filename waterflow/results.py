"""What became of a job, from what it leaves behind."""

from __future__ import annotations

import contextlib
import math
import traceback
from dataclasses import replace
from typing import Any

from waterflow.errors import JobTimeoutError, NonFiniteLossError
from waterflow.job import Job, JobResult, Metrics, Status
from waterflow.step import Step


def result_of(
    name: str, status: Status, error: BaseException | None, step: Step | None,
    metrics: tuple[Metrics, ...], losses: tuple[float, ...], seconds: float,
) -> JobResult:  # fmt: skip
    """The result of a job, whose step is None where it did not come that far; none of it may be under way."""
    plan = predicted = measured = None
    with contextlib.suppress(RuntimeError):  # no step came so far, or an opaque one alone, which needs no plan
        plan = step.plan if step is not None else None
    if step is not None and plan is not None:
        held = plan.persistent + plan.batch
        predicted = held + step.predicted_height if step.opaque_reason is None else None
        measured = held + step.measured_height if step.measured_height else None
    return JobResult(
        name=name,
        status=status,
        metrics=metrics,
        losses=losses,
        steps=len(losses),
        seconds=seconds,
        predicted_peak=predicted,
        measured_peak=measured,
        error=error,
        traceback="".join(traceback.format_exception(error)) if error is not None else None,
        **({} if step is None else {
            "opaque_reason": step.opaque_reason, "eager_steps": step.eager_steps, "planned_requests": step.planned_requests,
            "missed_requests": step.missed_requests, "recomputed": step.recomputed, "offloaded": step.most_offloaded,
            "state_dict": step.model.state_dict(),
        }),
    )  # fmt: skip


def over_limit(made: Any, error: JobTimeoutError) -> Any:
    """What becomes of the result of a job that ended at its time limit: it failed, of that. Raises the error where there is none."""
    if not isinstance(made, JobResult):
        raise error
    if made.status == "completed" or made.error is error:
        return made
    return replace(made, status="failed", error=error, traceback="".join(traceback.format_exception(error)))


def check_finite(job: Job, epoch: int, losses: list[float]) -> None:
    """Raise NonFiniteLossError where a loss of ``epoch`` is NaN or infinite and the job does not allow that."""
    if job.allow_non_finite or all(map(math.isfinite, losses)):
        return
    first = next(i for i, loss in enumerate(losses) if not math.isfinite(loss))
    raise NonFiniteLossError(
        f"the loss of job {job.name!r} became {losses[first]} in epoch {epoch}, step {first}. "
        "Lower the learning rate, clip gradients, or pass allow_non_finite=True; a study goes on after such trials "
        "with catch=(wf.NonFiniteLossError,)"
    )
