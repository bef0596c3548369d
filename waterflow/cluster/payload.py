"""Jobs as bytes for another process, and their results on the way back."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import nn

from waterflow.by_value import pickled
from waterflow.cluster.shared_folder import result_files
from waterflow.errors import InvalidJobError
from waterflow.job import Job, JobResult, Results
from waterflow.results import pack_result
from waterflow.training.runner import Task

Jobs = Job | Task | Iterable[Job | Task]
ATTEMPTS = 10  # at pickling objects that other threads change
DEPTH = 8  # levels of an object in which the part that cannot be pickled is searched


def pack(jobs: Jobs | Callable[[], Jobs]) -> bytes:
    """Return a payload for ``Backend.start``: jobs, or a function that makes them where they run.

    Functions of the calling script, lambdas among them, are sent by value; the code of other modules is imported there.
    Raises InvalidJobError that names the part that cannot be pickled.
    """
    if isinstance(jobs, nn.Module):
        raise InvalidJobError(
            f"a {type(jobs).__name__} is a module; submit a wf.Job that trains it, or a function that makes one"
        )
    content = jobs if callable(jobs) else checked(jobs)
    for attempt in reversed(range(ATTEMPTS)):
        try:
            return pickled(content)
        except Exception as error:
            if attempt and "changed size during iteration" in str(error):
                continue  # another thread has changed what is being read
            raise InvalidJobError(_why(content, error)) from error
    raise AssertionError


def unpack(payload: bytes) -> list[Job | Task]:
    """Return the jobs of a payload. Runs code of its author."""
    content = pickle.loads(payload)
    return checked(content() if callable(content) else content)


def checked(jobs: Any) -> list[Job | Task]:
    """Return jobs as a list of jobs with different names. Raises InvalidJobError."""
    made = [jobs] if isinstance(jobs, (Job, Task)) else list(jobs) if isinstance(jobs, Iterable) else [jobs]
    if not made:
        raise InvalidJobError("a payload needs at least one job; got none")
    names: set[str] = set()
    for number, job in enumerate(made):
        if not isinstance(job, (Job, Task)):
            raise InvalidJobError(f"entry {number} of a payload must be a Job; got {type(job).__name__}")
        job.check()
        if job.name in names:
            raise InvalidJobError(f"two jobs are called {job.name!r}; give each a name of its own")
        names.add(job.name)
    return made


def write_result(result: JobResult, path: Path) -> None:
    """Write a result to a file, which every process can read."""
    path.write_bytes(pack_result(result))


def read_result(path: Path) -> JobResult:
    """Read a file of ``write_result``. Unpickles: read only files of a cluster of yours."""
    result = pickle.loads(path.read_bytes())
    assert isinstance(result, JobResult)
    return result


def load_results(folder: Path) -> Results:
    """Read the files of ``result_files``. Unpickles: read only files of a cluster of yours."""
    return Results(map(read_result, result_files(folder)))


def _why(content: Any, error: Exception) -> str:
    if not isinstance(content, list):
        where, inner = _culprit(content, error)
        return f"the function that makes the jobs cannot be sent to another process: {inner}{_inside(where)}"
    for job in content:
        for field, value in vars(job).items():
            # Pickling again, field by field, is slow, but happens only after a failure.
            failure = _failure(value)
            if failure is not None:
                where, inner = _culprit(value, failure)
                return (
                    f"job {job.name!r}: {field} cannot be sent to another process: {inner}{_inside(where)}. "
                    "Make it inside of a function, which runs where the job does"
                )
    return f"the jobs cannot be sent to another process: {error}"


def _inside(where: str) -> str:
    return f" (it is in {where})" if where else ""


def _failure(value: Any) -> Exception | None:
    try:
        pickled(value)
    except Exception as error:
        return error
    return None


def _culprit(value: Any, error: Exception) -> tuple[str, Exception]:
    # Descends into the first part that fails alone, until none does: that is the smallest part to name.
    where: list[str] = []
    for _ in range(DEPTH):
        for name, part in _parts_of(value):
            failure = None if part is value else _failure(part)
            if failure is not None:
                where.append(name)
                value, error = part, failure
                break
        else:
            break
    return ", ".join(reversed(where)), error


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"entry {key!r}", part) for key, part in value.items()]
    if isinstance(value, (list, tuple, set)):
        return [(f"entry {number}", part) for number, part in enumerate(value)]
    parts: list[tuple[str, Any]] = []
    code = getattr(value, "__code__", None)
    if code is not None:
        for name, cell in zip(code.co_freevars, value.__closure__ or ()):
            parts.append((f"variable {name!r} of {value.__qualname__}", _content(cell)))
        known = getattr(value, "__globals__", {})
        parts += [(f"global {name!r}", known[name]) for name in code.co_names if name in known]
    if isinstance(value, nn.Module):
        parts += value.named_children()
    return parts + [(f"attribute {name!r}", part) for name, part in getattr(value, "__dict__", {}).items()]


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not set yet
        return None
