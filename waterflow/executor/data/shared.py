"""Shared data: several jobs read the same batches, and the first job to reach a batch reads it for all of them.

Jobs that read together have one ring: the last items that were read for them (batches, and the end of each epoch). A job that
is too far behind its ring, or begins later, has a ring of its own. The batches of an epoch follow from the seed and the number
of the epoch alone, so that rings need not be synchronized.
"""

from __future__ import annotations

import hashlib
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from numbers import Integral, Real
from typing import Any

import torch

from waterflow.errors import InvalidJobError, explained
from waterflow.executor.cancel import doing
from waterflow.executor.data.copies import OwnBatches, copied
from waterflow.executor.data.loader import Batches, is_function
from waterflow.executor.stats import AHEAD

LOOK_AGAIN = 0.05  # seconds after which a waiting job checks again whether it was stopped, or waits in vain
HELD_UP = 0.1  # seconds that others wait for a job that itself waits for memory or for its turn
_END = object()

Place = tuple[int, int]  # an epoch, and a batch of it


class SharedData:
    """Data that several jobs read together, each batch once: pass one object as ``data=`` of all of them.

    Every job gets the same batches in the same order, bitwise the ones that it would get alone: ``seed`` and the number of the
    epoch decide the order and the values. Shuffling and random transforms draw from numbers made of these, not from a job's
    own.

    Jobs that begin together stay together: one that is ``ahead`` batches in front waits for the slowest, and so does one
    that ends an epoch before others have evaluated theirs. A job that takes longer than ``patience`` seconds for one batch is
    not waited for: it reads on by itself, from the start of its epoch, as does one that begins later. The last ``ahead``
    batches are kept; with two of them, jobs that read together keep no more batches than they claim of ``memory=``.

    An error in reading a batch fails the job that reads it; the others read the batch for themselves. A step that changes its
    batch in place is given a copy. Workers of a DataLoader are started anew for each epoch. Thread-safe. A copy or an unpickled
    object has readers of its own.

    Args:
        data: Batches: a DataLoader, any iterable that can be read once an epoch, or a function that makes one. It draws from
            torch's default generator alone; a generator of its own goes into a function that makes iterators.
        seed: Decides over order and transforms.
        ahead: The number of batches that are kept, and by which a job can be in front of another.
        patience: Seconds that jobs wait for one that takes no batch.

    Raises:
        InvalidJobError: The data can be read only once or not at all, or a setting is not valid.
    """

    @explained("SharedData", "SharedData(loader, seed=0)", InvalidJobError)
    def __init__(
        self, data: Iterable[Any] | Callable[[], Iterable[Any]], *, seed: int = 0, ahead: int = 2, patience: float = 10.0
    ) -> None:
        if isinstance(data, Iterator):
            raise InvalidJobError(
                f"shared data must be read again by jobs that begin later; a {type(data).__name__} gives each batch only "
                "once. Pass a list, a DataLoader, or a function that makes a fresh iterator"
            )
        if isinstance(data, SharedData) or not (callable(data) or isinstance(data, Iterable)):
            got = type(data).__name__
            raise InvalidJobError(f"shared data must be iterable or a function that makes an iterable; got {got}")
        for name, value, kind, rule in (
            ("seed", seed, Integral, "an integer"),
            ("ahead", ahead, Integral, "a positive integer"),
            ("patience", patience, Real, "a positive number of seconds"),
        ):
            if isinstance(value, bool) or not isinstance(value, kind) or not (name == "seed" or value > 0):
                raise InvalidJobError(f"{name} of shared data must be {rule}; got {value!r}")
        self.seed, self.ahead, self.patience = int(seed), int(ahead), float(patience)
        self._given = self._data = data
        self._making = threading.Lock()
        # Entered directly: an exception from outside (breaking off) may strike inside of Condition.__enter__.
        self._guard = threading.RLock()
        self._changed = threading.Condition(self._guard)
        self._readers: weakref.WeakSet[Reader] = weakref.WeakSet()

    def __len__(self) -> int:
        """Return the batches of an epoch. Raises TypeError if the data has no length."""
        # Without a lock where the data exists already: a function that makes a model may ask, under a lock of its own.
        return len(self._open(0) if is_function(self._data) else self._data)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(SharedData, seed=self.seed, ahead=self.ahead, patience=self.patience), (self._given,)

    def reader(self, *fields: Any) -> Reader:
        """Return a reader for one job, made with ``fields`` of ``Reader``. Other readers wait for it from now on."""
        made = Reader(self, *fields)
        with self._guard:
            self._readers.add(made)
            self._enter(made)
        return made

    @doing("reading its data")
    def take(self, reader: Reader) -> Any:
        """Return the reader's next batch, or the end of its epoch. Raises what the data and ``check_stop`` raise."""
        began = time.monotonic()
        while True:
            reader.check_stop()
            _left = reader.ring  # referenced, so that workers of a ring without readers end outside of the guard
            with self._guard:
                ring, place = self._enter(reader), reader.place
                if place in ring.kept:
                    reader.place = _after(place, ring.kept[place])
                    self._changed.notify_all()
                    return ring.kept[place]
                if (ring.busy and ring.busy is not reader and ring.busy.ring is ring) or self._waits(ring, began):
                    self._changed.wait(timeout=LOOK_AGAIN)
                    continue
                ring.busy, source, ring.source = reader, ring.source, None
            # The other readers of the ring wait. If this raises, they read the batch anew, from the start of the epoch.
            source = source or self._pass(*place)
            batch = next(source, _END)
            with self._guard:
                if ring.busy is reader:  # else the others have given up waiting, and another one reads
                    ring.kept = dict([*ring.kept.items(), (place, batch)][-self.ahead :])
                    ring.head = _after(place, batch)
                    ring.source = None if batch is _END else source
                    ring.busy = None

    # -- under the guard

    def _enter(self, reader: Reader) -> _Ring:
        # Preferred is a ring that keeps the reader's next batch, then one that reads it next, then a new one; among equal ones
        # the reader's own.
        there, place = {each.ring for each in self._readers if each.ring}, reader.place
        rings = sorted(there, key=lambda ring: ring is not reader.ring)
        keep, come = [ring for ring in rings if place in ring.kept], [ring for ring in rings if ring.head == place]
        reader.ring = [*keep, *come, _Ring(place)][0]
        return reader.ring

    def _waits(self, ring: _Ring, began: float) -> bool:
        # The oldest batch leaves the ring with the next one: readers that have not taken it are waited for, up to their limit.
        oldest = next(iter(ring.kept)) if len(ring.kept) == self.ahead else None
        behind = [r for r in self._readers if r.ring is ring and r.place == oldest and r.place[0] < r.epochs]
        for reader in behind:
            if time.monotonic() - began > (HELD_UP if reader.held_up() else self.patience):
                reader.ring = None
        return any(reader.ring for reader in behind)

    # -- reading

    def _pass(self, epoch: int, index: int) -> Generator[Any, None, None]:
        # A batch is kept for other readers while the next one is read, so it is copied if its memory may be written again.
        with closing(self._open(epoch)) as batches:
            for batch in islice(batches.epoch(), index, None):
                yield batch if batches.reads_ahead else copied(batch)

    def _open(self, epoch: int) -> Batches:
        seed = int.from_bytes(hashlib.blake2b(f"{self.seed} {epoch}".encode(), digest_size=4).digest(), "little")
        with self._making:
            made = Batches(None, self._data, torch.Generator().manual_seed(seed), epoch)
            if is_function(self._data) and not isinstance(made.source, Iterator):
                self._data = made.source  # made once, and with numbers that nothing else is drawn from
                made = Batches(None, self._data, torch.Generator().manual_seed(seed), epoch)
            return made


def _nothing() -> None:
    pass


@dataclass(eq=False)
class Reader:
    """One job's place in shared data. Its methods are called on the job's thread.

    ``check_stop()`` raises if the job must stop; ``held_up()`` is true while it waits for memory or a lane that others have.
    """

    data: SharedData
    epochs: int = 1
    check_stop: Callable[[], Any] = _nothing
    held_up: Callable[[], Any] = _nothing
    place: Place = (0, 0)  # of its next batch
    ring: _Ring | None = None
    loading = AHEAD
    reads_ahead = True  # batches in memory that is written again were copied by ``_pass``
    own = OwnBatches(kept=False)

    @property
    def source(self) -> Any:
        """The data that is read."""
        return self.data._data

    def epoch(self) -> Iterator[Any]:
        """Yield the batches of the next pass over the data."""
        while (batch := self.data.take(self)) is not _END:
            yield batch

    def put_back(self, batch: Any) -> None:
        """Put back the last batch, which was not trained on, so that it is yielded again."""
        self.place = (self.place[0], self.place[1] - 1)

    def leave(self) -> None:
        """Leave the ring: other jobs do not wait for this one until it asks for a batch. The last to leave ends the workers."""
        with self.data._guard:
            left, self.ring = self.ring, None
            over = left.source if left and all(each.ring is not left for each in self.data._readers) else None
            self.data._changed.notify_all()
        if over is not None:
            over.close()

    def close(self) -> None:
        """End reading, also in the middle of a pass. Closing twice is no error."""
        self.leave()
        self.check_stop = self.held_up = _nothing  # they refer to the job, which may be collected


@dataclass(eq=False)
class _Ring:
    # The last items that were read for its readers, by place, and the place of the next one (``head``). The exception that
    # interrupts a job may strike between any two lines: so the reader that reads takes ``source`` out of the ring, and the
    # others read the items again, from a pass of their own.

    head: Place
    kept: dict[Place, Any] = field(default_factory=dict)
    source: Generator[Any, None, None] | None = None
    busy: Reader | None = None


def _after(place: Place, batch: Any) -> Place:
    return (place[0] + 1, 0) if batch is _END else (place[0], place[1] + 1)
