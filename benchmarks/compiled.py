"""A captured step against the same with its regions compiled: instructions, memory, time, and what compiling took."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch

import waterflow as wf
from benchmarks import report
from benchmarks.workloads import WORKLOADS, JobSpec, MadeJob

STEPS = 200
WAYS = {"captured": None, "compiled": "inductor-always", "chosen": "inductor"}


def made(workload: str, way: str) -> tuple[MadeJob, wf.Step]:
    """One job and its step, alone on the calling thread."""
    job = MadeJob(JobSpec(workload, 0))
    optimizer = job.optimizer(job.model.parameters())
    step = wf.Step(job.model, step=job.workload.loss, optimizer=optimizer, compile=WAYS[way])  # type: ignore[arg-type]
    return job, step


def walk(job: MadeJob, step: wf.Step, steps: int) -> None:
    """Some steps over the job's batches in turn."""
    for number in range(steps):
        step(job.batches[number % len(job.batches)])


def measure(workload: str, repeats: int) -> list[dict[str, Any]]:
    """Rows of one workload."""
    steps: dict[str, tuple[MadeJob, wf.Step]] = {}
    waited: dict[str, float] = {}
    count = max(10, min(STEPS, WORKLOADS[workload].steps))
    for way in WAYS:
        steps[way] = made(workload, way)
        begin = time.perf_counter()
        walk(*steps[way], 1)
        waited[way] = time.perf_counter() - begin
        walk(*steps[way], 9)
    times = report.interleaved(
        {way: lambda one=one: report.seconds(lambda: walk(*one, count)) / count for way, one in steps.items()}, repeats
    )  # type: ignore[misc]
    return [
        {
            "workload": workload, "step": way,
            "instructions": step.plan.operations,
            "ms/step": report.median(times[way]) * 1e3,
            "times faster": report.ratio_of(times["captured"], times[way]),
            "spread": report.spread([a / b for a, b in zip(times["captured"], times[way])]),
            "height, KiB": step.measured_height / 1024,
            "predicted": step.predicted_height / 1024,
            "first step, s": waited[way],
            "what": str(step.compiled or ""),
        }
        for way, (_, step) in steps.items()
    ]  # fmt: skip


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("workloads", nargs="*", default=["mlp", "transformer"], help=f"of {', '.join(WORKLOADS)}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for name in arguments.workloads for row in measure(name, arguments.repeats)]
    return report.finish(
        "compiled", arguments, rows, "one job, one thread; compiled: all regions; chosen: the faster ones"
    )


if __name__ == "__main__":
    sys.exit(main())
