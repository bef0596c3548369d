"""What every policy of the cluster is told, and what it answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Literal, TypeAlias

from waterflow.cluster.book import Book, Entry
from waterflow.cluster.submission import Report

# How submissions share a device: not at all; under the control of a coordinator on it; each as fast as it can.
Sharing: TypeAlias = Literal["none", "controlled", "packed"]


class Policy(ABC):
    """Decides who runs where. A state machine: equal events give equal decisions; it has no clock and no threads.

    The scheduler tells it what happened, then asks it to decide; it answers by the operations of the book. An entry
    that is told to have ended, or to be stopped, has already left its devices. One policy serves one scheduler.
    """

    name: ClassVar[str]
    beyond_quotas: ClassVar[bool] = False  # runs also those whom no quota could ever cover
    sharing: ClassVar[Sharing] = "none"
    book: Book

    def attach(self, book: Book) -> None:
        """The book that it decides over, empty as yet."""
        self.book = book

    @property
    def parameters(self) -> Mapping[str, Any]:
        """All that was chosen, by name; printed with every result."""
        return {}

    @property
    def next_tick(self) -> float | None:
        """When it wants to be asked again, though nothing else may have happened."""
        return None

    def refuse(self, entry: Entry) -> str | None:
        """Why it could never run this entry; None if it could. Here: all run within quotas, or beyond."""
        tenant = self.book.tenants.get(entry.tenant)
        if self.beyond_quotas or tenant is None or entry.wanted <= tenant.quota:
            return None
        return (
            f"it asks for {entry.wanted} devices, and the quota of {tenant.name!r} is {tenant.quota}; "
            f"policy {self.name!r} runs all submissions as guaranteed. Ask for fewer, or raise the quota"
        )

    @abstractmethod
    def submitted(self, entry: Entry) -> None:
        """A new entry waits."""

    def started(self, entry: Entry) -> bool:
        """All workers of a running entry are there. True: decide anew."""
        return False

    def stopped(self, entry: Entry) -> None:
        """A running entry lost a device, and waits again."""
        self.submitted(entry)

    @abstractmethod
    def ended(self, entry: Entry) -> None:
        """An entry is no longer in the book: it ran, or waited (``entry.devices`` is empty)."""

    def reported(self, entry: Entry, report: Report) -> bool:
        """News of a running entry, which hold them already. True: decide anew."""
        return False

    def nodes_changed(self) -> None:  # noqa: B027
        """Devices came or went; entries that ran there were told to be stopped before."""

    @abstractmethod
    def decide(self, now: float) -> None:
        """Change the book by its operations."""

    def to_dict(self) -> dict[str, Any]:
        """What cannot be had from the book again, as JSON knows it."""
        return {}

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a book that is full, with what ``to_dict`` gave."""
