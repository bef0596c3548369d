"""Clusters of processes for tests, which end with them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import waterflow as wf
from waterflow.cluster import launch
from waterflow.cluster.state import address_file, log_file, work_folder

SETTINGS: dict[str, Any] = {"nodes": ("one", "two"), "memory": "256MiB", "lanes": 1, "checkpoint_seconds": 0.2}


class LiveCluster:
    """A cluster in processes of its own: what a test does to them."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.config = launch.ClusterConfig(**SETTINGS | settings)
        self.client = wf.Cluster(folder)
        self.pid = 0

    def up(self) -> None:
        self.pid = launch.start(self.folder, self.config)["pid"]

    def kill_scheduler(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self.pid, 0)

    def workers(self) -> dict[str, int]:
        """The process of each device."""
        found = {}
        for path in (work_folder(self.folder) / "nodes").glob("*.json"):
            found[path.stem] = json.loads(path.read_text())["pid"]
        return found

    def end(self) -> None:
        """Whatever is left of it."""
        with contextlib.suppress(OSError, ValueError):
            os.kill(json.loads(address_file(self.folder).read_text())["pid"], signal.SIGKILL)
        for pid in self.workers().values():
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)

    def said(self) -> str:
        """What its scheduler logged."""
        return log_file(self.folder).read_text()


@pytest.fixture(scope="session")
def clusters() -> Iterator[Callable[..., LiveCluster]]:
    made: list[LiveCluster] = []
    with tempfile.TemporaryDirectory(prefix="wf-") as folder:

        def make(**settings: Any) -> LiveCluster:
            made.append(LiveCluster(Path(folder) / str(len(made)), **settings))
            made[-1].up()
            return made[-1]

        yield make
        for cluster in made:
            cluster.end()


@pytest.fixture(scope="session")
def shared_cluster(clusters: Callable[..., LiveCluster]) -> LiveCluster:
    """One for all tests that leave it as it is."""
    return clusters(tenants=(("default", 2), ("small", 1)))
