"""Judges what a step's code reads by name, attributes and entries of modules and classes, and guards what it may read.

Part of the judgement of a trace (``purity.py``).
"""

from __future__ import annotations

import enum
import inspect
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.torch_version import TorchVersion
from torch.utils import _pytree as pytree

from waterflow import _C
from waterflow.errors import CaptureError
from waterflow.partition.guards import code_refs
from waterflow.partition.guards.cache_key import Fingerprint
from waterflow.partition.guards.code_refs import in_library, is_installed, is_installed_space, package_of
from waterflow.partition.guards.guarded_places import exact, pairs_of
from waterflow.partition.guards.installed import BOUND, Installed
from waterflow.partition.guards.settings import Ask, same

ATOMS = frozenset({
    type(None), bool, int, float, complex, str, bytes, type(Ellipsis), type(NotImplemented), range, slice, types.CodeType,
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo,
})  # fmt: skip
FIXED_MODULES = ("torch._ops", "torch._library.custom_ops", "typing", "re")  # objects of their classes do not change
_FIXED = (types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType,
          types.MethodWrapperType, types.ModuleType, np.ufunc, np.dtype, np.generic, TorchVersion)  # fmt: skip
# From these a program comes to things that no path leads to.
_WAYS_OUT = frozenset({
    "__globals__", "__builtins__", "gi_frame", "cr_frame", "ag_frame", "tb_frame", "tb_next", "f_globals", "f_locals", "f_back",
    "f_builtins", "__subclasses__", "__traceback__",
})  # fmt: skip
_TENSOR_SECRETS = frozenset(
    {"_version", "data_ptr", "_cdata", "_backward_hooks", "_post_accumulate_grad_hooks", "_base", "__class__", "output_nr"}
)
# What no key holds of the user's functions and classes.
_SAID_NOWHERE = frozenset(
    {"__doc__", "__annotations__", "__module__", "__type_params__", "__abstractmethods__", "__orig_bases__"}
)
# Stand-ins have no gradient history.
_HISTORY = frozenset({"grad", "_grad", "grad_fn", "is_leaf", "retains_grad"})
# What looks up nothing, but in what it belongs to; functions are judged when they are called.
_METHODS = (types.FunctionType, property, staticmethod, classmethod, types.MemberDescriptorType, types.GetSetDescriptorType)
_HEAP_TYPE = 1 << 9  # of a class's flags (Py_TPFLAGS_HEAPTYPE): others cannot be changed from Python
_NOTHING = object()
_SHARED = {
    id(random._inst): "Python's random numbers",  # type: ignore[attr-defined]
    id(np.random.mtrand._rand): "NumPy's random numbers",  # type: ignore[attr-defined]
}


@dataclass(frozen=True)
class NamedValue:
    """An entry of a module or of a library's class that a capture has read; the capture serves only while it is unchanged."""

    container: Any
    name: str
    value: Any

    def holds(self) -> bool:
        """Return whether the entry has the same value now."""
        # By identity, and constants by their bits: numbers that are computed anew are other objects.
        now = vars(self.container).get(self.name, _NOTHING) if isinstance(self.container, type) else self._now()
        return now is self.value or (is_atom(now) and bool(exact(now) == exact(self.value)))

    def _now(self) -> Any:
        return self.container.get(self.name, _NOTHING)


@dataclass(frozen=True)
class Setting(NamedValue):
    """The value that ``container``, a function without arguments, returned when the step was traced."""

    def holds(self) -> bool:
        """Return whether the function returns the same now."""
        return same(self.container(), self.value)


@dataclass(frozen=True)
class Held(NamedValue):
    """A place of an installed package, ``container``, that the step has used; ``value`` is what was there."""

    def holds(self) -> bool:
        """Return whether the same is there now."""
        return bool(self.container.holds(self.value))


# A BaseException: the user's code must not catch it with ``except Exception`` and go on.
class Refused(BaseException):
    """An operation leaves the closed world; the message continues "the step ..."."""


class Reads:
    """Judges reads, for one trace. ``entries`` are guards that the capture needs beside those of the fingerprint."""

    def __init__(self, fingerprint: Fingerprint, batch_spec: pytree.TreeSpec | None = None) -> None:
        self.fingerprint = fingerprint
        self._given = frozenset() if batch_spec is None else frozenset(classes_of(batch_spec))
        self.entries: dict[tuple[int, str], NamedValue] = {}
        self.stand_ins: frozenset[int] = frozenset()  # by id, of the tensors that the step is given
        self.shown: Mapping[int, torch.Tensor] = {}  # the stand-ins of the step's own tensors, by their ids
        self.batch: dict[int, bool] = {}  # what the batch consists of, by id; whether the key tells it from the rest
        self._unlooked: dict[int, str] = {}
        self.installed = Installed(fingerprint, ATOMS)
        self.alive: list[Any] = []

    def read(self, value: Any) -> None:
        """Judge an operation that looks into ``value``. Raises Refused where no guard covers what it may find."""
        if type(value) in ATOMS:
            return
        if id(value) in self.installed.held:
            self._look(self.installed.use, value)
        label = self._unlooked.get(id(value))
        if label is None and not is_fixed(value) and self.fingerprint.cover(value) == "identity":
            label = " ".join(filter(None, (self.fingerprint.opaque.get(id(value)), f"({name_of(value)})")))
        if label is not None:
            raise Refused(f"reads {label}, into which a capture cannot look")

    def variable(self, operands: tuple[Any, ...]) -> None:
        """Judge a use of a variable of an outer function; ``operands`` begin with its cell."""
        if id(operands[0]) in self.installed.cells:
            self._look(self.installed.variable, operands[0])

    def wrapped(self, function: types.FunctionType) -> None:
        """Judge a call of a library's function that has the name of another package's: what it wraps belongs to that package."""
        self.installed.hold(function, name_of(function))
        self.read(function)

    def _look(self, use: Callable[[Any], None], value: Any) -> None:
        try:
            use(value)
        except CaptureError as error:
            raise Refused(f"uses what a package holds: {error}") from None

    def give(self, batch: Any, shown: Mapping[int, torch.Tensor], stand_ins: Iterable[torch.Tensor]) -> None:
        """Take over what the step is given in this trace.

        ``shown`` maps the ``id`` of each of the step's own tensors to its stand-in; ``stand_ins`` are all stand-ins.
        """
        parts: list[Any] = []
        # append returns None, so tree_flatten goes on into every part, and hands over the containers, too.
        pytree.tree_flatten(batch, is_leaf=parts.append)  # type: ignore[arg-type]
        alone = (enum.Enum, bool, type(None), type, torch.dtype)
        self.batch = {id(one): isinstance(one, torch.Tensor) for one in parts if not isinstance(one, alone)}
        self.shown, self.stand_ins = shown, frozenset(map(id, stand_ins))
        self.alive += parts

    def compared(self, operands: tuple[Any, ...]) -> None:
        """Judge ``left is right``. Raises Refused unless the answer is the same for real tensors, and in each step."""
        # A batch consists of other objects in each step, so only its tensors may be compared, with each other.
        known = [self.batch.get(id(one)) for one in operands]
        real = [self.shown.get(id(one), one) for one in operands]
        if known not in ([True, True], [None, None]) or (operands[0] is operands[1]) is not (real[0] is real[1]):
            why = "let the batch say by a number what is asked"
            raise Refused(f"asks which object a part of its batch or a tensor is; {why}")

    def forget(self) -> None:
        """Let go of what the trace has met."""
        self.alive.clear()
        self.installed.forget()

    def looked_up(self, operands: tuple[Any, ...]) -> None:
        """Judge a lookup of keys, ``operands[1:]``, in a container, ``operands[0]``.

        Raises Refused for a tensor as a key: dicts and sets find tensors by identity, and a stand-in is another object.
        """
        keyed = any(id(key) in self.stand_ins for key in operands[1:]) and isinstance(operands[0], (dict, set, frozenset))
        if keyed and self.fingerprint.cover(operands[0]) is not None:
            raise Refused("looks up a tensor in a dict or set, which finds it by its identity; use a name for it")

    def stranger(self, value: Any, label: str) -> None:
        """Refuse any later use of ``value``, which lay in a place that no guard covers."""
        self._unlooked[id(value)] = label
        self.alive.append(value)

    def _entry(self, container: Any, name: str, value: Any, label: str, installed: bool) -> None:
        # Guards an entry that was read of a module, or of a library's function. The guard compares identity, so a value
        # that can change in place must not be used, or is looked into then.
        if isinstance(container, dict) and self.fingerprint.cover(container, name) is not None:
            return
        if (id(container), name) not in self.entries:
            self.entries[id(container), name] = NamedValue(container, name, value)
        if installed and isinstance(value, BOUND):
            self.installed.hold(value, label)
        elif not self._is_constant(value):
            (self.installed.hold if installed else self.stranger)(value, label)

    def _is_constant(self, value: Any) -> bool:
        if is_fixed(value) or is_atom(value) or self.fingerprint.cover(value) == "whole":
            return True
        return isinstance(value, (type, types.FunctionType)) and in_library(value)

    def of_operator(self, operator: Any, name: str, function: types.FunctionType) -> None:
        """Guard a gradient or shape rule of a user's operator that has run. Raises Refused if it closes over values."""
        given = *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()
        if function.__closure__ or not all(map(is_atom, given)):
            raise Refused(
                f"runs {function.__qualname__} of a registered operator, which holds values that no key has; "
                "pass them to the operator as arguments"
            )
        self.entries[id(vars(operator)), name] = NamedValue(vars(operator), name, function)

    def setting(self, ask: Ask, label: str, value: Any) -> None:
        """Guard the setting of the process that ``ask`` returns, ``value``: the step's code may depend on it."""
        self.entries.setdefault((hash(label), label), Setting(ask, label, value))

    def named_global(self, operands: tuple[Any, ...]) -> None:
        """Guard a global or a builtin name that was read; ``operands`` are the dict that has it, and the name."""
        space, name = operands
        if name in space:
            self._entry(space, name, space[name], f"the global {name}", is_installed_space(space))

    def imported(self, module: Any) -> None:
        """Guard the identity of a module that the step imported."""
        if isinstance(module, types.ModuleType) and sys.modules.get(module.__name__) is module:
            entry = NamedValue(sys.modules, module.__name__, module)
            self.entries.setdefault((id(sys.modules), module.__name__), entry)

    def attribute(self, operands: tuple[Any, ...]) -> None:
        """Judge a read of an attribute; ``operands`` begin with the owner and the name.

        User code that computes the attribute (a property) is observed, and judged by itself.
        """
        owner, name = operands[:2]
        if isinstance(owner, types.ModuleType):
            self._of_module(owner, name)
            return
        self.read(owner)
        if name in _WAYS_OUT:
            raise Refused(f"reads {name}, from which everything else can be reached")
        if name in ("__dict__", "__annotations__") and isinstance(owner, (type, types.FunctionType)) and is_installed(owner):
            raise Refused(f"reads {name} of {name_of(owner)}, which no key holds")
        if name in _SAID_NOWHERE and isinstance(owner, (type, types.FunctionType)) and not in_library(owner):
            raise Refused(f"reads {name} of {name_of(owner)}, which no key holds")
        if type(owner) is super and (cls := getattr(owner, "__self_class__", None)) is not None:
            self._of_installed(cls.__mro__[cls.__mro__.index(getattr(owner, "__thisclass__")) + 1 :], name)  # noqa: B009
        elif isinstance(owner, type):
            self._of_class(owner, name, read=True)
            self._of_installed(inspect.getmro(type(owner)), name)
        elif isinstance(owner, types.CellType):
            self.variable(operands)
        elif isinstance(owner, types.FunctionType):
            installed = is_installed(owner)
            there = self._is_there(owner) if installed else in_library(owner)
            if there and name in vars(owner):
                self._entry(vars(owner), name, vars(owner)[name], f"{name_of(owner)}.{name}", installed)
        elif isinstance(owner, torch.Tensor) and (name in _TENSOR_SECRETS or (name in _HISTORY and id(owner) in self.stand_ins)):
            raise Refused(f"reads a tensor's {name}, which a trace does not have")
        elif not isinstance(owner, torch.Tensor) and type(owner) not in code_refs.TYPES:
            self._of_class(type(owner), name, read=False)

    def of_super(self, operands: tuple[Any, ...]) -> None:
        """Judge ``super().name``; ``operands`` are the object or class, the name, and the class whose bases are meant."""
        owner, name, below = operands[:3]
        self.read(owner)
        self.attribute((super(below, owner), name))

    def _is_there(self, function: types.FunctionType) -> bool:
        self.installed.search(package_of(function.__globals__.get("__name__")))
        return self.installed.is_there(function)

    def _of_module(self, module: types.ModuleType, name: str) -> None:
        label = f"{module.__name__}.{name}"
        space = vars(module)
        if name in space:
            self._entry(space, name, space[name], label, is_installed_space(space))
        elif type(module) is types.ModuleType and not hasattr(module, name):
            self.entries.setdefault((id(space), name), NamedValue(space, name, _NOTHING))
        elif name != "*" and not _is_lazy(module):
            raise Refused(f"reads {label}, which that module computes")

    def _of_class(self, cls: type, name: str, read: bool) -> None:
        # Entries of library classes are guarded by name; the fingerprint has looked into a user's class as a whole.
        for base in cls.__mro__:
            if name in vars(base):
                value = vars(base)[name]
                seen = isinstance(value, property) and isinstance(value.fget, types.FunctionType) and is_installed(value.fget)
                if in_library(base) and isinstance(value, property) and not seen and not code_refs.is_pure_class(base):
                    raise Refused(f"reads {name} of a {base.__module__}.{base.__qualname__}, which computes it")
                known = in_library(base) or base in self._given
                if known and self.fingerprint.cover(base) != "whole" and base.__flags__ & _HEAP_TYPE:
                    if is_installed(base):
                        self._of_installed((base,), name)
                        return
                    self.entries.setdefault((id(base), name), NamedValue(base, name, value))
                    shown = read or base in self._given
                    if shown and not self._is_constant(value) and not hasattr(type(value), "__get__"):
                        self.stranger(value, f"{base.__qualname__}.{name}")
                return

    def _of_installed(self, bases: Iterable[type], name: str) -> None:
        # What computes an attribute is called by Python itself, which nobody sees; so it is looked into at once.
        base = next((one for one in bases if name in vars(one)), None)
        if base is None or not is_installed(base):
            return
        value = vars(base)[name]
        self.entries.setdefault((id(base), name), NamedValue(base, name, value))
        if not isinstance(value, _METHODS):
            self.installed.hold(value, f"{base.__module__}.{base.__qualname__}.{name}")
            if hasattr(type(value), "__get__"):
                self.read(value)

    def set_attribute(self, operands: tuple[Any, ...]) -> None:
        """Judge a write or a deletion of an attribute; ``operands`` begin with the owner and the name.

        Changes of objects that the fingerprint covers are put back after the trace, and reported by ``undisturbed``.
        Raises Refused for all that would not be.
        """
        owner, name = operands[0], operands[1]
        if isinstance(owner, types.ModuleType) or (isinstance(owner, type) and in_library(owner)):
            raise Refused(f"changes {name_of(owner)}.{name}")
        unmet = isinstance(owner, types.FunctionType) and is_installed(owner) and self.fingerprint.cover(owner) is None
        if unmet and self._is_there(owner):
            raise Refused(f"changes {name_of(owner)}.{name}")
        if isinstance(owner, types.CellType):
            self.variable(operands)
        self.read(owner)
        # The mode of a shared part is not put back: an equal job on another thread may have set it.
        if name == "training" and isinstance(owner, nn.Module):
            value = operands[2] if len(operands) > 2 else None
            if not (isinstance(value, bool) and value is owner.training):
                raise Refused("sets the mode of a module (training)")


def classes_of(spec: pytree.TreeSpec) -> Iterator[type]:
    """Yield the classes in the structure of a batch."""
    yield from (one for one in (spec.type, spec.context) if isinstance(one, type))
    for child in spec.children():
        yield from classes_of(child)


def is_atom(value: Any) -> bool:
    """Return whether a value is of a type whose objects never change."""
    return type(value) in ATOMS


def _is_lazy(module: types.ModuleType) -> bool:
    # Such a module finds a name at its first use, and returns the same object from then on (PEP 562).
    if type(module) is types.ModuleType:
        return "__getattr__" in vars(module) and code_refs.is_pure_module(module.__name__)
    return type(module).__module__ in ("torch._ops", "torch._classes", "transformers.utils.import_utils")


def is_fixed(value: Any) -> bool:
    """Return whether an object has nothing that can change."""
    if isinstance(value, enum.Enum):  # a user's may have attributes
        return in_library(type(value)) and not is_installed(type(value))
    return isinstance(value, _FIXED) or type(value).__module__ in FIXED_MODULES


def name_of(value: Any) -> str:
    """Return the name of an object for a message."""
    if isinstance(value, types.ModuleType):
        return value.__name__
    name = getattr(value, "__qualname__", None)
    if isinstance(name, str):
        module = getattr(value, "__module__", None)
        return f"{module}.{name}" if isinstance(module, str) and module != "builtins" else name
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def check_mode(method: str, owner: Any, mode: Any = True, *_: Any) -> None:
    """Raise Refused for a call of ``train`` or ``eval`` that would change the mode of a module."""
    modules = owner.modules() if method in ("train", "eval") and isinstance(owner, nn.Module) else ()
    if any(one.training is not (bool(mode) and method == "train") for one in modules):
        raise Refused("sets the mode of a module (training)")


def check_generator(owner: Any, method: str) -> None:
    """Raise Refused for a method of a random number generator that is not torch's."""
    if isinstance(owner, (random.Random, np.random.RandomState, np.random.Generator)):
        raise Refused(f"draws from {_SHARED.get(id(owner), 'random numbers of its own')} ({method})")


PACKAGES = frozenset({"torchvision", "torchaudio", "timm", "transformers", "diffusers", "peft", "einops", "opt_einsum"})
_CHANGING = (int, float, torch.Tensor)  # counters, and what is cached
_MOST_ENTRIES = 1000
_SUBSTITUTED = "is_fake_tensor"  # while any thread traces (as_in_eager), which all threads see: no change of the step's

Met = Mapping[int, tuple[types.CodeType, dict[str, Any]]]  # code that was run, by its id, with its globals


@dataclass(frozen=True)
class Table(NamedValue):
    """A dict of functions or classes that code looks up by name; ``value`` has its pairs."""

    def holds(self) -> bool:
        """Return whether the dict has the same pairs, in the same order."""
        now = pairs_of(self.container)
        return len(now) == len(self.value) and all(a is c and b is d for (a, b), (c, d) in zip(now, self.value))


def entries_of(met: Met) -> Iterator[NamedValue]:
    """Yield guards of the module entries, and of the tables in them, that the code in ``met`` can have found by name."""
    found: dict[tuple[int, str], NamedValue] = {}
    for code, space in met.values():
        # This code ran unobserved, so every name in it counts as read.
        for place in _places(code, space):
            for name in code.co_names:
                value = place.get(name)
                if name in place and name != _SUBSTITUTED and (type(value) is bool or not isinstance(value, _CHANGING)):
                    found[id(place), name] = NamedValue(place, name, value)
                    found.update(((id(one), ""), Table(one, "", pairs_of(one))) for one in _tables_in(value))
    yield from found.values()


def _places(code: types.CodeType, space: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield space
    for name in code.co_names:
        held = space.get(name, sys.modules.get(name))
        if isinstance(held, types.ModuleType) and package_of(held.__name__) in PACKAGES:
            yield vars(held)


def _tables_in(value: Any) -> Iterator[dict[Any, Any]]:
    # A registry keeps its tables in attributes of itself, or of its class.
    found: Iterable[Any] = [value]
    if package_of(type(value).__module__) in PACKAGES:
        said = [_C.attributes_of(value) or {}, *map(vars, type(value).__mro__)]
        found = [one for body in said for one in [*body.values()]]
    yield from (one for one in found if type(one) is dict and len(one) <= _MOST_ENTRIES and _has_names(one))


def _has_names(table: dict[Any, Any]) -> bool:
    # Caches have other keys, and change all the time.
    return all(type(key) is str and callable(entry) for key, entry in pairs_of(table))
