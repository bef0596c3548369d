"""The devices of a cluster: which of them are free, and which ones a submission gets."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from waterflow.cluster.submission import Node, Place

if TYPE_CHECKING:
    from waterflow.cluster.book import Entry


class Device:
    """One device: at most one guaranteed submission, and any number of opportunistic ones beside it.

    ``reserved`` is a guaranteed submission that waits for more devices; until it has them, opportunistic ones may run here.
    """

    __slots__ = ("guaranteed", "memory", "node", "opportunistic", "place", "reserved")

    def __init__(self, node: NodeDevices, index: int) -> None:
        self.place: Place = (node.name, index)
        self.node = node
        self.memory = node.memory
        self.guaranteed: Entry | None = None
        self.reserved: Entry | None = None
        self.opportunistic: dict[str, Entry] = {}

    @property
    def residents(self) -> list[Entry]:
        """The entries that run here, the guaranteed one first."""
        first = [] if self.guaranteed is None else [self.guaranteed]
        return [*first, *self.opportunistic.values()]

    @property
    def utilization(self) -> float:
        """The sum of the utilizations of its residents; one that has not reported counts as 1."""
        return sum(1.0 if entry.utilization is None else entry.utilization for entry in self.residents)

    @property
    def reported(self) -> float:
        """The sum of the utilizations of its residents; one that has not reported counts as 0."""
        return sum(entry.utilization or 0.0 for entry in self.residents)

    @property
    def memory_used(self) -> int:
        """Bytes that its residents hold, or declared."""
        return sum(entry.memory for entry in self.residents)

    @property
    def room(self) -> float:
        """Bytes beside its residents, negative if they hold more than it has; infinite if its memory is not known."""
        return self.memory - self.memory_used if self.memory else math.inf

    @property
    def vacant(self) -> bool:
        """True if no entry runs here."""
        return self.guaranteed is None and not self.opportunistic

    def open_to(self, entry: Entry) -> bool:
        """Return whether ``entry`` may run here beside the residents, some of which may run alone."""
        if self.guaranteed is None and not self.opportunistic:
            return True
        return not entry.alone and not any(other.alone for other in self.residents)

    def __repr__(self) -> str:
        return f"Device({self.place[0]}:{self.place[1]}, {[entry.id for entry in self.residents]})"


class NodeDevices:
    """The devices of one node; ``free`` are those with neither a guaranteed submission nor a reservation."""

    __slots__ = ("devices", "free", "memory", "name")

    def __init__(self, node: Node) -> None:
        self.name = node.name
        self.memory = node.memory
        self.devices = [Device(self, index) for index in range(node.devices)]
        self.free: dict[Device, None] = dict.fromkeys(self.devices)


class Devices:
    """All devices that are alive. ``free`` counts those that a guaranteed submission could take now."""

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.nodes: dict[str, NodeDevices] = {}
        self.free = 0
        self.total = 0
        # Dicts as ordered sets: equal events must give equal choices.
        self._by_free: list[dict[NodeDevices, None]] = [{}]  # nodes by their number of free devices
        for node in nodes:
            self.join(node)

    def __iter__(self) -> Iterator[Device]:
        for node in self.nodes.values():
            yield from node.devices

    def at(self, place: Place) -> Device:
        """Return the device at a place. Raises KeyError or IndexError if there is none."""
        return self.nodes[place[0]].devices[place[1]]

    def join(self, node: Node) -> None:
        """Add a node with all its devices free. Raises ValueError for a known name, or a node without devices."""
        if node.name in self.nodes:
            raise ValueError(f"node {node.name!r} is already part of the cluster; give each node a name of its own")
        if node.devices < 1:
            raise ValueError(f"node {node.name!r} has {node.devices} devices; a node needs at least one")
        # The index by free devices is as long as the largest node needs; it is never shortened.
        added = self.nodes[node.name] = NodeDevices(node)
        while len(self._by_free) <= node.devices:
            self._by_free.append({})
        self._by_free[node.devices][added] = None
        self.free += node.devices
        self.total += node.devices

    def leave(self, name: str) -> None:
        """Remove a node, whose entries were stopped before."""
        node = self.nodes.pop(name)
        del self._by_free[len(node.free)][node]
        self.free -= len(node.free)
        self.total -= len(node.devices)

    def choose(self, count: int, first: Place | None = None) -> list[Device] | None:
        """Return ``count`` free devices: of the fullest node that has them, or else of as few nodes as possible.

        A single one is that at ``first``, if it is free. Returns None if there are not so many.
        """
        if count > self.free:
            return None
        if first is not None and count == 1 and first[0] in self.nodes and (device := self.at(first)) in device.node.free:
            return [device]
        # Nodes stand by their number of free devices, so the first that suffices leaves the least fragment.
        for nodes in self._by_free[count:]:
            if nodes:
                free = next(iter(nodes)).free
                if count == 1:
                    return [next(iter(free))]
                found = []
                for device in free:
                    found.append(device)
                    if len(found) == count:
                        return found
        found = []
        for nodes in reversed(self._by_free):
            for node in nodes:
                found += node.free
                if len(found) >= count:
                    return found[:count]
        raise AssertionError(f"{count} devices asked for, {self.free} free, {len(found)} found")

    def take(self, devices: Sequence[Device]) -> None:
        """Mark devices as no longer free."""
        by_free = self._by_free
        for device in devices:
            node = device.node
            free = node.free
            count = len(free)
            del free[device]
            del by_free[count][node]
            by_free[count - 1][node] = None
        self.free -= len(devices)

    def give(self, devices: Sequence[Device]) -> None:
        """Mark devices as free again."""
        by_free = self._by_free
        for device in devices:
            node = device.node
            free = node.free
            count = len(free)
            free[device] = None
            del by_free[count][node]
            by_free[count + 1][node] = None
        self.free += len(devices)

    def notes(self) -> dict[str, Any]:
        """Return the nodes and the order of free devices, of which the first are taken first, as JSON types."""
        return {
            "nodes": [[node.name, len(node.devices), node.memory] for node in self.nodes.values()],
            "by_free": [[node.name for node in nodes] for nodes in self._by_free],
            "free": {node.name: [device.place[1] for device in node.free] for node in self.nodes.values()},
        }

    def put_in_order(self, notes: Mapping[str, Any]) -> None:
        """Bring the free devices into the order of ``notes``; nodes, and which of their devices are free, must be the same."""
        self._by_free = [{self.nodes[name]: None for name in names} for names in notes["by_free"]]
        for name, free in notes["free"].items():
            node = self.nodes[name]
            node.free = {node.devices[index]: None for index in free}

    def check(self) -> None:
        """Walk all nodes; raise AssertionError if two counts contradict each other."""
        free = 0
        for node in self.nodes.values():
            assert node in self._by_free[len(node.free)], f"{node.name} is among nodes with another number free"
            for device in node.devices:
                is_free = device.guaranteed is None and device.reserved is None
                assert is_free == (device in node.free), f"{device} is free: {is_free}, and listed otherwise"
                free += is_free
        assert free == self.free, f"{free} devices are free, {self.free} are counted"
        assert sum(map(len, self._by_free)) == len(self.nodes)
