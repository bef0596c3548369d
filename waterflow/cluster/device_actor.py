"""The Ray actor of one device of a Ray cluster, without importing Ray."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

from waterflow.cluster.losses import Silence
from waterflow.cluster.shared_folder import SharedFolder
from waterflow.cluster.worker import BEAT_SECONDS, FIRST_SECONDS, Hello, Numbered, Worker, WorkerSettings


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
        if outlive > 0:
            threading.Thread(target=self._end_when_forgotten, args=(outlive,), daemon=True).start()

    def events(self, epoch: int, after: int, timeout: float) -> tuple[int, Hello | None, list[Numbered]]:
        """Return the events after number ``after`` of process ``epoch``, or a ``Hello`` if this is another process."""
        self._asked.broken()
        if epoch != self._epoch:
            return self._epoch, self._worker.hello(), []
        return epoch, None, self._worker.events(after, timeout)

    def request(self, epoch: int, name: str, arguments: dict[str, Any]) -> None:
        """Carry out a request for the process ``epoch``.

        Ray also delivers requests for the process before it: these are dropped.
        """
        if epoch == self._epoch:
            self._worker.request(name, arguments)

    def _end_when_forgotten(self, seconds: float) -> None:
        # Time in which this process itself stood still does not count: see ``Silence``.
        while self._asked.passed() < max(seconds, FIRST_SECONDS):
            time.sleep(BEAT_SECONDS)
        from waterflow.cluster.ray import end_this_actor

        end_this_actor()
