"""Leaves of a batch that a step does not read, such as names of files: no key holds their values.

A trace has stand-ins in their places. Whatever looks at one breaks the trace off; the next one has that leaf itself, and its key
the value. Taking a leaf out of a container, and putting it into a new one, is no look. Code that nobody observes, and places that
may outlive the step, count as looking at all that can be reached from what they are given.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Collection, Iterable, Sequence
from gc import get_referents
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree

from waterflow.errors import CaptureError
from waterflow.partition.code_key import in_library
from waterflow.partition.exact import exact
from waterflow.partition.fingerprint import Fingerprint
from waterflow.partition.opcodes import Kind
from waterflow.partition.questions import Answers
from waterflow.partition.reads import ATOMS, Refused, classes_of, is_fixed

_NODES = frozenset({tuple, list, dict, collections.OrderedDict, collections.defaultdict, collections.deque})
# These hand on what is in a container. Of other operations and calls, those look at all that their operands lead to; the rest look
# only at their first operand itself, a container most often, and take it that the others tell a place.
_HAND_ON = frozenset(map(id, (
    len, iter, next, zip, enumerate, list, tuple, dict, dict.get, dict.items, dict.keys, dict.values, dict.pop, getattr, hasattr,
)))  # fmt: skip
_LOOK = frozenset({
    Kind.SET_ATTRIBUTE, Kind.SET_GLOBAL, Kind.SET_NAME, Kind.SET_DEREF, Kind.COMPARE, Kind.BINARY, Kind.UNARY, Kind.IDENTITY,
    Kind.HASH, Kind.FORMAT, Kind.AWAIT, Kind.WITH, Kind.LEAVE, Kind.RAISE, Kind.EXCEPT,
})  # fmt: skip
_ENDS = ATOMS - {slice} | {types.TracebackType, types.FrameType}
_OF_ALL = {"__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__doc__"}


class LeafRead(CaptureError):
    """The step reads the leaves at ``places`` of its batch, for which the trace had stand-ins."""

    def __init__(self, *places: int) -> None:
        super().__init__("the step reads numbers or text of its batch")
        self.places = places


class StandIn:
    """Stands for a leaf: (its type, its place, places that were read). It answers with the first as its class, and refuses all else."""

    __slots__ = ("__weakref__", "_held")

    def __init__(self, *held: Any) -> None:
        object.__setattr__(self, "_held", held)

    def __getattribute__(self, name: str) -> Any:
        return _held(self)[0] if name == "__class__" else _look_at(self)


_held: Callable[[Any], Any] = vars(StandIn)["_held"].__get__


def _look_at(stand_in: Any, *_: Any) -> NoReturn:
    _, place, read = _held(stand_in)
    read.add(place)
    raise Refused("reads a leaf of its batch")


# With the special methods of each type, and no others, by which abstract classes and protocols know what is of theirs.
_STAND_INS = {kind: type(kind.__name__, (StandIn,), dict.fromkeys({n for n in dir(kind) if n[:2] == "__"} - _OF_ALL, _look_at))
              for kind in (str, bytes, int, float)}  # fmt: skip


class Unread:
    """The leaves that one trace has stand-ins for, at ``places``, and ``read``, the places where it then looked.

    A look raises Refused.
    """

    def __init__(self, looked: Fingerprint, places: Collection[int]) -> None:
        self._looked, self.places, self.read = looked, frozenset(places), set[int]()

    def shown(self, leaves: Iterable[Any]) -> list[Any]:
        """The leaves as the trace has them."""
        return [_STAND_INS[type(x)](type(x), n, self.read) if n in self.places else x for n, x in enumerate(leaves)]

    def check(self, error: BaseException | None = None) -> None:
        """Raise LeafRead where a leaf was read; also where it may be a stand-in that made the user's code raise, hence ``error``."""
        met = self.read or (self.places if isinstance(error, CaptureError) and error.__cause__ is not None else ())
        if met and (error is None or isinstance(error, (Exception, Refused))):
            raise LeafRead(*sorted(met)) from None

    def operation(self, kind: Kind, operands: tuple[Any, ...]) -> None:
        """It is about to happen."""
        if self.places and kind not in (Kind.CALL, Kind.CALL_UNPACKED):
            new = kind is Kind.SET_ITEM and type(operands[0]) in _NODES and not self._ends(operands[0])
            first = kind not in _LOOK
            self.look([*filter(_is_stand_in, operands[:first]), *operands[first : 2 if new else None]])

    def call(self, called: Any, given: Sequence[Any], is_observed: Callable[..., bool]) -> None:
        """Something is about to be called."""
        if self.places and called is not isinstance and called is not torch.is_tensor:
            if id(called) in _HAND_ON or (called is type and len(given) == 1):
                self.look(filter(_is_stand_in, given))
            elif not _goes_to(called, is_observed):
                self.look(given)

    def look(self, values: Iterable[Any]) -> None:
        """All that can be reached from the values is looked at."""
        waiting, seen = [*values] if self.places else [], set[int]()
        for x in waiting:  # ever more
            if id(x) not in seen and not self._ends(x):
                seen.add(id(x))
                function = type(x) is types.FunctionType  # not its globals
                waiting += [x.__closure__, x.__defaults__, x.__kwdefaults__] if function else get_referents(x)
        if found := {_held(one)[1] for one in waiting if _is_stand_in(one)}:
            self.read |= found
            raise Refused("reads a leaf of its batch")

    def _ends(self, value: Any) -> bool:
        """Whether no leaf can be behind a value: none is put where something lay before the step."""
        kind = type(value)
        held = kind in _ENDS or issubclass(kind, (StandIn, torch.Tensor, torch.nn.Module)) or is_fixed(value)
        return held or self._looked.cover(value) is not None or (issubclass(kind, type) and in_library(value))


def _is_stand_in(value: Any) -> bool:
    return issubclass(type(value), StandIn)


def _goes_to(called: Any, is_observed: Callable[..., bool]) -> bool:
    """Whether observed code is the first to have what is given in a call."""
    while isinstance(called, (types.MethodType, functools.partial)):
        called = called.func if isinstance(called, functools.partial) else called.__func__
    code: Any = called if isinstance(called, types.FunctionType) else type(called).__call__
    if code is torch.nn.Module.__call__:
        code = getattr(called.forward, "__func__", called.forward)
    return isinstance(code, types.FunctionType) and is_observed(code.__code__, code.__globals__)


def free_places(leaves: Sequence[Any], spec: pytree.TreeSpec | None, known: Answers = ()) -> list[int]:
    """Where a batch has leaves that no key holds before they are read; ``known`` is what the key has of those that were."""
    held = {place for places, _ in values_known(known) for place in places}
    free = [place for place, leaf in enumerate(leaves) if type(leaf) in _STAND_INS and place not in held]
    # Nobody's own code is to put a batch with stand-ins together.
    return free if free and (spec is None or _NODES.issuperset(classes_of(spec))) else []


def values_known(known: Answers) -> tuple[Any, ...]:
    """Those of the answers that are values of leaves, with their places."""
    return tuple(one for one in known if not isinstance(one, int))


def with_values(known: Answers, places: Sequence[int], leaves: Sequence[Any]) -> Answers:
    """``known``, and what the leaves at ``places`` are, bit by bit."""
    return (*known, (tuple(places), tuple(exact(leaves[place]) for place in places))) if places else known
