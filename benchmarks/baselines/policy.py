"""Policies: whether jobs train together in so much memory, and how that goes. Ours, and one best-fit pool."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.baselines.pool_replay import pool_steps, replay_operations, unplaced_steps
from waterflow.errors import MemoryLimitError
from waterflow.planner.simulate import Clock, SimulatedJob, arena_of, run, simulate


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


class Banker(Policy):
    """Ours, operation by operation: every piece placed in advance, two steps in one arena, the banker's algorithm."""

    name = "banker"

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock

    def run(self, jobs: Sequence[SimulatedJob], memory: int) -> Outcome:
        """Raises RaceError where an access has no order, which no job can bring about."""
        try:
            done = simulate(jobs, memory=memory, clock=self.clock)
        except MemoryLimitError as error:
            return Outcome(False, refused=str(error))
        return Outcome(True, done.peak, done.waits, done.overlap, done.speed)

    def fits(self, jobs: Sequence[SimulatedJob], memory: int) -> bool:
        """Jobs fit when the highest does: admission lets each finish, whatever the others hold."""
        arena = arena_of(jobs, memory)
        return arena > 0 and all(job.offsets.height <= arena for job in jobs)


class Dynamic(Policy):
    """Our order of operations without our placement.

    Admission takes a step to be as high as its live bytes; what it lets through asks one best-fit pool. The pool serves
    requests in the order in which the simulation issued their operations, as one stream would. Jobs fit if every request
    is served. Its speed is not modelled: the order on the device that reuse asks for would be one of single pieces.
    """

    name = "dynamic"

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock or Clock()

    def run(self, jobs: Sequence[SimulatedJob], memory: int) -> Outcome:
        """All steps of the jobs in ``memory`` bytes."""
        if (refused := no_room(jobs, memory)) is not None:
            return refused
        arena = arena_of(jobs, memory)
        highest = max(max(job.offsets.resident, default=0) for job in jobs)
        if highest > arena:
            return Outcome(False, refused=f"{highest:,} bytes are live at once, and {arena:,} are left for steps")
        issued = run(unplaced_steps(jobs, self.clock), arena, clock=self.clock).spans  # groups of one operation each
        pool = replay_operations(pool_steps(jobs, self.clock), [(span.job, span.group) for span in issued], arena)
        return Outcome(not pool.refused, held_by(jobs) + pool.peak, refused=pool.refused)
