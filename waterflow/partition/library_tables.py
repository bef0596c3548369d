"""What code of libraries of models, which is not observed, finds under names: functions that can be replaced, and registries of them.

Trainers replace kernels there, and register others, between two steps.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from waterflow import _C
from waterflow.partition.looks import pairs_of
from waterflow.partition.pure_code import package_of
from waterflow.partition.reads import Entry

PACKAGES = frozenset({"torchvision", "torchaudio", "timm", "transformers", "diffusers", "peft", "einops", "opt_einsum"})
_CHANGING = (int, float, torch.Tensor)  # counters, and what is cached
_MOST_ENTRIES = 1000
_SUBSTITUTED = "is_fake_tensor"  # while any thread traces (as_in_eager), which all threads see: no change of the step's

Met = Mapping[int, tuple[types.CodeType, dict[str, Any]]]  # code that was run, by its id, with its globals


@dataclass(frozen=True)
class Table(Entry):
    """A dict of functions or classes, which must have the same ones; ``value`` has its pairs."""

    def holds(self) -> bool:
        """Whether it has."""
        now = pairs_of(self.container)
        return len(now) == len(self.value) and all(a is c and b is d for (a, b), (c, d) in zip(now, self.value))


def entries_of(met: Met) -> Iterator[Entry]:
    """The entries that such code can have found by the names in it."""
    found: dict[tuple[int, str], Entry] = {}
    for code, space in met.values():
        for place in _places(code, space):
            for name in code.co_names:
                value = place.get(name)
                if name in place and name != _SUBSTITUTED and (type(value) is bool or not isinstance(value, _CHANGING)):
                    found[id(place), name] = Entry(place, name, value)
                    found.update(((id(one), ""), Table(one, "", pairs_of(one))) for one in _tables_in(value))
    yield from found.values()


def _places(code: types.CodeType, space: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield space
    for name in code.co_names:
        held = space.get(name, sys.modules.get(name))
        if isinstance(held, types.ModuleType) and package_of(held.__name__) in PACKAGES:
            yield vars(held)


def _tables_in(value: Any) -> Iterator[dict[Any, Any]]:
    """A table, or those that a registry keeps in itself and in its class."""
    found: Iterable[Any] = [value]
    if package_of(type(value).__module__) in PACKAGES:
        said = [_C.attributes_of(value) or {}, *map(vars, type(value).__mro__)]
        found = [one for body in said for one in [*body.values()]]
    yield from (one for one in found if type(one) is dict and len(one) <= _MOST_ENTRIES and _has_names(one))


def _has_names(table: dict[Any, Any]) -> bool:
    """Whether it has functions or classes by their names; caches have other keys."""
    return all(type(key) is str and callable(entry) for key, entry in pairs_of(table))
