"""Whether a job's next batch may be read while its last steps still run."""

from __future__ import annotations

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)

from waterflow.errors import CheckpointError, InvalidJobError
from waterflow.executor.cancel import Turn, doing
from waterflow.executor.data.copies import OwnBatches, copied
from waterflow.executor.rng import own_numbers

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


@doing("reading its data", interruptible=True)
class Batches:
    """The batches of one job: one pass per call of ``epoch()``.

    They are the same whatever other jobs read the same loader at the same time. A DataLoader is read through a copy
    whose samplers draw from a generator of the job's own; for all that is drawn beside that on the reading thread (an
    iterable's own numbers, transforms) a second one of the job stands in for the process's default generator. Both begin
    where ``generator`` stands. Nobody waits for another job's data: only a data set that several jobs read is read by one at
    a time, for it may keep a file and its place in it.

    ``read_ahead`` says whether a batch may be read while steps on those before it still run; None: ``may_read_ahead`` decides.

    Without a name they belong to no job. ``passes`` were made over the data before.
    """

    def __init__(
        self, name: str | None, data: Iterable[Any] | Callable[[], Iterable[Any]], generator: torch.Generator,
        passes: int = 0, read_ahead: bool | None = None,
    ) -> None:  # fmt: skip
        self._what = "shared data" if name is None else f"data of job {name!r}"
        self._generator = generator
        self._given = data
        order = self._order = torch.Generator()
        order.set_state(generator.get_state())
        self._make: Callable[[], Any] = data if is_function(data) else lambda: data  # type: ignore[assignment]
        with self._own_numbers():
            source = self._make()
        if not isinstance(source, Iterable):
            raise InvalidJobError(
                f"{self._what} made a {type(source).__name__}, which cannot be iterated; "
                "make a list of batches or a DataLoader"
            )
        self.source: Any = _own_loader(source, order) if isinstance(source, DataLoader) else source
        # Nothing is drawn here for a batch by workers, nor for one that is there already.
        self._draws = not in_workers(source) and type(source) not in (list, tuple)
        self.own = OwnBatches(kept=True) if type(source) in (list, tuple) else None  # other jobs may read the same
        self.reads_ahead = may_read_ahead(source) if read_ahead is None else read_ahead
        self._turn = _turn_of(source)
        self._reading: Iterator[Any] | None = None
        self._passes, self._before = 0, passes
        self._back: list[Any] = []  # batches that were given and not trained on
        self._read = 0  # batches of the pass that has begun; none between two passes
        self._ended = 0  # of the one that has ended
        self._began: dict[str, Any] = {}  # where all numbers stood at its beginning
        self._go_on: dict[str, Any] | None = None

    def __len__(self) -> int:
        """Batches of an epoch; TypeError where the source does not tell."""
        return len(self.source)  # type: ignore[arg-type]

    def epoch(self) -> Iterator[Any]:
        """One pass over the data, or the rest of it after ``go_on_from``. Raises InvalidJobError when it holds no batch."""
        place, self._go_on = self._go_on, None
        if place is not None:
            self._set_numbers(place["began"])
        began = self._numbers()
        with self._own_numbers(), self._turn:
            if self._passes and isinstance(self.source, Iterator):
                self.source = self._make()
            if place is not None and place["source"] is not None:
                self.source.load_state_dict(place["source"])
            self._reading = iter(self.source)
        self._passes += 1
        self._read, self._began, self._back = 0, began, []
        if place is not None:
            self._back = list(place.get("back", ()))
            yield from self._skip(place)
        while True:
            if self._back:
                yield self._back.pop()
                continue
            try:
                batch = self._next()
            except StopIteration:
                if self._read == 0:
                    raise InvalidJobError(self._empty()) from None
                self._ended, self._read = self._read, 0
                return
            self._read += 1
            yield batch

    def _next(self) -> Any:
        assert self._reading is not None
        if not self._draws:
            return next(self._reading)
        with self._own_numbers(), self._turn:
            return next(self._reading)

    # -- places

    def put_back(self, batch: Any) -> None:
        """The last batch was not trained on: it will be given again."""
        self._back.append(batch)

    def place(self, in_pass: bool = False) -> dict[str, Any]:
        """Where reading stands between two batches: plain data and tensors, for ``go_on_from``. ``in_pass``: not behind its end.

        Raises CheckpointError for data that cannot be read again from a place.
        """
        if (why := why_not_again(self._what, self._given, self.source)) is not None:
            raise CheckpointError(why)
        if self._go_on is not None:
            return self._go_on
        read = self._read or (self._ended if in_pass else 0)
        if read and not self._read and _has_state(self.source):
            raise CheckpointError(f"the {self._what} may take the end of its pass for the beginning of the next one")
        now = self._numbers()
        source = None
        if _has_state(self.source):
            with self._own_numbers():
                source = copy.deepcopy(self.source.state_dict())
        return {
            "passes": self._passes - (read > 0),
            # What was put back is read again, or, where the data's own place is behind it, kept.
            "read": read if source is not None else read - len(self._back),
            "back": copied(self._back) if source is not None else [],
            "began": self._began if read else now,
            "now": now,
            "source": source,
        }

    def go_on_from(self, place: dict[str, Any]) -> None:
        """The next pass begins where ``place()`` of the same data stood, in whatever process.

        Data that keeps its own place (``state_dict``) is asked to go there. Other data is read from the beginning of the pass
        with the random numbers of that time, and the batches that were read already are let go.
        """
        if (place["source"] is not None) != _has_state(self.source):
            has = "has" if _has_state(self.source) else "has not"
            raise CheckpointError(
                f"the {self._what} {has} the methods state_dict and load_state_dict, unlike that of the checkpoint; go on "
                "with the data that it was made with"
            )
        self._passes = place["passes"]
        self._go_on = place

    def _skip(self, place: dict[str, Any]) -> Iterator[Any]:
        if place["source"] is not None:
            if place["read"]:  # its iterator has drawn again what had been drawn
                self._set_numbers(place["now"])
                self._read = place["read"]
            else:
                yield from self._first_after_an_end()
            return
        for self._read in range(1, place["read"] + 1):
            try:
                self._next()
            except StopIteration:
                raise CheckpointError(
                    f"the {self._what} ended after {self._read - 1} batches of the pass; the checkpoint has read "
                    f"{place['read']}. Go on with the data that it was made with"
                ) from None

    def _first_after_an_end(self) -> Iterator[Any]:
        """Data that was asked for its state at the end of a pass may go on there: it is then read anew."""
        try:
            batch = self._next()
        except StopIteration:
            with self._own_numbers():
                self._reading = iter(self.source)
            return
        self._read = 1
        yield batch

    def _numbers(self) -> dict[str, Any]:
        """Where all generators stand that the order or the values of batches may come from."""
        return {
            "own": self._generator.get_state(),
            "order": self._order.get_state(),
            "others": [generator.get_state() for generator in self._other_generators()],
        }

    def _set_numbers(self, numbers: dict[str, Any]) -> None:
        self._generator.set_state(numbers["own"])
        self._order.set_state(numbers["order"])
        for generator, state in zip(self._other_generators(), numbers["others"]):
            generator.set_state(state)

    def _other_generators(self) -> list[torch.Generator]:
        """Those that the user's own objects keep: the source, its samplers, its data set."""
        source = self.source
        sampler, batches = getattr(source, "sampler", None), getattr(source, "batch_sampler", None)
        owners = [source, sampler, batches, getattr(batches, "sampler", None), getattr(source, "dataset", None)]
        found: list[torch.Generator] = []
        for owner in owners:
            for value in getattr(owner, "__dict__", {}).values():
                if isinstance(value, torch.Generator) and not any(value is g for g in (self._order, *found)):
                    found.append(value)
        return found

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
        return own_numbers(self._generator)


_turns: dict[int, Turn] = {}  # by the identity of what is read
_guard = threading.Lock()


def _turn_of(source: Any) -> contextlib.AbstractContextManager[None]:
    """Readers of one object of the user's take turns."""
    if (read := user_data(source)) is None:
        return contextlib.nullcontext()
    with _guard:
        if id(read) not in _turns:
            try:
                weakref.finalize(read, _turns.pop, id(read), None)
            except TypeError:  # nothing tells when it has gone
                return contextlib.nullcontext()
            _turns[id(read)] = Turn()
        return _turns[id(read)]


def is_function(data: Any) -> bool:
    """Whether the data of a job is a function that makes it."""
    return callable(data) and not isinstance(data, Iterable)


def why_not_again(what: str, given: Any, source: Any) -> str | None:
    """Why data cannot be read again from a place, in another process; None where it can. ``source`` was made of what was ``given``."""
    if _has_state(source):
        return None
    if isinstance(given, Iterator):
        return (
            f"the {what} is a {type(given).__name__}, which gives each batch only once: a checkpoint could not go on from its "
            "place. Pass a list, a DataLoader, a function that makes an iterator, or data with the methods state_dict and "
            "load_state_dict"
        )
    if isinstance(source, DataLoader) and source.persistent_workers and source.num_workers > 0:
        return (
            f"the workers of the {what} persist over epochs, and so do their random numbers, which cannot be asked for: a "
            "checkpoint could not go on from its place. Pass persistent_workers=False, or a loader with the methods state_dict "
            "and load_state_dict"
        )
    return None


def _has_state(data: Any) -> bool:
    """Whether data knows its own place, as torchdata's loaders do."""
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


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
