"""Batches that several jobs read together: whoever comes to one first reads it for all.

Jobs that go along together have one ring: the last items that were read for them, epoch after epoch (batches, and the end of
each epoch). A job that is too far behind its ring, or begins later, has one of its own. What an epoch holds follows from the
seed and the number of the epoch alone, so that rings never have to agree on anything.
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

LOOK_AGAIN = 0.05  # seconds after which a job that waits looks whether it was stopped, or waits in vain
HELD_UP = 0.1  # seconds that others wait for a job that itself waits for memory, or for its turn
_END = object()

Place = tuple[int, int]  # an epoch, and a batch of it


class SharedData:
    """Data that several jobs read together, each batch once: pass one object as ``data=`` of all of them.

    Every job gets the same batches in the same order, bitwise the ones that it would get alone: what an epoch holds is
    decided by ``seed`` and the number of the epoch. Shuffling and random transforms draw from numbers made of these, not
    from a job's own.

    Jobs that begin together stay together: one that is ``ahead`` batches in front waits for the slowest, and so does one
    that ends an epoch before others have evaluated theirs. For a job that is ``patience`` seconds over one batch nobody
    waits any longer: it reads on by itself, from the start of its epoch, as does one that begins later. The last ``ahead``
    batches are kept; with two of them, jobs that read together hold no more batches than they claim of ``memory=``.

    What reading a batch raises fails the job that reads it; the others read it for themselves. A step that changes its batch
    in place is given a copy. Workers of a DataLoader are started for each epoch anew. Thread-safe. A copy, or what was
    pickled, has readers of its own.

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
            got = type(data).__name__
            raise InvalidJobError(f"shared data must be iterable or a function that makes an iterable; got {got}")
        for name, value, kind, rule in (
            ("seed", seed, Integral, "an integer"), ("ahead", ahead, Integral, "a positive integer"),
            ("patience", patience, Real, "a positive number of seconds"),
        ):  # fmt: skip
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
        """Batches of an epoch; TypeError where the data does not tell."""
        # What is there already is asked without a lock: a model's function may ask, which draws under one itself.
        return len(self._open(0) if is_function(self._data) else self._data)  # type: ignore[arg-type]

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(SharedData, seed=self.seed, ahead=self.ahead, patience=self.patience), (self._given,)

    def reader(self, *fields: Any) -> Reader:
        """For one job, with these ``fields`` of a ``Reader``. From now on others wait for it."""
        made = Reader(self, *fields)
        with self._guard:
            self._readers.add(made)
            self._enter(made)
        return made

    @doing("reading its data")
    def take(self, reader: Reader) -> Any:
        """The reader's next batch, or the end; raises what the data raises, and what ``check_stop`` raises."""
        began = time.monotonic()
        while True:
            reader.check_stop()
            _left = reader.ring  # held here, so that the workers of a ring that all have left end outside of the guard
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
            # The others of the ring wait. Where this raises, they read the batch anew, from where the epoch starts.
            source = source or self._pass(*place)
            batch = next(source, _END)
            with self._guard:
                if ring.busy is reader:  # else nobody waited for it
                    ring.kept = dict([*ring.kept.items(), (place, batch)][-self.ahead :])
                    ring.head = _after(place, batch)
                    ring.source = None if batch is _END else source
                    ring.busy = None

    # -- under the guard

    def _enter(self, reader: Reader) -> _Ring:
        """The ring that keeps the reader's next batch; else one that reads it next, or a new one; its own goes before others."""
        there, place = {each.ring for each in self._readers if each.ring}, reader.place
        rings = sorted(there, key=lambda ring: ring is not reader.ring)
        keep, come = [ring for ring in rings if place in ring.kept], [ring for ring in rings if ring.head == place]
        reader.ring = [*keep, *come, _Ring(place)][0]
        return reader.ring

    def _waits(self, ring: _Ring, began: float) -> bool:
        """Whether one must take a batch before the next is read; who takes too long is left behind."""
        oldest = next(iter(ring.kept)) if len(ring.kept) == self.ahead else None
        behind = [r for r in self._readers if r.ring is ring and r.place == oldest and r.place[0] < r.epochs]
        for reader in behind:
            if time.monotonic() - began > (HELD_UP if reader.held_up() else self.patience):
                reader.ring = None
        return any(reader.ring for reader in behind)

    # -- reading

    def _pass(self, epoch: int, index: int) -> Generator[Any, None, None]:
        """An epoch from a batch on; those before it are let go. A batch is kept for others while the next one is read."""
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

    ``check_stop`` raises where the job is to stop; ``held_up`` tells whether it waits for something that others hold.
    """

    data: SharedData
    epochs: int = 1
    check_stop: Callable[[], Any] = _nothing
    held_up: Callable[[], Any] = _nothing
    place: Place = (0, 0)  # of its next batch
    ring: _Ring | None = None
    reads_ahead = True  # what lies in memory that is written again was copied
    own = OwnBatches(kept=False)

    def epoch(self) -> Iterator[Any]:
        """One pass over the data; the next call gives the next one."""
        while (batch := self.data.take(self)) is not _END:
            yield batch

    def put_back(self, batch: Any) -> None:
        """The last batch was not trained on: it will be given again."""
        self.place = (self.place[0], self.place[1] - 1)

    def leave(self) -> None:
        """Until the next batch is asked for, nobody waits for the job. The last to leave a ring ends its workers."""
        with self.data._guard:
            left, self.ring = self.ring, None
            over = left.source if left and all(each.ring is not left for each in self.data._readers) else None
            self.data._changed.notify_all()
        if over is not None:
            over.close()

    def close(self) -> None:
        """The job reads no more, wherever it stands. Calling it twice is no error."""
        self.leave()
        self.check_stop = self.held_up = _nothing  # it keeps nothing of its job


@dataclass(eq=False)
class _Ring:
    """The last items that were read for its readers, by place, and the place of the next.

    An order to break a job off may strike between any two lines: then items are read again, from a pass or a ring of a
    reader's own. Who reads has taken the source along.
    """

    head: Place
    kept: dict[Place, Any] = field(default_factory=dict)
    source: Generator[Any, None, None] | None = None
    busy: Reader | None = None


def _after(place: Place, batch: Any) -> Place:
    return (place[0] + 1, 0) if batch is _END else (place[0], place[1] + 1)
