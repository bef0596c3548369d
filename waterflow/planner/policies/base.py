"""What every policy answers: whether jobs train together in so much memory, and how that goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from waterflow.executor.simulation import SimulatedJob, arena_of


@dataclass(frozen=True)
class Outcome:
    """Jobs under a policy. ``peak`` is the most bytes that were held at once, persistent state and batches included.

    ``waits`` counts waits of a stream or lane for another one that the policy did not plan, but needed for memory.
    ``overlap`` (share of the time with both busy) and ``speed`` (against one that is never idle) come from a model of
    time and are None where there is none. ``refused`` tells why the jobs do not fit; where they do, it is empty.
    """

    fits: bool
    peak: int = 0
    waits: int = 0
    overlap: float | None = None
    speed: float | None = None
    refused: str = ""


class Policy(ABC):
    """One way to train jobs side by side. Equal arguments give equal outcomes."""

    @property
    @abstractmethod
    def name(self) -> str:
        """Shown in tables."""

    @abstractmethod
    def run(self, jobs: Sequence[SimulatedJob], memory: int) -> Outcome:
        """All steps of the jobs in ``memory`` bytes, persistent state and a batch of each included."""

    def fits(self, jobs: Sequence[SimulatedJob], memory: int) -> bool:
        """Whether they can be run."""
        return self.run(jobs, memory).fits


def held_by(jobs: Sequence[SimulatedJob]) -> int:
    """Bytes of persistent state and one batch of each job: taken from the memory before all else."""
    return sum(job.persistent + job.batch for job in jobs)


def no_room(jobs: Sequence[SimulatedJob], memory: int) -> Outcome | None:
    """Refuses jobs that leave no memory for steps at all."""
    if arena_of(jobs, memory) > 0:
        return None
    return Outcome(False, refused=f"parameters, optimizer state and batches take {held_by(jobs):,} of {memory:,} bytes")
