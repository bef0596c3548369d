"""Train many PyTorch models at once on one device.

Public names are imported at their first use: code that only talks to a cluster, or simulates one, needs neither torch nor
Optuna.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from waterflow import _C as _C
    from waterflow.cluster.client import Cluster
    from waterflow.errors import (
        AuditError,
        CaptureError,
        CheckpointError,
        ClusterError,
        InvalidJobError,
        JobCancelled,
        JobTimeoutError,
        MemoryLimitError,
        NonFiniteLossError,
        StepError,
        StepIndexError,
        StepValueError,
        StudyError,
        SubmissionError,
        WaterflowError,
        WorkloadError,
    )
    from waterflow.executor.data.shared import SharedData
    from waterflow.executor.engine import Engine, within
    from waterflow.executor.engine import current_device as device
    from waterflow.executor.timeline import Timeline
    from waterflow.job import Job, JobResult, Results
    from waterflow.partition.passes.rematerialize import Recomputed
    from waterflow.partition.plan.offsets import Offsets
    from waterflow.partition.plan.plan import Plan
    from waterflow.step import Step
    from waterflow.study import optimize
    from waterflow.training.batch_size import max_batch_size
    from waterflow.training.checkpoint import Checkpoint
    from waterflow.training.checkpoint_dir import Checkpoints
    from waterflow.training.runner import JobRunner
    from waterflow.training.train import Callback, train

__version__ = "0.1.0"

__all__ = [
    "AuditError",
    "Callback",
    "CaptureError",
    "Checkpoint",
    "CheckpointError",
    "Checkpoints",
    "Cluster",
    "ClusterError",
    "Engine",
    "InvalidJobError",
    "Job",
    "JobCancelled",
    "JobResult",
    "JobRunner",
    "JobTimeoutError",
    "MemoryLimitError",
    "NonFiniteLossError",
    "Offsets",
    "Plan",
    "Recomputed",
    "Results",
    "SharedData",
    "Step",
    "StepError",
    "StepIndexError",
    "StepValueError",
    "StudyError",
    "SubmissionError",
    "Timeline",
    "WaterflowError",
    "WorkloadError",
    "device",
    "max_batch_size",
    "optimize",
    "train",
    "within",
]

_MODULES = {  # of public names; errors are in errors
    "Callback": "training.train",
    "Checkpoint": "training.checkpoint",
    "Checkpoints": "training.checkpoint_dir",
    "Cluster": "cluster.client",
    "Engine": "executor.engine",
    "Job": "job",
    "JobResult": "job",
    "JobRunner": "training.runner",
    "Offsets": "partition.plan.offsets",
    "Plan": "partition.plan.plan",
    "Recomputed": "partition.passes.rematerialize",
    "Results": "job",
    "SharedData": "executor.data.shared",
    "Step": "step",
    "Timeline": "executor.timeline",
    "device": "executor.engine",
    "max_batch_size": "training.batch_size",
    "optimize": "study",
    "train": "training.train",
    "within": "executor.engine",
}
_OTHERWISE_CALLED = {"device": "current_device"}


def __getattr__(name: str) -> Any:
    if name == "_C":
        return _native()
    if name in __all__:
        module = _imported(_MODULES.get(name, "errors"))
        # Kept in the module, so that __getattr__ is asked once for each name.
        found = globals()[name] = getattr(module, _OTHERWISE_CALLED.get(name, name))
        return found
    if not name.startswith("_"):
        # Modules are reachable as attributes, too (waterflow.errors), without an import of their own.
        try:
            return _imported(name)
        except ModuleNotFoundError as error:
            if error.name != f"waterflow.{name}":
                raise
    raise AttributeError(f"module 'waterflow' has no attribute {name!r}")


def _imported(name: str) -> Any:
    # Ctrl-C in the middle of an import would leave a half-made module, or a native part, that the process can never
    # import again.
    from waterflow.executor.interrupts import uninterrupted

    with uninterrupted():
        return importlib.import_module(f"waterflow.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def _native() -> Any:
    # First, so that the native part finds torch's libraries loaded.
    import torch

    from waterflow.sources import digest

    native = importlib.import_module("waterflow._C")
    # A stale build fails here with its remedy, not somewhere in a run.
    if native.built_with_torch != torch.__version__:
        wrong = f"the extension was built with torch {native.built_with_torch}, and torch {torch.__version__} is installed"
    elif getattr(native, "built_from", None) != digest(Path(__file__).parent):
        wrong = "the extension was built from other sources than these"
    else:
        return native
    globals().pop("_C", None)  # or it would be there the next time
    raise ImportError(f"{wrong}: run make build, or pip install --no-build-isolation --force-reinstall --no-deps . in the clone")
