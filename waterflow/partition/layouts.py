"""Layouts that kernels return, where shape rules for fake tensors predict others.

What a trace records depends on strides: ``contiguous()`` copies or does nothing, ``reshape`` is a view or a copy, a sum adds up in
the order in which its operand lies. Behind a wrong prediction a captured step would compute with other layouts than an eager one,
and end with other last bits. So before a captured step first runs, the kernels of its operations are asked: each is called once
in a process, on zeros of the shapes and strides that it will see. Where one answers otherwise than predicted, the step is
captured again, by its answer.

Nobody is asked where all operands and results lie row by row: there kernels allocate what their shape rules say.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from waterflow.partition.exact import exact
from waterflow.partition.operators import is_random, is_view, lazy_bits, storage_id, tensors_in

aten = torch.ops.aten

Strides = tuple[tuple[int, ...] | None, ...]  # of each result; None: left as predicted
# Their shape rule is the very function that allocates the kernel's result, row by row.
_ROW_BY_ROW = frozenset(getattr(aten, name).default for name in ("mm", "addmm", "bmm", "baddbmm"))

_asking = threading.Lock()
_answers: dict[_Question, Strides] = {}
_corrections: dict[Any, dict[_Question, Strides]] = {}  # by operator: the answers that its shape rule does not give


@dataclass(frozen=True)
class _Form:
    """A tensor as far as layouts depend on it."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def zeros(self) -> torch.Tensor:
        size = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride)) if 0 not in self.shape else 0
        return torch.zeros(size, dtype=self.dtype, device=self.device).as_strided(self.shape, self.stride)


@dataclass(frozen=True)
class _Question:
    """An operator and a key of its arguments: forms in the place of tensors, numbers by their bits."""

    target: Any
    arguments: Any


def surprises(graph: fx.Graph) -> bool:
    """Ask the kernels of a captured step. Returns whether one answers otherwise than the graph says: capture it again."""
    found = False
    with _asking:
        for node in graph.nodes:
            if not _is_doubtful(node):
                continue
            predicted = _strides(node.meta["val"])
            question = _question(node.target, node.args, node.kwargs)
            if question not in _answers:
                _answers[question] = _ask(node)
            answer = _answers[question]
            if any(told is not None and told != said for told, said in zip(answer, predicted)):
                known = _corrections.setdefault(node.target, {})
                found |= known.get(question) != answer
                known[question] = answer
    return found


def is_corrected(target: Any) -> bool:
    """Whether shape rules were found wrong about an operator."""
    return target in _corrections


def corrected(mode: Any, target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], made: Any) -> Any:
    """What a shape rule made, in the layout in which the operator's kernel returns it."""
    answer = _corrections[target].get(_question(target, args, kwargs))
    if answer is None:
        return made
    leaves, form = pytree.tree_flatten(made)
    with mode:
        leaves = [
            torch.empty_strided(one.shape, strides, dtype=one.dtype, device=one.device)
            if strides is not None and isinstance(one, torch.Tensor) and tuple(one.stride()) != strides
            else one
            for one, strides in zip(leaves, answer)
        ]
    return pytree.tree_unflatten(leaves, form)


def _is_doubtful(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload) or target.namespace != "aten":
        return False
    if target._schema.is_mutable or is_view(target) or is_random(target) or target in _ROW_BY_ROW:
        return False
    if "_rnn" in target._schema.name:
        return False  # its workspace has a size that no shape rule knows, and zeros in the place of what it wrote there
    given = [tensor for source in node.all_input_nodes for tensor in tensors_in(source.meta["val"])]
    made = list(tensors_in(node.meta.get("val")))
    if any(t.layout != torch.strided or t.is_quantized or any(lazy_bits(t)) for t in (*given, *made)):
        return False
    if not {storage_id(t) for t in given}.isdisjoint(storage_id(t) for t in made):
        return False
    return not all(_lies_row_by_row(t) for t in (*given, *made))


def _lies_row_by_row(tensor: torch.Tensor) -> bool:
    rows = [*accumulate(reversed(tensor.shape[1:]), lambda one, other: one * max(1, other), initial=1)]
    return tensor.dim() == 0 or tuple(tensor.stride()) == tuple(reversed(rows))


def _ask(node: fx.Node) -> Strides:
    """The strides of what the kernel returns for zeros; the predicted ones where it cannot be called with zeros."""
    args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda source: _mapped(source.meta["val"], _form))
    args, kwargs = _mapped((args, kwargs), lambda one: one.zeros(), _Form)
    predicted = node.meta["val"]
    try:
        with torch.no_grad(), torch._C._DisableAutocast():
            returned = node.target(*args, **kwargs)  # type: ignore[operator]
    except Exception:
        return tuple(None for _ in pytree.tree_leaves(predicted))
    pairs = zip(pytree.tree_leaves(returned), pytree.tree_leaves(predicted))
    return tuple(
        tuple(one.stride())
        if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape
        else None
        for one, other in pairs
    )


def _strides(made: Any) -> Strides:
    return tuple(tuple(t.stride()) if isinstance(t, torch.Tensor) else None for t in pytree.tree_leaves(made))


def _form(tensor: torch.Tensor) -> _Form:
    return _Form(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.device)


def _question(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Question:
    return _Question(target, (tuple(_keys(args)), tuple((name, *_keys([kwargs[name]])) for name in sorted(kwargs))))


def _keys(values: Sequence[Any]) -> Iterator[Any]:
    for value in values:
        value = value.meta["val"] if isinstance(value, fx.Node) else value
        if isinstance(value, (list, tuple)):
            yield tuple(_keys(value))
        else:
            yield _form(value) if isinstance(value, torch.Tensor) else exact(value)


def _mapped(value: Any, change: Callable[[Any], Any], kind: type = torch.Tensor) -> Any:
    if isinstance(value, (list, tuple)):
        return [_mapped(item, change, kind) for item in value]
    if isinstance(value, dict):
        return {key: _mapped(item, change, kind) for key, item in value.items()}
    return change(value) if isinstance(value, kind) else value
