"""Jobs whose batches are all there run short steps without Python between them: the same bits, and others are heard at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from waterflow.executor.engine import Engine
from waterflow.partition.plan.plan import Plan
from waterflow.step import Step
from waterflow.training.runner import JobRunner

STEPS = 400
WAIT = 60.0  # seconds


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine(memory="256MiB", lanes=2) as made:
        yield made


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many steps each run had."""
    found, run_ahead = list[int](), Step.run_ahead

    def counted(self: Step, batches: Any, flag: Any, losses: list[torch.Tensor]) -> None:
        before = len(losses)
        try:
            run_ahead(self, batches, flag, losses)
        finally:
            found.append(len(losses) - before)

    monkeypatch.setattr(Step, "run_ahead", counted)
    return found


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 12), nn.Dropout(0.2), nn.ReLU(), nn.Linear(12, 3))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def batches(count: int = STEPS, kinds: int = 1) -> list[Any]:
    numbers = torch.Generator().manual_seed(0)
    sizes = [8 - (index // 50) % kinds for index in range(count)]
    return [(torch.randn(n, 6, generator=numbers), torch.randint(0, 3, (n,), generator=numbers)) for n in sizes]


def job(data: Any, **more: Any) -> wf.Job:
    return wf.Job("net", net, data, adam, loss=F.cross_entropy, seed=3, **{"epochs": 2, **more})


def outcome(runner: JobRunner) -> tuple[wf.JobResult, dict[str, torch.Tensor]]:
    result = runner.run()
    return result, {} if result.state_dict is None else result.state_dict


def same(one: tuple[wf.JobResult, Any], other: tuple[wf.JobResult, Any]) -> bool:
    equal = all(torch.equal(one[1][key], other[1][key]) for key in {*one[1], *other[1]})
    return equal and one[0].losses == other[0].losses and one[0].status == other[0].status


@pytest.mark.parametrize("kinds", [1, 3])
@pytest.mark.parametrize("alone", [False, True])
def test_bits_are_those_of_steps_one_by_one(
    engine: Engine, runs: list[int], monkeypatch: pytest.MonkeyPatch, kinds: int, alone: bool
) -> None:
    data, within = batches(kinds=kinds), None if alone else engine
    ahead = outcome(JobRunner(job(data), within))
    assert sum(runs) > STEPS and max(runs) > 10
    runs.clear()
    monkeypatch.setattr("waterflow.training.runner.MOST_RUN", 1)
    assert same(outcome(JobRunner(job(data), within)), ahead) and not runs
    assert len(ahead[0].losses) == 2 * STEPS


def test_kinds_of_which_one_takes_long(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    # Batches that were taken for a run and put back come before those that are not there yet.
    data = [(torch.ones(n, 6), torch.zeros(n, dtype=torch.long)) for n in [8] * 20 + [3]]
    plan = Step.plan.fget  # type: ignore[attr-defined]

    def slow_if_large(self: Step) -> Plan:
        found = plan(self)
        seconds = 1.0 if found.batch > 200 else 1e-4
        return replace(found, groups=tuple(replace(group, seconds=seconds) for group in found.groups))

    expected = outcome(JobRunner(job(data, epochs=6), engine))
    monkeypatch.setattr(Step, "plan", property(slow_if_large))
    assert same(outcome(JobRunner(job(data, epochs=6), engine)), expected)


def test_a_batch_that_fails(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    data = batches(200)
    data[150] = data[150][0], torch.full((8,), 99)
    ahead = outcome(JobRunner(job(data), engine))
    monkeypatch.setattr("waterflow.training.runner.MOST_RUN", 1)
    one_by_one = outcome(JobRunner(job(data), engine))
    assert ahead[0].status == "failed" and str(ahead[0].error) == str(one_by_one[0].error)
    assert ahead[0].losses == one_by_one[0].losses and len(ahead[0].losses) == 150


def test_requests_are_heard_between_two_steps(engine: Engine, runs: list[int]) -> None:
    data = batches()
    expected = outcome(JobRunner(job(data, epochs=20), engine))
    runner, copies = JobRunner(job(data, epochs=20), engine), list[wf.Checkpoint]()

    def ask() -> None:
        while not runner.steps:
            pass
        for _ in range(5):
            copies.append(runner.snapshot(WAIT))

    thread = threading.Thread(target=ask)
    thread.start()
    assert same(outcome(runner), expected)
    thread.join(WAIT)
    assert len(copies) == 5 and sum(runs) > STEPS
    for copy in copies[::2]:
        assert same(outcome(JobRunner(job(data, epochs=20), engine, resume=copy)), expected)


def test_it_is_stopped_between_two_steps(engine: Engine) -> None:
    runner = JobRunner(job(batches(), epochs=10_000), engine)

    def stop() -> None:
        while runner.steps < 2 * STEPS:
            pass
        runner.end("enough")

    thread = threading.Thread(target=stop)
    thread.start()
    result = runner.run()
    thread.join(WAIT)
    assert result.status == "cancelled" and str(result.error) == "enough"


def test_data_that_a_step_changes_is_read_one_by_one(engine: Engine, runs: list[int]) -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(0.5)
            return self.layer(x)

    made = wf.Job("changing", Changing, batches(100), adam, loss=F.cross_entropy, seed=3)
    result = JobRunner(made, engine).run()
    assert result.status == "completed" and not runs
