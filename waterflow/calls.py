"""Calls that cannot be made as they were written: arguments by position, names that other libraries have."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from waterflow.errors import WaterflowError

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
