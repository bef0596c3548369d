"""The part that all backends share: nodes with their newest states, requests on their way, and fencing."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Self

from waterflow.cluster.backend import DeviceState, NodeInfo, Request
from waterflow.cluster.shared_folder import SharedFolder

AGAIN_SECONDS = 1.0  # before requests that no state has answered are made again


@dataclass
class _Requests:
    """The requests to one process: those from number ``first`` on are not answered."""

    first: int
    pending: list[Request] = field(default_factory=list)
    at: float = 0.0  # when they were made last


class Nodes(ABC):
    """The part of a backend that does not depend on how its nodes are reached.

    A subclass finds out which nodes are alive and receives their states, and calls ``_joined``, ``_told`` and ``_lost`` from
    ``_listen``.
    """

    def __init__(self, folder: SharedFolder) -> None:
        self.folder = folder
        self._nodes: dict[str, NodeInfo] = {}
        self._states: dict[str, DeviceState] = {}  # told since the last ``listen``
        self._requests: dict[str, _Requests] = {}  # to processes that have told a state
        self._news = False  # a node was lost or has joined since the last ``listen``
        self._guard = threading.RLock()

    # -- for subclasses to implement

    @abstractmethod
    def _send(self, node: str, first: int, requests: Sequence[Request]) -> None:
        """Send requests, numbered from ``first``, to a node that is alive. OSError: they will be sent again."""

    @abstractmethod
    def _listen(self, timeout: float) -> None:
        """Watch all nodes; wait at most ``timeout`` seconds for ``_heard``."""

    @abstractmethod
    def end_process(self, node: str, epoch: int, why: str) -> None:
        """See ``Backend``."""

    # -- Backend

    def nodes(self) -> list[NodeInfo]:
        """See ``Backend``."""
        with self._guard:
            return [self._nodes[name] for name in sorted(self._nodes)]

    def listen(self, timeout: float) -> list[DeviceState]:
        """See ``Backend``."""
        self._listen(timeout)
        with self._guard:
            for node, requests in self._requests.items():
                if requests.pending and time.monotonic() - requests.at >= AGAIN_SECONDS:
                    self._send_pending(node, requests.first)
            states, self._states, self._news = list(self._states.values()), {}, False
            return states

    def request(self, node: str, *requests: Request) -> None:
        """See ``Backend``."""
        with self._guard:
            there = self._requests.get(node)
            if there is not None:
                there.pending += requests
                self._send_pending(node, there.first + len(there.pending) - len(requests))

    def answered(self, state: DeviceState) -> bool:
        """See ``Backend``."""
        with self._guard:
            node, there = self._nodes[state.node], self._requests.get(state.node)
            return there is not None and node.epoch == state.epoch and state.handled + 1 >= there.first + len(there.pending)

    # -- for subclasses to call

    @property
    def _heard(self) -> bool:
        return bool(self._states) or self._news

    def _joined(self, state: DeviceState) -> None:
        """Note that a process has told its first state: its node is alive."""
        with self._guard:
            before = self._nodes.get(state.node)
            why = before.lost if before is not None else ""
            self._nodes[state.node] = NodeInfo(state.node, state.memory, state.epoch, True, state.machine, why)
            self._requests[state.node] = _Requests(state.handled + 1)
            self._news = True
            self._told(state)

    def _told(self, state: DeviceState) -> None:
        """Note a state, unless its process is no longer, or not yet, that of its node."""
        with self._guard:
            node = self._nodes.get(state.node)
            if node is None or not node.alive or node.epoch != state.epoch:
                return
            requests = self._requests[state.node]
            answered = state.handled + 1 - requests.first
            if answered < 0:  # a state from before one that was heard already
                return
            del requests.pending[:answered]
            requests.first = state.handled + 1
            self._states[state.node] = state

    def _lost(self, node: str, epoch: int, why: str) -> None:
        """Note that a process is lost. Fenced first: from then on its jobs may start elsewhere, and it must not publish."""
        with self._guard:
            known = self._nodes.get(node)
            if known is None or known.epoch != epoch or not known.alive:
                return
            self.folder.fence(epoch)
            self._nodes[node] = replace(known, alive=False, lost=why)
            self._requests.pop(node, None)
            self._news = True

    def _send_pending(self, node: str, first: int) -> None:
        there = self._requests[node]
        there.at = time.monotonic()
        with contextlib.suppress(OSError):  # they are made again, or the end of the process is noticed
            self._send(node, first, there.pending[first - there.first :])


class OwnNodes(Nodes):
    """``Nodes`` that have their folder to themselves: the one that is given, or a temporary one, which goes at the end."""

    def __init__(self, folder: str | Path | None) -> None:
        self._temporary = folder is None
        super().__init__(SharedFolder(Path(folder or tempfile.mkdtemp(prefix="waterflow-")).absolute()))
        self.folder.make()
        self._lock_file = self.folder.lock()
        self._closed = False

    @abstractmethod
    def _leave(self, end: bool) -> None:
        """Let go of all nodes. ``end``: their processes end; else they wait for another backend."""

    def close(self) -> None:
        """See ``Backend``."""
        self._end_all(end=True)
        if self._temporary:
            shutil.rmtree(self.folder.path, ignore_errors=True)

    def detach(self) -> None:
        """See ``Backend``."""
        self._end_all(end=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _end_all(self, end: bool) -> None:
        with self._guard:
            if self._closed:
                return
            self._closed = True
            self._leave(end)
            os.close(self._lock_file)
