"""Jobs that take as long as a test wants, and end with bits that can be compared."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf


def job(
    name: str = "a", seconds: float = 0.0, steps: int = 40, seed: int = 0, width: int = 8, gate: Path | None = None,
) -> wf.Job:  # fmt: skip
    """Dropout, momentum and a seeded order: all of a job's state counts.

    It stands still in the middle until the file ``gate`` is there.
    """

    def data() -> Iterator[Any]:
        numbers = torch.Generator().manual_seed(seed)
        for number in range(steps):
            while gate is not None and number == steps // 2 and not gate.exists():
                time.sleep(0.02)
            if seconds:
                time.sleep(seconds / steps)
            yield torch.randn(4, 6, generator=numbers), torch.randint(0, 3, (4,), generator=numbers)

    return wf.Job(
        name=name, data=data, seed=seed, epochs=1, loss=F.cross_entropy,
        model=lambda: nn.Sequential(nn.Linear(6, width), nn.Dropout(0.2), nn.Linear(width, 3)),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
    )  # fmt: skip


def undisturbed(made: wf.Job) -> wf.JobResult:
    """The same job alone, in this process."""
    return wf.train([made], lanes=1)[0]


def same_bits(one: wf.JobResult, other: wf.JobResult) -> None:
    """AssertionError unless losses and parameters are equal bit by bit."""
    assert one.losses == other.losses
    assert one.state_dict is not None and other.state_dict is not None
    for name, value in one.state_dict.items():
        assert torch.equal(value, other.state_dict[name]), name


def failing() -> wf.Job:
    raise RuntimeError("no data today")
