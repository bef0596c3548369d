"""The reason of an eager step names what it is, where the user's code or a module causes it, and what helps."""

from __future__ import annotations

import importlib
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.quantization import FakeQuantize, FusedMovingAvgObsFakeQuantize
from torch.distributions import Distribution
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.utils import _pytree as pytree
from torch.utils.tensorboard import SummaryWriter

import waterflow as wf
from tests.support import images

HERE = "test_step_reasons.py:"
METRIC, DRAWN, SIZE = "as a metric", "pass what was drawn in the batch", "compute a size"


@pytest.fixture(autouse=True)
def _afresh(no_captures: Any) -> None:
    """No verdict is taken over from an earlier test."""


def reason(model: nn.Module, batch: Any, step: Any = None, steps: int = 1) -> str:
    how = {"loss": F.cross_entropy} if step is None else {"step": step}
    made = wf.Step(model, optimizer=torch.optim.AdamW(model.parameters()), **how)
    for _ in range(steps):
        made(batch)
    return str(made.opaque_reason)


def says(model: nn.Module, batch: Any, step: Any, *texts: str, steps: int = 1) -> None:
    told = reason(model, batch, step, steps)
    for text in texts:
        assert text in told, told


class Masked(nn.Module):
    def __init__(self, kind: str, **how: bool) -> None:
        super().__init__()
        layer = {"encoder": nn.TransformerEncoderLayer, "decoder": nn.TransformerDecoderLayer}[kind]
        stack = {"encoder": nn.TransformerEncoder, "decoder": nn.TransformerDecoder}[kind]
        self.kind, self.how, self.stack = kind, how, stack(layer(8, 2, 16), 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(x))
        if self.kind == "encoder":
            return self.stack(x, mask=mask, **self.how).mean(0)
        return self.stack(x, x, tgt_mask=mask, **self.how).mean(0)


@pytest.mark.parametrize("kind, argument", [("encoder", "is_causal"), ("decoder", "tgt_is_causal")])
def test_the_mask_of_a_transformer(kind: str, argument: str) -> None:
    batch = torch.randn(5, 4, 8), torch.tensor([0, 1, 2, 0])
    name = f"torch's Transformer{kind.title()}"
    says(Masked(kind), batch, None, name, "mask", f"{argument}=", f"module 'stack' (Transformer{kind.title()})", HERE)
    for causal in (True, False):
        assert reason(Masked(kind, **{argument: causal}), batch) == "None"


def test_modules_of_torch_that_read_values() -> None:
    batch = images(1)[0]
    norm = nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.Linear(6, 4))
    says(norm, batch, None, "torch's BatchNorm1d", "momentum=", "module '0'")
    says(
        nn.Sequential(FakeQuantize(), nn.Linear(6, 4)), batch, None, "FakeQuantize", "FusedMovingAvgObsFakeQuantize", "module '0'"
    )
    assert reason(nn.Sequential(FusedMovingAvgObsFakeQuantize(), nn.Linear(6, 4)), batch) == "None"
    adaptive = nn.AdaptiveLogSoftmaxWithLoss(6, 4, [2])
    says(adaptive, batch, lambda m, b: m(*b).loss, "torch's AdaptiveLogSoftmaxWithLoss reads", HERE)


def test_functions_of_torch_that_read_values() -> None:
    lstm, x, lengths = nn.LSTM(6, 4), torch.randn(3, 2, 6), torch.tensor([3, 1])

    def packed(m: Any, b: Any) -> torch.Tensor:
        return m(rnn.pack_padded_sequence(*b))[1][0].sum()

    says(lstm, (x, lengths), packed, "torch's pack_padded_sequence", "lengths", "padded batch", HERE)
    says(lstm, rnn.pack_padded_sequence(x, lengths), lambda m, b: m(b)[1][0].sum(), "torch's LSTM", "lengths", HERE)

    def ctc(m: Any, b: Any) -> torch.Tensor:
        return F.ctc_loss(m(b[0]).log_softmax(-1), *b[1:])

    targets = torch.randint(1, 4, (2, 1)), torch.tensor([3, 3]), torch.tensor([1, 1])
    says(nn.Linear(6, 4), (x, *targets), ctc, "torch's ctc_loss", "lengths", HERE)
    batch = images(1)[0]
    says(nn.Linear(6, 4), batch, lambda m, b: F.mse_loss(m(b[0]), F.one_hot(b[1]) * 1.0), "torch's one_hot", "num_classes=")


def test_shapes_by_values() -> None:
    x, y = images(1)[0]
    mask = torch.arange(len(x)) % 2 > 0

    def selected(m: Any, b: Any) -> torch.Tensor:
        return F.cross_entropy(m(b[0])[b[2]], b[1][b[2]])

    told = "x[mask]", "mask.nonzero()", "ignore_index=", 'reduction="none"', "mask.sum()", HERE
    says(nn.Linear(6, 4), (x, y, mask), selected, *told)
    says(nn.Linear(6, 4), (x, y), lambda m, b: m(b[0]).masked_select(b[0][:, :4] > 0).sum(), *told)
    assert reason(nn.Linear(6, 4), (x, y, mask.nonzero().flatten()), selected) == "None"

    def weighed(m: Any, b: Any) -> torch.Tensor:
        return (F.cross_entropy(m(b[0]), b[1], reduction="none") * b[2]).sum() / b[2].sum()

    assert reason(nn.Linear(6, 4), (x, y, mask), weighed) == "None"
    says(nn.Linear(6, 4), (x, y), lambda m, b: m(b[0]).sum() * len(b[1].unique()), "unique()", "before the step", HERE)
    repeats = torch.ones(len(x), dtype=torch.int64)
    says(nn.Linear(6, 4), (x, repeats), lambda m, b: m(b[0]).repeat_interleave(b[1], 0).sum(), "output_size=", HERE)


SIZES: dict[str, Callable[[torch.Tensor], Any]] = {
    "int()": lambda y: torch.zeros(int(y.max()) + 1),
    "item()": lambda y: torch.zeros(y.max().item() + 1),
    "an index or a size": lambda y: range(y.max()),
}


@pytest.mark.parametrize("what", SIZES)
def test_sizes_by_values(what: str) -> None:
    says(nn.Linear(6, 4), images(1)[0], lambda m, b: m(b[0]).mean() * len(SIZES[what](b[1])), what, SIZE, "before the step", HERE)


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Registered(Pair):
    pass


torch.export.register_dataclass(Registered)


class Data:
    """As graphs are: tensors in attributes."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


class RegisteredData(Data):
    pass


pytree.register_pytree_node(RegisteredData, lambda data: ([data.x, data.y], None), lambda held, _: RegisteredData(*held))


def test_batches_of_classes() -> None:
    def step(m: Any, b: Any) -> torch.Tensor:
        return F.cross_entropy(m(b.x), b.y)

    x, y = images(1)[0]
    instead = "pass a tuple or dict of its tensors"
    says(nn.Linear(6, 4), Pair(x, y), step, "holds a Pair", "torch.export.register_dataclass(Pair)", instead)
    says(nn.Linear(6, 4), Data(x, y), step, "holds a Data", "torch.utils._pytree.register_pytree_node", instead)
    for batch in (Registered(x, y), RegisteredData(x, y)):
        assert reason(nn.Linear(6, 4), batch, step, steps=2) == "None"


def test_what_torch_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Distribution, "_validate_args", Distribution._validate_args)  # which torch.compile switches off
    model, batch = torch.compile(nn.Linear(6, 4), backend="eager"), images(1)[0]
    says(model, batch, None, "torch.compile", "as they are")
    double = torch.compile(lambda x: 2 * x, backend="eager")
    says(nn.Linear(6, 4), batch, lambda m, b: double(m(b[0])).sum(), "double", "torch.compile", "as they are")


own, numpys = random.Random(3), np.random.default_rng(3)
DRAWS: dict[str, Callable[[], float]] = {
    "random.random": lambda: random.random(),
    "randint": lambda: random.randint(1, 2),
    "own": lambda: own.random(),
    "NumPy's": lambda: np.random.rand(),
    "numpys": lambda: numpys.random(),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_draws_outside_of_torch(draw: str) -> None:
    says(nn.Linear(6, 4), images(1)[0], lambda m, b: m(b[0]).sum() * DRAWS[draw](), draw, DRAWN, HERE)


def test_a_library_that_reads_and_the_line_that_calls_it(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    (folder / "telling.py").write_text("def tell(value):\n    return float(value)\n")
    monkeypatch.syspath_prepend(folder)
    telling = importlib.import_module("telling")

    def step(m: Any, b: Any) -> torch.Tensor:
        loss = F.cross_entropy(m(b[0]), b[1])
        telling.tell(loss)
        return loss

    says(nn.Linear(6, 4), images(1)[0], step, "telling.py:2, in tell: return float(value), from ", "in step: telling.tell(loss)")


log = logging.getLogger("tests.reasons")


def test_what_looks_at_a_loss_in_the_step(tmp_path: Any) -> None:
    writer, batch = SummaryWriter(tmp_path), images(1)[0]
    kept: dict[str, torch.Tensor] = {}

    def telling(look: Callable[[torch.Tensor], Any]) -> Any:
        def step(m: Any, b: Any) -> torch.Tensor:
            loss = F.cross_entropy(m(b[0]), b[1])
            look(loss)
            return loss

        return step

    looks: dict[str, Callable[[torch.Tensor], Any]] = {
        "print": lambda loss: print(loss),
        "logging.info": lambda loss: logging.info("loss %s", loss),
        "logging.Logger": lambda loss: log.info("loss %s", loss),
        "format()": lambda loss: f"{loss:.3f}",
        "float()": lambda loss: float(loss),
    }
    for text, look in looks.items():
        says(nn.Linear(6, 4), batch, telling(look), text, METRIC, HERE)
    says(nn.Linear(6, 4), batch, telling(lambda loss: writer.add_scalar("loss", loss)), "tensorboard", METRIC)
    writer.close()
    says(nn.Linear(6, 4), batch, telling(lambda loss: kept.update(loss=loss)), "kept", "metric", steps=4)
    says(nn.Linear(6, 4), batch, telling(lambda loss: 1 if loss > 9 else 2), "by if", "torch.where", METRIC, HERE)
