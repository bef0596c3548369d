"""Jobs that end their devices, and those that were there: who runs alone, who fails, and who is cleared."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_service import Cluster
from tests.cluster.test_store import check
from waterflow.cluster.losses import CALM_SECONDS, MOST_LOSSES
from waterflow.cluster.policies.antman import AntMan
from waterflow.cluster.policies.gandiva_packing import GandivaPacking
from waterflow.cluster.shared_folder import SharedFolder

LOOP = 10**9  # steps between checkpoints: never


class World:
    """Jobs on a fake backend: each takes some turns, and some end the process of their device."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.turns: dict[str, int] = {}  # that a job needs
        self.crash: dict[str, int] = {}  # the step at which one ends its device
        self.every: dict[str, int] = {}  # steps between checkpoints
        self.warm = 0  # turns before the first step of each start
        self.left: dict[str, int] = {}  # of them
        self.steps: dict[str, int] = {}
        self.saved: dict[str, int] = {}
        self.began: set[str] = set()
        self.together: list[frozenset[str]] = []  # who was there, at each loss
        self.lost_steps: dict[str, int] = {}

    def submit(self, id: str, turns: int, *, crash: int | None = None, every: int = 3, **more: Any) -> None:
        self.turns[id], self.every[id] = turns, every
        if crash is not None:
            self.crash[id] = crash
        self.cluster.submit(id, priority=more.pop("priority", "opportunistic"), **more)

    def turn(self) -> None:
        backend = self.cluster.backend
        backend.obey()
        for node in [node for node, info in backend.known.items() if not info.alive]:
            backend.return_(node)
        for id in sorted(backend.runs):
            if id not in backend.runs:
                continue  # it was lost with a neighbour
            if id not in self.began:
                self.began.add(id)
                self.steps[id], self.left[id] = self.saved.get(id, 0), self.warm
                backend.begin(id)
                continue
            if self.left[id] > 0:
                self.left[id] -= 1
                backend.progress(id, self.steps[id])
                continue
            self.steps[id] += 1
            if self.steps[id] == self.crash.get(id):
                self.lose(backend.runs[id][0][0][0])
            elif self.steps[id] >= self.turns[id]:
                self.began.remove(id)
                backend.end(id, steps=self.steps[id])
            else:
                backend.progress(id, self.steps[id])
                if self.steps[id] % self.every[id] == 0:
                    self.saved[id] = self.steps[id]
                    backend.save(id, self.steps[id])
        self.cluster.turn()

    def lose(self, node: str) -> None:
        backend = self.cluster.backend
        gone = {id for id, (places, _) in backend.runs.items() if any(name == node for name, _ in places)}
        self.together.append(frozenset(id for id in gone if (node, 0) in backend.runs[id][0]))
        self.began -= gone
        backend.lose(node, "its process ended with SIGSEGV")

    def until_all_ended(self, turns: int = 3000) -> dict[str, str]:
        for _ in range(turns):
            states = self.cluster.states()
            if all(state in ("completed", "failed", "cancelled") for state in states.values()):
                check(self.cluster.store)
                return states
            self.turn()
        raise AssertionError(f"they never ended: {self.cluster.states()}")


@pytest.fixture
def worlds(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(devices: int = 1, policy: Any = AntMan) -> World:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(World(Cluster(folder, devices, policy=policy)))
        return made[-1]

    yield make
    for world in made:
        world.cluster.store.close()


POLICIES = {"antman": AntMan, "packing": partial(GandivaPacking, backfill=True)}


@pytest.mark.parametrize("every", [3, LOOP], ids=["jobs", "loops"])
@pytest.mark.parametrize("policy", POLICIES)
def test_only_who_ends_its_device_fails(worlds: Callable[..., World], policy: str, every: int) -> None:
    """Neighbours that never write a checkpoint begin again, and are not failed for it."""
    world = worlds(policy=POLICIES[policy])
    world.submit("bad", 50, crash=7, every=every, memory=1000)
    for number in range(2):
        world.submit(f"good-{number}", 40, every=every, memory=1000)
    assert world.until_all_ended() == {"bad": "failed", "good-0": "completed", "good-1": "completed"}
    record = world.cluster.service.record("bad")
    assert re.search(f"lost {MOST_LOSSES + 1} times.*, [34] of them with nothing else on it", record.reason)
    assert "the last time: node 'device-0': its process ended with SIGSEGV" in record.reason
    assert sum(len(there) > 1 for there in world.together) in (1, 2)
    assert all("bad" in there for there in world.together)
    lines = [line for _, _, line in world.cluster.store.log("bad")]
    assert any("may be the reason that devices are lost: it runs alone" in line for line in lines)
    assert world.cluster.store.losses() == []


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_only_those_fail_that_end_devices(worlds: Callable[..., World], seed: int) -> None:
    """Several crashers, guaranteed jobs, restarts of the scheduler, and devices that are lost for no job's sake."""
    chance = random.Random(seed)
    world = worlds(devices=chance.randint(2, 3), policy=chance.choice([AntMan, *POLICIES.values()]))
    bad = set()
    for number in range(14):
        id = f"job-{number}"
        turns = chance.randint(5, 40)
        crash = chance.randint(1, turns - 1) if chance.random() < 0.2 else None
        bad |= {id} if crash is not None else set()
        world.submit(
            id, turns, crash=crash, every=chance.choice([2, 5, LOOP]), memory=1000,
            priority=chance.choice(["guaranteed", "opportunistic"]),
        )  # fmt: skip
    outside = 0
    for _ in range(3000):
        states = world.cluster.states()
        if all(state in ("completed", "failed") for state in states.values()):
            break
        draw = chance.random()
        if draw < 0.02 and outside < 5:
            outside += 1
            world.lose(chance.choice([node for node, info in world.cluster.backend.known.items() if info.alive]))
        elif draw < 0.06:
            world.cluster.kill()
        world.turn()
    assert {id for id, state in states.items() if state == "failed"} == bad
    assert all(state == "completed" for id, state in states.items() if id not in bad)
    assert world.cluster.store.losses() == []


def test_what_is_known_of_losses_outlives_the_scheduler(worlds: Callable[..., World]) -> None:
    world = worlds(policy=POLICIES["packing"])
    world.submit("bad", 50, crash=7, memory=1000)
    world.submit("good", 40, memory=1000)
    while len(world.together) < 2:
        world.turn()
    world.cluster.kill()
    entries = world.cluster.service.scheduler.book.entries
    assert entries["bad"].alone and entries["good"].alone
    for _ in range(8):
        world.turn()
        assert len(world.cluster.backend.runs) <= 1
    world.cluster.store.close()
    world.cluster.open()
    assert world.until_all_ended() == {"bad": "failed", "good": "completed"}
    assert sum(len(there) > 1 for there in world.together) == 2 and world.cluster.store.losses() == []


def test_who_begins_slowly_is_not_cleared_for_that(worlds: Callable[..., World]) -> None:
    """It ends its device one step behind its last checkpoint, long after it began."""
    world = worlds(policy=POLICIES["packing"])
    world.warm = 12
    world.submit("bad", 50, crash=25, every=4, memory=1000)
    world.submit("good", 40, every=4, memory=1000)
    assert world.until_all_ended() == {"bad": "failed", "good": "completed"}
    assert len(world.together) <= MOST_LOSSES + 2


def test_a_machine_that_ends_is_no_jobs_fault(worlds: Callable[..., World]) -> None:
    """All devices and the scheduler at once, many times; and the job in its first steps each time."""
    world = worlds(devices=2)
    world.submit("a", 30, every=LOOP)
    world.submit("b", 30, every=LOOP)
    for _ in range(MOST_LOSSES + 3):
        for _ in range(3):
            world.turn()
        world.cluster.store.close()
        for node in list(world.cluster.backend.known):
            world.lose(node)
            world.cluster.backend.return_(node)
        world.cluster.open()
    assert world.cluster.store.losses() == []
    assert world.until_all_ended() == {"a": "completed", "b": "completed"}


def test_who_gets_further_is_cleared(worlds: Callable[..., World]) -> None:
    world = worlds(policy=POLICIES["packing"])
    world.submit("a", 60, every=5, memory=1000)
    world.submit("b", 2000, every=5, memory=1000)
    for _ in range(2):
        for _ in range(10):
            world.turn()
        world.lose("device-0")
        world.turn()
    assert len(world.cluster.store.losses()) == 4
    while len(world.cluster.store.losses()) == 4:
        world.turn()
        assert len(world.cluster.backend.runs) <= 1
    assert not world.cluster.service.record("a").over  # it did not have to end for that
    while world.cluster.store.losses():
        world.turn()
    world.submit("c", 2000, every=5, memory=1000)
    for _ in range(5):
        world.turn()
    assert sorted(world.cluster.backend.runs) == ["b", "c"]
    world.lose("device-0")
    for _ in range(10):
        world.turn()
    assert len(world.cluster.store.losses()) == 2  # beside others it takes longer
    for _ in range(int(CALM_SECONDS)):
        world.turn()
    assert world.cluster.store.losses() == []


def test_a_device_that_is_lost_later_finds_another_reason(worlds: Callable[..., World]) -> None:
    """The first crasher explains its losses alone."""
    world = worlds()
    world.submit("bad", 50, crash=7)
    world.submit("worse", 50, crash=20)
    world.submit("good", 60)
    assert world.until_all_ended() == {"bad": "failed", "worse": "failed", "good": "completed"}


def test_after_a_loss_checkpoints_come_more_often(tmp_path: Path) -> None:
    folder = SharedFolder(tmp_path)
    folder.make()
    folder.prepare("a", 1, b"")
    assert [folder.lost_before("a", run) for run in (1, 2, 3, 4)] == [0, 1, 2, 3]
    folder.ended("a", 2).write_text("{}")
    assert [folder.lost_before("a", run) for run in (1, 2, 3, 4)] == [0, 1, 0, 1]
