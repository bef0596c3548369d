"""A capacity scheduler: queues of tenants with quotas, whole devices, and idle quota lent to whoever waits.

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
    """The tenant that uses least of its quota goes first; within a tenant, order of submission. Devices are not shared.

    A run within its tenant's quota is guaranteed. What is left over goes to opportunistic submissions, and with
    ``elastic`` to guaranteed ones beyond their quota if they are ``auto``; both are opportunistic runs until quota is
    free. With ``preempt`` a guaranteed submission within its quota stops such runs, the last started first;
    they go on later where they were (``keep``) or from the beginning. With ``backfill`` whoever fits may overtake
    others; without it the first of a queue that does not fit holds all devices that are left until it does.
    """

    name = "capacity"

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
        """All that was chosen, by name."""
        return {"preempt": self.preempt, "elastic": self.elastic, "backfill": self.backfill, "keep": self.keep}

    def refuse(self, entry: Entry) -> str | None:
        """Without ``elastic``, a guaranteed submission needs a quota that is large enough."""
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
        """It waits in the queue of its tenant."""
        self._take_back(entry)
        if entry.submission.priority == "opportunistic":
            self._extra.add(entry)
        else:
            self._queues.setdefault(entry.tenant, Waiting()).add(entry)

    def ended(self, entry: Entry) -> None:
        """It left its queue by not waiting."""
        self._take_back(entry)

    def decide(self, now: float) -> None:
        """Runs that quota covers by now, then submissions within quotas, then all others."""
        book = self.book
        for entry in [entry for entry in book.entries.values() if entry.reserved] if not self.backfill else ():
            book.unreserve(entry)
        self._cover()
        vacant = Pool(device for device in book.devices if not device.residents)
        self._within_quotas(vacant)
        self._beyond_quotas(vacant)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Queues by order; of running ones, the order of submission stands for that of their starts."""
        for entry in sorted(self.book.entries.values(), key=lambda entry: entry.order):
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
        """Runs beyond a quota become guaranteed ones when it has room for them."""
        for entry in list(self._beyond.values()):
            if entry.submission.priority == "guaranteed" and self.book.may_hold(entry, entry.wanted):
                self.book.set_priority(entry, "guaranteed")
                self._take_back(entry)

    def _within_quotas(self, vacant: Pool) -> None:
        book = self.book
        open_queues = {tenant: queue for tenant, queue in self._queues.items() if queue}
        while open_queues:
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
        """Vacant devices, or those of runs that are stopped for it."""
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
        """Share of its quota that a tenant uses, lent devices included."""
        if not self.book.tenants:
            return 0.0
        quota = self.book.tenants[tenant].quota
        return (self.book.held[tenant] + self._lent[tenant]) / quota if quota else float("inf")
