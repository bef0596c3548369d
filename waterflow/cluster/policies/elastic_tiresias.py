"""Elastic-Tiresias (Amoeba, section 6.2): Tiresias, with two rules that change the number of a submission's devices."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from typing import Any, TypeAlias

from waterflow.cluster.book import Entry
from waterflow.cluster.devices import Device
from waterflow.cluster.policies.las import Las
from waterflow.cluster.policies.ranked import Class
from waterflow.cluster.scaling import LINEAR, Scaling

Gain: TypeAlias = tuple[float, int, Entry]  # minus the gain, so that a heap has the largest first; order; entry


class ElasticTiresias(Las):
    """Plans as Tiresias does, then applies rule 1 and rule 2, and carries out the difference from now once.

    Rule 1: with more than ``pending`` submissions left waiting (the paper's N), all but those of the first queue are planned
    with half of the devices asked for. Rule 2: with none left waiting, idle devices go one by one to the submission with the
    largest gain, (t(p+1) - t(p)) / t(p), with ``scaling`` for t. The paper leaves open: ``least``, the devices that rule 1
    leaves; ``most``, the multiple of the devices asked for that rule 2 gives at most (None: no limit); ``least_gain``, the
    smallest gain that counts.
    """

    name = "elastic_tiresias"

    def __init__(
        self,
        limits: Sequence[float] = (10_000.0, 200_000.0),
        pending: int = 0,
        scaling: Scaling = LINEAR,
        least: int = 1,
        most: float | None = None,
        least_gain: float = 0.0,
    ) -> None:
        super().__init__(limits)
        if pending < 0 or least < 1:
            raise ValueError(f"pending={pending} is 0 or more, and least={least} is 1 or more")
        self._pending = pending
        self._scaling = scaling
        self._least = least
        self._most = most
        self._least_gain = least_gain
        self._sizes: dict[str, int] = {}
        self._gains: defaultdict[str, dict[int, Gain | None]] = defaultdict(dict)  # by size, until the entry ends

    @property
    def parameters(self) -> Mapping[str, Any]:
        """All parameters that the rules leave open."""
        own = {"pending": self._pending, "least": self._least, "most": self._most, "least_gain": self._least_gain}
        return {**super().parameters, **own, "scaling": str(self._scaling)}

    def ended(self, entry: Entry) -> None:
        """Forget the entry."""
        super().ended(entry)
        self._gains.pop(entry.id, None)

    def _class_of(self, entry: Entry) -> Class:
        tenant, size, _ = super()._class_of(entry)
        return (tenant, size, entry.key[0] >= 2)  # True: rule 1 may halve it

    def _halved(self, size: int) -> int:
        half = size // 2
        return half if half >= self._least else min(self._least, size)

    def _choose(self, now: float) -> tuple[list[Entry], list[Entry]]:
        # Rule 1 needs a plan without it first: it depends on the number that such a plan leaves waiting.
        running, asked = self._order, self._asked
        waiting = sum(map(len, self._waiting.values()))
        stops, starts = self._walk(running, asked)
        halve = waiting + len(stops) - len(starts) > self._pending
        if halve:
            sizes = [self._halved(size) if item[0] >= 2 else size for item, size in zip(running, asked)]
            halved = {which: self._halved(which[1]) if which[2] else which[1] for which in self._waiting}
            stops, starts = self._walk(running, sizes, halved)
        gone = {entry.id for entry in stops}
        chosen = [item[3] for item in running if item[3].id not in gone] + starts
        self._sizes = {entry.id: self._halved(entry.wanted) if halve and entry.key[0] >= 2 else entry.wanted for entry in chosen}
        if waiting + len(stops) == len(starts):
            self._grow(chosen)
        return stops, starts

    def _grow(self, chosen: Sequence[Entry]) -> None:
        # Rule 2. A heap has the largest gain on top again after each device.
        book, sizes = self.book, self._sizes
        idle = book.devices.total - sum(sizes.values())
        quotas = {tenant.name: tenant.quota for tenant in book.tenants.values()}
        if quotas:
            for entry in chosen:
                quotas[entry.tenant] -= sizes[entry.id]
        heap = [item for entry in chosen if (item := self._gain(entry, sizes[entry.id])) is not None] if idle else []
        heapify(heap)
        while idle and heap:
            _, _, entry = heap[0]
            if quotas and quotas[entry.tenant] < 1:
                heappop(heap)
                continue
            sizes[entry.id] += 1
            idle -= 1
            if quotas:
                quotas[entry.tenant] -= 1
            item = self._gain(entry, sizes[entry.id])
            if item is None:
                heappop(heap)
            else:
                heapreplace(heap, item)

    def _gain(self, entry: Entry, size: int) -> Gain | None:
        """Return the heap item for one more device; None if the gain is too small, or the entry may have no more."""
        gains = self._gains[entry.id]
        # Cached, as each decision asks for the same gains again.
        if size not in gains:
            now = self._scaling(entry.submission, size)
            gain = (self._scaling(entry.submission, size + 1) - now) / now
            allowed = gain > self._least_gain and (self._most is None or size < self._most * entry.wanted)
            gains[size] = (-gain, entry.order, entry) if allowed else None
        return gains[size]

    def _act(self, stops: Sequence[Entry], starts: Sequence[Entry]) -> None:
        # Stops and shrinking first: growing and starting need the devices that they free.
        book, sizes = self.book, self._sizes
        super()._act(stops, ())
        changed = [entry for *_, entry in self._order if sizes[entry.id] != len(entry.devices)]
        for entry in changed:
            size = sizes[entry.id]
            if size < len(entry.devices):
                self._resize(entry, entry.devices[:size])
        super()._act((), starts)
        for entry in changed:
            more = sizes[entry.id] - len(entry.devices)
            if more > 0:
                found = book.devices.choose(more)
                assert found is not None
                self._resize(entry, entry.devices + found)

    def _size_of(self, entry: Entry) -> int:
        return self._sizes[entry.id]

    def _resize(self, entry: Entry, devices: list[Device]) -> None:
        self.book.resize(entry, devices)
        self._watch(entry, entry.key[:3])
