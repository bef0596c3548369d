"""A step that runs eagerly is captured once what kept it from that is gone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim import SGD, AdamW, Optimizer

import waterflow as wf
from tests.support import MiB, Net, assert_same as same, images, run_steps, train_eager, train_step
from waterflow.executor.program import eager
from waterflow.executor.program.eager import SecondLook

GONE = 4  # the first step without it
BATCHES = images(9)


@pytest.fixture(autouse=True)
def _at_once(no_captures: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "LOOK_AGAIN_AFTER", 0)


class Debugged(Net):
    debug = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if self.debug:
            print(y.mean().item())
        return y


def hook(model: nn.Module, optimizer: Optimizer) -> Callable[[int], Any]:
    seen: list[Any] = []
    handle = model.first.register_forward_hook(lambda module, args, output: seen.append(output.mean().item()))  # type: ignore[operator,union-attr]
    return lambda number: number == GONE and handle.remove()


def debugging(model: nn.Module, optimizer: Optimizer) -> Callable[[int], Any]:
    return lambda number: number == GONE and setattr(model, "debug", False)


def anomalies(model: nn.Module, optimizer: Optimizer) -> Callable[[int], Any]:
    return lambda number: torch.autograd.set_detect_anomaly(number < GONE)


def pruning(model: nn.Module, optimizer: Optimizer) -> Callable[[int], Any]:
    def act(number: int) -> None:
        if number == 1:
            prune.l1_unstructured(model.first, "weight", amount=0.3)  # type: ignore[arg-type]
        elif number == GONE:
            prune.remove(model.first, "weight")  # type: ignore[arg-type]

    return act


@pytest.mark.parametrize("during", [hook, debugging, anomalies, pruning])
@pytest.mark.parametrize("inside", [False, True], ids=["alone", "engine"])
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_it_is_captured_once_it_stands_still(during: Any, inside: bool, caplog: pytest.LogCaptureFixture) -> None:
    kind = AdamW if during is anomalies else lambda parameters: SGD(parameters, lr=0.1, momentum=0.9)

    def make() -> tuple[nn.Module, Optimizer]:
        model = Debugged() if during is debugging else Net()
        return model, kind(model.parameters())

    expected = train_eager(make, BATCHES, during=during)
    caplog.set_level(logging.INFO, "waterflow")
    if inside:
        with wf.Engine(memory=64 * MiB, lanes=2) as engine:
            mine = train_step(make, BATCHES, during=during, engine=engine)
            engine.native.check()
    else:
        mine = train_step(make, BATCHES, during=during)
    same(mine, expected)
    assert mine.step is not None and mine.step.opaque_reason is None
    assert mine.step.eager_steps == GONE - (during is pruning)
    assert caplog.text.count("is captured from now on") == 1


def test_a_step_that_no_capture_fits_goes_on_eagerly() -> None:
    """A look in vain fails nothing that trains."""

    def make() -> tuple[nn.Module, Optimizer]:
        model = Debugged()
        return model, SGD(model.parameters(), lr=0.1)

    mine = train_step(make, BATCHES, during=debugging, recompute=1)
    same(mine, train_eager(make, BATCHES, during=debugging))
    assert mine.step is not None and mine.step.opaque_reason is not None and mine.step.eager_steps == len(BATCHES)


def test_in_a_job_that_reads_ahead_it_is_captured_within_the_epoch() -> None:
    model = Debugged()

    def data() -> Iterator[Any]:
        for number, batch in enumerate(images(40)):
            model.debug = number < 20
            yield batch

    job = wf.Job(
        "it", lambda: model, data, lambda parameters: SGD(parameters, lr=0.1), loss=F.cross_entropy, read_ahead=True, seed=0
    )
    (result,) = wf.train([job], lanes=1, memory="64MiB")
    assert result.status == "completed" and result.opaque_reason is None


def test_what_adds_up_gradients_stays_eager() -> None:
    """Its sums are the eager step's."""
    model = Debugged()
    mine = run_steps(model, SGD(model.parameters(), lr=0.1), images(8), accumulate=2, during=debugging)
    assert mine.step is not None and mine.step.opaque_reason is not None and mine.step.eager_steps == 8


@pytest.mark.parametrize("tick, steps", [(1, 1e9), (0, 1)], ids=["by the clock", "by its steps"])
def test_a_step_that_reads_values_is_looked_at_ever_less(tick: int, steps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eager, "LOOK_AGAIN_AFTER", 10)
    monkeypatch.setattr(eager, "STEPS_OF_A_LOOK", steps)
    now = [0.0]
    monkeypatch.setattr(eager.time, "perf_counter", lambda: now[0])
    look, looks = SecondLook(1.0), []
    for step in range(1000):
        now[0] += tick
        if look.due():
            looks.append(step)
            with look.looking():
                now[0] += 1.0
    assert looks == [9, 29, 69, 149, 309, 469, 629, 789, 949]
