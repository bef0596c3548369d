"""The global scheduler: a state machine over events, with the same policies live and in simulation.

It has no clock, no threads, no input and no output. Time is a float in seconds that the caller passes in and that never goes
back. Each event returns the actions to carry out, in this order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from waterflow.cluster.book import Book, Entry
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.submission import Action, Node, Priority, Report, Stop, Submission, Tenant
from waterflow.errors import SubmissionError
from waterflow.units import check_priority


class Scheduler:
    """A scheduler of nodes and tenants with quotas, with one policy.

    Each event takes ``decide=False`` if more events of the same moment follow; the last one decides for all.
    """

    def __init__(self, nodes: Sequence[Node], policy: Policy, tenants: Sequence[Tenant] = ()) -> None:
        self.policy = policy
        self.book = Book(nodes, tenants)
        self._order = 0
        self._undecided = False  # a decision is due, and the event had decide=False
        policy.attach(self.book)

    # -- events

    def submit(self, now: float, submission: Submission, decide: bool = True) -> list[Action]:
        """Add a submission; a known id changes nothing. Raises SubmissionError if it can never run."""
        self._at(now)
        book = self.book
        if submission.id in book.entries:
            return self._after(now, True, decide)
        self._refuse(submission)
        entry = book.add(submission, self._order)
        # The policy judges a complete entry; a refusal removes it again.
        why = self.policy.refuse(entry)
        if why is not None:
            book.remove(entry)
            raise SubmissionError(f"submission {submission.id!r}: {why}")
        self._order += 1
        self.policy.submitted(entry)
        return self._after(now, True, decide)

    def ended(self, now: float, id: str, decide: bool = True) -> list[Action]:
        """Record that a submission ended by itself; an unknown id changes nothing."""
        self._at(now)
        entry = self.book.entries.get(id)
        if entry is None:
            return []
        self.book.remove(entry)
        self.policy.ended(entry)
        return self._after(now, True, decide)

    def cancel(self, now: float, id: str, decide: bool = True) -> list[Action]:
        """End a submission on request."""
        self._at(now)
        entry = self.book.entries.get(id)
        if entry is None:
            return []
        stop: list[Action] = [Stop(id, suspend=False)] if entry.state == "running" else []
        return stop + self.ended(now, id, decide)

    def report(self, now: float, id: str, report: Report, decide: bool = True) -> list[Action]:
        """Update a running submission from a report; a report of any other is ignored."""
        self._at(now)
        entry = self.book.entries.get(id)
        if entry is None or entry.state != "running":
            return []
        # At the old rate, before the report changes it.
        entry.account(now)
        self.book.changed.add(id)
        duration = entry.submission.duration
        if report.progress is not None and duration is not None:
            entry.done = report.progress * duration
        entry.rate = report.rate
        if report.utilization is not None:
            entry.utilization = report.utilization
        if report.memory is not None:
            entry.memory = report.memory
        return self._after(now, self.policy.reported(entry, report), decide)

    def run_alone(self, now: float, id: str, alone: bool, decide: bool = True) -> list[Action]:
        """Let a submission share devices with no other from now on; with ``alone=False`` let any share again.

        One that runs, which must be alone, waits again first, as after a loss.
        """
        self._at(now)
        entry = self.book.entries.get(id)
        if entry is None or entry.alone == alone:
            return []
        stops: list[Action] = []
        self.book.actions = stops
        if alone and entry.state == "running":
            self.book.stop(entry)
            entry.preemptions -= 1
            self.policy.stopped(entry)
        elif alone:
            self.policy.set_apart(entry)
        entry.alone = alone
        self.book.changed.add(id)
        return stops + self._after(now, True, decide)

    def set_priority(self, now: float, id: str, priority: Priority, decide: bool = True) -> list[Action]:
        """Let a submission have another priority, as if it had been submitted with it; an unknown id changes nothing.

        Raises SubmissionError or InvalidJobError, and changes nothing, if the policy knows no priorities, or if quota or devices
        are not free for a guaranteed one.
        """
        self._at(now)
        entry = self.book.entries.get(id)
        if entry is None:
            return []
        self._refuse_priority(entry, priority)
        if entry.priority == entry.submission.priority == priority:
            return []
        actions: list[Action] = []
        self.book.actions = actions
        if entry.state == "running":
            self.book.set_priority(entry, priority)
        else:
            self.book.unreserve(entry)
            entry.priority, entry.waiting_since = priority, now
        entry.submission = replace(entry.submission, priority=priority)
        self.book.changed.add(id)
        self.policy.priority_changed(entry)
        return actions + self._after(now, True, decide)

    def node_lost(self, now: float, node: str, decide: bool = True) -> list[Action]:
        """Remove a node. Its submissions wait again; their workers on other nodes are stopped."""
        self._at(now)
        book = self.book
        if node not in book.devices.nodes:
            return []
        devices = book.devices.nodes[node].devices
        actions: list[Action] = []
        book.actions = actions
        hit = {entry.id: entry for device in devices for entry in device.residents}
        elsewhere = {entry.id for entry in hit.values() if any(device.node.name != node for device in entry.devices)}
        # Reservations end first: the policy must not find one on a device that no longer exists.
        for entry in [*hit.values(), *(device.reserved for device in devices)]:
            if entry is not None and entry.reserved:
                book.unreserve(entry)
        for entry in hit.values():
            book.stop(entry, suspend=False)
            entry.preemptions -= 1  # ``stop`` counts one, and a loss is none
        book.devices.leave(node)
        for entry in hit.values():
            self.policy.stopped(entry)
        self.policy.nodes_changed()
        stops: list[Action] = [action for action in actions if action.id in elsewhere]
        return stops + self._after(now, True, decide)

    def node_joined(self, now: float, node: Node, decide: bool = True) -> list[Action]:
        """Add a node on which nothing runs. A known node was lost, and came back: it is lost first."""
        lost = self.node_lost(now, node.name, decide=False)
        self._at(now)
        self.book.devices.join(node)
        self.policy.nodes_changed()
        return lost + self._after(now, True, decide)

    def tick(self, now: float) -> list[Action]:
        """Let the policy decide: at ``next_tick``, or for all events since with ``decide=False``."""
        self._at(now)
        return self._decide(now)

    @property
    def next_tick(self) -> float | None:
        """The time at which the policy must be asked again at the latest; None if only an event can change its decision."""
        return self.book.now if self._undecided else self.policy.next_tick

    # -- a restart

    def notes(self) -> dict[str, Any]:
        """Return the state that no entry has, as JSON types."""
        return {
            "policy": self.policy.name,
            "now": self.book.now,
            "order": self._order,
            "tenants": [[tenant.name, tenant.quota] for tenant in self.book.tenants.values()],
            "devices": self.book.devices.notes(),
            "policy_notes": self.policy.notes(),
        }

    @classmethod
    def restored(
        cls, notes: Mapping[str, Any], rows: Iterable[tuple[Submission, int, Mapping[str, Any]]], policy: Policy
    ) -> Scheduler:
        """Return a scheduler that decides as the one did that had ``notes`` and, as ``rows``, these entries.

        ``rows`` are those of ``Book.put_back``, ``policy`` a new one of the same class; with other parameters than before it
        decides by these from here on. Raises ValueError for the notes of another policy.
        """
        if notes["policy"] != policy.name:
            raise ValueError(f"the state is of policy {notes['policy']!r}, not {policy.name!r}; take the same policy")
        devices = notes["devices"]
        scheduler = cls([Node(*node) for node in devices["nodes"]], policy, [Tenant(*t) for t in notes["tenants"]])
        book = scheduler.book
        book.now = notes["now"]
        scheduler._order = notes["order"]
        book.put_back(rows)
        book.devices.put_in_order(devices)
        policy.restore(notes["policy_notes"])
        book.changed.clear()
        book.check()
        return scheduler

    # -- parts

    def _at(self, now: float) -> None:
        if now < self.book.now:
            raise ValueError(f"time goes back from {self.book.now} to {now} seconds; pass events in their order")
        self.book.now = now

    def _decide(self, now: float) -> list[Action]:
        actions: list[Action] = []
        self.book.actions = actions
        self._undecided = False
        self.policy.decide(now)
        return actions

    def _after(self, now: float, wanted: bool, decide: bool) -> list[Action]:
        if wanted and decide:
            return self._decide(now)
        self._undecided |= wanted
        return []

    def _refuse(self, submission: Submission) -> None:
        book = self.book
        about = f"submission {submission.id!r}"
        if book.tenants and submission.tenant not in book.tenants:
            raise SubmissionError(f"{about}: unknown tenant {submission.tenant!r}; there are {sorted(book.tenants)}")
        if submission.devices < 1:
            raise SubmissionError(f"{about} asks for {submission.devices} devices; at least one is needed")
        if submission.devices > book.devices.total:
            raise SubmissionError(
                f"{about} asks for {submission.devices} devices; the cluster has {book.devices.total}. Ask for fewer"
            )
        if submission.priority not in ("guaranteed", "opportunistic"):
            raise SubmissionError(f"{about}: priority {submission.priority!r} is neither guaranteed nor opportunistic")
        if submission.memory and all(0 < node.memory < submission.memory for node in book.devices.nodes.values()):
            most = max(node.memory for node in book.devices.nodes.values())
            raise SubmissionError(
                f"{about} needs {submission.memory:,} bytes on each device; the largest has {most:,}. Lower its batch sizes"
            )
        if book.tenants and submission.priority == "guaranteed" and not submission.auto:
            quota = book.tenants[submission.tenant].quota
            if submission.devices > quota:
                raise SubmissionError(
                    f"{about} asks for {submission.devices} guaranteed devices; the quota of {submission.tenant!r} is "
                    f"{quota}. Ask for fewer, or let it run as opportunistic (auto=True)"
                )

    def _refuse_priority(self, entry: Entry, priority: Priority) -> None:
        book, about = self.book, f"submission {entry.id!r}"
        if not self.policy.priorities:
            raise SubmissionError(
                f"{about}: policy {self.policy.name!r} runs all with one priority; start another cluster, with --policy antman"
            )
        check_priority(about, priority)
        if priority in ("opportunistic", entry.priority):
            return
        quota = book.tenants[entry.tenant].quota if book.tenants else entry.wanted
        used = 0 if entry.state == "waiting" else book.held.get(entry.tenant, 0)
        if entry.wanted > quota - used:
            raise SubmissionError(
                f"{about} takes {entry.wanted} guaranteed devices; of the quota of {entry.tenant!r}, {quota}, {used} are used. "
                "Leave it opportunistic, or let another one of the tenant be that first"
            )
        for device in entry.devices:
            other = device.guaranteed or device.reserved
            if other is not None and other is not entry:
                raise SubmissionError(
                    f"{about} runs at {device.place[0]}:{device.place[1]}, which {other.id!r} has as guaranteed. Wait for its "
                    "end, or let that one be opportunistic first"
                )
