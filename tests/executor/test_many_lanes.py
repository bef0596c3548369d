"""What follows from the number of lanes, with fewer of them than jobs and more than cores."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from typing import Any

import optuna
import pytest
import torch
from torch import nn

import waterflow as wf
from waterflow.partition.plan.plan import opaque_plan

LANES = pytest.mark.parametrize("lanes", [1, 2, 3, 4, 8, 16])
BATCHES = [(torch.randn(32, 16), torch.randn(32, 4)) for _ in range(8)]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.2), nn.ReLU(), nn.Linear(64, 4))


def job(seed: int, **settings: Any) -> wf.Job:
    return wf.Job(name=str(seed), model=model, loss=nn.functional.mse_loss, seed=seed,
                  optimizer=lambda p: torch.optim.AdamW(p, lr=0.01), **{"data": BATCHES, "epochs": 3, **settings})  # fmt: skip


@pytest.fixture(scope="module")
def alone() -> list[list[float]]:
    """The losses of each job alone."""
    return [wf.train([job(seed)], lanes=1, memory="256MiB")[0].losses for seed in range(6)]


def losses(results: Any) -> list[list[float]]:
    return [result.losses for result in sorted(results, key=lambda one: int(one.name))]


@LANES
def test_guaranteed_and_opportunistic_jobs(lanes: int, alone: list[list[float]]) -> None:
    """One opportunistic job's steps wait until the guaranteed ones are gone where there are no lanes for all."""
    jobs = [job(seed, priority="opportunistic" if seed % 2 else "guaranteed") for seed in range(6)]
    with wf.Engine(memory="256MiB", lanes=lanes) as engine:
        assert losses(wf.train(jobs, engine=engine, max_concurrent=6)) == alone
        engine.native.check()


@LANES
def test_an_opportunistic_job_makes_way_and_comes_back(lanes: int, alone: list[list[float]]) -> None:
    with wf.Engine(memory="256MiB", lanes=lanes) as engine:
        reservations = engine.reservations
        between: list[int] = []
        arrived = threading.Event()

        def guaranteed() -> None:
            assert arrived.wait(20)
            late = engine.add_job("late")
            reservations.claim(late, opaque_plan("late", 4096, persistent=reservations.room - 8192, batch=0))
            between.append(reservations.claimed())
            engine.remove_job(late)

        thread = threading.Thread(target=guaranteed)
        thread.start()
        mine = job(0, priority="opportunistic", epochs=3, data=lambda: announced(arrived))
        results = wf.train([mine], engine=engine)
        thread.join(20)
        assert losses(results) == alone[:1] and between and between[0] >= reservations.room - 8192


def announced(arrived: threading.Event) -> Any:
    for at, batch in enumerate(BATCHES):
        if at == 4:
            arrived.set()
        yield batch


@LANES
def test_jobs_that_share_their_data(lanes: int, alone: list[list[float]]) -> None:
    shared = wf.SharedData(BATCHES)
    assert (
        losses(wf.train([job(seed, data=shared) for seed in range(6)], lanes=lanes, memory="256MiB", max_concurrent=6)) == alone
    )


@LANES
def test_a_deterministic_study(lanes: int) -> None:
    """The same trials in each run with so many lanes, pruned ones, too."""

    def objective(trial: optuna.Trial) -> float:
        made = model()
        step = wf.Step(
            made,
            loss=nn.functional.mse_loss,
            optimizer=torch.optim.SGD(made.parameters(), lr=trial.suggest_float("lr", 1e-4, 1.0)),
        )
        for epoch in range(3):
            loss = sum(float(step(batch)) for batch in BATCHES)
            trial.report(loss, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return loss

    def trials() -> list[Any]:
        torch.manual_seed(0)
        study = optuna.create_study(
            sampler=optuna.samplers.TPESampler(seed=0), pruner=optuna.pruners.MedianPruner(n_startup_trials=2)
        )
        wf.optimize(study, objective, n_trials=10, lanes=lanes, deterministic=True, max_concurrent=4, memory="256MiB")
        return [(trial.params, trial.value, trial.state) for trial in study.trials]

    assert trials() == trials()


@LANES
def test_close_while_all_of_them_run(lanes: int) -> None:
    engine = wf.Engine(memory="256MiB", lanes=lanes)
    running, go = threading.Barrier(lanes + 1), threading.Event()
    ended: list[BaseException] = []

    def run() -> None:
        jobs = engine.add_job("held")
        try:
            while True:
                engine.run_eager(jobs, lambda: (running.wait(20), go.wait(20)) if not go.is_set() else None, 4096)
        except wf.JobCancelled as error:
            ended.append(error)

    threads = [threading.Thread(target=run) for _ in range(lanes + 4)]
    for thread in threads:
        thread.start()
    running.wait(20)
    assert engine.native.held == lanes * 4096
    go.set()
    engine.close()
    for thread in threads:
        thread.join(20)
    assert len(ended) == lanes + 4


PROGRAM = """
import signal, sys, threading, torch
import waterflow as wf
from torch import nn

def data():
    sys.stdout.write("running\\n")
    sys.stdout.flush()
    while True:
        yield torch.randn(32, 16), torch.randn(32, 4)

jobs = [wf.Job(name=str(n), model=lambda: nn.Linear(16, 4), data=data, loss=nn.functional.mse_loss,
               optimizer=lambda p: torch.optim.SGD(p, lr=0.1)) for n in range(6)]
try:
    wf.train(jobs, lanes=int(sys.argv[1]), memory="256MiB", max_concurrent=6)
except KeyboardInterrupt:
    print("interrupted", threading.active_count() < 20, flush=True)
"""


@pytest.mark.parametrize("lanes", [*(pytest.param(n, marks=pytest.mark.slow) for n in (1, 4)), 16])
def test_ctrl_c(lanes: int) -> None:
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, str(lanes)], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    try:
        for _ in range(6):
            assert program.stdout.readline().strip() == "running"
        os.kill(program.pid, signal.SIGINT)
        out, _ = program.communicate(timeout=60)
    finally:
        program.kill()
    assert out.strip() == "interrupted True" and program.returncode == 0
