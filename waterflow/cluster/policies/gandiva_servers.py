"""The servers of Gandiva (OSDI 2018): assignment of groups to servers, more than fit at once; its algorithm 1."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterable, Iterator, Mapping
from heapq import heapify, heappop, heapreplace
from math import inf
from typing import Any, TypeAlias

from waterflow.cluster.book import Entry
from waterflow.cluster.devices import Device, NodeDevices


class Group:
    """Submissions that run at the same time on the same devices: one, or several that are packed.

    ``home`` is the number of devices that it takes of each server; ``number`` counts such assignments. ``turn`` is when it
    last began to run, ``left`` when it last ceased to; minus infinity: never. ``tried`` is the id of a newcomer on trial,
    ``packed`` counts the packings that began, at the one from which it has several entries.
    ``waits`` and ``known`` are its items in the sorted lists of servers, as of the last ``refresh``: a change of a group, or
    of what it runs, must be noted in ``Servers.touched``.
    """

    __slots__ = ("entries", "home", "known", "left", "number", "packed", "tried", "turn", "waits", "wanted")

    def __init__(self, entries: list[Entry], home: dict[Server, int]) -> None:
        self.entries = entries
        self.wanted = entries[0].wanted
        self.home = home
        self.number = -1
        self.turn = -inf
        self.left = -inf
        self.tried: str | None = None
        self.packed = 0
        self.waits: Item | None = None
        self.known: Item | None = None

    @property
    def running(self) -> bool:
        """True while it has its turn."""
        return self.entries[0].state == "running"

    @property
    def profiled(self) -> bool:
        """True once its utilization and its memory are known."""
        return all(entry.memory > 0 and entry.utilization is not None for entry in self.entries)

    @property
    def utilization(self) -> float:
        """The utilization of its devices, summed over reports; an entry that has not reported counts as 1."""
        return sum(1.0 if entry.utilization is None else entry.utilization for entry in self.entries)

    @property
    def memory(self) -> int:
        """Bytes that it needs on each device."""
        return sum(entry.memory for entry in self.entries)

    def notes(self) -> dict[str, Any]:
        """Return its state as JSON types, for ``Servers.put_back``; each of its entries keeps it."""
        return {
            "home": {server.node.name: count for server, count in self.home.items()},
            "number": self.number,
            "turn": self.turn,
            "left": self.left,
            "tried": self.tried,
            "packed": self.packed,
        }


Item: TypeAlias = tuple[float, int, Group]  # rank, then a number that breaks ties; no two items are equal


class Server:
    """A node with the groups assigned to it. ``affinity`` is the number of devices that they ask for; 0: none yet.

    ``known`` are the groups that may be packed, by utilization: they ran, are profiled, and not on trial.
    """

    def __init__(self, node: NodeDevices) -> None:
        self.node = node
        self.size = len(node.devices)
        self.groups: dict[Group, None] = {}
        self.known: list[Item] = []
        self.allocated = 0
        self.affinity = 0

    @property
    def free(self) -> int:
        """The number of devices to which no group is assigned."""
        return max(0, self.size - self.allocated)

    @property
    def idle(self) -> list[Device]:
        """The devices on which no entry runs now."""
        return [device for device in self.node.devices if not device.residents]


Home: TypeAlias = tuple[tuple[Server, int], ...]


class Servers:
    """All servers, and the assignment of groups to them.

    Groups that wait for their turn are in a sorted list for each home, the one that left first in front: if the first of a
    list does not fit, none after it does. So a turn visits no more of them than begin to run. ``touched`` are groups whose
    places in the lists may have changed, ``changed`` those that were touched since its owner emptied it.
    """

    def __init__(self) -> None:
        self.by_node: dict[NodeDevices, Server] = {}
        self.touched: dict[Group, None] = {}
        self.changed: dict[Group, None] = {}
        self._waiting: dict[Home, list[Item]] = {}
        self._spread: dict[Home, dict[Group, None]] = {}  # groups on devices of several servers
        self.assigned = 0  # how often a group was assigned to a home

    @property
    def overloaded(self) -> bool:
        """True if some server has more groups than it can run at once."""
        return any(server.allocated > server.size for server in self.by_node.values())

    def assign(self, group: Group, home: dict[Server, int]) -> None:
        """Assign a group to ``home``."""
        group.home = home
        group.number = self.assigned
        self.assigned += 1
        self.touched[group] = None
        if len(home) > 1:
            self._spread.setdefault(tuple(home.items()), {})[group] = None
        for server, count in home.items():
            server.groups[group] = None
            server.allocated += count
            server.affinity = server.affinity or group.wanted

    def withdraw(self, group: Group) -> None:
        """Take a group from its home."""
        self._set_waits(group, None)
        self._set_known(group, None)
        self.touched.pop(group, None)
        self.changed.pop(group, None)
        if len(group.home) > 1:
            home = tuple(group.home.items())
            del self._spread[home][group]
            if not self._spread[home]:
                del self._spread[home]
        for server, count in group.home.items():
            del server.groups[group]
            server.allocated -= count
            if not server.groups:
                server.affinity = 0
        group.home = {}

    def put_back(self, entries: list[Entry], notes: Mapping[str, Any]) -> Group:
        """Return the group of ``entries`` with the state of ``notes``, at its home. Call it in the order of their numbers."""
        by_name = {node.name: server for node, server in self.by_node.items()}
        group = Group(entries, {})
        self.assigned = notes["number"]
        self.assign(group, {by_name[name]: count for name, count in notes["home"].items()})
        group.turn, group.left, group.tried, group.packed = (notes[name] for name in ("turn", "left", "tried", "packed"))
        return group

    def refresh(self) -> None:
        """Put the groups that were touched at their places in the lists."""
        for group in self.touched:
            self._set_waits(group, None if group.running else (group.left, group.entries[0].order, group))
            may = group.turn > -inf and group.tried is None and group.profiled
            self._set_known(group, (group.utilization, group.number, group) if may else None)
        self.changed |= self.touched
        self.touched.clear()

    def take_turns(self, room: dict[Server, int]) -> list[Group]:
        """Return the waiting groups that fit into ``room``, and subtract them from it; those that left first come first."""
        self.refresh()
        heads = [(items[0], 0, home) for home, items in self._waiting.items() if fits(home, room)]
        heapify(heads)
        turns = []
        while heads:
            item, index, home = heads[0]
            if not fits(home, room):
                heappop(heads)
                continue
            for server, count in home:
                room[server] -= count
            turns.append(item[2])
            items = self._waiting[home]
            index += 1
            if index < len(items):
                heapreplace(heads, (items[index], index, home))
            else:
                heappop(heads)
        return turns

    def _set_waits(self, group: Group, item: Item | None) -> None:
        if item == group.waits:
            return
        home = tuple(group.home.items())
        if group.waits is not None:
            items = self._waiting[home]
            del items[bisect_left(items, group.waits)]
            if not items:
                del self._waiting[home]
        if item is not None:
            insort(self._waiting.setdefault(home, []), item)
        group.waits = item

    def _set_known(self, group: Group, item: Item | None) -> None:
        if item == group.known:
            return
        for server in group.home:
            if group.known is not None:
                del server.known[bisect_left(server.known, group.known)]
            if item is not None:
                insort(server.known, item)
        group.known = item

    def find_home(self, wanted: int) -> dict[Server, int] | None:
        """Return a home by algorithm 1; None if no device is free and no server has the affinity."""
        same = [s for s in self.by_node.values() if s.affinity == wanted and s.size >= wanted]
        least = min(same, key=_load, default=None)
        if least is not None and least.allocated + wanted <= least.size:
            return {least: wanted}
        if sum(server.free for server in self.by_node.values()) >= wanted:
            # Servers without groups first: they take the affinity, and sizes stay apart, as algorithm 1 wants.
            unused = [server for server in self.by_node.values() if not server.groups]
            return self._of_free(wanted, unused) or self._of_free(wanted, self.by_node.values())
        if least is not None:
            return {least: wanted}
        # No server has the affinity: the least crowded home of a group that is spread over several servers is shared.
        order = {server: position for position, server in enumerate(self.by_node.values())}
        several = [
            (max(_load(server) for server, _ in home), min(order[server] for server, _ in home), group.number, group)
            for home, groups in self._spread.items()
            if (group := next(iter(groups))).wanted == wanted
        ]
        return dict(min(several)[-1].home) if several else None

    @staticmethod
    def _of_free(wanted: int, servers: Iterable[Server]) -> dict[Server, int] | None:
        ordered = sorted(servers, key=lambda server: server.free)
        for server in ordered:
            if server.free >= wanted:
                return {server: wanted}
        home: dict[Server, int] = {}
        for server in reversed(ordered):
            if wanted == 0 or server.free == 0:
                break
            home[server] = min(server.free, wanted)
            wanted -= home[server]
        return home if wanted == 0 else None

    def together(self) -> Iterator[tuple[Group, dict[Server, int]]]:
        """Yield groups that are spread over several servers, with one that has room; the caller moves each before the next."""
        rooms = [server for server in self.by_node.values() if server.free]
        largest = max((server.size for server in self.by_node.values()), default=0)
        small = [group for groups in self._spread.values() for group in groups if group.wanted <= largest]
        for group in sorted(small, key=lambda group: group.number):
            fit = [server for server in rooms if server.free + group.home.get(server, 0) >= group.wanted]
            if fit:
                yield group, {min(fit, key=lambda server: server.free): group.wanted}
                rooms = [server for server in self.by_node.values() if server.free]

    def less_crowded(self) -> tuple[Group, dict[Server, int]] | None:
        """Return a group of an overloaded server that fits on free devices elsewhere; preferably one that waits for its turn."""
        rooms = [server for server in self.by_node.values() if server.free]
        most = max((server.free for server in rooms), default=0)
        if not most:
            return None
        for crowded in sorted(self.by_node.values(), key=_load, reverse=True):
            if crowded.allocated <= crowded.size:
                return None
            small = [group for group in crowded.groups if group.wanted <= most and len(group.home) == 1]
            if small:
                group = min(small, key=lambda group: (group.running, group.left))
                return group, {min((s for s in rooms if s.free >= group.wanted), key=lambda s: s.free): group.wanted}
        return None

    def fuller(self, threshold: float) -> list[tuple[Group, dict[Server, int]]]:
        """Return moves that empty a server, of which a share ``threshold`` or more is free, onto fuller ones."""
        loose = [s for s in self.by_node.values() if s.groups and s.free >= threshold * s.size]
        for server in sorted(loose, key=lambda server: server.free, reverse=True):
            room = {
                other: other.free
                for other in self.by_node.values()
                if other is not server and other.groups and other.free <= server.free
            }
            moves = []
            for group in server.groups:
                fits = [other for other in room if room[other] >= group.wanted]
                # All groups of a server or none: a server that keeps one is not free for a large job.
                if not fits or len(group.home) > 1:
                    break
                target = min(fits, key=lambda other: room[other])
                room[target] -= group.wanted
                moves.append((group, {target: group.wanted}))
            else:
                return moves
        return []


def idle_devices(home: Mapping[Server, int], own: Collection[Device] = ()) -> list[Device]:
    """Return the devices of a home that are idle, or in ``own``; the caller knows that there are enough."""
    devices: list[Device] = []
    for server, count in home.items():
        here = [device for device in server.node.devices if not device.residents or device in own][:count]
        assert len(here) == count, f"{server.node.name} has {len(here)} devices that are idle, not {count}"
        devices += here
    return devices


def fits(home: Iterable[tuple[Server, int]], room: Mapping[Server, int]) -> bool:
    """Return whether there is room for one more group with this home."""
    return all(room[server] >= count for server, count in home)


def _load(server: Server) -> float:
    return server.allocated / server.size
