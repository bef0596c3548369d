"""Attributes that the objects of a batch have beside the leaves that the batch is flattened into.

Subclasses of namedtuples and of ``str`` have them, dataclasses with dropped fields, and classes whose registered functions leave
something out. A trace rebuilds the batch from its leaves: the attributes are part of the batch's key, and the rebuilt batch must
have the same.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch.utils import _pytree as pytree

from waterflow import _C
from waterflow.errors import CaptureError
from waterflow.partition.guards.batch_reads import StandIn
from waterflow.partition.guards.code_refs import slots_of
from waterflow.partition.guards.guarded_places import MISSING, exact, slot_value
from waterflow.partition.guards.reads import ATOMS, classes_of

# Objects of these classes have no attributes.
_BARE = frozenset({tuple, list, dict, collections.defaultdict, collections.deque, *ATOMS})
_CONTAINERS = (tuple, list, dict, set, frozenset)


class Beside(tuple[tuple[int, str, Hashable], ...]):
    """Attributes by the number of the object that has them; one that is a part of the batch is told by that part's number."""

    @staticmethod
    def within(key: Hashable) -> Beside:
        """Return the attributes in the key of a batch."""
        return next((part for part in cast(Any, key) if type(part) is Beside), NOTHING)


NOTHING = Beside()


def held_beside(batch: Any, spec: pytree.TreeSpec, leaves: Sequence[Any]) -> Beside:
    """Return what the objects of a batch hold beside its leaves. Raises CaptureError for what cannot be compared with another's."""
    if all(map(_is_bare, classes_of(spec))) and _BARE.issuperset(
        type(one) for one in leaves if not isinstance(one, torch.Tensor)
    ):
        return NOTHING
    parts: list[Any] = []
    # append returns None, so tree_flatten goes on into every part, and hands over the containers, too.
    pytree.tree_flatten(batch, is_leaf=parts.append)  # type: ignore[arg-type]
    numbers: dict[int, int] = {}
    for number, part in enumerate(parts):
        numbers.setdefault(id(part), number)
    found: list[tuple[int, str, Hashable]] = []
    for number, part in enumerate(parts):
        # ``type``: a stand-in of a trace passes for what it stands for.
        kind = type(part)
        if not _is_bare(kind) and kind.__module__ != "numpy" and not issubclass(kind, (torch.Tensor, enum.Enum, StandIn)):
            try:
                found += [(number, name, _said(value, numbers, part, name)) for name, value in _attributes(part).items()]
            except RecursionError:
                raise CaptureError(f"the batch's {kind.__qualname__} holds a container that contains itself") from None
    return Beside(found)


def _is_bare(kind: type) -> bool:
    # Also a namedtuple, which has no attributes but those that are its parts.
    return kind in _BARE or (issubclass(kind, tuple) and not kind.__dictoffset__)


def rebuilt(leaves: Sequence[Any], spec: pytree.TreeSpec, beside: Beside) -> Any:
    """Return the batch of these leaves. Raises CaptureError if its objects do not hold ``beside``, as those of the real batch do."""
    batch = pytree.tree_unflatten(leaves, spec)
    if held_beside(batch, spec, leaves) != beside:
        names = ", ".join(sorted({str(name) for _, name, _ in beside} or {kind.__qualname__ for kind in classes_of(spec)}))
        raise CaptureError(
            f"the batch holds more than its class hands over to be rebuilt from ({names}); make that a field, or let it hand over "
            "all that it holds"
        )
    return batch


def _attributes(part: Any) -> Mapping[str, Any]:
    slots = {slot.__name__: value for slot in slots_of(cast(Any, type(part))) if (value := slot_value(slot, part)) is not MISSING}
    return {**(_C.attributes_of(part) or {}), **slots}


def _said(value: Any, numbers: Mapping[int, int], holder: Any, name: str) -> Hashable:
    if id(value) in numbers:
        return "part", numbers[id(value)]
    if type(value) in ATOMS:
        return exact(value)  # type: ignore[no-any-return]
    if type(value) in _CONTAINERS:
        # Sets, too, in their order, which a step may see.
        return type(value), tuple(_said(one, numbers, holder, name) for one in (value.items() if type(value) is dict else value))
    raise CaptureError(
        f"the batch's {type(holder).__qualname__} holds {name} ({type(value).__qualname__}) beside what it is flattened into, which "
        "a capture would not see; make it a field, or let its class hand over all that it holds (torch.utils._pytree.register_pytree_node)"
    )
