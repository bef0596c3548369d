"""AntMan (OSDI 2020): guaranteed submissions run as if alone, opportunistic ones use what they leave.

Section 3.3 and algorithm 1. Sharing a device is the task of the local coordinator, here the interference controller.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import merge
from typing import Any

from waterflow.cluster.book import Entry
from waterflow.cluster.devices import Device
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.policies.waiting import Pool, Waiting
from waterflow.cluster.submission import Report

_UNKNOWN = -math.inf
_MOST_CROWDED = 50  # waiting entries without a device that has memory for them, after which a decision ends


class AntMan(Policy):
    """Guaranteed submissions start whole, in the order of submission, or reserve the devices that there are.

    Opportunistic ones start on the least loaded of the devices that have memory for them and that are vacant, or whose
    utilization stayed below ``busy`` (M in the paper) for ``window`` seconds. A submission that has not reported counts as
    busy; if it ends before it has, it leaves no trace. Reserved devices are open to opportunistic ones. A guaranteed
    submission that has waited ``patience`` seconds runs as an opportunistic one unless it forbids that (``auto=False``), and
    becomes guaranteed in place as soon as quota and all of its devices are free for it, before any other is started. The
    paper leaves ``patience`` open. With ``one_node`` a guaranteed submission that fits on one node waits for one.

    Devices reserved by a submission that runs alone are closed to all others, so that they become vacant. For the first
    waiting opportunistic submission that runs alone, as many devices are kept free of other opportunistic ones.
    """

    name = "antman"
    beyond_quotas = True
    sharing = "controlled"
    priorities = True

    def __init__(self, busy: float = 0.8, window: float = 10.0, patience: float = 600.0, one_node: bool = False) -> None:
        if not 0 < busy <= 1:
            raise ValueError(f"busy={busy}; it is a share of the device's time, above 0 and at most 1")
        if window < 0 or patience < 0:
            raise ValueError(f"window={window} and patience={patience} are seconds, 0 or more")
        self.busy = busy
        self.window = window
        self.patience = patience
        self.one_node = one_node
        self._queues: dict[str, Waiting] = {}  # guaranteed submissions, by tenant
        self._impatient: deque[tuple[float, Entry]] = deque()  # entries that may turn opportunistic, by start of wait
        self._extra = Waiting()  # entries that may run as opportunistic now
        self._turned: dict[str, Entry] = {}  # guaranteed submissions that run as opportunistic
        self._calm: dict[Device, float] = {}  # the time since which a device is below ``busy``; missing: always
        self._loud: dict[Device, bool] = {}  # devices at ``busy`` or above; True: by reports, not for want of them
        self._next: float | None = _UNKNOWN

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The policy's parameters by name."""
        return {"busy": self.busy, "window": self.window, "patience": self.patience, "one_node": self.one_node}

    @property
    def next_tick(self) -> float | None:
        """The time at which a device will have been calm for long enough, or the patience of an entry ends."""
        if self._next == _UNKNOWN:
            self._next = self._find_next()
        return self._next

    def submitted(self, entry: Entry) -> None:
        """Add an entry: an opportunistic one waits for calm devices, a guaranteed one for quota and devices of its own."""
        self._turned.pop(entry.id, None)
        self._extra.drop(entry)  # it may have turned opportunistic the last time that it waited
        self._wait(entry, entry.submission.auto and self._never_guaranteed(entry))

    def _wait(self, entry: Entry, turned: bool) -> None:
        entry.key = turned  # a guaranteed one that may run as opportunistic now
        guaranteed = entry.submission.priority == "guaranteed"
        if guaranteed:
            self._queues.setdefault(entry.tenant, Waiting()).add(entry)
        if turned or not guaranteed:
            self._extra.add(entry)
        elif entry.submission.auto:
            self._impatient.append((entry.waiting_since, entry))  # sorted, as time does not go back

    def priority_changed(self, entry: Entry) -> None:
        """Let an entry that waits do so in the other queue; one that runs has not turned any more."""
        self._turned.pop(entry.id, None)
        if entry.state == "waiting":
            self._queues.setdefault(entry.tenant, Waiting()).drop(entry)
            self.submitted(entry)

    def ended(self, entry: Entry) -> None:
        """Forget the entry; queues pass over entries that no longer wait."""
        self._turned.pop(entry.id, None)

    def reported(self, entry: Entry, report: Report) -> bool:
        """Note which of its devices have become calm, as of now."""
        for device in entry.devices:
            self._listen(device, heard=True)
        self._next = _UNKNOWN
        return False

    def nodes_changed(self) -> None:
        """Forget the devices of lost nodes."""
        here = set(self.book.devices)
        self._loud = {device: reported for device, reported in self._loud.items() if device in here}
        self._calm = {device: since for device, since in self._calm.items() if device in here}

    def decide(self, now: float) -> None:
        """Upgrade entries, then start guaranteed ones, then opportunistic ones."""
        for device in self.book.devices:
            self._listen(device)
        self._upgrade()
        self._reopen()
        self._start_guaranteed()
        self._lose_patience(now)
        # An entry that starts as opportunistic gives its reservation back, which guaranteed ones may take.
        while self._start_opportunistic(now):
            self._reopen()
            self._start_guaranteed()
        self._upgrade()
        self._next = _UNKNOWN

    def notes(self) -> dict[str, Any]:
        """Return which devices are calm or loud."""
        return {
            "calm": [[*device.place, since] for device, since in self._calm.items()],
            "loud": [[*device.place, reported] for device, reported in self._loud.items()],
        }

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Rebuild the queues by order, and patience by the time since which each entry waits."""
        entries = self.book.entries.values()
        for entry in sorted(entries, key=lambda entry: (entry.waiting_since, entry.order)):
            if entry.state == "waiting":
                self._wait(entry, entry.key)
        for entry in sorted(entries, key=lambda entry: entry.entered):
            if entry.state == "running" and entry.priority != entry.submission.priority:
                self._turned[entry.id] = entry
        at = self.book.devices.at
        self._calm = {at((node, index)): since for node, index, since in notes["calm"]}
        self._loud = {at((node, index)): reported for node, index, reported in notes["loud"]}
        self._next = _UNKNOWN

    # -- guaranteed

    def _never_guaranteed(self, entry: Entry) -> bool:
        book = self.book
        quota = book.tenants[entry.tenant].quota if book.tenants else book.devices.total
        return entry.wanted > min(quota, book.devices.total)

    def _upgrade(self) -> None:
        # All devices of an entry, or none: it runs as a whole, with one priority.
        for entry in list(self._turned.values()):
            alone = all(device.guaranteed is None and device.reserved is None for device in entry.devices)
            if alone and self.book.may_hold(entry, entry.wanted):
                self.book.set_priority(entry, "guaranteed")
                del self._turned[entry.id]

    def _reopen(self) -> None:
        # Reservations are made anew in each decision: the first in order never waits for devices that a later one
        # keeps.
        for entry in {device.reserved: None for device in self.book.devices if device.reserved is not None}:
            self.book.unreserve(entry)

    def _start_guaranteed(self) -> None:
        book = self.book
        if not book.devices.free:
            return
        by_load = sorted((device for device in book.devices if device.guaranteed is None and not _closed(device)), key=_load)
        free = Pool(by_load)
        by_load.reverse()
        for entry in self._with_quota():
            if not free:
                return
            if self._never_guaranteed(entry) or book.quota_left(entry.tenant) <= 0:
                continue
            together = self.one_node and any(len(node.devices) >= entry.wanted for node in book.devices.nodes.values())
            if book.may_hold(entry, entry.wanted):
                if entry.alone:
                    devices: list[Device] | None = Pool(device for device in free if device.vacant).close_together(
                        entry.wanted, together
                    )
                elif entry.wanted == 1:
                    while by_load[-1] not in free:
                        by_load.pop()
                    devices = [by_load[-1]]
                else:
                    devices = free.close_together(entry.wanted, together)
                if devices is not None:
                    book.start(entry, devices, "guaranteed")
                    free.remove(devices)
                    for device in devices:
                        self._listen(device)
                    continue
            at_most = min(entry.wanted, book.quota_left(entry.tenant))
            kept = free.most_of_one_node(at_most, entry.wanted) if together else list(free)[:at_most]
            book.reserve(entry, kept)
            free.remove(kept)

    def _with_quota(self) -> Iterator[Entry]:
        queues = [queue for tenant, queue in self._queues.items() if queue and self.book.quota_left(tenant) > 0]
        return merge(*(queue.in_order() for queue in queues), key=lambda entry: entry.order)

    # -- opportunistic

    def _lose_patience(self, now: float) -> None:
        while self._impatient and self._impatient[0][0] + self.patience <= now:
            since, entry = self._impatient.popleft()
            if _still_patient(since, entry):
                entry.key = True
                self._extra.add(entry)

    def _start_opportunistic(self, now: float) -> bool:
        # Returns True if a started entry gave back a reservation.
        reopened = False
        if not self._extra:
            return False
        calm = [device for device in self.book.devices if self._calm_at(device) <= now and not _closed(device)]
        calm.sort(key=_load, reverse=True)
        open_to_them = {device: (device.room, device.vacant) for device in calm}
        crowded: list[Entry] = []
        kept = False  # devices for one that runs alone
        while open_to_them:
            entry = self._extra.first(len(open_to_them))
            if entry is None:
                break
            declared, known = entry.submission.memory, entry.memory  # vacant: only the declared one counts
            roomy = [
                device
                for device, (room, vacant) in open_to_them.items()
                if (vacant or not entry.alone) and (not known or (declared if vacant else known) <= room)
            ]
            if len(roomy) < entry.wanted:
                self._extra.take_out(entry)
                crowded.append(entry)
                if entry.alone and not kept:
                    kept = True
                    for device in self._soonest_vacant(entry, open_to_them):
                        del open_to_them[device]
                if len(crowded) == _MOST_CROWDED:
                    break
                continue
            reopened = reopened or bool(entry.reserved)
            devices = [roomy.pop() for _ in range(entry.wanted)]
            for device in devices:
                del open_to_them[device]
            self.book.start(entry, devices, "opportunistic")
            if entry.submission.priority == "guaranteed":
                self._turned[entry.id] = entry
            for device in devices:
                self._listen(device)
        for entry in crowded:
            self._extra.add(entry)
        return reopened

    def _soonest_vacant(self, entry: Entry, among: Iterable[Device]) -> list[Device]:
        able = [
            device
            for device in among
            if device.guaranteed is None and (not device.memory or entry.submission.memory <= device.memory)
        ]
        return sorted(able, key=lambda device: (len(device.opportunistic), device.place))[: entry.wanted]

    def _listen(self, device: Device, heard: bool = False) -> None:
        # If a device was loud only for want of a report, its calm begins anew with a report alone: an entry that ends
        # before its first report leaves no trace.
        if device.utilization >= self.busy:
            self._loud[device] = self._loud.get(device, False) or device.reported >= self.busy
        elif device in self._loud and (self._loud.pop(device) or heard):
            self._calm[device] = self.book.now

    def _calm_at(self, device: Device) -> float:
        if device.vacant:
            return -math.inf
        if device in self._loud:
            return math.inf
        return self._calm.get(device, -math.inf) + self.window

    def _find_next(self) -> float | None:
        impatient = self._impatient
        while impatient and not _still_patient(*impatient[0]):
            impatient.popleft()
        times = [impatient[0][0] + self.patience] if impatient else []
        if self._extra:
            now = self.book.now
            times += [at for device in self.book.devices if now < (at := self._calm_at(device)) < math.inf]
        return min(times, default=None)


def _closed(device: Device) -> bool:
    # Closed to newcomers: a resident runs alone, or a submission that will has reserved the device.
    return any(entry.alone for entry in device.residents) or (device.reserved is not None and device.reserved.alone)


def _load(device: Device) -> tuple[float, int]:
    return device.utilization, len(device.opportunistic)


def _still_patient(since: float, entry: Entry) -> bool:
    # Its item may be of an earlier wait, or it may have turned opportunistic for want of devices that it could ever have.
    patient = entry.submission.priority == "guaranteed" and not entry.key
    return patient and entry.state == "waiting" and entry.waiting_since == since
