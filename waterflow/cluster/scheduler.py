"""The global scheduler: a state machine over events, with the same policies live and in simulation.

It has no clock, no threads, no input and no output. Time is a float in seconds that is passed in and never goes
back. Each event returns the actions to carry out, in this order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from waterflow.cluster.book import Book, Entry
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.submission import Action, Node, Outcome, Place, Report, Stop, Submission, Tenant
from waterflow.errors import SubmissionError

VERSION = 1  # of what to_dict() gives


class Scheduler:
    """Nodes, tenants with quotas, and one policy.

    Each event takes ``decide=False`` when more events of the same moment follow; the last one decides for all.
    """

    def __init__(self, nodes: Sequence[Node], policy: Policy, tenants: Sequence[Tenant] = ()) -> None:
        self.policy = policy
        self.book = Book(nodes, tenants)
        self._order = 0
        self._undecided = False  # the policy wants to decide, and the event had decide=False
        self._ended: dict[str, Outcome] = {}  # ids that were submitted once, and how they ended
        policy.attach(self.book)

    # -- events

    def submit(self, now: float, submission: Submission, decide: bool = True) -> list[Action]:
        """A new submission; one whose id is known already changes nothing. Raises SubmissionError."""
        self._at(now)
        book = self.book
        if submission.id in book.entries or submission.id in self._ended:
            return self._decide(now) if decide else []
        self._refuse(submission)
        entry = book.add(submission, self._order)
        why = self.policy.refuse(entry)
        if why is not None:
            del book.entries[entry.id]
            raise SubmissionError(f"submission {submission.id!r}: {why}")
        self._order += 1
        self.policy.submitted(entry)
        return self._decide(now) if decide else []

    def started(self, now: float, id: str, decide: bool = True) -> list[Action]:
        """All workers of a submission run."""
        self._at(now)
        entry = self.book.entries.get(id)
        if entry is None or entry.state != "running" or entry.confirmed:
            return []
        entry.confirmed = True
        return self._after(now, self.policy.started(entry), decide)

    def ended(self, now: float, id: str, how: Outcome, decide: bool = True) -> list[Action]:
        """A submission ended by itself; of one that is not known nothing comes."""
        self._at(now)
        entry = self.book.entries.get(id)
        if entry is None:
            return []
        self.book.remove(entry)
        self._ended[id] = how
        self.policy.ended(entry)
        return self._decide(now) if decide else []

    def cancel(self, now: float, id: str, decide: bool = True) -> list[Action]:
        """End a submission from outside."""
        self._at(now)
        entry = self.book.entries.get(id)
        if entry is None:
            return []
        stop: list[Action] = [Stop(id, suspend=False)] if entry.state == "running" else []
        return stop + self.ended(now, id, "cancelled", decide)

    def report(self, now: float, id: str, report: Report, decide: bool = True) -> list[Action]:
        """News of a running submission; of others they are not heard."""
        self._at(now)
        entry = self.book.entries.get(id)
        if entry is None or entry.state != "running":
            return []
        entry.account(now)
        duration = entry.submission.duration
        if report.progress is not None and duration is not None:
            entry.done = report.progress * duration
        if report.rate is not None:
            entry.rate = report.rate
        for name in ("steps", "utilization", "memory", "slowdown"):
            value = getattr(report, name)
            if value is not None:
                setattr(entry, name, value)
        return self._after(now, self.policy.reported(entry, report), decide)

    def run_alone(self, now: float, id: str, alone: bool, decide: bool = True) -> list[Action]:
        """A waiting submission is to share devices with nobody from now on; with ``alone=False`` any one may again."""
        self._at(now)
        entry = self.book.entries.get(id)
        if entry is None or entry.alone == alone or (alone and entry.state == "running"):
            return []
        entry.alone = alone
        return self._after(now, True, decide)

    def node_lost(self, now: float, node: str, decide: bool = True) -> list[Action]:
        """A node is gone. Whoever ran there waits again; its workers elsewhere are stopped."""
        self._at(now)
        book = self.book
        if node not in book.devices.nodes:
            return []
        devices = book.devices.nodes[node].devices
        actions: list[Action] = []
        book.actions = actions
        hit = {entry.id: entry for device in devices for entry in device.residents}
        elsewhere = {entry.id for entry in hit.values() if any(device.node.name != node for device in entry.devices)}
        for entry in [*hit.values(), *(device.reserved for device in devices)]:
            if entry is not None and entry.reserved:
                book.unreserve(entry)
        for entry in hit.values():
            book.stop(entry, suspend=False)
            entry.preemptions -= 1
        book.devices.leave(node)
        for entry in hit.values():
            self.policy.stopped(entry)
        self.policy.nodes_changed()
        stops: list[Action] = [action for action in actions if action.id in elsewhere]
        return stops + (self._decide(now) if decide else [])

    def node_joined(self, now: float, node: Node, decide: bool = True) -> list[Action]:
        """A node is there, with nothing running on it. One that is known was lost, and came back, first."""
        lost = self.node_lost(now, node.name, decide=False)
        self._at(now)
        self.book.devices.join(node)
        self.policy.nodes_changed()
        return lost + (self._decide(now) if decide else [])

    def tick(self, now: float) -> list[Action]:
        """Time passed: what the policy wanted at ``next_tick``, or the decision after events with decide=False."""
        self._at(now)
        return self._decide(now)

    @property
    def known(self) -> int:
        """How many submissions it keeps something of; those that ended are known by their ids."""
        return len(self.book.entries) + len(self._ended)

    @property
    def next_tick(self) -> float | None:
        """When the policy wants to be asked again, at the latest; None if only events can change its mind."""
        return self.book.now if self._undecided else self.policy.next_tick

    # -- a restart

    def to_dict(self) -> dict[str, Any]:
        """All state, as JSON knows it."""
        book = self.book
        return {
            "version": VERSION,
            "policy": self.policy.name,
            "now": book.now,
            "order": self._order,
            "ended": dict(self._ended),
            "nodes": [[n.name, len(n.devices), n.memory] for n in book.devices.nodes.values()],
            "tenants": [[tenant.name, tenant.quota] for tenant in book.tenants.values()],
            "entries": [_entry_to_dict(entry) for entry in book.entries.values()],
            "policy_state": self.policy.to_dict(),
        }

    @classmethod
    def from_dict(cls, state: Mapping[str, Any], policy: Policy) -> Scheduler:
        """The same scheduler again. ``policy`` is a new one of the same class and parameters."""
        if state.get("version") != VERSION:
            raise ValueError(f"state of version {state.get('version')!r}; this waterflow reads version {VERSION}")
        if state["policy"] != policy.name:
            raise ValueError(f"the state is of policy {state['policy']!r}, not {policy.name!r}; take the same policy")
        scheduler = cls([Node(*node) for node in state["nodes"]], policy, [Tenant(*t) for t in state["tenants"]])
        book = scheduler.book
        book.now = state["now"]
        scheduler._order = state["order"]
        scheduler._ended = dict(state["ended"])
        for fields in state["entries"]:
            _entry_from_dict(book, fields)
        policy.restore(state["policy_state"])
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
        """Decide, if the policy wants it after an event that seldom matters."""
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


_PLAIN = (
    "order", "priority", "confirmed", "submitted", "waiting_since", "since", "service", "ran", "done", "rate", "starts",
    "preemptions", "steps", "utilization", "memory", "slowdown", "wanted", "alone",
)  # fmt: skip


def _entry_to_dict(entry: Entry) -> dict[str, Any]:
    fields = {name: getattr(entry, name) for name in _PLAIN}
    reserved: list[Place] = [device.place for device in entry.reserved]
    return fields | {"submission": entry.submission.to_dict(), "places": list(entry.places), "reserved": reserved}


def _entry_from_dict(book: Book, fields: Mapping[str, Any]) -> None:
    entry = book.add(Submission.from_dict(fields["submission"]), fields["order"])
    entry.alone = fields.get("alone", False)  # the states of versions before do not have it
    devices = [book.devices.at((name, index)) for name, index in fields["places"]]
    if devices:
        book.start(entry, devices, fields["priority"])
    if fields["reserved"]:
        book.reserve(entry, [book.devices.at((name, index)) for name, index in fields["reserved"]])
    for name in _PLAIN:
        setattr(entry, name, fields.get(name, getattr(entry, name)))
