"""Trials of a study in other processes, on a cluster's devices: how they are submitted, and how they run there."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch

from waterflow.errors import ClusterError, JobCancelled, JobTimeoutError, StudyError, SubmissionError
from waterflow.executor.cancel import UserCode, limited
from waterflow.executor.engine import Engine, within
from waterflow.executor.program.ownership import cancel_steps, close_steps_of_thread, copied, made_here
from waterflow.executor.rng import generators_for, own_numbers
from waterflow.job import Job, JobResult, Results
from waterflow.results import over_limit
from waterflow.study.coordinator import Objective, StudyCallback, reporting
from waterflow.study.optuna_compat import (
    TrialPruned,
    TrialState,
    lasting_name,
    refresh,
    running_trials,
    set_in_loop,
    shareable,
    stopped,
    tell_once,
    trial_of,
    values_of,
)
from waterflow.study.values import KeepWeights, KeptResults, StudySummary, UnfitJobError, best_of, check_job, value_of
from waterflow.training.checkpoint import Checkpoint
from waterflow.training.engine_lease import LoopLease
from waterflow.training.progress import ProgressLine
from waterflow.training.runner import JobRunner, Task, draw_seed


@dataclass(frozen=True)
class TrialResult(JobResult):
    """A trial's result. ``returned`` is the value of its objective or job; ``stopped`` is True if it stopped the study."""

    returned: Any = None
    stopped: bool = False


class TrialTask(Task):
    """One trial of a study in another process, where it suggests values, trains, reports and prunes.

    ``timeout`` is in seconds; without ``weights`` the result has no state_dict.
    """

    def __init__(
        self, study: Any, number: int, objective: Objective, seed: int, weights: bool = True, timeout: float | None = None
    ) -> None:
        self.name = f"trial-{number}"
        self.study = study
        self.number = number
        self.objective = objective
        self.seed = seed
        self.timeout = timeout  # seconds
        self.weights = weights  # True: a completed trial's result has its weights

    def runner(self, engine: Engine, seed: int, resume: Checkpoint | None) -> TrialRunner:
        """Return the trial's runner; see ``Task``."""
        return TrialRunner(self, engine, resume)


class TrialRunner:
    """Runs a trial. A trial that returns a Job can be saved and resumed elsewhere; a user's own loop restarts there."""

    def __init__(self, task: TrialTask, engine: Engine, resume: Checkpoint | None) -> None:
        self._task = task
        self.engine = engine
        self._resume = resume
        self._code = UserCode()
        self._inner: JobRunner | None = None
        self._in_loop = 0  # steps that its own loop was seen to have done, and those of each Step of it
        self._of_step: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self.lease = LoopLease(task.name, engine)
        self._halted: str | None = None
        self._lock = threading.Lock()

    def run(self) -> JobResult:
        """Run the trial and return its result, which has its errors; see ``JobRunner.run``."""
        task, began = self._task, time.perf_counter()
        study = task.study
        study.sampler.reseed_rng()  # or all trials, with copies of one sampler, would draw the same values
        made: JobResult | None = None
        value: Any = None
        error: BaseException | None = None
        try:
            value = limited(
                task.timeout,
                task.name.replace("-", " "),
                "trial_timeout",
                lambda: self._value(trial_of(study, task.number)),
                self._code,
                self._end_at_limit,
                late=over_limit,
            )
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
        # Weights travel through files to the caller: only if it keeps them.
        if not task.weights:
            found["state_dict"] = None
        found |= {
            "name": task.name,
            "status": status,
            "error": error,
            "returned": value,
            "stopped": stopped(study),
            "traceback": "".join(traceback.format_exception(error)) if error is not None else None,
        }
        return TrialResult(**found)

    def _end_at_limit(self, reason: str) -> None:
        if self._inner is not None:
            self._inner.stop(reason)
        cancel_steps(self.lease.steps, reason)

    def _value(self, trial: Any) -> Any:
        """Return the objective's value, or the result of the job that it returns."""
        self.lease.steps = made_here.steps
        set_in_loop(self._task.study, True)  # study.stop() raises an error without it
        try:
            belonging = within(self.engine, policy=self.lease.policy)
            with own_numbers(*generators_for(self.engine.device, self._task.seed)), self._code.here(), belonging:
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
            self.lease.hand_on(runner.lease)
            # stop() may have come while the objective was making the job.
            if self._halted is not None:
                runner.stop(self._halted)
        return runner.run()

    @property
    def steps(self) -> int:
        """The number of steps of its job, or of its own loop."""
        if self._inner is not None:
            return self._inner.steps
        with self._lock:
            for step in copied(self.lease.steps):
                self._in_loop += step.steps - self._of_step.get(step, 0)
                self._of_step[step] = step.steps
            return self._in_loop

    @property
    def step(self) -> Any:
        """The step of its job, or None."""
        return self._inner.step if self._inner is not None else None

    def snapshot(self, timeout: float | None = None) -> Checkpoint:
        """As ``JobRunner.snapshot``. Raises StudyError if there is no job to save."""
        return self._job().snapshot(timeout)

    def suspend(self, timeout: float | None = None) -> Checkpoint:
        """As ``JobRunner.suspend``. Raises StudyError if there is no job to save."""
        return self._job().suspend(timeout)

    def stop(self, reason: str = "stopped") -> None:
        """End the trial: a job at its next group boundary, a user's own loop at once."""
        with self._lock:
            self._halted = reason
            inner = self._inner
        if inner is not None:
            inner.stop(reason)
        else:
            self._code.break_off()

    def break_off(self) -> None:
        """End the trial now, and interrupt the user's code, which ``stop()`` of a job would let finish."""
        with self._lock:
            self._halted = self._halted or "interrupted"
            inner = self._inner
        (inner or self._code).break_off()

    def _job(self) -> JobRunner:
        if self._inner is None:
            raise StudyError(f"{self._task.name} trains in a loop of its own, whose state is not known; return a Job")
        return self._inner


AFTER_LIMIT = 60.0  # seconds after ``trial_timeout`` until the cluster ends the trial's process
_LOOK_SECONDS = 2.0  # between two polls for an interrupt of the study
_AT_ONCE = 2  # trials for each device, if max_concurrent is not given


class TrialDevices(Protocol):
    """The methods of ``optimize(cluster=)``; a ``waterflow.Cluster`` has them."""

    def check(self, jobs: Any) -> None:
        """Raise InvalidJobError for jobs that cannot be submitted."""

    def submit(self, jobs: Any, *, id: str, time_limit: float | None) -> str:
        """Submit a task and return its id; the cluster ends it after ``time_limit`` seconds."""

    def wait(self, id: str, timeout: float) -> list[str]:
        """Return the given id in a list if the task has ended; an empty list after ``timeout`` seconds."""

    def status(self, id: str | None = None) -> dict[str, Any]:
        """Return the cluster's devices, or the state of one task. Raises SubmissionError for an unknown id."""

    def results(self, id: str) -> Results:
        """Return the results of a task that has ended."""

    def cancel(self, id: str) -> bool:
        """End a task; returns False if it had ended."""


def spread(
    study: Any,
    objective: Objective,
    n_trials: int | None,
    timeout: float | None,
    devices: TrialDevices,
    max_concurrent: int | None,
    catch: tuple[type[Exception], ...],
    callbacks: Sequence[StudyCallback],
    gc_after_trial: bool,
    show_progress_bar: bool,
    keep_weights: KeepWeights = "best",
    trial_timeout: float | None = None,
) -> StudySummary:
    """Run ``study.optimize`` with trials on ``devices``: its threads ask and tell here, and wait for the trials.

    Trials that an earlier process submitted and could not tell of are waited for and told here; they count, too. Errors as
    ``optimize``.
    """
    shared = shareable(study)
    at_once = max_concurrent or _AT_ONCE * max(1, sum(node["devices"] for node in devices.status()["nodes"]))
    # Before the first trial is asked for: an objective that cannot be pickled should leave no failed trial behind.
    devices.check([TrialTask(shared, 0, objective, 0)])
    caller = _Caller(study, shared, objective, devices, catch, keep_weights, at_once, trial_timeout)
    began = time.perf_counter()
    with ProgressLine(n_trials, "trials", show_progress_bar) as progress, caller.interruptible():
        then = [caller.told, *callbacks, lambda *_: progress.advance()]
        with caller.adopting(study, then) as adopted:
            left = None if n_trials is None else n_trials - adopted
            if left is None or left > 0:
                study.optimize(
                    caller.run, left, timeout, n_jobs=at_once, catch=catch, callbacks=then, gc_after_trial=gc_after_trial
                )
    if caller.failure is not None:
        raise caller.failure
    results = caller.results.in_order()
    return StudySummary(
        trials=caller.asked,
        seconds=time.perf_counter() - began,
        steps=sum(result.steps for result in results),
        captures=0,
        most_at_once=caller.most,
        lane_busy=(),
        results=results,
        states=caller.states,
        best=best_of(study),
    )


class _Caller:
    """The objective that Optuna calls: it submits the trial and waits for it. Thread-safe."""

    def __init__(
        self,
        study: Any,
        shared: Any,
        objective: Objective,
        devices: TrialDevices,
        catch: tuple[type[Exception], ...],
        keep_weights: KeepWeights,
        at_once: int,
        trial_timeout: float | None,
    ) -> None:
        self._study, self._objective, self._devices, self._catch = shared, objective, devices, catch
        self._weights, self._trial_timeout = keep_weights != "none", trial_timeout
        self._seed = draw_seed()
        self._name = lasting_name(study)
        self._places = threading.Semaphore(at_once)  # adopted trials need one, too
        self._interrupted = threading.Event()
        self._lock = threading.Lock()
        self._running: set[str] = set()
        self.results = KeptResults(study, keep_weights)
        self.states: Counter[str] = Counter()
        self.asked = self.most = 0
        self.failure: BaseException | None = None  # Optuna does not raise all errors of its threads

    def run(self, trial: Any) -> Any:
        """Return the objective's value from one of the devices, or raise its error."""
        with self._places:
            return self._outcome(trial, self._hand_in)

    def _outcome(self, trial: Any, start: Callable[[Any, str], None]) -> Any:
        try:
            return self._run(trial, start)
        except TrialPruned:
            raise
        except BaseException as error:
            # Optuna does not raise every error of its threads: stop the study, and raise the first error at its end.
            if isinstance(error, UnfitJobError) or not isinstance(error, self._catch):
                with self._lock:
                    self.failure = self.failure or error
                trial.study.stop()
            raise

    def told(self, study: Any, trial: Any) -> None:
        """Count a trial that was told, and drop weights that are not the best any more."""
        self.states[trial.state.name.lower()] += 1
        self.results.told(trial.number, values_of(trial))

    @contextlib.contextmanager
    def adopting(self, study: Any, callbacks: Sequence[StudyCallback]) -> Iterator[int]:
        """Wait for trials of an earlier process, each on a thread; yields their number. On exit all are told."""
        found = []
        for number in running_trials(study):
            # Unknown to the cluster: the trial was never submitted, or another process runs it.
            with contextlib.suppress(SubmissionError):
                self._devices.status(self._id(number))
                found.append(trial_of(study, number))
        threads = [threading.Thread(target=self._adopt, args=(study, trial, callbacks)) for trial in found]
        for thread in threads:
            thread.start()
        try:
            yield len(found)
            for thread in threads:
                thread.join()
        except BaseException:
            self._interrupted.set()
            raise
        finally:
            for thread in threads:
                thread.join()

    def _adopt(self, study: Any, trial: Any, callbacks: Sequence[StudyCallback]) -> None:
        set_in_loop(study, True)  # on this thread
        value: Any = None
        state: TrialState | None = None
        error: BaseException | None = None
        try:
            with self._places:
                value = self._outcome(trial, lambda *_: None)
        except TrialPruned as pruned:
            state, error = TrialState.PRUNED, pruned
        except BaseException as failure:
            state, error = TrialState.FAIL, failure
        try:
            told = tell_once(study, trial, value, state, error, self._catch)
            if told is not None:
                for callback in callbacks:
                    callback(study, told)
        except BaseException as failure:
            with self._lock:
                self.failure = self.failure or failure

    def _id(self, number: int) -> str:
        # Equal in every process, now and later, so that a restarted study finds its trials on the cluster.
        return f"trial-{number}-{self._name}"

    def _hand_in(self, trial: Any, id: str) -> None:
        # From the trial's number: the seed does not depend on the order in which threads submit.
        seed = int(torch.randint(2**31, (), generator=torch.Generator().manual_seed(self._seed + trial.number)))
        task = TrialTask(self._study, trial.number, self._objective, seed, self._weights, self._trial_timeout)
        # A trial that hangs holds its process: the cluster ends that.
        limit = self._trial_timeout and self._trial_timeout + AFTER_LIMIT
        self._devices.submit([task], id=id, time_limit=limit)

    def _run(self, trial: Any, start: Callable[[Any, str], None]) -> Any:
        id = self._id(trial.number)
        with self._lock:
            self._running.add(id)
            self.asked, self.most = self.asked + 1, max(self.most, len(self._running))
        try:
            start(trial, id)
            while not self._devices.wait(id, _LOOK_SECONDS):
                # This thread waits on the network, where no exception reaches it: it polls.
                if self._interrupted.is_set():
                    raise JobCancelled("interrupted")
        except BaseException:
            with contextlib.suppress(Exception):
                self._devices.cancel(id)
            raise
        finally:
            with self._lock:
                self._running.discard(id)
        return self._ended(trial, id)

    def _ended(self, trial: Any, id: str) -> Any:
        # The trial's process wrote values and reports to the storage; Optuna's object here has older ones.
        refresh(trial)
        results = self._devices.results(id)
        if not results:
            told = self._devices.status(id)
            # No result: the cluster ended the process at its time limit, or has lost it.
            late = told["time_limit"] is not None and told["ran"] >= told["time_limit"]
            raise (JobTimeoutError if late else ClusterError)(
                f"trial {trial.number} ({id}) is {told['state']}: {told['reason'] or 'it has no result'}"
            )
        result = results[0]
        assert isinstance(result, TrialResult)
        if result.steps:
            self.results.add(trial.number, result)
        if result.stopped:
            trial.study.stop()
        if result.status == "pruned":
            raise TrialPruned(f"pruned after epoch {len(result.metrics) - 1}")
        if result.error is not None:
            raise result.error
        return result.returned

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """On Ctrl-C inside, end the threads that wait for trials, and the trials."""
        # Optuna's threads do not see KeyboardInterrupt, which arrives on the main thread alone: an event tells them.
        before: Callable[[int, Any], Any] | Any = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is not threading.main_thread() or not callable(before):
            yield  # another thread gets no Ctrl-C; a shell's background job ignores it
            return

        def pressed(number: int, frame: Any) -> None:
            self._interrupted.set()
            before(number, frame)

        signal.signal(signal.SIGINT, pressed)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
