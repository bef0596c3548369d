"""Batches for a job, drawn with the job's own random numbers."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from waterflow import _C
from waterflow.errors import InvalidJobError


class Batches:
    """The batches of one job: one pass per call of ``epoch()``.

    Shuffling and transforms draw from ``generator``, whatever other jobs read the same loader at the same time:
    a DataLoader is read through a copy with a sampler of the job's own, and single-process reading happens with the
    process's default generator standing in for the job's, under one lock.
    """

    def __init__(
        self, name: str, data: Iterable[Any] | Callable[[], Iterable[Any]], generator: torch.Generator
    ) -> None:
        self._name = name
        self._generator = generator
        with self._own_numbers():
            source = data() if callable(data) and not isinstance(data, Iterable) else data
        if not isinstance(source, Iterable):
            raise InvalidJobError(f"data of job {name!r} made a {type(source).__name__}, which cannot be iterated")
        self._source = _own_loader(source, generator) if isinstance(source, DataLoader) else source
        self._in_workers = isinstance(source, DataLoader) and source.num_workers > 0
        self._passes = 0

    def __len__(self) -> int:
        """Batches of an epoch; TypeError where the source does not tell."""
        return len(self._source)  # type: ignore[arg-type]

    def epoch(self) -> Iterator[Any]:
        """One pass over the data. Raises InvalidJobError when it holds no batch."""
        with self._own_numbers():
            iterator = iter(self._source)
        self._passes += 1
        for count in itertools.count():
            try:
                with contextlib.nullcontext() if self._in_workers else self._own_numbers():
                    batch = next(iterator)
            except StopIteration:
                if count == 0:
                    raise InvalidJobError(self._empty()) from None
                return
            yield batch

    def _empty(self) -> str:
        if self._passes > 1:
            return (
                f"data of job {self._name!r} gave no batch in epoch {self._passes}: it can be read only once. "
                "Pass a list, a DataLoader, or a function that makes a fresh iterator"
            )
        return f"data of job {self._name!r} is empty: there is nothing to train on"

    def _own_numbers(self) -> contextlib.AbstractContextManager[Any]:
        return _C.GeneratorSwap(self._generator)


def _own_loader(loader: DataLoader[Any], generator: torch.Generator) -> DataLoader[Any]:
    """A copy of ``loader`` that shares its data set and has samplers that draw from ``generator``."""
    own = copy.copy(loader)
    state = own.__dict__
    state["generator"] = generator
    state["_iterator"] = None
    for name in ("sampler", "batch_sampler"):
        sampler = state.get(name)
        if sampler is None or type(sampler).__module__ != "torch.utils.data.sampler":
            continue
        state[name] = sampler = copy.copy(sampler)
        if getattr(sampler, "generator", _ABSENT) is not _ABSENT:
            sampler.generator = generator
    batch_sampler = state.get("batch_sampler")
    if batch_sampler is not None and getattr(batch_sampler, "sampler", None) is loader.sampler:
        batch_sampler.sampler = state["sampler"]
    return own


_ABSENT = object()
