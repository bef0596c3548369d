"""Dropout rates as inputs: trials that differ in nothing else share one capture.

A rate reaches the graph as a constant. While a step is traced, each dropout module shows a stand-in of its own in the
place of its rate; the constants that come out as ``1 - stand-in`` (or the stand-in itself) are then known to be that
module's, and become numbers that are filled in when the capture is bound. A stand-in notices any arithmetic that the
model's own code does with it: what came of that could not be recognized, so the rates then belong to the key.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from waterflow.errors import CaptureError

aten = torch.ops.aten

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)

# The arguments in which a rate may turn up, and whether it is the share that is kept or the one that is dropped.
_PLACES: dict[tuple[Any, str], str] = {
    (aten.bernoulli_.float, "p"): "keep",
    (aten.div_.Scalar, "other"): "keep",
    (aten.native_dropout.default, "p"): "drop",
}
# Stand-ins are exact in binary, and so is one less each of them: both are recognized by equality.
_FIRST, _APART = 0.25, 2.0**-24


class RatesMatter(CaptureError):
    """The model computes with its dropout rates: captures are shared only where these are equal."""


def has_free_rate(module: nn.Module) -> bool:
    """Whether the module is a plain dropout whose rate may be any number between 0 and 1."""
    return type(module) in DROPOUTS and module.training and isinstance(module.p, float) and 0.0 < module.p < 1.0


def rates(model: nn.Module) -> tuple[float, ...]:
    """The free rates of a model, in the order of its modules."""
    return tuple(module.p for module in model.modules() if has_free_rate(module))


class StandIn(float):
    """A rate that notices what is done with it."""

    touched = False

    def __float__(self) -> float:
        self.touched = True
        return float.__add__(self, 0.0)


def _noticing(name: str) -> Callable[..., Any]:
    method = getattr(float, name)

    def call(self: StandIn, *others: Any) -> Any:
        # Dropout itself asks whether its rate lies between 0 and 1, which every free rate does.
        if not (name in _COMPARISONS and others[0] in (0, 1)):
            self.touched = True
        return method(self, *others)

    return call


_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "divmod", "pow")
for _name in (
    *_COMPARISONS, *(f"__{n}__" for n in _ARITHMETIC), *(f"__r{n}__" for n in _ARITHMETIC),
    "__neg__", "__pos__", "__abs__", "__int__", "__bool__", "__round__", "__trunc__", "__floor__", "__ceil__",
    "__str__", "__repr__", "__format__", "hex", "as_integer_ratio", "is_integer",
):  # fmt: skip
    setattr(StandIn, _name, _noticing(_name))
StandIn.__hash__ = float.__hash__  # type: ignore[method-assign]


@contextlib.contextmanager
def standing_in(model: nn.Module) -> Iterator[dict[str, StandIn]]:
    """Within, each free rate of ``model`` is a stand-in; yields them by module name."""
    found = {name: module for name, module in model.named_modules() if has_free_rate(module)}
    before = {name: module.p for name, module in found.items()}
    shown = {name: StandIn(_FIRST + i * _APART) for i, name in enumerate(found)}
    try:
        for name, module in found.items():
            module.__dict__["p"] = shown[name]
        yield shown
    finally:
        for name, module in found.items():
            module.__dict__["p"] = before[name]


def find_rates(graph: fx.Graph, shown: dict[str, StandIn]) -> dict[tuple[str, str], tuple[str, str]]:
    """Where each rate turned up: (node name, argument name) to (module name, ``keep`` or ``drop``).

    Raises RatesMatter where a stand-in was computed with, or turned up in another place.
    """
    if any(stand_in.touched for stand_in in shown.values()):
        raise RatesMatter("the model computes with its dropout rates")
    meaning: dict[float, tuple[str, str]] = {}
    for name, stand_in in shown.items():
        value = float.__add__(stand_in, 0.0)
        meaning[value] = (name, "drop")
        meaning[1.0 - value] = (name, "keep")
    places = {}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        for argument, value in [*zip(names, node.args), *node.kwargs.items()]:
            for number in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(number, float) or (plain := float.__add__(number, 0.0)) not in meaning:
                    continue
                module, share = meaning[plain]
                if _PLACES.get((node.target, argument)) != share:
                    raise RatesMatter(f"a dropout rate turns up in {node.target}")
                places[node.name, argument] = (module, share)
    return places
