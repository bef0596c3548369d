"""Whether a job's next batch may be read while its last steps still run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
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
    default_collate,
)

_SAMPLERS = (BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)


def in_workers(source: Any) -> bool:
    """Whether other processes make the batches."""
    return isinstance(source, DataLoader) and source.num_workers > 0


def may_read_ahead(source: Any) -> bool:
    """Whether no batch can depend on the model, or lie in memory that the next one is written to.

    That is known of batches that are there already (a list, a tuple, the rows of a tensor), of those that other processes
    make, and of those that torch's own loader makes from torch's own data sets with torch's own samplers. Anything else runs
    code of the user's between two batches.
    """
    if type(source) in (list, tuple, torch.Tensor) or in_workers(source):
        return True
    return (
        type(source) is DataLoader
        and source.collate_fn is default_collate
        and source.batch_sampler is not None  # rows are copied into a batch
        and type(source.batch_sampler) in _SAMPLERS
        and type(source.sampler) in _SAMPLERS
        and user_data(source) is None
    )


def user_data(source: Any) -> Any:
    """The object whose code of the user's own is run for a batch: a data set's, or the iterable itself. None for torch's own."""
    if isinstance(source, DataLoader):
        return None if in_workers(source) else _user_data_set(source.dataset)
    return None if type(source) in (list, tuple, torch.Tensor) or isinstance(source, Iterator) else source


def _user_data_set(data: Any) -> Any:
    """The same of a data set: the first that torch's own are made of."""
    parts: tuple[Any, ...]
    if type(data) is Subset:
        parts = (data.dataset,)
    elif type(data) is ConcatDataset:
        parts = tuple(data.datasets)
    elif type(data) is StackDataset:
        parts = tuple(data.datasets.values() if isinstance(data.datasets, dict) else data.datasets)
    elif type(data) in (TensorDataset, list, tuple, torch.Tensor):
        return None
    else:
        return data
    return next((found for part in parts if (found := _user_data_set(part)) is not None), None)
