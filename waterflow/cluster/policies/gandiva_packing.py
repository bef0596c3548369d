"""Gandiva's packing alone, without time slicing and migration, as AntMan (OSDI 2020, section 5.2) compares with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import nsmallest
from typing import Any

from waterflow.cluster.book import Entry
from waterflow.cluster.devices import Device
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.policies.waiting import Waiting


def fits_beside(memory: int, device: Device) -> bool:
    """Return whether ``memory`` bytes fit beside a device's residents; False if the memory of one of them is not known."""
    known = memory > 0 and all(entry.memory > 0 for entry in device.residents)
    return known and memory <= device.room


class GandivaPacking(Policy):
    """Each submission goes to the devices of lowest utilization that have memory for it, in the order of submission.

    A submission that does not declare its memory shares no device. Priorities and quotas are ignored. At most ``limit``
    submissions share a device (0: as many as memory allows). With ``backfill`` a submission that finds devices may overtake
    others. With ``undo``, a submission is taken back that after ``trial`` seconds has brought the speeds on a device to no
    more than one alone would have; it waits for other neighbours.
    """

    name = "gandiva-packing"
    beyond_quotas = True
    sharing = "packed"

    def __init__(self, limit: int = 0, backfill: bool = False, undo: bool = False, trial: float = 60.0) -> None:
        if limit < 0 or trial <= 0:
            raise ValueError(f"limit={limit} is a number of submissions, 0 for any; trial={trial} is above 0 seconds")
        self.limit = limit
        self.backfill = backfill
        self.undo = undo
        self.trial = trial
        self._waiting = Waiting()
        self._trials: dict[str, float] = {}  # the times at which packed submissions are judged
        self.undone = 0

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The policy's parameters by name."""
        return {"limit": self.limit, "backfill": self.backfill, "undo": self.undo, "trial": self.trial}

    @property
    def next_tick(self) -> float | None:
        """The time at which the next packing is judged."""
        return min(self._trials.values(), default=None)

    def submitted(self, entry: Entry) -> None:
        """Add the entry to the queue."""
        self._end_trial(entry)
        self._waiting.add(entry)

    def ended(self, entry: Entry) -> None:
        """Forget the entry; the queue passes over entries that no longer wait."""
        self._trials.pop(entry.id, None)

    def decide(self, now: float) -> None:
        """Judge packed entries whose trial is over, then start each waiting entry that finds devices."""
        for id in [id for id, end in self._trials.items() if end <= now]:
            entry = self.book.entries[id]
            self._end_trial(entry)
            self._judge(entry)
        hopeless: set[tuple[int, int]] = set()  # (devices, memory) for which an entry found nothing in this decision
        for entry in self._waiting.in_order():
            if (entry.wanted, entry.memory) in hopeless:
                continue
            devices = self._find(entry)
            if devices is None:
                if not self.backfill:
                    return
                # An entry with failed packings refuses devices that another of its size may take.
                if entry.key is None:
                    hopeless.add((entry.wanted, entry.memory))
                continue
            self.book.start(entry, devices, "opportunistic")
            if self.undo and any(len(device.opportunistic) > 1 for device in devices):
                self._try(entry)

    def notes(self) -> dict[str, Any]:
        """Return how many packings were undone."""
        return {"undone": self.undone}

    def restore(self, notes: Mapping[str, Any]) -> None:
        """Rebuild the queue, and the trials in the order of their starts."""
        for entry in sorted(self.book.entries.values(), key=lambda entry: entry.entered):
            if entry.state == "waiting":
                self._waiting.add(entry)
            elif entry.key is not None and entry.key[0] is not None:
                self._trials[entry.id] = entry.key[0]
        self.undone = notes["undone"]

    def _find(self, entry: Entry) -> list[Device] | None:
        fits = [device for device in self.book.devices if self._fits(entry, device)]
        if len(fits) < entry.wanted:
            return None
        return nsmallest(entry.wanted, fits, key=lambda device: (device.utilization, len(device.opportunistic)))

    def _fits(self, entry: Entry, device: Device) -> bool:
        others = device.opportunistic
        if not others:
            return not device.memory or entry.memory <= device.memory
        if not device.open_to(entry):
            return False
        if self.limit and len(others) >= self.limit:
            return False
        if not fits_beside(entry.memory, device):
            return False
        return sorted(others) not in _failed(entry)

    def _judge(self, entry: Entry) -> None:
        for device in entry.devices:
            rates = [each.rate for each in device.residents]
            if None in rates and len(rates) > 1:  # nothing is judged before all are known
                self._try(entry)
                return
            if len(device.opportunistic) > 1 and sum(filter(None, rates)) <= 1.0:
                too_slow = [sorted(each.opportunistic.keys() - {entry.id}) for each in entry.devices]
                entry.key = (None, *_failed(entry), *too_slow)
                self.book.stop(entry)
                self.undone += 1
                self._waiting.add(entry)
                return

    def _try(self, entry: Entry) -> None:
        end = self._trials[entry.id] = self.book.now + self.trial
        entry.key = (end, *_failed(entry))

    def _end_trial(self, entry: Entry) -> None:
        if self._trials.pop(entry.id, None) is not None:
            entry.key = (None, *_failed(entry)) if _failed(entry) else None


def _failed(entry: Entry) -> Sequence[list[str]]:
    # The key is the end of a trial, or None, and then the neighbours, sorted, beside which the entry was too slow.
    return () if entry.key is None else entry.key[1:]
