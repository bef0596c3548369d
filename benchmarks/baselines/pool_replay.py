"""Steps of jobs whose every request goes to one pool: dynamic placement, on a device without memory.

The pool is the engine's own allocator (``tests/native/pool_replay.h``): best fit, neighbours merged at once, all of its
memory one segment from the beginning. Pieces are the ones that plans place, in multiples of 256 bytes, as allocators on
GPUs give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.native.build import load
from waterflow import _C
from waterflow.partition.plan.offsets import Offsets
from waterflow.planner.simulate import Clock, SimulatedJob, work_of

Group = tuple[int, int, int]  # job, first operation, one past the last
Pair = tuple[Group | None, Group | None]

# A step's requests (``pool_steps`` makes them); pairs of groups on two streams; operations in the order of a simulation.
_native = load()
PoolStep, replay_pairs, replay_operations = _native.PoolStep, _native.replay_pairs, _native.replay_operations


def pool_steps(jobs: Sequence[SimulatedJob], clock: Clock) -> list[Any]:
    """What each job's step asks of a pool, and how long it takes; copies share theirs."""
    made: dict[tuple[int, int], Any] = {}
    for job in jobs:
        key = (id(job.offsets), job.batch)
        if key not in made:
            lives = job.offsets.lives
            births, deaths = [life.birth for life in lives], [life.death for life in lives]
            sizes = [life.size for life in lives]
            made[key] = PoolStep(work_of(job.offsets, clock), births, deaths, sizes, clock.copy_ns(job.batch))
    return [made[id(job.offsets), job.batch] for job in jobs]


def live_after(offsets: Offsets) -> list[int]:
    """Bytes that are live behind each operation, without what died with it."""
    after = list(offsets.resident)
    for life in offsets.lives:
        after[life.death] -= life.size
    return after


def unplaced_steps(jobs: Sequence[SimulatedJob], clock: Clock) -> list[tuple[_C.SimulatedStep, int]]:
    """Jobs for the simulation whose heights are their live bytes, as if no byte were lost; they touch nothing."""
    made: dict[tuple[int, int], _C.SimulatedStep] = {}
    for job in jobs:
        key = (id(job.offsets), job.batch)
        if key not in made:
            resident, after = list(job.offsets.resident), live_after(job.offsets)
            first = [0] * (len(resident) + 1)
            work = [[each] for each in work_of(job.offsets, clock)]
            made[key] = _C.SimulatedStep(resident, after, work, first, [], clock.copy_ns(job.batch))
    return [(made[id(job.offsets), job.batch], job.steps) for job in jobs]
