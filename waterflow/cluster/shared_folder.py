"""The folder that all nodes of a cluster share: numbers that are given out once, checkpoints, results; and who may write.

A process writes into a folder of its own, ``epochs/<number>``, and publishes a file by moving it from there to where others
look. Who is fenced has no such folder any more: it was moved away, in one step, so that each of its moves came before, and
counts, or fails.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import socket
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

from waterflow.cluster.backend import BackendError
from waterflow.cluster.state import make_folder
from waterflow.errors import ClusterError

LONGEST_QUOTED = 200  # characters of a name in which dots are written as %2E
KEPT_CHECKPOINTS = 2  # of each job: one may be read while the next is written


class Fenced(Exception):
    """The process was declared lost: nothing that it writes counts any more."""


class SharedFolder:
    """Paths and moves in the folder. Any number of processes may use it; nothing is kept in memory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def make(self) -> None:
        """Create what is not there yet; only this user may enter it, for files in it are unpickled. Raises BackendError."""
        parts = ("claims", "epochs", "fenced", "jobs", "logs", "nodes")
        try:
            make_folder(self.path, parts)
        except ClusterError as error:
            raise BackendError(str(error)) from None
        for name in parts:
            (self.path / name).mkdir(mode=0o700, exist_ok=True)

    def lock(self) -> int:
        """The folder for one backend alone, until the file that is returned is closed, or this process ends."""
        file = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(file)
            raise BackendError(f"another backend uses {self.path}; close it, or take another folder") from None
        return file

    # -- processes

    def new_epoch(self) -> int:
        """A number higher than all before, with a folder to write into."""
        epoch = _claim(self.path / "claims")
        (self.path / "epochs" / str(epoch)).mkdir()
        return epoch

    def own(self, epoch: int) -> Path:
        """Where the process of ``epoch`` writes what it will publish."""
        return self.path / "epochs" / str(epoch)

    def fence(self, epoch: int) -> None:
        """From now on the process of ``epoch`` publishes nothing. Done twice is done once."""
        away = self.path / "fenced" / str(epoch)
        with contextlib.suppress(FileNotFoundError):
            os.rename(self.own(epoch), away)
        shutil.rmtree(away, ignore_errors=True)

    def is_fenced(self, epoch: int) -> bool:
        """Whether ``fence`` was called for it."""
        return not self.own(epoch).exists()

    def publish(self, epoch: int, written: Path, to: Path) -> None:
        """Move ``written``, which lies in ``own(epoch)``, to its place. Raises Fenced."""
        to.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.rename(written, to)
        except FileNotFoundError:
            if self.is_fenced(epoch):
                raise Fenced(f"the process of epoch {epoch} was declared lost and may not write {to.name}") from None
            raise

    def log(self, node: str, epoch: int) -> Path:
        """What the process of ``node`` printed, and the jobs in it."""
        return self.path / "logs" / f"{_quoted(node)}.{epoch}.log"

    def node(self, name: str) -> Path:
        """Where it is written how to reach a node."""
        return self.path / "nodes" / f"{_quoted(name)}.json"

    # -- ids; a run is one start of an id, with a number higher than those before

    def job(self, id: str) -> Path:
        """All that belongs to one id."""
        return self.path / "jobs" / _quoted(id)

    def new_run(self, id: str) -> int:
        """The number of another start of ``id``."""
        runs = self.job(id) / "runs"
        runs.mkdir(parents=True, exist_ok=True)
        return _claim(runs)

    def last_run(self, id: str) -> int:
        """The highest number that ``new_run`` gave; 0 if it gave none."""
        return max(_numbers(self.job(id) / "runs"), default=0)

    def payload(self, id: str, run: int) -> Path:
        """What was sent for a run."""
        return self.job(id) / f"{run}.payload"

    def send(self, id: str, run: int, payload: bytes) -> None:
        """Write the payload of a run; those of runs before are no longer needed."""
        unfinished = self.payload(id, run).with_suffix(f".{socket.gethostname()}.{os.getpid()}")
        unfinished.write_bytes(payload)
        os.replace(unfinished, self.payload(id, run))
        for old in self.job(id).glob("*.payload"):
            if old != self.payload(id, run):
                old.unlink(missing_ok=True)

    def adopt(self, id: str, checkpoint: Path) -> None:
        """Copy a checkpoint from elsewhere, as the oldest one of the first job of ``id``."""
        to = self.state(id, 0, 0, 0, 0)
        to.parent.mkdir(parents=True, exist_ok=True)
        unfinished = to.with_name(f"adopted.{socket.gethostname()}.{os.getpid()}")
        shutil.copyfile(checkpoint, unfinished)
        os.replace(unfinished, to)

    def forget(self, id: str) -> None:
        """Remove the checkpoints and results of ``id``."""
        for part in [*self._parts(id), *self.job(id).glob("*.ended")]:
            shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)

    def state(self, id: str, number: int, run: int, epoch: int, count: int) -> Path:
        """The ``count``-th checkpoint that a run's process makes; of the group's job ``number``."""
        return self.job(id) / f"job-{number}" / f"{run}.{epoch}.{count}.checkpoint"

    def result(self, id: str, number: int, run: int, epoch: int) -> Path:
        """The result of the group's job ``number``."""
        return self.job(id) / f"job-{number}" / f"{run}.{epoch}.0.result"

    def ended(self, id: str, run: int, share: int) -> Path:
        """How the part of a run that one node had came to its end, as JSON."""
        return self.job(id) / f"{run}.{share}.ended"

    def lost_before(self, id: str, run: int) -> int:
        """How many runs, one after the other, up to the one before ``run``, have not ended: their nodes were lost."""
        ended = {file.name.split(".")[0] for file in self.job(id).glob("*.ended")}
        count = 0
        while count < run - 1 and str(run - 1 - count) not in ended:
            count += 1
        return count

    def last_state(self, id: str, number: int) -> Path | None:
        """The newest checkpoint of a job of the group."""
        return max((self.job(id) / f"job-{number}").glob("*.checkpoint"), key=_age, default=None)

    def last_result(self, id: str, number: int) -> Path | None:
        """The newest result of a job of the group."""
        return max((self.job(id) / f"job-{number}").glob("*.result"), key=_age, default=None)

    def has_state(self, id: str) -> bool:
        """Whether there is a checkpoint, or the result of a part of the group."""
        return any(file.suffix in (".checkpoint", ".result") for part in self._parts(id) for file in part.iterdir())

    def drop_states(self, id: str, keep: int = KEPT_CHECKPOINTS) -> None:
        """Remove all but the newest checkpoints of each job of the group."""
        for part in self._parts(id):
            for old in sorted(part.glob("*.checkpoint"), key=_age)[: -keep or None]:
                old.unlink(missing_ok=True)

    def _parts(self, id: str) -> Iterator[Path]:
        yield from self.job(id).glob("job-*")


def result_files(folder: Path) -> list[Path]:
    """The newest result of each job of one id, in their order; ``folder`` is what ``Ended.results`` names.

    Jobs that have none yet (suspended ones) are left out.
    """
    parts = sorted(folder.glob("job-*"), key=lambda part: int(part.name.removeprefix("job-")))
    newest = (max(part.glob("*.result"), key=lambda p: int(p.name.split(".")[0]), default=None) for part in parts)
    return [path for path in newest if path is not None]


def _claim(folder: Path) -> int:
    for number in itertools.count(1 + max(_numbers(folder), default=0)):
        with contextlib.suppress(FileExistsError):
            (folder / str(number)).mkdir()
            return number
    raise AssertionError


def _numbers(folder: Path) -> list[int]:
    return [int(name) for name in os.listdir(folder) if name.isdigit()] if folder.exists() else []


def _age(path: Path) -> tuple[int, int]:
    run, _, count, _ = path.name.split(".")
    return int(run), int(count)


def _quoted(name: str) -> str:
    # "." and ".." are no names of files; with many dots written so a name would be too long for one.
    plain = urllib.parse.quote(name, safe="")
    quoted = plain.replace(".", "%2E")
    return quoted if len(quoted) <= LONGEST_QUOTED or not plain.strip(".") else plain
