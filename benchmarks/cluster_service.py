"""The scheduler of a whole cluster killed in the middle, and a device under it: what users see through the client.

    python -m benchmarks.cluster_service [--trials 5]

``waterflow cluster up`` with two devices on this machine, six jobs handed in: two run, four wait. Then SIGKILL.

To the scheduler: "back" is the time from the command ``waterflow cluster up`` until the client has an answer again, imports
included. Jobs that run must not have been touched: they are in their first attempt, at the place and of the process they were.

To the process of a device, with one job that takes long and the other device free by then: "known" until the client sees that
the device was lost, "elsewhere" until it sees a step on the other one beyond the checkpoint that the job went on from.

Either way no job may be lost or run twice at a time, and all results must have the bits of an undisturbed run.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import waterflow as wf

BATCHES = 500
LIMITS = {"known": 2.0, "elsewhere": 10.0}  # seconds
PATIENCE = 120.0


class Batches:
    """Batches that follow from a seed and take their time. Who reads them while another process does leaves a file behind."""

    def __init__(self, seconds: float, seed: int, reading: Path) -> None:
        self.seconds, self.seed, self.reading = seconds, seed, reading

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        numbers = torch.Generator().manual_seed(self.seed)
        with self.reading.open("a") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                twice(self.reading).touch()
            for _ in range(BATCHES):
                time.sleep(self.seconds)
                yield torch.randn(16, 32, generator=numbers), torch.randn(16, 1, generator=numbers)


def twice(reading: Path) -> Path:
    """The file that is left where a job was trained by two processes at a time."""
    return reading.with_suffix(".twice")


def job(number: int, seconds: float, folder: Path) -> wf.Job:
    """One with dropout and an optimizer that has state; ``seconds`` for each batch; who reads them is noted in ``folder``."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(32, 64), nn.Dropout(0.1), nn.ReLU(), nn.Linear(64, 1))

    return wf.Job(
        f"net-{number}", model, Batches(seconds, number, folder / f"reading-{number}"), lambda p: torch.optim.AdamW(p, lr=1e-3),
        loss=nn.functional.mse_loss, seed=number,
    )  # fmt: skip


def waterflow(*arguments: str) -> Any:
    """What a command of ``waterflow cluster`` answers."""
    command = [sys.executable, "-m", "waterflow", "cluster", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise SystemExit(f"waterflow cluster {' '.join(arguments)}: {done.stderr}")
    return json.loads(done.stdout)


def until(what: Callable[[], Any]) -> Any:
    end = time.monotonic() + PATIENCE
    while not (found := what()):
        if time.monotonic() > end:
            raise SystemExit("it took too long")
        time.sleep(0.01)
    return found


class Trial:
    """A cluster with six jobs, and what became of them."""

    def __init__(self, folder: Path, slow: int) -> None:
        self.folder = folder
        self.up = ("up", "--devices", "2", "--memory", "256MiB", "--lanes", "1", "--checkpoint-seconds", "0.5",
                   "--state", str(folder))  # fmt: skip
        self.pid = waterflow(*self.up)["pid"]
        self.client = wf.Cluster(folder)
        self.ids = [self.client.submit(job(n, 0.01 if n < slow else 0.0, folder), id=f"job-{n}") for n in range(6)]
        until(lambda: all(self.client.status(id)["steps"] > 20 for id in self.ids[:slow]))

    def processes(self) -> dict[str, int]:
        """Of the devices."""
        notes = (self.folder / "work" / "nodes").glob("*.json")
        return {note.stem: json.loads(note.read_text())["pid"] for note in notes}

    def end(self, alone: list[wf.JobResult]) -> dict[str, int]:
        """How many jobs were lost, were trained by two processes at a time, or ended with other bits."""
        found = {"jobs": len(self.ids), "lost": 0, "twice": 0, "other bits": 0, "attempts": 0}
        for number, (id, reference) in enumerate(zip(self.ids, alone)):
            (result,) = self.client.result(id, timeout=PATIENCE)
            found["attempts"] += sum(" starts at " in line for line in self.client.logs(id))
            found["lost"] += result.status != "completed"
            found["twice"] += twice(self.folder / f"reading-{number}").exists()
            found["other bits"] += not same(result, reference)
        waterflow("down", "--state", str(self.folder))
        return found


def same(one: wf.JobResult, other: wf.JobResult) -> bool:
    if one.losses != other.losses or one.state_dict is None or other.state_dict is None:
        return False
    return all(torch.equal(value, other.state_dict[name]) for name, value in one.state_dict.items())


def kill_scheduler(trial: Trial) -> dict[str, float]:
    """Returns seconds, and counts of jobs that were touched."""
    before = {told["id"]: told for told in trial.client.status()["jobs"]}
    processes = trial.processes()
    os.kill(trial.pid, signal.SIGKILL)
    began = time.monotonic()
    waterflow(*trial.up)
    after = {told["id"]: told for told in trial.client.status()["jobs"]}
    back = time.monotonic() - began
    running = [id for id, told in before.items() if told["state"] == "running"]
    kept = ("attempts", "started", "submitted", "tenant")
    touched = [id for id in running if any(before[id][key] != after[id][key] for key in kept)]
    return {
        "back": back, "unknown": len(before.keys() - after.keys()), "running": len(running), "touched": len(touched),
        "other processes": float(processes != trial.processes()),
    }  # fmt: skip


def kill_device(trial: Trial) -> dict[str, float]:
    """Returns seconds."""
    for id in trial.ids[1:]:
        trial.client.wait(id, PATIENCE)
    ((node, _),) = trial.client.status("job-0")["places"]
    os.killpg(trial.processes()[node], signal.SIGKILL)
    began = time.monotonic()
    until(lambda: any(" lost: " in line for line in trial.client.logs("job-0")))
    known = time.monotonic() - began
    told = until(lambda: (told := trial.client.status("job-0"))["attempts"] == 2 and told["state"] != "waiting" and told)
    until(lambda: (now := trial.client.status("job-0"))["state"] == "completed" or now["steps"] > told["steps"])
    if any(place[0] == node for place in told["places"]):
        raise SystemExit("it went on where it was")
    return {"known": known, "elsewhere": time.monotonic() - began}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=5)
    trials = parser.parse_args().trials
    failed = False
    with tempfile.TemporaryDirectory(prefix="wf-") as folder:
        alone = list(wf.train([job(n, 0.0, Path(folder)) for n in range(6)], lanes=1))
        for name, slow, kill in (("scheduler", 2, kill_scheduler), ("device", 1, kill_device)):
            seconds: dict[str, list[float]] = {}
            ends: dict[str, int] = {}
            for number in range(trials):
                trial = Trial(Path(folder) / f"{name}-{number}", slow)
                for key, value in kill(trial).items():
                    seconds.setdefault(key, []).append(value)
                for key, count in trial.end(alone).items():
                    ends[key] = ends.get(key, 0) + count
            print(f"the {name} killed, {trials} times:")
            for key, values in seconds.items():
                if key in ("back", "known", "elsewhere"):
                    print(f"  {key:16} median {statistics.median(values):6.2f} s, most {max(values):6.2f} s")
                    failed |= max(values) > LIMITS.get(key, PATIENCE)
                else:
                    print(f"  {key:16} {sum(values):.0f}")
            print("  " + ", ".join(f"{key} {count}" for key, count in ends.items()))
            failed |= any(ends[key] for key in ("lost", "twice", "other bits"))
            failed |= any(sum(seconds.get(key, [])) > 0 for key in ("unknown", "touched", "other processes"))
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
