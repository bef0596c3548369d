"""Settings of the process that a step's code asks for, or that libraries consult for it: guarded by asking again."""

from __future__ import annotations

import abc
import functools
import os
import re
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from waterflow.partition.exact import exact

Ask = Callable[[], Any]

# A function of torch's with such a name, called with plain values, says how the process is set.
_ASKS = re.compile(r"_?((is|are|get|has)_\w+|\w+_enabled|device_count|current_device)")
# These change with what the step itself enters, and are part of every key (``ambient.py``), or followed (``default_generators.py``).
_FOLLOWED = re.compile(r"\w*(grad|inference|autocast|anomaly|default_d|rng|generator)\w*")


def of_numpy() -> Any:
    """What NumPy does where numbers cannot be computed with, and how it writes them."""
    return [*np.geterr().items(), *np.get_printoptions().items()]


def of_warnings() -> Any:
    """What becomes of a warning."""
    return [*warnings.filters, warnings.showwarning]


def of_classes() -> Any:
    """A number that is another one after each registration with an abstract class."""
    return abc.get_cache_token()


def asks(
    called: Any, package: str, given: tuple[Any, ...], named: Mapping[str, Any], plain: frozenset[type]
) -> Ask | None:
    """The question that a call is, where all that it does is to ask for a setting by ``plain`` values."""
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
    """Whether a setting says what it said."""
    return bool(exact(one) == exact(other))
