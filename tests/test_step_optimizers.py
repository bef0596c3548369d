"""A captured update is the user's own optimizer, with everything that may happen to it between steps."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

import waterflow as wf
from tests.support import MiB, Net, Trained, assert_same, compare, fuse, images, train_eager, train_step
from waterflow.executor.engine import Engine


@pytest.fixture(params=["alone", "engine"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine | None]:
    """Every behaviour holds outside of an engine and inside of one."""
    if request.param == "alone":
        yield None
        return
    with Engine(memory=256 * MiB, lanes=2) as made:
        yield made


def net_with(optimizer: Any, **options: Any) -> Any:
    def make() -> tuple[nn.Module, Optimizer]:
        model = Net(**options)
        return model, optimizer(model.parameters())

    return make


OPTIMIZERS = {
    "sgd": partial(SGD, lr=0.1),
    "sgd, decay": partial(SGD, lr=0.1, weight_decay=0.1),
    "sgd, momentum": partial(SGD, lr=0.1, momentum=0.9),
    "sgd, dampening": partial(SGD, lr=0.1, momentum=0.9, dampening=0.3, weight_decay=1e-3),
    "sgd, nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "sgd, maximize": partial(SGD, lr=0.01, momentum=0.9, maximize=True),
    "sgd, fused": partial(SGD, lr=0.1, momentum=0.9, fused=True),
    "adam": partial(Adam, lr=0.01),
    "adam, all": partial(Adam, lr=0.01, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.05, amsgrad=True),
    "adam, decoupled": partial(Adam, lr=0.01, weight_decay=0.1, decoupled_weight_decay=True),
    "adamw": partial(AdamW, lr=0.01),
    "adamw, all": partial(AdamW, lr=0.01, betas=(0.7, 0.9), eps=1e-5, weight_decay=0.2, amsgrad=True),
    "adamw, maximize": partial(AdamW, lr=0.001, maximize=True),
    "adamw, tensor rate": lambda p: AdamW(p, lr=torch.tensor(0.01), fused=True),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_kinds(kind: str, engine: Engine | None) -> None:
    compare(net_with(OPTIMIZERS[kind], dropout=0.2), images(6), engine=engine)


@pytest.mark.parametrize("kind", ["sgd, dampening", "adamw, all"])
def test_groups(kind: str, engine: Engine | None) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = Net()
        last = {"params": model.last.parameters(), "lr": 0.02, "weight_decay": 0.0}
        return model, OPTIMIZERS[kind]([last, {"params": [*model.norm.parameters(), *model.first.parameters()]}])

    compare(make, images(6), engine=engine)


def test_group_without_momentum_beside_one_with(engine: Engine | None) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = Net()
        without = [*model.first.parameters(), *model.norm.parameters()]
        groups = [{"params": without, "momentum": 0.0}, {"params": model.last.parameters()}]
        return model, SGD(groups, lr=0.1, momentum=0.9)

    compare(make, images(5), engine=engine)


def by_hand(changes: dict[int, dict[str, Any]]) -> Any:
    def during(model: nn.Module, optimizer: Optimizer) -> Any:
        def act(number: int) -> None:
            for group in optimizer.param_groups:
                group.update(changes.get(number, {}))

        return act

    return during


def test_numbers_changed_by_hand_without_a_new_capture(engine: Engine | None, no_captures: Any) -> None:
    changes = {
        1: {"lr": 0.05},
        2: {"lr": 0.0, "weight_decay": 0.1},
        3: {"lr": 0.2, "betas": (0.5, 0.9)},
        4: {"eps": 1e-3, "lr": 0.1},
    }
    compare(net_with(OPTIMIZERS["adamw"]), images(6), during=by_hand(changes), engine=engine)
    assert no_captures.captures == 1
    changes = {1: {"momentum": 0.5}, 2: {"dampening": 0.2}, 3: {"weight_decay": 0.1, "lr": 0.3}}
    compare(net_with(OPTIMIZERS["sgd, momentum"]), images(6), during=by_hand(changes), engine=engine)
    assert no_captures.captures == 2


def test_settings_changed_by_hand(engine: Engine | None) -> None:
    changes = {2: {"nesterov": True}, 4: {"maximize": True}}
    compare(net_with(OPTIMIZERS["sgd, momentum"]), images(6), during=by_hand(changes), engine=engine)


def test_momentum_turned_on_and_off(engine: Engine | None) -> None:
    changes = {2: {"momentum": 0.9}, 4: {"momentum": 0.0}, 5: {"momentum": 0.8}}
    compare(net_with(OPTIMIZERS["sgd"]), images(7), during=by_hand(changes), engine=engine)


def test_tensor_rate_changed_in_place(engine: Engine | None) -> None:
    def during(model: nn.Module, optimizer: Optimizer) -> Any:
        return lambda number: optimizer.param_groups[0]["lr"].mul_(0.5)

    compare(net_with(OPTIMIZERS["adamw, tensor rate"]), images(5), during=during, engine=engine)


@pytest.mark.parametrize("kind", ["tensors", "list"])
def test_betas_changed_in_place(kind: str, engine: Engine | None) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = Net()
        optimizer = Adam(model.parameters(), lr=0.01, betas=(torch.tensor(0.9), torch.tensor(0.999)), fused=True)
        if kind == "list":
            optimizer.param_groups[0]["betas"] = [0.9, 0.999]
        return model, optimizer

    def during(model: nn.Module, optimizer: Optimizer) -> Any:
        def act(number: int) -> None:
            betas = optimizer.param_groups[0]["betas"]
            if kind == "list":
                betas[0] *= 0.5
            else:
                betas[0].mul_(0.5)

        return act

    compare(make, images(5), during=during, engine=engine)


SCHEDULES = {
    "step": partial(lr_scheduler.StepLR, step_size=2, gamma=0.3),
    "cosine": partial(lr_scheduler.CosineAnnealingLR, T_max=8),
    "lambda": partial(lr_scheduler.LambdaLR, lr_lambda=lambda number: min(1.0, (number + 1) / 4)),
    "one cycle": partial(lr_scheduler.OneCycleLR, max_lr=0.2, total_steps=10),
    "cyclic": partial(lr_scheduler.CyclicLR, base_lr=0.01, max_lr=0.2, step_size_up=3),
    "chain": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=3), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[3]
    ),
}


@pytest.mark.parametrize("kind", ["sgd, momentum", "adamw"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules(schedule: str, kind: str, engine: Engine | None) -> None:
    def during(model: nn.Module, optimizer: Optimizer) -> Any:
        scheduler = SCHEDULES[schedule](optimizer)
        return lambda number: scheduler.step() if number else None

    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        warnings.filterwarnings("ignore", message=".*epoch parameter.*")
        compare(net_with(OPTIMIZERS[kind]), images(8), during=during, engine=engine)


def test_schedule_by_the_loss(engine: Engine | None) -> None:
    """ReduceLROnPlateau, which reads each loss."""
    seen = []

    def train(run: Any, **options: Any) -> Trained:
        torch.manual_seed(1)
        model, optimizer = net_with(OPTIMIZERS["sgd, momentum"])()
        plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
        results, batches = [], images(8)
        step = run(model, optimizer)
        for batch in batches:
            results.append(step(batch))
            plateau.step(results[-1])
        seen.append(optimizer.param_groups[0]["lr"])
        return Trained(results, model, optimizer)

    def eager(model: nn.Module, optimizer: Optimizer) -> Any:
        fuse(optimizer)

        def step(batch: Any) -> torch.Tensor:
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        return step

    reference = train(eager)
    mine = train(lambda m, o: wf.Step(m, loss=F.cross_entropy, optimizer=o, engine=engine))
    assert_same(mine, reference)
    assert seen[0] == seen[1] < 0.1


@pytest.mark.parametrize("kind", ["sgd, momentum", "sgd, dampening", "adam, all"])
def test_checkpoint_loaded_in_the_middle(kind: str, engine: Engine | None) -> None:
    def during(model: nn.Module, optimizer: Optimizer) -> Any:
        kept: list[Any] = []

        def act(number: int) -> None:
            if number == 2:
                kept.extend([copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())])
            if number == 5:
                model.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])

        return act

    compare(net_with(OPTIMIZERS[kind], dropout=0.3), images(8), during=during, engine=engine)


@pytest.mark.parametrize("kind", ["sgd, dampening", "adamw"])
@pytest.mark.parametrize("how", ["load", "clear", "replace"])
def test_state_thrown_away_in_the_middle(kind: str, how: str, engine: Engine | None) -> None:
    def during(model: nn.Module, optimizer: Optimizer) -> Any:
        fresh = copy.deepcopy(optimizer.state_dict())

        def act(number: int) -> None:
            if number != 3:
                return
            if how == "load":
                optimizer.load_state_dict(fresh)
            elif how == "clear":
                optimizer.state.clear()
            else:
                optimizer.state = type(optimizer.state)(dict)

        return act

    compare(net_with(OPTIMIZERS[kind]), images(6), during=during, engine=engine)


def test_state_of_one_parameter_replaced(engine: Engine | None) -> None:
    def during(model: Net, optimizer: Optimizer) -> Any:
        def act(number: int) -> None:
            if number == 3:
                optimizer.state[model.first.weight]["exp_avg"] = torch.ones_like(model.first.weight)

        return act

    compare(net_with(OPTIMIZERS["adamw"]), images(6), during=during, engine=engine)


def test_state_of_an_unfused_run_is_taken_on() -> None:
    batches = images(6)
    torch.manual_seed(0)
    model, optimizer = net_with(OPTIMIZERS["adamw"])()
    for x, y in batches[:3]:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

    def make() -> tuple[nn.Module, Optimizer]:
        model, optimizer = net_with(OPTIMIZERS["adamw"])()
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(copy.deepcopy(saved[1]))
        return model, optimizer

    compare(make, batches[3:])


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_eager_training_goes_on_from_a_saved_state(kind: str, engine: Engine | None) -> None:
    batches = images(6)
    reference = train_eager(net_with(OPTIMIZERS[kind]), batches)
    first = train_step(net_with(OPTIMIZERS[kind]), batches[:3], engine=engine)

    def resume() -> tuple[nn.Module, Optimizer]:
        model, optimizer = net_with(OPTIMIZERS[kind])()
        model.load_state_dict(first.model.state_dict())
        optimizer.load_state_dict(copy.deepcopy(first.optimizer.state_dict()))
        return model, optimizer

    rest = train_eager(resume, batches[3:])
    rest.results = first.results + rest.results
    assert_same(rest, reference)


def test_the_same_optimizer_steps_eagerly_afterwards(engine: Engine | None) -> None:
    batches = images(6)
    reference = train_eager(net_with(OPTIMIZERS["adam, all"]), batches)
    mine = train_step(net_with(OPTIMIZERS["adam, all"]), batches[:3], engine=engine)
    fuse(mine.optimizer)
    for x, y in batches[3:]:
        loss = F.cross_entropy(mine.model(x), y)
        loss.backward()
        mine.optimizer.step()
        mine.optimizer.zero_grad()
        mine.results.append(loss.detach())
    assert_same(mine, reference)


def test_parameter_group_added_in_the_middle(engine: Engine | None) -> None:
    def make() -> tuple[nn.Module, Optimizer]:
        model = Net()
        model.first.requires_grad_(False)
        model.norm.requires_grad_(False)
        return model, SGD(model.last.parameters(), lr=0.1, momentum=0.9)

    def during(model: Net, optimizer: Optimizer) -> Any:
        def act(number: int) -> None:
            if number == 3:
                model.first.requires_grad_(True)
                optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 0.01})
                fuse(optimizer) if optimizer.param_groups[0].get("fused") else None

        return act

    def train(run: Any, **options: Any) -> Trained:
        return run(make, images(6), during=during, **options)

    assert_same(train(train_step, engine=engine), train(train_eager))


def test_steps_count_and_versions_tell_of_the_change(engine: Engine | None) -> None:
    """What reads tensors' versions (autograd's own checks) sees that a step changed the parameters."""
    torch.manual_seed(0)
    model, optimizer = net_with(OPTIMIZERS["adamw"])()
    step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
    batch = images(1)[0]
    output = model(batch[0]).square().sum()
    step(batch)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()
