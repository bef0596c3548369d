"""Kinds of training loops, as people have them: jobs one after the other in plain PyTorch, and the same through ``wf.train``.

Plain loops have the optimizer in the form that it has by default, and as many intra-op threads as make them faster: torch's
default, or one. Times hold all that a run takes. The README's table "Does it help you?" is made of this.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adagrad, AdamW, Optimizer
from torch.utils.data import DataLoader, Dataset

import waterflow as wf
from benchmarks import report

SECONDS_A_ROW = 0.0005  # what the slow data set takes for each


@dataclass(frozen=True)
class Loop:
    """Some jobs of one kind. ``model`` makes job number n's; ``loss`` maps a model and a batch to a scalar."""

    what: str
    jobs: int
    model: Callable[[int], nn.Module]
    data: Callable[[], Iterable[Any]]  # one epoch
    optimizer: Callable[..., Optimizer]
    loss: Callable[[nn.Module, Any], Tensor]
    shared: bool = False  # one loader for all jobs

    def plain(self) -> None:
        """One ordinary loop after the other."""
        for number in range(self.jobs):
            model = self.made(number)
            optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad])
            for batch in self.data():
                optimizer.zero_grad()
                self.loss(model, batch).backward()
                optimizer.step()

    def together(self) -> wf.Results:
        """All of them through one call."""
        shared = wf.SharedData(self.data(), seed=0) if self.shared else None
        return wf.train(
            [
                wf.Job(
                    name=f"{self.what} {number}", model=self.made(number), data=shared or self.data(), step=self.loss, train_mode="as_is",
                    optimizer=lambda parameters: self.optimizer([p for p in parameters if p.requires_grad]),
                )
                for number in range(self.jobs)
            ]
        )  # fmt: skip

    def made(self, number: int) -> nn.Module:
        """Job ``number``'s model, the same each time."""
        torch.manual_seed(number)
        return self.model(number)


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Of a classifier."""
    return F.cross_entropy(model(batch[0]), batch[1])


def logged(model: nn.Module, batch: Any) -> Tensor:
    """The same, with the loss read within the step."""
    loss = cross_entropy(model, batch)
    if loss.item() > 1e6:
        print("the loss explodes")
    return loss


def mlp(_: int) -> nn.Module:
    """A small perceptron."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(),
        nn.Linear(128, 10),
    )  # fmt: skip


def cnn(_: int) -> nn.Module:
    """A small convolutional network on 16 x 16 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


class Encoder(nn.Module):
    """A small transformer that classifies sequences of any length."""

    def __init__(self, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        block = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(block, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to (batch, 10)."""
        return self.head(self.blocks(x).mean(1))


def encoder(_: int) -> nn.Module:
    """One of them."""
    return Encoder()


class LoRA(nn.Module):
    """A frozen linear layer, shared by all who adapt it, with a low-rank sum beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """As the layer."""
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Adapted(nn.Module):
    """A classifier whose frozen layers are ``shared``."""

    def __init__(self, shared: nn.ModuleList) -> None:
        super().__init__()
        self.layers = nn.ModuleList(LoRA(layer) for layer in shared)
        self.head = nn.Linear(256, 10)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 256) to (batch, 10)."""
        for layer in self.layers:
            x = F.gelu(layer(x))
        return self.head(x)


def adapters() -> Callable[[int], nn.Module]:
    """Classifiers over one base of eight layers."""
    base = nn.ModuleList(nn.Linear(256, 256) for _ in range(8)).requires_grad_(False)
    return lambda _: Adapted(base)


class SlowRows(Dataset):
    """Rows that take a while, as decoded images do."""

    def __init__(self, count: int) -> None:
        self.rows = torch.randn(count, 64)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(SECONDS_A_ROW)
        return self.rows[index], index % 10


class Batches:
    """``count`` steps over a few batches that lie in memory; a shape for each."""

    def __init__(self, count: int, shapes: list[tuple[int, ...]]) -> None:
        self.batches = [(torch.randn(shape), torch.randint(10, shape[:1])) for shape in shapes]
        self.count = count

    def __iter__(self) -> Iterator[Any]:
        return (self.batches[number % len(self.batches)] for number in range(self.count))


def memory(count: int, *shape: int) -> Callable[[], Batches]:
    """Four batches of one shape."""
    batches = Batches(count, [shape] * 4)
    return lambda: batches


def lengths(count: int, how_many: int) -> Callable[[], Batches]:
    """Sequences of so many lengths in turn."""
    batches = Batches(count, [(8, 8 + 2 * length, 64) for length in range(how_many)])
    return lambda: batches


def new_shapes(count: int) -> Batches:
    """Batches of sizes that no call before has had."""
    return Batches(count, [(8 + next(_SIZES), 64) for _ in range(count)])


_SIZES = itertools.count()


def slow() -> DataLoader:
    """A loader of 512 slow rows."""
    return DataLoader(SlowRows(512), 32, shuffle=True)


def loops() -> list[Loop]:
    """All kinds, in the order of the table."""
    adamw, row = partial(AdamW, lr=1e-3), (32, 64)
    return [
        Loop("8 small MLPs", 8, mlp, memory(300, *row), adamw, cross_entropy),
        Loop("4 small CNNs", 4, cnn, memory(100, 32, 1, 16, 16), adamw, cross_entropy),
        Loop("4 MLPs, slow loader", 4, mlp, slow, adamw, cross_entropy),
        Loop("4 MLPs, slow loader, shared", 4, mlp, slow, adamw, cross_entropy, shared=True),
        Loop("8 MLPs, Adagrad", 8, mlp, memory(300, *row), partial(Adagrad, lr=1e-2), cross_entropy),
        Loop("8 MLPs, .item() in the step", 8, mlp, memory(300, *row), adamw, logged),
        Loop("4 transformers, 8 lengths", 4, encoder, lengths(100, 8), adamw, cross_entropy),
        Loop("4 transformers, 64 lengths", 4, encoder, lengths(100, 64), adamw, cross_entropy),
        Loop("4 MLPs, Adagrad, slow loader", 4, mlp, slow, partial(Adagrad, lr=1e-2), cross_entropy),
        Loop("1 MLP, ever new shapes", 1, mlp, partial(new_shapes, 50), adamw, cross_entropy),
        Loop("1 small MLP", 1, mlp, memory(1000, *row), adamw, cross_entropy),
        Loop("4 LoRA adapters, one base", 4, adapters(), memory(100, 32, 256), adamw, cross_entropy),
    ]


def measure(loop: Loop, repeats: int) -> dict[str, Any]:
    """One row. The first call of each way warms up and is not counted."""
    threads = torch.get_num_threads()

    def plain(count: int) -> float:
        torch.set_num_threads(count)
        try:
            return report.seconds(loop.plain)
        finally:
            torch.set_num_threads(threads)

    ways = {f"{count} threads": partial(plain, count) for count in {1, threads}}
    results = loop.together()
    for way in ways.values():
        way()
    times = report.interleaved({**ways, "together": lambda: report.seconds(loop.together)}, repeats)
    best = min(ways, key=lambda way: report.median(times[way]))
    ratios = [p / t for p, t in zip(times[best], times["together"])]
    return {
        "loop": loop.what, "steps": "captured" if results[0].opaque_reason is None else "eager", "plain with": best,
        "plain, s": report.median(times[best]), "waterflow, s": report.median(times["together"]),
        "ratio": report.median(ratios), "spread": report.spread(ratios),
    }  # fmt: skip


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.add_argument("--only", nargs="+", default=[], help="loops whose names have one of these words")
    arguments = parser.parse_args()
    wanted = [loop for loop in loops() if not arguments.only or any(word in loop.what for word in arguments.only)]
    rows = [measure(loop, arguments.repeats) for loop in wanted]
    return report.finish("loops", arguments, rows, "ratio: plain loops' time over waterflow's; over 1 is faster")


if __name__ == "__main__":
    sys.exit(main())
