"""A folder of checkpoints, from which ``train`` resumes its jobs after the process has ended."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import fields
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from waterflow.errors import CheckpointError, InvalidJobError
from waterflow.executor.data.loader import why_not_again
from waterflow.job import Job, JobResult
from waterflow.training.checkpoint import Checkpoint, read, write
from waterflow.training.safepoint import JobEnded

logger = logging.getLogger("waterflow")

_STATE, _RESULT, _SEEDS = "step-{:010d}.state", "result.state", "seeds.json"
# Fields of a result that are stored; the others contain objects that no file may have, or belong to the process.
_KEPT = frozenset(field.name for field in fields(JobResult)) - {"error", "traceback", "recomputed", "state_dict"}


class Checkpoints:
    """A folder to which the jobs of one ``train`` call are written, and how often.

    A second call with the same folder, and with jobs of the same names, resumes where the first one was interrupted, failed, or
    was killed; completed jobs are not trained again. One call at a time may use a folder.

    Args:
        folder: Is created if missing; has a folder for each job.
        every: Seconds between two checkpoints of a job; None: only at the end and at Ctrl-C.
        steps: Also write after this many steps.
        keep: The number of checkpoints to keep per job. If the last one is damaged, the one before is used.

    Raises InvalidJobError for invalid numbers.
    """

    def __init__(
        self, folder: str | os.PathLike[str], *, every: float | None = 60.0, steps: int | None = None, keep: int = 2
    ) -> None:
        self.folder = Path(folder)
        if every is not None and not every > 0:
            raise InvalidJobError(f"every must be a positive number of seconds, or None; got {every!r}")
        for name, value in (("steps", steps), ("keep", keep)):
            if not (value is None and name == "steps") and (not isinstance(value, int) or value < 1):
                raise InvalidJobError(f"{name} of checkpoints must be a positive integer; got {value!r}")
        self.every, self.steps, self.keep = every, steps, keep

    @contextlib.contextmanager
    def opened(self, jobs: Sequence[Job]) -> Iterator[None]:
        """Lock the folder for one call. Raises CheckpointError if another call has it, or if a job could not be resumed."""
        for job in jobs:
            # Before anything trains: a checkpoint that cannot be resumed is noticed only after a crash.
            if (why := why_not_again(f"data of job {job.name!r}", job.data, job.data)) is not None:
                raise CheckpointError(why)
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "in-use", "w") as lock, _closed_in_forks(lock.fileno()):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise CheckpointError(
                    f"checkpoints in {self.folder} are in use by another call; wait for its end, or give this one a folder of "
                    "its own"
                ) from None
            for left in self.folder.glob("**/.*.part"):  # of a process that was killed while it wrote
                left.unlink(missing_ok=True)
            yield

    def seeds(self, jobs: Sequence[Job], drawn: Sequence[int]) -> list[int]:
        """Return the jobs' seeds: those of the first call, and ``drawn`` ones for new jobs. Raises CheckpointError."""
        path = self.folder / _SEEDS
        known: dict[str, int] = {}
        try:
            known = json.loads(path.read_text())
        except FileNotFoundError:
            pass
        except ValueError:
            raise CheckpointError(f"{path} is damaged; remove the folder to start anew") from None
        # Stored before the first step, as a job may be killed before its first checkpoint and must then begin alike.
        found = [seed if job.seed is not None else known.get(job.name, seed) for job, seed in zip(jobs, drawn)]
        if (all_ := known | {job.name: seed for job, seed in zip(jobs, found)}) != known:
            try:
                replace_text(path, json.dumps(all_))
            except OSError as error:
                logger.warning(
                    "%s could not be written: %s. Training goes on; a second call draws other seeds for jobs that have neither a "
                    "checkpoint nor a result by then. Free space there, or pass Job(seed=)",
                    path,
                    error,
                )
        return found

    def load(self, job: Job) -> Checkpoint | JobResult | None:
        """Return the job's result, its last whole checkpoint, or None if it has neither. Raises CheckpointError."""
        if self.has_result(job.name):
            try:
                found = self.result(job.name, job=job.name)
                _check_result(job, found)
                return found
            except CheckpointError as error:
                raise self._anew(job.name, error) from error
        return self.last(job.name, job.name)

    def result(self, name: str, *, job: str | None = None) -> JobResult:
        """Return the result that ``keep_result`` wrote. Raises CheckpointError, also for one that is not of ``job``; OSError."""
        content = read(self._result_file(name), job=job)
        content |= {"metrics": tuple(content["metrics"]), "losses": tuple(content["losses"])}
        known = {field.name for field in fields(JobResult)}  # fields that an earlier version had are left out
        return JobResult(**{field: value for field, value in content.items() if field in known})

    def last(self, name: str, job: str) -> Checkpoint | None:
        """Return the last whole checkpoint of ``job`` in the folder of ``name``, or None. Raises CheckpointError."""
        last: CheckpointError | None = None
        for path in reversed(self.states(name)):
            try:
                return Checkpoint.load(path, job=job)
            except CheckpointError as error:
                logger.warning("%s; an older checkpoint is looked for", error)
                last = last or error
        if last is not None:
            raise self._anew(name, last) from last
        return None

    def _anew(self, name: str, error: CheckpointError) -> CheckpointError:
        return CheckpointError(f"{error}. To start job {name!r} anew, remove {self.of(name)}")

    def states(self, name: str) -> list[Path]:
        """Return the paths of a job's checkpoints, the latest last."""
        return sorted(self.of(name).glob("step-*.state"))

    def of(self, name: str) -> Path:
        """Return the folder of a job. Different names have different folders."""
        # Readable for people; the hash keeps names apart that look alike on the disk, such as a/b and a_b.
        plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:48]
        return self.folder / f"{plain}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"

    def save(self, name: str, checkpoint: Checkpoint, *, durable: bool = True) -> None:
        """Write a checkpoint and remove the oldest ones. ``durable`` and errors as in ``Checkpoint.save``."""
        folder = self.of(name)
        folder.mkdir(exist_ok=True)
        checkpoint.save(folder / _STATE.format(checkpoint.steps), durable=durable)
        for old in self.states(name)[: -self.keep]:
            old.unlink(missing_ok=True)

    def keep_result(self, name: str, result: JobResult) -> None:
        """Write the result of a job that has ended well. Raises OSError, CheckpointError."""
        self.of(name).mkdir(exist_ok=True)
        content: dict[str, Any] = {field: getattr(result, field) for field in _KEPT}
        content |= {"metrics": list(result.metrics), "losses": list(result.losses), "state_dict": result.state_dict}
        write(self._result_file(name), content, {"job": result.name, "steps": result.steps})

    def remove(self, name: str, *, result: bool = False) -> None:
        """Remove a job's checkpoints; with ``result`` its result, too."""
        for old in self.states(name):
            old.unlink(missing_ok=True)
        if result:
            self._result_file(name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it never was, or has what is not ours
                self.of(name).rmdir()

    def has_result(self, name: str) -> bool:
        """Return True if there is a result in the folder of ``name``."""
        return self._result_file(name).exists()

    def _result_file(self, name: str) -> Path:
        return self.of(name) / _RESULT


def replace_text(path: Path, text: str) -> None:
    """Write a text file: all of it, or nothing. Raises OSError."""
    part = path.parent / f".{path.name}.part"
    try:
        part.write_text(text)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


_LOCKS: set[int] = set()


@contextlib.contextmanager
def _closed_in_forks(file: int) -> Iterator[None]:
    # A worker that loads data, which is forked, would hold the lock for seconds behind the death of this process.
    _LOCKS.add(file)
    try:
        yield
    finally:
        _LOCKS.discard(file)


def _close_locks() -> None:
    while _LOCKS:  # a fork of the fork must not close what has their numbers then
        os.close(_LOCKS.pop())


os.register_at_fork(after_in_child=_close_locks)


def steps_of(state: Path) -> int:
    """Return the number of steps that the job had completed at the checkpoint in this file."""
    return int(state.stem.removeprefix("step-"))


def _check_result(job: Job, result: JobResult) -> None:
    epochs = len(result.metrics)
    if result.status == "completed" and epochs != job.epochs:
        raise _other_result(job, f"{epochs} epochs; it has {job.epochs} now")
    # A caller that passed a module expects it trained. For a function a new model is made, which shows if the weights
    # are of this job; the caller's random numbers stay as they are.
    if isinstance(job.model, nn.Module):
        model = job.model
    else:
        with torch.random.fork_rng(devices=[]):
            model = job.model()
    try:
        if result.state_dict is not None:
            model.load_state_dict(result.state_dict)
    except RuntimeError as error:
        raise _other_result(job, f"another model: {error}") from None


def _other_result(job: Job, told: str) -> CheckpointError:
    return CheckpointError(
        f"the result of job {job.name!r} is of {told}. Give the job another name, or train it in another folder"
    )


LOOK_AGAIN = 0.05  # seconds
RESULTS_AGAIN = 10.0  # seconds
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
MOST_NAMED = 5
LAST_SECONDS = 0.5  # at Ctrl-C, which returns within two seconds


class Copied(Protocol):
    """The part of a job's runner by which its state is copied."""

    job: Job

    @property
    def begun(self) -> int:
        """The number of steps that were submitted."""

    def ask_for_snapshot(self) -> Future[Checkpoint]:
        """Request a copy of the job's state."""


class Checkpointing:
    """A thread that asks jobs for their state when it is due, and writes it. Thread-safe.

    A job is paused only while its state is copied. A failed write, as on a full disk, ends no job: one warning says so, later
    checkpoints are tried again, and at the end a warning names the jobs whose last checkpoint is old.
    """

    def __init__(self, checkpoints: Checkpoints) -> None:
        self._to = checkpoints
        self._lock = threading.Lock()
        self._files = threading.RLock()  # one file at a time
        self._running: dict[Copied, tuple[float, int]] = {}  # when the job was written last, and its steps then
        self._names: dict[Copied, str] = {}  # of their folders
        self._sooner: dict[Copied, int] = {}
        self._asked: dict[Copied, Future[Checkpoint]] = {}
        self._refused: set[Copied] = set()
        self._unwritten: dict[str, Exception] = {}  # jobs whose last checkpoint or result could not be written, and why
        self._results: dict[str, JobResult] = {}  # of them, those that have ended well
        self._said: set[object] = set()  # causes that a warning has named
        self._again = 0.0  # when results are tried again
        self._hurry = False  # Ctrl-C was pressed
        self._over = threading.Event()

    @contextlib.contextmanager
    def under_way(self) -> Iterator[None]:
        """Write jobs inside; at the end write pending results, and warn of old checkpoints."""
        thread = threading.Thread(target=self._work, name="checkpoints", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join(LAST_SECONDS if self._hurry else None)
            if not self._hurry:
                self._write_results()
            self._say_what_is_old()

    def begin(self, runner: Copied, name: str, at_once: bool = False, sooner: int = 1) -> None:
        """Register a running job, whose files are in the folder of ``name``, so many times ``sooner`` than others.

        ``at_once``: write it now, as its initial state does not follow from its seed.
        """
        with self._lock:
            self._running[runner] = (time.monotonic(), runner.begun)
            self._names[runner], self._sooner[runner] = name, sooner
            if at_once:
                self._asked[runner] = runner.ask_for_snapshot()

    def end(self, runner: Copied, result: JobResult | None = None) -> None:
        """Remove a job that has ended; write its result if it ended well. Behind this nothing writes the job's state."""
        with self._lock:
            self._running.pop(runner, None)
            self._names.pop(runner, None)
            self._sooner.pop(runner, None)
            self._asked.pop(runner, None)
            self._refused.discard(runner)
        with self._files:
            if result is not None and result.status in ("completed", "pruned"):
                self._finish(result)

    def last(self) -> None:
        """Write all running jobs, as far as ``LAST_SECONDS`` allow."""
        self._hurry = True
        until = time.monotonic() + LAST_SECONDS
        with self._lock:
            asked = {self._asked.get(runner) or runner.ask_for_snapshot(): runner for runner in self._running}
        wait(asked, timeout=LAST_SECONDS)
        for made, runner in asked.items():
            # The other thread may be in a slow write, which is not waited for.
            if made.done() and self._files.acquire(timeout=max(0.0, until - time.monotonic())):
                try:
                    self._save(runner, made, durable=False)  # the process ends, not the machine
                finally:
                    self._files.release()

    def _work(self) -> None:
        while not self._over.wait(timeout=LOOK_AGAIN):
            with self._lock:
                due = [runner for runner in self._running if runner not in self._refused and self._due(runner)]
                for runner in due:
                    if runner not in self._asked:
                        self._asked[runner] = runner.ask_for_snapshot()
                done = [(runner, made) for runner, made in self._asked.items() if made.done()]
            for runner, made in done:
                self._save(runner, made)
            if self._results and time.monotonic() >= self._again:
                self._write_results()

    def _due(self, runner: Copied) -> bool:
        when, steps = self._running[runner]
        by_time = self._to.every is not None and time.monotonic() - when >= self._to.every / self._sooner[runner]
        return by_time or (self._to.steps is not None and runner.begun - steps >= self._to.steps)

    def _save(self, runner: Copied, made: Future[Checkpoint], durable: bool = True) -> None:
        with self._files:
            with self._lock:
                self._asked.pop(runner, None)
                if runner not in self._running:
                    return  # its result has been written
                name = self._names[runner]
            try:
                checkpoint = made.result()
            except JobEnded:
                return
            except Exception as error:  # its own, or of the user's state_dict()
                logger.warning("job %r trains without checkpoints: %s", name, error)
                self._refused.add(runner)
                return
            self.attempt(name, lambda: self._to.save(name, checkpoint, durable=durable))
        with self._lock:
            if runner in self._running:
                self._running[runner] = (time.monotonic(), checkpoint.steps)

    def forget(self, name: str) -> None:
        """Say nothing at the end of a job whose last state could not be written, as nobody needs it any more."""
        self._unwritten.pop(name, None)

    # -- what cannot be written

    def attempt(self, name: str, write: Callable[[], None]) -> bool:
        """Return True if ``write()`` wrote what belongs to the job; otherwise a warning says why."""
        try:
            # Files are written under another name first: if this fails, the file of before is still there. Anything is
            # caught, as the user's state_dict() may raise any error; none may end the training.
            write()
        except Exception as error:
            self._unwritten[name] = error.with_traceback(None)  # its frames hold the state
            of_all = isinstance(error, OSError | RuntimeError)  # of the disk, most likely
            # One warning for a full disk, not one per job and checkpoint.
            cause = (type(error), getattr(error, "errno", None)) if of_all else name
            log = logger.info if cause in self._said else logger.warning
            self._said.add(cause)
            advice = ". Training goes on, and later checkpoints are tried again"
            advice += f": free space in {self._to.folder}" if getattr(error, "errno", None) in FULL else ""
            log("job %r could not be written: %s%s", name, error, advice)
            return False
        if self._unwritten.pop(name, None) is not None:
            logger.info("job %r could be written again", name)
        return True

    def _finish(self, result: JobResult) -> None:
        def write() -> None:
            self._to.keep_result(result.name, result)
            self._to.remove(result.name)

        if self.attempt(result.name, write):
            self._results.pop(result.name, None)
        else:
            self._results[result.name] = result

    def _write_results(self) -> None:
        with self._files:
            for result in list(self._results.values()):
                self._finish(result)
        self._again = time.monotonic() + RESULTS_AGAIN

    def _say_what_is_old(self) -> None:
        if not self._unwritten:
            return
        told = []
        for name in self._unwritten:
            states = self._to.states(name)
            told.append(f"{name!r} ({f'step {steps_of(states[-1])}' if states else 'none'})")
        many = ", ".join(told[:MOST_NAMED]) + (f" and {len(told) - MOST_NAMED} more" if len(told) > MOST_NAMED else "")
        logger.warning(
            "the last checkpoints in %s are old, or missing, because later ones could not be written (%s): %s. The results of this "
            "call are complete; a second call would train again from these steps",
            self._to.folder,
            next(reversed(self._unwritten.values())),
            many,
        )
