"""Schedule training jobs over many devices, with the same scheduler and policies live and in simulation."""

import importlib
from typing import Any

from waterflow.cluster.book import Book as Book, Entry as Entry
from waterflow.cluster.devices import Device as Device
from waterflow.cluster.interference import (
    Interference as Interference,
    Resident as Resident,
    gavel_models as gavel_models,
    read_gandiva_models as read_gandiva_models,
    read_gavel_pairs as read_gavel_pairs,
)
from waterflow.cluster.model_profiles import (
    ANTMAN_MIX as ANTMAN_MIX,
    KNOWN_MODELS as KNOWN_MODELS,
    ModelProfile as ModelProfile,
    draw_models as draw_models,
)
from waterflow.cluster.policies import POLICIES as POLICIES
from waterflow.cluster.policies.base import Policy as Policy
from waterflow.cluster.scaling import LINEAR as LINEAR, Scaling as Scaling, TableScaling as TableScaling
from waterflow.cluster.scheduler import Scheduler as Scheduler
from waterflow.cluster.simulator import (
    JobRecord as JobRecord,
    Overheads as Overheads,
    Simulated as Simulated,
    Simulator as Simulator,
    Speeds as Speeds,
)
from waterflow.cluster.submission import (
    Action as Action,
    Move as Move,
    Node as Node,
    Place as Place,
    Priority as Priority,
    Report as Report,
    Resize as Resize,
    SetPriority as SetPriority,
    Start as Start,
    Stop as Stop,
    Submission as Submission,
    Tenant as Tenant,
)
from waterflow.cluster.workload import Workload as Workload, read_workload as read_workload

# Imported when they are first used: a simulation needs neither torch nor processes, a client needs no NumPy, and Ray may
# not be installed.
_PUBLIC = {
    "Cluster": "client",
    "DeviceState": "backend",
    "LocalBackend": "local",
    "NodeInfo": "backend",
    "Part": "backend",
    "RayBackend": "ray",
    "RayEnvironment": "ray_share",
    "Request": "backend",
    "Service": "service",
    "Store": "store",
    "Summary": "summary",
    "WorkerSettings": "worker",
    "load_ray": "ray",
    "load_results": "payload",
    "pack": "payload",
    "save_pictures": "summary",
    "share_ratios": "summary",
    "summarize": "summary",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(f"waterflow.cluster.{_PUBLIC[name]}"), name)
    raise AttributeError(f"module 'waterflow.cluster' has no attribute {name!r}")
