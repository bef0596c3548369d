"""What admission and barriers cost: eight jobs on two lanes, planned in groups and as one group each."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

import waterflow as wf
from benchmarks import report
from benchmarks.launch_bound import WORKLOADS, Repeated, loss

JOBS, STEPS = 8, 60


def measure(name: str, repeats: int) -> dict[str, Any]:
    """Share of the lanes' time that goes into admission and barriers, the wait for the engine's lock included."""
    make, shape, *_ = WORKLOADS[name]
    batch = (torch.randn(shape), torch.randn(shape))
    models: list[nn.Module] = [make() for _ in range(JOBS)]
    shares, costs, steps_ms, groups = [], [], [], 0
    for _ in range(repeats + 1):
        with wf.Engine(memory="1GiB", lanes=2) as engine:
            jobs = [
                wf.Job(name=f"job-{i}", model=model, loss=loss, data=Repeated(batch, STEPS),
                       optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3))
                for i, model in enumerate(models)
            ]  # fmt: skip
            wf.train(jobs, engine=engine, max_concurrent=JOBS)
            figures = engine.stats()
        shares.append(figures.scheduling_seconds / figures.busy_seconds)
        costs.append(figures.scheduling_seconds / figures.groups)
        steps_ms.append(figures.busy_seconds / figures.steps * 1e3)
        groups = round(figures.groups / figures.steps)
    share = report.median(shares[1:])  # the first round captured
    return {
        "workload": name, "groups per step": groups, "lane ms per step": report.median(steps_ms[1:]),
        "microseconds per group": report.median(costs[1:]) * 1e6, "share of the step": f"{share:.2%}",
        "spread": report.spread(shares[1:]), "at most": "3%", "holds": share < 0.03,
    }  # fmt: skip


def main() -> int:
    """Command line."""
    arguments = report.parser(__doc__ or "").parse_args()
    torch.set_num_threads(1)
    rows = [measure(name, arguments.repeats) for name in WORKLOADS]
    return report.finish("scheduling", arguments, rows, f"{JOBS} jobs on two lanes")


if __name__ == "__main__":
    sys.exit(main())
