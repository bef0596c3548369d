"""A backend as tests drive it, without a scheduler."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import waterflow as wf
from waterflow.cluster.backend import DeviceState, NodeInfo, Part, Request
from waterflow.cluster.nodes import Nodes
from waterflow.cluster.payload import load_results


class Watched:
    """A backend with all that its devices told."""

    def __init__(self, backend: Any) -> None:
        assert isinstance(backend, Nodes)
        self.backend: Any = backend
        self.states: dict[str, DeviceState] = {}  # the newest ones
        self.runs: dict[str, tuple[int, str]] = {}  # the newest run of each id, and its node
        self.told: list[tuple[str, int, Part]] = []  # node, epoch, part

    def start(self, id: str, payload: bytes, node: str, priority: Any = "guaranteed", checkpoint: Path | None = None) -> None:
        run = self.runs[id][0] + 1 if id in self.runs else 1
        self.runs[id] = run, node
        self.backend.folder.prepare(id, run, payload, run == 1, checkpoint)
        self.backend.request(node, Request("start", id, run, priority))

    def ask(self, id: str, kind: Any, **more: Any) -> None:
        run, node = self.runs[id]
        self.backend.request(node, Request(kind, id, run, **more))

    def listen(self) -> list[DeviceState]:
        states: list[DeviceState] = self.backend.listen(0.1)
        self.states |= {state.node: state for state in states}
        self.told += [(state.node, state.epoch, part) for state in states for part in state.parts]
        return states

    def until(self, id: str, condition: Callable[[Part], object], seconds: float = 20.0) -> Part:
        """Listen until the newest run of ``id`` meets the condition."""
        deadline, (run, node) = time.monotonic() + seconds, self.runs[id]
        while time.monotonic() < deadline:
            for state in self.listen():
                for part in state.parts:
                    if state.node == node and (part.id, part.run) == (id, run) and condition(part):
                        return part
        raise AssertionError(f"not within {seconds} s; there was {self.of(id)}")

    def answer(self, node: str, seconds: float = 20.0) -> DeviceState:
        """The state in which a device has taken up all requests, once it has told it."""
        deadline = time.monotonic() + seconds
        while node not in self.states or not self.backend.answered(self.states[node]):
            assert time.monotonic() < deadline, f"{node} does not answer"
            self.listen()
        return self.states[node]

    def end(self, id: str, seconds: float = 20.0) -> Part:
        """The end of the newest run, which is forgotten then."""
        ended = self.until(id, lambda part: part.phase == "ended", seconds)
        self.ask(id, "forget")
        return ended

    def of(self, id: str) -> list[Part]:
        return [part for _, _, part in self.told if part.id == id]

    def results(self, id: str) -> wf.Results:
        return load_results(self.backend.folder.job(id))

    def epoch(self, node: str) -> int:
        return int(next(each.epoch for each in self.backend.nodes() if each.name == node))

    def process(self, node: str) -> int:
        return int(self.backend.process(node))

    def lost(self, node: str, epoch: int, seconds: float) -> str:
        """Why the process was lost, once it is."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.listen()
            info: NodeInfo = next(each for each in self.backend.nodes() if each.name == node)
            if not info.alive or info.epoch != epoch:
                return info.lost
        raise AssertionError(f"{node} is not lost within {seconds} s")

    def alive(self, seconds: float = 30.0) -> list[str]:
        """The names of all nodes, once all of them are alive."""
        deadline = time.monotonic() + seconds
        while not all(node.alive for node in self.backend.nodes()):
            assert time.monotonic() < deadline, self.backend.nodes()
            self.listen()
        return [node.name for node in self.backend.nodes()]
