"""The configuration of a cluster, and the start of its process in the background. Needs no torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from waterflow.cluster.endpoint import check_address
from waterflow.cluster.policies import POLICIES, make_policy
from waterflow.cluster.state import log_file, make_folder, private
from waterflow.errors import ClusterError
from waterflow.executor.memory_limit import parse_memory

LIVE = sorted(set(POLICIES) - {"elastic_tiresias"})  # the policies of a live cluster
DEVICES = ("cpu", "cuda")  # kinds of device; which GPU a process sees follows from its node
READY_SECONDS = 180.0  # for the process to answer


@dataclass(frozen=True)
class ClusterConfig:
    """The configuration of a cluster, which the state folder keeps for the next ``up``.

    ``nodes`` are the names of its devices, each a process of its own; with ``ray``, the address of a running Ray cluster,
    they are all of its GPUs. ``ray_token`` is the file with that cluster's token, unless the environment names it. ``device``
    is the kind of device, one of ``DEVICES``. ``memory`` limits each device, in bytes or as text. ``tenants`` are (name,
    quota in devices) pairs; without any, every tenant may submit. ``parameters`` are arguments of the policy, of JSON types.
    """

    nodes: tuple[str, ...] = ("device-0",)
    policy: str = "antman"
    tenants: tuple[tuple[str, int], ...] = ()
    memory: int | float | str | None = None
    lanes: int | None = None
    device: str = "cpu"
    checkpoint_seconds: float = 30.0
    host: str = "127.0.0.1"
    port: int = 0
    beyond_loopback: bool = False
    ray: str | None = None
    ray_token: str | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raise ClusterError or InvalidJobError if a field is invalid."""
        if self.policy not in POLICIES:
            raise ClusterError(f"no policy is called {self.policy!r}; there are {', '.join(LIVE)}")
        if self.policy not in LIVE:
            raise ClusterError(
                f"policy {self.policy!r} changes the number of a job's devices, and a job of a live cluster runs on one; take "
                "las, or try it in simulate"
            )
        make_policy(self.policy, self.parameters)
        if not self.nodes or len(set(self.nodes)) < len(self.nodes):
            raise ClusterError(f"a cluster needs one device at least, each with a name of its own; got {list(self.nodes)}")
        names = [name for name, _ in self.tenants]
        if len(set(names)) < len(names) or any(quota < 0 for _, quota in self.tenants):
            raise ClusterError(f"tenants need names that differ and quotas of 0 or more devices; got {list(self.tenants)}")
        if self.device not in DEVICES:
            raise ClusterError(f"device must be one of {', '.join(DEVICES)}; got {self.device!r}")
        parse_memory(self.memory)
        check_address(self.host, self.beyond_loopback)


def config_file(folder: Path) -> Path:
    """Return the path of the configuration, a JSON file."""
    return folder / "config.json"


def load_config(folder: Path) -> ClusterConfig | None:
    """Return the configuration in a state folder; None if there is none. Raises ClusterError if it cannot be read."""
    try:
        given = json.loads(config_file(folder).read_text())
        known = {field.name for field in fields(ClusterConfig)}
        given = {key: value for key, value in given.items() if key in known}
        tenants = tuple((str(name), int(quota)) for name, quota in given.pop("tenants", ()))
        return ClusterConfig(**given | {"nodes": tuple(given["nodes"]), "tenants": tenants})
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise ClusterError(
            f"{config_file(folder)} cannot be read: {error}; remove it, and give the options of up again"
        ) from None


def start(folder: Path, config: ClusterConfig) -> dict[str, Any]:
    """Start the cluster of a state folder in a new process; return the content of its address file once it answers.

    Raises ClusterError with the reason if it does not begin.
    """
    config.check()
    make_folder(folder)
    # The child answers through a pipe, which the system closes if the child dies: no time-out has to be guessed.
    reading, writing = os.pipe()
    with open(log_file(folder), "ab", opener=private) as log, open(reading) as answer:
        command = [sys.executable, "-m", "waterflow.cluster.daemon", "--state", str(folder), "--ready", str(writing)]
        # A session of its own: signals from the caller's terminal do not reach it.
        process = subprocess.Popen(
            [*command, "--config", json.dumps(asdict(config))],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=[writing],
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        os.close(writing)
        said = answer.readline()  # it ends when the process does
    if not said:
        code = process.wait(READY_SECONDS)
        raise ClusterError(f"the cluster did not begin (its process ended with {code}); see {log_file(folder)}")
    told: dict[str, Any] = json.loads(said)
    if "error" in told:
        process.wait(READY_SECONDS)
        raise ClusterError(told["error"])
    return told


def wait_for_end(pid: int, seconds: float) -> bool:
    """Wait at most ``seconds`` for a process to end; return whether it has."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
            # A zombie has ended, though its number can still be signalled until its parent collects it.
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False
