"""Modules that several steps hold at the same time: they may read them, and none of them may train them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torch import nn

from waterflow.errors import InvalidJobError


@dataclass(frozen=True, eq=False)
class Hold:
    """One step's hold on the modules that have tensors of their own. ``owner`` is the thread that trains."""

    name: str
    owner: int
    trains: frozenset[int]  # modules, by id


class Holders:
    """Who holds which module. Thread-safe; a hold ends with ``release``, or with the object that it was made for."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holds: weakref.WeakKeyDictionary[nn.Module, list[Hold]] = weakref.WeakKeyDictionary()

    def hold(self, name: str, model: nn.Module, trained: Iterable[nn.Parameter]) -> Hold:
        """Hold a model's modules. Raises InvalidJobError where another thread's step trains one, or this one would."""
        ids = {id(p) for p in trained}
        modules = list(_with_tensors(model))
        made = Hold(name, threading.get_ident(), frozenset(id(m) for m in modules if _trained(m, ids)))
        with self._lock:
            for module in modules:
                for other in self._others(module, made):
                    if id(module) in made.trains | other.trains:
                        raise InvalidJobError(
                            f"{other.name!r} and {name!r} share a module ({type(module).__name__}) and train it at the "
                            "same time: each would change the other's parameters. Give each its own, for example "
                            "copy.deepcopy(model); frozen modules (requires_grad_(False)) may be shared"
                        )
            for module in modules:
                self._holds.setdefault(module, []).append(made)
        return made

    def check_written(self, hold: Hold, model: nn.Module, buffers: Iterable[str]) -> None:
        """Raise InvalidJobError where a step changes buffers of a module that another one holds, too."""
        for buffer in buffers:
            module = model.get_submodule(buffer.rpartition(".")[0])
            with self._lock:
                others = list(self._others(module, hold))
            if others:
                raise InvalidJobError(
                    f"{others[0].name!r} and {hold.name!r} share a module ({type(module).__name__}) whose buffer "
                    f"{buffer!r} changes in every step. Put it into eval() mode, or give each its own, for example "
                    "copy.deepcopy(model)"
                )

    def release(self, hold: Hold) -> None:
        """Let go; twice is no error."""
        with self._lock:
            for holds in self._holds.values():
                if hold in holds:
                    holds.remove(hold)

    def _others(self, module: nn.Module, hold: Hold) -> Iterator[Hold]:
        return (other for other in self._holds.get(module, ()) if other.owner != hold.owner)


def _with_tensors(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if any(t is not None for t in (*module._parameters.values(), *module._buffers.values())):
            yield module


def _trained(module: nn.Module, ids: set[int]) -> bool:
    return any(p is not None and p.requires_grad and id(p) in ids for p in module._parameters.values())


holders = Holders()
