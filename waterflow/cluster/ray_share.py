"""The resources that Ray reserves for a device of a cluster. Needs no Ray."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from waterflow.cluster.worker import WorkerSettings
from waterflow.executor.cores import lanes_of
from waterflow.executor.memory_limit import DEFAULT_MEMORY


class RayEnvironment:
    """The environment variables that Ray reads, set in this process until ``put_back``; processes that it starts inherit them."""

    def __init__(self, token: Path | None, loopback: bool) -> None:
        settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "token"}
        if loopback:
            settings["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        if token is not None:
            settings["RAY_AUTH_TOKEN_PATH"] = str(token)
        self._before = {name: os.environ.get(name) for name in [*settings, "RAY_AUTH_TOKEN"]}
        os.environ.update(settings)
        if token is not None:
            os.environ.pop("RAY_AUTH_TOKEN", None)  # it would come before the file

    def put_back(self) -> None:
        """Restore the environment of before."""
        for name, value in self._before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class RayShare:
    """The part of a Ray cluster that one device gets.

    On CUDA it is a GPU. On the CPU it is a CPU for each thread of its lanes and no GPU; without ``lanes``, all CPUs of the
    smallest node. ``cores`` are as in ``LocalBackend``: without ``lanes``, a device has a lane for each of its cores.
    """

    def __init__(self, settings: WorkerSettings, cores: Sequence[Sequence[int]] | None = None) -> None:
        self._settings = settings
        self._lanes_follow = settings.lanes is None and cores is None
        self.cpus = (settings.lanes or 0) * settings.threads_per_lane
        if cores and settings.lanes is None:
            self.cpus = max(map(len, cores))

    def room(self, nodes: Iterable[Mapping[str, Any]]) -> int:
        """Return how many devices fit on the nodes, which are as ``ray.nodes()`` lists them."""
        there = [node["Resources"] for node in nodes if node["Alive"]]
        if self._settings.device == "cuda":
            return sum(int(resources.get("GPU", 0)) for resources in there)
        cpus = [int(resources.get("CPU", 0)) for resources in there]
        self.cpus = self.cpus or min(filter(None, cpus), default=0)
        return sum(count // self.cpus for count in cpus) if self.cpus else 0

    def reserved(self) -> dict[str, int]:
        """Return the resources to reserve for the actor of a device; call ``room`` first."""
        return {"num_gpus": 1, "num_cpus": 0} if self._settings.device == "cuda" else {"num_gpus": 0, "num_cpus": self.cpus}

    def settings(self, devices: int) -> WorkerSettings:
        """Return the settings of one of ``devices`` devices: lanes on the reserved CPUs, an equal part of the memory.

        Call ``room`` first.
        """
        made = self._settings
        if made.device == "cpu" and self._lanes_follow:
            made = replace(made, lanes=lanes_of(self.cpus, made.threads_per_lane))
        if made.device == "cpu" and made.memory is None:  # they may all be of one machine
            made = replace(made, memory=DEFAULT_MEMORY / max(1, devices))
        return made

    def nothing(self) -> str:
        """Return why there is room for no device, with the remedy."""
        if self._settings.device == "cuda":
            return "the Ray cluster has no GPU; start its nodes with --num-gpus, or take device 'cpu'"
        return (
            f"no node of the Ray cluster has {max(1, self.cpus)} CPU(s), which a device reserves for its lanes; start nodes with "
            "--num-cpus, lower lanes, or take device 'cuda' for GPUs"
        )
