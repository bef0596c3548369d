"""Workers and the scheduler of a cluster killed at random, while one of the jobs ends its device each time that it runs.

    python -m benchmarks.cluster_kills [--jobs 200] [--kills 40] [--devices 3] [--seed 0] [--policy antman] [--set NAME=VALUE]

``waterflow cluster up`` with this policy, and these parameters of it, on this machine, and small jobs of both priorities, handed in at
once. Whenever another part of them has ended comes the next SIGKILL: to the process of a device, to the scheduler (which is started
again), or to both at once. One of the jobs aborts or ends with a segmentation fault at a step that ``seed`` draws.

All jobs but that one must complete, with the bits of an undisturbed run: none may be lost, and none trained by two processes at
a time, or told of twice. The one that ends its devices must fail, and no other with it. Prints the counts; exits with 1 where
one of them is not so.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import waterflow as wf

STEPS = 30
PATIENCE = 600.0  # seconds without the end of any job


class Batches:
    """Batches that follow from a seed and take their time. Who reads them while another process does leaves a file behind."""

    def __init__(self, seconds: float, seed: int, reading: Path, ends_at: int | None, abort: bool) -> None:
        self.seconds, self.seed, self.reading = seconds, seed, reading
        self.ends_at, self.abort = ends_at, abort

    def __len__(self) -> int:
        return STEPS

    def __iter__(self) -> Iterator[Any]:
        numbers = torch.Generator().manual_seed(self.seed)
        with self.reading.open("a") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self.reading.with_suffix(".twice").touch()
            for number in range(STEPS):
                time.sleep(self.seconds)
                if number == self.ends_at:
                    os.abort() if self.abort else ctypes.string_at(0)
                yield torch.randn(8, 16, generator=numbers), torch.randn(8, 1, generator=numbers)


def job(number: int, seconds: float, folder: Path, ends_at: int | None = None, abort: bool = False) -> wf.Job:
    """One with dropout and an optimizer that has state. ``ends_at``: the step at which it ends its process."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 24), nn.Dropout(0.1), nn.ReLU(), nn.Linear(24, 1))

    return wf.Job(
        f"net-{number}", model, Batches(seconds, number, folder / f"reading-{number}", ends_at, abort),
        lambda p: torch.optim.AdamW(p, lr=1e-3), loss=nn.functional.mse_loss, seed=number,
    )  # fmt: skip


@dataclass
class Counts:
    """What became of the jobs. ``lost``: unknown, or ended otherwise than completed; ``twice``: trained by two processes at a
    time, or told of twice."""

    jobs: int = 0
    completed: int = 0
    lost: int = 0
    twice: int = 0
    other_bits: int = 0
    crasher_failed: int = 0
    kills_of_devices: int = 0
    kills_of_schedulers: int = 0
    starts: int = 0
    seconds: float = 0.0

    def good(self) -> bool:
        """Whether all is as it must be."""
        whole = self.completed == self.jobs - 1 and self.crasher_failed == 1
        return whole and not (self.lost or self.twice or self.other_bits)


class Trial:
    """A cluster in processes of its own, and who is killed."""

    def __init__(self, folder: Path, devices: int, chance: random.Random, policy: str, chosen: Sequence[str]) -> None:
        self.folder, self.chance = folder, chance
        self.command = [
            sys.executable, "-m", "waterflow", "cluster", "up", "--json", "--state", str(folder), "--devices", str(devices),
            "--policy", policy, "--memory", "256MiB", "--lanes", "1", "--checkpoint-seconds", "0.5",
            *(part for each in chosen for part in ("--set", each)),
        ]  # fmt: skip
        self.client = wf.Cluster(folder, patience=60.0)
        self.counts = Counts()
        self.pid = 0

    def up(self) -> None:
        done = subprocess.run(self.command, capture_output=True, text=True, timeout=PATIENCE)
        if done.returncode:
            raise SystemExit(f"waterflow cluster up: {done.stderr}")
        self.pid = int(json.loads(done.stdout)["pid"])

    def workers(self) -> dict[str, int]:
        """The process of each device that is there."""
        notes = (self.folder / "work" / "nodes").glob("*.json")
        found = {note.stem: int(json.loads(note.read_text())["pid"]) for note in notes}
        return {node: pid for node, pid in found.items() if Path(f"/proc/{pid}").exists()}

    def kill(self) -> str:
        """Returns who it was."""
        what = self.chance.choice(["device", "device", "scheduler", "both"])
        workers = self.workers()
        if what != "scheduler" and workers:
            node = self.chance.choice(sorted(workers))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(workers[node], signal.SIGKILL)
                self.counts.kills_of_devices += 1
        if what != "device":
            os.kill(self.pid, signal.SIGKILL)
            self.counts.kills_of_schedulers += 1
            self.up()
        return what

    def ended(self) -> int:
        return sum(told["ended"] is not None for told in self.client.status()["jobs"])

    def end(self) -> None:
        """Whatever is left of it."""
        with contextlib.suppress(OSError):
            if self.pid:
                os.kill(self.pid, signal.SIGKILL)
        for pid in self.workers().values():
            with contextlib.suppress(OSError):
                os.killpg(pid, signal.SIGKILL)


def same(one: wf.JobResult, other: wf.JobResult) -> bool:
    """Whether losses and parameters are equal to the bit."""
    if one.losses != other.losses or one.state_dict is None or other.state_dict is None:
        return False
    return all(torch.equal(value, other.state_dict[name]) for name, value in one.state_dict.items())


def run(
    jobs: int, kills: int, devices: int, seed: int, say: Callable[[str], None], policy: str = "antman", chosen: Sequence[str] = (),
) -> Counts:  # fmt: skip
    """Run all of it once. ``chosen`` are parameters of the policy, as NAME=VALUE."""
    chance = random.Random(seed)
    crasher, ends_at, abort = chance.randrange(jobs // 2), chance.randrange(1, STEPS), chance.random() < 0.5
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="wf-") as name:
        folder = Path(name)
        apart = folder / "alone"
        apart.mkdir()
        alone = list(wf.train([job(n, 0.0, apart) for n in range(jobs)], lanes=1))
        trial = Trial(folder / "cluster", devices, chance, policy, chosen)
        counts = trial.counts
        counts.jobs = jobs
        try:
            trial.up()
            for number in range(jobs):
                priority: Any = chance.choice(["guaranteed", "opportunistic"])
                made = job(number, 0.02, folder, ends_at if number == crasher else None, abort)
                trial.client.submit(made, id=f"job-{number}", priority=priority)
            say(f"job {crasher} {'aborts' if abort else 'has a segmentation fault'} at step {ends_at}")
            for number in range(kills):
                _wait(trial, int(jobs * number / (kills + 1)))
                time.sleep(chance.uniform(0.0, 1.0))
                say(f"{time.monotonic() - began:6.1f} s  {trial.ended():4} ended; killed: {trial.kill()}")
            _wait(trial, jobs)
            _count(trial, folder, crasher, alone)
            counts.seconds = round(time.monotonic() - began, 1)
            trial.client.down()
            time.sleep(2.0)
        finally:
            trial.end()
    return counts


def _wait(trial: Trial, ended: int) -> None:
    """Until so many jobs have ended."""
    last, until = -1, 0.0
    while (now := trial.ended()) < ended:
        if now != last:
            last, until = now, time.monotonic() + PATIENCE
        if time.monotonic() > until:
            raise SystemExit(f"no job ended for {PATIENCE:.0f} s; {now} have, and there is {trial.client.status()}")
        time.sleep(0.1)


def _count(trial: Trial, folder: Path, crasher: int, alone: list[wf.JobResult]) -> None:
    counts = trial.counts
    told = {job["id"]: job for job in trial.client.status()["jobs"]}
    for number, reference in enumerate(alone):
        id = f"job-{number}"
        state = told[id]["state"] if id in told else "unknown"
        lines = [line.split(" ", 2)[2] for line in trial.client.logs(id)]
        counts.starts += sum(line.startswith("starts at ") for line in lines)
        ends = sum(line == "completed" or line.startswith("failed: ") for line in lines)
        counts.twice += (folder / f"reading-{number}.twice").exists() or ends > 1
        if number == crasher:
            counts.crasher_failed = int(state == "failed" and "its node was lost" in told[id]["reason"])
            continue
        counts.completed += state == "completed"
        counts.lost += state != "completed"
        if state == "completed":
            (result,) = trial.client.results(id)
            counts.other_bits += not same(result, reference)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--kills", type=int, default=40)
    parser.add_argument("--devices", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", default="antman")
    parser.add_argument("--set", dest="chosen", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    torch.set_num_threads(1)
    asked = given.policy, given.chosen
    counts = run(given.jobs, given.kills, given.devices, given.seed, lambda line: print(line, flush=True), *asked)
    for name, value in asdict(counts).items():
        print(f"{name.replace('_', ' '):20} {value}")
    raise SystemExit(0 if counts.good() else 1)


if __name__ == "__main__":
    main()
