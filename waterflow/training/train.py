"""train(): several jobs, side by side on one device; the whole path on one page."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from typing import Any, Literal

import torch
from torch import nn

from waterflow import _C
from waterflow.errors import AuditError, InvalidJobError, explained, told, unknown
from waterflow.executor.accelerate_state import telling_of_accelerate
from waterflow.executor.cancel import BREAK_OFF_SECONDS, STOP_SECONDS, break_off_all, join_all, stop_all
from waterflow.executor.engine import Engine, within
from waterflow.executor.interrupts import remembered_interrupts
from waterflow.executor.rng import telling_of_shared_numbers
from waterflow.executor.timeline import Timeline
from waterflow.job import Job, JobResult, Metrics, Results
from waterflow.run_stats import RunStats
from waterflow.training.checkpoint import Checkpoint
from waterflow.training.checkpoint_dir import Checkpointing, Checkpoints
from waterflow.training.progress import ProgressLine
from waterflow.training.runner import JobRunner, PauseJob, draw_seed
from waterflow.training.shards.runner import ElasticRunner, memory_of_each
from waterflow.units import Mode, check_device

logger = logging.getLogger("waterflow")


class Callback:
    """Methods that ``train`` calls while it runs, from the jobs' threads, never two at a time."""

    def on_job_start(self, job: Job, runner: JobRunner | ElasticRunner) -> None:
        """Called before ``job`` starts. Other threads, too, may use ``runner``: to stop it, to copy its state, to change its devices."""

    def on_epoch_end(self, job: Job, epoch: int, metrics: Metrics) -> None:
        """Called after ``job`` was trained and evaluated for an epoch."""

    def on_job_end(self, job: Job, result: JobResult) -> None:
        """Called after ``job`` has ended, with any status."""


@explained("train", "train([model_a, model_b], loss=..., data=loader, optimizer=...)", InvalidJobError)
def train(
    jobs: Iterable[Job | nn.Module] | Job,
    *,
    device: str | torch.device = "cpu",
    devices: Sequence[str] | None = None,
    memory: int | float | str | None = None,
    lanes: int | None = None,
    threads_per_lane: int = 1,
    engine: Engine | None = None,
    max_concurrent: int | None = None,
    exact: bool = True,
    mode: Mode = "auto",
    on_error: Literal["raise", "continue"] = "raise",
    callbacks: Sequence[Callback | Callable[[JobResult], None]] = (),
    show_progress_bar: bool = False,
    timeline: Callable[[Timeline], None] | None = None,
    checkpoint: str | os.PathLike[str] | Checkpoints | None = None,
    **shared: Any,
) -> Results:
    """Train several jobs side by side on one device and return their results in the order given.

    Args:
        jobs: Jobs, or one, or plain modules that share ``loss=``, ``optimizer=``, ``data=`` (and ``epochs=``, ``evaluate=``
            and the other settings of ``Job``), passed as further keyword arguments. No job: no result.
        device: Where to train: ``"cpu"``, or a GPU: ``"cuda"``, ``"cuda:1"``. There a job's model, made anywhere, is moved to it
            before its optimizer is made, and stays there; batches are brought ahead of their steps.
        devices: Where to train jobs that have ``shards``, a process for each: ``["cpu:0", "cpu:1"]`` are two cores (each of
            ``threads_per_lane``) of the ones that this process may run on. ``set_devices()`` of a job's runner changes them meanwhile.
            A device whose process dies is left out. No bit of a result depends on any of that. Other jobs train on ``device``.
            ``memory`` is the limit of each device, and on the CPU by default divided among them.
        memory: The limit for all jobs together: bytes, a share of the free memory (0.8 by default), or ``"4GiB"``.
        lanes: The number of steps that run at the same time; default: one per core that this process may use
            (its affinity and its control group count), less where threads_per_lane is more than 1.
        threads_per_lane: Threads inside one operation, on each lane. The number affects the last bits of results.
        engine: An open engine to train on, with its own device, limit, lanes and mode.
        max_concurrent: The most jobs at the same time; default: twice the lanes.
        exact: Every job ends with the bits that it would have alone. ``False`` allows other kernels if they are measured to be
            faster, such as oneDNN for large matrix products; results then differ by rounding.
        mode: ``"lanes"`` runs steps side by side, ``"turns"`` one at a time; ``"auto"`` measures what is faster.
            ``Results.decisions`` has the outcome.
        on_error: ``"raise"`` stops the others when a job fails and raises its error; ``"continue"`` leaves the error
            in the job's result, as an ``AuditError`` always is: that is a fault of waterflow, and costs one job alone.
        callbacks: ``Callback`` objects, or functions that are called with each result.
        show_progress_bar: One line that counts jobs, where there is a terminal.
        timeline: Called at the end with the record of the run, to save its pictures.
        checkpoint: A folder, or ``Checkpoints``, to which jobs are written while they train, and at Ctrl-C as far as two seconds
            allow. A second call with it resumes where the first one stopped, and returns the results of jobs that had ended;
            callbacks are called only for what happens now. ``Checkpoint`` says what ends bitwise equal.

    Raises:
        InvalidJobError: Jobs cannot be trained as given: two share a module, or a name; or this machine lacks ``device``.
        MemoryLimitError: A job does not fit (with ``on_error="raise"``).
        CheckpointError: Checkpoints are damaged or of other jobs, or a job could not be resumed from one.
    """
    given = _as_jobs(jobs, shared)
    _check_settings(max_concurrent, callbacks)
    if on_error not in ("raise", "continue"):
        raise InvalidJobError(f"on_error must be 'raise' or 'continue'; got {on_error!r}")
    _check_together(given)
    if not given:
        return Results()
    if engine is None:  # before there is a folder of checkpoints
        check_device(device)
    limit, parts = memory_of_each(given, devices, memory, max_concurrent)
    with contextlib.ExitStack() as stack:
        if checkpoint is not None and not isinstance(checkpoint, Checkpoints):
            checkpoint = Checkpoints(checkpoint)
        if checkpoint is not None:
            stack.enter_context(checkpoint.opened(given))
        if engine is None:
            engine = stack.enter_context(Engine(device, limit, lanes, threads_per_lane, exact=exact, mode=mode))
        if timeline is not None:
            engine.native.record_spans(True)
        with ProgressLine(len(given), "jobs", show_progress_bar) as progress:
            on = (devices, limit, parts) if devices is not None else None
            results = _Training(given, engine, max_concurrent, on_error, callbacks, progress, checkpoint, on).run()
        if timeline is not None:
            timeline(Timeline.of(engine))
    return results


class _Training:
    """Runs the jobs of one call, a thread per running job; the next job starts when one ends."""

    def __init__(
        self,
        jobs: list[Job],
        engine: Engine,
        max_concurrent: int | None,
        on_error: str,
        callbacks: Sequence[Callback | Callable[[JobResult], None]],
        progress: ProgressLine,
        checkpoints: Checkpoints | None,
        on_devices: tuple[Sequence[str], int | float | str | None, int] | None = None,
    ) -> None:
        self._on_devices = on_devices  # and the memory of each
        self._checkpoints = checkpoints
        self._jobs = jobs
        self._engine = engine
        self._at_once = max_concurrent if max_concurrent is not None else 2 * engine.lanes
        self._on_error = on_error
        self._callbacks = callbacks
        self._progress = progress
        self._results: dict[int, JobResult] = {}
        self._decided, self._accounts, self._began = len(engine.decisions), len(engine.accounts), time.perf_counter()
        self._running: dict[int, JobRunner | ElasticRunner] = {}
        self._waiting = deque(enumerate(jobs))
        # Drawn now: while jobs run, drawing from torch's generator means their own.
        self._seeds = [job.seed if job.seed is not None else draw_seed() for job in jobs]
        self._resume: dict[int, Checkpoint] = {}
        self._writing = Checkpointing(checkpoints) if checkpoints is not None else None
        if checkpoints is not None:
            self._go_on(checkpoints)
        self._lock = threading.Lock()
        # Not _lock: a callback may take long, and other jobs must be able to end meanwhile.
        self._telling = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._failure: BaseException | None = None

    def _go_on(self, checkpoints: Checkpoints) -> None:
        self._seeds = checkpoints.seeds(self._jobs, self._seeds)
        for number, job in enumerate(self._jobs):
            found = checkpoints.load(job)
            if isinstance(found, JobResult):
                self._results[number] = found
                self._progress.advance()
            elif found is not None:
                self._resume[number] = found
        self._waiting = deque(entry for entry in self._waiting if entry[0] not in self._results)
        if self._results:
            logger.warning(
                "%d jobs had ended in %s, and their stored results are returned; to train them with other settings, name "
                "another folder",
                len(self._results),
                checkpoints.folder,
            )

    def run(self) -> Results:
        with (
            self._engine.reservations.retain_pages(),
            self._writing.under_way() if self._writing is not None else contextlib.nullcontext(),
        ):
            return self._run()

    def _run(self) -> Results:
        threads: list[threading.Thread] = []
        try:
            with remembered_interrupts() as check_interrupt, self._lock:
                while self._waiting or self._running:
                    fresh = []
                    while self._waiting and self._failure is None and len(self._running) < self._at_once:
                        number, job = self._waiting.popleft()
                        self._running[number] = self._runner(number, job)
                        fresh.append(threading.Thread(target=self._drive, args=(number,), name=job.name, daemon=True))
                    threads += fresh
                    for thread in fresh:
                        thread.start()
                    if self._failure is not None and not self._running:
                        break
                    # With a timeout, so that Ctrl-C is noticed while all jobs run.
                    self._changed.wait(timeout=0.1)
                    check_interrupt()
        except BaseException:
            if self._writing is not None:
                self._writing.last()
            # In this order: ask for the end at a boundary, wait, then interrupt code of the user's that does not end.
            self._stop_all("interrupted")
            join_all(threads, STOP_SECONDS)
            break_off_all(list(self._running.values()), threads, BREAK_OFF_SECONDS)
            raise
        else:
            join_all(threads, BREAK_OFF_SECONDS)
        if self._failure is not None:
            raise self._failure
        decisions = [str(decision) for decision in self._engine.decisions[self._decided :]]
        stats = RunStats.of(self._engine, time.perf_counter() - self._began, self._accounts)
        return Results((self._results[number] for number in range(len(self._jobs))), decisions, stats)

    def _runner(self, number: int, job: Job) -> JobRunner | ElasticRunner:
        def on_epoch(epoch: int, metrics: Metrics) -> None:
            with self._telling:
                for callback in self._callbacks:
                    if isinstance(callback, Callback):
                        with _no_pause(job):
                            callback.on_epoch_end(job, epoch, metrics)

        own: dict[str, Any] = {"seed": self._seeds[number], "resume": self._resume.pop(number, None)}
        runner: JobRunner | ElasticRunner
        if self._on_devices is not None and job.shards > 1:
            runner = ElasticRunner(
                job, self._engine, *self._on_devices, on_epoch, **own, last_checkpoint=lambda: self._stored(job)
            )
        else:
            runner = JobRunner(job, self._engine, on_epoch, **own)
        if self._writing is not None:
            self._writing.begin(runner, job.name, isinstance(job.model, nn.Module))
        return runner

    def _stored(self, job: Job) -> Checkpoint | None:
        found = self._checkpoints.load(job) if self._checkpoints is not None else None
        return found if isinstance(found, Checkpoint) else None

    def _drive(self, number: int) -> None:
        job, runner = self._jobs[number], self._running[number]
        failure: BaseException | None = None
        try:
            _C.set_threads_here(self._engine.threads_per_lane)  # or eager code would take the cores of lanes
            with self._telling:
                for callback in self._callbacks:
                    if isinstance(callback, Callback):
                        callback.on_job_start(job, runner)
            beside = f"job {job.name!r}", lambda: len(self._running) > 1
            with within(self._engine), telling_of_shared_numbers(*beside), telling_of_accelerate(*beside):
                result = self._results[number] = runner.run()
            if self._writing is not None:
                self._writing.end(runner, result)
            if result.status == "failed":
                logger.warning("job %r failed: %s", job.name, told(result.error))
                if self._on_error == "raise" and not isinstance(result.error, AuditError):
                    failure = result.error
            self._tell(job, result)
        except BaseException as error:
            failure = failure or error
        with self._lock:
            del self._running[number]
            if failure is not None and self._failure is None:
                self._failure = failure
            stop = self._failure is not None
            self._changed.notify_all()
        self._progress.advance()
        if stop:
            self._stop_all("another job failed")

    def _tell(self, job: Job, result: JobResult) -> None:
        with self._telling:
            for callback in self._callbacks:
                if isinstance(callback, Callback):
                    callback.on_job_end(job, result)
                else:
                    callback(result)

    def _stop_all(self, reason: str) -> None:
        with self._lock:
            self._waiting.clear()
            stop_all(self._running.values(), reason)


@contextlib.contextmanager
def _no_pause(job: Job) -> Iterator[None]:
    try:
        yield
    except PauseJob:
        raise InvalidJobError(
            f"a callback of train() raised PauseJob for job {job.name!r}, whose state nobody would have; pause it by "
            "runner.suspend() and resume(), of the runner that on_job_start is given"
        ) from None


_SETTINGS = frozenset(field.name for field in fields(Job)) - {"name", "model"}


def _as_jobs(jobs: Iterable[Job | nn.Module] | Job, shared: dict[str, Any]) -> list[Job]:
    if isinstance(jobs, nn.Module):
        raise InvalidJobError("train() takes a list of models; put the one you have into brackets")
    jobs = [jobs] if isinstance(jobs, Job) else jobs
    if not isinstance(jobs, Iterable):
        raise InvalidJobError(f"train() takes a Job, or a list of jobs or models; got {jobs!r}")
    strangers = sorted(shared.keys() - _SETTINGS)
    if strangers:
        first = unknown(strangers[0], shared[strangers[0]], _SETTINGS | inspect.signature(train).parameters.keys())
        end = "" if first.endswith("?") else "."
        known = ", ".join(sorted(_SETTINGS))
        raise InvalidJobError(f"train() has no setting {first}{end} Settings of plain modules are {known}")
    made: list[Job] = []
    for number, entry in enumerate(jobs):
        if isinstance(entry, Job):
            if shared:
                raise InvalidJobError(
                    f"{', '.join(shared)}: settings for plain modules, but entry {number} is a Job, which has its own"
                )
            made.append(entry)
        elif isinstance(entry, nn.Module):
            missing = [name for name in ("data", "optimizer") if name not in shared]
            if missing:
                raise InvalidJobError(
                    f"entry {number} is a plain module: pass {' and '.join(f'{m}=' for m in missing)} to train()"
                )
            made.append(Job(name=f"{type(entry).__name__}-{number}", model=entry, **shared))
        else:
            raise InvalidJobError(f"entry {number} must be a Job or a module; got {type(entry).__name__}")
    return made


def _check_settings(max_concurrent: Any, callbacks: Any) -> None:
    if max_concurrent is not None and (not isinstance(max_concurrent, int) or max_concurrent < 1):
        raise InvalidJobError(f"max_concurrent must be a positive integer, or None for twice the lanes; got {max_concurrent!r}")
    if callable(callbacks) or isinstance(callbacks, Callback):
        raise InvalidJobError("callbacks takes a list; put the one you have into brackets")


def _check_together(jobs: list[Job]) -> None:
    names: set[str] = set()
    owner: dict[int, str] = {}
    readers: dict[int, str] = {}
    for job in jobs:
        job.check()
        if job.name in names:
            raise InvalidJobError(f"two jobs are called {job.name!r}; give each a name of its own")
        names.add(job.name)
        if isinstance(job.data, Iterator):
            other = readers.setdefault(id(job.data), job.name)
            if other != job.name:
                raise InvalidJobError(
                    f"jobs {other!r} and {job.name!r} read one iterator, which gives each batch to only one of them. "
                    "Pass a list, a DataLoader, or a function that makes an iterator for each"
                )
        if isinstance(job.model, nn.Module):
            # Frozen parameters may be shared, as by LoRA adapters over one model.
            for parameter in filter(lambda p: p.requires_grad, job.model.parameters()):
                other = owner.setdefault(id(parameter), job.name)
                if other != job.name:
                    raise InvalidJobError(
                        f"jobs {other!r} and {job.name!r} share a module: each would change the other's parameters. "
                        "Give each its own, for example copy.deepcopy(model)"
                    )
