"""Work by hand beside a step, as in a plain loop: it is refused where it would fail, else told once, with the remedy."""

from __future__ import annotations

import functools
import sys
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from waterflow.errors import InvalidJobError
from waterflow.executor.program.ownership import optimizer_of, optimizers_here
from waterflow.partition.capture.optimizers import WATCHER, parameters_of
from waterflow.partition.capture.reasons import is_users_file

_NO_BACKWARD = (
    "the step that returned this loss has done backward and update already; leave out loss.backward() and "
    "optimizer.step(). Add penalties to the loss inside the step, clip gradients with Step(clip_grad_norm=), and sum them over "
    "batches with Step(accumulate=)"
)
_NO_SCALER = (
    "a step needs no GradScaler: it has done backward and update already when it returns its loss. Leave out scaler.scale(), "
    "scaler.step() and scaler.update(), and ask for mixed precision with Step(autocast=torch.bfloat16)"
)
_NONE = (
    "{} found no gradient, and {} nothing: the Step of these parameters has updated them already, and p.grad is None after it. "
)
_TOLD = {
    "step": _NONE.format("optimizer.step()", "changed")
    + "Leave out optimizer.step(); clip with Step(clip_grad_norm=) or Step(clip_grad_value=)",
    "norm": _NONE.format("clip_grad_norm_()", "clipped") + "Leave it out, and clip with Step(clip_grad_norm=)",
    "value": _NONE.format("clip_grad_value_()", "clipped") + "Leave it out, and clip with Step(clip_grad_value=)",
    "backward": "backward() of a sum with what a step returned differentiates the rest alone, and optimizer.step() behind it makes "
    "a second update by that: the step has done backward and update already. Add penalties to the loss inside the step, as "
    "Step(step=) does, and leave out backward() and optimizer.step()",
}


def _backward(*_: Any, **__: Any) -> None:
    raise InvalidJobError(_NO_BACKWARD)


def _no_state() -> None:
    """Stand in for ``__getstate__`` of a loss, which is then pickled as an ordinary tensor, without ``backward``."""


def handed_out(result: Any) -> Any:
    """Return a step's loss, or ``(loss, metrics)``, with a ``loss.backward()`` that raises an error with the remedy."""
    loss = result[0] if isinstance(result, tuple) else result
    loss.__dict__.update(backward=_backward, __getstate__=_no_state)
    return result


def watch(optimizer: Optimizer) -> None:
    """Refuse or tell what is done by hand with the parameters of a Step's ``optimizer``, from now on."""
    _look_on()
    optimizer._optimizer_step_pre_hooks.setdefault(WATCHER, _steps)  # type: ignore[call-overload]


class _InStep(threading.local):
    """Says that the calling thread is in an eager step, whose backward pass is its own."""

    now = False


in_step = _InStep()
_told: weakref.WeakKeyDictionary[Optimizer, set[str]] = weakref.WeakKeyDictionary()


def _tell(optimizer: Optimizer, what: str) -> None:
    told = _told.setdefault(optimizer, set())
    if what in told:
        return
    told.add(what)
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and not is_users_file(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(_TOLD[what], stacklevel=level)


def _has_gradients(parameters: Iterable[torch.Tensor]) -> bool:
    return any(p.grad is not None for p in parameters)


def _steps(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    # A step that runs eagerly calls ``step()`` with gradients, and a closure will compute some: neither is told.
    closure = args[1:] or kwargs.get("closure")  # the first one is the optimizer again
    if not closure and not _has_gradients(parameters_of(optimizer)):
        _tell(optimizer, "step")


def _clips(what: str, clip: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> Any:
    given = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
    if _has_gradients(given) or (optimizer := optimizer_of(given)) is None:
        return clip(given, *args, **kwargs)
    _tell(optimizer, what)  # torch itself fails where it clips no gradient by value


def _scales(scale: Callable[..., Any], scaler: GradScaler, outputs: Any) -> Any:
    # A scaled loss is another tensor, whose ``backward()`` would raise torch's own error, without rule and remedy.
    of_step = isinstance(outputs, torch.Tensor) and outputs.__dict__.get("backward") is _backward
    if of_step and scaler.is_enabled():
        raise InvalidJobError(_NO_SCALER)
    return scale(scaler, outputs)


def _scaler_steps(step: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    given = parameters_of(optimizer)
    if scaler.is_enabled() and not _has_gradients(given) and optimizer_of(given) is not None:
        raise InvalidJobError(_NO_SCALER)
    return step(scaler, optimizer, *args, **kwargs)


def _goes_back(backward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = args[0] if args else kwargs.get("tensors")
    roots = given if isinstance(given, (list, tuple)) else [given]
    behind = [] if in_step.now else [one for one in optimizers_here() if "backward" not in _told.get(one, ())]
    if behind and any(map(_is_sum_with_constant, roots)):
        behind = [one for one in behind if not _has_gradients(parameters_of(one))]
    else:
        behind.clear()
    result = backward(*args, **kwargs)
    for optimizer in behind:
        if _has_gradients(parameters_of(optimizer)):
            _tell(optimizer, "backward")
    return result


_SUMS = frozenset({"AddBackward0", "SubBackward0", "StackBackward0"})
_OF_NUMBERS = _SUMS | {"MulBackward0", "DivBackward0", "NegBackward0", "SumBackward0", "MeanBackward0"}


def _is_sum_with_constant(root: Any) -> bool:
    # What a step has returned has no gradient: of a sum with it no edge leads there, and nothing else of it is left in a graph.
    waiting = [root.grad_fn] if isinstance(root, torch.Tensor) and root.dim() == 0 else []
    seen = {*waiting}
    for node in waiting:  # ever more
        if node is None or not _makes_number(node):
            continue
        before = {one for one, _ in node.next_functions}
        if None in before and node.name() in _SUMS:
            return True
        waiting += before - seen
        seen |= before
    return False


def _makes_number(node: Any) -> bool:
    # Or numbers that are stacked, to be added up.
    most = 1 if node.name() == "StackBackward0" else 0
    return node.name() in _OF_NUMBERS and all(len(one.shape) <= most for one in node._input_metadata)


@functools.cache
def _look_on() -> None:
    # Users import functions that clip by their names: replaced is what they call within ``no_grad``.
    for what, function in (("norm", clip_grad._clip_grads_with_norm_), ("value", clip_grad.clip_grad_value_)):
        inner = function.__wrapped__  # type: ignore[attr-defined]
        for cell in function.__closure__ or ():  # type: ignore[attr-defined]
            if cell.cell_contents is inner:
                cell.cell_contents = functools.partial(_clips, what, inner)
    for holder, name, look in (
        (GradScaler, "scale", _scales),
        (GradScaler, "step", _scaler_steps),
        (torch.autograd, "backward", _goes_back),
    ):
        setattr(holder, name, _looking(look, getattr(holder, name)))


def _looking(look: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def looking(*args: Any, **kwargs: Any) -> Any:
        return look(function, *args, **kwargs)

    return looking
