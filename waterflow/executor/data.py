"""Batches for a job, drawn with the job's own random numbers."""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from waterflow import _C
from waterflow.errors import InvalidJobError


class Batches:
    """The batches of one job: one pass per call of ``epoch()``.

    They are the same whatever other jobs read the same loader at the same time. A DataLoader is read through a copy
    whose samplers draw from a generator of the job's own; all that is drawn in this process beside that (an iterable's
    own numbers, transforms) comes from the process's default generator, which stands in for a second one of the job,
    under one lock. Both begin where ``generator`` stands.

    Without a name they belong to no job. ``passes`` were made over the data before.
    """

    def __init__(
        self, name: str | None, data: Iterable[Any] | Callable[[], Iterable[Any]], generator: torch.Generator,
        passes: int = 0,
    ) -> None:  # fmt: skip
        self._what = "shared data" if name is None else f"data of job {name!r}"
        self._generator = generator
        order = torch.Generator()
        order.set_state(generator.get_state())
        self._make: Callable[[], Any] = data if is_function(data) else lambda: data  # type: ignore[assignment]
        with self._own_numbers():
            source = self._make()
        if not isinstance(source, Iterable):
            raise InvalidJobError(
                f"{self._what} made a {type(source).__name__}, which cannot be iterated; "
                "make a list of batches or a DataLoader"
            )
        self.source = _own_loader(source, order) if isinstance(source, DataLoader) else source
        # Nothing is drawn here for a batch by workers, nor for one that is there already.
        in_workers = isinstance(source, DataLoader) and source.num_workers > 0
        self._draws = not in_workers and type(source) not in (list, tuple)
        self._reading: Iterator[Any] | None = None
        self._passes, self._before = 0, passes

    def __len__(self) -> int:
        """Batches of an epoch; TypeError where the source does not tell."""
        return len(self.source)  # type: ignore[arg-type]

    def epoch(self) -> Iterator[Any]:
        """One pass over the data. Raises InvalidJobError when it holds no batch."""
        with self._own_numbers():
            if self._passes and isinstance(self.source, Iterator):
                self.source = self._make()
            iterator = self._reading = iter(self.source)
        self._passes += 1
        for count in itertools.count():
            try:
                with self._own_numbers() if self._draws else contextlib.nullcontext():
                    batch = next(iterator)
            except StopIteration:
                if count == 0:
                    raise InvalidJobError(self._empty()) from None
                return
            yield batch

    def close(self) -> None:
        """End the loader's worker processes, wherever the pass stands. Calling it twice is no error."""
        shutdown = getattr(self._reading, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()

    def _empty(self) -> str:
        epoch = self._before + self._passes
        if epoch > 1:
            return (
                f"{self._what} gave no batch in epoch {epoch}: it can be read only once. "
                "Pass a list, a DataLoader, or a function that makes a fresh iterator"
            )
        return f"{self._what} is empty: there is nothing to train on"

    def _own_numbers(self) -> contextlib.AbstractContextManager[Any]:
        return _C.GeneratorSwap(self._generator)


def is_function(data: Any) -> bool:
    """Whether the data of a job is a function that makes it."""
    return callable(data) and not isinstance(data, Iterable)


def _own_loader(loader: DataLoader[Any], generator: torch.Generator) -> DataLoader[Any]:
    """A copy of ``loader`` that shares its data set and has samplers that draw from ``generator``."""
    own = copy.copy(loader)
    # DataLoader forbids to assign these.
    own.__dict__.update(
        generator=generator,
        _iterator=None,
        sampler=_own_sampler(loader.sampler, generator),
        batch_sampler=_own_sampler(loader.batch_sampler, generator),
    )
    return own


def _own_sampler(sampler: Any, generator: torch.Generator) -> Any:
    """The same for one of torch's samplers; a user's own is shared."""
    if not isinstance(sampler, Sampler) or type(sampler).__module__ != Sampler.__module__:
        return sampler
    own = copy.copy(sampler)
    if hasattr(own, "generator"):
        own.generator = generator
    if hasattr(own, "sampler"):  # one that makes batches of another's indices
        own.sampler = _own_sampler(own.sampler, generator)
    return own
