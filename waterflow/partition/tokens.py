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
    _tokens[id(value)] = reference, next(_next_token)
    return _tokens[id(value)][1]


def _forget(address: int, reference: weakref.ref[Any]) -> None:
    if address in _tokens and _tokens[address][0] is reference:
        del _tokens[address]
