"""The client's side of a submission: jobs are pickled, checked, and named here, where errors reach the caller."""

from __future__ import annotations

import contextlib
import re
import secrets
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from waterflow.cluster.payload import Jobs, pack
from waterflow.errors import InvalidJobError
from waterflow.executor.memory_limit import reserve_of
from waterflow.job import Job
from waterflow.partition.guards.code_refs import is_library_module
from waterflow.planner.feasibility import feasible, needed
from waterflow.training.checkpoint import Checkpoint
from waterflow.training.fit_together import forecast
from waterflow.training.runner import Task


@dataclass(frozen=True)
class JobSet:
    """Jobs that train together on one device, and the bytes that they need there at most; 0: not known."""

    jobs: tuple[Job, ...]
    memory: int


def memory_of(jobs: Sequence[Job]) -> int:
    """Return the bytes that jobs need on a device that they share: all persistent memory, and the highest step; 0 if not known.

    A device's limit must be higher by the engine's reserve, which belongs to no job.
    """
    known = [need for job in jobs if (need := forecast(job).need) is not None]
    return needed(known) if len(known) == len(jobs) else 0


def sets_that_fit(jobs: Sequence[Job], memory: int) -> list[JobSet]:
    """Partition jobs into sets that each fit on a device of ``memory`` bytes: the largest set, then the largest of the rest.

    A job whose step cannot be captured is a set of its own. Raises MemoryLimitError for a job that does not fit alone.
    """
    room = memory - reserve_of(memory)
    found = [forecast(job, memory, room) for job in jobs]
    for one in found:
        if one.error is not None:
            raise one.error
    fit = feasible([one.need for one in found], room)
    made = [JobSet(tuple(jobs[i] for i in turn), needed(fit.of(turn))) for turn in fit.turns]
    return [*made, *(JobSet((job,), 0) for job, one in zip(jobs, found) if one.need is None)]


_NEVER_OWN = frozenset({"waterflow", "__main__", "__mp_main__"} | sys.stdlib_module_names)
_packing = threading.Lock()  # cloudpickle's registry of modules to pickle by value is global


def packed(jobs: Jobs | Callable[[], Jobs]) -> bytes:
    """Return the payload of jobs; code of modules in the current folder is part of it. Raises InvalidJobError."""
    with _packing, _own_modules_by_value():
        return pack(jobs)


def planned_memory(jobs: Any) -> int:
    """Return the bytes that jobs need on a device together; each is captured. Raises InvalidJobError for a function."""
    there = [jobs] if isinstance(jobs, Job) else [] if callable(jobs) or isinstance(jobs, Task) else list(jobs)
    known = [job for job in there if isinstance(job, Job)]
    if not known or len(known) < len(there):
        raise InvalidJobError("memory='auto' plans jobs before they are submitted; a function makes them where they run")
    return memory_of(known)


def check_checkpoint(file: Path, jobs: Any) -> None:
    """Raise CheckpointError or InvalidJobError for a file that the jobs cannot resume from."""
    if not isinstance(jobs, Job) and not callable(jobs):
        jobs = list(jobs)
        if len(jobs) != 1:
            raise InvalidJobError(f"a checkpoint is of one job; got {len(jobs)} jobs. Submit them one by one")
        jobs = jobs[0]
    if not file.is_file():
        raise InvalidJobError(f"there is no checkpoint {file}")
    Checkpoint.load(file, job=jobs.name if isinstance(jobs, Job) else None)


def new_id(jobs: Any) -> str:
    """Return a new unique id that begins with the name of the jobs."""
    name = getattr(jobs, "__name__", "") or "job"
    if isinstance(jobs, Job):
        name = jobs.name
    elif isinstance(jobs, (list, tuple)) and jobs and isinstance(jobs[0], Job):
        name = jobs[0].name
    name = re.sub("[^A-Za-z0-9]+", "-", name).strip("-")[:40] or "job"
    return f"{name}-{secrets.token_hex(4)}"


@contextlib.contextmanager
def _own_modules_by_value() -> Iterator[None]:
    """Pickle functions of the user's own modules by value inside the block.

    A worker may have another current folder, or run on another machine. Installed packages are pickled by reference.
    """
    chosen = _own_modules()
    # Modules that the user has registered must stay registered.
    before = cloudpickle.list_registry_pickle_by_value()
    chosen = [module for module in chosen if module.__name__ not in before]
    for module in chosen:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in chosen:
            cloudpickle.unregister_pickle_by_value(module)


def _own_modules() -> list[ModuleType]:
    """Return modules in the current folder, beside the script, or named by path in a config, but none that is installed."""
    # A process has thousands of modules, and each submission walks them: the cheap tests on names come first.
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    roots = {Path.cwd().resolve()} | ({Path(script).resolve().parent} if script else set())
    beginnings = tuple(map(str, roots))
    chosen = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        package = name.partition(".")[0]
        if not file or package in _NEVER_OWN:
            continue
        # Only these can be in a root: paths drop doubled slashes and single dots.
        if isinstance(file, str) and not (file.startswith(beginnings) or name == file or "//" in file or "/./" in file):
            continue
        if is_library_module(package):
            continue
        path = Path(file)
        own = any(path.is_relative_to(root) for root in roots) or name == file  # what a config names by its path
        if own and path.suffix == ".py" and sys.modules.get(module.__name__) is module:
            chosen.append(module)
    return chosen
