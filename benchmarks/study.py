"""The demo's study, trials per hour: waterflow against the ways in which people run Optuna on one machine.

Search space, trials (enqueued, so that all ways train the same networks), epochs, seeds and loader are the same for
all. Every run is a new process that has captured nothing; imports (also those that torch puts off until the first
optimizer is made, 0.9 s) and reading the data are outside the clock, the captures inside.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

import waterflow as wf
from benchmarks import report
from examples import demo

GOAL = 1.3


def fresh_study(trials: int, storage: Any = None, name: str | None = None) -> optuna.Study:
    """The demo's study with its first ``trials`` points laid down."""
    study = demo.create_study(storage=storage, study_name=name)
    points = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    for _ in range(trials):
        trial = points.ask()
        demo.choose(trial)
        study.enqueue_trial(trial.params)
    return study


def alone(study: optuna.Study, trials: int) -> None:
    """``study.optimize`` as it comes: torch's default threads."""
    study.optimize(demo.objective_eager, n_trials=trials)


def two_threads(study: optuna.Study, trials: int) -> None:
    """``n_jobs=2``."""
    study.optimize(demo.objective_eager, n_trials=trials, n_jobs=2)


def door_loop(study: optuna.Study, trials: int) -> None:
    """waterflow, an objective with its own loop."""
    wf.optimize(study, demo.objective, n_trials=trials)


def door_job(study: optuna.Study, trials: int) -> None:
    """waterflow, trials that return a job."""
    wf.optimize(study, demo.build, n_trials=trials)


WAYS: dict[str, Callable[[optuna.Study, int], None]] = {
    "study.optimize": alone,
    "n_jobs=2": two_threads,
    "waterflow, own loop": door_loop,
    "waterflow, job": door_job,
}
PEERS = ("study.optimize", "n_jobs=2", "two processes")


def prepare() -> None:
    """Read the data, and let torch import what the first optimizer needs: the same for all ways."""
    demo.digits()
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)


def run_here(way: str, trials: int) -> dict[str, Any]:
    """One run in this process."""
    prepare()
    study = fresh_study(trials)
    taken = report.seconds(lambda: WAYS[way](study, trials))
    return summary(study, taken)


def summary(study: optuna.Study, taken: float) -> dict[str, Any]:
    """Seconds, and what became of the trials."""
    states = [trial.state for trial in study.trials]
    steps = sum(demo.steps_of(trial) for trial in study.trials)
    return {
        "seconds": taken, "steps": steps, "best": study.best_value,
        "completed": states.count(TrialState.COMPLETE), "pruned": states.count(TrialState.PRUNED),
        "failed": states.count(TrialState.FAIL),
    }  # fmt: skip


def work(path: str) -> None:
    """One of two processes on one storage: takes waiting trials until there are none."""
    torch.set_num_threads(1)
    prepare()
    study = optuna.load_study(study_name="shared", storage=JournalStorage(JournalFileBackend(path)), **_parts())
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()
    while study.get_trials(deepcopy=False, states=(TrialState.WAITING,)):
        study.optimize(demo.objective_eager, n_trials=1)


def _parts() -> dict[str, Any]:
    made = demo.create_study()
    return {"sampler": made.sampler, "pruner": made.pruner}


def run_processes(trials: int) -> dict[str, Any]:
    """Two processes with one intra-op thread each, which is faster here than torch's default."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "journal.log")
        study = fresh_study(trials, JournalStorage(JournalFileBackend(path)), "shared")
        command = [sys.executable, "-m", "benchmarks.study", "--worker", path]
        workers = [
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            for _ in range(2)
        ]
        for worker in workers:
            assert worker.stdout is not None
            worker.stdout.readline()
        start = time.perf_counter()
        for worker in workers:
            assert worker.stdin is not None
            worker.stdin.write("go\n")
            worker.stdin.flush()
        for worker in workers:
            if worker.wait() != 0:
                raise RuntimeError("a worker process failed")
        return summary(study, time.perf_counter() - start)


def run_new_process(way: str, trials: int) -> dict[str, Any]:
    """One run of one way, in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.study", "--run", way, "--trials", str(trials)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{way} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(trials: int, repeats: int) -> tuple[dict[str, list[float]], dict[str, list[dict[str, Any]]]]:
    """Seconds of each way in each round, and what became of its trials."""
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in (*WAYS, "two processes")}

    def run(way: str) -> float:
        runs[way].append(run_new_process(way, trials))
        return runs[way][-1]["seconds"]

    return report.interleaved({way: lambda way=way: run(way) for way in runs}, repeats), runs


def main() -> int:
    """Command line."""
    arguments_ = report.parser(__doc__ or "")
    arguments_.add_argument("--trials", type=int, default=24)
    arguments_.add_argument("--run", help=argparse.SUPPRESS)
    arguments_.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = arguments_.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if arguments.worker:
        work(arguments.worker)
        return 0
    if arguments.run:
        ran = run_processes(arguments.trials) if arguments.run == "two processes" else run_here(
            arguments.run, arguments.trials
        )  # fmt: skip
        sys.stdout.write(json.dumps(ran) + "\n")
        return 0
    times, runs = measure(arguments.trials, arguments.repeats)
    best = min(PEERS, key=lambda way: report.median(times[way]))
    rows = []
    for way, taken in times.items():
        last = runs[way][-1]
        ratio = report.ratio_of(times[best], taken)
        row = {
            "way": way, "seconds": report.median(taken), "spread": report.spread(taken),
            "trials per hour": arguments.trials / report.median(taken) * 3600, "against the best peer": ratio,
            "steps": last["steps"], "completed": last["completed"], "pruned": last["pruned"], "best": last["best"],
        }  # fmt: skip
        if way not in PEERS:
            row |= {"at least": GOAL, "holds": ratio >= GOAL}
        rows.append(row)
    note = f"{arguments.trials} trials; best peer: {best}; new process each run, captures inside the clock"
    return report.finish("study", arguments, rows, note)


if __name__ == "__main__":
    sys.exit(main())
