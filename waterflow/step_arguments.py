"""Arguments of a Step: what is refused, and the device and the generator that follow from them."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from waterflow.errors import InvalidJobError
from waterflow.executor.engine import Engine
from waterflow.executor.program.eager import wants_model
from waterflow.executor.rng import thread_generator
from waterflow.job import why_no_step, why_not_called


def own_generator(given: torch.Generator | None, device: torch.device, engine: Engine | None) -> torch.Generator | None:
    """Return the generator that a step on ``device`` draws from; None for the process's default one.

    That is ``given``, unless it is None or the default one: then the calling thread's; inside an engine a new one that starts
    in the state of the process's generator.
    """
    if given is not None and given is not torch.default_generator:
        if given.device.type != device.type:
            raise InvalidJobError(
                f"the generator is on {given.device} and the model on {device}, whose numbers it cannot draw; pass "
                f"generator=torch.Generator({str(device)!r})"
            )
        return given
    if (own := thread_generator(device)) is not None:
        return own
    if engine is None:
        return given
    # A copy of the process's generator: lanes run steps in any order, and a shared one would hand out other numbers
    # from run to run.
    own = torch.Generator(device)
    own.set_state(torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device))
    return own


def device_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.device:
    """Return the device of the model, or of the optimizer's tensors if the model has none.

    Raises InvalidJobError for several devices, and for the meta device.
    """
    tensors = [*model.parameters(), *model.buffers()] or [p for group in optimizer.param_groups for p in group["params"]]
    devices = {tensor.device for tensor in tensors}
    if len(devices) > 1:
        raise InvalidJobError(f"the model lies on several devices ({sorted(map(str, devices))}); move it to one")
    device = next(iter(devices))
    if device.type == "meta":
        raise InvalidJobError("the model lies on the meta device and has no values; materialize it first")
    return device


def check_arguments(
    model: Any, optimizer: Any, accumulate: Any, loss: Any, step: Any, clips: dict[str, Any], autocast: Any
) -> None:
    """Raise InvalidJobError for arguments that no Step can be made of."""
    if not isinstance(model, nn.Module):
        raise InvalidJobError(f"model must be a torch.nn.Module; got {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        got = f"the class {optimizer.__name__}" if isinstance(optimizer, type) else type(optimizer).__name__
        raise InvalidJobError(
            f"optimizer must be a torch.optim.Optimizer; got {got}. Make it from this model's parameters: "
            "torch.optim.AdamW(model.parameters())"
        )
    if not isinstance(accumulate, int) or accumulate < 1:
        raise InvalidJobError(f"accumulate must be a positive integer; got {accumulate!r}")
    if loss is not None and step is not None:
        raise InvalidJobError("give loss= or step=, not both")
    if (rule := why_not_called("loss", loss) or why_not_called("step", step)) is not None:
        raise InvalidJobError(rule)
    for name, value in clips.items():
        number = isinstance(value, Real) and not isinstance(value, bool)
        if value is not None and not (number and value > 0):
            raise InvalidJobError(f"{name} must be a positive number or None; got {value!r}")
    if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
        raise InvalidJobError(f"autocast must be a data type such as torch.bfloat16, or None; got {autocast!r}")
    if (why := why_no_step(type(optimizer))) is not None:
        raise InvalidJobError(why)
    named = [*model.named_parameters(), *model.named_buffers()]
    # A lazy parameter gets its shape in the first forward pass; optimizer and capture need it before.
    if (lazy := next((name for name, tensor in named if is_lazy(tensor)), None)) is not None:
        raise InvalidJobError(
            f"{lazy!r} of the model has no shape yet: call the model once on a batch, before its optimizer is made; in a Job do "
            "so in the function that makes the model"
        )
    updated = [p for group in optimizer.param_groups for p in group["params"]]
    whole_step = step is not None or wants_model(loss)  # which may train what the model does not hold
    if not any(p.requires_grad for p in (*model.parameters(), *(updated if whole_step else ()))):
        raise InvalidJobError("the model has no parameter that requires a gradient: there is nothing to train")
    trained = set(map(id, updated))
    # A step that trains nothing would run for hours without an error. A loss with parameters of its own counts, as in
    # metric learning.
    held = [*model.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else ())]
    if not whole_step and held and not held[0].is_meta and not any(id(p) in trained for p in held):
        raise InvalidJobError(
            "the optimizer trains none of the model's parameters: nothing would change. Make it from this model's: "
            "torch.optim.AdamW(model.parameters())"
        )


def check_device(name: str, model: torch.device, engine: Engine | None) -> None:
    """Raise InvalidJobError if the model of a step is on another device than its engine."""
    if engine is not None and model != engine.device:
        raise InvalidJobError(
            f"model of step {name!r} is on {model}, its engine trains on {engine.device}; move the model with "
            f"model.to({str(engine.device)!r}) before making the step"
        )
