"""Turns on a device: who has no turn is held there, goes on there, and leaves by a checkpoint only where it must."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.test_service import Cluster
from waterflow.cluster.losses import SUSPECT
from waterflow.cluster.policies.gandiva import Gandiva
from waterflow.cluster.policies.las import Las
from waterflow.cluster.reconciler import MOST_HELD

QUANTUM = 5.0  # seconds


def gandiva() -> Gandiva:
    return Gandiva(quantum=QUANTUM, packing=False)


@pytest.fixture
def turns(tmp_path: Path) -> Iterator[Cluster]:
    """Two jobs on one device, of which one has its turn."""
    cluster = Cluster(tmp_path, 1, policy=gandiva)
    for id in ("a", "b"):
        cluster.submit(id)
    cluster.turn()
    train(cluster)
    yield cluster
    cluster.store.close()


def train(cluster: Cluster) -> None:
    for id, state in cluster.states().items():
        if state == "starting":
            cluster.backend.begin(id)
            cluster.backend.progress(id, 5)
    cluster.turn()


def until(cluster: Cluster, id: str, state: str, turns: int = 40) -> None:
    for _ in range(turns):
        if cluster.states()[id] == state:
            return
        cluster.turn()
        train(cluster)
    raise AssertionError(f"{id} is {cluster.states()[id]}, not {state}")


def held(cluster: Cluster) -> dict[str, bool]:
    return {part.id: part.held for _, part in cluster.backend._running()}


def test_turns_without_a_stop(turns: Cluster) -> None:
    seen = set[str]()
    for _ in range(6 * int(QUANTUM)):
        turns.turn()
        train(turns)
        states = turns.states()
        assert sorted(states.values()) in (["running", "waiting"], ["held", "running"])
        if "held" in states.values():
            assert held(turns) == {id: state == "held" for id, state in states.items()}
            seen.add(next(id for id, state in states.items() if state == "held"))
    assert seen == {"a", "b"} and sorted(turns.backend.starts) == ["a", "b"] and not turns.backend.resumed
    told = {job["id"]: job for job in turns.service.status()["jobs"]}
    assert [told[id]["places"] for id in ("a", "b")] == [[["device-0", 0]]] * 2
    lines = [line for _, _, line in turns.store.log("a")]
    assert "is held until its next turn" in lines and "goes on" in lines


def test_who_is_held_stays_so_over_a_restart_of_the_scheduler(turns: Cluster) -> None:
    until(turns, "a", "held")
    turns.kill()
    assert turns.states()["a"] == "held" and turns.service.scheduler.book.entries["a"].held_at == ("device-0", 0)
    until(turns, "a", "running")
    assert sorted(turns.backend.starts) == ["a", "b"]


def test_a_held_job_has_no_part_in_a_loss(turns: Cluster) -> None:
    for _ in range(SUSPECT):
        until(turns, "a", "held")
        turns.backend.lose("device-0")
        turns.turn()
        turns.backend.return_("device-0")
        turns.turn()
        train(turns)
    entries = turns.service.scheduler.book.entries
    assert not turns.service.jobs._losses.known("a") and not entries["a"].alone and entries["b"].alone


def test_a_held_job_can_be_cancelled(turns: Cluster) -> None:
    until(turns, "a", "held")
    turns.service.cancel("a")
    assert turns.backend.stopping == {"a": False}
    turns.backend.obey()
    turns.turn()
    assert turns.states()["a"] == "cancelled"


def test_down_suspends_held_jobs(turns: Cluster) -> None:
    until(turns, "a", "held")
    turns.service._closing = True
    turns.turn()
    assert turns.backend.stopping == {"a": True, "b": True}
    turns.backend.obey()
    turns.turn()
    assert turns.states() == {"a": "waiting", "b": "waiting"}


def test_of_too_many_the_longest_held_leaves(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1, policy=gandiva)
    for number in range(MOST_HELD + 2):
        cluster.submit(f"job-{number}")
    for _ in range(int(QUANTUM) * (MOST_HELD + 8)):
        cluster.turn()
        train(cluster)
        cluster.backend.obey()
        assert sum(held(cluster).values()) <= MOST_HELD + 1  # one leaves
    states = list(cluster.states().values())
    assert states.count("held") == MOST_HELD and cluster.backend.resumed
    cluster.store.close()


def test_one_that_runs_alone_has_nobody_held_beside_it(turns: Cluster) -> None:
    until(turns, "a", "held")
    turns.service.scheduler.run_alone(turns.time, "b", True, decide=False)
    for _ in range(3 * int(QUANTUM)):
        turns.turn()
        train(turns)
        turns.backend.obey()
        there = held(turns)
        assert "b" not in there or len(there) == 1 or turns.backend.stopping
    assert turns.backend.resumed


def test_one_that_is_held_goes_on_where_it_is(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 2, policy=lambda: Las(limits=(4.0, 100.0)))
    for id in ("a", "b"):
        cluster.submit(id)
    cluster.turn()
    train(cluster)
    places = {job.id: job.node for job in cluster.store.jobs()}
    for _ in range(6):
        cluster.turn()
    for id in ("c", "d"):  # both go first
        cluster.submit(id)
    train(cluster)
    assert {cluster.states()[id] for id in ("a", "b")} == {"held"}
    for id in ("c", "d"):
        cluster.backend.end(id)
    cluster.turn()
    assert {job.id: job.node for job in cluster.store.jobs() if job.id in places} == places
    assert cluster.states() == {"a": "running", "b": "running", "c": "completed", "d": "completed"}
    assert not cluster.backend.resumed
    cluster.store.close()


def test_a_bad_packing_is_undone_and_not_tried_again(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, 1, policy=lambda: Gandiva(quantum=QUANTUM))
    for id in ("a", "b"):
        cluster.submit(id, memory=1000)
    together = 0
    for _ in range(12 * int(QUANTUM)):
        cluster.turn()
        train(cluster)
        running = [id for id, state in cluster.states().items() if state == "running"]
        together += len(running) == 2
        for device, part in cluster.backend._running():  # they slow each other down, which is known after three seconds
            known = None if len(running) == 2 and together % 4 < 3 else 0.4 if len(running) == 2 else 1.0
            device.parts[part.id, part.run] = replace(part, rate=known, steps=part.steps + 1, memory=1000)
    policy = cluster.service.scheduler.policy
    assert isinstance(policy, Gandiva) and (policy.packed, policy.unpacked) == (1, 1)
    assert 0 < together <= 3 * QUANTUM and not cluster.backend.resumed
    cluster.store.close()
