"""What users go on doing by hand beside a step that has done it already; told in a sentence with the remedy."""

from __future__ import annotations

import functools
import warnings
import weakref
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from waterflow.errors import InvalidJobError
from waterflow.executor import updated_elsewhere
from waterflow.partition.optimizers import WATCHER

_NO_BACKWARD = (
    "the step that returned this loss has done backward and update already; leave out loss.backward() and "
    "optimizer.step(). Clip gradients with Step(clip_grad_norm=), and sum them over batches with Step(accumulate=)"
)
_NO_SCALER = (
    "a step needs no GradScaler: it has done backward and update already when it returns its loss. Leave out scaler.scale(), "
    "scaler.step() and scaler.update(), and ask for mixed precision with Step(autocast=torch.bfloat16)"
)
_NO_STEP = (
    "optimizer.step() found no gradient, and changed nothing: this optimizer's Step has updated the parameters already, and "
    "p.grad is None after it. Leave out optimizer.step(); clip with Step(clip_grad_norm=) or Step(clip_grad_value=)"
)
_NO_CLIP = (
    "clip_grad_norm_() found no gradient, and clipped nothing: the Step of these parameters has updated them already, and p.grad "
    "is None after it. Leave it out, and clip with Step(clip_grad_norm=)"
)


def _backward(*_: Any, **__: Any) -> None:
    raise InvalidJobError(_NO_BACKWARD)


def _no_state() -> None:
    """A loss is pickled as the ordinary tensor that it is."""


def handed_out(result: Any) -> Any:
    """A step's loss, or ``(loss, metrics)``, whose ``loss.backward()`` says that it was done."""
    loss = result[0] if isinstance(result, tuple) else result
    loss.__dict__.update(backward=_backward, __getstate__=_no_state)
    return result


def watch(optimizer: Optimizer) -> None:
    """Tell, once, whoever calls ``step()`` of a Step's optimizer by hand and finds no gradients there."""
    _refuse_scaling()
    _look_at_clipping()
    optimizer._optimizer_step_pre_hooks.setdefault(WATCHER, _look)  # type: ignore[call-overload]


_told: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_told_of_clipping: weakref.WeakSet[Optimizer] = weakref.WeakSet()


def _look(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """The hook: a step that runs eagerly has gradients here, and a closure will make some."""
    if any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
        return
    closure = args[1:] or kwargs.get("closure")  # the first one is the optimizer again
    if not closure and optimizer not in _told:
        _told.add(optimizer)
        warnings.warn(_NO_STEP, stacklevel=3)


@functools.cache
def _refuse_scaling() -> None:
    """A scaled loss is another tensor, without a backward pass: torch's own error for it names neither rule nor remedy."""
    scale = GradScaler.scale

    @functools.wraps(scale)
    def checked(self: GradScaler, outputs: Any) -> Any:
        of_step = isinstance(outputs, torch.Tensor) and outputs.__dict__.get("backward") is _backward
        if of_step and self.is_enabled():
            raise InvalidJobError(_NO_SCALER)
        return scale(self, outputs)

    GradScaler.scale = checked  # type: ignore[method-assign]


@functools.cache
def _look_at_clipping() -> None:
    """Tell, once, whoever clips by hand behind a step: in what ``clip_grad_norm_`` calls, under whatever name it was imported."""
    clip = clip_grad._clip_grads_with_norm_

    @functools.wraps(clip)
    def looking(parameters: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(parameters, list) and all(p.grad is None for p in parameters):
            optimizer = updated_elsewhere.optimizer_of(parameters)
            if optimizer is not None and optimizer not in _told_of_clipping:
                _told_of_clipping.add(optimizer)
                warnings.warn(_NO_CLIP, stacklevel=4)
        clip(parameters, *args, **kwargs)

    clip_grad._clip_grads_with_norm_ = looking
