"""The process of one device: an engine, the groups of jobs on it, and the events that it reports."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import logging
import os
import shutil
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from waterflow.cluster.backend import BackendEvent, Progress
from waterflow.cluster.group import Part, Process, RunningGroup
from waterflow.cluster.shared_folder import SharedFolder
from waterflow.cluster.submission import Priority
from waterflow.executor.engine import Engine
from waterflow.units import Mode

logger = logging.getLogger("waterflow")

BEAT_SECONDS = 0.25  # between two signs of life of a worker
FIRST_SECONDS = 10.0  # for the backend that started the process to connect
FENCED = 3  # exit code

Numbered = tuple[int, int, BackendEvent]  # number of the event, run, event


@dataclass(frozen=True)
class WorkerSettings:
    """Settings of a device: times in seconds, and arguments of ``Engine``.

    ``cores`` are the CPU cores that the process may use; None: all.
    """

    device: str = "cpu"
    memory: int | float | str | None = None
    lanes: int | None = None
    threads_per_lane: int = 1
    exact: bool = True
    mode: Mode = "auto"
    cores: tuple[int, ...] | None = None
    checkpoint_seconds: float = 30.0
    report_seconds: float = 0.5


@dataclass(frozen=True)
class Hello:
    """The identity of a worker, and the parts that run there."""

    node: str
    epoch: int
    memory: int
    machine: str
    pid: int
    parts: tuple[Part, ...]


class Worker:
    """The groups of one device. Thread-safe; no method waits for a step, and only ``events`` waits."""

    REQUESTS = ("start", "stop", "checkpoint", "set_priority", "acknowledge")

    def __init__(self, node: str, epoch: int, folder: SharedFolder, settings: WorkerSettings) -> None:
        if settings.cores is not None:
            # Each thread has an affinity of its own, and libraries have started some by now.
            for thread in os.listdir("/proc/self/task"):
                os.sched_setaffinity(int(thread), settings.cores)
        lanes = settings.lanes or (len(settings.cores) if settings.cores is not None else None)
        self._engine = Engine(
            settings.device, settings.memory, lanes, settings.threads_per_lane, exact=settings.exact, mode=settings.mode
        )
        self._process = Process(node, epoch, folder, self._engine)
        self._settings = settings
        self._groups: dict[str, RunningGroup] = {}
        self._outbox: deque[Numbered] = deque()
        self._number = 0
        self._lock = threading.Lock()
        self._told = threading.Condition(self._lock)
        threading.Thread(target=self._watch, name="reports", daemon=True).start()

    def hello(self) -> Hello:
        """Return the worker's identity, and the parts that run now."""
        with self._lock:
            parts = tuple(replace(g.part, started=g.started, priority=g.priority) for g in self._groups.values())
        process = self._process
        return Hello(process.node, process.epoch, self._engine.limit, socket.gethostname(), os.getpid(), parts)

    def events(self, after: int, timeout: float) -> list[Numbered]:
        """Return the events after number ``after``; wait at most ``timeout`` seconds for the first."""
        deadline = time.monotonic() + timeout
        with self._told:
            while self._number <= after:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._told.wait(left)
            return [entry for entry in self._outbox if entry[0] > after]

    def request(self, name: str, arguments: dict[str, Any]) -> None:
        """Carry out one of ``REQUESTS``. Raises ValueError for any other."""
        if name not in self.REQUESTS:
            raise ValueError(f"a worker knows {', '.join(self.REQUESTS)}; got {name!r}")
        getattr(self, name)(**arguments)

    # -- requests

    def start(self, id: str, run: int, share: int, shares: int, priority: Priority, resume: bool) -> None:
        """Train a part of a group, whose payload is in the shared folder."""
        part = Part(id, run, share, shares, priority)
        with self._lock:
            known = self._groups.get(id)
            if known is not None and known.part.run >= run:  # the request was repeated, or is late
                return
            group = self._groups[id] = RunningGroup(part, resume, self._process, self._tell, self._exit_fenced)
        group.start()

    def stop(self, id: str, run: int, suspend: bool) -> None:
        """Stop a run, if it is still there."""
        group = self._group(id, run)
        if group is not None:
            group.halt(suspend)

    def checkpoint(self, id: str, run: int) -> None:
        """Save a run, if it is still there."""
        group = self._group(id, run)
        if group is not None:
            # Saving waits for the ends of steps, and requests must not.
            threading.Thread(target=group.save, daemon=True).start()

    def set_priority(self, id: str, run: int, priority: Priority) -> None:
        """Change the priority of a run, if it is still there."""
        group = self._group(id, run)
        if group is not None:
            group.set_priority(priority)

    def acknowledge(self, number: int) -> None:
        """Drop the events up to ``number``: the backend has them."""
        with self._lock:
            while self._outbox and self._outbox[0][0] <= number:
                self._outbox.popleft()

    # -- inside

    def _group(self, id: str, run: int) -> RunningGroup | None:
        with self._lock:
            group = self._groups.get(id)
            return group if group is not None and group.part.run == run else None

    def _tell(self, run: int, event: BackendEvent) -> None:
        with self._told:
            self._number += 1
            if isinstance(event, Progress):  # only the newest counts
                stale = [e for e in self._outbox if isinstance(e[2], Progress) and e[2].id == event.id]
                for entry in stale:
                    self._outbox.remove(entry)
            self._outbox.append((self._number, run, event))
            group = self._groups.get(getattr(event, "id", ""))
            if group is not None and group.over and group.part.run == run:
                del self._groups[group.part.id]
            self._told.notify_all()

    def _watch(self) -> None:
        busy, since = 0.0, time.monotonic()
        while True:
            time.sleep(self._settings.report_seconds)
            if self._process.folder.is_fenced(self._process.epoch):
                self._exit_fenced()
            now, total = time.monotonic(), sum(self._engine.native.lane_busy_ns) * 1e-9
            # Busy time of all lanes over the wall time of all lanes.
            utilization = min(1.0, (total - busy) / (now - since) / self._engine.lanes)
            busy, since = total, now
            with self._lock:
                groups = [group for group in self._groups.values() if group.started and not group.over]
            for group in groups:
                try:
                    self._tell(group.part.run, group.progress(utilization))
                    group.save_if_due(self._settings.checkpoint_seconds)
                except Exception:  # this thread reports and saves for the other groups, too
                    logger.exception("no report of %r", group.part.id)

    def _exit_fenced(self) -> None:
        logger.error("node %r, epoch %d, was declared lost; it ends", self._process.node, self._process.epoch)
        # Not ``sys.exit``, which would wait for threads that are in the middle of steps.
        os._exit(FENCED)


class _Server:
    """Serves one backend at a time over a socket; ends the process when none was connected for ``outlive`` seconds."""

    def __init__(self, worker: Worker, listener: socket.socket, outlive: float) -> None:
        self._worker = worker
        self._listener = listener
        self._outlive = outlive

    def serve(self) -> None:
        """Serve until a backend asks for the end, or stays away."""
        connection: Connection | None = None
        alone_until = time.monotonic() + FIRST_SECONDS
        while True:
            if connection is None and time.monotonic() > alone_until:
                return
            ready = wait([self._listener, *([connection] if connection else [])], BEAT_SECONDS)
            if self._listener in ready:
                connection = self._accept()
            elif ready and connection is not None:
                try:
                    name, arguments = connection.recv()
                except (EOFError, OSError):
                    connection, alone_until = None, time.monotonic() + self._outlive
                    continue
                if name == "end":
                    return
                try:
                    self._worker.request(name, arguments)
                except Exception:  # one request that fails is no reason for the other groups to end
                    logger.exception("request %r failed", name)

    def _accept(self) -> Connection:
        accepted, _ = self._listener.accept()
        connection = Connection(accepted.detach())
        threading.Thread(target=self._tell, args=(connection,), daemon=True).start()
        return connection

    def _tell(self, connection: Connection) -> None:
        heard = 0
        with contextlib.suppress(OSError):  # the backend closed the connection
            connection.send(self._worker.hello())
            while True:
                # An empty list is sent, too: it is the sign of life.
                events = self._worker.events(heard, BEAT_SECONDS)
                connection.send(events)
                heard = events[-1][0] if events else heard


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of a process that a backend starts; ``listener`` is a socket that the backend opened."""
    parser = argparse.ArgumentParser()
    for name, kind in (("node", str), ("epoch", int), ("folder", Path), ("listener", int), ("outlive", float)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    parser.add_argument("--settings", type=json.loads, required=True)
    given = parser.parse_args(arguments)
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    listener = socket.socket(fileno=given.listener)
    where = Path(listener.getsockname()).parent
    worker = Worker(given.node, given.epoch, SharedFolder(given.folder), settings_from(given.settings))
    try:
        _Server(worker, listener, given.outlive).serve()
    finally:
        shutil.rmtree(where, ignore_errors=True)
        sys.stdout.flush()
        os._exit(0)  # jobs may be in the middle of steps: their threads are not waited for


def settings_from(fields: dict[str, Any]) -> WorkerSettings:
    """Return settings from their JSON fields."""
    return WorkerSettings(**fields | {"cores": tuple(fields["cores"]) if fields["cores"] is not None else None})


def settings_as_text(settings: WorkerSettings) -> str:
    """Return settings as JSON text, for ``settings_from``."""
    return json.dumps(asdict(settings))
