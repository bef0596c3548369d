"""The gradients of a step, as an eager backward pass would leave them in its parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import _engine_run_backward

from waterflow.errors import CaptureError
from waterflow.partition.operators import storage_id


def gradients_of(
    loss: torch.Tensor, leaves: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor | None], list[torch.Tensor]]:
    """As ``torch.autograd.grad`` with ``allow_unused``, which would take function modes off for the backward pass.

    Returns also which other leaves an eager backward pass would leave gradients in. Raises CaptureError where the step puts
    gradients into its parameters by itself, as those would be lost.
    """
    one = torch.ones_like(loss, memory_format=torch.preserve_format)
    others, functions = _other_leaves(loss, leaves)
    wanted = (*leaves, *(others if functions else ()))
    found = _engine_run_backward((loss,), (one,), False, False, wanted, True, accumulate_grad=False)
    if any(leaf.grad is not None for leaf in leaves):
        raise CaptureError("the step calls backward() inside, whose gradients add to its own; use torch.autograd.grad")
    return found[: len(leaves)], others


def _other_leaves(loss: torch.Tensor, leaves: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], bool]:
    """Further leaves, and whether users' functions are in the graph: their backward passes run in eager training, too.

    The one of ``checkpoint(use_reentrant=True)`` reaches parameters although no edge of the graph leads to them. It refuses
    to run where single gradients are asked for, which makes the step one that cannot be captured.
    """
    waiting, seen, others = [loss.grad_fn], {loss.grad_fn}, []
    own = set(map(id, leaves))
    functions = False
    while waiting:
        node = waiting.pop()
        if node is None:
            continue
        functions |= isinstance(node, BackwardCFunction)
        variable = getattr(node, "variable", None)  # of a leaf
        if variable is not None and id(variable) not in own:
            others.append(variable)
        fresh = {after for after, _ in node.next_functions} - seen
        seen |= fresh
        waiting += fresh
    return others, functions


def check_history(inputs: Iterable[tuple[fx.Node, torch.Tensor]]) -> None:
    """Raise CaptureError where a graph computes with an input whose real tensor was computed before the step, with gradients."""
    for node, real in inputs:
        overwritten = (user.target is torch.ops.aten.copy_.default and user.args[0] is node for user in node.users)
        if real.grad_fn is not None and not all(overwritten):
            raise CaptureError("the step computes with a tensor that carries gradients from before the step")


def no_gradient(parameter: torch.Tensor) -> float | complex:
    """What a sum of gradients holds before the first one: -0.0, which leaves the bits of any number that is added."""
    return complex(-0.0, -0.0) if parameter.is_complex() else -0.0


def to_be_changed(
    gradients: Mapping[str, torch.Tensor], parameters: Mapping[str, torch.Tensor], others: Iterable[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gradients that may be changed in place: each lies as its parameter does, in memory of its own.

    Copies those that do not, as autograd does when it puts them into ``.grad``; ``others`` are the step's inputs and results.
    Sums over gradients (a norm) add up in the order in which they lie.
    """
    taken = set(map(storage_id, others))
    changed = {}
    for name, gradient in gradients.items():
        like = parameters[name]
        if not (like.is_contiguous() and gradient.is_contiguous()):
            like = torch.empty_like(like, memory_format=torch.preserve_format)
        if storage_id(gradient) in taken or not _lies_as(gradient, like):
            gradient = gradient.new_empty_strided(like.shape, like.stride()).copy_(gradient)
        taken.add(storage_id(gradient))
        changed[name] = gradient
    return changed


def _lies_as(one: torch.Tensor, other: torch.Tensor) -> bool:
    return all(a == b for a, b, size in zip(one.stride(), other.stride(), one.shape) if size > 1)
