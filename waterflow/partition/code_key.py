"""What code refers to: the globals that a function reads, the attributes of a class, and whose code it is."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from typing import Any

from waterflow.partition.libraries import is_library

# Class attributes that no forward pass computes with.
BOOKKEEPING = frozenset({
    "__module__", "__dict__", "__weakref__", "__doc__", "__qualname__", "__annotations__", "__annotate__",
    "__annotate_func__", "__annotations_cache__", "__firstlineno__", "__static_attributes__", "__parameters__",
    "__orig_bases__", "__abstractmethods__", "_abc_impl", "__dataclass_fields__", "__dataclass_params__",
    "__match_args__", "__slots__",
})  # fmt: skip
_GLOBAL_LOADS = frozenset({"LOAD_GLOBAL", "LOAD_NAME"})
_ATTRIBUTE_LOADS = frozenset({"LOAD_ATTR", "LOAD_METHOD"})


def in_library(value: Any) -> bool:
    """Whether a class, function or module belongs to a library, whose code does not change while a process runs."""
    if isinstance(value, types.ModuleType):
        name: Any = value.__name__
    elif isinstance(value, (type, types.FunctionType)):
        name = value.__module__
    else:
        return False
    return isinstance(name, str) and is_library(name.partition(".")[0])


@functools.lru_cache(maxsize=4096)
def global_reads(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """The globals that code reads, each with the attributes read of it: ``settings.scale`` is ("settings", "scale")."""
    reads: set[tuple[str, ...]] = set()
    path: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        if instruction.opname in _GLOBAL_LOADS:
            reads.add(path)
            path = (str(instruction.argval),)
        elif instruction.opname in _ATTRIBUTE_LOADS and path:
            path = (*path, str(instruction.argval))
        elif instruction.opname not in ("CACHE", "PRECALL", "EXTENDED_ARG", "NOP", "PUSH_NULL"):
            reads.add(path)
            path = ()
    reads.add(path)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            reads.update(global_reads(constant))
    return tuple(sorted(reads - {()}))


def class_attributes(cls: type) -> list[tuple[str, Any]]:
    """What a user's class, and those of its bases that no library defines, say: methods, properties, values."""
    return [
        (name, value)
        for base in inspect.getmro(cls)
        if not in_library(base)
        for name, value in vars(base).items()
        if name not in BOOKKEEPING
    ]


def library_base(cls: type) -> type:
    """The first base of a user's class that a library defines; ``object`` at the latest."""
    return next(base for base in inspect.getmro(cls) if in_library(base))


@functools.lru_cache(maxsize=1024)
def slots_of(cls: Any) -> tuple[str, ...]:
    """The slots that a class and its bases declare."""
    names: list[str] = []
    for base in inspect.getmro(cls):
        slots = vars(base).get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
