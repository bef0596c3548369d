"""Objectives that seed and draw from torch's numbers: the same trial alone, among others, and in plain Optuna."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import optuna
import pytest
import torch
from optuna.samplers import RandomSampler
from optuna.trial import FixedTrial, Trial
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf
from tests.support import images
from waterflow.executor import rng

ROWS = TensorDataset(torch.randn(48, 6, generator=torch.Generator().manual_seed(1)), torch.arange(48) % 4)
WIDTHS = 12, 8, 12, 4, 12, 16  # of the trials: a sampler would draw them in the order in which trials ask
optuna.logging.set_verbosity(optuna.logging.ERROR)


def perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 4))


def seeding(trial: Trial | FixedTrial, opaque: bool = False) -> float:
    """As nearly everybody writes it: one seed at the top, and then torch's functions."""
    torch.manual_seed(trial.number)
    width = trial.suggest_int("width", 4, 16, step=4)
    model = perceptron(width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)

    def compute(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = batch
        loss = F.cross_entropy(model(x + 0.1 * torch.randn_like(x)), y)
        return loss * (1 if not opaque or loss.item() < 1e9 else 2)

    step = wf.Step(model, step=compute, optimizer=optimizer)
    total = 0.0
    for _ in range(3):
        for batch in DataLoader(ROWS, batch_size=8, shuffle=True):
            with torch.random.fork_rng():
                torch.manual_seed(99)
                noise = float(torch.rand(()))
            total += float(step(batch)) + noise
        total += float(torch.rand(()))
    return total


def unseeded(trial: Trial) -> float:
    width = trial.suggest_int("width", 4, 16, step=4)
    return float(perceptron(width)[0].weight.detach().sum()) + float(torch.rand(()))


def studied(objective: Callable[[Trial], Any], **settings: Any) -> list[float]:
    study = optuna.create_study(sampler=RandomSampler(seed=0))
    for width in WIDTHS:
        study.enqueue_trial({"width": width})
    if settings:
        wf.optimize(study, objective, n_trials=len(WIDTHS), memory="1GiB", **settings)
    else:
        study.optimize(objective, n_trials=len(WIDTHS))
    return [trial.value for trial in study.trials]


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("opaque", [False, True], ids=["captured", "opaque"])
def test_an_objective_that_seeds_has_one_result(opaque: bool) -> None:
    def objective(trial: Trial) -> float:
        return seeding(trial, opaque)

    alone = studied(objective)
    assert len(set(alone)) == len(WIDTHS)
    for concurrency in (1, 2, 4):
        assert studied(objective, max_concurrent=concurrency, lanes=2) == alone, f"{concurrency} at a time"


@pytest.mark.usefixtures("one_thread")
def test_a_result_follows_from_a_trials_own_values_whoever_asked_first() -> None:
    """The sampler draws for the trial that asks; what the trial makes of that is its own."""
    turns = [threading.Event() for _ in range(7)]

    def objective(trial: Trial) -> float:
        assert turns[trial.number + 1].wait(30)
        trial.suggest_int("width", 4, 16, step=4)
        turns[trial.number].set()
        return seeding(trial)

    turns[-1].set()  # the last asks first
    plain, mine = (optuna.create_study(sampler=RandomSampler(seed=0)) for _ in range(2))
    plain.optimize(seeding, n_trials=6)
    wf.optimize(mine, objective, n_trials=6, max_concurrent=6, memory="1GiB", lanes=2)
    drawn = [trial.params for trial in plain.trials]
    assert [trial.params for trial in mine.trials] == drawn[::-1] != drawn
    assert [trial.value for trial in mine.trials] == [seeding(FixedTrial(trial.params, trial.number)) for trial in mine.trials]


def test_an_objective_that_does_not_seed_follows_the_process_seed() -> None:
    """Whatever runs beside it, a trial's numbers come from where torch's generator stood when the study began."""
    made = []
    for concurrency in (1, 3):
        torch.manual_seed(17)
        made.append(studied(unseeded, max_concurrent=concurrency, lanes=2))
    torch.manual_seed(18)
    other = studied(unseeded, max_concurrent=1, lanes=2)
    assert made[0] == made[1] != other


def test_a_study_leaves_the_process_numbers_but_for_one_draw() -> None:
    torch.manual_seed(5)
    studied(seeding, max_concurrent=2, lanes=2)
    after = torch.rand(3)
    torch.manual_seed(5)
    studied(unseeded, max_concurrent=1, lanes=1)
    assert torch.equal(torch.rand(3), after)


def test_an_evaluation_that_draws_is_the_jobs_own() -> None:
    """Masks, samples of a generative model, a random subset: the same beside others."""

    def sampled(model: nn.Module) -> float:
        return float(model(torch.randn(16, 6)).sum() + torch.rand(()))

    def job(seed: int) -> wf.Job:
        return wf.Job(
            name=f"job-{seed}", model=lambda: perceptron(8), data=images(4), loss=F.cross_entropy, evaluate=sampled,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1), epochs=4, seed=seed,
        )  # fmt: skip

    alone = [wf.train([job(seed)], memory="1GiB")[0] for seed in range(3)]
    together = wf.train([job(seed) for seed in range(3)], memory="1GiB", lanes=2, max_concurrent=3)
    for one, other in zip(alone, together):
        assert one.metrics == other.metrics and one.losses == other.losses


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_an_optimizer_and_a_scheduler_that_draw_are_the_jobs_own(interval: str) -> None:
    def job(seed: int) -> wf.Job:
        return wf.Job(
            name=f"job-{seed}", model=lambda: perceptron(8), data=DataLoader(ROWS, 8, shuffle=True), loss=F.cross_entropy,
            optimizer=lambda p: torch.optim.SGD(p, lr=float(torch.rand(()))), epochs=3, seed=seed,
            scheduler=lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: float(torch.rand(()))),
            scheduler_interval=interval,
        )  # fmt: skip

    alone = [wf.train([job(seed)], memory="1GiB")[0] for seed in range(3)]
    together = wf.train([job(seed) for seed in range(3)], memory="1GiB", lanes=2, max_concurrent=3)
    assert [one.losses for one in alone] == [other.losses for other in together]


def test_pythons_own_numbers_are_told_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level("WARNING", logger="waterflow")
    monkeypatch.setattr(rng, "_told", threading.Lock())

    def objective(trial: Trial) -> float:
        return random.random() + unseeded(trial)

    studied(objective, max_concurrent=1, lanes=2)
    assert not [message for message in caplog.messages if "Python's random" in message]
    studied(objective, max_concurrent=3, lanes=2)
    assert len([message for message in caplog.messages if "Python's random" in message]) == 1


def test_a_job_whose_data_draws_from_numpy_is_told_of(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rng, "_told", threading.Lock())
    caplog.set_level("WARNING", logger="waterflow")

    def noisy() -> Iterator[Any]:
        for x, y in images(3):
            yield x + float(np.random.rand()), y

    def job(number: int) -> wf.Job:
        return wf.Job(
            name=f"job-{number}", model=lambda: perceptron(8), data=noisy, loss=F.cross_entropy,
            optimizer=lambda p: torch.optim.SGD(p, lr=0.1), seed=number,
        )  # fmt: skip

    wf.train([job(0)], memory="1GiB")
    assert not [message for message in caplog.messages if "numpy.random" in message]
    wf.train([job(0), job(1)], memory="1GiB")
    assert len([message for message in caplog.messages if "numpy.random" in message]) == 1
