"""Jobs of steps that sleep on many lanes, with memory for a third of them: how near they come to what no order can beat.

And how many lanes work at a time, by the length of steps, if each job has a thread that submits them one by one. There steps
that sleep stand for cores that are not there: a bound by Python and the engine, not a measured speed.
"""

from __future__ import annotations

import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import waterflow as wf
from benchmarks import report

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
            engine.run_eager(job, lambda: time.sleep(made.seconds), made.bytes, by_caller=True)
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
            engine.run_eager(job, lambda: time.sleep(seconds), 1024, by_caller=True)
            steps += 1
        return steps

    began = time.perf_counter()
    with ThreadPoolExecutor(lanes) as pool:
        steps = sum(each.result() for each in [pool.submit(train) for _ in range(lanes)])
    took = time.perf_counter() - began
    engine.close()
    return steps * seconds / took


def main() -> int:
    """Command line."""
    arguments = report.parser(__doc__ or "").parse_args()
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
    return report.finish("lanes", arguments, rows, note, before={"lanes that work at a time": fed})


if __name__ == "__main__":
    sys.exit(main())
