"""Products by another library: close, and only where bits may differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from waterflow.executor.program import kernel_selection
from waterflow.executor.program.capture_cache import captures

BATCHES = [(torch.randn(128, 64), torch.randint(64, (128,))) for _ in range(4)]


def job(**changes: Any) -> wf.Job:
    settings: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64, bias=False)), "data": BATCHES,
        "loss": F.cross_entropy, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "epochs": 3, "seed": 0,
    }  # fmt: skip
    return wf.Job(name="one", **(settings | changes))


@pytest.fixture(autouse=True)
def always_faster(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    captures.clear()
    monkeypatch.setattr(kernel_selection, "_found", {})
    seen: list[Any] = []
    monkeypatch.setattr(kernel_selection, "measure", lambda *ways: seen.append(ways) or True)
    return seen


@pytest.mark.parametrize("turned", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("shape", [(1, 1, 1), (7, 5, 3), (64, 100, 33), (512, 128, 1000)])
def test_products(shape: tuple[int, int, int], turned: tuple[bool, bool]) -> None:
    m, k, n = shape
    a = torch.randn(k, m).t() if turned[0] else torch.randn(m, k)
    b = torch.randn(n, k).t() if turned[1] else torch.randn(k, n)
    c = torch.randn(n)
    for mine, reference in (
        (torch.ops.waterflow.mm(a, b), a.double() @ b.double()),
        (torch.ops.waterflow.addmm(c, a, b), c.double() + a.double() @ b.double()),
    ):
        assert mine.is_contiguous() and mine.dtype == torch.float32
        torch.testing.assert_close(mine.double(), reference, rtol=1e-4, atol=1e-4)


def test_steps_that_may_round_otherwise_are_close(always_faster: list[Any]) -> None:
    exact = wf.train([job()], memory="1GiB")[0]
    assert not always_faster
    close = wf.train([job()], memory="1GiB", exact=False, mode="lanes")[0]
    assert len(always_faster) >= 4
    torch.testing.assert_close(torch.tensor(close.losses), torch.tensor(exact.losses), rtol=1e-4, atol=1e-5)
    again = wf.train([job()], memory="1GiB")[0]
    assert again.losses == exact.losses


def test_double_precision_stays(always_faster: list[Any]) -> None:
    batches = [(x.double(), y) for x, y in BATCHES]
    wf.train([job(model=lambda: nn.Linear(64, 64).double(), data=batches)], memory="1GiB", exact=False, mode="lanes")
    assert not always_faster


def test_recomputing_steps_round_the_same(always_faster: list[Any]) -> None:
    def deep() -> nn.Module:
        return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.GELU())))

    plain = wf.train([job(model=deep)], memory="1GiB", exact=False, mode="lanes")[0]
    low = wf.train([job(model=deep, recompute=400_000)], memory="1GiB", exact=False, mode="lanes")[0]
    assert low.recomputed is not None and low.losses == plain.losses
