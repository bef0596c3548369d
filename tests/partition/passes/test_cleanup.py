"""Clean-up changes no bit: graphs give the same before and after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from benchmarks.zoo import SMALL
from tests.partition.graphs import instructions_of, interpret, spec_of
from tests.support import same_bits
from waterflow.partition.capture import trace as capturing
from waterflow.partition.capture.trace import Capture, StepSpec
from waterflow.partition.passes.cleanup import clean_up

aten = torch.ops.aten
FAST = sorted(set(SMALL) - {"inception_v3", "nasnet", "tacotron2"})


def values_of(capture: Capture, spec: StepSpec, leaves: list[Any]) -> list[torch.Tensor]:
    """Real inputs for a captured graph: the model's tensors, fresh optimizer state, the batch."""
    tensors = dict(spec.model.named_parameters()) | dict(spec.model.named_buffers())
    made = []
    for given in capture.inputs:
        if given.kind in ("parameter", "buffer"):
            made.append(tensors[given.name].detach().clone())
        elif given.kind == "state":
            like = tensors[given.name].detach()
            made.append(torch.zeros(()) if given.key == "step" else torch.zeros_like(like))
        elif given.kind == "rate":
            made.append(torch.tensor(spec.optimizer.param_groups[given.group]["lr"], dtype=torch.float64))
        else:
            made.append(leaves[given.leaf].clone())
    return made


def run(capture: Capture, spec: StepSpec, leaves: list[Any]) -> list[torch.Tensor]:
    """What a graph returns and what it leaves in its inputs."""
    inputs = values_of(capture, spec, leaves)
    torch.manual_seed(7)
    with torch.enable_grad():  # nothing requires a gradient, but recurrent layers keep no workspace without it
        outputs = interpret(capture.graph, inputs, capture.constants)
    return [*outputs, *inputs]


@pytest.mark.needs_time("real models are captured")
@pytest.mark.parametrize("name", FAST)
def test_results_stay_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = capturing.capture_step(*spec_of(name))
    monkeypatch.setattr(capturing, "clean_up", lambda graph: None)
    spec, leaves, structure = spec_of(name)
    raw = capturing.capture_step(spec, leaves, structure)
    assert clean.inputs == raw.inputs
    assert len(instructions_of(clean.graph)) < len(instructions_of(raw.graph))
    for mine, reference in zip(run(clean, spec, leaves), run(raw, spec, leaves), strict=True):
        assert same_bits(mine, reference)


@pytest.mark.campaign
@pytest.mark.parametrize("name", sorted(set(SMALL) - set(FAST)))
def test_results_of_large_models_stay_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    test_results_stay_equal(name, monkeypatch)


@pytest.mark.parametrize("name", ["bert", "lstm_cell"])
def test_nothing_idle_is_left(name: str) -> None:
    graph = capturing.capture_step(*spec_of(name)).graph
    nodes = instructions_of(graph)
    idle = (aten.detach.default, aten.alias.default)
    assert not [n for n in nodes if n.target in idle or "profiler" in str(n.target)]
    assert all(n.users or n.target._schema.is_mutable or "batch_norm" in str(n.target) for n in nodes)
    views = [(n.target, str(n.args), str(n.kwargs)) for n in nodes if "view" in str(n.target)]
    assert len(views) == len(set(views))
    clean_up(graph)
    assert instructions_of(graph) == nodes, "cleaning twice changes nothing"


def graph_of(build: Any) -> fx.Graph:
    graph = fx.Graph()
    graph.output([build(graph, graph.placeholder("x"))])
    return graph


def test_equal_views_merge_and_others_do_not() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        same = [graph.call_function(aten.view.default, (x, [4])) for _ in range(2)]
        other = graph.call_function(aten.view.default, (x, [2, 2]))
        pieces = [graph.call_function(aten.add.Tensor, (v, 1)) for v in (*same, other)]
        flat = [graph.call_function(aten.view.default, (piece, [4])) for piece in pieces]
        return graph.call_function(aten.cat.default, (flat,))

    graph = graph_of(build)
    clean_up(graph)
    assert sum(n.target is aten.view.default for n in graph.nodes) == 2 + 3
    assert sum(n.target is aten.add.Tensor for n in graph.nodes) == 3, "only views are merged"


@pytest.mark.parametrize("first", [1, 1.0, True])
@pytest.mark.parametrize("second", [1, 1.0, True])
def test_arguments_that_are_equal_and_not_the_same(first: Any, second: Any) -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        views = [graph.call_function(aten.unsqueeze.default, (x, n)) for n in (first, second)]
        return graph.call_function(aten.add.Tensor, tuple(views))

    graph = graph_of(build)
    clean_up(graph)
    merged = sum(n.target is aten.unsqueeze.default for n in graph.nodes) == 1
    assert merged == (type(first) is type(second))


def test_double_transposes_cancel() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        for _ in range(4):
            x = graph.call_function(aten.t.default, (x,))
        return graph.call_function(aten.relu.default, (x,))

    graph = graph_of(build)
    clean_up(graph)
    assert [n.target for n in instructions_of(graph)] == [aten.relu.default]


def test_what_has_an_effect_stays() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> fx.Node:
        graph.call_function(aten.add_.Tensor, (x, 1))
        graph.call_function(aten.rand.default, ([3],))
        graph.call_function(aten.relu.default, (x,))
        return graph.call_function(aten.sum.default, (x,))

    graph = graph_of(build)
    clean_up(graph)
    kept = [n.target for n in instructions_of(graph)]
    assert kept == [aten.add_.Tensor, aten.rand.default, aten.sum.default], "a dropped draw would shift all later ones"
