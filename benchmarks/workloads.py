"""What is trained side by side in ``benchmarks.throughput``: the workloads, and sets of jobs made of them.

A job is a workload, a seed and a learning rate. Every process makes the same model and the same batches from it, so
that all ways train the same jobs on the same data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils import _pytree as pytree

from benchmarks.networks import LSTMLanguageModel, conv_bn_relu, deep_mlp, linear_relu
from benchmarks.zoo import FULL

BATCHES = 4  # different ones of each job, made before the clock and read in turn

LAUNCH_BOUND, MEDIUM, SATURATING = "launch-bound", "medium", "saturating"


@dataclass(frozen=True)
class Workload:
    """A model with its batches, loss and optimizer.

    ``build`` takes the dropout rate, ``dropout`` the one to train with. ``loss`` maps a model and a batch to a scalar.
    ``steps`` is what one measured round has of all jobs together, a second or two of eager work on two cores.
    """

    name: str
    kind: str
    build: Callable[[float], nn.Module]
    batch: Callable[[Generator], Any]
    loss: Callable[[Any, Any], Tensor]
    optimizer: type[Optimizer]
    settings: dict[str, Any]
    steps: int
    dropout: float = 0.0


@dataclass(frozen=True)
class JobSpec:
    """One job of a set, in words that another process understands."""

    workload: str
    number: int

    @property
    def learning_rate(self) -> float:
        """The workload's own, up to twice as much: jobs of a study differ in it."""
        return WORKLOADS[self.workload].settings["lr"] * (1 + self.number / 8)


class MadeJob:
    """A job's model, batches and optimizer settings, made from its spec alone.

    ``exact``: without dropout and in float64, where all right ways of computing a step agree in many digits. Deep networks
    with BatchNorm amplify what float32 rounds, so that after a few steps agreement there would show nothing.
    """

    def __init__(self, spec: JobSpec, exact: bool = False) -> None:
        self.spec = spec
        self.workload = WORKLOADS[spec.workload]
        torch.manual_seed(spec.number)
        self.model = self.workload.build(0.0 if exact else self.workload.dropout).train()
        generator = torch.Generator().manual_seed(1000 + spec.number)
        self.batches = [self.workload.batch(generator) for _ in range(BATCHES)]
        if exact:
            self.model.double()
            self.batches = pytree.tree_map(lambda t: t.double() if t.is_floating_point() else t, self.batches)
        self.settings = self.workload.settings | {"lr": spec.learning_rate}

    def optimizer(self, parameters: Any, **more: Any) -> Optimizer:
        """The job's optimizer over ``parameters``."""
        return self.workload.optimizer(parameters, **self.settings, **more)


@dataclass(frozen=True)
class JobSet:
    """Jobs that are trained at the same time."""

    name: str
    jobs: tuple[JobSpec, ...]

    @property
    def kind(self) -> str:
        """Launch-bound, medium or saturating."""
        return WORKLOADS[self.jobs[0].workload].kind

    @property
    def workloads(self) -> list[str]:
        """Names of its workloads, each once."""
        return list(dict.fromkeys(job.workload for job in self.jobs))

    @property
    def same_shape(self) -> bool:
        """Whether all jobs are of one workload, so that their tensors can be stacked."""
        return len(self.workloads) == 1

    @property
    def kept(self) -> bool:
        """Whether all ways can hold their jobs between rounds: large models in large sets would not all fit into memory."""
        return self.kind != SATURATING or len(self.jobs) <= 2

    def steps(self, share: float = 1.0) -> list[int]:
        """Steps of each job in one measured round, two at least."""
        return [max(2, round(share * WORKLOADS[job.workload].steps / len(self.jobs))) for job in self.jobs]


def same(workload: str, count: int) -> JobSet:
    """``count`` jobs of one workload that differ in seed, data and learning rate."""
    return JobSet(f"{workload} x{count}", tuple(JobSpec(workload, number) for number in range(count)))


def mixed(kind: str, count: int) -> JobSet:
    """``count`` jobs that take the workloads of one kind in turn."""
    names = [name for name, workload in WORKLOADS.items() if workload.kind == kind]
    return JobSet(f"{kind} mix x{count}", tuple(JobSpec(names[n % len(names)], n) for n in range(count)))


# -- models that the zoo does not have in this size


def deep(dropout: float) -> nn.Module:
    """40 residual layers of width 64."""
    return deep_mlp(40, 64, dropout)


def tiny_transformer(dropout: float) -> nn.Module:
    """12 encoder blocks of width 32."""
    block = nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(block, 12, enable_nested_tensor=False)


def lenet(dropout: float) -> nn.Module:
    """LeNet-5 with a BatchNorm behind each convolution, for 3 x 32 x 32."""
    return nn.Sequential(
        nn.Conv2d(3, 6, 5), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        *linear_relu((400, 120, 84), dropout), nn.Linear(84, 10),
    )  # fmt: skip


class Residual(nn.Module):
    """Two convolutions with a way around them (He et al. 2016, the basic block)."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        stride = outside // inside
        self.body = nn.Sequential(
            nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(),
            nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        self.around = (
            nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
            if inside != outside
            else nn.Identity()
        )

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.around(x))


def resnet8(dropout: float) -> nn.Module:
    """Three stages of one basic block each, 16 to 64 channels, for 3 x 32 x 32."""
    return nn.Sequential(
        *conv_bn_relu(3, 16), Residual(16, 16), Residual(16, 32), Residual(32, 64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def lstm(dropout: float) -> nn.Module:
    """Two layers of 128 cells over 1,000 words."""
    return LSTMLanguageModel(False, vocab=1000, hidden=128, layers=2, dropout=dropout)


def resnet50(dropout: float) -> nn.Module:
    """The zoo's, whole."""
    return FULL["resnet50"].build()


def bert(dropout: float) -> nn.Module:
    """Six layers of width 384 over 8,192 words: BERT's own code, small enough for a few of them on a laptop."""
    return FULL["bert"].build(
        vocab_size=8192, hidden_size=384, num_hidden_layers=6, num_attention_heads=6, intermediate_size=1536,
        max_position_embeddings=64, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # type: ignore[call-arg]  # fmt: skip


# -- batches and losses


def _pairs(*shape: int) -> Callable[[Generator], Any]:
    return lambda generator: (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))


def _pictures(count: int, size: int, classes: int) -> Callable[[Generator], Any]:
    return lambda generator: (
        torch.randn(count, 3, size, size, generator=generator),
        torch.randint(classes, (count,), generator=generator),
    )


def _words(vocab: int, count: int, length: int) -> Callable[[Generator], Any]:
    """A text, and its next words."""

    def batch(generator: Generator) -> tuple[Tensor, Tensor]:
        text = torch.randint(vocab, (count, length + 1), generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()

    return batch


def _masked_words(vocab: int, count: int, length: int) -> Callable[[Generator], Any]:
    """A text with 15 % of its words masked, and these words; -100 elsewhere."""

    def batch(generator: Generator) -> tuple[Tensor, Tensor]:
        text = torch.randint(4, vocab, (count, length), generator=generator)
        masked = torch.rand(count, length, generator=generator).argsort(1) < round(0.15 * length)
        return text.masked_fill(masked, 3), text.masked_fill(~masked, -100)

    return batch


def _squared_error(model: Any, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def _classify(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def _next_word(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def _masked_word(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(input_ids=batch[0]).logits.flatten(0, 1), batch[1].flatten())


_ADAMW = {"lr": 1e-3}
_SGD = {"lr": 0.01, "momentum": 0.9}
_SLOW_SGD = _SGD | {"lr": 0.001}

WORKLOADS: dict[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload("mlp", LAUNCH_BOUND, deep, _pairs(4, 64), _squared_error, AdamW, _ADAMW, 1600),
        Workload("transformer", LAUNCH_BOUND, tiny_transformer, _pairs(4, 16, 32), _squared_error, AdamW, _ADAMW, 320,
                 dropout=0.1),
        Workload("lenet", MEDIUM, lenet, _pictures(64, 32, 10), _classify, SGD, _SGD, 160),
        Workload("resnet8", MEDIUM, resnet8, _pictures(32, 32, 10), _classify, SGD, _SGD, 40),
        Workload("lstm", MEDIUM, lstm, _words(1000, 16, 32), _next_word, AdamW, _ADAMW, 80, dropout=0.2),
        Workload("resnet50", SATURATING, resnet50, _pictures(16, 64, 1000), _classify, SGD, _SLOW_SGD, 8),
        Workload("bert", SATURATING, bert, _masked_words(8192, 8, 64), _masked_word, AdamW, _ADAMW, 4, dropout=0.1),
    )
}  # fmt: skip

KINDS = (LAUNCH_BOUND, MEDIUM, SATURATING)
COUNTS = (2, 4, 8)
SETS: dict[str, JobSet] = {
    made.name: made
    for made in (
        *(same(name, 1) for name, workload in WORKLOADS.items() if workload.kind == LAUNCH_BOUND),
        *(same(name, count) for name in WORKLOADS for count in COUNTS),
        *(mixed(kind, count) for kind in KINDS for count in COUNTS),
    )
}
