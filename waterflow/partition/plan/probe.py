"""Operators that hide memory from shape rules: each is called once, on zeros of the right shapes, and its memory measured.

oneDNN's recurrent layers return a workspace whose size only they know, and need about as much beside it. Shape rules
call it empty, which would put the prediction of a recurrent model off by more than half. They round those sizes.

Losses that are reduced hide memory, too, in sizes that follow from shapes (``reduced_losses``): nothing is run for
those.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from waterflow import _C
from waterflow.partition.passes.operators import schema_name

_HIDING = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
# How often the loss of single elements is there: in the memory that the reduced one keeps, and beside it.
_REDUCED = {
    "mse_loss": (1, 1),
    "smooth_l1_loss": (1, 1),
    "huber_loss": (0, 1),
    "binary_cross_entropy": (1, 0),
    "binary_cross_entropy_with_logits": (0, 2),
    "soft_margin_loss": (1, 0),
}


@dataclass(frozen=True)
class HiddenMemory:
    """The bytes of each result's storage, and the most bytes that the operator held beside its results."""

    results: tuple[int, ...]
    temporary: int


@dataclass(frozen=True)
class _Zeros:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True)
class _ResultOf:
    # A result of an earlier question: a backward layer reads the workspace of its forward layer.
    question: int
    position: int


@dataclass(frozen=True)
class Question:
    """An operator and its arguments. The questions of one step are asked in their order."""

    target: Any
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...] = ()


def questions(instructions: Sequence[fx.Node]) -> tuple[list[fx.Node], tuple[Question, ...]]:
    """Return the instructions that hide memory, and the question to ask about each."""
    targets = {getattr(torch.ops.aten, name).default for name in _HIDING if hasattr(torch.ops.aten, name)}
    targets.add(torch.ops.waterflow.derivative.default)  # zeros have the formula that takes more
    asked = [node for node in instructions if node.target in targets]
    numbers = {node: number for number, node in enumerate(asked)}
    given = ((node.target, *(_described(part, numbers) for part in (node.args, [*node.kwargs.items()]))) for node in asked)
    return asked, tuple(Question(*parts) for parts in given)


def hidden_memory(instructions: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, HiddenMemory]]:
    """Yield each instruction that hides memory, with the memory that it took. Runs those operators, and no others."""
    asked, about = questions(instructions)
    yield from zip(asked, answers(about))
    yield from reduced_losses(instructions)


def reduced_losses(instructions: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, HiddenMemory]]:
    """Yield the losses that kernels reduce from one loss per element, with the memory that these take."""
    for node in instructions:
        kept, beside = _REDUCED.get(schema_name(node.target).removeprefix("aten::"), (0, 0))
        if not kept and not beside:
            continue
        given = {
            a.name: node.args[i] if i < len(node.args) else node.kwargs.get(a.name, a.default_value)
            for i, a in enumerate(node.target._schema.arguments)
        }
        # 0 is "none": the loss of each element is the result itself, and nothing is hidden.
        if given["reduction"] == 0:
            continue
        one, other = (given[name].meta["val"].shape for name in ("self", "target"))
        result = node.meta["val"]
        size = torch.broadcast_shapes(one, other).numel() * result.element_size()
        yield node, HiddenMemory((size if kept else result.untyped_storage().nbytes(),), beside * size)


def keeps_more(node: fx.Node) -> bool:
    """Return whether the storage of an operation's result is larger than its shape says, as long as it lives."""
    return any(hidden.results[0] > node.meta["val"].nbytes for _, hidden in reduced_losses([node]))


def answers(about: tuple[Question, ...]) -> tuple[HiddenMemory, ...]:
    """Return the memory that the operators of one step took, asked or remembered. Asking takes as long as they run."""
    return _answers(about, torch.get_num_threads()) if about else ()


# The number of threads is part of the key: a workspace may depend on it.
@functools.lru_cache(maxsize=64)
def _answers(about: tuple[Question, ...], threads: int) -> tuple[HiddenMemory, ...]:
    seen: list[Any] = []
    told = []
    for question in about:
        arguments, named = _real(question.arguments, seen), dict(_real(question.named, seen))
        with torch.enable_grad():  # without it no workspace is made
            results, peak = _C.metered(functools.partial(question.target, *arguments, **named))
        results = results if isinstance(results, tuple) else (results,)
        seen.append(results)
        sizes = tuple(t.untyped_storage().nbytes() if isinstance(t, torch.Tensor) else 0 for t in results)
        told.append(HiddenMemory(sizes, max(0, peak - sum(sizes))))
    return tuple(told)


def _described(value: Any, numbers: dict[fx.Node, int]) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_described(item, numbers) for item in value)
    if not isinstance(value, fx.Node):
        return value
    # The operator would see the same tensor without the detour over the host.
    if schema_name(value.target) in ("waterflow::to_host", "waterflow::from_host"):
        return _described(value.args[0], numbers)
    if value.target is operator.getitem and value.args[0] in numbers:
        return _ResultOf(numbers[value.args[0]], value.args[1])  # type: ignore[index, arg-type]
    like = value.meta["val"]
    return _Zeros(tuple(like.shape), tuple(like.stride()), like.dtype, like.device)


def _real(value: Any, seen: Sequence[Any]) -> Any:
    if isinstance(value, tuple):
        return tuple(_real(item, seen) for item in value)
    if isinstance(value, _ResultOf):
        return seen[value.question][value.position]
    if isinstance(value, _Zeros):
        return torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device=value.device).zero_()
    return value
