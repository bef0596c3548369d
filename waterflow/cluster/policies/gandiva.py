"""Gandiva (OSDI 2018): every job starts at once; time slicing, packing, migration, growing. Sections 4.1 and 4.2."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from waterflow.cluster.book import Book, Entry
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.policies.gandiva_servers import Group, Server, Servers, fits, idle_devices
from waterflow.cluster.submission import Report

_PARAMETERS = ("quantum", "packing", "migration", "defragment", "growable", "grow_after", "newest_first")
_LOWEST = 8  # groups of a server, of lowest utilization, that are considered for one more packing


class Gandiva(Policy):
    """Servers take more submissions than they have devices for, and let them take turns.

    Each turn lasts ``quantum`` seconds. With ``packing``, while a server is overloaded, the submission of lowest utilization
    joins the one of lowest utilization beside it for a quantum at a time; it stays while both together get further than they
    would by turns, and while no device beside them is free. Both must have run alone before, declare their memory, and fit
    into the device together. With ``migration`` groups leave crowded servers for free devices, spread groups come together,
    and servers of which a share ``defragment`` is free are emptied. Models in ``growable`` (all of them with "all") take the
    free devices of their server ``grow_after`` seconds after the last arrival or end, and give them back at the next arrival.
    With ``newest_first`` submissions that never ran have the next turn, for early feedback; otherwise the last of the round.

    Tenants, quotas and priorities are ignored: the paper does not aim at fairness among them. The paper leaves open
    ``newest_first``, ``grow_after``, and how long a packing is tried: here one quantum.
    """

    name = "gandiva"
    beyond_quotas = True
    sharing = "packed"

    def __init__(
        self,
        quantum: float = 60.0,
        packing: bool = True,
        migration: bool = True,
        defragment: float = 0.75,
        growable: Collection[str] = (),
        grow_after: float = 60.0,
        newest_first: bool = True,
    ) -> None:
        if quantum <= 0 or grow_after < 0 or not 0 < defragment <= 1:
            raise ValueError(
                f"quantum={quantum} is above 0 seconds, grow_after={grow_after} 0 seconds or more, "
                f"defragment={defragment} a share above 0 and at most 1"
            )
        self.quantum = quantum
        self.packing = packing
        self.migration = migration
        self.defragment = defragment
        self.growable = growable
        self.grow_after = grow_after
        self.newest_first = newest_first
        self._pending: dict[str, Entry] = {}  # entries without a server
        self._servers = Servers()
        self._groups: dict[str, Group] = {}  # by the ids of their submissions
        self._packs: dict[Group, None] = {}  # groups of several submissions
        self._failed: dict[str, list[list[str]]] = {}  # packings that did not pay: sorted ids, by the one that left
        self._heard: set[str] = set()  # entries that reported since the last turn
        self._slice: float | None = None  # when the turn ends
        self._changed = 0.0  # the last arrival or end
        self._grown: dict[str, Entry] = {}
        self.packed = 0
        self.unpacked = 0
        self.migrations = 0

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The policy's parameters by name."""
        return {name: getattr(self, name) for name in _PARAMETERS}

    @property
    def next_tick(self) -> float | None:
        """The end of the turn, or the time to grow."""
        times = [] if self._slice is None else [self._slice]
        if self.growable and next(self._to_grow(), None) is not None:
            times.append(max(self._changed + self.grow_after, self.book.now))
        return min(times, default=None)

    def attach(self, book: Book) -> None:
        """Set the book; all its nodes become servers."""
        super().attach(book)
        self.nodes_changed()

    def submitted(self, entry: Entry) -> None:
        """Add an entry, which waits for a server."""
        self._changed = self.book.now
        self._pending[entry.id] = entry

    def ended(self, entry: Entry) -> None:
        """Remove an entry; its devices belong to the rest of its group."""
        self._changed = self.book.now
        self._pending.pop(entry.id, None)
        self._failed.pop(entry.id, None)
        self._heard.discard(entry.id)
        self._forget(entry)

    def stopped(self, entry: Entry) -> None:
        """Let an entry of a lost server wait for another one; ``nodes_changed`` removes the server."""
        self._forget(entry)
        self._pend(entry)

    def set_apart(self, entry: Entry) -> None:
        """Take an entry out of its group, to wait for a server by itself."""
        self.stopped(entry)

    def nodes_changed(self) -> None:
        """Let the groups of lost servers wait for others, and add new servers."""
        nodes = self.book.devices.nodes.values()
        for node in [node for node in self._servers.by_node if node not in nodes]:
            for group in list(self._servers.by_node[node].groups):
                for entry in list(group.entries):
                    self._forget(entry)
                    self._pend(entry)
            del self._servers.by_node[node]
        for node in nodes:
            if node not in self._servers.by_node:
                self._servers.by_node[node] = Server(node)

    def reported(self, entry: Entry, report: Report) -> bool:
        """Note the report; speeds are judged at the end of a turn."""
        self._heard.add(entry.id)
        group = self._groups.get(entry.id)
        if group is not None:
            self._servers.touched[group] = None
        return False

    def decide(self, now: float) -> None:
        """Assign servers to entries without one, then choose the groups that have their turn."""
        if self._pending:
            self._shrink()
            self._place()
        if self.migration:
            self._migrate()
        self._spread()
        if self._slice is not None and self._slice <= now:
            self._slice = None
            self._judge()
            self._pack()
            self._heard.clear()
            self._take_turns(rotate=True)
        else:
            self._take_turns(rotate=False)
        if self._slice is None and (self._servers.overloaded or self._packs):
            self._slice = now + self.quantum
        if self._changed + self.grow_after <= now:
            self._grow()
        self._write_keys()

    def notes(self) -> dict[str, Any]:
        """Return the turn, and who has reported in it."""
        servers = self._servers
        return {
            "affinity": {server.node.name: server.affinity for server in servers.by_node.values()},
            "assigned": servers.assigned,
            "heard": sorted(self._heard),
            "slice": self._slice,
            "changed": self._changed,
            "counts": [self.packed, self.unpacked, self.migrations],
        }

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Restore the groups from the keys; an entry in no group waits for a server."""
        members: dict[int, list[Entry]] = {}
        for entry in self.book.entries.values():
            self._failed |= {entry.id: entry.key["failed"]} if entry.key and entry.key["failed"] else {}
            if entry.key is None or entry.key["group"] is None:
                self._pending[entry.id] = entry
                continue
            members.setdefault(entry.key["group"]["number"], []).append(entry)
            if len(entry.devices) > entry.wanted:
                self._grown[entry.id] = entry
        for _, entries in sorted(members.items()):
            entries.sort(key=lambda entry: entry.key["position"])
            group = self._servers.put_back(entries, entries[0].key["group"])
            self._groups |= {entry.id: group for entry in entries}
        several = [group for group in set(self._groups.values()) if len(group.entries) > 1]
        self._packs = dict.fromkeys(sorted(several, key=lambda group: group.packed))
        for server in self._servers.by_node.values():
            server.affinity = notes["affinity"][server.node.name]
        self._servers.assigned = notes["assigned"]
        self._heard, self._slice, self._changed = set(notes["heard"]), notes["slice"], notes["changed"]
        self.packed, self.unpacked, self.migrations = notes["counts"]

    def _write_keys(self) -> None:
        self._servers.refresh()
        for group in self._servers.changed:
            notes = group.notes()
            for position, entry in enumerate(group.entries):
                entry.key = {"group": notes, "position": position, "failed": self._failed.get(entry.id, [])}
        self._servers.changed.clear()

    def _pend(self, entry: Entry) -> None:
        self._pending[entry.id] = entry
        entry.key = {"group": None, "position": 0, "failed": self._failed.get(entry.id, [])}

    # -- servers

    def _place(self) -> None:
        hopeless: set[int] = set()  # numbers of devices for which there is no home in this decision
        for entry in sorted(self._pending.values(), key=lambda entry: entry.order):
            if entry.wanted in hopeless:
                continue
            home = self._servers.find_home(entry.wanted)
            if home is None:
                hopeless.add(entry.wanted)
                continue
            group = self._groups[entry.id] = Group([entry], home)
            if not self.newest_first:
                group.left = self.book.now
            self._servers.assign(group, home)
            del self._pending[entry.id]

    def _forget(self, entry: Entry) -> None:
        self._grown.pop(entry.id, None)
        group = self._groups.pop(entry.id, None)
        if group is None:
            return
        group.tried = None
        self._leave(group, entry)
        if not group.entries:
            self._servers.withdraw(group)

    def _leave(self, group: Group, entry: Entry) -> None:
        group.entries.remove(entry)
        self._servers.touched[group] = None
        if len(group.entries) == 1:
            self._packs.pop(group, None)

    def _migrate(self) -> None:
        servers = self._servers
        while (found := servers.less_crowded()) is not None:
            self._move(*found)
        for group, home in servers.together():
            self._move(group, home)
        while not servers.overloaded and (moves := servers.fuller(self.defragment)):
            for group, home in moves:
                self._move(group, home)

    def _move(self, group: Group, home: dict[Server, int]) -> None:
        # The devices of the new home must be idle now: a running group goes on at once, a suspended one at its next
        # turn.
        self._shrink()
        self._servers.withdraw(group)
        if group.running:
            devices = idle_devices(home, own=group.entries[0].devices)
            for entry in group.entries:
                self.book.move(entry, devices)
        self._servers.assign(group, home)
        self.migrations += 1

    # -- turns

    def _take_turns(self, rotate: bool) -> None:
        """Give turns round robin: first the groups that have waited longest; of running ones those stay that began last.

        Without ``rotate`` no group is stopped.
        """
        now, book = self.book.now, self.book
        if not rotate and book.occupied == book.devices.total:
            return
        servers = self._servers.by_node.values()
        room = {server: server.size if rotate else len(server.idle) for server in servers}
        turns = self._servers.take_turns(room)
        if not turns:
            return
        stay = set()
        running = sorted(self._running(), key=lambda group: -group.turn) if rotate else []
        for group in running:
            if fits(group.home.items(), room):
                stay.add(group)
                for server, count in group.home.items():
                    room[server] -= count
        for group in running:
            if group not in stay:
                for entry in group.entries:
                    book.stop(entry)
                group.left = now
                self._servers.touched[group] = None
        for group in turns:
            devices = idle_devices(group.home)
            for entry in group.entries:
                book.start(entry, list(devices), "opportunistic")
            group.turn = now
            self._servers.touched[group] = None

    def _running(self) -> Iterable[Group]:
        found: dict[Group, None] = {}
        for server in self._servers.by_node.values():
            here = {self._groups[id] for device in server.node.devices for id in device.opportunistic}
            found |= dict.fromkeys(sorted(here, key=lambda group: group.number))
        return found

    # -- packing

    def _judge(self) -> None:
        # Packing pays if the speeds of all add up to more than the 1.0 that taking turns gives them together.
        for group in list(self._packs):
            newcomer = group.tried
            rates = [entry.rate for entry in group.entries]
            # A packing on trial is judged once all of its entries have reported, and their speeds are known.
            if not group.running or None in rates or not all(entry.id in self._heard for entry in group.entries if newcomer):
                continue
            group.tried = None
            self._servers.touched[group] = None
            if sum(filter(None, rates)) <= 1.0:
                out = next((entry for entry in group.entries if entry.id == newcomer), group.entries[-1])
                self._failed.setdefault(out.id, []).append(_ids(group))
                self.book.stop(out)
                self._split(group, out, dict(group.home)).left = self.book.now
                self.unpacked += 1

    def _spread(self) -> None:
        # Packing is for overload only: where devices have become free, the last entry of a packed group takes them.
        if not any(server.free for server in self._servers.by_node.values()):
            return
        for group in list(self._packs):
            server = next(iter(group.home))
            while len(group.home) == 1 and len(group.entries) > 1 and server.free >= group.wanted:
                group.tried = None
                out = group.entries[-1]
                alone = self._split(group, out, {server: group.wanted})
                if group.running:
                    self._shrink()
                    self.book.move(out, idle_devices(alone.home))
                alone.left = group.left

    def _split(self, group: Group, out: Entry, home: dict[Server, int]) -> Group:
        self._leave(group, out)
        alone = self._groups[out.id] = Group([out], {})
        alone.turn = group.turn
        self._servers.assign(alone, home)
        return alone

    def _pack(self) -> None:
        # One new packing on each overloaded server and turn, which the next turn judges.
        if not self.packing:
            return
        for server in self._servers.by_node.values():
            if server.allocated <= server.size:
                continue
            self._servers.refresh()
            pair = next(self._pairs([group for _, _, group in server.known[:_LOWEST]]), None)
            if pair is not None:
                self._join(*pair)

    def _pairs(self, known: list[Group]) -> Iterator[tuple[Group, Group]]:
        """Yield a single entry's group and a group that could take it in, the lowest utilization first."""
        held = {group: group.memory for group in known}
        for newcomer in known:
            if len(newcomer.entries) > 1 or newcomer.entries[0].alone:
                continue
            for host in known:
                memory = next(iter(host.home)).node.memory
                if (
                    host is not newcomer
                    and not host.entries[0].alone
                    and host.home == newcomer.home
                    and (not memory or held[host] + held[newcomer] <= memory)
                    and not self._has_failed(_ids(host, newcomer))
                ):
                    yield newcomer, host

    def _join(self, newcomer: Group, host: Group) -> None:
        entry = newcomer.entries[0]
        self._servers.withdraw(newcomer)
        if host.running:
            devices = list(host.entries[0].devices)
            if newcomer.running:
                self.book.move(entry, devices)
            else:
                self.book.start(entry, devices, "opportunistic")
        elif newcomer.running:
            self.book.stop(entry)
        host.entries.append(entry)
        self.packed += 1
        if host not in self._packs:
            self._packs[host] = None
            host.packed = self.packed
        self._groups[entry.id] = host
        host.tried = entry.id
        self._servers.touched[host] = None
        # Neither of the two waits longer for its turn than before.
        host.left = min(host.left, newcomer.left)

    def _has_failed(self, ids: list[str]) -> bool:
        return any(ids in self._failed.get(id, ()) for id in ids)

    # -- growing

    def _shrink(self) -> None:
        for entry in sorted(self._grown.values(), key=lambda entry: entry.order):
            self.book.resize(entry, entry.devices[: entry.wanted])
        self._grown.clear()

    def _to_grow(self) -> Iterator[tuple[Entry, Server]]:
        if self._pending or self._servers.overloaded:
            return
        for server in self._servers.by_node.values():
            if server.free and server.idle:
                for group in server.groups:
                    entry = group.entries[0]
                    may = self.growable == "all" or entry.submission.model in self.growable
                    if may and len(group.entries) == 1 and len(group.home) == 1 and group.running:
                        yield entry, server

    def _grow(self) -> None:
        """Give free devices one by one to the group with the smallest share of the devices that it asked for."""
        while found := min(self._to_grow(), key=lambda f: (len(f[0].devices) / f[0].wanted, f[0].order), default=None):
            entry, server = found
            self.book.resize(entry, [*entry.devices, server.idle[0]])
            self._grown[entry.id] = entry


def _ids(*groups: Group) -> list[str]:
    return sorted(entry.id for group in groups for entry in group.entries)
