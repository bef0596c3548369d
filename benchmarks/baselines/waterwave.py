"""Waterwave (Shi et al., IEEE Transactions on Computers 2023): node groups in pairs on two streams, one pool.

What it does, by sections of the paper, and how its text is read where it leaves things open:

- **Groups** (4.3, 4.4). Operations are taken in the order of the step (the paper: by depth, then by number) and cut behind
  the operation at which most bytes are live: allocation groups before, deallocation groups after. Since groups that release
  should be no smaller than those that allocate (4.4), the former are closed as soon as live bytes have changed by
  ``split_size``, the latter before they would change by more; the rest of each side is a group, too. For a number of
  groups (5.4, Tacotron2) the split size is that of equal halves.
- **Pairs** (algorithm 1). Two vectors stand for two streams, groups at the same index are a pair. See ``pair_groups``.
- **Between pairs** (4.3) all streams are synchronized, which is an order on the device and does not block the host, and
  free memory becomes everybody's.
- **Memory** (4.2). A request looks into its stream's unsynchronized free memory, then into the synchronized, then the
  streams are synchronized for it. The engine's own allocator searches in this order. Released memory is its last user's:
  the paper names the stream that allocated it, which would hand pieces of the first stream, freed by work on the second,
  to work that nothing orders behind that.
- **Inside a pair** both groups' operations are issued at once by threads of the host. Here they are merged in
  proportion to their numbers, the best case of what is a race there.
- **Waterwave-s** (5.1.3) has two groups per job, cut in two ways; the better one counts.

Persistent state and one batch of each job are taken from the memory first; the pool has the rest as one piece. After each
iteration of all jobs the streams are synchronized, and the next begins. Time is a model (``csrc/engine/simulation.h``): a host
that is never late, streams in their order, between pairs and where the allocator waits behind each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.baselines.policy import Outcome, Policy, held_by, no_room
from benchmarks.baselines.pool_replay import Pair, live_after, pool_steps, replay_pairs
from waterflow.errors import InvalidJobError
from waterflow.partition.plan.offsets import Offsets
from waterflow.planner.simulate import Clock, SimulatedJob, arena_of

PairOfGroups = tuple[tuple[int, int] | None, tuple[int, int] | None]  # (job, group) by stream; None: idle


@dataclass(frozen=True)
class NodeGroups:
    """A step's groups: where each ends, how many of them allocate (they come first), and the size that split them."""

    ends: tuple[int, ...]
    allocating: int
    split_size: int


def cut(offsets: Offsets, split_size: int) -> NodeGroups:
    """Groups that add at most ``split_size`` live bytes (or are one operation), then groups that let go of at least that."""
    after = live_after(offsets)
    summit = offsets.resident.index(max(offsets.resident)) + 1
    ends: list[int] = []
    begin = before = 0
    for i in range(summit):
        if i > begin and after[i] - before > split_size:
            ends.append(i)
            begin, before = i, after[i - 1]
    ends.append(summit)
    allocating, before = len(ends), after[summit - 1]
    for i in range(summit, len(after)):
        if before - after[i] >= split_size or i + 1 == len(after):
            ends.append(i + 1)
            before = after[i]
    return NodeGroups(tuple(ends), allocating, split_size)


def cut_in_two(offsets: Offsets, at: int) -> NodeGroups:
    """One group up to operation ``at``, one from there on."""
    return NodeGroups((at, len(offsets.heights)), 1, max(1, live_after(offsets)[at - 1]))


def pair_groups(groups: Sequence[tuple[int, int]], ahead: int) -> list[PairOfGroups]:
    """Algorithm 1: (allocation groups, all groups) of each job, sorted, to pairs of groups.

    ``ahead`` is p: how many allocation groups of the second job run beside the last ones of the first. Where the
    printed text slips, it is read so:

    - Loops advance by one (``i`` is counted up in their heads and in their bodies), and the second job's first loop
      covers groups 0 to p - 1: "to s" would schedule group p twice.
    - p lies between 0 and the allocation groups of either job: it is -1 where the first job leaves no room for a group,
      and offset = f_numANG - p would be negative where it leaves much.
    - A job's deallocation groups begin behind its last allocation group, idx2 = max(idx2, idx1): groups of a job "are
      processed in strict sequence", and a job that allocates longer than the one before it deallocates would break that.
    - Empty places that the last job's deallocation groups take are those beside earlier jobs' groups; the rest go to the
      second stream one by one. As printed, the test idx2 > idx1 would pair two groups of that job with each other.
    """
    first = groups[0][0]
    av: dict[int, tuple[int, int]] = {}
    dv: dict[int, tuple[int, int]] = {}
    idx1, idx2 = 0, first
    for job, (allocating, count) in enumerate(groups):
        started = min(max(ahead, 0), first, allocating) if job == 1 else 0
        for i in range(started):
            dv[first - started + i] = (job, i)
        for i in range(started, allocating):
            av[idx1] = (job, i)
            idx1 += 1
        idx2 = max(idx2, idx1)
        i = allocating
        while job == len(groups) - 1 and i < count and idx1 < idx2:
            av[idx1] = (job, i)
            idx1, i = idx1 + 1, i + 1
        for rest in range(i, count):
            dv[idx2] = (job, rest)
            idx2 += 1
    return [(av.get(i), dv.get(i)) for i in range(max([*av, *dv], default=-1) + 1)]


def groups_ahead(arena: int, peak: int, split_size: int) -> int:
    """How many groups of the second job find room at the peak of the first, less one: p of algorithm 1.

    Both the limit and the peak are taken without what persists. ``split_size`` is the second job's.
    """
    return (arena - peak) // split_size - 1


def order_of_groups(jobs: Sequence[SimulatedJob], cuts: Sequence[NodeGroups], arena: int) -> list[PairOfGroups]:
    """The pairs of one iteration of jobs that are cut so, for ``arena`` bytes; jobs and groups by number."""
    # The paper sorts by the "node groups' sizes", to have few bubbles: by how many there are. Ties keep their order.
    order = sorted(range(len(jobs)), key=lambda job: -len(cuts[job].ends))
    ahead = 0
    if len(order) > 1:
        ahead = groups_ahead(arena, max(jobs[order[0]].offsets.resident), cuts[order[1]].split_size)
    pairs = pair_groups([(cuts[job].allocating, len(cuts[job].ends)) for job in order], ahead)
    return [(one and (order[one[0]], one[1]), other and (order[other[0]], other[1])) for one, other in pairs]


def run_in_pairs(jobs: Sequence[SimulatedJob], cuts: Sequence[NodeGroups], memory: int, clock: Clock | None) -> Outcome:
    """Iterations of all jobs, as many as the job with the most steps has, in pairs of the groups that they are cut into."""
    if (refused := no_room(jobs, memory)) is not None:
        return refused
    arena = arena_of(jobs, memory)
    pairs: list[Pair] = [(_operations(one, cuts), _operations(other, cuts)) for one, other in order_of_groups(jobs, cuts, arena)]
    pool = replay_pairs(pool_steps(jobs, clock or Clock()), pairs, arena, max(job.steps for job in jobs))
    peak = held_by(jobs) + pool.peak
    if pool.refused:
        return Outcome(False, peak, pool.waits, refused=pool.refused)
    time = max(1, pool.makespan)
    return Outcome(True, peak, pool.waits, pool.overlapped / time, pool.alone / time)


def _operations(place: tuple[int, int] | None, cuts: Sequence[NodeGroups]) -> tuple[int, int, int] | None:
    if place is None:
        return None
    job, group = place
    ends = cuts[job].ends
    return job, ends[group - 1] if group else 0, ends[group]


class Waterwave(Policy):
    """The published system, with groups of ``split_size`` bytes or with a number of ``groups``; see the module."""

    def __init__(self, split_size: int | None = None, *, groups: int | None = None, clock: Clock | None = None) -> None:
        if (split_size is None) == (groups is None):
            raise InvalidJobError("waterwave cuts steps by split_size= (bytes) or into a number of groups=; give one")
        if split_size is not None and split_size < 1:
            raise InvalidJobError(f"a split size is at least one byte; got {split_size}")
        if groups is not None and (groups < 2 or groups % 2):
            raise InvalidJobError(f"half of a step's groups allocate, so their number is even; got groups={groups}")
        self.split_size, self.groups, self.clock = split_size, groups, clock

    @property
    def name(self) -> str:
        """With what it was cut."""
        if self.split_size is None:
            return f"waterwave, {self.groups} groups"
        return f"waterwave, {self.split_size / 2**30:g} GiB"

    def run(self, jobs: Sequence[SimulatedJob], memory: int) -> Outcome:
        """All steps of the jobs in ``memory`` bytes."""
        return run_in_pairs(jobs, [self._cut(job.offsets) for job in jobs], memory, self.clock)

    def _cut(self, offsets: Offsets) -> NodeGroups:
        if self.groups is None:
            assert self.split_size is not None
            return cut(offsets, self.split_size)
        return cut(offsets, max(1, -(-max(offsets.resident) // (self.groups // 2))))


class WaterwaveS(Policy):
    """Steps cut at their peak, or where the backward pass begins. Jobs must tell where that is (``forward``)."""

    name = "waterwave-s"

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock = clock

    def run(self, jobs: Sequence[SimulatedJob], memory: int) -> Outcome:
        """The better of both cuts. Raises InvalidJobError for a job that does not tell where its forward pass ends."""
        at_peak = run_in_pairs(jobs, [_at_peak(job) for job in jobs], memory, self.clock)
        at_backward = run_in_pairs(jobs, [_at_backward(job) for job in jobs], memory, self.clock)
        return max((at_peak, at_backward), key=lambda outcome: (outcome.fits, outcome.speed or 0.0))


def _at_peak(job: SimulatedJob) -> NodeGroups:
    resident = job.offsets.resident
    return cut_in_two(job.offsets, min(resident.index(max(resident)) + 1, len(resident) - 1))


def _at_backward(job: SimulatedJob) -> NodeGroups:
    operations = len(job.offsets.heights)
    if job.forward is None or not 0 < job.forward < operations:
        raise InvalidJobError(
            f"waterwave-s cuts a step where its backward pass begins; job {job.name!r} of {operations} operations says "
            f"{job.forward}; make it with forward=, from Plan.forward"
        )
    return cut_in_two(job.offsets, job.forward)
