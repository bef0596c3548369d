"""Elastic-Tiresias against Tiresias on a month of a public workload, and what becomes of that when assumptions change."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from benchmarks import report
from waterflow import cluster

TRACES = Path(__file__).parent / "traces"
LIMITS = (10_000.0, 200_000.0)  # of the queues, device-seconds: the paper's
GOAL = -0.29
GROW = 1.1  # seconds that a job is stopped when it grows (mechanism_costs.csv: amoeba_scale_out_stop)
RESUME = 30.0  # where a stop costs: mechanism_costs.csv, amoeba_stop_resume
SMALL, LARGE = 1e4, 2e5  # device-seconds, the paper's classes of jobs
MOST = 1_000_000  # as N: rule 1 never applies


def simulate(
    policy: str, devices: int = 400, seed: int | None = 0, resume: float = 0.0, grow: float = GROW, **parameters: Any
) -> cluster.Simulated:
    """The month under a policy; ``seed`` tells which measured curve stands for which job, None is linear scaling."""
    workload = cluster.read_workload(TRACES / "philly_multigpu_month.csv")
    table = TRACES / "elasticflow_scaling_a100.csv"
    scaling = cluster.LINEAR if seed is None else cluster.TableScaling.read(table, seed)
    parameters.setdefault("limits", LIMITS)
    if policy == "elastic_tiresias":
        parameters["scaling"] = scaling
    nodes = [cluster.Node(f"node{i}", 8) for i in range(devices // 8)]
    scheduler = cluster.Scheduler(nodes, cluster.POLICIES[policy](**parameters))
    overheads = cluster.Overheads(resume=resume, grow=grow)
    return cluster.Simulator(scheduler, overheads, scaling).run(workload.submissions)


def average(run: cluster.Simulated, least: float = 0.0, most: float = float("inf")) -> float:
    """Seconds from submission to end, of jobs of so many device-seconds."""
    chosen = [job.completion for job in run.jobs if least <= job.duration * job.devices < most]
    return sum(chosen) / len(chosen)


def row(what: str, only: dict[str, Any] | None = None, **both: Any) -> dict[str, Any]:
    """One change of assumptions, for the elastic policy ``only``, or for ``both``."""
    las = simulate("las", **both)
    elastic = simulate("elastic_tiresias", **both, **(only or {}))
    change = average(elastic) / average(las) - 1
    by_class = [
        f"{average(elastic, *span) / average(las, *span) - 1:+.0%}"
        for span in ((0.0, SMALL), (SMALL, LARGE), (LARGE, float("inf")))
    ]
    return {
        "what": what, "tiresias": f"{average(las):,.0f} s", "elastic": f"{average(elastic):,.0f} s",
        "change": f"{change:+.1%}", "small, medium, large": ", ".join(by_class), "change as a number": [change],
    }  # fmt: skip


def main() -> int:
    """Command line."""
    arguments = report.parser(__doc__ or "").parse_args()
    first = row("N = 0, all else as the note says")
    first |= {"goal": f"{GOAL:.0%}", "holds": first["change as a number"][0] <= GOAL}
    rows = [first]
    for seed in (1, 2, 3):
        rows.append(row(f"other curves for the jobs (seed {seed})", seed=seed))
    rows.append(row("linear scaling", seed=None))
    for pending in (5, 20, 100):
        rows.append(row(f"N = {pending}", {"pending": pending}))
    rows.append(row("rule 2 alone (N beyond all)", {"pending": MOST}))
    rows.append(row("rule 1 alone (rule 2 gives back what was asked for, no more)", {"most": 1}))
    rows.append(row("at most twice the devices asked for", {"most": 2}))
    rows.append(row("at most four times", {"most": 4}))
    rows.append(row("rule 2 wants a gain of 5 % for a device", {"least_gain": 0.05}))
    rows.append(row("growing is free", {"grow": 0.0}))
    rows.append(row("growing stops a job for 30 s", {"grow": 30.0}))
    rows.append(row("each resume after a stop costs 30 s, in both", resume=RESUME))
    rows.append(row("limits 3,250 and 7,200, in both", limits=(3_250.0, 7_200.0)))
    for devices in (320, 480, 640):
        rows.append(row(f"{devices} devices", devices=devices))
    note = (
        f"philly_multigpu_month, 400 devices; queues' limits {LIMITS} device-seconds, N = 0, growing stops a job for {GROW} s, "
        "shrinking and all else is free; the trace names no models: each job takes one of 14 measured curves (seed 0). "
        f"Small, medium and large jobs: below {SMALL:,.0f}, up to {LARGE:,.0f}, above (device-seconds). A model, no measurement."
    )
    return report.finish("elastic_tiresias", arguments, rows, note)


if __name__ == "__main__":
    sys.exit(main())
