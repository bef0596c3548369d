"""Layers of LSTM cells of our own: close, and only where bits may differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import waterflow as wf
from waterflow import _C
from waterflow.executor import faster_lstm
from waterflow.executor.captured import captures

aten, ours = torch.ops.aten, torch.ops.waterflow
LSTM = 2
assert _C  # brings the operators


class Tagger(nn.Module):
    def __init__(self, cells: int = 32, **settings: Any) -> None:
        super().__init__()
        self.cells = nn.LSTM(12, cells, 2, batch_first=True, **settings)
        self.out = nn.Linear(cells * (2 if self.cells.bidirectional else 1), 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.cells(x)[0]).flatten(0, 1)


BATCHES = [(torch.randn(6, 9, 12), torch.randint(5, (54,))) for _ in range(4)]


def job(**changes: Any) -> wf.Job:
    settings: dict[str, Any] = {
        "model": Tagger, "data": BATCHES, "loss": F.cross_entropy,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "epochs": 3, "seed": 0,
    }  # fmt: skip
    return wf.Job(name="one", **(settings | changes))


@pytest.fixture
def always_faster(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    captures.clear()
    monkeypatch.setattr(faster_lstm, "_found", {})
    measured: list[Any] = []
    monkeypatch.setattr(faster_lstm, "_is_faster", lambda layer: measured.append(layer) or True)
    return measured


def layer(times: int, batch: int, inputs: int, cells: int, scale: float = 0.0) -> tuple[list[Tensor], list[Tensor]]:
    """Input, weights and state; gradients of the output, turned, and of both states."""
    sizes = [(times, batch, inputs), (4 * cells, inputs), (4 * cells, cells), (4 * cells,), (4 * cells,)]
    given = [torch.randn(size) * (scale or cells**-0.5) for size in sizes] + [
        torch.randn(batch, cells) for _ in range(2)
    ]
    return given, [
        torch.randn(batch, times, cells).transpose(0, 1),
        torch.randn(batch, cells),
        torch.randn(batch, cells),
    ]


def run(given: list[Tensor], gradients: list[Tensor | None], biases: bool = True) -> list[Tensor]:
    """Output and states; gradients of input, weights, biases and states."""
    cells = given[-1].shape[-1]
    *made, kept = ours.lstm_layer(*given, False, [], LSTM, cells, 1, biases, False, False, True)
    assert kept.dtype == torch.float32  # oneDNN's is of bytes
    back = ours.lstm_layer_backward(
        *given, *made, *gradients, False, LSTM, cells, 1, biases, True, False, [], False, kept
    )
    return [*made, *back]


def reference(given: list[Tensor], gradients: list[Tensor | None]) -> list[Tensor]:
    """The same in double precision, by torch's own cells."""
    x, *weights, hidden, last = (value.double().requires_grad_() for value in given)
    names = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    network = nn.LSTM(x.shape[2], hidden.shape[1]).double()
    with torch.backends.mkldnn.flags(enabled=False):
        output, (h, c) = torch.func.functional_call(network, dict(zip(names, weights)), (x, (hidden[None], last[None])))
        loss = sum((y * g.double()).sum() for y, g in zip((output, h[0], c[0]), gradients) if g is not None)
    return [output, h[0], c[0], *torch.autograd.grad(loss, [x, *weights, hidden, last])]  # type: ignore[arg-type]


def assert_close(mine: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(mine, wanted, strict=True):
        assert one.shape == other.shape and one.is_contiguous()
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5 * max(1.0, other.abs().max().item()))


@pytest.mark.parametrize("sizes", [(32, 16, 24, 128), (5, 3, 7, 16), (1, 1, 16, 32), (9, 5, 20, 48), (3, 2, 1, 272)])
def test_layers(sizes: tuple[int, int, int, int]) -> None:
    given, gradients = layer(*sizes)
    assert_close(run(given, gradients), reference(given, gradients))
    for left_out in ([gradients[0], None, None], [None, None, gradients[2]]):
        assert_close(run(given, left_out), reference(given, left_out))


def test_without_biases() -> None:
    given, gradients = layer(4, 3, 5, 16)
    given[3:5] = torch.zeros(64), torch.zeros(64)
    empty = [*given[:3], torch.zeros(0), torch.zeros(0), *given[5:]]
    plain, wanted = run(empty, gradients, biases=False), reference(given, gradients)
    assert_close([*plain[:6], *plain[8:]], [*wanted[:6], *wanted[8:]])


def test_large_and_missing_numbers() -> None:
    given, gradients = layer(6, 4, 8, 16, scale=60.0)
    made = run(given, gradients)
    assert all(tensor.isfinite().all() for tensor in made) and made[0].abs().max() <= 1
    given[0][3, 1, 2] = float("nan")
    output = run(given, gradients)[0]
    assert output[3:, 1].isnan().all() and output[:3].isfinite().all() and output[:, 0].isfinite().all()


def test_small_numbers_keep_their_digits() -> None:
    given, gradients = layer(3, 2, 4, 16, scale=1e-5)
    given[5:] = torch.zeros(2, 16), torch.zeros(2, 16)
    for mine, wanted in zip(run(given, gradients)[:3], reference(given, gradients)[:3]):
        torch.testing.assert_close(mine.double(), wanted, rtol=1e-5, atol=1e-14)


def test_other_layers_are_torch_s() -> None:
    given, _ = layer(4, 3, 5, 20)  # no multiple of sixteen
    for reverse in (False, True):
        arguments = (*given, reverse, [], LSTM, 20, 1, True, False, False, True)
        for mine, theirs in zip(ours.lstm_layer(*arguments), aten.mkldnn_rnn_layer(*arguments)):
            assert mine.dtype == theirs.dtype and (mine.dtype == torch.uint8 or torch.equal(mine, theirs))


@pytest.mark.parametrize("settings", [{}, {"bidirectional": True}, {"bias": False}, {"cells": 20}], ids=str)
def test_steps_that_may_round_otherwise_are_close(always_faster: list[Any], settings: dict[str, Any]) -> None:
    make = lambda: Tagger(**settings)  # noqa: E731
    exact = wf.train([job(model=make)], memory="1GiB")[0]
    assert not always_faster
    close = wf.train([job(model=make)], memory="1GiB", exact=False, mode="lanes")[0]
    assert len(always_faster) == 2  # each layer once, for both directions of the step
    torch.testing.assert_close(torch.tensor(close.losses), torch.tensor(exact.losses), rtol=1e-4, atol=1e-5)
    assert wf.train([job(model=make)], memory="1GiB")[0].losses == exact.losses


def test_it_is_measured_which_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    captures.clear()
    monkeypatch.setattr(faster_lstm, "_found", {})
    wf.train([job(epochs=1)], memory="1GiB", exact=False, mode="lanes")
    assert len(faster_lstm._found) == 2
