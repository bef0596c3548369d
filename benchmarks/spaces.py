"""Search spaces whose studies are measured: the demo's networks that read digits, and perceptrons on a made-up table."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import optuna
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from examples import demo

CLASSES, FEATURES, TRAINING_ROWS, EPOCHS = 5, 40, 2_560, 27


@functools.cache
def table() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rows to train, their classes, rows to test, and theirs."""
    from sklearn.datasets import make_classification

    rows, classes = make_classification(
        4_000, FEATURES, n_informative=14, n_redundant=6, n_classes=CLASSES, n_clusters_per_class=4, flip_y=0.05, random_state=0
    )
    values, labels = torch.tensor(rows, dtype=torch.float32), torch.tensor(classes)
    return values[:TRAINING_ROWS], labels[:TRAINING_ROWS], values[TRAINING_ROWS:], labels[TRAINING_ROWS:]


class Rows:
    """Batches of the table's rows to train, shuffled anew in each pass by numbers of their own."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size = batch_size
        self._numbers = torch.Generator().manual_seed(0)

    def __len__(self) -> int:
        return TRAINING_ROWS // self.batch_size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        values, labels, _, _ = table()
        for rows in torch.randperm(TRAINING_ROWS, generator=self._numbers).split(self.batch_size):
            yield values.index_select(0, rows), labels.index_select(0, rows)


@dataclass(frozen=True)
class Point:
    """A point of the table's space."""

    depth: int
    width: int
    dropout: float
    optimizer: str
    lr: float
    wd: float
    bs: int
    schedule: str


def choose(trial: optuna.Trial) -> Point:
    """Ask the trial for a point."""
    return Point(
        depth=trial.suggest_int("depth", 1, 4),
        width=trial.suggest_categorical("width", [16, 32, 64, 128]),
        dropout=trial.suggest_float("dropout", 0.0, 0.6),
        optimizer=trial.suggest_categorical("optimizer", ["SGD", "Adam", "AdamW"]),
        lr=trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        wd=trial.suggest_float("wd", 1e-6, 1e-1, log=True),
        bs=trial.suggest_categorical("bs", [32, 64, 128]),
        schedule=trial.suggest_categorical("schedule", ["constant", "cosine"]),
    )


def make_model(point: Point) -> nn.Module:
    """A perceptron."""
    layers: list[nn.Module] = []
    features = FEATURES
    for _ in range(point.depth):
        layers += [nn.Linear(features, point.width), nn.ReLU(), nn.Dropout(point.dropout)]
        features = point.width
    return nn.Sequential(*layers, nn.Linear(features, CLASSES))


def make_optimizer(point: Point, parameters: Any) -> torch.optim.Optimizer:
    """The chosen optimizer, fused."""
    kind: Any = getattr(torch.optim, point.optimizer)
    more = {"momentum": 0.9} if point.optimizer == "SGD" else {}
    made: torch.optim.Optimizer = kind(parameters, lr=point.lr, weight_decay=point.wd, fused=True, **more)
    return made


def make_scheduler(point: Point, optimizer: torch.optim.Optimizer) -> Any:
    """The chosen schedule of the rate."""
    rate = torch.optim.lr_scheduler
    return rate.CosineAnnealingLR(optimizer, EPOCHS) if point.schedule == "cosine" else rate.ConstantLR(optimizer, 1.0)


def accuracy(model: nn.Module) -> float:
    """Share of the rows to test whose class ``model`` finds."""
    _, _, rows, labels = table()
    model.eval()
    with torch.no_grad():
        right = (model(rows).argmax(dim=1) == labels).float().mean()
    model.train()
    return float(right)


def job(trial: optuna.Trial) -> wf.Job:
    """A trial of the table's space."""
    point = choose(trial)
    return wf.Job(
        name=f"trial {trial.number}",
        model=lambda: make_model(point),
        data=lambda: Rows(point.bs),
        read_ahead=True,
        loss=F.cross_entropy,
        optimizer=lambda parameters: make_optimizer(point, parameters),
        scheduler=lambda optimizer: make_scheduler(point, optimizer),
        evaluate=accuracy,
        epochs=EPOCHS,
        seed=0,
    )


def eager(trial: optuna.Trial) -> float:
    """The same trial in PyTorch's ordinary loop."""
    point = choose(trial)
    torch.manual_seed(0)
    model = make_model(point)
    optimizer = make_optimizer(point, model.parameters())
    scheduler, rows, value = make_scheduler(point, optimizer), Rows(point.bs), 0.0
    for epoch in range(EPOCHS):
        for values, labels in rows:
            F.cross_entropy(model(values), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        value = accuracy(model)
        scheduler.step()
        trial.report(value, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return value


@dataclass(frozen=True)
class Space:
    """A search space: its points, a trial as a job and as an ordinary loop, its epochs, and what reads its data."""

    choose: Callable[[optuna.Trial], Any]
    job: Callable[[optuna.Trial], wf.Job]
    eager: Callable[[optuna.Trial], float]
    epochs: int
    read: Callable[[], Any]


SPACES = {
    "digits": Space(demo.choose, demo.build, demo.objective_eager, demo.EPOCHS, demo.digits),
    "table": Space(choose, job, eager, EPOCHS, table),
}
