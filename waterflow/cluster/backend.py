"""What a cluster asks of those who run its jobs: the Protocol ``Backend``, its events, and what is sent to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from waterflow.cluster.submission import Place, Priority
from waterflow.errors import WaterflowError

How = Literal["completed", "failed", "cancelled", "suspended", "lost"]


class BackendError(WaterflowError, ValueError):
    """A request that cannot be carried out as it was made: an unknown node or id, an id that runs already."""


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node: what fails as one. Here: one process with one device.

    ``memory`` is bytes for jobs on each device, ``epoch`` the number of its process: each start of any node's process has a
    higher one than all before. A node that is not ``alive`` is being started again. ``machine`` is where it runs.
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
    """How far ``id`` is, a few times a second.

    ``steps`` are those of all its jobs, from their beginning, also before a resume; ``fraction`` is the part of all steps
    (None where the length of the data is not known). ``step_seconds``: wall time between two ends of steps of a job, over the
    last report; 0.0 before there are any. ``memory``: bytes that its jobs hold or claim on one device; of several, the most.
    ``utilization``: the part of the last report in which the device worked, for whomever: all who run there tell the same.
    ``seconds``: since it was started, this time.
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
    """``path`` now has the state of ``id`` after so many steps; it is what ``start(checkpoint=)`` takes."""

    id: str
    node: str
    epoch: int
    path: Path
    steps: int


@dataclass(frozen=True, slots=True)
class Ended:
    """``id`` runs no more.

    ``completed``, ``failed`` (``reason`` says why), ``cancelled``, ``suspended`` (it goes on from ``results``, which is then the
    path for ``start(checkpoint=)``), or ``lost`` (a node of its was; it goes on from ``Backend.checkpoints(id)``).
    ``results``: a folder for ``load_results``. ``steps`` are those of all its jobs in the end; None where nobody can tell.
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
    """The process of ``node`` ended, or was silent for too long. What it still does or says counts no more."""

    node: str
    epoch: int
    reason: str


@dataclass(frozen=True, slots=True)
class NodeJoined:
    """``node`` takes jobs, with a process of a new epoch."""

    node: str
    epoch: int
    devices: int
    memory: int


BackendEvent = Started | Progress | Checkpointed | Ended | NodeLost | NodeJoined


class Backend(Protocol):
    """Runs groups of jobs on the devices of nodes.

    Its methods return at once; what became of a request is told by ``poll``. Thread-safe, with one caller of ``poll`` at a
    time. Nodes are watched and started again inside of ``poll``: call it at least once a second.

    - *Order.* Events of one id come in order: ``Started``, any number of ``Progress`` and ``Checkpointed``, one ``Ended``. After
      ``NodeLost`` comes ``Ended(how="lost")`` for each id that ran there. Events may come twice to somebody who attaches to
      nodes that outlived another backend; those of an id that was started again since never do.
    - *Fencing.* A process whose node was declared lost can publish neither checkpoints nor results, and its events are dropped.
    - *Several devices.* The jobs of a group are dealt out over ``places``: job ``i`` runs at ``places[i % len(places)]``. When
      one of the nodes is lost the others' jobs are suspended before ``Ended(how="lost")`` comes.
    - *Stopping twice.* An id whose stop is under way may be started already: it begins when that has ended, and its events follow.
    - *Files.* Payloads, checkpoints and results go through one folder that all nodes share. Its owner is trusted: files in it
      are unpickled.
    - *Restart.* Nodes may outlive who started them, for a time that is set, and then end themselves. A backend that is opened
      on the same folder takes them over: what runs there runs on, and ``running()`` tells what that is.
    """

    def nodes(self) -> list[NodeInfo]:
        """All nodes, those that are being started again, too; by name."""

    def running(self) -> list[str]:
        """The ids that were started and have not ended."""

    def start(
        self, id: str, payload: bytes, places: Sequence[Place], priority: Priority = "guaranteed",
        checkpoint: Path | None = None,
    ) -> None:  # fmt: skip
        """Train the jobs of ``payload`` (from ``pack``) at ``places``.

        ``checkpoint``: go on from the newest state there (jobs without one begin); None: all begin, and what is left of an
        earlier start is removed. An id that is being stopped is started once that has ended. Raises BackendError for an
        id that runs, an unknown place, or a node that is not alive.
        """

    def poll(self, timeout: float) -> list[BackendEvent]:
        """What happened since the last call; waits at most so many seconds for something to happen."""

    def checkpoint(self, id: str) -> None:
        """Have ``id`` write a checkpoint at the next boundary of a step; besides those that it writes by itself."""

    def checkpoints(self, id: str) -> Path | None:
        """Where the checkpoints of ``id`` are, for ``start(checkpoint=)``; None before there is one."""

    def adopt(self, id: str, checkpoint: Path) -> Path:
        """Take a file of ``Checkpoint.save`` as what the first job of ``id`` goes on from; returns what ``start`` takes."""

    def stop(self, id: str, suspend: bool) -> None:
        """End ``id`` at the next boundary: ``suspended``, with a checkpoint, or ``cancelled``. One that has ended: nothing.

        One that is being suspended may be cancelled. A job whose data or evaluation is stuck is never suspended; cancelled, it
        is broken off after some seconds, where that code is Python.
        """

    def break_off(self, id: str) -> None:
        """End the processes in which a cancelled ``id`` still runs: it does not come to its end. One that has ended: nothing.

        All that runs there is lost, as if the processes had died, and they are started again.
        """

    def set_priority(self, id: str, priority: Priority) -> None:
        """Let ``id`` run as guaranteed, or as opportunistic, from its next step on."""

    def close(self) -> None:
        """End all nodes, and wait for that. What ran there ends without an event."""

    def detach(self) -> None:
        """Leave the nodes running, for a backend that is opened on the same folder later."""
