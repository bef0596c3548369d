"""The process of a cluster: its store, backend, scheduler and endpoint, from ``up`` to ``down``.

When it dies, workers and jobs live on for a time, and the next one on the same state folder takes them over.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from waterflow.cluster.backend import Backend
from waterflow.cluster.endpoint import Endpoint, check_address, make_token
from waterflow.cluster.local import LocalBackend
from waterflow.cluster.policies import POLICIES
from waterflow.cluster.service import Service
from waterflow.cluster.state import address_file, hold, log_file, make_folder, store_file, token_file, work_folder
from waterflow.cluster.store import Store
from waterflow.cluster.submission import Tenant
from waterflow.cluster.worker import WorkerSettings
from waterflow.errors import ClusterError
from waterflow.executor.memory_limit import parse_memory
from waterflow.metrics import available, cluster_text

logger = logging.getLogger("waterflow")

OUTLIVE_SECONDS = 3600.0  # that workers wait for another scheduler after theirs has died
READY_SECONDS = 180.0  # for the process to answer


@dataclass(frozen=True)
class ClusterConfig:
    """What a cluster is made of; it is kept in the state folder, and the next ``up`` takes it from there.

    ``nodes`` are the names of its devices, each a process of its own, or, with ``ray`` (the address of a Ray cluster that
    runs), all of its GPUs. ``memory`` is the limit of each, in bytes or as text; ``tenants`` have quotas in devices (none:
    anybody may submit).
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

    def check(self) -> None:
        """Raise ClusterError or InvalidJobError where it cannot be right."""
        if self.policy not in POLICIES:
            raise ClusterError(f"no policy is called {self.policy!r}; there are {', '.join(sorted(POLICIES))}")
        if not self.nodes or len(set(self.nodes)) < len(self.nodes):
            raise ClusterError(
                f"a cluster needs one device at least, each with a name of its own; got {list(self.nodes)}"
            )
        names = [name for name, _ in self.tenants]
        if len(set(names)) < len(names) or any(quota < 0 for _, quota in self.tenants):
            raise ClusterError(
                f"tenants need names that differ and quotas of 0 or more devices; got {list(self.tenants)}"
            )
        parse_memory(self.memory)
        check_address(self.host, self.beyond_loopback)


def config_file(folder: Path) -> Path:
    """Where the config is kept, as JSON."""
    return folder / "config.json"


def load_config(folder: Path) -> ClusterConfig | None:
    """The config of the cluster in a state folder; None where there was none so far."""
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
            f"{config_file(folder)} cannot be read: {error}; remove it, and say what is wanted again"
        ) from None


def make_backend(config: ClusterConfig, folder: Path) -> Backend:
    """The devices of a cluster."""
    settings = WorkerSettings(
        device=config.device, memory=config.memory, lanes=config.lanes, checkpoint_seconds=config.checkpoint_seconds
    )
    if config.ray is not None:
        from waterflow.cluster.ray import RayBackend

        return RayBackend(config.ray, work_folder(folder), settings=settings, outlive=OUTLIVE_SECONDS)
    return LocalBackend(config.nodes, work_folder(folder), settings=settings, outlive=OUTLIVE_SECONDS)


def serve(
    folder: Path, config: ClusterConfig, ready: Callable[[dict[str, Any]], None],
    backend: Callable[[ClusterConfig, Path], Backend] = make_backend,
) -> None:  # fmt: skip
    """Be the cluster of a state folder until somebody takes it down, or a signal ends this process alone.

    ``ready`` is called with what the address file says. Raises ClusterError where it cannot begin; what ended it otherwise.
    """
    config.check()
    make_folder(folder)
    with contextlib.ExitStack() as stack:
        lock = hold(folder)
        if lock is None:
            raise ClusterError(f"a cluster is up in {folder}; waterflow cluster down ends it")
        stack.enter_context(lock)
        store = Store(store_file(folder))
        token = make_token(token_file(folder))
        policy = POLICIES[config.policy]()
        tenants = [Tenant(name, quota) for name, quota in config.tenants]
        made = backend(config, folder)
        try:
            service = Service(store, made, policy, tenants)
            endpoint = _endpoint(service, token, config, folder)
        except BaseException:
            made.detach()
            raise
        stopped = _signals()
        service.start()
        endpoint.start()
        told = {"address": endpoint.address, "pid": os.getpid(), "policy": config.policy,
                "nodes": [node.name for node in made.nodes()]}  # fmt: skip
        _write(config_file(folder), asdict(config))
        _write(address_file(folder), told)
        ready(told)
        while not (service.over or stopped.is_set() or endpoint.wanted_down.wait(0.1)):
            pass
        if endpoint.wanted_down.is_set() and not service.over:
            service.down()
            address_file(folder).unlink(missing_ok=True)
        endpoint.close()
        service.close()
        if service.failure is not None:
            raise service.failure


def _endpoint(service: Service, token: str, config: ClusterConfig, folder: Path) -> Endpoint:
    """At the port of last time, if that is free: then addresses stay right."""
    ports = [config.port]
    if config.port == 0:
        with contextlib.suppress(OSError, ValueError, KeyError):
            ports.insert(0, int(json.loads(address_file(folder).read_text())["address"].rpartition(":")[2]))
    for port in ports:
        try:
            return Endpoint(
                service, token, config.host, port, anywhere=config.beyond_loopback,
                metrics=(lambda: cluster_text(service.status())) if available() else None,
            )  # fmt: skip
        except OSError as error:
            reason = error
    raise ClusterError(f"cannot listen on {config.host}:{ports[-1]}: {reason}; choose another --port")


def _signals() -> threading.Event:
    stopped = threading.Event()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
    return stopped


def _write(path: Path, content: dict[str, Any]) -> None:
    unfinished = path.with_suffix(".new")
    unfinished.write_text(json.dumps(content))
    os.replace(unfinished, path)


# -- in the background


def start(folder: Path, config: ClusterConfig) -> dict[str, Any]:
    """Start the cluster of a state folder in a process of its own; returns what its address file says once it answers.

    Raises ClusterError with the reason where it does not begin.
    """
    config.check()
    make_folder(folder)
    reading, writing = os.pipe()
    with open(log_file(folder), "ab") as log, open(reading) as answer:
        command = [sys.executable, "-m", "waterflow.cluster.daemon", "--state", str(folder), "--ready", str(writing)]
        process = subprocess.Popen(
            [*command, "--config", json.dumps(asdict(config))], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            pass_fds=[writing], start_new_session=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
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
    """Whether a process has ended; waits at most so long for it."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


def main() -> None:
    """Entry of the process that ``start`` makes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--config", type=json.loads, required=True)
    parser.add_argument("--ready", type=int, required=True)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    config = ClusterConfig(
        **given.config
        | {"nodes": tuple(given.config["nodes"]), "tenants": tuple((n, q) for n, q in given.config["tenants"])}
    )
    answer = os.fdopen(given.ready, "w")

    # What importing torch leaves behind is never garbage; walking it would hold up a decision for a tenth of a second.
    gc.collect()
    gc.freeze()

    def ready(told: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # whoever started it has gone
            answer.write(json.dumps(told) + "\n")
            answer.close()

    try:
        serve(given.state, config, ready)
    except Exception as error:
        logger.exception("the cluster in %s ends", given.state)
        if not answer.closed:
            ready({"error": str(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
