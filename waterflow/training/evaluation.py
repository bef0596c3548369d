"""A job's ``evaluate``: in the place of a lane, beside the steps of other jobs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from waterflow.errors import MemoryLimitError
from waterflow.executor.cancel import UserCode, doing
from waterflow.executor.data.copies import brought
from waterflow.executor.engine import Engine
from waterflow.executor.rng import own_numbers
from waterflow.job import Job, Metrics, as_metrics
from waterflow.partition.plan.plan import Plan, format_bytes, opaque_plan
from waterflow.step import Step
from waterflow.training.build import evaluation_mode

_local = threading.local()


class Bringing(TorchFunctionMode):
    """Inside it an operation that torch refuses, as only some of its tensors are on ``device``, is given copies there."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call ``operation``; again, if it was refused and does not write to what it is given."""
        given = args, kwargs or {}
        try:
            return operation(*args, **given[1])
        except RuntimeError:
            name, there = getattr(operation, "__name__", ""), brought(given, self._device)
            on_both = any(isinstance(one, torch.Tensor) and one.device == self._device for one in tree_leaves(given))
            writes = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or "out" in given[1]
            if there is given or not on_both or writes:
                raise
        return operation(*there[0], **there[1])


def evaluating() -> bool:
    """Return True if the calling thread is inside a job's ``evaluate``, and so occupies a lane."""
    return getattr(_local, "evaluating", False)


@doing("evaluating")
class Evaluation:
    """Calls a job's ``evaluate`` after an epoch, in the memory that it was measured to need."""

    def __init__(self, job: Job, engine: Engine | None, code: UserCode) -> None:
        self._job = job
        self._engine = engine
        self._code = code
        self._lane = OnLane(f"evaluate of job {job.name!r}")
        self._model: nn.Module | None = None  # only while it is evaluated: the engine may keep the work for longer

    def metrics(self, step: Step) -> Metrics | None:
        """Return metrics of the step's model; None for a job without ``evaluate``. Raises MemoryLimitError, JobCancelled."""
        if self._job.evaluate is None:
            return None
        self._model = step.model
        try:
            return as_metrics(self._job.name, self._evaluate(step))
        finally:
            self._model = None

    def _evaluate(self, step: Step) -> Any:
        evaluate, engine, generators = self._job.evaluate, self._engine, step.generators
        device = engine.device if engine is not None else torch.device("cpu")

        @doing("evaluating")
        def work() -> Any:
            model = self._model
            assert model is not None and evaluate is not None
            bringing = Bringing(device) if device.type == "cuda" else contextlib.nullcontext()
            numbers = own_numbers(*generators) if generators else contextlib.nullcontext()
            _local.evaluating = True
            try:
                with evaluation_mode(model), torch.no_grad(), numbers, bringing, self._code.here():
                    return evaluate(model)
            finally:
                _local.evaluating = False

        if engine is None:
            return work()
        return self._lane.run(engine, step, work)


class OnLane:
    """Runs work of a job that is no step of it in the place of a lane, in the memory that it was measured to need.

    ``what`` names the work in messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._height: int | None = None
        self._size = 0
        self._plan: Plan | None = None  # of the job's last step

    def run(self, engine: Engine, step: Step, work: Callable[[], Any], size: int = 0) -> Any:
        """Run ``work`` as ``Engine.run_eager`` does, for an input of ``size`` bytes; no step of ``step`` may be under way.

        Raises MemoryLimitError and JobCancelled.
        """
        assert step.job is not None
        known = None
        # The first time, and for an input that is larger than before, it runs in the reserve, measured; later it reserves what it took.
        if self._height is not None and size <= self._size:
            self._claim(engine, step, self._height)
            known = self._height
        result, height = engine.run_eager(step.job, work, known)
        self._height, self._size = max(height, self._height or 0), max(size, self._size)
        with contextlib.suppress(RuntimeError):
            self._plan = step.plan
        return result

    def _claim(self, engine: Engine, step: Step, height: int) -> None:
        assert step.job is not None
        with contextlib.suppress(RuntimeError):  # resumed, and not trained since: the last plan counts
            self._plan = step.plan
            if height <= self._plan.height and engine.reservations.covers(step.job, self._plan, step.batches_ahead):
                return
        if (plan := self._plan) is None:
            return
        # Steps and evaluation of one job never overlap: it reserves the higher of the two.
        height = max(height, plan.height)
        needed = opaque_plan(step.name, height, persistent=plan.persistent, batch=plan.batch)
        try:
            engine.reservations.claim(step.job, needed, batches=step.batches_ahead)
        except MemoryLimitError as error:
            raise MemoryLimitError(
                f"{self._what} reaches {format_bytes(height)} above the job's state, which the "
                f"limit of {format_bytes(error.limit)} does not leave. Evaluate in smaller batches, train fewer jobs "
                "at once, or raise memory=.",
                needed=error.needed,
                limit=error.limit,
            ) from None
