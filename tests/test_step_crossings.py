"""How often a settled step crosses into Python's functions and into C++: each call costs, and holds the interpreter lock."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from waterflow import _C

BATCH = torch.randn(4, 4), torch.randn(4, 2)


def crossings(work: Callable[[], object]) -> Counter[str]:
    """Frames of Python, and calls into the extension, of one call."""
    found = Counter[str]()

    def count(frame: FrameType, event: str, called: Any) -> None:
        if event == "call":
            found["frames"] += 1
        elif event == "c_call" and "waterflow" in (getattr(called, "__module__", None) or type(called.__self__).__module__):
            found["calls"] += 1

    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
    return found


def settled(engine: wf.Engine | None = None, loss: Any = F.mse_loss) -> wf.Step:
    model = nn.Linear(4, 2)
    step = wf.Step(model, loss=loss, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), engine=engine, audit=10**6)
    for _ in range(10):
        step(BATCH)
    return step


@pytest.mark.parametrize(("inside", "frames", "calls"), [(False, 15, 3), (True, 20, 4)])
def test_a_settled_step(inside: bool, frames: int, calls: int) -> None:
    with wf.Engine("cpu", memory="64MiB", lanes=1) as engine:
        step = settled(engine if inside else None)
        found = crossings(lambda: step(BATCH))
        assert found["frames"] <= frames and found["calls"] <= calls
        step.close()


def test_steps_of_a_job_over_a_list() -> None:
    with wf.Engine("cpu", memory="64MiB", lanes=1) as engine:
        step, losses = settled(engine), list[torch.Tensor]()
        found = crossings(lambda: step.run_ahead([BATCH] * 32, _C.Flag(), losses))
        assert len(losses) == 32 and found["frames"] < 32
        step.close()
