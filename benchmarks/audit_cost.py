"""What audits as by default add to a study: trials of 1,000 and of 100 steps of the demo's networks, in one process.

Each run is a new process with a whole study by ``waterflow.optimize``: as many trials as are asked for, which the demo's search space
gives at random, each of so many steps and nothing else. Captures are inside the clock, imports and data outside. The audits of
one network are shared by all trials of a process; of the trials here nearly each has a network of its own, so that nearly each
pays. Runs with ``WATERFLOW_AUDIT=off`` and ``first`` alternate.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from itertools import chain, islice, repeat
from typing import Any

import optuna
import torch
from torch.nn import functional as F

import waterflow as wf
from benchmarks import report
from benchmarks.study import fresh_study, prepare
from examples import demo

LIMITS = {1000: 0.01, 100: 0.05}  # by steps of a trial: what audits may add
WAYS = ("off", "first")


def run_here(trials: int, steps: int) -> dict[str, float]:
    """One study in this process: its seconds, and how many audits its steps passed."""
    prepare()
    made: list[wf.Step] = []

    def objective(trial: optuna.Trial) -> float:
        choice = demo.choose(trial)
        model = demo.make_model(choice.kind, choice.depth, choice.width, choice.dropout)
        optimizer = demo.make_optimizer(choice, model.parameters())
        numbers = torch.Generator().manual_seed(demo.SEED)
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, generator=numbers)
        made.append(step)
        passes = chain.from_iterable(repeat(demo.Batches(choice.batch_size)))
        return float([step(batch) for batch in islice(passes, steps)][-1])

    study = fresh_study(trials)
    processor = time.process_time()
    taken = report.seconds(lambda: wf.optimize(study, objective, n_trials=trials))
    processor = time.process_time() - processor
    audits = [step.audit for step in made]
    passed, audited = sum(a.passed for a in audits), sum(a.seconds for a in audits)
    return {"seconds": taken, "processor": processor, "audits": passed, "audited": audited}


def run_new_process(way: str, trials: int, steps: int) -> dict[str, float]:
    """The same in a process of its own, with audits that way."""
    command = [sys.executable, "-m", "benchmarks.audit_cost", "--run", str(steps), "--trials", str(trials)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "WATERFLOW_AUDIT": way})
    if done.returncode != 0:
        raise RuntimeError(f"a study with audits {way} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measure(trials: int, steps: int, repeats: int) -> dict[str, Any]:
    """One row of the table."""
    runs: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}

    def run(way: str) -> float:
        runs[way].append(run_new_process(way, trials, steps))
        return runs[way][-1]["seconds"]

    times = report.interleaved({way: lambda way=way: run(way) for way in WAYS}, repeats)
    added = [first / off - 1 for first, off in zip(times["first"], times["off"])]
    processor = [first["processor"] / off["processor"] - 1 for first, off in zip(runs["first"], runs["off"])]
    within = [one["audited"] / one["seconds"] for one in runs["first"]]
    return {
        "steps": steps, "off, s": report.median(times["off"]), "off, spread": report.spread(times["off"]),
        "first, s": report.median(times["first"]), "first, spread": report.spread(times["first"]),
        "audits": runs["first"][-1]["audits"], "in audits, %": 100 * report.median(within),
        "processor time added, %": 100 * report.median(processor),
        "added, %": 100 * report.median(added), "added, spread": report.spread([100 * one for one in added]),
        "at most, %": 100 * LIMITS[steps], "holds": report.median(added) <= LIMITS[steps],
    }  # fmt: skip


def main() -> int:
    """Command line."""
    arguments_ = report.parser(__doc__ or "")
    arguments_.add_argument("--trials", type=int, default=24)
    arguments_.add_argument("--run", type=int, help=argparse.SUPPRESS)
    arguments = arguments_.parse_args()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    if arguments.run:
        sys.stdout.write(json.dumps(run_here(arguments.trials, arguments.run)) + "\n")
        return 0
    rows = [measure(arguments.trials, steps, arguments.repeats) for steps in LIMITS]
    note = f"a study of {arguments.trials} trials with so many steps each; new process each run, captures inside the clock"
    return report.finish("audit_cost", arguments, rows, note)


if __name__ == "__main__":
    sys.exit(main())
