"""The scheduler's state on disk: a snapshot now and then, and each event since, whose replay repeats the same decisions."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from waterflow.cluster.book import Book
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.scheduler import Scheduler
from waterflow.cluster.store import Store
from waterflow.cluster.submission import Action, Node, Outcome, Report, Submission, Tenant

logger = logging.getLogger("waterflow")

# A snapshot is due after one event for so many submissions in it, and one more: its cost grows with the submissions.
ENTRIES_PER_EVENT = 50


class JournaledScheduler:
    """A ``Scheduler`` whose events are written down in the transaction of the store in which they happen.

    Restores the state that the store has: the last snapshot, and the events since.
    """

    def __init__(self, store: Store, policy: Policy, tenants: Sequence[Tenant] = ()) -> None:
        self._store = store
        # The replay below calls the same methods with the same arguments and times, so it makes the same decisions.
        state = store.meta("scheduler")
        self._inner = Scheduler([], policy, tenants) if state is None else Scheduler.from_dict(state, policy)
        self._since = 0
        for name, now, arguments in store.events():
            self._call(name, now, _read(name, arguments), decide=name == "tick")
            self._since += 1
        if self._since:
            logger.info("took up the scheduler's state, and %d events since it was written", self._since)

    @property
    def book(self) -> Book:
        """The scheduler's book."""
        return self._inner.book

    @property
    def policy(self) -> Policy:
        """The scheduler's policy."""
        return self._inner.policy

    @property
    def next_tick(self) -> float | None:
        """See ``Scheduler``."""
        return self._inner.next_tick

    def submit(self, now: float, submission: Submission) -> None:
        """See ``Scheduler``. Here and in most events, decisions are made at the next tick."""
        self._event("submit", now, submission)

    def started(self, now: float, id: str) -> None:
        """See ``Scheduler``."""
        self._event("started", now, id)

    def ended(self, now: float, id: str, how: Outcome) -> None:
        """See ``Scheduler``."""
        self._event("ended", now, id, how)

    def cancel(self, now: float, id: str) -> None:
        """See ``Scheduler``."""
        self._event("cancel", now, id)

    def report(self, now: float, id: str, report: Report) -> None:
        """See ``Scheduler``."""
        self._event("report", now, id, report)

    def run_alone(self, now: float, id: str, alone: bool) -> None:
        """See ``Scheduler``."""
        self._event("run_alone", now, id, alone)

    def node_lost(self, now: float, node: str) -> list[Action]:
        """See ``Scheduler``."""
        return self._event("node_lost", now, node)

    def node_joined(self, now: float, node: Node) -> list[Action]:
        """See ``Scheduler``."""
        return self._event("node_joined", now, node)

    def tick(self, now: float) -> list[Action]:
        """See ``Scheduler``."""
        return self._event("tick", now)

    def save(self) -> Callable[[], None] | None:
        """Begin a snapshot of the state as it is now; return None unless enough events have happened since the last one.

        The returned function writes it, and may run while other events arrive: events before the snapshot are kept until it
        is written. Call this outside of transactions, as it must not save changes that may still be rolled back.
        """
        if self._since <= self._inner.known // ENTRIES_PER_EVENT:
            return None
        store, last = self._store, self._store.last_event()
        state = self._inner.to_dict()
        entries = state.pop("entries")  # fresh objects, and most of the state: ``finish`` turns them into text
        # Later events change these objects before ``finish`` runs, so they become text now.
        rest = json.dumps(state)
        self._since = 0

        def finish() -> None:
            text = f'{rest[:-1]}, "entries": {json.dumps(entries)}}}'
            with store.transaction():
                store.set_meta_text("scheduler", text)
                store.forget_events(last)

        return finish

    def _event(self, name: str, now: float, *arguments: Any) -> list[Action]:
        actions = self._call(name, now, arguments, decide=name == "tick")
        # After the call: an event that the scheduler refuses raises an error, and must not be replayed.
        self._store.add_event(name, now, [_written(argument) for argument in arguments])
        self._since += 1
        return actions

    def _call(self, name: str, now: float, arguments: Sequence[Any], decide: bool) -> list[Action]:
        if decide:
            return self._inner.tick(now)
        # One decision a tick, however many events: replaying ``tick`` events repeats the decisions.
        made: list[Action] = getattr(self._inner, name)(now, *arguments, decide=False)
        return made


def _written(argument: Any) -> Any:
    if isinstance(argument, Submission):
        return argument.to_dict()
    if isinstance(argument, Report):
        return [argument.progress, argument.steps, argument.rate, argument.utilization, argument.memory, argument.slowdown]
    return [argument.name, argument.devices, argument.memory] if isinstance(argument, Node) else argument


def _read(name: str, arguments: list[Any]) -> list[Any]:
    kinds: dict[str, Any] = {
        "submit": lambda given: [Submission.from_dict(given)],
        "report": lambda id, given: [id, Report(*given)],
        "node_joined": lambda given: [Node(*given)],
    }
    return list(kinds[name](*arguments)) if name in kinds else arguments
