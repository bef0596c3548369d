"""The loop in C++ beside which the smallest steps are measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.nn import functional as F

from benchmarks import door
from waterflow import _C


def test_the_loop_in_cpp_trains_as_torch_does(tmp_path: Path) -> None:
    model, optimizer, (x, y) = door.perceptron()
    losses = []
    for _ in range(5):
        loss = F.mse_loss(model(x), y)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    before = _C.denormals_here()
    assert door.floor(str(tmp_path))(5) == pytest.approx(losses[-1], rel=1e-5)
    assert _C.denormals_here() == before
    assert losses[-1] < losses[0]
