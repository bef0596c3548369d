"""How long capture and plan take: large models once, and the first step of a small trial."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from benchmarks import report
from benchmarks.zoo import FULL

LARGE = {"resnet50": (8, 2.0), "resnet152": (8, None), "bert": (4, None), "tacotron2": (2, 30.0)}


def large(name: str) -> float:
    """Seconds from model and batch to plan, in a process that has captured nothing of the kind before."""
    zoo = FULL[name]
    model = zoo.build()
    batch = zoo.batch(LARGE[name][0], torch.Generator().manual_seed(0))
    step = wf.Step(model, step=zoo.step, optimizer=zoo.optimizer(model.parameters()))
    taken = report.seconds(lambda: step.plan_for(batch))
    print(len(step.plan_for(batch).groups), step.plan_for(batch).operations, file=sys.stderr)
    return taken


def small_net(width: int) -> nn.Module:
    """Two convolutions with BatchNorm and a head, as in a trial over handwritten digits."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.Flatten(),
        nn.Dropout(0.2), nn.Linear(2 * width * 16, 10),
    )  # fmt: skip


def first_steps() -> tuple[float, float, float]:
    """Seconds of a trial's first step: the first in the process, one of a new shape, one whose shape is known."""

    def trial(width: int) -> float:
        model = small_net(width)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batch = (torch.randn(32, 1, 8, 8), torch.randint(0, 10, (32,)))

        def first() -> None:
            wf.Step(model, loss=F.cross_entropy, optimizer=optimizer)(batch)

        return report.seconds(first)

    return trial(8), trial(12), trial(12)


def in_new_process(expression: str) -> Any:
    """Evaluate in a fresh process, so that no earlier capture helps."""
    code = f"import torch; torch.set_num_threads(1); from benchmarks.capture import *; print(repr({expression}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return eval(done.stdout.strip().splitlines()[-1])  # a number or a tuple of numbers of ours


def main() -> int:
    """Command line."""
    arguments = report.parser(__doc__ or "").parse_args()
    rows: list[dict[str, Any]] = []
    for name, (_, goal) in LARGE.items():
        taken = [in_new_process(f"large({name!r})") for _ in range(arguments.repeats)]
        rows.append(_row(f"capture and plan of {name}", taken, goal))
    firsts = [in_new_process("first_steps()") for _ in range(arguments.repeats)]
    kinds = (("first step of the process", None), ("of a new shape", 0.3), ("of a known shape", 0.02))
    for position, (kind, goal) in enumerate(kinds):
        what = f"small CNN trial: {kind}" if position == 0 else f"small CNN trial: first step {kind}"
        rows.append(_row(what, [first[position] for first in firsts], goal))
    return report.finish("capture", arguments, rows, "each in new processes, one intra-op thread")


def _row(what: str, taken: list[float], goal: float | None) -> dict[str, Any]:
    middle = report.median(taken)
    row = {"what": what, "seconds": middle, "spread": report.spread(taken), "at most": goal}
    return row if goal is None else {**row, "holds": middle <= goal}


if __name__ == "__main__":
    sys.exit(main())
