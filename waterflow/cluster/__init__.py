"""Schedule training jobs over many devices, with the same scheduler and policies live and in simulation."""

import importlib
from typing import Any

from waterflow.cluster.book import Book, Entry
from waterflow.cluster.devices import Device
from waterflow.cluster.interference import Interference, Resident, gavel_models, read_gandiva_models, read_gavel_pairs
from waterflow.cluster.model_profiles import ANTMAN_MIX, KNOWN_MODELS, ModelProfile, draw_models
from waterflow.cluster.policies import POLICIES
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.scaling import LINEAR, Scaling, TableScaling
from waterflow.cluster.scheduler import Scheduler
from waterflow.cluster.simulator import JobRecord, Overheads, Simulated, Simulator, Speeds
from waterflow.cluster.submission import (
    Action,
    Move,
    Node,
    Place,
    Priority,
    Report,
    Resize,
    SetPriority,
    Start,
    Stop,
    Submission,
    Tenant,
)
from waterflow.cluster.workload import Workload, read_workload

# Imported when they are first used: a simulation needs neither torch nor processes, a client needs no NumPy, and Ray may
# not be installed.
_PUBLIC = {
    "BackendError": "backend",
    "Checkpointed": "backend",
    "Cluster": "client",
    "Ended": "backend",
    "LocalBackend": "local",
    "LoopbackCluster": "ray",
    "NodeInfo": "backend",
    "NodeJoined": "backend",
    "NodeLost": "backend",
    "Progress": "backend",
    "RayBackend": "ray",
    "Service": "service",
    "Started": "backend",
    "Store": "store",
    "Summary": "summary",
    "WorkerSettings": "worker",
    "load_results": "payload",
    "pack": "payload",
    "save_pictures": "summary",
    "share_ratios": "summary",
    "summarize": "summary",
}

__all__ = [
    "ANTMAN_MIX",
    "KNOWN_MODELS",
    "LINEAR",
    "POLICIES",
    "Action",
    "BackendError",
    "Book",
    "Checkpointed",
    "Cluster",
    "Device",
    "Ended",
    "Entry",
    "Interference",
    "JobRecord",
    "LocalBackend",
    "LoopbackCluster",
    "ModelProfile",
    "Move",
    "Node",
    "NodeInfo",
    "NodeJoined",
    "NodeLost",
    "Overheads",
    "Place",
    "Policy",
    "Priority",
    "Progress",
    "RayBackend",
    "Report",
    "Resident",
    "Resize",
    "Scaling",
    "Scheduler",
    "Service",
    "SetPriority",
    "Simulated",
    "Simulator",
    "Speeds",
    "Start",
    "Started",
    "Stop",
    "Store",
    "Submission",
    "Summary",
    "TableScaling",
    "Tenant",
    "WorkerSettings",
    "Workload",
    "draw_models",
    "gavel_models",
    "load_results",
    "pack",
    "read_gandiva_models",
    "read_gavel_pairs",
    "read_workload",
    "save_pictures",
    "share_ratios",
    "summarize",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"waterflow.cluster.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'waterflow.cluster' has no attribute {name!r}")
