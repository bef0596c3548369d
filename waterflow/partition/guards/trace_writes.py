"""Notes what a traced step itself writes: beside other threads only that is put back after the trace.

A trace must leave the objects of the user's as they were. Another trial, on another thread, may meanwhile have entered its model
into a registry that both read: taking that back would lose it.
"""

from __future__ import annotations

import functools
import itertools
import sys
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable
from gc import get_referents
from typing import Any

import torch
from torch import nn

from waterflow import _C
from waterflow.partition.guards.cache_key import Fingerprint
from waterflow.partition.guards.observer import Event, Kind
from waterflow.partition.guards.reads import ATOMS

_NAMED = frozenset({Kind.SET_ATTRIBUTE, Kind.DELETE_ATTRIBUTE, Kind.SET_ITEM, Kind.DELETE_ITEM, Kind.SET_NAME, Kind.DELETE_NAME})
_WHOLE = frozenset({Kind.SET_SLICE, Kind.SET_DEREF, Kind.DELETE_DEREF})
_FILLS = frozenset({Kind.ITEM, Kind.ATTRIBUTE})  # reads that may put something there
_CALLS = frozenset({Kind.CALL, Kind.CALL_UNPACKED})
_METHODS = (types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodWrapperType, types.WrapperDescriptorType)
_OF_ONE_KEY = frozenset({"setdefault", "pop", "__setitem__", "__delitem__", "move_to_end"})
_READERS = frozenset(
    map(
        id,
        (
            *(len, min, max, sum, any, all, sorted, reversed, isinstance, issubclass, hasattr, getattr, callable, id, type),
            *(iter, enumerate, zip, range, list, tuple, dict, set, frozenset, str, repr, bool, int),
        ),
    )
)
_READING = frozenset(
    {"get", "keys", "values", "items", "copy", "index", "count", "__getitem__", "__contains__", "__len__", "__iter__"}
)
_BUILTIN = frozenset({dict, OrderedDict, list, tuple, set, frozenset, deque})
_CALLED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType, functools.partial)
_ENDS = ATOMS | {types.ModuleType}
_DICTS = ("_parameters", "_buffers", "_modules")  # of a module: where some of its attributes lie


def others_run() -> bool:
    """Return True if the process has other threads that run Python."""
    return len(sys._current_frames()) > 1


class TraceWrites:
    """Collects what the frames of one trace wrote. Where no other thread runs as the trace begins, it counts everything as the trace's."""

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.alone = not others_run()
        self._fingerprint = fingerprint
        self._entries: set[tuple[int, Any]] = set()  # by the ids of containers, which the fingerprint keeps alive
        self._containers: set[int] = set()  # of which some entry was written
        self._whole: set[int] = set()
        self._roots: dict[int, Any] = {}  # went to code that is not observed, and so may have written to all that they lead to
        self._reached: set[int] | None = None

    def note(self, event: Event, goes_to_observed: Callable[[Any], bool]) -> None:
        """Take note of an operation; ``goes_to_observed(called)`` tells a call of code whose operations come by themselves."""
        kind, operands = event.kind, event.operands
        if kind in _NAMED:
            self._entry(operands[0], operands[1])
        elif kind in _WHOLE or (kind is Kind.BINARY and operands[1].endswith("=")):
            self._whole.add(id(operands[0]))
        elif kind in _FILLS and _fills(operands[0], operands[1], kind):
            self._entry(operands[0], operands[1])
        elif kind is Kind.CALL and (written := _written_by(*operands)) is not None:
            for key in written[1]:
                self._entry(written[0], key)
        elif kind is Kind.CALL and id(operands[0]) in _READERS:
            given = operands[1]
            if len(given) > 1 and _fills(given[0], given[1], Kind.ATTRIBUTE):
                self._entry(given[0], given[1])
            # What they call writes: a function, or an iterator that the step made.
            self._hand_over(x for x in given if isinstance(x, _CALLED) or self._fingerprint.cover(x) is None)
        elif kind in _CALLS and not goes_to_observed(operands[0]):
            self._hand_over(operands)

    def wrote(self, container: Any, key: Any = None) -> bool:
        """Return True if the trace may have written to this entry of a container or attribute of an object; to any, without ``key``."""
        if self.alone:
            return True
        ids = {id(container), id(_C.attributes_of(container))}
        if self._reached is None:
            self._reached = self._whole | set(_reachable(self._roots.values()))
        if self._reached & ids:
            return True
        return bool(self._containers & ids) if key is None else any((one, key) in self._entries for one in ids)

    def _entry(self, container: Any, key: Any) -> None:
        if type(key) not in ATOMS:
            self._whole.add(id(container))
            return
        held = (vars(container)[name] for name in _DICTS) if isinstance(container, nn.Module) else ()
        for one in (container, *held):
            self._entries.add((id(one), key))
            self._containers.add(id(one))

    def _hand_over(self, operands: Iterable[Any]) -> None:
        # What the step made leads to what was there before; that is kept alive, and looked at only where something differs.
        waiting, seen = [*operands], set[int]()
        for x in waiting:  # ever more
            if type(x) in _ENDS or id(x) in seen:
                continue
            seen.add(id(x))
            if self._fingerprint.cover(x) is not None:
                self._roots[id(x)] = x
            elif not isinstance(x, torch.Tensor):
                waiting += _parts(x)


def _written_by(called: Any, given: tuple[Any, ...], names: tuple[str, ...]) -> tuple[Any, Collection[Any]] | None:
    """Return the object that a call changes, and the names of what it changes there; None where that does not follow from it."""
    if (called is setattr or called is delattr) and len(given) > 1:
        return given[0], given[1:2]
    owner, name = getattr(called, "__self__", None), getattr(called, "__name__", "")
    if isinstance(called, types.MethodDescriptorType) and given:  # a bound method is taken apart
        owner, given = given[0], given[1:]
    if isinstance(called, _METHODS) and type(owner) in _BUILTIN and name in _READING:
        return owner, ()
    if not isinstance(called, _METHODS) or not isinstance(owner, dict):
        return None
    if name in _OF_ONE_KEY and given:
        return owner, given[:1]
    if name == "update" and all(type(one) is dict for one in given[: len(given) - len(names)]):
        return owner, {*names, *itertools.chain(*given[: len(given) - len(names)])}
    return None


def _fills(container: Any, key: Any, kind: Kind) -> bool:
    if kind is Kind.ITEM:
        return isinstance(container, dict) and hasattr(type(container), "__missing__")
    return isinstance(getattr(type(container), key, None) if type(key) is str else None, functools.cached_property)


def _reachable(roots: Iterable[Any]) -> Iterable[int]:
    waiting, seen = [*roots], set[int]()
    for x in waiting:
        if type(x) not in _ENDS and id(x) not in seen:
            seen.add(id(x))
            waiting += _parts(x)
    return seen


def _parts(value: Any) -> list[Any]:
    # A class or a function leads to nearly everything: of these, what a call may change is what they close over.
    if isinstance(value, types.FunctionType):
        return [value.__closure__, value.__defaults__, value.__kwdefaults__]
    if isinstance(value, types.BuiltinFunctionType):
        return [] if isinstance(value.__self__, type) else [value.__self__]
    return [] if isinstance(value, type) else [part for part in get_referents(value) if not isinstance(part, type)]
