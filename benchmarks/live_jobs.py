"""The jobs of ``benchmarks.cluster_live``: nets of linear layers, and data that notes its times and obeys files.

A module of its own, as the processes of devices import it: jobs of one device share its lock.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import waterflow as wf

TURN = threading.Lock()  # jobs of one process take turns at it
LOST = 0.5  # of the time at the lock, by whoever had to wait for it
ENDLESS = 10**9  # steps
KEPT = 4  # batches, which come again and again


def note(folder: Path, name: str, what: str, number: int = 0) -> None:
    """Append a number, and the time of ``time.monotonic()``, which all processes share, to a file."""
    with (folder / f"{name}.{what}").open("a") as file:
        file.write(f"{number} {time.monotonic()}\n")


def noted(folder: Path, name: str, what: str) -> list[float]:
    """The first time of each number in a file; none, if there is no file yet. A line under way is left out."""
    path, found = folder / f"{name}.{what}", dict[int, float]()
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        number, _, at = line.partition(" ")
        if at.endswith("\n"):
            found.setdefault(int(number), float(at))
    return list(found.values())


class Batches:
    """Batches that follow from a seed, each after ``seconds``.

    With ``folder`` the time at which each is asked for is a line in NAME.asked. No batch is read ahead, as this is code of the
    user's: the line of batch n, counted from 0, is the end of step n - 1. NAME.pause, NAME.double and NAME.end, while they are
    there, let the job stand still, double its batches, and end it.
    """

    def __init__(
        self, name: str = "", folder: Path | None = None, steps: int = ENDLESS, seconds: float = 0.0, rows: int = 16, width: int = 32,
        seed: int = 0,
    ) -> None:  # fmt: skip
        self.name, self.folder, self.steps, self.seconds = name, folder, steps, seconds
        self.rows, self.width, self.seed = rows, width, seed

    def __iter__(self) -> Iterator[Any]:
        made: dict[int, list[Any]] = {}
        for number in range(self.steps):
            if self.folder is not None:
                note(self.folder, self.name, "asked", number)
            while self.told("pause") and not self.told("end"):
                time.sleep(0.005)
            if self.told("end"):
                return
            self.wait()
            rows = self.rows * (2 if self.told("double") else 1)
            if rows not in made:
                made[rows] = self.made(rows)
            yield made[rows][number % KEPT]

    def wait(self) -> None:
        """Take time for a batch."""
        if self.seconds:
            time.sleep(self.seconds)

    def told(self, what: str) -> bool:
        """Whether the file is there."""
        return self.folder is not None and os.path.exists(f"{self.folder}/{self.name}.{what}")

    def made(self, rows: int) -> list[Any]:
        """Inputs and targets."""
        numbers = torch.Generator().manual_seed(self.seed)
        return [(torch.randn(rows, self.width, generator=numbers), torch.randn(rows, 1, generator=numbers)) for _ in range(KEPT)]


class InTurns(Batches):
    """They take their time at the lock; whoever had to wait for it loses some more there."""

    def wait(self) -> None:
        """See ``Batches``."""
        waits = not TURN.acquire(blocking=False)
        if waits:
            TURN.acquire()
        try:
            time.sleep(self.seconds * (1 + LOST * waits))
        finally:
            TURN.release()


class Net:
    """Makes the model; notes in NAME.built when."""

    def __init__(self, name: str, folder: Path | None, width: int, layers: int) -> None:
        self.name, self.folder, self.width, self.layers = name, folder, width, layers

    def __call__(self) -> nn.Module:
        if self.folder is not None:
            note(self.folder, self.name, "built")
        inner = [part for _ in range(self.layers) for part in (nn.Linear(self.width, self.width), nn.Tanh())]
        return nn.Sequential(nn.Dropout(0.1), *inner, nn.Linear(self.width, 1))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    """An optimizer with two states for each parameter."""
    return torch.optim.AdamW(parameters, lr=1e-3)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    """One with a single state."""
    return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9)


def total(model: nn.Module) -> float:
    """Of all parameters: a value that an evaluation tells."""
    return float(sum(parameter.detach().double().sum() for parameter in model.parameters()))


def job(batches: Batches, layers: int = 2, **more: Any) -> wf.Job:
    """A job on these batches, under their name and seed, unless ``more`` says otherwise."""
    net = Net(batches.name, batches.folder, batches.width, layers)
    settings: dict[str, Any] = {"data": batches, "optimizer": adamw, "loss": nn.functional.mse_loss, "seed": batches.seed}
    return wf.Job(batches.name, net, **settings | more)


def plan(made: wf.Job, double: bool = False) -> wf.Plan:
    """What a step of such a job needs, on a batch of its own or twice that."""
    assert isinstance(made.data, Batches) and isinstance(made.model, Net)
    model = made.model()
    step = wf.Step(model, loss=made.loss, optimizer=made.optimizer(model.parameters()), name=made.name)
    return step.plan_for(made.data.made(made.data.rows * (1 + double))[0])


def held(plan: wf.Plan) -> int:
    """Bytes between steps: what persists, and the two batches that a job claims."""
    return plan.persistent + 2 * plan.batch
