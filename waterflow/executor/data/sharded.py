"""Batches that are cut into shards: by the indices of their rows where that is possible, else after they were read."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from waterflow.errors import CheckpointError, InvalidJobError
from waterflow.executor.data.digest import digest
from waterflow.executor.data.loader import Batches
from waterflow.executor.data.rows import SeededRows
from waterflow.executor.rng import own_numbers

SAMPLE = 4096  # bytes of a tensor in which batches are compared


@dataclass(frozen=True)
class Cut:
    """One batch: the number of rows of each shard, and the parts that were read here, by shard. Shards without rows have none.

    ``alike`` must be the same on all devices: the indices of the batch, if there are some, and of some rows the beginnings.
    """

    rows: tuple[int, ...]
    parts: dict[int, Any] = field(repr=False)
    alike: dict[str, Any] = field(default_factory=dict, repr=False)


def stream_seed(*numbers: int) -> int:
    """Return a seed that follows from whole numbers, such as (the job's seed, shard, step); others give unrelated streams."""
    told = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little") >> 1


def sizes(rows: int, shards: int) -> tuple[int, ...]:
    """Return the rows of each shard: as equal as possible, the first ones with one more."""
    return tuple(rows // shards + (shard < rows % shards) for shard in range(shards))


def cut(what: str, batch: Any, shards: int, mine: range) -> Cut:
    """Cut the tensors of a batch along their first dimension, in copies; other leaves, and scalars, are in every part.

    Raises InvalidJobError if tensors have different numbers of rows, or none has rows.
    """
    leaves, spec = pytree.tree_flatten(batch)
    cuttable = [isinstance(leaf, torch.Tensor) and leaf.dim() > 0 for leaf in leaves]
    lengths = {len(leaf) for leaf, one in zip(leaves, cuttable) if one}
    if len(lengths) != 1:
        raise InvalidJobError(
            f"{what}: a batch is cut into shards by rows, and tensors of this one have {sorted(lengths)} rows; return tensors of one "
            "first dimension, or read a map-style data set through a DataLoader, which is cut by its indices"
        )
    rows = sizes(lengths.pop(), shards)
    parts = {}
    for shard in (shard for shard in mine if rows[shard]):
        begin = sum(rows[:shard])
        part = [leaf[begin : begin + rows[shard]].clone() if one else leaf for leaf, one in zip(leaves, cuttable)]
        parts[shard] = pytree.tree_unflatten(part, spec)
    return Cut(rows, parts)


def beginnings(batch: Any) -> list[Any]:
    """Return the leaves of a batch, of tensors the shape and a copy of the first numbers."""
    found: list[Any] = []
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            rows = leaf.detach()[: 1 + SAMPLE // max(1, leaf[0].nbytes)] if leaf.dim() and len(leaf) else leaf.detach()
            found += [tuple(leaf.shape), rows.reshape(-1)[: SAMPLE // leaf.element_size()].cpu().clone()]
        elif isinstance(leaf, np.ndarray):
            found += [leaf.shape, leaf.reshape(-1)[: SAMPLE // max(1, leaf.itemsize)].copy()]
        else:
            found.append(leaf)
    return found


class _Parts:
    """A batch sampler that yields the indices of the shards in ``mine`` one by one, and notes in ``batches`` what it has yielded.

    The one that it divides draws from ``numbers``, which no reading of rows changes. Where devices are ``compared``, some rows of a few
    batches are yielded first, for all of them to read: of the first batch of a pass, and then ever more rarely. Batches that are skipped
    must be those that gave the digest ``skipped``, if there is one.
    """

    def __init__(self, batches: Any, shards: int, seed: int) -> None:
        self.sampler, self._shards, self._seed = batches, shards, seed
        self.numbers = torch.Generator().manual_seed(seed)
        self.mine = range(shards)
        self.skip = self.passes = 0
        self.skipped: bytes | None = None
        self.compared = False
        # The rows of each shard, the indices, whether some rows come first, and a digest of all indices of the pass so far.
        self.batches: deque[tuple[tuple[int, ...], list[Any], bool, bytes]] = deque()

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        self.batches.clear()
        skip, self.skip, order = self.skip, 0, b""
        with own_numbers(self.numbers):
            batches = iter(self.sampler)
        for number in itertools.count():
            with own_numbers(self.numbers):
                indices = next(batches, None)
            if (number == skip and self.skipped not in (None, order)) or (indices is None and number < skip):
                raise InvalidJobError(
                    f"data that was read up to batch {skip} of a pass is read again, as devices have changed or the job goes on, and its "
                    "batches have other indices: rows would be left out. Let samplers draw from torch's numbers, or from a torch.Generator "
                    "that they have as an attribute"
                )
            if indices is None:
                return
            order = digest([order, indices := list(indices)])
            if number < skip:
                continue
            rows = sizes(len(indices), self._shards)
            probed = self.compared and (number == skip or not number & (number - 1))
            self.batches.append((rows, indices, probed, order))
            if probed:
                # A whole part, as a collate function gets it anyway.
                yield stream_seed(self._seed, self._shards, self.passes, number), indices[: rows[0]]
            for shard in (shard for shard in self.mine if rows[shard]):
                begin = sum(rows[:shard])
                yield stream_seed(self._seed, shard, self.passes, number), indices[begin : begin + rows[shard]]

    def __len__(self) -> int:
        return len(self.sampler)


class ShardedBatches(Batches):
    """The batches of a job with shards, of which the parts in ``mine`` are read here; they are ``compared`` where others read the rest.

    Both count from the next pass on. The rows of a map-style data set in a DataLoader are read one part after the other, each collated
    for itself, and a pass goes on at any batch without reading those before. Other data is read whole and cut.
    """

    def __init__(
        self,
        name: str | None,
        data: Any,
        generator: torch.Generator,
        *,
        shards: int,
        seed: int,
        on_device: Sequence[torch.Generator] = (),
    ) -> None:
        # Each step has ended before the next batch is read.
        super().__init__(name, data, generator, read_ahead=True, on_device=on_device)
        self.mine = range(shards)
        self.compared = False
        self._shards = shards
        self._parts: _Parts | None = None
        self._early: list[Any] = []  # parts that were read before their batch's turn
        self._orders: deque[bytes | None] = deque(maxlen=4)  # digests of the indices up to each of the last batches
        self.own = None  # parts are copies
        source = self.source
        if (
            isinstance(source, DataLoader)
            and source.batch_sampler is not None
            and not isinstance(source.dataset, IterableDataset)
        ):
            self._parts = _Parts(source.batch_sampler, shards, seed)
            source.__dict__.update(dataset=SeededRows(source.dataset), batch_sampler=self._parts)

    def epoch(self) -> Iterator[Any]:
        """Yield the ``Cut`` batches of one pass, as ``Batches.epoch``."""
        if self._parts is not None:
            self._parts.mine, self._parts.compared, self._early = self.mine, self.compared, []
            self._parts.passes, place = self._passes, self._go_on or {"read": 0}
            self._parts.skip, self._parts.skipped = place["read"], place.get("order")
            self._orders.append(self._parts.skipped)
        return super().epoch()

    def _next(self) -> Any:
        if self._parts is None:
            made = cut(self._what, batch := super()._next(), self._shards, self.mine)
            return replace(made, alike={"rows": beginnings(batch)}) if self.compared else made
        if not self._parts.batches:
            try:
                self._early.append(super()._next())
            except StopIteration:
                if not self._parts.batches:
                    raise
        rows, indices, probed, order = self._parts.batches.popleft()
        self._orders.append(order)
        alike: dict[str, Any] = {"indices": indices} if self.compared else {}
        if probed:
            alike["rows"] = beginnings(self._read_part())
        return Cut(rows, {shard: self._part(rows[shard]) for shard in self.mine if rows[shard]}, alike)

    def _read_part(self) -> Any:
        return self._early.pop() if self._early else super()._next()

    def _part(self, rows: int) -> Any:
        part = self._read_part()
        lengths = (len(leaf) for leaf in pytree.tree_leaves(part) if isinstance(leaf, torch.Tensor) and leaf.dim())
        if (made := next(lengths, rows)) != rows and getattr(self.source, "batch_transform", None) is not None:
            raise InvalidJobError(
                f"{self._what}: batch_transform made {made} rows of {rows}. A job with shards= weighs each part of a batch by its rows: "
                "return as many, or change the rows in the data set"
            )
        return part

    def place(self, in_pass: bool = False) -> dict[str, Any]:
        """Return the place of reading, as ``Batches.place``, with a digest of the indices that were read."""
        place = super().place(in_pass)
        if self._parts is not None and place["read"] and self._go_on is None:
            place["order"] = self._orders[-1 - len(self._back)]
        return place

    def _skip(self, place: dict[str, Any]) -> Iterator[Any]:
        if self._parts is None:
            yield from super()._skip(place)
            return
        self._read = place["read"]
        with contextlib.suppress(TypeError):  # a sampler may have no length
            if self._read > (length := len(self._parts)):
                raise CheckpointError(
                    f"the {self._what} has {length} batches a pass; the checkpoint has read {self._read}. Go on with the data that it "
                    "was made with"
                )
