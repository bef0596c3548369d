"""Memory that losses hide from shape rules, against what their kernels ask for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.optim import SGD

import waterflow as wf
from tests.native import count_memory
from tests.partition.graphs import instructions_of
from waterflow import _C
from waterflow.partition.capture.fake_rules import TracingMode
from waterflow.partition.capture.recorder import Recorder
from waterflow.partition.passes.cleanup import clean_up
from waterflow.partition.plan.liveness import lifetimes
from waterflow.partition.plan.probe import reduced_losses

SHAPE = 128, 128
WEIGHT = torch.rand(SHAPE[1])
LOSSES: dict[str, Any] = {
    "mse": F.mse_loss,
    "mse, sum": lambda x, y: F.mse_loss(x, y, reduction="sum"),
    "mse, none": lambda x, y: F.mse_loss(x, y, reduction="none"),
    "smooth l1": lambda x, y: F.smooth_l1_loss(x, y, beta=0.5),
    "huber": lambda x, y: F.huber_loss(x, y, reduction="sum"),
    "bce": F.binary_cross_entropy,
    "bce, weight": lambda x, y: F.binary_cross_entropy(x, y, weight=WEIGHT),
    "bce of logits": F.binary_cross_entropy_with_logits,
    "bce of logits, weights": lambda x, y: F.binary_cross_entropy_with_logits(x, y, pos_weight=WEIGHT),
    "soft margin": F.soft_margin_loss,
    "cross entropy": F.cross_entropy,
}


def recorded(loss: Any) -> fx.Graph:
    recorder = Recorder()
    with torch.no_grad(), TracingMode(allow_non_fake_inputs=True) as mode:
        tensors = [torch.empty(SHAPE), torch.empty(SHAPE), mode.from_tensor(WEIGHT)]
        for number, tensor in enumerate(tensors):
            recorder.add_input(number, tensor)
        with recorder.recording(), pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "WEIGHT", tensors[2])
            result = loss(*tensors[:2])
        recorder.add_outputs([result])
    return recorder.graph


@pytest.mark.parametrize("kind", LOSSES)
def test_as_kernels_ask(kind: str) -> None:
    found = list(reduced_losses(instructions_of(recorded(LOSSES[kind]))))
    assert len(found) == (kind not in ("mse, none", "cross entropy"))
    one, other = torch.rand(SHAPE), torch.rand(SHAPE)
    for _, hidden in found:
        result, peak = _C.metered(lambda: LOSSES[kind](one, other))
        assert result.untyped_storage().nbytes() == hidden.results[0]
        assert sum(hidden.results) + hidden.temporary <= peak <= sum(hidden.results) + hidden.temporary + 1024


def test_torch_does_not_warn_of_memory_that_was_there_before(capfd: pytest.CaptureFixture[str]) -> None:
    kept: list[torch.Tensor] = []
    for _ in range(1000):  # it warns once in a thousand times
        kept.append(torch.ones(100))
        _C.metered(kept.clear)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind", LOSSES)
def test_results_are_no_larger_than_they_look(kind: str) -> None:
    graph = recorded(LOSSES[kind])
    clean_up(graph)
    output = next(node for node in graph.nodes if node.op == "output")
    (kept,) = (life.size for life in lifetimes(graph, instructions_of(graph)) if life.kept)
    assert kept == output.args[0][0].meta["val"].nbytes


@pytest.mark.parametrize("kind", [kind for kind in LOSSES if kind not in ("mse, none", "soft margin")])
def test_a_step_takes_what_its_plan_says(kind: str) -> None:
    """The loss of single elements counts where it is there.

    The backward pass of a soft margin has temporaries of its own, which only a profile sees.
    """
    model = nn.Linear(SHAPE[1], SHAPE[1])
    batch = torch.rand(SHAPE), torch.rand(SHAPE)
    squashed = "bce" in kind and "logits" not in kind
    with wf.Engine(lanes=1) as engine, wf.within(engine):
        step = wf.Step(
            model, optimizer=SGD(model.parameters(), lr=0.1, fused=True),
            step=lambda model, batch: LOSSES[kind](model(batch[0]).sigmoid() if squashed else model(batch[0]), batch[1]),
        )  # fmt: skip
        predicted = step.plan_for(batch)
        for _ in range(4):
            loss = step(batch)
        with count_memory() as count:
            step(batch)
            counted = count.peak
    assert step.opaque_reason is None
    assert loss.untyped_storage().nbytes() == loss.nbytes
    assert abs(predicted.height - counted) < 0.02 * counted
