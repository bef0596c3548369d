"""The largest batch: what a slow search finds, for one job alone and for several that share an arena."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import torch
from torch import nn

import waterflow as wf
from benchmarks.copies import limit_for, lossless_for
from waterflow.executor.program import capture_budget
from waterflow.planner.gpus import gpu
from waterflow.planner.search import largest_batch, largest_mix, run_copies, search_sizes
from waterflow.planner.simulate import Clock
from waterflow.planner.step_sizes import StepSizes


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def sizes_of(norm: bool = False, **options: Any) -> StepSizes:
    layers: list[nn.Module] = [nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)]
    if norm:
        layers.insert(1, nn.BatchNorm1d(64))
    model = nn.Sequential(*layers)
    step = wf.Step(model, loss=loss, optimizer=torch.optim.AdamW(model.parameters()), **options)
    return StepSizes(step, (torch.zeros(4, 32), torch.zeros(4, 8)))


@pytest.mark.parametrize("copies", [1, 2, 4])
def test_the_next_one_does_not_fit(copies: int) -> None:
    sizes = sizes_of()
    memory = 300_000
    found = largest_batch(sizes, memory=memory, copies=copies)

    def needed(size: int) -> int:
        at = sizes.at(size)
        if copies == 1:
            return at.persistent + at.batch + max(at.offsets.resident)
        return -(-copies * (at.persistent + at.batch) // 64) * 64 + at.offsets.height

    assert needed(found.size) <= memory < needed(found.size + 1)
    assert sizes.captures <= 10
    assert (found.run is None) == (copies == 1)
    if found.run is not None:
        assert found.run.peak <= memory and found.run.steps == (12,) * copies


def test_copies_take_from_each_other_only_what_they_hold_all_the_time() -> None:
    sizes = sizes_of()
    alone = largest_batch(sizes, memory="1MiB")
    each = [largest_batch(sizes, memory="1MiB", copies=n).size for n in (2, 3, 4)]
    assert sorted(each, reverse=True) == each
    for copies, size in zip((2, 3, 4), each):
        assert 0.98 * lossless_for(alone, copies) < size / alone.size < 1.02 * lossless_for(alone, copies)
        assert limit_for(alone, copies) <= lossless_for(alone, copies)


def test_a_smaller_batch_runs_more_side_by_side() -> None:
    sizes = sizes_of()
    size = largest_batch(sizes, memory="1MiB", copies=2).size
    clock = Clock(
        dataclasses.replace(gpu("v100-32g"), bus_rate=10**6)
    )  # batches of so small a network would take longer to come than to train on
    tight = run_copies(sizes, size, memory="1MiB", copies=2, steps=8, clock=clock)
    easy = run_copies(sizes, size // 2, memory="1MiB", copies=2, steps=8, clock=clock)
    assert tight.overlap < easy.overlap


def test_another_job_stands_beside() -> None:
    sizes, other = sizes_of(), sizes_of().at(500).job("other", steps=2)
    alone = largest_batch(sizes, memory="1MiB")
    found = largest_batch(sizes, memory="1MiB", beside=[other])
    assert found.run is not None and found.run.steps == (12, 2) and found.size < alone.size
    # Where the other one is the higher of the two, it alone decides how large the arena has to be.
    held = found.step.persistent + found.step.batch + other.persistent + other.batch
    needed = -(-held // 64) * 64 + max(found.step.offsets.height, other.offsets.height)
    assert 2**20 - 2 * (found.step.alone - found.step.persistent) / found.size < needed <= 2**20


@pytest.mark.slow
def test_normalization_over_the_batch() -> None:
    sizes = sizes_of(norm=True)
    assert sizes.smallest().size == 2
    assert largest_batch(sizes, memory="200kB", copies=2).size > 2


def test_not_even_the_smallest_batch() -> None:
    with pytest.raises(wf.MemoryLimitError, match=r"'Sequential' with a batch of 1, .* need .* Train fewer"):
        largest_batch(sizes_of(), memory=40_000, copies=2)


def test_what_cannot_vary() -> None:
    sizes = sizes_of()
    with pytest.raises(wf.InvalidJobError, match="copies=0"):
        largest_batch(sizes, memory=10**6, copies=0)
    with pytest.raises(wf.InvalidJobError, match="dimension that can vary"):
        StepSizes(sizes.step, (torch.tensor(1.0),))


@pytest.mark.parametrize("limit", [5, 6, 99, 100, 101, 4000, 4242])
@pytest.mark.parametrize("power", [0.5, 1, 2])
def test_the_search_needs_no_line(limit: int, power: float) -> None:
    asked = []

    def needed(size: int) -> int:
        asked.append(size)
        return int(5 * size**power)

    found = search_sizes(needed, 1, limit)
    assert needed(found) <= limit < needed(found + 1)
    assert len(set(asked)) < (8 if power == 1 else 70)


class Stepped(nn.Module):
    """Another graph from batches of 50 on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.exp().tanh() if x.shape[0] >= 50 else x.exp()) * torch.ones(32)


@pytest.mark.parametrize("memory", [60_000, 110_000, 400_000])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_step_that_changes_with_its_batch(copies: int, memory: int) -> None:
    model = nn.Sequential(nn.Linear(32, 32), Stepped())
    step = wf.Step(model, loss=loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    batch = (torch.zeros(8, 32), torch.zeros(8, 32))
    found = largest_batch(StepSizes(step, batch), memory=memory, copies=copies).size
    fresh = StepSizes(step, batch)

    def needed(size: int) -> int:
        at = fresh.captured(size)
        if copies == 1:
            return at.alone
        return -(-copies * at.held // 64) * 64 + at.offsets.height

    assert needed(found) <= memory < needed(found + 1)


def test_sizes_on_a_line_are_those_that_are_captured() -> None:
    believed, captured = (sizes_of(early_updates=False) for _ in range(2))
    believed.at(4), believed.at(100)
    for size in (3, 7, 33, 129, 1000):
        one, other = believed.at(size), captured.captured(size)
        assert one == other and one.footprint.same_shape(other.footprint) and one.groups == other.groups
        assert one.offsets == other.offsets and one.offsets.costs == other.offsets.costs
    assert believed.captures == 2


@pytest.mark.parametrize("copies", [1, 2])
def test_an_answer_costs_a_few_captures(copies: int) -> None:
    sizes = sizes_of()
    largest_batch(sizes, memory=300_000, copies=copies)
    assert sizes.captures <= 5


def test_a_search_captures_more_sizes_than_a_job_in_training_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_budget, "FREE_CAPTURES", 2)
    sizes = sizes_of()
    largest_batch(sizes, memory=300_000)
    assert sizes.captures > 2


class Recurrent(nn.Module):
    """oneDNN's recurrent layer, whose workspace no shape tells."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.LSTM(32, 24, batch_first=True), nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.last(self.layer(x)[0])
        return made


def recurrent() -> StepSizes:
    model = Recurrent()
    step = wf.Step(model, loss=loss, optimizer=torch.optim.Adam(model.parameters()))
    return StepSizes(step, (torch.zeros(4, 9, 32), torch.zeros(4, 9, 8)))


def test_memory_that_no_shape_tells_is_in_each_answer() -> None:
    sizes, fresh = recurrent(), recurrent()
    for memory, copies in ((4_000_000, 1), (4_000_000, 2), (2_500_000, 2), (1_500_000, 1)):
        before = sizes.captures
        found = largest_batch(sizes, memory=memory, copies=copies)
        assert sizes.captures - before <= (4 if before == 0 else 2)
        for size, fits in ((found.size, True), (found.size + 1, False)):
            at = fresh.captured(size)
            needed = at.alone if copies == 1 else -(-copies * at.held // 64) * 64 + at.offsets.height
            assert (needed <= memory) == fits


def test_the_collector_is_left_as_it_was() -> None:
    assert gc.isenabled()
    largest_batch(sizes_of(), memory=300_000)
    assert gc.isenabled()
    gc.disable()
    try:
        largest_batch(sizes_of(), memory=300_000)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_different_jobs_get_the_same_share() -> None:
    one, other = sizes_of(), sizes_of(norm=True)
    found = largest_mix([one, other, one], memory="1MiB")
    shares = [step.size / alone.size for step, alone in zip(found.steps, found.alone)]
    assert max(shares) - min(shares) < 1 / min(alone.size for alone in found.alone)
    # The limits count batches of the largest size alone as held; here they are smaller, and a large part of it all.
    assert all(share > limit for share, limit in zip(shares, found.limits))
    assert found.run.steps == (12, 12, 12) and found.run.peak <= 2**20
    # One more of the largest, and the others in proportion, would not fit.
    lead = max(range(3), key=lambda i: found.alone[i].size)
    more = [max(1, int((found.steps[lead].size + 1) * alone.size / found.alone[lead].size)) for alone in found.alone]
    steps = [job.at(size) for job, size in zip((one, other, one), more)]
    held = sum(step.held for step in steps)
    assert -(-held // 64) * 64 + max(step.offsets.height for step in steps) > 2**20


@pytest.mark.slow
def test_a_small_share_of_a_job_that_takes_no_batch_of_one() -> None:
    wide = nn.Sequential(nn.Linear(32, 4096), nn.BatchNorm1d(4096), nn.ReLU(), nn.Linear(4096, 8))
    step = wf.Step(wide, loss=loss, optimizer=torch.optim.SGD(wide.parameters(), lr=0.1))
    large, tiny = StepSizes(step, (torch.zeros(4, 32), torch.zeros(4, 8))), sizes_of()
    alone = largest_batch(large, memory="1400kB").size
    assert alone < 10
    found = largest_mix([large, tiny], memory="1400kB")
    assert found.steps[0].size == 2 and found.run.peak <= 1_400_000
