"""The live loop over a backend that a test holds in its hands, and its death at any moment."""

from __future__ import annotations

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
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fake_backend import FakeBackend
from tests.cluster.test_store import check
from waterflow.cluster.backend import Part, Request
from waterflow.cluster.policies import POLICIES
from waterflow.cluster.policies.antman import AntMan
from waterflow.cluster.policies.fifo import Fifo
from waterflow.cluster.reconciler import MOST_LOSSES, Reconciler
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
        self,
        folder: Path,
        devices: int = 2,
        tenants: tuple[Tenant, ...] = (),
        policy: Callable[[], Any] = Fifo,
        backend: FakeBackend | None = None,
    ) -> None:
        self.folder = folder
        self.tenants = tenants
        self.backend = backend or FakeBackend(devices, folder)
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
            self.rows_are_the_book()

    def rows_are_the_book(self) -> None:
        """The rows have what the book has, as JSON types."""
        if self.service._behind:
            return
        book, rows = self.service.scheduler.book, self.store.entries()
        there = [(entry.submission.to_dict(), entry.order, entry.columns()) for entry in book.entries.values()]
        assert json.loads(json.dumps(rows)) == json.loads(json.dumps(there))

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
    check(cluster.store)
    lines = [line for _, _, line in cluster.store.log("a")]
    assert lines[0] == "submitted, guaranteed" and lines[-1] == "completed"


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
        ({"id": "a", "devices": 3}, "devices must be 1, as a job runs on one device; got 3. Submit several jobs each by itself"),
        ({"id": "a", "devices": 0}, "devices must be 1, as a job runs on one device; got 0"),
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
    for node in ("device-0", "device-1"):
        cluster.backend.lose(node)
    cluster.turn()
    with pytest.raises(BusyError, match="device-0, device-1 are being started again; try it in some seconds"):
        cluster.submit("a")
    cluster.backend.return_("device-1")
    cluster.turn()
    assert cluster.submit("a")


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


def test_quota_and_priority_are_kept_and_requested(tmp_path: Path) -> None:
    cluster = antman(tmp_path)
    running(cluster)
    cluster.service.set("a", "1MiB", "opportunistic")
    part = cluster.backend.devices["device-0"].parts["a", 1]
    assert (part.priority, part.quota) == ("opportunistic", 1 << 20) and len(cluster.backend.told_priorities) == 1
    told = cluster.service.status()["jobs"][0]
    assert (told["priority"], told["quota"]) == ("opportunistic", 1 << 20)
    assert [line for _, _, line in cluster.store.log("a")][-1] == "goes on as opportunistic"
    cluster.rows_are_the_book()
    cluster.kill()
    cluster.turn(3)
    assert len(cluster.backend.told_priorities) == 1 and not cluster.submit("a")  # it is the same job
    cluster.service.set("a", quota=0.5)  # of its device
    assert cluster.backend.devices["device-0"].parts["a", 1].quota == 1 << 29
    cluster.backend.lose("device-0")
    cluster.turn()
    cluster.backend.return_("device-0")
    cluster.turn()
    part = cluster.backend.devices["device-0"].parts["a", 2]  # what it begins with again
    assert (part.priority, part.quota) == ("opportunistic", 1 << 29)
    cluster.service.set("a", priority="guaranteed")
    cluster.turn()  # it is asked when the start is answered
    assert cluster.backend.devices["device-0"].parts["a", 2] == replace(part, priority="guaranteed")
    cluster.store.close()


def test_the_priority_of_a_job_that_waits(tmp_path: Path) -> None:
    cluster = antman(tmp_path)
    running(cluster)
    cluster.submit("b", auto=False)
    cluster.backend.progress("a", 1, utilization=0.1)
    cluster.turn(12)
    assert cluster.states()["b"] == "waiting"
    cluster.service.set("b", "1GiB", "opportunistic")
    cluster.kill()
    cluster.turn()
    assert cluster.backend.runs["b"][1] == "opportunistic"
    cluster.backend.begin("b")
    cluster.submit("c", auto=False)
    cluster.submit("d", priority="opportunistic")
    cluster.service.set("c", priority="opportunistic")
    cluster.service.set("d", priority="guaranteed")
    cluster.backend.end("a")
    cluster.turn(2)
    assert cluster.backend.runs["d"][1] == "guaranteed" and cluster.service.status()["jobs"][2]["priority"] == "opportunistic"
    cluster.store.close()


@pytest.mark.parametrize(
    ("id", "asked", "said"),
    [
        ("x", {"quota": "1MiB"}, "no job is called 'x'"),
        ("over", {"quota": "1MiB"}, "job 'over' has ended, or is about to: only one that waits or runs can be changed"),
        ("leaves", {"quota": "1MiB"}, "job 'leaves' has ended, or is about to"),
        ("low", {}, "job 'low': nothing is to be changed; give a quota, a priority, or both"),
        ("low", {"quota": "2 parsecs"}, "job 'low': quota must be bytes as a whole number, a share"),
        ("low", {"quota": True}, "quota must be bytes"),
        ("low", {"quota": "2GiB", "priority": "guaranteed"}, "its quota of 2147483648 bytes exceeds .* limit of 1073741824"),
        ("waits", {"quota": "2GiB"}, "its quota of 2147483648 bytes exceeds"),
        ("low", {"quota": "1MiB", "priority": "high"}, "priority must be 'guaranteed' or 'opportunistic'; got 'high'"),
        ("low", {"quota": "1MiB", "priority": "guaranteed"},
         "takes 1 guaranteed devices; of the quota of 'us', 2, 2 are used. Leave it opportunistic, or"),
        ("theirs", {"quota": "1MiB", "priority": "guaranteed"},
         "'theirs' runs at device-[01]:0, which '(high|other)' has as guaranteed. Wait for its end, or"),
        ("waits", {"priority": "guaranteed"}, "takes 1 guaranteed devices; of the quota of 'none', 0, 0 are used"),
    ],
)  # fmt: skip
def test_what_cannot_be_set_is_refused(tmp_path: Path, id: str, asked: dict[str, Any], said: str) -> None:
    tenants = Tenant("us", 2), Tenant("them", 1), Tenant("none", 0)
    cluster = Cluster(tmp_path, 2, tenants, partial(AntMan, window=1.0))
    for name, tenant, memory in (
        ("over", "us", 0), ("high", "us", 0), ("other", "us", 0), ("leaves", "us", 0), ("low", "us", 0), ("theirs", "them", 0),
        ("waits", "none", 1 << 30),
    ):  # fmt: skip
        guaranteed = name in ("over", "high", "other")
        cluster.submit(name, tenant=tenant, memory=memory, priority="guaranteed" if guaranteed else "opportunistic")
        cluster.turn(3)
        if name in cluster.backend.runs:
            cluster.backend.progress(name, 1, utilization=0.3)
        if name == "over":
            cluster.backend.end("over")
        cluster.turn(3)
    cluster.service.cancel("leaves")
    before = cluster.store.entries(), cluster.backend.runs
    assert set(before[1]) == {"high", "other", "leaves", "low", "theirs"} and cluster.states()["waits"] == "waiting"
    with pytest.raises((SubmissionError, InvalidJobError), match=said):
        cluster.service.set(id, **asked)
    cluster.turn()
    assert (cluster.store.entries(), cluster.backend.runs) == before and not cluster.backend.told_priorities
    cluster.store.close()


def test_a_policy_without_priorities_refuses_them(cluster: Cluster) -> None:
    running(cluster)
    with pytest.raises(SubmissionError, match="policy 'fifo' runs all with one priority; start another cluster, with --policy"):
        cluster.service.set("a", priority="opportunistic")
    cluster.service.set("a", quota=1 << 20)
    assert cluster.backend.devices["device-0"].parts["a", 1].quota == 1 << 20


def test_a_lost_node(cluster: Cluster) -> None:
    cluster.submit("a")
    cluster.backend.begin("a")
    cluster.turn()
    cluster.backend.save("a", 7)
    place = (cluster.service.record("a").node or "",)
    cluster.turn()
    cluster.backend.lose(place[0])
    cluster.turn()
    job = cluster.service.record("a")
    assert job.state == "starting" and job.node != place[0] and job.steps == 7 and job.attempts == 2
    assert cluster.backend.starts == ["a", "a"] and cluster.backend.resumed == ["a"]


def test_a_job_that_always_loses_its_node_fails(cluster: Cluster) -> None:
    cluster.submit("a")
    for lost in range(MOST_LOSSES + 1):
        assert not cluster.service.record("a").over, lost
        cluster.backend.begin("a")
        cluster.turn()
        place = (cluster.service.record("a").node or "",)
        cluster.backend.lose(place[0], "SIGSEGV")
        cluster.backend.return_(place[0])
        cluster.turn(2)
    job = cluster.service.record("a")
    assert job.state == "failed" and job.reason.endswith(
        f"lost 5 times without a checkpoint in between; the last time: node {place[0]!r}: SIGSEGV"
    )
    assert cluster.service.scheduler.book.entries == {}


def test_late_states_do_not_count(cluster: Cluster) -> None:
    """Of a process that was lost, though its node is back, and the job runs there again."""
    cluster.backend.lose("device-1")
    cluster.turn()
    cluster.submit("a")
    cluster.backend.begin("a")
    cluster.turn()
    old = cluster.backend.devices["device-0"]
    cluster.backend.lose("device-0")
    cluster.backend.return_("device-0")
    cluster.turn()
    part = old.parts["a", 1]
    for late in (replace(part, steps=99), replace(part, phase="ended", how="completed")):
        old.parts["a", 1] = late
        cluster.backend._told(old.state())
        cluster.turn()
        with cluster.store.transaction():
            cluster.service.jobs.see(cluster.time, [old.state()])
    job = cluster.service.record("a")
    assert job.state == "starting" and job.attempts == 2 and job.epoch is not None and job.epoch > old.epoch
    assert cluster.service.status()["jobs"][0]["steps"] == 0


def test_a_start_that_its_device_refuses_is_tried_again(cluster: Cluster) -> None:
    cluster.submit("a")
    cluster.backend.end("a", "refused", "can't start new thread")
    cluster.turn()
    assert cluster.states() == {"a": "waiting"} and told_of(cluster) == "job 'a': can't start new thread"
    cluster.turn(9)
    assert cluster.states() == {"a": "waiting"} and cluster.submit("b")
    cluster.turn()
    assert cluster.states() == {"a": "starting", "b": "starting"} and told_of(cluster) == "None"
    assert cluster.service.record("a").attempts == 2 and cluster.backend.starts == ["a", "b", "a"]


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


def running(cluster: Cluster) -> None:
    """Job "a"."""
    cluster.submit("a")
    cluster.backend.begin("a")
    cluster.turn()


@pytest.mark.parametrize("kind", ["start", "stop", "set"])
def test_a_request_that_nobody_heard_is_made_again(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next scheduler, which finds the difference; and by the same one, if the request was lost on its way."""
    cluster = antman(tmp_path)
    if kind != "start":
        running(cluster)

    def ask() -> None:
        if kind == "start":
            cluster.submit("a")
        elif kind == "stop":
            cluster.service.cancel("a")
        else:
            book = cluster.service.scheduler.book
            book.set_priority(book.entries["a"], "opportunistic")
            cluster.turn()

    def took_up() -> bool:
        part = cluster.backend.devices["device-0"].parts.get(("a", 1))
        return {
            "start": part is not None,
            "stop": part is not None and part.stopping == "cancelled",
            "set": part is not None and part.priority == "opportunistic",
        }[kind]

    now = [100.0]
    monkeypatch.setattr("waterflow.cluster.nodes.time.monotonic", lambda: now[0])
    with monkeypatch.context() as lossy:
        lossy.setattr(FakeBackend, "_send", lambda *_: None)
        ask()
        cluster.turn(3)
    assert not took_up()
    now[0] += 0.5
    cluster.turn()
    assert not took_up()
    now[0] += 0.6
    cluster.turn()
    assert took_up()
    cluster.store.close()


def test_a_request_that_was_never_made_is_made_by_the_next_scheduler(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(*_: object) -> None:
        raise Killed

    running(cluster)
    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(cluster.backend, "request", dies)
        cluster.service.cancel("a")
    assert cluster.states() == {"a": "stopping"} and not cluster.backend.stopping
    cluster.kill()
    assert cluster.backend.stopping == {"a": False}
    cluster.backend.obey()
    cluster.turn()
    assert cluster.states() == {"a": "cancelled"}


def test_an_older_state_is_no_answer(cluster: Cluster) -> None:
    """It was told before the request was taken up: the job is not started twice, and not stopped for nothing."""
    before = cluster.backend.devices["device-0"].state()
    cluster.submit("a")
    for _ in range(3):
        cluster.time += 1.0
        cluster.backend._states = {"device-0": before}
        with cluster.service._turn([before]):
            pass
    assert cluster.backend.starts == ["a"] and cluster.states() == {"a": "starting"}
    cluster.turn()
    assert cluster.backend.starts == ["a"] and not cluster.backend.stopping


def test_what_the_table_does_not_know_is_stopped_and_forgotten(cluster: Cluster) -> None:
    running(cluster)
    device = cluster.backend.devices["device-1"]
    cluster.backend.folder.prepare("x", 1, b"")
    device.request(device.inbox.handled + 1, [Request("start", "x", 1)])
    device.parts["y", 3] = Part("y", 3, "ended", "guaranteed", "completed")
    cluster.backend.attach_again()
    cluster.turn()
    assert cluster.backend.stopping == {"x": False}
    cluster.backend.obey()
    cluster.turn(2)
    assert device.parts == {} and cluster.states() == {"a": "running"}


def test_a_job_that_is_being_suspended_can_be_cancelled(cluster: Cluster) -> None:
    running(cluster)
    node = cluster.service.record("a").node
    assert node is not None
    cluster.backend.request(node, Request("stop", "a", 1, suspend=True))
    cluster.turn()
    assert cluster.service.cancel("a")
    cluster.turn()
    assert cluster.backend.stopping == {"a": False}


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


def test_who_comes_waits_on_the_device_for_who_leaves(tmp_path: Path) -> None:
    """Its memory is admitted there; a job that hangs holds nobody up, and one that leaves is not started before it has left."""
    cluster = Cluster(tmp_path, devices=1)
    running(cluster)
    cluster.submit("b")
    cluster.service.cancel("a")
    cluster.turn()
    assert cluster.states() == {"a": "stopping", "b": "starting"} and cluster.backend.starts == ["a", "b"]
    cluster.kill()
    cluster.backend.begin("b")
    cluster.turn()
    assert cluster.states() == {"a": "stopping", "b": "running"} and cluster.backend.starts == ["a", "b"]
    cluster.backend.obey()
    cluster.turn()
    assert cluster.states() == {"a": "cancelled", "b": "running"}
    cluster.store.close()


def test_who_moves_starts_when_it_has_left(cluster: Cluster) -> None:
    running(cluster)
    book = cluster.service.scheduler.book
    (here,) = book.entries["a"].devices
    (there,) = [device for device in book.devices if device is not here]
    book.move(book.entries["a"], [there])
    cluster.turn(3)
    assert cluster.states() == {"a": "stopping"} and cluster.backend.stopping == {"a": True}
    cluster.kill()
    cluster.backend.obey()
    cluster.turn()
    assert cluster.states() == {"a": "starting"} and cluster.backend.resumed == ["a"]
    assert cluster.service.record("a").node == there.place[0]


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
        cluster.turn()
    assert cluster.backend.stopping == {"a": True}
    cluster.backend.obey()
    cluster.turn()
    ending.join(10)
    assert cluster.backend.closed and not ending.is_alive()
    with pytest.raises(ClosedError, match="start it again: waterflow cluster up"):
        cluster.submit("b")
    cluster.open()
    assert cluster.states() == {"a": "starting"} and cluster.backend.resumed == ["a"]


@pytest.mark.parametrize("policy", ["antman", "las", "gandiva", "fifo"])
def test_a_long_queue_is_taken_up_from_its_rows(tmp_path: Path, policy: str) -> None:
    cluster = Cluster(tmp_path, devices=3, policy=POLICIES[policy])
    chance = random.Random(0)
    for number in range(60):
        priority = chance.choice(["guaranteed", "opportunistic"])
        cluster.submit(f"job-{number}", priority=priority)
        for id in sorted(cluster.backend.runs):
            cluster.backend.begin(id) if chance.random() < 0.5 else cluster.backend.progress(id, number, number / 60)
        cluster.turn()
        cluster.backend.obey()
        if number % 7 == 6:
            before = cluster.store.entries(), cluster.service.scheduler.notes()
            runs = dict(cluster.backend.runs)
            cluster.kill()
            assert cluster.backend.runs == runs
            cluster.rows_are_the_book()
            after = cluster.store.entries(), cluster.service.scheduler.notes()
            assert [row[2]["places"] for row in after[0]] == [row[2]["places"] for row in before[0]]
            assert after[1]["order"] == before[1]["order"] == number + 1
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
    check(cluster.store)


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
        full.setattr(cluster.backend.folder, "_prepare", fails(OSError(errno.ENOSPC, "No space left on device")))
        cluster.submit("a")
        cluster.turn(20)
        assert cluster.states() == {"a": "waiting"} and not cluster.service.over
    cluster.turn(10)
    assert cluster.states() == {"a": "starting"} and cluster.backend.starts == ["a"]
    lines = [line for _, _, line in cluster.store.log("a")]
    assert sum("is not started: [Errno 28] No space left on device" in line for line in lines) == 1


def test_what_cannot_be_taken_up_holds_up_nobody(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault is in what becomes of one job; others are taken up, and this one by and by."""
    for id in "abc":
        cluster.submit(id)
    for id in "ab":
        cluster.backend.begin(id)
    cluster.turn()
    whole = Reconciler._take

    def take(self: Reconciler, job: Any, part: Part, state: Any) -> None:
        whole(self, job, part, state)
        if part.phase == "ended" and part.id == "a":
            raise ZeroDivisionError("a fault")

    with monkeypatch.context() as faulty:
        faulty.setattr(Reconciler, "_take", take)
        cluster.backend.end("a")
        cluster.backend.end("b")
        cluster.turn()
        assert cluster.states() == {"a": "running", "b": "completed", "c": "starting"}
        assert "job 'a': ZeroDivisionError: a fault" in told_of(cluster) and cluster.submit("d")
    cluster.turn(12)
    assert cluster.states()["a"] == "completed" and told_of(cluster) == "None"
    assert cluster.backend.starts == ["a", "b", "c", "d"]


def test_a_job_that_cannot_be_settled_holds_up_nobody(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Reconciler._start

    def start(self: Reconciler, job: Any, *rest: Any) -> None:
        if job.id == "a":
            raise ZeroDivisionError("a fault")
        whole(self, job, *rest)

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
        broken.setattr(cluster.backend, "listen", fails(OSError(errno.EMFILE, "Too many open files")))
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
from tests.cluster.test_store import check
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
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))  # less than there is
try:
    cluster.turn()
except BusyError:
    print("waits", cluster.service.trouble)
resource.setrlimit(resource.RLIMIT_FSIZE, before)
cluster.turn()
print(cluster.states()["a"], cluster.service.record("a").steps, len(cluster.states()) == 1 + added, cluster.service.trouble)
check(cluster.store)
"""


def test_a_disk_that_is_really_too_small(tmp_path: Path) -> None:
    """Files may grow to so many bytes only, in a process of its own; then again as they like."""
    command = [sys.executable, "-c", SMALL_DISK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ | {"PYTHONPATH": os.getcwd()})
    assert done.returncode == 0, done.stderr
    refused, waits, after = done.stdout.splitlines()
    assert "cannot write down its state" in refused and waits.startswith("waits OperationalError: ")
    assert after == "completed 12 True None"
