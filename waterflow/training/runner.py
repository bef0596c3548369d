"""JobRunner: train one job; and Task: other work that runs on a device in place of a job."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from waterflow.errors import CheckpointError, InvalidJobError, JobCancelled
from waterflow.executor.cancel import UserCode, let_go, limited, time_does_not_count
from waterflow.executor.data.loader import Batches
from waterflow.executor.data.memory import DataMemory
from waterflow.executor.data.sharded import ShardedBatches
from waterflow.executor.data.shared import Reader, SharedData
from waterflow.executor.engine import Engine
from waterflow.executor.program.step_future import Done, StepFuture
from waterflow.executor.rng import generators_for, own_numbers, set_state_of, state_of
from waterflow.executor.stats import Account
from waterflow.job import Job, JobResult, Metrics, Status
from waterflow.results import check_finite, over_limit, result_of
from waterflow.step import Step
from waterflow.training.build import model_of, optimizer_of
from waterflow.training.checkpoint import Checkpoint
from waterflow.training.engine_lease import EngineLease
from waterflow.training.evaluation import Evaluation
from waterflow.training.job_state import JobState, as_checkpoint_error, check_same_job, progress_of, put_progress
from waterflow.training.safepoint import Safepoint, State
from waterflow.training.schedulers import of_numbers, step_after_epoch
from waterflow.training.shards.step import ShardedStep
from waterflow.training.step_queue import BRIDGE_SECONDS, MOST_RUN, STEPS_AHEAD, StepQueue, between_steps, step_of, steps_ahead

logger = logging.getLogger("waterflow")


class Task(ABC):
    """A named, picklable piece of work, such as a trial of a study, that makes its runner where it runs."""

    name: str

    def check(self) -> None:  # noqa: B027
        """Raise InvalidJobError if a setting is invalid."""

    @abstractmethod
    def runner(self, engine: Engine, seed: int, resume: Checkpoint | None) -> Any:
        """Return an object with the methods of ``JobRunner``; unsupported ones (such as a snapshot) raise an error."""


OnEpoch = Callable[[int, Metrics], None]
InOrder = Callable[[], contextlib.AbstractContextManager[None]]


def draw_seed(generator: torch.Generator | None = None) -> int:
    """Return a seed for a job that has none, drawn from ``generator``, by default torch's."""
    return int(torch.randint(2**31, (), generator=generator))


class StopJob(Exception):
    """Raised by ``on_epoch`` to end a job early and keep its results; its status is then ``pruned``."""


class PauseJob(StopJob):
    """Raised by ``on_epoch`` to end the run and leave the job's state in ``paused``, from which another runner resumes it.

    A job that no other runner could resume (its data can be read only once, say) goes on instead.
    """


class JobRunner:
    """Trains one job. Call ``run()`` once; ``stop()``, ``snapshot()``, ``suspend()``, ``resume()`` from any thread.

    Without ``engine`` it trains alone, on the calling thread. ``on_epoch(epoch, metrics)`` is called after each evaluation
    (after each epoch, with the mean loss, if there is none); an exception from it ends the job. ``seed`` is used if the job has
    none; by default it is drawn here. Model and data are made inside ``in_order()``, which may wait. With ``resume`` the job
    resumes from a checkpoint of it; raises CheckpointError for one of another job. ``ran`` seconds of its time limit have passed
    in runs before.
    """

    devices: tuple[str, ...] = ()  # of ``train(devices=)``

    def __init__(
        self,
        job: Job,
        engine: Engine | None = None,
        on_epoch: OnEpoch | None = None,
        *,
        seed: int | None = None,
        in_order: InOrder = contextlib.nullcontext,
        resume: Checkpoint | None = None,
        ran: float = 0.0,
    ) -> None:
        job.check()
        self._ran = ran
        self.job = job
        self.engine = engine
        self.step: Step | None = None
        self._on_epoch = on_epoch
        self._stop: str | None = None
        self._started = time.perf_counter()
        self._losses: list[float] = []
        self._metrics: list[Metrics] = []
        self._epoch = self._epoch_began = 0  # epochs done, and the steps before
        self._length: int | None = None  # of the data, in batches
        self._batches: Batches | Reader | None = None
        self._memory: DataMemory | None = None
        self._thread: int | None = None
        self._scheduler: Any = None
        self._user_code = UserCode()
        self._account = Account(job.name)
        if engine is not None:
            engine.accounts.append(self._account)
        self._evaluation = Evaluation(job, engine, self._user_code)
        self._lock = threading.Lock()
        self._in_order = in_order
        self._resume: Checkpoint | None = None
        self.paused: Checkpoint | None = None
        self.why_not_paused: str | None = None
        self.seconds_to_resume = 0.0  # of the processor
        self._state: JobState | None = None
        self._safepoint = Safepoint(job.name)
        self.lease = EngineLease(job, engine, self._safepoint)
        self._between = False  # the job's own thread is between two steps
        self._steps = StepQueue()
        self._device = engine.device if engine is not None else torch.device("cpu")
        # The third for the scheduler, as queued steps draw from the first.
        self._numbers, self._data_numbers, self._setting_numbers = (generators_for(self._device, 0) for _ in range(3))
        if resume is not None:
            seed = self._start_at(resume)
        elif job.seed is not None or seed is None:
            seed = int(job.seed) if job.seed is not None else draw_seed()
        self._set_seed(seed)
        if isinstance(job.data, SharedData):  # from now on, readers of the same data wait for this job
            place = (0, 0) if resume is None else (resume.epoch, resume.batch)
            self._batches = job.data.reader(job.epochs, self._check_stop, self._held_up, place)

    def end(self, reason: str = "stopped") -> None:
        """End the job between two steps; do not wait for that."""
        self._stop = self._stop or reason
        self._safepoint.flag.raised = True

    def stop(self, reason: str = "stopped") -> None:
        """End the job at its next group boundary, and wait for that."""
        with self._lock:
            self._stop = reason
            step = self.step
        self._safepoint.flag.raised = True
        if step is not None and step.job is not None and self.engine is not None:
            with contextlib.suppress(ValueError):  # it has left already
                self.engine.cancel(step.job, reason)

    def snapshot(self, timeout: float | None = None) -> Checkpoint:
        """Return a copy of the job's whole state after its current step. Later steps wait for the copy.

        Raises CheckpointError if the job ends before, if it reaches no step boundary within ``timeout`` seconds, and for jobs
        that cannot be resumed (their data can be read only once). On the job's own thread it may be called only in
        ``on_epoch``.
        """
        if threading.get_ident() != self._thread:
            return self._safepoint.ask("copy", timeout)
        if not self._between:
            raise CheckpointError(f"job {self.job.name!r} cannot be copied in the middle of a step or of its evaluation")
        return self._checkpoint()

    def ask_for_snapshot(self) -> Future[Checkpoint]:
        """Request a snapshot without waiting; the future has it, or its error."""
        return self._safepoint.request("copy")

    def suspend(self, timeout: float | None = None) -> Checkpoint:
        """Pause the job after its current step: its state leaves the device, and its reservation is released.

        Model and optimizer hold no memory until ``resume()``; ``stop()`` also restores them. Raises as ``snapshot``, but also
        suspends jobs whose data can be read only once; the returned checkpoint then has no position in the data.
        """
        if threading.get_ident() == self._thread:
            raise CheckpointError(f"job {self.job.name!r} cannot suspend itself: no thread would be left to resume it")
        if self.engine is not None and self.engine.reservations.clock is not None:
            raise CheckpointError(f"job {self.job.name!r} cannot be suspended: {self.lease.policy.stays}, or ask for a snapshot")
        return self._safepoint.ask("suspend", timeout)

    def set_devices(self, devices: Sequence[str]) -> None:
        """Raise InvalidJobError: only a job of ``train(devices=)`` can change its devices."""
        raise InvalidJobError(
            f"job {self.job.name!r} trains in this process; to change its devices give it shards, and pass devices= to train()"
        )

    def resume(self) -> None:
        """Resume a suspended job. Raises CheckpointError if it is not suspended."""
        self._safepoint.resume()

    @property
    def suspended(self) -> bool:
        """Return True while the job is suspended until ``resume()``."""
        return self._safepoint.state is State.SUSPENDED

    def break_off(self) -> None:
        """End the job now, and interrupt the user's code (data, evaluation), which ``stop()`` would let finish."""
        self._stop = self._stop or "interrupted"
        self._safepoint.flag.raised = True
        self._user_code.break_off()

    @property
    def steps(self) -> int:
        """The number of completed steps, or a few less."""
        return len(self._losses) + self._steps.ended

    @property
    def begun(self) -> int:
        """The number of steps that were submitted."""
        return self.steps + len(self._steps)

    def run(self) -> JobResult:
        """Train to the end, or to ``Job.timeout``. Returns errors of the job, of any kind, in its result."""
        with self._account.spending("jobs"):
            told = self.job.timeout, f"job {self.job.name!r}", "Job.timeout"
            return limited(*told, self._run, self._user_code, self.stop, self._progress, over_limit, self._ran)

    def unfinished(self) -> JobResult:
        """Return, instead of ``run()``, the result and the weights that the job had when it was paused."""
        try:
            with self._user_code.here():
                self._begin()
        except BaseException as error:
            self._end(error)
            raise
        return self._ended("unfinished", None)

    def _progress(self) -> str:
        return f", in epoch {min(self._epoch + 1, self.job.epochs)} of {self.job.epochs}, after {self.steps} steps"

    def _run(self) -> JobResult:
        status: Status = "completed"
        self._thread = threading.get_ident()
        error: BaseException | None = None
        try:
            with self._user_code.here():
                with self._in_order():
                    self._begin()
                self._train()
        except PauseJob:
            status = "paused"
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
        return self._ended(status, error)

    # -- the parts

    def _begin(self) -> None:
        began = time.thread_time()
        self._build()
        if self._resume is not None:
            try:
                self._go_on_from(self._resume)
            except Exception as why:  # of the user's load_state_dict(), too
                raise as_checkpoint_error(self.job.name, why) from why
            self._resume = None
            self.seconds_to_resume = time.thread_time() - began

    def _ended(self, status: Status, error: BaseException | None) -> JobResult:
        try:
            told = tuple(self._metrics), tuple(self._losses), time.perf_counter() - self._started
            return result_of(self.job.name, status, error, self.step if self.paused is None else None, *told)
        finally:
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._safepoint.end()
        self.lease.enter(None)
        if self.engine is not None:
            self.engine.reservations.take_back_priority()
        self._thread = None
        if self._batches is not None:
            self._batches.close()
        if self.step is not None:
            self.step.close()
        if error is not None:  # its frames keep this object: drop what holds memory or workers
            let_go(error)
        if error is not None or self.paused is not None:
            self.step = self._batches = self._memory = self._scheduler = self._state = None

    def _build(self) -> None:
        job = self.job
        self._check_stop()
        model = model_of(job, self._numbers, self._device)
        with own_numbers(*self._setting_numbers):
            optimizer = optimizer_of(job, model)
            self._scheduler = job.scheduler(optimizer) if job.scheduler is not None else None
        self._state = JobState(job, model, optimizer, self._scheduler)
        if not isinstance(job.data, SharedData):
            given, on_device = (job.name, job.data, self._data_numbers[0]), self._data_numbers[1:]
            if job.shards > 1:
                self._batches = ShardedBatches(*given, shards=job.shards, seed=self._seed, on_device=on_device)
            else:
                self._batches = Batches(*given, read_ahead=job.read_ahead, on_device=on_device)
        self._memory = DataMemory(self._batches.source)  # type: ignore[union-attr]
        self._count_batches()
        self._make_step(model, optimizer)

    def _make_step(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with own_numbers(*self._numbers):  # the step draws from all of them
            step = step_of(self.job, model, optimizer, self._numbers[-1], self.engine, self._seed)
        assert self._batches is not None
        step.own_batches = self._batches.own
        step.expect(self._steps_left)
        self.lease.enter(step)
        with self._lock:
            self.step = step

    def _count_batches(self) -> None:
        assert self._batches is not None
        # The user's code: numbers that it draws are no part of the job's. A loader of an IterableDataset that was asked warns of
        # other lengths.
        with contextlib.suppress(Exception), own_numbers(*generators_for(self._device, 0)):
            source = self._batches.source
            if not isinstance(getattr(source, "dataset", None), IterableDataset):
                self._length = len(source)

    def _steps_left(self) -> int | None:
        length = self._epoch_began / self._epoch if self._epoch else self._length
        return None if length is None else int(self.job.epochs * length) - self.begun

    # -- between two steps

    def _checkpoint(self, move: bool = False, stays: bool = False) -> Checkpoint:
        """Return the job's state. With ``move`` it leaves the job's objects; with ``stays`` only they will take it back."""
        step, batches, state = self.step, self._batches, self._state
        assert step is not None and batches is not None and state is not None
        # A suspended job keeps its loader, so it may do without a position in the data. Otherwise it is resumed with a new
        # loader: data that cannot be read again is an error.
        place: dict[str, Any] | None = None
        if isinstance(batches, Batches):
            with contextlib.suppress(CheckpointError) if stays else contextlib.nullcontext():
                place = batches.place(in_pass=len(self._losses) > self._epoch_began)
        held = {
            "seed": self._seed,
            "shared": isinstance(batches, Reader),
            "data": place,
            "numbers": state_of(self._numbers),
            "setting_numbers": state_of(self._setting_numbers),
            "step": progress_of(step),
            "losses": torch.tensor(self._losses, dtype=torch.float64),
            "metrics": [dict(metrics) for metrics in self._metrics],
            "seconds": time.perf_counter() - self._started,
            "job": state.take(move, stays),
        }
        return Checkpoint(self.job.name, self._epoch, len(self._losses) - self._epoch_began, len(self._losses), held)

    def _start_at(self, checkpoint: Checkpoint) -> int:
        # In the constructor: a wrong checkpoint is the caller's error, and must not become a failed job.
        check_same_job(self.job, checkpoint)
        self._resume = checkpoint
        self._losses = checkpoint.state["losses"].tolist()
        self._metrics = [dict(metrics) for metrics in checkpoint.state["metrics"]]
        # The result's seconds are those of all runs of the job.
        self._started -= checkpoint.state["seconds"]
        self._epoch, self._epoch_began = checkpoint.epoch, checkpoint.steps - checkpoint.batch
        return int(checkpoint.state["seed"])

    def _set_seed(self, seed: int) -> None:
        self._seed = seed
        for generator in (*self._numbers, *self._data_numbers, *self._setting_numbers):
            generator.manual_seed(seed)

    def _go_on_from(self, checkpoint: Checkpoint) -> None:
        state, step = checkpoint.state, self.step
        assert step is not None and self._state is not None
        self._state.put(state["job"])
        if isinstance(self._batches, Batches):
            self._batches.go_on_from(state["data"])
        set_state_of(self._numbers, state["numbers"])
        if "setting_numbers" in state:  # an older version had none
            set_state_of(self._setting_numbers, state["setting_numbers"])
        put_progress(step, state["step"])

    def _serve(self) -> None:
        self._steps.take_all()
        # A checkpoint is between two steps: the queue must be empty, and its losses counted.
        self._losses += self._steps.losses()
        self._stand_by()

    def _stand_by(self) -> None:
        # Is copied and leaves if that is requested, and waits while it is held.
        policy = self.lease.policy
        while True:
            self._safepoint.serve(self._checkpoint, suspend=False)
            self._preempt()
            if not policy.held:
                return
            with time_does_not_count():
                self._safepoint.stand_by(self._check_stop, lambda: policy.held)

    def _preempt(self) -> None:
        checkpoint = self._safepoint.serve(lambda: self._checkpoint(move=True, stays=True), suspend=True)
        # None: no request, or the state could not be copied; the job goes on.
        if checkpoint is None:
            return
        step, state = self.step, self._state
        assert step is not None and state is not None
        try:
            step.close()
            if isinstance(self._batches, Reader):
                self._batches.leave()  # or readers of the same data would wait for it
            with time_does_not_count():
                self._safepoint.stand(checkpoint, self._check_stop, self.lease.has_room)
        finally:
            state.put(checkpoint.state["job"])
        # A new step, as close() gave up the old one's place in the engine. Steps of equal models share captures, so
        # this captures nothing again.
        self._make_step(step.model, step.optimizer)
        assert self.step is not None
        self.step.opaque_reason, self.step.measured_height = step.opaque_reason, step.measured_height
        self.step.second_look = step.second_look
        put_progress(self.step, checkpoint.state["step"])
        self._safepoint.go_on()

    def _train(self) -> None:
        assert self.step is not None
        while self._epoch < self.job.epochs:
            epoch, losses = self._epoch, self._train_epoch()
            check_finite(self.job, epoch, losses)
            self._check_stop()
            if self.lease.policy.held:
                self._stand_by()
            metrics = self._evaluate() or {"loss": sum(losses) / len(losses)}
            self._metrics.append(metrics)
            if self._scheduler is not None and self.job.scheduler_interval == "epoch":
                with own_numbers(*self._setting_numbers):
                    step_after_epoch(self._scheduler, metrics)
            self._epoch, self._epoch_began = epoch + 1, len(self._losses)
            if self._on_epoch is not None:
                self._between = True
                try:
                    self._on_epoch(epoch, metrics)
                except PauseJob:
                    if self._pause():
                        raise
                finally:
                    self._between = False

    def _pause(self) -> bool:
        try:
            # A module of the caller's keeps its tensors: the next runner may be given it again.
            self.paused = self._checkpoint(move=not isinstance(self.job.model, nn.Module))
        except Exception as error:  # of the user's state_dict(), too
            self.why_not_paused = str(error)
        return self.paused is not None

    def _evaluate(self) -> Metrics | None:
        while True:
            assert self.step is not None
            # An evaluation that waits for memory is abandoned if others need the job's memory, and begins again later.
            with self.lease.may_leave(), self._account.spending("evaluation"):
                metrics = self._evaluation.metrics(self.step)
                if isinstance(self.step, ShardedStep) and metrics is not None:
                    self.step.take_over_buffers()
                return metrics
            self._stand_by()

    def _train_epoch(self) -> list[float]:
        assert self.step is not None and self._batches is not None and self._memory is not None
        steps, memory, policy = self._steps, self._memory, self.lease.policy
        # While queued steps run this thread loads the next batch. A loader thread of its own only added hand-overs of
        # the interpreter lock.
        ahead = steps_ahead(self.step, self.engine)
        batches = self._account.reading(self._batches.epoch(), self._batches.loading)
        memory.new_pass()
        by_step = self._scheduler is not None and self.job.scheduler_interval == "step"
        self.step.waited_for = not self._batches.reads_ahead or (by_step and not of_numbers(self._scheduler))
        runs = isinstance(self._batches, Batches) and self._batches.reads_ahead and not by_step
        if not self._batches.reads_ahead:
            batches = between_steps(batches, steps, self.job.name, self._account)
        try:
            while True:
                if self._safepoint.state is State.REQUESTED or policy.held:
                    self._serve()
                try:
                    batch = next(batches)
                except StopIteration:
                    break
                self._check_stop()
                if runs and not policy.held and self._run_ahead(batch):
                    continue
                # The job is to leave, or was held while the batch came: it waits in _serve().
                if policy.held or (pending := self._submit(batch)) is None:
                    self._batches.put_back(batch)
                    continue
                steps.add(pending)
                bound = pending.bound_step if isinstance(pending, StepFuture) else None  # None: it has run eagerly, and ended
                if bound is not None and self._batches.reads_ahead and memory.written_by(bound):
                    self.step.waited_for = True
                    steps.take_all()
                if by_step:
                    self._step_scheduler(self.step.optimizer)
                if len(steps) >= ahead:
                    if ahead == STEPS_AHEAD:
                        ahead = steps_ahead(self.step, self.engine)
                    steps.take_half()
            steps.take_all()
        except BaseException:
            # Queued steps must end before their memory is released.
            with contextlib.suppress(Exception):
                steps.take_all()
            raise
        finally:
            self._losses += steps.losses()
        return self._losses[self._epoch_began :]

    def _run_ahead(self, batch: Any) -> bool:
        # Where all batches are there, short steps follow each other without Python; False if this one cannot.
        assert self.step is not None and self._memory is not None and isinstance(self._batches, Batches)
        flag, policy = self._safepoint.flag, self.lease.policy
        flag.raised = False  # before anything is looked at that others raise it for
        bound_step = self.step.settled
        if bound_step is None or self._memory.written_by(bound_step):
            return False
        most = min(MOST_RUN, int(BRIDGE_SECONDS / max(self.step.plan.seconds, 1e-6)) + 1)
        if policy.held or self._stop is not None or most < 2 or not (more := self._batches.more(most - 1)):
            return False
        if self._safepoint.state is State.REQUESTED:
            flag.raised = True
        batches, before, ran = [batch, *more], self._steps.ended, 0
        try:
            self._steps.take_all()
            before = self._steps.ended
            if self.step.settled is bound_step:  # others may have changed something meanwhile
                self._steps.run(self.step, batches, flag)
        finally:
            ran = self._steps.ended - before
            for left in reversed(batches[ran or 1 :]):
                self._batches.put_back(left)
        return ran > 0

    def _step_scheduler(self, optimizer: Any) -> None:
        if not of_numbers(self._scheduler):
            self._steps.take_all()
        # The update may be only queued: without the flag schedulers warn of a missing optimizer.step().
        optimizer._opt_called = True
        with own_numbers(*self._setting_numbers):
            self._scheduler.step()

    def _submit(self, batch: Any) -> StepFuture | Done | None:
        assert self.step is not None
        with self.lease.may_leave():
            return self.step.submit(batch)
        return None

    def _held_up(self) -> bool:
        # Readers of the same data do not wait for a job that is held, or waits for what other jobs hold (memory, lanes, its
        # turn in a study): both could wait for ever.
        if self.engine is None:
            return False
        return (
            self.lease.policy.opportunistic
            or self.lease.policy.held
            or self.engine.reservations.clock is not None
            or self.engine.reservations.waits(self._thread)
        )

    def _check_stop(self) -> None:
        if self._stop is not None:
            raise JobCancelled(self._stop)
