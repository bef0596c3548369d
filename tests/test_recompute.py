"""Steps that recompute: the same bits from less memory, alone and beside others, and what is told of it."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import waterflow as wf
from benchmarks.zoo import SMALL
from tests.support import Net, Trained, assert_same, compare, images
from tests.test_bitwise import BATCH, _forget, batches_of, reference, run_steps, train, train_step  # noqa: F401
from waterflow.executor.engine import Engine

# What the backward pass of the others needs at the peak is made by random or recurrent operators, or lies in gradients.
LOWER = ["cnn_bn", "resnet50", "vit", "bert", "gpt2", "lstm_cell", "mamba"]


class Deep(nn.Module):
    """Blocks whose activations are most of a step, with dropout, and changes in place."""

    def __init__(self, width: int = 32, blocks: int = 6, dropout: float = 0.2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.GELU()
            )
            for _ in range(blocks)
        )  # fmt: skip
        self.last = nn.Linear(width, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def make_deep() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = Deep()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


BATCHES = images(5, size=256, shape=(32,))


def heights(**options: Any) -> tuple[int, int]:
    """The height of the plain step, and the lowest that it can be brought to."""
    model, optimizer = make_deep()
    step = wf.Step(model, loss=nn.functional.cross_entropy, optimizer=optimizer, **options)
    with pytest.raises(wf.MemoryLimitError) as refused:
        step.plan_for(BATCHES[0], recompute=1)
    return step.plan_for(BATCHES[0]).height, refused.value.needed


def lowest_of(name: str, **options: Any) -> int:
    zoo = SMALL[name]
    model = zoo.build()
    step = wf.Step(model, step=zoo.step, optimizer=zoo.optimizer(model.parameters()), **options)
    with pytest.raises(wf.MemoryLimitError) as refused:
        step.plan_for(batches_of(zoo, 0)[0], recompute=1)
    return refused.value.needed


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_zoo_alone(name: str) -> None:
    if name in ("nasnet", "tacotron2", "inception_v3"):
        pytest.skip("takes long: see the slow test")
    check_alone(name)


@pytest.mark.campaign
@pytest.mark.parametrize("name", ["nasnet", "tacotron2", "inception_v3"])
def test_large_models_alone(name: str) -> None:
    check_alone(name)


def check_alone(name: str) -> None:
    trained = train(SMALL[name], 0, train_step, recompute=lowest_of(name))
    assert trained.step is not None and trained.step.opaque_reason is None
    assert_same(trained, reference(name, 0))
    if name in LOWER:  # with all gradients at the end, so that activations are not the lesser part
        lowest = lowest_of(name, early_updates=False)
        trained = train(SMALL[name], 0, train_step, recompute=lowest, early_updates=False)
        assert_same(trained, reference(name, 0))
        step, plain = trained.step, train(SMALL[name], 0, train_step, early_updates=False).step
        assert step is not None and plain is not None and plain.recomputed is None
        assert step.predicted_height <= lowest < plain.predicted_height
        assert step.measured_height < plain.measured_height
        assert step.recomputed is not None and step.recomputed.operations > 0


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"clip_grad_norm": 0.5}, {"autocast": torch.bfloat16}], ids=str)
def test_any_height(share: float, options: dict[str, Any]) -> None:
    plain, lowest = heights(**options)
    height = int(lowest + share * (plain - lowest))
    eager = compare(make_deep, BATCHES, **options)
    torch.manual_seed(5)
    model, optimizer = make_deep()
    torch.manual_seed(5)
    trained = run_steps(model, optimizer, BATCHES, recompute=height, **options)
    assert_same(trained, eager)
    assert trained.step is not None and trained.step.recomputed is not None
    if not options:
        assert trained.step.predicted_height <= height
        assert eager.step is not None and trained.step.measured_height < eager.step.measured_height


def jobs(**options: Any) -> list[wf.Job]:
    def make(seed: int) -> wf.Job:
        return wf.Job(
            f"deep-{seed}", Deep, BATCHES, lambda params: torch.optim.AdamW(params, lr=1e-2),
            loss=nn.functional.cross_entropy, seed=seed, epochs=2, **options,
        )  # fmt: skip

    return [make(seed) for seed in range(3)]


def state_of(result: wf.JobResult) -> Trained:
    assert result.state_dict is not None
    holder = nn.ParameterDict({name.replace(".", "_"): nn.Parameter(t, False) for name, t in result.state_dict.items()})
    return Trained([torch.tensor(result.losses)], holder, torch.optim.SGD([torch.zeros(1)]))


@pytest.mark.parametrize("asynchronous", [None, 7], ids=["plain", "asynchronous"])
def test_auto_lets_jobs_in_that_do_not_fit(asynchronous: int | None) -> None:
    alone = wf.train(jobs(), memory="1GiB", lanes=1)
    model, optimizer = make_deep()
    plan = wf.Step(model, loss=nn.functional.cross_entropy, optimizer=optimizer).plan_for(BATCHES[0])
    measured = alone[0].measured_peak
    assert measured is not None
    limit = 3 * (plan.persistent + 2 * plan.batch) + int(0.8 * (measured - plan.persistent - plan.batch))
    with Engine(memory=limit, lanes=2, reserve=0, asynchronous=asynchronous) as engine:
        room = plan.persistent + 2 * plan.batch + int(0.8 * plan.height)
        results = wf.train(jobs(recompute="auto"), engine=engine)
        assert engine.native.peak_held <= engine.limit
        engine.native.check()
    for mine, other in zip(results, alone):
        assert_same(state_of(mine), state_of(other))
    with Engine(memory=room, lanes=2, reserve=0) as engine:
        with pytest.raises(wf.MemoryLimitError, match="largest batch that fits"):
            wf.train(jobs()[:1], engine=engine)
        (result,) = wf.train(jobs(recompute="auto")[:1], engine=engine)
    assert_same(state_of(result), state_of(alone[0]))
    assert result.recomputed is not None and result.recomputed.freed > 0
    assert result.to_dict()["recomputed"]["operations"] == result.recomputed.operations


def test_auto_recomputes_nothing_where_the_step_fits() -> None:
    with Engine(memory="1GiB", lanes=1) as engine:
        (result,) = wf.train(jobs(recompute="auto")[:1], engine=engine)
    assert result.recomputed is None and result.to_dict()["recomputed"] is None
    model, optimizer = make_deep()
    step = wf.Step(model, loss=nn.functional.cross_entropy, optimizer=optimizer, recompute="auto")
    step(BATCHES[0])
    assert step.recomputed is None


@pytest.mark.slow
def test_auto_says_how_low_it_comes() -> None:
    model, optimizer = make_deep()
    plan = wf.Step(model, loss=nn.functional.cross_entropy, optimizer=optimizer).plan_for(BATCHES[0])
    told = r"recomputing brings the step to .* at best; the largest batch"
    memory = plan.persistent + 2 * plan.batch + 1000
    with Engine(memory=memory, lanes=1, reserve=0) as engine, pytest.raises(wf.MemoryLimitError, match=told):
        wf.train(jobs(recompute="auto")[:1], engine=engine)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_who_does_not_fit_is_told_whether_it_helps(share: float) -> None:
    """Half of the height is more than recomputing brings, nine tenths are not."""
    plain, lowest = heights()
    assert 0.4 * plain < lowest < 0.5 * plain
    model, optimizer = make_deep()
    plan = wf.Step(model, loss=nn.functional.cross_entropy, optimizer=optimizer).plan_for(BATCHES[0])
    for helps, height in ((True, int(share * plain)), (False, lowest - 1)):
        memory = plan.persistent + 2 * plan.batch + height
        with Engine(memory=memory, lanes=1, reserve=0) as engine:
            with pytest.raises(wf.MemoryLimitError, match="the largest batch that fits is") as refused:
                wf.train(jobs()[:1], engine=engine)
            said = str(refused.value)
            assert ("with recompute='auto' this one fits" in said) == ("pass recompute='auto'" in said) == helps
            assert ("recompute='auto' would not be enough" in said) != helps
            if helps:
                (result,) = wf.train(jobs(recompute="auto")[:1], engine=engine)
                assert result.recomputed is not None


def sized(size: int, **options: Any) -> wf.Job:
    (job,) = jobs(**options)[:1]
    return replace(job, data=images(2, size=size, shape=(32,)))


@pytest.mark.slow
def test_a_job_that_may_recompute_is_told_the_largest_batch_with_it_and_without() -> None:
    with Engine(memory=600_000, lanes=1, reserve=0) as engine:
        with pytest.raises(wf.MemoryLimitError) as refused:
            wf.train([sized(4096, recompute="auto")], engine=engine)
        largest = refused.value.largest_batch
        told = re.search(r"at best; the largest batch that fits is (\d+), (\d+) without recomputing", str(refused.value))
        assert told is not None and largest == int(told[1]) > int(told[2])
        assert wf.train([sized(largest, recompute="auto")], engine=engine)[0].recomputed is not None
        assert wf.train([sized(int(told[2]))], engine=engine)[0].status == "completed"
        for more in (sized(largest + 1, recompute="auto"), sized(int(told[2]) + 1)):
            with pytest.raises(wf.MemoryLimitError):
                wf.train([more], engine=engine)


def test_what_a_profile_showed_counts_for_the_largest_batch() -> None:
    """Kernels' temporaries, of which the graph knows nothing."""

    def make(size: int) -> wf.Job:
        def model() -> nn.Module:
            return nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.Flatten())

        data = [(torch.zeros(size, 3, 32, 32), torch.zeros(size, 1024))] * 4
        return wf.Job("conv", model, data, lambda p: torch.optim.SGD(p, lr=0.1), loss=nn.functional.mse_loss, seed=0)

    with Engine(memory="1GiB", lanes=1, reserve=0) as engine:
        (result,) = wf.train([make(16)], engine=engine)
    assert result.measured_peak is not None and result.predicted_peak is not None
    assert result.measured_peak > result.predicted_peak
    batch = 16 * (3 * 32 * 32 + 1024) * 4
    with Engine(memory=(result.measured_peak + result.predicted_peak) // 2 + batch, lanes=1, reserve=0) as engine:
        with pytest.raises(wf.MemoryLimitError) as refused:
            wf.train([make(16)], engine=engine)
        fits = refused.value.largest_batch
        assert fits is not None and 8 < fits < 16
        assert wf.train([make(fits)], engine=engine)[0].status == "completed"


def test_it_tells_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    plain, lowest = heights()
    model, optimizer = make_deep()
    step = wf.Step(model, loss=nn.functional.cross_entropy, optimizer=optimizer, recompute=lowest, name="deep")
    with caplog.at_level(logging.INFO, "waterflow"):
        step(BATCHES[0])
        step(BATCHES[1])
    told = [record.getMessage() for record in caplog.records if "recomputes" in record.getMessage()]
    assert len(told) == 1 and "'deep'" in told[0] and "less at the peak" in told[0]
    cost = step.recomputed
    assert cost is not None and 0 < cost.freed <= plain and 0 < cost.share_of_bytes < 1 and 0 <= cost.share_of_flops < 1
    assert cost == step.recomputed_for(BATCHES[0]) and step.plan_for(BATCHES[0]).operations > cost.operations


def test_a_planner_can_ask() -> None:
    model, optimizer = make_deep()
    step = wf.Step(model, loss=nn.functional.cross_entropy, optimizer=optimizer)
    plain = step.footprint_for(BATCHES[0]).offsets()
    wanted = int(0.8 * plain.height)
    lower = step.footprint_for(BATCHES[0], recompute=wanted).offsets()
    lower.check()
    assert lower.height <= wanted < plain.height
    assert step.plan_for(BATCHES[0], recompute=wanted).height <= wanted
    assert step.footprint_for(BATCHES[0], recompute=plain.height * 2).offsets() == plain
    cost = step.recomputed_for(BATCHES[0], recompute=wanted)
    assert cost is not None and cost.operations > 0
    # Offsets count whole alignments.
    assert cost.freed == pytest.approx(max(plain.resident) - max(lower.resident), rel=0.01)
    assert step.recomputed_for(BATCHES[0]) is None


@pytest.mark.parametrize("wrong", [0, -1, True, "much", [], "1 parsec"])
def test_what_cannot_be_asked_for(wrong: Any) -> None:
    model, optimizer = make_deep()
    with pytest.raises(wf.InvalidJobError, match="recompute must be"):
        wf.Step(model, loss=nn.functional.cross_entropy, optimizer=optimizer, recompute=wrong)


def test_a_height_that_is_out_of_reach() -> None:
    net = Net()
    step = wf.Step(net, loss=nn.functional.cross_entropy, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), recompute="1kB")
    with pytest.raises(wf.MemoryLimitError, match="cannot be brought to a height of 1000 B"):
        step(images(1, size=64)[0])
