"""The places that a step's key was made from: how each is guarded, compared, and put back after a trace."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import struct
import types
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.fx import _symbolic_trace

from waterflow import _C
from waterflow.partition.guards.code_refs import BOOKKEEPING, guards_of, in_library, is_at_its_name, mutable_bases

_tokens: dict[int, tuple[weakref.ref[Any], int]] = {}
_next_token = itertools.count()


def token_of(value: Any) -> int | None:
    """Return a number that no other object of the process ever has; None for an object without weak references."""
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


def exact(value: Any) -> Any:
    """Return a key that equals another value's only if both have the same type and bits; NaN is equal to itself.

    Looks into plain containers and dataclasses. Objects of other kinds are compared by ``==`` and ``repr``. The key can
    be hashed if everything in it can be.
    """
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return kind, value
    if isinstance(value, float):
        return kind, struct.pack("d", value)
    if isinstance(value, complex):
        return kind, struct.pack("dd", value.real, value.imag)
    if isinstance(value, np.generic):
        return kind, value.dtype.str, value.tobytes()
    if isinstance(value, (list, tuple)):
        return kind, tuple(map(exact, value))
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(map(exact, value))
    if isinstance(value, dict):
        return kind, tuple((exact(key), exact(entry)) for key, entry in value.items())
    if isinstance(value, (range, slice)):
        return kind, exact((value.start, value.stop, value.step))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return kind, tuple(exact(getattr(value, one.name)) for one in dataclasses.fields(value))
    return kind, value, repr(value)


Kind = Literal["dict", "entries", "items", "cell", "object", "slots", "function", "class", "memory"]
MISSING = object()
_VALUES = (type(None), bool, int, float, complex, str, bytes)
_NONE: Mapping[int, Any] = types.MappingProxyType({})
# The attribute in which torch keeps, for a function that Dynamo leaves alone, what it made at the first call, from any thread.
MEMO = "__dynamo_disable"
_PARTS = ("__code__", "__defaults__", "__kwdefaults__")
# What torch's recurrent layers set in each forward pass.
_SET_BY_TORCH = ("_flat_weights", "_flat_weight_refs", "_flat_weights_names")


Wrote = Callable[[Any, Any], bool]


def _everything(container: Any, key: Any) -> bool:
    return True


@dataclass(eq=False, slots=True)  # not frozen: a key is made from a thousand, and each would take three times as long to make
class GuardedPlace:
    """A place that a key was made from.

    ``keys`` are the names of the entries that were read of a dict, or the descriptors of an object's slots. ``base`` is
    Python's own type that keeps the items or the memory. ``label`` says where the place was found; ``owner`` is the
    module whose attributes it has. A trace may change a place that is not ``kept``: other code restores that.
    """

    container: Any
    kind: Kind
    keys: tuple[Any, ...] = ()
    base: Any = None
    label: str = ""
    owner: nn.Module | None = None
    kept: bool = True

    def guard(self, guards: _C.Guards) -> None:
        """Add the place to ``guards``, which then report any replacement here."""
        container, kind = self.container, self.kind
        if kind == "dict":  # the most frequent first
            guards.dict(container)
        elif kind == "object":
            guards.object(container)
        elif kind in ("items", "memory"):
            (guards.items if kind == "items" else guards.bytes)(container, self.base)
        elif kind == "cell":
            guards.cell(container)
        elif kind == "function":
            guards.function(container)
        elif kind == "class":
            guards.cls(container)
        for key in self.keys:
            (guards.entry if kind == "entries" else guards.member)(container, key)

    def contents(self) -> Any:
        """Return what can be put back: pairs of all that has names, a list of items, or bytes."""
        container, kind = self.container, self.kind
        if kind == "dict":
            return pairs_of(container)
        if kind == "entries":
            return [(key, container.get(key, MISSING)) for key in self.keys]
        if kind == "items":
            return [*self.base.__iter__(container)]
        if kind == "cell":
            return [("", cell_contents(container))]
        if kind == "object":
            attributes = _C.attributes_of(container)
            return type(container), attributes, pairs_of(attributes or {})
        if kind == "slots":
            return [(key, slot_value(key, container)) for key in self.keys]
        if kind == "function":
            return [(key, getattr(container, key)) for key in _PARTS]
        if kind == "class":
            return [(name, value) for name, value in vars(container).items() if name not in BOOKKEEPING]
        return np.ndarray.ravel(container).tolist() if _has_objects(container) else memory_of(container)

    def holds(self, before: Any) -> bool:
        """Return whether the place has the same objects as ``before``, or constants of the same bits."""
        then, now = self._values(before), self._values(self.contents())
        return len(then) == len(now) and all(
            a is b or (type(a) in _VALUES and bool(exact(a) == exact(b))) for a, b in zip(then, now)
        )

    def _values(self, contents: Any) -> list[Any]:
        if self.kind == "memory":
            return [contents]
        own, contents = (contents[:2], contents[2]) if self.kind == "object" else ((), contents)
        return [*own, *(contents if self.kind == "items" else itertools.chain(*contents))]

    def put_back(self, before: Any, stand_ins: Mapping[int, Any] = _NONE, wrote: Wrote = _everything) -> str | None:
        """Undo what a trace changed. Returns the name of something that the step changes; None if it changes nothing.

        ``stand_ins`` maps the ``id`` of an object to what the trace showed for it. A stand-in in the place of its
        object is no change: the step has put the object back, as ``self.total += x`` does. What the trace has not
        written by ``wrote``, of a container and a key, stays.
        """
        now = self.contents()
        if self.kind in ("memory", "items") and not wrote(self.container, None):
            return None
        if self.kind == "memory":
            if now == before if isinstance(now, bytes) else len(now) == len(before) and all(map(_is, now, before)):
                return None
            _write_memory(self.container, before)
            return ""
        if self.kind == "items":
            return self._put_items_back(before, now, stand_ins)
        if self.kind == "object":
            return self._put_object_back(before, now, stand_ins, wrote)
        if len(before) == len(now) and all(a is c and b is d for (a, b), (c, d) in zip(before, now)):
            return None
        return self._put_pairs_back(before, now, stand_ins, wrote)

    def _put_object_back(
        self, before: tuple[Any, ...], now: tuple[Any, ...], stand_ins: Mapping[int, Any], wrote: Wrote
    ) -> str | None:
        changed = None
        if now[0] is not before[0] and wrote(self.container, "__class__"):
            # object's own: a user's __setattr__ must not run.
            object.__setattr__(self.container, "__class__", before[0])
            changed = "__class__"
        if now[1] is not before[1] and before[1] is not None and wrote(self.container, "__dict__"):
            object.__setattr__(self.container, "__dict__", before[1])
            changed = "__dict__"
        pairs = pairs_of(_C.attributes_of(self.container) or {})
        if len(before[2]) == len(pairs) and all(a is c and b is d for (a, b), (c, d) in zip(before[2], pairs)):
            return changed
        return self._put_pairs_back(before[2], pairs, stand_ins, wrote) or changed

    def _put_items_back(self, before: list[Any], now: list[Any], stand_ins: Mapping[int, Any]) -> str | None:
        if len(before) == len(now) and all(map(_is, before, now)):
            return None
        if self.base is OrderedDict:
            for key in before:
                # The pairs of the dict are another place; here only the order counts.
                OrderedDict.move_to_end(self.container, key)
            return ""
        if self.base is set and {*map(id, before)} == {*map(id, now)}:
            return None
        self.base.clear(self.container)
        (self.base.update if self.base is set else self.base.extend)(self.container, before)
        same = len(now) == len(before) and all(
            equal(a, b) or (b is not None and stand_ins.get(id(a)) is b) for a, b in zip(before, now)
        )
        return None if same else ""

    def _put_pairs_back(
        self, before: list[tuple[Any, Any]], now: list[tuple[Any, Any]], stand_ins: Mapping[int, Any], wrote: Wrote
    ) -> str | None:
        changed = None
        old_values, new_values = dict(before), dict(now)
        for key in {**old_values, **new_values}:
            old, new = old_values.get(key, MISSING), new_values.get(key, MISSING)
            if old is new or (type(key) is str and key == MEMO):
                continue
            # Another job that shares a frozen part may have set its mode meanwhile.
            if key == "training" and self.owner is not None and not any(p.requires_grad for p in self.owner.parameters()):
                continue
            if not wrote(self.container, key.__name__ if self.kind == "slots" else key):
                continue
            self._put(key, old)
            same = equal(old, new) or (new is not None and stand_ins.get(id(old)) is new)
            if not (same or (isinstance(self.owner, nn.RNNBase) and key in _SET_BY_TORCH)):
                changed = key.__name__ if self.kind == "slots" else str(key)
        ordered = self.kind == "dict" and not isinstance(self.container, OrderedDict)  # its order has its own place
        if ordered and wrote(self.container, None):
            there, own = self.contents(), {id(key) for key, _ in before}
            others = [pair for pair in there if id(pair[0]) not in own]  # of other threads
            held = {id(key): pair for pair in there for key in pair[:1]}
            wanted = [held[id(key)] for key, _ in before if id(key) in held] + others
            if [id(key) for key, _ in there] != [id(key) for key, _ in wanted]:
                dict.clear(self.container)
                dict.update(self.container, wanted)
                changed = changed or ""
        return changed

    def _put(self, key: Any, old: Any) -> None:
        container, kind = self.container, self.kind
        if kind == "object":
            container, kind = _C.attributes_of(container), "dict"
        if kind in ("dict", "entries"):
            base = OrderedDict if isinstance(container, OrderedDict) else dict
            if old is MISSING:
                base.pop(container, key, None)
            else:
                base.__setitem__(container, key, old)
        elif kind == "cell":
            if old is not MISSING:
                container.cell_contents = old
        elif kind == "slots":
            key.__delete__(container) if old is MISSING else key.__set__(container, old)
        elif old is MISSING:
            delattr(container, key)
        else:
            setattr(container, key, old)


def _is(one: Any, other: Any) -> bool:
    return one is other


def pairs_of(container: dict[Any, Any]) -> list[tuple[Any, Any]]:
    """Return the entries of a dict in their order, without running code of its class."""
    return [*dict.items(container)]


def cell_contents(cell: types.CellType) -> Any:
    """Return the contents of a closure's cell; MISSING if it is not filled yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def slot_value(descriptor: Any, value: Any) -> Any:
    """Return the contents of a slot; MISSING if it is empty."""
    try:
        return descriptor.__get__(value, type(value))
    except AttributeError:
        return MISSING


def memory_of(value: Any) -> bytes:
    """Return the bytes of an array or a buffer, row by row."""
    return np.ndarray.tobytes(value) if isinstance(value, np.ndarray) else memoryview(value).tobytes()


def _has_objects(value: Any) -> bool:
    return isinstance(value, np.ndarray) and bool(value.dtype.hasobject)


def _write_memory(value: Any, contents: Any) -> None:
    if _has_objects(value):
        value.flat[:] = contents
    elif isinstance(value, array) and len(contents) != memoryview(value).nbytes:
        del value[:]
        value.frombytes(contents)
    elif isinstance(value, bytearray) and len(contents) != len(value):
        value[:] = contents
    else:
        here = np.asarray(value if isinstance(value, np.ndarray) else memoryview(value))
        here[...] = np.frombuffer(contents, here.dtype).reshape(here.shape)


def equal(old: Any, new: Any) -> bool:
    """Return whether a step may replace one value by the other: they differ in nothing but their identity."""
    if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
        return False
    try:
        return bool(exact(old) == exact(new))
    except Exception:
        return False


_OF_FX = vars(_symbolic_trace)


@dataclass(frozen=True)
class Body:
    """The entries of a class and its bases. ``users`` are the functions and classes among them that no library defines.

    ``key`` counts every entry by identity; ``keep`` must live as long as the key, which contains addresses.
    """

    key: Hashable
    users: tuple[tuple[str, Any], ...]
    keep: tuple[Any, ...]


_known: dict[type, tuple[_C.Guards, Body]] = {}
_numbers: dict[Hashable, tuple[int, Body]] = {}
_next_number = itertools.count()  # no two keys have the same one, whichever threads ask


def body_of(cls: type) -> Body:
    """Return the present entries of a library's class and its bases."""
    known = _known.get(cls)
    if known is not None and known[0].current():
        return known[1]
    guards, body = guards_of(cls), _read(cls)
    if is_at_its_name(cls):
        # A number in the place of a long key: equal bodies get the same one, also after a change and back.
        number, first = _numbers.setdefault(body.key, (next(_next_number), body))  # which keeps what has an address in it
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
