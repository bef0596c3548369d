"""Shape rules for the fused optimizer kernels, which torch would otherwise run on real memory while tracing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses import fake_impls

aten = torch.ops.aten

_UPDATES = (
    aten._fused_sgd_.default,
    aten._fused_sgd_.tensor_lr,
    aten._fused_adam_.default,
    aten._fused_adam_.tensor_lr,
    aten._fused_adamw_.default,
    aten._fused_adamw_.tensor_lr,
)


def is_update(target: Any) -> bool:
    """Whether an operation is an optimizer's fused update."""
    return target in _UPDATES


def _changes_in_place(fake_mode: Any, func: Any, *args: Any, **kwargs: Any) -> None:
    """The fused updates return nothing and change their lists in place: there is no shape to work out."""


@contextlib.contextmanager
def active() -> Iterator[None]:
    """Within, FakeTensorMode knows the fused updates."""
    table: dict[Any, Callable[..., Any]] = fake_impls.op_implementations_dict
    added = [op for op in _UPDATES if op not in table]
    for op in added:
        table[op] = _changes_in_place
    try:
        yield
    finally:
        for op in added:
            del table[op]
