"""Tells library code from user code, and lists what of libraries may run in a capture without being observed.

Code belongs to a library by the file that it comes from and by what is installed there, whatever name it has.
"""

from __future__ import annotations

import array
import builtins
import collections
import dis
import functools
import gc
import importlib.metadata
import importlib.util
import inspect
import itertools
import operator
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch._library import custom_ops

from waterflow import _C


@functools.lru_cache(maxsize=8192)
def is_library_file(file: str) -> bool:
    """Return whether a file is Python's own, torch's, or belongs to an installed distribution.

    A project that is installed in editable mode is user code, as is a copy of a library in a source tree.
    """
    # A distribution's record lies beside its packages, in whatever folder: look in each one up to the root.
    folder, name = os.path.split(os.path.realpath(file))
    while folder != os.path.dirname(folder):
        if folder in _library_folders() or name.partition(".")[0] in _recorded(folder):
            return True
        folder, name = os.path.split(folder)
    return False


@functools.lru_cache(maxsize=8192)
def is_torchs_file(file: str) -> bool:
    """Return whether a file lies in torch's own folder."""
    return Path(_torchs_folder()) in Path(os.path.realpath(file)).parents


def is_library_module(name: str) -> bool:
    """Return whether the module of this full name is a library's. A module without a file belongs to its package."""
    module = sys.modules.get(name)
    if isinstance(module, types.ModuleType):
        return is_library_space(vars(module))
    return "." in name and is_library_module(name.rpartition(".")[0])


def is_library_space(space: Mapping[str, Any]) -> bool:
    """Return whether a module with these globals is a library's."""
    name, file = space.get("__name__"), space.get("__file__")
    if not isinstance(name, str) or name == "__main__":
        return False
    if isinstance(file, str):
        return is_library_file(file)
    if getattr(sys.modules.get(name), "__dict__", None) is not space:
        return False
    return name in sys.stdlib_module_names or ("." in name and is_library_module(name.rpartition(".")[0]))


def is_library_code(code: types.CodeType, space: Mapping[str, Any]) -> bool:
    """Return whether code that runs with these globals is a library's.

    Code without a file of its own (``exec``) belongs to the module that it runs in.
    """
    file = code.co_filename
    return is_library_file(file) if os.path.isabs(file) else is_library_space(space)


def is_library_function(function: types.FunctionType) -> bool:
    """Return whether a function, and every function that it wraps, is a library's."""
    return all(is_library_code(one.__code__, one.__globals__) for one in _wrapped_in(function))


def is_torchs_function(function: Any) -> bool:
    """Return whether a function, and every function that it wraps, is torch's own."""
    found = _wrapped_in(function) if isinstance(function, types.FunctionType) else ()
    return bool(found) and all(is_torchs_file(str(one.__globals__.get("__file__"))) for one in found)


def is_library_class(cls: type) -> bool:
    """Return whether a class is a library's."""
    if not isinstance(cls.__module__, str) or not is_library_module(cls.__module__):
        return False
    # A program may replace some methods of a library's class, but hardly all of them.
    own = [one for one in list(vars(cls).values()) if isinstance(one, types.FunctionType)]
    return not own or any(is_library_code(one.__code__, one.__globals__) for one in own)


def _wrapped_in(function: types.FunctionType) -> list[types.FunctionType]:
    # Decorators keep what they wrap in their closure, at times within a partial or a method.
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
    paths = [sysconfig.get_path(one) for one in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages(), _torchs_folder(), str(Path(__file__).parents[2])]
    return frozenset(map(os.path.realpath, paths))


@functools.lru_cache(maxsize=1024)
def _recorded(folder: str) -> frozenset[str]:
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
    """Return whether a class, function or module is a library's, whose code does not change while a process runs."""
    if isinstance(value, types.ModuleType):
        return is_library_space(vars(value))
    if isinstance(value, types.FunctionType):
        return is_library_function(value)
    return isinstance(value, type) and is_library_class(value)


def is_installed_code(code: types.CodeType, space: Mapping[str, Any]) -> bool:
    """Return whether code that runs with these globals is an installed package's, and observed: no trusted library's."""
    return not is_trusted(package_of(space.get("__name__"))) and is_library_code(code, space)


def is_installed_space(space: Mapping[str, Any]) -> bool:
    """Return whether a module with these globals is an installed package's, and no trusted library's."""
    return not is_trusted(package_of(space.get("__name__"))) and is_library_space(space)


def is_installed(value: Any) -> bool:
    """Return whether a class or function is an installed package's, and no trusted library's."""
    if isinstance(value, types.FunctionType):
        return is_installed_code(value.__code__, value.__globals__)
    return not is_trusted(package_of(value.__module__)) and is_library_class(value)


class _Reader:
    def __init__(self, code: types.CodeType, names: dict[str, Read]) -> None:
        self.found: set[Read] = set()
        # Local names that stand for what was imported.
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
    """Return what code reads of globals, of its closure and of what it imports, each with the attributes read of it.

    ``settings.scale`` is ("global", "settings", "scale"). Includes the code of functions and classes within.
    """
    return tuple(sorted(_Reader(code, {}).found))


def bodies(cls: type) -> Iterator[tuple[type, list[tuple[str, Any]]]]:
    """Yield each base of a user's class with its own entries (methods, properties, values); a library's base has none."""
    for base in inspect.getmro(cls):
        said = []
        if not in_library(base):
            said = [(n, v) for n, v in vars(base).items() if n not in BOOKKEEPING or n == "__match_args__"]
            fields = vars(base).get("__dataclass_fields__", {})
            said += [(f"{name} (field)", getattr(one, "metadata", None)) for name, one in fields.items()]
        yield base, said


def mutable_bases(cls: type) -> list[type]:
    """Return the class and its bases, without those whose methods cannot be replaced."""
    return [base for base in inspect.getmro(cls) if not base.__flags__ & _IMMUTABLE]


def is_at_its_name(cls: type) -> bool:
    """Return whether its module has the class under its name; such a class lives as long as the process."""
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, "__dict__", {}).get(name)
    return found is cls


def guards_of(cls: type) -> _C.Guards:
    """Return guards of the entries of a class and its bases."""
    guards = _C.Guards()
    guards.cls(cls)
    return guards


@functools.lru_cache(maxsize=1024)
def slots_of(cls: Any) -> tuple[Any, ...]:
    """Return the descriptors of the slots that a class and its bases declare."""
    found = [(base, one) for base in inspect.getmro(cls) if "__slots__" in vars(base) for one in vars(base).values()]
    return tuple(one for base, one in found if isinstance(one, types.MemberDescriptorType) and one.__objclass__ is base)


@functools.lru_cache(maxsize=1024)
def layout_of(cls: Any) -> type:
    """Return the base that determines the memory of the class's objects beside attributes and slots.

    Only C code knows that memory: each such base has a rule of its own (``CONTENTS``), or counts by identity.
    """
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
    """Return a code object and all code objects within it: those of functions and classes that it makes."""
    inner: Iterator[types.CodeType] = (one for one in code.co_consts if isinstance(one, types.CodeType))
    return (code, *(one for part in inner for one in codes_within(part)))


def operators_with(code: types.CodeType) -> Iterator[tuple[Any, str, types.FunctionType]]:
    """Yield (operator, attribute, function) for each operator of users that has this code in a shape rule or a gradient."""
    # A call of such an operator is one node of the graph.
    for one in list(custom_ops.OPDEFS.values()):
        for name in ("_init_fn", "_abstract_fn", "_backward_fn", "_setup_context_fn"):
            function = vars(one).get(name)
            if isinstance(function, types.FunctionType) and code in codes_within(function.__code__):
                yield one, name, function


# Libraries whose Python code runs unobserved, each with what its functions and classes hold, beside code and constants,
# in the version that was looked at. Any other package that is installed is observed.
_LIBRARIES = {
    "torch": "what it keeps is followed, guarded or refused by name (below, settings.py, rng_ops.py); 2.13",
    "waterflow": "this library",
    "numpy": "C code; settings are asked again, generators refused (settings.py); 2.4",
    "torchvision": "names of weights, options of a kernel; 0.28",
    "torchaudio": "nothing; 2.11",
    "timm": "sizes of models as defaults of constructors; 1.0",
    "transformers": "tables of classes and functions, which are guarded (reads.PACKAGES), options of configurations; 5.23",
    "diffusers": "tables as in transformers; 0.42",
    "peft": "names of layers by kind of model, and layers by class; 0.21",
    "einops": "caches of what follows from its arguments; 0.8",
    "opt_einsum": "tables of functions that find paths, of its module; 3.4",
    **dict.fromkeys(
        ("optree", "packaging", "sympy", "networkx", "mpmath", "filelock", "typing_extensions"),
        "torch calls it while it traces, for sizes and containers; no step computes by it",
    ),
}
# What they read of their arguments, they may read all of.
PACKAGES = frozenset({
    *_LIBRARIES, "math", "cmath", "operator", "_operator", "itertools", "functools", "_functools", "collections", "_collections",
    "_collections_abc", "copy", "copyreg", "dataclasses", "enum", "typing", "abc", "_abc", "contextlib", "numbers", "types",
    "string", "_string", "re", "fractions", "statistics", "_statistics", "heapq", "_heapq", "bisect", "_bisect", "warnings",
    "_warnings",
})  # fmt: skip
# Transformers calls its validators of configurations, which hold fields, set when a class is made; 2.4. A step must not call it.
_ONLY_BY_LIBRARIES = frozenset({"huggingface_hub"})
# Parts of them that keep, read or draw something.
_WITH_STATE = (
    "torch.utils.data", "torch.utils.tensorboard", "torch.distributed", "torch.serialization", "torch.hub", "torch.optim",
    "torch.multiprocessing", "torch.profiler", "torch.cuda.memory", "torch.cuda.random", "torch.jit", "torch._dynamo",
    "torch.utils.benchmark", "torch.package", "numpy.random", "numpy.lib._npyio", "transformers.trainer",
    "transformers.utils.logging", "transformers.generation",
)  # fmt: skip
_WITHOUT_STATE = ("torch.optim.swa_utils",)

_BUILTINS = frozenset(map(id, (
    abs, all, any, ascii, bin, callable, chr, delattr, divmod, format, getattr, hasattr, hex, isinstance, issubclass, iter, len,
    max, min, next, oct, ord, pow, repr, round, setattr, sorted, sum, builtins.__build_class__,
)))  # fmt: skip
_ordered = collections.OrderedDict[str, int]()
# Of these classes objects are made, and methods called, without anything else than the object and the arguments.
TYPES: frozenset[type] = frozenset({
    bool, int, float, complex, str, bytes, bytearray, memoryview, list, tuple, dict, set, frozenset, range, slice, object, type,
    super, property, staticmethod, classmethod, enumerate, filter, map, reversed, zip, type(None), type(Ellipsis),
    types.FunctionType, types.MethodType, types.GeneratorType, types.SimpleNamespace, types.MappingProxyType, types.CellType,
    collections.deque, collections.OrderedDict, collections.defaultdict, collections.Counter, functools.partial,
    operator.itemgetter, operator.attrgetter, type({}.keys()), type({}.values()), type({}.items()), type(iter([])),
    type(iter(())), type(iter({})), type(iter({}.values())), type(iter({}.items())), type(iter(range(0))), type(iter(set())),
    *map(type, (_ordered.keys(), _ordered.values(), _ordered.items(), iter(_ordered))), array.array, os._Environ,
    type(iter("")), type(iter(b"")), type(reversed([])), type(reversed({})), types.GenericAlias, types.UnionType,
})  # fmt: skip
OF_TENSORS = frozenset({
    "data_ptr", "storage", "untyped_storage", "_typed_storage", "share_memory_", "numpy", "tolist", "__array__", "__dlpack__",
    "_is_view", "record_stream", "pin_memory", "storage_offset", "storage_type", "is_inference", "is_shared", "is_pinned",
    "is_set_to", "__setstate__",  # of a functools.partial, too: it replaces what is not put back
})  # fmt: skip
OF_TORCH = frozenset({
    "state_dict", "load_state_dict",  # whose hooks no key holds
    "save", "load", "set_default_dtype", "set_default_device", "set_grad_enabled_", "set_num_threads",
    "use_deterministic_algorithms", "set_printoptions", "compile", "set_float32_matmul_precision", "from_file",
})  # fmt: skip
_IN_C = (
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.ClassMethodDescriptorType,
    types.BuiltinFunctionType,
    staticmethod,
)
_ITERTOOLS = frozenset(value for value in vars(itertools).values() if isinstance(value, type) and value is not itertools.count)


def package_of(module: Any) -> str:
    """Return the top-level package of a module's name; empty if it has none."""
    return module.partition(".")[0] if isinstance(module, str) else ""


def is_trusted(package: str) -> bool:
    """Return whether the code of a library's package runs unobserved: Python's own library, torch, and a few more."""
    return package in PACKAGES or package in _ONLY_BY_LIBRARIES or package in sys.stdlib_module_names


def is_pure_module(module: Any) -> bool:
    """Return whether code of a library's module may run unobserved."""
    if package_of(module) not in PACKAGES or not is_library_module(module):
        return False
    return _within(module, _WITHOUT_STATE) or not _within(module, _WITH_STATE)


def _within(module: str, parts: tuple[str, ...]) -> bool:
    return any(module == part or module.startswith(part + ".") for part in parts)


def is_pure_function(function: Any) -> bool:
    """Return whether a C function of a module may be called."""
    if id(function) in _BUILTINS:
        return True
    name = getattr(function, "__name__", "")
    if function.__module__ is None:  # a method of a class itself
        if isinstance(function.__self__, type):
            return is_pure_class(function.__self__)
        return any(getattr(owner, name, None) is function for owner in (torch.Tensor, *TYPES))
    module = module_of(function)
    return is_pure_module(module) and not (package_of(module) == "torch" and name in OF_TORCH)


def module_of(function: Any) -> str:
    """Return the library module that a function is from; empty for other functions, whatever their ``__module__``."""
    owner = getattr(function, "__self__", None)
    if isinstance(function, types.FunctionType):
        module = function.__globals__.get("__name__") if is_library_function(function) else ""
    else:
        module = owner.__name__ if isinstance(owner, types.ModuleType) else getattr(function, "__module__", None)
    return module if isinstance(module, str) and is_library_module(module) else ""


def is_pure_class(cls: type) -> bool:
    """Return whether a library's class, and the methods of its objects, may be called."""
    if cls in TYPES or cls in _ITERTOOLS or issubclass(cls, (BaseException, torch.Tensor, torch.autograd.Function)):
        return True
    if issubclass(cls, (torch.Generator, torch.jit.ScriptModule)) or cls.__module__ == "builtins":
        return False
    return is_pure_module(cls.__module__) and is_library_class(cls)


def is_pure_method(receiver: Any, name: str) -> bool:
    """Return whether a C method reads and changes nothing but its receiver and its arguments."""
    if isinstance(receiver, torch.Tensor) or name == "__setstate__":
        return name not in OF_TENSORS
    defining = next((base for base in type(receiver).__mro__ if isinstance(vars(base).get(name), _IN_C)), None)
    return defining is not None and is_pure_class(defining)


def walks_over(receiver: Any, name: str) -> bool:
    """Return whether a C method of a container reads attributes of the container's items."""
    return isinstance(receiver, (list, tuple, dict, collections.deque)) and name in ("sort", "extend", "update")
