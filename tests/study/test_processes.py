"""A study in several processes: each trial once, with its bits, in any storage, whatever dies or interrupts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.trial import TrialState
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.imports import ROOT
from waterflow.errors import StudyError
from waterflow.study.processes import MOST_STARTS

pytestmark = pytest.mark.slow

WAIT = 60.0  # seconds


@pytest.fixture(autouse=True)
def quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="waterflow")
    optuna.logging.set_verbosity(optuna.logging.WARNING)


def storage(kind: str, folder: Path) -> Any:
    if kind == "journal":
        return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(folder / "journal")))
    return {"memory": None, "sqlite": f"sqlite:///{folder / 'study.db'}", "sqlite in memory": "sqlite:///:memory:"}[kind]


def job(trial: optuna.Trial) -> wf.Job:
    width = trial.suggest_int("width", 4, 40)
    numbers = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 6, generator=numbers), torch.randint(0, 3, (8,), generator=numbers)) for _ in range(6)]

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(6, width), nn.Dropout(0.3), nn.ReLU(), nn.Linear(width, 3))

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-2)

    return wf.Job(f"width {width}", model, data, optimizer, loss=F.cross_entropy, epochs=2)


def square(trial: optuna.Trial) -> float:
    return trial.suggest_float("x", -1.0, 1.0) ** 2


@pytest.mark.parametrize("kind", ["memory", "sqlite", "sqlite in memory", "journal"])
def test_each_trial_is_told_once(tmp_path: Path, kind: str) -> None:
    study, told = optuna.create_study(storage=storage(kind, tmp_path)), []
    summary = wf.optimize(study, square, 11, processes=2, callbacks=[lambda _, trial: told.append(trial.number)])
    assert sorted(told) == [*range(11)] == [trial.number for trial in study.trials]
    assert all(trial.state == TrialState.COMPLETE and trial.value == trial.params["x"] ** 2 for trial in study.trials)
    assert summary.states == {"complete": 11} and summary.trials == 11
    assert len({trial.params["x"] for trial in study.trials}) == 11  # samplers draw from numbers of their own


@pytest.mark.timeout(600)  # in the campaign ten studies, each with three new processes
@pytest.mark.parametrize("kind", ["memory", "sqlite", "journal"])
def test_enqueued_trials_have_the_bits_of_one_process(tmp_path: Path, kind: str, full: bool) -> None:
    def run(processes: int, name: str) -> wf.StudySummary:
        pruner, told = optuna.pruners.NopPruner(), Counter[int]()
        study = optuna.create_study(storage=storage(kind, tmp_path), study_name=name, pruner=pruner)
        for width in widths:
            study.enqueue_trial({"width": width})
        torch.manual_seed(7)
        summary = wf.optimize(
            study, job, len(widths), processes=processes, keep_weights="all", callbacks=[lambda _, t: told.update([t.number])]
        )
        assert [trial.params["width"] for trial in study.trials] == [*widths]
        assert told == Counter(range(len(widths))) and summary.states == {"complete": len(widths)}
        return summary

    widths = range(4, 41 if full else 23)
    one = run(1, "one")
    for again in range(10 if full else 1):
        three = run(3, f"three, {again}")
        for ours, theirs in zip(three.results, one.results, strict=True):
            assert ours.name == theirs.name and ours.losses == theirs.losses
            assert ours.state_dict is not None and theirs.state_dict is not None
            assert all(torch.equal(ours.state_dict[key], theirs.state_dict[key]) for key in theirs.state_dict)


def test_weights_of_the_best_trial_are_kept() -> None:
    study = optuna.create_study()
    summary = wf.optimize(study, job, 8, processes=2)
    with_weights = [result.name for result in summary.results if result.state_dict is not None]
    assert with_weights == [f"width {study.best_params['width']}"]


def test_what_the_caller_and_trials_decide_is_heard_by_all() -> None:
    def stops(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        if trial.number == 4:
            study.stop()

    study = optuna.create_study()
    wf.optimize(study, square, processes=2, callbacks=[stops])
    assert 5 <= len(study.trials) <= 8 and all(trial.state == TrialState.COMPLETE for trial in study.trials)

    def objective(trial: optuna.Trial) -> float:
        if trial.number == 4:
            trial.study.stop()
        return square(trial)

    study = optuna.create_study()
    wf.optimize(study, objective, processes=2)
    assert 5 <= len(study.trials) <= 8
    study = optuna.create_study()
    wf.optimize(study, square, timeout=0.5, processes=2)
    assert all(trial.state == TrialState.COMPLETE for trial in study.trials)


def test_an_error_ends_the_study_unless_it_is_caught() -> None:
    def objective(trial: optuna.Trial) -> float:
        if trial.number == 3:
            raise KeyError("no such row")
        return square(trial)

    study = optuna.create_study()
    with pytest.raises(KeyError, match="no such row"):
        wf.optimize(study, objective, 50, processes=2)
    assert study.trials[3].state == TrialState.FAIL and len(study.trials) < 50
    assert not [trial for trial in study.trials if not trial.state.is_finished()]
    study = optuna.create_study()
    summary = wf.optimize(study, objective, 12, processes=2, catch=KeyError)
    assert summary.states == {"complete": 11, "fail": 1}


def test_an_error_of_a_callback_ends_all() -> None:
    def broken(study: optuna.Study, trial: optuna.trial.FrozenTrial) -> None:
        raise ValueError("of the callback")

    study = optuna.create_study()
    with pytest.raises(ValueError, match="of the callback"):
        wf.optimize(study, square, 50, processes=2, callbacks=[broken])
    assert all(trial.state.is_finished() for trial in study.trials)


def test_a_process_that_ends_fails_its_trial_alone(caplog: pytest.LogCaptureFixture) -> None:
    def objective(trial: optuna.Trial) -> float:
        if trial.number == 3:
            os._exit(5)
        return square(trial)

    study, told = optuna.create_study(), []
    summary = wf.optimize(study, objective, 12, processes=2, callbacks=[lambda _, trial: told.append(trial.number)])
    lost = [trial.number for trial in study.trials if trial.state == TrialState.FAIL]
    assert 3 in lost and len(lost) <= 2 and sorted(told) == [*range(12)]  # a lane beside it may have had another
    assert summary.states == {"complete": 12 - len(lost), "fail": len(lost)}
    assert "trial 3 has failed: its process ended with code 5" in caplog.text


def test_processes_that_always_end_are_not_started_for_ever() -> None:
    study = optuna.create_study()
    with pytest.raises(StudyError, match=f"ended {MOST_STARTS} times, the last one by SIGKILL, and trials are left"):
        wf.optimize(study, lambda trial: os.kill(os.getpid(), signal.SIGKILL), 100, processes=2)
    assert all(trial.state == TrialState.FAIL for trial in study.trials)


def moments(few: int) -> list[Any]:
    """As many drawn moments, twenty in the campaign."""
    return [pytest.param(seed, marks=[pytest.mark.campaign] if seed >= few else []) for seed in range(20)]


@pytest.mark.parametrize("seed", moments(3))
def test_a_process_killed_at_any_moment(tmp_path: Path, seed: int) -> None:
    def objective(trial: optuna.Trial) -> float:
        (tmp_path / f"{trial.number}").write_text(str(os.getpid()))
        for step in range(10):
            trial.report(float(step), step)
            time.sleep(0.005)
        return square(trial)

    def kills() -> None:
        numbers = torch.Generator().manual_seed(seed)
        deadline = time.monotonic() + WAIT
        while not any(tmp_path.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(float(torch.rand((), generator=numbers)) * 0.5)
        while not (pid := pid_of(max(tmp_path.iterdir(), key=lambda path: path.stat().st_mtime))):
            pass  # it is about to be written
        os.kill(pid, signal.SIGKILL)

    study, told = optuna.create_study(), []
    threading.Thread(target=kills, daemon=True).start()
    wf.optimize(study, objective, 30, processes=2, callbacks=[lambda _, trial: told.append(trial.number)])
    assert sorted(told) == [*range(30)] and all(trial.state.is_finished() for trial in study.trials)
    assert Counter(trial.state for trial in study.trials)[TrialState.FAIL] <= 2


SCRIPT = """
import functools, os, sys, time
import optuna
import waterflow as wf

@functools.cache
def seconds():
    return float(sys.argv[2])

def objective(trial):  # of a script without a guard
    open(os.path.join(sys.argv[1], f"trial-{trial.number}"), "w").write(str(os.getpid()))
    time.sleep(seconds())
    return 0.0

study = optuna.create_study(storage=f"sqlite:///{sys.argv[1]}/study.db", study_name="a")
wf.optimize(study, objective, processes=2)
"""


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pid_of(path: Path) -> int:
    return int(path.read_text() or 0)


@pytest.mark.parametrize("seed", moments(2))
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_the_caller_is_interrupted_or_killed(tmp_path: Path, how: signal.Signals, seed: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    numbers = torch.Generator().manual_seed(seed)
    seconds = 60.0 if seed == 0 else 0.02  # trials that end meanwhile, or none
    caller = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path), str(seconds)], stderr=subprocess.DEVNULL, env=environment
    )
    deadline = time.monotonic() + WAIT
    while len({*map(pid_of, tmp_path.glob("trial-*"))} - {0}) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(float(torch.rand((), generator=numbers)))
    caller.send_signal(how)
    caller.wait(WAIT)
    pids = {*map(pid_of, tmp_path.glob("trial-*"))} - {0}
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) >= 2 and not any(map(lives, pids))
    study = optuna.load_study(study_name="a", storage=f"sqlite:///{tmp_path}/study.db")
    if how == signal.SIGINT:
        assert all(trial.state.is_finished() for trial in study.trials)


def test_a_grid_is_walked_once() -> None:
    points = {"x": [-1.0, -0.5, 0.0, 0.5, 1.0], "y": [0.0, 1.0]}
    study = optuna.create_study(sampler=optuna.samplers.GridSampler(points, seed=0))

    def objective(trial: optuna.Trial) -> float:
        return trial.suggest_float("x", -1, 1) + trial.suggest_float("y", 0, 1)

    wf.optimize(study, objective, 10, processes=3)
    assert sorted((t.params["x"], t.params["y"]) for t in study.trials) == [(x, y) for x in points["x"] for y in points["y"]]


def test_samplers_and_pruners_see_the_trials_of_all_processes() -> None:
    def objective(trial: optuna.Trial) -> float:
        x = trial.suggest_float("x", 0.0, 1.0)
        for step in range(4):
            trial.report(x, step)
            if trial.should_prune():
                raise optuna.TrialPruned
        return x

    pruner = optuna.pruners.MedianPruner(n_startup_trials=6, n_warmup_steps=0)
    study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=0, n_startup_trials=10), pruner=pruner)
    wf.optimize(study, objective, 60, processes=4)
    states = Counter(trial.state for trial in study.trials)
    assert states[TrialState.PRUNED] >= 10 and states[TrialState.PRUNED] + states[TrialState.COMPLETE] == 60
    late = [trial.params["x"] for trial in study.trials[30:]]
    assert sum(late) / len(late) < 0.3  # a single process would have had 15 trials, of which ten are random


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"processes": 0}, "processes must be a whole number of 1 or more; got 0"),
        ({"processes": True}, "processes must be a whole number"),
        ({"processes": 2, "deterministic": True, "max_concurrent": 2}, "deterministic=True cannot stand beside processes=2"),
        ({"processes": 2, "timeline": print}, "timeline= cannot stand beside processes=2"),
        ({"processes": 2, "checkpoint": "folder"}, "checkpoint= cannot stand beside processes=2"),
        ({"processes": 2, "order": "promising"}, "order= cannot stand beside processes=2"),
        ({"processes": 2, "device": "cuda"}, "device='cuda' cannot stand beside processes=2"),
        ({"processes": 2, "max_concurrent": 1}, "max_concurrent=1 allows fewer"),
    ],
)
def test_what_cannot_stand_beside_it_is_refused(given: dict[str, Any], said: str) -> None:
    study = optuna.create_study()
    with pytest.raises(StudyError, match=said):
        wf.optimize(study, square, 4, **given)
    assert not study.trials


def test_what_cannot_be_pickled_is_named() -> None:
    lock, study = threading.Lock(), optuna.create_study()
    with pytest.raises(StudyError, match="objective cannot be sent to the processes of the study: cannot pickle '_thread.lock'"):
        wf.optimize(study, lambda trial: float(lock.locked()), 4, processes=2)
    assert not study.trials


class Unreadable:
    """Is written, and cannot be read."""

    def __reduce__(self) -> Any:
        return int, ("none",)


def test_what_cannot_be_read_in_a_process_is_told() -> None:
    made, study = Unreadable(), optuna.create_study()
    with pytest.raises(StudyError, match="objective cannot be read in a process of the study: invalid literal"):
        wf.optimize(study, lambda trial: float(made is None), 4, processes=2)
    assert not study.trials


def test_more_processes_than_cores_are_told(caplog: pytest.LogCaptureFixture) -> None:
    study = optuna.create_study()
    wf.optimize(study, square, 6, processes=5)
    assert len(study.trials) == 6 and "more than one for each core is not faster" in caplog.text


def test_each_process_has_cores_of_its_own(tmp_path: Path) -> None:
    def objective(trial: optuna.Trial) -> float:
        (tmp_path / f"{trial.number}").write_text(json.dumps([os.getpid(), *sorted(os.sched_getaffinity(0))]))
        return 0.0

    wf.optimize(optuna.create_study(), objective, 8, processes=2)
    cores = {tuple(json.loads(path.read_text())[1:]) for path in tmp_path.iterdir()}
    assert len(cores) <= min(2, len(os.sched_getaffinity(0))) and len({core for some in cores for core in some}) == sum(
        map(len, cores)
    )
