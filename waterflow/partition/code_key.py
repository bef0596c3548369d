"""What code refers to: the names that a function reads, what classes say, and whose code it is."""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch._library import custom_ops

from waterflow import _C
from waterflow.partition.libraries import is_library_class, is_library_function, is_library_space

# Class attributes that no forward pass computes with.
BOOKKEEPING = frozenset({
    "__module__", "__dict__", "__weakref__", "__doc__", "__qualname__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__firstlineno__", "__static_attributes__", "__parameters__",
    "__orig_bases__", "__abstractmethods__", "_abc_impl", "__dataclass_fields__", "__dataclass_params__",
    "__match_args__", "__slots__",
})  # fmt: skip
_GLOBAL_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_CELL_LOADS = frozenset({"LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"})
_LOCAL_LOADS = frozenset({"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"})
_LOCAL_STORES = frozenset({"STORE_FAST", "STORE_DEREF"})
_ATTRIBUTE_LOADS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})
_QUIET = frozenset({"CACHE", "PRECALL", "EXTENDED_ARG", "NOP", "PUSH_NULL", "MAKE_CELL", "COPY_FREE_VARS", "RESUME"})
_IMMUTABLE, _MANAGED_DICT = 1 << 8, 1 << 4  # flags of types

# ("global", name, attributes ...), ("closure", name, attributes ...) or ("import", module, attributes ...)
Read = tuple[str, ...]


def in_library(value: Any) -> bool:
    """Whether a class, function or module belongs to a library, whose code does not change while a process runs."""
    if isinstance(value, types.ModuleType):
        return is_library_space(vars(value))
    if isinstance(value, types.FunctionType):
        return is_library_function(value)
    return isinstance(value, type) and is_library_class(value)


class _Reader:
    """Goes over the instructions of one piece of code; ``names`` are the local ones that stand for what was imported."""

    def __init__(self, code: types.CodeType, names: dict[str, Read]) -> None:
        self.found: set[Read] = set()
        self._names = dict(names)
        self._path: Read = ()
        self._module: Read = ()
        self._imported: Read = ()
        self._chained = False
        before: list[Any] = [None, None]  # constants: how far up an import begins, and what it takes of the module
        for instruction in dis.get_instructions(code):
            if instruction.opname not in _QUIET:
                self._take(instruction.opname, instruction.argval, before)
            if instruction.opname == "LOAD_CONST":
                before = [before[1], instruction.argval]
        self._take("", None, before)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.found |= _Reader(constant, self._names).found

    def _take(self, name: str, value: Any, before: list[Any]) -> None:
        if name in _ATTRIBUTE_LOADS and self._path:
            self._path = (*self._path, str(value))
            return
        if self._path:
            self.found.add(self._path)
        self._path = ()
        if name in _GLOBAL_LOADS:
            self._path = ("global", str(value))
        elif name in _CELL_LOADS:
            self._path = self._names.get(str(value), ("closure", str(value)))
        elif name in _LOCAL_LOADS:
            self._path = self._names.get(str(value), ())
        elif name == "IMPORT_NAME":
            level, self._chained = before[0] or 0, before[1] is None
            module = str(value).partition(".")[0] if self._chained else str(value)
            self._module = self._imported = ("import", "." * level + module)
        elif name == "IMPORT_FROM":
            self._imported = (*(self._imported if self._chained else self._module), str(value))
        elif name in _LOCAL_STORES and self._imported:
            self.found.add(self._imported)
            self._names[str(value)] = self._imported
            self._imported = ()


@functools.lru_cache(maxsize=4096)
def reads_of(code: types.CodeType) -> tuple[Read, ...]:
    """What code reads of globals, of its closure and of what it imports, each with the attributes read of it.

    ``settings.scale`` is ("global", "settings", "scale").
    """
    return tuple(sorted(_Reader(code, {}).found))


def bodies(cls: type) -> Iterator[tuple[type, list[tuple[str, Any]]]]:
    """The bases of a user's class with what each of them says: methods, properties, values. Nothing of a library's."""
    for base in inspect.getmro(cls):
        said = []
        if not in_library(base):
            said = [(n, v) for n, v in vars(base).items() if n not in BOOKKEEPING or n == "__match_args__"]
            fields = vars(base).get("__dataclass_fields__", {})
            said += [(f"{name} (field)", getattr(one, "metadata", None)) for name, one in fields.items()]
        yield base, said


def mutable_bases(cls: type) -> list[type]:
    """A class and those of its bases in which anybody can replace a method."""
    return [base for base in inspect.getmro(cls) if not base.__flags__ & _IMMUTABLE]


def is_at_its_name(cls: type) -> bool:
    """Whether a class is the one that its module has under its name, as those are that live as long as the process."""
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found is cls


def guards_of(cls: type) -> _C.Guards:
    """Guards of what a class and its bases say."""
    guards = _C.Guards()
    guards.cls(cls)
    return guards


@functools.lru_cache(maxsize=1024)
def slots_of(cls: Any) -> tuple[Any, ...]:
    """The descriptors of the slots that a class and its bases declare."""
    found = [(base, one) for base in inspect.getmro(cls) if "__slots__" in vars(base) for one in vars(base).values()]
    return tuple(one for base, one in found if isinstance(one, types.MemberDescriptorType) and one.__objclass__ is base)


@functools.lru_cache(maxsize=1024)
def layout_of(cls: Any) -> type:
    """The base whose memory an object of this class has beside attributes and slots, of which C code alone knows."""
    base = cls.__base__
    if base is None:
        return cls
    slots = [one for one in vars(cls).values() if isinstance(one, types.MemberDescriptorType)]
    own = len(slots) if "__slots__" in vars(cls) else 0
    own += bool(cls.__weakrefoffset__) and not base.__weakrefoffset__
    own += bool(cls.__dictoffset__) and not base.__dictoffset__ and not cls.__flags__ & _MANAGED_DICT
    same = cls.__basicsize__ - base.__basicsize__ == 8 * own and cls.__itemsize__ == base.__itemsize__
    return layout_of(base) if same else cls


@functools.lru_cache(maxsize=4096)
def codes_within(code: types.CodeType) -> tuple[types.CodeType, ...]:
    """A piece of code and all that it holds: of the functions and classes that it makes."""
    inner: Iterator[types.CodeType] = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return (code, *(one for part in inner for one in codes_within(part)))


def operators_with(code: types.CodeType) -> Iterator[tuple[Any, str, types.FunctionType]]:
    """The operators of users with this code in their shape rules and gradients, each with an attribute, and the function there.

    Their calls are part of the graph.
    """
    for one in list(custom_ops.OPDEFS.values()):
        for name in ("_init_fn", "_abstract_fn", "_backward_fn", "_setup_context_fn"):
            function = vars(one).get(name)
            if isinstance(function, types.FunctionType) and code in codes_within(function.__code__):
                yield one, name, function
