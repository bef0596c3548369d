"""Layers of LSTM cells and logarithms of softmax of our own: close, and only where bits may differ."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import waterflow as wf
from waterflow import _C
from waterflow.executor import measured
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
def always_faster(monkeypatch: pytest.MonkeyPatch) -> dict[Any, bool]:
    """What was measured."""
    captures.clear()
    monkeypatch.setattr(measured, "_found", found := {})
    monkeypatch.setattr(measured, "measure", lambda *ways: True)
    return found


def names(found: dict[Any, bool]) -> list[str]:
    return sorted(str(like[0]) for like, _ in found)


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
    kept = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    network = nn.LSTM(x.shape[2], hidden.shape[1]).double()
    with torch.backends.mkldnn.flags(enabled=False):
        output, (h, c) = torch.func.functional_call(network, dict(zip(kept, weights)), (x, (hidden[None], last[None])))
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
def test_steps_that_may_round_otherwise_are_close(always_faster: dict[Any, bool], settings: dict[str, Any]) -> None:
    make = lambda: Tagger(**settings)  # noqa: E731
    exact = wf.train([job(model=make)], memory="1GiB")[0]
    assert not always_faster
    close = wf.train([job(model=make)], memory="1GiB", exact=False, mode="lanes")[0]
    assert names(always_faster).count("lstm") == 2  # each layer once, for both directions of the step
    torch.testing.assert_close(torch.tensor(close.losses), torch.tensor(exact.losses), rtol=1e-4, atol=1e-5)
    assert wf.train([job(model=make)], memory="1GiB")[0].losses == exact.losses


def test_it_is_measured_which_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    captures.clear()
    monkeypatch.setattr(measured, "_found", {})
    wf.train([job(epochs=1)], memory="1GiB", exact=False, mode="lanes")
    assert names(measured._found).count("lstm") == 2


# -- logarithms of softmax


@pytest.mark.parametrize("shape", [(3, 8), (5, 13), (2, 3, 1000), (1, 4099), (16,)])
def test_log_softmax(shape: tuple[int, ...]) -> None:
    x, gradients = 5 * torch.randn(shape), torch.randn(shape)
    made = ours.log_softmax(x, -1, False)
    back = ours.log_softmax_backward(gradients, made, len(shape) - 1, torch.float32)
    wanted = x.double().log_softmax(-1)
    wanted_back = gradients.double() - wanted.exp() * gradients.double().sum(-1, keepdim=True)
    torch.testing.assert_close(made.double(), wanted, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(back.double(), wanted_back, rtol=1e-5, atol=1e-5)


def test_log_softmax_of_far_and_missing_numbers() -> None:
    inf = float("inf")
    x = torch.tensor([0.0, 100.0, -inf, -100.0, 3.4e38, -3.4e38, 1.0, 88.0, 89.0, -88.0, -0.0]).expand(6, 11).clone()
    x[0, 4], x[1, 4], x[2, 10], x[3], x[4, 9] = 5.0, 101.0, float("nan"), -inf, inf
    made = ours.log_softmax(x, 1, False)
    torch.testing.assert_close(made, torch.log_softmax(x, 1), rtol=1e-6, atol=1e-6, equal_nan=True)
    back = ours.log_softmax_backward(torch.ones_like(x), made, 1, torch.float32)
    theirs = aten._log_softmax_backward_data(torch.ones_like(x), made, 1, torch.float32)
    torch.testing.assert_close(back, theirs, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert back[0, 2] == 1.0  # nothing of what cannot happen


@pytest.mark.parametrize(
    "x",
    [torch.randn(8, 16).t(), torch.randn(8, 4), torch.randn(8, 16, dtype=torch.double), torch.randn(0, 9)],
    ids=["transposed", "short rows", "double", "no rows"],
)
def test_other_softmaxes_are_torch_s(x: Tensor) -> None:
    made = ours.log_softmax(x, 1, False)
    assert torch.equal(made, aten._log_softmax(x, 1, False))
    back = ours.log_softmax_backward(x, made, 1, x.dtype)
    assert torch.equal(back, aten._log_softmax_backward_data(x, made, 1, x.dtype))


def test_losses_by_a_large_softmax_are_close(always_faster: dict[Any, bool]) -> None:
    make = lambda: nn.Sequential(nn.Linear(12, 300), nn.Flatten(0, 1))  # noqa: E731
    exact = wf.train([job(model=make)], memory="1GiB")[0]
    assert not always_faster
    close = wf.train([job(model=make)], memory="1GiB", exact=False, mode="lanes")[0]
    assert {"aten._log_softmax.default", "aten._log_softmax_backward_data.default"} <= set(names(always_faster))
    torch.testing.assert_close(torch.tensor(close.losses), torch.tensor(exact.losses), rtol=1e-4, atol=1e-5)
