"""One group of jobs in the process of a device: training, what is told of it, checkpoints, stops."""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import logging
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from waterflow import _C
from waterflow.cluster.backend import How, Part, Request
from waterflow.cluster.pace import Pace, Seen
from waterflow.cluster.payload import read_result, unpack, write_result
from waterflow.cluster.shared_folder import Fenced, SharedFolder
from waterflow.cluster.submission import Priority
from waterflow.errors import CheckpointError, JobCancelled
from waterflow.executor.cancel import UserCode
from waterflow.executor.engine import Engine, within
from waterflow.job import Job, JobResult
from waterflow.training.checkpoint import Checkpoint
from waterflow.training.engine_lease import LoopLease
from waterflow.training.runner import JobRunner, Task, draw_seed

logger = logging.getLogger("waterflow")

AGAIN_SECONDS = 0.5
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

T = TypeVar("T")


def is_full(error: BaseException | None) -> bool:
    """Return whether an error, or one that caused it, says that the disk or the quota is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


def when_there_is_room(what: str, write: Callable[[], T], given_up: Callable[[], bool] = lambda: False) -> T:
    """Call ``write`` until it does not fail for want of room; return its result. Its other errors are raised.

    ``given_up`` returns True once the result is no longer wanted; then the error is raised.
    """
    said = False
    while True:
        try:
            return write()
        except Exception as error:
            if not is_full(error) or given_up():
                raise
            if not said:
                logger.warning("%s cannot be written, and waits until there is room: %s", what, error)
            said = True
        time.sleep(AGAIN_SECONDS)


SAVING_SHARE = 0.05  # of a group's time at most goes into periodic checkpoints
AFTER_A_LOSS = 0.125  # factor on the time between two saves, for each lost device
LEAST_PAUSE = 1.0  # seconds between two saves after many losses
PATIENCE = 2.0  # seconds for a cancelled job's data or evaluation to return
LONGEST_REASON = 4000  # characters

_count = itertools.count(1)  # of files that this process makes


@dataclass(frozen=True)
class Process:
    """The process that a group runs in."""

    node: str
    epoch: int
    folder: SharedFolder
    engine: Engine


class RunningGroup:
    """The jobs of one run, until it has ended. Thread-safe.

    ``part`` is what the device tells of it; ``tell`` is called, from threads of its own, when that has news.
    """

    def __init__(self, start: Request, process: Process, tell: Callable[[], None], fenced: Callable[[], None]) -> None:
        self.id, self.run = start.id, start.run
        self.part = Part(start.id, start.run, "beginning", start.priority, held=start.held, quota=start.quota)
        self._held_by = {"asked"} if start.held else set()
        self._held_since, self._was_held = time.monotonic(), 0.0  # seconds
        self._process = process
        self._tell = tell
        self._fenced = fenced
        self._jobs: dict[int, Job | Task] = {}
        self._runners: dict[int, JobRunner] = {}
        self._results: dict[int, JobResult] = {}
        self._states: dict[int, Checkpoint] = {}  # checkpoints of jobs that have not begun
        self._reached: dict[int, int] = {}  # steps of jobs that do not train, and steps from which others resumed
        self._seeds: list[int] = []
        self._length: int | None = None  # steps of all jobs
        self._user_code = UserCode()
        self._halted: How | None = None
        self._unsaved: dict[int, str] = {}
        self._lock = threading.Lock()
        self._saving = threading.Lock()
        self._next_save: float | None = None
        self._pause = 0.0  # seconds between two saves
        self._lost = 0  # how many starts before this one ended with a lost device
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._run, name=self.id, daemon=True)

    def start(self, past: int = 0) -> None:
        """Begin to train on a thread of its own; a run that is not above ``past``, the newest forgotten one, is refused."""
        if self.run <= past:
            self._end("refused", f"run {past} of it was here before")
            return
        try:
            self._thread.start()
        except RuntimeError as error:
            self._end("refused", str(error))

    # -- requests

    def halt(self, suspend: bool) -> None:
        """Stop all jobs after their current steps; with ``suspend``, save them first. Returns at once.

        A group that is being suspended can still be cancelled. User code of a cancelled group that does not return is
        interrupted.
        """
        how: How = "suspended" if suspend else "cancelled"
        with self._lock:
            if self.part.stopping in (how, "cancelled"):
                return
            self._halted = how
            runners = list(self._runners.items())
        # If there are no more threads, it does not tell that it stops, and is asked again.
        for number, runner in runners:
            stop = self._suspend_one if suspend else self._cancel_one
            threading.Thread(target=stop, args=(number, runner), daemon=True).start()
        if self.part.phase == "beginning" and not suspend:
            threading.Thread(target=self._break_off_beginning, daemon=True).start()
        self._change(stopping=how)

    def save(self) -> None:
        """Write a checkpoint of each job that trains. Waits for the ends of current steps."""
        with self._saving:
            with self._lock:
                runners = {} if self._halted else dict(self._runners)
            saved = False
            took = 0.0
            for number, runner in runners.items():
                try:
                    count = next(_count)  # before the snapshot, so that a later snapshot has a higher number
                    state = runner.snapshot()
                    began = time.monotonic()  # waiting for the end of a step costs no training time
                    self._write(number, state, count)
                    took += time.monotonic() - began
                    saved = True
                    with self._lock:
                        self._reached[number] = max(self._reached.get(number, 0), state.steps)
                except Fenced:
                    return self._fenced()
                except Exception as error:  # it ended meanwhile, or its state cannot be captured: it trains on
                    logger.info("no checkpoint of job %r: %s", self._jobs[number].name, error)
            if saved:
                self._process.folder.drop_states(self.id)
                with self._lock:
                    reached = sum(self._reached.values())  # without the steps that jobs have trained since
                self._change(saved=reached)
            # Saving that took t seconds is followed by t / SAVING_SHARE seconds without, whatever the configured
            # interval.
            self._next_save = max(self._next_save or 0.0, time.monotonic() + took / SAVING_SHARE)

    def save_if_due(self, every: float) -> None:
        """Save on a thread of its own if the last save, or the start, was so long ago.

        ``every`` is the time between two saves in seconds. After each lost device it begins shorter, and doubles up to
        ``every``.
        """
        now = time.monotonic()
        if not self._pause:
            self._pause = max(min(LEAST_PAUSE, every), every * AFTER_A_LOSS**self._lost)
        if self._next_save is None:
            self._next_save = now + self._pause
        if now >= self._next_save and not self._saving.locked() and self.part.saved != self.steps():
            self._pause = min(2 * self._pause, every)
            self._next_save = now + self._pause
            threading.Thread(target=self.save, daemon=True).start()

    def set(self, priority: Priority, quota: int | None) -> None:
        """Set the priority of all jobs in the engine, and the bytes of each unless ``quota`` is None."""
        self._change(priority=priority, quota=quota)
        with self._lock:
            runners = list(self._runners.values())
        for runner in runners:
            self._set(runner)

    def _set(self, runner: JobRunner) -> None:
        quota = self.part.quota  # it may be above the limit of this device: then it is all of it
        runner.lease.set(self.part.priority, None if quota is None else min(quota, self._process.engine.limit))

    def hold(self, by: str, held: bool) -> None:
        """Let its jobs begin no further step, or go on, as ``by`` wants it: they are held while anybody wants it.

        "asked" is the scheduler, and shows in the part. Returns at once.
        """
        with self._lock:
            if (by in self._held_by) == held:
                return
            before, now = bool(self._held_by), time.monotonic()
            (self._held_by.add if held else self._held_by.discard)(by)
            for runner in self._runners.values():
                self._hold(runner)
            if before != bool(self._held_by):
                self._was_held += 0.0 if held else now - self._held_since
                self._held_since = now
        if by == "asked":
            self._change(held=held)

    def _hold(self, runner: JobRunner) -> None:
        # For a measurement, which is short, nobody gives up memory.
        runner.lease.hold(bool(self._held_by), "asked" in self._held_by)

    def _give_up(self) -> None:
        # A loop has no checkpoint: it is begun anew later. Called with the engine's locks held.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=self.halt, args=(True,), daemon=True).start()

    def steps(self) -> int:
        """Return the steps of all jobs, counted from their beginning."""
        with self._lock:
            reached = dict(self._reached)
            for number, runner in self._runners.items():
                reached[number] = max(reached.get(number, 0), runner.steps)
            return sum(reached.values())

    def seen(self) -> Seen:
        """Return what its jobs have done so far."""
        with self._lock:
            runners, held_by = list(self._runners.values()), set(self._held_by)
        protected = self.part.priority == "guaranteed" and "asked" not in held_by
        return Seen(self.steps(), sum(map(_waited, runners)), self.part.phase == "training" and not held_by, protected)

    def measure(self, pace: Pace) -> None:
        """Note its progress, and its pace."""
        with self._lock:
            runners = list(self._runners.values())
        # Not told at once: it goes with the next sign of life.
        self._change(False, **self._progress(), memory=sum(map(_memory, runners)), **asdict(pace))

    def _progress(self) -> dict[str, Any]:
        steps = self.steps()
        return {"steps": steps, "fraction": min(1.0, steps / self._length) if self._length else None, "seconds": self._seconds()}

    def _seconds(self) -> float:
        # Since the start, without the time in which it was held.
        with self._lock:
            now = time.monotonic()
            return now - self._began - self._was_held - (now - self._held_since if self._held_by else 0.0)

    # -- its threads

    def _run(self) -> None:
        folder, epoch = self._process.folder, self._process.epoch
        how: How = "failed"
        reason = ""
        try:
            try:
                self._begin()
                how, reason = self._train()
            except Fenced:
                raise
            except JobCancelled:  # while it was unpacked
                how = "cancelled"
            except Exception as error:
                how, reason = "failed", f"{type(error).__name__}: {error}"
            with self._saving:  # a save under way leaves nothing behind the end; later ones find no job
                pass
            # The end is noted in the shared folder, where it is found if this process ends before it has told of it.
            note = folder.own(epoch) / f"{next(_count)}.ended"
            told = json.dumps({"how": how, "reason": reason[:LONGEST_REASON], "steps": self.steps()})

            def write() -> None:
                note.write_text(told)
                folder.publish(epoch, note, folder.ended(self.id, self.run))

            when_there_is_room(f"the end of {self.id!r}", write)
            if how == "completed":
                folder.drop_states(self.id, keep=0)  # it is never resumed
        except (Fenced, FileNotFoundError):
            return self._fenced()
        except Exception:
            logger.exception("the end of %r is told, and could not be noted", self.id)
        self._end(how, reason[:LONGEST_REASON])

    def _end(self, how: How, reason: str) -> None:
        self._change(phase="ended", how=how, reason=reason, **self._progress())

    def _change(self, tell: bool = True, **fields: Any) -> None:
        with self._lock:
            if self.part.phase != "ended":
                self.part = replace(self.part, **fields)
        if tell:
            self._tell()

    def _begin(self) -> None:
        folder, id = self._process.folder, self.id
        self._lost = folder.lost_before(id, self.run)
        with self._user_code.here():
            jobs = unpack(folder.payload(id, self.run).read_bytes())
        # Jobs without a seed get the same ones wherever and whenever the group starts.
        numbers = torch.Generator().manual_seed(zlib.crc32(id.encode()))
        seeds = [draw_seed(numbers) for _ in jobs]
        states: dict[int, Checkpoint] = {}
        for number, job in enumerate(jobs):
            result = folder.last_result(id, number)
            state = folder.last_state(id, number)
            # A job that had ended before the group was lost is not trained again.
            if result is not None and (known := read_result(result)).status != "cancelled":
                self._results[number] = known
            elif state is not None:
                states[number] = _loaded(state, None if isinstance(job, Task) else job.name)
        self._jobs, self._states = dict(enumerate(jobs)), states
        self._length = _length(jobs)
        self._reached = {number: known.steps for number, known in (states | self._results).items()}
        self._seeds = seeds
        self.measure(Pace())
        self._change(phase="training")

    def _train(self) -> tuple[How, str]:
        # More jobs at once than lanes, so that a lane is busy while another job evaluates or reads data.
        at_once = 2 * self._process.engine.lanes
        with ThreadPoolExecutor(at_once, thread_name_prefix=self.id) as threads:
            for done in [threads.submit(self._drive, n) for n in self._jobs if n not in self._results]:
                done.result()
        if self._halted is not None and len(self._results) < len(self._jobs):
            return self._halted, "; ".join(why for n, why in self._unsaved.items() if n not in self._results)
        failed = [result for result in self._results.values() if result.status == "failed"]
        reasons = [f"job {result.name!r}: {type(result.error).__name__}: {result.error}" for result in failed]
        return ("failed" if failed else "completed"), "; ".join(reasons)

    def _drive(self, number: int) -> None:
        process = self._process
        with self._lock:
            if self._halted is not None:
                return
            job, seed, state = self._jobs[number], self._seeds[number], self._states.pop(number, None)
            runner = (
                job.runner(process.engine, seed, state)
                if isinstance(job, Task)
                else JobRunner(job, process.engine, seed=seed, resume=state)
            )
            if isinstance(runner.lease, LoopLease):
                runner.lease.give_up = self._give_up
            self._set(runner)
            self._hold(runner)
            self._runners[number] = runner
        result: JobResult | None = None
        try:
            # Building the model and evaluation run on this thread, not on a lane.
            _C.set_threads_here(process.engine.threads_per_lane)
            with within(process.engine):
                result = runner.run()
            if result.status == "cancelled" and self._halted == "suspended":
                return
            ended = result
            written = process.folder.own(process.epoch) / f"{next(_count)}.result"
            to = process.folder.result(self.id, number, self.run, process.epoch)

            def write() -> None:
                write_result(ended, written)
                process.folder.publish(process.epoch, written, to)

            when_there_is_room(f"the result of {job.name!r}", write)
        finally:
            with self._lock:
                # Under one lock: ``steps`` counts a job as running or as reached, never as both or neither.
                del self._runners[number]
                steps = result.steps if result is not None else runner.steps
                self._reached[number] = max(self._reached.get(number, 0), steps)
                if result is not None and result.status != "cancelled":
                    self._results[number] = result

    def _suspend_one(self, number: int, runner: JobRunner) -> None:
        try:
            state, count = runner.suspend(), next(_count)
            when_there_is_room(
                f"the checkpoint of {self._jobs[number].name!r}",
                lambda: self._write(number, state, count),
                given_up=lambda: self._halted == "cancelled",
            )
        except Fenced:
            self._fenced()
        except Exception as error:  # it has ended meanwhile, or its state cannot be taken
            self._unsaved[number] = f"no checkpoint of job {self._jobs[number].name!r}: {error}"
        runner.stop(str(self._halted))

    def _cancel_one(self, number: int, runner: JobRunner) -> None:
        # ``stop`` waits for the end of a step, which user code that hangs never reaches.
        threading.Thread(target=runner.stop, args=("cancelled",), daemon=True).start()
        self._thread.join(PATIENCE)
        with self._lock:
            late = self._runners.get(number) is runner
        if late:
            runner.break_off()

    def _break_off_beginning(self) -> None:
        self._thread.join(PATIENCE)
        if self.part.phase == "beginning":
            self._user_code.break_off()

    def _write(self, number: int, state: Checkpoint, count: int) -> None:
        process = self._process
        written = process.folder.own(process.epoch) / f"{count}.checkpoint"
        state.save(written)
        process.folder.publish(process.epoch, written, process.folder.state(self.id, number, self.run, process.epoch, count))


def _loaded(file: Path, job: str | None) -> Checkpoint:
    try:
        return Checkpoint.load(file, job=job)
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}. Submit the job under another id: with checkpoint= and an older file of {file.parent}, or anew"
        ) from error


def _length(jobs: list[Job | Task]) -> int | None:
    # The data is the user's object: its length may be unknown, or raise anything.
    with contextlib.suppress(Exception):
        return sum(len(job.data) * job.epochs for job in jobs)  # type: ignore[arg-type, misc, union-attr]
    return None


def _memory(runner: JobRunner) -> int:
    # A job without a captured step has no plan to tell its memory.
    with contextlib.suppress(AttributeError, RuntimeError):  # not captured yet, or just ended
        plan = runner.step.plan  # type: ignore[union-attr]
        return int(plan.persistent + plan.batch + plan.height)
    return 0


def _waited(runner: JobRunner) -> float:
    with contextlib.suppress(AttributeError):  # it has no step yet, or is one of a loop
        return runner.step.account.get("waiting for memory", 0.0)  # type: ignore[union-attr]
    return 0.0
