"""A scheduler that steps after each training step finds what a loop's would: the step has ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import ChainedScheduler, LambdaLR, LRScheduler, SequentialLR, StepLR

import waterflow as wf
from tests.support import images
from waterflow.training.schedulers import of_numbers

BATCHES = images(30, size=64, shape=(64,))
Make = Callable[[torch.optim.Optimizer], Any]


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, fused=True)


def norm(optimizer: torch.optim.Optimizer) -> float:
    return float(sum(p.detach().norm() for group in optimizer.param_groups for p in group["params"]))


class ByNorm(LRScheduler):
    """A rate by the norm of the parameters."""

    def get_lr(self) -> list[float]:
        return [0.5 / (1 + norm(self.optimizer)) for _ in self.optimizer.param_groups]


class Clipping(StepLR):
    """Changes the parameters, too."""

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        with torch.no_grad():
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.04, 0.04)


def by_function(optimizer: torch.optim.Optimizer) -> LambdaLR:
    return LambdaLR(optimizer, lambda epoch: 1 / (1 + norm(optimizer)))


def replaced(optimizer: torch.optim.Optimizer) -> StepLR:
    made = StepLR(optimizer, 100)
    made.get_lr = lambda: [0.5 / (1 + norm(optimizer))]  # type: ignore[method-assign]
    return made


LOOKING: dict[str, Make] = {
    "its own": ByNorm,
    "that writes": lambda optimizer: Clipping(optimizer, 5),
    "a function": by_function,
    "a replaced method": replaced,
    "within": lambda optimizer: ChainedScheduler([StepLR(optimizer, 5), by_function(optimizer)]),
    "in a row": lambda optimizer: SequentialLR(optimizer, [StepLR(optimizer, 5), by_function(optimizer)], [3]),
}


def by_hand(make: Make) -> list[float]:
    net = model()
    optimizer = sgd(net.parameters())
    scheduler, losses = make(optimizer), []
    for x, y in BATCHES:
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
    return losses


def job_of(make: Make) -> wf.Job:
    given: dict[str, Any] = {"model": model, "data": BATCHES, "loss": F.cross_entropy, "optimizer": sgd, "seed": 0}
    return wf.Job("one", scheduler=make, scheduler_interval="step", **given)


class Started(wf.Callback):
    def on_job_start(self, job: wf.Job, runner: Any) -> None:
        self.runner = runner


@pytest.mark.parametrize("kind", LOOKING)
def test_a_scheduler_that_looks_at_parameters(kind: str) -> None:
    (result,) = wf.train(job_of(LOOKING[kind]), memory="1GiB", lanes=2)
    assert result.opaque_reason is None
    assert list(result.losses) == by_hand(LOOKING[kind])


@pytest.mark.parametrize("behind", [False, True])
def test_it_steps_behind_its_step_where_it_may_look(behind: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of torch's that cannot are not waited for."""
    started, under_way = Started(), []
    step = LRScheduler.step

    def looking(scheduler: Any, *given: Any) -> None:
        if hasattr(started, "runner"):
            under_way.append(started.runner.begun - started.runner.steps)
        step(scheduler, *given)

    monkeypatch.setattr(LRScheduler, "step", looking)
    make: Make = (lambda o: LambdaLR(o, lambda epoch: 0.9**epoch)) if behind else (lambda o: StepLR(o, 3))
    wf.train(job_of(make), memory="1GiB", callbacks=[started])
    assert (max(under_way[1:]) == 0) is behind and len(under_way) > len(BATCHES) - 1
    assert started.runner.step.waited_for is behind


@pytest.mark.parametrize(
    ("make", "alone"),
    [
        (lambda o: StepLR(o, 3), True),
        (lambda o: lr_scheduler.OneCycleLR(o, 0.1, 30), True),
        (lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.3), True),
        (lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.3, scale_fn=lambda x: 1.0), False),
        (lambda o: SequentialLR(o, [StepLR(o, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]), True),
        (lambda o: LambdaLR(o, lambda epoch: 0.9**epoch), False),
        (lambda o: Clipping(o, 3), False),
        (lambda o: object(), False),
    ],
)
def test_what_is_known_of_schedulers(make: Make, alone: bool) -> None:
    assert of_numbers(make(sgd(model().parameters()))) is alone


def test_a_rate_that_is_a_tensor_is_shared_with_the_step() -> None:
    rate = torch.tensor(0.1)
    assert not of_numbers(StepLR(torch.optim.SGD(model().parameters(), lr=rate), 3))  # type: ignore[arg-type]
