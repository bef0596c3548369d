"""What a user's own loop may do around a Step, and must find as if it were eager."""

from __future__ import annotations

import copy
import gc
import inspect
import weakref
from collections import namedtuple
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import waterflow as wf
from tests.support import MiB, Net, Trained, assert_same, compare, fuse, images, of_target, same_bits, train_eager, train_step
from waterflow.executor.engine import Engine, within


@pytest.fixture(params=["alone", "engine"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine | None]:
    """Every behaviour holds outside of an engine and inside of one."""
    if request.param == "alone":
        yield None
        return
    with Engine(memory=256 * MiB, lanes=2) as made:
        yield made


def sgd(model: nn.Module) -> Optimizer:
    return SGD((p for p in model.parameters() if p.requires_grad), lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def making(model: Any, optimizer: Any = adamw, **options: Any) -> Any:
    def make() -> tuple[nn.Module, Optimizer]:
        made = model(**options)
        return made, optimizer(made)

    return make


def at_step(number: int, act: Any) -> Any:
    """Does ``act(model, optimizer)`` before step ``number``."""
    return lambda model, optimizer: lambda now: act(model, optimizer) if now == number else None


# -- the model between steps


def test_train_and_eval(engine: Engine | None) -> None:
    def during(model: Net, optimizer: Optimizer) -> Any:
        return lambda number: model.norm.train(number % 2 == 0)

    compare(making(Net, dropout=0.2), images(6), during=during, engine=engine)


def test_evaluation_between_steps(engine: Engine | None) -> None:
    seen: list[torch.Tensor] = []

    def during(model: Net, optimizer: Optimizer) -> Any:
        def act(number: int) -> None:
            model.eval()
            with torch.no_grad():
                seen.append(model(torch.ones(3, 6)))
            model.train()

        return act

    compare(making(Net), images(4), during=during, engine=engine)
    assert all(map(same_bits, seen[:4], seen[4:]))


def test_dropout_changed(engine: Engine | None) -> None:
    def during(model: Net, optimizer: Optimizer) -> Any:
        return lambda number: setattr(model.drop, "p", [0.5, 0.5, 0.1, 0.0, 0.5, 1.0][number])

    compare(making(Net, dropout=0.5), images(6), during=during, engine=engine)


def test_batch_norm_momentum_changed(engine: Engine | None) -> None:
    during = at_step(2, lambda model, _: setattr(model.norm, "momentum", 0.5))
    compare(making(Net), images(4), during=during, engine=engine)


@pytest.mark.parametrize("what", ["parameter", "parameter's data", "buffer", "buffer's data", "weight to view"])
def test_tensor_replaced(what: str, engine: Engine | None) -> None:
    def act(model: Net, optimizer: Optimizer) -> None:
        if what == "parameter":
            model.first.bias = nn.Parameter(torch.ones(16))
            optimizer.param_groups[0]["params"][1] = model.first.bias
        elif what == "parameter's data":
            model.first.weight.data = torch.full((16, 6), 0.1)
        elif what == "buffer":
            model.norm.running_mean = torch.ones(16)
        elif what == "buffer's data":
            model.norm.running_mean.data = torch.ones(16)
        else:
            model.first.weight.data = torch.full((6, 16), 0.1).t()

    compare(making(Net), images(5), during=at_step(2, act), engine=engine)


def test_parameter_changed_in_place(engine: Engine | None) -> None:
    def act(model: Net, optimizer: Optimizer) -> None:
        with torch.no_grad():
            model.last.weight.mul_(0.5)
            model.norm.running_var.fill_(2.0)

    compare(making(Net), images(5), during=at_step(2, act), engine=engine)


def test_layer_replaced(engine: Engine | None) -> None:
    def act(model: Net, optimizer: Optimizer) -> None:
        model.drop = nn.Tanh()

    compare(making(Net), images(5), during=at_step(2, act), engine=engine)


def test_model_made_double(engine: Engine | None) -> None:
    batches = images(2) + [(x.double(), y) for x, y in images(3)]

    def act(model: Net, optimizer: Optimizer) -> None:
        model.double()
        optimizer.state.clear()

    compare(making(Net), batches, during=at_step(2, act), engine=engine)


@pytest.mark.parametrize("freeze", [True, False])
def test_layer_frozen_and_thawed(freeze: bool, engine: Engine | None) -> None:
    def during(model: Net, optimizer: Optimizer) -> Any:
        model.first.requires_grad_(freeze)
        return lambda number: model.first.requires_grad_(not freeze) if number == 2 else None

    compare(making(Net), images(5), during=during, engine=engine)


def test_everything_frozen_but_one_layer(engine: Engine | None) -> None:
    class Head(Net):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.last.requires_grad_(True)

    compare(making(Head, sgd), images(5), engine=engine)
    compare(making(Head, adamw), images(5), engine=engine)


def test_tied_parameters(engine: Engine | None) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(10, 6)
            self.middle = nn.Linear(6, 6)
            self.out = nn.Linear(6, 10, bias=False)
            self.out.weight = self.embed.weight

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(torch.tanh(self.middle(self.embed(tokens))))

    batches = [(y, (y + 1) % 4) for _, y in images(5)]
    compare(making(Tied), batches, engine=engine)


@pytest.mark.parametrize("layer", [lambda: nn.Linear(6, 6), lambda: nn.BatchNorm1d(6)], ids=["linear", "norm"])
def test_layer_under_two_names(layer: Any, engine: Engine | None) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        shared = layer()
        model = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(6, 4))
        return model, sgd(model)

    compare(make, images(5), engine=engine)


class Partly(nn.Module):
    """Uses ``second`` only when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 4)
        self.second = nn.Linear(6, 4)
        self.use = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x) if self.use else self.first(x)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_parameter_unused(optimizer: Any, engine: Engine | None) -> None:
    trained = compare(making(Partly, optimizer), images(5), engine=engine)
    assert not trained.optimizer.state.get(trained.model.second.weight)


def test_parameter_used_from_some_step_on(engine: Engine | None) -> None:
    """Its state begins with its first gradient."""
    during = at_step(2, lambda model, _: setattr(model, "use", True))
    compare(making(Partly, adamw), images(5), during=during, engine=engine)


def test_parameter_with_momentum_used_from_some_step_on(engine: Engine | None) -> None:
    """Each its own group: torch's fused SGD cannot begin one buffer of a group later than the others."""

    def make() -> tuple[nn.Module, Optimizer]:
        model = Partly()
        groups = [{"params": model.first.parameters()}, {"params": model.second.parameters()}]
        return model, SGD(groups, lr=0.1, momentum=0.9, dampening=0.5)

    during = at_step(2, lambda model, _: setattr(model, "use", True))
    compare(make, images(5), during=during, engine=engine)


def test_plain_attributes_are_seen(engine: Engine | None) -> None:
    class Scaled(Net):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

    def during(model: nn.Module, optimizer: Optimizer) -> Any:
        model.scale = 1.0
        return lambda number: setattr(model, "scale", [1.0, 1.0, 0.5, 2, 1.0][number])

    compare(making(Scaled), images(5), during=during, engine=engine)


class Settings:
    def __init__(self) -> None:
        self.scale = 1.0


@pytest.mark.parametrize("holder", ["tuple", "list", "item of list", "dict", "object", "class", "tensor"])
def test_attributes_that_hold_values_are_seen(holder: str, engine: Engine | None) -> None:
    class Scaled(Net):
        factor = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.pair: tuple[float, ...] = (1.0,)
            self.scales = [1.0]
            self.named = {"scale": 1.0}
            self.settings = Settings()
            self.tensor = torch.tensor(1.0)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = self.pair[0] * self.scales[0] * self.named["scale"] * self.settings.scale * self.factor
            return super().forward(x) * scale * self.tensor

    def act(model: Any, optimizer: Optimizer) -> None:
        if holder == "tuple":
            model.pair = (2.0,)
        elif holder == "list":
            model.scales = [2.0]
        elif holder == "item of list":
            model.scales[0] = 2.0
        elif holder == "dict":
            model.named["scale"] = 2.0
        elif holder == "object":
            model.settings.scale = 2.0
        elif holder == "class":
            type(model).factor = 2.0
        else:
            model.tensor = torch.tensor(2.0)

    def during(model: Any, optimizer: Optimizer) -> Any:
        type(model).factor = 1.0
        return lambda now: act(model, optimizer) if now == 2 else None

    compare(making(Scaled), images(5), during=during, engine=engine)


weight_of_penalty = 0.0


@pytest.mark.needs_time("the first capture of a process imports much of torch")
@pytest.mark.parametrize("holder", ["global", "cell", "attribute"])
def test_values_that_the_step_function_reads_are_seen(holder: str, engine: Engine | None) -> None:
    """Annealed weights of a loss are often a global, or a variable of the function around."""
    global weight_of_penalty
    weight = 0.0
    settings = Settings()

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        penalty = sum(p.square().sum() for p in model.parameters())
        if holder == "global":
            return loss + weight_of_penalty * penalty
        return loss + (weight if holder == "cell" else settings.scale) * penalty

    def during(model: nn.Module, optimizer: Optimizer) -> Any:
        def act(number: int) -> None:
            nonlocal weight
            global weight_of_penalty
            weight = weight_of_penalty = settings.scale = number * 0.1

        return act

    compare(making(Net), images(4), step=step, during=during, engine=engine)


squashing: Any = torch.nn.functional.elu


@pytest.mark.parametrize("others", [F.selu, torch.celu, nn.Softsign()], ids=["function", "builtin", "module"])
def test_a_global_that_stands_for_another_function_is_seen(others: Any, engine: Engine | None) -> None:
    """Functions of a library, too: ``activation = F.elu`` in a notebook's cell, and later ``F.selu``."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(squashing(model(batch[0])), batch[1])

    def during(model: nn.Module, optimizer: Optimizer) -> Any:
        def act(number: int) -> None:
            global squashing
            squashing = F.elu if number < 2 else others

        return act

    compare(making(Net), images(4), step=step, during=during, engine=engine)


def test_settings_of_a_loss_module_are_seen(engine: Engine | None) -> None:
    def train(run: Any, **options: Any) -> Trained:
        loss = nn.CrossEntropyLoss(label_smoothing=0.0)
        during = at_step(2, lambda *_: setattr(loss, "label_smoothing", 0.3))
        return run(making(Net), images(5), loss=loss, during=during, **options)

    assert_same(train(train_step, engine=engine), train(train_eager))


# -- what forward may do


def test_buffer_assigned_in_forward(engine: Engine | None) -> None:
    class Averaging(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return super().forward(x - self.mean)

    compare(making(Averaging), images(5), engine=engine)


def test_buffer_changed_in_place_and_swapped(engine: Engine | None) -> None:
    class Queue(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("older", torch.zeros(6))
            self.register_buffer("newer", torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.older, self.newer = self.newer, x.mean(0).detach()
            return super().forward(x + self.older)

    compare(making(Queue), images(5), engine=engine)


def test_buffers_that_change_places(engine: Engine | None) -> None:
    class Turning(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("one", torch.zeros(6))
            self.register_buffer("two", torch.ones(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.one, self.two = self.two, self.one
            return super().forward(x + self.one)

    compare(making(Turning), images(5), engine=engine)


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clamp(-0.5, 0.5)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return gradient * torch.where(x.abs() > 0.5, 0.25, 1.0)


def test_custom_autograd_function(engine: Engine | None) -> None:
    class Custom(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Clipped.apply(super().forward(x))

    compare(making(Custom), images(5), engine=engine)


def test_checkpointed_layers(engine: Engine | None) -> None:
    from torch.utils.checkpoint import checkpoint

    class Recomputed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = checkpoint(lambda t: torch.tanh(self.first(t)), x, use_reentrant=False)
            return self.last(hidden)

    compare(making(Recomputed), images(5), engine=engine)


def test_gradient_inside_forward(engine: Engine | None) -> None:
    """A gradient penalty: ``autograd.grad`` with create_graph in the loss."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        x = batch[0].clone().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return F.cross_entropy(output, batch[1]) + slope.square().mean()

    class Smooth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.first(x)))

    compare(making(Smooth), images(5), step=step, engine=engine)


def test_hooks_that_compute(engine: Engine | None) -> None:
    class Hooked(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first.register_forward_hook(lambda module, args, output: output * 1.5)
            self.last.register_forward_pre_hook(lambda module, args: (args[0] + 1,))

    compare(making(Hooked), images(5), engine=engine)


def test_hook_added_and_removed_between_steps(engine: Engine | None) -> None:
    def during(model: Net, optimizer: Optimizer) -> Any:
        handles: list[Any] = []

        def act(number: int) -> None:
            if number == 2:
                handles.append(model.first.register_forward_hook(lambda module, args, output: output * 0.5))
            if number == 4:
                handles.pop().remove()

        return act

    compare(making(Net), images(6), during=during, engine=engine)


def test_weight_norm_and_spectral_norm(engine: Engine | None) -> None:
    from torch.nn.utils import parametrizations

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = parametrizations.weight_norm(nn.Linear(6, 16))
            self.last = parametrizations.spectral_norm(nn.Linear(16, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.relu(self.first(x)))

    compare(making(Normed), images(5), engine=engine)


def test_every_way_to_draw(engine: Engine | None) -> None:
    class Noisy(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 0.1 * torch.randn_like(x) + torch.rand(6) + torch.randint(3, (6,)) - torch.rand_like(x)
            x = x[:, torch.randperm(6)] * torch.bernoulli(torch.full((6,), 0.7)) + torch.normal(0.0, 1.0, (6,))
            x = F.alpha_dropout(F.feature_alpha_dropout(x, 0.1, self.training), 0.1, self.training)
            noise = torch.empty(8, 6).normal_().uniform_().exponential_()
            return F.rrelu(super().forward(x + noise), training=True)

    compare(making(Noisy, dropout=0.3), images(5), engine=engine)


# -- batches


def test_odd_last_batch(engine: Engine | None, no_captures: Any) -> None:
    batches = images(3) + images(1, size=5) + images(3) + images(1, size=5)
    compare(making(Net, dropout=0.2), batches, engine=engine)
    assert no_captures.captures == 2


def test_many_shapes(engine: Engine | None) -> None:
    batches = [images(1, size=size)[0] for size in [*range(2, 22), 2, 3]]
    compare(making(Net), batches, engine=engine)


def test_other_layouts(engine: Engine | None) -> None:
    x, y = images(1, size=8)[0]
    wide = torch.randn(8, 12)
    compare(making(Net), [(x, y), (wide[:, ::2], y), (x.T.contiguous().T, y), (x, y)], engine=engine)


Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize("kind", ["dict", "nested", "named", "list", "extra", "single"])
def test_batch_structures(kind: str, engine: Engine | None) -> None:
    def pack(x: torch.Tensor, y: torch.Tensor) -> Any:
        return {
            "dict": {"x": x, "y": y},
            "nested": ({"x": [x, None]}, (y, 2, "sum")),
            "named": Pair(x, y),
            "list": [x, y],
            "extra": (x, y, 0.5),
            "single": torch.cat([x, y[:, None]], 1),
        }[kind]

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        scale = 1.0
        if kind == "dict":
            x, y = batch["x"], batch["y"]
        elif kind == "nested":
            (x, _), (y, scale, _) = batch[0]["x"], batch[1]
        elif kind == "named":
            x, y = batch.x, batch.y
        elif kind == "list":
            assert isinstance(batch, list)
            x, y = batch
        elif kind == "extra":
            x, y, scale = batch
        else:
            x, y = batch[:, :-1], batch[:, -1].long()
        return F.cross_entropy(model(x), y) * scale

    compare(making(Net), [pack(*batch) for batch in images(4)], step=step, engine=engine)


def test_model_that_returns_its_loss(engine: Engine | None) -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": F.cross_entropy(self.net(x), y)}

    def train(run: Any, **options: Any) -> Trained:
        return run(making(Whole), [{"x": x, "y": y} for x, y in images(4)], **options)

    reference = train(train_eager, step=lambda model, batch: model(**batch)["loss"])
    torch.manual_seed(5)
    model, optimizer = making(Whole)()
    job = wf.Step(model, optimizer=optimizer, engine=engine)
    results = [job({"x": x, "y": y}) for x, y in images(4)]
    assert_same(Trained(results, model, optimizer), reference)


def test_several_inputs(engine: Engine | None) -> None:
    class Two(Net):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return super().forward(x.masked_fill(mask, 0.0))

    compare(making(Two), [(x, x > 1, y) for x, y in images(4)], engine=engine)


def test_batch_changed_by_the_caller_afterwards(engine: Engine | None) -> None:
    """A loader may fill the same tensors again and again."""
    buffer = images(1)[0]

    def train(run: Any, **options: Any) -> Trained:
        def during(model: nn.Module, optimizer: Optimizer) -> Any:
            fresh = images(5, seed=3)

            def act(number: int) -> None:
                for target, source in zip(buffer, fresh[number]):
                    target.copy_(source)

            return act

        return run(making(Net), [buffer] * 5, during=during, **options)

    assert_same(train(train_step, engine=engine), train(train_eager))


def test_step_does_not_change_its_batch(engine: Engine | None) -> None:
    batches = images(3)
    kept = copy.deepcopy(batches)
    train_step(making(Net), batches, engine=engine)
    assert all(same_bits(a, b) for one, other in zip(batches, kept) for a, b in zip(one, other))


# -- losses and what a step returns


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_module_with_class_weights(reduction: str, engine: Engine | None) -> None:
    def loss() -> nn.Module:
        return nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 2.0, 0.5]), reduction=reduction)

    compare(making(Net), images(5), loss=loss(), engine=engine)


def test_class_weights_changed_in_place_and_replaced(engine: Engine | None) -> None:
    def train(run: Any, **options: Any) -> Trained:
        loss = nn.CrossEntropyLoss(weight=torch.ones(4))

        def during(model: nn.Module, optimizer: Optimizer) -> Any:
            def act(number: int) -> None:
                if number == 2:
                    loss.weight.mul_(torch.tensor([0.1, 1.0, 2.0, 0.5]))
                if number == 4:
                    loss.weight = torch.tensor([3.0, 1.0, 1.0, 1.0])

            return act

        return run(making(Net), images(6), loss=loss, during=during, **options)

    assert_same(train(train_step, engine=engine), train(train_eager))


def test_loss_with_parameters(engine: Engine | None) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.tensor(1.5))

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(output / self.temperature, target)

    def train(run: Any, **options: Any) -> tuple[Trained, torch.Tensor]:
        loss = Scaled()

        def make() -> tuple[nn.Module, Optimizer]:
            model = Net()
            return model, AdamW([*model.parameters(), *loss.parameters()], lr=0.01)

        return run(make, images(5), loss=loss, **options), loss.temperature

    mine, reference = train(train_step, engine=engine), train(train_eager)
    assert_same(mine[0], reference[0])
    assert same_bits(mine[1], reference[1]) and mine[1] != 1.5


def with_metrics(model: nn.Module, batch: Any) -> Any:
    output = model(batch[0])
    loss = F.cross_entropy(output, batch[1])
    return loss, {"right": (output.argmax(1) == batch[1]).sum(), "largest": output.abs().max(), "again": loss}


def test_metrics(engine: Engine | None) -> None:
    trained = compare(making(Net, dropout=0.2), images(4), step=with_metrics, engine=engine)
    assert list(trained.results[0][1]) == ["right", "largest", "again"]
    assert trained.results[0][1]["right"].dtype == torch.int64


@pytest.mark.parametrize("opaque", [None, "step reads the values"])
def test_a_pair_without_metrics_comes_back_as_a_pair(engine: Engine | None, opaque: str | None) -> None:
    def step(model: nn.Module, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss * (1 if opaque is None or loss.item() > 0 else 2), {}

    trained = compare(
        making(Net, lambda model: fuse(SGD(model.parameters(), lr=0.1))), images(2), step=step, engine=engine, opaque=opaque
    )
    assert all(type(one) is tuple and one[1] == {} for one in trained.results)


def test_metrics_own_their_memory(engine: Engine | None) -> None:
    """What a step returned stays as it was, whatever later steps do, and whatever the caller does to it."""

    def step(model: Net, batch: Any) -> Any:
        output = model(batch[0])
        views = {"weight": model.first.weight.t(), "row": model.first.weight[0], "mean": model.norm.running_mean}
        views |= {"input": batch[0].view(-1), "target": batch[1], "output": output[:2]}
        return F.cross_entropy(output, batch[1]), views

    torch.manual_seed(0)
    model = Net()
    job = wf.Step(model, step=step, optimizer=adamw(model), engine=engine)
    batches = images(4)
    results = [job(batches[0])]
    kept = copy.deepcopy(results[0])
    before = copy.deepcopy(model.state_dict())
    for batch in batches[1:]:
        results.append(job(batch))
    assert same_bits(results[0][0], kept[0])
    for name, value in kept[1].items():
        assert same_bits(results[0][1][name], value), f"{name} changed after it was returned"
        assert not value.requires_grad
    state, batch = copy.deepcopy(model.state_dict()), copy.deepcopy(batches)
    for value in [results[-1][0], *results[-1][1].values()]:
        value.zero_()
    assert all(same_bits(value, model.state_dict()[name]) for name, value in state.items())
    assert all(same_bits(a, b) for one, other in zip(batches, batch) for a, b in zip(one, other))
    assert any(not same_bits(value, before[name]) for name, value in state.items())


def test_losses_can_be_kept(engine: Engine | None) -> None:
    torch.manual_seed(0)
    model = Net()
    job = wf.Step(model, loss=F.cross_entropy, optimizer=adamw(model), engine=engine)
    losses, values = [], []
    for batch in images(20):
        losses.append(job(batch))
        values.append(losses[-1].item())
    assert [loss.item() for loss in losses] == values
    assert len({loss.data_ptr() for loss in losses}) == len(losses)
    assert all(loss.shape == () and not loss.requires_grad and loss.grad_fn is None for loss in losses)


def test_losses_never_read(engine: Engine | None) -> None:
    reference = train_eager(making(Net), images(10))
    torch.manual_seed(5)
    model = Net()
    optimizer = adamw(model)
    job = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
    for batch in images(10):
        job(batch)
    reference.results = []
    assert_same(Trained([], model, optimizer), reference)


def test_nan_loss_is_a_value_like_any_other(engine: Engine | None) -> None:
    batches = images(4)
    batches[1][0][0, 0] = float("nan")
    trained = compare(making(Net), batches, engine=engine)
    assert trained.results[2].isnan()


# -- updates


@pytest.mark.parametrize("options", [{"clip_grad_norm": 0.05}, {"clip_grad_norm": 1e6}, {"clip_grad_value": 1e-3},
                                     {"clip_grad_norm": 0.3, "clip_grad_value": 0.02}], ids=str)  # fmt: skip
def test_clipping(options: Any, engine: Engine | None) -> None:
    compare(making(Net, sgd, dropout=0.2), images(6), engine=engine, **options)


@pytest.mark.parametrize("accumulate", [2, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_accumulation(accumulate: int, clip: float | None, optimizer: Any, engine: Engine | None) -> None:
    """``(loss / n).backward()`` n times, then one update; the losses that come back are not divided."""
    compare(
        making(Net, optimizer, dropout=0.2), images(2 * accumulate + 1), accumulate=accumulate, clip_grad_norm=clip,
        engine=engine,
    )  # fmt: skip


def test_accumulation_over_batches_of_other_sizes(engine: Engine | None) -> None:
    batches = [images(1, size=size, seed=size)[0] for size in (8, 4, 8, 8, 4, 4)]
    compare(making(Net), batches, accumulate=2, engine=engine)


def test_accumulation_with_an_unused_parameter(engine: Engine | None) -> None:
    compare(making(Partly, sgd), images(6), accumulate=2, engine=engine)


@pytest.mark.parametrize("how", ["argument", "around"])
def test_autocast(how: str, engine: Engine | None) -> None:
    if how == "argument":
        compare(making(Net, dropout=0.2), images(5), autocast=torch.bfloat16, engine=engine)
        return
    reference = train_eager(making(Net, dropout=0.2), images(5), autocast=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = train_step(making(Net, dropout=0.2), images(5), engine=engine)
    assert mine.step is not None and mine.step.opaque_reason is None
    assert_same(mine, reference)


def test_autocast_turned_on_in_the_middle(engine: Engine | None) -> None:
    batches = images(4)
    kept = []
    for run in ("eager", "mine"):
        torch.manual_seed(5)
        model = Net()
        optimizer = adamw(model)
        results = []
        job = None
        if run == "mine":
            job = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
        else:
            fuse(optimizer)
        for number, batch in enumerate(batches):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=number >= 2):
                if job:
                    results.append(job(batch))
                    continue
                loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            results.append(loss.detach())
        kept.append(Trained(results, model, optimizer))
    assert_same(kept[1], kept[0])


def test_autocast_to_half_of_a_layer(engine: Engine | None) -> None:
    class Mixed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                x = self.first(x)
            return self.last(self.norm(x.float()))

    compare(making(Mixed), images(4), engine=engine)


def test_under_no_grad_a_step_still_trains(engine: Engine | None) -> None:
    reference = train_eager(making(Net), images(3))
    with torch.no_grad():
        mine = train_step(making(Net), images(3), engine=engine)
    assert_same(mine, reference)


# -- loops


def test_loop_that_breaks_off(engine: Engine | None) -> None:
    torch.manual_seed(5)
    model = Net()
    optimizer = adamw(model)
    job = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
    results = []
    for batch in images(100):
        results.append(job(batch))
        if len(results) == 3:
            break
    assert_same(Trained(results, model, optimizer), train_eager(making(Net), images(3)))
    job.close()
    job.close()
    if engine:
        assert engine.reservations.claimed() == 0 and engine.native.held == 0


def gan(run: Any, engine: Engine | None = None, normalize: bool = False, seed: int = 1) -> list[torch.Tensor]:
    """Two networks that train in turn; each step reads the other network."""
    torch.manual_seed(seed)
    middle = nn.BatchNorm1d(8) if normalize else nn.Tanh()
    maker = nn.Sequential(nn.Linear(3, 8), middle, nn.ReLU(), nn.Linear(8, 6))
    judge = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
    one, other = AdamW(maker.parameters(), lr=0.01), SGD(judge.parameters(), lr=0.05, momentum=0.9)

    def judging(model: nn.Module, batch: Any) -> torch.Tensor:
        real, noise = batch
        with torch.no_grad():
            fake = maker(noise)
        return F.softplus(-model(real)).mean() + F.softplus(model(fake)).mean()

    def making(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.softplus(-judge(model(batch[1]))).mean()

    steps = run([(judge, other, judging), (maker, one, making)], engine)
    random = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(4):
        batch = (torch.randn(8, 6, generator=random), torch.randn(8, 3, generator=random))
        losses += [step(batch) for step in steps]
    return [*losses, *(v for m in (maker, judge) for v in m.state_dict().values())]


def gan_eager(parts: Any, engine: Engine | None) -> Any:
    def of(model: nn.Module, optimizer: Optimizer, compute: Any) -> Any:
        fuse(optimizer)

        def step(batch: Any) -> torch.Tensor:
            for each, _, _ in parts:
                each.zero_grad()
            loss = compute(model, batch)
            loss.backward()
            optimizer.step()
            return loss.detach()

        return step

    return [of(*part) for part in parts]


def gan_steps(parts: Any, engine: Engine | None) -> Any:
    return [wf.Step(m, step=compute, optimizer=o, engine=engine) for m, o, compute in parts]


@pytest.mark.parametrize("normalize", [False, True])
def test_two_networks_in_turn(normalize: bool, engine: Engine | None) -> None:
    pairs = zip(gan(gan_steps, engine, normalize), gan(gan_eager, None, normalize))
    assert [same_bits(mine, reference) for mine, reference in pairs].count(False) == 0


def test_another_pair_of_networks_of_the_same_kind(engine: Engine | None) -> None:
    gan(gan_steps, engine)
    pairs = zip(gan(gan_steps, engine, seed=2), gan(gan_eager, None, seed=2))
    assert [same_bits(mine, reference) for mine, reference in pairs].count(False) == 0


def test_two_steps_over_one_model(engine: Engine | None) -> None:
    """Two losses of one model in turn, with an optimizer for each."""
    losses = [F.cross_entropy, lambda output, target: F.multi_margin_loss(output, target)]
    ends = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizers = [fuse(adamw(model)), fuse(sgd(model))]
        jobs = [wf.Step(model, loss=f, optimizer=o, engine=engine) for f, o in zip(losses, optimizers)]
        for number, batch in enumerate(images(6)):
            if captured:
                jobs[number % 2](batch)
                continue
            of_target(losses[number % 2])(model, batch).backward()
            optimizers[number % 2].step()
            model.zero_grad()
        ends.append(model.state_dict())
    assert all(same_bits(ends[0][name], ends[1][name]) for name in ends[0])


def test_several_steps_handed_in_ahead() -> None:
    reference = train_eager(making(Net), images(6))
    with Engine(memory=256 * MiB, lanes=2) as engine:
        torch.manual_seed(5)
        model = Net()
        optimizer = adamw(model)
        job = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
        pending = [job.submit(batch) for batch in images(6)]
        results = [each.result() for each in pending]
        assert_same(Trained(results, model, optimizer), reference)


@pytest.mark.slow
def test_step_and_model_can_be_forgotten(engine: Engine | None, no_captures: Any) -> None:
    """Captures are shared and kept; the models that they came from are not."""
    model = Net()
    job = wf.Step(model, loss=F.cross_entropy, optimizer=adamw(model), engine=engine)
    job(images(1)[0])
    alive = [weakref.ref(model), weakref.ref(model.first.weight), weakref.ref(job)]
    del model, job
    gc.collect()
    assert [each() is None for each in alive] == [True] * 3
    if engine:
        assert engine.reservations.claimed() == 0


# -- what cannot be


def test_wrong_arguments(engine: Engine | None) -> None:
    model = Net()
    optimizer = adamw(model)
    with pytest.raises(wf.InvalidJobError, match="meta"):
        wf.Step(Net().to("meta"), loss=F.cross_entropy, optimizer=optimizer, engine=engine)
    with pytest.raises(wf.InvalidJobError, match="Module"):
        wf.Step(F.relu, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
    with pytest.raises(wf.InvalidJobError, match="Optimizer"):
        wf.Step(model, loss=F.cross_entropy, optimizer=AdamW, engine=engine)
    with pytest.raises(wf.InvalidJobError, match="accumulate"):
        wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, accumulate=0, engine=engine)
    with pytest.raises(wf.InvalidJobError, match="not both"):
        wf.Step(model, loss=F.cross_entropy, step=with_metrics, optimizer=optimizer, engine=engine)
    with pytest.raises(wf.InvalidJobError, match="loss must be a function of"):
        wf.Step(model, loss="cross entropy", optimizer=optimizer, engine=engine)
    with pytest.raises(wf.InvalidJobError, match="nothing to train"):
        wf.Step(Net().requires_grad_(False), loss=F.cross_entropy, optimizer=optimizer, engine=engine)


def test_wrong_batches(engine: Engine | None) -> None:
    model = Net()
    job = wf.Step(model, loss=F.cross_entropy, optimizer=adamw(model), engine=engine)
    for batch in (None, [], (), 3, "text", {}, (object(),), (torch.ones(8, 6),), torch.ones(8, 6)):
        with pytest.raises(wf.InvalidJobError):
            job(batch)
    assert job(images(1)[0]).isfinite() and job.opaque_reason is None


def test_larger_than_memory() -> None:
    with Engine(memory=MiB, lanes=1) as engine, within(engine):
        model = Net(width=1024)
        job = wf.Step(model, loss=F.cross_entropy, optimizer=adamw(model))
        with pytest.raises(wf.MemoryLimitError, match="Lower the batch size or raise memory") as caught:
            job(images(1, size=512)[0])
        assert caught.value.needed > caught.value.limit == MiB
        assert isinstance(caught.value, MemoryError)
        assert engine.reservations.claimed() == 0
        small = Net(width=8)
        assert wf.Step(small, loss=F.cross_entropy, optimizer=adamw(small))(images(1)[0]).isfinite()
        # The one that was refused can be used with a batch that fits.
        assert job(images(1, size=4)[0]).isfinite()


def test_plan_before_the_first_call() -> None:
    model = Net()
    job = wf.Step(model, loss=F.cross_entropy, optimizer=adamw(model), name="early")
    with pytest.raises(RuntimeError, match="'early' has no plan"):
        _ = job.plan


@pytest.mark.parametrize("closed", ["step", "engine"])
def test_closed(closed: str) -> None:
    engine = Engine(memory=64 * MiB, lanes=1)
    model = Net()
    job = wf.Step(model, loss=F.cross_entropy, optimizer=adamw(model), engine=engine)
    job(images(1)[0])
    (job if closed == "step" else engine).close()
    with pytest.raises(wf.WaterflowError, match="closed") as caught:
        job(images(1)[0])
    assert not isinstance(caught.value, wf.MemoryLimitError)
    assert engine.reservations.claimed() == 0
    engine.close()


def test_constructor_is_documented() -> None:
    """Every argument of the constructor is explained."""
    text = inspect.getdoc(wf.Step) or ""
    for name in inspect.signature(wf.Step).parameters:
        assert f"{name}:" in text, name


# -- memory formats: fake tensors predict strides that real kernels do not always return


class Folded(nn.Module):
    """Convolutions whose operands lie in memory in some order of their own."""

    def __init__(self, kernel: int, stride: int, groups: int, where: str) -> None:
        super().__init__()
        self.where = where
        self.first = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.middle = nn.Conv2d(8, 8, kernel, stride=stride, groups=groups, padding=kernel // 2, bias=False)
        self.last = nn.Linear(8, 4)
        if where == "weights":
            self.to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "input":
            x = x.contiguous(memory_format=torch.channels_last)
        x = torch.relu(self.norm(self.first(x)))
        if self.where == "inside":
            x = x.contiguous(memory_format=torch.channels_last)
        if self.where == "permuted":
            x = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
        return self.last(self.middle(x).mean((2, 3)))


@pytest.mark.parametrize("where", ["nowhere", "input", "inside", "permuted", "weights"])
@pytest.mark.parametrize(("kernel", "stride", "groups"), [(1, 1, 1), (1, 2, 1), (3, 1, 1), (3, 2, 1), (3, 2, 8), (5, 2, 2)])
@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_memory_formats(kernel: int, stride: int, groups: int, where: str, optimizer: Any) -> None:
    make = making(Folded, optimizer, kernel=kernel, stride=stride, groups=groups, where=where)
    compare(make, images(3, size=2, shape=(4, 9, 9)))


def test_transposed_and_expanded_parameters() -> None:
    """Parameters and state that do not lie in order, as ``torch.linalg`` and loaded checkpoints make them."""

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Parameter(torch.randn(5, 6).t())
            self.other = nn.Parameter(torch.randn(4, 2, 5).permute(1, 2, 0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.one @ self.other).sum(0)

    compare(making(Turned, sgd), images(4))
    compare(making(Turned, adamw), images(4))
