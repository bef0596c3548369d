"""The door of a cluster whose devices a test holds in its hands."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.fake_backend import FakeBackend
from tests.cluster.live_jobs import failing
from waterflow.cluster.client import Cluster
from waterflow.cluster.endpoint import Endpoint
from waterflow.cluster.policies.fifo import Fifo
from waterflow.cluster.service import Service
from waterflow.cluster.store import Store
from waterflow.errors import InvalidJobError, SubmissionError

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


def test_a_page_of_the_jobs_that_wait(door: Door) -> None:
    ids = door.submit(30)
    told = door.client.status(ended=1, waiting=5)
    assert [job["id"] for job in told["jobs"]] == ids[:7] and told["waiting_not_shown"] == 23
    assert len(door.client.status()["jobs"]) == 30
