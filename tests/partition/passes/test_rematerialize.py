"""What is dropped and made again: against liveness of the graph that comes of it, and bit by bit against the plain one."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from tests.partition.graphs import capture_of, instructions_of, interpret
from tests.support import same_bits
from waterflow.partition.capture.trace import Capture
from waterflow.partition.passes.operators import is_random
from waterflow.partition.passes.rematerialize import choose, lowest, repeat
from waterflow.partition.passes.storages import StorageTable
from waterflow.partition.plan.liveness import operation_memory

aten = torch.ops.aten


def peak_of(graph: fx.Graph) -> int:
    """By liveness alone."""
    return max(memory.peak for memory in operation_memory(graph, instructions_of(graph)))


def check_choice(capture: Capture, limit: int) -> Capture:
    """Drop down to a limit; what the search believes must be what liveness finds in the graph that comes of it."""
    table = StorageTable(capture.graph)
    chosen = choose(table, limit)
    before = [node.name for node in capture.graph.nodes]
    made = repeat(capture, table, chosen)
    assert [node.name for node in capture.graph.nodes] == before
    assert chosen.peak_before == peak_of(capture.graph)
    assert peak_of(made.graph) <= chosen.peak <= chosen.peak_before
    repeated = [node for node in made.graph.nodes if "repeats" in node.meta]
    assert not any(is_random(node.target) for node in repeated)
    assert all(node.meta["phase"] == "backward" for node in repeated)
    return made


@pytest.mark.needs_time("the bits of real models")
@pytest.mark.parametrize(
    "name",
    [
        "cnn_bn",
        "bert",
        "lstm",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("resnet50", "vit", "gpt2", "lstm_cell", "mamba")),
    ],
)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.8])
def test_zoo(name: str, share: float) -> None:
    capture = capture_of(name)
    check_choice(capture, int(share * peak_of(capture.graph)))


def test_what_is_within_the_limit_stays_as_it_is() -> None:
    capture = capture_of("cnn_bn")
    table = StorageTable(capture.graph)
    chosen = choose(table, peak_of(capture.graph))
    assert not chosen.chains and not chosen.dropped and chosen.repeated.operations == 0
    assert str(repeat(capture, table, chosen).graph) == str(capture.graph)


def test_no_more_than_is_needed() -> None:
    capture = capture_of("vit")
    table = StorageTable(capture.graph)
    before = peak_of(capture.graph)
    some, more = choose(table, int(0.9 * before)), choose(table, int(0.7 * before))
    assert more.peak < some.peak <= 0.9 * before and 0 < len(some.dropped) < len(more.dropped)
    assert some.repeated.seconds < more.repeated.seconds
    assert lowest(table).peak <= choose(table, 0).peak


# -- by hand


def captured(step: Any, *inputs: torch.Tensor, backward: str) -> Capture:
    """A capture whose backward pass begins with the first operation of that name."""
    with FakeTensorMode():
        fakes = [torch.empty(x.shape, dtype=x.dtype) for x in inputs]
        module = make_fx(step)(*fakes)
    phase = "forward"
    for node in module.graph.nodes:
        if node.op == "call_function" and backward in str(node.target):
            phase = "backward"
        node.meta["phase"] = phase
    return Capture(module.graph, {}, (), (), {}, {}, 0, True, 0.0)


def targets(capture: Capture, phase: str = "backward") -> list[str]:
    return [
        node.target.overloadpacket.__name__ for node in instructions_of(capture.graph)
        if node.meta["phase"] == phase
    ]  # fmt: skip


def run(capture: Capture, *inputs: torch.Tensor) -> list[torch.Tensor]:
    return interpret(capture.graph, [x.clone() for x in inputs], {})


def both(step: Any, *inputs: torch.Tensor, backward: str) -> tuple[Capture, Capture]:
    """The plain capture and its lowest form, which must compute the same."""
    plain = captured(step, *inputs, backward=backward)
    low = check_choice(plain, 0)
    for one, other in zip(run(plain, *inputs), run(low, *inputs)):
        assert same_bits(one, other)
    return plain, low


X = torch.linspace(-1, 1, 1000)


def test_a_cheap_activation_is_made_again() -> None:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        a = x.exp()
        b = torch.cat([a.sin(), a.cos()])  # the peak is here
        return [b.sum().neg() * a]

    _, low = both(step, X, backward="neg")
    assert targets(low) == ["neg", "exp", "mul"]


def test_what_changes_in_place_is_made_again_with_its_source() -> None:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        a = x.exp().view(10, 100)
        a.relu_()
        b = torch.cat([a.sin(), a.cos()])
        return [b.sum().neg() * a.t()]

    _, low = both(step, X, backward="neg")
    assert targets(low) == ["neg", "exp", "view", "relu_", "t", "mul"]


@pytest.mark.parametrize("change", ["input", "source"])
def test_what_was_read_must_be_as_it_was(change: str) -> None:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        source = x.sinh() if change == "source" else x
        a = source.exp()
        source.add_(1)
        b = torch.cat([a.sin(), a.cos()])
        return [b.sum().neg() * a * source]

    _, low = both(step, X, backward="neg")
    assert "exp" not in targets(low)


def test_random_numbers_are_drawn_once() -> None:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        a = torch.bernoulli(x.abs())
        b = torch.cat([a.sin(), a.cos()])
        return [b.sum().neg() * a]

    low = check_choice(captured(step, X, backward="neg"), 0)
    assert targets(low) == ["neg", "mul"]


def test_a_normalization_updates_its_statistics_once() -> None:
    def step(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> list[torch.Tensor]:
        a = aten.native_batch_norm(x, None, None, mean, variance, True, 0.1, 1e-5)[0]
        b = torch.cat([a.sin(), a.cos()])
        return [b.sum().neg() * a, mean, variance]

    inputs = torch.rand(50, 20), torch.zeros(20), torch.ones(20)
    _, low = both(step, *inputs, backward="neg")
    assert targets(low) == ["neg", "native_batch_norm", "mul"]
    (again,) = (node for node in low.graph.nodes if "repeats" in node.meta and node.target is not operator.getitem)
    assert again.args[3:6] == (None, None, True)


def test_what_costs_more_than_it_frees_stays() -> None:
    """To make the small tensor again the large one would have to be kept."""

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        large = torch.bernoulli(x.repeat(5).abs())
        a = large.view(5, 1000).sum(0)
        b = torch.cat([a.sin(), a.cos()]).repeat(4)
        return [b.sum().neg() * a]

    low = check_choice(captured(step, X, backward="neg"), 0)
    assert targets(low) == ["neg", "mul"]


# -- random programs


def program(choices: list[tuple[int, int, int]], back: list[tuple[int, int]]) -> Any:
    """A forward pass of views, changes in place and results of several tensors, and a backward pass that uses some of it."""

    def step(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> list[torch.Tensor]:
        made = [x]
        for kind, one, other in choices:
            a, b = made[one % len(made)], made[other % len(made)]
            if kind == 0:
                made.append(a.reshape(-1).repeat(4)[:16] + b.reshape(-1).repeat(4)[:16])
            elif kind == 1:
                made.append(a.reshape(-1).repeat(1 + other % 3))
            elif kind == 2:
                made.append(a.t() if a.dim() == 2 else a.view(-1, 4).t())
            elif kind == 3:
                a.mul_(0.5)
            elif kind == 4:
                made.extend(a.reshape(-1).split(8)[:2])
            elif kind == 5:
                made.append(aten.native_batch_norm(
                    a.reshape(-1, 4), None, None, mean, variance, True, 0.1, 1e-5)[other % 2].reshape(-1).repeat(4)
                )  # fmt: skip
            elif kind == 6:
                made.append(a.reshape(-1).sort()[0])
            elif kind == 7:
                made.append(a.sin().add_(1))
            else:
                mean.add_(a.reshape(-1)[:4])
        result = made[-1].sum().neg()
        for one, other in back:
            result = result + (made[one % len(made)].cos().sum() * made[other % len(made)].sum())
        return [result, mean, variance, x.sum()]

    return step


def random_programs(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test of choices of operations, of what the backward pass reads, and of a share of the plain program's peak."""
    operations = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=25)
    back = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)
    return given(operations, back, st.floats(0, 1))(settings(max_examples=60, deadline=None)(test))


def bits_stay(lower: Callable[[Capture, int], Capture], choices: list[Any], back: list[Any], share: float) -> None:
    """A program and what is made of it for a peak of so many bytes return the same."""
    inputs = torch.linspace(-1, 1, 64), torch.zeros(4), torch.ones(4)
    plain = captured(program(choices, back), *inputs, backward="neg")
    before = run(plain, *copy.deepcopy(inputs))
    low = lower(plain, int(share * peak_of(plain.graph)))
    for one, other in zip(before, run(low, *inputs)):
        assert same_bits(one, other)


@pytest.mark.slow
@random_programs
def test_random_programs(choices: list[Any], back: list[Any], share: float) -> None:
    bits_stay(check_choice, choices, back, share)
