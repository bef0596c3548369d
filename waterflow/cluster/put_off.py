"""Events that could not be taken, and those that came after them: they are taken again by and by, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from waterflow.cluster.backend import BackendEvent, Progress
from waterflow.cluster.store import NOT_NOW

AGAIN_SECONDS = 10.0  # before an event that could not be taken is tried again


class PutOff:
    """Holds back an event that raises an error of its own, and all later ones of the same job or node.

    Times are those of the caller. What ``to_take`` returns counts as taken once ``written`` is called.
    """

    def __init__(self) -> None:
        self._waiting: list[BackendEvent] = []
        self._held: list[BackendEvent] = []  # of those that ``to_take`` was asked about last
        self._tried: set[Any] = set()
        self._blocked: dict[Any, tuple[float, str]] = {}  # until when, and why

    def due(self, now: float) -> bool:
        """Whether an event is to be tried again."""
        return any(until <= now for until, _ in self._blocked.values())

    @property
    def ids(self) -> set[str]:
        """The jobs of the events that are held back."""
        return {event.id for event in self._held if hasattr(event, "id")}

    def trouble(self) -> str | None:
        """Why an event is held back; None where there is none."""
        return next((why for _, why in self._blocked.values()), None)

    def to_take(self, now: float, events: Sequence[BackendEvent]) -> list[BackendEvent]:
        """The events to take now, with ``events`` as the newest."""
        self._tried = {key for key, (until, _) in self._blocked.items() if until <= now}
        held = self._blocked.keys() - self._tried
        everything = [*self._waiting, *events]
        self._held = [event for event in everything if _key(event) in held and not isinstance(event, Progress)]
        return [event for event in everything if _key(event) not in held]

    def failed(self, now: float, event: BackendEvent, error: Exception) -> None:
        """``event`` could not be taken. Where it is not the event's fault, nothing is held back."""
        if not isinstance(error, NOT_NOW):
            what = f"{type(event).__name__} of {getattr(event, 'id', '') or event.node!r}"
            self._blocked[_key(event)] = now + AGAIN_SECONDS, f"{what}: {type(error).__name__}: {error}"

    def written(self) -> None:
        """All that ``to_take`` returned is taken."""
        self._waiting, self._held = self._held, []
        for key in self._tried:
            self._blocked.pop(key, None)
        self._tried = set()


def newest(events: Sequence[BackendEvent]) -> list[BackendEvent]:
    """The same events, of reports only the last of each job and node."""
    last = {(event.id, event.node): number for number, event in enumerate(events) if isinstance(event, Progress)}
    return [
        event
        for number, event in enumerate(events)
        if not isinstance(event, Progress) or last[event.id, event.node] == number
    ]


def _key(event: BackendEvent) -> Any:
    return getattr(event, "id", None) or ("node", event.node)
