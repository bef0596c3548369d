"""What torch says under its own names: layers call functions there that anybody can replace, as they can methods of tensors."""

from __future__ import annotations

import itertools
import types
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from torch.nn import functional

from waterflow import _C
from waterflow.errors import CaptureError
from waterflow.partition.code_key import in_library
from waterflow.partition.tokens import token_of

_TABLES: tuple[dict[str, Any], ...] = (vars(functional), vars(torch))
_METHODS = frozenset(dir(torch.Tensor))  # torch's own: others may be added
_known: list[tuple[_C.Guards, Hashable, str]] = []
_numbers: dict[Hashable, int] = {}
_next_number = itertools.count()  # of threads that ask at once, no two are told the same for different tables


def key_of_torch(look: Callable[..., None]) -> Hashable:
    """A key of the functions that torch's tables have now, each of which ``look`` is shown.

    Raises CaptureError for one that the user put in the place of torch's: in a trace it would be called twice, by torch, too.
    """
    for table in _TABLES:
        look(table, "dict", kept=False)
    if not _known or not _known[0][0].current():
        guards = _C.Guards()
        for table in _TABLES:
            guards.dict(table)
        guards.cls(torch.Tensor)
        said = tuple((name, token_of(value)) for table in _TABLES for name, value in table.items() if callable(value))
        _known[:] = [(guards, _numbers.setdefault(said, next(_next_number)), next(_replaced(), ""))]
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
