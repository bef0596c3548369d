"""The short way of tracing makes the graph that ``make_fx`` makes, and leaves to it what it does not know."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.optim import AdamW

from benchmarks.zoo import SMALL
from tests.partition.graphs import spec_of
from tests.support import Net, images
from waterflow.errors import CaptureError
from waterflow.partition.capture import trace
from waterflow.partition.capture.recorder import NotPlain, Recorder
from waterflow.partition.capture.spec import StepSpec
from waterflow.partition.capture.trace import Capture, capture_step


def by_make_fx(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> Capture:
    def gives_up(*_: Any) -> None:
        raise NotPlain("to be compared with")

    with monkeypatch.context() as patch:
        patch.setattr(trace.Recorder, "recording", gives_up)
        return capture_step(*arguments)


def lines(captured: Capture) -> list[str]:
    """The graph with its nodes by number: names are given in another order."""
    numbers = {node: f"%{i}" for i, node in enumerate(captured.graph.nodes)}

    def shown(value: Any) -> str:
        if isinstance(value, fx.Node):
            return numbers[value]
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(shown, value))}]"
        return repr(value)

    def layout(value: Any) -> str:
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(map(layout, value))}]"
        if not isinstance(value, torch.Tensor):
            return type(value).__name__
        return f"{value.dtype} {tuple(value.shape)} {value.stride()} {value.storage_offset()}"

    return [
        f"{node.op} {node.target if node.op == 'call_function' else ''} {shown(node.args)} "
        f"{[(k, shown(v)) for k, v in sorted(node.kwargs.items()) if v is not None]} {layout(node.meta.get('val'))}"
        for node in captured.graph.nodes
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_the_graph_is_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, leaves, batch_spec = spec_of(name)
    capture_step(spec, leaves, batch_spec)  # results that are one tensor become two once the fake mode knows the call
    recorded = capture_step(spec, leaves, batch_spec)
    thorough = by_make_fx(monkeypatch, spec, leaves, batch_spec)
    assert lines(recorded) == lines(thorough)
    assert recorded.inputs == thorough.inputs and not recorded.constants
    assert [n.meta["phase"] for n in recorded.graph.nodes] == [n.meta["phase"] for n in thorough.graph.nodes]
    lines_of = [[n.meta.get("line") for n in c.graph.nodes] for c in (recorded, thorough)]
    assert lines_of[0] == lines_of[1]


def spec_with(loss: Any, model: nn.Module) -> StepSpec:
    return StepSpec(
        model=model, compute_loss=loss, optimizer=AdamW(model.parameters()), device=torch.device("cpu"), update=True,
        accumulate=1, clip_norm=None, clip_value=None, autocast=None,
    )  # fmt: skip


def with_a_constant(model: nn.Module, batch: Any) -> torch.Tensor:
    weights = torch.tensor([1.0, 2.0, 1.0, 1.0])
    return F.cross_entropy(model(batch[0]), batch[1], weight=weights)


def with_a_size_that_changes(model: nn.Module, batch: Any) -> torch.Tensor:
    out = model(batch[0])
    weight = torch.ones(2)
    weight.resize_(1)
    return F.cross_entropy(out, batch[1]) * weight.sum()


def swallowing(model: nn.Module, batch: Any) -> torch.Tensor:
    try:
        weight = torch.tensor(2.0)
    except Exception:
        weight = 1.0
    return F.cross_entropy(model(batch[0]), batch[1]) * weight


@pytest.mark.slow
@pytest.mark.parametrize("loss", [with_a_constant, with_a_size_that_changes, swallowing])
def test_what_is_not_plain_is_left_to_make_fx(loss: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_with(loss, Net())
    leaves = list(images(1)[0])
    left = []
    thorough = trace._StepTracer.make_fx
    monkeypatch.setattr(trace._StepTracer, "make_fx", lambda tracer: left.append(1) or thorough(tracer))
    captured = capture_step(spec, leaves, None)
    assert left
    assert lines(captured) == lines(by_make_fx(monkeypatch, spec, leaves, None))


def test_recurrent_layers_are_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """They turn their results in place."""
    monkeypatch.delattr(trace._StepTracer, "make_fx")

    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch[0])[0].square().mean()

    for kind in (nn.GRU, nn.LSTM, nn.RNN):
        graph = capture_step(spec_with(loss, kind(3, 4, batch_first=True)), [torch.randn(2, 5, 3)], None).graph
        assert not any(node.target is torch.ops.aten.transpose_.default for node in graph.nodes)


def test_values_of_tensors_are_refused() -> None:
    def guarded_places(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss * 2 if loss.item() > 1 else loss

    with pytest.raises(CaptureError, match="step reads the values"):
        capture_step(spec_with(guarded_places, Net()), list(images(1)[0]), None)


def test_the_end_of_the_graph_says_what_was_swallowed() -> None:
    recorder = Recorder()
    with recorder.recording(), contextlib.suppress(NotPlain):
        torch.ones(2)  # no fake tensors here
    with pytest.raises(NotPlain, match="real memory"):
        recorder.add_outputs([])
