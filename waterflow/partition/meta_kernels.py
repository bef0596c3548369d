"""Fake tensors made straight from the memory layout that a kernel's result has.

FakeTensorMode takes many operations apart in Python first: the loss of a classifier and its gradient took 12 ms of a trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

aten = torch.ops.aten

# One function of torch lays out their results on every device, whatever the strides of their operands.
_OF_ANY_STRIDES = frozenset({
    *(getattr(aten, name).default for name in ("mm", "bmm", "baddbmm", "view", "t", "expand", "detach", "unsqueeze")),
    aten.transpose.int, aten.select.int, aten.slice.Tensor,
})  # fmt: skip
# And of these where their operands lie row by row.
_OF_ROWS = frozenset({
    aten.max_pool2d_with_indices.default, aten.max_pool2d_with_indices_backward.default,
    aten.avg_pool2d.default, aten.avg_pool2d_backward.default, aten.sum.dim_IntList, aten.mean.dim,
})  # fmt: skip
KNOWN = _OF_ANY_STRIDES | _OF_ROWS


def by_meta_kernel(mode: Any, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What one of the operations ``KNOWN`` returns for fake tensors of ``mode``; NotImplemented where these are not plain."""
    device = None
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            if not is_plain_fake(mode, value) or (func in _OF_ROWS and not value.is_contiguous()):
                return NotImplemented
            if device is not None and device != value.device:
                return NotImplemented
            device = value.device
    if device is None:
        return NotImplemented
    with in_kernel_invocation_manager(mode):
        made = func(*args, **kwargs)
    if isinstance(made, torch.Tensor):
        return FakeTensor(mode, made, device)
    return tuple(FakeTensor(mode, one, device) for one in made)


def is_plain_fake(mode: Any, value: torch.Tensor) -> bool:
    """Whether a tensor is a fake one of ``mode`` that stands for plain memory, of which no values are known."""
    if type(value) is not FakeTensor or value.fake_mode is not mode or value.constant is not None:
        return False
    return value.layout is torch.strided and not value.is_conj() and not value.is_neg()


def rows(mode: Any, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> FakeTensor:
    """A fake tensor that lies row by row."""
    with in_kernel_invocation_manager(mode):
        made = torch.empty(shape, dtype=dtype, device="meta")
    return FakeTensor(mode, made, device)


def strided(mode: Any, like: torch.Tensor) -> FakeTensor:
    """A fake tensor with the shape and the strides of a real one, in memory of its own."""
    with in_kernel_invocation_manager(mode):
        made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device="meta")
    return FakeTensor(mode, made, like.device)
