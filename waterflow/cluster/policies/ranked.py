"""Policies that rank submissions: devices go to the first of the order that fit, and whoever is left out waits."""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import accumulate
from typing import Any, ClassVar, TypeAlias

from waterflow.cluster.book import Entry
from waterflow.cluster.policies.base import Policy

Item: TypeAlias = tuple[float, int, int, Entry]  # rank, then who comes first among equals; no two are equal
Class: TypeAlias = tuple[str, int, bool]  # tenant, where quotas bind; devices; what a policy adds
Head: TypeAlias = tuple[Item, int, Class]  # who waits, where in the list of its class


class Ranked(Policy):
    """Walks all submissions in their order and gives devices to each that fits into what is left.

    Waiting submissions stand in a sorted list for each size (and tenant, where quotas bind): where the first of a
    list does not fit, none after it does. So a decision looks at those that run, and at no more of those that wait
    than start. Priorities are not looked at: all run as guaranteed. ``entry.key`` is the entry's item, of the last
    decision if it runs.
    """

    preempts: ClassVar[bool] = True

    def __init__(self) -> None:
        self._waiting: dict[Class, list[Item]] = {}
        self._running: dict[str, Entry] = {}
        self._count = 0

    # -- what a policy of this kind says

    @abstractmethod
    def _item(self, entry: Entry) -> Item:
        """Where a waiting entry stands; that does not change while it waits."""

    def _ranked(self, now: float) -> list[Item]:
        """Those that run, in their order."""
        return []

    def _on_start(self, entry: Entry) -> None:
        """It runs from now on."""

    def _on_stop(self, entry: Entry) -> None:
        """It ran, and waits or has ended; its key is still that of a running one."""

    # -- events

    def submitted(self, entry: Entry) -> None:
        """It waits."""
        self._wait(entry)

    def ended(self, entry: Entry) -> None:
        """It is neither among those that run nor among those that wait."""
        if self._running.pop(entry.id, None) is not None:
            self._on_stop(entry)
        else:
            self._forget(entry)

    def stopped(self, entry: Entry) -> None:
        """It ran on a node that is lost."""
        del self._running[entry.id]
        self._on_stop(entry)
        self._wait(entry)

    def decide(self, now: float) -> None:
        """Stop whoever is no longer among the first that fit, then start those that are."""
        stops, starts = self._choose(now)
        self._act(stops, starts)

    def _act(self, stops: Sequence[Entry], starts: Sequence[Entry]) -> None:
        book = self.book
        for entry in reversed(stops):
            book.stop(entry)
            self.stopped(entry)
        for entry in starts:
            self._forget(entry)
            devices = book.devices.choose(self._size_of(entry))
            assert devices is not None, f"{entry} was chosen, and {book.devices.free} devices are free"
            book.start(entry, devices, "guaranteed")
            self._running[entry.id] = entry
            self._on_start(entry)

    # -- a restart

    def to_dict(self) -> dict[str, Any]:
        """The order."""
        return {"count": self._count, "items": {entry.id: entry.key[:3] for entry in self.book.entries.values()}}

    def restore(self, state: Mapping[str, Any]) -> None:
        """The order again."""
        self._count = state["count"]
        for entry in self.book.entries.values():
            rank, first, second = state["items"][entry.id]
            entry.key = (rank, first, second, entry)
            if entry.state == "waiting":
                insort(self._waiting.setdefault(self._class_of(entry), []), entry.key)
        for entry in sorted(self.book.entries.values(), key=lambda each: each.key):
            if entry.state == "running":
                self._running[entry.id] = entry

    # -- parts

    def _class_of(self, entry: Entry) -> Class:
        return (entry.tenant if self.book.tenants else "", entry.wanted, False)

    def _size_of(self, entry: Entry) -> int:
        """Devices that it is started on."""
        return entry.wanted

    def _next(self) -> int:
        self._count += 1
        return self._count

    def _wait(self, entry: Entry) -> None:
        entry.key = item = self._item(entry)
        insort(self._waiting.setdefault(self._class_of(entry), []), item)

    def _forget(self, entry: Entry) -> None:
        waiting = self._waiting[self._class_of(entry)]
        del waiting[bisect_left(waiting, entry.key)]

    def _choose(self, now: float) -> tuple[list[Entry], list[Entry]]:
        """Whom to stop and whom to start, both in the order of rank."""
        return self._walk(self._ranked(now) if self.preempts else [])

    def _walk_on(self, running: Sequence[Item], sizes: Sequence[int], first: Item) -> tuple[list[Entry], list[Entry]]:
        """The same, where nothing before ``first`` changed since the last decision, and quotas do not bind.

        Whoever ran there fits again, and whoever waited there does not.
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
        """The same, where those that run take ``sizes``, and those that wait ``size_of``.

        None: as many as they have, and as many as they ask for.
        """
        book = self.book
        quotas = {name: book.quota_left(name) + self.preempts * book.held[name] for name in book.tenants}
        heads = [(items[0], 0, which) for which, items in self._waiting.items() if items]
        if not (heads or quotas or sizes):
            return [], []
        heapify(heads)
        free = book.devices.total if self.preempts else book.devices.free
        if not quotas and sizes is None:  # whoever stands before all that wait stays
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
        """From ``at`` and ``heads`` on, the first of each list of those that wait."""
        waiting, count = self._waiting, len(running)
        stops: list[Entry] = []
        starts: list[Entry] = []
        while True:
            behind = bisect_left(running, heads[0][0], at) if heads else count
            if at < behind:  # they run, and stand before all that wait
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
    def _keep(
        running: Sequence[Item], sizes: Sequence[int], at: int, behind: int, free: int, stops: list[Entry]
    ) -> int:
        """How many of ``free`` devices those keep that run from ``at`` to ``behind``; to ``stops`` go who do not fit."""
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
