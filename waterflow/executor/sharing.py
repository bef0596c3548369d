"""Modules that several steps hold at the same time: they may read them, and none of them may train them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

from torch import nn

from waterflow.errors import InvalidJobError


class _Thread(threading.local):
    """An object for each thread: numbers of threads are used again."""

    def __init__(self) -> None:
        self.token = object()


_this = _Thread()


class Hold:
    """One step's hold on the modules that have tensors of their own. ``over()`` tells that its engine has ended."""

    def __init__(self, name: str, over: Callable[[], bool]) -> None:
        self.name = name
        self.owner = _this.token
        self.trains: frozenset[int] = frozenset()  # modules, by id
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
    """Who holds which module. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holds: weakref.WeakKeyDictionary[nn.Module, list[Hold]] = weakref.WeakKeyDictionary()

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
                lasting = [other for other in self._holds.get(module, ()) if other is not hold and other.lasts]
                self._holds[module] = [*lasting, hold]

    def _others(self, module: nn.Module, hold: Hold) -> Iterator[Hold]:
        return (other for other in self._holds.get(module, ()) if other.owner is not hold.owner and other.lasts)


def _with_tensors(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if any(t is not None for t in (*module._parameters.values(), *module._buffers.values())):
            yield module


def _trained(module: nn.Module, ids: set[int]) -> bool:
    return any(p is not None and p.requires_grad and id(p) in ids for p in module._parameters.values())


holders = Holders()
