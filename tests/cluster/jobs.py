"""Jobs for the tests of backends: small, seeded, and as slow as a test asks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import waterflow as wf


class Batches:
    """Batches in an order that follows from a seed; each takes a while to come."""

    def __init__(self, count: int, seconds: float = 0.0, seed: int = 3) -> None:
        self.count, self.seconds, self.seed = count, seconds, seed

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        numbers = torch.Generator().manual_seed(self.seed)
        for _ in range(self.count):
            time.sleep(self.seconds)
            yield torch.randn(8, 12, generator=numbers), torch.randn(8, 1, generator=numbers)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 24), nn.Dropout(0.1), nn.ReLU(), nn.Linear(24, 1))


def jobs(count: int = 1, *, batches: int = 30, epochs: int = 2, seconds: float = 0.0) -> list[wf.Job]:
    return [
        wf.Job(
            f"net-{n}", model, Batches(batches, seconds), lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
            loss=nn.functional.mse_loss, epochs=epochs, seed=n,
            scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ) for n in range(count)
    ]  # fmt: skip


def equal(got: wf.Results, expected: wf.Results) -> None:
    """The same results, to the bit."""
    assert [r.name for r in got] == [r.name for r in expected]
    for ours, theirs in zip(got, expected):
        assert ours.status == theirs.status == "completed"
        assert ours.losses == theirs.losses and ours.metrics == theirs.metrics
        assert ours.state_dict is not None and theirs.state_dict is not None
        assert ours.state_dict.keys() == theirs.state_dict.keys()
        for name, tensor in theirs.state_dict.items():
            assert torch.equal(ours.state_dict[name], tensor), name
