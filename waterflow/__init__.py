"""Train many PyTorch models at once on one device."""

import torch as _torch

from waterflow import _C as _native

if _native.built_with_torch != _torch.__version__:
    raise ImportError(
        f"waterflow was built with torch {_native.built_with_torch}, and torch {_torch.__version__} is installed; "
        "build it again: pip install --no-build-isolation --force-reinstall --no-deps waterflow"
    )

from waterflow.allocator.counting import count_memory
from waterflow.batch_size import max_batch_size
from waterflow.checkpoint import Checkpoint
from waterflow.checkpoint_folder import Checkpoints
from waterflow.errors import (
    CaptureError,
    CheckpointError,
    ClusterError,
    InvalidJobError,
    JobCancelled,
    MemoryLimitError,
    NonFiniteLossError,
    StepError,
    StudyError,
    SubmissionError,
    WaterflowError,
    WorkloadError,
)
from waterflow.executor.engine import Engine, within
from waterflow.executor.engine import current_device as device
from waterflow.executor.shared_data import SharedData
from waterflow.executor.timeline import Timeline
from waterflow.job import Job, JobResult, Results
from waterflow.partition.offsets import Offsets
from waterflow.partition.plan import Plan
from waterflow.partition.recompute import Recomputed
from waterflow.runner import JobRunner
from waterflow.step import Step
from waterflow.training import Callback, train

__version__ = "0.1.0"

__all__ = [
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
    "MemoryLimitError",
    "NonFiniteLossError",
    "Offsets",
    "Plan",
    "Recomputed",
    "Results",
    "SharedData",
    "Step",
    "StepError",
    "StudyError",
    "SubmissionError",
    "Timeline",
    "WaterflowError",
    "WorkloadError",
    "count_memory",
    "device",
    "max_batch_size",
    "optimize",
    "train",
    "within",
]


def __getattr__(name: str):  # type: ignore[no-untyped-def]
    # Optuna takes a second to import: only those who run studies pay for it.
    if name == "optimize":
        from waterflow.study import optimize

        return optimize
    if name == "Cluster":
        from waterflow.cluster.client import Cluster

        return Cluster
    raise AttributeError(f"module 'waterflow' has no attribute {name!r}")
