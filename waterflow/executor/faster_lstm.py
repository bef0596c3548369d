"""Layers of LSTM cells by kernels of our own, where bits may differ and they are measured to be faster here."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

REPEATS = 3
GAIN = 1.1
_LSTM = 2  # torch's number of that kind of layer

_Layer = tuple[int, int, int, int, bool, int]  # steps of time, batch, inputs, cells, biases, threads
_found: dict[_Layer, bool] = {}
_one_at_a_time = threading.Lock()


def lstm_form(target: Any, values: Sequence[Any]) -> Any:
    """The operator to call in the place of ``target``, a layer or its gradients; both are chosen together."""
    given = {argument.name: value for argument, value in zip(target._schema.arguments, values, strict=True)}
    back = target is aten.mkldnn_rnn_layer_backward.default
    inputs, weights = given["input"].meta["val"], given["weight2" if back else "weight1"].meta["val"]
    plain = all(t.device.type == "cpu" and t.dtype == torch.float32 for t in (inputs, weights))
    if not plain or given["mode"] != _LSTM or not given["train"] or given["reverse"] or given["batch_sizes"]:
        return target
    layer = (*inputs.shape, weights.shape[1], given["has_biases"], torch.get_num_threads())
    with _one_at_a_time:
        if layer not in _found:
            _found[layer] = _is_faster(layer)
        if not _found[layer]:
            return target
    return torch.ops.waterflow.lstm_layer_backward.default if back else torch.ops.waterflow.lstm_layer.default


def _is_faster(layer: _Layer) -> bool:
    times, batch, inputs, cells, biases, _ = layer
    sizes = [(4 * cells, inputs), (4 * cells, cells), *[(4 * cells,) if biases else (0,)] * 2]
    x, *weights = (torch.full(size, 0.01) for size in [(times, batch, inputs), *sizes])
    state = torch.zeros(batch, cells)
    best = [float("inf")] * 2
    ways = [
        (aten.mkldnn_rnn_layer.default, aten.mkldnn_rnn_layer_backward.default),
        (torch.ops.waterflow.lstm_layer.default, torch.ops.waterflow.lstm_layer_backward.default),
    ]
    with torch.enable_grad():  # without it oneDNN keeps nothing for gradients
        for _ in range(REPEATS):
            for number, (forward, backward) in enumerate(ways):
                begin = time.perf_counter()
                _train(forward, backward, x, weights, state, biases)
                best[number] = min(best[number], time.perf_counter() - begin)
    return best[1] * GAIN < best[0]


def _train(forward: Any, backward: Any, x: Tensor, weights: Sequence[Tensor], state: Tensor, biases: bool) -> None:
    cells = state.shape[1]
    output, hidden, last, kept = forward(
        x, *weights, state, state, False, [], _LSTM, cells, 1, biases, False, False, True
    )
    backward(
        x, *weights, state, state, output, hidden, last, output, None, None,
        False, _LSTM, cells, 1, biases, True, False, [], False, kept,
    )  # fmt: skip
