"""What several policies share: queues that start others than the first, and devices that stand close together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush
from itertools import islice

from waterflow.cluster.book import Entry
from waterflow.cluster.devices import Device, NodeDevices


class Waiting:
    """Waiting entries in the order of submission, and the first of them that asks for at most so many devices.

    Whoever no longer waits is passed over when its turn comes; nothing has to be taken out.
    """

    def __init__(self) -> None:
        self._entries: dict[int, Entry] = {}  # by order of submission
        self._by_size: dict[int, list[int]] = {}  # heaps of orders, by devices asked for

    def add(self, entry: Entry) -> None:
        """It waits, at the place that its order gives it."""
        if entry.order not in self._entries:
            self._entries[entry.order] = entry
            heappush(self._by_size.setdefault(entry.wanted, []), entry.order)

    def first(self, at_most: int) -> Entry | None:
        """The first that asks for no more than ``at_most`` devices; None if nobody does."""
        heads = [head for size in self._by_size if size <= at_most and (head := self._head(size)) is not None]
        return self._entries[min(heads)] if heads else None

    def take_out(self, entry: Entry) -> None:
        """Pass over the one that ``first`` gave, until it is added again."""
        heappop(self._by_size[entry.wanted])
        del self._entries[entry.order]

    def in_order(self) -> Iterator[Entry]:
        """All of them, the first first. Starting them meanwhile is fine."""
        for order in sorted(self._entries):
            if self._entries[order].state == "waiting":
                yield self._entries[order]

    def __bool__(self) -> bool:
        return any(self._head(size) is not None for size in self._by_size)

    def _head(self, size: int) -> int | None:
        orders = self._by_size[size]
        while orders:
            if self._entries[orders[0]].state == "waiting":
                return orders[0]
            del self._entries[heappop(orders)]
        return None


class Pool:
    """Devices to choose from, by node. Of one node the first that were added are chosen first."""

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
        """One more."""
        self._by_node.setdefault(device.node, {})[device] = None
        self._number += 1

    def remove(self, devices: Iterable[Device]) -> None:
        """These are taken; those that are not in it are passed over."""
        for device in devices:
            here = self._by_node.get(device.node)
            if here is not None and device in here:
                del here[device]
                self._number -= 1

    def __contains__(self, device: Device) -> bool:
        return device in self._by_node.get(device.node, ())

    def most_of_one_node(self, at_most: int, devices: int) -> list[Device]:
        """Devices of the node that has most, of those with so many ``devices`` in all."""
        here = [own for node, own in self._by_node.items() if len(node.devices) >= devices]
        return list(islice(max(here, key=len, default=()), at_most))

    def close_together(self, count: int, one_node: bool = False) -> list[Device] | None:
        """``count`` devices: of the node with the fewest that suffice, or else of as few nodes as possible.

        None if there are not so many, or, with ``one_node``, no node has them.
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
