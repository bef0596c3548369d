"""Devices of this machine: one supervised process for each, reached over a Unix socket."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path

from waterflow.cluster.backend import Request
from waterflow.cluster.losses import Silence
from waterflow.cluster.nodes import OwnNodes
from waterflow.cluster.worker import END, WorkerSettings, settings_as_text
from waterflow.errors import BackendError
from waterflow.executor.memory_limit import DEFAULT_MEMORY

logger = logging.getLogger("waterflow")

READY_SECONDS = 120.0  # for all processes to begin
END_SECONDS = 2.0  # for a process to end by itself before it is killed
PAUSES = (0.0, 0.0, 1.0, 2.0, 5.0, 10.0)  # before a process that ended at once is started again
START_SECONDS = 30.0  # for one process to answer, before another one replaces it
FIRST_TRIES = 3  # for a process that ends before it was ever ready
STEADY_SECONDS = 30.0  # a process that lived so long resets the count of failures


@dataclass
class _Child:
    """The process of one device."""

    node: str
    settings: WorkerSettings
    epoch: int = 0
    pid: int = 0
    began: str = ""  # the start time of the process, in clock ticks: the system reuses process ids
    socket: str = ""
    connection: Connection | None = None
    alive: int = -1  # a pidfd: readable when the process ends, even if a child of its still has its sockets open
    popen: subprocess.Popen[bytes] | None = None
    joined: bool = False
    silence: Silence = field(default_factory=Silence)
    started: float = 0.0
    failures: int = 0
    again: float = 0.0  # when to start it again


class LocalBackend(OwnNodes):
    """A ``Backend`` over the devices of this machine.

    Each is a node, ``device-0``, ``device-1``, ... or as ``devices`` names them.

    ``folder`` contains all that the processes share (default: a temporary folder, removed at the end). ``settings`` apply to
    each device; on the CPU a ``memory`` of None is an equal part of 0.8 of the free memory. With ``device="cuda"`` each
    process sees one GPU, in the order of ``CUDA_VISIBLE_DEVICES``. ``cores`` are, for each device, the CPU cores that its
    process is pinned to. A process that is silent for ``silent_seconds`` is lost: it is killed and started again. After this
    process has ended, its children wait ``outlive`` seconds for another backend on the same folder, and then end.

    Returns when all processes are ready. Raises BackendError if they cannot be started, or the folder is in use.
    """

    def __init__(
        self,
        devices: int | Sequence[str] = 1,
        folder: str | Path | None = None,
        *,
        settings: WorkerSettings = WorkerSettings(),  # noqa: B008
        cores: Sequence[Iterable[int]] | None = None,
        silent_seconds: float = 5.0,
        outlive: float = 0.0,
    ) -> None:
        names = [f"device-{n}" for n in range(devices)] if isinstance(devices, int) else list(devices)
        if not names or len(set(names)) < len(names):
            raise BackendError(f"devices needs a positive number, or names that differ; got {devices!r}")
        if cores is not None and len(cores) != len(names):
            raise BackendError(f"cores has {len(cores)} entries for {len(names)} devices; give one for each")
        super().__init__(folder)
        self._silent = silent_seconds
        self._outlive = outlive
        if settings.memory is None and settings.device == "cpu":  # all of them have the same
            settings = replace(settings, memory=DEFAULT_MEMORY / len(names))
        self._children = {
            name: _Child(name, replace(settings, cores=tuple(cores[n])) if cores is not None else settings)
            for n, name in enumerate(names)
        }
        try:
            for child in self._children.values():
                if not self._attach(child):
                    self._begin(child)
            self._await_all()
        except BaseException:
            self.close()
            raise

    def process(self, node: str) -> int:
        """Return the process id of a node."""
        return self._children[node].pid

    # -- Nodes

    def _send(self, node: str, first: int, requests: Sequence[Request]) -> None:
        child = self._children[node]
        if child.connection is not None:
            child.connection.send((first, list(requests)))

    def end_process(self, node: str, epoch: int, why: str) -> None:
        """See ``Backend``."""
        with self._guard:
            child = self._children[node]
            if child.epoch == epoch and child.connection is not None:
                self._end(child, why)

    def _listen(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            self._look_after()
            left = deadline - time.monotonic()
            if self._heard or left <= 0 or self._closed:
                return
            self._wait(min(left, 0.1))

    # -- processes

    def _look_after(self) -> None:
        for child in self._children.values():
            with self._guard:
                if child.connection is not None:
                    gone = self._hear(child)
                    allowed = self._silent if child.joined else START_SECONDS
                    if child.silence.passed() > allowed and gone is None:
                        gone = f"its process was silent for {allowed:g} s"
                    if gone is not None:
                        self._end(child, gone)
                elif time.monotonic() >= child.again and not self._closed:
                    self._begin_again(child)

    def _wait(self, timeout: float) -> None:
        with self._guard:
            there = [child for child in self._children.values() if child.connection is not None]
            heard = [handle for child in there for handle in (child.connection, child.alive)]
        with contextlib.suppress(OSError, ValueError):  # closed meanwhile, as a process is ended
            wait(heard, timeout)  # type: ignore[arg-type]

    def _hear(self, child: _Child) -> str | None:
        """Take the states of a child; return the reason if its process has ended, else None."""
        assert child.connection is not None
        try:
            # Read before the pidfd is tested: an ended process may have left states in the socket.
            while child.connection.poll():
                state = child.connection.recv()
                child.silence.broken()
                if child.joined:
                    self._told(state)
                else:
                    child.joined = True
                    self._joined(state)
        except (EOFError, OSError):
            pass
        else:
            if not wait([child.alive], 0):
                return None
        code = child.popen.wait() if child.popen is not None and wait([child.alive], 0) else None
        return "its process ended" + (f" with {_words(code)}" if code is not None else "")

    def _begin_again(self, child: _Child) -> None:
        try:
            self._begin(child)
        except OSError as error:  # no room, or no more processes
            logger.warning("node %r cannot be started, and is tried again: %s", child.node, error)
            self._finish(child)
            child.failures += 1
            child.again = time.monotonic() + PAUSES[min(child.failures, len(PAUSES)) - 1]

    def _begin(self, child: _Child) -> None:
        epoch = child.epoch = self.folder.new_epoch()
        # Short, as paths of sockets must be; the process that listens removes it.
        path = child.socket = os.path.join(tempfile.mkdtemp(prefix="wf-"), "s")
        log = self.folder.log(child.node, epoch)
        cores = child.settings.cores
        # The child must import the user's modules from the same places as this process.
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "OMP_NUM_THREADS": str(child.settings.threads_per_lane),
            "PYTHONUNBUFFERED": "1",
        }
        if child.settings.device == "cuda":
            number = list(self._children).index(child.node)
            seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
            environment["CUDA_VISIBLE_DEVICES"] = seen.split(",")[number] if seen else str(number)
        # Bound here and inherited, so that a connection need not wait until the child is ready.
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen()
            options = {"node": child.node, "epoch": epoch, "folder": self.folder.path, "outlive": self._outlive}
            options |= {"listener": listener.fileno(), "settings": settings_as_text(child.settings)}
            command = [sys.executable, "-c", "from waterflow.cluster.worker import main; main()"]
            command += [text for name, value in options.items() for text in (f"--{name}", str(value))]
            with log.open("ab") as output:
                child.popen = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,
                )
        child.pid, child.began = child.popen.pid, _began(child.popen.pid)
        logger.info("node %r begins as process %d, epoch %d, on cores %s", child.node, child.popen.pid, epoch, cores)
        child.joined, child.started = False, time.monotonic()
        child.connection = _connected(path)
        child.alive = os.pidfd_open(child.pid)
        child.silence.broken()
        note = {"epoch": epoch, "pid": child.pid, "began": child.began, "socket": path}
        unfinished = self.folder.node(child.node).with_suffix(".new")
        unfinished.write_text(json.dumps(note))
        os.replace(unfinished, self.folder.node(child.node))

    def _attach(self, child: _Child) -> bool:
        """Take over the process that an earlier backend left; return False if there is none."""
        try:
            note = json.loads(self.folder.node(child.node).read_text())
        except FileNotFoundError:
            return False
        child.epoch, child.pid, child.began, child.socket = note["epoch"], note["pid"], note["began"], note["socket"]
        try:
            child.alive = os.pidfd_open(child.pid)
            child.connection = _connected(child.socket)
        except OSError:
            self._finish(child)
            return False
        child.started = time.monotonic()
        return True

    def _await_all(self) -> None:
        deadline = time.monotonic() + READY_SECONDS
        while not all(child.joined for child in self._children.values()):
            self._look_after()
            worst = max(self._children.values(), key=lambda child: child.failures)
            if worst.failures >= FIRST_TRIES or time.monotonic() > deadline:
                raise BackendError(f"node {worst.node!r} does not start; its output ends: {self._last_words(worst)}")
            self._wait(0.1)

    def _last_words(self, child: _Child) -> str:
        log = self.folder.log(child.node, child.epoch)
        return log.read_text(errors="replace")[-2000:].strip() if log.exists() else "nothing"

    def _end(self, child: _Child, why: str) -> None:
        logger.warning("node %r, epoch %d, is lost: %s", child.node, child.epoch, why)
        steady = time.monotonic() - child.started > STEADY_SECONDS
        child.failures = 1 if steady else child.failures + 1
        child.again = time.monotonic() + PAUSES[min(child.failures, len(PAUSES)) - 1]
        self._lost(child.node, child.epoch, why)
        self._finish(child)

    def _finish(self, child: _Child) -> None:
        # Fenced first: from here on the process may be replaced, and must not publish.
        self.folder.fence(child.epoch)
        if child.connection is not None:
            child.connection.close()
        if child.alive >= 0:
            os.close(child.alive)
        child.connection, child.alive, child.joined = None, -1, False
        self._kill(child)
        if child.socket:
            shutil.rmtree(Path(child.socket).parent, ignore_errors=True)
            child.socket = ""

    def _kill(self, child: _Child) -> None:
        if child.popen is not None or (child.began and _began(child.pid) == child.began):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # and the workers of its data loaders
        if child.popen is not None:
            child.popen.wait()
        child.popen, child.began = None, ""  # the system may give its process id to another process

    def _leave(self, end: bool) -> None:
        children = list(self._children.values())
        for child in children:
            if child.connection is not None and end:
                with contextlib.suppress(OSError):
                    child.connection.send(END)
        for child in children:
            if end:
                _wait_for_end(child)
                self._finish(child)
            elif child.connection is not None:
                child.connection.close()
                os.close(child.alive)
                child.connection, child.alive = None, -1


def _connected(path: str) -> Connection:
    # No check of who listens is needed: only this user can enter the folder of the socket.
    made = socket.socket(socket.AF_UNIX)
    try:
        made.connect(path)
    except BaseException:
        made.close()
        raise
    return Connection(made.detach())


def _began(pid: int) -> str:
    # Field 22 of /proc/pid/stat, counted after the name of the command, which may contain spaces and parentheses.
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _wait_for_end(child: _Child) -> None:
    deadline = time.monotonic() + END_SECONDS
    while time.monotonic() < deadline and _began(child.pid) == child.began:
        if child.popen is not None and child.popen.poll() is not None:
            return
        time.sleep(0.01)


def _words(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"code {code}"
