"""Submissions to a cluster, and the actions of a scheduler: plain data. Times are seconds, memory is bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from waterflow.units import Priority as Priority

Place: TypeAlias = tuple[str, int]  # a node's name and the index of one of its devices


@dataclass(frozen=True, slots=True)
class Node:
    """A machine with ``devices`` equal devices of ``memory`` bytes each (0: not known)."""

    name: str
    devices: int
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Tenant:
    """A user of the cluster, whose guaranteed submissions hold at most ``quota`` devices at once."""

    name: str
    quota: int


@dataclass(slots=True)
class Submission:
    """One group of jobs that runs as a whole, on ``devices`` devices at once.

    A guaranteed submission with ``auto`` may run as an opportunistic one while its quota is used up. ``memory`` is the bytes
    that it needs on each device (0: not known), ``model`` its name in tables of interference and scaling, ``duration`` the
    seconds that it takes alone on the devices asked for, which only a simulation knows. ``time_limit`` is the seconds of all
    its runs together after which a live cluster ends it, ``quota`` the bytes that each of its jobs was given since.
    """

    id: str
    tenant: str = "default"
    devices: int = 1
    priority: Priority = "guaranteed"
    auto: bool = True
    memory: int = 0
    model: str | None = None
    duration: float | None = None
    submitted: float = 0.0
    time_limit: float | None = None
    quota: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name, as JSON types."""
        # ``dataclasses.asdict`` copies deeply, which is slow, and all fields are plain.
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Report:
    """News of a running submission; None for a field without news, but for ``rate``.

    ``progress`` goes from 0 to 1. ``rate`` is its speed relative to alone on the devices asked for (1: as fast), None while it is
    not known beside its present neighbours. ``utilization`` (0 to 1) and ``memory`` (bytes) are its use of each of its devices.
    """

    progress: float | None = None
    rate: float | None = None
    utilization: float | None = None
    memory: int | None = None


class Start(NamedTuple):
    """Run the submission at ``places``, from its last checkpoint if it has one."""

    id: str
    places: tuple[Place, ...]
    priority: Priority


class Stop(NamedTuple):
    """End the run; with ``suspend`` keep its state, as it will be started again."""

    id: str
    suspend: bool


class Move(NamedTuple):
    """Suspend the run, and resume it at ``places``."""

    id: str
    places: tuple[Place, ...]


class SetPriority(NamedTuple):
    """Continue the run in place with another priority."""

    id: str
    priority: Priority


class Resize(NamedTuple):
    """Continue the run with more or fewer devices: ``places`` are all of them."""

    id: str
    places: tuple[Place, ...]


Action: TypeAlias = Start | Stop | Move | SetPriority | Resize
