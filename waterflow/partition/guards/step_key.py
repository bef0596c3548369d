"""Keys under which captures are found again: the form of a batch, and everything else that a step is made of."""

from __future__ import annotations

import contextlib
import enum
import operator
import struct
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from waterflow import _C
from waterflow.errors import CaptureError, InvalidJobError
from waterflow.partition.capture.optimizers import BY_ZERO, READ_EACH_STEP, check_hooks, has_fused_form
from waterflow.partition.capture.spec import StepSpec
from waterflow.partition.guards.batch_reads import free_places
from waterflow.partition.guards.beside_leaves import Beside, held_beside
from waterflow.partition.guards.cache_key import Fingerprint, tensor_key
from waterflow.partition.guards.guarded_places import exact

_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})
_FLAT = frozenset({torch.Tensor, int, float, str, bool})
_NUMBERS = "biufc"  # kinds of NumPy's types
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, enum.Enum)


def peculiarity(tensor: torch.Tensor) -> str | None:
    """Return why a graph cannot take this tensor as plain memory; None for a plain tensor."""
    if type(tensor) not in _PLAIN:
        return f"is a {type(tensor).__name__}, whose class may compute in ways of its own"
    if tensor.layout != torch.strided:
        return f"has the layout {tensor.layout}"
    for name in ("nested", "quantized", "meta"):
        if getattr(tensor, f"is_{name}"):
            return f"is {name}"
    return None


def check_plain(tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise CaptureError for a tensor that is no plain memory; each comes with its description."""
    for what, tensor in tensors:
        why = peculiarity(tensor)
        if why is not None:
            raise CaptureError(f"{what} {why}")


def check_unchanged(batch: Any, spec: pytree.TreeSpec | None, leaves: Sequence[Any], beside: Beside) -> None:
    """Raise CaptureError where a step has changed the containers of its batch, which a captured step never touches.

    ``spec``, ``leaves`` and ``beside`` are the structure, the leaves and the attributes that the batch was built with.
    """
    if spec is None:
        return  # a tuple
    now, form = pytree.tree_flatten(batch)
    if form != spec or any(map(operator.is_not, now, leaves)) or held_beside(batch, spec, now) != beside:
        raise CaptureError("a step changes what its batch consists of; let it change a copy, as dict(batch) is one")


def flat_leaves(batch: Any) -> list[Any] | None:
    """Return the leaves of a flat tuple, list or dict of tensors and numbers; None for other batches."""
    # Most batches are flat; pytree takes longer.
    items = batch.values() if type(batch) is dict else batch
    return list(items) if type(batch) in (tuple, list, dict) and _FLAT.issuperset(map(type, items)) else None


def of_torch(batch: Any) -> Any:
    """Return the batch with NumPy's arrays as tensors over the same memory, and NumPy's numbers as Python's.

    Models and losses that waterflow calls itself get it so, as from a loader of torch's. An array that torch cannot share
    (read-only, or with negative strides) is copied.
    """
    if flat_leaves(batch) is not None:
        return batch
    leaves, spec = pytree.tree_flatten(batch)
    taken = _of_torch(leaves)
    return batch if taken is leaves else pytree.tree_unflatten(taken, spec)


def _of_torch(leaves: list[Any]) -> list[Any]:
    made = {id(leaf): _from_numpy(leaf) for leaf in leaves if isinstance(leaf, (np.ndarray, np.generic))}
    return [made.get(id(leaf), leaf) for leaf in leaves] if made else leaves


def _from_numpy(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item() if value.dtype.kind in _NUMBERS else value
    with contextlib.suppress(TypeError, ValueError):  # of a type or strides that torch does not have
        if type(value) is np.ndarray:
            shared = value.flags.writeable and min(value.strides, default=0) >= 0
            return torch.from_numpy(value if shared else value.copy())
    return value


def flatten(batch: Any, arrays: bool = False) -> tuple[list[Any], pytree.TreeSpec | None, Hashable]:
    """Return the leaves, the structure (None for a flat tuple) and the key of a batch.

    With ``arrays`` the user's code gets NumPy's arrays as they are, and they cannot be captured; else see ``of_torch``.
    Raises InvalidJobError for a batch without tensors, and CaptureError for objects that a capture cannot look into.
    """
    form = _C.form_of(batch)
    if form is not None:
        return list(batch), None, form
    leaves, spec = pytree.tree_flatten(batch)
    leaves = leaves if arrays else _of_torch(leaves)
    key: list[Hashable] = [spec, *_dict_keys(spec)]
    tensors, others = 0, []
    free = {*free_places(leaves, spec)}
    for place, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            tensors += 1
            check_plain([("a tensor of the batch", leaf)])
            key.append(_form(leaf))
        elif isinstance(leaf, _VALUES) or (isinstance(leaf, np.generic) and leaf.dtype.kind in _NUMBERS):
            key.append(type(leaf) if place in free else exact(leaf))  # type: ignore[arg-type]
        else:
            others.append(leaf)
    _check_bare(leaves)
    if others:
        name, advice = type(others[0]).__qualname__, "pass dict(batch)"
        if isinstance(others[0], np.ndarray):
            name, advice = "NumPy array", "pass torch.from_numpy(array) in its place"
        elif not isinstance(others[0], Mapping):
            how = f"export.register_dataclass({name})" if is_dataclass(others[0]) else "utils._pytree.register_pytree_node"
            advice = f"pass a tuple or dict of its tensors, or register the class by torch.{how}"
        raise CaptureError(f"the batch holds a {name}, into which a capture cannot look; {advice}")
    if not tensors:
        advice = ". Make lists of numbers tensors, by torch.tensor" if leaves else ""
        raise InvalidJobError(f"a batch must hold at least one tensor; got {type(batch).__name__}{advice}")
    if beside := held_beside(batch, spec, leaves):
        key.append(beside)
    first: dict[int, int] = {}
    places = [first.setdefault(id(leaf), place) for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if len(first) < len(places):  # a tensor that is there twice changes with itself
        key.append(("same", *places))
    return leaves, spec, tuple(key)


def _check_bare(leaves: Sequence[Any]) -> None:
    # A captured step is given other tensors each time; gradients and attributes of these would be lost.
    if _C.carries_more(leaves):
        raise CaptureError("a tensor of the batch requires gradients, or has a gradient or attributes; detach() it")


def _form(tensor: torch.Tensor) -> Hashable:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()


def _dict_keys(spec: pytree.TreeSpec) -> Iterator[Hashable]:
    # Specs compare keys by ==, and 1 == True == 1.0: a step may compute with them.
    is_dict = isinstance(spec.type, type) and issubclass(spec.type, dict)
    if is_dict and any(type(key) is not str for key in spec.context):
        yield exact(spec.context)
    for child in spec.children():
        if child.num_children:
            yield from _dict_keys(child)


def structure_key(spec: StepSpec) -> tuple[Hashable, Fingerprint]:
    """Return the key of everything but the batch, and its fingerprint. Raises CaptureError for what cannot be captured."""
    fingerprint = Fingerprint(spec.model)
    check_plain((f"parameter {name!r}", tensor) for name, tensor in fingerprint.parameters.items())
    check_plain((f"buffer {name!r}", tensor) for name, tensor in fingerprint.buffers.items())
    if not all(has_fused_form(p) for group in spec.optimizer.param_groups for p in group["params"]):
        raise CaptureError("the optimizer has no fused form for complex parameters, nor for views with gaps in memory")
    model = fingerprint.of(spec.model)
    compute = fingerprint.of(spec.compute_loss)
    _check_parametrized(fingerprint)
    numbers = {id(p): n for n, p in enumerate(fingerprint.parameters.values())}
    if any(p._backward_hooks or p._post_accumulate_grad_hooks for p in fingerprint.parameters.values()):
        raise CaptureError("a parameter has gradient hooks, which must run every step; take them off")
    check_hooks(spec.optimizer)
    groups = []
    for group in spec.optimizer.param_groups:
        external_tensors = [p for p in group["params"] if id(p) not in numbers]
        if external_tensors:
            raise CaptureError(
                f"the optimizer trains a parameter of shape {tuple(external_tensors[0].shape)} that the model does not hold; add it there"
            )
        settings = tuple(
            (name, bool(value) if name in BY_ZERO else fingerprint.of(value))
            for name, value in group.items()
            if name in BY_ZERO or (name in spec.optimizer.defaults and name not in READ_EACH_STEP)
        )
        rate = group["lr"]
        kind = tensor_key(rate) if isinstance(rate, torch.Tensor) else None
        groups.append((tuple(numbers[id(p)] for p in group["params"]), settings, kind))
    optimizer = (fingerprint.of(type(spec.optimizer)), tuple(groups))
    apart = lie_apart(spec, fingerprint)
    own = (spec.update, spec.accumulate, spec.clip_norm, spec.clip_value, spec.autocast, spec.early_updates, apart)
    sharded = (spec.shards > 1, spec.more_sums)
    return (model, compute, optimizer, fingerprint.of_process(), exact(own), sharded), fingerprint


def what_changed(before: Hashable, now: Hashable) -> str:
    """Describe the first difference of two keys of one step, by its name where that has one."""
    names: list[str] = []
    while type(before) is type(now) is tuple and len(before) == len(now):
        place = next((n for n, (one, other) in enumerate(zip(before, now)) if one != other), None)
        if place is None or (len(now) == 2 and isinstance(now[0], type)):
            break  # a type and a value
        if len(now) == 2 and place == 1:
            names += [now[0]] if isinstance(now[0], str) and now[0] not in _TAGS else []
            names += [now[0][1]] if isinstance(now[0], tuple) and now[0][:1] == (str,) else []  # a key of a dict
        before, now = before[place], now[place]
    where = ".".join(names) or "something that the step reads beside its batch"
    was, there = _shown(before), _shown(now)
    return f"{where} was {was} and is {there}" if was and there else f"{where} has changed"


_TAGS = ("id", "token", "seen")


def _shown(value: Any) -> str:
    # Of a key that ``exact`` has made of one value.
    if not (type(value) is tuple and len(value) == 2 and value[0] in (bool, int, float, str, type(None))):
        return ""
    shown = repr(struct.unpack("d", value[1])[0] if value[0] is float else value[1])
    return shown if len(shown) <= 40 else ""


def _check_parametrized(fingerprint: Fingerprint) -> None:
    # parametrize.cached() keeps tensors for longer than a step: a trace would leave fakes there, or use what is old.
    fingerprint.guard(vars(parametrize), "entries", ("_cache_enabled",))
    if parametrize._cache_enabled and any(isinstance(one, parametrize.ParametrizationList) for one in fingerprint.modules()):
        raise CaptureError("the step is called within parametrize.cached(), which keeps tensors; enter that within the step")


def lie_apart(spec: StepSpec, fingerprint: Fingerprint) -> bool:
    """Return whether no two of the step's tensors share a byte.

    A graph takes its inputs as memory of their own: a change of one that shows in another would be missed. Where
    tensors share bytes, the operations stay in their order: no early updates, and nothing is recomputed.
    """
    rates = [group["lr"] for group in spec.optimizer.param_groups if isinstance(group["lr"], torch.Tensor)]
    own = [*fingerprint.parameters.values(), *fingerprint.buffers.values()]
    ranges = sorted(r for kind in (own, fingerprint.external_tensors, rates, state_of(spec.optimizer)) for r in ranges_of(kind))
    return all(before[1] <= after[0] for before, after in pairwise(ranges))


def state_of(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors of an optimizer's state."""
    for entries in optimizer.state.values():
        yield from (value for value in entries.values() if isinstance(value, torch.Tensor))


def ranges_of(tensors: Iterable[torch.Tensor]) -> list[tuple[int, int]]:
    """Return the address ranges [begin, end) of tensors in bytes, each tensor once, in order."""
    distinct = {id(t): t for t in tensors if t.layout == torch.strided and t.numel()}
    return sorted((t.data_ptr(), t.data_ptr() + extent_bytes(t)) for t in distinct.values())


def extent_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes from the first element of a tensor to the end of its last one in memory."""
    if tensor.is_contiguous():
        return tensor.nbytes
    return (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride()))) * tensor.element_size()
