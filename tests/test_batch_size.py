"""max_batch_size: the answer that the search gives, on a GPU or so much memory, and what is said of wrong questions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from waterflow.batch_size import max_batch_size
from waterflow.executor.presets import gpu
from waterflow.planner.search import largest_batch
from waterflow.planner.sizes import StepSizes


def job(name: str = "net", width: int = 64, **options: Any) -> wf.Job:
    return wf.Job(
        name=name,
        model=lambda: nn.Sequential(nn.Linear(32, width), nn.ReLU(), nn.Linear(width, 10)),
        data=[(torch.zeros(16, 32), torch.zeros(16, dtype=torch.long))],
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.Adam(parameters),
        **options,
    )


def sizes_of(given: wf.Job) -> StepSizes:
    assert callable(given.model)
    model = given.model()
    step = wf.Step(model, loss=F.cross_entropy, optimizer=given.optimizer(model.parameters()))
    return StepSizes(step, given.data[0])  # type: ignore[index]


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_the_answer_is_that_of_the_search(copies: int) -> None:
    found = max_batch_size(job(), copies=copies, memory="4MiB")
    searched = largest_batch(sizes_of(job()), memory="4MiB", copies=copies)
    assert found.size == searched.size and len(found.jobs) == copies and found.context == 0
    assert (found.run is None) == (copies == 1)
    if found.run is not None:
        assert found.run.peak <= 4 << 20
        assert f"{copies} x net: {found.size}" in str(found)
    assert all(row.ratio <= 1 for row in found.jobs)


def test_a_gpu_keeps_its_context() -> None:
    card = gpu("p100-16g")
    on_card, with_memory = max_batch_size(job(), gpu="P100-16g"), max_batch_size(job(), memory=card.usable)
    assert on_card.size == with_memory.size and on_card.memory == card.usable and on_card.context == card.context
    assert "300.0 MiB for the CUDA context" in str(on_card)
    less = max_batch_size(job(), gpu=card, memory="1GiB")
    assert less.memory == 1 << 30 and less.size < on_card.size


def test_different_jobs() -> None:
    found = max_batch_size([job("a"), job("b", width=256)], memory="8MiB")
    a, b = found.jobs
    assert a.size > b.size and abs(a.ratio - b.ratio) < 0.01
    with pytest.raises(ValueError, match=f"a {a.size}, b {b.size}"):
        found.size  # noqa: B018
    told = found.to_dict()
    assert [row["size"] for row in told["jobs"]] == [a.size, b.size] and told["peak_bytes"] <= 8 << 20
    assert set(told["model"]) == {"overlap", "speed"}


def deep(recompute: Any = None) -> wf.Job:
    layers = [layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh(), nn.GELU())]
    return wf.Job("deep", lambda: nn.Sequential(*layers), [(torch.zeros(16, 32), torch.zeros(16, dtype=torch.long))],
                  torch.optim.SGD, loss=F.cross_entropy, recompute=recompute)  # fmt: skip


def test_a_job_that_recomputes() -> None:
    plain, auto = (max_batch_size(deep(recompute), memory="4MiB") for recompute in (None, "auto"))
    (row,) = auto.jobs
    again = row.recomputed
    assert row.size == plain.size and again is not None and plain.jobs[0].recomputed is None
    assert again.size > 1.2 * again.without == 1.2 * plain.size and 0 < again.cost.share_of_bytes < 1
    assert f"deep alone, recomputing: {again.size}, {plain.size} without; " in str(auto)
    assert auto.to_dict()["jobs"][0]["recomputed"]["cost"]["operations"] == again.cost.operations
    # Side by side an engine lowers no step that fits alone.
    pair = max_batch_size(deep("auto"), copies=2, memory="4MiB")
    assert pair.size == max_batch_size(deep(), copies=2, memory="4MiB").size
    assert [row.recomputed for row in pair.jobs] == [again, again]


def test_a_height_in_bytes_holds_side_by_side() -> None:
    height = 2 << 20
    plain, lower = (max_batch_size(deep(recompute), copies=2, memory="4MiB") for recompute in (None, height))
    assert lower.size > plain.size and all(row.height <= height for row in lower.jobs)
    again = lower.jobs[0].recomputed
    assert again is not None and again.size == lower.jobs[0].alone
    assert again.without == max_batch_size(deep(), memory="4MiB").size
    assert lower.run is not None and lower.run.peak <= 4 << 20


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "the device must be known: pass gpu='v100-32g'"),
        ({"gpu": "v100"}, "did you mean v100-32g"),
        ({"gpu": "p100-16g", "memory": "20GiB"}, "more than p100-16g has for jobs: 15.6 GiB"),
        ({"memory": "4MiB", "copies": 0}, "copies=0"),
        ({"memory": "many"}, "cannot read 'many' as memory"),
    ],
)
def test_wrong_questions(options: dict[str, Any], said: str) -> None:
    with pytest.raises(wf.InvalidJobError, match=said):
        max_batch_size(job(), **options)
    with pytest.raises(wf.InvalidJobError, match="there must be a job"):
        max_batch_size([], memory="4MiB")


def test_what_never_fits_and_what_is_not_known() -> None:
    with pytest.raises(
        wf.MemoryLimitError, match=r"batch of 1 need .* parameters.* the limit is 19\.5 KiB.* raise memory="
    ):
        max_batch_size(job(), memory=20_000)

    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum().item() >= 0 else x

    with pytest.raises(wf.CaptureError, match="item"):
        max_batch_size(wf.Job("stops", Stops, [(torch.zeros(4, 32), torch.zeros(4, dtype=torch.long))],
                              torch.optim.SGD, loss=F.cross_entropy), memory="4MiB")  # fmt: skip
