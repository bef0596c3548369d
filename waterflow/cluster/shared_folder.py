"""The folder that all nodes of a cluster share: unique numbers, checkpoints, results, and fences.

A process writes into a folder of its own, ``epochs/<number>``, and publishes a file by moving it from there to its public
place. Fencing a process moves that folder away in one step: each of its moves either came before, and counts, or fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import socket
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from waterflow.cluster.state import make_folder
from waterflow.errors import BackendError, ClusterError

LONGEST_QUOTED = 200  # characters of a name in which dots are written as %2E
KEPT_CHECKPOINTS = 2  # of each job: one may be being read while the next is written


class Fenced(Exception):
    """The process was declared lost: it can no longer publish files."""


class SharedFolder:
    """Paths and moves in the folder. Any number of processes may use it; it keeps no state in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Create the folder and its parts, for this user alone, as files in it are unpickled. Raises BackendError."""
        parts = ("claims", "epochs", "fenced", "jobs", "logs", "nodes", "sessions")
        try:
            make_folder(self.path, parts)
        except ClusterError as error:
            raise BackendError(str(error)) from None
        for name in parts:
            (self.path / name).mkdir(mode=0o700, exist_ok=True)

    def lock(self) -> int:
        """Lock the folder for one backend; return the file whose closing, or the end of this process, unlocks it.

        Raises BackendError if another backend has the lock.
        """
        file = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise BackendError(f"another backend uses {self.path}; close it, or take another folder") from None
        return file

    # -- processes

    def new_epoch(self) -> int:
        """Return a number higher than all before, and make its folder."""
        epoch = _claim(self.path / "claims")
        (self.path / "epochs" / str(epoch)).mkdir()
        return epoch

    def new_session(self) -> int:
        """Return the number of a backend, higher than those before it."""
        return _claim(self.path / "sessions")

    def own(self, epoch: int) -> Path:
        """Return the folder in which the process of ``epoch`` writes files before it publishes them."""
        return self.path / "epochs" / str(epoch)

    def fence(self, epoch: int) -> None:
        """Keep the process of ``epoch`` from publishing anything from now on. Idempotent."""
        away = self.path / "fenced" / str(epoch)
        with contextlib.suppress(FileNotFoundError):
            # The rename is the fence; removing in place would leave a time in which single files could still be
            # published.
            os.rename(self.own(epoch), away)
        shutil.rmtree(away, ignore_errors=True)

    def is_fenced(self, epoch: int) -> bool:
        """Return whether ``fence`` was called for ``epoch``."""
        return not self.own(epoch).exists()

    def publish(self, epoch: int, written: Path, to: Path) -> None:
        """Move ``written``, a file in ``own(epoch)``, to ``to``. Raises Fenced."""
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(written, to)
        except FileNotFoundError:
            if self.is_fenced(epoch):
                raise Fenced(f"the process of epoch {epoch} was declared lost and may not write {to.name}") from None
            raise

    def log(self, node: str, epoch: int) -> Path:
        """Return the log file of a process of ``node``, and of the jobs in it."""
        return self.path / "logs" / f"{_quoted(node)}.{epoch}.log"

    def node(self, name: str) -> Path:
        """Return the file that says how to reach a node."""
        return self.path / "nodes" / f"{_quoted(name)}.json"

    # -- ids; a run is one start of an id, with a number higher than that of any run before

    def job(self, id: str) -> Path:
        """Return the folder of one id."""
        return self.path / "jobs" / _quoted(id)

    def payload(self, id: str, run: int) -> Path:
        """Return the payload file of a run."""
        return self.job(id) / f"{run}.payload"

    def last_run(self, id: str) -> int:
        """Return the highest number of a run that has a file here; 0 without one. An older table may have a lower one."""
        try:
            numbers = [path.name.split(".")[0] for kind in ("payload", "ended") for path in self.job(id).glob(f"*.{kind}")]
        except OSError as error:
            raise BackendError(f"is not started: {error}") from error
        return max((int(number) for number in numbers if number.isdigit()), default=0)

    def prepare(self, id: str, run: int, payload: bytes, anew: bool = False, checkpoint: Path | None = None) -> None:
        """Write what a run needs, and remove the payloads of earlier runs.

        With ``anew``, the checkpoints and results that are left of another job with this id are removed before; the first job
        resumes from ``checkpoint``, a file of ``Checkpoint.save``.

        Raises BackendError if there is no room, or ``checkpoint`` cannot be read.
        """
        try:
            self._prepare(id, run, payload, anew, checkpoint)
        except OSError as error:
            raise BackendError(f"is not started: {error}") from error

    def _prepare(self, id: str, run: int, payload: bytes, anew: bool, checkpoint: Path | None) -> None:
        if anew:
            for left in [*self._parts(id), *self.job(id).glob("*.ended")]:
                shutil.rmtree(left) if left.is_dir() else left.unlink(missing_ok=True)
            if checkpoint is not None:
                _write(self.state(id, 0, 0, 0, 0), lambda unfinished: shutil.copyfile(checkpoint, unfinished))
        _write(self.payload(id, run), lambda unfinished: unfinished.write_bytes(payload))
        for old in self.job(id).glob("*.payload"):
            if old != self.payload(id, run):
                old.unlink(missing_ok=True)

    def state(self, id: str, number: int, run: int, epoch: int, count: int) -> Path:
        """Return the file of the ``count``-th checkpoint that a run's process makes, of the group's job ``number``."""
        return self.job(id) / f"job-{number}" / f"{run}.{epoch}.{count}.checkpoint"

    def result(self, id: str, number: int, run: int, epoch: int) -> Path:
        """Return the result file of the group's job ``number``."""
        return self.job(id) / f"job-{number}" / f"{run}.{epoch}.0.result"

    def ended(self, id: str, run: int) -> Path:
        """Return the JSON file that says how a run ended."""
        return self.job(id) / f"{run}.ended"

    def end_of(self, id: str, run: int) -> dict[str, Any] | None:
        """Return how a run ended, as its device has noted it: ``how``, ``reason`` and ``steps``; None if it has not.

        Raises BackendError if the note cannot be read.
        """
        try:
            return dict(json.loads(self.ended(id, run).read_text()))
        except (FileNotFoundError, ValueError):  # a power cut may leave an empty file
            return None
        except OSError as error:
            raise BackendError(f"the note of its end cannot be read: {error}") from error

    def has_ended(self, id: str, run: int) -> bool:
        """Return whether there is a note of a run's end that can be read."""
        with contextlib.suppress(BackendError):
            return self.end_of(id, run) is not None
        return False

    def lost_before(self, id: str, run: int) -> int:
        """Return how many runs in a row before ``run`` have not ended: their nodes were lost."""
        ended = {file.name.split(".")[0] for file in self.job(id).glob("*.ended")}
        count = 0
        while count < run - 1 and str(run - 1 - count) not in ended:
            count += 1
        return count

    def last_state(self, id: str, number: int) -> Path | None:
        """Return the newest checkpoint of a job of the group; None before the first."""
        return max((self.job(id) / f"job-{number}").glob("*.checkpoint"), key=_age, default=None)

    def last_result(self, id: str, number: int) -> Path | None:
        """Return the newest result of a job of the group; None before the first."""
        return max((self.job(id) / f"job-{number}").glob("*.result"), key=_age, default=None)

    def drop_states(self, id: str, keep: int = KEPT_CHECKPOINTS) -> None:
        """Remove all but the newest ``keep`` checkpoints of each job of the group."""
        for part in self._parts(id):
            for old in sorted(part.glob("*.checkpoint"), key=_age)[: -keep or None]:
                old.unlink(missing_ok=True)

    def _parts(self, id: str) -> Iterator[Path]:
        yield from self.job(id).glob("job-*")


def result_files(folder: Path) -> list[Path]:
    """Return the newest result of each job of one id, in their order; ``folder`` is ``SharedFolder.job(id)``.

    Jobs that have none yet (suspended ones) are left out.
    """
    parts = sorted(folder.glob("job-*"), key=lambda part: int(part.name.removeprefix("job-")))
    newest = (max(part.glob("*.result"), key=lambda p: int(p.name.split(".")[0]), default=None) for part in parts)
    return [path for path in newest if path is not None]


def _write(to: Path, write: Callable[[Path], object]) -> None:
    # Under a name that no other process uses, and then moved as a whole: readers never see a part.
    to.parent.mkdir(parents=True, exist_ok=True)
    unfinished = to.with_name(f"{to.name}.{socket.gethostname()}.{os.getpid()}")
    write(unfinished)
    os.replace(unfinished, to)


def _claim(folder: Path) -> int:
    for number in itertools.count(1 + max(_numbers(folder), default=0)):
        with contextlib.suppress(FileExistsError):
            # Making a directory is atomic: one of several processes gets the number.
            (folder / str(number)).mkdir()
            return number
    raise AssertionError


def _numbers(folder: Path) -> list[int]:
    return [int(name) for name in os.listdir(folder) if name.isdigit()] if folder.exists() else []


def _age(path: Path) -> tuple[int, int]:
    # By numbers, as file times of several machines cannot be compared.
    run, _, count, _ = path.name.split(".")
    return int(run), int(count)


def _quoted(name: str) -> str:
    # "." and ".." are no names of files; with many dots written so a name would be too long for one.
    plain = urllib.parse.quote(name, safe="")
    quoted = plain.replace(".", "%2E")
    return quoted if len(quoted) <= LONGEST_QUOTED or not plain.strip(".") else plain
