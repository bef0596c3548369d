"""What a job has claimed covers each of its steps, whatever kinds of batches they take."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import waterflow as wf
from waterflow.executor.policy import ResourcePolicy
from waterflow.executor.program.capture_cache import PlannedStep, StepPlans

MiB = 1 << 20


@pytest.fixture
def engine() -> Iterator[wf.Engine]:
    with wf.Engine(memory=100 * MiB, lanes=2, reserve=0) as made:
        yield made


def large_batch() -> Any:
    return torch.randn(8, 64), torch.zeros(40 * MiB // 4)


def high_step() -> Any:
    return torch.randn(16 * 1024, 64), torch.zeros(4)


def step_of(engine: wf.Engine, **more: Any) -> wf.Step:
    model = nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return wf.Step(model, step=lambda m, batch: m(batch[0]).square().mean(), optimizer=optimizer, engine=engine, **more)


def covered(step: wf.Step) -> bool:
    return step.engine.reservations.covers(step.job, step.plan, step.batches_ahead)


def test_two_kinds_that_do_not_fit_together(engine: wf.Engine) -> None:
    step = step_of(engine)
    both = large_batch(), high_step()
    first, second = map(step.plan_for, both)
    assert first.persistent + first.batch + second.height > engine.limit
    for batch in (both[0], both[0], both[1], both[1], both[1], both[0], both[0], both[1]):
        step(batch)
        assert covered(step)
        assert engine.reservations.claimed() + step.plan.height <= engine.limit


def test_steps_under_way_end_before_less_is_claimed(engine: wf.Engine) -> None:
    step = step_of(engine)
    both = large_batch(), high_step()
    for batch in both:
        step(batch)
    for _ in range(3):
        futures = []
        for batch in both:
            futures.append(step.submit(batch))
            assert covered(step)
            assert all(one.run.done for one in futures[:-1])
        for future in futures:
            future.result()


def test_kinds_that_fit_together_are_claimed_once(engine: wf.Engine) -> None:
    step = step_of(engine)
    for _ in range(3):
        for rows in (1024, 64):
            step((torch.randn(rows, 64), torch.zeros(4)))
    claims = len(engine.reservations.persistent_log)
    for rows in (64, 1024, 64):
        step((torch.randn(rows, 64), torch.zeros(4)))
        assert covered(step)
    assert len(engine.reservations.persistent_log) == claims


def test_another_policy_is_looked_at(engine: wf.Engine) -> None:
    step = step_of(engine)
    for _ in range(3):
        step(high_step())
    engine.set_policy(step.job, ResourcePolicy("opportunistic", 90 * MiB))
    assert covered(step)
    engine.set_policy(step.job, ResourcePolicy("opportunistic", step.plan.peak - 8 * MiB))
    assert not covered(step)
    step(high_step())
    assert covered(step) and (step.plan.offloaded or step.recomputed)


def test_more_batches_ahead_are_claimed(engine: wf.Engine) -> None:
    step = step_of(engine)
    step(large_batch())
    step.hold_batches(2)
    assert not covered(step)
    step(large_batch())
    assert covered(step) and engine.reservations.claimed() >= 80 * MiB


def test_kinds_of_eager_steps_that_do_not_fit_together(engine: wf.Engine, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(64, 64)

    def eager(m: nn.Module, batch: Any) -> torch.Tensor:
        loss = m(batch[0]).square().mean()
        return loss * float(loss.item() > -1)

    step = wf.Step(model, step=eager, optimizer=torch.optim.SGD(model.parameters(), lr=0.01), engine=engine)
    for batch in (large_batch(), high_step(), large_batch(), high_step(), large_batch()):
        step(batch)
        assert step.opaque_reason is not None and covered(step)


def test_a_plan_and_its_twin_are_one(engine: wf.Engine) -> None:
    step = step_of(engine)
    batch = torch.randn(65, 64), torch.zeros(5)  # of a kind that no other test has profiled
    seen: list[PlannedStep] = []
    for _ in range(6):
        step(batch)
        (plans,) = {id(one.plans): one.plans for one in step._bound_steps._bound_steps.values()}.values()
        assert isinstance(plans, StepPlans) and isinstance(plans.now, PlannedStep)
        assert plans.now.native.largest == plans.now.plan.height
        seen += [plans.now] if plans.now not in seen else []
    assert [one.plan.measured for one in seen] == [False, True]
