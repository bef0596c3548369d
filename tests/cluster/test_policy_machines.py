"""Every policy as a state machine: whatever happens, its promises hold, and everybody ends."""

from __future__ import annotations

import math
from functools import partial
from typing import ClassVar

from hypothesis import settings

from tests.cluster.machine import ClusterMachine
from waterflow.cluster.book import Entry
from waterflow.cluster.policies import POLICIES
from waterflow.cluster.policies.antman import AntMan
from waterflow.cluster.policies.capacity import Capacity
from waterflow.cluster.policies.gandiva import Gandiva
from waterflow.cluster.policies.gandiva_packing import GandivaPacking
from waterflow.cluster.submission import Action, Start

STEPS = settings(stateful_step_count=30)
OTHERS = ("fifo", "fifo_backfill", "srtf", "srsf", "las", "elastic_tiresias")


class WholeDevices(ClusterMachine):
    """Policies that give whole devices and know no tenants but their quotas."""

    policies: ClassVar = [POLICIES[name] for name in OTHERS]


class AntManMachine(ClusterMachine):
    policies: ClassVar = [AntMan, partial(AntMan, patience=0.0), partial(AntMan, busy=0.3, window=60.0, patience=100.0)]
    shares_devices: ClassVar = True

    def check_waiting(self) -> None:
        """No guaranteed submission waits while its quota and devices without another one are free for it.

        One that runs alone needs vacant devices, and its own are free for nobody.
        """
        book = self.scheduler.book
        for entry in waiting(self, "guaranteed"):
            open_to_it = [d for d in book.devices if d.guaranteed is None and d.reserved in (None, entry)]
            open_to_it = [d for d in open_to_it if d.open_to(entry)]
            assert not (book.may_hold(entry, entry.wanted) and len(open_to_it) >= entry.wanted)
        for entry in book.entries.values():
            if entry.state == "running" and not entry.submission.auto:
                assert entry.priority == entry.submission.priority


class AntManOneNodeMachine(ClusterMachine):
    policies: ClassVar = [partial(AntMan, one_node=True), partial(AntMan, one_node=True, patience=0.0)]
    shares_devices: ClassVar = True

    def carry_out(self, actions: list[Action]) -> None:
        """One that fits on a node starts on one, as a guaranteed submission."""
        book = self.scheduler.book
        for action in actions:
            if isinstance(action, Start) and action.priority == "guaranteed":
                fits = any(len(node.devices) >= len(action.places) for node in book.devices.nodes.values())
                assert not fits or len({node for node, _ in action.places}) == 1
        super().carry_out(actions)


class CapacityMachine(ClusterMachine):
    policies: ClassVar = [Capacity, partial(Capacity, elastic=False), partial(Capacity, preempt=True, keep=True)]

    def check_waiting(self) -> None:
        """The first guaranteed submission of each tenant does not wait while its quota and devices are free for it."""
        book = self.scheduler.book
        policy = book_policy(self)
        first: dict[str, Entry] = {}
        for entry in waiting(self, "guaranteed"):
            first.setdefault(entry.tenant, entry)
        for entry in first.values():
            taken = (lambda d: d.guaranteed) if policy.preempt else (lambda d: d.residents)
            free = [d for d in book.devices if not taken(d) and d.reserved in (None, entry)]
            assert not (book.may_hold(entry, entry.wanted) and len(free) >= entry.wanted)


class CapacityBackfillMachine(ClusterMachine):
    policies: ClassVar = [
        partial(Capacity, backfill=True),
        partial(Capacity, backfill=True, preempt=True),
        partial(Capacity, backfill=True, elastic=False),
    ]

    def check_waiting(self) -> None:
        """Nobody waits while quota and vacant devices are free for it; nor, without a quota, while they are lent."""
        book = self.scheduler.book
        vacant = sum(not device.residents for device in book.devices)
        policy = book_policy(self)
        for entry in waiting(self, "guaranteed"):
            lent = policy.elastic and entry.submission.auto
            assert not ((lent or book.may_hold(entry, entry.wanted)) and vacant >= entry.wanted)
        for entry in waiting(self, "opportunistic"):
            assert vacant < entry.wanted


class GandivaMachine(ClusterMachine):
    policies: ClassVar = [
        Gandiva,
        partial(Gandiva, packing=False, migration=False),
        partial(Gandiva, growable="all", grow_after=5.0, defragment=0.5),
    ]
    shares_devices: ClassVar = True

    def check_waiting(self) -> None:
        """Devices of a server are idle only if nobody assigned to it could use them; packed ones fit into memory."""
        policy = book_policy(self)
        for group in set(policy._groups.values()):
            assert len({entry.state for entry in group.entries}) == 1
            if not group.running:
                assert any(len(server.idle) < count for server, count in group.home.items())
            elif len(group.entries) > 1:
                assert group.memory <= 16
                assert len({entry.places for entry in group.entries}) == 1
        servers = policy._servers
        servers.refresh()
        in_lists = [group for items in servers._waiting.values() for _, _, group in items]
        assert {*in_lists} == {group for group in policy._groups.values() if not group.running}
        assert len({*in_lists}) == len(in_lists)
        for items in servers._waiting.values():
            assert items == sorted((group.left, group.entries[0].order, group) for _, _, group in items)
        for server in servers.by_node.values():
            assert server.allocated == sum(group.home[server] for group in server.groups)
            ran = [group for group in server.groups if group.turn > -math.inf and group.profiled and not group.tried]
            assert server.known == sorted((group.utilization, group.number, group) for group in ran)
        assert not (policy._grown and policy._pending)


class GandivaPackingMachine(ClusterMachine):
    policies: ClassVar = [
        GandivaPacking,
        partial(GandivaPacking, limit=2, undo=True),
        partial(GandivaPacking, backfill=True, undo=True, trial=5.0),
    ]
    shares_devices: ClassVar = True

    def check_waiting(self) -> None:
        """Nobody waits while devices are vacant, unless behind one that does; memory is enough for all on a device."""
        book = self.scheduler.book
        vacant = sum(not device.residents for device in book.devices)
        first = min((e for e in book.entries.values() if e.state == "waiting"), key=lambda e: e.order, default=None)
        assert first is None or vacant < first.wanted
        for device in book.devices:
            assert device.memory_used <= device.memory


def waiting(machine: ClusterMachine, priority: str) -> list[Entry]:
    """Who waits, the first first."""
    entries = machine.scheduler.book.entries.values()
    found = [e for e in entries if e.state == "waiting" and e.submission.priority == priority]
    return sorted(found, key=lambda entry: entry.order)


def book_policy(machine: ClusterMachine):  # type: ignore[no-untyped-def]
    return machine.scheduler.policy


def case_of(machine: type[ClusterMachine]) -> type:
    case = machine.TestCase
    case.settings = STEPS
    return case


TestWholeDevices = case_of(WholeDevices)
TestAntMan = case_of(AntManMachine)
TestAntManOneNode = case_of(AntManOneNodeMachine)
TestCapacity = case_of(CapacityMachine)
TestCapacityBackfill = case_of(CapacityBackfillMachine)
TestGandiva = case_of(GandivaMachine)
TestGandivaPacking = case_of(GandivaPackingMachine)
