"""The process of one device: an engine, the groups of jobs on it, and the state that it tells."""

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
from collections.abc import Hashable, Sequence
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from waterflow.cluster.backend import DeviceState, Inbox, Request
from waterflow.cluster.group import Process, RunningGroup
from waterflow.cluster.pace import Pace, Paces, Seen
from waterflow.cluster.shared_folder import SharedFolder
from waterflow.executor.engine import Engine
from waterflow.units import Mode

logger = logging.getLogger("waterflow")

BEAT_SECONDS = 0.25  # between two signs of life of a worker
FIRST_SECONDS = 10.0  # for the backend that started the process to connect
FENCED = 3  # exit code
END = "end"  # instead of requests: the process ends


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


class Worker:
    """The groups of one device. Thread-safe; no method waits for a step, and only ``news`` waits."""

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
        self._who = node, epoch, socket.gethostname(), os.getpid(), self._engine.limit
        self._groups: dict[tuple[str, int], RunningGroup] = {}  # by id and run
        self._past: dict[str, int] = {}  # the newest run of each id that was forgotten
        self._inbox = Inbox()
        self._utilization = 0.0
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._version = 0  # of what is told at once
        threading.Thread(target=self._watch, name="reports", daemon=True).start()

    def news(self, known: int, timeout: float) -> tuple[int, DeviceState]:
        """Return the state and its version, once that is not ``known``, or after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while self._version == known and (left := deadline - time.monotonic()) > 0:
                self._changed.wait(left)
            parts = tuple(group.part for group in self._groups.values())
            state = DeviceState(*self._who, self._utilization, self._inbox.handled, parts)
            return self._version, state

    def request(self, first: int, requests: Sequence[Request]) -> None:
        """Take up requests, numbered from ``first``; those that are taken up already are left out."""
        with self._lock:
            for request in self._inbox.take(first, requests):
                try:
                    self._take_up(request)
                except Exception:  # one request that fails is no reason for the other groups to end
                    logger.exception("%s failed", request)
            self._tell()

    # -- inside

    def _take_up(self, request: Request) -> None:
        which = request.id, request.run
        if request.kind == "start":
            if which not in self._groups:  # otherwise it comes from a scheduler before
                self._groups[which] = RunningGroup(request, self._process, self._tell, self._exit_fenced)
                self._groups[which].start(self._past.get(request.id, 0))
            return
        group = self._groups.get(which)
        if group is None:
            return
        if request.kind == "stop":
            group.halt(request.suspend)
        elif request.kind == "checkpoint":
            threading.Thread(target=group.save, daemon=True).start()  # saving waits for the ends of steps
        elif request.kind == "set":
            group.set(request.priority, request.quota)
            group.hold("asked", request.held)
        elif group.part.phase == "ended":
            del self._groups[which]
            self._past[request.id] = max(request.run, self._past.get(request.id, 0))

    def _tell(self) -> None:
        with self._changed:
            self._version += 1
            self._changed.notify_all()

    def _watch(self) -> None:
        busy, since, paces = 0.0, time.monotonic(), Paces()
        while True:
            time.sleep(self._settings.report_seconds)
            if self._process.folder.is_fenced(self._process.epoch):
                self._exit_fenced()
            now, total = time.monotonic(), sum(self._engine.native.lane_busy_ns) * 1e-9
            # Busy time of all lanes over the wall time of all lanes.
            self._utilization = min(1.0, (total - busy) / (now - since) / self._engine.lanes)
            busy, since = total, now
            with self._lock:
                groups = {which: group for which, group in self._groups.items() if group.part.phase != "ended"}
                seen: dict[Hashable, Seen] = {which: group.seen() for which, group in groups.items()}
            paces.look(time.monotonic(), seen)
            for which, group in groups.items():
                try:
                    group.hold("measured", paces.alone not in (None, which))
                    group.measure(self._pace(group, paces.of(which)))
                    if group.part.phase == "training":
                        group.save_if_due(self._settings.checkpoint_seconds)
                except Exception:  # this thread measures and saves for the other groups, too
                    logger.exception("%r is not measured", group.part.id)

    def _pace(self, group: RunningGroup, pace: Pace) -> Pace:
        # The interference controller compares steps of guaranteed jobs with and without others all the time.
        control = self._engine.interference
        if group.part.priority == "opportunistic" or control is None or control.slowdown is None:
            return pace
        beside = any(policy.opportunistic for _, policy in self._engine.reservations.policies())
        return replace(pace, rate=1 / (1 + max(0.0, control.slowdown))) if beside else pace

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
                    said = connection.recv()
                except (EOFError, OSError):
                    connection, alone_until = None, time.monotonic() + self._outlive
                    continue
                if said == END:
                    return
                self._worker.request(*said)

    def _accept(self) -> Connection:
        accepted, _ = self._listener.accept()
        connection = Connection(accepted.detach())
        threading.Thread(target=self._tell, args=(connection,), daemon=True).start()
        return connection

    def _tell(self, connection: Connection) -> None:
        version = -1
        with contextlib.suppress(OSError):  # the backend closed the connection
            while True:
                # A state without news is sent, too: it is the sign of life.
                version, state = self._worker.news(version, BEAT_SECONDS)
                connection.send(state)


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
