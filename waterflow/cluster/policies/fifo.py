"""First in, first out: a submission that does not fit blocks all submissions after it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from waterflow.cluster.book import Entry
from waterflow.cluster.policies.base import Policy


class Fifo(Policy):
    """Strict order of submission. No run is ever stopped."""

    name = "fifo"

    def __init__(self) -> None:
        self._waiting: deque[Entry] = deque()

    def submitted(self, entry: Entry) -> None:
        """Append the entry; one that lost its devices returns to its old position."""
        waiting = self._waiting
        waiting.append(entry)
        # Sorted only then: almost always the newest comes last.
        if len(waiting) > 1 and waiting[-2].order > entry.order:
            self._waiting = deque(sorted(waiting, key=lambda each: each.order))

    def ended(self, entry: Entry) -> None:
        """Do nothing: ``decide`` drops an entry that no longer waits when that is at the front."""

    def decide(self, now: float) -> None:
        """Start entries from the front until one does not fit."""
        waiting, book = self._waiting, self.book
        while waiting:
            entry = waiting[0]
            if entry.state == "waiting":
                devices = book.devices.choose(entry.wanted) if book.may_hold(entry, entry.wanted) else None
                if devices is None:
                    return
                book.start(entry, devices, "guaranteed")
            waiting.popleft()

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Rebuild the queue from the order of submission."""
        waiting = [entry for entry in self.book.entries.values() if entry.state == "waiting"]
        self._waiting = deque(sorted(waiting, key=lambda each: each.order))
