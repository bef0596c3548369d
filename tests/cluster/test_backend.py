"""The contract of Backend, held by every backend that there is."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import waterflow as wf
from tests.cluster.jobs import equal, jobs
from tests.cluster.watched import Watched
from waterflow.cluster.backend import Request
from waterflow.cluster.group import Process, RunningGroup
from waterflow.cluster.local import LocalBackend
from waterflow.cluster.payload import pack
from waterflow.cluster.shared_folder import SharedFolder
from waterflow.cluster.worker import WorkerSettings
from waterflow.executor.engine import Engine
from waterflow.training.runner import JobRunner

pytestmark = pytest.mark.needs_time("the contract of every backend, with jobs that last long enough to be stopped")

SETTINGS = WorkerSettings(memory="512MiB", lanes=1, checkpoint_seconds=0.2, report_seconds=0.1)
SLOW = 0.01  # seconds for a batch

_ids = count()


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    # A late process must not end only because nobody is connected to it.
    folder = tmp_path_factory.mktemp("shared")
    with LocalBackend(2, folder, settings=SETTINGS, silent_seconds=2.0, outlive=30.0) as backend:
        yield Watched(backend)


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    from benchmarks.loopback import LoopbackCluster
    from waterflow.cluster.ray import RayBackend

    with (
        LoopbackCluster([1, 1]) as cluster,
        RayBackend(
            cluster.address, tmp_path_factory.mktemp("shared"), settings=SETTINGS, silent_seconds=2.0, token=cluster.token
        ) as backend,
    ):
        yield Watched(backend)


WITHOUT_RAY = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")


@pytest.fixture(params=["local", pytest.param("ray", marks=[WITHOUT_RAY, pytest.mark.slow])])
def there(request: pytest.FixtureRequest) -> Watched:
    watched = request.getfixturevalue(request.param)
    assert isinstance(watched, Watched)
    watched.alive()
    return watched


@pytest.fixture
def id(request: pytest.FixtureRequest) -> str:
    return f"{request.node.name}/{next(_ids)}"


def test_results_are_those_of_train(there: Watched, id: str) -> None:
    first, second = there.alive()
    there.start(id, pack(jobs(3)), first)
    there.start(id + "b", pack(lambda: jobs(3)), second)
    expected = wf.train(jobs(3), lanes=1)
    for name in (id, id + "b"):
        ended = there.end(name)
        assert ended.how == "completed" and ended.reason == ""
        equal(there.results(name), expected)
    phases = [part.phase for part in there.of(id)]
    assert phases == sorted(phases, key=["beginning", "training", "ended"].index)
    for node in (first, second):  # what was asked to be forgotten is told no more
        assert there.answer(node).parts == ()


def test_progress(there: Watched, id: str) -> None:
    first, _ = there.alive()
    there.start(id, pack(jobs(2, batches=60, epochs=1, seconds=SLOW)), first)
    told = there.until(id, lambda part: part.steps > 20 and part.pace > 0)
    assert told.fraction == told.steps / 120
    assert SLOW / 2 < 1 / told.pace < 40 * SLOW
    assert told.memory > 2 * 4 * (12 * 24 + 24 + 24 + 1)
    ended = there.end(id)
    assert ended.how == "completed" and ended.steps == 120 and ended.fraction == 1.0
    steps = [part.steps for part in there.of(id)]
    assert steps == sorted(steps) and steps[-1] <= 120
    assert {epoch for _, epoch, part in there.told if part.id == id} == {there.epoch(first)}


def test_checkpoint_when_asked(there: Watched, id: str) -> None:
    first, _ = there.alive()
    there.start(id, pack(jobs(seconds=SLOW)), first)
    there.until(id, lambda part: part.phase == "training")
    there.ask(id, "checkpoint")
    assert (there.until(id, lambda part: part.saved is not None).saved or 0) >= 0
    assert there.end(id).how == "completed"
    assert not list(there.backend.folder.job(id).rglob("*.checkpoint"))  # nobody needs them any more


def test_suspend_and_go_on_elsewhere(there: Watched, id: str) -> None:
    first, second = there.alive()
    payload = pack(jobs(2, batches=200, seconds=SLOW))
    there.start(id, payload, first)
    there.until(id, lambda part: part.steps > 15)
    there.ask(id, "stop", suspend=True)
    ended = there.end(id)
    assert ended.how == "suspended" and ended.stopping == "suspended" and there.results(id) == []
    there.start(id, payload, second, "opportunistic")
    told = there.until(id, lambda part: part.phase == "training")
    assert told.steps >= ended.steps >= 15 and told.priority == "opportunistic"
    assert there.end(id).how == "completed"
    equal(there.results(id), wf.train(jobs(2, batches=200), lanes=1))


def test_stop(there: Watched, id: str) -> None:
    first, _ = there.alive()
    there.start(id, pack(jobs(batches=10_000, seconds=SLOW)), first)
    there.until(id, lambda part: part.steps > 0)
    there.ask(id, "stop")
    assert there.end(id, seconds=5).how == "cancelled" and there.results(id)[0].status == "cancelled"
    there.ask(id, "stop")  # once more is nothing


def test_data_that_is_stuck_can_be_cancelled(there: Watched, id: str) -> None:
    first, _ = there.alive()
    made = jobs(batches=5, seconds=0.0)
    made[0].evaluate = lambda model: [time.sleep(0.01) for _ in range(10_000)]
    there.start(id, pack(made), first)
    there.until(id, lambda part: part.steps >= 5)
    there.ask(id, "stop", suspend=True)  # which waits for a boundary
    there.until(id, lambda part: part.stopping == "suspended")
    there.listen()
    assert there.of(id)[-1].phase == "training"
    there.ask(id, "stop")
    assert there.end(id, seconds=10).how == "cancelled"


def test_priority_can_change(there: Watched, id: str) -> None:
    first, _ = there.alive()
    there.start(id, pack(jobs(batches=60, seconds=SLOW)), first, "guaranteed")
    there.until(id, lambda part: part.phase == "training")
    there.ask(id, "set", priority="opportunistic")
    there.until(id, lambda part: part.priority == "opportunistic")
    assert there.end(id).how == "completed"
    equal(there.results(id), wf.train(jobs(batches=60), lanes=1))


def test_failure_says_why(there: Watched, id: str) -> None:
    def explode(_: Any) -> float:
        raise ZeroDivisionError("planted")

    first, _ = there.alive()
    made = jobs(2)
    made[0].evaluate = explode
    there.start(id, pack(made), first)
    ended = there.end(id)
    assert ended.how == "failed" and "net-0" in ended.reason and "planted" in ended.reason
    results = there.results(id)
    assert isinstance(results[0].error, ZeroDivisionError) and "explode" in str(results[0].traceback)
    assert results[1].losses == wf.train(jobs(2), lanes=1)[1].losses  # the other one was left alone


def test_payload_that_fails_to_unpack(there: Watched, id: str) -> None:
    def jobs_of_nothing() -> list[wf.Job]:
        raise RuntimeError("planted")

    first, _ = there.alive()
    there.start(id, pack(jobs_of_nothing), first)
    ended = there.end(id)
    assert ended.how == "failed" and "planted" in ended.reason


def test_unpicklable_jobs_are_refused_by_name() -> None:
    lock = threading.Lock()
    made = jobs(2)
    made[1].evaluate = lambda model: float(lock.locked())
    with pytest.raises(wf.InvalidJobError, match="job 'net-1': evaluate cannot be sent.*variable 'lock'"):
        pack(made)
    with pytest.raises(wf.InvalidJobError, match="function that makes the jobs.*variable 'lock'"):
        pack(lambda: jobs(int(lock.locked())))
    made = jobs(1)
    made[0].data.source = {"guard": [lock]}  # type: ignore[union-attr]
    with pytest.raises(wf.InvalidJobError, match="data cannot be sent.*entry 0, entry 'guard', attribute 'source'"):
        pack(made)


def test_damaged_checkpoint_is_refused(there: Watched, id: str) -> None:
    first, second = there.alive()
    payload = pack(jobs(batches=60, seconds=SLOW))
    there.start(id, payload, first)
    there.until(id, lambda part: part.steps > 5)
    there.ask(id, "stop", suspend=True)
    there.end(id)
    newest = there.backend.folder.last_state(id, 0)
    assert newest is not None
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    there.start(id, payload, second)
    ended = there.end(id)
    assert ended.how == "failed" and f"CheckpointError: {newest} is damaged" in ended.reason
    assert f"an older file of {newest.parent}" in ended.reason


def test_a_run_that_was_here_is_not_begun_again(there: Watched, id: str) -> None:
    first, _ = there.alive()
    there.start(id, pack(jobs(batches=2)), first)
    assert there.end(id).how == "completed"
    there.answer(first)
    there.ask(id, "start")
    ended = there.end(id)
    assert ended.how == "refused" and ended.reason == "run 1 of it was here before"
    equal(there.results(id), wf.train(jobs(batches=2), lanes=1))


def test_killed_in_the_middle(there: Watched, id: str) -> None:
    """Its jobs go on elsewhere from the last checkpoint: none lost, none run twice, no bit different."""
    first, second = there.alive()
    payload = pack(jobs(2, batches=60, seconds=SLOW))
    there.start(id, payload, first)
    there.start(id + "b", pack(jobs(batches=150, epochs=1, seconds=SLOW)), second)
    saved = there.until(id, lambda part: (part.saved or 0) > 10).saved or 0
    epoch = there.epoch(first)
    os.kill(there.process(first), signal.SIGKILL)
    killed = time.monotonic()
    assert there.lost(first, epoch, 2) and time.monotonic() - killed < 2
    assert there.backend.folder.end_of(id, 1) is None
    there.start(id, payload, second)
    told = there.until(id, lambda part: part.phase == "training", 10)
    assert told.steps >= saved and time.monotonic() - killed < 10
    assert there.end(id).how == "completed"
    equal(there.results(id), wf.train(jobs(2, batches=60), lanes=1))
    there.alive()
    assert there.epoch(first) > epoch
    ends = {part.how for part in there.of(id + "b") if part.phase == "ended"} or {there.end(id + "b").how}
    assert ends == {"completed"}  # the other node's were left alone


def test_an_end_that_was_not_told_is_noted(there: Watched, id: str) -> None:
    first, _ = there.alive()
    there.start(id, pack(jobs(batches=3)), first)
    deadline = time.monotonic() + 20
    while there.backend.folder.end_of(id, 1) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    epoch = there.epoch(first)
    os.kill(there.process(first), signal.SIGKILL)
    there.lost(first, epoch, 2)
    noted = there.backend.folder.end_of(id, 1)
    assert noted == {"how": "completed", "reason": "", "steps": 6}
    there.alive()


@pytest.mark.slow
def test_node_that_comes_back_late(there: Watched, id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped until its work was placed elsewhere, then let go: it can neither write nor speak, and ends."""
    first, second = there.alive()
    monkeypatch.setattr(there.backend, "_kill", lambda *_: None)  # as if it could not be reached
    late, old = there.process(first), there.epoch(first)
    payload = pack(jobs(2, batches=100, seconds=SLOW))
    there.start(id, payload, first)
    there.until(id, lambda part: part.saved is not None)
    os.kill(late, signal.SIGSTOP)
    try:
        assert "silent" in there.lost(first, old, 6)
        there.start(id, payload, second)
        there.until(id, lambda part: part.phase == "training")
        files = _written_by(there, id, old)
    finally:
        os.kill(late, signal.SIGCONT)
    heard = len(there.told)
    assert there.end(id).how == "completed"
    assert _written_by(there, id, old) <= files
    assert all(epoch != old for _, epoch, _ in there.told[heard:])
    equal(there.results(id), wf.train(jobs(2, batches=100), lanes=1))
    deadline = time.monotonic() + 5
    while _lives(late):
        assert time.monotonic() < deadline, "the late process trains on"
        time.sleep(0.05)
    monkeypatch.undo()
    there.alive()


def _written_by(there: Watched, id: str, epoch: int) -> set[str]:
    return {path.name for path in there.backend.folder.job(id).rglob(f"*.{epoch}.*") if path.is_file()}


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_everything_is_on_loopback(there: Watched) -> None:
    """No socket that a process of this backend listens on can be reached from elsewhere."""
    pids = {there.process(node) for node in there.alive()} | _descendants(os.getpid())
    inodes = {
        os.readlink(fd) for pid in pids for fd in Path(f"/proc/{pid}/fd").glob("*") if os.path.islink(fd)
    }  # fmt: skip
    for table, loopback in (("tcp", ("0100007F",)), ("tcp6", ("0" * 24 + "01000000", "0" * 16 + "FFFF00000100007F"))):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                assert fields[1].split(":")[0] in loopback, line


def _descendants(pid: int) -> set[int]:
    found = {pid}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if parent == pid:
            found |= _descendants(int(entry.name))
    return found


def test_torch_threads() -> None:
    """What is compared here was trained with one thread inside of operations, as workers do."""
    assert torch.get_num_threads() == 1


def test_an_end_comes_behind_a_save_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hears of the end finds no checkpoint that is written later."""
    folder = SharedFolder(tmp_path)
    folder.make()
    epoch = folder.new_epoch()
    folder.prepare("a", 1, pack(jobs(batches=3, epochs=1)))
    told: list[object] = []
    begun = threading.Event()
    run = JobRunner.run

    def run_during_a_save(runner: JobRunner) -> wf.JobResult:
        threading.Thread(target=group.save).start()
        assert begun.wait(60)
        return run(runner)

    def write(_: RunningGroup, *state: object) -> None:
        begun.set()
        group._thread.join(0.5)  # until the job is over, and its end would be told
        told.append("written")

    monkeypatch.setattr(JobRunner, "run", run_during_a_save)
    monkeypatch.setattr(JobRunner, "snapshot", lambda _: SimpleNamespace(steps=0))
    monkeypatch.setattr(RunningGroup, "_write", write)
    with Engine(lanes=1) as engine:
        process = Process("here", epoch, folder, engine)

        def tell() -> None:
            part = group.part
            told.append((part.phase, part.saved))

        group = RunningGroup(Request("start", "a", 1), process, tell, lambda: None)
        group.start()
        group._thread.join(60)
    assert told == [("training", None), "written", ("training", 3), ("ended", 3)]
