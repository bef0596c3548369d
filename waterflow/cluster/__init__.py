"""Many devices: who may run where and when, decided by the same classes live and in simulation."""

import importlib
from typing import Any

# Looked up when they are asked for: those who simulate need neither torch nor processes, and Ray may not be there.
_PUBLIC = {
    "BackendError": "backend",
    "Checkpointed": "backend",
    "Ended": "backend",
    "LocalBackend": "local",
    "LoopbackCluster": "ray",
    "NodeInfo": "backend",
    "NodeJoined": "backend",
    "NodeLost": "backend",
    "Progress": "backend",
    "RayBackend": "ray",
    "Started": "backend",
    "WorkerSettings": "worker",
    "load_results": "payload",
    "pack": "payload",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"waterflow.cluster.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'waterflow.cluster' has no attribute {name!r}")
