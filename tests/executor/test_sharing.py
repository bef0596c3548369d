"""Modules that several jobs hold at once: frozen ones work, trained ones are refused."""

from __future__ import annotations

from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf

X = torch.randn(32, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 4, (32,), generator=torch.Generator().manual_seed(1))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def job(name: str, model: Any) -> wf.Job:
    return wf.Job(name=name, model=model, loss=F.cross_entropy, optimizer=adamw, data=[(X, Y)] * 20, epochs=2, seed=0)


def backbone(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *more).requires_grad_(False)


def head(width: int) -> nn.Module:
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))


def objective_over(shared: nn.Module) -> Any:
    def objective(trial: optuna.Trial) -> float:
        width = trial.suggest_int("width", 8, 64)
        made = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 4))
        for parameter in made.parameters():
            nn.init.constant_(parameter, 0.05)
        model = nn.Sequential(shared, made)
        numbers = torch.Generator().manual_seed(0)
        step = wf.Step(model, loss=F.cross_entropy, optimizer=adamw(made.parameters()), generator=numbers)
        loss = torch.zeros(())
        for number in range(40):
            loss = step((X, Y))
            if number % 10 == 0:
                model.eval()
                with torch.no_grad():
                    assert type(model(X)) is torch.Tensor  # not one that a capture shows
                model.train()
        assert step.opaque_reason is None
        return loss.item()

    return objective


def study_of(widths: list[int]) -> optuna.Study:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for width in widths:
        study.enqueue_trial({"width": width})
    return study


def test_trials_over_one_frozen_part() -> None:
    objective = objective_over(backbone(nn.Tanh()))
    widths = list(range(8, 32, 2))
    together, alone = study_of(widths), study_of(widths)
    wf.optimize(together, objective, n_trials=len(widths))
    alone.optimize(objective, n_trials=len(widths))
    assert [t.value for t in together.trials] == [t.value for t in alone.trials]


def test_plain_modules_over_one_frozen_part() -> None:
    shared = backbone(nn.Tanh())
    models = [nn.Sequential(shared, head(width)) for width in (8, 12)]
    before = shared[0].weight.clone()
    results = wf.train(models, loss=F.cross_entropy, optimizer=adamw, data=[(X, Y)] * 10)
    assert [r.status for r in results] == ["completed"] * 2
    assert torch.equal(before, shared[0].weight) and type(shared[0].weight) is nn.Parameter


def test_one_trained_module_in_two_jobs() -> None:
    model = head(8)
    model = nn.Sequential(nn.Linear(8, 16), model)
    results = wf.train([job("a", lambda: model), job("b", lambda: model)], on_error="continue")
    failed = [r for r in results if r.status == "failed"]
    assert failed and all("share a module (Linear) and train it" in str(r.error) for r in failed)
    assert all(isinstance(r.error, wf.InvalidJobError) for r in failed)


def test_a_module_again_when_the_first_is_done() -> None:
    model = nn.Sequential(nn.Linear(8, 16), head(8))
    assert wf.train([job("a", lambda: model)])[0].status == "completed"
    assert wf.train([job("b", lambda: model)])[0].status == "completed"


def test_one_objective_over_one_trained_model() -> None:
    model = nn.Sequential(nn.Linear(8, 16), head(8))

    def objective(trial: optuna.Trial) -> float:
        step = wf.Step(model, loss=F.cross_entropy, optimizer=adamw(model.parameters()))
        return [step((X, Y)).item() for _ in range(50)][-1]

    study = optuna.create_study()
    with pytest.raises(wf.InvalidJobError, match="share a module"):
        wf.optimize(study, objective, n_trials=4)


def test_two_steps_of_one_thread_may_share() -> None:
    model = nn.Sequential(nn.Linear(8, 16), head(8))
    with wf.Engine() as engine:
        steps = [
            wf.Step(model, loss=F.cross_entropy, optimizer=adamw(model.parameters()), engine=engine) for _ in range(2)
        ]
        for step in steps * 2:
            assert step((X, Y)).isfinite()
            assert step.opaque_reason is None


class InOneMode(nn.Sequential):
    """Keeps its first part in evaluation mode."""

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        self[0].eval()
        return self


def test_buffers_that_change_are_not_shared() -> None:
    shared = backbone(nn.BatchNorm1d(16).requires_grad_(False))
    results = wf.train(
        [job(name, lambda: nn.Sequential(shared, head(8))) for name in "ab"], on_error="continue", max_concurrent=2
    )
    failed = [r for r in results if r.status == "failed"]
    assert failed and all("changes in every step. Put it into eval() mode" in str(r.error) for r in failed)
    results = wf.train([job(name, lambda: InOneMode(shared, head(8))) for name in "ab"])
    assert [(r.status, r.opaque_reason) for r in results] == [("completed", None)] * 2
    assert results[0].losses == results[1].losses
