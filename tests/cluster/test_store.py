"""The store: one id is one job, and what was promised is there after the process was killed."""

from __future__ import annotations

import os
import pickle
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from waterflow.cluster.store import PLACED, Store, digest_of
from waterflow.errors import ClusterError, InvalidJobError


def asked(id: str = "a", **more: Any) -> dict[str, Any]:
    return {"id": id, "tenant": "default", "devices": 1, "priority": "guaranteed", "submitted": 1.0, **more}


def check(store: Store) -> None:
    """The file is whole, and a job has a node as long as it is on one."""
    assert store._all("PRAGMA integrity_check") == [("ok",)]
    for job in store.jobs():
        assert (job.node is not None) == (job.state in PLACED), job


@pytest.fixture
def store(tmp_path: Path):
    store = Store(tmp_path / "cluster.db")
    yield store
    store.close()


def test_one_id_is_one_job(store: Store) -> None:
    assert store.add(asked(), b"payload")
    assert not store.add(asked(submitted=2.0), b"payload")  # the same answer, whenever it comes
    with pytest.raises(
        InvalidJobError, match="job 'a' is known already, and differs in its payload, or the checkpoint.*One id is one"
    ):
        store.add(asked(), b"another")
    with pytest.raises(InvalidJobError, match="differs in devices 1 there and 2 here"):
        store.add(asked(devices=2), b"payload")
    assert [job.id for job in store.jobs()] == ["a"] and store.payload("a") == b"payload"


def test_classes_by_value_have_one_digest_in_every_process(tmp_path: Path) -> None:
    """cloudpickle numbers them by chance."""
    made = tmp_path / "made.py"
    made.write_text(
        "import cloudpickle, sys\n"
        "class Thing:\n    def go(self): return 3\n"
        "sys.stdout.buffer.write(cloudpickle.dumps(Thing().go))\n"
    )
    one, two = (subprocess.run([sys.executable, made], capture_output=True, check=True).stdout for _ in range(2))
    assert one != two and pickle.loads(one)() == 3
    assert digest_of(asked(), one) == digest_of(asked(), two)
    other = cloudpickle.dumps(lambda: 4)
    assert digest_of(asked(), one) != digest_of(asked(), other)


def test_one_id_goes_on_from_one_checkpoint(store: Store) -> None:
    assert store.add(asked(), b"", "first") and not store.add(asked(), b"", "first")
    for other in ("second", None):
        with pytest.raises(InvalidJobError, match="or the checkpoint that it resumes from"):
            store.add(asked(), b"", other)


def test_payloads_go_when_asked(store: Store) -> None:
    store.add(asked(), b"large")
    store.forget_payload("a")
    assert store._all("SELECT * FROM payloads") == [] and not store.add(asked(), b"large")


def test_a_transaction_is_whole_or_nothing(store: Store) -> None:
    store.add(asked(), b"")
    with pytest.raises(KeyboardInterrupt), store.transaction():
        store.change("a", state="running")
        with store.transaction():
            store.place("a", ("n", 0, 1))
        raise KeyboardInterrupt
    job = store.job("a")
    assert job is not None and job.state == "waiting" and job.node is None
    with store.transaction():
        store.change("a", state="running", started=3.0)
        store.place("a", ("m", 2, 4))
    job = store.job("a")
    assert job is not None and job.state == "running" and (job.node, job.device, job.epoch) == ("m", 2, 4)
    check(store)
    store.place("a", None)
    with pytest.raises(AssertionError):
        check(store)


def test_jobs_by_id_and_state(store: Store) -> None:
    for number in range(5):
        store.add(asked(f"job-{number}"), b"")
    store.change("job-3", state="completed", ended=5.0)
    assert [job.id for job in store.jobs(states=["completed"])] == ["job-3"]
    assert [job.id for job in store.jobs(["job-4", "job-3", "job-9"])] == ["job-3", "job-4"]
    assert store.jobs([]) == [] and store.job("job-9") is None
    assert [job.over for job in store.jobs()] == [False, False, False, True, False]


def test_a_log_keeps_its_last_lines(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waterflow.cluster.store.LOG_LINES", 20)
    for number in range(30):
        store.say("b", 0.0, "another job's")
        store.say("a", float(number), f"line {number}")
    lines = store.log("a")
    assert [line for _, _, line in lines] == [f"line {number}" for number in range(10, 30)]
    assert store.log("a", after=lines[-2][0]) == [lines[-1]]


def test_other_files_are_refused(tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.db"
    damaged.write_bytes(b"no database " * 1000)
    with pytest.raises(ClusterError, match=r"damaged.db cannot be used as the state of a cluster: file is not a database"):
        Store(damaged)
    for other in (1, 99):  # of an earlier version, which had a journal, and of a later one
        store = Store(tmp_path / f"{other}.db")
        store.set_meta("format", other)
        store.close()
        with pytest.raises(ClusterError, match=f"has format {other}, and this version reads format 2. Use the version"):
            Store(tmp_path / f"{other}.db")


def test_only_its_owner_reads_it(store: Store) -> None:
    assert store.path.stat().st_mode & 0o777 == 0o600


KILLED = """
import sys, os
from pathlib import Path
from waterflow.cluster.store import Store
store = Store(Path(sys.argv[1]))
asked = {"id": "", "tenant": "t", "priority": "guaranteed", "submitted": 0.0}
for number in range(10**6):
    with store.transaction():
        store.add(asked | {"id": f"job-{number}"}, b"x" * 3000)
        store.set_meta("count", number + 1)
    os.write(1, b"%d\\n" % number)
"""


@pytest.mark.parametrize("after", [3, 40, 150])
def test_what_was_promised_survives_a_kill(tmp_path: Path, after: int) -> None:
    path = tmp_path / "cluster.db"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    told = -1
    for line in process.stdout:
        told = int(line)
        if told >= after:
            break
    os.kill(process.pid, signal.SIGKILL)
    rest = process.stdout.read().split()
    process.wait(10)
    told = int(rest[-1]) if rest else told
    store = Store(path)
    count = store.meta("count")
    assert count >= told + 1 and len(store.jobs()) == count
    check(store)
    store.close()


def test_full_synchronization_is_on(store: Store) -> None:
    with sqlite3.connect(store.path) as other:
        assert other.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    assert store._all("PRAGMA synchronous") == [(2,)]
