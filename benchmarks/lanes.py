"""Jobs of steps that sleep on many lanes, with memory for a third of them: how near they come to what no order can beat.

And how many lanes work at a time, by the length of steps, if each job has a thread that submits them one by one. There steps
that sleep stand for cores that are not there: a bound by Python and the engine, not a measured speed.

And what many lanes keep in memory: the most resident bytes above those at the start, sampled each 5 ms (``Pss`` of
``smaps_rollup``, in which a page counts once at however many addresses), against the limit, and page faults for each step.
"""

from __future__ import annotations

import json
import random
import re
import resource
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import optuna
import torch

import waterflow as wf
from benchmarks import report
from benchmarks.zoo import SMALL

JOBS, LANES = 12, 8
MOST = 1.25
LENGTHS = (0.25, 1, 4, 16)  # of steps, in ms
BESIDE = 64 << 20  # bytes of Python and libraries beside the limit


@dataclass(frozen=True)
class Made:
    """A job of equal steps: their number, the seconds and the bytes of each."""

    steps: int
    seconds: float
    bytes: int


def mix(seed: int) -> list[Made]:
    """Return jobs of different length and height."""
    chance = random.Random(seed)
    return [Made(chance.randint(30, 90), chance.uniform(2e-3, 8e-3), chance.randint(10, 60) << 20) for _ in range(JOBS)]


def bounds(jobs: list[Made], capacity: int) -> dict[str, float]:
    """Return the seconds below which no order of the steps can be."""
    return {
        "longest job": max(job.steps * job.seconds for job in jobs),
        "work by lanes": sum(job.steps * job.seconds for job in jobs) / LANES,
        "bytes x seconds by capacity": sum(job.steps * job.seconds * job.bytes for job in jobs) / capacity,
    }


def run(jobs: list[Made], capacity: int) -> float:
    """Return the seconds that the jobs took, where a step sleeps as long as it was asked to.

    While they run, a lane that stands idle although a step would be let in is an error (``check()`` of the native engine).
    """
    engine = wf.Engine(memory=capacity, reserve=0, lanes=LANES, mode="lanes")
    done = 0

    def train(made: Made) -> None:
        nonlocal done
        job = engine.add_job("made up")
        for _ in range(made.steps):
            engine.run_eager(job, lambda: time.sleep(made.seconds), made.bytes)
        done += 1

    began = time.perf_counter()
    threads = [threading.Thread(target=train, args=(made,)) for made in jobs]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        engine.native.check()
        time.sleep(5e-3)
    took = time.perf_counter() - began
    if done < len(jobs):
        raise RuntimeError("a job has failed")
    # What a sleep takes longer than it was asked for is no matter of order.
    longer = engine.stats().busy_seconds / sum(job.steps * job.seconds for job in jobs)
    engine.close()
    return took / longer


def working(lanes: int, seconds: float, for_seconds: float = 1.0) -> float:
    """Return how many of the lanes work at a time, on average, with a job for each."""
    engine = wf.Engine(memory="1GiB", reserve=0, lanes=lanes, mode="lanes")
    until = time.perf_counter() + for_seconds

    def train() -> int:
        job, steps = engine.add_job("made up"), 0
        while time.perf_counter() < until:
            engine.run_eager(job, lambda: time.sleep(seconds), 1024)
            steps += 1
        return steps

    began = time.perf_counter()
    with ThreadPoolExecutor(lanes) as pool:
        steps = sum(each.result() for each in [pool.submit(train) for _ in range(lanes)])
    took = time.perf_counter() - began
    engine.close()
    return steps * seconds / took


def resident() -> int:
    """Return the resident bytes of this process."""
    with open("/proc/self/smaps_rollup") as file:
        return int(re.search(r"^Pss:\s+(\d+) kB", file.read(), re.MULTILINE)[1]) * 1024  # type: ignore[index]


def planned(zoo: Any, batch: Any) -> Any:
    """Return the plan of a step; nothing of its model is left, which would count beside the limit."""
    with wf.Engine(lanes=1) as engine, wf.within(engine):
        model = zoo.build()
        return wf.Step(model, step=zoo.step, optimizer=zoo.optimizer(model.parameters())).plan_for(batch)


def resnets(lanes: int) -> tuple[int, int]:
    """Train two ResNet-50 more than lanes, where three steps fit; return the limit and the steps."""
    zoo, steps = SMALL["resnet50"], 6
    batches = [zoo.batch(8, torch.Generator().manual_seed(number)) for number in range(steps)]
    jobs = [
        wf.Job(name=str(n), model=zoo.build, data=batches, step=zoo.step, optimizer=zoo.optimizer, seed=n)
        for n in range(lanes + 2)
    ]
    plan = planned(zoo, batches[0])
    limit = len(jobs) * (plan.persistent + 2 * plan.batch) + 3 * plan.height
    wf.train(jobs, lanes=lanes, memory=limit + (64 << 20), max_concurrent=len(jobs))
    return limit + (64 << 20), steps * len(jobs)


def study(lanes: int) -> tuple[int, int]:
    """Run a study of small CNNs; return the limit and the steps."""
    zoo, steps, trials, limit = SMALL["cnn_bn"], 30, 16, 256 << 20

    def objective(trial: optuna.Trial) -> float:
        model = zoo.build()
        step = wf.Step(model, step=zoo.step, optimizer=zoo.optimizer(model.parameters()))
        size = trial.suggest_categorical("batch", [64, 128])
        losses = [step(zoo.batch(size, torch.Generator().manual_seed(n))) for n in range(steps)]
        return float(losses[-1])

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    wf.optimize(optuna.create_study(), objective, n_trials=trials, lanes=lanes, memory=limit)
    return limit, steps * trials


CASES = {"ResNet-50, two more than lanes": resnets, "a study of CNNs": study}


def kept(case: str, lanes: int) -> tuple[int, int, float]:
    """Return the limit, the most resident bytes above the start, and the page faults for each step, of the second run."""
    CASES[case](lanes)
    over, most, start = threading.Event(), 0, resident()

    def sample() -> None:
        nonlocal most
        while not over.wait(5e-3):
            most = max(most, resident() - start)

    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    watch = threading.Thread(target=sample)
    watch.start()
    limit, steps = CASES[case](lanes)
    over.set()
    watch.join()
    return limit, most, (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults) / steps


def in_process(case: str, lanes: int) -> dict[str, Any]:
    """One row of what is kept, measured in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.lanes", "--one", case, str(lanes)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    limit, most, faults = json.loads(done.stdout.splitlines()[-1])
    return {
        "jobs": f"{case}, {lanes} lanes", "limit MiB": limit / 2**20, "most MiB": most / 2**20, "page faults of a step": faults,
        "holds": most <= limit + BESIDE,
    }  # fmt: skip


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--one", nargs=2, help="for the benchmark itself: what is run, and on how many lanes")
    parser.add_argument("--kept", action="store_true", help="what is kept alone")
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(kept(arguments.one[0], int(arguments.one[1]))))
        return 0
    memory = [in_process(case, lanes) for case in CASES for lanes in (2, 4, 8)]
    if arguments.kept:
        return report.finish("lanes", arguments, memory)
    numbers = (1, 4, 8, 16, 32, 64)
    fed = [{"lanes": n, **{f"steps of {ms:g} ms": working(n, ms * 1e-3) for ms in LENGTHS}} for n in numbers]
    rows = []
    for seed in range(4):
        jobs = mix(seed)
        capacity = sum(job.bytes for job in jobs) // 3
        lower = bounds(jobs, capacity)
        name, least = max(lower.items(), key=lambda each: each[1])
        took = [run(jobs, capacity) for _ in range(arguments.repeats)]
        rows.append({
            "jobs": f"{JOBS} on {LANES} lanes, mix {seed}", "seconds": report.median(took),
            "no order can beat": least, "by": name, "ratio": report.median(took) / least, "spread": report.spread(took),
            "at most": MOST, "holds": report.median(took) <= MOST * least,
        })  # fmt: skip
    note = "memory for a third of the jobs; steps that sleep, so any machine"
    return report.finish("lanes", arguments, rows, note, before={"resident memory": memory, "lanes that work at a time": fed})


if __name__ == "__main__":
    sys.exit(main())
