"""What makes two steps trace to the same graph: a hashable key over code, structure and settings.

Captures are shared between jobs whose keys are equal, so that the hundredth trial of a study captures nothing.
The key must therefore hold everything that tracing can look at: the module tree with its plain attributes, the
functions that are called with what they close over, and the shape of every tensor. An object that cannot be
looked into counts by identity: it is then shared by nothing else.
"""

from __future__ import annotations

import dis
import enum
import functools
import inspect
import types
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from waterflow.partition.dropout_rates import has_free_rate

_ATOMS = (
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis),
    torch.dtype, torch.device, torch.layout, torch.memory_format, enum.Enum, range, slice,
)  # fmt: skip
_MODULE_DICTS = frozenset({"_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"})
_LIBRARY_PREFIXES = ("torch.", "torchvision.", "timm.", "transformers.", "numpy.", "builtins.", "waterflow.")


def tensor_key(tensor: torch.Tensor) -> tuple[Hashable, ...]:
    """Shape, strides, dtype, device and requires_grad: what a graph depends on, not the values."""
    return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)


class Fingerprint:
    """Builds one key; remembers what it has met, so that cycles end and sharing shows.

    ``keep`` holds the objects that count by identity: as long as the key lives they must, too.
    """

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self.keep: list[Any] = []
        # (dict, key), (dict, None) for its size, (list, None), (closure cell, None): what the key looked into.
        self.looked_at: list[tuple[Any, Any]] = []

    def _meet(self, value: Any) -> int | None:
        """The number of an object met before; None the first time."""
        number = self._seen.get(id(value))
        if number is None:
            self._seen[id(value)] = len(self._seen)
            self.keep.append(value)
        return number

    def _look_at(self, container: dict[Any, Any], *keys: Any) -> None:
        self.looked_at.append((container, None))
        self.looked_at.extend((container, key) for key in keys if key is not None)

    def of(self, value: Any) -> Hashable:
        """The key of any value."""
        if isinstance(value, float):
            return ("float", value.hex())  # tells 0.0 from -0.0, and nan is equal to itself
        if isinstance(value, _ATOMS):
            return (type(value).__name__, value if not isinstance(value, (range, slice)) else repr(value))
        if isinstance(value, (types.BuiltinFunctionType, types.ModuleType)):
            self.keep.append(value)
            return ("id", id(value))
        seen = self._meet(value)
        if seen is not None:
            return ("seen", seen)
        if isinstance(value, type):
            return self.of_class(value)
        if isinstance(value, nn.Module):
            return self.of_module(value)
        if isinstance(value, torch.Tensor):
            return ("tensor", id(value))  # a constant of the graph
        if isinstance(value, list):
            self.looked_at.append((value, None))
        if isinstance(value, (tuple, list, torch.Size)):
            return (type(value).__name__, *map(self.of, value))
        if isinstance(value, (set, frozenset)):
            return ("set", frozenset(map(self.of, value)))
        if isinstance(value, dict):
            self._look_at(value, *value)
        if isinstance(value, Mapping):
            return ("map", type(value).__name__, *((self.of(k), self.of(v)) for k, v in value.items()))
        if isinstance(value, functools.partial):
            return ("partial", self.of(value.func), self.of(value.args), self.of(value.keywords))
        if isinstance(value, types.MethodType):
            return ("method", self.of(value.__func__), self.of(value.__self__))
        if isinstance(value, types.FunctionType):
            return self.of_function(value)
        state = getattr(value, "__dict__", None)
        if state is not None and not isinstance(value, torch.Generator):
            self._look_at(state, *state)
            return ("object", self.of(type(value)), *((name, self.of(entry)) for name, entry in state.items()))
        return ("id", id(value))

    def of_function(self, function: types.FunctionType) -> Hashable:
        """Code, defaults, what it closes over, and the plain globals that it reads."""
        module = (function.__module__ or "") + "."
        if module.startswith(_LIBRARY_PREFIXES):
            return ("id", id(function), self._closure(function))
        return (
            "function",
            function.__code__,
            self.of(function.__defaults__),
            self.of(function.__kwdefaults__),
            self._closure(function),
            self._globals(function),
        )

    def _closure(self, function: types.FunctionType) -> Hashable:
        cells = []
        for cell in function.__closure__ or ():
            self.looked_at.append((cell, None))
            try:
                cells.append(self.of(cell.cell_contents))
            except ValueError:  # not yet filled
                cells.append("empty")
        return tuple(cells)

    def _globals(self, function: types.FunctionType) -> Hashable:
        found: list[Hashable] = []
        for name in _names(function.__code__):
            value = function.__globals__.get(name, _ATOMS)
            if value is not _ATOMS and not isinstance(value, (types.ModuleType, type)):
                self.looked_at.append((function.__globals__, name))
                found.append((name, self.of(value)))
        return tuple(found)

    def of_module(self, module: nn.Module) -> Hashable:
        """The tree below ``module``: types, plain attributes, tensors by shape, tied ones by number."""
        state = module.__dict__
        tensors: list[Hashable] = []
        for kind in ("_parameters", "_buffers"):
            for name, tensor in state[kind].items():
                if tensor is None:
                    tensors.append((kind, name, None))
                    continue
                seen = self._meet(tensor)
                tensors.append((kind, name, ("seen", seen) if seen is not None else tensor_key(tensor)))
        free = has_free_rate(module)
        self._look_at(state, *(name for name in state if name not in _MODULE_DICTS))
        attributes = tuple(
            (name, "a rate" if free and name == "p" else self.of(value))
            for name, value in state.items()
            if name not in _MODULE_DICTS and not (isinstance(value, dict) and not value)
        )
        children = tuple((name, None if child is None else self.of(child)) for name, child in state["_modules"].items())
        return ("module", self.of(type(module)), tuple(tensors), attributes, children)

    def of_class(self, cls: type) -> Hashable:
        """A library's class by identity; a user's by its code, for it may be defined anew in every trial."""
        methods = _own_methods(cls)
        if not methods:
            return ("id", id(cls))
        library = next(base for base in inspect.getmro(cls) if _in_library(base))
        return ("class", cls.__qualname__, id(library), *map(self.of_function, methods))


@functools.lru_cache(maxsize=4096)
def _names(code: types.CodeType) -> tuple[str, ...]:
    # Not co_names, which holds attributes as well.
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names.update(_names(constant))
    return tuple(sorted(names))


def _in_library(cls: type) -> bool:
    return (cls.__module__ + ".").startswith(_LIBRARY_PREFIXES)


@functools.lru_cache(maxsize=4096)
def _own_methods(cls: type) -> tuple[types.FunctionType, ...]:
    """Methods that the user wrote: those of classes that no library defines."""
    methods: list[types.FunctionType] = []
    for base in inspect.getmro(cls):
        if not _in_library(base):
            methods.extend(m for m in vars(base).values() if isinstance(m, types.FunctionType))
    return tuple(methods)


def ambient_key(device_type: str) -> tuple[Hashable, ...]:
    """Process and thread settings that change what tracing records."""
    return (
        torch.is_autocast_enabled(device_type),
        torch.get_autocast_dtype(device_type),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_default_dtype(),
    )


def batch_key(leaves: Iterable[Any]) -> tuple[Hashable, ...]:
    """The part of the key that a batch's leaves give: tensors by shape, everything else by value."""
    return tuple(tensor_key(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
