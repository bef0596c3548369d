"""The contract of Backend, held by every backend that there is."""

from __future__ import annotations

import importlib.util
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import waterflow as wf
from tests.cluster.jobs import equal, jobs
from waterflow.cluster.backend import BackendError, BackendEvent, Checkpointed, Ended, NodeJoined, NodeLost, Progress, Started
from waterflow.cluster.group import Part, Process, RunningGroup
from waterflow.cluster.ledger import Ledger
from waterflow.cluster.local import LocalBackend
from waterflow.cluster.payload import load_results, pack
from waterflow.cluster.shared_folder import SharedFolder
from waterflow.cluster.worker import WorkerSettings
from waterflow.executor.engine import Engine
from waterflow.training.runner import JobRunner

pytestmark = pytest.mark.needs_time("the contract of every backend, with jobs that last long enough to be stopped")

SETTINGS = WorkerSettings(memory="512MiB", lanes=1, checkpoint_seconds=0.2, report_seconds=0.1)
SLOW = 0.01  # seconds for a batch

_ids = count()


class Watched:
    """A backend with all that it told. ``process`` gives the process of a node."""

    def __init__(self, backend: Ledger, process: Callable[[str], int]) -> None:
        self.backend = backend
        self.process = process
        self.events: list[BackendEvent] = []
        self.seen = 0  # of them

    def until(self, condition: Callable[[BackendEvent], bool], seconds: float = 20.0) -> Any:
        """Poll until an event meets the condition; it is returned, and those behind it are still to be looked at."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            while self.seen < len(self.events):
                self.seen += 1
                if condition(event := self.events[self.seen - 1]):
                    return event
            self.events += self.backend.poll(0.1)
        raise AssertionError(f"not within {seconds} s; there was {self.events}")

    def event(self, kind: type, id: str, seconds: float = 20.0, **fields: Any) -> Any:
        """The next event of a kind about ``id``, with these fields."""
        return self.until(
            lambda e: (
                isinstance(e, kind)
                and getattr(e, "id", None) == id
                and all(getattr(e, name) == value for name, value in fields.items())
            ),
            seconds,
        )

    def of(self, id: str) -> list[BackendEvent]:
        return [event for event in self.events if getattr(event, "id", None) == id]

    def alive(self, seconds: float = 30.0) -> list[str]:
        """The names of all nodes, once all of them are alive."""
        deadline = time.monotonic() + seconds
        while not all(node.alive for node in self.backend.nodes()):
            assert time.monotonic() < deadline, self.backend.nodes()
            self.events += self.backend.poll(0.1)
        self.seen = len(self.events)
        return [node.name for node in self.backend.nodes()]


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    # A late process must not end only because nobody is connected to it.
    folder = tmp_path_factory.mktemp("shared")
    with LocalBackend(2, folder, settings=SETTINGS, silent_seconds=2.0, outlive=30.0) as backend:
        yield Watched(backend, backend.process)


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    from waterflow.cluster.ray import LoopbackCluster, RayBackend

    with (
        LoopbackCluster([1, 1]) as cluster,
        RayBackend(cluster.address, tmp_path_factory.mktemp("shared"), settings=SETTINGS, silent_seconds=2.0) as backend,
    ):
        yield Watched(backend, backend.process)


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
    there.backend.start(id, pack(jobs(3)), [(first, 0)])
    there.backend.start(id + "b", pack(lambda: jobs(3)), [(first, 0), (second, 0)])
    ends = {}
    there.until(lambda e: isinstance(e, Ended) and ends.update({e.id: e}) is None and len(ends) == 2)
    expected = wf.train(jobs(3), lanes=1)
    for name in (id, id + "b"):
        assert ends[name].how == "completed" and ends[name].reason == ""
        equal(load_results(ends[name].results), expected)
    assert there.backend.running() == [] and there.backend.checkpoint(id) is None  # type: ignore[func-returns-value]
    kinds = [type(e) for e in there.of(id)]
    assert kinds[0] is Started and kinds[-1] is Ended and kinds.count(Ended) == 1


def test_progress(there: Watched, id: str) -> None:
    first, _ = there.alive()
    there.backend.start(id, pack(jobs(2, batches=60, epochs=1, seconds=SLOW)), [(first, 0)])
    told = there.until(lambda e: isinstance(e, Progress) and e.id == id and e.steps > 20 and e.step_seconds > 0)
    assert told.fraction == told.steps / 120
    assert SLOW / 2 < told.step_seconds < 40 * SLOW
    assert told.memory > 2 * 4 * (12 * 24 + 24 + 24 + 1)
    assert 0 <= told.utilization <= 1
    assert told.epoch == next(n.epoch for n in there.backend.nodes() if n.name == first)
    ended = there.event(Ended, id)
    assert ended.how == "completed" and ended.steps == 120
    steps = [e.steps for e in there.of(id) if isinstance(e, Progress)]
    assert steps == sorted(steps) and steps[-1] <= 120


def test_checkpoint_when_asked(there: Watched, id: str) -> None:
    first, _ = there.alive()
    assert there.backend.checkpoints(id) is None
    there.backend.start(id, pack(jobs(seconds=SLOW)), [(first, 0)])
    there.event(Started, id)
    there.backend.checkpoint(id)
    told = there.event(Checkpointed, id)
    assert told.path == there.backend.checkpoints(id) and told.steps >= 0
    there.event(Ended, id)
    assert not list(told.path.rglob("*.checkpoint"))  # nobody needs them any more


def test_suspend_and_go_on_elsewhere(there: Watched, id: str) -> None:
    first, second = there.alive()
    payload = pack(jobs(2, batches=200, seconds=SLOW))
    there.backend.start(id, payload, [(first, 0)])
    there.until(lambda e: isinstance(e, Progress) and e.id == id and e.steps > 15)
    there.backend.stop(id, suspend=True)
    ended = there.event(Ended, id)
    assert ended.how == "suspended" and ended.results == there.backend.checkpoints(id)
    assert load_results(ended.results) == []
    there.backend.start(id, payload, [(second, 0)], "opportunistic", ended.results)
    told = there.event(Progress, id)
    assert told.steps >= 15 and told.node == second
    ended = there.event(Ended, id)
    assert ended.how == "completed" and ended.node == second
    equal(load_results(ended.results), wf.train(jobs(2, batches=200), lanes=1))


@pytest.mark.slow
def test_move_without_waiting(there: Watched, id: str) -> None:
    """A start while the stop is under way follows it."""
    first, second = there.alive()
    payload = pack(jobs(batches=200, seconds=SLOW))
    there.backend.start(id, payload, [(first, 0)])
    there.until(lambda e: isinstance(e, Progress) and e.id == id and e.steps > 5)
    there.backend.stop(id, suspend=True)
    there.backend.start(id, payload, [(second, 0)], checkpoint=there.backend.folder.job(id))
    there.event(Ended, id, how="suspended")
    assert there.event(Started, id).node == second
    assert there.event(Ended, id).how == "completed"
    equal(load_results(there.backend.folder.job(id)), wf.train(jobs(batches=200), lanes=1))


def test_stop(there: Watched, id: str) -> None:
    first, _ = there.alive()
    there.backend.start(id, pack(jobs(batches=10_000, seconds=SLOW)), [(first, 0)])
    there.until(lambda e: isinstance(e, Progress) and e.id == id and e.steps > 0)
    with pytest.raises(BackendError, match="runs on"):
        there.backend.start(id, pack(jobs()), [(first, 0)])
    there.backend.stop(id, suspend=False)
    ended = there.event(Ended, id, seconds=5)
    assert ended.how == "cancelled" and load_results(ended.results)[0].status == "cancelled"
    there.backend.stop(id, suspend=False)  # once more is nothing
    assert id not in there.backend.running()


def test_data_that_is_stuck_can_be_cancelled(there: Watched, id: str) -> None:
    first, _ = there.alive()
    made = jobs(batches=5, seconds=0.0)
    made[0].evaluate = lambda model: [time.sleep(0.01) for _ in range(10_000)]
    there.backend.start(id, pack(made), [(first, 0)])
    there.until(lambda e: isinstance(e, Progress) and e.id == id and e.steps >= 5)
    there.backend.stop(id, suspend=True)  # which waits for a boundary
    assert not there.backend.poll(0.3) or not any(isinstance(e, Ended) for e in there.of(id))
    there.backend.stop(id, suspend=False)
    assert there.event(Ended, id, seconds=10).how == "cancelled"


def test_priority_can_change(there: Watched, id: str) -> None:
    first, _ = there.alive()
    there.backend.start(id, pack(jobs(batches=60, seconds=SLOW)), [(first, 0)], "guaranteed")
    there.event(Started, id)
    there.backend.set_priority(id, "opportunistic")
    assert there.event(Ended, id).how == "completed"
    equal(load_results(there.backend.folder.job(id)), wf.train(jobs(batches=60), lanes=1))


def test_failure_says_why(there: Watched, id: str) -> None:
    def explode(_: Any) -> float:
        raise ZeroDivisionError("planted")

    first, _ = there.alive()
    made = jobs(2)
    made[0].evaluate = explode
    there.backend.start(id, pack(made), [(first, 0)])
    ended = there.event(Ended, id)
    assert ended.how == "failed" and "net-0" in ended.reason and "planted" in ended.reason
    results = load_results(ended.results)
    assert isinstance(results[0].error, ZeroDivisionError) and "explode" in str(results[0].traceback)
    assert results[1].losses == wf.train(jobs(2), lanes=1)[1].losses  # the other one was left alone


def test_payload_that_fails_to_unpack(there: Watched, id: str) -> None:
    def jobs_of_nothing() -> list[wf.Job]:
        raise RuntimeError("planted")

    first, _ = there.alive()
    there.backend.start(id, pack(jobs_of_nothing), [(first, 0)])
    ended = there.event(Ended, id)
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


def test_bad_requests_are_refused(there: Watched, id: str) -> None:
    first, _ = there.alive()
    payload = pack(jobs())
    for places, why in (([], "at least one"), ([("nowhere", 0)], "no node 'nowhere'"), ([(first, 1)], "there is no 1"),
                        ([(first, 0)] * 2, "twice")):  # fmt: skip
        with pytest.raises(BackendError, match=why):
            there.backend.start(id, payload, places)
    with pytest.raises(BackendError, match="is no checkpoint of"):
        there.backend.start(id, payload, [(first, 0)], checkpoint=Path("/elsewhere"))
    assert id not in there.backend.running()


def test_damaged_checkpoint_is_refused(there: Watched, id: str) -> None:
    first, second = there.alive()
    payload = pack(jobs(batches=60, seconds=SLOW))
    there.backend.start(id, payload, [(first, 0)])
    there.until(lambda e: isinstance(e, Progress) and e.id == id and e.steps > 5)
    there.backend.stop(id, suspend=True)
    ended = there.event(Ended, id)
    newest = there.backend.folder.last_state(id, 0)
    assert newest is not None
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    there.backend.start(id, payload, [(second, 0)], checkpoint=ended.results)
    ended = there.event(Ended, id)
    assert ended.how == "failed" and f"CheckpointError: {newest} is damaged" in ended.reason
    assert f"an older file of {newest.parent}" in ended.reason


def test_killed_in_the_middle(there: Watched, id: str) -> None:
    """Its jobs go on elsewhere from the last checkpoint: none lost, none run twice, no bit different."""
    first, second = there.alive()
    payload = pack(jobs(2, batches=60, seconds=SLOW))
    there.backend.start(id, payload, [(first, 0)])
    there.backend.start(id + "b", pack(jobs(batches=150, epochs=1, seconds=SLOW)), [(second, 0)])
    checkpointed = there.until(lambda e: isinstance(e, Checkpointed) and e.id == id and e.steps > 10)
    epoch = next(n.epoch for n in there.backend.nodes() if n.name == first)
    os.kill(there.process(first), signal.SIGKILL)
    killed = time.monotonic()
    lost = there.until(lambda e: isinstance(e, NodeLost), 2)
    assert (lost.node, lost.epoch) == (first, epoch) and time.monotonic() - killed < 2
    ended = next((e for e in there.of(id) if isinstance(e, Ended)), None) or there.event(Ended, id, 2)
    assert ended.how == "lost" and first in ended.reason
    with pytest.raises(BackendError, match="was lost"):
        there.backend.start(id, payload, [(first, 0)])
    there.backend.start(id, payload, [(second, 0)], checkpoint=there.backend.checkpoints(id))
    told = there.until(lambda e: isinstance(e, Progress) and e.id == id, 10)
    assert told.node == second and told.steps >= checkpointed.steps and time.monotonic() - killed < 10
    assert there.event(Ended, id).how == "completed"
    equal(load_results(there.backend.folder.job(id)), wf.train(jobs(2, batches=60), lanes=1))
    joined = [e for e in there.events if isinstance(e, NodeJoined) and e.node == first and e.epoch > epoch]
    assert joined or there.until(lambda e: isinstance(e, NodeJoined) and e.node == first, 30).epoch > epoch
    ends = [e for e in there.of(id + "b") if isinstance(e, Ended)] or [there.event(Ended, id + "b")]
    assert [e.how for e in ends] == ["completed"]  # the other node's were left alone


@pytest.mark.slow
def test_group_of_two_nodes_that_loses_one(there: Watched, id: str) -> None:
    """The part that was not lost is suspended, and nothing is trained twice that had a checkpoint."""
    first, second = there.alive()
    payload = pack(jobs(3, batches=80, epochs=1, seconds=SLOW))
    there.backend.start(id, payload, [(first, 0), (second, 0)])
    there.until(lambda e: isinstance(e, Checkpointed) and e.id == id and e.steps > 10)
    os.kill(there.process(second), signal.SIGKILL)
    there.until(lambda e: isinstance(e, NodeLost) and e.node == second, 2)
    there.backend.start(id, payload, [(first, 0)], checkpoint=there.backend.folder.job(id))
    ended = [e for e in there.of(id) if isinstance(e, Ended)] or [there.event(Ended, id, 5)]
    assert [e.how for e in ended] == ["lost"]
    assert there.event(Ended, id).how == "completed"
    equal(load_results(there.backend.folder.job(id)), wf.train(jobs(3, batches=80, epochs=1), lanes=1))


@pytest.mark.slow
def test_node_that_comes_back_late(there: Watched, id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped until its work was placed elsewhere, then let go: it can neither write nor speak, and ends."""
    first, second = there.alive()
    monkeypatch.setattr(there.backend, "_kill", lambda *_: None)  # as if it could not be reached
    late = there.process(first)
    old = next(n.epoch for n in there.backend.nodes() if n.name == first)
    payload = pack(jobs(2, batches=100, seconds=SLOW))
    there.backend.start(id, payload, [(first, 0)])
    there.until(lambda e: isinstance(e, Checkpointed) and e.id == id)
    os.kill(late, signal.SIGSTOP)
    try:
        lost = there.until(lambda e: isinstance(e, NodeLost) and e.node == first, 6)
        assert lost.epoch == old and "nothing" in lost.reason
        there.backend.start(id, payload, [(second, 0)], checkpoint=there.backend.checkpoints(id))
        there.until(lambda e: isinstance(e, Started) and e.node == second)
        files = _written_by(there, id, old)
    finally:
        os.kill(late, signal.SIGCONT)
    assert there.event(Ended, id).how == "completed"
    assert _written_by(there, id, old) <= files
    assert [e for e in there.of(id) if isinstance(e, Ended)][-1].node == second
    equal(load_results(there.backend.folder.job(id)), wf.train(jobs(2, batches=100), lanes=1))
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
    folder.new_run("a")
    folder.send("a", 1, pack(jobs(batches=3, epochs=1)))
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
        group = RunningGroup(Part("a", 1), False, process, lambda _, event: told.append(type(event)), lambda: None)
        group.start()
        group._thread.join(60)
    assert told == [Started, "written", Checkpointed, Ended]
