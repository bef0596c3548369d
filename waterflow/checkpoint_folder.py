"""A folder of checkpoints: where the jobs of ``train`` go on after the process has ended."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from waterflow.checkpoint import Checkpoint, read, write
from waterflow.errors import CheckpointError, InvalidJobError
from waterflow.executor.data import why_not_again
from waterflow.job import Job, JobResult

logger = logging.getLogger("waterflow")

_STATE, _RESULT, _SEEDS = "step-{:010d}.state", "result.state", "seeds.json"
# Of a result; the rest has objects in it, or belongs to the process.
_KEPT = frozenset(field.name for field in fields(JobResult)) - {
    "error",
    "traceback",
    "recomputed",
    "state_dict",
}


class Checkpoints:
    """Where and how often the jobs of one ``train`` call are written.

    A second call with the same folder, and with the same jobs by their names, goes on where the first one stopped, whether
    it was interrupted, failed, or killed: jobs that have ended are not trained again. One call at a time may use a folder.

    Args:
        folder: Is made where it is missing; has a folder for each job.
        every: Seconds between two checkpoints of a job; None: only at the end and at Ctrl-C.
        steps: Steps between two, at least, where that comes first.
        keep: So many of the last checkpoints of each job stay. Where the last one is damaged, the one before is taken.
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
        """Keep the folder for one call. Raises CheckpointError where another one has it, or a job could not go on."""
        for job in jobs:
            if (why := why_not_again(f"data of job {job.name!r}", job.data, job.data)) is not None:
                raise CheckpointError(why)
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / "in-use", "w") as lock:
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
        """The seeds of jobs: those of the first call, and for jobs that are new those that were ``drawn`` now."""
        path = self.folder / _SEEDS
        known: dict[str, int] = {}
        try:
            known = json.loads(path.read_text())
        except FileNotFoundError:
            pass
        except ValueError:
            raise CheckpointError(f"{path} is damaged; remove the folder to start anew") from None
        found = [seed if job.seed is not None else known.get(job.name, seed) for job, seed in zip(jobs, drawn)]
        if (all_ := known | {job.name: seed for job, seed in zip(jobs, found)}) != known:
            try:
                self._write_seeds(path, json.dumps(all_))
            except OSError as error:
                logger.warning(
                    "%s could not be written: %s. Training goes on; a second call draws other seeds for jobs that have neither a "
                    "checkpoint nor a result by then. Free space there, or pass Job(seed=)",
                    path, error,
                )  # fmt: skip
        return found

    def _write_seeds(self, path: Path, text: str) -> None:
        part = self.folder / ".seeds.part"
        try:
            part.write_text(text)
            os.replace(part, path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise

    def load(self, job: Job) -> Checkpoint | JobResult | None:
        """Where the job stands: its result, its last checkpoint that is whole, or None. Raises CheckpointError."""
        result = self.of(job.name) / _RESULT
        if result.exists():
            try:
                return _result(job, read(result, job=job.name))
            except CheckpointError as error:
                raise self._anew(job.name, error) from error
        last: CheckpointError | None = None
        for path in reversed(self.states(job.name)):
            try:
                return Checkpoint.load(path, job=job.name)
            except CheckpointError as error:
                logger.warning("%s; an older checkpoint is looked for", error)
                last = last or error
        if last is not None:
            raise self._anew(job.name, last) from last
        return None

    def _anew(self, name: str, error: CheckpointError) -> CheckpointError:
        """The error with what to do about it."""
        return CheckpointError(f"{error}. To start job {name!r} anew, remove {self.of(name)}")

    def states(self, name: str) -> list[Path]:
        """The checkpoints of a job, the last one last."""
        return sorted(self.of(name).glob("step-*.state"))

    def of(self, name: str) -> Path:
        """The folder of a job. Unlike names have unlike folders."""
        plain = re.sub(r"[^A-Za-z0-9_-]", "_", name)[:48]
        return self.folder / f"{plain}-{hashlib.blake2b(name.encode(), digest_size=4).hexdigest()}"

    def save(self, checkpoint: Checkpoint, *, durable: bool = True) -> None:
        """Write it, and let the oldest go; as ``Checkpoint.save``."""
        folder = self.of(checkpoint.job)
        folder.mkdir(exist_ok=True)
        checkpoint.save(folder / _STATE.format(checkpoint.steps), durable=durable)
        for old in self.states(checkpoint.job)[: -self.keep]:
            old.unlink(missing_ok=True)

    def finish(self, result: JobResult) -> None:
        """The job has ended well: its result takes the place of its checkpoints."""
        folder = self.of(result.name)
        folder.mkdir(exist_ok=True)
        content: dict[str, Any] = {name: getattr(result, name) for name in _KEPT}
        content |= {"metrics": list(result.metrics), "losses": list(result.losses), "state_dict": result.state_dict}
        write(folder / _RESULT, content, {"job": result.name, "steps": result.steps})
        for old in self.states(result.name):
            old.unlink(missing_ok=True)


def steps_of(state: Path) -> int:
    """How many steps the job had done whose checkpoint the file is."""
    return int(state.stem.removeprefix("step-"))


def _result(job: Job, content: dict[str, Any]) -> JobResult:
    content |= {"metrics": tuple(content["metrics"]), "losses": tuple(content["losses"])}
    epochs, state = len(content["metrics"]), content["state_dict"]
    if content["status"] == "completed" and epochs != job.epochs:
        raise _other_result(job, f"{epochs} epochs; it has {job.epochs} now")
    if isinstance(job.model, nn.Module):
        model = job.model
    else:
        with torch.random.fork_rng(devices=[]):
            model = job.model()
    try:
        if state is not None:
            model.load_state_dict(state)
    except RuntimeError as error:
        raise _other_result(job, f"another model: {error}") from None
    known = {field.name for field in fields(JobResult)}  # what an earlier version told beside is left out
    return JobResult(**{name: value for name, value in content.items() if name in known})


def _other_result(job: Job, told: str) -> CheckpointError:
    return CheckpointError(
        f"the result of job {job.name!r} is of {told}. Give the job another name, or train it in another folder"
    )
