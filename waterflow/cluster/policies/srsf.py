"""Shortest remaining service first: the remaining time, times devices."""

from __future__ import annotations

from waterflow.cluster.book import Entry
from waterflow.cluster.policies.srtf import Srtf


class Srsf(Srtf):
    """Ranks by the device-seconds that are left."""

    name = "srsf"

    def rank(self, entry: Entry, now: float) -> float:
        """Return the device-seconds that are left."""
        return entry.remaining_at(now) * entry.wanted
