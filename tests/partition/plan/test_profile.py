"""Heights: as predicted from a graph, as profiled, and as an independent allocator counts them."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch

import waterflow as wf
from benchmarks.zoo import FULL, SMALL, ZooModel
from tests.native import count_memory
from tests.support import Net, images
from waterflow import _C
from waterflow.partition.plan.liveness import OperationMemory
from waterflow.partition.plan.profile import StepProfile, _placed


def counted(step: wf.Step, batch: Any) -> int:
    """The most that torch's allocator held during a step, above what was there before."""
    with count_memory() as count:
        step(batch)
        return count.peak


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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cnn_bn", "resnet50", "bert", "vit", "lstm", "mlp_dropout", "gpt2", "mamba"])
def test_heights(name: str) -> None:
    check(*heights_of(SMALL[name], 8))


@pytest.mark.campaign
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


def profile(table: list[list[int]], requests: list[list[int]], first: list[int], ends: list[int]) -> StepProfile:
    return StepProfile(torch.tensor(table), torch.tensor(requests), first, ends)


# Operation 0 makes 100 bytes, and 200 that die with operation 1, which makes what stays and a temporary.
TWO = ([[300, 300, 10, 2], [70, -130, 20, 2]], [[100, 0, 5], [200, 1, 4], [64, 3, -1], [6, 4, 4]], [0, 2, 4], [2, 5])


def test_table_to_memory() -> None:
    table = [[100, 80, 10, 1], [50, -30, 20, 2], [0, -90, 30, 0], [7, 7, 40, 1]]
    predicted = [OperationMemory(0, 0, traffic) for traffic in (1, 2, 3, 4)]
    memory, seconds = profile(table, [], [], []).memory(predicted)
    assert memory == [
        OperationMemory(100, 80, 1), OperationMemory(130, 50, 2), OperationMemory(50, 0, 3), OperationMemory(7, 7, 4),
    ]  # fmt: skip
    assert seconds == pytest.approx([1e-8, 2e-8, 3e-8, 4e-8])


def test_requests_to_places() -> None:
    memory, planned = profile(*TWO).place([OperationMemory(0, 0, traffic) for traffic in (7, 8)])
    assert planned.sizes == (100, 200, 64, 6) and planned.first == (0, 2, 4)
    # What outlives the step has no place, and counts on top.
    assert planned.offsets[2] == -1 and sorted(planned.offsets[:2]) in ([0, 128], [0, 256])
    assert planned.native().height == 128 + 256 + 64
    assert memory == [OperationMemory(384, 384, 7), OperationMemory(448 + 64, max(memory[1].after, 128 + 64), 8)]


def test_a_plan_with_one_overlapping_byte_is_refused() -> None:
    _, planned = profile(*TWO).place([OperationMemory(0, 0, 0)] * 2)
    low, high = sorted((0, 1), key=lambda i: planned.offsets[i])
    for lower in (64, planned.offsets[high]):
        offsets = list(planned.offsets)
        offsets[high] -= lower
        with pytest.raises(ValueError, match=r"requests 0 and 1 of a plan live at once and share bytes"):
            replace(planned, offsets=tuple(offsets)).native()
    assert planned.offsets[low] == 0


@pytest.mark.parametrize("change", [
    {"offsets": (0, 256, -1, 65)}, {"offsets": (-2, 128, -1, 512)}, {"sizes": (100, 0, 64, 6)},
    {"deaths": (5, 0, 3, 4)}, {"births": (0, 0, 3, 4)}, {"first": (0, 2, 3)}, {"first": (0, 3, 2, 4)}, {"first": ()},
    {"ends": (2,)}, {"ends": (5, 2)},
])  # fmt: skip
def test_requests_that_cannot_be_are_refused(change: dict[str, tuple[int, ...]]) -> None:
    _, planned = profile(*TWO).place([OperationMemory(0, 0, 0)] * 2)
    with pytest.raises(ValueError, match="request"):
        replace(planned, **change).native()


@pytest.mark.parametrize(("what", "same"), [("time", True), ("bytes", False), ("death", False), ("end", False)])
def test_same_requests_whatever_the_times(what: str, same: bool) -> None:
    table, requests, first, ends = (deepcopy(part) for part in TWO)
    table[0][2] += what == "time"
    requests[1][0] += what == "bytes"
    requests[1][2] += what == "death"
    ends[1] += what == "end"
    assert profile(*TWO).same_requests(profile(table, requests, first, ends)) == same


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


def test_a_profiled_step_is_placed_no_worse_than_before_it_ran() -> None:
    """Requests of a three-layer MLP, in rows of 512 and 10 floats: by ticks alone the search ends 1.5 % above what is live."""
    wide, narrow = 78_352_384, 1_530_368
    lives = [
        (0, 2, wide), (2, 39, wide), (4, 6, wide), (6, 29, wide), (8, 10, narrow), (10, 19, narrow), (13, 17, 64),
        (15, 17, 64), (17, 19, narrow), (19, 26, narrow), (21, 29, wide), (24, 47, 20_480), (26, 47, 64), (29, 36, wide),
        (31, 39, wide), (34, 47, 1_048_576), (36, 47, 2_048), (39, 44, wide), (42, 47, 1_605_632), (44, 47, 2_048),
    ]  # fmt: skip
    ends = [1, 3, 5, 7, 9, 11, 14, 16, 18, 20, 22, 23, 25, 27, 28, 30, 32, 33, 35, 37, 38, 40, 41, 43, 45, 46, 47, 48]
    offsets, heights = _placed(lives, ends)
    walked = _C.walk_offsets(lives, list(offsets), len(heights))
    assert walked.overlap is None and list(walked.during) == list(heights)
    assert max(heights) == max(sum(size for b, d, size in lives if b <= tick <= d) for tick in range(len(heights)))


def test_the_counting_allocator_counts() -> None:
    """The witness itself: blocks of all sizes, kept, dropped, and dropped after it stopped."""
    with count_memory() as count:
        kept = torch.empty(1000)
        torch.empty(5000)
        assert (count.current, count.peak) == (4000, 24000)
        count.restart()
        assert count.peak == 4000
        late = torch.empty(10)
        del kept
        assert count.current == 40
    del late
    with count_memory() as count:
        assert count.current == 0
