"""Copies of a model on a simulated device of 32 GB: the largest batch of each, against the largest batch alone.

32 GB is 32 * 2**30 bytes. Requests come from captures; operations are issued one by one on two lanes that share an arena,
with the placement that plans use; each job has one batch on the device, the next one waits in host memory. Alone, a job
is counted by its live bytes. "limit" is (M - N W) / (M - W), with memory M and what each copy holds all the time, W:
persistent state and the largest batch alone. "lossless" counts the smaller batches of copies, too: what a placement
without a lost byte would reach. Every run is checked: no byte is touched without an order, the limit is kept.

Overlap (share of the time in which both lanes are busy) and speed (against one lane that is never idle) are a model:
lanes run at full speed, and time is the bytes that operations move, at 900 GB/s, batches come over a bus of 12 GB/s.
"""

from __future__ import annotations

import sys
from typing import Any

import waterflow as wf
from benchmarks import report
from benchmarks.zoo import FULL
from waterflow import batch_size

MEMORY = 32 * 2**30
STEPS = 12
MODELS = ("resnet50", "resnet152", "bert", "inception_v3")
# Largest batch against alone: what is to be reached, and what the Waterwave paper (IEEE TC 2023, table 1; three and four
# copies from its text) did.
GOALS = {
    ("resnet50", 2): 0.98, ("resnet50", 3): 0.965, ("resnet50", 4): 0.95, ("resnet152", 2): 0.973, ("bert", 2): 0.944,
}  # fmt: skip
PUBLISHED = {
    ("resnet50", 2): 0.916, ("resnet50", 3): 0.828, ("resnet50", 4): 0.764, ("resnet152", 2): 0.860, ("bert", 2): 0.899,
    ("inception_v3", 2): 0.933,
}  # fmt: skip


def measure(name: str) -> list[dict[str, Any]]:
    """Two, three and four copies of one model."""
    zoo = FULL[name]
    model = zoo.build()
    step = wf.Step(model, step=zoo.step, optimizer=zoo.optimizer(model.parameters()), name=name)
    sizes = batch_size.StepSizes(step, zoo.batch(8, None))
    alone = batch_size.largest_batch(sizes, memory=MEMORY)
    return [_row(name, sizes, alone, copies) for copies in (2, 3, 4)]


def _row(name: str, sizes: batch_size.StepSizes, alone: batch_size.LargestBatch, copies: int) -> dict[str, Any]:
    found = batch_size.largest_batch(sizes, memory=MEMORY, copies=copies, steps=STEPS)
    run = found.run
    assert run is not None and run.peak <= MEMORY
    smaller = batch_size.run_copies(sizes, round(0.9 * found.size), memory=MEMORY, copies=copies, steps=STEPS)
    ratio, goal = found.size / alone.size, GOALS.get((name, copies))
    return {
        "model": f"{name} x {copies}", "alone": alone.size, "each": found.size, "ratio": ratio,
        "at least": goal, "holds": None if goal is None else ratio >= goal, "limit": alone.limit_for(copies),
        "lossless": alone.lossless_for(copies), "published": PUBLISHED.get((name, copies)),
        "height / live": found.step.offsets.height / found.step.resident, "peak / limit": run.peak / MEMORY,
        "overlap, speed": _pace(run), "at 90 %": _pace(smaller), "waits": f"{run.waits} of {run.groups}",
    }  # fmt: skip


def _pace(run: Any) -> str:
    return f"{run.overlap:.2f}, {run.speed:.2f}"


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(FULL))
    arguments = parser.parse_args()
    rows = [row for name in arguments.models for row in measure(name)]
    note = "32 * 2**30 bytes; overlap and speed are a model (bytes moved as the clock)"
    return report.finish("copies", arguments, rows, note)


if __name__ == "__main__":
    sys.exit(main())
