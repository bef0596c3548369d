"""What a library's class says: it counts by identity, but anybody can replace a method of it."""

from __future__ import annotations

import itertools
import types
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch.fx import _symbolic_trace

from waterflow import _C
from waterflow.partition.code_key import BOOKKEEPING, guards_of, in_library, is_at_its_name, mutable_bases
from waterflow.partition.exact import exact
from waterflow.partition.tokens import token_of

_OF_FX = vars(_symbolic_trace)
_VALUES = (type(None), bool, int, float, complex, str, bytes)


@dataclass(frozen=True)
class Body:
    """What a class and its bases say. ``users`` are the functions and classes in it that no library defines.

    ``key`` counts everything by identity; ``keep`` must live as long as it, as addresses are part of it.
    """

    key: Hashable
    users: tuple[tuple[str, Any], ...]
    keep: tuple[Any, ...]


_known: dict[type, tuple[_C.Guards, Body]] = {}
_numbers: dict[Hashable, tuple[int, Body]] = {}
_next_number = itertools.count()  # no two keys have the same one, whichever threads ask


def body_of(cls: type) -> Body:
    """What a library's class and its bases say now."""
    known = _known.get(cls)
    if known is not None and known[0].current():
        return known[1]
    guards, body = guards_of(cls), _read(cls)
    if is_at_its_name(cls):
        number, first = _numbers.setdefault(
            body.key, (next(_next_number), body)
        )  # which keeps what has an address in it
        body = Body(number, first.users, ())
        _known[cls] = guards, body
    return body


def _read(cls: type) -> Body:
    entries: list[Hashable] = []
    users, keep = [], []
    for base in mutable_bases(cls):
        for name, value in list(vars(base).items()):
            if name in BOOKKEEPING:
                continue
            if (
                type(value) is types.FunctionType and value.__globals__ is _OF_FX
            ):  # nn.Module's, while any thread traces by make_fx
                value = getattr(value, "__wrapped__", value)
            token: Hashable = exact(value) if type(value) in _VALUES else token_of(value)
            if token is None:
                keep.append(value)
                token = "id", id(value)
            entries.append((name, token))
            if isinstance(value, (types.FunctionType, type)) and not in_library(value):
                users.append((name, value))
    return Body(tuple(entries), tuple(users), tuple(keep))
