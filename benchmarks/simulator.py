"""The cluster's simulator: policies against an independent implementation, how fast it is, and how long decisions take."""

from __future__ import annotations

import csv
import gc
import random
import re
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks import report
from waterflow import cluster

TRACES = Path(__file__).parent / "traces"
WAITING, DEVICES, EVENTS = 10_000, 1_000, 300
NAMES = {"fifo_backfill(fjf)": "fifo_backfill", "2d-las": "las", "las-time": "las"}


def nodes(devices: int) -> list[cluster.Node]:
    """Nodes of eight devices."""
    return [cluster.Node(f"node{i}", min(8, devices - 8 * i)) for i in range(-(-devices // 8))]


def run(trace: str, policy: cluster.Policy, devices: int, **more: Any) -> cluster.Simulated:
    """A public trace under a policy."""
    workload = cluster.read_workload(TRACES / f"{trace}.csv")
    return cluster.Simulator(cluster.Scheduler(nodes(devices), policy), **more).run(workload.submissions)


def oracle() -> list[dict[str, Any]]:
    """All rows of ``oracle_zero_overhead.csv``."""
    rows = []
    for row in csv.DictReader((TRACES / "oracle_zero_overhead.csv").open()):
        name, *limits = re.split(r"[\[\];]", row["policy"].rstrip("]"))
        parameters: dict[str, Any] = {"limits": [float(limit) for limit in limits]} if limits else {}
        if name == "las-time":
            parameters["by"] = "time"
        policy = cluster.POLICIES[NAMES.get(name, name)](**parameters)
        found = run(row["trace"], policy, int(row["gpus"]))
        summary = cluster.summarize(found)
        ours = (round(summary.average, 2), summary.p50, summary.p99, max(job.ended for job in found.jobs), summary.preemptions)
        theirs = [row[c] for c in ("avg_jct_s", "p50_jct_s", "p99_jct_s", "last_end_s", "preemptions")]
        holds = all(not their or our == float(their) for our, their in zip(ours, theirs))
        rows.append({"what": f"{row['trace']}, {row['policy']}", "figure": f"{ours[0]:,.2f}", "unit": "s on average",
                     "goal": f"{theirs[0]}, and all other figures", "holds": holds})  # fmt: skip
    return rows


def speed(repeats: int) -> list[dict[str, Any]]:
    """Jobs per second of the month on 400 devices, the best of the repeats: whatever else runs only slows it down."""
    workload = cluster.read_workload(TRACES / "philly_multigpu_month.csv")
    policies = {name: policy for name, policy in cluster.POLICIES.items() if policy.sharing == "none"}
    best = dict.fromkeys(policies, float("inf"))
    for _ in range(repeats):
        for name, policy in policies.items():  # interleaved: what else runs comes and goes
            simulator = cluster.Simulator(cluster.Scheduler(nodes(400), policy()))
            begin = time.perf_counter()
            simulator.run(workload.submissions)
            best[name] = min(best[name], time.perf_counter() - begin)
    rows = []
    for name in policies:
        pace = len(workload) / best[name]
        goal = 10_000 if name == "las" else None
        rows.append({"what": f"the month on 400 devices, {name}", "figure": f"{pace:,.0f}", "unit": "jobs/s",
                     "goal": goal and f"{goal:,}", "holds": goal is None or pace >= goal})  # fmt: skip
    return rows


def decisions() -> list[dict[str, Any]]:
    """The slowest and the median of many decisions while 10,000 wait for 1,000 devices."""
    rows = []
    for name in cluster.POLICIES:
        gc.collect()
        gc.freeze()  # as the service does when it starts: what was imported is not walked over in a decision
        seconds = sorted(_decisions(name))
        rows.append({"what": f"decisions with {WAITING:,} waiting for {DEVICES:,} devices, {name}",
                     "figure": round(seconds[-1] * 1e3, 2), "unit": f"ms the slowest of {EVENTS}, median "
                     f"{seconds[len(seconds) // 2] * 1e3:.2f}", "goal": "under 50", "holds": seconds[-1] < 0.05})  # fmt: skip
    return rows


def _decisions(name: str) -> list[float]:
    rng = random.Random(1)
    places = [cluster.Node(node.name, node.devices, memory=16) for node in nodes(DEVICES)]
    scheduler = cluster.Scheduler(places, cluster.POLICIES[name]())

    def submission(number: int) -> cluster.Submission:
        sizes, priority = (1, 1, 1, 2, 4, 8), rng.choice(("guaranteed", "opportunistic"))
        return cluster.Submission(
            str(number), devices=rng.choice(sizes), priority=priority, duration=rng.uniform(60, 1e5),
            memory=rng.choice((8, 12, 16)),
        )  # fmt: skip

    number = 0
    while sum(entry.state == "waiting" for entry in scheduler.book.entries.values()) < WAITING:
        for _ in range(1_000):
            scheduler.submit(float(number), submission(number), decide=False)
            number += 1
        scheduler.tick(float(number))
    seconds, now = [], float(number)
    for event in range(EVENTS):
        now += 10.0
        running = [entry.id for entry in scheduler.book.entries.values() if entry.state == "running"]
        fresh, gone = submission(number + event), rng.choice(running)
        begin = time.perf_counter()
        if event % 3 == 0:
            scheduler.submit(now, fresh)
        elif event % 3 == 1:
            scheduler.ended(now, gone, "completed")
        else:
            scheduler.tick(now)
        seconds.append(time.perf_counter() - begin)
    return seconds


def main() -> int:
    """Command line."""
    arguments = report.parser(__doc__ or "").parse_args()
    rows = [*oracle(), *speed(arguments.repeats), *decisions()]
    return report.finish("simulator", arguments, rows, "virtual time; nothing is trained")


if __name__ == "__main__":
    sys.exit(main())
