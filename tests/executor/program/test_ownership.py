"""Modules that several jobs hold at once: frozen ones work, trained ones are refused."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from waterflow.executor.engine import Engine

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
    refused = threading.Event()

    def objective(trial: optuna.Trial) -> float:
        try:
            step = wf.Step(model, loss=F.cross_entropy, optimizer=adamw(model.parameters()))
            loss = step((X, Y)).item()
            assert refused.wait(20)  # the other one comes meanwhile
        except wf.InvalidJobError:
            refused.set()
            raise
        return loss

    study = optuna.create_study()
    with pytest.raises(wf.InvalidJobError, match="share a module"):
        wf.optimize(study, objective, n_trials=4)


def test_two_steps_of_one_thread_may_share() -> None:
    model = nn.Sequential(nn.Linear(8, 16), head(8))
    with wf.Engine() as engine:
        steps = [wf.Step(model, loss=F.cross_entropy, optimizer=adamw(model.parameters()), engine=engine) for _ in range(2)]
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


def test_a_shared_loss_with_weights() -> None:
    """It has tensors and no parameters."""
    weights = torch.tensor([1.0, 2.0, 3.0, 4.0])
    loss = nn.CrossEntropyLoss(weight=weights)

    def objective(trial: optuna.Trial) -> float:
        model = nn.Linear(8, 4)
        nn.init.constant_(model.weight, 0.01 * trial.suggest_int("width", 1, 100))
        nn.init.zeros_(model.bias)
        step = wf.Step(model, loss=loss, optimizer=adamw(model.parameters()), accumulate=1 + trial.number % 3)
        for _ in range(30):
            value = step((X, Y))
            assert type(loss.weight) is torch.Tensor
        return value.item()

    together, alone = study_of(list(range(1, 13))), study_of(list(range(1, 13)))
    wf.optimize(together, objective, n_trials=12)
    alone.optimize(objective, n_trials=12)
    assert [t.value for t in together.trials] == [t.value for t in alone.trials]
    assert loss.weight is weights


def in_thread(work: Any) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def test_a_hold_ends_with_its_engine() -> None:
    model = nn.Linear(8, 4)

    def train() -> Any:
        with wf.Engine() as engine:
            step = wf.Step(model, loss=F.cross_entropy, optimizer=adamw(model.parameters()), engine=engine)
            return step, step((X, Y))

    kept = [train(), in_thread(train)]
    assert all(loss.isfinite() for _, loss in kept)


def test_a_part_that_is_trained_later_on() -> None:
    shared = backbone()
    models = [nn.Sequential(shared, head(8)) for _ in range(2)]
    with wf.Engine() as engine:

        def make(model: nn.Module) -> wf.Step:
            return wf.Step(model, loss=F.cross_entropy, optimizer=adamw(model.parameters()), engine=engine)

        first, second = make(models[0]), in_thread(lambda: make(models[1]))
        assert first((X, Y)).isfinite() and second((X, Y)).isfinite()
        shared.requires_grad_(True)
        with pytest.raises(wf.InvalidJobError, match="share a module"):
            for step in (first, second):
                step((X, Y))


def with_closure(tensor: torch.Tensor, writes: bool) -> Any:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(model(batch[0]) + tensor, batch[1])
        if writes:
            tensor.mul_(0.9).add_(loss.detach(), alpha=0.1)
        return loss

    return step


@pytest.mark.parametrize("writers", ["ab", "a", "b", ""])
def test_a_tensor_of_a_closure_that_changes_is_not_shared(writers: str) -> None:
    shared = torch.zeros(4)
    made: list[wf.Step] = []

    def run(name: str) -> None:
        model = nn.Linear(8, 4)
        step = with_closure(shared, name in writers)
        made.append(wf.Step(model, step=step, optimizer=adamw(model.parameters()), engine=engine, name=name))
        made[-1]((X, Y))

    with Engine(memory="256MiB", lanes=2) as engine:
        thread = threading.Thread(target=run, args="a")
        thread.start()
        thread.join()
        told = r"'a' and 'b' share a tensor of shape \(4,\).*Give each its own"
        with pytest.raises(wf.InvalidJobError, match=told) if writers else contextlib.nullcontext():
            run("b")
        made[0].close()
        made[1]((X, Y))
    assert [step.opaque_reason for step in made] == [None, None]


def test_one_job_after_the_other_may_change_a_tensor() -> None:
    shared = torch.zeros(4)
    for name in "ab":
        step = with_closure(shared, True)
        made = wf.Job(name=name, model=lambda: nn.Linear(8, 4), step=step, optimizer=adamw, data=[(X, Y)], seed=0)
        assert wf.train([made])[0].opaque_reason is None
    assert shared.count_nonzero() == 4
