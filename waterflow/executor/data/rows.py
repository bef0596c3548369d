"""Rows of torch's own data sets, a batch at a time: one selection from each tensor in the place of a fetch for each row."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
from torch.utils import data as torch_data
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.data import ConcatDataset, StackDataset, Subset, TensorDataset, default_collate, get_worker_info
from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map
from torch.utils.data.dataloader import _DatasetKind, _SingleProcessDataLoaderIter

from waterflow.errors import InvalidJobError

_ROWS: tuple[Any, ...] = ((), {})  # what torch's data sets return, besides tensors
_INTEGERS = {int, np.int64, np.int32}
INDICES = {list, tuple, range, np.ndarray, torch.Tensor}  # kinds of Subset's indices that run no code of the user's

_T_co = TypeVar("_T_co", covariant=True)


class _Unsure(Exception):
    """It is not sure that the result would equal torch's own."""


# Torch's own way meets these errors of rows and indices again, and raises them in its words.
_REFUSALS = (_Unsure, IndexError, TypeError, ValueError, RuntimeError)


class DataLoader(torch_data.DataLoader[_T_co]):
    """``torch.utils.data.DataLoader``, which takes the rows of a batch at once where torch's own data sets hold them.

    The same arguments, order, random numbers and batches as torch's. Where the data is a tensor, a ``TensorDataset``, or made of
    such by ``Subset``, ``random_split``, ``ConcatDataset`` and ``StackDataset``, with ``default_collate`` and without workers, a batch
    is one ``index_select`` of each tensor; all else is read as torch reads it. In plain PyTorch, too.

    Args:
        batch_transform: A function of a whole batch (normalize, flip by a mask) that returns the batch to train on. It is called
            once a batch, in the workers where there are some; with ``Job(shards=)`` once for each part, whose rows must stay as many.
            Jobs read such batches ahead only with ``Job(read_ahead=True)``.

    Raises:
        InvalidJobError: ``batch_transform`` is no function, or has returned None.
    """

    batch_transform: Callable[[Any], Any] | None = None

    def __init__(self, dataset: Any, *args: Any, batch_transform: Callable[[Any], Any] | None = None, **kwargs: Any) -> None:
        super().__init__(dataset, *args, **kwargs)
        if batch_transform is not None:
            if not callable(batch_transform):
                raise InvalidJobError(f"batch_transform must be a function of a batch; got {type(batch_transform).__name__}")
            self.batch_transform = batch_transform

    def _get_iterator(self) -> Any:
        own = self
        if self.batch_transform is not None:
            own = object.__new__(type(self))  # not copy.copy: a subclass may leave things out of its pickled state
            own.__dict__.update(self.__dict__, collate_fn=_Transformed(self.collate_fn, self.batch_transform))
        return at_once(super(DataLoader, own)._get_iterator())


class _Transformed:
    """Collates and transforms; picklable, for workers."""

    def __init__(self, collate: Any, transform: Callable[[Any], Any]) -> None:
        self.collate, self._transform = collate, transform

    def __call__(self, rows: Any) -> Any:
        return self.transformed(self.collate(rows))

    def transformed(self, batch: Any) -> Any:
        made = self._transform(batch)
        if made is None:
            name = getattr(self._transform, "__name__", type(self._transform).__name__)
            raise InvalidJobError(f"batch_transform {name} returned None; return the batch that it has made or changed")
        return made


class SeededRows:
    """A data set of which a loader asks (seed, indices); random numbers of its rows follow from the seed alone."""

    def __init__(self, data: Any) -> None:
        self.dataset = data

    def seeded(self, asked: tuple[int, list[Any]]) -> list[Any]:
        """Seed the random numbers; return the indices."""
        seed, indices = asked
        torch.manual_seed(seed)  # in this process that is the job's own generator
        if get_worker_info() is not None:
            random.seed(seed)
            np.random.seed(seed % 2**32)
        return indices

    def __getitems__(self, asked: tuple[int, list[Any]]) -> list[Any]:
        indices = self.seeded(asked)
        own = getattr(self.dataset, "__getitems__", None)
        return own(indices) if own else [self.dataset[index] for index in indices]


def leaves_of(data: Any) -> Iterator[Any]:
    """Yield the data sets of which torch's own containers make ``data``: itself, if it is none; and indices of the user's kind."""
    if type(data) in (Subset, SeededRows):
        yield from leaves_of(data.dataset)
        if type(chosen := getattr(data, "indices", ())) not in INDICES:
            yield chosen
    elif type(data) in (ConcatDataset, StackDataset):
        for part in data.datasets.values() if isinstance(data.datasets, dict) else data.datasets:
            yield from leaves_of(part)
    else:
        yield data


def of_tensors(data: Any) -> bool:
    """Return True if torch's own data sets hold all rows of ``data`` in tensors."""
    return all(type(leaf) in (torch.Tensor, TensorDataset) for leaf in leaves_of(data))


def at_once(reading: Any) -> Any:
    """Make torch's iterator of a loader without workers take the rows of a batch at once; return it, whatever it is.

    What it draws, its batch sampler and pinning stay torch's: only fetching and collating differ.
    """
    if type(reading) is _SingleProcessDataLoaderIter and not is_at_once(reading) and of_tensors(reading._dataset):
        fetcher = reading._dataset_fetcher
        collate = fetcher.collate_fn
        inner = collate.collate if isinstance(collate, _Transformed) else collate
        plain = default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn and not any(
            isinstance(of, kinds) for kinds in default_collate_fn_map for of in _ROWS
        )  # else the user has changed how torch collates
        if reading._dataset_kind == _DatasetKind.Map and reading._auto_collation and inner is default_collate and plain:
            reading._dataset_fetcher = _AtOnce(fetcher)
    return reading


def is_at_once(reading: Any) -> bool:
    """Return True if ``at_once`` has changed this iterator."""
    return type(getattr(reading, "_dataset_fetcher", None)) is _AtOnce


class _AtOnce:
    """In the place of torch's fetcher of a map-style data set, until a batch is not sure to be equal to torch's."""

    def __init__(self, torchs: Any) -> None:
        self._torchs = torchs
        self._tries = True

    def fetch(self, asked: Any) -> Any:
        if not self._tries:
            return self._torchs.fetch(asked)
        data, indices = self._torchs.dataset, asked
        if isinstance(data, SeededRows):
            data, indices = data.dataset, data.seeded(asked)
        try:
            batch = _rows(data, _checked(indices))
        except _REFUSALS:
            self._tries = False
            return self._torchs.fetch(asked)
        collate = self._torchs.collate_fn
        return collate.transformed(batch) if isinstance(collate, _Transformed) else batch


def _checked(indices: Any) -> np.ndarray:
    # Whole numbers in a row, or _Unsure: a bool, a tensor or an object may mean something else as an index. A sequence of the
    # user's own kind is not even looked at, as torch's way would be its second look.
    if type(indices) in (list, tuple) and not {*map(type, indices)} <= _INTEGERS:
        raise _Unsure
    made = np.asarray(indices) if type(indices) in (list, tuple, np.ndarray) else np.zeros(0)
    if made.dtype not in (np.int64, np.int32) or made.ndim != 1 or not len(made):
        raise _Unsure
    return made


def _rows(data: Any, at: np.ndarray) -> Any:
    # What default_collate makes of the rows ``at`` of torch's own containers, of exactly these types.
    kind = type(data)
    if kind is torch.Tensor:
        return _selected(data, at)
    if "__getitems__" in getattr(data, "__dict__", ()):
        raise _Unsure
    if kind is TensorDataset:
        return [_selected(tensor, at) for tensor in data.tensors]
    if kind is Subset:
        return _rows(data.dataset, _chosen(data.indices, at))
    if kind is StackDataset:
        parts = data.datasets
        return {name: _rows(part, at) for name, part in parts.items()} if type(parts) is dict else [_rows(p, at) for p in parts]
    if kind is ConcatDataset:
        return _joined(data, at)
    raise _Unsure


def _selected(tensor: Any, at: np.ndarray) -> torch.Tensor:
    unlike = type(tensor) is not torch.Tensor or tensor.requires_grad or tensor.layout != torch.strided or not tensor.dim()
    # Torch keeps the channels_last of such rows.
    unlike = unlike or (tensor.dim() > 4 and not tensor[:1].is_contiguous())
    if unlike or tensor.is_conj() or tensor.is_neg() or at.min() < 0 or at.max() >= len(tensor):
        raise _Unsure
    return tensor.index_select(0, torch.tensor(at, device=tensor.device))


def _chosen(indices: Any, at: np.ndarray) -> np.ndarray:
    if at.min() < 0:
        raise _Unsure
    if type(indices) is np.ndarray or (type(indices) is torch.Tensor and not indices.is_cuda):
        return _checked(np.asarray(indices)[at])
    return _checked([indices[i] for i in at.tolist()] if type(indices) in (list, tuple, range) else None)


def _joined(data: ConcatDataset[Any], at: np.ndarray) -> Any:
    ends = np.asarray(data.cumulative_sizes)
    if at.min() < 0 or at.max() >= ends[-1]:
        raise _Unsure
    part_of = np.searchsorted(ends, at, side="right")
    inside = at - np.concatenate([[0], ends])[part_of]
    order = np.argsort(part_of, kind="stable")
    parts = [tree_flatten(_rows(data.datasets[part], inside[part_of == part])) for part in np.unique(part_of)]
    form = parts[0][1]
    columns = [*zip(*(leaves for leaves, _ in parts))]
    alike = all(len({(one.shape[1:], one.dtype, one.device) for one in column}) == 1 for column in columns)
    if not alike or any(each != form for _, each in parts):
        raise _Unsure
    back = np.argsort(order)
    whole = (torch.cat(column) for column in columns)
    return tree_unflatten([one.index_select(0, torch.tensor(back, device=one.device)) for one in whole], form)
