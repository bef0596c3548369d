"""The door of a cluster whose devices a test holds in its hands."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.fake_backend import FakeBackend
from tests.cluster.live_jobs import failing
from waterflow.cluster.client import Cluster
from waterflow.cluster.connections import most_connections
from waterflow.cluster.endpoint import Endpoint
from waterflow.cluster.policies.fifo import Fifo
from waterflow.cluster.service import Service
from waterflow.cluster.store import Store
from waterflow.errors import ClusterError, InvalidJobError, SubmissionError

TOKEN = "t" * 40


class Door:
    """An endpoint, the service behind it, and a client in front of it."""

    def __init__(self, folder: Path) -> None:
        self.backend = FakeBackend(2, folder)
        self.store = Store(folder / "cluster.db")
        seconds = itertools.count(1000.0)
        self.service = Service(self.store, self.backend, Fifo(), clock=lambda: next(seconds))
        self.endpoint = Endpoint(self.service, TOKEN)
        self.endpoint.start()
        self.client = Cluster(self.endpoint.address, TOKEN)

    def submit(self, count: int) -> list[str]:
        ids = [f"job-{number}" for number in range(count)]
        with self.store.transaction():
            for id in ids:
                self.service.submit({"id": id}, b"payload")
        return ids


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Door]:
    made = Door(tmp_path)
    yield made
    made.endpoint.close()
    made.service.close()


def test_thousands_of_ids_can_be_waited_for(door: Door) -> None:
    ids = door.submit(1200)
    assert door.client.wait(ids, timeout=0.0) == [] and door.client.wait([]) == []
    for id in ids[:2]:
        door.backend.begin(id)
        door.service.turn(0.0)
        door.backend.end(id)
    door.service.turn(0.0)
    assert door.client.wait(ids) == ids[:2]
    with pytest.raises(SubmissionError, match="no job is called 'nobody'"):
        door.client.wait([*ids, "nobody"])


def test_a_time_limit_is_text_or_seconds(door: Door) -> None:
    for id, given, seconds in (("a", "2h", 7200.0), ("b", 90, 90.0), ("c", " 1.5 min", 90.0), ("d", None, None)):
        assert door.client.submit(failing, id=id, time_limit=given) == id
        assert door.client.status(id)["time_limit"] == seconds
    for wrong in ("2 parsecs", "0s", "-1", float("inf"), True, "h"):
        with pytest.raises(InvalidJobError, match="must be a positive number of seconds, or text like '90s'"):
            door.client.submit(failing, time_limit=wrong)


def half_open(door: Door, count: int) -> list[socket.socket]:
    """Connections of people who do not come to an end with their header."""
    port = int(door.endpoint.address.rpartition(":")[2])
    made = []
    for _ in range(count):
        made.append(socket.create_connection(("127.0.0.1", port), timeout=10))
        made[-1].sendall(b"GET /status HTTP/1.1\r\nAuth")
    return made


def closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_who_shows_no_token_keeps_nobody_out(door: Door) -> None:
    """More of them than the process may have files: the oldest make way."""
    server = door.endpoint._server
    server.most = 40
    before = len(os.listdir("/proc/self/fd"))
    theirs = half_open(door, 100)
    assert door.client.status()["nodes"]
    assert all(closed(connection) for connection in theirs[:80])
    until = time.monotonic() + 10
    while len(os.listdir("/proc/self/fd")) - before - len(theirs) > 12:  # this test has the other ends of all of them
        assert time.monotonic() < until
        time.sleep(0.01)
    for connection in theirs:
        connection.close()


def test_a_header_has_a_limited_time(door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waterflow.cluster.connections.HEADER_SECONDS", 0.3)
    (theirs,) = half_open(door, 1)
    began = time.monotonic()
    while not closed_now(theirs):  # a letter now and then does not help
        assert time.monotonic() < began + 10
        with contextlib.suppress(OSError):
            theirs.sendall(b"o")
        time.sleep(0.05)
    theirs.close()


def closed_now(connection: socket.socket) -> bool:
    connection.settimeout(0.01)
    try:
        return closed(connection)
    except TimeoutError:
        return False


@pytest.mark.slow
def test_who_waits_has_a_limit_too(door: Door) -> None:
    (id,) = door.submit(1)
    door.endpoint._server.most = 8
    waiting = [threading.Thread(target=door.client.wait, args=(id, 3.0), daemon=True) for _ in range(8)]
    for thread in waiting:
        thread.start()
    until = time.monotonic() + 10
    while len(door.endpoint._server._known) < 8:
        assert time.monotonic() < until
        time.sleep(0.01)
    with pytest.raises(ClusterError, match="as many connections as it can have; try again"):
        door.client.status()
    for thread in waiting:
        thread.join()
    assert door.client.status()["nodes"]


def test_many_clients_at_once_need_not_knock_again(door: Door) -> None:
    assert door.endpoint._server.request_queue_size >= 128 and most_connections() >= 128
    threads = [threading.Thread(target=door.client.status) for _ in range(60)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_page_of_the_jobs_that_wait(door: Door) -> None:
    ids = door.submit(30)
    told = door.client.status(ended=1, waiting=5)
    assert [job["id"] for job in told["jobs"]] == ids[:7] and told["waiting_not_shown"] == 23
    assert len(door.client.status()["jobs"]) == 30
