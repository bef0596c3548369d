"""How quick a cluster answers while thousands of jobs wait.

    python -m benchmarks.cluster_queue [--waiting 5000] [--policy antman]

``waterflow cluster up`` with one device, on which a job stands; then so many are handed in. "submit": one more, by the client,
packing included, median of 100. "status": all jobs, median of 5, by the client; by the command line, Python's start included,
its page and ``--all``. "wait": until one of them all has ended, where one has. "back": the scheduler is killed, and ``up`` takes so
much longer until ``status`` answers than with none waiting, medians of 3. Ends with 1 where a limit is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

import waterflow as wf
from benchmarks.cluster_service import job, waterflow

LIMITS = {"submit": 0.02, "status": 0.3, "wait": 0.3, "command": 2.0, "command --all": 2.0, "back": 1.0}  # seconds


def small() -> wf.Job:
    """What is handed in so often."""
    return wf.Job("small", lambda: nn.Linear(4, 1), list, lambda p: torch.optim.SGD(p, lr=0.1), loss=nn.functional.mse_loss)


def seconds(what: Callable[[], object], times: int) -> float:
    """The median."""
    return statistics.median(each(what, times))


def each(what: Callable[[], object], times: int) -> list[float]:
    """How long it took, each time."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        what()
        took.append(time.perf_counter() - began)
    return took


def killed_and_back(client: wf.Cluster, up: tuple[str, ...]) -> float:
    """Seconds from ``up`` to the first answer, behind a scheduler that was killed; the median of 3."""

    def back() -> None:
        waterflow(*up)
        client.status(waiting=1)

    took = []
    for _ in range(3):
        os.kill(json.loads((Path(up[-1]) / "endpoint.json").read_text())["pid"], signal.SIGKILL)
        took += each(back, 1)
    return statistics.median(took)


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--waiting", type=int, default=5000)
    parser.add_argument("--policy", default="antman")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="wf-") as folder:
        state = str(Path(folder) / "state")
        up = ("up", "--devices", "1", "--memory", "256MiB", "--lanes", "1", "--policy", given.policy, "--state", state)
        waterflow(*up)
        try:
            client, made = wf.Cluster(state), small()
            client.submit(job(0, 10.0, Path(folder)), id="stands")
            before = killed_and_back(client, up)
            ids = [client.submit(made) for _ in range(given.waiting)]

            def command(*more: str) -> None:
                told = subprocess.run(
                    [sys.executable, "-m", "waterflow", "cluster", "status", "--state", state, *more],
                    capture_output=True, text=True, check=True,
                )  # fmt: skip
                assert ids[10] in told.stdout and (ids[-1] in told.stdout) == bool(more)

            one_more = each(lambda: client.submit(made), 100)
            found = {
                "submit": statistics.median(one_more),
                "status": seconds(client.status, 5),
                "command": seconds(command, 3),
                "command --all": seconds(lambda: command("--all"), 3),
                "back": killed_and_back(client, up) - before,
            }
            client.cancel(ids[-1])
            found["wait"] = seconds(lambda: client.wait(ids), 3)
        finally:
            waterflow("down", "--state", state)
    print(f"{given.waiting:,} jobs wait, policy {given.policy}:")
    for name, took in found.items():
        print(f"  {name:16} {took * 1e3:8.1f} ms, limit {LIMITS[name] * 1e3:,.0f} ms")
    print(f"  the slowest submit took {max(one_more) * 1e3:.1f} ms; load of the machine {os.getloadavg()[0]:.1f}")
    raise SystemExit(any(took > LIMITS[name] for name, took in found.items()))


if __name__ == "__main__":
    main()
