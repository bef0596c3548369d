"""The exceptions that users can catch."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar


class WaterflowError(Exception):
    """Base of all errors that waterflow raises on purpose."""


def told(error: BaseException | None) -> str:
    """What an error says, with its notes: such as which job and which line of the user's it comes from."""
    return " ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", ()))])


class InvalidJobError(WaterflowError, ValueError):
    """A job, or a set of jobs, that cannot be trained as it was handed in."""


class CaptureError(WaterflowError):
    """A step that cannot be captured as one graph; it then runs eagerly, as an opaque job."""

    def __init__(self, reason: str, where: str = "") -> None:
        self.reason = reason
        self.where = where
        super().__init__(f"{reason} ({where})" if where else reason)


class MemoryLimitError(WaterflowError, MemoryError):
    """A job that does not fit into the memory limit, whatever else runs.

    Attributes are bytes; ``largest_batch`` is the largest first dimension of the batch that fits, or None where
    it is not known.
    """

    def __init__(self, message: str, *, needed: int, limit: int, largest_batch: int | None = None) -> None:
        self.needed = needed
        self.limit = limit
        self.largest_batch = largest_batch
        super().__init__(message)


class StepError(WaterflowError, RuntimeError):
    """An operation failed in the middle of a captured step; the message names it and the user's line."""


class StepIndexError(StepError, IndexError):
    """The same, where eager training raises an IndexError."""


class StepValueError(StepError, ValueError):
    """The same, where torch.distributions finds an argument that is not valid."""


class AuditError(WaterflowError, RuntimeError):
    """A captured step has differed from the eager one, which is a fault of waterflow, and steps before it were not compared."""


class NonFiniteLossError(WaterflowError, ArithmeticError):
    """The loss became NaN or infinite."""


class JobCancelled(WaterflowError):
    """The job was stopped at a group boundary: pruned, interrupted, or removed."""


class JobTimeoutError(WaterflowError, TimeoutError):
    """A job, or a trial, that ran longer than its time limit; the message says which, and where it stood."""


class StudyError(WaterflowError, ValueError):
    """A study, or its settings, that cannot be run as asked."""


class ClusterError(WaterflowError, RuntimeError):
    """A cluster that cannot be reached, or that cannot do what it was asked for; the message says why."""


class CheckpointError(WaterflowError):
    """A checkpoint that cannot be made, read, or gone on from: damaged, of another version, or of another job."""


class SubmissionError(WaterflowError, ValueError):
    """A submission that the cluster can never run."""


class WorkloadError(WaterflowError, ValueError):
    """A workload, or a table that its simulation needs, that cannot be read, or cannot be simulated as asked."""


_P = ParamSpec("_P")
_T = TypeVar("_T")

# What others call what we call otherwise; ``{}`` is the value that was given.
FOREIGN: Mapping[str, str] = {
    "n_jobs": "how many train at the same time is max_concurrent={}",
    "num_workers": "loading belongs to the data: DataLoader(num_workers={})",
    "lr": "the learning rate belongs to the optimizer: torch.optim.AdamW(params, lr={})",
    "epoch": "how often the data is read is epochs={}",
    "n_epochs": "how often the data is read is epochs={}",
    "num_epochs": "how often the data is read is epochs={}",
}


def explained(
    name: str, example: str, error: Callable[[str], WaterflowError]
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Makes Python's TypeError for arguments that a function does not take an ``error`` that says how it is called.

    What goes wrong inside of the function stays as it is, and a call that is right costs nothing more.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return function(*args, **kwargs)
            except TypeError:
                wrong = _what_is_wrong(function, args, kwargs)
                if wrong is None:
                    raise
            write = "that in its place" if any(key in FOREIGN for key in kwargs) else example
            raise error(f"{name}() {wrong}{'' if wrong.endswith('?') else '.'} Write {write}")

        return called

    return decorate


def explained_class(name: str, example: str, error: Callable[[str], WaterflowError]) -> Callable[[type[_T]], type[_T]]:
    """As ``explained``, for what a class is called with; also for a dataclass, whose ``__init__`` nobody wrote."""

    def decorate(cls: type[_T]) -> type[_T]:
        setattr(cls, "__init__", explained(name, example, error)(cls.__init__))  # noqa: B010  # mypy: no method to assign to
        return cls

    return decorate


def _what_is_wrong(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Why ``function`` cannot be called with these; None where it can."""
    signature = inspect.signature(function)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = signature.parameters
        takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        strangers = [] if takes_any else [key for key in kwargs if key not in parameters]
        if strangers:
            return f"has no {unknown(strangers[0], kwargs[strangers[0]], parameters)}"
        places = [n for n, p in parameters.items() if p.kind is p.POSITIONAL_OR_KEYWORD]
        own = places[:1] == ["self"]
        if len(args) > len(places):
            takes = f"{len(places) - own} argument{'s' * (len(places) - own != 1)} by position"
            return f"takes {takes}; got {len(args) - own}"
        return str(error)
    return None


def unknown(key: str, value: Any, known: Mapping[str, Any] | frozenset[str]) -> str:
    """``key``, which is not among ``known``, with what it is called here, or the nearest."""
    if key in FOREIGN:
        return f"{key}: {FOREIGN[key].format(value if isinstance(value, (int, float)) else '...')}"
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
    return key + (f"; did you mean {near[0]}=?" if near else "")
