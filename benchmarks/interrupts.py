"""Ctrl-C at random moments: how long a study then takes to end, and what it leaves behind.

    python -m benchmarks.interrupts [--times 40] [--seed 0] [--load 2]

Another process studies again and again, with trials of every kind side by side: a job with an evaluation and a slow loader, a
loop of the objective's own, one whose step is opaque, and one that sleeps in short naps. It is sent SIGINT at a random moment of each
study, from its first trial to half a second on. Printed are the seconds from the signal to the end of ``optimize``, trials
that are RUNNING then, and threads of trials that are left; as many processes as asked for keep the cores busy meanwhile.
Exit status 1 where one of them took 2 s or more, or left anything.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import optuna
import torch
from optuna.trial import Trial, TrialState
from torch import nn
from torch.nn import functional as F

import waterflow as wf

LONGEST = 2.0  # seconds
WINDOW = 0.5  # seconds after a study's first trial in which the signal comes
DATA = [(torch.randn(32, 64), torch.randint(0, 8, (32,))) for _ in range(16)]


def network() -> nn.Module:
    """A small perceptron."""
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.2), nn.Linear(256, 8))


def slowly() -> Iterator[Any]:
    """Batches from a loader that takes its time."""
    for batch in DATA:
        time.sleep(0.003)
        yield batch


def evaluate(model: nn.Module) -> float:
    """The share of right answers."""
    return statistics.mean(float((model(x).argmax(1) == y).float().mean()) for x, y in DATA)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def opaque_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss that a step cannot be captured with."""
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return loss if loss.item() < 1e9 else 2 * loss


def objective(trial: Trial) -> Any:
    """One of four kinds of trial, which goes on for longer than anybody waits."""
    trial.suggest_float("x", 0.0, 1.0)
    kind = trial.number % 4
    if kind == 0:
        return wf.Job(f"trial-{trial.number}", network, slowly, sgd, loss=F.cross_entropy, evaluate=evaluate, epochs=10**6)
    while kind == 1:
        time.sleep(0.02)
    model = network()
    settings: dict[str, Any] = {"loss": F.cross_entropy} if kind == 2 else {"step": opaque_loss}
    step = wf.Step(model, optimizer=sgd(model.parameters()), **settings)
    while True:
        for batch in DATA:
            step(batch)


def studies(url: str, times: int, wire: Connection) -> None:
    """Study until interrupted, so many times; tell of each begin and end."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    torch.set_num_threads(1)
    for number in range(times):
        study = optuna.create_study(storage=url, study_name=f"study-{number}")

        def begun(study: optuna.Study = study, number: int = number) -> None:
            while not study.get_trials(deepcopy=False):
                time.sleep(0.001)
            wire.send(number)

        told = threading.Thread(target=begun)
        told.start()
        try:
            wf.optimize(study, objective, n_trials=100, max_concurrent=5, memory="1GiB")
        except KeyboardInterrupt:
            ended = time.monotonic()
            told.join()
            running = sum(trial.state == TrialState.RUNNING for trial in study.get_trials(deepcopy=False))
            left = sum(thread.name.startswith("trial-") for thread in threading.enumerate())
            wire.send((ended, running, left))
    wire.send(None)


def burn() -> None:
    """Keep a core busy."""
    while True:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=40, help="studies to interrupt")
    parser.add_argument("--seed", type=int, default=0, help="decides over the moments")
    parser.add_argument("--load", type=int, default=os.cpu_count() or 1, help="processes that keep cores busy")
    asked = parser.parse_args()
    moments = random.Random(asked.seed)
    context = mp.get_context("spawn")
    load = [context.Process(target=burn, daemon=True) for _ in range(asked.load)]
    seconds, running, left = [], 0, 0
    with tempfile.TemporaryDirectory() as folder:
        here, there = context.Pipe()
        url = f"sqlite:///{Path(folder) / 'studies.db'}"
        child = context.Process(target=studies, args=(url, asked.times, there), daemon=True)
        for process in [child, *load]:
            process.start()
        there.close()
        while here.recv() is not None:
            time.sleep(moments.uniform(0, WINDOW))
            assert child.pid is not None
            sent = time.monotonic()
            os.kill(child.pid, signal.SIGINT)
            ended, were_running, were_left = here.recv()
            seconds.append(ended - sent)
            running, left = running + were_running, left + were_left
        child.join(30)
        for process in load:
            process.kill()
    print(
        f"{len(seconds)} interrupted studies, {asked.load} busy processes beside: ended after {statistics.median(seconds):.2f} s "
        f"in the median, {max(seconds):.2f} s at most; RUNNING trials: {running}; threads left: {left}; exit {child.exitcode}"
    )
    if max(seconds) >= LONGEST or running or left or child.exitcode or len(seconds) != asked.times:
        sys.exit(1)


if __name__ == "__main__":
    main()
