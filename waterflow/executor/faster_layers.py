"""LSTM layers and logarithms of softmax by kernels of our own, where bits may differ and they are measured to be faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from waterflow.executor.measured import is_faster

aten, ours = torch.ops.aten, torch.ops.waterflow

LEAST_NUMBERS = 1 << 12  # of a softmax: smaller ones are over before the way to them is
_LSTM = 2  # torch's number of that kind of layer

_Ways = tuple[Callable[[], Any], Callable[[], Any]]


def faster_layer(target: Any, values: Sequence[Any]) -> Any:
    """The operator to call in the place of ``target`` with the same arguments; results may differ by rounding."""
    if target in (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default):
        return _lstm(target, values)
    if target in (aten._log_softmax.default, aten._log_softmax_backward_data.default):
        return _log_softmax(target, values)
    return target


def _plain(*tensors: Tensor) -> bool:
    return all(t.device.type == "cpu" and t.dtype == torch.float32 for t in tensors)


def _log_softmax(target: Any, values: Sequence[Any]) -> Any:
    back = target is aten._log_softmax_backward_data.default
    numbers = [value.meta["val"] for value in values[: 2 if back else 1]]
    plain = _plain(*numbers) and all(n.is_contiguous() for n in numbers) and values[-2] in (-1, numbers[0].dim() - 1)
    shape = numbers[0].shape
    if not plain or shape.numel() < LEAST_NUMBERS:
        return target
    own = ours.log_softmax_backward.default if back else ours.log_softmax.default
    return own if is_faster((target, shape), lambda: _ways_of_log_softmax(target, own, shape, back)) else target


def _ways_of_log_softmax(target: Any, own: Any, shape: torch.Size, back: bool) -> _Ways:
    given = (torch.full(shape, 0.01), torch.full(shape, -1.0)) if back else (torch.full(shape, 0.01),)
    last = torch.float32 if back else False
    return lambda: target(*given, -1, last), lambda: own(*given, -1, last)


def _lstm(target: Any, values: Sequence[Any]) -> Any:
    """A layer and its gradients are chosen together."""
    given = {argument.name: value for argument, value in zip(target._schema.arguments, values, strict=True)}
    back = target is aten.mkldnn_rnn_layer_backward.default
    inputs, weights = given["input"].meta["val"], given["weight2" if back else "weight1"].meta["val"]
    plain = _plain(inputs, weights)
    if not plain or given["mode"] != _LSTM or not given["train"] or given["reverse"] or given["batch_sizes"]:
        return target
    layer = (*inputs.shape, weights.shape[1], given["has_biases"])
    if not is_faster(("lstm", *layer), lambda: _ways_of_lstm(*layer)):
        return target
    return ours.lstm_layer_backward.default if back else ours.lstm_layer.default


def _ways_of_lstm(times: int, batch: int, inputs: int, cells: int, biases: bool) -> _Ways:
    sizes = [(4 * cells, inputs), (4 * cells, cells), *[(4 * cells,) if biases else (0,)] * 2]
    x, *weights = (torch.full(size, 0.01) for size in [(times, batch, inputs), *sizes])
    state = torch.zeros(batch, cells)

    def train(forward: Any, backward: Any) -> None:
        with torch.enable_grad():  # without it oneDNN keeps nothing for gradients
            output, hidden, last, kept = forward(
                x, *weights, state, state, False, [], _LSTM, cells, 1, biases, False, False, True
            )
            backward(
                x, *weights, state, state, output, hidden, last, output, None, None,
                False, _LSTM, cells, 1, biases, True, False, [], False, kept,
            )  # fmt: skip

    return (
        lambda: train(aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default),
        lambda: train(ours.lstm_layer.default, ours.lstm_layer_backward.default),
    )
