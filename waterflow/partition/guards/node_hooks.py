"""Hooks on the nodes at which gradients end in parameters (``AccumulateGrad``), as Horovod, Apex and sharded optimizers put them.

Torch says neither which hooks a node has nor that it has a new one; but it calls one function of Python's for each new hook.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd import function
from torch.autograd.graph import get_gradient_edge

_numbers = itertools.count(1)


class Registered:
    """Counts: ``last`` is another number after each hook that any node of the process was given."""

    last = 0


class _Answer(Exception):
    def __init__(self, hooks: dict[int, Any] | None) -> None:
        self.hooks = hooks


def _ask(*_: Any) -> None:
    """Stand in for a hook: its registration raises _Answer with those that are there."""


@functools.cache
def observe() -> None:
    """Count hooks from now on."""
    register = function._HookMixin._register_hook

    def observed(hooks: dict[int, Any] | None, hook: Callable[..., Any]) -> Any:
        if hook is _ask:
            raise _Answer(hooks)
        made = register(hooks, hook)
        Registered.last = next(_numbers)
        return made

    function._HookMixin._register_hook = staticmethod(observed)


def hooked(parameters: Iterable[torch.Tensor]) -> bool:
    """Return whether the node of any of these parameters has hooks."""
    # A node that somebody holds refers to its parameter; most parameters have none.
    held = (p for p in parameters if p._use_count() > 1 and p.requires_grad and p.is_leaf)  # type: ignore[attr-defined]
    nodes = (get_gradient_edge(p).node for p in held)
    return any(_hooks_at(register) for node in nodes for register in (node.register_hook, node.register_prehook))


def _hooks_at(register: Callable[..., Any]) -> dict[int, Any] | None:
    try:
        register(_ask).remove()
    except _Answer as answer:
        return answer.hooks
    raise RuntimeError("torch no longer asks torch.autograd.Function for its hooks")
