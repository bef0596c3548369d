"""The Protocol ``Backend``, through which a cluster runs its jobs: devices tell what is, and take requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from waterflow.cluster.shared_folder import SharedFolder
from waterflow.cluster.submission import Priority

Phase = Literal["beginning", "training", "ended"]
# How a run has ended. ``suspended``: it resumes from its checkpoints. ``refused``: its device could not begin it.
How = Literal["completed", "failed", "cancelled", "suspended", "refused"]


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node: the unit that fails as a whole. It is one process with one device.

    ``memory`` is bytes for jobs. ``epoch`` numbers the node's process: each process that starts, on any node, has a higher
    epoch than all before it. A node that is not ``alive`` is being started again. ``machine`` is the host it runs on, ``lost``
    why its last process was lost.
    """

    name: str
    memory: int
    epoch: int
    alive: bool
    machine: str = ""
    lost: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """One run of a job, as its device has it, until it has ended and is to be forgotten.

    ``run`` counts the starts of the job. ``how`` and ``reason`` say how it has ended. ``stopping`` is how it was asked to end.
    ``steps`` counts the steps of all jobs of the group from their beginning, those before a resume included, ``fraction`` is
    the share of all steps, 0 to 1, None if the length of the data is not known. ``pace`` is steps a second, lately, 0.0 before it
    is known, ``rate`` that as a share of its pace alone, and ``waited`` the share of the time in which it waited for memory.
    ``memory`` is the bytes that its jobs hold or claim, ``seconds`` the time since this start, ``saved`` the steps in the last
    checkpoint of this run, None before the first. A part that is ``held`` begins no step, and its time does not pass. ``quota`` is
    the bytes that each of its jobs was given by a request; None: what the job says.
    """

    id: str
    run: int
    phase: Phase
    priority: Priority
    how: How | None = None
    reason: str = ""
    stopping: How | None = None
    steps: int = 0
    fraction: float | None = None
    pace: float = 0.0
    rate: float | None = None
    waited: float = 0.0
    memory: int = 0
    seconds: float = 0.0
    saved: int | None = None
    held: bool = False
    quota: int | None = None


@dataclass(frozen=True, slots=True)
class DeviceState:
    """All that a device is and has, told whole.

    ``utilization`` is the share of time in which the device worked for any job, lately; ``handled`` the number up to which all
    requests are taken up.
    """

    node: str
    epoch: int
    machine: str
    pid: int
    memory: int
    utilization: float
    handled: int
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """A request to a device about one run of a job. Its effect shows in the device's state.

    ``start`` trains the jobs of a payload that is in the shared folder, from the checkpoints there, with ``priority``, and with
    ``quota``, the bytes of each of them, unless it is None; ``held`` lets them begin no step until they are told to go on. ``stop``
    ends them after their current steps, with ``suspend`` behind a checkpoint. ``checkpoint`` writes one besides the periodic ones.
    ``set`` changes ``priority``, ``quota`` and ``held``. ``forget`` drops a run that has ended.
    """

    kind: Literal["start", "stop", "checkpoint", "set", "forget"]
    id: str
    run: int
    priority: Priority = "guaranteed"
    suspend: bool = False
    held: bool = False
    quota: int | None = None


class Inbox:
    """The requests that a device has taken up: each once, in the order of their numbers, however often they come."""

    def __init__(self) -> None:
        self.handled = 0

    def take(self, first: int, requests: Sequence[Request]) -> list[Request]:
        """Return those to take up now, of requests numbered from ``first``. Behind a gap none is: they will come again."""
        if first > self.handled + 1:
            return []
        fresh = list(requests[self.handled + 1 - first :])
        self.handled += len(fresh)
        return fresh


class Backend(Protocol):
    """Devices, each a node, that run groups of jobs.

    Methods return at once; ``listen`` tells what became of a request. Thread-safe, with one caller of ``listen`` at a time.
    Nodes are watched, and started again, inside ``listen``: call it at least once a second.

    - *States.* A device tells its state whenever a run, its phase, priority, hold, stop or checkpoint has changed, or a request was
      taken up, and four times a second besides. Any state may be lost: the next one says the same.
    - *Requests.* They reach a device once and in order, as long as its process lives; ``answered`` says whether a state has the
      effects of all of them. Those of an earlier backend reach nobody once another one has heard the device.
    - *Fencing.* A process whose node is no longer alive, or has another epoch, can publish neither checkpoints nor results,
      and its states are dropped.
    - *Files.* Payloads, checkpoints, results and notes of ends go through ``folder``, which all nodes share. Its owner is
      trusted: files in it are unpickled.
    - *Restart.* Nodes may outlive the process that started them, for a configured time, and then end themselves. A backend
      that is opened on the same folder takes them over, with the jobs that run there.
    """

    folder: SharedFolder

    def nodes(self) -> list[NodeInfo]:
        """Return all nodes, sorted by name, including those that are being started again."""

    def listen(self, timeout: float) -> list[DeviceState]:
        """Return the newest state of each device that has told one since the last call; wait at most ``timeout`` seconds."""

    def request(self, node: str, *requests: Request) -> None:
        """Make requests to a device; they are repeated until it has taken them up, or its process is lost."""

    def answered(self, state: DeviceState) -> bool:
        """Return whether a state has the effects of all requests to its process; False once that is lost."""

    def end_process(self, node: str, epoch: int, why: str) -> None:
        """End the process of a node at once, if it is still that of ``epoch``; it is started again."""

    def close(self) -> None:
        """End all nodes, and wait until they have ended."""

    def detach(self) -> None:
        """Leave the nodes running, for a backend that is opened on the same folder later."""
