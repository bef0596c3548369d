"""Pickles for other processes, with what the caller's script defines by value: functions, classes, and functions with a cache."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle


def pickled(value: Any) -> bytes:
    """Return ``value`` for ``pickle.loads`` in another process, which imports modules and not the script. Raises what pickling does."""
    return bytes(cloudpickle.dumps(value))


def _with_cache(function: Callable[..., Any], maxsize: int | None, typed: bool) -> Any:
    return functools.lru_cache(maxsize, typed)(function)


def _reduce(cached: Any) -> Any:
    # By its name where another process finds it under that; else anew, with an empty cache.
    by_value = ("__main__", *cloudpickle.list_registry_pickle_by_value())
    try:
        found = operator.attrgetter(cached.__qualname__)(sys.modules[cached.__module__])
    except (AttributeError, KeyError):
        found = None
    if found is cached and cached.__module__ not in by_value:
        return cached.__qualname__
    return _with_cache, (cached.__wrapped__, *cached.cache_parameters().values())


cloudpickle.Pickler.dispatch_table[functools._lru_cache_wrapper] = _reduce
