"""Simulated runs: within the limit, in order, to the end; and each planted mistake is found."""

from __future__ import annotations

import dataclasses
import itertools
import random
from typing import Any

import pytest
from hypothesis import given, strategies as st

import waterflow as wf
from benchmarks.zoo import SMALL
from waterflow import _C
from waterflow._C import OrderFault
from waterflow.partition.plan.costs import Cost
from waterflow.partition.plan.liveness import Lifetime
from waterflow.partition.plan.offsets import Offsets, place
from waterflow.planner.gpus import GPU
from waterflow.planner.simulate import Clock, SimulatedJob, SimulatedRun, arena_of, prepare, run, simulate, simulated_step

# A byte takes a nanosecond, on the bus, too, and so does a floating point operation, and a launch.
UNIT = GPU("unit", 1 << 40, 0, memory_rate=1, compute_rate=1, launch_ns=1, bus_rate=1)
BYTE = Clock(UNIT)


def plan(*lives: tuple[int, int, int], traffic: tuple[int, ...]) -> Offsets:
    """Pieces (birth, death, size), each written where it is born and read where it dies."""
    pieces = [Lifetime(b, d, size, reads=(d,) if d > b else (), writes=(b,)) for b, d, size in lives]
    return place(pieces, len(traffic), costs=tuple(map(Cost, traffic)))


def launches(offsets: Offsets) -> Offsets:
    """The same step, taking as long, and leaving all bandwidth to others: launches instead of bytes."""
    return dataclasses.replace(offsets, costs=tuple(Cost(launches=cost.bytes) for cost in offsets.costs))


def test_work_of_operations() -> None:
    whole = _C.SimulatedStep.whole
    clock = Clock(GPU("made up", 1 << 40, 0, memory_rate=4, compute_rate=8, launch_ns=10, bus_rate=1))
    assert clock.work(Cost()) == (0, 0, 0)
    assert clock.work(Cost(bytes=40)) == (10, whole, 0)
    assert clock.work(Cost(bytes=41, flops=80)) == (11, 41 * whole // 44, 80 * whole // 88)
    assert clock.work(Cost(bytes=40, flops=160, launches=2)) == (40, whole // 4, whole // 2)


def test_one_job_by_hand() -> None:
    offsets = plan((0, 2, 128), (1, 1, 64), traffic=(10, 20, 30))
    done = simulate([SimulatedJob("a", offsets, persistent=100, batch=5, steps=2)], memory=400, clock=BYTE)
    # A batch is copied in 5; the next one when the step that read it is done.
    assert done == SimulatedRun(
        limit=400, arena=256, peak=105 + 192, makespan=2 * (5 + 60), alone=120, busy=(120, 0), overlapped=0, waits=0, groups=6,
        steps=(2,),
    )  # fmt: skip


def test_two_jobs_that_fit_side_by_side_wait_for_nothing() -> None:
    offsets = launches(plan((0, 2, 128), (1, 1, 64), traffic=(10, 20, 30)))
    done = simulate([SimulatedJob("a", offsets), SimulatedJob("b", offsets)], memory=384, clock=BYTE)
    assert (done.makespan, done.overlapped, done.waits, done.peak) == (60, 60, 0, 384)
    assert done.overlap == 1 and done.speed == 2


def test_lanes_share_the_rates() -> None:
    offsets = plan((0, 2, 128), (1, 1, 64), traffic=(10, 20, 30))
    both = [SimulatedJob("a", offsets), SimulatedJob("b", offsets)]
    done = simulate(both, memory=384, clock=BYTE)
    # All of it is bandwidth: side by side, both at half the speed.
    assert (done.makespan, done.alone, done.busy, done.overlap, done.speed) == (120, 120, (120, 120), 1, 1)
    # Beside arithmetic alone it is full speed, and beside a step that leaves half of the bandwidth, two thirds.
    for costs, makespan in [((Cost(flops=60),), 60), ((Cost(bytes=30, launches=30),), 90)]:
        other = dataclasses.replace(offsets, costs=(*costs, Cost(), Cost()))
        done = simulate([both[0], SimulatedJob("b", other)], memory=384, clock=BYTE)
        assert (done.makespan, done.alone) == (makespan, 120)


def test_two_jobs_that_do_not_fit_at_their_peaks() -> None:
    # One operation at the peak, of 128 bytes, 64 before and after it; arena of 192.
    offsets = launches(plan((0, 2, 64), (1, 1, 64), traffic=(10, 20, 30)))
    done = simulate([SimulatedJob("a", offsets), SimulatedJob("b", offsets)], memory=192, clock=BYTE)
    # Groups are issued ahead: while the first lane runs operation 0, its peak is issued and so given back in the host's
    # order. The second lane's peak then waits on the device for the first one's to end at 30, and runs until 50.
    assert (done.makespan, done.peak, done.waits) == (80, 192, 1)
    assert done.busy == (60, 60)


def test_groups_of_a_plan_hold_their_highest_operation() -> None:
    offsets = plan((0, 3, 64), (1, 1, 64), (2, 2, 256), traffic=(1, 2, 3, 4))
    step = simulated_step(SimulatedJob("a", offsets, ends=(2, 4)), BYTE)
    result = run([(step, 1)], 320, clock=BYTE)
    assert [(s.peak, s.after, s.end - s.start) for s in result.spans] == [(128, 64, 3), (320, 0, 7)]


def test_operations_of_a_group_keep_their_own_shares() -> None:
    def step(*costs: Cost, **of_job: Any) -> SimulatedJob:
        offsets = place([Lifetime(0, len(costs) - 1, 64, reads=(), writes=(0,))], len(costs), costs=costs)
        return SimulatedJob("a", offsets, **of_job)

    # Half of the bandwidth for 20. Bytes take 15 instead of 10 beside it, arithmetic then 10; half bytes and half
    # arithmetic, as they are on the average, would run at full speed, for 20.
    half = step(Cost(bytes=10, launches=10))
    mixed = (Cost(bytes=10), Cost(flops=10))
    for one in (step(*mixed), step(*mixed, ends=(2,))):
        done = simulate([one, half], memory=256, run_ahead=1, clock=BYTE)
        assert (done.makespan, done.alone, done.overlapped, max(done.busy)) == (25, 40, 25, 25), one
    # A stalled group takes longer behind its operations, and uses nothing then.
    stalls = Clock(UNIT, stalled=1000, stall_ns=1000)
    done = simulate([step(*mixed, ends=(2,))], memory=256, clock=stalls)
    assert done.makespan == done.alone > 20


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=2))
def test_groups_take_as_long_as_their_operations_one_by_one(seeds: list[int]) -> None:
    cut = [dataclasses.replace(random_job(f"job-{i}", random.Random(seed)), steps=1) for i, seed in enumerate(seeds)]
    whole = [dataclasses.replace(job, ends=(len(job.offsets.heights),)) for job in cut]
    single = [dataclasses.replace(job, ends=None) for job in cut]
    memory = sum(job.persistent + job.batch + job.offsets.height for job in cut) + 64
    took = [simulate(jobs, memory=memory, run_ahead=1, clock=BYTE) for jobs in (cut, whole, single)]
    assert len({(done.makespan, done.alone, sum(done.busy), done.overlapped, done.waits) for done in took}) == 1


def test_a_job_that_does_not_fit_is_refused_by_its_numbers() -> None:
    offsets = plan((0, 0, 640), traffic=(1,))
    with pytest.raises(wf.MemoryLimitError, match="'big' reaches 640 B") as refused:
        simulate([SimulatedJob("big", offsets, persistent=64)], memory=640)
    assert refused.value.needed == 704


# -- random jobs


@st.composite
def jobs(draw: Any, most: int = 4) -> list[SimulatedJob]:
    made = []
    for number in range(draw(st.integers(1, most))):
        made.append(random_job(f"job-{number}", random.Random(draw(st.integers(0, 10**6)))))
    return made


def random_job(name: str, draw: random.Random) -> SimulatedJob:
    """Mostly nested pieces, as those of a training step, and some that are not."""
    operations = draw.randint(2, 14)
    lives = []
    for _ in range(draw.randint(1, 12)):
        birth = draw.randint(0, operations - 1)
        death = draw.randint(birth, operations - 1)
        if draw.random() < 0.6:
            birth, death = sorted((birth, operations - 1 - birth))
        touched = sorted({birth, death, draw.randint(birth, death)})
        kind = [draw.random() < 0.5 for _ in touched]
        reads = tuple(at for at, write in zip(touched, kind) if not write)
        writes = tuple(sorted({birth, *(at for at, write in zip(touched, kind) if write)}))
        lives.append(Lifetime(birth, death, draw.randint(1, 600), reads=reads, writes=writes))
    costs = tuple(Cost(draw.randint(0, 40), draw.randint(0, 40), draw.randint(0, 9)) for _ in range(operations))
    cuts = sorted({*draw.sample(range(1, operations), draw.randint(0, operations - 1)), operations})
    return SimulatedJob(
        name, place(lives, operations, costs=costs), persistent=draw.randint(0, 300), batch=draw.randint(0, 90),
        steps=draw.randint(1, 4), ends=None if draw.random() < 0.5 else tuple(cuts),
    )  # fmt: skip


def room_for(mixed: list[SimulatedJob], share: float) -> int:
    """Memory between what the highest job needs and what any two need side by side."""
    highest = max(job.offsets.height for job in mixed)
    held = sum(job.persistent + job.batch for job in mixed)
    return held + 64 * round(highest * (1 + share) / 64) + 64


def must_be_right(result: Any, mixed: list[SimulatedJob], arena: int, run_ahead: int) -> None:
    """All that a run has to keep, told from its spans alone; every pair is looked at."""
    assert list(result.steps) == [job.steps for job in mixed]
    held: dict[int, int] = {}
    for number, span in enumerate(result.spans):
        held[span.lane] = span.peak
        assert held.get(span.lane, 0) + held.get(span.lane ^ 1, 0) <= arena
        held[span.lane] = span.after
        assert span.issued <= span.start <= span.end
        earlier = result.spans[:number]
        # Groups of a lane, and of a job, run one after the other.
        assert all(e.end <= span.start for e in earlier if e.lane == span.lane or e.job == span.job)
        # The host runs so many groups ahead of the device, and no more.
        assert sum(e.lane == span.lane and e.end > span.issued for e in earlier) < run_ahead
        # Ground that both lanes reach is left by the one before the other comes.
        facing = [e for e in earlier if e.lane == span.lane ^ 1 and e.peak + span.peak > arena]
        assert all(e.end <= span.start for e in facing)


@given(
    jobs(), st.floats(0, 1), st.integers(1, 3), st.integers(0, 9), st.booleans(), st.booleans()
)  # fmt: skip
def test_random_jobs(mixed: list[SimulatedJob], share: float, run_ahead: int, seed: int, stalls: bool, learns: bool) -> None:
    clock = Clock(UNIT, stalled=300 if stalls else 0, stall_ns=200)
    memory = room_for(mixed, share)
    native, arena = prepare(mixed, memory, clock)
    result = run(native, arena, seed=seed, clock=clock, run_ahead=run_ahead, host_learns=learns)
    assert not result.races, result.told
    must_be_right(result, mixed, arena, run_ahead)
    edges = sorted({at for span in result.spans for at in (span.start, span.end)})
    both = [
        (a, b) for a, b in itertools.pairwise(edges)
        if len({s.lane for s in result.spans if s.start <= a and b <= s.end}) > 1
    ]  # fmt: skip
    assert result.overlapped == sum(b - a for a, b in both)
    done = simulate(mixed, memory=memory, seed=seed, clock=clock)
    assert done == simulate(mixed, memory=memory, seed=seed, clock=clock)
    assert done.peak <= memory and done.speed <= 2
    # Nobody gets more out of the device than it has; what shares lose to rounding is made good.
    for kind in ("bytes", "flops"):
        asked = sum(getattr(cost, kind) * job.steps for job in mixed for cost in job.offsets.costs)
        assert done.makespan >= asked * 0.999 - 1


# -- planted mistakes


def found(count: int, fault: OrderFault, learns: bool = False) -> float:
    """The share of random mixes in which an access without an order is seen."""
    seen = 0
    for seed in range(count):
        draw = random.Random(seed)
        clock = Clock(UNIT, stalled=300, stall_ns=200)
        mixed = [dataclasses.replace(random_job(f"job-{i}", draw), steps=4) for i in range(3)]
        native, arena = prepare(mixed, room_for(mixed, 0.3), clock)
        result = run(native, arena, seed=seed, clock=clock, fault=fault, host_learns=learns)
        seen += result.races > 0
        assert (result.races > 0) == bool(result.told)
    return seen / count


LEARNS = pytest.mark.parametrize("learns", [False, True], ids=["by waits alone", "host learns"])


@LEARNS
def test_planted_heights_compared_at_events_instead_of_peaks(learns: bool, full: bool) -> None:
    assert found(1000 if full else 100, OrderFault.heights_at_events, learns) > 0.5


@LEARNS
def test_planted_dropped_waits(learns: bool, full: bool) -> None:
    assert found(1000 if full else 100, OrderFault.dropped_waits, learns) > 0.5


@LEARNS
def test_without_mistakes_nothing_is_found(learns: bool, full: bool) -> None:
    assert found(1000 if full else 100, OrderFault.none, learns) == 0


def moved(offsets: Offsets, piece: int, by: int) -> Offsets:
    made = list(offsets.offsets)
    made[piece] += by
    return dataclasses.replace(offsets, offsets=tuple(made))


@pytest.mark.parametrize("by", [1, 64], ids=["one byte", "one alignment"])
def test_planted_plan_with_one_overlapping_byte(by: int) -> None:
    offsets = plan((0, 3, 256), (1, 2, 128), traffic=(1, 1, 1, 1))
    below = min(range(2), key=lambda i: offsets.offsets[i])
    wrong = moved(offsets, below, by)
    with pytest.raises(ValueError, match=f"may not share a byte while both live: 0 .* and 1 .* share {by} from"):
        simulate([SimulatedJob("a", wrong)], memory=4096)


def test_planted_plan_that_reaches_one_byte_further_than_it_says() -> None:
    offsets = plan((0, 1, 128), traffic=(5, 5))
    wrong = moved(offsets, 0, 1)
    with pytest.raises(ValueError, match="operation 0 reaches 129 bytes, the plan says 128"):
        simulate([SimulatedJob("a", wrong), SimulatedJob("b", offsets)], memory=256)
    # Were it not looked at, the device would tell: byte 128 belongs to the other lane.
    steps = [simulated_step(SimulatedJob("a", each), BYTE, check=False) for each in (wrong, offsets)]
    result = run([(step, 1) for step in steps], 256, clock=BYTE)
    assert result.races and "job 1" in result.told[0]
    right = simulated_step(SimulatedJob("a", offsets), BYTE)
    assert run([(right, 1), (steps[1], 1)], 256, clock=BYTE).races == 0


def test_planted_group_issued_before_its_barrier() -> None:
    step = simulated_step(SimulatedJob("a", plan((0, 1, 64), traffic=(1, 1))), BYTE)
    with pytest.raises(RuntimeError, match="a group was issued before its barrier: 1 arrival"):
        run([(step, 1)], 64, clock=BYTE, early_issue=True)


# -- steps of real models


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn_bn", "bert", "lstm"])
def test_copies_of_small_models(name: str) -> None:
    zoo = SMALL[name]
    model = zoo.build()
    step = wf.Step(model, step=zoo.step, optimizer=zoo.optimizer(model.parameters()))
    batch = zoo.batch(4, None)
    offsets, planned = step.footprint_for(batch).offsets(), step.plan_for(batch)
    offsets.check()
    for life in offsets.lives:
        touched = {*life.reads, *life.writes}
        assert min(touched) == life.birth == life.writes[0] and max(touched) <= life.death
    job = SimulatedJob(name, offsets, planned.persistent, planned.batch, steps=3)
    grouped = dataclasses.replace(job, ends=tuple(group.end for group in planned.groups))
    for each in (job, grouped):
        memory = 3 * (job.persistent + job.batch) + round(offsets.height * 1.3)
        done = simulate([each] * 3, memory=memory, clock=Clock(stalled=100, stall_ns=10_000))
        assert done.steps == (3, 3, 3) and done.peak <= memory and done.waits
        assert arena_of([each] * 3, memory) == done.arena


def test_wrong_steps_are_refused() -> None:
    with pytest.raises(ValueError, match="a step of 1 groups needs a time for each"):
        _C.SimulatedStep([1], [0], [], [0, 0], [])
    with pytest.raises(ValueError, match="a step of 1 groups needs a time for each"):
        _C.SimulatedStep([1], [0], [[]], [0, 0], [])
    step = _C.SimulatedStep([100], [0], [[(1, 0, 0)]], [0, 0], [])
    with pytest.raises(ValueError, match="reaches 100 bytes does not fit into an arena of 64"):
        run([(step, 1)], 64, clock=BYTE)
