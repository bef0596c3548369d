"""Updates that come early change no bit, and give gradients' memory back within the step."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

import waterflow as wf
from benchmarks.zoo import SMALL
from tests.support import MiB, Trained, assert_same, compare, images, train_step
from waterflow.executor.engine import Engine

OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.05),
    "sgd, momentum": partial(SGD, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "sgd, nesterov": partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    "adam": partial(Adam, lr=1e-3),
    "adam, amsgrad": partial(Adam, lr=1e-3, amsgrad=True, weight_decay=1e-2),
    "adamw": partial(AdamW, lr=1e-3),
    "adamw, tensor rate": lambda p: AdamW(p, lr=torch.tensor(1e-3), fused=True),
}


def deep(width: int = 37, layers: int = 6) -> nn.Sequential:
    """More parameters than activations, in sizes that fill no vector of a processor."""
    hidden = [(nn.Linear(width, width), nn.Tanh()) for _ in range(layers)]
    return nn.Sequential(nn.Linear(6, width), *itertools.chain(*hidden), nn.Linear(width, 4))


def places(trained: Trained) -> int:
    """To how many places updates of the last step moved."""
    assert trained.step is not None and trained.step.opaque_reason is None
    variants = trained.step._bound_steps._bound_steps.values()
    return max(variant.captured.capture.early_updates for variant in variants)


def both(make: Any, batches: Any, early: bool = True, **options: Any) -> tuple[Trained, Trained]:
    """With and without early updates; eager, too, all with the same bits. ``early``: whether there are any."""
    mine = compare(make, batches, **options)
    plain = train_step(make, batches, early_updates=False, **options)
    assert_same(mine, plain)
    assert places(plain) == 0 and (places(mine) > 0) == early
    return mine, plain


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("where", ["alone", "engine"])
def test_kinds(kind: str, where: str) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = deep()
        return model, OPTIMIZERS[kind](model.parameters())

    if where == "engine":
        with Engine(memory=256 * MiB, lanes=2) as engine:
            compare(make, images(4), engine=engine)
            return
    mine, plain = both(make, images(4))
    for trained in (mine, plain):
        assert trained.step is not None and trained.step.measured_height > 0
    assert mine.step.measured_height < 0.6 * plain.step.measured_height  # type: ignore[union-attr]
    assert mine.step.predicted_height < 0.6 * plain.step.predicted_height  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(SMALL) - {"inception_v3", "nasnet", "tacotron2"}))
@pytest.mark.parametrize("kind", ["sgd, nesterov", "adam, amsgrad"])
def test_small_models(name: str, kind: str) -> None:
    zoo = SMALL[name]
    generator = torch.Generator().manual_seed(3)
    batches = [zoo.batch(1, generator) for _ in range(3)] if name not in ("cnn_bn", "resnet50") else []
    batches = batches or [zoo.batch(2, generator) for _ in range(3)]

    def make() -> tuple[nn.Module, Optimizer]:
        model = zoo.build()
        return model, OPTIMIZERS[kind](model.parameters())

    mine, plain = (train_step(make, batches, step=zoo.step, early_updates=early) for early in (True, False))
    assert_same(mine, plain)
    if places(mine):
        step, other = mine.step, plain.step
        assert step is not None and other is not None
        assert step.predicted_height <= 0.99 * other.predicted_height
        assert step.plan.height < other.plan.height


@pytest.mark.parametrize(
    ("options", "early"),
    [
        ({"accumulate": 2}, True),  # gradients are added to their sums early, and those are updated at the end
        ({"clip_grad_value": 0.01}, True),
        ({"clip_grad_norm": 0.1}, False),  # all gradients are read before the first update
        ({"accumulate": 2, "clip_grad_norm": 0.1, "clip_grad_value": 0.02}, True),
    ],
)
def test_accumulation_and_clipping(options: dict[str, Any], early: bool) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = deep()
        return model, AdamW(model.parameters(), lr=1e-3)

    mine, plain = both(make, images(4), early, **options)
    assert mine.step is not None and plain.step is not None
    assert (mine.step.measured_height < 0.8 * plain.step.measured_height) == early


def test_several_groups_and_what_is_frozen() -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = deep()
        for parameter in model[3].parameters():
            parameter.requires_grad_(False)
        parameters = list(model.parameters())
        groups = [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.02, "momentum": 0.0}]
        return model, SGD(groups, lr=0.01, momentum=0.9)

    both(make, images(4))


class Tied(nn.Module):
    """An embedding that is the output layer, too: read at both ends of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(51, 23)
        self.layers = deep(23, 5)[1:-1]
        self.out = nn.Linear(23, 51, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(self.embedding(tokens)))


def test_tied_weights() -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = Tied()
        return model, AdamW(model.parameters(), lr=1e-2)

    random = torch.Generator().manual_seed(1)
    batches = [tuple(torch.randint(51, (2, 3), generator=random) for _ in range(2)) for _ in range(4)]
    both(make, batches, loss=lambda output, target: F.cross_entropy(output.flatten(0, 1), target.flatten()))


class Watched(nn.Module):
    """A weight that is read a last time behind the whole backward pass of the layers above it."""

    def __init__(self, shared: bool) -> None:
        super().__init__()
        self.layers = deep(layers=8)
        self.register_buffer("shown", self.layers[5].weight.data if shared else self.layers[5].weight.data.clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.layers[0](x)) @ self.shown  # read backwards after most updates
        return self.layers[2:](x)


@pytest.mark.parametrize("shared", [False, True])
def test_memory_that_is_seen_under_two_names(shared: bool) -> None:
    """A buffer that lies on a parameter's memory: nothing in the graph tells that one is the other."""

    def make() -> tuple[nn.Module, Optimizer]:
        model = Watched(shared)
        return model, SGD(model.parameters(), lr=0.1, momentum=0.9)

    both(make, images(4), early=not shared)


def test_a_batch_that_is_memory_of_the_model() -> None:
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        x, target, weight = batch
        return F.cross_entropy(model[1:](torch.tanh(model[0](x)) @ weight), target)

    trained = []
    for early in (True, False):
        torch.manual_seed(5)
        model = deep()
        step = wf.Step(model, step=loss, optimizer=SGD(model.parameters(), lr=0.1), early_updates=early)
        results = [step((*batch, model[9].weight.detach())) for batch in images(3)]
        trained.append(Trained(results, model, step.optimizer, step))
    assert places(trained[0]) > 0 and places(trained[1]) == 0
    assert_same(*trained)


@pytest.mark.parametrize("name", ["cnn_bn", "resnet50"])
def test_a_network_for_images_stays_as_it_is(name: str) -> None:
    """Activations are higher than gradients, or convolutions take memory that no prediction knows."""
    zoo = SMALL[name]
    model = zoo.build()
    step = wf.Step(model, step=zoo.step, optimizer=zoo.optimizer(model.parameters()))
    batch = zoo.batch(4, torch.Generator().manual_seed(0))
    plain = wf.Step(model, step=zoo.step, optimizer=zoo.optimizer(model.parameters()), early_updates=False)
    assert step.footprint_for(batch).offsets() == plain.footprint_for(batch).offsets()
