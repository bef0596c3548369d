"""A study over the devices of a cluster: as on one device, with trials in other processes."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.cluster.conftest import LiveCluster
from waterflow.errors import InvalidJobError, StudyError
from waterflow.study import cluster_trials

pytestmark = pytest.mark.slow


@pytest.fixture
def cluster(shared_cluster: LiveCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> wf.Cluster:
    monkeypatch.chdir(tmp_path)
    return shared_cluster.client


@pytest.fixture
def study(tmp_path: Path, cluster: wf.Cluster) -> optuna.Study:
    return optuna.create_study(
        storage="sqlite:///study.db", sampler=optuna.samplers.RandomSampler(seed=1), pruner=optuna.pruners.NopPruner()
    )


def data(steps: int = 4) -> Iterator[Any]:
    numbers = torch.Generator().manual_seed(0)
    for _ in range(steps):
        yield torch.randn(4, 6, generator=numbers), torch.randint(0, 3, (4,), generator=numbers)


def build(trial: optuna.Trial) -> wf.Job:
    rate = trial.suggest_float("rate", 1e-3, 1.0, log=True)
    trial.set_user_attr("process", os.getpid())
    return wf.Job(
        name="built", data=data, seed=3, epochs=2, loss=F.cross_entropy, model=lambda: nn.Linear(6, 3),
        optimizer=lambda p: torch.optim.SGD(p, lr=rate), evaluate=lambda m: float(sum(p.sum() for p in m.parameters())),
    )  # fmt: skip


def test_trials_that_return_jobs(cluster: wf.Cluster, study: optuna.Study) -> None:
    told: list[optuna.trial.FrozenTrial] = []
    done = wf.optimize(study, build, 6, cluster=cluster, callbacks=[lambda _, trial: told.append(trial)])
    assert done.trials == 6 and len(study.trials) == 6 and 1 <= done.most_at_once <= 4
    assert [result.steps for result in done.results] == [8] * 6 and done.steps == 48
    processes = {trial.user_attrs["process"] for trial in study.trials}
    assert os.getpid() not in processes
    assert len({trial.params["rate"] for trial in study.trials}) == 6  # copies of one sampler do not repeat each other
    for trial in study.trials:  # as in this process, bit by bit
        (alone,) = wf.train([build(optuna.trial.FixedTrial(trial.params))], lanes=1)  # type: ignore[arg-type]
        assert alone.value == trial.value and len(trial.intermediate_values) == 2
    assert {trial.number: trial.params for trial in told} == {trial.number: trial.params for trial in study.trials}


def test_a_job_is_pruned_where_it_runs(cluster: wf.Cluster) -> None:
    study = optuna.create_study(storage="sqlite:///study.db", pruner=optuna.pruners.ThresholdPruner(lower=1e9))
    done = wf.optimize(study, build, 2, cluster=cluster)
    assert [trial.state.name for trial in study.trials] == ["PRUNED"] * 2
    assert [result.steps for result in done.results] == [4, 4]  # one epoch of two
    assert all(trial.value == trial.intermediate_values[0] for trial in study.trials)


def test_trials_with_loops_of_their_own(cluster: wf.Cluster, study: optuna.Study) -> None:
    """Pruned, failed, stopped: each as Optuna would have it."""

    def objective(trial: optuna.Trial) -> float:
        model = nn.Linear(6, 3)
        step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        loss = sum(float(step(batch)) for batch in data())
        trial.report(loss, 0)
        if trial.number == 1:
            raise optuna.TrialPruned
        if trial.number == 2:
            raise ValueError("boom")
        if trial.number == 3:
            trial.study.stop()
        return loss

    wf.optimize(study, objective, 50, cluster=cluster, catch=(ValueError,), max_concurrent=1)
    states = [trial.state.name for trial in study.trials]
    assert states == ["COMPLETE", "PRUNED", "FAIL", "COMPLETE"]
    assert study.trials[1].value == study.trials[1].intermediate_values[0]
    with pytest.raises(ValueError, match="boom"):
        wf.optimize(study, lambda trial: (_ for _ in ()).throw(ValueError("boom")), 1, cluster=cluster)


def test_several_objectives_and_journal_storage(cluster: wf.Cluster) -> None:
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend("journal.log"))
    study = optuna.create_study(storage=storage, directions=["minimize", "maximize"])

    def objective(trial: optuna.Trial) -> Any:
        job = build(trial)
        job.evaluate = lambda model: {"a": 1.0, "b": float(trial.number)}
        return job

    wf.optimize(study, objective, 3, cluster=cluster)
    assert sorted(tuple(trial.values) for trial in study.trials) == [(1.0, 0.0), (1.0, 1.0), (1.0, 2.0)]


@pytest.mark.parametrize("keep", ["best", "none", "all"])
def test_whose_weights_come_back(cluster: wf.Cluster, keep: Any) -> None:
    study = optuna.create_study(storage="sqlite:///study.db", sampler=optuna.samplers.RandomSampler(seed=1))
    done = wf.optimize(study, build, 4, cluster=cluster, keep_weights=keep)
    kept = [number for number, result in enumerate(done.results) if result.state_dict is not None]
    assert kept == {"best": [study.best_trial.number], "none": [], "all": [0, 1, 2, 3]}[keep]
    assert all(result.losses for result in done.results)


@pytest.mark.parametrize("catch", [(), Exception], ids=["", "catch"])
def test_a_training_loss_is_not_maximized(cluster: wf.Cluster, catch: Any) -> None:
    study = optuna.create_study(storage="sqlite:///study.db", direction="maximize")

    def objective(trial: optuna.Trial) -> Any:
        job = build(trial)
        job.evaluate = None
        return job

    with pytest.raises(StudyError, match=r"direction='maximize' and job 'built' has no evaluate=.*Pass Job\(evaluate=\)"):
        wf.optimize(study, objective, 4, cluster=cluster, max_concurrent=1, catch=catch)
    assert [trial.state.name for trial in study.trials] == ["FAIL"]


def test_trials_over_their_time_limit(cluster: wf.Cluster, study: optuna.Study) -> None:
    """A loop of its own, and a job: told as failed, and the study goes on."""

    def objective(trial: optuna.Trial) -> Any:
        if trial.number == 0:
            while True:
                time.sleep(0.01)
        job = build(trial)
        if trial.number == 1:
            job.evaluate = lambda model: threading.Event().wait()
        return job

    done = wf.optimize(study, objective, 3, cluster=cluster, trial_timeout=4.0, max_concurrent=1)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "FAIL", "COMPLETE"]
    errors = [str(result.error) for result in done.results if result.error is not None]
    assert len(errors) == 1 and "trial 1 ran longer than its limit trial_timeout=4 s" in errors[0]


@pytest.mark.slow
def test_a_trial_that_nothing_ends_ends_with_its_process(
    cluster: wf.Cluster, study: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_trials, "AFTER_LIMIT", 2.0)

    def objective(trial: optuna.Trial) -> float:
        if trial.number == 0:
            threading.Event().wait()
        return 1.0

    wf.optimize(study, objective, 2, cluster=cluster, trial_timeout=4.0, max_concurrent=1)
    assert [trial.state.name for trial in study.trials] == ["FAIL", "COMPLETE"]


def test_interrupted(cluster: wf.Cluster, study: optuna.Study) -> None:
    """Ctrl-C ends the trials, too."""
    import signal

    def objective(trial: optuna.Trial) -> float:
        trial.set_user_attr("began", True)
        time.sleep(60)
        return 0.0

    def press() -> None:
        until = time.monotonic() + 30
        while not any(trial.user_attrs for trial in study.trials) and time.monotonic() < until:
            time.sleep(0.05)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        wf.optimize(study, objective, 4, cluster=cluster, max_concurrent=2)
    assert {trial.state.name for trial in study.trials} == {"FAIL"}
    jobs = [job for job in cluster.status()["jobs"] if job["id"].startswith("trial-")]
    assert not [job for job in jobs if job["state"] in ("waiting", "running", "starting")]


KILLED = """
import sys, time
from pathlib import Path
import optuna
import waterflow as wf
import tests.cluster.test_optimize as these

study = optuna.load_study(study_name="killed", storage="sqlite:///study.db")
wf.optimize(study, these.gated(Path("gate").resolve()), 4, backend=wf.Cluster(sys.argv[1]))
"""


def gated(gate: Path) -> Any:
    """An objective that stands still until a file is there, and notes that it was begun."""

    def objective(trial: optuna.Trial) -> float:
        value = trial.suggest_float("x", 0.0, 1.0)
        with gate.with_name("begun").open("a") as begun:
            begun.write(f"{trial.number}\n")
        while not gate.exists():
            time.sleep(0.05)
        if trial.number == 1:
            trial.report(7.0, 0)
            raise optuna.TrialPruned
        return value + trial.number

    return objective


def test_the_same_call_again_after_its_process_was_killed(
    shared_cluster: LiveCluster, cluster: wf.Cluster, tmp_path: Path
) -> None:
    """Trials that were handed in train once, and are told once."""
    study = optuna.create_study(storage="sqlite:///study.db", study_name="killed")
    study.ask()  # somebody else's
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    caller = subprocess.Popen([sys.executable, "-c", KILLED, str(shared_cluster.folder)], env=environment)
    begun = tmp_path / "begun"
    try:
        until = time.monotonic() + 90
        ended = ("completed", "failed", "cancelled")
        while (
            not begun.exists()
            or sum(job["id"].startswith("trial-") and job["state"] not in ended for job in cluster.status()["jobs"]) < 4
        ):
            assert time.monotonic() < until and caller.poll() is None
            time.sleep(0.05)
    finally:
        caller.kill()
        caller.wait()
    handed_in = [trial.number for trial in study.trials if trial.number and trial.state.name == "RUNNING"]
    assert handed_in == [1, 2, 3, 4]
    told: list[int] = []
    gate = tmp_path / "gate"
    gate.touch()
    done = wf.optimize(study, gated(gate), 4, cluster=cluster, callbacks=[lambda _, trial: told.append(trial.number)])
    assert [trial.state.name for trial in study.trials] == ["RUNNING", "PRUNED", *["COMPLETE"] * 3]
    assert all(trial.value == trial.params["x"] + trial.number for trial in study.trials[2:])
    assert study.trials[1].value == 7.0 and done.trials == 4 and sorted(told) == [1, 2, 3, 4]
    assert sorted(map(int, begun.read_text().split())) == [1, 2, 3, 4]
    wf.optimize(study, gated(gate), 1, cluster=cluster)  # nothing is left of before
    assert len(study.trials) == 6


@pytest.mark.parametrize("storage", [None, "sqlite://"])
def test_a_study_in_this_process_cannot_be_spread(cluster: wf.Cluster, storage: str | None) -> None:
    study = optuna.create_study(storage=storage)
    with pytest.raises(StudyError, match=r"must be an RDB or a journal storage, in a file .*storage='sqlite:///study.db'"):
        wf.optimize(study, build, 1, cluster=cluster)
    assert study.trials == []


def test_settings_that_contradict(cluster: wf.Cluster, study: optuna.Study) -> None:
    with pytest.raises(StudyError, match="memory=, deterministic= cannot stand beside backend="):
        wf.optimize(study, build, 1, cluster=cluster, memory="1GiB", deterministic=True, max_concurrent=1)
    with pytest.raises(StudyError, match="backend must be a waterflow.Cluster; got str"):
        wf.optimize(study, build, 1, cluster="here")  # type: ignore[arg-type]


def test_an_objective_that_cannot_be_pickled(cluster: wf.Cluster, study: optuna.Study) -> None:
    lock = threading.Lock()
    with pytest.raises(InvalidJobError, match=r"objective cannot be sent to another process: .*variable 'lock' of"):
        wf.optimize(study, lambda trial: float(lock.locked()), 1, cluster=cluster)
    assert study.trials == []
