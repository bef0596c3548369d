"""Jobs of ``benchmarks.elastic``, the record of their steps, and the same models under DistributedDataParallel."""

from __future__ import annotations

import os
import random
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

import waterflow as wf
from waterflow import zoo

SEED = 3


# -- models and their rows


class Rows(Dataset[Any]):
    """``length`` rows: those of some tensors, in turn. Each takes ``pause`` seconds to read."""

    def __init__(self, tensors: Sequence[Tensor], length: int, pause: float = 0.0) -> None:
        self.tensors, self.length, self.pause = tensors, length, pause

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        if self.pause:
            time.sleep(self.pause)
        return tuple(tensor[index % len(tensor)] for tensor in self.tensors)


@dataclass(frozen=True)
class Workload:
    """A model with what its training needs. ``draw`` makes so many rows; ``loss`` maps a model and a batch to a scalar."""

    name: str
    model: Callable[[], nn.Module]
    draw: Callable[[int, torch.Generator], Sequence[Tensor]]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[Any], Optimizer]

    def rows(self, length: int, different: int, pause: float = 0.0) -> Rows:
        """The workload's rows, of which ``different`` ones differ."""
        return Rows(self.draw(different, torch.Generator().manual_seed(SEED)), length, pause)


def perceptron(*widths: int, dropout: float = 0.0) -> nn.Module:
    """Linear layers of these widths, with ReLU and dropout between them."""
    hidden = [(nn.Linear(i, o), nn.ReLU(), nn.Dropout(dropout)) for i, o in pairwise(widths[:-1])]
    return nn.Sequential(*(layer for layers in hidden for layer in layers), nn.Linear(*widths[-2:]))


def resnet18(classes: int = 10) -> nn.Module:
    """Made by torchvision."""
    module = zoo.require("torchvision.models.resnet")
    return module.ResNet(module.BasicBlock, [2, 2, 2, 2], num_classes=classes).train()


def vectors(width: int, classes: int, count: int, numbers: torch.Generator) -> tuple[Tensor, Tensor]:
    """Normal numbers with a class each."""
    return zoo.randn(count, width, generator=numbers), zoo.randint(classes, count, generator=numbers)


def classify(model: nn.Module, batch: Any) -> Tensor:
    """The mean cross-entropy of a batch."""
    return F.cross_entropy(model(batch[0]), batch[1])


def small_bert(hidden: int, layers: int) -> Callable[[], nn.Module]:
    """A function that makes a BERT of few words, with dropout."""
    return partial(
        zoo.bert, vocab_size=1000, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=4,
        intermediate_size=4 * hidden, max_position_embeddings=64,
    )  # fmt: skip


sgd = partial(SGD, lr=0.01, momentum=0.9, fused=True)
adamw = partial(AdamW, lr=1e-3, fused=True)

MLP = Workload("MLP with dropout", partial(perceptron, 16, 128, 128, 4, dropout=0.2), partial(vectors, 16, 4), classify, adamw)
WIDE = Workload("8 layers of width 1024", partial(perceptron, *[1024] * 9), partial(vectors, 1024, 1024), classify, adamw)
SMALL_RESNET = Workload("ResNet with BatchNorm, 32 px", partial(zoo.resnet, (1, 1, 1, 1), 10), zoo.images(32, 10), classify, sgd)
SMALL_BERT = Workload("BERT, hidden 64", small_bert(64, 2), zoo.masked_tokens(1000, 32, 1), zoo.masked_lm, adamw)
RESNET = Workload("ResNet-18, 64 px", resnet18, zoo.images(64, 10), classify, sgd)
BERT = Workload("BERT, hidden 256, length 64", small_bert(256, 4), zoo.masked_tokens(1000, 64, 1), zoo.masked_lm, adamw)
WORKLOADS = {what.name: what for what in (MLP, WIDE, SMALL_RESNET, SMALL_BERT, RESNET, BERT)}


# -- the record of steps


@dataclass(frozen=True)
class Done:
    """One line of a log: a step that a process has done."""

    number: int
    when: float
    pid: int


class StepLog:
    """A scheduler that appends a line to a file after each step, and lets another one step, if there is one."""

    def __init__(self, path: Path, inner: Any = None) -> None:
        self.path, self.inner, self.number = path, inner, 0

    def step(self) -> None:
        """One line; processes that write to one file do not cut each other's."""
        self.number += 1
        if self.inner is not None:
            self.inner.step()
        file = os.open(self.path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
        try:
            os.write(file, f"{self.number} {time.time():.6f} {os.getpid()}\n".encode())
        finally:
            os.close(file)

    def state_dict(self) -> dict[str, Any]:
        """The number of steps, and the other scheduler's state."""
        return {"number": self.number, "inner": self.inner.state_dict() if self.inner is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.number = state["number"]
        if self.inner is not None:
            self.inner.load_state_dict(state["inner"])


def read_log(path: Path) -> list[Done]:
    """All lines of a log."""
    words = (line.split() for line in path.read_text().splitlines())
    return [Done(int(number), float(when), int(pid)) for number, when, pid in words]


def first_times(done: Sequence[Done]) -> dict[int, float]:
    """When a step of each number was first done by any process, in the order of numbers."""
    times: dict[int, float] = {}
    for one in sorted(done, key=lambda one: (one.number, one.when)):
        times.setdefault(one.number, one.when)
    return times


def gaps(times: dict[int, float]) -> dict[int, float]:
    """Seconds from the step before to each step that has one."""
    return {number: when - times[number - 1] for number, when in times.items() if number - 1 in times}


def seconds_a_step(path: Path, warm: int) -> float:
    """The median over all steps but the first ones; few of them are audited, which takes twice the time."""
    return statistics.median(gap for number, gap in gaps(first_times(read_log(path))).items() if number > warm)


def halved(optimizer: Optimizer, every: int = 5) -> Any:
    """A scheduler that halves the learning rate now and then."""
    return torch.optim.lr_scheduler.StepLR(optimizer, every, 0.5)


def job(
    what: Workload, log: Path, *, shards: int, batch: int, steps: int, different: int | None = None, pause: float = 0.0,
    halve: bool = False, **settings: Any,
) -> wf.Job:  # fmt: skip
    """A job of one epoch that logs its steps. All rows differ unless ``different`` says how many do."""
    rows = what.rows(batch * steps, different or batch * steps, pause)
    return wf.Job(
        what.name, what.model, DataLoader(rows, batch), what.optimizer, step=what.loss, seed=SEED, shards=shards,
        scheduler=lambda optimizer: StepLog(log, halved(optimizer) if halve else None), scheduler_interval="step", **settings,
    )  # fmt: skip


# -- jobs whose members begin apart, or whose evaluation changes the model

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta")


class Apart(nn.Module):
    """A classifier of which each process may make another one, and what evaluations change: an average, weights, an attribute."""

    def __init__(self, begins: str, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {name: nn.Linear(16, width) for name in (set(NAMES) if begins == "modules by a set" else NAMES)}
        )
        self.norm, self.out, self.scale = nn.BatchNorm1d(width), nn.Linear(width, 4), 1.0
        if begins == "weights by NumPy":
            for weight in self.parts.parameters():
                weight.data.copy_(torch.from_numpy(np.random.randn(*weight.shape) / 8))
        if begins == "an attribute by Python":
            self.scale = random.uniform(0.5, 1.5)
        self.register_buffer("average", torch.zeros(4, width))
        for name, weight in list(self.named_parameters()):
            self.register_buffer(f"first_{name.replace('.', '_')}", weight.detach().clone())

    def forward(self, rows: Tensor) -> Tensor:
        """Rows of 16 numbers to scores."""
        hidden = self.norm(torch.stack([self.parts[name](rows) for name in NAMES]).sum(0)).relu() * self.scale
        return self.out(hidden) + F.linear(hidden, self.average)


def begun(width: int, state: dict[str, Tensor], scale: float) -> nn.Module:
    """The same model as it began, from its state at the end."""
    model = Apart("alike", width)
    for name, weight in model.named_parameters():
        weight.data.copy_(state[f"first_{name.replace('.', '_')}"])
    for name in state:
        if name.startswith("first_"):
            model.get_buffer(name).copy_(state[name])
    model.scale = scale
    return model


def _freeze(model: Any) -> None:
    model.out.bias.requires_grad_(not model.out.bias.requires_grad)


def _scale(model: Any) -> None:
    model.scale *= 0.9


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "an average": lambda model: model.average.lerp_(model.out.weight.detach(), 0.5),
    "clipped weights": lambda model: model.out.weight.data.clamp_(-0.1, 0.1),
    "statistics": lambda model: model.norm.reset_running_stats(),
    "what is frozen": _freeze,
    "an attribute": _scale,
}


def changing(what: str, model: Any) -> dict[str, float]:
    """An evaluation that changes the model; its metrics are of the time before."""
    told = {"scale": model.scale, "weight": float(model.out.weight.detach().sum())}
    CHANGES[what](model)
    return told


class ByPython(Sampler[int]):
    """An order that each process draws for itself."""

    def __iter__(self) -> Iterator[int]:
        """All of 96 rows."""
        return iter(random.sample(range(96), 96))


def apart_rows(kind: str, batch: int) -> DataLoader[Any]:
    """Rows in an order, or with labels, that may be each process's own."""
    numbers, order = torch.Generator().manual_seed(SEED), set(NAMES) if kind == "labels by a set" else NAMES
    label = {name: number % 4 for number, name in enumerate(order)}
    targets = torch.tensor([label[NAMES[row % len(NAMES)]] for row in range(96)])
    rows = TensorDataset(zoo.randn(96, 16, generator=numbers), targets)
    return DataLoader(rows, batch, sampler=ByPython() if kind == "a sampler by Python" else None)


REFUSED = ["modules by a set", "labels by a set", "a sampler by Python"]


def drawn_apart(chance: random.Random) -> tuple[wf.Job, str, Callable[[wf.JobResult], wf.Job]]:
    """A job, what is odd of it, and the same job with the first state that a result began with."""
    odd = chance.choice([*["nothing", "weights by NumPy", "an attribute by Python"] * 2, *REFUSED])
    change, width, shards = chance.choice(list(CHANGES)), chance.choice([8, 24, 32]), chance.choice([2, 3, 4])
    job = wf.Job(
        "apart", partial(Apart, odd, width), partial(apart_rows, odd, chance.choice([12, 16, 24])), chance.choice([sgd, adamw]),
        loss=F.cross_entropy, evaluate=partial(changing, change), epochs=3, seed=SEED, shards=shards,
        accumulate=chance.choice([1, 2]), clip_grad_norm=chance.choice([None, 1.0]),
    )  # fmt: skip

    def alone(result: wf.JobResult) -> wf.Job:
        assert result.state_dict is not None
        return replace(job, model=partial(begun, width, result.state_dict, result.metrics[0]["scale"]))

    return job, f"{odd} apart; an evaluation changes {change}", alone


# -- without waterflow


def by_hand(what: Workload, log: Path, *, shards: int, batch: int, steps: int, different: int) -> None:
    """An ordinary loop that accumulates the gradients of the parts of each batch."""
    torch.manual_seed(SEED)
    model = what.model()
    optimizer, record = what.optimizer(model.parameters()), StepLog(log)
    for number, part in enumerate(DataLoader(what.rows(batch * steps, different), batch // shards)):
        (what.loss(model, part) / shards).backward()
        if number % shards == shards - 1:
            optimizer.step()
            optimizer.zero_grad()
            record.step()


class WithLoss(nn.Module):
    """A model whose output is its loss, so that a wrapper's forward pass has all of the step."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> Tensor:
        """A batch to its loss."""
        return self.loss(self.model, batch)


def ddp(rank: int, cores: Sequence[int], workload: str, log: str, batch: int, steps: int, different: int) -> None:
    """One of as many processes as there are cores, each pinned to its own; buffers stay each process's own, as a shard's do.

    To be called in a process that ends with it.
    """
    os.sched_setaffinity(0, {cores[rank]})
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", FutureWarning)  # broadcast_buffers has another name in later versions
    torch.distributed.init_process_group("gloo", init_method=f"file://{log}.meet", rank=rank, world_size=len(cores))
    torch.manual_seed(SEED)
    what = WORKLOADS[workload]
    model: Any = WithLoss(what.model(), what.loss)
    model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, broadcast_buffers=False)
    optimizer, record = what.optimizer(model.parameters()), StepLog(Path(log))
    own = batch // len(cores)
    mine = [begin + rank * own + row for begin in range(0, batch * steps, batch) for row in range(own)]
    for part in DataLoader(what.rows(batch * steps, different), own, sampler=mine):
        model(part).backward()
        optimizer.step()
        optimizer.zero_grad()
        record.step()
    torch.distributed.destroy_process_group()
