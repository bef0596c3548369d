"""Looks into what installed packages hold, while a step is traced that runs their code.

A package that is installed, a laboratory's own or anybody's, is judged as the user's code is. But it is not walked before
the trace, for it may refer to half of the process. Its closures, default arguments, and what its modules and classes keep
under names are *held* at first; the fingerprint looks into such an object when the step uses it. Until then nobody has
changed it, as each change is a use.
"""

from __future__ import annotations

import functools
import gc
import itertools
import types
from collections.abc import Callable, Collection, Hashable
from typing import Any

from waterflow.errors import CaptureError
from waterflow.partition.guards.cache_key import Fingerprint
from waterflow.partition.guards.code_refs import is_library_code, is_trusted, package_of
from waterflow.partition.guards.guarded_places import GuardedPlace

BOUND = (types.MethodType, types.BuiltinFunctionType, types.MethodWrapperType)


class Installed:
    """Finds and guards what installed packages hold, for one trace.

    ``held`` are objects, and ``cells`` variables of closures, by ``id``, which the step has not used yet. ``before`` has
    what is put back after the trace.
    """

    def __init__(self, fingerprint: Fingerprint, atoms: Collection[type]) -> None:
        self._atoms = atoms  # types of what never changes
        self.before: list[tuple[GuardedPlace, Any]] = []
        self._fingerprint = fingerprint
        self.held: dict[int, tuple[str, Any]] = {}
        self.cells: dict[int, tuple[str, types.CellType]] = {}
        self._functions: dict[int, types.FunctionType] = {}
        self._entered: set[int] = set()
        self._searched: set[str] = set()
        self._known: dict[str, list[types.FunctionType]] | None = None

    def search(self, package: str) -> None:
        """Find what the functions of a package hold, before its code first runs."""
        if package in self._searched:
            return
        self._searched.add(package)
        if self._known is None:
            self._known = _functions()
        guarded = {id(place.container) for place in self._fingerprint.guarded_places if place.kind == "cell"}
        for function in self._known.get(package, ()):
            if not is_library_code(function.__code__, function.__globals__):
                continue
            self._functions[id(function)] = function
            for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
                if id(cell) not in guarded:
                    self.cells[id(cell)] = f"{function.__qualname__}.{name}", cell
            for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
                self.hold(value, f"a default argument of {function.__module__}.{function.__qualname__}")

    def hold(self, value: Any, label: str) -> None:
        """Note an object that an installed package keeps in a place with this name; of a bound method, what it is bound to."""
        if isinstance(value, BOUND):
            self.hold(getattr(value, "__func__", None), label)
            self.hold(value.__self__, label)
        elif (
            type(value) not in self._atoms and not isinstance(value, types.ModuleType) and self._fingerprint.cover(value) is None
        ):
            self.held[id(value)] = label, value

    def use(self, value: Any) -> None:
        """Look into what is held: the step is about to use it. Raises CaptureError where that is not possible."""
        label, _ = self.held.pop(id(value))
        self._look(label, functools.partial(self._fingerprint.entry, label, value))

    def variable(self, cell: Any) -> None:
        """Look into one of ``cells``, as ``use`` does into an object."""
        label, _ = self.cells.pop(id(cell))
        self._look(label, functools.partial(self._fingerprint.cell, label, cell))

    def is_there(self, function: types.FunctionType) -> bool:
        """Return whether a function is an installed package's, and was there before the trace."""
        return id(function) in self._functions

    def entered(self, function: types.FunctionType) -> None:
        """Guard code and defaults of a function that the step has run."""
        if id(function) in self._functions and id(function) not in self._entered:
            self._entered.add(id(function))
            self._guard([GuardedPlace(function, "function", label=function.__qualname__)])

    def forget(self) -> None:
        """Let go of the objects of the trace."""
        for found in (self.held, self.cells, self._functions, self.before):
            found.clear()
        self._known = None

    def _look(self, label: str, walk: Callable[[], Hashable]) -> None:
        one = self._fingerprint
        first, others = len(one.guarded_places), (len(one.external_tensors), len(one.generators))
        try:
            walk()
        except RecursionError:
            raise CaptureError(f"{label} is nested too deeply for a key") from None
        if (len(one.external_tensors), len(one.generators)) != others:
            raise CaptureError(f"{label} holds tensors or random numbers; make them a module's, or pass them to the function")
        self._guard(one.guarded_places[first:])

    def _guard(self, places: list[GuardedPlace]) -> None:
        found = [(place, place.contents()) for place in places]
        self._fingerprint.found += found
        self.before += [(place, contents) for place, contents in found if place.kept]


def _functions() -> dict[str, list[types.FunctionType]]:
    # By package, without those of trusted libraries. Of the youngest objects all were made by the trace, which began with
    # a collection (``leaks.py``).
    objects = itertools.chain(gc.get_objects(generation=1), gc.get_objects(generation=2))
    found: dict[str, list[types.FunctionType]] = {}
    lists: dict[int, list[types.FunctionType]] = {}  # by the globals of functions
    for function in [one for one in objects if type(one) is types.FunctionType]:
        known = lists.get(id(function.__globals__))
        if known is None:
            package = package_of(function.__globals__.get("__name__"))
            known = [] if is_trusted(package) else found.setdefault(package, [])
            lists[id(function.__globals__)] = known
        known.append(function)
    return found
