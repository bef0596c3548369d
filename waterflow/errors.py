"""Exceptions that users can catch, and errors for arguments that a function does not take."""

from __future__ import annotations

import difflib
import functools
import inspect
import pickle
import traceback
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar


class WaterflowError(Exception):
    """Base of all errors that waterflow raises on purpose."""


def told(error: BaseException | None) -> str:
    """Return an error's text with its notes, such as the job and the user's line that it comes from."""
    return " ".join([str(error), *(f"({note})" for note in getattr(error, "__notes__", ()))])


def sendable(error: BaseException) -> BaseException:
    """Return ``error`` if another process can read it once it is pickled; else one of ours with its type, text and traceback.

    Some exceptions can be written and not read, such as those whose ``__init__`` takes more than it hands on.
    """
    from waterflow.by_value import pickled  # slow to import

    try:
        pickle.loads(pickled(error))
    except Exception:
        lines = "".join(traceback.format_exception(error))
        return WaterflowError(f"{type(error).__name__}: {told(error)}\n\n{lines}")
    return error


class InvalidJobError(WaterflowError, ValueError):
    """A job, or a set of jobs, cannot be trained as it was given."""


class CaptureError(WaterflowError):
    """A step cannot be captured as one graph; it runs eagerly instead, as an opaque job."""

    def __init__(self, reason: str, where: str = "") -> None:
        self.reason = reason
        self.where = where
        super().__init__(f"{reason} ({where})" if where else reason)


class MemoryLimitError(WaterflowError, MemoryError):
    """A job does not fit into the memory limit, even if it runs alone.

    ``needed`` and ``limit`` are bytes; ``largest_batch`` is the largest first dimension of the batch that fits, or None if it
    is not known. ``others_hold`` is True if other jobs have the memory that lacks, and wait themselves for more.
    """

    def __init__(
        self, message: str, *, needed: int, limit: int, largest_batch: int | None = None, others_hold: bool = False
    ) -> None:
        self.others_hold = others_hold
        self.needed = needed
        self.limit = limit
        self.largest_batch = largest_batch
        super().__init__(message)


class StepError(WaterflowError, RuntimeError):
    """An operation failed in the middle of a captured step; the message names it and the user's line."""


class StepIndexError(StepError, IndexError):
    """A captured operation failed where eager training raises an IndexError."""


class StepValueError(StepError, ValueError):
    """A captured operation failed where torch.distributions refuses an invalid argument."""


class AuditError(WaterflowError, RuntimeError):
    """A captured step differed from the eager step, a fault of waterflow, and earlier steps had not been compared."""


class NonFiniteLossError(WaterflowError, ArithmeticError):
    """The loss became NaN or infinite."""


class JobCancelled(WaterflowError):
    """The job was stopped at a group boundary: pruned, interrupted, or removed."""


class JobTimeoutError(WaterflowError, TimeoutError):
    """A job or a trial ran longer than its time limit; the message names it and the line where it stood."""


class StudyError(WaterflowError, ValueError):
    """A study or its settings cannot be run as given."""


class ClusterError(WaterflowError, RuntimeError):
    """A cluster cannot be reached, or cannot do what it was asked; the message says why."""


class BackendError(ClusterError, ValueError):
    """The devices of a cluster cannot be started or reached, or their folder cannot be used."""


class CheckpointError(WaterflowError):
    """A checkpoint cannot be made, read, or resumed: damaged, of another version, or of another job."""


class SubmissionError(WaterflowError, ValueError):
    """The cluster can never run a submission."""


class WorkloadError(WaterflowError, ValueError):
    """A workload, or a table that its simulation needs, cannot be read or simulated."""


_P = ParamSpec("_P")
_T = TypeVar("_T")

# Arguments as other libraries name them, and our name for each; ``{}`` is the given value.
FOREIGN: Mapping[str, str] = {
    "n_jobs": "how many train at the same time is max_concurrent={}",
    "num_workers": "loading belongs to the data: DataLoader(num_workers={})",
    "lr": "the learning rate belongs to the optimizer: torch.optim.AdamW(params, lr={})",
    "epoch": "how often the data is read is epochs={}",
    "n_epochs": "how often the data is read is epochs={}",
    "num_epochs": "how often the data is read is epochs={}",
}


def explained(name: str, example: str, error: Callable[[str], WaterflowError]) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorate a function so that a call with wrong arguments raises ``error``, whose text shows a right call.

    Python's TypeError stays only where the arguments are right and the function itself raised it. Right calls cost nothing
    more.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(function)
        def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return function(*args, **kwargs)
            except TypeError:
                # Only after a TypeError: to bind a signature is slow, and right calls must cost nothing.
                wrong = _what_is_wrong(function, args, kwargs)
                if wrong is None:
                    raise
            write = "that in its place" if any(key in FOREIGN for key in kwargs) else example
            raise error(f"{name}() {wrong}{'' if wrong.endswith('?') else '.'} Write {write}")

        return called

    return decorate


def explained_class(name: str, example: str, error: Callable[[str], WaterflowError]) -> Callable[[type[_T]], type[_T]]:
    """Decorate a class as ``explained`` does a function; also a dataclass, whose ``__init__`` is generated."""

    def decorate(cls: type[_T]) -> type[_T]:
        setattr(cls, "__init__", explained(name, example, error)(cls.__init__))  # noqa: B010  # mypy: no method to assign to
        return cls

    return decorate


def _what_is_wrong(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """Return why ``function`` cannot be called with these arguments, or None if it can."""
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
        # The function may be an __init__, whose self is no argument of the caller's.
        own = places[:1] == ["self"]
        if len(args) > len(places):
            takes = f"{len(places) - own} argument{'s' * (len(places) - own != 1)} by position"
            return f"takes {takes}; got {len(args) - own}"
        return str(error)
    return None


def unknown(key: str, value: Any, known: Mapping[str, Any] | frozenset[str]) -> str:
    """Return ``key``, which is not in ``known``, followed by our name for it or the nearest known name."""
    if key in FOREIGN:
        return f"{key}: {FOREIGN[key].format(value if isinstance(value, (int, float)) else '...')}"
    near = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
    return key + (f"; did you mean {near[0]}=?" if near else "")
