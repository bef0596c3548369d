"""A search over architectures: cells in the manner of NAS-Bench-201 (Dong and Yang 2020), on handwritten digits, with Hyperband.

    python -m examples.cells [TRIALS]

Each trial is another graph: six edges between four nodes, each of them nothing, a skip, a convolution of one or of three, or a mean
of three. Most trials end at Hyperband's first rung, and are captured only if that pays.
"""

from __future__ import annotations

import sys

import optuna
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from examples.demo import CLASSES, Batches, accuracy

OPERATIONS = ("none", "skip", "conv1", "conv3", "mean")
EDGES = [(source, target) for target in range(1, 4) for source in range(target)]
WIDTHS = (4, 6, 8)
BATCH, EPOCHS = 64, 9


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
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))
    return nn.Sequential(stem, nn.MaxPool2d(2), Cell(edges, channels), head)


def choose(trial: optuna.Trial) -> tuple[list[str], int]:
    """Ask for an architecture."""
    edges = [trial.suggest_categorical(f"edge{number}", OPERATIONS) for number in range(len(EDGES))]
    return edges, trial.suggest_categorical("channels", WIDTHS)


def build(trial: optuna.Trial) -> wf.Job:
    """A trial as a job."""
    edges, channels = choose(trial)
    return wf.Job(
        f"trial {trial.number}",
        model=lambda: network(edges, channels),
        data=lambda: Batches(BATCH),
        loss=F.cross_entropy,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, fused=True),
        evaluate=accuracy,
        epochs=EPOCHS,
        seed=0,
        read_ahead=True,
    )


def make_study() -> optuna.Study:
    """A study whose trials begin with one epoch, and have nine if they are among the best."""
    pruner = optuna.pruners.HyperbandPruner(min_resource=1, max_resource=EPOCHS, reduction_factor=3)
    return optuna.create_study(direction="maximize", sampler=optuna.samplers.RandomSampler(seed=0), pruner=pruner)


if __name__ == "__main__":
    study = make_study()
    print(wf.optimize(study, build, int(sys.argv[1]) if len(sys.argv) > 1 else 60))
    print("best cell:", study.best_params)
