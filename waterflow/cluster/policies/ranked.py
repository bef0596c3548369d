"""Policies that rank submissions: devices go to the first of the order that fit, and the others wait."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias

from waterflow.cluster.book import Entry
from waterflow.cluster.policies.base import Policy

Item: TypeAlias = tuple[float, int, int, Entry]  # rank, then two numbers that break ties; no two items are equal
Key: TypeAlias = tuple[Any, ...]  # the numbers of an item, and what else a policy notes of an entry
Class: TypeAlias = tuple[str, int, bool]  # tenant if quotas bind, devices, and a property that the policy adds
Head: TypeAlias = tuple[Item, int, Class]  # the next waiting item of a class, its index in the class, the class


class Ranked(Policy):
    """Walks all submissions in their order and gives devices to each that fits into what is left.

    Waiting submissions are in a sorted list for each size (and tenant, if quotas bind): if the first of a list does not fit,
    none after it does. So a decision visits the running submissions, and of the waiting ones no more than start, and one for
    each list. Priorities are ignored: all run as guaranteed. ``entry.key`` begins with the three numbers of the entry's item,
    of the last decision if it runs.
    """

    preempts: ClassVar[bool] = True

    def __init__(self) -> None:
        self._waiting: dict[Class, list[Item]] = {}
        self._running: dict[str, Entry] = {}
        self._count = 0

    # -- for subclasses to implement

    @abstractmethod
    def _key(self, entry: Entry) -> Key:
        """Return the key of a waiting entry, which must not change while it waits."""

    def _ranked(self, now: float) -> list[Item]:
        """Return the items of running entries, in order."""
        return []

    def _on_start(self, entry: Entry) -> None:
        """An entry has started to run."""

    def _on_stop(self, entry: Entry) -> None:
        """An entry no longer runs; its key is still that of a running one."""

    # -- events

    def submitted(self, entry: Entry) -> None:
        """Add an entry to those that wait."""
        self._wait(entry)

    def ended(self, entry: Entry) -> None:
        """Remove an entry from those that run or wait."""
        if self._running.pop(entry.id, None) is not None:
            self._on_stop(entry)
        else:
            self._forget(entry)

    def stopped(self, entry: Entry) -> None:
        """Let an entry wait again that ran on a lost node."""
        del self._running[entry.id]
        self._on_stop(entry)
        self._wait(entry)

    def decide(self, now: float) -> None:
        """Stop entries that are no longer among the first that fit, then start those that are."""
        stops, starts = self._choose(now)
        self._act(stops, starts)

    def _act(self, stops: Sequence[Entry], starts: Sequence[Entry]) -> None:
        book = self.book
        # Stops first: the starts need the devices that they free.
        for entry in reversed(stops):
            book.stop(entry)
            self.stopped(entry)
        # One that is held goes on where it is, if it can; so these choose first.
        for entry in sorted(starts, key=lambda each: each.held_at is None):
            self._forget(entry)
            devices = book.devices.choose(self._size_of(entry), entry.held_at)
            assert devices is not None, f"{entry} was chosen, and {book.devices.free} devices are free"
            book.start(entry, devices, "guaranteed")
        for entry in starts:
            self._running[entry.id] = entry
            self._on_start(entry)

    # -- a restart

    def notes(self) -> dict[str, Any]:
        """Return how far the numbers of items are counted."""
        return {"count": self._count}

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Restore the order from the keys."""
        self._count = notes["count"]
        for entry in sorted(self.book.entries.values(), key=lambda each: tuple(each.key[:3])):
            entry.key = tuple(entry.key)
            if entry.state == "waiting":
                self._waiting.setdefault(self._class_of(entry), []).append(item_of(entry))
            else:
                self._running[entry.id] = entry

    # -- parts

    def _class_of(self, entry: Entry) -> Class:
        return (entry.tenant if self.book.tenants else "", entry.wanted, False)

    def _size_of(self, entry: Entry) -> int:
        return entry.wanted

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _wait(self, entry: Entry) -> None:
        entry.key = self._key(entry)
        insort(self._waiting.setdefault(self._class_of(entry), []), item_of(entry))

    def _forget(self, entry: Entry) -> None:
        waiting = self._waiting[self._class_of(entry)]
        del waiting[bisect_left(waiting, item_of(entry))]

    def _choose(self, now: float) -> tuple[list[Entry], list[Entry]]:
        """Return the entries to stop and those to start, both in the order of rank."""
        return self._walk(self._ranked(now) if self.preempts else [])

    def _walk_on(self, running: Sequence[Item], sizes: Sequence[int], first: Item) -> tuple[list[Entry], list[Entry]]:
        """Choose as ``_walk`` does, from ``first`` on: nothing before it changed since the last decision, and no quotas bind.

        A run before it fits again, and an entry that waited before it still does not fit.
        """
        at = bisect_left(running, first)
        free = self.book.devices.total - sum(sizes[:at])
        heads = [
            (items[index], index, which)
            for which, items in self._waiting.items()
            if items and which[1] <= free and (index := bisect_left(items, first)) < len(items)
        ]
        heapify(heads)
        return self._merge(running, sizes, at, heads, free, {}, None) if heads else ([], [])

    def _walk(
        self, running: Sequence[Item], sizes: Sequence[int] | None = None, size_of: Mapping[Class, int] | None = None
    ) -> tuple[list[Entry], list[Entry]]:
        """Choose the entries to stop and to start, with ``sizes`` devices for running ones and ``size_of`` for waiting classes.

        None: the devices that they have, and the devices that they ask for.
        """
        book = self.book
        # With preemption the plan begins with empty quotas, as all runs are placed anew.
        quotas = {name: book.quota_left(name) + self.preempts * book.held[name] for name in book.tenants}
        heads = [(items[0], 0, which) for which, items in self._waiting.items() if items]
        if not (heads or quotas or sizes):
            return [], []
        heapify(heads)
        free = book.devices.total if self.preempts else book.devices.free
        if not quotas and sizes is None:  # runs ranked before all waiting entries keep their devices
            running = running[bisect_left(running, heads[0][0]) if heads else len(running) :]
            sizes = [len(item[3].devices) for item in running]
            free = book.devices.free + sum(sizes)
        elif sizes is None:
            sizes = [len(item[3].devices) for item in running]
        return self._merge(running, sizes, 0, heads, free, quotas, size_of)

    def _merge(
        self,
        running: Sequence[Item],
        sizes: Sequence[int],
        at: int,
        heads: list[Head],
        free: int,
        quotas: dict[str, int],
        size_of: Mapping[Class, int] | None,
    ) -> tuple[list[Entry], list[Entry]]:
        """Merge the runs from index ``at`` with ``heads``, the next waiting item of each class, in the order of rank."""
        waiting, count = self._waiting, len(running)
        stops: list[Entry] = []
        starts: list[Entry] = []
        while True:
            behind = bisect_left(running, heads[0][0], at) if heads else count
            if at < behind:  # these runs rank before all waiting entries
                if quotas:
                    for item, size in zip(running[at:behind], sizes[at:behind]):
                        if size > free or size > quotas[item[3].tenant]:
                            stops.append(item[3])
                        else:
                            free -= size
                            quotas[item[3].tenant] -= size
                else:
                    free -= self._keep(running, sizes, at, behind, free, stops)
                at = behind
            if not heads:
                return stops, starts
            item, index, which = heads[0]
            tenant, size = which[0], which[1] if size_of is None else size_of[which]
            # If the first of a class does not fit, no later one does: the class is done.
            if size > free or (quotas and size > quotas[tenant]):
                heappop(heads)
                continue
            free -= size
            if quotas:
                quotas[tenant] -= size
            starts.append(item[3])
            items = waiting[which]
            index += 1
            if index < len(items):
                heapreplace(heads, (items[index], index, which))
            else:
                heappop(heads)

    @staticmethod
    def _keep(running: Sequence[Item], sizes: Sequence[int], at: int, behind: int, free: int, stops: list[Entry]) -> int:
        # Returns the devices that the runs from ``at`` to ``behind`` keep. Prefix sums and bisection skip over the runs
        # that fit, which are nearly all in a large cluster.
        kept = 0
        while at < behind:
            up_to = list(accumulate(sizes[at:behind]))
            fit = bisect_right(up_to, free - kept)
            if fit:
                kept += up_to[fit - 1]
            at += fit
            if at < behind:
                stops.append(running[at][3])
                at += 1
        return kept


def item_of(entry: Entry) -> Item:
    """Return an entry's item, from its key."""
    return (*entry.key[:3], entry)
