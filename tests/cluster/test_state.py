"""The state folder: nobody but its user reads what lies in it, and what is missing of it is noticed."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from waterflow.cluster import state
from waterflow.cluster.shared_folder import SharedFolder
from waterflow.cluster.state import check_whole, hold, make_folder, store_file, token_file, work_folder
from waterflow.cluster.store import Store
from waterflow.errors import BackendError, ClusterError


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture(autouse=True)
def _others_may_read() -> object:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_all_that_is_made_is_for_its_user_alone(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    make_folder(folder)
    held = hold(folder)
    assert held is not None
    store = Store(store_file(folder))
    store.set_meta("x", 1)
    SharedFolder(work_folder(folder)).make()
    assert {path.name: mode(path) for path in [folder, *folder.iterdir()]} == {
        "state": 0o700, "lock": 0o600, "cluster.db": 0o600, "cluster.db-wal": 0o600, "cluster.db-shm": 0o600,
        "work": 0o700,
    }  # fmt: skip
    store.close()
    held.close()


def test_a_folder_that_others_can_read_is_closed(tmp_path: Path) -> None:
    """An empty one, and one of a cluster with all files in it; but not a folder with other things, nor a token that others know."""
    folder = tmp_path / "state"
    folder.mkdir(mode=0o755)
    make_folder(folder)
    assert mode(folder) == 0o700
    for name in ("config.json", "cluster.db", "cluster.db-wal", "token", "service.log"):
        (folder / name).touch(0o644)
    folder.chmod(0o750)
    make_folder(folder)
    assert mode(folder) == 0o700
    modes = {path.name: mode(path) for path in folder.iterdir()}
    assert modes.pop("token") == 0o644 and set(modes.values()) == {0o600}
    mine = tmp_path / "home"
    mine.mkdir(mode=0o755)
    (mine / "letters").touch()
    with pytest.raises(ClusterError, match=r"others may read .*home \(mode 755\).*chmod 700"):
        make_folder(mine)
    assert mode(mine) == 0o755 and mode(mine / "letters") == 0o644
    mine.chmod(0o770)
    with pytest.raises(ClusterError, match=r"others may write into .*home \(mode 770\)"):
        make_folder(mine)


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_folder(tmp_path / "state")
    token_file(tmp_path / "state").touch(0o600)
    me = os.geteuid()
    with monkeypatch.context() as patched:
        patched.setattr(state.os, "geteuid", lambda: me + 1)
        with pytest.raises(ClusterError, match=r"state belongs to user .*, and you are .*Take another --state folder"):
            make_folder(tmp_path / "state")
        with pytest.raises(BackendError, match="belongs to user"):
            SharedFolder(tmp_path / "state").make()
    make_folder(tmp_path / "state")


def test_work_that_others_can_read_is_closed(tmp_path: Path) -> None:
    work = SharedFolder(tmp_path / "work")
    work.make()
    work.path.chmod(0o755)
    work.make()
    assert mode(work.path) == 0o700
    work.path.chmod(0o777)
    with pytest.raises(BackendError, match="others may write into"):
        work.make()


@pytest.mark.parametrize("left", [None, b""])
def test_work_without_what_the_cluster_knew_is_refused(tmp_path: Path, left: bytes | None) -> None:
    check_whole(tmp_path)
    work = SharedFolder(work_folder(tmp_path))
    work.make()
    check_whole(tmp_path)  # nothing ever ran
    store = Store(store_file(tmp_path))
    work.prepare("a", 1, b"")
    check_whole(tmp_path)
    store.close()
    kept = store_file(tmp_path).rename(tmp_path / "copy")
    if left is not None:
        store_file(tmp_path).write_bytes(left)
    with pytest.raises(ClusterError, match=r"cluster.db is .*results of 1 job\(s\).*Put back a copy.*move .*work away"):
        check_whole(tmp_path)
    kept.rename(store_file(tmp_path))
    check_whole(tmp_path)
