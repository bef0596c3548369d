"""Batches of one job: reads the user's data with the job's own random numbers, and can go on from a place in it."""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

from waterflow.errors import CheckpointError, InvalidJobError
from waterflow.executor.cancel import READING, Turn, doing
from waterflow.executor.data import rows
from waterflow.executor.data.copies import OwnBatches, copied
from waterflow.executor.data.rows import at_once
from waterflow.executor.rng import own_numbers, set_state_of, state_of
from waterflow.executor.stats import AHEAD, AT_ONCE, BETWEEN, ROWS, ROWS_AHEAD, TENSORS, WHOLE, Account

_SAMPLERS = (BatchSampler, RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)

_READS: tuple[tuple[Any, str], ...] = ((_MultiProcessingDataLoaderIter, "__init__"), (_BaseDataLoaderIter, "__next__"))
_reads_lock = threading.Lock()
_timed: dict[int, Account] = {}  # by the thread that an objective runs on
_untimed: list[Callable[[Any], Any]] = []  # what stood in the place of _READS


@contextlib.contextmanager
def loaders_timed(account: Account) -> Iterator[None]:
    """Add the time that the calling thread spends in torch's loaders to ``account``, by what they load (``LOADING``)."""
    thread = threading.get_ident()
    with _reads_lock:
        if not _timed:
            _untimed[:] = [getattr(owner, name) for owner, name in _READS]
            for (owner, name), read in zip(_READS, _untimed):
                setattr(owner, name, _timing(read))
        _timed[thread] = account
    try:
        yield
    finally:
        with _reads_lock:
            del _timed[thread]
            if not _timed:
                for (owner, name), read in zip(_READS, _untimed):
                    setattr(owner, name, read)


def _timing(read: Callable[..., Any]) -> Callable[..., Any]:
    @doing(READING, interruptible=True)
    def timed(self: Any, *loader: Any) -> Any:
        if (account := _timed.get(threading.get_ident())) is None:
            return read(self, *loader)
        with account.spending(_kind_of(self)):
            return read(self, *loader)

    return timed


def _kind_of(reading: Any) -> str:
    # One of LOADING. It is known once the iterator is made, and kept there.
    its = vars(reading)
    if (known := its.get("_waterflow_kind")) is not None or "_dataset" not in its:
        return known or WHOLE  # made just now, with its workers
    data = its["_dataset"]
    if its["_num_workers"] or isinstance(data, IterableDataset):
        kind = WHOLE
    elif _user_data_set(data) is not None:
        kind = ROWS
    elif its["_collate_fn"] is not default_collate or not rows.of_tensors(data):
        kind = WHOLE
    else:
        kind = AT_ONCE if rows.is_at_once(reading) else TENSORS
    reading._waterflow_kind = kind
    return kind


def in_workers(source: Any) -> bool:
    """Return True if worker processes make the batches."""
    return isinstance(source, DataLoader) and source.num_workers > 0


def may_read_ahead(source: Any) -> bool:
    """Return True if no batch can depend on the model, or lie in memory that the next batch overwrites.

    That is known of batches that exist already (a list, a tuple, the rows of a tensor), of those that worker processes make,
    and of those that torch's own loader makes from torch's own data sets with torch's own samplers. Anything else runs the
    user's code between two batches.
    """
    if type(source) in (list, tuple, torch.Tensor) or in_workers(source):
        return True
    return (
        (type(source) is DataLoader or (type(source) is rows.DataLoader and source.batch_transform is None))
        and source.collate_fn is default_collate
        and source.batch_sampler is not None  # rows are copied into a batch
        and _is_torchs(source.batch_sampler)
        and _is_torchs(source.sampler)
        and user_data(source) is None
    )


def _is_torchs(sampler: Any) -> bool:
    inner = sampler.sampler if type(sampler) is BatchSampler else None
    chosen = sampler.indices if type(sampler) is SubsetRandomSampler else ()
    return type(sampler) in _SAMPLERS and type(chosen) in rows.INDICES and (inner is None or _is_torchs(inner))


def user_data(source: Any) -> Any:
    """Return the user's object whose code makes a batch in this process: a data set, or the iterable itself; None if none does."""
    if isinstance(source, DataLoader):
        return None if in_workers(source) else _user_data_set(source.dataset)
    return None if type(source) in (list, tuple, torch.Tensor) or isinstance(source, Iterator) else source


def _user_data_set(data: Any) -> Any:
    # The first of the user's among the data sets of which torch's own are made.
    own = (leaf for leaf in rows.leaves_of(data) if type(leaf) not in (TensorDataset, list, tuple, torch.Tensor))
    return next(own, None)


@doing(READING, interruptible=True)
class Batches:
    """The batches of one job: one pass over the data per call of ``epoch()``.

    The batches do not depend on other jobs that read the same loader at the same time. A DataLoader is read through a copy
    whose samplers draw from a generator of the job's own; for all other draws on the reading thread (an iterable's own
    numbers, transforms) a second generator of the job stands in for the process's default one. Both begin in the state of
    ``generator``. A data set that several jobs read is read by one thread at a time, as it may keep a file and a place in it.

    With ``read_ahead`` a batch may be read while steps on earlier ones still run; None lets ``may_read_ahead`` decide. Without
    a ``name`` the batches belong to no job. ``passes`` is the number of passes made over the data before. What the data draws on
    a GPU comes from ``on_device``.

    Raises InvalidJobError if a function given as ``data`` returns something that cannot be iterated.
    """

    def __init__(
        self,
        name: str | None,
        data: Iterable[Any] | Callable[[], Iterable[Any]],
        generator: torch.Generator,
        passes: int = 0,
        read_ahead: bool | None = None,
        on_device: Sequence[torch.Generator] = (),
    ) -> None:
        self._what = "shared data" if name is None else f"data of job {name!r}"
        self._generators = [generator, *on_device]
        self._given = data
        order = self._order = torch.Generator()
        order.set_state(generator.get_state())
        self._make: Callable[[], Any] = data if is_function(data) else lambda: data  # type: ignore[assignment]
        with self._own_numbers():
            source = self._make()
        if not isinstance(source, Iterable):
            raise InvalidJobError(
                f"{self._what} made a {type(source).__name__}, which cannot be iterated; make a list of batches or a DataLoader"
            )
        self.source: Any = _own_loader(source, order) if isinstance(source, DataLoader) else source
        # Nothing is drawn here for a batch by workers, nor for one that is there already.
        self._draws = not in_workers(source) and type(source) not in (list, tuple)
        self.own = OwnBatches(kept=True) if type(source) in (list, tuple) else None  # other jobs may read the same
        self.reads_ahead = may_read_ahead(source) if read_ahead is None else read_ahead
        makes_rows = isinstance(source, DataLoader) and user_data(source) is not None
        self.loading = BETWEEN if not self.reads_ahead else ROWS_AHEAD if makes_rows else AHEAD
        self._turn = _turn_of(source)
        self._reading: Iterator[Any] | None = None
        self._passes, self._before = 0, passes
        self._back: list[Any] = []  # batches that were yielded and not trained on
        self._read = 0  # batches read in the present pass; 0 between two passes
        self._ended = 0  # batches of the pass that has ended
        self._began: dict[str, Any] = {}  # the states of all generators at the beginning of the pass
        self._go_on: dict[str, Any] | None = None

    def __len__(self) -> int:
        """Return the batches of an epoch. Raises TypeError if the source has no length."""
        return len(self.source)  # type: ignore[arg-type]

    def epoch(self) -> Iterator[Any]:
        """Yield the batches of one pass, or of its rest after ``go_on_from``. Raises InvalidJobError if the pass has no batch."""
        place, self._go_on = self._go_on, None
        if place is not None:
            self._set_numbers(place["began"])
        began = self._numbers()
        with self._own_numbers(), self._turn:
            if self._passes and isinstance(self.source, Iterator):
                self.source = self._make()
            if place is not None and place["source"] is not None:
                self.source.load_state_dict(place["source"])
            self._reading = at_once(iter(self.source))
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

    def more(self, most: int) -> list[Any]:
        """Return at most so many of the batches that follow in this pass, if they exist already, as those of a list do.

        Those that are not trained on must be put back, the last one first.
        """
        if type(self.source) not in (list, tuple) or self._reading is None or most < 1:
            return []
        back = self._back[-most:][::-1]
        del self._back[len(self._back) - len(back) :]
        read = [*itertools.islice(self._reading, most - len(back))]
        self._read += len(read)
        return back + read

    # -- places

    def put_back(self, batch: Any) -> None:
        """Put back the last batch that was not trained on, so that it is yielded again."""
        self._back.append(batch)

    def place(self, in_pass: bool = False) -> dict[str, Any]:
        """Return the place of reading between two batches, as plain data and tensors for ``go_on_from``.

        With ``in_pass`` the place after the last batch belongs to the pass that has ended, not to the next. Raises
        CheckpointError for data that cannot be read again from a place.
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
            # A batch that was put back is read again; if the data's own place lies after it, the checkpoint contains it.
            "read": read if source is not None else read - len(self._back),
            "back": copied(self._back) if source is not None else [],
            "began": self._began if read else now,
            "now": now,
            "source": source,
        }

    def go_on_from(self, place: dict[str, Any]) -> None:
        """Begin the next pass at a ``place()`` of the same data, from this process or another.

        Data with a ``state_dict`` loads its own place. Other data is read from the beginning of the pass, with the random
        numbers of that time, and the batches that were read before are dropped. Raises CheckpointError if the place is of data
        of the other kind.
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
            if place["read"]:  # creating the iterator has drawn the numbers of the beginning of the pass a second time
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
        # Data that was asked for its state at the end of a pass may continue there, and be empty: it is then read anew.
        try:
            batch = self._next()
        except StopIteration:
            with self._own_numbers():
                self._reading = at_once(iter(self.source))
            return
        self._read = 1
        yield batch

    def _numbers(self) -> dict[str, Any]:
        # The states of all generators from which the order or the values of batches may come.
        return {
            "own": state_of(self._generators),
            "order": self._order.get_state(),
            "others": [generator.get_state() for generator in self._other_generators()],
        }

    def _set_numbers(self, numbers: dict[str, Any]) -> None:
        set_state_of(self._generators, numbers["own"])
        self._order.set_state(numbers["order"])
        for generator, state in zip(self._other_generators(), numbers["others"]):
            generator.set_state(state)

    def _other_generators(self) -> list[torch.Generator]:
        # Generators that the user's own objects have as attributes: the source, its samplers, its data set.
        owners, found = [self.source], list[torch.Generator]()
        for owner in owners:
            own = getattr(owner, "__dict__", {})
            for value in own.values():
                if isinstance(value, torch.Generator) and not any(value is g for g in (self._order, *found)):
                    found.append(value)
            inner = [own.get(name) for name in ("sampler", "batch_sampler", "dataset")]
            owners += [one for one in inner if not any(one is other for other in owners)]
        return found

    def close(self) -> None:
        """End the loader's worker processes, also in the middle of a pass. Closing twice is no error."""
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
        return own_numbers(*self._generators)


_turns: dict[int, Turn] = {}  # by the identity of what is read
_guard = threading.Lock()


def _turn_of(source: Any) -> contextlib.AbstractContextManager[None]:
    # Readers of one object of the user's take turns, as it may keep a file and a place in it.
    if (read := user_data(source)) is None:
        return contextlib.nullcontext()
    with _guard:
        if id(read) not in _turns:
            try:
                weakref.finalize(read, _turns.pop, id(read), None)
            except TypeError:  # it takes no weak references, so its entry would stay for ever
                return contextlib.nullcontext()
            _turns[id(read)] = Turn()
        return _turns[id(read)]


def is_function(data: Any) -> bool:
    """Return True if the data of a job is a function that makes it."""
    return callable(data) and not isinstance(data, Iterable)


def why_not_again(what: str, given: Any, source: Any) -> str | None:
    """Return the reason why data cannot be read again from a place in another process, or None if it can.

    ``given`` is what the user passed, ``source`` what is read; ``what`` names it in the message.
    """
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
    # The data keeps its own place, as torchdata's loaders do.
    return callable(getattr(data, "state_dict", None)) and callable(getattr(data, "load_state_dict", None))


def _own_loader(loader: DataLoader[Any], generator: torch.Generator) -> DataLoader[Any]:
    # The copy shares the data set; its samplers draw from the job's generator.
    own = copy.copy(loader)
    # DataLoader.__setattr__ refuses to assign these.
    own.__dict__.update(
        generator=generator,
        _iterator=None,
        sampler=_own_sampler(loader.sampler, generator),
        batch_sampler=_own_sampler(loader.batch_sampler, generator),
    )
    return own


def _own_sampler(sampler: Any, generator: torch.Generator) -> Any:
    # A sampler of the user's own is shared: how to copy it is not known.
    if not isinstance(sampler, Sampler) or type(sampler).__module__ != Sampler.__module__:
        return sampler
    own = copy.copy(sampler)
    if hasattr(own, "generator"):
        own.generator = generator
    if hasattr(own, "sampler"):  # one that makes batches of another's indices
        own.sampler = _own_sampler(own.sampler, generator)
    return own
