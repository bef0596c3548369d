"""Moved updates: what touches one memory keeps its order, bits stay, and the height falls."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import fx
from torch.utils import _pytree as pytree

from benchmarks.zoo import SMALL
from tests.partition.graphs import capture_of, instructions_of, interpret
from tests.support import same_bits
from waterflow.partition.capture.fake_rules import TracingMode, is_update
from waterflow.partition.capture.recorder import Recorder
from waterflow.partition.passes.cleanup import clean_up
from waterflow.partition.passes.gradient_memory import LEAST_GAIN, MOST_MOVES, update_early
from waterflow.partition.plan.liveness import lifetimes, operation_memory

SIDE = 5


def random_step(draw: random.Random, tensors: dict[str, list[torch.Tensor]], mark: Callable[[], None]) -> torch.Tensor:
    """A step with every hazard: gradients that are views, or one memory, or read again; weights read late; sums."""
    parameters, batch = tensors["parameter"], tensors["batch"]
    values = list(batch)
    for _ in range(draw.randint(1, 4)):
        values.append(torch.tanh(draw.choice(values) @ draw.choice(parameters).t()))
    loss = values[-1].sum()
    mark()
    gradients: list[torch.Tensor] = []
    for _ in parameters:
        for _ in range(draw.randint(0, 2)):
            values.append(draw.choice(values) * draw.choice([*parameters, *values]))
        made = torch.mul(draw.choice(values), draw.choice([*parameters, *values]))
        kind = draw.choice(["plain", "plain", "plain", "view", "same", "read"])
        if kind == "view":
            made = made.t()
        elif kind == "same" and gradients:
            made = draw.choice(gradients)
        elif kind == "read":
            values.append(made)
        gradients.append(made)
    mark()
    for number, total in enumerate(tensors["accumulator"]):
        if draw.random() < 0.7:
            total.add_(gradients[number])
            gradients[number] = total
    if draw.random() < 0.3:
        for gradient in gradients:
            gradient.clamp_(-0.5, 0.5)
    if draw.random() < 0.2:
        norm = torch.stack([gradient.norm() for gradient in draw.sample(gradients, 2)]).norm()
        gradients[0].mul_(norm)
    if draw.random() < 0.3:
        batch[0].mul_(draw.choice(parameters).norm())  # as it was before the update
    cut = draw.randint(1, len(parameters))
    for part in (slice(0, cut), slice(cut, None)):
        if parameters[part]:
            torch._fused_sgd_(
                parameters[part], gradients[part], tensors["state"][part], lr=tensors["rate"][0], momentum=0.9,
                weight_decay=0.1, dampening=0.0, nesterov=True, maximize=False, is_first_step=False,
            )  # fmt: skip
    for total in tensors["accumulator"]:
        total.zero_()
    return loss


def tensors_of(draw: random.Random, fill: torch.Generator | None) -> dict[str, list[torch.Tensor]]:
    count = draw.randint(2, 7)
    counts = {"parameter": count, "state": count, "batch": 2, "accumulator": count if draw.random() < 0.4 else 0}
    made = {
        kind: [torch.empty(SIDE, SIDE) if fill is None else torch.randn(SIDE, SIDE, generator=fill) for _ in range(n)]
        for kind, n in counts.items()
    }
    return made | {"rate": [torch.tensor(0.01, dtype=torch.float64)]}


def random_graph(seed: int) -> tuple[fx.Graph, dict[str, int]]:
    """The same graph for each seed."""
    draw = random.Random(seed)
    recorder = Recorder()
    with torch.no_grad(), TracingMode(allow_non_fake_inputs=True):
        tensors = tensors_of(draw, None)
        tensors["rate"] = [torch.empty((), dtype=torch.float64)]
        for number, tensor in enumerate(pytree.tree_leaves(tensors)):
            recorder.add_input(number, tensor)
        places: list[int] = []
        with recorder.recording():
            loss = random_step(draw, tensors, lambda: places.append(len(recorder.graph.nodes)))
        recorder.add_outputs([loss])
    graph = recorder.graph
    for position, node in enumerate(graph.nodes):
        node.meta["phase"] = ("forward", "backward", "update")[sum(position >= place for place in places)]
    clean_up(graph)
    groups = {n.name: g for g, n in enumerate(n for n in graph.nodes if n.op != "output" and is_update(n.target))}
    return graph, groups


def storages(node: fx.Node) -> list[int]:
    values = pytree.tree_leaves(node.meta.get("val"))
    return [value.untyped_storage()._cdata for value in values if isinstance(value, torch.Tensor)]


def accesses(graph: fx.Graph) -> dict[int, list[Any]]:
    """For each memory the writes in their order, and what reads it between them, in any order.

    An update of several parameters is taken apart; each access is told by what it touches.
    """
    found: dict[int, list[Any]] = defaultdict(lambda: [set()])
    for node in instructions_of(graph):
        target: Any = node.target
        together = is_update(target)
        for element in range(len(node.args[0]) if together else 1):  # type: ignore[arg-type]
            reads: list[fx.Node] = []
            writes: list[fx.Node] = []
            for place, argument in enumerate(target._schema.arguments):
                value = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
                if together and isinstance(value, list):
                    value = value[element : element + 1]
                nodes = [v for v in pytree.tree_leaves(value) if isinstance(v, fx.Node)]
                (writes if argument.alias_info is not None and argument.alias_info.is_write else reads).extend(nodes)
            written = {s for one in writes for s in storages(one)}
            name = (str(target), tuple(s for one in (*writes, *reads) for s in storages(one)))
            for storage in written:
                found[storage] += [name, set()]
            for storage in {s for one in reads for s in storages(one)} - written:
                found[storage][-1].add(name)
            for storage in set(storages(node)) - written:
                found[storage][-1].add(name)
    return dict(found)


def height(graph: fx.Graph) -> int:
    return max(memory.peak for memory in operation_memory(graph, instructions_of(graph)))


def run(graph: fx.Graph, seed: int) -> list[torch.Tensor]:
    inputs = pytree.tree_leaves(tensors_of(random.Random(seed), torch.Generator().manual_seed(seed)))
    with torch.no_grad():
        outputs = interpret(graph, inputs, {})
    return [*outputs, *inputs]


def check(seed: int) -> int:
    """Moves the updates of a random step; returns to how many places."""
    graph, groups = random_graph(seed)
    other, others = random_graph(seed)
    before = accesses(graph)
    high, nodes = height(graph), [node.name for node in graph.nodes]
    places = update_early(graph, groups)
    graph.lint()
    assert accesses(graph) == before
    updates = {n.name for n in graph.nodes if n.op != "output" and is_update(n.target)}
    assert updates == groups.keys() and set(groups.values()) == set(others.values())
    if not places:
        assert [node.name for node in graph.nodes] == nodes
    else:
        assert places <= MOST_MOVES and height(graph) <= (1 - LEAST_GAIN) * high
    for mine, reference in zip(run(graph, seed), run(other, seed), strict=True):
        assert same_bits(mine, reference)
    return places


@pytest.mark.slow
@given(st.integers(0, 10**9))
@settings(max_examples=150, deadline=None)
def test_random_steps(seed: int) -> None:
    check(seed)


def test_random_steps_move_often_enough_to_tell() -> None:
    assert sum(check(seed) > 0 for seed in range(40)) >= 10


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(SMALL) - {"inception_v3", "nasnet", "tacotron2"}))
@pytest.mark.parametrize("accumulate", [1, 2])
def test_small_models_keep_their_order(name: str, accumulate: int) -> None:
    capture = capture_of(name, early_updates=False, accumulate=accumulate)
    before, high = accesses(capture.graph), height(capture.graph)
    assert capture.early_updates == 0
    groups = dict(capture.update_groups)
    places = update_early(capture.graph, groups)
    capture.graph.lint()
    assert accesses(capture.graph) == before
    assert (height(capture.graph) <= (1 - LEAST_GAIN) * high) if places else (height(capture.graph) == high)
    assert places == capture_of(name, accumulate=accumulate).early_updates


def test_gradients_that_would_fill_the_peak_go_as_they_come() -> None:
    """Of equal layers with hardly any activations, no more than an eighth of the gradients is ever there."""
    layers = 64
    recorder = Recorder()
    with torch.no_grad(), TracingMode(allow_non_fake_inputs=True):
        parameters = [torch.empty(64, 64) for _ in range(layers)]
        x, rate = torch.empty(64), torch.empty((), dtype=torch.float64)
        for number, tensor in enumerate([*parameters, x, rate]):
            recorder.add_input(number, tensor)
        with recorder.recording():
            value = x.sum()
            gradients = [torch.outer(x, parameter[0]) for parameter in parameters]
            begin = len(recorder.graph.nodes)
            torch._fused_sgd_(
                parameters, gradients, [], lr=rate, momentum=0.0, weight_decay=0.0, dampening=0.0, nesterov=False,
                maximize=False, is_first_step=False,
            )  # fmt: skip
        recorder.add_outputs([value])
    for position, node in enumerate(recorder.graph.nodes):
        node.meta["phase"] = "backward" if position < begin else "update"
    groups = {n.name: 0 for n in recorder.graph.nodes if n.op == "call_function" and is_update(n.target)}
    assert update_early(recorder.graph, groups) <= MOST_MOVES
    found = lifetimes(recorder.graph, instructions_of(recorder.graph))
    assert height(recorder.graph) <= (layers / MOST_MOVES + 2) * 64 * 64 * 4 + max(life.size for life in found)
