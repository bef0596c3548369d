"""What is of LocalBackend alone: its processes, and who ends when."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import waterflow as wf
from tests.cluster.jobs import equal, jobs
from waterflow.cluster.backend import BackendError, BackendEvent, Checkpointed, Ended, NodeJoined, NodeLost, Progress, Started
from waterflow.cluster.group import PATIENCE, Part, Process, RunningGroup
from waterflow.cluster.local import LocalBackend
from waterflow.cluster.losses import Silence
from waterflow.cluster.payload import load_results, pack
from waterflow.cluster.shared_folder import SharedFolder
from waterflow.cluster.worker import WorkerSettings
from waterflow.executor.engine import Engine

pytestmark = pytest.mark.slow

SETTINGS = WorkerSettings(memory="256MiB", lanes=1, checkpoint_seconds=0.2, report_seconds=0.1)


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone_within(pid: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not lives(pid)


def until(backend: LocalBackend, *kinds: type, seconds: float = 20.0) -> object:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        for event in backend.poll(0.1):
            if isinstance(event, kinds):
                return event
    raise AssertionError(f"no {kinds} within {seconds} s")


OWNER = """
import sys, time
from tests.cluster.jobs import jobs
from waterflow.cluster import Checkpointed, LocalBackend, WorkerSettings, pack

settings = WorkerSettings(memory="256MiB", lanes=1, checkpoint_seconds=0.2, report_seconds=0.1)
backend = LocalBackend(1, sys.argv[1], settings=settings, outlive=float(sys.argv[2]))
backend.start("a", pack(jobs(batches=60, epochs=1, seconds=0.02)), [("device-0", 0)])
while not any(isinstance(event, Checkpointed) for event in backend.poll(0.1)):
    pass
print(backend.process("device-0"), flush=True)
time.sleep(60)
"""


def killed_owner(folder: Path, outlive: float) -> int:
    """A backend in a process of its own that is killed; returns its child's number."""
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(folder), str(outlive)], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        child = int(owner.stdout.readline())
        assert lives(child)
    finally:
        owner.kill()
        owner.wait()
    return child


def test_children_end_with_their_parent(tmp_path: Path) -> None:
    assert gone_within(killed_owner(tmp_path, 0.0), 3)


def test_children_wait_for_another_backend_as_long_as_they_are_told(tmp_path: Path) -> None:
    child = killed_owner(tmp_path, 1.5)
    time.sleep(0.7)
    assert lives(child)
    assert gone_within(child, 5)


def test_another_backend_takes_over_what_runs(tmp_path: Path) -> None:
    child = killed_owner(tmp_path, 30.0)
    time.sleep(0.3)
    with LocalBackend(1, tmp_path, settings=SETTINGS) as backend:
        assert backend.process("device-0") == child
        assert backend.running() == ["a"]
        seen = [type(e) for e in backend.poll(0.0)]
        assert NodeJoined in seen and NodeLost not in seen
        ended = until(backend, Ended)
        assert isinstance(ended, Ended) and ended.how == "completed"
        equal(load_results(ended.results), wf.train(jobs(batches=60, epochs=1), lanes=1))
        assert [p.name for p in (backend.folder.job("a") / "runs").iterdir()] == ["1"]  # it was started once
        again = backend.poll(0.2) + backend.poll(0.2)
        assert not any(isinstance(event, Ended) for event in again)
    assert not lives(child)


def test_what_was_told_and_not_heard_is_told_again(tmp_path: Path) -> None:
    first = LocalBackend(1, tmp_path, settings=SETTINGS, outlive=30.0)
    first.start("a", pack(jobs()), [("device-0", 0)])
    ended = first.folder.ended("a", 1, 0)
    deadline = time.monotonic() + 20
    while not ended.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first.detach()  # it polled never
    with LocalBackend(1, tmp_path, settings=SETTINGS) as second:
        event = until(second, Ended, seconds=5)
        assert isinstance(event, Ended) and event.how == "completed"


def test_a_child_that_died_while_nobody_looked(tmp_path: Path) -> None:
    first = LocalBackend(2, tmp_path, settings=SETTINGS, outlive=30.0)
    payload = pack(jobs(2, batches=60, epochs=1, seconds=0.02))
    first.start("a", payload, [("device-0", 0), ("device-1", 0)])
    until(first, Checkpointed)
    dead = first.process("device-0")
    first.detach()
    os.kill(dead, signal.SIGKILL)
    with LocalBackend(2, tmp_path, settings=SETTINGS) as second:
        assert second.process("device-0") != dead
        ended = until(second, Ended, seconds=10)  # the part on device-1 is suspended for the next start
        assert isinstance(ended, Ended) and ended.how == "lost"
        second.start("a", payload, [("device-1", 0)], checkpoint=second.checkpoints("a"))
        ended = until(second, Ended)
        assert isinstance(ended, Ended) and ended.how == "completed"
        equal(load_results(ended.results), wf.train(jobs(2, batches=60, epochs=1), lanes=1))


def test_a_device_that_cannot_start_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waterflow.cluster.local.FIRST_TRIES", 1)  # each is a process that imports torch
    with pytest.raises(BackendError, match="(?s)does not start; its output ends.*cannot read 'much' as memory"):
        LocalBackend(1, tmp_path, settings=WorkerSettings(memory="much"))
    with pytest.raises(BackendError, match="positive number"):
        LocalBackend(0)
    with pytest.raises(BackendError, match="1 entries for 2 devices"):
        LocalBackend(2, cores=[[0]])


def test_pinned_cores_and_the_log(tmp_path: Path) -> None:
    def cores_of_all_threads(_: object) -> float:
        threads = [int(name) for name in os.listdir("/proc/self/task")]
        print("pinned to", sorted({core for thread in threads for core in os.sched_getaffinity(thread)}))
        return 0.0

    one = min(os.sched_getaffinity(0))
    with LocalBackend(["a"], tmp_path, settings=SETTINGS, cores=[[one]]) as backend:
        made = jobs(1, epochs=1)
        made[0].evaluate = cores_of_all_threads
        backend.start("x", pack(made), [("a", 0)])
        ended = until(backend, Ended)
        assert isinstance(ended, Ended) and ended.how == "completed"
        assert f"pinned to [{one}]" in backend.folder.log("a", 1).read_text()


def test_a_cancelled_job_that_hangs_is_broken_off(tmp_path: Path) -> None:
    """Its process ends; who ran beside it goes on from a checkpoint, with the bits of an undisturbed run."""

    hangs = tmp_path / "hangs"
    with LocalBackend(1, tmp_path / "work", settings=SETTINGS) as backend:
        (stuck,), beside = jobs(1), pack(jobs(batches=300, epochs=1, seconds=0.02))
        stuck.model = lambda: (hangs.touch(), time.sleep(1e6))  # type: ignore[assignment, return-value]
        backend.start("beside", beside, [("device-0", 0)])
        until(backend, Checkpointed)
        backend.start("stuck", pack([stuck]), [("device-0", 0)])
        while not hangs.exists():  # and nothing in Python breaks it off
            backend.poll(0.1)
        before = backend.process("device-0")
        backend.break_off("stuck")  # nobody cancelled it
        backend.stop("stuck", suspend=False)
        began = time.monotonic()
        ends: dict[str, Ended] = {}
        joined = False

        def hear() -> None:
            nonlocal joined
            for event in backend.poll(0.1):
                joined |= isinstance(event, NodeJoined)
                if isinstance(event, Ended):
                    ends[event.id] = event

        while time.monotonic() < began + PATIENCE + 1.0:
            hear()
        assert "stuck" not in ends
        backend.break_off("stuck")
        assert not lives(before)
        while len(ends) < 2 or not joined:
            assert time.monotonic() < began + 90.0
            hear()
        assert ends["stuck"].how == "lost" and "'stuck' was cancelled, and did not come" in ends["stuck"].reason
        if ends["beside"].how == "lost":
            backend.start("beside", beside, [("device-0", 0)], checkpoint=backend.checkpoints("beside"))
            ended = until(backend, Ended, seconds=60)
            assert isinstance(ended, Ended)
            ends["beside"] = ended
        equal(load_results(ends["beside"].results), wf.train(jobs(batches=300, epochs=1), lanes=1))


def test_a_process_that_stands_still_is_replaced(tmp_path: Path) -> None:
    with LocalBackend(1, tmp_path, settings=SETTINGS, silent_seconds=0.8) as backend:
        before = backend.process("device-0")
        os.kill(before, signal.SIGSTOP)
        began = time.monotonic()
        lost = until(backend, NodeLost)
        assert isinstance(lost, NodeLost) and "was silent" in lost.reason
        assert 0.5 < time.monotonic() - began < 4
        assert not lives(before)
        joined = until(backend, NodeJoined, seconds=30)
        assert isinstance(joined, NodeJoined) and joined.epoch > lost.epoch


def test_a_backend_that_did_not_look_blames_nobody(tmp_path: Path) -> None:
    with LocalBackend(1, tmp_path, settings=SETTINGS, silent_seconds=0.8) as backend:
        backend.start("a", pack(jobs(batches=150, epochs=1, seconds=0.02)), [("device-0", 0)])
        until(backend, Started)
        time.sleep(1.5)
        assert not any(isinstance(event, NodeLost) for event in backend.poll(0.0) + backend.poll(0.1))
        until(backend, Progress)


def test_silence_counts_while_somebody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("waterflow.cluster.losses.time.monotonic", lambda: now[0])
    silence = Silence()
    for _ in range(10):
        now[0] += 0.1
        heard = silence.passed()
    assert heard == pytest.approx(1.0)
    now[0] += 60.0  # the listener was stopped
    assert silence.passed() == pytest.approx(1.5)
    silence.broken()
    assert silence.passed() == 0.0


def test_a_backend_that_cannot_begin_removes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk at the first start of a process: what lies in the current folder is somebody's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").write_text("kept")

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("waterflow.cluster.shared_folder.SharedFolder.new_epoch", full)
    with pytest.raises(OSError, match="No space left"):
        LocalBackend(2, tmp_path / "work")
    assert (tmp_path / "mine").read_text() == "kept"


def test_a_process_that_finds_no_room_is_started_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalBackend(1, tmp_path, settings=SETTINGS) as backend:
        whole, tries = SharedFolder.new_epoch, []

        def full(folder: SharedFolder) -> int:
            tries.append(1)
            if len(tries) < 3:
                raise OSError(errno.ENOSPC, "No space left on device")
            return whole(folder)

        monkeypatch.setattr(SharedFolder, "new_epoch", full)
        os.kill(backend.process("device-0"), signal.SIGKILL)
        until(backend, NodeLost)
        until(backend, NodeJoined)
        assert len(tries) == 3


def test_the_end_of_a_job_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and ends that cannot be written are written when there is room; the job does not fail for it."""
    folder = SharedFolder(tmp_path)
    folder.make()
    epoch = folder.new_epoch()
    folder.new_run("a")
    folder.send("a", 1, pack(jobs(1, batches=3, epochs=1)))
    told: list[BackendEvent] = []
    refused: list[str] = []
    whole_bytes, whole_text = Path.write_bytes, Path.write_text

    def full(whole: Callable[..., int]) -> Callable[..., int]:
        def write(path: Path, content: object) -> int:
            if path.suffix in (".result", ".ended") and refused.count(path.suffix) < 2:
                refused.append(path.suffix)
                path.touch()
                raise OSError(errno.ENOSPC, "No space left on device")
            return whole(path, content)

        return write

    monkeypatch.setattr(Path, "write_bytes", full(whole_bytes))
    monkeypatch.setattr(Path, "write_text", full(whole_text))
    monkeypatch.setattr("waterflow.cluster.group.AGAIN_SECONDS", 0.01)
    with Engine(lanes=1) as engine:
        process = Process("here", epoch, folder, engine)
        group = RunningGroup(Part("a", 1), False, process, lambda _, event: told.append(event), lambda: None)
        group.start()
        group._thread.join(60)
    (ended,) = [event for event in told if isinstance(event, Ended)]
    assert ended.how == "completed", ended.reason
    assert refused == [".result"] * 2 + [".ended"] * 2
    equal(load_results(folder.job("a")), wf.train(jobs(1, batches=3, epochs=1), lanes=1))
