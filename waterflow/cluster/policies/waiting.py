"""Queues and pools of devices for several policies: queues that can start others than their first, and devices by node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice

from waterflow.cluster.book import Entry
from waterflow.cluster.devices import Device, NodeDevices


class Waiting:
    """Waiting entries in the order of submission, and the first of them that asks for at most so many devices.

    Entries that no longer wait are passed over when they come first; they need not be removed.
    """

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}  # by order of submission
        self._by_size: dict[int, list[int]] = {}  # heaps of orders, by devices asked for

    def add(self, entry: Entry) -> None:
        """Add an entry, at the position of its order."""
        if entry.order not in self._entries:
            self._entries[entry.order] = entry
            heappush(self._by_size.setdefault(entry.wanted, []), entry.order)

    def first(self, at_most: int) -> Entry | None:
        """Return the first entry that asks for at most ``at_most`` devices; None if there is none."""
        # A heap for each size asked for: there are few sizes, and thousands of entries.
        heads = [head for size in self._by_size if size <= at_most and (head := self._head(size)) is not None]
        return self._entries[min(heads)] if heads else None

    def take_out(self, entry: Entry) -> None:
        """Remove the entry that ``first`` returned, until it is added again."""
        heappop(self._by_size[entry.wanted])
        del self._entries[entry.order]

    def drop(self, entry: Entry) -> None:
        """Remove an entry, until it is added again."""
        self._entries.pop(entry.order, None)

    def in_order(self) -> Iterator[Entry]:
        """Yield all entries in order. Entries may be started meanwhile."""
        for order in sorted(self._entries):
            if self._entries[order].state == "waiting":
                yield self._entries[order]
            else:
                del self._entries[order]

    def __bool__(self) -> bool:
        return any(self._head(size) is not None for size in self._by_size)

    def _head(self, size: int) -> int | None:
        orders = self._by_size[size]
        while orders:
            entry = self._entries.get(orders[0])
            if entry is not None and entry.state == "waiting":
                return orders[0]
            self._entries.pop(heappop(orders), None)
        return None


class Pool:
    """Devices to choose from, by node. The devices of one node are chosen in the order in which they were added."""

    def __init__(self, devices: Iterable[Device] = ()) -> None:
        self._by_node: dict[NodeDevices, dict[Device, None]] = {}
        self._number = 0
        for device in devices:
            self.add(device)

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[Device]:
        for devices in self._by_node.values():
            yield from devices

    def add(self, device: Device) -> None:
        """Add a device."""
        self._by_node.setdefault(device.node, {})[device] = None
        self._number += 1

    def remove(self, devices: Iterable[Device]) -> None:
        """Remove devices; those that are not in the pool are ignored."""
        for device in devices:
            here = self._by_node.get(device.node)
            if here is not None and device in here:
                del here[device]
                self._number -= 1

    def __contains__(self, device: Device) -> bool:
        return device in self._by_node.get(device.node, ())

    def most_of_one_node(self, at_most: int, devices: int) -> list[Device]:
        """Return at most ``at_most`` devices of the node with most of them here, among nodes with ``devices`` devices in all."""
        here = [own for node, own in self._by_node.items() if len(node.devices) >= devices]
        return list(islice(max(here, key=len, default=()), at_most))

    def close_together(self, count: int, one_node: bool = False) -> list[Device] | None:
        """Return ``count`` devices: of the node with the fewest that suffice, or else of as few nodes as possible.

        Returns None if there are not so many, or, with ``one_node``, if no single node has them.
        """
        if self._number < count:
            return None
        enough = [devices for devices in self._by_node.values() if len(devices) >= count]
        if enough:
            fewest = min(enough, key=len)
            return list(islice(fewest, count))
        if one_node:
            return None
        chosen: list[Device] = []
        for devices in sorted(self._by_node.values(), key=len, reverse=True):
            chosen += devices
            if len(chosen) >= count:
                break
        return chosen[:count]
