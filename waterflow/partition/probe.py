"""Operators that hide memory from shape rules: asked once, on zeros of the right shapes.

oneDNN's recurrent layers return a workspace whose size only they know, and need about as much beside it. Shape rules
call it empty, which would put the prediction of a recurrent model off by more than half.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from waterflow import _C

_HIDING = ("mkldnn_rnn_layer", "mkldnn_rnn_layer_backward")
_ASKED = "hidden_memory"  # where a node keeps the answer: asking takes as long as running the operator


@dataclass(frozen=True)
class HiddenMemory:
    """Bytes of each result's storage, and the most that the operator held beside its results."""

    results: tuple[int, ...]
    temporary: int


def hidden_memory(instructions: Sequence[fx.Node]) -> Iterator[tuple[fx.Node, HiddenMemory]]:
    """Each instruction that hides memory, with what it was seen to take. Runs those operators, and no others."""
    targets = {getattr(torch.ops.aten, name).default for name in _HIDING if hasattr(torch.ops.aten, name)}
    seen: dict[fx.Node, Any] = {}
    for node in instructions:
        if node.target not in targets:
            continue
        if _ASKED in node.meta:
            yield node, node.meta[_ASKED]
            continue
        arguments = fx.node.map_arg(node.args, lambda source: _real(source, seen))
        with torch.enable_grad():  # without it no workspace is made
            results, peak = _C.metered(lambda node=node, arguments=arguments: node.target(*arguments, **node.kwargs))
        seen[node] = results
        sizes = tuple(t.untyped_storage().nbytes() if isinstance(t, torch.Tensor) else 0 for t in results)
        node.meta[_ASKED] = HiddenMemory(sizes, max(0, peak - sum(sizes)))
        yield node, node.meta[_ASKED]


def _real(node: fx.Node, seen: dict[fx.Node, Any]) -> Any:
    """A real value in the shape of a graph's: what a probed operator returned, else zeros."""
    if node.target is operator.getitem and node.args[0] in seen:
        return seen[node.args[0]][node.args[1]]  # type: ignore[index]
    like = node.meta["val"]
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()
