"""The memory that batches are made from, and the steps that write to it: data that a step changes, or that lies over weights."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from waterflow.executor.data import rows
from waterflow.executor.program.bound_step import BoundStep
from waterflow.partition.guards.step_key import extent_bytes

_FREQUENT = {torch.Tensor, tuple, int, float, bool, str, bytes, type(None), range}
_LAYOUT = operator.attrgetter("layout")
_TORCHS = {
    BatchSampler, ConcatDataset, DataLoader, RandomSampler, SequentialSampler, StackDataset, Subset, SubsetRandomSampler,
    TensorDataset, WeightedRandomSampler, rows.DataLoader,
}  # fmt: skip


class DataMemory:
    """The memory that batches of ``source`` are made from now."""

    def __init__(self, source: Any) -> None:
        self._source = source
        self._found: Memory | None = None
        self._may_differ = True

    def new_pass(self) -> None:
        """Note that code of the user's has run, which may have replaced data."""
        self._may_differ = True

    def written_by(self, step: BoundStep) -> bool:
        """Return True if ``step`` may write there, and must have ended before the next batch is read."""
        # A captured step replaces no data; code that ran eagerly before a step was bound may have.
        if self._may_differ or step.on_data is None:
            if self._found is None or not self._found.holds():
                self._found = Memory(self._source)
            self._may_differ = False
        assert self._found is not None
        if step.on_data is None or step.on_data[0] is not self._found:
            step.on_data = self._found, any(map(self._found.has, step.written()))
        return step.on_data[1]


class Memory:
    """The memory of all tensors and arrays that torch's own loaders, data sets, samplers and containers hold in ``source``.

    Where a tensor has no plain memory, that is all memory. Worker processes have copies: there it is none.
    """

    def __init__(self, source: Any) -> None:
        self._tensors: list[torch.Tensor] = []
        self._arrays: list[tuple[int, int]] = []  # where each begins, and its bytes
        self._containers: dict[int, tuple[Any, list[Any]]] = {}  # by identity: those that may change, and their parts
        if not (isinstance(source, DataLoader) and source.num_workers > 0):
            self._gather(source)
        self.everywhere = any(layout != torch.strided for layout in map(_LAYOUT, self._tensors))
        tensors = [] if self.everywhere else self._tensors
        self._addresses = [*map(torch.Tensor.data_ptr, tensors)]
        begins = np.array([*self._addresses, *(begin for begin, _ in self._arrays)], dtype=np.uint64)
        sizes = np.array([*map(extent_bytes, tensors), *(size for _, size in self._arrays)], dtype=np.uint64)
        order = np.argsort(begins)
        self._begins, self._ends = begins[order], np.maximum.accumulate((begins + sizes)[order])  # a range may enclose later ones

    def holds(self) -> bool:
        """Return True if the same tensors are still there, at the same addresses."""
        for container, before in self._containers.values():
            now = [*_parts_of(container)]
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                return False
        return not self.everywhere and [*map(torch.Tensor.data_ptr, self._tensors)] == self._addresses

    def has(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor has a byte there."""
        if self.everywhere or not tensor.numel():
            return self.everywhere
        begin = tensor.data_ptr()
        before = int(np.searchsorted(self._begins, np.uint64(begin + extent_bytes(tensor))))
        return before > 0 and int(self._ends[before - 1]) > begin

    def _gather(self, source: Any) -> None:
        # All parts of a level at once: there may be many rows, and each counts.
        level = [source]
        while level:
            self._tensors += [part for part in level if type(part) is torch.Tensor]
            below = [*chain.from_iterable(part for part in level if type(part) is tuple)]
            for part in (part for part in level if type(part) not in _FREQUENT):
                if isinstance(part, torch.Tensor):
                    self._tensors.append(part)
                elif isinstance(part, np.ndarray):
                    self._arrays += _range_of(part)
                elif id(part) not in self._containers:
                    self._containers[id(part)] = part, [*_parts_of(part)]
                    below += self._containers[id(part)][1]
            level = below


def _parts_of(part: Any) -> Iterable[Any]:
    kind = type(part)
    if isinstance(part, (list, tuple)):
        return part
    if isinstance(part, Mapping):
        return part.values()
    if kind in _TORCHS:
        return vars(part).values()
    return pytree.SUPPORTED_NODES[kind].flatten_fn(part)[0] if kind in pytree.SUPPORTED_NODES else ()


def _range_of(array: np.ndarray) -> list[tuple[int, int]]:
    if not array.size:
        return []
    begin, steps = array.__array_interface__["data"][0], [(n - 1) * s for n, s in zip(array.shape, array.strides)]
    return [(begin + sum(s for s in steps if s < 0), sum(map(abs, steps)) + array.itemsize)]
