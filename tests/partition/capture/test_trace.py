"""What a captured step says of itself."""

from __future__ import annotations

import gc
import os
import threading
from itertools import groupby
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW

from benchmarks.zoo import FULL
from tests.partition.graphs import capture_of, instructions_of, spec_of
from tests.support import Net, images, of_target, same_bits
from waterflow.errors import CaptureError
from waterflow.partition.capture.substitution import no_collections
from waterflow.partition.capture.trace import StepSpec, capture_step


def spec_for(model: nn.Module, optimizer: Any, step: Any = None, **options: Any) -> StepSpec:
    given = {"update": True, "accumulate": 1, "clip_norm": None, "clip_value": None, "autocast": None} | options
    return StepSpec(
        model=model, compute_loss=step or of_target(F.cross_entropy), optimizer=optimizer,
        device=torch.device("cpu"), **given,
    )  # fmt: skip


def capture_net(optimizer: Any = None, **options: Any) -> Any:
    model = Net()
    spec = spec_for(model, (optimizer or AdamW)(model.parameters(), lr=0.1), **options)
    return capture_step(spec, list(images(1)[0]), None)


@pytest.mark.needs_time("real models are captured")
@pytest.mark.parametrize("name", ["cnn_bn", "bert", "lstm"])
def test_phases_follow_one_another(name: str) -> None:
    phases = [node.meta["phase"] for node in instructions_of(capture_of(name, early_updates=False).graph)]
    assert [phase for phase, _ in groupby(phases)] == ["forward", "backward", "update"]


@pytest.mark.parametrize("optimizer", [SGD, Adam, AdamW])
def test_inputs(optimizer: Any) -> None:
    capture = capture_net(optimizer)
    kinds = [given.kind for given in capture.inputs]
    assert len(kinds) == sum(node.op == "placeholder" for node in capture.graph.nodes)
    order = ["parameter", "buffer", "state", "rate", "batch"]
    present = [kind for kind, _ in groupby(kinds)]
    assert present == [kind for kind in order if kind in present]
    assert kinds.count("parameter") == 6 and kinds.count("buffer") == 3 and kinds.count("batch") == 2
    assert kinds.count("state") == (0 if optimizer is SGD else 18)
    assert [given.leaf for given in capture.inputs if given.kind == "batch"] == [0, 1]


def test_one_update_a_group() -> None:
    model = Net()
    groups = [{"params": [p], "lr": 0.1} for p in model.parameters()]
    capture = capture_step(spec_for(model, SGD(groups)), list(images(1)[0]), None)
    assert sorted(capture.update_groups.values()) == list(range(6))


def test_accumulation_adds_and_updates_apart() -> None:
    gathering = capture_net(accumulate=2, update=False)
    updating = capture_net(accumulate=2, update=True)
    assert [given.kind for given in gathering.inputs].count("accumulator") == 6
    assert not gathering.update_groups and len(updating.update_groups) == 1
    assert {node.meta["phase"] for node in instructions_of(gathering.graph)} == {"forward", "backward", "update"}


def test_tracing_leaves_everything_as_it_was() -> None:
    """Values, attributes, gradients, modes and generators."""
    torch.manual_seed(0)
    model = Net(dropout=0.5)
    model.note = "mine"  # type: ignore[assignment]
    optimizer = AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    attributes = [(name, dict(module.__dict__)) for name, module in model.named_modules()]
    random = torch.get_rng_state()
    capture_step(spec_for(model, optimizer), list(images(1)[0]), None)
    assert all(same_bits(before[name], value) for name, value in model.state_dict().items())
    assert [(name, dict(module.__dict__)) for name, module in model.named_modules()] == attributes
    assert all(type(p) is nn.Parameter and p.grad is None for p in model.parameters())
    assert torch.equal(random, torch.get_rng_state())
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 1e-3
    assert torch.is_grad_enabled() and not torch._C._len_torch_dispatch_stack()


def test_a_failed_attempt_leaves_everything_as_it_was() -> None:
    class Failing(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.norm(self.first(x))
            raise ValueError("no")

    torch.manual_seed(0)
    model = Failing()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CaptureError, match="ValueError: no") as caught:
        capture_step(spec_for(model, SGD(model.parameters(), lr=0.1)), list(images(1)[0]), None)
    assert "test_trace.py:" in caught.value.where
    assert all(same_bits(before[name], value) for name, value in model.state_dict().items())
    assert not torch._C._len_torch_dispatch_stack()


def test_nothing_of_the_graph_is_real() -> None:
    """The graph holds shapes: it would keep memory alive else."""
    capture = capture_net()
    for node in capture.graph.nodes:
        for value in torch.utils._pytree.tree_leaves(node.meta.get("val")):
            assert not isinstance(value, torch.Tensor) or isinstance(value, torch._subclasses.FakeTensor)


def test_threads_capture_one_after_the_other() -> None:
    ends: list[Any] = []

    def work(width: int) -> None:
        model = Net(width=width)
        made = capture_step(spec_for(model, AdamW(model.parameters())), list(images(1)[0]), None)
        ends.append(made.nodes - len(made.update_groups))  # where parameters change depends on their size

    threads = [threading.Thread(target=work, args=(8 + number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ends) == 6 and len(set(ends)) == 1


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (lambda model, batch: model(batch[0]), "must be a scalar"),
        (lambda model, batch: 3.0, "returned float"),
        (lambda model, batch: (model(batch[0]).sum(), {"one": 1.0}), "metric 'one' is a float"),
        (lambda model, batch: torch.tensor(1.0), "does not require grad"),
    ],
)
def test_losses_that_are_none(step: Any, reason: str) -> None:
    with pytest.raises(CaptureError, match=reason):
        model = Net()
        capture_step(spec_for(model, SGD(model.parameters(), lr=0.1), step), list(images(1)[0]), None)


def test_nodes_of_a_resnet() -> None:
    """1,056 nodes with the fused update were measured when this was designed."""
    zoo = FULL["resnet50"]
    model = zoo.build()
    batch = zoo.batch(1, torch.Generator().manual_seed(0))
    capture = capture_step(spec_for(model, zoo.optimizer(model.parameters()), zoo.step), list(batch), None)
    assert len(instructions_of(capture.graph)) <= 1056


def test_seconds_are_told() -> None:
    spec, leaves, structure = spec_of("mlp_dropout")
    capture = capture_step(spec, leaves, structure)
    assert capture.seconds > 0 and capture.nodes >= len(instructions_of(capture.graph))


@pytest.mark.parametrize("was_on", [True, False])
def test_a_child_that_is_forked_meanwhile_collects_as_before(was_on: bool) -> None:
    (gc.enable if was_on else gc.disable)()
    try:
        with no_collections():
            assert not gc.isenabled()
            if (child := os.fork()) == 0:
                os._exit(gc.isenabled())
        assert gc.isenabled() == was_on
    finally:
        gc.enable()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == was_on
