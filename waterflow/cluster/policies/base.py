"""The interface of the cluster's policies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from waterflow.cluster.book import Book, Entry
from waterflow.cluster.submission import Report

# Submissions share a device: not at all; under an interference controller on it; each as fast as it can.
Sharing: TypeAlias = Literal["none", "controlled", "packed"]


class Policy(ABC):
    """Decides which submissions run where. A state machine without clock or threads: equal events give equal decisions.

    The scheduler reports events to it, then asks it to decide; it answers by the operations of the book. An entry that
    ``ended`` or ``stopped`` reports has already left its devices. One policy serves one scheduler.
    """

    name: ClassVar[str]
    beyond_quotas: ClassVar[bool] = False  # runs also submissions larger than their tenant's whole quota
    sharing: ClassVar[Sharing] = "none"
    priorities: ClassVar[bool] = False  # it looks at the priorities of submissions, which may change
    book: Book

    def attach(self, book: Book) -> None:
        """Set the book to decide over, which has no entries yet."""
        self.book = book

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The policy's parameters by name, as results print them."""
        return {}

    @property
    def next_tick(self) -> float | None:
        """The time at which it wants to decide again even without an event; None if it does not."""
        return None

    def refuse(self, entry: Entry) -> str | None:
        """Return why it could never run this entry; None if it could.

        Here: an entry larger than its tenant's quota is refused.
        """
        tenant = self.book.tenants.get(entry.tenant)
        if self.beyond_quotas or tenant is None or entry.wanted <= tenant.quota:
            return None
        return (
            f"it asks for {entry.wanted} devices, and the quota of {tenant.name!r} is {tenant.quota}; "
            f"policy {self.name!r} runs all submissions as guaranteed. Ask for fewer, or raise the quota"
        )

    @abstractmethod
    def submitted(self, entry: Entry) -> None:
        """Add a new entry, which waits."""

    def stopped(self, entry: Entry) -> None:
        """A running entry lost a device, and waits again."""
        self.submitted(entry)

    def set_apart(self, entry: Entry) -> None:  # noqa: B027
        """A waiting entry must share devices with no other from now on."""

    def priority_changed(self, entry: Entry) -> None:  # noqa: B027
        """An entry that waits or runs has another priority, as if it had been submitted with it."""

    @abstractmethod
    def ended(self, entry: Entry) -> None:
        """An entry has left the book. It ran, or waited if ``entry.devices`` is empty."""

    def reported(self, entry: Entry, report: Report) -> bool:
        """A running entry has news, which the entry contains already. Return True to decide anew."""
        return False

    def nodes_changed(self) -> None:  # noqa: B027
        """Devices came or went; entries that ran there were reported to ``stopped`` before."""

    @abstractmethod
    def decide(self, now: float) -> None:
        """Start, stop and move entries by the book's operations."""

    def notes(self) -> dict[str, Any]:
        """Return the state that belongs to no entry, as JSON types; what belongs to one is in ``entry.key``."""
        return {}

    @abstractmethod
    def restore(self, notes: Mapping[str, Any]) -> None:
        """Restore the policy's state from a filled book and the result of ``notes``."""
