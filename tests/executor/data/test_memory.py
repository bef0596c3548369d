"""Data that lies in memory which steps write: a batch is read behind the step before it, and elsewhere still ahead of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    Sampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

import waterflow as wf
from waterflow.executor.data.loader import may_read_ahead
from waterflow.executor.data.memory import Memory

ROWS, WIDTH, AT_ONCE = 96, 8, 8


class Wide(nn.Module):
    """Takes long enough for a batch to be read beside it. ``memory`` is a buffer, of which a step writes rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, WIDTH))
        self.register_buffer("memory", torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(3)))
        self.table = nn.Parameter(torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(4)))


@dataclass
class Own:
    """What one job has: all of it is made anew for each run."""

    model: Wide
    x: torch.Tensor
    y: torch.Tensor
    at: torch.Tensor

    @classmethod
    def made(cls) -> Own:
        torch.manual_seed(7)
        return cls(Wide(), torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.arange(ROWS))


def next_rows(at: torch.Tensor) -> torch.Tensor:
    return (at + AT_ONCE) % ROWS


def labels(own: Own) -> Callable[..., torch.Tensor]:
    """A step that writes the targets of the rows that come next."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        x, y, at = batch
        z = model.layers(x)
        own.y[next_rows(at)] = z.detach()
        return F.mse_loss(z, y)

    return step


def bank(own: Own) -> Callable[..., torch.Tensor]:
    """A step that writes rows of a buffer of its model."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        x, y, at = batch
        z = model.layers(x)
        model.memory[next_rows(at)] = z.detach()
        return F.mse_loss(z, y)

    return step


def trained(own: Own) -> Callable[..., torch.Tensor]:
    """A step that trains the rows of a table."""

    def step(model: Any, batch: Any) -> torch.Tensor:
        x, y, _ = batch
        return F.mse_loss(model.layers(x), y) + model.table.square().sum()

    return step


def tensors(x: torch.Tensor, y: torch.Tensor, at: torch.Tensor, **settings: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(x, y, at), AT_ONCE, **settings)


KINDS: dict[str, tuple[Callable[[Own], Any], Callable[[Own], Any]]] = {
    "tensors": (labels, lambda own: tensors(own.x, own.y, own.at)),
    "a view": (labels, lambda own: tensors(own.x, own.y.view(-1).view(ROWS, WIDTH), own.at)),
    "shuffled": (labels, lambda own: tensors(own.x, own.y, own.at, shuffle=True)),
    "rows": (labels, lambda own: DataLoader(list(zip(own.x, own.y, own.at)), AT_ONCE)),
    "arrays": (labels, lambda own: DataLoader([(x, y.numpy(), at) for x, y, at in zip(own.x, own.y, own.at)], AT_ONCE)),
    "nested": (
        labels,
        lambda own: DataLoader(
            ConcatDataset([Subset(TensorDataset(own.x, own.y, own.at), range(k, k + 48)) for k in (0, 48)]), AT_ONCE
        ),
    ),
    "our loader": (labels, lambda own: wf.DataLoader(TensorDataset(own.x, own.y, own.at), AT_ONCE)),
    "shared": (labels, lambda own: wf.SharedData(tensors(own.x, own.y, own.at))),
    "made by a function": (labels, lambda own: lambda: tensors(own.x, own.y, own.at)),
    "a buffer": (bank, lambda own: tensors(own.x, own.model.memory, own.at)),
    "a parameter": (trained, lambda own: tensors(own.x, own.model.table.detach(), own.at)),
    "batches": (labels, lambda own: [*zip(own.x.split(AT_ONCE), own.y.split(AT_ONCE), own.at.split(AT_ONCE))]),
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, fused=True)


def by_hand(step_of: Callable[[Own], Any], data_of: Callable[[Own], Any]) -> list[float]:
    own = Own.made()
    step, optimizer, losses = step_of(own), sgd(own.model.parameters()), []
    data = data_of(own)
    data = data._given if isinstance(data, wf.SharedData) else data() if callable(data) else data
    for _ in range(2):
        for batch in data:
            loss = step(own.model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def job_of(kind: str, **settings: Any) -> wf.Job:
    step_of, data_of = KINDS[kind]
    own = Own.made()
    return wf.Job(
        kind, model=lambda: own.model, data=data_of(own), step=step_of(own), optimizer=sgd, epochs=2, seed=0, **settings
    )


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "shuffled"])
def test_a_batch_is_read_behind_the_step_that_writes_to_its_data(kind: str) -> None:
    (result,) = wf.train([job_of(kind)], memory="1GiB", lanes=2)
    assert result.opaque_reason is None
    assert list(result.losses) == by_hand(*KINDS[kind])


def test_reading_behind_draws_no_other_numbers() -> None:
    """The order of rows is that of a job that reads between its steps by its own setting."""
    losses = [wf.train([job_of("shuffled", **how)], memory="1GiB", lanes=2)[0].losses for how in ({}, {"read_ahead": False})]
    assert losses[0] == losses[1]


class Looking:
    """Steps that are not taken yet, at each reading."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.under_way: list[int] = []
        self.runner: Any = None
        read = wf.executor.data.loader.Batches._next

        def looking(batches: Any) -> Any:
            self.under_way.append(self.runner.begun - self.runner.steps)
            return read(batches)

        monkeypatch.setattr(wf.executor.data.loader.Batches, "_next", looking)

    def train(self, job: wf.Job) -> int:
        self.under_way.clear()
        looking = self

        class Started(wf.Callback):
            def on_job_start(self, job: wf.Job, runner: Any) -> None:
                looking.runner = runner

        (result,) = wf.train([job], memory="1GiB", callbacks=[Started()])
        assert result.opaque_reason is None
        return max(self.under_way)


def test_other_data_is_still_read_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    looking = Looking(monkeypatch)
    assert looking.train(job_of("tensors")) == 0
    own = Own.made()
    other = tensors(own.x.clone(), own.y.clone(), own.at)
    job = wf.Job("other", model=lambda: own.model, data=other, step=labels(own), optimizer=sgd, epochs=2, seed=0)
    assert looking.train(job) > 0


def test_data_that_is_replaced_between_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Own.made()
    loader = tensors(own.x, own.y.clone(), own.at)

    def evaluate(model: nn.Module) -> float:
        loader.dataset.tensors = own.x, own.y, own.at
        return 0.0

    looking = Looking(monkeypatch)
    settings: dict[str, Any] = {"optimizer": sgd, "epochs": 2, "seed": 0, "evaluate": evaluate}
    looking.train(wf.Job("replaced", model=lambda: own.model, data=loader, step=labels(own), **settings))
    first, second = looking.under_way[: len(loader)], looking.under_way[len(loader) + 1 :]
    assert max(first) > 0 and max(second) == 0


class Chosen:
    """Indices that look at what a step changes."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, number: int) -> int:
        return number


class InOrder(Sampler[int]):
    def __init__(self) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        return iter(range(ROWS))

    def __len__(self) -> int:
        return ROWS


TABLE = TensorDataset(torch.zeros(ROWS, 2))


@pytest.mark.parametrize(
    ("make", "may"),
    [
        (lambda: DataLoader(TABLE, batch_sampler=BatchSampler(InOrder(), 8, False)), False),
        (lambda: DataLoader(TABLE, batch_sampler=BatchSampler(SequentialSampler(TABLE), 8, False)), True),
        (lambda: DataLoader(TABLE, 8, sampler=SubsetRandomSampler(Chosen())), False),  # type: ignore[arg-type]
        (lambda: DataLoader(TABLE, 8, sampler=SubsetRandomSampler(range(8))), True),
        (lambda: DataLoader(Subset(TABLE, Chosen()), 8), False),  # type: ignore[arg-type]
        (lambda: DataLoader(Subset(TABLE, torch.arange(8)), 8), True),  # type: ignore[arg-type]
    ],
)
def test_what_samplers_and_indices_may_be_of_the_users(make: Callable[[], Any], may: bool) -> None:
    assert may_read_ahead(make()) is may


class Nothing(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return index


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (lambda a, b: [(a, 1), {"b": b, "name": "x"}], 2),
        (lambda a, b: DataLoader(StackDataset(a=TensorDataset(a), b=TensorDataset(b))), 2),
        (lambda a, b: DataLoader(TensorDataset(a), sampler=SubsetRandomSampler(b.long())), 1),  # type: ignore[arg-type]
        (lambda a, b: DataLoader(Subset(TensorDataset(a), b.numpy()[::-1])), 2),  # type: ignore[arg-type]
        (lambda a, b: DataLoader(TensorDataset(a, b), num_workers=1), 0),
        (lambda a, b: DataLoader(Nothing()), 0),
    ],
)
def test_the_memory_of_data(make: Callable[[Any, Any], Any], parts: int) -> None:
    a, b = torch.zeros(6, 4), torch.zeros(6)
    found = Memory(make(a, b))
    assert [found.has(a[3]), found.has(b[5:]), found.has(torch.zeros(3))] == [parts > 0, parts > 1, False]


def test_memory_that_is_not_known() -> None:
    found = Memory([torch.eye(3).to_sparse()])
    assert found.has(torch.zeros(1))


def test_an_array_without_elements_has_no_memory() -> None:
    found = Memory([np.zeros((0, 3)), np.zeros(())])
    assert not found.has(torch.zeros(3))
