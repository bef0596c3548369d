"""Modules and tensors that several steps hold at the same time: they may read them, and none of them may change them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from waterflow.errors import InvalidJobError


class _Thread(threading.local):
    """An object for each thread: numbers of threads are used again."""

    def __init__(self) -> None:
        self.token = object()


_this = _Thread()


class Hold:
    """One step's hold on modules that have tensors, and on tensors elsewhere. ``over()`` tells that its engine has ended."""

    def __init__(self, name: str, over: Callable[[], bool]) -> None:
        self.name = name
        self.owner = _this.token
        self.trains: frozenset[int] = frozenset()  # modules, by id
        self.writes: set[int] = set()  # tensors that no model has, by id
        self._over = over
        self._released = False

    def release(self) -> None:
        """Let go; twice is no error. Takes no lock: a finalizer may call it at any time."""
        self._released = True

    @property
    def lasts(self) -> bool:
        """Whether the step is still there to be in the way of others."""
        return not self._released and not self._over()


class Holders:
    """Who holds which module, and which tensor that no model has. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holds = WeakIdKeyDictionary()

    def check(self, hold: Hold, model: nn.Module, trained: Iterable[nn.Parameter], written: Iterable[str] = ()) -> None:
        """Hold a model's modules, from now on or again.

        Raises InvalidJobError where another thread's step trains one of them, or this one would, and where this step
        writes into buffers (``written``, by name) of a module that another one holds.
        """
        ids = {id(p) for p in trained}
        modules = list(_with_tensors(model))
        hold.trains = frozenset(id(m) for m in modules if _trained(m, ids))
        with self._lock:
            for module in modules:
                for other in self._others(module, hold):
                    if id(module) in hold.trains | other.trains:
                        raise InvalidJobError(
                            f"{other.name!r} and {hold.name!r} share a module ({type(module).__name__}) and train it at "
                            "the same time: each would change the other's parameters. Give each its own, for example "
                            "copy.deepcopy(model); frozen modules (requires_grad_(False)) may be shared"
                        )
            for buffer in written:
                module = model.get_submodule(buffer.rpartition(".")[0])
                for other in self._others(module, hold):
                    raise InvalidJobError(
                        f"{other.name!r} and {hold.name!r} share a module ({type(module).__name__}) whose buffer "
                        f"{buffer!r} changes in every step. Put it into eval() mode, or give each its own, for example "
                        "copy.deepcopy(model)"
                    )
            for module in modules:
                self._keep(module, hold)

    def check_tensors(self, hold: Hold, read: Iterable[torch.Tensor], written: Iterable[torch.Tensor]) -> None:
        """Hold tensors that the model does not have. Raises InvalidJobError where another thread's step, or this, writes one."""
        hold.writes.update(map(id, written))
        with self._lock:
            for tensor in read:
                for other in self._others(tensor, hold):
                    if id(tensor) in hold.writes | other.writes:
                        raise InvalidJobError(
                            f"{other.name!r} and {hold.name!r} share a tensor of shape {tuple(tensor.shape)} that is in no "
                            "model (of a closure, or a global) and changes in every step: each would see the other's "
                            "changes. Give each its own, or make it a buffer of each model"
                        )
                self._keep(tensor, hold)

    def _keep(self, held: nn.Module | torch.Tensor, hold: Hold) -> None:
        lasting = [other for other in self._holds.get(held, ()) if other is not hold and other.lasts]
        self._holds[held] = [*lasting, hold]

    def _others(self, held: nn.Module | torch.Tensor, hold: Hold) -> Iterator[Hold]:
        return (other for other in self._holds.get(held, ()) if other.owner is not hold.owner and other.lasts)


def _with_tensors(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if any(t is not None for t in (*module._parameters.values(), *module._buffers.values())):
            yield module


def _trained(module: nn.Module, ids: set[int]) -> bool:
    return any(p is not None and p.requires_grad and id(p) in ids for p in module._parameters.values())


holders = Holders()
