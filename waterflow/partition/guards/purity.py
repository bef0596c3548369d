"""Judges a trace: everything that the user's code read in it must be guarded, or must not be able to change.

A fingerprint (``cache_key.py``) walks over what a step is made of, and is compared before each call. The observer
(``observer.py``) reports what the user's frames really did while the step was traced. A capture is good only if the
second lies within the first. That is decided operation by operation, and by induction over them. An object is

- *looked into*: the fingerprint has met it, and whatever can be read of it is guarded, or answers for itself;
- *unlooked*: the fingerprint has met it and could not look into it, or it was read from an unguarded place. Any use
  of it refuses the step;
- *new*: neither. The step made it, from things of the first kind: what is called is observed itself, or is known to
  return what follows from its arguments (``code_refs.py``); everything else refuses the step.

Entries of modules and of libraries' classes are read by name, and become guards of the capture (``NamedValue``).
"""

from __future__ import annotations

import abc
import builtins
import contextlib
import enum
import functools
import gc
import operator
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from torch.overrides import _get_current_function_mode_stack, _pop_mode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from waterflow import _C
from waterflow.errors import CaptureError
from waterflow.partition.capture.reasons import advised
from waterflow.partition.capture.substitution import ChangesPackage, no_collections
from waterflow.partition.guards import code_refs, reads, settings
from waterflow.partition.guards.batch_reads import StandIn, Unread, goes_to
from waterflow.partition.guards.cache_key import Fingerprint
from waterflow.partition.guards.code_refs import codes_within, in_library, is_library_code, operators_with, slots_of
from waterflow.partition.guards.guarded_places import MISSING, pairs_of, slot_value
from waterflow.partition.guards.observer import CannotObserve, Event, Kind, line_of, observing
from waterflow.partition.guards.reads import ATOMS, FIXED_MODULES, Held, NamedValue, Reads, Refused, is_atom, is_fixed, name_of
from waterflow.partition.guards.trace_writes import TraceWrites

_DESCRIPTORS = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType)
_CONTAINERS: tuple[type, ...] = (list, tuple, dict, set, frozenset, deque, type({}.keys()), type({}.values()), type({}.items()))
_Cached = type(functools.lru_cache(lambda: None))
# What reads no more of its arguments than their classes.
_OF_CLASSES = frozenset(map(id, (isinstance, issubclass, callable)))
_BY_NAME = {id(getattr): "read", id(hasattr): "read", id(setattr): "write", id(delattr): "write"}


_OF_PROCESS = frozenset(
    {"importlib._bootstrap", "importlib._bootstrap_external", "_frozen_importlib", "_frozen_importlib_external", "logging"}
)
_Rules = dict[Kind, Callable[[tuple[Any, ...]], None]]


class ClosedWorld:
    """Judges the operations of one trace, each before it happens. Made for one trace, on one thread."""

    def __init__(self, fingerprint: Fingerprint, batch: Iterable[Any] = (), batch_spec: pytree.TreeSpec | None = None) -> None:
        """``batch`` has the leaves of the batch, ``batch_spec`` its structure."""
        self.unread = Unread(fingerprint, ())
        self.reads = Reads(fingerprint, batch_spec)
        self.writes = TraceWrites(fingerprint)
        for value in batch:
            if isinstance(value, enum.Enum) and not in_library(type(value)) and fingerprint.cover(value) is None:
                self.reads.stranger(value, f"{value} of the batch")
        self._settings = {ask: ask() for ask in (settings.of_numpy, settings.of_warnings, settings.of_classes)}
        self._met: dict[int, tuple[types.CodeType, dict[str, Any]]] = {}
        self._known: set[types.CodeType] | None = None
        self._of_process: set[types.CodeType] = set()  # code of packages that ran while a module was imported, or text logged
        self._imported: set[str] = set()  # packages that the trace has imported
        self._refusal: CaptureError | None = None

    @property
    def entries(self) -> tuple[NamedValue, ...]:
        """The guards that the capture needs beside those of the fingerprint."""
        held = (Held(place, place.label, before) for place, before in self.reads.fingerprint.found)
        return *self.reads.entries.values(), *reads.entries_of(self._met), *held

    def _make_rules(self) -> _Rules:
        works = (
            Kind.ITEM, Kind.DELETE_ITEM, Kind.SLICE, Kind.NEXT, Kind.SEND, Kind.AWAIT, Kind.LENGTH, Kind.CONTAINS,
            Kind.COMPARE, Kind.BINARY, Kind.UNARY, Kind.TEST, Kind.HASH, Kind.FORMAT, Kind.LEAVE, Kind.RAISE, Kind.EXCEPT,
            Kind.INTRINSIC,
        )  # fmt: skip
        harmless = (
            Kind.CELLS, Kind.CELL, Kind.SET_NAME, Kind.DELETE_NAME, Kind.FUNCTION, Kind.BUILD_CLASS, Kind.IMPORT,
        )  # fmt: skip
        return {
            **dict.fromkeys(works, self._operates),
            **dict.fromkeys(harmless, self._harmless),
            **dict.fromkeys((Kind.DEREF, Kind.SET_DEREF, Kind.DELETE_DEREF), self.reads.variable),
            Kind.SUPER: self.reads.of_super,
            Kind.ATTRIBUTE: self.reads.attribute,
            Kind.IMPORT_FROM: self.reads.attribute,
            Kind.IDENTITY: self.reads.compared,
            Kind.SET_ATTRIBUTE: self.reads.set_attribute,
            Kind.DELETE_ATTRIBUTE: self.reads.set_attribute,
            Kind.SET_ITEM: self._stores,
            Kind.SET_SLICE: self._stores,
            Kind.GLOBAL: self.reads.named_global,
            Kind.NAME: self._name,
            Kind.SET_GLOBAL: self._set_global,
            Kind.DELETE_GLOBAL: self._set_global,
            Kind.ITERATE: self._iterates,
            Kind.UNPACK: self._iterates,
            Kind.EXTEND: self._iterates,
            Kind.CALL: self._call,
            Kind.CALL_UNPACKED: self._call_unpacked,
            Kind.WITH: self._with,
            Kind.MATCH: self._matches,
            Kind.UNKNOWN: self._unknown,
            Kind.DISPLAY: self._unknown,
        }

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Observe the user code of the block, which is to be part of the capture.

        Raises CaptureError in the place of the first operation that leaves the closed world.
        """
        dispatching, functions = len(_get_current_dispatch_mode_stack()), len(_get_current_function_mode_stack())
        try:
            rules = self._make_rules()
            with no_collections(), observing(self._begins, functools.partial(self._check, rules), rules) as seen:
                yield
        except CannotObserve as error:
            raise CaptureError(str(error)) from None
        except Refused:
            self._raise_refusal()
            raise
        finally:
            for mode in reversed(_get_current_dispatch_mode_stack()[dispatching:]):  # whose own __exit__ was refused
                TorchDispatchMode.__exit__(mode, None, None, None)
            while len(_get_current_function_mode_stack()) > functions:
                _pop_mode()
            with contextlib.suppress(UnboundLocalError):
                self._look_back(seen)
        self._raise_refusal()

    def is_observed(self, code: types.CodeType, space: dict[str, Any]) -> bool:
        """Return whether the operations of a function's frames are judged one by one.

        Frames of Python's own library and of torch are not: code that is not observed may call them, too. Calls to them
        are judged. Nor are a few libraries (``code_refs.PACKAGES``). All other packages are, installed or not.
        """
        package = code_refs.package_of(space.get("__name__"))
        if not is_library_code(code, space):
            return not package.startswith("namedtuple_")
        if package in reads.PACKAGES:
            self._met[id(code)] = code, space
        return not code_refs.is_trusted(package)

    def _begins(self, code: types.CodeType, space: dict[str, Any]) -> bool:
        # Asked before code runs for the first time in this trace: whether it is observed.
        if not self.is_observed(code, space):
            return False
        if not is_library_code(code, space):
            return True
        package, caller = code_refs.package_of(space.get("__name__")), sys._getframe(2)
        # Finders and loaders of modules, and handlers of what libraries log, are the process's, and no part of the step.
        if caller.f_code in self._of_process or caller.f_globals.get("__name__") in _OF_PROCESS:
            self._of_process.add(code)
            self._imported.update([package] if code.co_name == "<module>" else [])
            return False
        why = None
        if package in self._imported:
            why = f"imports {package} for the first time; import it before the step"
        elif gc.get_freeze_count():
            why = f"runs code of {package}, and gc.freeze() hides what that holds; call gc.unfreeze() before the step"
        if why is not None:
            self._refusal = self._refusal or ChangesPackage(f"the step {why}")
        self.reads.installed.search(package)
        return True

    def _raise_refusal(self) -> None:
        # Taken out first: its traceback refers to this object.
        refusal, self._refusal = self._refusal, None  # whose traceback leads to here
        if refusal is not None:
            raise refusal from None

    def _check(self, rules: _Rules, event: Event) -> None:
        # Runs before each operation. A refused operation does not happen; nor does any after it, in except and finally
        # clauses of the user. But what a with statement entered is left: torch's modes would else outlive the trace.
        if self._refusal is None and not self.unread.read:
            try:
                self.unread.operation(event.kind, event.operands)
                rules[event.kind](event.operands)
                return
            except Refused as why:
                self._refusal = CaptureError(advised(f"the step {why}"), line_of(event))
        if event.kind is not Kind.LEAVE:
            raise Refused

    def _look_back(self, seen: observing) -> None:
        # Judges, after the block, what cannot be judged before: the frames that were entered, and the modules that an
        # import returned.
        for event in seen.events:
            if not self.writes.alone:
                self.writes.note(event, lambda called: goes_to(called, self.is_observed))
            try:
                if event.kind is Kind.ENTER:
                    self._frame(event.code, event.operands[0])
                    self.reads.installed.entered(event.operands[0])
                elif event.kind is Kind.IMPORT:
                    self.reads.imported(event.result)
            except Refused as why:
                self._refusal = self._refusal or CaptureError(advised(f"the step {why}"), line_of(event))
        if not seen.complete:
            self._refusal = self._refusal or CaptureError(advised(f"not all that the step does could be seen: {seen.why_not}"))
        for line in seen.drop():
            self._refusal = self._refusal or CaptureError("the step runs code when it releases an object", line)

    # -- what objects are

    def _whole(self, value: Any, seen: set[int] | None = None) -> None:
        # ``value`` goes to code that is not observed, which may read and call all of it: every part must be readable.
        if type(value) in ATOMS or issubclass(type(value), StandIn):
            return
        self.reads.read(value)
        if isinstance(value, (torch.Tensor, enum.Enum)) or type(value).__module__ in FIXED_MODULES:
            return
        if isinstance(value, types.ModuleType):
            if not code_refs.is_pure_module(value.__name__):
                raise Refused(f"hands the module {value.__name__} to code that is not observed")
            return
        seen = set() if seen is None else seen
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, type):
            if in_library(value):
                self._construct(value)
        elif callable(value) and not isinstance(value, nn.Module):
            self._callee(value, (), {})
        for part in self._parts(value):
            self._whole(part, seen)

    def _parts(self, value: Any) -> Iterator[Any]:
        base = next((base for base in _CONTAINERS if isinstance(value, base)), None)
        if base is not None:
            yield from (one for pair in pairs_of(value) for one in pair) if base is dict else base.__iter__(value)  # type: ignore[attr-defined]
        # A fingerprint without opaque objects already covers the attributes of all that it met.
        made = self.reads.fingerprint.cover(value) is None
        if not isinstance(value, (type, nn.Module)) and (made or self.reads.fingerprint.opaque):
            yield from (_C.attributes_of(value) or {}).values()
            yield from (part for slot in slots_of(cast(Any, type(value))) if (part := slot_value(slot, value)) is not MISSING)

    # -- entries by name

    def _name(self, operands: tuple[Any, ...]) -> None:
        # A class body's names are the step's own.
        if "__builtins__" in operands[0] or operands[0] is vars(builtins):
            self.reads.named_global(operands)

    def _set_global(self, operands: tuple[Any, ...]) -> None:
        raise Refused(f"changes the global {operands[1]}")

    # -- operations

    def _operates(self, operands: tuple[Any, ...]) -> None:
        self.reads.looked_up(operands)
        for value in operands:
            self.reads.read(value)
            kind = type(value)
            if isinstance(value, (np.generic, np.ndarray)):
                self._depends_on(settings.of_numpy)
            if kind not in ATOMS and not is_fixed(value) and in_library(kind) and not code_refs.is_pure_class(kind):
                raise Refused(f"works on a {name_of(kind)}, which is not known to be without state")

    def _matches(self, operands: tuple[Any, ...]) -> None:
        self._depends_on(settings.of_classes)
        self._operates(operands)

    def _stores(self, operands: tuple[Any, ...]) -> None:
        self._operates(operands[:2])  # what is stored is not read

    def _iterates(self, operands: tuple[Any, ...]) -> None:
        self._operates(operands)
        for value in operands:
            if isinstance(value, (set, frozenset)) and len(value) > 1 and not all(map(is_atom, value)):
                raise Refused("iterates over a set of objects, whose order differs between processes")

    def _with(self, operands: tuple[Any, ...]) -> None:
        kind = type(operands[0])
        self.reads.read(operands[0])
        if in_library(kind) and not code_refs.is_pure_class(kind):
            raise Refused(f"enters a {name_of(kind)}, which is not known to be without state")

    def _unknown(self, operands: tuple[Any, ...]) -> None:
        raise Refused("executes an instruction that a capture does not know")

    def _harmless(self, operands: tuple[Any, ...]) -> None:
        """Names and cells that the step makes."""

    def _frame(self, code: types.CodeType, function: Any) -> None:
        # User code runs only if the fingerprint has met it, or if such code contains it. Anything else was reached by a
        # way that no guard covers.
        if self._known is None:
            self._known = {code for one in self.reads.fingerprint.functions() for code in codes_within(one.__code__)}
        if code.co_name == "<module>":  # a module that is imported for the first time, or text that a library executes
            self._known.update(codes_within(code))
        elif code not in self._known and not in_library(function):
            found = list(operators_with(code))
            if not found:
                raise Refused(f"runs {code.co_qualname}, which it reaches in a way that a capture does not see")
            for one in found:
                self.reads.of_operator(*one)

    # -- calls

    def _call(self, operands: tuple[Any, ...]) -> None:
        called, given, names = operands
        self._judge_call(called, given[: len(given) - len(names)], dict(zip(names, given[len(given) - len(names) :])))

    def _call_unpacked(self, operands: tuple[Any, ...]) -> None:
        called, given, named = operands[0], operands[1], operands[2] or {}
        self._iterates((given,))
        self.reads.read(named)
        given = (*operands[3:], *given) if type(given) in (tuple, list) else (*operands[3:], given)
        self._judge_call(called, given, named if type(named) is dict else {"": named})

    def _judge_call(self, called: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self.unread.call(called, (*given, *named.values()), self.is_observed)
        by_name = _BY_NAME.get(id(called))
        if by_name is not None and len(given) >= 2 and type(given[1]) is str:
            rule = self.reads.attribute if by_name == "read" else self.reads.set_attribute
            rule(given)
            return
        self._callee(called, given, named)

    def _callee(self, called: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        # Wrappers (methods, partials) are taken apart until the code that runs is known.
        if self._asks(called, given, named):
            return
        if isinstance(called, types.FunctionType):
            self._function(called, given, named)
        elif isinstance(called, types.MethodType):
            self._callee(called.__func__, (called.__self__, *given), named)
        elif isinstance(called, functools.partial):
            self.reads.read(called)
            self._callee(called.func, (*called.args, *given), {**called.keywords, **named})
        elif isinstance(called, types.BuiltinFunctionType):
            self._builtin(called, given, named)
        elif isinstance(called, _DESCRIPTORS):
            if not code_refs.is_pure_class(called.__objclass__) or called.__name__ in code_refs.OF_TENSORS:
                raise Refused(f"calls {called.__qualname__}, which is not known to depend on its arguments alone")
            self.reads.looked_up(given)
            self._all_whole(given, named)
        elif isinstance(called, types.MethodWrapperType):
            self.reads.looked_up((called.__self__, *given))
            self._all_whole((called.__self__, *given), named)
        elif called is type and len(given) == 1:
            if isinstance(given[0], torch.Tensor):
                raise Refused("asks for the class of a tensor, which differs in a trace")
        elif isinstance(called, type):
            self._construct(called)
            self._all_whole(given, named) if in_library(called) else None
        else:
            self._object(called, given, named)

    def _asks(self, called: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> bool:
        # A call that does nothing but read a setting of the process becomes a guard of the capture, which asks again.
        package = code_refs.package_of(code_refs.module_of(called))
        if package in ("numpy", "warnings", "_warnings"):
            self._depends_on(settings.of_numpy if package == "numpy" else settings.of_warnings)
        ask = settings.asks(called, package, given, named, ATOMS)
        said = None if ask is None else ask()
        if ask is not None and is_atom(said):
            self.reads.setting(ask, f"{name_of(called)}{given}{named}", said)
            return True
        return False

    def _depends_on(self, ask: settings.Ask) -> None:
        self.reads.setting(ask, ask.__name__, self._settings[ask])  # type: ignore[attr-defined]

    def _all_whole(self, given: Iterable[Any], named: Mapping[str, Any]) -> None:
        for value in (*given, *named.values()):
            self._whole(value)

    def _function(self, called: types.FunctionType, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        self.reads.read(called)
        if self.is_observed(called.__code__, called.__globals__):
            return
        if given:
            # Library code is judged by its call alone: random draws and changes of mode must be caught here.
            reads.check_generator(given[0], called.__name__)
            reads.check_mode(called.__name__, *given[:2], *named.values())
        if not code_refs.is_trusted(code_refs.package_of(called.__module__)):  # one that a package has wrapped
            self.reads.wrapped(called)
        if not code_refs.is_pure_module(called.__globals__.get("__name__")):
            raise Refused(f"calls {called.__module__}.{called.__qualname__}, which is not known to be without state")
        if called.__name__ in code_refs.OF_TORCH and code_refs.package_of(called.__module__) == "torch":
            raise Refused(f"calls torch's {called.__name__}, which reads or changes the process")
        self._all_whole(given, named)

    def _builtin(self, called: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if id(called) in _OF_CLASSES:
            if called is not callable and len(given) == 2:
                self._classes(given[1])
            return
        owner = called.__self__
        if isinstance(owner, type) and issubclass(owner, torch.autograd.Function):
            given = (owner, *given)  # where ``apply`` finds the user's code; before torch 2.15 it was no builtin
        if owner is None or isinstance(owner, (types.ModuleType, type)):
            if not (code_refs.is_pure_function(called) or (isinstance(owner, type) and code_refs.is_pure_class(owner))):
                raise Refused(f"calls {name_of(called)}, which is not known to depend on its arguments alone")
            (self.reads.compared if called in (operator.is_, operator.is_not) else self.reads.looked_up)(given)
        else:
            self.reads.read(owner)
            reads.check_generator(owner, called.__name__)
            if not code_refs.is_pure_method(owner, called.__name__):
                what = name_of(type(owner))
                raise Refused(f"calls {called.__name__} of a {what}, which is not known to be without state")
            self.reads.looked_up((owner, *given))
            given = (*given, owner) if code_refs.walks_over(owner, called.__name__) else given
        # These walk over their first argument, as a for loop does.
        if called is iter or called is next or called is sorted:
            self._iterates(given[:1])
        self._all_whole(given, named)

    def _classes(self, classes: Any) -> None:
        # An abstract class answers by a registry, which the process may change.
        for one in classes if type(classes) is tuple else getattr(classes, "__args__", (classes,)):
            if isinstance(one, abc.ABCMeta):
                self._depends_on(settings.of_classes)

    def _construct(self, cls: type) -> None:
        self.reads.read(cls)
        base = next(base for base in cls.__mro__ if in_library(base))
        if base is not object and not code_refs.is_pure_class(base):
            raise Refused(f"makes a {cls.__module__}.{cls.__qualname__}, which is not known to be without state")

    def _object(self, called: Any, given: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        kind = type(called)
        if not isinstance(called, _Cached):
            self.reads.read(called)
        if isinstance(called, _Cached) and not code_refs.is_pure_module(called.__module__):
            raise Refused(f"calls {name_of(called)}, which keeps its results (a cache)")
        if kind.__name__ == "cython_function_or_method" and given:  # as NumPy's methods are
            reads.check_generator(given[0], called.__name__)
        if isinstance(called, operator.methodcaller):
            raise Refused("calls an operator.methodcaller, whose method cannot be seen")
        if isinstance(called, nn.Module):
            self._all_whole(given, named)
            return
        if in_library(kind):
            if not isinstance(called, _Cached) and not code_refs.is_pure_class(kind):
                raise Refused(f"calls a {kind.__module__}.{kind.__qualname__}, which is not known to be without state")
            self._all_whole(given, named)
