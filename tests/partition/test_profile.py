"""Heights: as predicted from a graph, as profiled, and as an independent allocator counts them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from waterflow._C import CountingAllocator

import waterflow as wf
from benchmarks.zoo import FULL, SMALL, ZooModel
from tests.support import Net, images
from waterflow.partition.liveness import OperationMemory
from waterflow.partition.profile import profiled_memory, same_requests


def counted(step: wf.Step, batch: Any) -> int:
    """The most that torch's allocator held during a step, above what was there before."""
    CountingAllocator.start()
    try:
        step(batch)
        return CountingAllocator.peak()
    finally:
        CountingAllocator.stop()


def heights_of(zoo: ZooModel, size: int) -> tuple[int, int, int]:
    """(predicted, measured, counted) bytes of a step."""
    torch.manual_seed(0)
    model = zoo.build()
    job = wf.Step(model, step=zoo.step, optimizer=zoo.optimizer(model.parameters()))
    batch = zoo.batch(size, torch.Generator().manual_seed(0))
    predicted = job.plan_for(batch).height
    for _ in range(5):
        job(batch)
    assert job.plan.measured
    return predicted, job.plan.height, counted(job, batch)


def check(predicted: int, measured: int, seen: int) -> None:
    assert measured == pytest.approx(seen, rel=0.02)
    assert predicted == pytest.approx(seen, rel=0.10)


@pytest.mark.parametrize("name", ["cnn_bn", "resnet50", "bert", "vit", "lstm", "mlp_dropout", "gpt2", "mamba"])
def test_heights(name: str) -> None:
    check(*heights_of(SMALL[name], 8))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn_bn", "resnet50", "bert", "vit"])
def test_heights_of_full_models(name: str) -> None:
    check(*heights_of(FULL[name], 8))


def test_measured_heights_are_not_below_what_is_counted() -> None:
    """A step that reaches higher than its plan would break the limit: what is measured is all that is asked for."""
    for name in ("cnn_bn", "vit", "lstm_cell"):
        _, measured, seen = heights_of(SMALL[name], 4)
        # The loss that the caller keeps is 4 bytes, the learning rate 8.
        assert measured >= seen - 64


def test_optimizer_state_and_batch_are_persistent() -> None:
    torch.manual_seed(0)
    model = Net(width=64)
    job = wf.Step(model, loss=torch.nn.functional.cross_entropy, optimizer=torch.optim.AdamW(model.parameters()))
    x, y = images(1)[0]
    job((x, y))
    parameters = sum(p.nbytes for p in model.parameters())
    buffers = sum(b.nbytes for b in model.buffers())
    steps = 4 * len(list(model.parameters()))
    assert job.plan.persistent == 3 * parameters + buffers + steps
    assert job.plan.batch == x.nbytes + y.nbytes


def test_tied_and_unused_tensors_count_once_or_not_at_all() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other, self.idle = (torch.nn.Linear(6, 6, bias=False) for _ in range(3))
            self.other.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.other(self.one(x))

    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters())
    job = wf.Step(model, step=lambda model, x: model(x).sum(), optimizer=optimizer)
    job(torch.ones(2, 6))
    # Two parameters; state for the one that is trained.
    assert job.plan.persistent == 144 * 2 + 144 * 2 + 4


def test_table_to_memory() -> None:
    table = torch.tensor([[100, 80, 10, 1], [50, -30, 20, 2], [0, -90, 30, 0], [7, 7, 40, 1]])
    predicted = [OperationMemory(0, 0, traffic) for traffic in (1, 2, 3, 4)]
    memory, seconds = profiled_memory(table, predicted)
    assert memory == [
        OperationMemory(100, 80, 1), OperationMemory(130, 50, 2), OperationMemory(50, 0, 3), OperationMemory(7, 7, 4),
    ]  # fmt: skip
    assert seconds == pytest.approx([1e-8, 2e-8, 3e-8, 4e-8])


def test_same_requests_whatever_the_times() -> None:
    table = torch.tensor([[100, 80, 10, 1], [50, -30, 20, 2]])
    for column, same in ((0, False), (1, False), (2, True), (3, False)):
        other = table.clone()
        other[1, column] += 1
        assert same_requests(table, other) == same


def test_two_equal_profiles_make_the_plan() -> None:
    torch.manual_seed(0)
    model = Net(width=51)
    job = wf.Step(model, loss=torch.nn.functional.cross_entropy, optimizer=torch.optim.AdamW(model.parameters()))
    batch = images(1, size=17)[0]
    seen = []
    for _ in range(4):
        job(batch)
        seen.append(job.plan.measured)
    # The first two steps are profiled, and run by the predicted plan.
    assert seen == [False, False, True, True]
    assert job.plan.seconds > 0 and job.measured_height == job.plan.height


def test_the_counting_allocator_counts() -> None:
    """The witness itself: blocks of all sizes, kept, dropped, and dropped after it stopped."""
    CountingAllocator.start()
    try:
        kept = torch.empty(1000)
        torch.empty(5000)
        assert (CountingAllocator.current(), CountingAllocator.peak()) == (4000, 24000)
        CountingAllocator.reset_peak()
        assert CountingAllocator.peak() == 4000
        late = torch.empty(10)
        del kept
        assert CountingAllocator.current() == 40
    finally:
        CountingAllocator.stop()
    del late
    CountingAllocator.start()
    assert CountingAllocator.current() == 0
    CountingAllocator.stop()
