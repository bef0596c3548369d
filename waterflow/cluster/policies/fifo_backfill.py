"""First in, first out, but whoever fits may go before one that does not."""

from __future__ import annotations

from waterflow.cluster.book import Entry
from waterflow.cluster.policies.ranked import Item, Ranked


class FifoBackfill(Ranked):
    """In the order of submission, each that fits into what is free. Nobody is stopped."""

    name = "fifo_backfill"
    preempts = False

    def _item(self, entry: Entry) -> Item:
        return (0.0, entry.order, 0, entry)
