"""The state folder of a cluster: where it is, and what lies in it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import IO

from waterflow.errors import ClusterError


def state_folder(given: str | Path | None) -> Path:
    """The folder that is given, or ``$WATERFLOW_CLUSTER``, or the usual one of this user."""
    chosen = given if given is not None else os.environ.get("WATERFLOW_CLUSTER")
    if chosen is not None:
        return Path(chosen).expanduser().resolve()
    home = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(home).expanduser() / "waterflow" / "cluster"


def address_file(folder: Path) -> Path:
    """Where the endpoint is, and who answers there, as JSON."""
    return folder / "endpoint.json"


def token_file(folder: Path) -> Path:
    """What requests must bring; only its owner may read it."""
    return folder / "token"


def store_file(folder: Path) -> Path:
    """Jobs, results, and the scheduler's state."""
    return folder / "cluster.db"


def work_folder(folder: Path) -> Path:
    """What the nodes share: payloads, checkpoints, results."""
    return folder / "work"


def log_file(folder: Path) -> Path:
    """What the scheduler's process says."""
    return folder / "service.log"


def make_folder(folder: Path) -> None:
    """Create it, for its owner alone. Raises ClusterError where others may write into it."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = folder.stat().st_mode & 0o777
    if mode & 0o022:
        raise ClusterError(
            f"others may write into {folder} (mode {mode:o}), and files in it are unpickled; chmod 700 {folder}"
        )


def hold(folder: Path) -> IO[str] | None:
    """The folder's lock, which one process at a time has until it ends; None while another one has it."""
    file = (folder / "lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file
