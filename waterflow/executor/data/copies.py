"""Copies of batches, and the address ranges of tensors.

Batches are copied to the device of a step; for a step that changes a batch that other jobs read, or whose batch lies in memory that
it changes; for checkpoints; and for shared data, if the user's data may write to the memory of an earlier batch again.
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from waterflow.partition.guards.step_key import extent_bytes, of_torch, ranges_of
from waterflow.partition.passes.operators import storage_id, with_lazy_bits

ALIGNMENT = 16  # bytes: of the largest elements


def copied(batch: Any) -> Any:
    """Return the batch with copies in the place of its tensors and arrays; one that occurs twice has one copy."""
    leaves, form = pytree.tree_flatten(batch)
    tensors = {id(leaf): leaf for leaf in leaves if isinstance(leaf, torch.Tensor)}
    copies: dict[int, Any] = dict(zip(tensors, copies_of([*tensors.values()])))
    copies.update((id(leaf), leaf.copy(order="K")) for leaf in leaves if isinstance(leaf, np.ndarray))
    return pytree.tree_unflatten([copies.get(id(leaf), leaf) for leaf in leaves], form)


def brought(batch: Any, device: torch.device, arrays: bool = False) -> Any:
    """Return the batch with copies on ``device``, a GPU, of what lies elsewhere; the batch itself if all of it is there.

    With ``arrays`` NumPy's arrays stay as they are, else they are brought as tensors. Returns before the copies are made: the
    caller's current stream makes them, from pinned memory.
    """
    batch_of_tensors = batch if arrays else of_torch(batch)
    leaves, form = pytree.tree_flatten(batch_of_tensors, is_leaf=lambda part: isinstance(part, PackedSequence))
    there = {id(leaf): _on(leaf, device) for leaf in leaves}  # a tensor that occurs twice has one copy
    if all(there[id(leaf)] is leaf for leaf in leaves):
        return batch
    return pytree.tree_unflatten([there[id(leaf)] for leaf in leaves], form)


def _on(leaf: Any, device: torch.device) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf.to(device) if hasattr(leaf, "to") else leaf  # a packed sequence keeps a part on the CPU
    if leaf.device == device:
        return leaf
    host = leaf.detach()
    if device.type == "cuda" and host.device.type == "cpu" and host.layout == torch.strided:
        host = host.pin_memory()  # torch keeps it until the copy is made
    return host.to(device, non_blocking=True).requires_grad_(leaf.requires_grad)


def copies_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return copies with the same strides and lazy bits; tensors that overlap in memory have copies that overlap alike."""
    # Sorted by place in memory, tensors that overlap stand side by side: each such run is copied as one block.
    copies: list[Any] = [None if _is_plain(tensor) else tensor.detach().clone() for tensor in tensors]
    spans = [
        (storage_id(tensor), tensor.data_ptr(), tensor.data_ptr() + extent_bytes(tensor), i)
        for i, tensor in enumerate(tensors)
        if copies[i] is None
    ]
    overlapping: list[list[int]] = []
    held, end = -1, 0
    for storage, begin, stop, i in sorted(spans):
        if storage == held and begin < end:
            overlapping[-1].append(i)
            end = max(end, stop)
        else:
            overlapping.append([i])
            held, end = storage, stop
    for together in overlapping:
        for i, copy in zip(together, _copied_together([tensors[i] for i in together])):
            copies[i] = copy
    return [copy.requires_grad_(tensor.requires_grad) for copy, tensor in zip(copies, tensors)]


def _is_plain(tensor: torch.Tensor) -> bool:
    dense = type(tensor) is torch.Tensor and tensor.layout == torch.strided and tensor.numel() > 0
    return dense and not tensor.is_quantized


def _copied_together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    first, *others = tensors
    if not others and first.is_contiguous() and not first.is_neg() and not first.is_conj():
        return [first.detach().clone(memory_format=torch.contiguous_format)]
    storage = tensors[0].untyped_storage()
    start = storage.data_ptr()
    first = tensors[0].data_ptr() - start
    first -= first % ALIGNMENT  # so that each tensor begins at a whole number of its elements
    end = max(tensor.data_ptr() + extent_bytes(tensor) for tensor in tensors) - start
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device)
    block = raw.set_(storage, first, (end - first,)).clone().untyped_storage()
    copies = []
    for tensor in tensors:
        place = (tensor.data_ptr() - start - first) // tensor.element_size()
        copy = tensor.detach().new_empty(0).set_(block, place, tensor.shape, tensor.stride())
        copies.append(with_lazy_bits(copy, tensor))
    return copies


class OwnBatches:
    """One job's copies of batches that other jobs may read, too.

    A captured step gets a copy only if it writes to its batch; an eager step always gets one.

    If the data yields the same objects in each epoch, as a list does, the copies are ``kept``: in a later epoch the job finds
    what it wrote, as it would alone.
    """

    def __init__(self, kept: bool) -> None:
        self._kept = kept
        self._made: dict[int, Any] = {}  # deepcopy's memo: copies by the id of the original, with what keeps that alive
        self._taken: dict[
            int, tuple[Any, Any]
        ] = {}  # by id: batches with NumPy arrays, and the form in tensors that a step takes
        self._writes = False  # some step of the job has written to its batch

    def of(self, batch: Any, as_taken: Callable[[Any], Any]) -> Any:
        """Return the job's copy of ``as_taken(batch)``, the batch as its step takes it, for a step that writes to it."""
        self._writes = self._kept
        batch = self._once(batch, as_taken)
        return deepcopy(batch, self._made) if self._kept else copied(batch)

    def _once(self, batch: Any, as_taken: Callable[[Any], Any]) -> Any:
        taken = as_taken(batch)
        return taken if taken is batch or not self._kept else self._taken.setdefault(id(batch), (batch, taken))[1]

    def run(self, work: Callable[[Any], Any], batch: Any, as_taken: Callable[[Any], Any]) -> Any:
        """Call ``work`` with a copy of ``as_taken(batch)``, which is kept if ``work`` has written to it; return its result.

        For steps that are not captured, of which it is not known before whether they write.
        """
        if self._writes:
            return work(self.of(batch, as_taken))
        batch = self._once(batch, as_taken)
        own = copied(batch)
        before, form = pytree.tree_flatten(own)
        versions = [_version(leaf) for leaf in before]
        try:
            return work(own)
        finally:
            now, formed = pytree.tree_flatten(own)
            same = form == formed and all(map(operator.is_, before, now))
            if self._kept and not (same and versions == [_version(leaf) for leaf in now]):
                self._writes = True
                self._made.update(zip(map(id, pytree.tree_leaves(batch)), before))
                self._made[id(batch)] = own
                self._made.setdefault(id(self._made), []).append(batch)  # kept alive, so that its id is not used again


def _version(leaf: Any) -> Any:
    # Arrays do not count their writes.
    return leaf._version if isinstance(leaf, torch.Tensor) else leaf.tobytes() if isinstance(leaf, np.ndarray) else 0


class Ranges:
    """The address ranges of tensors, which may overlap."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        ranges = ranges_of(tensors)
        self._starts = [begin for begin, _ in ranges]
        # A running maximum, as a range may enclose later ones.
        self._ends = list(accumulate((end for _, end in ranges), max))

    @property
    def spans(self) -> list[tuple[int, int]]:
        """Pairs of addresses, by begin: where a range begins, and the largest end of it and those before it."""
        return [*zip(self._starts, self._ends)]

    def have(self, tensor: torch.Tensor) -> bool:
        """Return True if the tensor has a byte in one of the ranges."""
        if not self._starts or not tensor.numel():
            return False
        begin = tensor.data_ptr()
        at = bisect_left(self._starts, begin + extent_bytes(tensor))  # the first range after the tensor
        return at > 0 and self._ends[at - 1] > begin
