"""Batches that are cut into shards: by the indices of their rows where that is possible, else after they were read."""

from __future__ import annotations

import hashlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, IterableDataset

from waterflow.errors import CheckpointError, InvalidJobError
from waterflow.executor.data.loader import Batches
from waterflow.executor.data.rows import SeededRows
from waterflow.executor.rng import own_numbers


@dataclass(frozen=True)
class Cut:
    """One batch: the number of rows of each shard, and the parts that were read here, by shard. Shards without rows have none."""

    rows: tuple[int, ...]
    parts: dict[int, Any] = field(repr=False)


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


class _Parts:
    """A batch sampler that yields the indices of the shards in ``mine`` one by one, and notes the rows of each batch.

    The one that it divides draws from ``numbers``, which no reading of rows changes.
    """

    def __init__(self, batches: Any, shards: int, seed: int) -> None:
        self.sampler, self._shards, self._seed = batches, shards, seed
        self.numbers = torch.Generator().manual_seed(seed)
        self.mine = range(shards)
        self.skip = self.passes = 0
        self.rows: deque[tuple[int, ...]] = deque()

    def __iter__(self) -> Iterator[tuple[int, list[Any]]]:
        self.rows.clear()
        skip, self.skip = self.skip, 0
        with own_numbers(self.numbers):
            batches = iter(self.sampler)
        for number in itertools.count():
            with own_numbers(self.numbers):
                indices = next(batches, None)
            if indices is None:
                return
            if number < skip:
                continue
            rows = sizes(len(indices), self._shards)
            self.rows.append(rows)
            for shard in (shard for shard in self.mine if rows[shard]):
                begin = sum(rows[:shard])
                yield stream_seed(self._seed, shard, self.passes, number), list(indices[begin : begin + rows[shard]])

    def __len__(self) -> int:
        return len(self.sampler)


class ShardedBatches(Batches):
    """The batches of a job with shards, of which the parts in ``mine`` are read here; ``mine`` counts from the next pass on.

    The rows of a map-style data set in a DataLoader are read one part after the other, each collated for itself, and a pass goes on
    at any batch without reading those before. Other data is read whole and cut.
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
        self._shards = shards
        self._parts: _Parts | None = None
        self._early: list[Any] = []  # parts that were read before their batch's turn
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
            self._parts.mine, self._early = self.mine, []
            self._parts.passes = self._passes
            self._parts.skip = self._go_on["read"] if self._go_on is not None else 0
        return super().epoch()

    def _next(self) -> Any:
        if self._parts is None:
            return cut(self._what, super()._next(), self._shards, self.mine)
        if not self._parts.rows:
            try:
                self._early.append(super()._next())
            except StopIteration:
                if not self._parts.rows:
                    raise
        rows = self._parts.rows.popleft()
        return Cut(rows, {shard: self._part(rows[shard]) for shard in self.mine if rows[shard]})

    def _part(self, rows: int) -> Any:
        part = self._early.pop() if self._early else super()._next()
        lengths = (len(leaf) for leaf in pytree.tree_leaves(part) if isinstance(leaf, torch.Tensor) and leaf.dim())
        if (made := next(lengths, rows)) != rows and getattr(self.source, "batch_transform", None) is not None:
            raise InvalidJobError(
                f"{self._what}: batch_transform made {made} rows of {rows}. A job with shards= weighs each part of a batch by its rows: "
                "return as many, or change the rows in the data set"
            )
        return part

    def _skip(self, place: dict[str, Any]) -> Iterator[Any]:
        if self._parts is None:
            yield from super()._skip(place)
            return
        self._read = place["read"]
        if self._read > len(self._parts):
            raise CheckpointError(
                f"the {self._what} has {len(self._parts)} batches a pass; the checkpoint has read {self._read}. Go on with the data "
                "that it was made with"
            )
