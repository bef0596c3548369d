"""Gradients that a step leaves in tensors which it does not update: nobody sees them where another Step updates those."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch.optim import Optimizer

from waterflow.errors import CaptureError
from waterflow.executor.binding import Owner
from waterflow.partition.spec import GraphInput

# Of the Steps that are alive: each clears what it finds in ``.grad`` of its parameters before its own backward pass.
_optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def add(optimizer: Optimizer) -> None:
    """From now on, a Step updates this optimizer's parameters."""
    _optimizers.add(optimizer)


def discard(optimizer: Optimizer) -> None:
    """Its Step was closed."""
    _optimizers.discard(optimizer)


def optimizer_of(tensors: Iterable[torch.Tensor]) -> Optimizer | None:
    """One with which a Step updates any of them."""
    ids = set(map(id, tensors))
    found = (one for one in [*_optimizers] for group in one.param_groups for p in group["params"] if id(p) in ids)
    return next(found, None)


def check(reached: Iterable[GraphInput], owner: Owner) -> None:
    """Raise CaptureError where a gradient that the step would leave might be seen: a captured step leaves none."""
    reached = list(reached)
    if not reached:
        return
    cleared = {id(p) for optimizer in [*_optimizers] for group in optimizer.param_groups for p in group["params"]}
    for given in reached:
        if given.kind in ("batch", "buffer") or id(_tensor(given, owner)) not in cleared:
            raise CaptureError(_reason(given))


def _tensor(given: GraphInput, owner: Owner) -> torch.Tensor:
    return owner.looked.strangers[given.leaf] if given.kind == "stranger" else owner.tensors[given.name]


def _reason(given: GraphInput) -> str:
    if given.kind == "parameter":
        what = f"the parameter {given.name} requires gradients, but the optimizer does not have it"
    elif given.kind == "buffer":
        what = f"the buffer {given.name} requires gradients"
    else:
        what = "a tensor of the batch" if given.kind == "batch" else "a tensor from outside of the model"
        what += " requires gradients, and the backward pass reaches it"
    return f"{what}: they would add up in its .grad. Freeze it with requires_grad_(False), or give it to an optimizer of a Step"
