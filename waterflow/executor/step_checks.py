"""What a Step can be made of."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from waterflow.errors import InvalidJobError


def device_of(model: nn.Module) -> torch.device:
    """Where the model lies. Raises InvalidJobError for several devices, or none."""
    devices = {p.device for p in model.parameters()} | {b.device for b in model.buffers()}
    if len(devices) > 1:
        raise InvalidJobError(f"the model lies on several devices ({sorted(map(str, devices))}); move it to one")
    device = next(iter(devices))
    if device.type == "meta":
        raise InvalidJobError("the model lies on the meta device and has no values; materialize it first")
    return device


def check_arguments(model: Any, optimizer: Any, accumulate: Any, loss: Any, step: Any) -> None:
    """Raise InvalidJobError for what a Step cannot be made of."""
    if not isinstance(model, nn.Module):
        raise InvalidJobError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InvalidJobError(f"optimizer must be a torch.optim.Optimizer; got {type(optimizer).__name__}")
    if not isinstance(accumulate, int) or accumulate < 1:
        raise InvalidJobError(f"accumulate must be a positive integer; got {accumulate!r}")
    if loss is not None and step is not None:
        raise InvalidJobError("give loss= or step=, not both")
    if not any(p.requires_grad for p in model.parameters()):
        raise InvalidJobError("the model has no parameter that requires a gradient: there is nothing to train")
