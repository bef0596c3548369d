"""Costs of operations: by hand, and their arithmetic against torch's counter over an eager step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import waterflow as wf
from benchmarks.zoo import SMALL
from tests.partition.graphs import capture_of, instructions_of
from waterflow.partition.plan.costs import Cost, operation_cost

aten = torch.ops.aten


def costs_of(step: Callable[..., Any], *shapes: tuple[int, ...]) -> list[Cost]:
    """The costs of a function's operations, each input a tensor of this shape."""
    with FakeTensorMode():
        graph = make_fx(step)(*(torch.empty(shape) for shape in shapes)).graph
    return [operation_cost(node) for node in instructions_of(graph)]


def test_a_product_of_matrices() -> None:
    assert costs_of(lambda a, b: a @ b, (10, 20), (20, 5)) == [Cost(4 * (200 + 100 + 50), 2 * 10 * 20 * 5, 1)]


def test_elementwise_work_counts_bytes_alone() -> None:
    assert costs_of(lambda a, b: a * b, (10, 10), (10, 10)) == [Cost(1200, 0, 1)]
    assert costs_of(lambda a, b: a.add_(b), (10, 10), (10, 10)) == [Cost(1200, 0, 1)]


@pytest.mark.parametrize("step", [
    lambda a: a.view(5, 20).t(), aten._unsafe_view.default, lambda a: aten.unsafe_split(a, 2), torch.empty_like,
], ids=["views", "undeclared view", "undeclared views", "bare memory"])  # fmt: skip
def test_what_starts_no_kernel_costs_nothing(step: Callable[..., Any]) -> None:
    shaped = (lambda a: step(a, [5, 20])) if step is aten._unsafe_view.default else step
    costs = costs_of(shaped, (10, 10))
    assert costs and set(costs) == {Cost()}


def test_convolutions() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(x, weight)

    # 2 images, 3 channels to 5, 6 x 6 places of a 3 x 3 window.
    moved = 4 * (2 * 3 * 64 + 5 * 3 * 9 + 2 * 5 * 36)
    assert costs_of(step, (2, 3, 8, 8), (5, 3, 3, 3)) == [Cost(moved, 2 * 2 * 5 * 36 * 3 * 9, 1)]


@pytest.mark.parametrize(("tensors", "each", "launches"), [(36, 10, 1), (37, 10, 2), (1, 320 * 65_536 + 1, 2)])
def test_updates_of_lists(tensors: int, each: int, launches: int) -> None:
    graph = fx.Graph()
    with FakeTensorMode():
        *lists, steps = [[graph.placeholder(f"list{i}_{j}") for j in range(tensors)] for i in range(5)]
        for nodes, shape in [*((one, (each,)) for one in lists), (steps, ())]:
            for node in nodes:
                node.meta["val"] = torch.empty(shape)
    update = graph.call_function(aten._fused_adam_.default, (*lists, [], steps))
    # Four lists are read, and written, gradients too by their schema; the counts of steps are read.
    assert operation_cost(update) == Cost(4 * (8 * tensors * each + tensors), 0, launches)


def test_recurrent_layers() -> None:
    nodes = instructions_of(capture_of("lstm").graph)
    layers = [(n, operation_cost(n)) for n in nodes if "mkldnn_rnn_layer" in str(n.target)]
    assert layers
    for node, cost in layers:
        x, *weights = (source.meta["val"] for source in node.args[:3])  # type: ignore[union-attr]
        forward = 2 * x.shape[0] * x.shape[1] * sum(weight.numel() for weight in weights)
        assert cost.flops == forward * (2 if "backward" in str(node.target) else 1) > 0


@pytest.mark.parametrize("name", ["mlp_dropout", "cnn_bn", "bert", "vit"])
def test_arithmetic_is_what_torch_counts_in_an_eager_step(name: str) -> None:
    zoo = SMALL[name]
    model = zoo.build()
    batch = zoo.batch(2, torch.Generator().manual_seed(1))
    with FlopCounterMode(display=False) as counter:
        zoo.step(model, batch).backward()
    # The counter knows no attention on the CPU.
    nodes = [node for node in instructions_of(capture_of(name).graph) if "attention" not in str(node.target)]
    assert sum(operation_cost(node).flops for node in nodes) == counter.get_total_flops() > 0


def test_a_plan_carries_its_costs() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    step = wf.Step(model, loss=nn.functional.mse_loss, optimizer=torch.optim.SGD(model.parameters()))
    offsets = step.footprint_for((torch.zeros(3, 8), torch.zeros(3, 4))).offsets()
    assert len(offsets.costs) == len(offsets.heights)
    # Forward, and the gradient of the weights; nobody asks for that of the input.
    assert sum(cost.flops for cost in offsets.costs) == 2 * (2 * 3 * 8 * 4)
    assert sum(cost.launches for cost in offsets.costs) == sum(cost.bytes > 0 for cost in offsets.costs)
    assert offsets.by("death").costs == offsets.costs
