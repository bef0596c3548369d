"""What of the words of nodes counts, without any process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from waterflow.cluster.backend import BackendEvent, Checkpointed, Ended, NodeJoined, NodeLost, Progress, Started
from waterflow.cluster.group import Part
from waterflow.cluster.ledger import Ledger
from waterflow.cluster.shared_folder import SharedFolder
from waterflow.cluster.worker import Hello


class Told(Ledger):
    """A backend whose nodes are played by the test."""

    def __init__(self, path: Path) -> None:
        super().__init__(SharedFolder(path))
        self.folder.make()
        self.sent: list[tuple[str, str, dict[str, Any]]] = []
        self.count = 0

    def _send(self, node: str, name: str, arguments: dict[str, Any]) -> None:
        self.sent.append((node, name, arguments))

    def _listen(self, timeout: float) -> None:
        pass

    def join(self, node: str, *parts: Part) -> int:
        epoch = self.folder.new_epoch()
        self._joined(Hello(node, epoch, 100, "here", 1, parts))
        return epoch

    def say(self, node: str, epoch: int, run: int, *events: BackendEvent) -> None:
        for event in events:
            self.count += 1
            self._take(node, epoch, [(self.count, run, event)])

    def heard(self) -> list[BackendEvent]:
        return self.poll(0.0)

    def requests(self, name: str) -> list[tuple[str, dict[str, Any]]]:
        found = [(node, arguments) for node, sent, arguments in self.sent if sent == name]
        self.sent = [entry for entry in self.sent if entry[1] != name]
        return found


@pytest.fixture
def told(tmp_path: Path) -> Iterator[Told]:
    yield Told(tmp_path)


def kinds(events: list[BackendEvent]) -> list[str]:
    return [type(event).__name__ + (f" {event.how}" if isinstance(event, Ended) else "") for event in events]


def progress(node: str, epoch: int, steps: int, fraction: float | None) -> Progress:
    return Progress("x", node, epoch, steps, fraction, 0.5, 10, 0.4)


def test_words_of_a_lost_process_do_not_count(told: Told, tmp_path: Path) -> None:
    a, b = told.join("a"), told.join("b")
    told.start("x", b"", [("a", 0)])
    told.say("a", a, 1, Started("x", "a", a))
    told._lost("a", a, "gone")
    assert kinds(told.heard()) == ["NodeJoined", "NodeJoined", "Started", "NodeLost", "Ended lost"]
    told.say("a", a, 1, Checkpointed("x", "a", a, tmp_path, 5), Ended("x", "a", a, "completed", tmp_path))
    assert told.heard() == [] and told.folder.is_fenced(a)
    told.start("x", b"", [("b", 0)])
    later = told.join("a")  # the same node, another process: words of the old one are still not its own
    told.say("a", a, 2, Started("x", "a", a))
    told.say("a", later, 1, Ended("x", "a", later, "failed", tmp_path))
    told.say("b", b, 1, Ended("x", "b", b, "failed", tmp_path))
    assert kinds(told.heard()) == ["NodeJoined"] and told.running() == ["x"]
    told.say("b", b, 2, Ended("x", "b", b, "completed", tmp_path))
    assert kinds(told.heard()) == ["Ended completed"] and told.running() == []


def test_words_that_come_twice_count_once(told: Told, tmp_path: Path) -> None:
    a = told.join("a")
    told.start("x", b"", [("a", 0)])
    event = Started("x", "a", a)
    told._take("a", a, [(1, 1, event)])
    told._take("a", a, [(1, 1, event), (2, 1, Ended("x", "a", a, "completed", tmp_path))])
    assert kinds(told.heard())[1:] == ["Started", "Ended completed"]
    told.heard()
    assert told.requests("acknowledge") == [("a", {"number": 2})]


def test_parts_of_a_group_are_told_as_one(told: Told, tmp_path: Path) -> None:
    a, b = told.join("a"), told.join("b")
    told.start("x", b"", [("a", 0), ("b", 0)])
    assert [(node, sent["share"], sent["shares"]) for node, sent in told.requests("start")] == [("a", 0, 2), ("b", 1, 2)]
    told.heard()
    told.say("a", a, 1, Started("x", "a", a))
    assert told.heard() == []
    told.say("b", b, 1, Started("x", "b", b), progress("b", b, 3, 0.5), progress("b", b, 4, 0.6))
    told.say("a", a, 1, progress("a", a, 10, 0.2))
    *_, last = told.heard()
    assert isinstance(last, Progress) and last.node == "a"
    # Steps of both, memory of one device.
    assert (last.steps, last.fraction, last.memory, last.step_seconds) == (14, pytest.approx(0.4), 10, 0.5)
    told.say("a", a, 1, Ended("x", "a", a, "failed", tmp_path, "why"))
    assert told.heard() == []
    told.say("b", b, 1, Ended("x", "b", b, "completed", tmp_path))
    (end,) = told.heard()
    assert isinstance(end, Ended) and (end.how, end.reason) == ("failed", "why")


def test_the_rest_of_a_group_is_suspended_when_a_part_is_lost(told: Told, tmp_path: Path) -> None:
    a, b = told.join("a"), told.join("b")
    told.start("x", b"first", [("a", 0), ("b", 0)])
    told.requests("start")
    told._lost("b", b, "gone")
    assert told.requests("stop") == [("a", {"id": "x", "run": 1, "suspend": True})]
    told.start("x", b"second", [("a", 0)], checkpoint=told.folder.job("x"))  # it waits for that
    assert told.requests("start") == [] and kinds(told.heard())[2:] == ["NodeLost"]
    told.say("a", a, 1, Ended("x", "a", a, "suspended", tmp_path))
    assert kinds(told.heard()) == ["Ended lost"]
    ((node, sent),) = told.requests("start")
    assert (node, sent["run"], sent["shares"], sent["resume"]) == ("a", 2, 1, True)
    assert told.folder.payload("x", 2).read_bytes() == b"second" and not told.folder.payload("x", 1).exists()


def test_a_start_that_waits_can_be_stopped(told: Told, tmp_path: Path) -> None:
    a = told.join("a")
    told.start("x", b"", [("a", 0)])
    told.stop("x", suspend=True)
    told.start("x", b"", [("a", 0)])
    told.stop("x", suspend=False)
    told.say("a", a, 1, Ended("x", "a", a, "suspended", tmp_path))
    assert kinds(told.heard())[1:] == ["Ended suspended", "Ended cancelled"] and told.running() == []
    assert len(told.requests("start")) == 1


def test_a_start_that_waits_for_a_node_that_is_lost(told: Told, tmp_path: Path) -> None:
    a, b = told.join("a"), told.join("b")
    told.start("x", b"", [("a", 0)])
    told.stop("x", suspend=True)
    told.start("x", b"", [("b", 0)], checkpoint=told.folder.job("x"))
    told._lost("b", b, "gone")
    told.say("a", a, 1, Ended("x", "a", a, "suspended", tmp_path))
    assert kinds(told.heard())[2:] == ["NodeLost", "Ended suspended", "Ended lost"] and told.running() == []


def test_what_runs_is_known_from_the_nodes(told: Told, tmp_path: Path) -> None:
    """A backend that takes over: one part runs on, one has ended as its file says, one is gone."""
    for id, shares in (("x", 1), ("y", 2), ("z", 2)):
        assert told.folder.new_run(id) == 1, shares
    told.folder.ended("y", 1, 1).write_text('{"how": "completed", "reason": ""}')
    stale = Part("w", 1)
    told.folder.new_run("w")
    told.folder.new_run("w")  # it was started again since
    a = told.join("a", Part("x", 1, started=True), Part("y", 1, 0, 2), Part("z", 1, 0, 2), stale)
    told._all_joined()
    assert told.running() == ["x", "y", "z"]
    assert told.requests("stop") == [("a", {"id": "z", "run": 1, "suspend": True})]
    told.say("a", a, 1, *(Ended(id, "a", a, "completed", tmp_path) for id in "xy"), Ended("z", "a", a, "suspended", tmp_path))
    events = told.heard()
    assert {e.id: e.how for e in events if isinstance(e, Ended)} == {"x": "completed", "y": "completed", "z": "lost"}
    assert not any(isinstance(e, NodeLost) for e in events) and isinstance(events[0], NodeJoined)
