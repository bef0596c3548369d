"""Numbers for objects that count by identity."""

from __future__ import annotations

import functools
import itertools
import weakref
from typing import Any

_tokens: dict[int, tuple[weakref.ref[Any], int]] = {}
_next_token = itertools.count()


def token_of(value: Any) -> int | None:
    """A number that no other object ever has; None for an object that cannot be referred to weakly."""
    known = _tokens.get(id(value))
    if known is not None and known[0]() is value:
        return known[1]
    try:
        reference = weakref.ref(value, functools.partial(_forget, id(value)))
    except TypeError:
        return None
    mine = reference, next(_next_token)
    while True:
        there = _tokens.setdefault(id(value), mine)  # of threads that ask at once, one sets it for all
        if there[0]() is value:
            return there[1]
        _forget(id(value), there[0])  # of an object that was there before


def _forget(address: int, reference: weakref.ref[Any]) -> None:
    if (known := _tokens.get(address)) is not None and known[0] is reference:
        _tokens.pop(address, None)
