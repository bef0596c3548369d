"""Sums of gradients in place: what a backward pass adds up goes into the memory of a sum that nothing reads any more.

Autograd adds up gradients in this way, but not while a step is traced.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from waterflow.partition.operators import storage_id

aten = torch.ops.aten


def sum_in_place(graph: fx.Graph) -> int:
    """Let additions of the backward pass write into their first operand where it dies with them; returns how many do.

    Operand and sum are tensors of the step's own that lie alike and have no views: views keep short ways to be made
    (``executor/shortcuts.py``), which memory that is written to does not have.
    """
    # Operations with several results are counted by those that are taken out of them.
    values = (node.meta.get("val") for node in graph.nodes)
    shared = Counter(storage_id(value) for value in values if isinstance(value, torch.Tensor))
    done = 0
    for node in graph.nodes:
        if node.target is not aten.add.Tensor or node.meta["phase"] != "backward":
            continue
        into, other = node.args
        if not isinstance(into, fx.Node) or not isinstance(other, fx.Node) or into.op != "call_function":
            continue
        given, added, made = (one.meta["val"] for one in (into, other, node))
        alone = (
            len(into.users) == 1 and into is not other and shared[storage_id(given)] == shared[storage_id(made)] == 1
        )
        if alone and _lies_as(given, made) and _lies_as(added, made):
            node.target = aten.add_.Tensor
            node.meta["val"] = given
            done += 1
    return done


def _lies_as(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (
        one.shape == other.shape
        and one.stride() == other.stride()
        and one.dtype == other.dtype
        and one.device == other.device
    )
