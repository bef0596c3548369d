"""Policies on small jobs: orders worked by hand, and what holds of every replay."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import nn

import waterflow as wf
from benchmarks.baselines import Banker, Dynamic, Policy, Waterwave, WaterwaveS, largest_batch_under
from benchmarks.baselines.largest import _search
from benchmarks.baselines.pool_replay import PoolStep, live_after, pool_steps, replay_pairs
from benchmarks.baselines.waterwave import cut, groups_ahead, order_of_groups, pair_groups
from waterflow.partition.plan.costs import Cost
from waterflow.partition.plan.liveness import Lifetime
from waterflow.partition.plan.offsets import Offsets, place
from waterflow.planner.gpus import GPU
from waterflow.planner.simulate import Clock, SimulatedJob
from waterflow.training.batch_size import StepSizes, largest_batch

PLENTY = 1 << 46
# An operation of the plans below takes 64 ns, and nothing of what others use.
BYTE = Clock(GPU("made up", 1 << 40, 0, memory_rate=1, compute_rate=1, launch_ns=64, bus_rate=1))


def text(pairs: list[Any]) -> str:
    """``J1.4|J2.1``: group 4 of job 1 on the first stream beside group 1 of job 2 on the second, as the paper counts."""
    return " ".join("|".join("-" if p is None else f"J{p[0] + 1}.{p[1] + 1}" for p in pair) for pair in pairs)


# -- the order of groups, worked by hand from algorithm 1


def test_two_equal_jobs() -> None:
    # Two jobs of two allocation and two deallocation groups; f_numANG = 2, p = 0: idx1 = 0, idx2 = 2.
    # Job 1: allocation groups to av[0], av[1] (idx1 = 2); deallocation groups to dv[2], dv[3] (idx2 = 4).
    # Job 2: allocation groups to av[2], av[3] (idx1 = 4). It is the last, but idx2 = 4 = idx1: no place beside job 1 is
    #        empty, so its deallocation groups go to dv[4], dv[5].
    assert text(pair_groups([(2, 4), (2, 4)], 0)) == "J1.1|- J1.2|- J2.1|J1.3 J2.2|J1.4 -|J2.3 -|J2.4"


def test_two_equal_jobs_with_room_for_a_group() -> None:
    # p = 1: offset = f_numANG - p = 1, so job 2's first group goes to dv[1], beside job 1's last allocation group.
    # Job 1: av[0], av[1]; dv[2], dv[3]; idx1 = 2, idx2 = 4. Job 2: group 1 to dv[1], group 2 to av[2] (idx1 = 3).
    # It is the last, and idx2 = 4 > idx1 = 3: group 3 to av[3] (idx1 = 4), beside job 1's last; group 4 to dv[4].
    assert text(pair_groups([(2, 4), (2, 4)], 1)) == "J1.1|- J1.2|J2.1 J2.2|J1.3 J2.3|J1.4 -|J2.4"


def test_jobs_with_different_numbers_of_groups() -> None:
    # Job 1 of 4 + 4 groups, job 2 of 2 + 2; p = 0: idx1 = 0, idx2 = 4.
    # Job 1: av[0..3] (idx1 = 4), dv[4..7] (idx2 = 8). Job 2: allocation groups to av[4], av[5] (idx1 = 6), then, as the
    # last job and while idx2 = 8 > idx1, its deallocation groups to av[6], av[7].
    assert text(pair_groups([(4, 8), (2, 4)], 0)) == ("J1.1|- J1.2|- J1.3|- J1.4|- J2.1|J1.5 J2.2|J1.6 J2.3|J1.7 J2.4|J1.8")


def test_a_job_that_allocates_longer_than_the_one_before_deallocates() -> None:
    # Job 1 of 1 + 1 groups, job 2 of 3 + 1 (equally many would be sorted otherwise; this is the algorithm alone), p = 0.
    # Job 1: av[0], dv[1]; idx1 = 1, idx2 = 2. Job 2: av[1], av[2], av[3] (idx1 = 4). As printed, its group 4 would go to
    # dv[2], beside group 2 of the same job; in strict sequence it goes behind group 3, to dv[4].
    assert text(pair_groups([(1, 2), (3, 4)], 0)) == "J1.1|- J2.1|J1.2 J2.2|- J2.3|- -|J2.4"


def test_three_jobs_as_in_figure_5() -> None:
    # 6, 4 and 4 groups, half of them allocation groups; f_numANG = 3, p = 0: idx1 = 0, idx2 = 3.
    # Job 1: av[0..2] (idx1 = 3), dv[3..5] (idx2 = 6).
    # Job 2: av[3], av[4] (idx1 = 5); not the last: dv[6], dv[7] (idx2 = 8).
    # Job 3: av[5], av[6] (idx1 = 7); the last, idx2 = 8 > 7: group 3 to av[7] (idx1 = 8); group 4 to dv[8].
    # The paper's text names two pairs of this figure: J1NG4 with J2NG1, and J2NG3 with J3NG2.
    pairs = text(pair_groups([(3, 6), (2, 4), (2, 4)], 0))
    assert pairs == "J1.1|- J1.2|- J1.3|- J2.1|J1.4 J2.2|J1.5 J3.1|J1.6 J3.2|J2.3 J3.3|J2.4 -|J3.4"
    assert "J2.1|J1.4" in pairs and "J3.2|J2.3" in pairs


def test_room_beside_the_first_job() -> None:
    assert groups_ahead(arena=100, peak=70, split_size=10) == 2  # three groups fit, less the one that waits
    assert groups_ahead(arena=100, peak=95, split_size=10) == -1
    # As many as the first job has: the second starts with it.
    assert text(pair_groups([(2, 4), (2, 4)], 9)) == "J1.1|J2.1 J1.2|J2.2 J2.3|J1.3 J2.4|J1.4"


counts = st.tuples(st.integers(1, 6), st.integers(0, 6)).map(lambda pair: (pair[0], sum(pair)))


@given(st.lists(counts, min_size=1, max_size=5), st.integers(-2, 8))
def test_every_group_comes_once_and_in_order(jobs: list[tuple[int, int]], ahead: int) -> None:
    pairs = pair_groups(jobs, ahead)
    for job, (_, count) in enumerate(jobs):
        at = [[i for i, pair in enumerate(pairs) if (job, group) in pair] for group in range(count)]
        assert all(len(found) == 1 for found in at)
        assert all(one < other for (one,), (other,) in pairwise(at))  # never two of one job in one pair
    assert sum(p is not None for pair in pairs for p in pair) == sum(count for _, count in jobs)


# -- groups of a step


def plan(*lives: tuple[int, int, int]) -> Offsets:
    """Pieces (birth, death, size)."""
    operations = max(death for _, death, _ in lives) + 1
    pieces = [Lifetime(b, d, size, reads=(d,) if d > b else (), writes=(b,)) for b, d, size in lives]
    return place(pieces, operations, costs=(Cost(launches=1),) * operations)


def hill(layers: int, size: int = 256) -> Offsets:
    """A forward pass that keeps a piece a layer, and a backward pass that lets them go, last first."""
    return plan(*((i, 2 * layers - 1 - i, size) for i in range(layers)))


def test_groups_of_a_hill() -> None:
    # Live behind operations 0 to 11: 1 2 3 4 5 6 5 4 3 2 1 0 pieces; the most are live while operation 5 runs.
    groups = cut(hill(6), 2 * 256)
    assert (groups.ends, groups.allocating) == ((2, 4, 6, 8, 10, 12), 3)
    # Groups of four: two are left on each side.
    assert cut(hill(6), 4 * 256).ends == (4, 6, 10, 12)
    assert Waterwave(groups=6)._cut(hill(6)).ends == groups.ends


GOLDEN = json.loads((Path(__file__).parent / "golden" / "waterwave_three_jobs.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{case['memory']} pieces")
@pytest.mark.parametrize("given", ["CAB", "ABC", "BCA"])
def test_the_order_of_three_small_jobs_worked_by_hand(case: dict[str, Any], given: str) -> None:
    told, piece = GOLDEN["jobs"], 256
    jobs = [SimulatedJob(name, hill(told["layers"][name])) for name in given]
    cuts = [cut(job.offsets, told["split_size"] * piece) for job in jobs]
    assert {job.name: list(groups.ends) for job, groups in zip(jobs, cuts)} == told["group_ends"]
    pairs = order_of_groups(jobs, cuts, case["memory"] * piece)
    streams = [[p and f"{given[p[0]]}{p[1] + 1}" for p in stream] for stream in zip(*pairs)]
    assert streams == [case["av"], case["dv"]]


@st.composite
def steps(draw: st.DrawFn) -> Offsets:
    operations = draw(st.integers(2, 12))
    lives = []
    for _ in range(draw(st.integers(1, 24))):
        birth = draw(st.integers(0, operations - 1))
        lives.append((birth, draw(st.integers(birth, operations - 1)), 64 * draw(st.integers(1, 40))))
    pieces = [Lifetime(b, d, size, reads=(d,) if d > b else (), writes=(b,)) for b, d, size in lives]
    return place(pieces, operations, costs=(Cost(launches=1),) * operations)


def live_behind(offsets: Offsets, operation: int) -> int:
    return sum(life.size for life in offsets.lives if life.birth <= operation < life.death)


@given(steps(), st.integers(64, 4000))
def test_groups_change_by_the_split_size(offsets: Offsets, split_size: int) -> None:
    groups = cut(offsets, split_size)
    behind = [live_behind(offsets, i) for i in range(len(offsets.heights))]
    assert live_after(offsets) == behind
    assert list(groups.ends) == sorted(set(groups.ends)) and groups.ends[-1] == len(behind)
    summit = groups.ends[groups.allocating - 1]
    assert offsets.resident[summit - 1] == max(offsets.resident)
    for begin, end in zip((0, *groups.ends), groups.ends):
        change = [behind[i] - (behind[begin - 1] if begin else 0) for i in range(begin, end)]
        if end <= summit:  # at most the split size, and the next operation would not have fitted
            assert max(change[1:], default=0) <= split_size
            assert end == summit or behind[end] - (behind[begin - 1] if begin else 0) > split_size
        else:  # no longer than needed, and at least the split size but for the last
            assert min(change[:-1], default=0) > -split_size
            assert change[-1] <= -split_size or end == len(behind)


# -- replays


def rounded(offsets: Offsets) -> int:
    """The most that is live at once, in pieces of multiples of 256 bytes."""
    return max(
        sum(-(-life.size // 256) * 256 for life in offsets.lives if life.birth <= i <= life.death)
        for i in range(len(offsets.heights))
    )


@settings(deadline=None)
@given(st.lists(steps(), min_size=1, max_size=3), st.integers(1, 6), st.integers(0, 3), st.integers(0, 30_000))
def test_replays_stay_within_their_limit(offsets: list[Offsets], share: int, ahead: int, limit: int) -> None:
    jobs = [SimulatedJob(str(i), one, forward=1) for i, one in enumerate(offsets)]
    cuts = [cut(one, max(1, max(one.resident) // share)) for one in offsets]
    numbers = pair_groups([(c.allocating, len(c.ends)) for c in cuts], ahead)

    def group(place: tuple[int, int] | None) -> tuple[int, int, int] | None:
        if place is None:
            return None
        job, i = place
        return job, cuts[job].ends[i - 1] if i else 0, cuts[job].ends[i]

    pairs = [(group(one), group(other)) for one, other in numbers]
    free = replay_pairs(pool_steps(jobs, BYTE), pairs, PLENTY, 3, check=True)
    assert not free.refused and free.requests == 3 * sum(len(one.lives) for one in offsets)
    assert max(rounded(one) for one in offsets) <= free.peak <= -(-free.reach // 256) * 256
    tight = replay_pairs(pool_steps(jobs, BYTE), pairs, limit, 3, check=True)
    assert tight.peak <= limit and tight.reach <= limit
    assert bool(tight.refused) == (tight.requests < free.requests)
    if not tight.refused:
        assert tight.peak == free.peak  # the order of requests is the same
    if limit < max(rounded(one) for one in offsets):
        assert tight.refused


def test_a_stream_takes_what_the_other_released_only_behind_it() -> None:
    # Both jobs need the whole pool at the same time of one pair: one waits for the other's last use, on the device.
    jobs = [SimulatedJob("a", plan((0, 0, 256))), SimulatedJob("b", plan((0, 0, 256)))]
    shared = replay_pairs(pool_steps(jobs, BYTE), [((0, 0, 1), (1, 0, 1))], 256, 1, check=True)
    assert not shared.refused and shared.waits == 1
    apart = replay_pairs(pool_steps(jobs, BYTE), [((0, 0, 1), (1, 0, 1))], 512, 1, check=True)
    assert apart.waits == 0
    in_turn = replay_pairs(pool_steps(jobs, BYTE), [((0, 0, 1), None), (None, (1, 0, 1))], 256, 1, check=True)
    assert not in_turn.refused and in_turn.waits == 0


def test_time_by_hand() -> None:
    # Operations of 64 ns each. Both at once: 64; with one pool of 256 bytes b waits for a; in turn it waits for the pair.
    jobs = [SimulatedJob("a", plan((0, 0, 256))), SimulatedJob("b", plan((0, 0, 256)))]
    pool = pool_steps(jobs, BYTE)

    def time(pairs: list[Any], limit: int, iterations: int = 1) -> tuple[int, int, int]:
        made = replay_pairs(pool, pairs, limit, iterations)
        return made.makespan, made.overlapped, made.alone

    together, in_turn = [((0, 0, 1), (1, 0, 1))], [((0, 0, 1), None), (None, (1, 0, 1))]
    assert time(together, 512) == (64, 64, 128)
    assert time(together, 256) == (128, 0, 128)
    assert time(in_turn, 512) == (128, 0, 128)
    assert time(together, 512, 3) == (3 * 64, 3 * 64, 3 * 128)
    # A batch of 100 ns: the first step waits for it, the next one for the copy behind the first.
    copied = pool_steps([SimulatedJob("a", plan((0, 0, 256)), batch=100)], BYTE)
    assert replay_pairs(copied, [((0, 0, 1), None)], 512, 2).makespan == 2 * (100 + 64)


def test_operations_of_a_pair_are_merged_in_proportion() -> None:
    # Job a holds 256 bytes during each of its four operations, job b 256 from its first on. b comes in the middle of a.
    a, b = plan(*((i, i, 256) for i in range(4))), plan((0, 1, 256))
    pool = pool_steps([SimulatedJob("a", a), SimulatedJob("b", b)], BYTE)
    assert replay_pairs(pool, [((0, 0, 4), (1, 0, 2))], 512, 1).peak == 512
    assert replay_pairs(pool, [((0, 0, 4), None), (None, (1, 0, 2))], 512, 1).peak == 256


def test_a_replay_refuses_operations_out_of_order() -> None:
    pool = pool_steps([SimulatedJob("a", hill(2))], BYTE)
    with pytest.raises(ValueError, match="in order: 2 came, 0 is next"):
        replay_pairs(pool, [((0, 2, 4), None)], 1024, 1)
    with pytest.raises(ValueError, match="run to its end"):
        replay_pairs(pool, [((0, 0, 2), None)], 1024, 1)
    with pytest.raises(ValueError, match="lives within the 2 operations"):
        PoolStep([(1, 0, 0)] * 2, [0], [2], [64])


def test_best_fit_fragments() -> None:
    # Two pieces around a hole of one: a piece of two does not fit, though two are free.
    offsets = plan((0, 2, 256), (0, 0, 256), (0, 2, 256), (2, 2, 512))
    job = SimulatedJob("a", offsets)
    assert max(offsets.resident) == 1024
    refused = Dynamic().run([job], 1024)
    assert not refused.fits and "256 bytes" in refused.refused
    assert Dynamic().run([job], 1280).fits


# -- policies


@settings(deadline=None, max_examples=60)
@given(st.lists(steps(), min_size=1, max_size=3), st.integers(64, 20_000), st.integers(0, 500))
def test_no_policy_beats_live_bytes(offsets: list[Offsets], memory: int, persistent: int) -> None:
    jobs = [SimulatedJob(str(i), one, persistent, 64, 2, forward=1) for i, one in enumerate(offsets)]
    floor = sum(job.persistent + job.batch for job in jobs) + max(max(one.resident) for one in offsets)
    policies: list[Policy] = [Banker(), Dynamic(), Waterwave(512), Waterwave(groups=4), WaterwaveS()]
    for policy in policies:
        outcome = policy.run(jobs, memory)
        assert outcome.fits == policy.fits(jobs, memory) == (not outcome.refused)
        if outcome.fits:
            assert floor <= memory and outcome.peak <= memory


def test_what_is_refused_before_anything_runs() -> None:
    for policy in (Dynamic(), Waterwave(512), WaterwaveS()):
        outcome = policy.run([SimulatedJob("a", hill(2), persistent=900, forward=2)], 800)
        assert not outcome.fits and "take 900 of 800 bytes" in outcome.refused
    with pytest.raises(wf.InvalidJobError, match="of 4 operations says None"):
        WaterwaveS().run([SimulatedJob("a", hill(2))], 4096)
    for wrong in ({}, {"split_size": 1, "groups": 2}, {"split_size": 0}, {"groups": 3}):
        with pytest.raises(wf.InvalidJobError):
            Waterwave(**wrong)


# -- the largest batch


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 80))
def test_the_search_ends_where_the_next_sizes_do_not_fit(pattern: list[bool], guess: int) -> None:
    def fits(size: int) -> bool:
        return size == 1 or (size <= len(pattern) and pattern[size - 1])

    found = _search(fits, 1, guess, 4)
    assert fits(found) and not any(fits(found + i) for i in range(1, 5))
    spread = _search(fits, 1, guess, 4, most=64)
    assert fits(spread) and spread >= max((size for size in range(64, 0, -2) if fits(size)), default=1)


@given(st.integers(1, 300), st.integers(1, 300))
def test_the_search_finds_the_one_edge(edge: int, guess: int) -> None:
    assert _search(lambda size: size <= edge, 1, guess, 2) == edge


def network() -> tuple[StepSizes, int]:
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
    model = nn.Sequential(*layers)
    step = wf.Step(
        model, loss=lambda output, target: ((output - target) ** 2).mean(), optimizer=torch.optim.SGD(model.parameters())
    )
    batch = (torch.zeros(4, 64), torch.zeros(4, 64))
    return StepSizes(step, batch)


def test_the_largest_batch_of_each_policy() -> None:
    sizes = network()
    assert sizes.at(4).footprint.forward == 6 * 2 + 3  # layers, then difference, square and mean
    memory = 2_000_000
    alone = largest_batch(sizes, memory=memory).size
    found = {
        policy.name: largest_batch_under(policy, sizes, memory=memory, copies=2, most=alone)
        for policy in (Banker(), Dynamic(), Waterwave(100_000), WaterwaveS())
    }
    ours = largest_batch(sizes, memory=memory, copies=2, steps=3)
    assert found["banker"].size == ours.size and ours.run is not None
    assert found["banker"].outcome.speed == ours.run.speed
    for one in found.values():
        assert one.size <= alone and one.outcome.fits and one.outcome.peak <= memory
        looked = dict(one.looked)
        assert looked[one.size] and not any(looked[one.size + i] for i in range(1, 5))
    assert found["waterwave-s"].size < found["banker"].size
    with pytest.raises(wf.MemoryLimitError, match="under dynamic"):
        largest_batch_under(Dynamic(), sizes, memory=60_000, copies=2)
