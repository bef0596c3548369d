"""Jobs of steps that sleep on many lanes, with memory for a third of them: how near they come to what no order can beat.

And how many lanes work at a time, by the length of steps, if each job has a thread that submits them one by one. There steps
that sleep stand for cores that are not there: a bound by Python and the engine, not a measured speed.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from dataclasses import dataclass

from benchmarks import report
from waterflow import _C

JOBS, LANES = 12, 8
MOST = 1.25
LENGTHS = (0.25, 1, 4, 16)  # of steps, in ms


@dataclass(frozen=True)
class Made:
    """A job of equal steps: their number, the seconds and the bytes of each."""

    steps: int
    seconds: float
    bytes: int


def mix(seed: int) -> list[Made]:
    """Return jobs of different length and height."""
    chance = random.Random(seed)
    return [Made(chance.randint(30, 90), chance.uniform(2e-3, 8e-3), chance.randint(10, 60)) for _ in range(JOBS)]


def bounds(jobs: list[Made], lanes: int, capacity: int) -> dict[str, float]:
    """Return the seconds below which no order of the steps can be."""
    return {
        "longest job": max(job.steps * job.seconds for job in jobs),
        "work by lanes": sum(job.steps * job.seconds for job in jobs) / lanes,
        "bytes x seconds by capacity": sum(job.steps * job.seconds * job.bytes for job in jobs) / capacity,
    }


def run(jobs: list[Made], lanes: int, capacity: int) -> tuple[float, float]:
    """Return the seconds that the jobs took, and those of the longest job's steps themselves.

    While they run, a lane that stands idle although a step would be let in is an error (``Engine.check``).
    """
    engine = _C.Engine(lanes=lanes, threads_per_lane=1, capacity=capacity)
    runs = []
    began = time.perf_counter()
    for made in jobs:
        job, plan = engine.add_job(), _C.GroupPlan(ends=[1], peak=[made.bytes], after=[0])
        for _ in range(made.steps):
            runs.append(_C.opaque_run(plan, lambda seconds=made.seconds: time.sleep(seconds)))
            engine.submit(job, runs[-1])
    while not all(step.done for step in runs[-1:]) or engine.steps_done < len(runs):
        engine.check()
        time.sleep(5e-3)
    took = time.perf_counter() - began
    slept = sum(engine.lane_busy_ns) * 1e-9
    for step in runs:
        step.outputs()
    engine.close()
    return took, slept / sum(job.steps * job.seconds for job in jobs)


def fed(lanes: int, seconds: float, for_seconds: float = 1.0) -> float:
    """Return how many of the lanes work at a time, on average, with a job for each."""
    engine = _C.Engine(lanes=lanes, threads_per_lane=1, capacity=1 << 30)
    plan = _C.GroupPlan(ends=[1], peak=[1 << 10], after=[0])
    until = time.perf_counter() + for_seconds
    slept = [0.0] * lanes

    def train(number: int) -> None:
        job = engine.add_job()
        while time.perf_counter() < until:
            run = _C.opaque_run(plan, lambda: time.sleep(seconds))
            run.by_caller = True
            engine.submit(job, run)
            engine.wait(run)
            slept[number] += seconds

    began = time.perf_counter()
    threads = [threading.Thread(target=train, args=(number,)) for number in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took = time.perf_counter() - began
    engine.close()
    return sum(slept) / took


def main() -> int:
    """Command line."""
    arguments = report.parser(__doc__ or "").parse_args()
    working = [{"lanes": n, **{f"steps of {ms:g} ms": fed(n, ms * 1e-3) for ms in LENGTHS}} for n in (1, 4, 8, 16, 32, 64)]
    rows = []
    for seed in range(4):
        jobs = mix(seed)
        capacity = sum(job.bytes for job in jobs) // 3
        lower = bounds(jobs, LANES, capacity)
        name, least = max(lower.items(), key=lambda each: each[1])
        # What a sleep takes longer than it was asked for is no matter of order.
        took = [seconds / longer for seconds, longer in (run(jobs, LANES, capacity) for _ in range(arguments.repeats))]
        rows.append({
            "jobs": f"{JOBS} on {LANES} lanes, mix {seed}", "seconds": report.median(took),
            "no order can beat": least, "by": name, "ratio": report.median(took) / least, "spread": report.spread(took),
            "at most": MOST, "holds": report.median(took) <= MOST * least,
        })  # fmt: skip
    note = "memory for a third of the jobs; steps that sleep, so any machine"
    return report.finish("lanes", arguments, rows, note, before={"lanes that work at a time": working})


if __name__ == "__main__":
    sys.exit(main())
