"""Steps under torch's profiler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

import waterflow as wf
from tests.support import MiB, Net, assert_same, images, train_eager, train_step
from waterflow.executor.engine import within

BATCHES = images(12)


def make() -> Any:
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def reads(model: Any, batch: Any) -> torch.Tensor:
    loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    return loss * (1 if loss.item() < 1e9 else 2)


@pytest.mark.parametrize("memory", [False, True], ids=["", "memory"])
@pytest.mark.parametrize("step", [None, reads], ids=["captured", "eager"])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "engine"])
def test_steps_have_their_bits_and_their_operators_show(inside: bool, step: Any, memory: bool, no_captures: Any) -> None:
    """Where memory is measured, in the first steps, the meter stands in the profiler's place."""
    expected = train_eager(make, BATCHES, step=step)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=memory) as seen, record_function("the loop"):
        if inside:
            with wf.Engine(memory=64 * MiB, lanes=2) as engine, within(engine):
                mine = train_step(make, BATCHES, step=step, engine=engine)
        else:
            mine = train_step(make, BATCHES, step=step)
    assert_same(mine, expected)
    shown = {event.key: event.count for event in seen.key_averages()}
    assert shown["the loop"] == 1 and shown["aten::nll_loss_backward"] >= 6


def test_the_profiler_of_autograd() -> None:
    expected = train_eager(make, BATCHES)
    with torch.autograd.profiler.profile():
        mine = train_step(make, BATCHES)
    assert_same(mine, expected)
