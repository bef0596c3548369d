"""Sums in place: the same bits, and only where nothing else looks at the memory."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, fx

from tests.partition.graphs import capture_of, instructions_of, interpret
from tests.support import same_bits
from waterflow.partition.capture.fake_rules import TracingMode
from waterflow.partition.capture.recorder import Recorder
from waterflow.partition.passes.gradient_memory import sum_in_place
from waterflow.partition.plan.liveness import lifetimes

aten = torch.ops.aten
SIDE = 4


def recorded(step: Callable[[list[Tensor]], list[Tensor]], inputs: int = 2) -> fx.Graph:
    """The graph of a step that is a backward pass from beginning to end."""
    recorder = Recorder()
    with torch.no_grad(), TracingMode(allow_non_fake_inputs=True):
        tensors = [torch.empty(SIDE, SIDE) for _ in range(inputs)]
        for number, tensor in enumerate(tensors):
            recorder.add_input(number, tensor)
        with recorder.recording():
            outputs = step(tensors)
        recorder.add_outputs(outputs)
    for node in recorder.graph.nodes:
        node.meta["phase"] = "backward"
    return recorder.graph


def in_place(graph: fx.Graph) -> int:
    return sum(node.target is aten.add_.Tensor for node in graph.nodes)


def test_a_chain_of_sums_has_one_memory() -> None:
    def step(given: list[Tensor]) -> list[Tensor]:
        total = torch.tanh(given[0])
        for _ in range(5):
            total = total + torch.tanh(given[1])
        return [total]

    graph = recorded(step)
    assert sum_in_place(graph) == in_place(graph) == 5
    instructions = instructions_of(graph)
    most = [sum(life.birth <= at <= life.death for life in lifetimes(graph, instructions)) for at in range(11)]
    assert max(most) == 2  # the sum, and what is added to it


def test_what_is_looked_at_otherwise_stays() -> None:
    def sums(given: list[Tensor]) -> list[Tensor]:
        used_again, viewed, turned, single = (torch.tanh(given[0] * n) for n in (1.0, 2.0, 3.0, 4.0))
        return [
            given[0] + given[1],  # memory of the caller
            used_again + given[1], used_again * 2,
            viewed + given[1], viewed.t(),
            turned.t().tanh() + given[1],  # lies otherwise than the sum
            single[0] + given[1],  # is broadcast
            (torch.tanh(given[1]) + given[0]).t(),  # the sum has views
        ]  # fmt: skip

    graph = recorded(sums)
    assert sum_in_place(graph) == in_place(graph) == 0


def test_forward_passes_are_left_alone() -> None:
    graph = recorded(lambda given: [torch.tanh(given[0]) + given[1]])
    for node in graph.nodes:
        node.meta["phase"] = "forward"
    assert sum_in_place(graph) == 0


def random_step(seed: int) -> Callable[[list[Tensor]], list[Tensor]]:
    def step(given: list[Tensor]) -> list[Tensor]:
        draw = random.Random(seed)
        values = list(given)
        for _ in range(draw.randint(3, 14)):
            one, other = draw.choice(values[-4:]), draw.choice(values)
            kind = draw.choice(["sum", "sum", "sum", "scaled", "tanh", "view", "split"])
            if kind == "sum":
                values.append(one + other)
            elif kind == "scaled":
                values.append(torch.add(one, other, alpha=2))
            elif kind == "tanh":
                values.append(torch.tanh(one))
            elif kind == "view":
                values.append(one.t())
            else:
                values += torch.var_mean(one, 1, keepdim=True)
        return draw.sample(values, 2)

    return step


def check(seed: int) -> int:
    plain, summed = recorded(random_step(seed)), recorded(random_step(seed))
    done = sum_in_place(summed)
    summed.lint()
    torch.manual_seed(seed)
    inputs = [torch.randn(SIDE, SIDE) for _ in range(2)]
    before = [t.clone() for t in inputs]
    for mine, reference in zip(interpret(summed, inputs, {}), interpret(plain, inputs, {}), strict=True):
        assert same_bits(mine, reference)
    assert all(map(same_bits, inputs, before))
    return done


@pytest.mark.slow
@given(st.integers(0, 10**9))
@settings(max_examples=200, deadline=None)
def test_random_steps_keep_their_bits(seed: int) -> None:
    check(seed)


def test_random_steps_have_sums_often_enough_to_tell() -> None:
    assert sum(check(seed) > 0 for seed in range(40)) >= 10


def test_gradients_of_a_weight_used_again_and_again() -> None:
    assert in_place(capture_of("lstm_cell").graph) > 0
