"""Which code that nobody observes may be called while a step is traced: what it returns follows from what it is given.

Packages count whole, but for parts that keep state of their own. C functions and types count one by one.
"""

from __future__ import annotations

import array
import builtins
import collections
import functools
import itertools
import operator
import os
import types
from typing import Any

import torch

from waterflow.partition.libraries import is_library_class, is_library_function, is_library_module

# Their Python code runs unobserved. What it reads of its arguments, it may read all of.
PACKAGES = frozenset({
    "torch", "torchvision", "torchaudio", "timm", "transformers", "diffusers", "peft", "einops", "opt_einsum", "numpy",
    "math", "cmath", "operator", "_operator", "itertools", "functools", "_functools", "collections", "_collections",
    "_collections_abc", "copy", "copyreg", "dataclasses", "enum", "typing", "typing_extensions", "abc", "_abc", "contextlib",
    "numbers", "types", "string", "_string", "re", "fractions", "statistics", "_statistics", "heapq",
    "_heapq", "bisect", "_bisect", "warnings", "_warnings", "waterflow", "optree", "packaging", "sympy", "networkx", "mpmath", "filelock",
})  # fmt: skip
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
    "is_set_to", "__setstate__",  # of a functools.partial, too: it replaces what nobody puts back
})  # fmt: skip
OF_TORCH = frozenset({
    "state_dict", "load_state_dict",  # whose hooks no key holds
    "save", "load", "set_default_dtype", "set_default_device", "set_grad_enabled_", "set_num_threads",
    "use_deterministic_algorithms", "set_printoptions", "compile", "set_float32_matmul_precision", "from_file",
})  # fmt: skip
_IN_C = (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType, types.BuiltinFunctionType,
         staticmethod)  # fmt: skip
_ITERTOOLS = frozenset(
    value for value in vars(itertools).values() if isinstance(value, type) and value is not itertools.count
)


def package_of(module: Any) -> str:
    """The top-level package of a module's name; empty for what has none."""
    return module.partition(".")[0] if isinstance(module, str) else ""


def is_pure_module(module: Any) -> bool:
    """Whether code of a library's module may run unobserved."""
    if package_of(module) not in PACKAGES or not is_library_module(module):
        return False
    return _within(module, _WITHOUT_STATE) or not _within(module, _WITH_STATE)


def _within(module: str, parts: tuple[str, ...]) -> bool:
    return any(module == part or module.startswith(part + ".") for part in parts)


def is_pure_function(function: Any) -> bool:
    """Whether a C function that belongs to a module may be called."""
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
    """The library's module that a function is from; empty for other functions, whatever they say of themselves."""
    owner = getattr(function, "__self__", None)
    if isinstance(function, types.FunctionType):
        module = function.__globals__.get("__name__") if is_library_function(function) else ""
    else:
        module = owner.__name__ if isinstance(owner, types.ModuleType) else getattr(function, "__module__", None)
    return module if isinstance(module, str) and is_library_module(module) else ""


def is_pure_class(cls: type) -> bool:
    """Whether a library's class may be called, and its objects' methods."""
    if cls in TYPES or cls in _ITERTOOLS or issubclass(cls, (BaseException, torch.Tensor)):
        return True
    if issubclass(cls, (torch.Generator, torch.jit.ScriptModule)) or cls.__module__ == "builtins":
        return False
    return is_pure_module(cls.__module__) and is_library_class(cls)


def is_pure_method(receiver: Any, name: str) -> bool:
    """Whether a C method reads and changes nothing but its receiver and its arguments."""
    if isinstance(receiver, torch.Tensor) or name == "__setstate__":
        return name not in OF_TENSORS
    defining = next((base for base in type(receiver).__mro__ if isinstance(vars(base).get(name), _IN_C)), None)
    return defining is not None and is_pure_class(defining)


def walks_over(receiver: Any, name: str) -> bool:
    """Whether a C method of a container reads what all of its items say."""
    return isinstance(receiver, (list, tuple, dict, collections.deque)) and name in ("sort", "extend", "update")
