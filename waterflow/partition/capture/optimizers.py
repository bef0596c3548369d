"""The optimizers whose updates a captured step can contain, and the state and settings that these updates read."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.optim.optimizer import Optimizer, _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from waterflow.errors import CaptureError
from waterflow.partition.capture.fake_rules import is_update
from waterflow.partition.capture.spec import GraphInput
from waterflow.partition.guards.code_refs import is_torchs_function

# Optimizers whose whole state can be laid out before their first step.
FUSED_OPTIMIZERS: dict[type[Optimizer], tuple[str, ...]] = {
    torch.optim.SGD: ("momentum_buffer",),
    torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"),
}
# Group entries that are numbers in the update; they may change from step to step without a new capture.
GROUP_NUMBERS: dict[str, tuple[str, int]] = {
    "lr": ("lr", -1),
    "weight_decay": ("weight_decay", -1),
    "momentum": ("momentum", -1),
    "dampening": ("dampening", -1),
    "beta1": ("betas", 0),
    "beta2": ("betas", 1),
    "eps": ("eps", -1),
}
# Settings that are read at each step, and those that matter by whether they are zero: all others change the graph.
READ_EACH_STEP = frozenset(entry for entry, _ in GROUP_NUMBERS.values())
BY_ZERO = frozenset({"momentum"})
FIRST_STEP_FLAG = "is_first_step"
WATCHER = -1  # the key of our own hook of an optimizer's step(), which changes nothing; torch counts from 0


def state_keys(optimizer: Optimizer, group: dict[str, Any]) -> tuple[str, ...]:
    """Return the names of a parameter's entries in the optimizer state, for a parameter of this group."""
    if isinstance(optimizer, torch.optim.SGD):
        return ("momentum_buffer",) if group["momentum"] != 0 else ()
    keys = FUSED_OPTIMIZERS[type(optimizer)]
    return keys if group["amsgrad"] else keys[:-1]


def hooks_of(optimizer: Optimizer) -> Iterator[dict[Any, Any]]:
    """Yield the dicts of hooks that the optimizer's ``step()`` calls: its own, and those of all optimizers."""
    yield from (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    yield from (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)


def check_hooks(optimizer: Optimizer) -> None:
    """Raise CaptureError for hooks of ``step()``, or for a ``step()`` that is not torch's: a captured update calls neither."""
    kind = type(optimizer)
    if any(hooks.keys() - {WATCHER} for hooks in hooks_of(optimizer)):
        raise CaptureError(f"the {kind.__name__} has step hooks, which must run every step; do that after the step")
    own = [kind.step, vars(optimizer).get("step", kind.step)]  # schedulers wrap the instance's in a function of torch's
    if kind in FUSED_OPTIMIZERS and not all(map(is_torchs_function, own)):
        raise CaptureError(
            f"step() of the {kind.__name__} was replaced, which must run every step; clip gradients with Step(clip_grad_norm=), "
            "and do the rest after the step"
        )


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise CaptureError for an optimizer whose update cannot be part of a captured step."""
    kind = type(optimizer)
    if kind not in FUSED_OPTIMIZERS:
        known = ", ".join(sorted(k.__name__ for k in FUSED_OPTIMIZERS))
        raise CaptureError(f"the update of {kind.__name__} is not captured; {known} are")
    check_hooks(optimizer)
    for number, group in enumerate(optimizer.param_groups):
        if group.get("fused") is False or group.get("foreach") is not None:
            form = "foreach" if group.get("foreach") else "single-tensor"
            raise CaptureError(f"parameter group {number} asks for the {form} form of {kind.__name__}; leave that out")
        if group.get("differentiable"):
            raise CaptureError(f"parameter group {number} asks for a differentiable update; leave that out")


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return all parameters that the optimizer updates, in the order of its groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def captured_form(optimizer: Optimizer) -> contextlib.AbstractContextManager[None]:
    """Make ``step()`` compute in the fused form of a captured update, for the block.

    Groups whose user chose a form, or that torch cannot update in this form here, stay as they are.
    """
    groups = [group for group in optimizer.param_groups if _can_be_fused(optimizer, group)]
    return _fused(groups) if groups else contextlib.nullcontext()


@contextlib.contextmanager
def _fused(groups: list[dict[str, Any]]) -> Iterator[None]:
    for group in groups:
        group["fused"] = True
    try:
        yield
    finally:
        for group in groups:
            group["fused"] = None


def _can_be_fused(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    if type(optimizer) not in FUSED_OPTIMIZERS or group.get("differentiable"):
        return False
    if group.get("fused") is not None or group.get("foreach") is not None:
        return False
    moved = [p for p in group["params"] if p.grad is not None]
    begun = {optimizer.state.get(p, {}).get("momentum_buffer") is not None for p in moved}
    # torch's fused SGD takes momentum buffers for all parameters of a group, or for none.
    half_begun = bool(group.get("momentum")) and len(begun) > 1
    return not half_begun and all(has_fused_form(p) and not p.grad.is_sparse for p in moved)


def has_fused_form(parameter: torch.Tensor) -> bool:
    """Return whether a fused update can change this parameter: it must be strided, real, and without gaps in memory."""
    if parameter.layout != torch.strided or not parameter.is_floating_point():
        return False
    # Fused kernels walk raw memory, and would write into the gaps.
    extent = 1 + sum((n - 1) * s for n, s in zip(parameter.shape, parameter.stride()))
    return extent == parameter.numel() or parameter.is_contiguous()


def update_groups(graph: fx.Graph, inputs: Sequence[GraphInput], group_names: Sequence[Sequence[str]]) -> dict[str, int]:
    """Return the optimizer group of each update node, keyed by the node's name.

    ``inputs`` describe the graph's placeholders; ``group_names`` lists the names of each group's parameters.
    """
    group_of = {name: g for g, names in enumerate(group_names) for name in names}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    names = {node: given.name for node, given in zip(placeholders, inputs) if given.kind == "parameter"}
    groups = {}
    for node in graph.nodes:
        if node.op == "call_function" and is_update(node.target):
            parameter: Any = node.args[0][0]  # type: ignore[index]
            while parameter not in names:  # the forward pass has changed it in place
                parameter = parameter.args[0]
            groups[node.name] = group_of[names[parameter]]
    return groups


def fake_optimizer(real: Optimizer, members: Iterable[Any], rates: Iterable[Any], state: Mapping[Any, Any]) -> Optimizer:
    """Return an optimizer of the same class and settings, in its fused form, over other tensors.

    ``members`` has each group's parameters, ``rates`` each group's learning rate, ``state`` each parameter's entries.
    """
    given = zip(real.param_groups, members, rates)
    groups = [dict(group, params=params, lr=rate, fused=True, foreach=None) for group, params, rate in given]
    # Without the instance's own step: a scheduler wraps it to count the calls, and a trace is none.
    fake = Optimizer.__new__(type(real))
    fake.__dict__ = {name: value for name, value in vars(real).items() if name != "step"}
    vars(fake).update(param_groups=groups, state=defaultdict(dict, state), _need_device_dtype_check_for_fused=False)
    return fake
