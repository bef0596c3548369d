"""max_batch_size: the answer that the search gives, on a GPU or so much memory, and what is said of wrong questions."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from waterflow.executor.memory_limit import parse_memory, reserve_of
from waterflow.partition.plan.plan import format_bytes
from waterflow.planner.gpus import gpu
from waterflow.planner.search import largest_batch
from waterflow.planner.step_sizes import StepSizes
from waterflow.training.batch_size import max_batch_size
from waterflow.training.fit_together import fit_together
from waterflow.training.step_queue import STEPS_AHEAD


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
    return StepSizes(step, given.data[0], batches_held=STEPS_AHEAD)  # type: ignore[index]


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_the_answer_is_that_of_the_search(copies: int) -> None:
    found = max_batch_size(job(), copies=copies, memory="4MiB")
    room = (4 << 20) - reserve_of(4 << 20)
    searched = largest_batch(sizes_of(job()), memory=room, copies=copies, claimed=True)
    assert found.size == searched.size and len(found.jobs) == copies and found.context == 0
    assert (found.run is None) == (copies == 1)
    if found.run is not None:
        assert found.run.peak <= room
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


@pytest.mark.slow
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


@pytest.mark.slow
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
        ({"gpu": "a100"}, "did you mean a100-40g or a100-80g?"),
        ({"gpu": 0}, "gpu must be a name, such as 'v100-32g', or a GPU; got 0"),
        ({"memory": "4MiB", "copies": 1.5}, "a whole number of copies of it; got 1 job.s., copies=1.5"),
        ({"memory": "24"}, "'24' is 24 B; did you mean '24GiB'"),
        ({"memory": 24.5}, "a whole number of bytes; got 24.5: did you mean '24.5GiB'"),
        ({"memory": 24}, "24 is 24 B; did you mean '24GiB'"),
    ],
)
def test_wrong_questions(options: dict[str, Any], said: str) -> None:
    with pytest.raises(wf.InvalidJobError, match=said):
        max_batch_size(job(), **options)
    with pytest.raises(wf.InvalidJobError, match="there must be a job"):
        max_batch_size([], memory="4MiB")
    for modules in (nn.Sequential(nn.Linear(2, 2)), [nn.Linear(2, 2)]):
        with pytest.raises(wf.InvalidJobError, match=r"takes jobs; got a .*wf.Job\(name='net', model=lambda: net"):
            max_batch_size(modules, memory="4MiB")  # type: ignore[arg-type]


def test_a_batch_is_not_taken_from_an_iterator() -> None:
    batches = iter(job().data)  # type: ignore[arg-type]
    with pytest.raises(wf.InvalidJobError, match="data of job 'net' is an iterator, which can be read only once"):
        max_batch_size(replace(job(), data=batches), memory="4MiB")
    assert len(list(batches)) == 1
    assert max_batch_size(replace(job(), data=lambda: iter(job().data)), memory="4MiB").size  # type: ignore[arg-type]


def test_lists_are_no_tensors() -> None:
    with pytest.raises(wf.InvalidJobError, match=r"batch of 'net' .* make its lists tensors, by torch\.tensor"):
        max_batch_size(replace(job(), data=[([[1.0, 2.0]], [1])]), memory="4MiB")


# -- what is told is what trains


def wide(size: int, name: str = "wide") -> wf.Job:
    layers = (nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
    return wf.Job(
        name, lambda: nn.Sequential(*map(copy.deepcopy, layers)),
        [(torch.zeros(size, 784), torch.zeros(size, dtype=torch.long))] * 4, torch.optim.AdamW, loss=F.cross_entropy,
    )  # fmt: skip


@pytest.mark.needs_time("the README promises that the batch which is told trains")
@pytest.mark.parametrize("memory", [pytest.param("600MiB", marks=pytest.mark.slow), "100MiB"])
def test_the_told_batch_trains_and_a_larger_one_does_not(memory: str) -> None:
    found = max_batch_size(wide(16), memory=memory)
    limit = parse_memory(memory)
    assert found.reserve == wf.Engine(memory=memory).reservations.reserve == found.to_dict()["reserve_bytes"] > 0
    assert found.to_dict()["batches_held"] == 2
    assert f"{format_bytes(found.reserve)} of it the reserve" in str(found) and "and 2 batches of " in str(found)
    assert "except temporaries of kernels" in str(found)
    (result,) = wf.train([wide(found.size)], memory=memory)  # its steps are profiled, and claimed for anew
    assert result.status == "completed" and result.measured_peak is not None
    assert result.measured_peak + found.jobs[0].batch <= limit - found.reserve
    with pytest.raises(wf.MemoryLimitError, match=f"the largest batch that fits is {found.size}"):
        wf.train([wide(found.size + 1)], memory=memory)


def test_copies_of_the_told_batch_are_under_way_together() -> None:
    found = max_batch_size(wide(16), copies=2, memory="200MiB")
    for size, together in ((found.size, ["a", "b"]), (found.size + found.size // 50, ["a"])):
        plan = fit_together([wide(size, "a"), wide(size, "b")], "200MiB", 2)
        assert [job.name for job in plan.feasibility.together] == together


def test_a_share_above_that_beside_the_largest_is_no_limit() -> None:
    found = max_batch_size(wide(16), copies=2, memory="200MiB")
    assert "the limit" not in str(found)
    (row, _) = found.to_dict()["jobs"]
    assert 0 < row["room_beside_largest"] < 1 and "limit" not in row


@pytest.mark.slow
def test_what_is_said_of_recomputing_side_by_side() -> None:
    assert "side by side no step recomputes: with recompute='auto'" in str(max_batch_size(deep("auto"), copies=2, memory="4MiB"))
    assert "side by side" not in str(max_batch_size(deep("auto"), memory="4MiB"))
    plain = wf.Job("plain", lambda: nn.Linear(32, 10), job().data, torch.optim.SGD, loss=F.mse_loss, recompute="auto")
    plain = replace(plain, data=[(torch.zeros(16, 32), torch.zeros(16, 10))])
    found = max_batch_size(plain, memory="4MiB")
    assert f"plain alone, recomputing: no larger batch than {found.size} fits" in str(found)
    with pytest.raises(wf.MemoryLimitError, match=r"recompute= of 8\.0 KiB says\. Allow at least .* its lowest height"):
        max_batch_size(deep(8 << 10), memory="4MiB")


def test_slower_than_turns_is_said() -> None:
    found = max_batch_size(job(), copies=2, memory="4MiB")
    assert found.run is not None
    slow = replace(found, run=replace(found.run, makespan=2 * found.run.alone))
    fast = replace(found, run=replace(found.run, makespan=found.run.alone // 2))
    assert "slower than taking turns" in str(slow) and "slower" not in str(fast)


def test_what_never_fits_and_what_is_not_known() -> None:
    with pytest.raises(
        wf.MemoryLimitError,
        match=r"batch of 1 need .* parameters.* the limit is 14\.6 KiB.* raise memory= \(it is 19\.5 KiB, 4\.9 KiB",
    ):
        max_batch_size(job(), memory="20kB")

    class Stops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(32, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x) if x.sum().item() >= 0 else x

    with pytest.raises(wf.CaptureError, match="job 'stops' cannot be captured, .*item"):
        max_batch_size(wf.Job("stops", Stops, [(torch.zeros(4, 32), torch.zeros(4, dtype=torch.long))],
                              torch.optim.SGD, loss=F.cross_entropy), memory="4MiB")  # fmt: skip


def test_copies_have_names_of_their_own_in_a_picture(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[list[str]] = []
    monkeypatch.setattr(
        "waterflow.training.batch_size.save_report", lambda path, jobs, **_: seen.append([name for name, _ in jobs])
    )
    max_batch_size(job(), copies=2, memory="4MiB").save_report(tmp_path / "plan.png")
    max_batch_size([job("a"), job("b")], memory="4MiB").save_report(tmp_path / "plan.png")
    assert seen == [["net 1", "net 2"], ["a", "b"]]
