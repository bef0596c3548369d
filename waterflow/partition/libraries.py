"""Whose code something is: told by the file that it comes from and what is installed there, not by the names that it goes by."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
import importlib.util
import os
import site
import sys
import sysconfig
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any


@functools.lru_cache(maxsize=8192)
def is_library_file(file: str) -> bool:
    """Whether a file is Python's own, torch's, or belongs to an installed distribution.

    A distribution's record lies beside its packages, in whatever folder. A project that is installed in editable mode has its
    packages elsewhere: it is its user's own code, as is a copy of a library that lies in a source tree.
    """
    folder, name = os.path.split(os.path.realpath(file))
    while folder != os.path.dirname(folder):
        if folder in _library_folders() or name.partition(".")[0] in _recorded(folder):
            return True
        folder, name = os.path.split(folder)
    return False


@functools.lru_cache(maxsize=8192)
def is_torchs_file(file: str) -> bool:
    """Whether a file lies in torch's own folder."""
    return Path(_torchs_folder()) in Path(os.path.realpath(file)).parents


def is_library_module(name: str) -> bool:
    """Whether the module of this full name is a library's. One that has no file is a part of its package."""
    module = sys.modules.get(name)
    if isinstance(module, types.ModuleType):
        return is_library_space(vars(module))
    return "." in name and is_library_module(name.rpartition(".")[0])


def is_library_space(space: Mapping[str, Any]) -> bool:
    """The same of a module's globals."""
    name, file = space.get("__name__"), space.get("__file__")
    if not isinstance(name, str) or name == "__main__":
        return False
    if isinstance(file, str):
        return is_library_file(file)
    if getattr(sys.modules.get(name), "__dict__", None) is not space:
        return False
    return name in sys.stdlib_module_names or ("." in name and is_library_module(name.rpartition(".")[0]))


def is_library_code(code: types.CodeType, space: Mapping[str, Any]) -> bool:
    """Whether code that runs with these globals is a library's. Without a file of its own it is of the module that it runs in."""
    file = code.co_filename
    return is_library_file(file) if os.path.isabs(file) else is_library_space(space)


def is_library_function(function: types.FunctionType) -> bool:
    """Whether a function is a library's, with all that it wraps."""
    return all(is_library_code(one.__code__, one.__globals__) for one in _wrapped_in(function))


def is_torchs_function(function: Any) -> bool:
    """Whether a function is torch's own, with all that it wraps."""
    found = _wrapped_in(function) if isinstance(function, types.FunctionType) else ()
    return bool(found) and all(is_torchs_file(str(one.__globals__.get("__file__"))) for one in found)


def is_library_class(cls: type) -> bool:
    """Whether a class is a library's: anybody can replace a method of it, but nobody all of them."""
    if not isinstance(cls.__module__, str) or not is_library_module(cls.__module__):
        return False
    own = [one for one in list(vars(cls).values()) if isinstance(one, types.FunctionType)]
    return not own or any(is_library_code(one.__code__, one.__globals__) for one in own)


def _wrapped_in(function: types.FunctionType) -> list[types.FunctionType]:
    """A function, and those that it closes over, and so on."""
    found: list[Any] = [function]
    for one in found:
        for held in gc.get_referents(*(one.__closure__ or ())):
            held = held.func if isinstance(held, functools.partial) else held
            held = held.__func__ if isinstance(held, types.MethodType) else held
            if isinstance(held, types.FunctionType) and not any(held is other for other in found):
                found.append(held)
    return found


@functools.cache
def _torchs_folder() -> str:
    spec = importlib.util.find_spec("torch")
    return os.path.realpath(os.path.dirname(spec.origin or "")) if spec is not None else ""


@functools.cache
def _library_folders() -> frozenset[str]:
    """Where Python, its packages, torch and this package are installed."""
    paths = [sysconfig.get_path(one) for one in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages(), _torchs_folder(), str(Path(__file__).parents[1])]
    return frozenset(map(os.path.realpath, paths))


@functools.lru_cache(maxsize=1024)
def _recorded(folder: str) -> frozenset[str]:
    """The top-level packages that the records in a folder name."""
    try:
        if not any(name.endswith(".dist-info") for name in os.listdir(folder)):
            return frozenset()
    except OSError:
        return frozenset()
    names = set()
    for distribution in importlib.metadata.distributions(path=[folder]):
        names.update((distribution.read_text("top_level.txt") or "").split())
        for file in distribution.files or ():
            first = file.parts[0]
            names.add(first.partition(".")[0] if len(file.parts) == 1 else first)
    return frozenset(names)
