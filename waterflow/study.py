"""The Optuna study runner: trials in, results out, several at a time on one device."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import queue
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import optuna
import torch
from optuna.trial import FrozenTrial, Trial, TrialState

from waterflow import _C
from waterflow.errors import JobCancelled, StudyError
from waterflow.executor.auto import AutoConcurrency
from waterflow.executor.captured import captures
from waterflow.executor.engine import Engine, current_worker, within
from waterflow.executor.timeline import Timeline
from waterflow.executor.virtual_clock import VirtualClock
from waterflow.job import Job, JobResult, Metrics, Results
from waterflow.progress import ProgressLine
from waterflow.runner import (
    BREAK_OFF_SECONDS,
    STOP_SECONDS,
    JobRunner,
    StopJob,
    break_off,
    draw_seed,
    evaluating,
    join_all,
    stop_all,
)
from waterflow.step import close_steps_of_thread

logger = logging.getLogger("waterflow")

Objective = Callable[[Trial], Any]
StudyCallback = Callable[[optuna.Study, FrozenTrial], None]


@dataclass(frozen=True)
class StudySummary:
    """What one call of ``optimize`` did. ``results`` holds the jobs of trials that returned one, by trial."""

    trials: int
    seconds: float
    steps: int
    captures: int
    most_at_once: int
    lane_busy: tuple[float, ...]
    results: Results = field(default_factory=Results)


def optimize(
    study: optuna.Study,
    objective: Objective,
    n_trials: int | None = None,
    timeout: float | None = None,
    *,
    max_concurrent: int | Literal["auto"] = "auto",
    memory: int | float | str | None = None,
    device: str = "cpu",
    lanes: int | None = None,
    intra_op: int = 1,
    catch: Iterable[type[Exception]] | type[Exception] = (),
    callbacks: Iterable[StudyCallback] | None = None,
    gc_after_trial: bool = False,
    show_progress_bar: bool = False,
    deterministic: bool = False,
    timeline: Callable[[Timeline], None] | None = None,
) -> StudySummary:
    """``study.optimize``, with several trials training side by side on one device.

    ``objective`` is an ordinary Optuna objective in whose loop a ``waterflow.Step`` trains, or a function that
    returns a ``waterflow.Job``; the job is then trained, reported to the pruner after each evaluation, and its
    ``value`` is told (its first metrics, in a study with several objectives). Each trial runs on a thread of its own.
    torch's default generator belongs to all of them: an objective with a loop of its own draws from a
    ``torch.Generator`` that it makes, also for its Step (``generator=``); a Job draws from its own numbers.

    Args:
        study: Any Optuna study: in memory, RDB or journal storage, one objective or several.
        objective: See above.
        n_trials, timeout: As in ``study.optimize``; running trials finish after a timeout.
        max_concurrent: Trials under way at the same time. ``"auto"``: as many as memory and measured throughput allow.
        memory: The limit for all trials together: bytes, a share of what is free, or text like ``"4GiB"``.
        device, lanes, intra_op: As in ``train``.
        catch: Exceptions that fail a trial without ending the study, as in ``study.optimize``.
        callbacks: Called with (study, trial) after each trial, on the calling thread.
        gc_after_trial: Collect garbage after each trial.
        show_progress_bar: One line of progress, where there is a terminal.
        deterministic: Ask, report, prune and tell in an order that follows training steps, not the clock: the same
            seeds then give the same study twice. Needs a whole number as ``max_concurrent``, and no ``timeout``.
            What objectives do to the study in other ways than through their trial and ``study.stop()`` has no order.
        timeline: Called at the end with the record of the run, to save its pictures.

    Returns:
        Figures of the run. What the trials found is in ``study``.

    Raises:
        StudyError: Settings that contradict each other.
        Exception: What a trial raised and ``catch`` does not name, after the other running trials have ended.
    """
    _check(study, objective, n_trials, timeout, max_concurrent, callbacks, deterministic)
    caught = tuple(catch) if isinstance(catch, Iterable) else (catch,)
    with Engine(device, memory=memory, lanes=lanes, intra_op=intra_op) as engine:
        if timeline is not None:
            engine.native.record_spans(True)
        coordinator = _Coordinator(study, objective, engine, max_concurrent, deterministic, gc_after_trial)
        with ProgressLine(n_trials, "trials", show_progress_bar) as progress:
            summary = coordinator.run(n_trials, timeout, caught, list(callbacks or ()), progress)
        if timeline is not None:
            timeline(Timeline.of(engine))
    return summary


def _check(
    study: Any, objective: Any, n_trials: Any, timeout: Any, max_concurrent: Any, callbacks: Any, deterministic: bool
) -> None:
    if not isinstance(study, optuna.Study):
        raise StudyError(
            f"study must be an optuna.Study, such as optuna.create_study() makes; got {type(study).__name__}"
        )
    if not callable(objective):
        advice = "; return the Job from a function of the trial" if isinstance(objective, Job) else ""
        raise StudyError(f"objective must be a function of a trial; got {type(objective).__name__}{advice}")
    for name, value in (("n_trials", n_trials), ("timeout", timeout)):
        if value is not None and not isinstance(value, (int, float)):
            raise StudyError(f"{name} must be a number or None; got {value!r}")
    if callable(callbacks):
        raise StudyError("callbacks takes a list; put the one you have into brackets")
    if max_concurrent != "auto" and (not isinstance(max_concurrent, int) or max_concurrent < 1):
        raise StudyError(f"max_concurrent must be 'auto' or a positive integer; got {max_concurrent!r}")
    if n_trials is not None and n_trials < 0:
        raise StudyError(f"n_trials cannot be negative; got {n_trials}")
    if deterministic and not isinstance(max_concurrent, int):
        raise StudyError(
            "deterministic=True needs a whole number as max_concurrent, for 'auto' follows the clock; "
            "pass for example max_concurrent=4"
        )
    if deterministic and timeout is not None:
        raise StudyError("deterministic=True and timeout= contradict each other; limit the study with n_trials=")
    if _in_loop(study):
        raise StudyError(
            "optimize() was called inside an objective or a callback of the same study; call it after the first has "
            "returned, or give the inner one a study of its own"
        )


@dataclass
class _Worker:
    """A trial under way, and how it ended."""

    trial: Trial
    seed: int  # for a job that has none
    thread: threading.Thread | None = None
    runner: JobRunner | None = None
    value: Any = None
    result: JobResult | None = None
    state: TrialState | None = None
    error: BaseException | None = None
    told: threading.Event = field(default_factory=threading.Event)

    def break_off(self) -> None:
        """Break off whatever its thread does."""
        if self.thread is None or self.thread.ident is None or not self.thread.is_alive():
            return
        if self.runner is not None:
            self.runner.break_off()
        else:
            break_off(self.thread.ident)


class _Coordinator:
    """Asks and tells on the calling thread; trials run on theirs and send word when they end."""

    def __init__(
        self, study: optuna.Study, objective: Objective, engine: Engine, max_concurrent: int | Literal["auto"],
        deterministic: bool, gc_after_trial: bool,
    ) -> None:  # fmt: skip
        self._study = study
        self._objective = objective
        self._engine = engine
        self._clock = VirtualClock() if deterministic else None
        engine.clock = self._clock
        self._at_once = max_concurrent if max_concurrent != "auto" else engine.lanes
        self._auto = (
            AutoConcurrency(engine.lanes, lambda: [engine.native.progress_ns]) if max_concurrent == "auto" else None
        )
        self._gc_after_trial = gc_after_trial
        self._seeds = torch.Generator().manual_seed(draw_seed())  # before lanes borrow torch's own
        self._running: dict[int, _Worker] = {}
        self._ended: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self._results: list[tuple[int, JobResult]] = []
        self._failure: BaseException | None = None
        self._asked = 0
        self._most = 0

    def run(
        self, n_trials: int | None, timeout: float | None, catch: tuple[type[Exception], ...],
        callbacks: Sequence[StudyCallback], progress: ProgressLine,
    ) -> StudySummary:  # fmt: skip
        """Run trials until there are enough; see ``optimize``."""
        started = time.perf_counter()
        captured = captures.captures

        def wanted() -> bool:
            return not (
                self._failure is not None
                or _stopped(self._study)
                or (n_trials is not None and self._asked >= n_trials)
                or (timeout is not None and time.perf_counter() - started >= timeout)
            )

        with _loop(self._study, self._clock):
            try:
                self._fill(wanted, 0)
                while self._running or wanted():
                    worker = self._next_ended()
                    if worker is not None:
                        try:
                            self._tell(worker, catch, callbacks, progress)
                            self._fill(wanted, self._leave(worker))
                        finally:
                            worker.told.set()
                            join_all([worker.thread], 1.0)
                    elif self._auto is not None:
                        self._at_once = self._auto.update(len(self._running), self._memory_allows())
                        self._fill(wanted, 0)
            except BaseException:
                with _uninterrupted():
                    self._interrupt()
                raise
        if self._failure is not None:
            raise self._failure
        seconds = time.perf_counter() - started
        busy = tuple(ns * 1e-9 / seconds for ns in self._engine.native.lane_busy_ns)
        results = Results(result for _, result in sorted(self._results, key=lambda pair: pair[0]))
        return StudySummary(
            trials=self._asked,
            seconds=seconds,
            steps=self._engine.native.steps_done,
            captures=captures.captures - captured,
            most_at_once=self._most,
            lane_busy=busy,
            results=results,
        )

    # -- asking

    def _fill(self, wanted: Callable[[], bool], time_: int) -> None:
        fresh = []
        while len(self._running) < self._at_once and wanted():
            with _uninterrupted():
                trial = self._ask()
                worker = self._running[trial.number] = _Worker(trial, draw_seed(self._seeds))
            self._asked += 1
            if self._clock is not None:
                self._clock.join(trial.number, time_)
                _take_turns(trial, self._clock)
            fresh.append(worker)
        self._most = max(self._most, len(self._running))
        for worker in fresh:  # all are known to the clock before the first of them acts
            name = f"trial-{worker.trial.number}"
            worker.thread = threading.Thread(target=self._work, args=(worker,), name=name, daemon=True)
            worker.thread.start()

    def _ask(self) -> Trial:
        _fail_stale(self._study)
        return self._study.ask()

    def _memory_allows(self) -> bool:
        free = self._engine.room - self._engine.claimed() - self._engine.native.held
        return free > self._engine.largest_claim()

    def _next_ended(self) -> _Worker | None:
        with contextlib.suppress(queue.Empty):
            return self._ended.get(timeout=0.1)
        return None

    # -- one trial, on its own thread

    def _work(self, worker: _Worker) -> None:
        trial = worker.trial
        _set_in_loop(self._study, True)
        _C.set_threads_here(self._engine.intra_op)  # lanes keep their cores
        with contextlib.suppress(JobCancelled), within(self._engine, trial.number):
            try:
                with _heartbeat(trial, self._study):
                    value = self._objective(trial)
                    worker.value = self._train(worker, value) if isinstance(value, Job) else value
            except optuna.TrialPruned as pruned:
                worker.state, worker.error = TrialState.PRUNED, pruned
            except BaseException as error:
                worker.state, worker.error = TrialState.FAIL, error
            with self._turn(worker):
                close_steps_of_thread()
                self._ended.put(worker)
                if self._clock is not None:
                    worker.told.wait()

    def _turn(self, worker: _Worker) -> contextlib.AbstractContextManager[None]:
        return self._clock.turn(worker.trial.number) if self._clock is not None else contextlib.nullcontext()

    def _train(self, worker: _Worker, job: Job) -> Any:
        trial = worker.trial
        single = len(self._study.directions) == 1

        def on_epoch(epoch: int, metrics: Metrics) -> None:
            if not single:
                return
            with self._turn(worker):
                trial.report(next(iter(metrics.values())), epoch)
                if trial.should_prune():
                    raise StopJob

        worker.runner = JobRunner(job, self._engine, on_epoch, seed=worker.seed, in_order=lambda: self._turn(worker))
        result = worker.result = worker.runner.run()
        if result.status == "pruned":
            raise optuna.TrialPruned(f"pruned after epoch {len(result.metrics) - 1}")
        if result.error is not None:
            raise result.error
        if single:
            return result.value
        values = list(result.metrics[-1].values())
        if len(values) != len(self._study.directions):
            raise StudyError(
                f"the study has {len(self._study.directions)} objectives and evaluate of job {job.name!r} returned "
                f"{len(values)} number(s): {', '.join(result.metrics[-1])}. Return one per objective, in their order"
            )
        return values

    # -- telling

    def _tell(
        self, worker: _Worker, catch: tuple[type[Exception], ...], callbacks: Sequence[StudyCallback],
        progress: ProgressLine,
    ) -> None:  # fmt: skip
        trial, error = worker.trial, worker.error
        with _uninterrupted():
            try:
                told = _tell_quietly(self._study, trial, worker.value, worker.state, error)
            except Exception as failure:  # a sampler's own
                self._failure = self._failure or failure
                return
            finally:
                del self._running[trial.number]
        if worker.result is not None:
            self._results.append((trial.number, worker.result))
        if worker.state == TrialState.FAIL and error is not None and not isinstance(error, catch):
            self._failure = self._failure or error
            return
        if self._gc_after_trial:
            gc.collect()
        for callback in callbacks:
            callback(self._study, told)
        progress.advance(_best(self._study))

    def _leave(self, worker: _Worker) -> int:
        """The trial leaves the clock; returns the virtual time at which the next one may begin."""
        if self._clock is None:
            return 0
        ended = self._clock.time(worker.trial.number)
        self._clock.leave(worker.trial.number)
        return ended

    def _interrupt(self) -> None:
        """Ctrl-C, or a callback that raised: stop what runs, and leave no trial RUNNING."""
        workers = list(self._running.values())
        if self._clock is not None:
            self._clock.open()
        stop_all([worker.runner for worker in workers if worker.runner is not None], "interrupted")
        for worker in workers:
            worker.told.set()
            if worker.runner is None:
                worker.break_off()
        join_all([worker.thread for worker in workers], STOP_SECONDS)
        for worker in workers:
            worker.break_off()
        join_all([worker.thread for worker in workers], BREAK_OFF_SECONDS)
        for worker in workers:
            with contextlib.suppress(Exception):
                self._study.tell(worker.trial, state=TrialState.FAIL)
        self._running.clear()


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits until the block is through: a trial is asked for and known here, or told and forgotten."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        signal.raise_signal(signal.SIGINT)


# What follows is all that touches Optuna's private names, with a way around each where it is missing.


def _loop_flags(study: optuna.Study) -> Any:
    return getattr(study, "_thread_local", None)


def _in_loop(study: optuna.Study) -> bool:
    return bool(getattr(_loop_flags(study), "in_optimize_loop", False))


def _set_in_loop(study: optuna.Study, value: bool) -> None:
    flags = _loop_flags(study)
    if flags is not None:
        flags.in_optimize_loop = value  # study.stop() looks at it


@contextlib.contextmanager
def _loop(study: optuna.Study, clock: VirtualClock | None) -> Iterator[None]:
    study._stop_flag = False
    _set_in_loop(study, True)
    if clock is not None:
        study.stop = _stop_in_turn(study, clock)  # type: ignore[method-assign]
    try:
        yield
    finally:
        _set_in_loop(study, False)
        if clock is not None:
            del study.stop


def _stop_in_turn(study: optuna.Study, clock: VirtualClock) -> Callable[[], None]:
    stop = study.stop

    def call() -> None:
        worker = current_worker()
        with clock.turn(worker) if worker is not None else contextlib.nullcontext():
            stop()

    return call


def _stopped(study: optuna.Study) -> bool:
    return bool(getattr(study, "_stop_flag", False))


def _heartbeat(trial: Trial, study: optuna.Study) -> contextlib.AbstractContextManager[Any]:
    try:
        from optuna.storages._heartbeat import get_heartbeat_thread
    except ImportError:
        return contextlib.nullcontext()
    return get_heartbeat_thread(trial._trial_id, study._storage)  # type: ignore[return-value]


def _fail_stale(study: optuna.Study) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with contextlib.suppress(AttributeError):
            optuna.storages.fail_stale_trials(study)


def _tell_quietly(
    study: optuna.Study, trial: Trial, value: Any, state: TrialState | None, error: BaseException | None
) -> FrozenTrial:
    """Tell, and log what became of the trial as Optuna does."""
    number = trial.number
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        told = study.tell(trial, None if state is not None else value, state=state)
    log = logging.getLogger("optuna.study._optimize")
    if told.state == TrialState.COMPLETE:
        if hasattr(study, "_log_completed_trial"):
            study._log_completed_trial(told.values, number, told.params)
    elif told.state == TrialState.PRUNED:
        log.info("Trial %d pruned. %s", number, error)
    else:
        why = repr(error) if error is not None else "; ".join(str(warning.message) for warning in said)
        log.warning(
            "Trial %d failed with parameters: %s because of the following error: %s.", number, told.params, why,
            exc_info=error,
        )  # fmt: skip
        log.warning("Trial %d failed with value %r.", number, value)
    return told


def _best(study: optuna.Study) -> str:
    if len(study.directions) > 1:
        return ""
    with contextlib.suppress(ValueError):
        return f"best {study.best_value:.6g} (trial {study.best_trial.number})"
    return ""


class _InTurn(Trial):
    """A trial whose dealings with the study wait for their turn on a virtual clock."""


_TURNS = ("suggest_float", "suggest_int", "suggest_categorical", "report", "should_prune", "set_user_attr",
          "set_constraint")  # fmt: skip


def _in_turn(name: str) -> Callable[..., Any]:
    method = getattr(Trial, name)

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if evaluating():
            raise StudyError(
                f"trial.{name}() inside evaluate of a Job: that would wait for other trials while it keeps their lane. "
                "Return the number from evaluate, and it is reported; suggest values before the Job is made"
            )
        with self._waterflow_clock.turn(self.number):
            return method(self, *args, **kwargs)

    return call


for _name in _TURNS:
    if hasattr(Trial, _name):
        setattr(_InTurn, _name, _in_turn(_name))


def _take_turns(trial: Trial, clock: VirtualClock) -> None:
    # A new object would ask the sampler again.
    trial.__class__ = _InTurn
    trial._waterflow_clock = clock  # type: ignore[attr-defined]
