"""Processes and nodes killed in the middle: how soon it is known, and how soon their jobs go on elsewhere.

    python -m benchmarks.cluster_failures [--trials 20] [--ray 5]

Two devices on this machine; a group of two small jobs trains on one of them and writes a checkpoint every half a second. Then
SIGKILL: to the process of the device, or, for Ray, to all processes of its node as well. "known": until the scheduler has written
down the loss. "elsewhere": until the first step on the other device beyond the checkpoint is told (reports come every 50 ms). "back":
until the device takes jobs again. Each trial's results are compared with those of an undisturbed run; they must be the same to
the bit, and each job must have ended once.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import waterflow as wf
from benchmarks.loopback import LoopbackCluster
from waterflow import cluster

BATCHES = 200
BATCH_SECONDS = 0.01
LIMITS = {"known": 2.0, "elsewhere": 10.0}  # seconds


class Batches:
    """Batches that follow from a seed and take their time."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        numbers = torch.Generator().manual_seed(5)
        for _ in range(BATCHES):
            time.sleep(self.seconds)
            yield torch.randn(16, 32, generator=numbers), torch.randn(16, 1, generator=numbers)


def jobs(seconds: float) -> list[wf.Job]:
    """Two jobs; with ``seconds`` for each batch."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 1))

    def adamw(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=1e-3)

    return [wf.Job(f"net-{n}", model, Batches(seconds), adamw, loss=nn.functional.mse_loss, seed=n) for n in range(2)]


def until(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> float:
    """Wait for the condition, and return the time at which it held."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return time.monotonic()
        time.sleep(0.002)
    raise SystemExit(f"not within {seconds:g} s: {what}")


@contextlib.contextmanager
def served(backend: Any) -> Iterator[cluster.Service]:
    """A scheduler over the devices."""
    with tempfile.TemporaryDirectory(prefix="wf-") as folder:
        service = cluster.Service(cluster.Store(Path(folder) / "state.db"), backend, cluster.POLICIES["fifo"]())
        service.start()
        yield service
        service.down()


def trial(service: cluster.Service, number: int, kill: Callable[[str], None], expected: wf.Results) -> dict[str, float]:
    """One loss; seconds from the kill."""
    until(lambda: all(node.alive for node in service.backend.nodes()), "all devices are there")
    id = f"{kill.__name__}-{number}"
    service.submit({"id": id}, cluster.pack(jobs(BATCH_SECONDS)))
    until(lambda: service.record(id).steps > 20, f"a checkpoint of {id}")
    time.sleep(0.05 * (number % 10))
    before = service.record(id)
    assert before.node is not None and before.epoch is not None
    victim, epoch = before.node, before.epoch
    kill(victim)
    killed = time.monotonic()
    known = until(lambda: service.record(id).epoch != epoch, f"the scheduler knows of the loss of {victim}")
    elsewhere = until(lambda: service.told(now := service.record(id))["steps"] > now.steps, f"{id} goes on")
    if not service.wait([id], 60.0):
        raise SystemExit(f"{id} did not end")
    after = service.record(id)
    results = cluster.load_results(Path(after.results or ""))
    if after.state != "completed" or after.attempts != 2 or not same(results, expected):
        raise SystemExit(f"{id} did not end once, with the results of an undisturbed run: {after}")
    back = until(lambda: all(node.alive for node in service.backend.nodes()), f"{victim} is back")
    return {"known": known - killed, "elsewhere": elsewhere - killed, "back (at most)": back - killed}


def same(got: wf.Results, expected: wf.Results) -> bool:
    """Whether losses and parameters are equal to the bit."""
    return len(got) == len(expected) and all(
        ours.losses == theirs.losses
        and ours.state_dict is not None
        and theirs.state_dict is not None
        and all(torch.equal(ours.state_dict[name], tensor) for name, tensor in theirs.state_dict.items())
        for ours, theirs in zip(got, expected)
    )


def told(what: str, trials: list[dict[str, float]]) -> bool:
    """Print a table; whether the limits are kept."""
    print(f"{what}, {len(trials)} trials{'median':>22}{'worst':>8}")
    good = True
    for name in trials[0]:
        values = [trial[name] for trial in trials]
        limit = LIMITS.get(name)
        good &= limit is None or max(values) <= limit
        print(f"  {name:<30}{statistics.median(values):>12.3f}{max(values):>8.3f}" + (f"  (at most {limit:g})" if limit else ""))
    return good


def local(trials: int, expected: wf.Results) -> bool:
    """Processes of LocalBackend."""
    settings = cluster.WorkerSettings(memory="512MiB", lanes=1, checkpoint_seconds=0.5, report_seconds=0.05)
    with cluster.LocalBackend(2, settings=settings) as backend, served(backend) as service:

        def process(node: str) -> None:
            os.kill(backend.process(node), signal.SIGKILL)

        return told("local: a process killed", [trial(service, n, process, expected) for n in range(trials)])


def ray(trials: int, expected: wf.Results) -> bool:
    """Actors of RayBackend, and whole nodes of Ray."""
    settings = cluster.WorkerSettings(memory="512MiB", lanes=1, checkpoint_seconds=0.5, report_seconds=0.05)
    with (
        LoopbackCluster([1, 1]) as made,
        cluster.RayBackend(made.address, devices=2, settings=settings, token=made.token) as backend,
        served(backend) as service,
    ):

        def process(node: str) -> None:
            os.kill(backend.process(node), signal.SIGKILL)

        good = told("ray: an actor's process killed", [trial(service, n, process, expected) for n in range(trials)])
        made.add()  # room for the actor of a node that is gone

        def whole_node(node: str) -> None:
            made.kill(made.number_of(backend.process(node)))

        lost = []
        for number in range(trials):
            lost.append(trial(service, number, whole_node, expected))
            made.add()
        return told("ray: all processes of a node killed", lost) and good


def main() -> None:
    """Print all of it; exits with 1 where a limit is not kept."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, default=20, help="for the local backend")
    parser.add_argument("--ray", type=int, default=5, help="trials with Ray; 0 where it is not installed")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {os.cpu_count()} cores; seconds from SIGKILL")
    expected = wf.train(jobs(0.0), lanes=1)
    good = local(given.trials, expected) if given.trials else True
    if given.ray:
        good &= ray(given.ray, expected)
    sys.exit(not good)


if __name__ == "__main__":
    main()
