"""What objects of Python's and NumPy's own types say, beside the attributes that objects of their subclasses have."""

from __future__ import annotations

import array
import functools
import gc
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

import numpy as np

from waterflow.partition.code_key import layout_of
from waterflow.partition.exact import exact
from waterflow.partition.looks import memory_of, pairs_of, slot_value

DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType,
                types.MethodDescriptorType, types.ClassMethodDescriptorType)  # fmt: skip
# Types whose own objects have no attributes: those of classes that are made from them may.
NO_ATTRIBUTES = frozenset({
    list, tuple, set, frozenset, deque, dict, defaultdict, bytearray, memoryview, array.array, np.ndarray, np.void, slice,
    types.MappingProxyType, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, property, weakref.ref,
    types.CellType, *DESCRIPTORS,
})  # fmt: skip
_MOST_BYTES = 64 << 10  # of an array whose contents belong to the key
_MOST_ENTRIES = 1000  # of a container whose contents do


class Looked(Protocol):
    """The key that contents belong to, as far as they ask it: a ``Fingerprint``."""

    def of(self, value: Any) -> Hashable: ...  # noqa: D102
    def entry(self, name: Any, value: Any) -> Hashable: ...  # noqa: D102
    def cell(self, name: str, cell: types.CellType) -> Hashable: ...  # noqa: D102
    def identity(self, value: Any) -> Hashable: ...  # noqa: D102
    def by_identity(self, value: Any) -> Hashable: ...  # noqa: D102
    def look(self, container: Any, kind: Any, keys: Iterable[Any] = (), **how: Any) -> None: ...  # noqa: D102


def _items(looked: Looked, value: Any, base: Any) -> tuple[Hashable, ...]:
    if base.__len__(value) > _MOST_ENTRIES:
        return (looked.by_identity(value),)
    if base not in (tuple, frozenset):
        looked.look(value, "items", base=base)
    return tuple(map(looked.of, [*base.__iter__(value)]))


def _dict(looked: Looked, value: Any) -> tuple[Hashable, ...]:
    if dict.__len__(value) > _MOST_ENTRIES:
        return (looked.by_identity(value),)
    looked.look(value, "dict")
    pairs = pairs_of(value)
    if isinstance(value, OrderedDict) and len(pairs) > 1:
        looked.look(value, "items", base=OrderedDict)
        places = {id(key): number for number, key in enumerate(OrderedDict.__iter__(value))}
        pairs.sort(key=lambda pair: places.get(id(pair[0]), -1))
    return tuple((looked.of(key), looked.entry(key if isinstance(key, str) else "", entry)) for key, entry in pairs)


def _default(looked: Looked, value: Any) -> tuple[Hashable, ...]:
    factory = vars(defaultdict)["default_factory"]
    looked.look(value, "slots", (factory,))
    return (looked.of(slot_value(factory, value)), *_dict(looked, value))


def _memory(looked: Looked, value: Any) -> tuple[Hashable, ...]:
    """Shape, type and contents of what has at most 64 KiB; more is not looked into."""
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):  # e.g. dates, of which NumPy shows no memory
        return (looked.by_identity(value),)
    objects = isinstance(value, np.ndarray) and value.dtype.hasobject
    if view.nbytes > _MOST_BYTES or (objects and value.dtype != object):
        return (looked.by_identity(value),)
    kind: Any = type(value)
    looked.look(value, "memory", base=layout_of(kind))
    form = view.format, view.shape, view.strides, view.readonly
    if objects:
        return (form, tuple(map(looked.of, np.ndarray.ravel(value).tolist())))
    return (form, memory_of(value))


def _builtin(looked: Looked, value: Any) -> tuple[Hashable, ...]:
    bound = value.__self__
    if bound is None or isinstance(bound, (types.ModuleType, type)):
        return (looked.identity(value),)
    return (value.__name__, looked.of(bound))


def _named(looked: Looked, value: Any) -> tuple[Hashable, ...]:
    return (value.__name__, getattr(value.__objclass__, "__qualname__", ""))


def _attributes(*names: str) -> _Say:
    """Says the values of attributes that Python's own types have, which tell what an object was made of."""
    return lambda looked, value: tuple(looked.of(getattr(value, name)) for name in names)


def _each_item(base: Any) -> _Say:
    return lambda looked, value: _items(looked, value, base)


def _partial(looked: Looked, value: Any) -> tuple[Hashable, ...]:
    parts = tuple(vars(functools.partial)[name] for name in ("func", "args", "keywords"))
    looked.look(value, "slots", parts)  # __setstate__ replaces them
    return tuple(looked.of(slot_value(part, value)) for part in parts)


def _number(base: Any) -> _Say:
    return lambda looked, value: (exact(base.__pos__(value)),)


_Say = Callable[[Looked, Any], tuple[Hashable, ...]]
CONTENTS: dict[Any, _Say] = {
    object: lambda looked, value: (),
    types.SimpleNamespace: lambda looked, value: (),
    **{base: _each_item(base) for base in (list, tuple, set, frozenset)},
    deque: lambda looked, value: (value.maxlen, *_items(looked, value, deque)),
    dict: _dict,
    OrderedDict: _dict,
    defaultdict: _default,
    **dict.fromkeys((bytearray, memoryview, array.array, np.ndarray, np.void), _memory),
    **{base: _number(base) for base in (int, float, complex)},
    str: lambda looked, value: (exact(str.__str__(value)),),
    bytes: lambda looked, value: (exact(bytes.__getitem__(value, slice(None))),),
    slice: _attributes("start", "stop", "step"),
    types.MappingProxyType: lambda looked, value: tuple(map(looked.of, gc.get_referents(value))),
    types.MethodType: _attributes("__func__", "__self__"),
    types.BuiltinFunctionType: _builtin,
    types.MethodWrapperType: _builtin,
    staticmethod: _attributes("__func__"),
    classmethod: _attributes("__func__"),
    property: _attributes("fget", "fset", "fdel"),
    functools.partial: _partial,
    weakref.ref: lambda looked, value: (looked.of(value()),),
    types.CellType: lambda looked, value: (looked.cell("", value),),
    **dict.fromkeys(DESCRIPTORS, _named),
}
