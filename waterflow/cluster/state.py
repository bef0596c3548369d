"""The state folder of a cluster: its location, its files, and who may read them."""

from __future__ import annotations

import fcntl
import logging
import os
import pwd
import stat
from collections.abc import Collection
from pathlib import Path
from typing import IO

from waterflow.errors import ClusterError

logger = logging.getLogger("waterflow")

PARTS = ("config.json", "cluster.db", "endpoint.json", "lock", "service.log", "token", "work")  # of a state folder


def state_folder(given: str | Path | None) -> Path:
    """Return ``given``, or else ``$WATERFLOW_CLUSTER``, or else the default folder of this user."""
    chosen = given if given is not None else os.environ.get("WATERFLOW_CLUSTER")
    if chosen is not None:
        return Path(chosen).expanduser().resolve()
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "waterflow" / "cluster"


def address_file(folder: Path) -> Path:
    """Return the path of the endpoint's address and process id, a JSON file."""
    return folder / "endpoint.json"


def token_file(folder: Path) -> Path:
    """Return the path of the token that requests must carry; only its owner may read it."""
    return folder / "token"


def store_file(folder: Path) -> Path:
    """Return the path of the database of jobs and of the scheduler's state."""
    return folder / "cluster.db"


def work_folder(folder: Path) -> Path:
    """Return the folder that the nodes share: payloads, checkpoints, results."""
    return folder / "work"


def log_file(folder: Path) -> Path:
    """Return the path of the log of the cluster's process."""
    return folder / "service.log"


def make_folder(folder: Path, parts: Collection[str] = PARTS) -> None:
    """Create a folder for this user alone, with mode 0700, and set mode 0600 for the files in it.

    An existing folder gets these modes if it is empty or contains one of ``parts``. Raises ClusterError if it belongs to
    another user, if others may write into it, as files in it are unpickled, or if others may read it and it contains other
    things.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    there = {Path(entry.path): entry.stat(follow_symlinks=False) for entry in os.scandir(folder)}
    me = os.geteuid()
    for path, found in [(folder, folder.stat()), *there.items()]:
        if (owner := found.st_uid) != me:
            raise ClusterError(
                f"{path} belongs to user {_name(owner)}, and you are {_name(me)}; its owner can run code as you. "
                "Take another --state folder"
            )
    mode = folder.stat().st_mode & 0o777
    if mode & 0o022:
        raise ClusterError(f"others may write into {folder} (mode {mode:o}), and files in it are unpickled; chmod 700 {folder}")
    if mode & 0o077:
        if there and not {path.name for path in there} & set(parts):
            raise ClusterError(
                f"others may read {folder} (mode {mode:o}), and jobs and results will lie in it; chmod 700 {folder}, or take "
                "another --state folder"
            )
        logger.warning("others could read %s (mode %o); from now on it has mode 700", folder, mode)
        folder.chmod(0o700)
    for path, found in there.items():
        if (
            stat.S_ISREG(found.st_mode) and found.st_mode & 0o077 and path != token_file(folder)
        ):  # a token that others could read is compromised: ``read_token`` refuses it
            path.chmod(found.st_mode & 0o700)


def private(path: str, flags: int) -> int:
    """Open a file for its owner alone, as an ``opener`` of ``open``."""
    return os.open(path, flags, 0o600)


def check_whole(folder: Path) -> None:
    """Raise ClusterError if there is work of jobs, but no database that knows them."""
    store, jobs = store_file(folder), work_folder(folder) / "jobs"
    if (store.exists() and store.stat().st_size) or not jobs.is_dir():
        return
    count = sum(1 for _ in jobs.iterdir())
    if count:
        raise ClusterError(
            f"{store} is {'empty' if store.exists() else 'missing'}, and {jobs} has checkpoints and results of {count} job(s) "
            f"that it knew. Put back a copy of {store.name}; or, to begin without them, move {jobs.parent} away"
        )


def hold(folder: Path) -> IO[str] | None:
    """Lock the folder for this process until it ends; return None if another process has the lock."""
    file = open(folder / "lock", "a", opener=private)  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)
