"""What it takes to suspend a job and let it go on, and to move it to another process.

    python -m benchmarks.suspend [--megabytes 100] [--times 7]

The job is a stack of linear layers with AdamW; its size is that of all tensors of its checkpoint: parameters and
optimizer state (two sums for each parameter), and 15 KB of random numbers. Times are seconds on the wall, best and
median. Moving: from the moment at which the first process is asked for the job's state, its steps under way included,
to the end of the first step in the other one, which runs already and waits. There are two kinds of it: "warm" has
trained another job and knows nothing of this one; "cold" has imported the package and no more. The state goes through a
file in the folder given, which need not be a disk: /dev/shm is the default where it is there.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing as mp
import os
import statistics
import tempfile
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf

WIDTH = 1024
BATCH = 16
SECONDS = 120.0  # after which nothing is waited for any more


def job_of(megabytes: float) -> wf.Job:
    """A job whose checkpoints have about so many megabytes (10^6 bytes), and which never ends by itself."""
    layers = max(1, round(megabytes * 1e6 / (12 * WIDTH * (WIDTH + 1))))

    def model() -> nn.Module:
        return nn.Sequential(*[layer for _ in range(layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())])

    def data() -> list[Any]:
        return [(torch.randn(BATCH, WIDTH), torch.randint(WIDTH, (BATCH,))) for _ in range(8)]

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-4)

    return wf.Job("moved", model, data, adamw, loss=F.cross_entropy, epochs=10**6, seed=1)


class Running:
    """A job that trains on a thread of its own."""

    def __init__(self, runner: wf.JobRunner) -> None:
        self.runner = runner
        self.thread = threading.Thread(target=runner.run, daemon=True)
        self.thread.start()

    def await_steps(self, steps: int) -> float:
        """Until so many are done; the time then."""
        until = time.monotonic() + SECONDS
        while self.runner.steps < steps and time.monotonic() < until:
            time.sleep(2e-4)
        assert self.runner.steps >= steps, "the job does not go on"
        return time.monotonic()

    def stop(self) -> None:
        self.runner.stop()
        self.thread.join(SECONDS)


def told(what: str, seconds: list[float]) -> None:
    print(f"  {what:<58} {min(seconds):7.3f} {statistics.median(seconds):7.3f}")


def suspend(megabytes: float, times: int) -> None:
    """Suspend and resume, and what of that is a step."""
    with wf.Engine(memory="2GiB", lanes=1) as engine:
        running = Running(wf.JobRunner(job_of(megabytes), engine))
        began = running.await_steps(20)
        step = (running.await_steps(40) - began) / 20
        away: list[float] = []
        back: list[float] = []
        nbytes = 0
        for _ in range(times):
            time.sleep(5 * step)
            began = time.monotonic()
            nbytes = running.runner.suspend(SECONDS).nbytes
            away.append(time.monotonic() - began)
            steps = running.runner.steps
            began = time.monotonic()
            running.runner.resume()
            back.append(running.await_steps(steps + 1) - began)
        running.stop()
    print(f"suspend and resume, {nbytes / 1e6:.1f} MB, a step takes {step:.3f} s            best  median")
    told("suspend: steps under way, state moved out, memory given back", away)
    told("resume: state copied back, and the first steps", back)
    told("both", [one + other for one, other in zip(away, back)])


def train_another() -> None:
    """What torch imports and sets up at the first step of a process is then there."""
    batches = [(torch.randn(2, 2), torch.randint(2, (2,))) for _ in range(4)]
    models = [nn.Sequential(nn.Linear(2, 2), nn.ReLU())]
    wf.train(models, loss=F.cross_entropy, optimizer=torch.optim.AdamW, data=batches, lanes=1, memory="1GiB")


def target(pipe: Connection, megabytes: float, kind: str) -> None:
    """The process that a job moves to."""
    torch.set_num_threads(1)
    with wf.Engine(memory="2GiB", lanes=1) as engine:
        if kind == "warm":
            train_another()
        pipe.send("up")
        path = pipe.recv()
        begun = time.monotonic()
        checkpoint = wf.Checkpoint.load(path)
        loaded = time.monotonic()
        running = Running(wf.JobRunner(job_of(megabytes), engine, resume=checkpoint))
        first = running.await_steps(checkpoint.steps + 1)
        pipe.send({"load and check": loaded - begun, "model, state, capture, first steps": first - loaded, "end": first})
        running.stop()


def move(megabytes: float, times: int, folder: Path, kind: str) -> None:
    """From this process to another one."""
    parts: dict[str, list[float]] = {}
    context = mp.get_context("spawn")
    with wf.Engine(memory="2GiB", lanes=1) as engine:
        running = Running(wf.JobRunner(job_of(megabytes), engine))
        running.await_steps(20)
        for number in range(times):
            mine, other = context.Pipe()
            process = context.Process(target=target, args=(other, megabytes, kind), daemon=True)
            process.start()
            try:
                assert mine.poll(SECONDS) and mine.recv() == "up"
                path = folder / f"{number}.state"
                asked = time.monotonic()
                checkpoint = running.runner.suspend(SECONDS)
                copied = time.monotonic()
                checkpoint.save(path, durable=False)
                saved = time.monotonic()
                mine.send(path)
                assert mine.poll(SECONDS)
                there = mine.recv()
                took = {"steps under way, state moved out": copied - asked, "write": saved - copied}
                end = there.pop("end")
                for name, seconds in {**took, **there, "all": end - asked}.items():
                    parts.setdefault(name, []).append(seconds)
                path.unlink()
            finally:
                process.join(SECONDS)
                process.kill()
            running.runner.resume()
            running.await_steps(running.runner.steps + 5)
        running.stop()
    print(f"{f'to another process, {kind}':<60}    best  median")
    for name, seconds in parts.items():
        told(name, seconds)


def main() -> None:
    """Print all of it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--megabytes", type=float, default=100.0)
    parser.add_argument("--times", type=int, default=7)
    default = "/dev/shm" if os.path.isdir("/dev/shm") else None
    parser.add_argument("--folder", default=default, help="for the file that a job moves through")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores; seconds")
    suspend(given.megabytes, given.times)
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        for kind in ("warm", "cold"):
            move(given.megabytes, max(3, math.ceil(given.times / 2)), Path(folder), kind)


if __name__ == "__main__":
    main()
