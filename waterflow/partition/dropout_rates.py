"""Dropout rates as inputs: trials that differ in nothing else share one capture.

A rate reaches the graph as a constant. While a step is traced, each dropout module computes with a stand-in of its
own in the place of its rate; the constants that come out as ``1 - stand-in`` (or the stand-in itself) are then known
to be that module's, and become numbers that are filled in when the capture is bound. Where the model's own code
reads a rate, its value could turn up anywhere: the rates then belong to the key.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from waterflow.errors import CaptureError
from waterflow.partition.exact import exact
from waterflow.partition.fake_rules import TracingMode

aten = torch.ops.aten

DROPOUTS: dict[type[nn.Module], Callable[..., torch.Tensor]] = {
    nn.Dropout: F.dropout, nn.Dropout1d: F.dropout1d, nn.Dropout2d: F.dropout2d, nn.Dropout3d: F.dropout3d,
}  # fmt: skip

# The arguments in which a rate may turn up, and whether it is the share that is kept or the one that is dropped.
_PLACES: dict[tuple[Any, str], str] = {
    (aten.bernoulli_.float, "p"): "keep",
    (aten.div_.Scalar, "other"): "keep",
    (aten.native_dropout.default, "p"): "drop",
}
# Numbers that nobody writes down, recognized by equality.
_FIRST, _APART = 0.37139067635410372, 2.0**-30


class RatesMatter(CaptureError):
    """The model computes with its dropout rates: captures are shared only where these are equal."""


def has_free_rate(module: nn.Module) -> bool:
    """Whether the module is a plain dropout whose rate may be any number between 0 and 1."""
    if type(module) not in DROPOUTS or not module.training:
        return False
    rate = module.__dict__.get("p")
    return isinstance(rate, float) and 0.0 < rate < 1.0


def rates(model: nn.Module) -> tuple[Hashable, ...]:
    """Keys of the free rates of a model, in the order of its modules."""
    return tuple(exact(module.__dict__["p"]) for module in model.modules() if has_free_rate(module))


@dataclass
class StandIns:
    """What was shown in the place of each module's rate, by module name; which of them were called, or read."""

    shown: dict[str, float] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    read: bool = False


def _is_traced_here() -> bool:
    """Whether the step is traced on this thread; others see its modules as they are.

    A backward pass on a GPU's tensors, in which ``checkpoint`` calls modules again, runs on a thread of autograd's.
    """
    return any(isinstance(mode, TracingMode) for mode in _get_current_dispatch_mode_stack())


class _NoticedRate:
    """``p`` of all dropout modules while a step is traced: notices when a module's rate is read."""

    def __init__(self, modules: set[int], stand_ins: StandIns) -> None:
        self._modules, self._stand_ins = modules, stand_ins

    def __get__(self, module: Any, owner: Any = None) -> Any:
        if module is None:
            return self
        if id(module) in self._modules and _is_traced_here():
            self._stand_ins.read = True
            raise RatesMatter("the model computes with its dropout rates")
        try:
            return module.__dict__["p"]
        except KeyError:
            raise AttributeError("p") from None

    def __set__(self, module: Any, value: Any) -> None:
        module.__dict__["p"] = value


PASSING = _NoticedRate  # the type of what stands in torch's own classes only while a step is traced


def _forward(module: Any, name: str, stand_ins: StandIns, x: torch.Tensor) -> torch.Tensor:
    rate = module.__dict__["p"]
    if _is_traced_here():
        stand_ins.called.add(name)
        rate = stand_ins.shown[name]
    return DROPOUTS[type(module)](x, rate, module.training, module.inplace)


def stands_in(value: Any) -> bool:
    """Whether a module's attribute is only there while its step is traced."""
    return isinstance(value, functools.partial) and value.func is _forward


@contextlib.contextmanager
def standing_in(model: nn.Module) -> Iterator[StandIns]:
    """Within, each dropout of ``model`` that has a free rate computes with a stand-in. One at a time in a process."""
    found = {name: module for name, module in model.named_modules() if has_free_rate(module)}
    stand_ins = StandIns({name: _FIRST + i * _APART for i, name in enumerate(found)})
    if not found:
        yield stand_ins
        return
    _DropoutNd.p = _NoticedRate({id(m) for m in found.values()}, stand_ins)  # type: ignore[assignment]
    for name, module in found.items():
        module.__dict__["forward"] = functools.partial(_forward, module, name, stand_ins)
    try:
        yield stand_ins
    finally:
        for module in found.values():
            module.__dict__.pop("forward", None)
        del _DropoutNd.p


def find_rates(graph: fx.Graph, stand_ins: StandIns) -> dict[tuple[str, str], tuple[str, str]]:
    """Where each rate turned up: (node name, argument name) to (module name, ``keep`` or ``drop``).

    Raises RatesMatter where a rate was read, or a stand-in turned up in another place, or nowhere.
    """
    if stand_ins.read:
        raise RatesMatter("the model computes with its dropout rates")
    meaning: dict[float, tuple[str, str]] = {}
    for name, value in stand_ins.shown.items():
        meaning[value] = (name, "drop")
        meaning[1.0 - value] = (name, "keep")
    places = {}
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        names = [argument.name for argument in node.target._schema.arguments]
        for argument, value in [*zip(names, node.args), *node.kwargs.items()]:
            for number in value if isinstance(value, (list, tuple)) else (value,):
                if not isinstance(number, float) or number not in meaning:
                    continue
                module, share = meaning[number]
                if _PLACES.get((node.target, argument)) != share:
                    raise RatesMatter(f"a dropout rate turns up in {node.target}")
                places[node.name, argument] = (module, share)
    lost = stand_ins.called - {module for module, _ in places.values()}
    if lost:
        raise RatesMatter(f"the rate of {min(lost)} is not to be found in the graph")
    return places
