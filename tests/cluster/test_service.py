"""The live loop over a backend that a test holds in its hands, and its death at any moment."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import random
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fake_backend import FakeBackend
from waterflow.cluster.backend import BackendError, Ended, NodeJoined, Progress
from waterflow.cluster.journal import JournaledScheduler
from waterflow.cluster.policies import POLICIES
from waterflow.cluster.policies.fifo import Fifo
from waterflow.cluster.reconciler import LET_GO_SECONDS, MOST_LOSSES, Reconciler
from waterflow.cluster.service import BusyError, ClosedError, Service
from waterflow.cluster.store import LARGEST_PAYLOAD, Store
from waterflow.cluster.stuck import CANCEL_SECONDS, SAVE_SECONDS
from waterflow.cluster.submission import Tenant
from waterflow.errors import InvalidJobError, SubmissionError


class Killed(BaseException):
    """The process ends here."""


class Cluster:
    """A service that can be killed, and made again on what it left."""

    def __init__(
        self, folder: Path, devices: int = 2, tenants: tuple[Tenant, ...] = (), policy: Callable[[], Any] = Fifo
    ) -> None:
        self.folder = folder
        self.tenants = tenants
        self.backend = FakeBackend(devices, folder)
        self.time = 1000.0
        self.policy: Any = policy
        self.open()

    def open(self) -> None:
        self.store = Store(self.folder / "cluster.db")
        self.service = Service(self.store, self.backend, self.policy(), self.tenants, clock=lambda: self.time)

    def kill(self) -> None:
        self.store.close()
        self.backend.attach_again()
        self.open()

    def submit(self, id: str, payload: bytes = b"payload", **more: Any) -> bool:
        return self.service.submit({"id": id, **more}, payload)

    def turn(self, times: int = 1) -> None:
        for _ in range(times):
            self.time += 1.0
            self.service.turn(0.0)

    def states(self) -> dict[str, str]:
        return {job.id: job.state for job in self.store.jobs()}


@pytest.fixture
def cluster(tmp_path: Path):
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.store.close()


def test_a_job_from_submission_to_end(cluster: Cluster) -> None:
    assert cluster.submit("a")
    assert cluster.states() == {"a": "starting"} and cluster.backend.starts == ["a"]
    cluster.backend.begin("a")
    cluster.turn()
    cluster.backend.progress("a", 10, 0.5)
    cluster.turn()
    told = cluster.service.status()["jobs"][0]
    assert told["state"] == "running" and told["steps"] == 10 and told["fraction"] == 0.5 and told["places"]
    cluster.backend.end("a")
    cluster.turn()
    told = cluster.service.status()["jobs"][0]
    assert told["state"] == "completed" and told["places"] == [] and told["fraction"] == 1.0
    assert cluster.service.wait(["a"], 0.0) == ["a"]
    assert cluster.store._all("SELECT id FROM payloads") == [] and not cluster.submit("a")
    cluster.store.check()
    lines = [line for _, _, line in cluster.store.log("a")]
    assert lines[0] == "submitted: 1 device(s), guaranteed" and lines[-1] == "completed"


def test_twice_with_one_id_is_one_job(cluster: Cluster) -> None:
    assert cluster.submit("a") and not cluster.submit("a")
    cluster.kill()
    assert not cluster.submit("a")
    with pytest.raises(InvalidJobError, match="One id is one job"):
        cluster.submit("a", b"another payload")
    cluster.turn()
    assert cluster.backend.starts == ["a"]


def test_a_queue_moves_on(cluster: Cluster) -> None:
    for id in "abc":
        cluster.submit(id)
    assert cluster.states() == {"a": "starting", "b": "starting", "c": "waiting"}
    for id in "ab":
        cluster.backend.begin(id)
    cluster.turn()
    cluster.backend.end("b", "failed", "it broke")
    cluster.turn()
    assert cluster.states() == {"a": "running", "b": "failed", "c": "starting"}
    assert cluster.service.record("b").reason == "it broke"


def test_a_checkpoint_that_is_not_there_is_refused(cluster: Cluster, tmp_path: Path) -> None:
    with pytest.raises(SubmissionError, match=r"the machine of the cluster has no file .*gone"):
        cluster.service.submit({"id": "a"}, b"", checkpoint=str(tmp_path / "gone"))
    assert cluster.submit("a") and cluster.backend.starts == ["a"]


@pytest.mark.slow
def test_who_waits_hears_that_the_cluster_ends(cluster: Cluster) -> None:
    cluster.submit("a")
    said: list[BaseException] = []

    def wait() -> None:
        try:
            cluster.service.wait(["a"], 30.0)
        except ClosedError as closed:
            said.append(closed)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.05)
    cluster.service.close()
    thread.join(5)
    assert said and not thread.is_alive()
    with pytest.raises(ClosedError, match="waterflow cluster up"):
        cluster.service.wait(["a"], 30.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"id": "a", "devices": 3}, "asks for 3 devices; the cluster has 2"),
        ({"id": "a", "tenant": "nobody"}, "unknown tenant 'nobody'"),
        ({"id": "a", "tenant": "us", "memory": 1 << 31}, "needs 2,147,483,648 bytes on each device; the largest has"),
        ({"id": "a", "memory": -1}, "memory must be a number of bytes; got -1"),
        ({"id": "a", "devices": "many"}, "devices of a submission cannot be 'many'"),
        ({"id": "a", "devices": True}, "devices of a submission cannot be True"),
        ({"id": "a", "time_limit": 0}, "time_limit must be a positive number of seconds; got 0"),
        ({"id": "a", "time_limit": float("nan")}, "time_limit must be a positive number of seconds; got nan"),
        ({"id": "a", "time_limit": "2h"}, "time_limit of a submission cannot be '2h'"),
        ({"id": "a", "colour": 1}, "a submission has no 'colour'; it has id, tenant"),
        ({"id": "../a"}, "a job's id is 1 to 100 letters, digits, dots"),
        ({}, "a job's id is 1 to 100 letters"),
        ({"id": "a", "tenant": "\udcff"}, "tenant of a submission has characters that are no text"),
        ({"id": "a", "model": "a\0b"}, "model of a submission has characters that are no text"),
        ({"id": "a", "tenant": "us", "priority": "high"}, "priority 'high' is neither"),
    ],
)
def test_what_can_never_run_is_refused(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    cluster = Cluster(tmp_path, tenants=(Tenant("us", 2),))
    with pytest.raises(SubmissionError) as refused:
        cluster.service.submit({"tenant": "us"} | given if "devices" in given else given, b"")
    assert said in str(refused.value)
    assert cluster.store.jobs() == [] and cluster.backend.starts == []
    assert cluster.service.submit({"id": "a", "tenant": "us"}, b"")  # the id is free
    cluster.store.close()


def test_a_device_that_is_started_again_is_no_reason_to_refuse(cluster: Cluster) -> None:
    cluster.backend.lose("device-1")
    cluster.turn()
    with pytest.raises(BusyError, match="asks for 2 devices, and device-1 is being started again"):
        cluster.submit("a", devices=2)
    cluster.backend.return_("device-1")
    cluster.turn()
    assert cluster.submit("a", devices=2)


def test_cancel(cluster: Cluster) -> None:
    for id in "abc":
        cluster.submit(id)
    cluster.backend.begin("a")
    cluster.turn()
    assert cluster.service.cancel("c") and cluster.service.cancel("a")
    assert cluster.states() == {"a": "stopping", "b": "starting", "c": "cancelled"}
    assert cluster.backend.stopping == {"a": False}
    cluster.kill()  # the wish survives
    cluster.backend.obey()
    cluster.turn()
    assert cluster.states()["a"] == "cancelled" and not cluster.service.cancel("a")
    with pytest.raises(SubmissionError, match="no job is called 'z'"):
        cluster.service.cancel("z")


def test_a_lost_node(cluster: Cluster) -> None:
    cluster.submit("a")
    cluster.backend.begin("a")
    cluster.turn()
    cluster.backend.save("a", 7)
    (place,) = cluster.service.record("a").places
    cluster.turn()
    cluster.backend.lose(place[0])
    cluster.turn()
    job = cluster.service.record("a")
    assert job.state == "starting" and job.places[0][0] != place[0] and job.steps == 7 and job.attempts == 2
    assert cluster.backend.starts == ["a", "a"] and cluster.backend.resumed == ["a"]


def test_a_job_that_always_loses_its_node_fails(cluster: Cluster) -> None:
    cluster.submit("a")
    for lost in range(MOST_LOSSES + 1):
        assert not cluster.service.record("a").over, lost
        cluster.backend.begin("a")
        cluster.turn()
        (place,) = cluster.service.record("a").places
        cluster.backend.lose(place[0], "SIGSEGV")
        cluster.backend.return_(place[0])
        cluster.turn(2)
    job = cluster.service.record("a")
    assert job.state == "failed" and "lost 5 times without a checkpoint in between; the last time: SIGSEGV" in job.reason
    assert cluster.service.scheduler.book.entries == {}


def test_late_words_do_not_count(cluster: Cluster) -> None:
    cluster.submit("a")
    cluster.backend.begin("a")
    cluster.turn()
    (node, _, epoch) = cluster.service.record("a").places[0]
    cluster.backend.lose(node)
    cluster.turn()
    cluster.backend.waiting.append(Progress("a", node, epoch, 99, 0.9, 0.1, 1, 1.0))
    cluster.turn()
    assert cluster.service.status()["jobs"][0]["steps"] == 0


def test_an_end_that_an_older_process_tells_does_not_count(tmp_path: Path) -> None:
    """The node is back, and the job runs there again."""
    cluster = Cluster(tmp_path, devices=1)
    cluster.submit("a")
    cluster.backend.begin("a")
    cluster.turn()
    ((node, _, epoch),) = cluster.service.record("a").places
    cluster.backend.lose(node)
    cluster.backend.return_(node)
    cluster.turn()
    cluster.backend.begin("a")
    cluster.backend.waiting.append(Ended("a", node, epoch, "completed", tmp_path))
    cluster.turn()
    assert cluster.states() == {"a": "running"} and cluster.service.record("a").places[0][2] > epoch
    cluster.backend.end("a")
    cluster.turn()
    assert cluster.states() == {"a": "completed"}
    cluster.store.close()


def test_a_start_that_is_refused_is_tried_again(cluster: Cluster) -> None:
    node = cluster.backend.known["device-0"]
    other = cluster.backend.known["device-1"]
    cluster.backend.known = {}

    class Gone(dict):  # type: ignore[type-arg]
        def __missing__(self, name: str) -> Any:
            raise BackendError(f"node {name!r} is gone")

    cluster.backend.known = Gone()
    cluster.submit("a")
    assert cluster.states() == {"a": "waiting"}
    cluster.backend.known = {"device-0": node, "device-1": other}
    cluster.turn()
    assert cluster.states() == {"a": "starting"} and cluster.backend.starts == ["a"]
    assert any("is not started: node 'device-" in line for _, _, line in cluster.store.log("a"))


def test_a_restart_leaves_what_runs_alone(cluster: Cluster) -> None:
    for id in "abc":
        cluster.submit(id)
    for id in "ab":
        cluster.backend.begin(id)
    cluster.turn()
    before = dict(cluster.backend.runs)
    cluster.kill()
    cluster.turn(3)
    assert cluster.backend.runs == before and cluster.backend.starts == ["a", "b"] and not cluster.backend.stopping
    assert cluster.states() == {"a": "running", "b": "running", "c": "waiting"}
    # Nodes that are taken over are told of again.
    for node in cluster.backend.nodes():
        cluster.backend.waiting.append(NodeJoined(node.name, node.epoch, node.devices, node.memory))
    cluster.turn()
    assert cluster.backend.runs == before and not cluster.backend.stopping


def running(cluster: Cluster) -> None:
    """Job "a"."""
    cluster.submit("a")
    cluster.backend.begin("a")
    cluster.turn()


def test_a_stop_that_nobody_heard_is_asked_for_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(id: str, suspend: bool) -> None:
        raise Killed

    running(cluster)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(cluster.backend, "stop", dies)
        cluster.service.cancel("a")
    assert cluster.states() == {"a": "stopping"} and not cluster.backend.stopping
    cluster.kill()
    assert cluster.backend.stopping == {"a": False}
    cluster.backend.obey()
    cluster.turn()
    assert cluster.states() == {"a": "cancelled"}


def test_priorities_that_nobody_may_have_heard_are_told_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[str, str]] = []
    running(cluster)
    cluster.submit("b")
    cluster.backend.begin("b")
    monkeypatch.setattr(cluster.backend, "set_priority", lambda *what: told.append(what))
    cluster.turn(2)
    assert not told
    cluster.kill()
    assert told == [("a", "guaranteed"), ("b", "guaranteed")]
    cluster.turn(2)
    assert len(told) == 2


def test_a_job_that_is_being_suspended_can_be_cancelled(cluster: Cluster) -> None:
    running(cluster)
    cluster.store.change("a", state="stopping")
    cluster.backend.stop("a", suspend=True)
    assert cluster.service.cancel("a") and cluster.backend.stopping == {"a": False}


def test_a_stop_that_was_refused_is_asked_for_again_and_the_job_keeps_its_place(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(id: str, suspend: bool) -> None:
        raise BackendError("not now")

    running(cluster)
    places = cluster.service.record("a").places
    with monkeypatch.context() as patched:
        patched.setattr(cluster.backend, "stop", refuses)
        cluster.service.cancel("a")
    assert cluster.service.record("a").places == places and cluster.states() == {"a": "stopping"}
    cluster.turn(2)
    assert cluster.backend.stopping == {"a": False}
    assert any("cannot be reached: not now" in line for _, _, line in cluster.store.log("a"))


def test_what_ended_while_no_scheduler_ran(cluster: Cluster) -> None:
    for id in "ab":
        cluster.submit(id)
        cluster.backend.begin(id)
    cluster.turn()
    cluster.store.close()
    cluster.backend.end("a")
    cluster.backend.lose("device-1")
    cluster.backend.return_("device-1")
    cluster.open()
    assert cluster.states() == {"a": "completed", "b": "starting"}


def test_a_device_is_free_when_whoever_leaves_it_has_let_go(tmp_path: Path) -> None:
    """Also after a restart; but a job that hangs holds nobody up for ever."""
    cluster = Cluster(tmp_path, devices=1)
    cluster.submit("a")
    cluster.backend.begin("a")
    cluster.turn()
    cluster.submit("b")
    cluster.service.cancel("a")
    cluster.turn()
    assert cluster.states() == {"a": "stopping", "b": "waiting"} and cluster.backend.starts == ["a"]
    cluster.kill()
    cluster.turn()
    assert cluster.states() == {"a": "stopping", "b": "waiting"} and cluster.backend.starts == ["a"]
    cluster.backend.obey()
    cluster.turn()
    assert cluster.states() == {"a": "cancelled", "b": "starting"} and cluster.backend.starts == ["a", "b"]
    cluster.backend.begin("b")
    cluster.submit("c")
    cluster.service.cancel("b")
    cluster.turn(int(LET_GO_SECONDS) - 1)
    assert cluster.states()["c"] == "waiting"
    cluster.turn(2)
    assert cluster.states()["c"] == "starting" and cluster.states()["b"] == "stopping"
    cluster.store.close()


def test_a_cancelled_job_that_does_not_leave_is_ended_with_its_device(tmp_path: Path) -> None:
    """Who runs beside it is asked for a checkpoint before, goes on from it, and the loss is not put down to it."""
    cluster = antman(tmp_path, devices=2)
    for id, priority in (("one", "guaranteed"), ("two", "guaranteed"), ("beside", "opportunistic")):
        cluster.submit(id, priority=priority)
        cluster.backend.begin(id)
        cluster.backend.progress(id, 1, utilization=0.1)
        cluster.turn(12)
    places = {id: run[0] for id, run in cluster.backend.runs.items()}
    hangs, elsewhere = ("one", "two") if places["one"] == places["beside"] else ("two", "one")
    ((node, _),) = places["beside"]
    assert places[hangs] == places["beside"] and cluster.service.cancel(hangs)
    cluster.turn(int(CANCEL_SECONDS) - 1)
    cluster.kill()  # the time begins anew
    cluster.turn(int(CANCEL_SECONDS) - 1)
    assert cluster.states()[hangs] == "stopping" and not cluster.backend.asked_to_save
    cluster.turn(2)
    assert cluster.backend.asked_to_save == ["beside"] and cluster.backend.known[node].alive
    cluster.backend.save("beside", 5)
    cluster.turn(int(SAVE_SECONDS) + 1)
    cluster.turn()
    assert not cluster.backend.known[node].alive and cluster.states()[hangs] == "cancelled"
    assert any("did not leave within 30 s: its device's process is ended" in x for _, _, x in cluster.store.log(hangs))
    cluster.backend.return_(node)
    cluster.turn(12)
    beside = cluster.service.record("beside")
    assert cluster.backend.resumed == ["beside"] and beside.attempts == 2
    assert not cluster.service.scheduler.book.entries["beside"].alone  # nobody suspects it
    assert cluster.service.record(elsewhere).attempts == 1
    cluster.store.close()


def test_who_leaves_late_but_leaves_costs_nobody_anything(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, devices=1)
    running(cluster)
    cluster.service.cancel("a")
    cluster.turn(int(CANCEL_SECONDS) - 1)
    cluster.backend.obey()
    cluster.turn(2 * int(CANCEL_SECONDS))
    assert cluster.states() == {"a": "cancelled"} and cluster.backend.known["device-0"].alive
    cluster.store.close()


def test_a_time_limit_counts_all_runs_together(cluster: Cluster) -> None:
    """Waiting does not count; a restart of the scheduler and a lost device forget nothing."""
    assert cluster.submit("a", time_limit=100)
    cluster.turn(200)
    cluster.backend.begin("a")
    cluster.backend.progress("a", 1, seconds=60.0)
    cluster.turn()
    cluster.kill()
    cluster.backend.progress("a", 2, seconds=70.0)
    cluster.turn()
    assert cluster.service.status()["jobs"][0]["ran"] == 70.0
    cluster.backend.lose(cluster.backend.runs["a"][0][0][0])
    cluster.turn(2)
    cluster.backend.begin("a")
    cluster.backend.progress("a", 3, seconds=29.0)
    cluster.turn(2)
    assert cluster.states() == {"a": "running"} and not cluster.backend.stopping
    cluster.backend.progress("a", 4, seconds=31.0)
    cluster.turn()
    assert cluster.backend.stopping == {"a": False}
    cluster.kill()
    cluster.backend.progress("a", 4, seconds=32.0)
    cluster.turn()
    cluster.backend.obey()
    cluster.turn()
    job = cluster.service.record("a")
    assert job.state == "failed" and job.reason == "it ran for 1.68 min, and its time limit is 1.67 min"
    assert job.ran == 102.0 and cluster.service.status()["jobs"][0]["time_limit"] == 100
    assert any(line.startswith("is ended: it ran for") for _, _, line in cluster.store.log("a"))


def test_who_ends_at_its_limit_has_completed(cluster: Cluster) -> None:
    cluster.submit("a", time_limit=10.0)
    cluster.backend.begin("a")
    cluster.backend.progress("a", 1, seconds=11.0)
    cluster.turn()
    cluster.backend.end("a")
    cluster.turn()
    assert cluster.states() == {"a": "completed"} and cluster.service.record("a").reason == ""


def test_time_goes_on_when_the_systems_clock_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ahead and back, while a service runs and between two of them."""
    backend = FakeBackend(1, tmp_path)
    wall, passed = [1e9], [50.0]
    monkeypatch.setattr("waterflow.cluster.service.time.time", lambda: wall[0])
    monkeypatch.setattr("waterflow.cluster.service.boot_seconds", lambda: passed[0])

    def opened() -> Service:
        return Service(Store(tmp_path / "cluster.db"), backend, Fifo())

    service = opened()
    assert service.now() == 1e9
    for jump in (0.0, 1e7, -1e7, -1e8):
        wall[0] += jump
        passed[0] += 5.0
        service.turn(0.0)
    assert service.now() == 1e9 + 20.0
    service.submit({"id": "a"}, b"")
    wall[0] += 1e7
    passed[0] += 60.0
    service.store.close()
    service = opened()  # nobody was there for a minute
    assert service.now() == 1e9 + 80.0 and service.record("a").submitted == 1e9 + 20.0
    service.store.close()
    monkeypatch.setattr("waterflow.cluster.service.boot_id", lambda: "another")
    wall[0], passed[0] = 5.0, 1.0  # a machine without a clock of its own
    service = opened()
    before = service.now()
    assert before >= 1e9 + 20.0
    passed[0] += 7.0
    assert service.now() == before + 7.0
    service.store.close()


def test_a_clock_that_goes_back_stops_nothing(cluster: Cluster) -> None:
    cluster.turn()
    cluster.time -= 500.0
    before = cluster.service.now()
    cluster.turn(3)
    assert cluster.service.now() == before + 3.0


def test_who_comes_first_waits_for_who_makes_way(tmp_path: Path) -> None:
    """Both are settled at once, and the one that leaves was handed in later."""
    cluster = Cluster(tmp_path, devices=1, tenants=(Tenant("us", 1), Tenant("them", 0)))
    cluster.store.close()
    cluster.policy = lambda: POLICIES["capacity"](preempt=True)
    (tmp_path / "cluster.db").unlink()
    cluster.open()
    cluster.submit("late", tenant="them", priority="opportunistic")
    cluster.backend.begin("late")
    cluster.turn()
    cluster.submit("first", tenant="us")
    assert cluster.states() == {"late": "stopping", "first": "waiting"}
    cluster.backend.obey()
    cluster.turn()
    assert cluster.states() == {"late": "waiting", "first": "starting"}
    cluster.store.close()


@pytest.mark.parametrize("how", ["completed", "failed", "cancelled"])
def test_the_steps_of_a_job_that_ended_are_its_last_ones(cluster: Cluster, how: str) -> None:
    cluster.submit("a")
    cluster.backend.begin("a")
    cluster.backend.progress("a", 10, 0.5)
    cluster.turn()
    cluster.backend.end("a", how, steps=17)
    cluster.turn()
    assert cluster.service.status()["jobs"][0]["steps"] == 17 and cluster.service.record("a").steps == 17


def test_of_many_jobs_that_ended_the_last_are_shown(cluster: Cluster) -> None:
    for id in "abcdef":
        cluster.submit(id)
    for id in "bacd":
        cluster.backend.begin(id)
        cluster.turn()
        cluster.backend.end(id)
        cluster.turn()
    told = cluster.service.status(ended=2)
    assert [job["id"] for job in told["jobs"]] == ["c", "d", "e", "f"] and told["jobs_not_shown"] == 2
    told = cluster.service.status(ended=9)
    assert len(told["jobs"]) == 6 and told["jobs_not_shown"] == 0
    assert cluster.service.status()["jobs"] == told["jobs"]


def test_of_many_jobs_that_wait_the_first_are_shown(cluster: Cluster) -> None:
    ids = [f"job-{number}" for number in range(9)]
    for id in ids:
        cluster.submit(id)
    cluster.backend.begin("job-0")
    cluster.turn()
    cluster.backend.end("job-0")
    cluster.turn()
    told = cluster.service.status(ended=0, waiting=3)
    assert [job["id"] for job in told["jobs"]] == ids[1:6] and told["jobs_not_shown"] == 1
    assert told["waiting_not_shown"] == 3 and all(node["jobs"] for node in told["nodes"])
    told = cluster.service.status(waiting=0)
    assert [job["id"] for job in told["jobs"]] == ids[:3] and told["waiting_not_shown"] == 6
    everything = cluster.service.status()
    assert len(everything["jobs"]) == 9 and everything["waiting_not_shown"] == everything["jobs_not_shown"] == 0
    assert cluster.service.status(ended=9, waiting=9)["jobs"] == everything["jobs"]


def antman(folder: Path, devices: int = 1) -> Cluster:
    """A cluster whose policy lets jobs share devices."""
    cluster = Cluster(folder, devices)
    cluster.store.close()
    cluster.policy = POLICIES["antman"]
    (folder / "cluster.db").unlink()
    cluster.open()
    return cluster


def test_a_device_that_is_left_is_free_for_the_next_opportunistic_job_at_once(tmp_path: Path) -> None:
    cluster = antman(tmp_path)
    for number in range(40):
        cluster.submit(str(number), priority="opportunistic")
    for number in range(40):
        assert cluster.backend.starts[-1] == str(number)
        cluster.backend.begin(str(number))
        cluster.backend.progress(str(number), 1, utilization=1.0)
        cluster.service.turn(0.0)  # no time passes
        cluster.backend.end(str(number))
        cluster.service.turn(0.0)
    assert set(cluster.states().values()) == {"completed"}
    cluster.store.close()


def test_the_utilization_of_a_device_counts_once(tmp_path: Path) -> None:
    """All who run there tell of the whole device."""
    cluster = antman(tmp_path)
    (device,) = cluster.service.scheduler.book.devices
    for id in "abc":
        cluster.submit(id, priority="opportunistic")
        cluster.backend.begin(id)
        for resident in device.residents:
            cluster.backend.progress(resident.id, 1, utilization=0.3)
        cluster.turn(12)
        for resident in device.residents:
            cluster.backend.progress(resident.id, 2, utilization=0.3)
        cluster.turn()
        assert device.utilization == pytest.approx(0.3)
        assert cluster.service.status()["nodes"][0]["utilization"] == 0.3
    assert len(device.residents) == 3
    cluster.store.close()


def test_another_policy_or_other_tenants_are_refused(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, tenants=(Tenant("us", 2),))
    cluster.store.close()
    cluster.tenants = (Tenant("us", 1),)
    with pytest.raises(SubmissionError, match="has the tenants us=2; leave out --tenant"):
        cluster.open()


def test_down_suspends_and_up_goes_on(cluster: Cluster) -> None:
    cluster.submit("a")
    cluster.backend.begin("a")
    cluster.turn()
    ending = threading.Thread(target=cluster.service.down, args=(10.0,))
    ending.start()
    while not cluster.backend.stopping:
        time.sleep(0.01)
    assert cluster.backend.stopping == {"a": True}
    cluster.backend.obey()
    cluster.turn()
    ending.join(10)
    assert cluster.backend.closed and not ending.is_alive()
    with pytest.raises(ClosedError, match="start it again: waterflow cluster up"):
        cluster.submit("b")
    cluster.open()
    assert cluster.states() == {"a": "starting"} and cluster.backend.resumed == ["a"]


# -- killed at any moment


class Fragile:
    """Lets so many calls to store and backend through, then the process ends."""

    def __init__(self, inside: Any, names: tuple[str, ...], budget: list[int], before: bool) -> None:
        self._inside, self._names, self._budget, self._before = inside, names, budget, before

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inside, name)
        if name not in self._names:
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            self._budget[0] -= 1
            if self._budget[0] == 0 and self._before:
                raise Killed
            made = value(*args, **kwargs)
            if self._budget[0] == 0:
                raise Killed
            return made

        return call


@pytest.mark.parametrize("seed", range(40))
def test_killed_at_any_moment(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever it dies: no job is lost, none runs twice at a time, none again after its end, none that runs is touched."""
    if seed % 2:  # the state from events alone
        monkeypatch.setattr(JournaledScheduler, "save", lambda self: None)
    chance = random.Random(seed)
    cluster = Cluster(tmp_path, devices=3)
    backend = cluster.backend
    wanted: dict[str, bytes] = {}
    over: dict[str, str] = {}
    real_start = backend.start

    def start(id: str, *args: Any, **kwargs: Any) -> None:
        assert id not in over, f"{id} is started after it has {over[id]}"
        real_start(id, *args, **kwargs)

    backend.start = start  # type: ignore[method-assign]
    cancelled: set[str] = set()
    deaths = 0
    for step in range(120):
        budget = [chance.choice([0, 0, chance.randint(1, 12)])]
        before = chance.random() < 0.5
        service = cluster.service
        asking = Fragile(backend, ("start", "stop", "poll", "checkpoints"), budget, before)
        writing = Fragile(cluster.store, ("change", "place", "set_meta", "say", "add", "add_event"), budget, before)
        service.backend = service.jobs.backend = asking  # type: ignore[assignment]
        service.store = service.jobs.store = service.scheduler._store = writing  # type: ignore[assignment]
        runs = dict(backend.runs)
        try:
            draw = chance.random()
            if draw < 0.25 and step < 90:
                id = f"job-{len(wanted)}"
                wanted[id] = b"x"
                service.submit({"id": id, "devices": chance.randint(1, 2)}, b"x")
            elif draw < 0.32 and wanted:
                id = chance.choice(sorted(wanted))
                if id in {job.id for job in cluster.store.jobs()}:
                    cancelled.add(id)
                    service.cancel(id)
            elif draw < 0.4:
                node = f"device-{chance.randrange(3)}"
                if backend.known[node].alive:
                    backend.lose(node)
                else:
                    backend.return_(node)
            elif backend.runs and draw < 0.8:
                id = chance.choice(sorted(backend.runs))
                kind = chance.choice(["begin", "progress", "save", "end"])
                if kind == "end" and id not in backend.stopping:
                    over[id] = "completed"
                    backend.end(id)
                elif kind == "begin":
                    backend.begin(id)
                elif kind != "end":
                    getattr(backend, kind)(id, step)
            else:
                backend.obey()
            cluster.time += 1.0
            service.turn(0.0)
        except Killed:
            deaths += 1
            alive = {id: run for id, run in backend.runs.items() if id in runs}
            stopping = set(backend.stopping)
            cluster.kill()
            now = {id: run for id, run in backend.runs.items() if id in alive}
            assert now == alive, "a restart touched what ran"
            assert _preempted(cluster) & backend.runs.keys() <= backend.stopping.keys(), "nobody heard that it is to stop"
            assert {id for id in backend.stopping if id not in stopping} <= cancelled | _preempted(cluster)
        except (SubmissionError, BusyError):
            pass
        # Whoever got no answer asks again.
        service = cluster.service
        service.backend = service.jobs.backend = backend
        service.store = service.jobs.store = service.scheduler._store = cluster.store
        for id in wanted:
            if cluster.store.job(id) is None:
                with contextlib.suppress(BusyError):
                    service.submit({"id": id, "devices": 1}, b"x")
    for node in backend.known:
        if not backend.known[node].alive:
            backend.return_(node)
    for _ in range(200):
        backend.obey()
        for id in sorted(backend.runs):
            over[id] = "completed"
            backend.end(id)
        cluster.turn()
    assert set(cluster.states()) == set(wanted)
    for id, state in cluster.states().items():
        assert state == "completed" or (state == "cancelled" and id in cancelled) or state == "failed", (id, state)
        assert state != "completed" or over[id] == "completed"
    assert deaths > 3 and not backend.runs
    cluster.store.check()
    cluster.store.close()


def _preempted(cluster: Cluster) -> set[str]:
    return {job.id for job in cluster.store.jobs() if job.state == "stopping"}


@pytest.mark.parametrize("policy", ["antman", "las", "gandiva", "fifo"])
def test_a_long_queue_is_taken_up_from_events(tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the state is written now and then; what came since gives the same decisions again."""
    monkeypatch.setattr("waterflow.cluster.journal.ENTRIES_PER_EVENT", 5)
    cluster = Cluster(tmp_path, devices=3)
    cluster.policy = POLICIES[policy]
    cluster.store.set_meta("scheduler", None)
    cluster.store._run("DELETE FROM meta WHERE key != 'format'")
    cluster.store.forget_events()
    cluster.store.close()
    cluster.open()
    chance = random.Random(0)
    for number in range(60):
        priority = chance.choice(["guaranteed", "opportunistic"])
        cluster.submit(f"job-{number}", devices=chance.randint(1, 2), priority=priority)
        for id in sorted(cluster.backend.runs):
            cluster.backend.begin(id) if chance.random() < 0.5 else cluster.backend.progress(id, number, number / 60)
        cluster.turn()
        cluster.backend.obey()
        if number % 7 == 6:
            before = cluster.service.scheduler._inner.to_dict()
            runs = dict(cluster.backend.runs)
            cluster.kill()
            assert cluster.backend.runs == runs
            after = cluster.service.scheduler._inner.to_dict()
            assert [entry["places"] for entry in after["entries"]] == [entry["places"] for entry in before["entries"]]
    assert len(cluster.store.events()) < 60
    cluster.store.close()


# -- what goes wrong in a turn


def told_of(cluster: Cluster) -> str:
    return str(cluster.service.status()["trouble"])


def fails(error: Exception) -> Any:
    def raises(*_: Any, **__: Any) -> Any:
        raise error

    return raises


FULL = [sqlite3.OperationalError("database or disk is full"), OSError(errno.ENOSPC, "No space left on device")]


@pytest.mark.parametrize("error", FULL, ids=["database", "file"])
def test_a_full_disk_is_waited_for(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """What ended meanwhile is told when there is room, once; requests are refused with the reason until then."""
    running(cluster)
    cluster.submit("b")
    with monkeypatch.context() as full:
        full.setattr(Store, "_run", fails(error))
        cluster.backend.end("a", steps=12)
        for _ in range(3):
            with pytest.raises(BusyError, match="cannot write down its state, and tries again"):
                cluster.turn()
        assert str(error) in told_of(cluster) and not cluster.service.over
        with pytest.raises(BusyError, match="tries again"):
            cluster.submit("c")
        with pytest.raises(BusyError, match="tries again"):
            cluster.service.cancel("b")
    cluster.turn()
    assert told_of(cluster) == "None"
    assert cluster.states() == {"a": "completed", "b": "starting"} and cluster.service.record("a").steps == 12
    assert cluster.submit("c")
    cluster.turn()
    assert cluster.backend.starts == ["a", "b", "c"]
    lines = [line for _, _, line in cluster.store.log("a")]
    assert lines.count("completed") == 1
    cluster.store.check()


def test_a_full_disk_behind_a_commit(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite rolls back by itself, or not; either way nothing is half written."""
    running(cluster)
    cluster.store._db.execute("PRAGMA max_page_count = 1")  # the smallest that it takes: what there is
    with pytest.raises(BusyError, match="database or disk is full"):
        for number in range(100):
            cluster.submit(f"large-{number}", b"x" * 100_000)
    assert "database or disk is full" in told_of(cluster)
    known = set(cluster.states())
    cluster.store._db.execute("PRAGMA max_page_count = 1000000")
    cluster.turn()
    assert told_of(cluster) == "None" and set(cluster.states()) == known
    assert cluster.submit("after", b"x" * 100_000)
    cluster.kill()
    assert set(cluster.states()) == known | {"after"}


def test_files_that_find_no_room_are_written_later(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(cluster.backend, "start", fails(OSError(errno.ENOSPC, "No space left on device")))
        cluster.submit("a")
        cluster.turn(20)
        assert cluster.states() == {"a": "waiting"} and not cluster.service.over
    cluster.turn(40)
    assert cluster.states() == {"a": "starting"} and cluster.backend.starts == ["a"]
    lines = [line for _, _, line in cluster.store.log("a")]
    assert sum("is not started: [Errno 28] No space left on device" in line for line in lines) == 1


def test_a_start_that_could_not_be_noted_is_made_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend refuses, and there is no room to say so."""
    with monkeypatch.context() as full:

        def start(*_: Any) -> None:
            full.setattr(Store, "_run", fails(FULL[0]))
            raise BackendError("not now")

        full.setattr(cluster.backend, "start", start)
        assert cluster.submit("a")  # that much is written down
        with pytest.raises(BusyError):
            cluster.turn()
    cluster.turn(2)
    assert cluster.states() == {"a": "starting"} and cluster.backend.starts == ["a"]


def test_an_event_that_cannot_be_taken_holds_up_nobody(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is in what becomes of one event; those of other jobs are taken, and this one by and by."""
    for id in "abc":
        cluster.submit(id)
    for id in "ab":
        cluster.backend.begin(id)
    cluster.turn()
    whole = Reconciler.take

    def take(self: Reconciler, now: float, event: Any) -> None:
        if isinstance(event, Ended) and event.id == "a":
            raise ZeroDivisionError("a fault")
        whole(self, now, event)

    with monkeypatch.context() as faulty:
        faulty.setattr(Reconciler, "take", take)
        cluster.backend.end("a")
        cluster.backend.end("b")
        with pytest.raises(ZeroDivisionError):
            cluster.turn()
        cluster.turn()
        assert cluster.states() == {"a": "running", "b": "completed", "c": "starting"}
        assert "Ended of 'a': ZeroDivisionError: a fault" in told_of(cluster) and cluster.submit("d")
    cluster.turn(12)
    assert cluster.states()["a"] == "completed" and told_of(cluster) == "None"
    assert cluster.backend.starts == ["a", "b", "c", "d"]


def test_a_job_that_cannot_be_settled_holds_up_nobody(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Reconciler._start

    def start(self: Reconciler, job: Any, *rest: Any) -> Any:
        made = whole(self, job, *rest)
        if job.id == "a":
            raise ZeroDivisionError("a fault")
        return made

    with monkeypatch.context() as faulty:
        faulty.setattr(Reconciler, "_start", start)
        assert cluster.submit("a") and cluster.submit("b")
        cluster.turn()
        assert cluster.states() == {"a": "waiting", "b": "starting"}
        assert "job 'a': ZeroDivisionError: a fault" in told_of(cluster)
    cluster.turn(40)
    assert cluster.states()["a"] == "starting" and told_of(cluster) == "None"


def test_a_policy_that_fails_once_is_asked_again(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop goes on; what the scheduler had decided in vain does not count."""
    running(cluster)
    cluster.service.start()
    with monkeypatch.context() as faulty:
        faulty.setattr(Fifo, "decide", fails(KeyError("nobody")))
        with pytest.raises(KeyError):
            cluster.submit("b")
        until = time.monotonic() + 10
        while "KeyError" not in told_of(cluster):
            assert time.monotonic() < until
            time.sleep(0.01)
        assert cluster.states() == {"a": "running"} and not cluster.service.over
    until = time.monotonic() + 10
    while told_of(cluster) != "None":
        assert time.monotonic() < until
        time.sleep(0.01)
    assert cluster.submit("b") and cluster.backend.starts == ["a", "b"]
    cluster.service.close()


def test_a_backend_that_cannot_be_heard_is_heard_later(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    running(cluster)
    with monkeypatch.context() as broken:
        broken.setattr(cluster.backend, "poll", fails(OSError(errno.EMFILE, "Too many open files")))
        cluster.service.start()
        until = time.monotonic() + 10
        while "Too many open files" not in told_of(cluster):
            assert time.monotonic() < until
            time.sleep(0.01)
    cluster.backend.end("a")
    assert cluster.service.wait(["a"], 10.0) == ["a"] and told_of(cluster) == "None"
    cluster.service.close()


@pytest.mark.parametrize(
    ("checkpoint", "said"),
    [("x" * 300, "can be no checkpoint: .*File name too long"), ("/" + "y/" * 3000, "can be no checkpoint"),
     ("", "has no file"), ("/dev/zero", "has no file /dev/zero")],
)  # fmt: skip
def test_a_path_that_can_be_none_is_refused(cluster: Cluster, checkpoint: str, said: str) -> None:
    with pytest.raises(SubmissionError, match=said):
        cluster.service.submit({"id": "a"}, b"", checkpoint=checkpoint)
    cluster.turn()
    assert not cluster.service.over and cluster.states() == {} and cluster.submit("a")


def test_a_payload_beyond_the_limit_is_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    assert LARGEST_PAYLOAD < 10**9  # SQLite's
    monkeypatch.setattr("waterflow.cluster.store.LARGEST_PAYLOAD", 1 << 20)
    with pytest.raises(InvalidJobError, match=r"the payload has 1.0 MiB; at most 1.0 MiB are taken. Let a function load"):
        cluster.submit("a", b"x" * ((1 << 20) + 1))
    assert cluster.submit("a", b"x" * (1 << 20))


SMALL_DISK = """
import resource, sys
from pathlib import Path
from tests.cluster.test_service import Cluster
from waterflow.cluster.service import BusyError

cluster = Cluster(Path(sys.argv[1]))
cluster.submit("a")
cluster.backend.begin("a")
cluster.turn()
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
added = 0
try:
    while added < 100:
        cluster.submit(f"large-{added}", bytes(50_000))
        added += 1
except BusyError as error:
    print(error)
cluster.backend.end("a", steps=12)
try:
    cluster.turn()
except BusyError:
    print("waits", cluster.service.trouble)
resource.setrlimit(resource.RLIMIT_FSIZE, before)
cluster.turn()
print(cluster.states()["a"], cluster.service.record("a").steps, len(cluster.states()) == 1 + added, cluster.service.trouble)
cluster.store.check()
"""


def test_a_disk_that_is_really_too_small(tmp_path: Path) -> None:
    """Files may grow to so many bytes only, in a process of its own; then again as they like."""
    command = [sys.executable, "-c", SMALL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert done.returncode == 0, done.stderr
    refused, waits, after = done.stdout.splitlines()
    assert "cannot write down its state" in refused and waits.startswith("waits OperationalError: ")
    assert after == "completed 12 True None"


def test_requests_do_not_wait_while_the_whole_state_is_written(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop writes it; what comes in meanwhile stays noted, and is there after a kill at any moment."""
    monkeypatch.setattr("waterflow.cluster.journal.ENTRIES_PER_EVENT", 1)
    whole, written = json.dumps, []

    def dumps(value: Any, **more: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict) and "submission" in value[0]:
            one_more = threading.Thread(target=cluster.submit, args=(f"meanwhile-{len(written)}",))
            one_more.start()
            one_more.join(20.0)
            assert not one_more.is_alive(), "a submission waits for the state to be written"
            written.append(len(value))
        return whole(value, **more)

    monkeypatch.setattr("waterflow.cluster.journal.json.dumps", dumps)
    for number in range(8):
        cluster.submit(f"job-{number}")
    assert not written  # no request writes it
    cluster.turn()
    assert written == [8]
    assert [name for name, *_ in cluster.store.events()] == ["submit", "tick"]  # those that came meanwhile
    before = cluster.service.scheduler._inner.to_dict()
    cluster.kill()
    assert cluster.service.scheduler._inner.to_dict()["entries"] == before["entries"]
    assert "meanwhile-0" in cluster.states()


def test_a_state_that_cannot_be_written_costs_no_event(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waterflow.cluster.journal.ENTRIES_PER_EVENT", 1)
    for number in range(8):
        cluster.submit(f"job-{number}")
    noted, state = cluster.store.events(), cluster.store.meta("scheduler")
    with monkeypatch.context() as full:
        full.setattr(Store, "forget_events", fails(FULL[0]))
        with pytest.raises(sqlite3.OperationalError):
            cluster.turn()
    assert cluster.store.events()[: len(noted)] == noted and cluster.store.meta("scheduler") == state
    cluster.kill()
    assert len(cluster.service.scheduler.book.entries) == 8
