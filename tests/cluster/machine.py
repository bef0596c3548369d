"""A cluster to which anything may happen in any order, for state machines of policies, and an obvious second book."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.cluster.simulated import Rows
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.scheduler import Scheduler
from waterflow.cluster.submission import Action, Node, Place, Report, Resize, SetPriority, Start, Stop, Submission, Tenant
from waterflow.errors import SubmissionError

MEMORY = 16


class ClusterMachine(RuleBasedStateMachine):
    """Submissions, ends, reports, time, nodes that go and come back, and restarts of the scheduler.

    ``where`` is what a backend would believe, from the actions alone. ``twin`` is the scheduler before the last restart: it
    hears all that comes, and must decide the same to the end.
    """

    policies: ClassVar[list[Callable[[], Policy]]]
    shares_devices: ClassVar[bool] = False  # several submissions on one device

    @initialize(
        data=st.data(),
        sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3),
        quotas=st.one_of(st.none(), st.lists(st.integers(0, 6), min_size=2, max_size=2)),
    )
    def build(self, data: st.DataObject, sizes: list[int], quotas: list[int] | None) -> None:
        self.new_policy = data.draw(st.sampled_from(self.policies))
        self.nodes = {f"n{i}": Node(f"n{i}", size, MEMORY) for i, size in enumerate(sizes)}
        self.lost: set[str] = set()
        self.quotas = None if quotas is None else {"a": quotas[0], "b": quotas[1]}
        tenants = [Tenant(name, quota) for name, quota in (self.quotas or {}).items()]
        self.scheduler = Scheduler(list(self.nodes.values()), self.new_policy(), tenants)
        self.twin: Scheduler | None = None
        self.rows = Rows()
        self.now = 0.0
        self.number = 0
        self.where: dict[str, tuple[tuple[Place, ...], str]] = {}
        self.open: set[str] = set()

    def tell(self, event: str, *what: Any) -> list[Action]:
        """Return the decision on an event, which the twin takes, too; its consequences are written down."""
        actions: list[Action] = getattr(self.scheduler, event)(self.now, *what)
        if self.twin is not None:
            assert getattr(self.twin, event)(self.now, *what) == actions, "the one that never stopped decides otherwise"
            assert self.twin.next_tick == self.scheduler.next_tick
        self.rows.write(self.scheduler)
        return actions

    # -- what happens

    @rule(
        tenant=st.sampled_from("ab"),
        devices=st.integers(1, 5),
        guaranteed=st.booleans(),
        auto=st.booleans(),
        memory=st.integers(0, MEMORY),
        duration=st.floats(1, 1000),
    )
    def submit(self, tenant: str, devices: int, guaranteed: bool, auto: bool, memory: int, duration: float) -> None:
        submission = Submission(
            id=str(self.number),
            tenant=tenant,
            devices=devices,
            priority="guaranteed" if guaranteed else "opportunistic",
            auto=auto,
            memory=memory,
            model="m",
            duration=duration,
            submitted=self.now,
        )
        self.number += 1
        try:
            actions = self.tell("submit", submission)
        except SubmissionError:
            if self.twin is not None:
                with pytest.raises(SubmissionError):
                    self.twin.submit(self.now, submission)
            return
        self.open.add(submission.id)
        self.carry_out(actions)
        assert self.tell("submit", submission) == []  # the same id twice is one

    @precondition(lambda self: self.where)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.end_one(data.draw(st.sampled_from(sorted(self.where))))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        id = data.draw(st.sampled_from(sorted(self.open)))
        self.open.remove(id)
        self.carry_out(self.tell("cancel", id))
        assert id not in self.where

    @precondition(lambda self: self.open and self.scheduler.policy.priorities)
    @rule(data=st.data(), guaranteed=st.booleans())
    def set_priority(self, data: st.DataObject, guaranteed: bool) -> None:
        """As its user may; a guaranteed one must find quota and devices."""
        id = data.draw(st.sampled_from(sorted(self.open)))
        entry, priority = self.scheduler.book.entries[id], "guaranteed" if guaranteed else "opportunistic"
        try:
            actions = self.tell("set_priority", id, priority)
        except SubmissionError:
            assert guaranteed and (self.quotas is not None or entry.state == "running")
            if self.twin is not None:
                with pytest.raises(SubmissionError):
                    self.twin.set_priority(self.now, id, "guaranteed")
            return
        self.carry_out(actions)
        assert entry.submission.priority == priority

    @precondition(lambda self: self.where)
    @rule(data=st.data(), utilization=st.floats(0, 1), rate=st.floats(0.1, 1))
    def report(self, data: st.DataObject, utilization: float, rate: float) -> None:
        id = data.draw(st.sampled_from(sorted(self.where)))
        self.carry_out(self.tell("report", id, Report(utilization=utilization, rate=rate)))

    @rule(seconds=st.floats(0.1, 700))
    def time_passes(self, seconds: float) -> None:
        end = self.now + seconds
        while (tick := self.scheduler.next_tick) is not None and tick <= end:
            assert tick >= self.now, f"the policy wanted to be asked at {tick}, before {self.now}"
            self.now = tick
            self.carry_out(self.tell("tick"))
            again = self.scheduler.next_tick
            assert again is None or again > self.now, "a tick that asks for itself again"
        self.now = end

    @precondition(lambda self: len(self.lost) < len(self.nodes))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(set(self.nodes) - self.lost)))
        self.lost.add(name)
        actions = self.tell("node_lost", name)
        for id, (places, _) in list(self.where.items()):
            if any(node == name for node, _ in places):
                del self.where[id]  # a backend stops the workers that are elsewhere
        self.carry_out([a for a in actions if not (isinstance(a, Stop) and a.id not in self.where)])

    @precondition(lambda self: self.lost)
    @rule(data=st.data())
    def come_back(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.lost)))
        self.lost.remove(name)
        self.carry_out(self.tell("node_joined", self.nodes[name]))

    @precondition(lambda self: self.open)
    @rule(data=st.data(), alone=st.booleans())
    def run_alone(self, data: st.DataObject, alone: bool) -> None:
        """As after a device was lost."""
        id = data.draw(st.sampled_from(sorted(self.open)))
        self.carry_out(self.tell("run_alone", id, alone))
        assert self.scheduler.book.entries[id].alone == alone

    @rule()
    def restart(self) -> None:
        """What was written down gives the same scheduler again; the one before lives on as its twin."""
        self.rows.write(self.scheduler)
        self.rows.check(self.scheduler)
        self.twin, self.scheduler = self.scheduler, self.rows.read(self.new_policy())
        assert self.scheduler.notes() == self.twin.notes()

    # -- what must be true

    @invariant()
    def the_book_is_whole(self) -> None:
        self.scheduler.book.check()  # quotas, one guaranteed submission on a device, reservations by who waits

    @invariant()
    def the_backend_agrees(self) -> None:
        book = self.scheduler.book
        running = {e.id: (e.places, e.priority) for e in book.entries.values() if e.state == "running"}
        assert running == self.where
        assert set(book.entries) == self.open

    @invariant()
    def quotas_are_kept(self) -> None:
        """Counted anew from what the backend believes, and reservations."""
        if self.quotas is None:
            return
        for tenant, quota in self.quotas.items():
            entries = [entry for entry in self.scheduler.book.entries.values() if entry.tenant == tenant]
            held = sum(len(self.where[e.id][0]) for e in entries if self.where.get(e.id, ("", ""))[1] == "guaranteed")
            held += sum(len(entry.reserved) for entry in entries)
            assert held <= quota

    @invariant()
    def devices_are_held_by_one(self) -> None:
        taken: dict[Place, list[str]] = {}
        for _, (places, priority) in self.where.items():
            assert len(set(places)) == len(places)
            for place in places:
                assert place[0] not in self.lost
                taken.setdefault(place, []).append(priority)
        for priorities in taken.values():
            assert priorities.count("guaranteed") <= 1
            assert self.shares_devices or len(priorities) == 1

    @invariant()
    def who_runs_alone_shares_with_nobody(self) -> None:
        for id, (places, _) in self.where.items():
            if self.scheduler.book.entries[id].alone:
                others = {place for other, (taken, _) in self.where.items() if other != id for place in taken}
                assert not others.intersection(places), f"{id} is not alone"

    @invariant()
    def reservations_do_not_leak(self) -> None:
        book = self.scheduler.book
        for device in book.devices:
            if device.reserved is not None:
                assert book.entries[device.reserved.id].state == "waiting"
                waits_for_vacant_ones = device.reserved.alone and not all(d.vacant for d in device.reserved.reserved)
                assert len(device.reserved.reserved) < device.reserved.wanted + waits_for_vacant_ones

    @invariant()
    def nobody_waits_in_vain(self) -> None:
        self.check_waiting()

    def check_waiting(self) -> None:
        """What a policy promises to those who wait."""

    def teardown(self) -> None:
        """Everybody ends, once all nodes are there again."""
        if not hasattr(self, "scheduler"):
            return
        for name in sorted(self.lost):
            self.carry_out(self.tell("node_joined", self.nodes[name]))
        self.lost.clear()
        for _ in range(20 * (len(self.open) + 5)):
            if not self.open:
                break
            if self.where:
                for id in sorted(self.where):
                    self.carry_out(self.tell("report", id, Report(utilization=0.5, rate=0.6)))
                self.time_passes(30.0)
                if self.where:
                    self.end_one(min(self.where, key=int))
            else:
                tick = self.scheduler.next_tick
                assert tick is not None, f"nothing runs, {sorted(self.open)} wait, and no tick is wanted"
                self.time_passes(max(tick - self.now, 0.1))
            self.the_book_is_whole()
        assert not self.open, f"{sorted(self.open)} never ended"

    # -- parts

    def end_one(self, id: str) -> None:
        del self.where[id]
        self.open.remove(id)
        self.carry_out(self.tell("ended", id))

    def carry_out(self, actions: list[Action]) -> None:
        """As a backend would, which knows of nothing else."""
        for action in actions:
            match action:
                case Start(id, places, priority):
                    assert id not in self.where, f"{id} is started twice"
                    self.where[id] = (places, priority)
                case Stop(id):
                    del self.where[id]
                case SetPriority(id, priority):
                    self.where[id] = (self.where[id][0], priority)
                case Resize(id, places):
                    self.where[id] = (places, self.where[id][1])
                case _:  # a move
                    assert len(action.places) == len(self.where[action.id][0])
                    self.where[action.id] = (action.places, self.where[action.id][1])
