"""The process of a cluster: its store, backend, scheduler and endpoint, from ``up`` to ``down``.

When it dies, workers and jobs live on for a time, and the next process on the same state folder takes them over.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from waterflow.cluster.backend import Backend
from waterflow.cluster.endpoint import Endpoint, make_token
from waterflow.cluster.launch import ClusterConfig, config_file
from waterflow.cluster.local import LocalBackend
from waterflow.cluster.policies import make_policy
from waterflow.cluster.service import Service
from waterflow.cluster.state import address_file, check_whole, hold, make_folder, private, store_file, token_file, work_folder
from waterflow.cluster.store import Store
from waterflow.cluster.submission import Tenant
from waterflow.cluster.worker import WorkerSettings
from waterflow.errors import ClusterError
from waterflow.executor.metrics import available, cluster_text
from waterflow.units import missing

logger = logging.getLogger("waterflow")

OUTLIVE_SECONDS = 3600.0  # for which workers wait for another scheduler after theirs has died


def make_backend(config: ClusterConfig, folder: Path) -> Backend:
    """Return the backend that ``config`` describes. Raises ClusterError if this machine lacks the devices."""
    settings = WorkerSettings(
        device=config.device, memory=config.memory, lanes=config.lanes, checkpoint_seconds=config.checkpoint_seconds
    )
    if config.ray is not None:
        from waterflow.cluster.ray import RayBackend

        return RayBackend(config.ray, work_folder(folder), settings=settings, outlive=OUTLIVE_SECONDS, token=config.ray_token)
    if (why := missing(config.device, len(config.nodes))) is not None:
        raise ClusterError(f"a cluster of {len(config.nodes)} device(s): {why}")
    return LocalBackend(config.nodes, work_folder(folder), settings=settings, outlive=OUTLIVE_SECONDS)


def serve(folder: Path, config: ClusterConfig, ready: Callable[[dict[str, Any]], None]) -> None:
    """Run the cluster of a state folder until ``down`` is requested, or a signal ends this process alone.

    ``ready`` receives the content of the address file. Raises ClusterError if the cluster cannot begin, and the error that
    ended it.
    """
    config.check()
    make_folder(folder)
    with contextlib.ExitStack() as stack:
        lock = hold(folder)
        if lock is None:
            raise ClusterError(f"a cluster is up in {folder}; waterflow cluster down ends it")
        stack.enter_context(lock)
        check_whole(folder)
        store = Store(store_file(folder))
        token = make_token(token_file(folder))
        policy = make_policy(config.policy, config.parameters)
        tenants = [Tenant(name, quota) for name, quota in config.tenants]
        made = make_backend(config, folder)
        try:
            service = Service(store, made, policy, tenants)
            endpoint = _endpoint(service, token, config, folder)
        except BaseException:
            # Workers taken over from an earlier process must survive a failed start.
            made.detach()
            raise
        stopped = _signals()
        service.start()
        endpoint.start()
        told = {
            "address": endpoint.address,
            "pid": os.getpid(),
            "policy": config.policy,
            "nodes": [node.name for node in made.nodes()],
        }
        _write(config_file(folder), asdict(config))
        # Written once the endpoint answers: a client that finds the file can connect.
        _write(address_file(folder), told)
        ready(told)
        while not (service.over or stopped.is_set() or endpoint.wanted_down.wait(0.1)):
            pass
        if endpoint.wanted_down.is_set() and not service.over:
            service.down()
            # After a signal the file stays: the next process takes the same port from it.
            address_file(folder).unlink(missing_ok=True)
        endpoint.close()
        service.close()
        if service.failure is not None:
            raise service.failure


def _endpoint(service: Service, token: str, config: ClusterConfig, folder: Path) -> Endpoint:
    # The port of last time, if it is free, keeps the addresses valid that clients know.
    ports = [config.port]
    if config.port == 0:
        with contextlib.suppress(OSError, ValueError, KeyError):
            ports.insert(0, int(json.loads(address_file(folder).read_text())["address"].rpartition(":")[2]))
    for port in ports:
        try:
            return Endpoint(
                service,
                token,
                config.host,
                port,
                anywhere=config.beyond_loopback,
                metrics=(lambda: cluster_text(service.status())) if available() else None,
            )
        except OSError as error:
            reason = error
    raise ClusterError(f"cannot listen on {config.host}:{ports[-1]}: {reason}; choose another --port")


def _signals() -> threading.Event:
    stopped = threading.Event()
    # Python lets only the main thread set signal handlers.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
    return stopped


def _write(path: Path, content: dict[str, Any]) -> None:
    # A reader sees the old file or the new one, never a part.
    unfinished = path.with_suffix(".new")
    with open(unfinished, "w", opener=private) as file:
        json.dump(content, file)
    os.replace(unfinished, path)


def main() -> None:
    """Entry point of the process that ``launch.start`` starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--config", type=json.loads, required=True)
    parser.add_argument("--ready", type=int, required=True)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    config = ClusterConfig(
        **given.config | {"nodes": tuple(given.config["nodes"]), "tenants": tuple((n, q) for n, q in given.config["tenants"])}
    )
    answer = os.fdopen(given.ready, "w")

    # Objects that importing torch leaves are never garbage; a collection that walks them delays a decision by 0.1 s.
    gc.collect()
    gc.freeze()

    def ready(told: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # the process that started this one has ended
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
