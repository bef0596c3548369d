"""Studies whose trials return jobs: what their values mean, and whose weights stay."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import optuna
import pytest
import torch
from optuna.samplers import RandomSampler
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.leftovers import nothing_left  # noqa: F401
from tests.support import images
from waterflow.study.values import UnfitJobError

optuna.logging.set_verbosity(optuna.logging.ERROR)
BATCHES = images(3)
SCORES = [0.2, 0.5, 0.9, 0.4, 0.9, 0.1]


def job(number: int, **changes: Any) -> wf.Job:
    settings: dict[str, Any] = {
        "model": lambda: nn.Sequential(nn.Linear(6, 64), nn.Linear(64, 4)), "data": BATCHES, "loss": F.cross_entropy,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "seed": number, "evaluate": lambda model: SCORES[number],
    }  # fmt: skip
    return wf.Job(f"trial-{number}", **(settings | changes))


def new_study(*directions: str, **settings: Any) -> optuna.Study:
    return optuna.create_study(directions=directions, sampler=RandomSampler(1), pruner=optuna.pruners.NopPruner(), **settings)


def optimize(study: optuna.Study, objective: Any = lambda trial: job(trial.number), **settings: Any) -> Any:
    return wf.optimize(study, objective, **({"n_trials": len(SCORES), "max_concurrent": 2, "lanes": 2} | settings))


# -- what a value means


@pytest.mark.parametrize("catch", [(), Exception], ids=["", "catch"])
def test_a_training_loss_is_not_maximized(catch: Any) -> None:
    read: list[int] = []

    def data() -> Any:
        read.append(1)
        yield from BATCHES

    study = new_study("maximize")
    text = r"direction='maximize' and job 'trial-0' has no evaluate=.*training loss.*Pass Job\(evaluate=\).*'minimize'"
    with pytest.raises(wf.StudyError, match=text):
        optimize(study, lambda trial: job(trial.number, evaluate=None, data=data), max_concurrent=1, catch=catch)
    assert not read and [trial.state.name for trial in study.trials] == ["FAIL"]


@pytest.mark.parametrize("directions", [("minimize", "maximize"), ("maximize", "maximize"), ("minimize", "minimize")])
def test_one_loss_is_not_taken_for_several_objectives(directions: tuple[str, ...]) -> None:
    read: list[int] = []

    def data() -> Any:
        read.append(1)
        yield from BATCHES

    with pytest.raises(UnfitJobError, match=r"2 objectives and evaluate of job 'trial-.*directions are m.*per objective"):
        optimize(new_study(*directions), lambda trial: job(trial.number, evaluate=None, data=data))
    assert not read


def test_what_a_study_can_take() -> None:
    study = new_study("minimize")
    optimize(study, lambda trial: job(trial.number, evaluate=None), n_trials=2)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 2
    study = new_study("maximize")
    optimize(study)
    assert study.best_value == 0.9
    study = new_study("maximize", "minimize")
    optimize(study, lambda trial: job(trial.number, evaluate=lambda model: {"a": 1.0, "b": 2.0}), n_trials=1)
    assert study.trials[0].values == [1.0, 2.0]


# -- whose weights stay


def kept(summary: Any) -> list[str]:
    assert all(result.losses for result in summary.results if result.status == "completed")
    return [result.name for result in summary.results if result.state_dict is not None]


def test_the_best_trial_keeps_its_weights() -> None:
    for direction, best in (("maximize", max(SCORES)), ("minimize", min(SCORES))):
        study = new_study(direction)
        summary = optimize(study)
        assert len(summary.results) == len(SCORES)
        assert kept(summary) == [f"trial-{study.best_trial.number}"] and study.best_value == best
        (expected,) = wf.train([job(study.best_trial.number)])
        state = summary.results[f"trial-{study.best_trial.number}"].state_dict
        assert all(torch.equal(value, state[name]) for name, value in expected.state_dict.items())


def test_all_or_none() -> None:
    assert kept(optimize(new_study("maximize"), keep_weights="none")) == []
    assert kept(optimize(new_study("maximize"), keep_weights="all")) == [f"trial-{n}" for n in range(len(SCORES))]
    for wrong in ("last", True, None):
        with pytest.raises(wf.StudyError, match="keep_weights must be one of 'best', 'all', 'none'; got"):
            optimize(new_study("maximize"), keep_weights=wrong)


@pytest.mark.parametrize("storage", [None, "sqlite:///{}/study.db"])
def test_of_equal_trials_the_one_that_the_study_names(storage: str | None, tmp_path: Any) -> None:
    """Whatever order they end in."""
    storage = storage and storage.format(tmp_path)
    study = new_study("maximize", storage=storage)
    later = threading.Event()

    def objective(trial: optuna.Trial) -> wf.Job:
        if trial.number == 0:
            later.wait(20)
        made = job(trial.number, evaluate=lambda model: 0.5)
        if trial.number == 1:
            made.evaluate = lambda model: later.set() or 0.5
        return made

    summary = optimize(study, objective, n_trials=4)
    assert kept(summary) == [f"trial-{study.best_trial.number}"]


def test_the_best_of_this_call() -> None:
    """A second call on a study has no weights of the first one's trials."""
    study = new_study("maximize")
    optimize(study)
    summary = optimize(study, renamed, n_trials=3)
    assert kept(summary) == ["trial-8"]


def renamed(trial: optuna.Trial) -> wf.Job:
    made = job(0, evaluate=lambda model: 0.01 * trial.number)
    made.name = f"trial-{trial.number}"
    return made


def test_those_on_the_front_of_several_objectives() -> None:
    values = [(1.0, 1.0), (2.0, 5.0), (3.0, 3.0), (0.5, 6.0), (2.0, 5.0), (3.0, 2.0)]
    study = new_study("maximize", "maximize")
    summary = optimize(study, lambda trial: job(trial.number, evaluate=lambda model: dict(zip("ab", values[trial.number]))))
    front = sorted(trial.number for trial in study.best_trials)
    assert kept(summary) == [f"trial-{number}" for number in front] and front == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trials_that_are_never_the_best() -> None:
    """Pruned, failed, told a value that is none, or against a constraint."""

    def objective(trial: optuna.Trial) -> wf.Job:
        made = job(trial.number, epochs=2)
        trial.set_user_attr("over", 1.0 if trial.number == 2 else -1.0)
        if trial.number == 1:
            made.data = [*BATCHES, (torch.zeros(1, 5), torch.zeros(1))]
        if trial.number == 4:
            made.evaluate = lambda model: float("nan")
        return made

    sampler = optuna.samplers.TPESampler(seed=1, constraints_func=lambda trial: (trial.user_attrs["over"],))
    study = optuna.create_study(direction="maximize", sampler=sampler, pruner=optuna.pruners.ThresholdPruner(lower=0.15))
    summary = optimize(study, objective, catch=Exception)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE", "PRUNED", "PRUNED"]
    assert kept(summary) == ["trial-3"] and study.best_trial.number == 3


@pytest.mark.slow
@pytest.mark.parametrize("keep, most", [("best", 3), ("none", 2), ("all", 12)])
def test_memory_is_released_while_the_study_runs(keep: Any, most: int) -> None:
    """Counted by the models that are alive when another one is made: one that trains, the best one, and what ends just now."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    seen: list[int] = []

    def objective(trial: optuna.Trial) -> wf.Job:
        def model() -> nn.Module:
            gc.collect()
            seen.append(len(alive))
            made = nn.Linear(6, 4)
            alive.add(made.weight.untyped_storage())
            return made

        return job(0, model=model, evaluate=lambda model: float(trial.number % 5))

    study = new_study("maximize")
    summary = optimize(study, objective, n_trials=12, max_concurrent=1, keep_weights=keep)
    assert max(seen) <= most and (keep != "all" or max(seen) >= 8)
    del objective
    gc.collect()
    assert len(alive) <= {"best": 1, "none": 0, "all": 12}[keep]
    assert sum(result.state_dict is not None for result in summary.results) == {"best": 1, "none": 0, "all": 12}[keep]
