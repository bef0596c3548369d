"""The pieces of one training step that is to be captured, and the inputs of its graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from waterflow.errors import CaptureError

InputKind = Literal["parameter", "buffer", "state", "accumulator", "rate", "batch", "number", "flag", "external"]


@dataclass(frozen=True)
class GraphInput:
    """One positional input of a captured graph.

    ``name`` is the qualified parameter or buffer name; ``key`` the state entry, or the group entry of a number;
    ``group`` the optimizer's group; ``leaf`` the position among the batch's leaves, or among the tensors that the step
    reads and the model does not hold as parameters or buffers (``external``). A step raises its version counter ``raised``
    times, as the eager step does, and may have given it another size or other strides (``resized``).
    """

    kind: InputKind
    name: str = ""
    key: str = ""
    group: int = -1
    leaf: int = -1
    raised: int = 0
    resized: bool = False


@dataclass(frozen=True)
class StepSpec:
    """The pieces of one training step."""

    model: nn.Module
    compute_loss: Callable[[nn.Module, Any], Any]
    optimizer: Optimizer
    update: bool
    accumulate: int
    clip_norm: float | None
    clip_value: float | None
    autocast: torch.dtype | None
    device: torch.device
    early_updates: bool = True  # parameters may change before the step's end, where that saves memory
    # Parameters that have gradients from earlier calls, of which this is the last.
    gathered: frozenset[str] = frozenset()
    # More than 1: calls without an update add the gradients of one part of a batch to the sums, and an update computes none.
    shards: int = 1
    more_sums: int = 0  # tensors of each parameter's size that the job holds beside those that a call without an update reads

    @property
    def has_sums(self) -> bool:
        """Return True if gradients of several calls add up before an update."""
        return self.accumulate > 1 or self.shards > 1

    def trained(self) -> dict[str, nn.Parameter]:
        """Return, by name, the parameters of the model that the optimizer trains."""
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad and id(p) in trained}

    def updated(self) -> dict[str, nn.Parameter]:
        """Return, by name, the parameters that an update may change.

        These are the trained ones, and frozen ones that have a gradient from an earlier call, as in an eager loop.
        """
        trained = {id(p) for group in self.optimizer.param_groups for p in group["params"]}
        named = self.model.named_parameters()
        return {n: p for n, p in named if id(p) in trained and (p.requires_grad or n in self.gathered)}


def split_result(result: Any, numbers: bool = False) -> tuple[torch.Tensor, dict[str, Any] | None]:
    """Return what a step function returned as (scalar loss, metrics); metrics are None if it returned the loss alone.

    Raises CaptureError for anything else. Metrics must be tensors unless ``numbers`` is set.
    """
    metrics: dict[str, Any] | None = None
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], dict):
        result, metrics = result
    if not isinstance(result, torch.Tensor):
        raise CaptureError(
            f"the loss must be a tensor; the step returned {type(result).__name__}: return the loss, or (loss, {{name: tensor}})"
        )
    if result.numel() != 1:
        raise CaptureError(f"the loss must be a scalar; the step returned shape {tuple(result.shape)}: take its mean() or sum()")
    for name, value in (metrics or {}).items():
        if not numbers and not isinstance(value, torch.Tensor):
            raise CaptureError(f"metric {name!r} is a {type(value).__name__}, not a tensor; return it as one")
    return result, metrics
