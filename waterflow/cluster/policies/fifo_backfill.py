"""First in, first out, but a submission that fits may overtake one that does not."""

from __future__ import annotations

from waterflow.cluster.book import Entry
from waterflow.cluster.policies.ranked import Key, Ranked


class FifoBackfill(Ranked):
    """Starts, in the order of submission, each one that fits on the free devices. No run is ever stopped."""

    name = "fifo_backfill"
    preempts = False

    def _key(self, entry: Entry) -> Key:
        return (0.0, entry.order, 0)
