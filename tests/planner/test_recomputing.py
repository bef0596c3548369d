"""The largest batch with recomputation: what an engine takes, and no larger one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import waterflow as wf
from tests.support import images
from tests.test_recompute import Deep
from waterflow.executor.engine import Engine
from waterflow.planner.search import largest_batch, largest_recomputed
from waterflow.planner.step_sizes import StepSizes

MEMORY = 2_000_000


def sizes_of(model: nn.Module | None = None, **options: Any) -> StepSizes:
    model = model if model is not None else Deep()
    step = wf.Step(model, loss=nn.functional.cross_entropy, optimizer=torch.optim.AdamW(model.parameters()), **options)
    return StepSizes(step, images(1, size=256, shape=(32,))[0])


def train(size: int, recompute: Any = None) -> wf.JobResult:
    job = wf.Job(
        "deep", Deep, images(1, size=size, shape=(32,)), torch.optim.AdamW, loss=nn.functional.cross_entropy, seed=1,
        recompute=recompute,
    )  # fmt: skip
    with Engine(memory=MEMORY, lanes=1, reserve=0) as engine:
        return wf.train([job], engine=engine)[0]


@pytest.mark.slow
def test_what_an_engine_takes_and_no_more() -> None:
    sizes = sizes_of(recompute="auto")
    plain = largest_batch(sizes, memory=MEMORY).size
    before = sizes.step._bound_steps._captures.copy()
    running = StepSizes(sizes.step, images(1, size=256, shape=(32,))[0], batches_held=2)
    found = largest_recomputed(running, MEMORY, plain)
    assert found is not None
    step, cost = found
    assert step.size > 1.5 * plain
    assert len(sizes.step._bound_steps._captures) - len(before) <= 8
    step.offsets.check()
    assert step.held == step.persistent + 2 * step.batch and step.held + step.offsets.height <= MEMORY
    assert train(step.size, "auto").recomputed == cost and cost.share_of_bytes > 0
    with pytest.raises(wf.MemoryLimitError):
        train(step.size + 1, "auto")
    with pytest.raises(wf.MemoryLimitError):
        train(step.size)


@pytest.mark.slow
def test_where_nothing_is_known_to_fit_without() -> None:
    sizes = sizes_of(recompute="auto")
    plain = largest_batch(sizes, memory=MEMORY).size
    one, other = largest_recomputed(sizes, MEMORY, 0), largest_recomputed(sizes, MEMORY, plain)
    assert one is not None and other is not None and one[0].size == other[0].size


def test_nothing_to_drop() -> None:
    sizes = sizes_of(nn.Linear(32, 4), recompute="auto")
    assert largest_recomputed(sizes, MEMORY, largest_batch(sizes, memory=MEMORY).size) is None
    assert largest_recomputed(sizes, 1000, 0) is None


def test_a_height_that_no_batch_is_brought_to() -> None:
    with pytest.raises(
        wf.MemoryLimitError,
        match=r"'Deep' with a batch of 2 is .* higher at best than its recompute= of 8\.8 KiB says\. Allow at least",
    ):
        largest_batch(sizes_of(recompute=9000), memory=MEMORY)


@pytest.mark.slow
@pytest.mark.parametrize("height", [300_000, 900_000, MEMORY])
@pytest.mark.parametrize("copies", [1, 2])
def test_a_height_in_bytes(copies: int, height: int) -> None:
    sizes, fresh = sizes_of(recompute=height), sizes_of(recompute=height)
    found = largest_batch(sizes, memory=MEMORY, copies=copies)
    assert sizes.captures <= 16

    def needed(size: int) -> int:
        at = fresh.captured(size)
        own = copies * at.held + (at.resident if copies == 1 else at.offsets.height)
        assert at.within == (fresh.lowest(size) <= height) and (not at.within or at.offsets.height <= height)
        return own if at.within else MEMORY + 1

    assert needed(found.size) <= MEMORY < needed(found.size + 1)
    plain = largest_batch(sizes.without_recomputing(), memory=MEMORY, copies=copies)
    assert plain.size == largest_batch(sizes_of(), memory=MEMORY, copies=copies).size
    assert (found.size > plain.size) == (height == 900_000)
