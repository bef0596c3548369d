"""Numbers that are given out once, and files of those who may write."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from waterflow.cluster.shared_folder import Fenced, SharedFolder
from waterflow.errors import BackendError


@pytest.fixture
def folder(tmp_path: Path) -> SharedFolder:
    made = SharedFolder(tmp_path / "shared")
    made.make()
    return made


def written(folder: SharedFolder, epoch: int) -> Path:
    path = folder.own(epoch) / "x"
    path.write_text("new")
    return path


def test_only_its_user_may_enter(folder: SharedFolder) -> None:
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_one_backend_at_a_time(folder: SharedFolder) -> None:
    lock = folder.lock()
    with pytest.raises(BackendError, match="another backend uses"):
        folder.lock()
    os.close(lock)
    os.close(folder.lock())


def test_numbers_are_given_once(folder: SharedFolder) -> None:
    got: list[int] = []
    threads = [
        threading.Thread(target=lambda: got.extend(folder.new_epoch() for _ in range(20))) for _ in range(4)
    ]  # fmt: skip
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(1, 81))
    folder.fence(80)
    assert folder.new_epoch() == 81


def test_who_is_fenced_publishes_nothing(folder: SharedFolder) -> None:
    first, second = folder.new_epoch(), folder.new_epoch()
    folder.publish(first, written(folder, first), folder.state("a", 0, 1, first, 1))
    late = written(folder, first)
    folder.fence(first)
    folder.fence(first)
    with pytest.raises(Fenced, match=f"epoch {first}"):
        folder.publish(first, late, folder.state("a", 0, 1, first, 2))
    with pytest.raises(FileNotFoundError):  # nor can it begin to write
        written(folder, first)
    folder.publish(second, written(folder, second), folder.state("a", 0, 2, second, 3))
    assert folder.is_fenced(first) and not folder.is_fenced(second)
    assert {path.name for path in folder.job("a").rglob("*.checkpoint")} == {
        f"1.{first}.1.checkpoint", f"2.{second}.3.checkpoint",
    }  # fmt: skip


def test_a_fence_is_before_or_behind_each_file(folder: SharedFolder) -> None:
    """A process that publishes as fast as it can, fenced in between: what it was told was written is there, and no more."""
    epoch = folder.new_epoch()
    done: list[int] = []
    enough = threading.Event()

    def publish() -> None:
        for count in range(1, 100_000):
            try:
                folder.publish(epoch, written(folder, epoch), folder.state("a", 0, 1, epoch, count))
            except (Fenced, FileNotFoundError):
                return
            done.append(count)
            if count > 20:
                enough.set()

    thread = threading.Thread(target=publish)
    thread.start()
    assert enough.wait(10)
    folder.fence(epoch)
    there = {int(path.name.split(".")[2]) for path in folder.job("a").rglob("*.checkpoint")}
    thread.join(10)
    assert there >= set(done[:21])
    assert {int(path.name.split(".")[2]) for path in folder.job("a").rglob("*.checkpoint")} == there == set(done)


def test_the_newest_is_of_the_last_start(folder: SharedFolder) -> None:
    """Not of the process that began last: a job may move to an older one."""
    old, young = folder.new_epoch(), folder.new_epoch()
    assert folder.last_state("a", 0) is None
    for epoch, run, counts in ((young, 1, (1, 2, 30)), (old, 2, (4, 5))):
        for count in counts:
            folder.publish(epoch, written(folder, epoch), folder.state("a", 0, run, epoch, count))
    newest = folder.last_state("a", 0)
    assert newest is not None and newest.name == f"2.{old}.5.checkpoint"
    folder.drop_states("a")
    assert sorted(p.name for p in folder.job("a").rglob("*.checkpoint")) == [
        f"2.{old}.4.checkpoint", f"2.{old}.5.checkpoint",
    ]  # fmt: skip
    folder.drop_states("a", keep=0)
    (folder.job("a") / "job-0" / "0.0.0.checkpoint.host.1").touch()  # whoever copied a checkpoint died
    assert folder.last_state("a", 0) is None


def test_a_job_begins_with_its_own_files(folder: SharedFolder, tmp_path: Path) -> None:
    """Files of another job that had its id are removed; those of its earlier runs stay."""
    (tmp_path / "saved").write_text("mine")
    for again in range(2):
        epoch = folder.new_epoch()
        folder.prepare("a", 1, b"first", True, tmp_path / "saved")
        state = folder.last_state("a", 0)
        assert state is not None and state.read_text() == "mine" and folder.last_result("a", 0) is None
        folder.publish(epoch, written(folder, epoch), folder.state("a", 0, 1, epoch, 1))
        folder.publish(epoch, written(folder, epoch), folder.result("a", 0, 1, epoch))
        folder.ended("a", 1).write_text('{"how": "suspended", "reason": "", "steps": 3}')
        assert folder.last_run("a") == 1 and folder.last_run("b") == 0
        folder.prepare("a", 2, b"second")
        folder.ended("a", 2).touch()  # a power cut left it empty
        assert folder.payload("a", 2).read_bytes() == b"second" and not folder.payload("a", 1).exists(), again
        state = folder.last_state("a", 0)
        assert state is not None and state.read_text() == "new" and folder.last_result("a", 0) is not None
        assert folder.end_of("a", 1) == {"how": "suspended", "reason": "", "steps": 3} and folder.end_of("a", 2) is None


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12), unique=True, max_size=8))
def test_any_id_has_a_folder_of_its_own(ids: list[str]) -> None:
    folder = SharedFolder(Path("/shared"))
    paths = [folder.job(id) for id in ids]
    assert len(set(paths)) == len(ids)
    for path in paths:
        assert path.parent == folder.path / "jobs" and path.name not in (".", "..", "") and os.sep not in path.name
