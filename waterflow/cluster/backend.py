"""The Protocol ``Backend``, through which a cluster runs its jobs, and the events that a backend reports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from waterflow.cluster.submission import Place, Priority
from waterflow.errors import WaterflowError

How = Literal["completed", "failed", "cancelled", "suspended", "lost"]


class BackendError(WaterflowError, ValueError):
    """A request that cannot be carried out as it was made: an unknown node or id, or an id that runs already."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node: the unit that fails as a whole. Here it is one process with one device.

    ``memory`` is bytes for jobs on each device. ``epoch`` numbers the node's process: each process that starts, on any node,
    has a higher epoch than all before it. A node that is not ``alive`` is being started again. ``machine`` is the host it
    runs on.
    """

    name: str
    devices: int
    memory: int
    epoch: int
    alive: bool
    machine: str = ""


@dataclass(frozen=True, slots=True)
class Started:
    """The jobs of ``id`` have been unpacked and begin to train."""

    id: str
    node: str
    epoch: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of ``id``, reported a few times a second.

    ``steps`` counts the steps of all its jobs from their beginning, those before a resume included. ``fraction`` is the share
    of all steps, 0 to 1; None if the length of the data is not known. ``step_seconds`` is the wall time between the ends of
    two steps of a job, over the last report; 0.0 before there are any. ``memory`` is the bytes that its jobs hold or claim on
    one device, the largest if there are several. ``utilization`` is the share of the last report in which the device worked
    for any job: all jobs on a device report the same. ``seconds`` is the time since this start.
    """

    id: str
    node: str
    epoch: int
    steps: int
    fraction: float | None
    step_seconds: float
    memory: int
    utilization: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Checkpointed:
    """A checkpoint of ``id`` after ``steps`` steps was written to ``path``, which ``start(checkpoint=)`` takes."""

    id: str
    node: str
    epoch: int
    path: Path
    steps: int


@dataclass(frozen=True, slots=True)
class Ended:
    """The run of ``id`` has ended.

    ``how`` is ``completed``, ``failed`` (``reason`` says why), ``cancelled``, ``suspended`` (it resumes from ``results``, the
    path for ``start(checkpoint=)``) or ``lost`` (one of its nodes was lost; it resumes from ``Backend.checkpoints(id)``).
    ``results`` is a folder for ``load_results``. ``steps`` counts the steps of all its jobs; None if the count was lost with
    the node.
    """

    id: str
    node: str
    epoch: int
    how: How
    results: Path
    reason: str = ""
    steps: int | None = None


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The process of ``node`` ended, or was silent for too long. The backend ignores all that it still does or sends."""

    node: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """``node`` takes jobs, with a process of a new epoch. ``memory`` is bytes for jobs on each device."""

    node: str
    epoch: int
    devices: int
    memory: int


BackendEvent = Started | Progress | Checkpointed | Ended | NodeLost | NodeJoined


class Backend(Protocol):
    """Runs groups of jobs on the devices of nodes.

    Methods return at once; ``poll`` reports the outcome of a request. Thread-safe, with one caller of ``poll`` at a time.
    Nodes are watched, and started again, inside ``poll``: call it at least once a second.

    - *Order.* Events of one id come in order: ``Started``, any number of ``Progress`` and ``Checkpointed``, one ``Ended``.
      After ``NodeLost`` comes ``Ended(how="lost")`` for each id that ran there. A backend that takes over the nodes of
      another one may report an event twice, but never an event of a start before the newest one of its id.
    - *Fencing.* A process whose node was declared lost can publish neither checkpoints nor results, and its events are
      dropped.
    - *Several devices.* The jobs of a group are dealt out over ``places``: job ``i`` runs at ``places[i % len(places)]``.
      When one of the nodes is lost, the jobs on the others are suspended before ``Ended(how="lost")`` comes.
    - *Start after stop.* An id whose stop is under way may be started: it begins once the stop has ended, and its events
      follow.
    - *Files.* Payloads, checkpoints and results go through one folder that all nodes share. Its owner is trusted: files in it
      are unpickled.
    - *Restart.* Nodes may outlive the process that started them, for a configured time, and then end themselves. A backend
      that is opened on the same folder takes them over: their jobs run on, and ``running()`` lists them.
    """

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes, sorted by name, including those that are being started again."""

    def running(self) -> list[str]:
        """Return the ids that were started and have not ended."""

    def start(
        self, id: str, payload: bytes, places: Sequence[Place], priority: Priority = "guaranteed", checkpoint: Path | None = None
    ) -> None:
        """Train the jobs of ``payload`` (from ``pack``) at ``places``.

        With ``checkpoint``, each job resumes from its newest state there, and a job without one begins. With None, all jobs
        begin, and the files of an earlier start are removed. An id that is being stopped is started once the stop has ended.

        Raises BackendError for an id that runs, an unknown place, or a node that is not alive.
        """

    def poll(self, timeout: float) -> list[BackendEvent]:
        """Return the events since the last call; wait at most ``timeout`` seconds for the first."""

    def checkpoint(self, id: str) -> None:
        """Have ``id`` write a checkpoint after its current step, besides its periodic ones."""

    def checkpoints(self, id: str) -> Path | None:
        """Return the folder of the checkpoints of ``id``, for ``start(checkpoint=)``; None before the first."""

    def adopt(self, id: str, checkpoint: Path) -> Path:
        """Copy a file of ``Checkpoint.save`` to where the first job of ``id`` resumes from; return the path for ``start``."""

    def stop(self, id: str, suspend: bool) -> None:
        """End ``id`` after its current step: ``suspended``, with a checkpoint, or ``cancelled``. Does nothing for an ended id.

        An id that is being suspended may be cancelled. A job whose data or evaluation hangs cannot be suspended; once
        cancelled, it is interrupted after some seconds if that code is Python.
        """

    def break_off(self, id: str) -> None:
        """End the processes in which a cancelled ``id`` still runs because it does not end by itself.

        Does nothing for an ended id.

        All jobs in these processes are lost, as if the processes had died; the processes are started again.
        """

    def set_priority(self, id: str, priority: Priority) -> None:
        """Run ``id`` with ``priority`` from its next step on."""

    def close(self) -> None:
        """End all nodes, and wait until they have ended. Their jobs end without an event."""

    def detach(self) -> None:
        """Leave the nodes running, for a backend that is opened on the same folder later."""
