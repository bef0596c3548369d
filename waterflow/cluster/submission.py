"""What is submitted to a cluster, and what a scheduler answers: plain data. Times are seconds, memory is bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from waterflow.units import Priority as Priority

Outcome = Literal["completed", "failed", "cancelled"]
Place: TypeAlias = tuple[str, int]  # a node's name and the index of one of its devices


@dataclass(frozen=True, slots=True)
class Node:
    """A machine with ``devices`` equal devices of ``memory`` bytes each (0: not known)."""

    name: str
    devices: int
    memory: int = 0


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who shares the cluster: guaranteed submissions of a tenant hold at most ``quota`` devices at once."""

    name: str
    quota: int


@dataclass(slots=True)
class Submission:
    """One group of jobs that runs as a whole, on ``devices`` devices at once.

    A guaranteed submission with ``auto`` may run as an opportunistic one while its quota is used up. ``memory`` is
    what it needs on each device (0: not known), ``model`` its name in tables of interference and scaling, and
    ``duration`` the seconds it takes alone on the devices asked for: only a simulation knows it. ``time_limit``: the seconds
    after which a live cluster ends it, all its runs together.
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

    def to_dict(self) -> dict[str, Any]:
        """All fields, as JSON knows them."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> Submission:
        """The other way."""
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class Report:
    """What is known of a running submission; None where nothing new is.

    ``progress`` goes from 0 to 1. ``rate`` is its speed against alone on the devices asked for (1: as fast).
    ``utilization`` (0 to 1) and ``memory`` (bytes) are what it takes of each of its devices. ``slowdown`` is the
    guaranteed job's step time against its solo profile (1: as fast as alone).
    """

    progress: float | None = None
    steps: int | None = None
    rate: float | None = None
    utilization: float | None = None
    memory: int | None = None
    slowdown: float | None = None


class Start(NamedTuple):
    """Run it there, from its last checkpoint if it has one."""

    id: str
    places: tuple[Place, ...]
    priority: Priority


class Stop(NamedTuple):
    """End it there; with ``suspend``, keep its state, for it will be started again."""

    id: str
    suspend: bool


class Move(NamedTuple):
    """Suspend it, and go on at ``places``."""

    id: str
    places: tuple[Place, ...]


class SetPriority(NamedTuple):
    """Go on where it is, with another priority."""

    id: str
    priority: Priority


class Resize(NamedTuple):
    """Go on with more or fewer devices: ``places`` are all that it has from now on."""

    id: str
    places: tuple[Place, ...]


Action: TypeAlias = Start | Stop | Move | SetPriority | Resize
