"""Train many PyTorch models at once on one device.

Public names are imported at their first use: code that only talks to a cluster, or simulates one, needs neither torch nor
Optuna.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from waterflow import errors

if TYPE_CHECKING:
    from waterflow import _C as _C
    from waterflow.cluster.client import Cluster as Cluster
    from waterflow.errors import (
        AuditError as AuditError,
        BackendError as BackendError,
        CaptureError as CaptureError,
        CheckpointError as CheckpointError,
        ClusterError as ClusterError,
        InvalidJobError as InvalidJobError,
        JobCancelled as JobCancelled,
        JobTimeoutError as JobTimeoutError,
        MemoryLimitError as MemoryLimitError,
        NonFiniteLossError as NonFiniteLossError,
        StepError as StepError,
        StepIndexError as StepIndexError,
        StepValueError as StepValueError,
        StudyError as StudyError,
        SubmissionError as SubmissionError,
        WaterflowError as WaterflowError,
        WorkloadError as WorkloadError,
    )
    from waterflow.executor.data.rows import DataLoader as DataLoader
    from waterflow.executor.data.shared import SharedData as SharedData
    from waterflow.executor.engine import Engine as Engine, current_device, within as within
    from waterflow.executor.timeline import Timeline as Timeline
    from waterflow.job import Job as Job, JobResult as JobResult, Results as Results
    from waterflow.partition.passes.rematerialize import Recomputed as Recomputed
    from waterflow.partition.plan.offsets import Offsets as Offsets
    from waterflow.partition.plan.plan import Plan as Plan
    from waterflow.step import Step as Step
    from waterflow.study import optimize as optimize
    from waterflow.training.batch_size import max_batch_size as max_batch_size
    from waterflow.training.checkpoint import Checkpoint as Checkpoint
    from waterflow.training.checkpoint_dir import Checkpoints as Checkpoints
    from waterflow.training.evaluate import evaluate as evaluate
    from waterflow.training.runner import JobRunner as JobRunner, PauseJob as PauseJob
    from waterflow.training.train import Callback as Callback, train as train

    device = current_device

__version__ = "0.1.0"

_MODULES = {  # of public names; errors are in errors
    "Callback": "training.train",
    "Checkpoint": "training.checkpoint",
    "Checkpoints": "training.checkpoint_dir",
    "Cluster": "cluster.client",
    "DataLoader": "executor.data.rows",
    "Engine": "executor.engine",
    "Job": "job",
    "JobResult": "job",
    "JobRunner": "training.runner",
    "Offsets": "partition.plan.offsets",
    "PauseJob": "training.runner",
    "Plan": "partition.plan.plan",
    "Recomputed": "partition.passes.rematerialize",
    "Results": "job",
    "SharedData": "executor.data.shared",
    "Step": "step",
    "Timeline": "executor.timeline",
    "device": "executor.engine",
    "evaluate": "training.evaluate",
    "max_batch_size": "training.batch_size",
    "optimize": "study",
    "train": "training.train",
    "within": "executor.engine",
}
_OTHERWISE_CALLED = {"device": "current_device"}

_ERRORS = [name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, errors.WaterflowError)]
__all__ = sorted([*_MODULES, *_ERRORS])


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
