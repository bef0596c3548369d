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
from tests.cluster.watched import Watched
from waterflow.cluster.backend import Request
from waterflow.cluster.group import PATIENCE, Process, RunningGroup
from waterflow.cluster.local import LocalBackend
from waterflow.cluster.losses import Silence
from waterflow.cluster.payload import load_results, pack
from waterflow.cluster.shared_folder import SharedFolder
from waterflow.cluster.worker import WorkerSettings
from waterflow.errors import BackendError
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


OWNER = """
import sys, time
from tests.cluster.jobs import jobs
from tests.cluster.watched import Watched
from waterflow.cluster import LocalBackend, WorkerSettings, pack

settings = WorkerSettings(memory="256MiB", lanes=1, checkpoint_seconds=0.2, report_seconds=0.1)
backend = LocalBackend(1, sys.argv[1], settings=settings, outlive=float(sys.argv[2]))
there = Watched(backend)
there.start("a", pack(jobs(batches=60, epochs=1, seconds=0.02)), "device-0")
there.until("a", lambda part: part.saved is not None)
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
        there = taken_over(backend)
        assert backend.process("device-0") == child and backend.nodes()[0].alive
        assert there.end("a").how == "completed"
        equal(there.results("a"), wf.train(jobs(batches=60, epochs=1), lanes=1))
        assert there.answer("device-0").parts == ()  # it was told as long as it was needed
    assert not lives(child)


def taken_over(backend: LocalBackend) -> Watched:
    """The job "a" of another backend is the first run, on the first device."""
    there = Watched(backend)
    there.runs["a"] = 1, "device-0"
    return there


def test_what_was_told_and_not_heard_is_told_again(tmp_path: Path) -> None:
    first = LocalBackend(1, tmp_path, settings=SETTINGS, outlive=30.0)
    Watched(first).start("a", pack(jobs()), "device-0")
    deadline = time.monotonic() + 20
    while first.folder.end_of("a", 1) is None:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    first.detach()  # it listened never
    with LocalBackend(1, tmp_path, settings=SETTINGS) as second:
        assert taken_over(second).end("a", seconds=5).how == "completed"


def test_a_child_that_died_while_nobody_looked(tmp_path: Path) -> None:
    first = LocalBackend(1, tmp_path, settings=SETTINGS, outlive=30.0)
    there, payload = Watched(first), pack(jobs(2, batches=60, epochs=1, seconds=0.02))
    there.start("a", payload, "device-0")
    there.until("a", lambda part: part.saved is not None)
    dead, epoch = first.process("device-0"), there.epoch("device-0")
    first.detach()
    os.kill(dead, signal.SIGKILL)
    with LocalBackend(1, tmp_path, settings=SETTINGS) as second:
        there = taken_over(second)
        assert second.process("device-0") != dead and there.epoch("device-0") > epoch
        assert second.folder.is_fenced(epoch) and second.folder.end_of("a", 1) is None
        there.start("a", payload, "device-0")
        assert there.end("a").how == "completed"
        equal(there.results("a"), wf.train(jobs(2, batches=60, epochs=1), lanes=1))


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
        there = Watched(backend)
        there.start("x", pack(made), "a")
        assert there.end("x").how == "completed"
        assert f"pinned to [{one}]" in backend.folder.log("a", 1).read_text()


def test_a_cancelled_job_that_hangs_ends_with_its_process(tmp_path: Path) -> None:
    """Who ran beside it goes on from a checkpoint, with the bits of an undisturbed run."""
    hangs = tmp_path / "hangs"
    with LocalBackend(1, tmp_path / "work", settings=SETTINGS) as backend:
        there, beside = Watched(backend), pack(jobs(batches=300, epochs=1, seconds=0.02))
        (stuck,) = jobs(1)
        stuck.model = lambda: (hangs.touch(), time.sleep(1e6))  # type: ignore[assignment, return-value]
        there.start("beside", beside, "device-0")
        there.until("beside", lambda part: part.saved is not None)
        there.start("stuck", pack([stuck]), "device-0")
        while not hangs.exists():  # and nothing in Python breaks it off
            there.listen()
        before, epoch = backend.process("device-0"), there.epoch("device-0")
        there.ask("stuck", "stop")
        began = time.monotonic()
        while time.monotonic() < began + PATIENCE + 1.0:
            there.listen()
        assert there.of("stuck")[-1].phase == "training" and there.of("stuck")[-1].stopping == "cancelled"
        backend.end_process("device-0", epoch - 1, "of another process")
        assert lives(before)
        backend.end_process("device-0", epoch, "it did not come to its end")
        assert not lives(before) and there.lost("device-0", epoch, 1) == "it did not come to its end"
        there.alive()
        there.start("beside", beside, "device-0")
        assert there.end("beside", seconds=60).how == "completed"
        equal(there.results("beside"), wf.train(jobs(batches=300, epochs=1), lanes=1))


def test_a_process_that_stands_still_is_replaced(tmp_path: Path) -> None:
    with LocalBackend(1, tmp_path, settings=SETTINGS, silent_seconds=0.8) as backend:
        there, before = Watched(backend), backend.process("device-0")
        epoch = there.epoch("device-0")
        os.kill(before, signal.SIGSTOP)
        began = time.monotonic()
        assert "was silent" in there.lost("device-0", epoch, 20)
        assert 0.5 < time.monotonic() - began < 4
        assert not lives(before)
        there.alive()
        assert there.epoch("device-0") > epoch


def test_a_backend_that_did_not_look_blames_nobody(tmp_path: Path) -> None:
    with LocalBackend(1, tmp_path, settings=SETTINGS, silent_seconds=0.8) as backend:
        there = Watched(backend)
        there.start("a", pack(jobs(batches=150, epochs=1, seconds=0.02)), "device-0")
        steps = there.until("a", lambda part: part.phase == "training").steps
        time.sleep(1.5)
        there.listen()
        there.until("a", lambda part: part.steps > steps)
        assert backend.nodes()[0].alive and backend.nodes()[0].lost == ""


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
        there = Watched(backend)
        epoch = there.epoch("device-0")
        os.kill(backend.process("device-0"), signal.SIGKILL)
        there.lost("device-0", epoch, 20)
        there.alive()
        assert len(tries) == 3


def test_the_end_of_a_job_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and ends that cannot be written are written when there is room; the job does not fail for it."""
    folder = SharedFolder(tmp_path)
    folder.make()
    epoch = folder.new_epoch()
    folder.prepare("a", 1, pack(jobs(1, batches=3, epochs=1)))
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
        group = RunningGroup(Request("start", "a", 1), process, lambda: None, lambda: None)
        group.start()
        group._thread.join(60)
    ended = group.part
    assert ended.how == "completed", ended.reason
    assert refused == [".result"] * 2 + [".ended"] * 2
    equal(load_results(folder.job("a")), wf.train(jobs(1, batches=3, epochs=1), lanes=1))
