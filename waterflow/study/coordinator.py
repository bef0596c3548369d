"""StudyRunner: the calling thread asks and tells, and each trial runs on a thread of its own."""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import queue
import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import optuna
import torch
from optuna.trial import FrozenTrial, Trial, TrialState

from waterflow import _C
from waterflow.errors import JobCancelled, JobTimeoutError, MemoryLimitError, StudyError, told
from waterflow.executor.accelerate_state import telling_of_accelerate
from waterflow.executor.cancel import (
    BREAK_OFF_SECONDS,
    STOP_SECONDS,
    begin_import,
    break_off_all,
    join_all,
    limited,
    stop_all,
    time_does_not_count,
)
from waterflow.executor.data.loader import loaders_timed
from waterflow.executor.engine import Engine, within
from waterflow.executor.interrupts import remembered_interrupts, uninterrupted
from waterflow.executor.program.ownership import close_steps_of_thread, made_here
from waterflow.executor.rng import generators_for, own_numbers, telling_of_shared_numbers
from waterflow.executor.stats import Account
from waterflow.executor.tuning import AutoConcurrency
from waterflow.executor.virtual_clock import VirtualClock, here
from waterflow.job import Job, Metrics
from waterflow.planner.feasibility import Need, needed
from waterflow.results import over_limit
from waterflow.run_stats import RunStats
from waterflow.study.history import History, StudyTimeline
from waterflow.study.lines import LineSampler
from waterflow.study.optuna_compat import (
    frozen,
    heartbeat,
    loop,
    observe,
    set_in_loop,
    stopped,
    take_turns,
    take_up,
    tell_quietly,
    values_of,
)
from waterflow.study.order import Fifo, Policy, TrialOrder
from waterflow.study.paused import PausedStates
from waterflow.study.run import StudyRun, folder_of
from waterflow.study.values import (
    KeepWeights,
    KeptResults,
    StudySummary,
    UnfitCheckpointError,
    UnfitJobError,
    best_of,
    check_job,
    value_of,
)
from waterflow.study.worker import Worker
from waterflow.training.checkpoint import Checkpoint
from waterflow.training.checkpoint_dir import LAST_SECONDS
from waterflow.training.progress import ProgressLine
from waterflow.training.runner import InOrder, JobRunner, OnEpoch, PauseJob, StopJob

logger = logging.getLogger("waterflow")

Objective = Callable[[Trial], Any]
StudyCallback = Callable[[optuna.Study, FrozenTrial], None]
# Pauses of a trial may cost this share of the time that the whole of it takes.
PAUSING = 0.02
OPENING = 0.9  # the share of the time until the deadline in which trials begin
UNFINISHED = "waterflow:unfinished"  # user attribute of trials that ran, or were paused, when the study ended


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
        order: Policy | None = None,
        deadline: float | None = None,
    ) -> None:
        self._began, self._deadline = time.monotonic(), deadline
        self._study = study
        self._objective = objective
        self._engine = engine
        self._clock = VirtualClock() if deterministic else None
        engine.reservations.clock = self._clock
        self._at_once = max_concurrent if max_concurrent != "auto" else engine.lanes
        self._auto = AutoConcurrency(engine.lanes, lambda: engine.native.progress_ns) if max_concurrent == "auto" else None
        self._gc_after_trial = gc_after_trial
        self._trial_timeout = trial_timeout
        begin_import()  # the first trials are asked for meanwhile
        self._history = History(lambda: engine.steps)
        self._run = run or StudyRun(study)
        self._order = TrialOrder(order or Fifo(), study.directions[0].name == "MAXIMIZE")
        self._timeout: float | None = None
        self._n_trials: int | None = None
        self._any_reports = False
        self._to_first: list[float] = []  # seconds until trials made their first report
        self._again: deque[Worker] = deque()  # trials that lacked memory, and run before all others
        self._standing: dict[int, Worker] = {}  # trials that were paused
        self._pauses = 0
        self._pausing = 0.0  # seconds
        self._lock = threading.Lock()
        self._paused = PausedStates(engine, self._run.files)
        self._ran_again = 0
        self._running: dict[int, Worker] = {}
        self._ended: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._ended_last: deque[Need] = deque(maxlen=engine.lanes)
        self._results = KeptResults(study, keep_weights)
        self._kept = self._run.kept() if keep_weights != "none" else ()
        self._failure: BaseException | None = None
        self._told_who_stays = False
        self._asked_for = 0
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
        self._n_trials, self._timeout = n_trials, timeout
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
                self._know_others()
                self._fill(0)
                while self._has_more():
                    check_interrupt()
                    self._paused.make_way()
                    self._paused.write_old()
                    self._run.keep_alive([w.trial for w in (*self._again, *self._standing.values()) if not w.loops])
                    self._look(catch, callbacks, progress)
                    self._end_in_time(catch, callbacks, progress)
                self._let_go()
            except BaseException as error:
                with uninterrupted():
                    self._interrupt(LAST_SECONDS if isinstance(error, KeyboardInterrupt) else math.inf)
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
            trials=self._asked_for,
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
            pauses=self._pauses,
            pausing=self._pausing,
            history=self._timeline(),
        )

    @property
    def results(self) -> KeptResults:
        """Results of trials so far."""
        return self._results

    def _let_go(self) -> None:
        """Leave the trials that wait to the next call, or as failed ones."""
        waiting = [*self._again, *self._standing.values()]
        for worker in waiting:
            if worker.loops:
                worker.stop("the study has ended")
                worker.open()
        join_all([worker.thread for worker in waiting], BREAK_OFF_SECONDS)
        if self._run.lasts:
            self._paused.write()
        for worker in waiting:
            self._run.leave(worker.trial)

    def _steps(self) -> Counter[int]:
        """Return training steps by trial."""
        steps: Counter[int] = Counter()
        for account in self._engine.accounts:
            if isinstance(account.who, int):
                steps[account.who] += int(account.get("steps", 0))
        return steps

    def _timeline(self) -> StudyTimeline:
        winner = None
        if len(self._study.directions) == 1:
            with contextlib.suppress(ValueError):
                winner = self._study.best_trial.number
        return self._history.timeline(self._study.directions[0].name == "MAXIMIZE", self._steps(), winner)

    def _goes_on(self) -> bool:
        over = self._timeout is not None and self._history.now >= self._timeout
        return not (self._failure is not None or stopped(self._study) or over or self._left() <= 0)

    def _left(self) -> float:
        """Return the seconds until the deadline."""
        return math.inf if self._deadline is None else self._began + self._deadline - time.monotonic()

    def _wanted(self) -> bool:
        if self._n_trials is not None and self._run.begun >= self._n_trials:
            return False
        return self._goes_on() and not self._too_late() and self._run.wanted()

    def _too_late(self) -> bool:
        """Return True if a trial that began now would make no report before the deadline, or only take time from the leading ones."""
        if self._deadline is None:
            return False
        first = statistics.median(self._to_first) if self._to_first else 0.0
        return self._left() <= max((1 - OPENING) * self._deadline, first)

    def _has_more(self) -> bool:
        if self._running or (self._failure is None and (self._again and (self._goes_on() or self._again[0].again))):
            return True
        if self._standing and self._failure is None and (self._goes_on() or not self._run.lasts):
            return True
        return (self._goes_on() and self._run.waits_for_others()) or self._wanted()

    def _look(self, catch: tuple[type[Exception], ...], callbacks: Sequence[StudyCallback], progress: ProgressLine) -> None:
        """Wait a moment for the end of a trial, tell it, and begin others."""
        worker = self._next_ended()
        if self._auto is not None:
            in_use = self._engine.lanes_in_use
            self._at_once = self._auto.update(len(self._running), self._one_more_fits(), in_use)
        if worker is None:
            if self._auto is not None or self._run.lasts or self._starving():
                self._fill(self._clock.latest() if self._clock is not None else 0, hungry=True)
            return
        told, loops = worker.told, worker.aside and worker.loops
        if self._running.get(worker.trial.number) is not worker:
            return  # a loop that was to wait when the study ended, and was told then
        try:
            if not (self._set_aside(worker) or self._put_again(worker)):
                self._tell(worker, catch, callbacks, progress)
            if self._failure is not None and self._run.lasts:
                raise self._failure
            self._fill(self._leave(worker))
        finally:
            told.set()
            join_all([] if loops else [worker.thread], 1.0)

    def _threads(self) -> list[int]:
        threads = [worker.thread for worker in [*self._running.values()]]
        return [thread.ident for thread in threads if thread is not None and thread.ident is not None]

    # -- asking

    def _know_others(self) -> None:
        """Compare with trials of calls before, and let those that were under way wait for their turn."""
        if not self._order.pauses:
            return
        for known in self._study.get_trials(deepcopy=False, states=(TrialState.COMPLETE, TrialState.PRUNED)):
            self._order.add(known.number, known.intermediate_values, ended=True)
        for _ in range(self._run.waiting):
            if self._n_trials is not None and self._run.begun >= self._n_trials:
                return
            with uninterrupted():
                worker = self._asked()
                if worker.alone:
                    self._again.append(worker)
                else:
                    self._standing[worker.trial.number] = worker
            self._any_reports |= bool(frozen(worker.trial).intermediate_values)

    def _fill(self, time_: int, hungry: bool = False) -> None:
        fresh = []
        while (worker := self._next(hungry)) is not None:
            if self._clock is not None:
                self._clock.join(worker.trial.number, time_)
                take_turns(worker.trial, self._clock)
            fresh.append(worker)
        if not fresh:
            return
        self._most = max(self._most, len(self._running))
        self._run.under_way(self._running)
        for worker in fresh:  # all are known to the clock before the first of them acts
            self._history.runs(worker.trial.number)
            if worker.loops:
                worker.aside, worker.told = False, threading.Event()
                worker.open()
                continue
            name = f"trial-{worker.trial.number}"
            worker.thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
            worker.thread.start()

    def _next(self, hungry: bool) -> Worker | None:
        """Return the next trial, which counts as running; None if none is to begin now."""
        if self._failure is not None:
            return None
        if hungry and self._starving():
            return self._take_up(next(number for number, worker in self._standing.items() if worker.loops))
        if any(worker.alone for worker in self._running.values()):
            return None
        if len(self._running) >= self._at_once:
            return None
        if self._again and (self._again[0].again or self._goes_on()):
            if self._again[0].alone and self._running:
                return None
            with uninterrupted():
                worker = self._again.popleft()
                self._running[worker.trial.number] = worker
            self._order.runs(worker.trial.number)
            return worker
        if self._standing and not self._goes_on():
            return None
        fits = not (self._auto or self._loops_wait()) or self._one_more_fits()
        new = fits and self._wanted() and not (self._running and self._run.next_is_alone())
        found = self._order.next(self._at_once, int(new), bool(self._running))
        if found is None:
            return None
        if found.state != "new":
            return self._take_up(found.number)
        with uninterrupted():
            # Ctrl-C in between would leave a RUNNING trial in the storage that nothing ends.
            worker = self._asked()
            self._running[worker.trial.number] = worker
        self._order.runs(worker.trial.number)
        return worker

    def _take_up(self, number: int) -> Worker:
        with uninterrupted():
            worker = self._running[number] = self._standing.pop(number)
        if worker.job is not None:
            began = time.thread_time()
            worker.paused = self._paused.take(folder_of(number))
            self._cost(worker, time.thread_time() - began)
        self._order.runs(number)
        return worker

    def _asked(self) -> Worker:
        trial = self._run.ask()
        worker = Worker(trial, self._run.seed_of(trial), Account(trial.number), trial.number in self._run.alone)
        self._order.add(trial.number, frozen(trial).intermediate_values)
        self._asked_for += 1
        return worker

    def _loops_wait(self) -> bool:
        return any(worker.loops for worker in self._standing.values())

    def _starving(self) -> bool:
        """Return True if all that run wait for memory while loops that stand aside hold some."""
        threads = [worker.thread for worker in self._running.values()]
        waits = self._engine.reservations.waits
        return bool(threads) and self._loops_wait() and all(thread is not None and waits(thread.ident) for thread in threads)

    def _one_more_fits(self) -> bool:
        """Return True if one more trial would train together with the running ones."""
        # A trial's need is unknown until it reserves memory. Assume that a new one is like the largest of the running
        # ones and of those that ended last. Before any need is known, run one trial per lane.
        holding = [*self._running, *(number for number, worker in self._standing.items() if worker.loops)]
        under_way = [self._need(number) for number in holding]
        known = [*filter(None, under_way), *self._ended_last]
        if not under_way or not known:
            return len(under_way) < self._engine.lanes
        like = max(known, key=lambda need: need.peak)
        return needed([*(need or like for need in under_way), like]) <= self._engine.reservations.room

    def _need(self, number: int) -> Need | None:
        needs = self._engine.reservations.needs(number)
        return None if needs is None else Need(f"trial-{number}", *needs)

    def _next_ended(self) -> Worker | None:
        with contextlib.suppress(queue.Empty):
            return self._ended.get(timeout=0.1)
        return None

    # -- one trial, on its own thread

    def _work(self, worker: Worker) -> None:
        trial = worker.trial
        set_in_loop(self._study, True)
        observe(trial, lambda step, value: self._observe(worker, step, value))
        here.before_step = (lambda: self._before_step(worker)) if self._order.pauses else None
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
    def _own_numbers(self, worker: Worker) -> Iterator[None]:
        # Python's and NumPy's generators belong to all trials: a warning says so if one draws from them.
        own = own_numbers(*generators_for(self._engine.device, worker.seed))
        told = f"trial {worker.trial.number}", lambda: len(self._running) > 1
        with own, telling_of_shared_numbers(*told), telling_of_accelerate(*told):
            yield

    def _limited(self, worker: Worker) -> Any:
        worker.steps = made_here.steps
        told = self._trial_timeout, f"trial {worker.trial.number}", "trial_timeout"
        try:
            return limited(*told, lambda: self._value(worker), worker.code, worker.stop, before=worker.seconds)
        except JobTimeoutError as error:
            # The job may have ended just at the limit: its result then says that it failed.
            if worker.result is not None:
                worker.result = over_limit(worker.result, error)
            raise

    def _value(self, worker: Worker) -> Any:
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

    def _turn(self, worker: Worker) -> contextlib.AbstractContextManager[None]:
        return self._clock.turn(worker.trial.number) if self._clock is not None else contextlib.nullcontext()

    def _train(self, worker: Worker, job: Job) -> Any:
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

        def aside(epoch: int) -> bool:
            return epoch + 1 < job.epochs and self._stands_aside(worker, epoch + 1)

        ran = worker.paused.state["seconds"] if worker.paused is not None else 0.0
        settings = {"engine": self._engine, "on_epoch": reporting(self._study, worker.trial, turn, aside), "in_order": turn}
        result = self._run.train(worker.trial, job, began, worker.paused, seed=worker.seed, ran=ran, **settings)
        if worker.runner is not None and worker.job is not None:
            self._cost(worker, worker.runner.seconds_to_resume)
        if result.status == "paused" and worker.runner is not None:
            self._cost(worker, time.thread_time() - (worker.leaving or 0.0))
            worker.job, worker.paused, worker.aside, worker.result = job, worker.runner.paused, True, result
            return None
        worker.result = result
        if result.status == "pruned":
            raise optuna.TrialPruned(f"pruned after epoch {len(result.metrics) - 1}")
        if result.error is not None:
            raise result.error
        return value_of(self._study, result)

    def _observe(self, worker: Worker, step: int, value: float) -> None:
        number = worker.trial.number
        if not self._order.report(number, step, value):
            return  # a call before, or a run before, has made it
        worker.reported = self._any_reports = True
        if len(frozen(worker.trial).intermediate_values) == 1:
            self._to_first.append(worker.seconds + self._history.runs_for(number))
        self._history.report(number, value)

    def _stands_aside(self, worker: Worker, epochs: int | None = None) -> bool:
        """Return True if a trial that has made a report is to stand aside now. ``epochs`` of its job are done; None for a loop."""
        if not self._order.pauses or not worker.reported:
            return False
        worker.reported, number = False, worker.trial.number
        if worker.leaving is not None and worker.runner is not None:  # it goes on all the same
            worker.leaving, worker.stays = None, True
            self._order.runs(number)
            self._tell_who_stays(worker)
        if worker.stays or worker.alone or not self._goes_on():
            return False
        if self._clock is None and worker.runner is not None and epochs is not None:
            whole = (worker.seconds + self._history.runs_for(number)) * worker.runner.job.epochs / epochs
            if worker.pausing + self._pausing / max(1, self._pauses) > PAUSING * whole:
                return False
        if self._order.goes_on(number, self._at_once, int(self._wanted())):
            return False
        worker.leaving = time.thread_time()
        return True

    def _tell_who_stays(self, worker: Worker) -> None:
        if not self._told_who_stays and worker.runner is not None:
            self._told_who_stays = True
            logger.warning(
                "trial %d, and others like it, cannot be paused and keeps its lane to its end, whatever it promises: %s",
                worker.trial.number,
                worker.runner.why_not_paused,
            )

    def _before_step(self, worker: Worker) -> None:
        # A job is asked after its evaluation, and taken up by another thread. A loop waits here, on its own.
        if worker.runner is not None:
            if not self._run.lasts:  # else Ctrl-C may come before the job's next checkpoint
                worker.paused = None
            return
        if not worker.reported:
            return
        with time_does_not_count(), worker.account.leaving_out("trials"):
            with self._turn(worker):
                if not self._stands_aside(worker):
                    return
                told, worker.aside = worker.told, True
                self._ended.put(worker)
                if self._clock is not None:
                    told.wait()
            worker.wait()

    def _cost(self, worker: Worker, seconds: float) -> None:
        # Of the processor: while a thread of a trial that stands aside waits, others have the lanes.
        worker.pausing += seconds
        with self._lock:
            self._pausing += seconds

    # -- telling

    def _set_aside(self, worker: Worker) -> bool:
        """Return True if the trial's job was paused, or its loop waits: for its turn."""
        if not worker.aside or worker.error is not None:
            return False
        number, waiting = worker.trial.number, worker
        if worker.unfinished and worker.loops:  # its steps are cancelled: it does not wait
            worker.aside = False
            worker.open()
            return True
        worker.seconds += self._history.stands(number)
        self._pauses += 1
        if worker.paused is not None:
            began = time.thread_time()
            self._paused.put(folder_of(number), worker.paused)
            self._cost(worker, time.thread_time() - began)
            waiting = worker.next_run(job=worker.job, result=worker.result)
        worker.leaving = None
        self._note_need(number)
        with uninterrupted():
            del self._running[number]
            self._standing[number] = waiting
        self._order.stands(number)
        return True

    def _put_again(self, worker: Worker) -> bool:
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
        self._history.stands(trial.number, "again")
        self._note_need(trial.number)
        with uninterrupted():
            del self._running[trial.number]
            self._again.append(replace(worker.next_run(), alone=alone, again=True, seconds=0.0))
        self._ran_again += 1
        return True

    def _note_need(self, number: int) -> None:
        # Trials are alike: the need of ended ones predicts the next one's.
        if (need := self._need(number)) is not None:
            self._ended_last.append(need)

    def _tell(
        self, worker: Worker, catch: tuple[type[Exception], ...], callbacks: Sequence[StudyCallback], progress: ProgressLine
    ) -> None:
        worker.unfinished &= isinstance(worker.error, JobCancelled)  # or it has ended by itself
        if worker.unfinished and not self._as_reported(worker):
            return
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
        complete = told.state == TrialState.COMPLETE
        self._history.stands(trial.number, "unfinished" if worker.unfinished and complete else told.state.name.lower())
        self._order.ended(trial.number, forget=told.state == TrialState.FAIL)
        if result is not None:
            self._results.add(trial.number, result)
            self._results.told(trial.number, values_of(told))
            # Weights that are not kept must be freed now, not at the study's end.
            result = worker.result = worker.runner = None
        self._run.told(trial, self._results.with_weights())
        if complete and self._order.pauses and not self._any_reports and self._steps()[trial.number]:
            self._failure = self._failure or StudyError(
                f"trial {trial.number} has ended without a report, and order= ranks trials by their reports: let the objective call "
                "trial.report(value, epoch), or return a wf.Job, whose evaluations are reported; or leave order= out"
            )
        fatal = isinstance(error, UnfitJobError) or not isinstance(error, catch)
        if worker.state == TrialState.FAIL and error is not None and fatal:
            self._failure = self._failure or error
            return
        if self._gc_after_trial:
            gc.collect()
        for callback in callbacks:
            callback(self._study, told)
        progress.advance(best_of(self._study))

    def _as_reported(self, worker: Worker) -> bool:
        """Give a trial that the deadline has ended the value of its last report; False if it has none, or goes on in the next call."""
        reports = frozen(worker.trial).intermediate_values
        if not reports or (self._run.lasts and self._deadline is None):
            self._leave_to_next(worker)
            return False
        if worker.paused is not None and (worker.result is None or worker.result.steps <= worker.paused.steps):
            self._with_weights(worker, worker.paused)  # it was just being taken up
        Trial.set_user_attr(worker.trial, UNFINISHED, True)  # not in its turn: this thread has none
        worker.value, worker.state, worker.error = reports[max(reports)], None, None
        if worker.result is not None:
            worker.result = replace(worker.result, status="unfinished", error=None, traceback=None)
        return True

    def _leave_to_next(self, worker: Worker) -> None:
        number = worker.trial.number
        self._history.stands(number, "waiting" if self._run.lasts else "fail")
        self._states["fail"] += not self._run.lasts
        self._order.ended(number, forget=True)
        with uninterrupted():
            del self._running[number]
            self._run.leave(worker.trial)

    def _end_in_time(
        self, catch: tuple[type[Exception], ...], callbacks: Sequence[StudyCallback], progress: ProgressLine
    ) -> None:
        """End what runs at the deadline, and what stands aside when the study does not go on."""
        late = self._left() <= 0
        for worker in [worker for worker in self._running.values() if late and worker.thread is not None]:
            worker.end(self._history.now)
        if not self._standing or self._goes_on() or (self._run.lasts and not late):
            return
        if self._clock is not None and self._running:
            return  # or it would depend on the moment what others see of them
        # Loops last: what frees a job's step waits for its turn, which a loop that has ended may have.
        for number, worker in sorted(self._standing.items(), key=lambda one: (one[1].loops, one[0])):
            with uninterrupted():
                self._running[number] = self._standing.pop(number)
            self._order.runs(number)
            worker.unfinished = True
            if worker.loops:
                worker.aside, worker.told = False, threading.Event()
                worker.stop("the study has ended")
                worker.open()
                if self._clock is not None:
                    return  # one after the other
            elif worker.job is None:  # of a call before, and not taken up
                self._leave_to_next(worker)
            else:
                worker.state, worker.error = TrialState.FAIL, JobCancelled("the study has ended")
                self._with_weights(worker)
                self._tell(worker, catch, callbacks, progress)
        if self._failure is not None and self._run.lasts:
            raise self._failure

    def _with_weights(self, worker: Worker, state: Checkpoint | None = None) -> None:
        """Give the result of a job that was paused its weights, if they may be kept."""
        reports, job = frozen(worker.trial).intermediate_values, worker.job
        if job is None or not reports or not self._results.would_keep(reports[max(reports)]):
            return
        try:
            with within(self._engine, worker.trial.number):
                state = state or self._paused.take(folder_of(worker.trial.number))
                worker.result = JobRunner(job, self._engine, resume=state).unfinished()
        except Exception as error:  # of the disk, or of the user's functions
            logger.warning("the weights of trial %d are lost: %s", worker.trial.number, told(error))

    def _leave(self, worker: Worker) -> int:
        """Remove the trial from the clock; returns the virtual time at which the next one may begin."""
        if self._clock is None or not self._clock.knows(worker.trial.number):  # a loop that stood aside when the study ended
            return 0
        ended = self._clock.time(worker.trial.number)
        self._clock.leave(worker.trial.number)
        return ended

    def _interrupt(self, seconds: float) -> None:
        # After Ctrl-C or an error of a callback: stop all trials, and leave none RUNNING in the storage.
        workers = [*self._running.values(), *self._again, *self._standing.values()]
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
            self._paused.write(seconds)
        for worker in workers:
            with contextlib.suppress(Exception):
                self._run.leave(worker.trial)
        self._running.clear()


def reporting(
    study: optuna.Study, trial: Trial, turn: InOrder = contextlib.nullcontext, aside: Callable[[int], bool] = lambda epoch: False
) -> OnEpoch:
    """Return the ``on_epoch`` of a trial's job: it reports the first metric to the study, and raises StopJob to prune.

    It raises PauseJob if ``aside(epoch)`` says so. A study with several objectives gets no reports, as Optuna allows none.
    """

    def on_epoch(epoch: int, metrics: Metrics) -> None:
        if len(study.directions) == 1:
            with turn():
                trial.report(next(iter(metrics.values())), epoch)
                if trial.should_prune():
                    raise StopJob
                if aside(epoch):
                    raise PauseJob

    return on_epoch
