"""Tiresias' discretized two-dimensional LAS (Gu et al., NSDI 2019): least attained service first, in a few queues."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from typing import Any, Literal

from waterflow.cluster.book import Entry
from waterflow.cluster.policies.ranked import Item, Key, Ranked, item_of

_BEFORE_ALL: Any = (-1.0,)  # less than any item


class Las(Ranked):
    """Submissions begin in the first queue, and move to the end of the next one when their service reaches a limit.

    ``limits`` are device-seconds, or with ``by="time"`` seconds on any number of devices. In a queue running submissions go
    first, then those that were stopped there, then the others in order of arrival. The time at which a run reaches its limit
    is known when it starts: ``next_tick``.
    """

    name = "las"

    def __init__(self, limits: Sequence[float] = (3250.0, 7200.0), by: Literal["service", "time"] = "service") -> None:
        super().__init__()
        self._limits = tuple(float(limit) for limit in limits)
        if not self._limits or any(low >= high for low, high in zip((0.0, *self._limits), self._limits)):
            raise ValueError(f"limits {self._limits} of the queues; they are above 0 and rise from queue to queue")
        if by not in ("service", "time"):
            raise ValueError(f"las counts by 'service' or by 'time', not by {by!r}")
        self._by = by
        self._order: list[Item] = []  # items of running entries, sorted
        self._asked: list[int] = []  # devices of each
        self._demotions: list[tuple[float, int, Entry]] = []  # (time, order, entry); stale unless the time is in _due
        self._due: dict[str, float] = {}
        self._demoted: dict[str, Entry] = {}  # in the decision that is being taken
        self._first: Item | None = _BEFORE_ALL  # the first item that changed since the last decision

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The limits of the queues, and the quantity that they count."""
        return {"limits": self._limits, "by": self._by}

    @property
    def next_tick(self) -> float | None:
        """The time at which the next submission reaches its limit."""
        demotions, due = self._demotions, self._due
        # A heap cannot remove from its middle: entries that were stopped meanwhile are dropped when they come first.
        while demotions:
            time, _, entry = demotions[0]
            if due.get(entry.id) == time:
                return time
            heappop(demotions)
        return None

    def decide(self, now: float) -> None:
        """Demote entries whose time has come, then decide as ``Ranked`` does."""
        demoted = self._demoted
        time = self.next_tick
        while time is not None and time <= now:
            entry = heappop(self._demotions)[2]
            demoted[entry.id] = entry
            del self._due[entry.id]
            time = self.next_tick
        for entry in sorted(demoted.values(), key=lambda each: each.order):
            self._on_stop(entry)
            entry.key = (entry.key[0] + 3, self._next(), 0)  # last of the next queue, though it runs
            self._insert(entry)
        super().decide(now)
        for entry in demoted.values():
            if entry.state == "running":
                self._on_stop(entry)
                self._on_start(entry)
        demoted.clear()
        self._first = None

    def nodes_changed(self) -> None:
        """Consider all waiting entries anew: there may be room for them."""
        self._first = _BEFORE_ALL

    def queue_of(self, entry: Entry) -> int:
        """Return the index of an entry's queue; the first is 0."""
        return int(entry.key[0]) // 2

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Restore the order, and the times at which limits are reached."""
        super().restore(notes)
        running = self._running.values()
        self._order = [item_of(entry) for entry in running]
        self._asked = [entry.wanted for entry in running]
        self._due = {entry.id: entry.key[3] for entry in running if len(entry.key) > 3}
        self._demotions = sorted((due, self._running[id].order, self._running[id]) for id, due in self._due.items())

    # -- parts. The rank is twice the queue, plus one for a waiting entry. The key of a run ends with the time at which it
    # reaches its limit, if there is one.

    def _key(self, entry: Entry) -> Key:
        if entry.key is None:
            return (1.0, self._next(), 0)
        if entry.id in self._demoted:
            return entry.key[:3]
        return (2.0 * self.queue_of(entry) + 1, -self._next(), 0)  # before all that wait

    def _ranked(self, now: float) -> list[Item]:
        return self._order

    def _choose(self, now: float) -> tuple[list[Entry], list[Entry]]:
        # The shortcut below does not count the quotas that entries before ``_first`` use.
        if self.book.tenants:
            return self._walk(self._order, self._asked)
        return ([], []) if self._first is None else self._walk_on(self._order, self._asked, self._first)

    def _wait(self, entry: Entry) -> None:
        super()._wait(entry)
        self._change(item_of(entry))

    def _change(self, item: Item) -> None:
        if self._first is None or item < self._first:
            self._first = item

    def _on_start(self, entry: Entry) -> None:
        self._watch(entry, (2.0 * self.queue_of(entry), self._next(), 0))
        self._insert(entry)

    def _insert(self, entry: Entry) -> None:
        item = item_of(entry)
        at = bisect_left(self._order, item)
        self._order.insert(at, item)
        self._asked.insert(at, entry.wanted)

    def _on_stop(self, entry: Entry) -> None:
        item = item_of(entry)
        at = bisect_left(self._order, item)
        del self._order[at], self._asked[at]
        self._change(item)
        self._due.pop(entry.id, None)

    def _watch(self, entry: Entry, key: Key) -> None:
        queue = int(key[0]) // 2
        if queue < len(self._limits):
            now, limit = self.book.now, self._limits[queue]
            by_time = self._by == "time"
            left = limit - entry.ran_at(now) if by_time else (limit - entry.service_at(now)) / len(entry.devices)
            due = self._due[entry.id] = now + left
            key = (*key, due)
            heappush(self._demotions, (due, entry.order, entry))
        entry.key = key
