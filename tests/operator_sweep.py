"""Operators with a gradient, as torch's own tests list them: each trains a small model eagerly and with ``waterflow.Step``.

The model's parameters are the sample's tensors that want a gradient, the batch a scale of theirs and the sample's other tensors.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from tests.program_campaign import forget
from tests.support import Trained, same_bits, train_eager, train_step

STEPS = 3
MOST = 30  # of an operator's samples; those that are run are spread among them
MOST_REFUSED = 0.05  # of the operators


class Operands(nn.Module):
    """A parameter for each tensor of a sample that wants a gradient."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.held = nn.ParameterList(nn.Parameter(one.detach().clone()) for one in tensors)


@dataclass
class Case:
    """One sample of an operator as a training program."""

    operator: str
    number: int
    make: Callable[[], tuple[nn.Module, Optimizer]]
    batches: list[Any]
    step: Callable[[nn.Module, Any], Any]

    def outcome(self, train: Callable[..., Any]) -> Any:
        """What training leaves behind, or the error that it ends with."""
        try:
            return train(self.make, self.batches, step=self.step)
        except Exception as error:
            return error

    def differences(self) -> tuple[list[str], str]:
        """The tensors that differ between both ways, and why it ran eagerly; raises what both ways raise."""
        eager = self.outcome(train_eager)
        mine = self.outcome(train_step)
        if isinstance(eager, Exception):
            if not isinstance(mine, type(eager)):
                return [f"eager raises {eager!r:.100}, captured {mine if isinstance(mine, Exception) else 'nothing'!r:.100}"], ""
            raise eager
        if isinstance(mine, Exception):
            return [f"captured raises {type(mine).__name__}: {mine!s:.200}"], ""
        differing = _differing(mine, eager)
        if differing and any(_differing(self.outcome(train_eager), eager) for _ in range(10)):
            raise RuntimeError("two eager runs differ")
        return differing, (mine.step.opaque_reason or "").partition(" (/")[0]  # without the line, which is this file's


def _differing(mine: Trained, other: Trained) -> list[str]:
    one, two = mine.tensors(), other.tensors()
    return [name for name in {**one, **two} if not same(one.get(name), two.get(name))]


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Equal bits; any NaN is equal to any."""
    if one is None or other is None:
        return one is other
    if one.is_floating_point() and one.dtype == other.dtype:
        one, other = (torch.where(tensor.isnan(), torch.full_like(tensor, math.nan), tensor) for tensor in (one, other))
    return same_bits(one, other)


def cases(operator: Any, count: int) -> Iterator[Case]:
    """``count`` samples of an operator, as programs."""
    torch.manual_seed(0)
    every = operator.sample_inputs("cpu", torch.float32, requires_grad=True)
    samples = [one for one in itertools.islice(every, MOST) if all(tensor.layout == torch.strided for tensor in _tensors(one))]
    chosen = sorted({round(i * (len(samples) - 1) / max(1, count - 1)) for i in range(count)}) if samples else []
    for number in chosen:
        yield _case(operator, number, samples[number])


def _tensors(sample: Any) -> list[torch.Tensor]:
    leaves = pytree.tree_leaves((sample.input, sample.args, sample.kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


Filled = Callable[[list[torch.Tensor]], Any]  # a value, given its tensors


def _filler(value: Any, found: list[torch.Tensor]) -> Filled:
    # Plain functions: a captured step may read these, and no objects of the sample's own types.
    if isinstance(value, torch.Tensor):
        number = len(found)
        found.append(value)
        return lambda given: given[number]
    if type(value) in (list, tuple):
        kind, parts = type(value), [_filler(one, found) for one in value]
        return lambda given: kind([part(given) for part in parts])
    if type(value) is dict:
        entries = {key: _filler(one, found) for key, one in value.items()}
        return lambda given: {key: entry(given) for key, entry in entries.items()}
    return lambda given: value


def _case(operator: Any, number: int, sample: Any) -> Case:
    found: list[torch.Tensor] = []
    first, args, kwargs = (_filler(value, found) for value in (sample.input, tuple(sample.args), dict(sample.kwargs)))
    wanted = [one.requires_grad for one in found]
    values = [one for one in found if one.requires_grad]
    given = [one for one in found if not one.requires_grad]
    function, process = operator.op, sample.output_process_fn_grad

    def step(model: Any, batch: Any) -> torch.Tensor:
        scale, *tensors = batch
        trained, others = iter(model.held), iter(tensors)
        filled = [next(trained) * scale if wants else next(others) for wants in wanted]
        made = process(function(first(filled), *args(filled), **kwargs(filled)))
        parts = [one for one in pytree.tree_leaves(made) if isinstance(one, torch.Tensor) and one.requires_grad]
        parts = [torch.view_as_real(one.resolve_conj()) if one.is_complex() else one for one in parts]
        return sum((one.float().square().sum() for one in parts), torch.zeros(()))

    def make() -> tuple[nn.Module, Optimizer]:
        model = Operands(values)
        return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    scales = (1.0, 0.96875, 0.9375)[:STEPS]
    return Case(operator.formatted_name, number, make, [(torch.tensor(scale), *given) for scale in scales], step)


@dataclass
class Sweep:
    """What became of the operators."""

    run_both_ways: int = 0  # operators
    differing: dict[str, list[str]] = field(default_factory=dict)  # by operator: samples
    refused: dict[str, str] = field(default_factory=dict)  # at least one sample: why
    left_out: dict[str, str] = field(default_factory=dict)  # every sample: why

    def run(self, samples: int, only: str = "") -> None:
        """Train with so many samples of each operator whose name has ``only`` in it."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for operator in op_db:
                if (
                    only in operator.formatted_name
                    and operator.supports_autograd
                    and operator.supports_dtype(torch.float32, "cpu")
                ):
                    self._try(operator.formatted_name, cases(operator, samples))
                    forget()

    def _try(self, name: str, samples: Iterator[Case]) -> None:
        error, ran = "no sample of dense tensors", False
        for case in samples:
            try:
                differing, reason = case.differences()
            except Exception as raised:
                error = f"{type(raised).__name__}: {raised!s:.80}"
                continue
            ran = True
            if differing:
                self.differing.setdefault(name, []).append(f"sample {case.number}: {', '.join(differing[:3])}")
            if reason:
                self.refused.setdefault(name, f"sample {case.number}: {reason}")
        self.run_both_ways += ran
        if not ran:
            self.left_out[name] = error
