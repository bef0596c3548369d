"""Build a job's result, and the errors that decide it."""

from __future__ import annotations

import contextlib
import math
import pickle
import traceback
from dataclasses import fields, replace
from typing import Any

import torch

from waterflow.by_value import pickled
from waterflow.errors import JobTimeoutError, NonFiniteLossError, WaterflowError, sendable
from waterflow.job import Job, JobResult, Metrics, Status
from waterflow.step import Step


def result_of(
    name: str,
    status: Status,
    error: BaseException | None,
    step: Step | None,
    metrics: tuple[Metrics, ...],
    losses: tuple[float, ...],
    seconds: float,
) -> JobResult:
    """Return the result of a job. ``step`` is None if it was never made; no step of it may be running.

    ``seconds`` is wall time.
    """
    plan = predicted = measured = None
    with contextlib.suppress(RuntimeError):  # no step ran, or only opaque ones outside an engine, which have no plan
        plan = step.plan if step is not None else None
    if step is not None and plan is not None:
        held = plan.persistent + plan.batch
        # Only a graph predicts; an eager step is measured.
        predicted = held + step.predicted_height if step.predicted_height and step.opaque_reason is None else None
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
        **(
            {}
            if step is None
            else {
                "opaque_reason": step.opaque_reason,
                "eager_steps": step.eager_steps,
                "planned_requests": step.planned_requests,
                "missed_requests": step.missed_requests,
                "recomputed": step.recomputed,
                "offloaded": step.most_offloaded,
                "state_dict": _on_host(step.model.state_dict()),
            }
        ),
    )


def pack_result(result: JobResult) -> bytes:
    """Return a result for another process, pickled, which ``pickle.loads`` reads there.

    An error that cannot be read is replaced by ``sendable``; for anything else of the user's the job fails, without it.
    """
    if result.error is not None:
        result = replace(result, error=sendable(result.error))
    # Weights can be read; to try that with large ones would take their memory again.
    plain = {name: value for name, value in (result.state_dict or {}).items() if not isinstance(value, torch.Tensor)}
    if _is_readable(replace(result, state_dict=plain)):
        return pickled(result)
    lost: dict[str, Any] = {one.name: None for one in fields(result) if not _is_readable(getattr(result, one.name))}
    error = WaterflowError(
        f"job {result.name!r} has ended, and what another process cannot read of its result is lost: {', '.join(lost)}. Let objectives "
        "and get_extra_state return plain data and tensors"
    )
    return pickled(replace(result, **lost | {"status": "failed", "error": error}))


def _is_readable(value: Any) -> bool:
    try:
        pickle.loads(pickled(value))
    except Exception:
        return False
    return True


def _on_host(state: dict[str, Any]) -> dict[str, Any]:
    # Of a model on a GPU: results are kept beside the memory limit, and are loaded on machines without a GPU.
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.is_cuda:
            state[name] = value.cpu()
    return state


def over_limit(made: Any, error: JobTimeoutError) -> Any:
    """Return the result of a job that passed its time limit: failed with ``error``. Raises ``error`` if there is no result."""
    if not isinstance(made, JobResult):
        raise error
    # It may have completed between the limit and the stop: then its result stands.
    if made.status == "completed" or made.error is error:
        return made
    return replace(made, status="failed", error=error, traceback="".join(traceback.format_exception(error)))


def check_finite(job: Job, epoch: int, losses: list[float]) -> None:
    """Raise NonFiniteLossError if a loss of ``epoch`` is NaN or infinite and the job does not allow that."""
    if job.allow_non_finite or all(map(math.isfinite, losses)):
        return
    first = next(i for i, loss in enumerate(losses) if not math.isfinite(loss))
    raise NonFiniteLossError(
        f"the loss of job {job.name!r} became {losses[first]} in epoch {epoch}, step {first}. "
        "Lower the learning rate, clip gradients, or pass allow_non_finite=True; a study goes on after such trials "
        "with catch=(wf.NonFiniteLossError,)"
    )
