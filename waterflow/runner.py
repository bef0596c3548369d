"""Runs one job from build to result, on the calling thread: loads its data, feeds its lane, evaluates."""

from __future__ import annotations

import atexit
import contextlib
import math
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from waterflow import _C
from waterflow.errors import InvalidJobError, JobCancelled, MemoryLimitError, NonFiniteLossError
from waterflow.executor.data import Batches
from waterflow.executor.engine import Engine
from waterflow.executor.fused_group import FusedPending
from waterflow.executor.pending import Pending
from waterflow.executor.shared_data import Reader, SharedData
from waterflow.job import Job, JobResult, Metrics, Status, as_metrics
from waterflow.partition.plan import format_bytes, opaque_plan
from waterflow.step import Step
from waterflow.user_code import UserCode

# Steps handed to the engine before the first of them is done, and batches held: one runs, one waits or is being loaded.
STEPS_AHEAD = 2
# Short steps are queued deeper where their batches are small: so much work bridges a wait for the interpreter lock.
BRIDGE_SECONDS = 5e-3
MOST_STEPS_AHEAD = 16
BATCH_SHARE = 1 / 32  # of the engine's reserve, for the batches that one job queues beyond its claim
# Ctrl-C returns within two seconds: jobs get this long to come to a group boundary, then to be broken off.
STOP_SECONDS = 0.5
BREAK_OFF_SECONDS = 1.0

OnEpoch = Callable[[int, Metrics], None]
InOrder = Callable[[], contextlib.AbstractContextManager[None]]


def draw_seed(generator: torch.Generator | None = None) -> int:
    """A seed for a job that has none, from torch's default generator or another."""
    return int(torch.randint(2**31, (), generator=generator))


class StopJob(Exception):
    """Raised by ``on_epoch`` to end a job early and keep what it has: its status is then ``pruned``."""


_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """A thread that comes back from native code while Python shuts down would abort the process."""
    _C.close_engines()
    deadline = time.monotonic() + BREAK_OFF_SECONDS
    for thread in list(_threads):
        if thread.ident is not None and thread is not threading.current_thread():
            thread.join(timeout=max(0.0, deadline - time.monotonic()))


def stop_all(runners: Iterable[JobRunner], reason: str) -> None:
    """Stop several jobs; does not wait for their groups to end."""
    for runner in runners:
        thread = threading.Thread(target=runner.stop, args=(reason,), daemon=True)
        _threads.add(thread)
        thread.start()


def join_all(threads: Iterable[threading.Thread | None], seconds: float) -> None:
    """Wait for threads that have been started, at most ``seconds`` for all of them."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        if thread is not None and thread.ident is not None:
            _threads.add(thread)
            thread.join(timeout=max(0.0, deadline - time.monotonic()))


_local = threading.local()


def evaluating() -> bool:
    """Whether the calling thread is inside a job's ``evaluate``, and so keeps a lane."""
    return getattr(_local, "evaluating", False)


class JobRunner:
    """Trains one job. ``run()`` is called once; ``stop()`` from any thread.

    ``engine`` None trains alone, on the calling thread. ``on_epoch(epoch, metrics)`` is called after each
    evaluation (after each epoch where there is none, with the mean loss); what it raises ends the job. ``seed``
    stands in for a seed that the job does not have; without one it is drawn here. Model and data are made inside of
    ``in_order()``, which may wait.
    """

    def __init__(
        self, job: Job, engine: Engine | None = None, on_epoch: OnEpoch | None = None, *,
        seed: int | None = None, in_order: InOrder = contextlib.nullcontext,
    ) -> None:  # fmt: skip
        job.check()
        self.job = job
        self.engine = engine
        self.step: Step | None = None
        self._on_epoch = on_epoch
        self._stop: str | None = None
        self._started = time.perf_counter()
        self._losses: list[float] = []
        self._metrics: list[Metrics] = []
        self._eager_height: int | None = None
        self._batches: Batches | Reader | None = None
        self._thread: int | None = None
        self._scheduler: Any = None
        self._user_code = UserCode()
        self._lock = threading.Lock()
        self._in_order = in_order
        if job.seed is not None or seed is None:
            seed = job.seed if job.seed is not None else draw_seed()
        self._numbers = torch.Generator().manual_seed(seed)
        self._data_numbers = torch.Generator().manual_seed(seed)
        if isinstance(job.data, SharedData):  # from now on other jobs wait for this one
            self._batches = job.data.reader(job.epochs, self._check_stop, self._held_up)

    def stop(self, reason: str = "stopped") -> None:
        """End the job at its next group boundary, and wait for that."""
        with self._lock:
            self._stop = reason
            step = self.step
        if step is not None and step.job is not None and self.engine is not None:
            with contextlib.suppress(ValueError):  # it has left already
                self.engine.native.cancel(step.job, reason)

    def break_off(self) -> None:
        """End the job now: code of the user's, too (data, evaluation), which ``stop()`` would let come to its end."""
        self._stop = self._stop or "interrupted"
        self._user_code.break_off()

    def run(self) -> JobResult:
        """Train to the end; errors of the job end up in its result, whatever their kind."""
        status: Status = "completed"
        self._thread = threading.get_ident()
        error: BaseException | None = None
        try:
            with self._user_code.here():
                with self._in_order():
                    self._build()
                self._train()
        except StopJob:
            status = "pruned"
        except JobCancelled as cancelled:
            status, error = "cancelled", cancelled
        except KeyboardInterrupt:
            self._end(None)
            raise
        except BaseException as failure:
            status, error = "failed", failure
        if error is not None and self._stop is not None:
            status = "cancelled"
        try:
            return self._result(status, error)
        finally:
            self._end(error)

    # -- the parts

    def _end(self, error: BaseException | None) -> None:
        if self._batches is not None:
            self._batches.close()
        if self.step is not None:
            self.step.close()
        if error is not None:  # it is kept, and this object with it
            _let_go(error)
            self.step = self._batches = self._scheduler = None

    def _build(self) -> None:
        job = self.job
        self._check_stop()
        if isinstance(job.model, nn.Module):
            model = job.model
        else:
            # Initialization draws from the job's own numbers; the lock keeps others from drawing meanwhile.
            with _C.GeneratorSwap(self._numbers):
                model = job.model()
            if not isinstance(model, nn.Module):
                raise InvalidJobError(f"job {job.name!r}: model() made a {type(model).__name__}, not a module")
        model.train()
        optimizer = job.optimizer(model.parameters())
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidJobError(f"job {job.name!r}: optimizer made a {type(optimizer).__name__}, not an optimizer")
        self._scheduler = job.scheduler(optimizer) if job.scheduler is not None else None
        step = Step(
            model, optimizer=optimizer, loss=job.loss, step=job.step, accumulate=job.accumulate,
            clip_grad_norm=job.clip_grad_norm, clip_grad_value=job.clip_grad_value, autocast=job.autocast,
            recompute=job.recompute, compile=job.compile, generator=self._numbers, name=job.name, engine=self.engine,
        )  # fmt: skip
        step.batches_ahead = STEPS_AHEAD
        with self._lock:
            self.step = step
        if isinstance(job.data, SharedData):
            step.shared_batches = True
        else:
            self._batches = Batches(job.name, job.data, self._data_numbers)

    def _train(self) -> None:
        for epoch in range(self.job.epochs):
            losses = self._train_epoch()
            if not self.job.allow_non_finite and not all(map(math.isfinite, losses)):
                first = next(i for i, loss in enumerate(losses) if not math.isfinite(loss))
                raise NonFiniteLossError(
                    f"the loss of job {self.job.name!r} became {losses[first]} in epoch {epoch}, step {first}. "
                    "Lower the learning rate, clip gradients, or pass allow_non_finite=True; a study goes on after such trials "
                    "with catch=(wf.NonFiniteLossError,)"
                )
            metrics = self._evaluate()
            if metrics is None:
                metrics = {"loss": sum(losses) / len(losses)}
            self._metrics.append(metrics)
            if self._scheduler is not None and self.job.scheduler_interval == "epoch":
                if isinstance(self._scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
                    self._scheduler.step(next(iter(metrics.values())))
                else:
                    self._scheduler.step()
            if self._on_epoch is not None:
                self._on_epoch(epoch, metrics)

    def _train_epoch(self) -> list[float]:
        """One pass over the data: the next batch is loaded while the last ones run."""
        assert self.step is not None and self._batches is not None
        under_way: deque[Pending | FusedPending] = deque()
        losses: list[torch.Tensor] = []
        before = len(self._losses)
        ahead = self._steps_ahead()
        try:
            for batch in self._batches.epoch():
                self._check_stop()
                under_way.append(self.step.submit(batch))
                if self._scheduler is not None and self.job.scheduler_interval == "step":
                    # Schedulers look for it; the update that it stands for is on its way.
                    self.step.optimizer._opt_called = True  # type: ignore[attr-defined]
                    self._scheduler.step()
                if len(under_way) >= ahead:
                    if ahead == STEPS_AHEAD:
                        ahead = self._steps_ahead()
                    # One wait for half of the queue: they end in order, and each wait costs two thread switches.
                    half = (len(under_way) + 1) // 2
                    under_way[half - 1].wait()
                    for _ in range(half):
                        _take(under_way, losses)
            while under_way:
                _take(under_way, losses)
        except BaseException:
            # What is under way must end before its memory goes.
            with contextlib.suppress(Exception):
                while under_way:
                    _take(under_way, losses)
            raise
        finally:
            self._losses.extend(_numbers(losses))
        return self._losses[before:]

    def _steps_ahead(self) -> int:
        """How many steps to have queued or running.

        Batches beyond those that are claimed lie in the reserve: a job that fits must not fail, or wait, for a
        deeper queue.
        """
        step = self.step
        assert step is not None
        if self.engine is None or not step.steps or not step.plan.measured:
            return STEPS_AHEAD
        plan = step.plan
        by_time = int(BRIDGE_SECONDS / max(plan.seconds, 1e-6)) + 1
        by_memory = STEPS_AHEAD + int(self.engine.reserve * BATCH_SHARE / max(plan.batch, 1))
        return max(STEPS_AHEAD, min(by_time, by_memory, MOST_STEPS_AHEAD))

    def _evaluate(self) -> Metrics | None:
        evaluate = self.job.evaluate
        if evaluate is None:
            return None
        self._check_stop()
        assert self.step is not None

        def work() -> Any:
            assert self.step is not None
            model = self.step.model
            model.eval()
            _local.evaluating = True
            try:
                with torch.no_grad(), self._user_code.here():
                    return evaluate(model)
            finally:
                _local.evaluating = False
                model.train()

        if self.engine is None:
            return as_metrics(self.job.name, work())
        assert self.step.job is not None
        plan = None
        if self._eager_height is not None:
            self._claim_for_evaluation(self._eager_height)
            plan = _C.GroupPlan(ends=[1], peak=[self._eager_height], after=[0])
        try:
            result, height = self.engine.run_eager(self.step.job, work, plan)
        except _C.Cancelled as error:
            raise JobCancelled(str(error)) from None
        self._eager_height = max(height, self._eager_height or 0)
        return as_metrics(self.job.name, result)

    def _claim_for_evaluation(self, height: int) -> None:
        assert self.engine is not None and self.step is not None and self.step.job is not None
        step = self.step.plan
        if height <= step.height:
            return
        needed = opaque_plan(self.job.name, height, persistent=step.persistent, batch=step.batch)
        try:
            self.engine.claim(self.step.job, needed, batches=self.step.batches_ahead)
        except MemoryLimitError as error:
            raise MemoryLimitError(
                f"evaluate of job {self.job.name!r} reaches {format_bytes(height)} above the job's state, which the "
                f"limit of {format_bytes(error.limit)} does not leave. Evaluate in smaller batches, train fewer jobs "
                "at once, or raise memory=.",
                needed=error.needed, limit=error.limit,
            ) from None  # fmt: skip

    def _held_up(self) -> bool:
        """Whether the job may wait for what other jobs hold: memory, or its turn in a study."""
        return self.engine is not None and (self.engine.clock is not None or self.engine.waits(self._thread))

    def _check_stop(self) -> None:
        if self._stop is not None:
            raise JobCancelled(self._stop)

    def _result(self, status: Status, error: BaseException | None) -> JobResult:
        step = self.step
        if step is not None:
            step.stand_alone()  # what the result keeps is the job's own
        plan = predicted = measured = None
        with contextlib.suppress(RuntimeError):  # no step came so far, or an opaque one alone, which needs no plan
            plan = step.plan if step is not None else None
        if step is not None and plan is not None:
            held = plan.persistent + plan.batch
            predicted = held + step.predicted_height if step.opaque_reason is None else None
            measured = held + step.measured_height if step.measured_height else None
        return JobResult(
            name=self.job.name,
            status=status,
            metrics=tuple(self._metrics),
            losses=tuple(self._losses),
            steps=len(self._losses),
            seconds=time.perf_counter() - self._started,
            predicted_peak=predicted,
            measured_peak=measured,
            error=error,
            traceback="".join(traceback.format_exception(error)) if error is not None else None,
            **({} if step is None else {
                "opaque_reason": step.opaque_reason, "planned_requests": step.planned_requests,
                "missed_requests": step.missed_requests, "recomputed": step.recomputed, "compiled": step.compiled,
                "fused_steps": step.fused_steps, "state_dict": step.model.state_dict(),
            }),
        )  # fmt: skip


def _let_go(error: BaseException) -> None:
    """Free what the frames behind an error hold (models, batches, the engine); its lines and files stay readable."""
    chain = [error]
    for link in chain:
        traceback.clear_frames(link.__traceback__)
        chain += [e for e in (link.__cause__, link.__context__) if e is not None and e not in chain]


def _take(under_way: deque[Pending | FusedPending], losses: list[torch.Tensor]) -> None:
    """Wait for the first of the steps; those behind a failed one do not count."""
    try:
        losses.append(_loss_of(under_way.popleft().result()))
    except BaseException:
        for pending in under_way:
            with contextlib.suppress(Exception):
                pending.result()
        under_way.clear()
        raise


def _loss_of(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result


def _numbers(losses: list[torch.Tensor]) -> list[float]:
    # One transfer from the device.
    return torch.stack([loss.reshape(()).to(torch.float64) for loss in losses]).tolist() if losses else []
