"""Simulate jobs on the two lanes of an arena in virtual time. Every access is checked; no memory is used.

The order of groups is the real one (``csrc/engine/admission.h``, ``csrc/engine/cross_lane_fences.h``). Time is a model, not a
measurement. An operation alone takes its launches, and then as long as its bytes or its arithmetic at the peak rates of a GPU,
whichever is longer. Operations that run at the same time share those rates (``csrc/engine/simulation.h``): if two lanes
together ask for more than there is, both slow down. Lanes gain only what the other one leaves idle: launches, or bandwidth
beside arithmetic. The operations of a group run one after the other, each with its own shares. Batches are copied at the rate
of the bus beside that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from waterflow import _C
from waterflow.errors import MemoryLimitError
from waterflow.partition.plan.costs import Cost
from waterflow.partition.plan.offsets import ALIGNMENT, Offsets
from waterflow.partition.plan.plan import format_bytes
from waterflow.planner.gpus import GPU, gpu

_DEFAULT_GPU = gpu("v100-32g")


class RaceError(RuntimeError):
    """Two accesses to one byte have no order between them. This is a mistake in waterflow, never in a job."""


@dataclass(frozen=True)
class Clock:
    """The model of time: the rates of a GPU, by default a V100.

    ``stalled`` of 1,000 groups take up to ``stall_ns`` nanoseconds longer, drawn from the run's seed; a stall uses no bandwidth
    and no arithmetic.
    """

    gpu: GPU = _DEFAULT_GPU
    stalled: int = 0
    stall_ns: int = 0

    def work(self, cost: Cost) -> tuple[int, int, int]:
        """Return an operation's nanoseconds alone and its shares of bandwidth and arithmetic, in ``SimulatedStep.whole``."""
        # Integers throughout: equal arguments must give equal runs on every machine.
        bound = max(-(-cost.bytes // self.gpu.memory_rate), -(-cost.flops // self.gpu.compute_rate))
        nanoseconds = cost.launches * self.gpu.launch_ns + bound
        if nanoseconds == 0:
            return 0, 0, 0
        whole = _C.SimulatedStep.whole
        return (
            nanoseconds,
            cost.bytes * whole // (self.gpu.memory_rate * nanoseconds),
            cost.flops * whole // (self.gpu.compute_rate * nanoseconds),
        )

    def copy_ns(self, copied: int) -> int:
        """Return the nanoseconds that ``copied`` bytes take over the bus."""
        return -(-copied // self.gpu.bus_rate)


@dataclass(frozen=True)
class SimulatedJob:
    """A job as a simulation needs it: the offsets of its step's memory, and the bytes it holds besides.

    ``ends`` are the ends of its node groups; None makes every operation a group. ``batch`` bytes are copied while the step
    before runs. ``forward`` is the number of operations in the forward pass, None if not known.
    """

    name: str
    offsets: Offsets
    persistent: int = 0
    batch: int = 0
    steps: int = 1
    ends: tuple[int, ...] | None = None
    forward: int | None = None


@dataclass(frozen=True)
class SimulatedRun:
    """The result of a simulated run, in bytes and in nanoseconds of virtual time, which are a model.

    ``peak`` is the most that was held at once, persistent state and batches included; ``limit`` the bytes that were allowed.
    ``alone`` is the time of all steps one by one on a lane that is never idle; ``busy`` is the busy time of each lane, slowed
    by the others. ``waits`` of the ``groups`` waited on the device for the facing lane.
    """

    limit: int
    arena: int
    peak: int
    makespan: int
    alone: int
    busy: tuple[int, ...]
    overlapped: int
    waits: int
    groups: int
    steps: tuple[int, ...]

    @property
    def overlap(self) -> float:
        """The share of the time in which two lanes were busy."""
        return self.overlapped / max(1, self.makespan)

    @property
    def speed(self) -> float:
        """The speed relative to taking turns on one lane that is never idle. A model, not a measurement."""
        return self.alone / max(1, self.makespan)


def arena_of(jobs: Sequence[SimulatedJob], memory: int) -> int:
    """Return the bytes of the arena beside persistent state and one batch of each job; negative if those do not fit."""
    return (memory - sum(job.persistent + job.batch for job in jobs)) // ALIGNMENT * ALIGNMENT


def simulate(
    jobs: Sequence[SimulatedJob], *, memory: int, run_ahead: int = 2, seed: int = 0, clock: Clock | None = None
) -> SimulatedRun:
    """Run all steps of all jobs in ``memory`` bytes, on two lanes. Equal arguments give equal runs.

    The host issues up to ``run_ahead`` groups per lane beyond what the device has finished. Raises ValueError for an invalid
    plan, MemoryLimitError for a job that does not fit into the arena, and RaceError if two accesses have no order, which no job
    can cause.
    """
    native, arena = prepare(jobs, memory, clock or Clock())
    result = run(native, arena, run_ahead=run_ahead, seed=seed, clock=clock or Clock())
    if result.races:
        raise RaceError(
            f"accesses to one byte must be ordered; {result.races} are not, the first: {result.told[0]}. "
            "This is a mistake in waterflow; please report it"
        )
    if result.peak > arena:
        raise RaceError(f"an arena of {arena} bytes may hold no more; {result.peak} were held: a mistake in waterflow")
    held = sum(job.persistent + job.batch for job in jobs)
    return SimulatedRun(
        limit=memory,
        arena=arena,
        peak=held + result.peak,
        makespan=result.makespan,
        alone=result.alone,
        busy=tuple(result.busy),
        overlapped=result.overlapped,
        waits=result.waits,
        groups=len(result.spans),
        steps=tuple(result.steps),
    )


def prepare(jobs: Sequence[SimulatedJob], memory: int, clock: Clock) -> tuple[list[tuple[_C.SimulatedStep, int]], int]:
    """Return native steps of the jobs, each plan checked, and the bytes of the arena. Raises as ``simulate``."""
    arena = arena_of(jobs, memory)
    steps: dict[Any, _C.SimulatedStep] = {}
    native = []
    for job in jobs:
        if job.offsets.height > arena:
            held = memory - arena
            raise MemoryLimitError(
                f"a job's step must fit into the arena: {job.name!r} reaches {format_bytes(job.offsets.height)}, and "
                f"beside parameters, optimizer state and a batch of each job ({format_bytes(held)}) {memory:,} bytes leave "
                f"{format_bytes(arena)}; lower its batch size or raise memory=",
                needed=held + job.offsets.height,
                limit=memory,
            )
        # Copies of one job share one native step: building its list of touches is the slow part.
        key = (id(job.offsets), job.batch, job.ends)
        if key not in steps:
            steps[key] = simulated_step(job, clock)
        native.append((steps[key], job.steps))
    return native, arena


def simulated_step(job: SimulatedJob, clock: Clock, check: bool = True) -> _C.SimulatedStep:
    """Return the heights, work and accesses of a job's groups. Without ``check`` a wrong plan is accepted, for tests."""
    offsets = job.offsets
    operations = len(offsets.heights)
    after = offsets.after() if check else (*offsets.heights[1:], 0)
    ends = job.ends if job.ends is not None else tuple(range(1, operations + 1))
    # Per operation: (offset, bytes, is it a write). The simulation checks that accesses to one byte are ordered.
    touches: list[list[tuple[int, int, bool]]] = [[] for _ in range(operations)]
    for life, at in zip(offsets.lives, offsets.offsets):
        for operation in life.reads:
            touches[operation].append((at, life.size, False))
        for operation in life.writes:
            touches[operation].append((at, life.size, True))
    works = work_of(offsets, clock)
    groups = [works[begin:end] for begin, end in pairwise((0, *ends))]
    peaks, afters, first, flat = [], [], [0], []
    for begin, end in pairwise((0, *ends)):
        peaks.append(max(offsets.heights[begin:end]))
        afters.append(after[end - 1])
        flat += [touch for operation in touches[begin:end] for touch in operation]
        first.append(len(flat))
    return _C.SimulatedStep(peaks, afters, groups, first, flat, clock.copy_ns(job.batch))


def work_of(offsets: Offsets, clock: Clock) -> list[tuple[int, int, int]]:
    """Return the work of each operation of a step. A step without known costs takes no time."""
    return [clock.work(cost) for cost in offsets.costs or (Cost(),) * len(offsets.heights)]


def run(
    steps: Sequence[tuple[_C.SimulatedStep, int]],
    arena: int,
    *,
    seed: int = 0,
    clock: Clock,
    run_ahead: int = 2,
    host_learns: bool = False,
    fault: _C.OrderFault = _C.OrderFault.none,
    early_issue: bool = False,
) -> _C.SimulationResult:
    """Run the native simulation once and return its raw result, races included.

    ``fault`` and ``early_issue`` are mistakes that tests plant. With ``host_learns`` the end of a group on the device also
    orders everything issued afterwards, and no group waits for it. Raises RuntimeError if a group is issued before its barrier,
    or if no group can go on.
    """
    return _C.simulate(list(steps), arena, run_ahead, seed, clock.stalled, clock.stall_ns, host_learns, fault, early_issue)
