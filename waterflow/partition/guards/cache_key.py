"""Builds the key of a step's objects: everything that its code can read, and the places that are guarded for it.

The key covers objects of Python's and NumPy's own types, modules, functions with all that they read, and classes.
"""

from __future__ import annotations

import array
import builtins
import datetime
import decimal
import enum
import fractions
import functools
import gc
import importlib.util
import io
import itertools
import logging
import os
import pathlib
import random
import re
import sys
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import nn

from waterflow import _C
from waterflow.errors import CaptureError
from waterflow.partition.capture.reasons import advised
from waterflow.partition.guards.code_refs import bodies, in_library, is_installed, layout_of, mutable_bases, reads_of, slots_of
from waterflow.partition.guards.guarded_places import (
    MEMO,
    MISSING,
    GuardedPlace,
    body_of,
    cell_contents,
    exact,
    memory_of,
    pairs_of,
    slot_value,
    token_of,
)
from waterflow.partition.guards.settings import key_of_torch
from waterflow.partition.passes.operators import lazy_bits

DESCRIPTORS = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)
# Types whose own objects have no attributes; objects of their subclasses may.
NO_ATTRIBUTES = frozenset({
    list, tuple, set, frozenset, deque, dict, defaultdict, bytearray, memoryview, array.array, np.ndarray, np.void, slice,
    types.MappingProxyType, types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType, property, weakref.ref,
    types.CellType, *DESCRIPTORS,
})  # fmt: skip
_MOST_BYTES = 64 << 10  # of an array whose contents belong to the key
_MOST_ENTRIES = 1000  # of a container whose contents do


class KeyBuilder(Protocol):
    """The part of a ``Fingerprint`` that the functions in ``CONTENTS`` use."""

    def of(self, value: Any) -> Hashable: ...  # noqa: D102
    def entry(self, name: Any, value: Any) -> Hashable: ...  # noqa: D102
    def cell(self, name: str, cell: types.CellType) -> Hashable: ...  # noqa: D102
    def identity(self, value: Any) -> Hashable: ...  # noqa: D102
    def by_identity(self, value: Any) -> Hashable: ...  # noqa: D102
    def guard(self, container: Any, kind: Any, keys: Iterable[Any] = (), **how: Any) -> None: ...  # noqa: D102


def _items(fingerprint: KeyBuilder, value: Any, base: Any) -> tuple[Hashable, ...]:
    if base.__len__(value) > _MOST_ENTRIES:
        return (fingerprint.by_identity(value),)
    if base not in (tuple, frozenset):
        fingerprint.guard(value, "items", base=base)
    return tuple(map(fingerprint.of, [*base.__iter__(value)]))


def _dict(fingerprint: KeyBuilder, value: Any) -> tuple[Hashable, ...]:
    if dict.__len__(value) > _MOST_ENTRIES:
        return (fingerprint.by_identity(value),)
    fingerprint.guard(value, "dict")
    pairs = pairs_of(value)
    if isinstance(value, OrderedDict) and len(pairs) > 1:
        fingerprint.guard(value, "items", base=OrderedDict)
        places = {id(key): number for number, key in enumerate(OrderedDict.__iter__(value))}
        pairs.sort(key=lambda pair: places.get(id(pair[0]), -1))
    return tuple((fingerprint.of(key), fingerprint.entry(key if isinstance(key, str) else "", entry)) for key, entry in pairs)


def _default(fingerprint: KeyBuilder, value: Any) -> tuple[Hashable, ...]:
    factory = vars(defaultdict)["default_factory"]
    fingerprint.guard(value, "slots", (factory,))
    return (fingerprint.of(slot_value(factory, value)), *_dict(fingerprint, value))


def _memory(fingerprint: KeyBuilder, value: Any) -> tuple[Hashable, ...]:
    # The key has the contents of at most 64 KiB; a larger array counts by identity.
    try:
        view = memoryview(value)
    except (TypeError, ValueError, BufferError):  # e.g. dates, of which NumPy shows no memory
        return (fingerprint.by_identity(value),)
    objects = isinstance(value, np.ndarray) and value.dtype.hasobject
    if view.nbytes > _MOST_BYTES or (objects and value.dtype != object):
        return (fingerprint.by_identity(value),)
    kind: Any = type(value)
    fingerprint.guard(value, "memory", base=layout_of(kind))
    form = view.format, view.shape, view.strides, view.readonly
    if objects:
        return (form, tuple(map(fingerprint.of, np.ndarray.ravel(value).tolist())))
    return (form, memory_of(value))


def _builtin(fingerprint: KeyBuilder, value: Any) -> tuple[Hashable, ...]:
    bound = value.__self__
    if bound is None or isinstance(bound, (types.ModuleType, type)):
        return (fingerprint.identity(value),)
    return (value.__name__, fingerprint.of(bound))


def _named(fingerprint: KeyBuilder, value: Any) -> tuple[Hashable, ...]:
    return (value.__name__, getattr(value.__objclass__, "__qualname__", ""))


def _attributes(*names: str) -> _Say:
    return lambda fingerprint, value: tuple(fingerprint.of(getattr(value, name)) for name in names)


def _each_item(base: Any) -> _Say:
    return lambda fingerprint, value: _items(fingerprint, value, base)


def _partial(fingerprint: KeyBuilder, value: Any) -> tuple[Hashable, ...]:
    parts = tuple(vars(functools.partial)[name] for name in ("func", "args", "keywords"))
    fingerprint.guard(value, "slots", parts)  # __setstate__ replaces them
    return tuple(fingerprint.of(slot_value(part, value)) for part in parts)


def _number(base: Any) -> _Say:
    return lambda fingerprint, value: (exact(base.__pos__(value)),)


_Say = Callable[[KeyBuilder, Any], tuple[Hashable, ...]]
CONTENTS: dict[Any, _Say] = {
    object: lambda fingerprint, value: (),
    types.SimpleNamespace: lambda fingerprint, value: (),
    **{base: _each_item(base) for base in (list, tuple, set, frozenset)},
    deque: lambda fingerprint, value: (value.maxlen, *_items(fingerprint, value, deque)),
    dict: _dict,
    OrderedDict: _dict,
    defaultdict: _default,
    **dict.fromkeys((bytearray, memoryview, array.array, np.ndarray, np.void), _memory),
    **{base: _number(base) for base in (int, float, complex)},
    str: lambda fingerprint, value: (exact(str.__str__(value)),),
    bytes: lambda fingerprint, value: (exact(bytes.__getitem__(value, slice(None))),),
    slice: _attributes("start", "stop", "step"),
    types.MappingProxyType: lambda fingerprint, value: tuple(map(fingerprint.of, gc.get_referents(value))),
    types.MethodType: _attributes("__func__", "__self__"),
    types.BuiltinFunctionType: _builtin,
    types.MethodWrapperType: _builtin,
    staticmethod: _attributes("__func__"),
    classmethod: _attributes("__func__"),
    property: _attributes("fget", "fset", "fdel"),
    functools.partial: _partial,
    weakref.ref: lambda fingerprint, value: (fingerprint.of(value()),),
    types.CellType: lambda fingerprint, value: (fingerprint.cell("", value),),
    **dict.fromkeys(DESCRIPTORS, _named),
}


# Objects of exactly these types never change, and say all by their value.
_FIXED = frozenset({
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range, types.CodeType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, datetime.date, datetime.timedelta, decimal.Decimal,
    fractions.Fraction, pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath, re.Pattern,
    *(kind for kind in np.sctypeDict.values() if kind not in (np.object_, np.void)),
})  # fmt: skip
_BY_IDENTITY = (types.ModuleType, logging.Logger, io.IOBase)
# Objects of these modules of libraries are no part of what a step computes, and hold half of the process.
_MACHINERY = ("optuna.", "threading", "queue", "logging", "torch.optim", "torch.utils.data", "torch._ops", "torch._library",
              "waterflow.step", "waterflow.training.runner", "waterflow.executor.engine")  # fmt: skip
_CODE: Any = (type, types.FunctionType, types.BuiltinFunctionType)
_HANDLE = torch.utils.hooks.RemovableHandle  # of a hook; the class counts those that all threads register
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator)
_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)
_TENSOR_DICTS = ("_parameters", "_buffers", "_modules")
_MODULE_DICTS = frozenset({*_TENSOR_DICTS, "_non_persistent_buffers_set"})
# A module's dicts of hooks that forward and backward passes call: their keys count the hooks of the whole process. With each, those
# that say how its hooks are called.
_HOOKS = {
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_backward_hooks": (),
    "_backward_pre_hooks": (),
}
# Of these a forward pass reads none, or only beside one that is looked at.
_SILENT = frozenset(
    {
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        *itertools.chain(*_HOOKS.values()),
    }
)

# How much of an object a key covers. ``whole``: all that a program can read of it is part of the key and guarded, or is an
# object that answers for itself. ``identity``: the object may change unseen. ``library``: a library's code.
Cover = Literal["whole", "identity", "library"]


def tensor_key(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Return a tensor's shape, strides, dtype, lazy bits, device and requires_grad: what a graph depends on, without values."""
    shape = tuple(tensor.shape), tensor.stride(), tensor.dtype, lazy_bits(tensor)
    return (*shape, tensor.device, tensor.requires_grad)


class Fingerprint:
    """Builds one key; remembers the objects that it has met, so that cycles end and sharing shows.

    ``parameters`` and ``buffers`` are those of the model ``own``, by name.
    ``guarded_places`` are the places that it looked into. ``external_tensors`` are the tensors that it met beside
    parameters and buffers of the model ``own``, in an order that is the same for equal keys. ``generators`` are sources
    of random numbers. ``keep`` has objects that count by their address and must live as long as the key. ``opaque``
    has, by ``id``, labels of the objects that it met and did not look into. ``found`` are guarded places that a trace
    has found (``installed.py``), with what was there. It runs no user code.
    """

    def __init__(self, own: nn.Module | None = None) -> None:
        self.guarded_places: list[GuardedPlace] = []
        self.external_tensors: list[torch.Tensor] = []
        self.generators: list[tuple[str, Any]] = []
        self.keep: list[Any] = []
        self.opaque: dict[int, str] = {}
        self.found: list[tuple[GuardedPlace, Any]] = []
        self.parameters = {} if own is None else dict(own.named_parameters())
        self.buffers = {} if own is None else dict(own.named_buffers())
        modules = own.modules() if own is not None else ()
        self._own = {id(one) for one in (*modules, *self.parameters.values(), *self.buffers.values())}
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # an address must not be given to another object while this is being built
        self._path: list[str] = []
        self._entries: set[tuple[int, str]] = set()  # what was read of dicts that count in part

    def cover(self, value: Any, entry: str | None = None) -> Cover | None:
        """Return how much of an object the key covers; None for an object that the fingerprint never met.

        With ``entry``, asks for one entry of a dict, or one attribute of a Python module, of which functions read some.
        """
        if type(value) in _FIXED:
            return "whole"
        entries = vars(value) if isinstance(value, types.ModuleType) else value
        if entry is not None and (id(entries), entry) in self._entries:
            return "whole"
        if type(value) in (types.MethodType, types.BuiltinFunctionType) and id(value) not in self._seen:
            parts = [value.__self__, *([value.__func__] if isinstance(value, types.MethodType) else [])]
            both = {self.cover(part) for part in parts}
            return next((one for one in (None, "identity") if one in both), "whole")  # type: ignore[return-value]
        if id(value) in self.opaque:
            return "identity"
        if id(value) not in self._seen:
            return None
        return "library" if is_librarys(value) else "whole"

    def functions(self) -> Iterator[types.FunctionType]:
        """Yield the Python functions that the fingerprint has met."""
        return (value for value in self._alive if isinstance(value, types.FunctionType))

    def modules(self) -> Iterator[nn.Module]:
        """Yield the ``nn.Module`` objects that the fingerprint has met."""
        return (value for value in self._alive if isinstance(value, nn.Module))

    def identity(self, value: Any) -> Hashable:
        """Return the key of an object that counts by identity."""
        token = token_of(value)
        if token is None:
            self.keep.append(value)
            return ("id", id(value))
        return ("token", token)

    def by_identity(self, value: Any) -> Hashable:
        """Return the key of an object without looking into it."""
        self._meet(value)
        self.leave(value)
        return self.identity(value)

    def _meet(self, value: Any) -> None:
        if id(value) not in self._seen:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)

    def leave(self, value: Any) -> None:
        """Note that an object may change unseen, unless it is a library's code."""
        if not is_librarys(value):
            self.opaque[id(value)] = self._where() or f"a {type(value).__name__}"

    def _where(self) -> str:
        return ".".join(self._path)

    def guard(self, container: Any, kind: Any, keys: Iterable[Any] = (), **how: Any) -> None:
        """Note a place that the key is made from."""
        self.guarded_places.append(GuardedPlace(container, kind, tuple(keys), label=self._where(), **how))
        if kind == "entries":
            self._entries.update((id(container), key) for key in keys)

    def entry(self, name: Any, value: Any) -> Hashable:
        """Return the key of a value that is found under a name."""
        self._path.append(str(name))
        try:
            return self.of(value)
        finally:
            self._path.pop()

    def of(self, value: Any) -> Hashable:
        """Return the key of any value. Raises CaptureError for an iterator, and for a ``threading.local``."""
        kind = type(value)
        if kind in _FIXED:
            return exact(value)
        seen = self._seen.get(id(value))
        if seen is not None:
            return ("seen", seen)
        self._meet(value)
        if value is _HANDLE or issubclass(kind, _HANDLE):
            self.leave(value)
            return kind.__name__
        if issubclass(kind, _GENERATORS):
            self._check_generator(value)
            return self.by_identity(value)
        if issubclass(kind, nn.Module):
            return self.of_module(value)
        machinery = str(kind.__module__).startswith(_MACHINERY) and in_library(kind)
        if issubclass(kind, _BY_IDENTITY) or machinery or value is sys.modules:
            return self.by_identity(value)
        if issubclass(kind, torch.Tensor):
            return self._tensor(value)
        if issubclass(kind, type):
            return self.of_class(value)
        if issubclass(kind, enum.Enum) and in_library(kind) and not is_installed(kind):
            return ("enum", self.identity(kind), value._name_, exact(value._value_))
        if issubclass(kind, threading.local):
            where = self._where() or "the step"
            raise CaptureError(advised(f"{where} is a threading.local, which differs between threads"))
        # A step could draw from it, and a captured one would not.
        if issubclass(kind, Iterator):
            where = self._where() or "the step"
            holds = f"{where} holds a {kind.__module__}.{kind.__qualname__}, and could draw from it"
            raise CaptureError(advised(holds, "draw outside the step"))
        return self._object(value, kind)

    def _check_generator(self, value: Any) -> None:
        # Calls of torch's functions to a default generator become operations; its own methods cannot be followed. A
        # draw from any other generator is noticed by its state.
        if value is torch.default_generator or value is torch._C.default_generator:
            raise CaptureError(
                f"{self._where() or 'the step'} is torch's default generator, whose methods cannot be followed; "
                "use torch.get_rng_state, torch.set_rng_state and torch.manual_seed"
            )
        self.generators.append((self._where(), value))

    # -- tensors and modules

    def _tensor(self, tensor: torch.Tensor) -> Hashable:
        if id(tensor) not in self._own:
            if type(tensor) not in _PLAIN_TENSORS or tensor.layout != torch.strided:
                return self.by_identity(tensor)
            self.external_tensors.append(tensor)
        self.guard(tensor, "object")
        attributes = _C.attributes_of(tensor) or {}
        said = tuple((name, self.entry(name, value)) for name, value in pairs_of(attributes))
        return ("tensor", type(tensor).__name__, *tensor_key(tensor), said)

    def of_module(self, module: nn.Module) -> Hashable:
        """Return the key of the tree below ``module``: types, plain attributes, tensors by shape, tied ones by number.

        Raises CaptureError for a module of TorchScript.
        """
        if isinstance(module, torch.jit.ScriptModule):
            where = self._where() or type(module).__name__
            raise CaptureError(f"{where} is scripted or traced (torch.jit); pass the module that it was made of")
        state = _C.attributes_of(module) or {}
        self.guard(module, "object", owner=module)
        tensors: list[Hashable] = []
        for kind in _TENSOR_DICTS:  # the model's tensors are put back by who shows others there
            self.guard(state[kind], "dict", kept=kind == "_modules" or id(module) not in self._own)
        for kind in _TENSOR_DICTS[:2]:
            for name, tensor in list(state[kind].items()):
                tensors.append((kind, name, None if tensor is None else self.entry(name, tensor)))
        attributes: list[Hashable] = []
        for name, value in list(state.items()):  # another thread may be tracing a part that both hold
            if name in _MODULE_DICTS or name in _SILENT:
                continue
            if name in _HOOKS and isinstance(value, dict):
                attributes.append((name, self._hooks(value, [state.get(one, {}) for one in _HOOKS[name]])))
            else:
                attributes.append((name, self.entry(name, value)))
        slots = self._slots(module, type(module))
        children = tuple((name, self.entry(name, child)) for name, child in list(state["_modules"].items()))
        return ("module", self.of(type(module)), tuple(tensors), tuple(attributes), slots, children)

    def _hooks(self, hooks: dict[Any, Any], ways: Iterable[dict[Any, Any]]) -> Hashable:
        # ``ways`` tell how each hook is called. Their keys count hooks of the whole process, so only the order is kept.
        for one in (hooks, *ways) if hooks else (hooks,):
            self.guard(one, "dict")
        if len(hooks) > 1 and isinstance(hooks, OrderedDict):
            self.guard(hooks, "items", base=OrderedDict)
        called = (tuple(exact(bool(way.get(number))) for way in ways) for number in hooks)
        return tuple((self.entry("hook", hook), how) for hook, how in zip(list(hooks.values()), called))

    def of_process(self) -> Hashable:
        """Return the key of the hooks that every module of the process calls, and of torch's functions."""
        found = {name: value for name, value in vars(nn.modules.module).items() if name.startswith("_global_")}
        self.guard(vars(nn.modules.module), "entries", found)
        hooks = tuple((name, self._hooks(v, ()) if isinstance(v, dict) else exact(v)) for name, v in found.items())
        return (*hooks, key_of_torch(self.guard), self.of_class(torch.Tensor))

    # -- all other objects

    def _object(self, value: Any, kind: type) -> Hashable:
        layout: Any = layout_of(kind)
        if layout is types.FunctionType:
            return self._function(value)
        say = CONTENTS.get(layout)
        said = say(self, value) if say is not None else ()
        if say is None and layout is not object:
            self.leave(value)
        if kind is layout and kind in NO_ATTRIBUTES:
            return (kind.__name__, *said)
        attributes = _C.attributes_of(value)
        slots = self._slots(value, kind)
        self.guard(value, "object")
        # Nothing can be read of it but its identity, as of object().
        if not said and not kind.__dictoffset__ and not slots:
            return self.identity(value)
        entries = tuple((name, self.entry(name, entry)) for name, entry in pairs_of(attributes or {}))
        return ("object", self.of(kind), *said, *entries, slots)

    def _slots(self, value: Any, kind: type) -> tuple[Hashable, ...]:
        slots = slots_of(kind)
        if slots and in_library(kind):
            self.leave(value)
            return ()
        if slots:
            self.guard(value, "slots", slots)
        found = ((slot.__name__, slot_value(slot, value)) for slot in slots)
        return tuple((name, "empty" if entry is MISSING else self.entry(name, entry)) for name, entry in found)

    def _function(self, function: types.FunctionType) -> tuple[Hashable, ...]:
        # A library's function is not followed into its module; its defaults and closure may contain a user's objects.
        self.guard(function, "function")
        self.guard(function, "object")
        said = tuple((n, self.entry(n, value)) for n, value in pairs_of(_C.attributes_of(function) or {}) if n != MEMO)
        given = self.of(function.__defaults__), self.of(function.__kwdefaults__)
        key = ("function", function.__name__, function.__qualname__, said, function.__code__, *given)
        closure = tuple(map(self.cell, function.__code__.co_freevars, function.__closure__ or ()))
        if in_library(function):
            return (*key, closure, function.__module__, function.__qualname__)
        return (*key, closure, self._reads(function))

    def cell(self, name: str, cell: types.CellType) -> Hashable:
        """Return the key of the contents of a closure's variable."""
        self._path.append(name)
        try:
            self.guard(cell, "cell")
            contents = cell_contents(cell)
            return "empty" if contents is MISSING else self.of(contents)
        finally:
            self._path.pop()

    def _reads(self, function: types.FunctionType) -> Hashable:
        found: list[Hashable] = []
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or ()))
        for place, first, *attributes in reads_of(function.__code__):
            space: dict[str, Any] = function.__globals__
            name = first
            if place == "closure":
                held = cell_contents(cells[first]) if first in cells else None
                if not isinstance(held, types.ModuleType) or not attributes:
                    continue
                space, (name, *attributes) = vars(held), attributes
            elif place == "import":
                space, name = sys.modules, _full_name(first, space)  # type: ignore[assignment]
            found.append((first, *attributes, self._read(space, name, attributes)))
        return tuple(found)

    def _read(self, space: dict[str, Any], name: str, attributes: list[str]) -> Hashable:
        # Follows a chain of attributes from module to module. The state of a library is its own and counts by identity,
        # but for the environment and short lists of numbers and names (sys.argv). Functions and classes that its names
        # stand for are looked into.
        librarys = False
        while True:
            self._path.append(name)
            self.guard(space, "entries", (name,))
            self._path.pop()
            if name not in space:
                return "missing" if name not in vars(builtins) else self._read(vars(builtins), name, [])
            value = space[name]
            if not isinstance(value, types.ModuleType) or not attributes:
                kept = librarys and type(value) not in _FIXED and not isinstance(value, _CODE + _GENERATORS)
                own = kept and value is not os.environ and not _says_plainly(value)
                return self.by_identity(value) if own else self.entry(name, value)
            space, (name, *attributes), librarys = vars(value), attributes, in_library(value)

    def of_class(self, cls: type) -> Hashable:
        """Return the key of a class: a library's by identity and by what was replaced in it, a user's by its code."""
        if mutable_bases(cls):
            self.guard(cls, "class")
        if in_library(cls):
            return self._library_class(cls)
        # A user's class may be made anew in every trial.
        said: list[Hashable] = []
        for base, body in bodies(cls):
            if in_library(base):
                said.append(self._library_class(base))
            else:
                entries = tuple((name, self.entry(name, value)) for name, value in body)
                said.append((base.__name__, base.__qualname__, entries))
        return ("class", self.of(type(cls)), tuple(said))

    def _library_class(self, cls: type) -> Hashable:
        body = body_of(cls)
        self.keep += body.keep
        return (self.identity(cls), body.key, tuple((name, self.entry(name, one)) for name, one in body.users))


def _says_plainly(value: Any) -> bool:
    short = type(value) in (list, tuple, set, frozenset) and len(value) <= 100
    return short and all(type(one) in _FIXED for one in value)


def is_librarys(value: Any) -> bool:
    """Return whether an object is code of a library, or of Python itself."""
    return in_library(value) or type(value) in (types.BuiltinFunctionType, *DESCRIPTORS)


def _full_name(name: str, space: dict[str, Any]) -> str:
    if not name.startswith("."):
        return name
    try:
        return importlib.util.resolve_name(name, space.get("__package__") or "")
    except ImportError:
        return name
