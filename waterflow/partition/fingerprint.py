"""What makes two steps trace to the same graph: a hashable key over code, structure and settings.

Captures are shared between jobs whose keys are equal, so that the hundredth trial of a study captures nothing.
The key must therefore hold everything that tracing can look at: the module tree with its plain attributes, the
functions that are called with what they close over, and the shape of every tensor. An object that cannot be
looked into counts by identity: it is then shared by nothing else.
"""

from __future__ import annotations

import enum
import functools
import inspect
import io
import itertools
import logging
import random
import types
import weakref
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from waterflow.errors import CaptureError
from waterflow.partition.code_key import class_attributes, global_reads, in_library, library_base, slots_of
from waterflow.partition.dropout_rates import has_free_rate, stands_in
from waterflow.partition.exact import exact
from waterflow.partition.operators import lazy_bits

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum, range, slice,
)  # fmt: skip
_FIXED = frozenset({type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range,
                    torch.dtype, torch.device, torch.layout, torch.memory_format, types.CodeType})  # fmt: skip
_BY_IDENTITY = (types.BuiltinFunctionType, types.ModuleType, torch.Generator, logging.Logger, io.IOBase)
# Objects of these modules are no part of what a step computes, and hold half of the process.
_MACHINERY = ("optuna.", "threading", "queue", "logging", "torch.optim", "torch.utils.data", "torch._ops", "torch._library",
              "waterflow.step", "waterflow.runner", "waterflow.executor.engine")  # fmt: skip
_DESCRIPTORS = (types.MemberDescriptorType, types.GetSetDescriptorType, types.WrapperDescriptorType)
_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)
_MODULE_DICTS = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
# Dicts of a module's hooks: their keys count the hooks of the whole process.
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")
# Of these a forward pass reads none, or only beside one that is looked at.
_SILENT = frozenset({"_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
                     "_load_state_dict_post_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
                     "_forward_pre_hooks_with_kwargs"})  # fmt: skip

_tokens: dict[int, tuple[weakref.ref[Any], int]] = {}
_next_token = itertools.count()


def _token(value: Any) -> int | None:
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


def tensor_key(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Shape, strides, dtype, lazy bits, device and requires_grad: what a graph depends on, not the values."""
    shape = tuple(tensor.shape), tensor.stride(), tensor.dtype, lazy_bits(tensor)
    return (*shape, tensor.device, tensor.requires_grad)


@dataclass(frozen=True, slots=True)
class Look:
    """A place that a key was made from: a dict, list, set, deque, closure cell, class, or object with slots.

    ``keys`` are the entries that were read of a dict, and the slots of an object. Of a dict that is not ``whole``
    (a function's globals) nothing else counts. ``owner`` is the module whose attributes the dict holds.
    """

    container: Any
    keys: tuple[Any, ...] = ()
    whole: bool = True
    label: str = ""
    owner: nn.Module | None = None


# How much of an object a key covers. ``whole``: all that a program can read of it is part of the key and guarded, or is an
# object that answers for itself. ``identity``: the object may change, and nobody would see. ``library``: a library's code.
Cover = Literal["whole", "identity", "library"]


class Fingerprint:
    """Builds one key; remembers what it has met, so that cycles end and sharing shows.

    ``looks`` are the places it looked into; ``strangers`` the tensors it met that are not ``own`` (parameters and
    buffers of the model), in an order that is the same for equal keys; ``generators`` sources of random
    numbers; ``keep`` what counts by its address and must live as long as the key; ``unlooked`` labels, by ``id``, the
    objects that it met and did not look into.
    """

    def __init__(self, own: nn.Module | None = None) -> None:
        self.looks: list[Look] = []
        self.strangers: list[torch.Tensor] = []
        self.generators: list[tuple[str, Any]] = []
        self.keep: list[Any] = []
        self.unlooked: dict[int, str] = {}
        self._own = set() if own is None else {id(t) for t in (*own.modules(), *own.parameters(), *own.buffers())}
        self._seen: dict[int, int] = {}
        self._alive: list[Any] = []  # an address must not be given to another object while this is being built
        self._path: list[str] = []
        self._entries: set[tuple[int, str]] = set()  # what of a dict was read that counts in part

    def _meet(self, value: Any) -> int | None:
        """The number of an object met before; None the first time."""
        number = self._seen.get(id(value))
        if number is None:
            self._seen[id(value)] = len(self._seen)
            self._alive.append(value)
        return number

    def cover(self, value: Any, entry: str | None = None) -> Cover | None:
        """How much of an object the key covers; None for one that it never met.

        ``entry`` asks for one entry of a dict, or one attribute of a module (of Python's), of which functions read some.
        """
        if type(value) in _FIXED:
            return "whole"
        entries = vars(value) if isinstance(value, types.ModuleType) else value
        if entry is not None and (id(entries), entry) in self._entries:
            return "whole"
        if isinstance(value, types.MethodType):
            both = {self.cover(value.__func__), self.cover(value.__self__)}
            return next((one for one in (None, "identity") if one in both), "whole")  # type: ignore[return-value]
        if id(value) in self.unlooked:
            return "identity"
        if id(value) not in self._seen:
            return None
        return "library" if in_library(value) or isinstance(value, types.BuiltinFunctionType) else "whole"

    def _unlooked(self, value: Any) -> Hashable:
        """The key of an object that cannot be looked into, or is not."""
        self._meet(value)
        library = in_library(value) or isinstance(value, types.BuiltinFunctionType)
        if not library:
            self.unlooked[id(value)] = ".".join(self._path) or f"a {type(value).__name__}"
        return self._identity(value)

    def _identity(self, value: Any) -> Hashable:
        token = _token(value)
        if token is None:
            self.keep.append(value)
            return ("id", id(value))
        return ("token", token)

    def _look(self, container: Any, keys: Iterable[Any] = (), whole: bool = True, owner: Any = None) -> None:
        self.looks.append(Look(container, tuple(keys), whole, ".".join(self._path), owner))
        if not whole:
            self._entries.update((id(container), key) for key in keys)

    def _entry(self, name: Any, value: Any) -> Hashable:
        self._path.append(str(name))
        try:
            return self.of(value)
        finally:
            self._path.pop()

    def of(self, value: Any) -> Hashable:
        """The key of any value. Raises CaptureError for an iterator, which a step could draw from."""
        if isinstance(value, _ATOMS):
            return exact(value)
        if isinstance(value, torch.Generator):
            self._check_generator(value)
        if isinstance(value, _BY_IDENTITY) or type(value).__module__.startswith(_MACHINERY):
            return self._unlooked(value)
        seen = self._meet(value)
        if seen is not None:
            return ("seen", seen)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, nn.Module):
            return self.of_module(value)
        if isinstance(value, type):
            return self.of_class(value)
        if isinstance(value, (list, tuple, set, frozenset, dict, deque, Mapping)):
            return self._container(value)
        return self._callable(value) or self._object(value)

    def _check_generator(self, value: torch.Generator) -> None:
        """What a step does with a default generator by its methods cannot be followed; what with others is noticed."""
        if value is torch.default_generator or value is torch._C.default_generator:
            raise CaptureError(
                f"{'.'.join(self._path) or 'the step'} is torch's default generator, whose methods cannot be followed; "
                "use torch.get_rng_state, torch.set_rng_state and torch.manual_seed"
            )
        self.generators.append((".".join(self._path), value))

    def _tensor(self, tensor: torch.Tensor) -> Hashable:
        if id(tensor) not in self._own:
            if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer) or tensor.layout != torch.strided:
                return self._unlooked(tensor)
            self.strangers.append(tensor)
        return ("tensor", *tensor_key(tensor))

    def _container(self, value: Any) -> Hashable:
        kind = type(value).__name__
        if isinstance(value, (set, frozenset)):
            if isinstance(value, set):
                self._look(value)
            return (kind, frozenset(map(self.of, value)))
        if isinstance(value, (list, tuple, deque)):
            if not isinstance(value, tuple):
                self._look(value)
            return (kind, *map(self.of, value))
        if isinstance(value, dict):
            self._look(value, value)
        return ("map", kind, *((self.of(k), self._entry(k, v)) for k, v in value.items()))

    def _callable(self, value: Any) -> Hashable:
        """The key of functions in all their forms; None for anything else."""
        if isinstance(value, types.FunctionType):
            return self.of_function(value)
        if isinstance(value, functools.partial):
            return ("partial", self.of(value.func), self.of(value.args), self.of(value.keywords))
        if isinstance(value, types.MethodType):
            return ("method", self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, (staticmethod, classmethod)):
            return (type(value).__name__, self.of(value.__func__))
        if isinstance(value, property):
            return ("property", self.of(value.fget), self.of(value.fset))
        return None

    def _object(self, value: Any) -> Hashable:
        if isinstance(value, weakref.ref):
            return ("weakref", self.of(value()))
        if isinstance(value, _DESCRIPTORS):
            return ("descriptor", value.__name__)
        if isinstance(value, _GENERATORS):
            self.generators.append((".".join(self._path), value))
            return self._unlooked(value)
        if isinstance(value, Iterator):
            where = ".".join(self._path)
            raise CaptureError(f"{where or 'the step'} holds a {type(value).__name__}, from which each step could draw")
        state = getattr(value, "__dict__", None)
        kind: Any = type(value)
        slots = () if in_library(kind) else slots_of(kind)
        if state is None and not slots:
            return self._identity(value) if kind is object else self._unlooked(value)
        if state:
            self._look(state, state)
        if slots:
            self._look(value, slots)
        entries = [*(state or {}).items(), *((name, getattr(value, name, None)) for name in slots)]
        return ("object", self.of(type(value)), *((name, self._entry(name, entry)) for name, entry in entries))

    def of_function(self, function: types.FunctionType) -> Hashable:
        """Code, defaults, what it closes over, and the globals that it reads."""
        key = (
            "function",
            function.__code__,
            self.of(function.__defaults__),
            self.of(function.__kwdefaults__),
            self._closure(function),
        )
        if in_library(function):
            return (*key, function.__module__, function.__qualname__)
        return (*key, self._globals(function))

    def _closure(self, function: types.FunctionType) -> Hashable:
        cells = []
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
            self._path.append(name)
            self._look(cell)
            try:
                cells.append(self.of(cell.cell_contents))
            except ValueError:  # not yet filled
                cells.append("empty")
            finally:
                self._path.pop()
        return tuple(cells)

    def _globals(self, function: types.FunctionType) -> Hashable:
        """What the function's code reads of its module, and of the modules that it names there."""
        found: list[Hashable] = []
        for name, *attributes in global_reads(function.__code__):
            space = function.__globals__
            if "default_generator" in attributes and space.get(name) in (torch, torch.random):
                self._check_generator(torch.default_generator)
            while name in space:
                value, known = space[name], in_library(space[name])
                if isinstance(value, types.ModuleType) and attributes and not known:
                    self._look(space, (name,), whole=False)
                    space, (name, *attributes) = vars(value), attributes
                    continue
                self._path.append(name)
                self._look(space, (name,), whole=False)
                self._path.pop()
                # What a library says does not change; which of its functions a name stands for does.
                found.append((name, self._unlooked(value) if known else self._entry(name, value)))
                break
        return tuple(found)

    def of_module(self, module: nn.Module) -> Hashable:
        """The tree below ``module``: types, plain attributes, tensors by shape, tied ones by number.

        Raises CaptureError for code of TorchScript's.
        """
        if isinstance(module, torch.jit.ScriptModule):
            where = ".".join(self._path) or type(module).__name__
            raise CaptureError(f"{where} is scripted or traced (torch.jit), into which a capture cannot look")
        state = module.__dict__
        tensors: list[Hashable] = []
        for kind in ("_parameters", "_buffers"):
            for name, tensor in state[kind].items():
                tensors.append((kind, name, None if tensor is None else self.of(tensor)))
        free = id(module) in self._own and has_free_rate(module)
        self._look(
            state, [n for n, v in list(state.items()) if n not in _MODULE_DICTS and not stands_in(v)], owner=module
        )
        attributes: list[Hashable] = []
        for name, value in list(state.items()):  # another thread may be tracing a part that both hold
            if name in _MODULE_DICTS or stands_in(value):
                continue
            if isinstance(value, dict) and (not value or name.endswith(_HOOKS)):
                if name not in _SILENT:
                    self._look(value, value)
                attributes.append((name, tuple(self._entry(name, hook) for hook in value.values())))
            else:
                attributes.append((name, "a rate" if free and name == "p" else self._entry(name, value)))
        children = tuple((name, self._entry(name, child)) for name, child in state["_modules"].items())
        return ("module", self.of(type(module)), tuple(tensors), tuple(attributes), children)

    def of_class(self, cls: type) -> Hashable:
        """A library's class by identity; a user's by its code, for it may be defined anew in every trial."""
        if in_library(cls):
            return self._unlooked(cls)
        for base in inspect.getmro(cls):
            if not in_library(base):
                self._look(base)
        attributes = tuple((name, self._entry(name, value)) for name, value in class_attributes(cls))
        return ("class", cls.__qualname__, self._identity(library_base(cls)), attributes)


# Which of the kernels for attention may be chosen (``torch.nn.attention.sdpa_kernel``).
_ATTENTION = torch._C._get_flash_sdp_enabled, torch._C._get_mem_efficient_sdp_enabled, torch._C._get_math_sdp_enabled


def ambient_key(device_type: str) -> tuple[Hashable, ...]:
    """Process and thread settings that change what tracing records."""
    return (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
        *(allowed() for allowed in _ATTENTION),
    )
