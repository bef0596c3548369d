"""What a Step can be made of."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import fx, nn
from torch.nn.parameter import is_lazy

from waterflow import _C
from waterflow.errors import InvalidJobError, StepError, StepIndexError, StepValueError
from waterflow.executor.eager import wants_model
from waterflow.executor.engine import Engine, current_worker
from waterflow.executor.thread_generators import thread_generator
from waterflow.job import why_no_step
from waterflow.partition.argument_checks import CHECK
from waterflow.partition.surroundings import shown_line


def default_name(model: Any) -> str:
    """The model's class, and the trial of a study that trains it."""
    name, trial = type(model).__name__, current_worker()
    return name if trial is None else f"{name} of trial {trial}"


def own_generator(given: torch.Generator | None, device: torch.device, engine: Engine | None) -> torch.Generator | None:
    """The generator that a step on ``device`` draws from; None for the process's.

    ``given``, or where that is no other than the default one: the calling thread's; inside an engine a new one that stands
    where the process's stands.
    """
    if given is not None and given is not torch.default_generator:
        return given
    if (own := thread_generator(device)) is not None:
        return own
    if engine is None:
        return given
    on_cpu = engine.device.type == "cpu"
    own = torch.Generator(engine.device)
    own.set_state(torch.get_rng_state() if on_cpu else torch.cuda.get_rng_state(engine.device))
    return own


def device_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.device:
    """Where the model lies, or what is trained of one without tensors. Raises InvalidJobError for several devices."""
    tensors = [*model.parameters(), *model.buffers()] or [
        p for group in optimizer.param_groups for p in group["params"]
    ]
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
    """Raise InvalidJobError for what a Step cannot be made of."""
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
    if isinstance(loss, type):
        raise InvalidJobError(f"loss is the class {loss.__name__}; pass an object of it: {loss.__name__}()")
    for name, value in clips.items():
        number = isinstance(value, Real) and not isinstance(value, bool)
        if value is not None and not (number and value > 0):
            raise InvalidJobError(f"{name} must be a positive number or None; got {value!r}")
    if autocast is not None and not (isinstance(autocast, torch.dtype) and autocast.is_floating_point):
        raise InvalidJobError(f"autocast must be a data type such as torch.bfloat16, or None; got {autocast!r}")
    if (why := why_no_step(type(optimizer))) is not None:
        raise InvalidJobError(why)
    named = [*model.named_parameters(), *model.named_buffers()]
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
    held = [*model.parameters(), *(loss.parameters() if isinstance(loss, nn.Module) else ())]
    if not whole_step and held and not held[0].is_meta and not any(id(p) in trained for p in held):
        raise InvalidJobError(
            "the optimizer trains none of the model's parameters: nothing would change. Make it from this model's: "
            "torch.optim.AdamW(model.parameters())"
        )


def node_error(step: str, node: fx.Node, error: _C.NodeError) -> StepError:
    """The error of an operation that failed while a step ran."""
    where = f" ({shown_line(node.meta['line'])})" if "line" in node.meta else ""
    if node.target is CHECK:
        return StepValueError(f"step {step!r}: {str(error).strip()}{where}")
    phase = node.meta.get("phase", "")
    kind = StepIndexError if isinstance(error, _C.NodeIndexError) else StepError
    return kind(f"{node.target} in the {phase} of step {step!r} failed: {str(error).strip()}{where}")


def check_device(name: str, model: torch.device, engine: Engine | None) -> None:
    """Raise InvalidJobError where the model of a step is on another device than its engine."""
    if engine is not None and model != engine.device:
        raise InvalidJobError(
            f"model of step {name!r} is on {model}, its engine trains on {engine.device}; move the model with "
            f"model.to({str(engine.device)!r}) before making the step"
        )
