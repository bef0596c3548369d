"""Several nodes of Ray on this machine, with made-up GPUs, for tests and trials."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Sequence
from pathlib import Path

from waterflow import cluster

# Ray notices a dead node after period * threshold at most.
HEALTH = {
    "health_check_initial_delay_ms": 0,
    "health_check_period_ms": 300,
    "health_check_timeout_ms": 1000,
    "health_check_failure_threshold": 4,
    "timeout_ms_task_wait_for_death_info": 100,  # the delay until a call reports that its actor died
    "worker_niceness": 0,
}


class LoopbackCluster:
    """Several nodes of Ray on this machine: ``gpus`` gives the number of made-up GPUs for each of them.

    Each GPU comes with ``cpus`` made-up CPUs. All nodes listen on 127.0.0.1 alone, ask for a token (``token`` is its file),
    have no dashboard unless ``dashboard``, and report no usage. One at a time in a process; ``close`` restores the process's
    environment.
    """

    def __init__(self, gpus: Sequence[int] = (1,), dashboard: bool = False, cpus: int = 1) -> None:
        self._cpus = cpus
        self._folder = Path(tempfile.mkdtemp(prefix="wf-ray-"))
        self.token = self._folder / "token"
        self.token.touch(0o600)
        self.token.write_text(secrets.token_hex(32))
        self._environment = cluster.RayEnvironment(self.token, loopback=True)
        cluster.load_ray()
        from ray._common.utils import get_default_ray_temp_dir
        from ray.cluster_utils import Cluster

        Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)  # it writes the address there

        settings = {"node_ip_address": "127.0.0.1", "num_cpus": 0, "include_dashboard": False}
        head = settings | {"include_dashboard": dashboard, "_system_config": HEALTH, "temp_dir": str(self._folder / "r")}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        try:
            self.nodes = [
                self._cluster.add_node(wait=False, **settings | {"num_gpus": count, "num_cpus": count * cpus}) for count in gpus
            ]
            self._cluster.wait_for_nodes()
        except BaseException:
            self.close()
            raise

    @property
    def address(self) -> str:
        """The address for ``RayBackend``."""
        return str(self._cluster.address)

    def kill(self, number: int) -> None:
        """End all processes of a node at once, with SIGKILL, as if its machine had lost its power."""
        started = [entry.process.pid for entries in self.nodes[number].all_processes.values() for entry in entries]
        for pid in [*started, *(child for parent in started for child in _children(parent))]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._cluster.remove_node(self.nodes.pop(number), allow_graceful=False)

    def number_of(self, process: int) -> int:
        """Return the index in ``nodes`` of the node that a process belongs to. Raises LookupError."""
        for number, node in enumerate(self.nodes):
            started = (entry.process.pid for entries in node.all_processes.values() for entry in entries)
            if any(process in _children(pid) for pid in started):
                return number
        raise LookupError(f"process {process} is of none of the {len(self.nodes)} nodes")

    def add(self, gpus: int = 1) -> None:
        """Add one node."""
        self.nodes.append(
            self._cluster.add_node(
                num_gpus=gpus, num_cpus=gpus * self._cpus, node_ip_address="127.0.0.1", include_dashboard=False
            )
        )

    def close(self) -> None:
        """End all nodes."""
        self._cluster.shutdown()
        self._environment.put_back()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> LoopbackCluster:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *_children(child)]
    return found
