"""StudyRunner: the calling thread asks and tells, and each trial runs on a thread of its own."""

from __future__ import annotations

import contextlib
import gc
import logging
import queue
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import optuna
import torch
from optuna.trial import FrozenTrial, Trial, TrialState

from waterflow import _C
from waterflow.errors import JobCancelled, JobTimeoutError, MemoryLimitError, told
from waterflow.executor.accelerate_state import telling_of_accelerate
from waterflow.executor.cancel import (
    BREAK_OFF_SECONDS,
    STOP_SECONDS,
    UserCode,
    break_off_all,
    import_ahead,
    join_all,
    limited,
    stop_all,
)
from waterflow.executor.data.loader import loaders_timed
from waterflow.executor.engine import Engine, within
from waterflow.executor.interrupts import remembered_interrupts, uninterrupted
from waterflow.executor.program.ownership import cancel_steps, close_steps_of_thread, made_here
from waterflow.executor.rng import generators_for, own_numbers, telling_of_shared_numbers
from waterflow.executor.stats import Account
from waterflow.executor.tuning import AutoConcurrency
from waterflow.executor.virtual_clock import VirtualClock
from waterflow.job import Job, JobResult, Metrics
from waterflow.planner.feasibility import Need, needed
from waterflow.results import over_limit
from waterflow.run_stats import RunStats
from waterflow.study.lines import LineSampler
from waterflow.study.optuna_compat import heartbeat, loop, set_in_loop, stopped, take_turns, take_up, tell_quietly, values_of
from waterflow.study.paused import PausedStates
from waterflow.study.run import StudyRun, folder_of
from waterflow.study.values import (
    KeepWeights,
    KeptResults,
    StudySummary,
    UnfitCheckpointError,
    UnfitJobError,
    check_job,
    value_of,
)
from waterflow.training.checkpoint import Checkpoint
from waterflow.training.checkpoint_dir import LAST_SECONDS
from waterflow.training.progress import ProgressLine
from waterflow.training.runner import InOrder, JobRunner, OnEpoch, StopJob

logger = logging.getLogger("waterflow")

Objective = Callable[[Trial], Any]
StudyCallback = Callable[[optuna.Study, FrozenTrial], None]


@dataclass
class _Worker:
    """A running trial, and how it ended."""

    trial: Trial
    seed: int  # of its own random numbers, and of a job that has none
    account: Account
    alone: bool = False  # no other trial runs beside it
    again: bool = False  # it lacked memory before
    job: Job | None = None  # of a trial that was paused
    thread: threading.Thread | None = None
    code: UserCode = field(default_factory=UserCode)
    runner: JobRunner | None = None
    paused: Checkpoint | None = None  # what its job left, or goes on from
    aside: bool = False  # its job was paused
    value: Any = None
    result: JobResult | None = None
    state: TrialState | None = None
    error: BaseException | None = None
    told: threading.Event = field(default_factory=threading.Event)
    steps: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)  # that its objective made

    def stop(self, reason: str) -> None:
        """Cancel its job, or the steps of its loop, at the next boundary."""
        if self.runner is not None:
            self.runner.stop(reason)
        cancel_steps(self.steps, reason)

    def break_off(self) -> None:
        """Interrupt the trial's thread now."""
        (self.runner or self.code).break_off()


class StudyRunner:
    """Asks and tells on the calling thread; trials run on their own threads and report their ends through a queue."""

    def __init__(
        self,
        study: optuna.Study,
        objective: Objective,
        engine: Engine,
        max_concurrent: int | Literal["auto"],
        deterministic: bool,
        gc_after_trial: bool,
        keep_weights: KeepWeights = "best",
        trial_timeout: float | None = None,
        run: StudyRun | None = None,
    ) -> None:
        self._study = study
        self._objective = objective
        self._engine = engine
        self._clock = VirtualClock() if deterministic else None
        engine.reservations.clock = self._clock
        self._at_once = max_concurrent if max_concurrent != "auto" else engine.lanes
        self._auto = AutoConcurrency(engine.lanes, lambda: engine.native.progress_ns) if max_concurrent == "auto" else None
        self._gc_after_trial = gc_after_trial
        self._trial_timeout = trial_timeout
        # An import that is interrupted on a trial's thread would leave a half-made module: do slow ones before.
        import_ahead()
        self._run = run or StudyRun(study)
        self._again: deque[_Worker] = deque()  # trials that lacked memory, or were paused
        self._paused = PausedStates(engine, self._run.files)
        self._ran_again = 0
        self._running: dict[int, _Worker] = {}
        self._ended: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._ended_last: deque[Need] = deque(maxlen=engine.lanes)
        self._results = KeptResults(study, keep_weights)
        self._kept = self._run.kept() if keep_weights != "none" else ()
        self._failure: BaseException | None = None
        self._asked = 0
        self._most = 0
        self._states: Counter[str] = Counter()

    def run(
        self,
        n_trials: int | None,
        timeout: float | None,
        catch: tuple[type[Exception], ...],
        callbacks: Sequence[StudyCallback],
        progress: ProgressLine,
    ) -> StudySummary:
        """Run trials until ``n_trials`` or ``timeout`` (seconds) is reached; arguments and errors as in ``optimize``."""
        started = time.perf_counter()

        def goes_on() -> bool:
            over = timeout is not None and time.perf_counter() - started >= timeout
            return not (self._failure is not None or stopped(self._study) or over)

        def wanted() -> bool:
            return goes_on() and (n_trials is None or self._run.begun < n_trials)

        # Earliest trials first: a pruner compares with trials that have ended, and prunes more if they end soon.
        first = self._engine.fifo_lanes()
        # Not where the order of events must follow from steps alone: a frame that is looked at may outlive its call for a moment.
        sampler = LineSampler(self._threads, self._value.__code__) if self._clock is None else None
        with (
            first,
            self._paused.opened(),
            sampler or contextlib.nullcontext(),
            loop(self._study, self._clock),
            remembered_interrupts() as check_interrupt,
        ):
            try:
                for trial, result in self._kept:
                    self._results.add(trial.number, result)
                    self._results.told(trial.number, values_of(trial))
                self._fill(wanted, 0)
                while (
                    self._running
                    or (self._again and self._failure is None)
                    or (goes_on() and self._run.waits_for_others())
                    or wanted()
                ):
                    check_interrupt()
                    self._paused.make_way()
                    self._run.keep_alive([worker.trial for worker in self._again])
                    self._look(wanted, catch, callbacks, progress)
                for waiting in self._again:
                    self._run.leave(waiting.trial)
            except BaseException:
                with uninterrupted():
                    self._interrupt()
                raise
        if self._failure is not None:
            raise self._failure
        seconds = time.perf_counter() - started
        busy = tuple(ns * 1e-9 / seconds for ns in self._engine.native.lane_busy_ns)
        stats = RunStats.of(self._engine, seconds, lines=sampler.lines() if sampler is not None else None)
        # The study worked, but nothing ran on lanes: the objective probably trains in a plain torch loop.
        if self._states["complete"] and not stats.jobs:
            nothing = "no trial trained through waterflow: let the objective's loop call a wf.Step, or return a wf.Job"
            logger.warning(nothing)
        return StudySummary(
            trials=self._asked,
            seconds=seconds,
            steps=self._engine.steps,
            captures=stats.captures,
            most_at_once=self._most,
            lane_busy=busy,
            results=self._results.in_order(),
            states=self._states,
            best=best_of(self._study),
            stats=stats,
            run_again=self._ran_again,
        )

    def _look(
        self,
        wanted: Callable[[], bool],
        catch: tuple[type[Exception], ...],
        callbacks: Sequence[StudyCallback],
        progress: ProgressLine,
    ) -> None:
        """Wait a moment for the end of a trial, tell it, and begin others."""
        worker = self._next_ended()
        if self._auto is not None:
            in_use = self._engine.lanes_in_use
            self._at_once = self._auto.update(len(self._running), self._one_more_fits(), in_use)
        if worker is None:
            if self._auto is not None or self._run.lasts:
                self._fill(wanted, 0)
            return
        try:
            if not (self._set_aside(worker) or self._put_again(worker)):
                self._tell(worker, catch, callbacks, progress)
            if self._failure is not None and self._run.lasts:
                raise self._failure
            self._fill(wanted, self._leave(worker))
        finally:
            worker.told.set()
            join_all([worker.thread], 1.0)

    def _threads(self) -> list[int]:
        threads = [worker.thread for worker in [*self._running.values()]]
        return [thread.ident for thread in threads if thread is not None and thread.ident is not None]

    # -- asking

    def _fill(self, wanted: Callable[[], bool], time_: int) -> None:
        fresh = []
        while len(self._running) < self._at_once and (worker := self._next(wanted)) is not None:
            if self._clock is not None:
                self._clock.join(worker.trial.number, time_)
                take_turns(worker.trial, self._clock)
            fresh.append(worker)
        self._most = max(self._most, len(self._running))
        for worker in fresh:  # all are known to the clock before the first of them acts
            name = f"trial-{worker.trial.number}"
            worker.thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
            worker.thread.start()

    def _next(self, wanted: Callable[[], bool]) -> _Worker | None:
        """Return the next trial, which counts as running; None if none is to begin now."""
        if self._failure is not None or any(worker.alone for worker in self._running.values()):
            return None
        if self._again:
            if self._again[0].alone and self._running:
                return None
            with uninterrupted():
                worker = self._again.popleft()
                self._running[worker.trial.number] = worker
            if worker.job is not None:
                worker.paused = self._paused.take(folder_of(worker.trial.number))
            return worker
        if not wanted() or (self._auto and not self._one_more_fits()) or (self._running and self._run.next_is_alone()):
            return None
        with uninterrupted():
            # Ctrl-C between the two lines would leave a RUNNING trial in the storage that nothing ends.
            trial = self._run.ask()
            worker = _Worker(trial, self._run.seed_of(trial), Account(trial.number), trial.number in self._run.alone)
            self._running[trial.number] = worker
        self._asked += 1
        return worker

    def _one_more_fits(self) -> bool:
        """Return True if one more trial would train together with the running ones."""
        # A trial's need is unknown until it reserves memory. Assume that a new one is like the largest of the running
        # ones and of those that ended last. Before any need is known, run one trial per lane.
        under_way = [self._need(number) for number in self._running]
        known = [*filter(None, under_way), *self._ended_last]
        if not under_way or not known:
            return len(under_way) < self._engine.lanes
        like = max(known, key=lambda need: need.peak)
        return needed([*(need or like for need in under_way), like]) <= self._engine.reservations.room

    def _need(self, number: int) -> Need | None:
        needs = self._engine.reservations.needs(number)
        return None if needs is None else Need(f"trial-{number}", *needs)

    def _next_ended(self) -> _Worker | None:
        with contextlib.suppress(queue.Empty):
            return self._ended.get(timeout=0.1)
        return None

    # -- one trial, on its own thread

    def _work(self, worker: _Worker) -> None:
        trial = worker.trial
        set_in_loop(self._study, True)
        self._engine.accounts.append(worker.account)
        with contextlib.suppress(JobCancelled), within(self._engine, trial.number), worker.account.spending("trials"):
            try:
                _C.set_threads_here(self._engine.threads_per_lane)  # or eager code would take the cores of lanes
                with heartbeat(trial, self._study):
                    worker.value = self._limited(worker)
            except optuna.TrialPruned as pruned:
                worker.state, worker.error = TrialState.PRUNED, pruned.with_traceback(None)  # its frames hold loaders
            except BaseException as error:
                worker.state, worker.error = TrialState.FAIL, error
            with self._turn(worker):
                try:
                    close_steps_of_thread()
                finally:
                    self._ended.put(worker)
                if self._clock is not None:
                    # A deterministic trial keeps its turn until it was told, so that later ones see its value.
                    worker.told.wait()

    @contextlib.contextmanager
    def _own_numbers(self, worker: _Worker) -> Iterator[None]:
        # Python's and NumPy's generators belong to all trials: a warning says so if one draws from them.
        own = own_numbers(*generators_for(self._engine.device, worker.seed))
        told = f"trial {worker.trial.number}", lambda: len(self._running) > 1
        with own, telling_of_shared_numbers(*told), telling_of_accelerate(*told):
            yield

    def _limited(self, worker: _Worker) -> Any:
        worker.steps = made_here.steps
        told = self._trial_timeout, f"trial {worker.trial.number}", "trial_timeout"
        try:
            return limited(*told, lambda: self._value(worker), worker.code, worker.stop)
        except JobTimeoutError as error:
            # The job may have ended just at the limit: its result then says that it failed.
            if worker.result is not None:
                worker.result = over_limit(worker.result, error)
            raise

    def _value(self, worker: _Worker) -> Any:
        with self._own_numbers(worker):
            if worker.job is not None:
                value: Any = worker.job
            else:
                with loaders_timed(worker.account), worker.code.here():
                    value = self._objective(worker.trial)
            if not isinstance(value, Job):
                self._run.began_anew(worker.trial)
                return value
            with worker.code.here():
                return self._train(worker, value)

    def _turn(self, worker: _Worker) -> contextlib.AbstractContextManager[None]:
        return self._clock.turn(worker.trial.number) if self._clock is not None else contextlib.nullcontext()

    def _train(self, worker: _Worker, job: Job) -> Any:
        check_job(self._study, job)
        if self._clock is not None and job.timeout is not None:
            raise UnfitJobError(
                f"job {job.name!r} has timeout={job.timeout:g}, which follows the clock, and the study is deterministic=True; "
                "leave one of them out"
            )

        def turn() -> contextlib.AbstractContextManager[None]:
            return self._turn(worker)

        def began(runner: JobRunner) -> None:
            worker.runner = runner

        if worker.again and job.recompute is None:
            job = replace(job, recompute="auto")
        settings = {"engine": self._engine, "on_epoch": reporting(self._study, worker.trial, turn), "in_order": turn}
        result = self._run.train(worker.trial, job, began, worker.paused, seed=worker.seed, **settings)
        if result.status == "paused" and worker.runner is not None:
            worker.job, worker.paused, worker.aside = job, worker.runner.paused, True
            return None
        worker.result = result
        if result.status == "pruned":
            raise optuna.TrialPruned(f"pruned after epoch {len(result.metrics) - 1}")
        if result.error is not None:
            raise result.error
        return value_of(self._study, result)

    # -- telling

    def _set_aside(self, worker: _Worker) -> bool:
        """Return True if the trial's job was paused; it waits for its turn."""
        if not worker.aside or worker.paused is None or worker.error is not None:
            return False
        self._paused.put(folder_of(worker.trial.number), worker.paused)
        self._put_last(_Worker(worker.trial, worker.seed, Account(worker.trial.number), worker.alone, worker.again, worker.job))
        return True

    def _put_again(self, worker: _Worker) -> bool:
        """Return True if the trial lacked memory and runs once more: with less, and alone if others had what it lacked."""
        error, runner = worker.error, worker.runner
        if worker.again or runner is None or not isinstance(error, (MemoryLimitError, torch.OutOfMemoryError)):
            return False
        alone = not isinstance(error, MemoryLimitError) or error.others_hold
        if not alone and runner.job.recompute is not None:
            return False
        trial = worker.trial
        how = ["alone"] * alone + ["with recompute='auto'"] * (runner.job.recompute is None)
        logger.warning("trial %d runs once more %s: %s", trial.number, " and ".join(how), told(error))
        take_up(trial)
        self._put_last(_Worker(trial, worker.seed, Account(trial.number), alone, again=True))
        self._ran_again += 1
        return True

    def _put_last(self, worker: _Worker) -> None:
        self._note_need(worker.trial.number)
        with uninterrupted():
            del self._running[worker.trial.number]
            self._again.append(worker)

    def _note_need(self, number: int) -> None:
        # Trials are alike: the need of ended ones predicts the next one's.
        if (need := self._need(number)) is not None:
            self._ended_last.append(need)

    def _tell(
        self, worker: _Worker, catch: tuple[type[Exception], ...], callbacks: Sequence[StudyCallback], progress: ProgressLine
    ) -> None:
        trial, error, result = worker.trial, worker.error, worker.result
        if isinstance(error, UnfitCheckpointError):
            self._failure = self._failure or error  # the trial waits, as all that are under way
            return
        if worker.state is None and result is not None and self._results.would_keep(worker.value):
            self._run.keep(trial, result)
        with uninterrupted():
            try:
                told = tell_quietly(self._study, trial, worker.value, worker.state, error, catch)
            except Exception as failure:  # a sampler's own: the next trial would meet it again
                self._failure = self._failure or failure
                if not self._run.lasts:
                    del self._running[trial.number]
                return
            del self._running[trial.number]
            self._note_need(trial.number)
        self._states[told.state.name.lower()] += 1
        if result is not None:
            self._results.add(trial.number, result)
            self._results.told(trial.number, values_of(told))
            # Weights that are not kept must be freed now, not at the study's end.
            result = worker.result = worker.runner = None
        self._run.told(trial, self._results.with_weights())
        fatal = isinstance(error, UnfitJobError) or not isinstance(error, catch)
        if worker.state == TrialState.FAIL and error is not None and fatal:
            self._failure = self._failure or error
            return
        if self._gc_after_trial:
            gc.collect()
        for callback in callbacks:
            callback(self._study, told)
        progress.advance(best_of(self._study))

    def _leave(self, worker: _Worker) -> int:
        """Remove the trial from the clock; returns the virtual time at which the next one may begin."""
        if self._clock is None:
            return 0
        ended = self._clock.time(worker.trial.number)
        self._clock.leave(worker.trial.number)
        return ended

    def _interrupt(self) -> None:
        # After Ctrl-C or an error of a callback: stop all trials, and leave none RUNNING in the storage.
        workers = [*self._running.values(), *self._again]
        began = time.monotonic()
        self._run.last()
        if self._clock is not None:
            # Trials that wait for their turn could never end.
            self._clock.open()
        stop_all([worker.runner for worker in workers if worker.runner is not None], "interrupted")
        for worker in workers:
            worker.told.set()
            if worker.runner is None:
                worker.break_off()
        join_all([worker.thread for worker in workers], max(0.1, STOP_SECONDS - (time.monotonic() - began)))
        break_off_all(workers, [worker.thread for worker in workers], BREAK_OFF_SECONDS)
        if self._run.lasts:
            for worker in workers:
                if worker.paused is not None:
                    self._paused.put(folder_of(worker.trial.number), worker.paused)
            self._paused.write(LAST_SECONDS)
        for worker in workers:
            with contextlib.suppress(Exception):
                self._run.leave(worker.trial)
        self._running.clear()


def reporting(study: optuna.Study, trial: Trial, turn: InOrder = contextlib.nullcontext) -> OnEpoch:
    """Return the ``on_epoch`` of a trial's job: it reports the first metric to the study, and raises StopJob to prune.

    A study with several objectives gets no reports, as Optuna allows none.
    """

    def on_epoch(epoch: int, metrics: Metrics) -> None:
        if len(study.directions) == 1:
            with turn():
                trial.report(next(iter(metrics.values())), epoch)
                if trial.should_prune():
                    raise StopJob

    return on_epoch


def best_of(study: optuna.Study) -> str:
    """Return text with the best value and its trial; empty if there is none, or several objectives."""
    if len(study.directions) > 1:
        return ""
    with contextlib.suppress(ValueError):
        return f"best {study.best_value:.6g} (trial {study.best_trial.number})"
    return ""
