"""One trial of a study in another process, on a device of a cluster: what is handed in, and what runs it there."""

from __future__ import annotations

import threading
import time
import traceback
import weakref
from dataclasses import dataclass, fields
from typing import Any

from waterflow.checkpoint import Checkpoint
from waterflow.errors import StudyError
from waterflow.executor.cancel import UserCode, limited
from waterflow.executor.engine import Engine
from waterflow.executor.steps_of_thread import cancel_steps, close_steps_of_thread, made_here
from waterflow.executor.thread_generators import generators_for, own_numbers
from waterflow.job import Job, JobResult
from waterflow.optuna_private import TrialPruned, set_in_loop, stopped, trial_of
from waterflow.priority import Priority
from waterflow.results import over_limit
from waterflow.runner import JobRunner
from waterflow.study_coordinator import Objective, reporting
from waterflow.study_values import check_job, value_of
from waterflow.task import Task


@dataclass(frozen=True)
class TrialResult(JobResult):
    """What became of a trial: ``returned`` by its objective, or by its job's evaluation; whether it stopped the study."""

    returned: Any = None
    stopped: bool = False


class TrialTask(Task):
    """One trial of a study, in another process: asks for its values there, trains, reports and prunes."""

    def __init__(self, study: Any, number: int, objective: Objective, seed: int, weights: bool = True,
        timeout: float | None = None,
    ) -> None:  # fmt: skip
        self.name = f"trial-{number}"
        self.study = study
        self.number = number
        self.objective = objective
        self.seed = seed
        self.timeout = timeout  # seconds
        self.weights = weights  # whether its weights come back where it is completed

    def runner(self, engine: Engine, seed: int, resume: Checkpoint | None) -> TrialRunner:
        """See ``Task``."""
        return TrialRunner(self, engine, resume)


class TrialRunner:
    """Runs a trial. One that returns a Job can be saved and go on elsewhere; the user's own loop begins again there."""

    def __init__(self, task: TrialTask, engine: Engine, resume: Checkpoint | None) -> None:
        self._task = task
        self.engine = engine
        self.priority: Priority = "guaranteed"
        self._resume = resume
        self._code = UserCode()
        self._inner: JobRunner | None = None
        self._steps: weakref.WeakSet[Any] = weakref.WeakSet()
        self._halted: str | None = None
        self._lock = threading.Lock()

    def run(self) -> JobResult:
        """See ``JobRunner``; errors end up in the result."""
        task, began = self._task, time.perf_counter()
        study = task.study
        study.sampler.reseed_rng()  # all trials have copies of one sampler
        made: JobResult | None = None
        value: Any = None
        error: BaseException | None = None
        try:
            value = limited(
                task.timeout, task.name.replace("-", " "), "trial_timeout",
                lambda: self._value(trial_of(study, task.number)), self._code, self._end_at_limit, late=over_limit,
            )  # fmt: skip
            if isinstance(value, JobResult):
                made = value
                error = made.error
                value = value_of(study, made) if made.status == "completed" else None
        except BaseException as failure:
            error = failure
        status: Any = "completed" if error is None else "failed"
        if isinstance(error, TrialPruned) or (made is not None and made.status == "pruned"):
            status, error = "pruned", None
        elif self._halted is not None and status != "completed":
            status = "cancelled"
        found: dict[str, Any] = {"seconds": time.perf_counter() - began}
        if made is not None:
            found = {field.name: getattr(made, field.name) for field in fields(JobResult)}
        if not task.weights:
            found["state_dict"] = None
        found |= {
            "name": task.name, "status": status, "error": error, "returned": value, "stopped": stopped(study),
            "traceback": "".join(traceback.format_exception(error)) if error is not None else None,
        }  # fmt: skip
        return TrialResult(**found)

    def _end_at_limit(self, reason: str) -> None:
        if self._inner is not None:
            self._inner.stop(reason)
        cancel_steps(self._steps, reason)

    def _value(self, trial: Any) -> Any:
        """What the objective returns; where that is a job, its result."""
        self._steps = made_here.steps
        set_in_loop(self._task.study, True)  # study.stop() looks at it
        try:
            with own_numbers(*generators_for(self.engine.device, self._task.seed)), self._code.here():
                value = self._task.objective(trial)
            return self._train(trial, value) if isinstance(value, Job) else value
        finally:
            close_steps_of_thread()

    def _train(self, trial: Any, job: Job) -> JobResult:
        check_job(self._task.study, job)
        on_epoch = reporting(self._task.study, trial)
        runner = JobRunner(job, self.engine, on_epoch, seed=self._task.seed, resume=self._resume)
        with self._lock:
            self._inner = runner
            runner.lease.set(self.priority)
            if self._halted is not None:
                runner.stop(self._halted)
        return runner.run()

    @property
    def lease(self) -> Any:
        """Where the priority is set: of its job, once there is one."""
        return self._inner.lease if self._inner is not None else self

    def set(self, priority: Priority) -> None:
        """For the job to come."""
        self.priority = priority

    @property
    def steps(self) -> int:
        """Steps of its job; 0 of a loop of the user's own."""
        return self._inner.steps if self._inner is not None else 0

    @property
    def step(self) -> Any:
        """The step of its job."""
        return self._inner.step if self._inner is not None else None

    def snapshot(self, timeout: float | None = None) -> Checkpoint:
        """See ``JobRunner``. Raises StudyError where there is no job to save."""
        return self._job().snapshot(timeout)

    def suspend(self, timeout: float | None = None) -> Checkpoint:
        """See ``JobRunner``. Raises StudyError where there is no job to save."""
        return self._job().suspend(timeout)

    def stop(self, reason: str = "stopped") -> None:
        """End it: a job at its next group boundary, the user's own loop at once."""
        with self._lock:
            self._halted = reason
            inner = self._inner
        if inner is not None:
            inner.stop(reason)
        else:
            self._code.break_off()

    def break_off(self) -> None:
        """End it now: code of the user's, too, which ``stop()`` of a job would let come to its end."""
        with self._lock:
            self._halted = self._halted or "interrupted"
            inner = self._inner
        (inner or self._code).break_off()

    def _job(self) -> JobRunner:
        if self._inner is None:
            raise StudyError(f"{self._task.name} trains in a loop of its own, whose state is not known; return a Job")
        return self._inner
