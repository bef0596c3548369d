"""A capacity scheduler: queues of tenants with quotas, whole devices, and idle quota lent to submissions that wait.

After Apache YARN's, as AntMan (OSDI 2020, sections 2.2 and 5.2) and Gandiva (OSDI 2018, section 6.4) compare with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from waterflow.cluster.book import Entry
from waterflow.cluster.devices import Device
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.policies.waiting import Pool, Waiting


class Capacity(Policy):
    """The tenant that uses the least of its quota goes first; within a tenant, the order of submission. Devices are not shared.

    A run within its tenant's quota is guaranteed. Devices left over go to opportunistic submissions, and with ``elastic`` to
    guaranteed ones beyond their quota if they are ``auto``; both run as opportunistic until quota is free. With ``preempt`` a
    guaranteed submission within its quota stops such runs, the last started first; they resume later (``keep``), or begin
    anew. With ``backfill`` a submission that fits may overtake others; without it the first of a queue that does not fit
    reserves all devices that are left until it does.
    """

    name = "capacity"
    priorities = True

    def __init__(self, preempt: bool = False, elastic: bool = True, backfill: bool = False, keep: bool = False) -> None:
        self.preempt = preempt
        self.elastic = elastic
        self.backfill = backfill
        self.keep = keep
        self._queues: dict[str, Waiting] = {}  # guaranteed submissions, by tenant
        self._extra = Waiting()  # opportunistic submissions
        self._beyond: dict[str, Entry] = {}  # runs beyond a quota, in the order of their starts
        self._lent: Counter[str] = Counter()  # their devices, by tenant

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The policy's parameters by name."""
        return {"preempt": self.preempt, "elastic": self.elastic, "backfill": self.backfill, "keep": self.keep}

    def refuse(self, entry: Entry) -> str | None:
        """Refuse, without ``elastic``, a guaranteed submission larger than its quota."""
        book = self.book
        if self.elastic or entry.submission.priority == "opportunistic" or not book.tenants:
            return None
        quota = book.tenants[entry.tenant].quota
        if entry.wanted <= quota:
            return None
        return (
            f"it asks for {entry.wanted} guaranteed devices; the quota of {entry.tenant!r} is {quota}, and nothing is "
            "lent (elastic=False). Ask for fewer, or submit it as opportunistic"
        )

    def submitted(self, entry: Entry) -> None:
        """Add the entry to the queue of its tenant."""
        self._take_back(entry)
        if entry.submission.priority == "opportunistic":
            self._extra.add(entry)
        else:
            self._queues.setdefault(entry.tenant, Waiting()).add(entry)

    def priority_changed(self, entry: Entry) -> None:
        """Let an entry that waits do so in the other queue; devices of one that runs are lent, or no more."""
        if entry.state == "waiting":
            for queue in (self._extra, *self._queues.values()):
                queue.drop(entry)
            self.submitted(entry)
        elif entry.priority == "guaranteed":
            self._take_back(entry)
        elif entry.id not in self._beyond:
            self._lend(entry)

    def ended(self, entry: Entry) -> None:
        """Take back the devices lent to the entry. Queues pass over entries that no longer wait."""
        self._take_back(entry)

    def decide(self, now: float) -> None:
        """Cover runs by free quota, then start submissions within quotas, then all others."""
        book = self.book
        # Reservations are made anew in each decision: two jobs that keep devices from each other would wait for ever.
        for entry in {device.reserved: None for device in book.devices if device.reserved is not None}:
            book.unreserve(entry)
        self._cover()
        vacant = Pool(device for device in book.devices if not device.residents)
        self._within_quotas(vacant)
        self._beyond_quotas(vacant)

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Rebuild the queues, and the runs beyond quotas in the order of their starts."""
        for entry in sorted(self.book.entries.values(), key=lambda entry: entry.entered):
            if entry.state == "waiting":
                self.submitted(entry)
            elif entry.priority == "opportunistic":
                self._lend(entry)

    # -- parts

    def _lend(self, entry: Entry) -> None:
        self._beyond[entry.id] = entry
        self._lent[entry.tenant] += entry.wanted

    def _take_back(self, entry: Entry) -> None:
        if self._beyond.pop(entry.id, None) is not None:
            self._lent[entry.tenant] -= entry.wanted

    def _cover(self) -> None:
        for entry in list(self._beyond.values()):
            if entry.submission.priority == "guaranteed" and self.book.may_hold(entry, entry.wanted):
                self.book.set_priority(entry, "guaranteed")
                self._take_back(entry)

    def _within_quotas(self, vacant: Pool) -> None:
        book = self.book
        open_queues = {tenant: queue for tenant, queue in self._queues.items() if queue}
        while open_queues:
            # The use of a quota changes with each start, so the tenant that goes next is chosen anew each time.
            heads: list[tuple[float, int, Entry]] = []
            for name, queue in list(open_queues.items()):
                most = book.quota_left(name) if self.backfill else book.devices.total
                if self.backfill and not self.preempt:
                    most = min(most, len(vacant))
                head = queue.first(most)
                if head is None or not book.may_hold(head, head.wanted):
                    del open_queues[name]
                else:
                    heads.append((self._use(name), head.order, head))
            if not heads:
                return
            entry = min(heads)[2]
            devices = self._find(entry, vacant)
            if devices is None and self.backfill:
                fits = open_queues[entry.tenant].first(min(book.quota_left(entry.tenant), len(vacant)))
                if fits is not None:
                    entry, devices = fits, vacant.close_together(fits.wanted)
            if devices is not None:
                book.start(entry, devices, "guaranteed")
                vacant.remove(devices)
                continue
            if not self.backfill:
                kept = list(vacant)
                book.reserve(entry, kept)
                vacant.remove(kept)
            del open_queues[entry.tenant]

    def _find(self, entry: Entry, vacant: Pool) -> list[Device] | None:
        # Runs are stopped only if enough of them can be: otherwise they would lose their devices for nothing.
        devices = vacant.close_together(entry.wanted)
        if devices is not None or not self.preempt:
            return devices
        victims: list[Entry] = []
        found = len(vacant)
        for other in reversed(self._beyond.values()):
            if found >= entry.wanted:
                break
            victims.append(other)
            found += len(other.devices)
        if found < entry.wanted:
            return None
        for other in victims:
            for device in other.devices:
                vacant.add(device)
            self.book.stop(other, suspend=self.keep)
            self.submitted(other)
        return vacant.close_together(entry.wanted)

    def _beyond_quotas(self, vacant: Pool) -> None:
        while vacant:
            waiting = [self._extra]
            if self.elastic:
                waiting += self._queues.values()
            most = len(vacant) if self.backfill else self.book.devices.total
            heads = [head for queue in waiting if (head := queue.first(most)) is not None]
            heads = [head for head in heads if head.submission.priority == "opportunistic" or head.submission.auto]
            if not heads:
                return
            entry = min(heads, key=lambda head: (self._use(head.tenant), head.order))
            devices = vacant.close_together(entry.wanted)
            if devices is None:
                return
            self.book.start(entry, devices, "opportunistic")
            self._lend(entry)
            vacant.remove(devices)

    def _use(self, tenant: str) -> float:
        if not self.book.tenants:
            return 0.0
        quota = self.book.tenants[tenant].quota
        return (self.book.held[tenant] + self._lent[tenant]) / quota if quota else float("inf")
