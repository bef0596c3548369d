"""A backend without processes: a test decides what happens on it. It outlives services, as real nodes do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from waterflow.cluster.backend import (
    BackendError,
    BackendEvent,
    Checkpointed,
    Ended,
    NodeInfo,
    NodeJoined,
    NodeLost,
    Place,
    Priority,
    Progress,
    Started,
)


class FakeBackend:
    """Keeps events until the poll after the one that gave them, as they could be lost with the service before that."""

    def __init__(self, devices: int = 2, folder: Path = Path("results")) -> None:
        self.folder = folder
        self.epoch = 0
        self.known: dict[str, NodeInfo] = {}
        self.runs: dict[str, tuple[tuple[Place, ...], str]] = {}  # where, and with which priority
        self.stopping: dict[str, bool] = {}
        self.starts: list[str] = []
        self.resumed: list[str] = []
        self.states: set[str] = set()
        self.asked_to_save: list[str] = []
        self.waiting: list[BackendEvent] = []
        self.given: list[BackendEvent] = []
        self.left = self.closed = False
        for number in range(devices):
            self._join(f"device-{number}")
        self.waiting.clear()

    # -- what a test does

    def begin(self, id: str) -> None:
        self.waiting.append(Started(id, *self._where(id)))

    def progress(
        self, id: str, steps: int, fraction: float | None = None, utilization: float = 0.5, seconds: float = 0.0
    ) -> None:
        self.waiting.append(Progress(id, *self._where(id), steps, fraction, 0.01, 1000, utilization, seconds))

    def save(self, id: str, steps: int) -> None:
        self.states.add(id)
        self.waiting.append(Checkpointed(id, *self._where(id), self.folder / id, steps))

    def end(self, id: str, how: str = "completed", reason: str = "", steps: int | None = None) -> None:
        if how == "suspended":
            self.states.add(id)
        where = self._where(id)
        del self.runs[id]
        self.stopping.pop(id, None)
        self.waiting.append(Ended(id, *where, how, self.folder / id, reason, steps))  # type: ignore[arg-type]

    def obey(self) -> None:
        """Whatever was asked to stop stops."""
        for id, suspend in list(self.stopping.items()):
            self.end(id, "suspended" if suspend else "cancelled")

    def lose(self, node: str, reason: str = "its process ended") -> None:
        info = self.known[node]
        self.known[node] = NodeInfo(node, 1, info.memory, info.epoch, False)
        self.waiting.append(NodeLost(node, info.epoch, reason))
        for id in [id for id, (places, _) in self.runs.items() if any(name == node for name, _ in places)]:
            self.end(id, "lost", reason)

    def return_(self, node: str) -> None:
        self._join(node)

    def attach_again(self) -> None:
        """Another service comes: what the one before may not have heard is told again."""
        self.waiting = self.given + self.waiting
        self.given = []

    def _join(self, node: str) -> None:
        self.epoch += 1
        self.known[node] = NodeInfo(node, 1, 1 << 30, self.epoch, True)
        self.waiting.append(NodeJoined(node, self.epoch, 1, 1 << 30))

    def _where(self, id: str) -> tuple[str, int]:
        node = self.runs[id][0][0][0]
        return node, self.known[node].epoch

    # -- Backend

    def nodes(self) -> list[NodeInfo]:
        return [self.known[name] for name in sorted(self.known)]

    def running(self) -> list[str]:
        return sorted(self.runs)

    def start(
        self, id: str, payload: bytes, places: Sequence[Place], priority: Priority = "guaranteed",
        checkpoint: Path | None = None,
    ) -> None:  # fmt: skip
        if id in self.runs:
            raise BackendError(f"{id!r} runs")
        for node, _ in places:
            if not self.known[node].alive:
                raise BackendError(f"node {node!r} was lost")
        if checkpoint is not None:
            self.resumed.append(id)
        self.starts.append(id)
        self.runs[id] = tuple(places), priority

    def poll(self, timeout: float) -> list[BackendEvent]:
        self.given, self.waiting = self.waiting, []
        return list(self.given)

    def checkpoint(self, id: str) -> None:
        self.asked_to_save.append(id)

    def checkpoints(self, id: str) -> Path | None:
        return self.folder / id if id in self.states else None

    def adopt(self, id: str, checkpoint: Path) -> Path:
        self.states.add(id)
        return self.folder / id

    def stop(self, id: str, suspend: bool) -> None:
        if id in self.runs:
            self.stopping[id] = suspend and self.stopping.get(id, True)

    def break_off(self, id: str) -> None:
        if self.stopping.get(id) is False:
            for node in {name for name, _ in self.runs[id][0]}:
                self.lose(node, f"{id} did not come to its end")

    def set_priority(self, id: str, priority: Priority) -> None:
        self.runs[id] = self.runs[id][0], priority

    def close(self) -> None:
        self.closed = True

    def detach(self) -> None:
        self.left = True
