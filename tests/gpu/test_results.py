"""Results are whole on the stream of whoever takes them, and stay so while that stream still reads them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf

ROWS, WIDTH = 1024, 64  # a metric of 256 KiB
LATE = 200_000_000  # cycles that a stream of a real GPU sleeps; the stand-in is late by itself
swapped = threading.Event()


@torch.library.custom_op("waterflow_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Asks for a temporary and for its result, in one order or the other."""
    one, other = torch.empty_like(x), torch.empty_like(x)
    temporary, result = (other, one) if swapped.is_set() else (one, other)
    torch.add(x, 0, out=temporary)
    return torch.mul(temporary, 2, out=result)


@doubled.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Branches(nn.Module):
    """What cannot be captured."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y * 2 if y.sum().item() > 0 else y


def job(
    engine: wf.Engine, compute: Callable[..., Any], seed: int, model: nn.Module | None = None
) -> tuple[wf.Step, list[tuple[torch.Tensor, torch.Tensor]]]:
    torch.manual_seed(seed)
    model = (model or nn.Linear(WIDTH, 10)).cuda()
    step = wf.Step(
        model, step=compute, optimizer=torch.optim.SGD(model.parameters(), lr=2**-7), engine=engine, name=f"job {seed}"
    )
    batches = [(torch.randn(ROWS, WIDTH).cuda(), torch.randint(0, 10, (ROWS,)).cuda()) for _ in range(8)]
    torch.cuda.synchronize()
    return step, batches


def with_rows(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1]), {"rows": batch[0] * 3}


def with_bias(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch[0]), batch[1]), {"bias": model.bias}


def at_once(step: wf.Step, batch: Any) -> Any:
    return step(batch)


def later(step: wf.Step, batch: Any) -> Any:
    return step.submit(batch).result()


def again(step: wf.Step, batch: Any) -> Any:
    future = step.submit(batch)
    with torch.cuda.stream(torch.cuda.default_stream()):
        future.result()
    return future.result()


@pytest.mark.parametrize("graphs", [False, True])
def test_copies_are_made_before_the_caller_reads_them(graphs: bool) -> None:
    side = torch.cuda.Stream()
    with wf.Engine("cuda", memory="1GiB", lanes=1, device_graphs=graphs) as engine:
        step, batches = job(engine, with_bias, 0)
        for batch in batches:
            with torch.cuda.stream(side):
                read = later(step, batch)[1]["bias"].clone()  # a thread of the lane's runs the step
            side.synchronize()
            assert torch.equal(read.cpu(), step.model.bias.detach().cpu())


@pytest.mark.parametrize("way", [at_once, later, again])
@pytest.mark.parametrize("kind", ["plain", "graphs", "eager"])
def test_a_result_that_is_dropped_is_not_given_away_while_it_is_read(kind: str, way: Callable[..., Any]) -> None:
    side = torch.cuda.Stream()
    with wf.Engine("cuda", memory="1GiB", lanes=1, device_graphs=kind == "graphs") as engine:
        eager = kind == "eager"
        mine, batches = job(engine, with_rows, 1, Branches() if eager else None)
        other, others = job(engine, with_rows, 2, Branches() if eager else None)
        for one, two in zip(batches[:6], others):
            float(mine(one)[0]), float(other(two)[0])
        assert (mine.opaque_reason is not None) == eager
        if kind == "graphs":
            assert engine.stats().graphs["launched"] > 0
        with torch.cuda.stream(side):
            rows = way(mine, batches[6])[1]["rows"]
            torch.cuda._sleep(LATE)
            read = rows.clone()
            del rows
        for batch in others:  # on another stream, which does not wait for the reader's
            other(batch)
        side.synchronize()
        assert torch.equal(read.cpu(), batches[6][0].cpu() * 3)


def test_a_result_is_never_planned_memory() -> None:
    """Another step would be given its place while the user has it."""

    def compute(model: nn.Module, batch: Any) -> Any:
        return F.cross_entropy(model(batch[0]), batch[1]), {"doubled": doubled(batch[0])}

    swapped.clear()
    with wf.Engine("cuda", memory="1GiB", lanes=1) as engine:
        step, batches = job(engine, compute, 3)
        for batch in batches[:6]:
            float(step(batch)[0])
        assert step.opaque_reason is None and step.planned_requests > 0
        swapped.set()
        kept = step(batches[6])[1]["doubled"]
        assert engine.native.detached == 0, "the step has left its place in the arena to the result"
        assert torch.equal(kept.cpu(), batches[6][0].cpu() * 2)
