"""Shortest remaining time first. The remaining time of each submission must be known."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from waterflow.cluster.book import Entry
from waterflow.cluster.policies.ranked import Item, Key, Ranked, item_of


class Srtf(Ranked):
    """Ranks by the seconds that are left, alone on the devices asked for. Ties keep the order of the last decision."""

    name = "srtf"

    def __init__(self) -> None:
        super().__init__()
        self._moment = 0  # the count at the last decision: entries that waited then go before those that ran

    def refuse(self, entry: Entry) -> str | None:
        """Refuse a submission without a duration."""
        if entry.submission.duration is None:
            return f"policy {self.name!r} orders by the time that is left; give the submission a duration, or use las"
        return super().refuse(entry)

    def decide(self, now: float) -> None:
        """Decide as ``Ranked`` does."""
        super().decide(now)
        self._moment = self._next()

    def rank(self, entry: Entry, now: float) -> float:
        """Return the seconds that are left."""
        return entry.remaining_at(now)

    def notes(self) -> dict[str, Any]:
        """Return the counts, and that of the last decision."""
        return {**super().notes(), "moment": self._moment}

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Restore the order from the keys."""
        super().restore(notes)
        self._moment = notes["moment"]

    def _key(self, entry: Entry) -> Key:
        return (self.rank(entry, self.book.now), self._next(), 0)

    def _ranked(self, now: float) -> list[Item]:
        before = sorted((self.rank(entry, now), *item_of(entry)) for entry in self._running.values())
        for place, (rank, last, *_, entry) in enumerate(before):
            if rank != last:
                entry.key = (rank, self._moment, place)
        return [item_of(entry) for *_, entry in before]
