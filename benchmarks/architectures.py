"""A search over architectures, where each trial is another graph: waterflow against ``study.optimize`` with one and with two threads.

    python -m benchmarks.architectures [--rounds 3] [--save]

Trials are cells in the manner of NAS-Bench-201 (Dong and Yang 2020): each of six edges between four nodes is nothing, a skip, a
convolution of one or of three, or a mean of three. They train on handwritten digits in batches of 16, a plain step of 2 to 4 ms.
``A of S`` are A architectures of S steps each. Runs are processes of their own, in turn; captures count.
"""

from __future__ import annotations

import argparse
import functools
import json
import random
import subprocess
import sys
import time
from typing import Any

import optuna
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from benchmarks import report
from examples import demo

Row = dict[str, Any]
OPERATIONS = ("none", "skip", "conv1", "conv3", "mean")
EDGES = [(source, target) for target in range(1, 4) for source in range(target)]
SIZES = {(40, 60): 0.97, (6, 600): 1.3, (2, 6_000): 2.0}
BATCH = 16
WAYS = ("waterflow", "one thread", "two threads")


def operation(name: str, channels: int) -> nn.Module:
    """What an edge of a cell does to [batch, channels, side, side]."""
    if name == "skip":
        return nn.Identity()
    if name == "mean":
        return nn.AvgPool2d(3, stride=1, padding=1)
    side = int(name[-1])
    return nn.Sequential(nn.Conv2d(channels, channels, side, padding=side // 2, bias=False), nn.BatchNorm2d(channels), nn.ReLU())


class Cell(nn.Module):
    """Four nodes; each is the sum of what the edges make of those before. The last one is the output."""

    def __init__(self, edges: list[str], channels: int) -> None:
        super().__init__()
        kept = [(source, target, operation(name, channels)) for (source, target), name in zip(EDGES, edges) if name != "none"]
        self.places = [(source, target) for source, target, _ in kept]
        self.operations = nn.ModuleList(made for _, _, made in kept)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to images of the same shape."""
        nodes: list[torch.Tensor | None] = [x, None, None, None]
        for (source, target), made in zip(self.places, self.operations):
            before = nodes[source]
            if before is not None:
                value, known = made(before), nodes[target]
                nodes[target] = value if known is None else known + value
        last = nodes[3]
        return x if last is None else last


def network(edges: list[str], channels: int) -> nn.Module:
    """A network of one cell that reads digits [batch, 1, 8, 8]."""
    stem = nn.Sequential(nn.Conv2d(1, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, demo.CLASSES))
    return nn.Sequential(stem, nn.MaxPool2d(2), Cell(edges, channels), head)


def points(count: int) -> list[dict[str, Any]]:
    """Architectures, no two of them equal."""
    numbers, seen = random.Random(0), dict[tuple[Any, ...], dict[str, Any]]()
    while len(seen) < count:
        point: dict[str, Any] = {f"edge{number}": numbers.choice(OPERATIONS[1:]) for number in range(len(EDGES))}
        point["channels"] = numbers.choice([4, 6, 8])
        seen[tuple(point.values())] = point
    return list(seen.values())


def choose(trial: optuna.Trial) -> tuple[list[str], int]:
    """Ask for an architecture."""
    edges = [trial.suggest_categorical(f"edge{number}", OPERATIONS) for number in range(len(EDGES))]
    return edges, trial.suggest_categorical("channels", [4, 6, 8])


class Batches(demo.Batches):
    """As many batches as a trial has steps."""

    def __init__(self, steps: int) -> None:
        super().__init__(BATCH)
        self.steps = steps

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Any:
        left = self.steps
        while left > 0:
            for batch in super().__iter__():
                yield batch
                left -= 1
                if left == 0:
                    return


def job(trial: optuna.Trial, steps: int) -> wf.Job:
    """A trial as a job."""
    edges, channels = choose(trial)
    return wf.Job(
        f"trial {trial.number}", lambda: network(edges, channels), lambda: Batches(steps), loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, fused=True), evaluate=demo.accuracy, epochs=1, seed=0,
        read_ahead=True,
    )  # fmt: skip


def eager(trial: optuna.Trial, steps: int) -> float:
    """The same trial in PyTorch's ordinary loop."""
    edges, channels = choose(trial)
    torch.manual_seed(0)
    model = network(edges, channels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    for images, labels in Batches(steps):
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return demo.accuracy(model)


def run(way: str, count: int, steps: int) -> float:
    """Seconds of a study, in this process."""
    torch.set_num_threads(2 if way == "two threads" else 1)
    demo.digits()
    torch.optim.AdamW([torch.zeros(1, requires_grad=True)], fused=True)  # imports
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())
    for point in points(count):
        study.enqueue_trial(point)
    began = time.perf_counter()
    if way == "waterflow":
        wf.optimize(study, functools.partial(job, steps=steps), count, keep_weights="none")
    else:
        study.optimize(functools.partial(eager, steps=steps), count)
    return time.perf_counter() - began


def main() -> int:
    """Command line."""
    parser = report.parser((__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if arguments.run:
        way, count, steps = arguments.run
        print(json.dumps(run(way, int(count), int(steps))))
        return 0
    rows: list[Row] = []
    for (count, steps), goal in SIZES.items():
        taken: dict[str, list[float]] = {way: [] for way in WAYS}
        for seed in range(arguments.rounds):
            for way in random.Random(seed).sample(WAYS, len(WAYS)):
                command = [sys.executable, "-m", "benchmarks.architectures", "--run", way, str(count), str(steps)]
                done = subprocess.run(command, capture_output=True, text=True, check=True)
                taken[way].append(float(done.stdout.strip().splitlines()[-1]))
        medians = {way: report.median(seconds) for way, seconds in taken.items()}
        gain = min(medians[way] for way in WAYS[1:]) / medians["waterflow"]
        rows.append(
            {
                "what": f"{count} of {steps:,}", **{way: f"{medians[way]:.1f} s ({report.spread(taken[way])})" for way in WAYS},
                "times as fast": gain, "goal": goal, "holds": gain >= goal,
            }
        )  # fmt: skip
    return report.finish("architectures", arguments, rows)


if __name__ == "__main__":
    sys.exit(main())
