"""A backend without processes: a test decides what happens on it. It outlives services, as real nodes do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from waterflow.cluster.backend import DeviceState, Inbox, NodeInfo, Part, Request
from waterflow.cluster.nodes import Nodes
from waterflow.cluster.shared_folder import SharedFolder


class FakeDevice:
    """A process that does what it is asked, and no more, until a test says so."""

    def __init__(self, backend: FakeBackend, node: str) -> None:
        self.backend, self.node, self.epoch = backend, node, backend.folder.new_epoch()
        self.parts: dict[tuple[str, int], Part] = {}
        self.inbox = Inbox()
        self.utilization = 0.0

    def state(self) -> DeviceState:
        parts = tuple(self.parts.values())
        return DeviceState(self.node, self.epoch, "here", 1, 1 << 30, self.utilization, self.inbox.handled, parts)

    def request(self, first: int, requests: Sequence[Request]) -> None:
        for request in self.inbox.take(first, requests):
            which = request.id, request.run
            part = self.parts.get(which)
            if request.kind == "start":
                self.backend.started(self, request)
                self.parts.setdefault(which, Part(*which, "beginning", request.priority, held=request.held, quota=request.quota))
            elif part is None:
                continue
            elif request.kind == "stop":
                self.parts[which] = replace(part, stopping="suspended" if request.suspend else "cancelled")
            elif request.kind == "set":
                if part.priority != request.priority:
                    self.backend.told_priorities.append((request.id, request.priority))
                self.parts[which] = replace(part, priority=request.priority, held=request.held, quota=request.quota)
            elif request.kind == "checkpoint":
                self.backend.asked_to_save.append(request.id)
            elif part.phase == "ended":
                del self.parts[which]


class FakeBackend(Nodes):
    """Nodes called ``device-0``, ``device-1``, ... with a fake device each."""

    def __init__(self, devices: int, folder: Path) -> None:
        super().__init__(SharedFolder(folder / "work"))
        self.folder.make()
        self.devices: dict[str, FakeDevice] = {}  # the processes that are alive
        self.starts: list[str] = []
        self.resumed: list[str] = []
        self.asked_to_save: list[str] = []
        self.told_priorities: list[tuple[str, str]] = []
        self.left = self.closed = False
        for number in range(devices):
            self.return_(f"device-{number}")

    # -- what a test does

    def begin(self, id: str) -> None:
        self._change(id, phase="training")

    def progress(
        self, id: str, steps: int, fraction: float | None = None, utilization: float = 0.5, seconds: float = 0.0
    ) -> None:
        self._find(id)[0].utilization = utilization
        self._change(
            id, phase="training", steps=steps, fraction=fraction, pace=100.0, memory=1000, seconds=seconds
        )  # fmt: skip

    def save(self, id: str, steps: int) -> None:
        self._change(id, phase="training", saved=steps, steps=steps)

    def end(self, id: str, how: str = "completed", reason: str = "", steps: int | None = None) -> None:
        _, part = self._find(id)
        steps = part.steps if steps is None else steps
        note = self.folder.ended(id, part.run)
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(json.dumps({"how": how, "reason": reason, "steps": steps}))
        self._change(id, phase="ended", how=how, reason=reason, steps=steps)

    def obey(self) -> None:
        """Whatever was asked to stop stops."""
        for id, suspend in self.stopping.items():
            self.end(id, "suspended" if suspend else "cancelled")

    def lose(self, node: str, reason: str = "its process ended") -> None:
        self._lost(node, self.devices.pop(node).epoch, reason)

    def return_(self, node: str) -> None:
        self.devices[node] = FakeDevice(self, node)
        self._joined(self.devices[node].state())

    def attach_again(self) -> None:
        """Another service comes, with a backend that knows nothing yet."""
        for device in self.devices.values():
            self._joined(device.state())

    @property
    def known(self) -> dict[str, NodeInfo]:
        return self._nodes

    @property
    def runs(self) -> dict[str, tuple[tuple[tuple[str, int], ...], str]]:
        """What runs, where, and with which priority."""
        return {part.id: (((device.node, 0),), part.priority) for device, part in self._running()}

    @property
    def stopping(self) -> dict[str, bool]:
        """Who was asked to stop, and whether to be suspended."""
        return {part.id: part.stopping == "suspended" for _, part in self._running() if part.stopping}

    def started(self, device: FakeDevice, request: Request) -> None:
        assert self.folder.payload(request.id, request.run).exists()
        assert request.id not in self.runs, f"{request.id} runs twice at a time"
        self.starts.append(request.id)
        if request.run > 1:
            self.resumed.append(request.id)

    def _running(self) -> list[tuple[FakeDevice, Part]]:
        there = [(device, part) for device in self.devices.values() for part in device.parts.values()]
        return sorted((pair for pair in there if pair[1].phase != "ended"), key=lambda pair: pair[1].id)

    def _find(self, id: str) -> tuple[FakeDevice, Part]:
        (found,) = [pair for pair in self._running() if pair[1].id == id]
        return found

    def _change(self, id: str, **fields: Any) -> None:
        device, part = self._find(id)
        device.parts[part.id, part.run] = replace(part, **fields)

    # -- Nodes

    def _send(self, node: str, first: int, requests: Sequence[Request]) -> None:
        if node in self.devices:
            self.devices[node].request(first, requests)

    def _listen(self, timeout: float) -> None:
        for device in self.devices.values():
            self._told(device.state())

    def end_process(self, node: str, epoch: int, why: str) -> None:
        if node in self.devices and self.devices[node].epoch == epoch:
            self.lose(node, why)

    def close(self) -> None:
        self.closed = True

    def detach(self) -> None:
        self.left = True
