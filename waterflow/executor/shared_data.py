"""Batches that several jobs read together: whoever comes to one first reads it for all.

Jobs that go along together are a party. What it reads is one row of items, epoch after epoch: batches, and the end of each
epoch. A job that is too far behind its party, or begins later, reads in a party of its own. What an epoch holds follows from
the seed and the number of the epoch alone, so that parties never have to agree on anything.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

import torch

from waterflow.calls import explained
from waterflow.errors import InvalidJobError, JobCancelled
from waterflow.executor.batch_copies import OwnBatches, copied
from waterflow.executor.cancel import doing
from waterflow.executor.data import Batches, is_function

LOOK_AGAIN = 0.05  # seconds after which a job that waits looks whether it was stopped, or waits in vain
HELD_UP = 0.1  # seconds that others wait for a job that itself waits for memory, or for its turn
_END = object()


class SharedData:
    """Data that several jobs read together, each batch once: pass one object as ``data=`` of all of them.

    Every job gets the same batches in the same order, bitwise the ones that it would get alone: what an epoch holds is
    decided by ``seed`` and the number of the epoch. Shuffling and random transforms draw from numbers made of these, not
    from a job's own.

    Jobs that begin together stay together: one that is ``ahead`` batches in front waits for the slowest, and so does one
    that ends an epoch before others have evaluated theirs. For a job that is ``patience`` seconds over one batch nobody
    waits any longer: it reads on by itself, from the start of its epoch, as does one that begins later. The last ``ahead``
    batches are kept; with two of them, the jobs of a party hold no more batches than they claim of ``memory=``.

    A step that changes its batch in place is given a copy. Workers of a DataLoader are started for each epoch anew.
    Thread-safe. A copy, or what was pickled, has readers of its own.

    Args:
        data: Batches: a DataLoader, any iterable that can be read once an epoch, or a function that makes one. It draws from
            torch's default generator alone; a generator of its own goes into a function that makes iterators.
        seed: Decides over order and transforms.
        ahead: Batches that are kept, and by which a job can be in front of another.
        patience: Seconds that jobs wait for one that takes no batch.

    Raises:
        InvalidJobError: Data that can be read only once, and settings that cannot be.
    """

    @explained("SharedData", "SharedData(loader, seed=0)", InvalidJobError)
    def __init__(
        self, data: Iterable[Any] | Callable[[], Iterable[Any]], *, seed: int = 0, ahead: int = 2, patience: float = 10.0
    ) -> None:  # fmt: skip
        if isinstance(data, Iterator):
            raise InvalidJobError(
                f"shared data must be read again by jobs that begin later; a {type(data).__name__} gives each batch only "
                "once. Pass a list, a DataLoader, or a function that makes a fresh iterator"
            )
        if isinstance(data, SharedData) or not (callable(data) or isinstance(data, Iterable)):
            raise InvalidJobError(
                f"shared data must be iterable or a function that makes an iterable; got {type(data).__name__}"
            )
        for name, value in (("seed", seed), ("ahead", ahead)):
            if isinstance(value, bool) or not isinstance(value, Integral) or (name == "ahead" and value < 1):
                raise InvalidJobError(
                    f"{name} of shared data must be {'an' if name == 'seed' else 'a positive'} integer; got {value!r}"
                )
        if isinstance(patience, bool) or not isinstance(patience, Real) or not patience > 0:
            raise InvalidJobError(f"patience of shared data must be a positive number of seconds; got {patience!r}")
        self._set({"given": data, "seed": int(seed), "ahead": int(ahead), "patience": float(patience)})

    def __len__(self) -> int:
        """Batches of an epoch; TypeError where the data does not tell."""
        # What is there already is asked without a lock: a model's function may ask, which draws under one itself.
        return len(self._open(0) if is_function(self._data) else self._data)  # type: ignore[arg-type]

    def __getstate__(self) -> dict[str, Any]:
        return {"given": self._given, "seed": self.seed, "ahead": self.ahead, "patience": self.patience}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set(state)

    def _set(self, state: dict[str, Any]) -> None:
        self.seed: int = state["seed"]
        self.ahead: int = state["ahead"]
        self.patience: float = state["patience"]
        self._given = self._data = state["given"]
        self._making = threading.Lock()
        # Entered directly: an exception from outside (breaking off) may strike inside of Condition.__enter__.
        self._guard = threading.RLock()
        self._changed = threading.Condition(self._guard)
        self._parties: list[_Party] = []

    def reader(
        self, epochs: int = 1, check_stop: Callable[[], None] | None = None, held_up: Callable[[], bool] | None = None,
        place: tuple[int, int] = (0, 0),
    ) -> Reader:  # fmt: skip
        """For one job, which begins at ``place``: an epoch, and a batch of it. From now on others wait for it.

        ``check_stop`` raises where the job is to stop; ``held_up`` tells whether it waits for something that others hold.
        """
        made = Reader(self, epochs, check_stop or _nothing, held_up or (lambda: False), place)
        with self._guard:
            self._enter(made)
        return made

    # -- what readers ask

    @doing("reading its data")
    def take(self, reader: Reader) -> Any:
        """The reader's next batch; raises EndOfEpoch, what the data raised, and what ``check_stop`` raises."""
        began = time.monotonic()
        while True:
            reader.check_stop()
            with self._guard:
                party = self._enter(reader)
                item = party.item(reader.at)
                if item is not None:
                    self._advance(reader, item)
                    break
                if party.busy not in party.readers and not self._too_far(party, began):
                    party.busy = reader
                    place, source, party.source = party.head(), party.source, None
                else:
                    self._changed.wait(timeout=LOOK_AGAIN)
                    continue
            self._sweep()
            self._read(party, place, source)
        if item.error is not None:
            raise _again(item.error)
        if item.last:
            raise EndOfEpoch
        return item.batch

    def leave(self, reader: Reader) -> None:
        """Nobody waits for it any more. Calling it twice is no error."""
        with self._guard:
            self._part(reader)
            self._changed.notify_all()
        self._sweep()

    def _sweep(self) -> None:
        """End the passes of parties that all have left."""
        with self._guard:
            over = [party.source for party in self._parties if not party.readers]
            self._parties = [party for party in self._parties if party.readers]
        for source in filter(None, over):
            source.close()

    # -- parties; under the guard

    def _enter(self, reader: Reader) -> _Party:
        """The party in which the reader finds its next batch, or reads it."""
        mine = reader.party
        if mine is not None and mine.item(reader.at) is not None:
            return mine
        for party in self._parties:
            at = party.number_of(reader.place)
            if at is not None and party.readers:
                return self._join(reader, party, at)
        if mine is not None and reader.at == mine.head()[0]:
            return mine  # else it came when its batch was just about to go
        for party in self._parties:
            if party.readers and party.head()[1:] == reader.place:
                return self._join(reader, party, party.head()[0])
        party = _Party(reader.place, deque(maxlen=self.ahead))
        self._parties.append(party)
        return self._join(reader, party, 0)

    def _join(self, reader: Reader, party: _Party, at: int) -> _Party:
        self._part(reader)
        reader.at = at
        reader.moved = time.monotonic()
        reader.party = party
        party.readers.add(reader)
        self._changed.notify_all()
        return party

    def _part(self, reader: Reader) -> None:
        if reader.party is not None:
            reader.party.readers.discard(reader)
            reader.party = None

    def _advance(self, reader: Reader, item: _Item) -> None:
        reader.at = item.number + 1
        reader.place = item.after
        reader.moved = time.monotonic()
        if item.last and reader.place[0] >= reader.epochs:
            self._part(reader)  # nobody waits for a job that reads no more
        self._changed.notify_all()

    def _too_far(self, party: _Party, began: float) -> bool:
        """Whether one of the party must take a batch before the next is read; who takes too long is left behind."""
        head, now = party.head()[0], time.monotonic()
        waits = False
        for reader in list(party.readers):
            if head - reader.at < self.ahead:
                continue
            waited = now - max(began, reader.moved)
            if waited > self.patience or (waited > HELD_UP and reader.held_up()):
                self._part(reader)
            else:
                waits = True
        return waits

    # -- reading, which takes time: the party's others wait

    def _read(self, party: _Party, place: tuple[int, int, int], source: _Pass | None) -> None:
        number, epoch, index = place
        try:
            try:
                if source is None:
                    source = _Pass(self._open(epoch))
                batch = source.read(index)
                item = _Item(number, epoch, index, batch, last=batch is _END)
            except Exception as error:
                if _ordered(error):
                    raise
                item = _Item(number, epoch, index, error=error)
        except BaseException:  # of this job alone: the others read the batch anew, from where the epoch starts
            if source is not None:
                source.close()
            raise
        done = item.last or item.error is not None
        with self._guard:
            party.kept.append(item)
            party.source = None if done else source
            party.busy = None
            self._changed.notify_all()
        if done and source is not None:
            source.close()

    def _open(self, epoch: int) -> Batches:
        with self._making:
            made = Batches(None, self._data, _numbers(self.seed, epoch), epoch)
            if is_function(self._data) and not isinstance(made.source, Iterator):
                self._data = made.source  # made once, and with numbers that nothing else is drawn from
                made = Batches(None, self._data, _numbers(self.seed, epoch), epoch)
            return made


class EndOfEpoch(Exception):
    """There is no further batch in this epoch."""


@dataclass(eq=False)
class Reader:
    """One job's place in shared data. Its methods are called on the job's thread."""

    data: SharedData
    epochs: int
    check_stop: Callable[[], None]
    held_up: Callable[[], bool]
    place: tuple[int, int] = (0, 0)  # epoch, and batch in it
    party: _Party | None = None
    at: int = 0  # the same place, as a number in the row of its party
    reads_ahead = True  # what lies in memory that is written again was copied
    moved: float = 0.0  # when it took its last batch
    own = OwnBatches(kept=False)

    def epoch(self) -> Iterator[Any]:
        """One pass over the data; the next call gives the next one."""
        while True:
            try:
                batch = self.data.take(self)
            except EndOfEpoch:
                return
            yield batch

    def go_to(self, place: tuple[int, int]) -> None:
        """The next batch is the one at ``place``. Until it is asked for, nobody waits for the job."""
        self.data.leave(self)
        self.place = place

    def put_back(self, batch: Any) -> None:
        """The last batch was not trained on: it will be given again."""
        self.go_to((self.place[0], self.place[1] - 1))

    def close(self) -> None:
        """The job reads no more, wherever it stands. Calling it twice is no error."""
        self.data.leave(self)
        self.check_stop, self.held_up = _nothing, lambda: False  # it keeps nothing of its job


@dataclass(frozen=True, eq=False)
class _Item:
    number: int
    epoch: int
    index: int
    batch: Any = None
    last: bool = False  # the epoch's end
    error: Exception | None = None

    @property
    def after(self) -> tuple[int, int]:
        return (self.epoch + 1, 0) if self.last else (self.epoch, self.index + 1)


@dataclass(eq=False)
class _Party:
    """Readers, and the last items that were read for them.

    An order to break a job off may strike between any two lines. So the place of what is read next is not written down, but
    follows from the last item, and who reads has taken the source along.
    """

    start: tuple[int, int]
    kept: deque[_Item]
    readers: weakref.WeakSet[Reader] = field(default_factory=weakref.WeakSet)
    source: _Pass | None = None
    busy: Reader | None = None

    def head(self) -> tuple[int, int, int]:
        """Number, epoch and index of the item to read next."""
        if not self.kept:
            return 0, *self.start
        return self.kept[-1].number + 1, *self.kept[-1].after

    def item(self, number: int) -> _Item | None:
        """The item with this number, if it has been read."""
        return next((item for item in self.kept if item.number == number), None)

    def number_of(self, place: tuple[int, int]) -> int | None:
        """The number of the item at a place, if it is kept."""
        return next((item.number for item in self.kept if (item.epoch, item.index) == place), None)


class _Pass:
    """One pass over an epoch, and how far it has come."""

    def __init__(self, batches: Batches) -> None:
        self._read = 0
        self._batches = batches
        self._iterator = batches.epoch()

    def read(self, index: int) -> Any:
        """The batch at ``index``, or the end; those before it are let go. It is kept for others while the next one is read."""
        while self._read <= index:
            batch, self._read = next(self._iterator, _END), self._read + 1
        return batch if batch is _END or self._batches.reads_ahead else copied(batch)

    def close(self) -> None:
        """End its workers."""
        self._batches.close()


def _numbers(seed: int, epoch: int) -> torch.Generator:
    mixed = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest()
    return torch.Generator().manual_seed(int.from_bytes(mixed, "little"))


def _ordered(error: BaseException | None) -> bool:
    """Whether an error comes from an order to break off, which concerns one job alone."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, JobCancelled):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def _again(error: Exception) -> Exception:
    """The same error for another thread, whose frames then stand in its own traceback."""
    made: Exception = RuntimeError(f"{type(error).__name__}: {error}")
    for remake in (_bare, copy.copy):
        with contextlib.suppress(Exception):
            same = remake(error)
            if str(same) == str(error):
                made = same
                break
    made.__cause__ = error.__cause__
    return made.with_traceback(error.__traceback__)


def _bare(error: Exception) -> Exception:
    # Not through __init__, which may take other arguments than those that it hands on.
    made = type(error).__new__(type(error), *error.args)
    made.__dict__.update(error.__dict__)
    return made


def _nothing() -> None:
    pass
