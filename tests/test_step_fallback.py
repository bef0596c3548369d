"""When a step begins to run eagerly changes no bit of its results."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, AdamW, Optimizer

import waterflow as wf
from benchmarks.zoo import SMALL
from tests.support import MiB, Net, Trained, assert_same, images, train_step
from waterflow.errors import CaptureError
from waterflow.executor.engine import Engine
from waterflow.partition.capture.optimizers import captured_form

STEPS = 5
CHEAP = ("mlp_dropout", "cnn_bn", "lstm")


def falling_back(at: int | None) -> Any:
    """A loop that gives its optimizer a hook before that step, which no capture has."""

    def during(_: nn.Module, optimizer: Optimizer) -> Callable[[int], None]:
        return lambda number: optimizer.register_step_post_hook(lambda *_: None) if number == at else None

    return during


def trained(name: str, at: int | None, seed: int, engine: Engine | None = None) -> Trained:
    zoo = SMALL[name]
    random = torch.Generator().manual_seed(seed)
    batches = [zoo.batch(4, random) for _ in range(STEPS)]

    def make() -> tuple[nn.Module, Optimizer]:
        model = zoo.build()
        return model, zoo.optimizer(model.parameters())

    return train_step(make, batches, step=zoo.step, during=falling_back(at), seed=seed, engine=engine)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in CHEAP else pytest.mark.slow) for n in SMALL])
def test_a_loop_of_the_zoo_that_falls_back(name: str) -> None:
    at = random.Random(name).randrange(STEPS)
    never, fallen = trained(name, None, 3), trained(name, at, 3)
    assert never.step is not None and never.step.opaque_reason is None
    assert fallen.step is not None and "step hooks" in str(fallen.step.opaque_reason)
    assert_same(fallen, never)
    with Engine(memory=512 * MiB, lanes=2) as engine:
        assert_same(trained(name, at, 3, engine), never)


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.3, nesterov=False),
    "adam": lambda p: Adam(p, lr=0.01, amsgrad=True),
    "adamw, groups": lambda p: AdamW([{"params": p[:2], "lr": 0.1}, {"params": p[2:]}], lr=0.01),
}


def net_trained(optimizer: str, at: int | None, **options: Any) -> Trained:
    def make() -> tuple[nn.Module, Optimizer]:
        model = Net(dropout=0.3)
        return model, OPTIMIZERS[optimizer]([*model.parameters()])

    return train_step(make, images(8), during=falling_back(at), **options)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("at", [0, 3])
def test_with_gradients_that_gather_and_are_clipped(optimizer: str, at: int) -> None:
    options = {"accumulate": 2, "clip_grad_norm": 0.5}
    assert_same(net_trained(optimizer, at, **options), net_trained(optimizer, None, **options))
    assert_same(net_trained(optimizer, at), net_trained(optimizer, None))


def test_from_a_first_step_whose_audit_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its state was laid out: momentum begins as the gradient all the same."""
    never = net_trained("momentum", None)

    def fails(*_: Any) -> None:
        raise CaptureError("planted")

    monkeypatch.setattr("waterflow.step.Audit.compare", fails)
    monkeypatch.setattr("waterflow.step.Audit.due", lambda *_: True)
    fallen = net_trained("momentum", None)
    assert fallen.step is not None and fallen.step.opaque_reason == "planted"
    assert_same(fallen, never)


# -- the form


def test_groups_are_as_they_were_behind_an_update_also_where_it_fails() -> None:
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = AdamW([{"params": parameters[:1]}, {"params": parameters[1:2], "foreach": True},
                       {"params": parameters[2:], "fused": False}])  # fmt: skip
    before = [dict(group) for group in optimizer.param_groups]
    with pytest.raises(KeyError), captured_form(optimizer):
        assert [group["fused"] for group in optimizer.param_groups] == [True, None, False]
        raise KeyError
    assert [dict(group) for group in optimizer.param_groups] == before


class Odd(nn.Module):
    """A parameter of a kind that fused updates do not take."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table = nn.Embedding(6, 4, sparse=kind == "sparse")
        if kind == "gaps":
            self.table.weight = nn.Parameter(torch.randn(6, 8)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x.argmax(-1))


@pytest.mark.parametrize("kind", ["sparse", "gaps"])
def test_parameters_without_a_fused_form_always_have_torchs_other_one(kind: str) -> None:
    torch.manual_seed(0)
    model = Odd(kind)
    torch.manual_seed(0)
    alone = Odd(kind)
    step = wf.Step(model, loss=F.cross_entropy, optimizer=SGD(model.parameters(), lr=0.1, momentum=0.9))
    optimizer = SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for x, y in images(4):
        loss = F.cross_entropy(alone(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(step((x, y)), loss)
    assert step.opaque_reason is not None and torch.equal(model.table.weight, alone.table.weight)


# -- what other threads do


class Handles(nn.Module):
    """Keeps the handles of its hooks, whose class counts the hooks of all threads."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
        hook = lambda module, given, made: made * 1.0  # noqa: E731
        self.handles = [m.register_forward_hook(hook) for m in self.net if isinstance(m, nn.ReLU)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def handles_trained(seed: int) -> Trained:
    def make() -> tuple[nn.Module, Optimizer]:
        model = Handles()
        return model, AdamW(model.parameters(), lr=1e-2)

    return train_step(make, images(6), seed=seed)


def test_hooks_that_other_threads_register_change_nothing(no_captures: Any) -> None:
    def register() -> None:
        while not over.is_set():
            other.register_forward_hook(lambda *_: None).remove()

    other = nn.Linear(2, 2)  # made here: it draws from the generator that the others are seeded from
    over = threading.Event()
    thread = threading.Thread(target=register)
    thread.start()
    try:
        found = [handles_trained(seed) for seed in range(3)]
    finally:
        over.set()
        thread.join()
    assert [one.step.opaque_reason for one in found if one.step is not None] == [None] * 3
    assert no_captures.captures == 1
    for seed, one in enumerate(found):
        assert_same(one, handles_trained(seed))


def test_trials_whose_models_keep_handles_end_as_alone() -> None:
    together: dict[int, Trained] = {}

    def objective(trial: optuna.Trial) -> float:
        together[trial.number] = handles_trained(trial.number)
        return together[trial.number].results[-1].item()

    wf.optimize(optuna.create_study(), objective, n_trials=4, max_concurrent=4)
    for number, one in together.items():
        assert_same(one, handles_trained(number))


class Asks(Handles):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + self.handles[0].id % 2)


def test_a_step_that_reads_a_handle_is_not_captured() -> None:
    model = Asks()
    step = wf.Step(model, loss=F.cross_entropy, optimizer=AdamW(model.parameters()))
    step(images(1)[0])
    assert "handles" in str(step.opaque_reason)


class Settles(nn.Module):
    """Fills in a setting in its first call, as Hugging Face's classifiers do; or counts its calls."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.kind: str | None = None
        self.counts, self.calls = counts, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind is None:
            self.kind = "regression"
        if self.counts:
            self.calls += 1
        return self.layer(x).square().mean() if self.kind == "regression" else self.layer(x).abs().mean()


@pytest.mark.parametrize("counts", [False, True])
def test_a_step_that_fills_in_a_setting_once_is_captured_behind_that(counts: bool) -> None:
    def made() -> tuple[Settles, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = Settles(counts)
        return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    model, optimizer = made()
    step = wf.Step(model, optimizer=optimizer)
    plain, other = made()
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        x = torch.randn(5, 8, generator=generator)
        other.zero_grad()
        loss = plain(x)
        loss.backward()
        other.step()
        assert step((x,)).item() == loss.item()
    assert all(map(torch.equal, model.parameters(), plain.parameters())) and model.calls == plain.calls
    if counts:
        assert step.opaque_reason is not None and "changes calls" in step.opaque_reason
    else:
        assert step.opaque_reason is None and step.eager_steps == 1


def test_under_anomaly_detection_a_step_runs_eagerly(capfd: pytest.CaptureFixture[str]) -> None:
    model = nn.Linear(6, 4)
    step = wf.Step(model, loss=F.cross_entropy, optimizer=AdamW(model.parameters()))
    with torch.autograd.set_detect_anomaly(True):
        assert step(images(1)[0]).isfinite()
    assert step.opaque_reason is not None and step.opaque_reason.startswith("anomaly detection (torch.autograd.set_detect")
    assert "Error detected" not in capfd.readouterr().err
