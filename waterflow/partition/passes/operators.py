"""Properties of single operators: views, effects, random numbers; the tensors that they take and return."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

# Change running statistics although their schema does not say so.
_HIDDEN_WRITES = frozenset(
    op for name in ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm") for op in (getattr(aten, name).default,)
)
# Sums whose order differs from call to call on a GPU (torch.use_deterministic_algorithms names them), and recurrent layers,
# whose second call makes no workspace.
_UNREPEATABLE = frozenset(
    ("bincount", "cumsum", "histc", "index_add", "index_copy", "index_put", "_index_put_impl", "kthvalue", "median",
     "mkldnn_rnn_layer", "put", "scatter", "scatter_add", "scatter_reduce", "_embedding_bag", "_cudnn_rnn")
)  # fmt: skip
# How the overload that takes a generator is called, for operators that have one beside the plain overload.
_GENERATOR_FORMS = {
    "default": "generator",
    "low": "low_generator",
    "Tensor": "Tensor_generator",
    "low_dtype": "low_generator_dtype",
}


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors of an argument or a result, and of its lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


def lazy_bits(tensor: torch.Tensor) -> tuple[bool, bool]:
    """Return whether torch reads the tensor's memory as the conjugate, and as the negative, of the numbers there."""
    return tensor.is_conj(), tensor.is_neg()


def with_lazy_bits(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Set the lazy bits of ``tensor`` to those of ``like``, in place; return ``tensor``."""
    conjugate, negative = lazy_bits(like)
    if conjugate != tensor.is_conj():
        torch._C._set_conj(tensor, conjugate)  # type: ignore[attr-defined]
    if negative != tensor.is_neg():
        torch._C._set_neg(tensor, negative)  # type: ignore[attr-defined]
    return tensor


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of the storage of a (fake) tensor."""
    return tensor.untyped_storage()._cdata


def schema_name(target: Any) -> str:
    """Return ``aten::add`` for ``aten.add.Tensor``; empty for anything but an operator."""
    return target._schema.name if isinstance(target, torch._ops.OpOverload) else ""


@functools.cache
def is_view(target: Any) -> bool:
    """Return whether the operation returns an alias of its first argument and changes nothing."""
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    returns = target._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def lies_in_host(node: fx.Node) -> bool:
    """Return whether the operation's result is in host memory beside the device's: see ``offload.py``."""
    return schema_name(node.target) == "waterflow::to_host"


def is_random(target: Any) -> bool:
    """Return whether the operation draws from a generator."""
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def running_statistics(node: fx.Node) -> set[fx.Node]:
    """Return the buffers that a normalization changes although its schema does not say so."""
    if node.target not in _HIDDEN_WRITES or not node.args[5]:
        return set()
    return {value for value in node.args[3:5] if isinstance(value, fx.Node)}


def is_repeatable(node: fx.Node) -> bool:
    """Return whether a second call with the same arguments gives the same bits, and changes only its declared arguments.

    A normalization in training mode counts: ``repeated_arguments`` leaves its running statistics out.
    """
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten" or is_random(target):
        return False
    if target._schema.name.removeprefix("aten::").rstrip("_") in _UNREPEATABLE:
        return False
    return target not in _HIDDEN_WRITES or target is aten.native_batch_norm.default


def repeated_arguments(node: fx.Node) -> tuple[Any, ...]:
    """Return the positional arguments of a second call, which must not update running statistics again."""
    if running_statistics(node):
        return (*node.args[:3], None, None, *node.args[5:])
    return node.args


def has_effect(node: fx.Node) -> bool:
    """Return whether a node must run even if nothing uses its results."""
    if node.op != "call_function":
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False  # getitem
    return target._schema.is_mutable or not target._schema.returns or is_random(target) or target in _HIDDEN_WRITES


def written_by(node: fx.Node) -> set[fx.Node]:
    """Return the arguments of an operation that it changes in place."""
    found: set[fx.Node] = set()
    for place, name in _written_arguments(node.target):
        value = node.args[place] if place < len(node.args) else node.kwargs.get(name)
        found |= {v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, fx.Node)}
    return found


@functools.cache
def may_resize(target: Any) -> bool:
    """Return whether an operator may give what it changes another size, as observers do, without a fake tensor's telling.

    Those that work in place do not, and where ``out=`` gets another size a fake tensor does so, too.
    """
    named = target._schema.arguments if isinstance(target, torch._ops.OpOverload) else ()
    written = [a for a in named if a.alias_info is not None and a.alias_info.is_write]
    return any(not a.kwarg_only for a in written) and not target._schema.name.endswith("_")


@functools.cache
def _written_arguments(target: Any) -> tuple[tuple[int, str], ...]:
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
        return ()
    given = enumerate(target._schema.arguments)
    return tuple((place, a.name) for place, a in given if a.alias_info is not None and a.alias_info.is_write)


@functools.lru_cache(maxsize=1024)
def taking_generator(target: Any) -> Any:
    """Return the overload of a random operator that takes a generator; None if it has none."""
    if any(argument.name == "generator" for argument in target._schema.arguments):
        return target
    name = _GENERATOR_FORMS.get(target._overloadname, "")
    return getattr(target.overloadpacket, name) if name in target.overloadpacket.overloads() else None
