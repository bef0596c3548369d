"""Settings of the process that a step's code asks for, or that libraries consult for it.

They are guarded by asking again: each is a function without arguments (an ``Ask``).
"""

from __future__ import annotations

import abc
import functools
import itertools
import os
import re
import types
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.distributions import Distribution
from torch.nn import functional
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from waterflow import _C
from waterflow.errors import CaptureError
from waterflow.partition.guards.code_refs import in_library
from waterflow.partition.guards.guarded_places import exact, token_of

Ask = Callable[[], Any]

# A function of torch's with such a name, called with plain values, says how the process is set.
_ASKS = re.compile(r"_?((is|are|get|has)_\w+|\w+_enabled|device_count|current_device)")
# These change with what the step itself enters, and are part of every key (``ambient_key``), or followed (``rng_ops.py``).
_FOLLOWED = re.compile(r"\w*(grad|inference|autocast|anomaly|default_d|rng|generator)\w*")


def of_numpy() -> Any:
    """Return NumPy's settings for errors of arithmetic, and for printing."""
    return [*np.geterr().items(), *np.get_printoptions().items()]


def of_warnings() -> Any:
    """Return the filters of warnings, and the function that shows one."""
    return [*warnings.filters, warnings.showwarning]


def of_classes() -> Any:
    """Return a number that changes with each registration with an abstract class."""
    return abc.get_cache_token()


def asks(called: Any, package: str, given: tuple[Any, ...], named: Mapping[str, Any], plain: frozenset[type]) -> Ask | None:
    """Return the question that a call asks, if it only reads a setting by ``plain`` arguments; None for other calls.

    ``package`` is the library package that the called function is from.
    """
    if any(type(value) not in plain for value in (*given, *named.values())):
        return None
    if called is os.getenv:
        return functools.partial(called, *given, **named)
    name = getattr(called, "__name__", "")
    is_function = isinstance(called, (types.FunctionType, types.BuiltinFunctionType))
    if is_function and package == "torch" and _ASKS.fullmatch(name) and not _FOLLOWED.fullmatch(name):
        return functools.partial(called, *given, **named)
    return None


def same(one: Any, other: Any) -> bool:
    """Return whether two values of a setting have the same type and bits."""
    return bool(exact(one) == exact(other))


def ambient_key(device_type: str) -> Hashable:
    """Return the key of torch's settings that a graph depends on; read before each step.

    Raises CaptureError on a thread that is in a function mode, a dispatch mode, or hooks for saved tensors: their code
    would run only while a step is traced. A default device is no such mode.
    """
    settings = _C.ambient(device_type), Distribution._validate_args
    if not _C.modes_here():
        return settings
    modes = _get_current_function_mode_stack()
    for mode in modes:
        if type(mode) is not DeviceContext:
            raise CaptureError(f"the step is called in a {type(mode).__name__}, which must see every step")
    if _C.modes_here() > len(modes):
        raise CaptureError("the step is called in a dispatch mode or with hooks for saved tensors, which must see every step")
    return settings, tuple(str(mode.device) for mode in modes)


_TABLES: tuple[dict[str, Any], ...] = (vars(functional), vars(torch))
_METHODS = frozenset(dir(torch.Tensor))  # torch's own: others may be added
_known: list[tuple[_C.Guards, Hashable, str]] = []
_numbers: dict[Hashable, int] = {}
_next_number = itertools.count()  # of threads that ask at once, no two are told the same for different tables


def key_of_torch(guard: Callable[..., None]) -> Hashable:
    """Return a key of the functions in torch's tables; ``guard`` is called with each table.

    Raises CaptureError for a function that the user put in the place of torch's.
    """
    for table in _TABLES:
        guard(table, "dict", kept=False)
    if not _known or not _known[0][0].current():
        guards = _C.Guards()
        for table in _TABLES:
            guards.dict(table)
        guards.cls(torch.Tensor)
        said = tuple((name, token_of(value)) for table in _TABLES for name, value in table.items() if callable(value))
        _known[:] = [(guards, _numbers.setdefault(said, next(_next_number)), next(_replaced(), ""))]
    # In a trace torch calls the replacement, too: it would run twice.
    _, number, why = _known[0]
    if why:
        raise CaptureError(why)
    return number


def _replaced() -> Iterator[str]:
    methods = dict(vars(torch.Tensor))
    for table in (*_TABLES, methods):
        for name, value in table.items():
            theirs = isinstance(value, types.FunctionType) and not in_library(value)
            if theirs and (name in _METHODS or table is not methods):
                code = value.__code__
                place = f"{code.co_filename}:{code.co_firstlineno}"
                yield f"torch's {name} was replaced ({place}); let the step call {code.co_name} by a name of its own"
