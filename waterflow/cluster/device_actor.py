"""The Ray actor of one device of a Ray cluster, without importing Ray."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from waterflow.cluster.backend import DeviceState, Request
from waterflow.cluster.losses import Silence
from waterflow.cluster.shared_folder import SharedFolder
from waterflow.cluster.worker import BEAT_SECONDS, FIRST_SECONDS, Worker, WorkerSettings


class DeviceActor:
    """The process of a device: a ``Worker``, and the calls that Ray brings to it. Each start has a new epoch."""

    def __init__(self, node: str, folder: str, settings: WorkerSettings, outlive: float) -> None:
        shared = SharedFolder(Path(folder))
        self._epoch = shared.new_epoch()
        with shared.log(node, self._epoch).open("ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        self._worker = Worker(node, self._epoch, shared, settings)
        self._asked = Silence()
        self._lock, self._session = threading.Lock(), 0
        if outlive > 0:
            threading.Thread(target=self._end_when_forgotten, args=(outlive,), daemon=True).start()

    def news(self, epoch: int, session: int, known: int, timeout: float) -> tuple[int, DeviceState]:
        """Return the state and its version, at once if this is not the process ``epoch``; see ``Worker.news``.

        ``session`` numbers the backends: requests of those before it are dropped from now on.
        """
        self._asked.broken()
        with self._lock:
            self._session = max(session, self._session)
        return self._worker.news(known, timeout if epoch == self._epoch else 0.0)

    def request(self, epoch: int, session: int, first: int, requests: Sequence[Request]) -> None:
        """Take up requests to the process ``epoch``.

        Ray also delivers requests to the process before it, and late ones of a backend that has ended: these are dropped.
        """
        with self._lock:
            if epoch == self._epoch and session == self._session:
                self._worker.request(first, requests)

    def _end_when_forgotten(self, seconds: float) -> None:
        # Time in which this process itself stood still does not count: see ``Silence``.
        while self._asked.passed() < max(seconds, FIRST_SECONDS):
            time.sleep(BEAT_SECONDS)
        from waterflow.cluster.ray import end_this_actor

        end_this_actor()
