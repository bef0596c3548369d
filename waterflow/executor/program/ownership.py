"""Ownership: which steps share modules and tensors, which Steps a thread has made, and which optimizers they update."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from waterflow.errors import CaptureError, InvalidJobError
from waterflow.executor.program.binding import Owner
from waterflow.partition.capture.spec import GraphInput


class _Thread(threading.local):
    """An object for each thread, by which threads are told apart: their numbers are used again."""

    def __init__(self) -> None:
        self.token = object()


_this = _Thread()


class Hold:
    """One step's use of modules that have tensors, and of tensors elsewhere. ``over()`` returns True once its engine has ended."""

    def __init__(self, name: str, over: Callable[[], bool]) -> None:
        self.name = name
        self.owner = _this.token
        self.trains: frozenset[int] = frozenset()  # ids of modules that the step trains
        self.writes: set[int] = set()  # ids of tensors outside of models that the step writes to
        self._over = over
        self._released = False

    def release(self) -> None:
        """End the use. Releasing twice is no error. Takes no lock, as a finalizer may call it at any time."""
        self._released = True

    @property
    def lasts(self) -> bool:
        """True until the step is released or its engine ends."""
        return not self._released and not self._over()


class Holders:
    """The holds of all steps on modules, and on tensors that no model contains. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holds = WeakIdKeyDictionary()

    def check(self, hold: Hold, model: nn.Module, trained: Iterable[nn.Parameter], written: Iterable[str] = ()) -> None:
        """Register ``hold`` for all modules of ``model``; calling it again is no error.

        Raises InvalidJobError if another thread's step has one of the modules and either step trains it, or this step writes
        to one of its buffers (``written``, by name).
        """
        # Steps of one thread are exempt: as in a plain loop, two of them may train the same module.
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
        """Register ``hold`` for tensors of no model. Raises InvalidJobError if another thread's step has one that either writes."""
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


class Closable(Protocol):
    """A step that can be closed."""

    def close(self) -> None:
        """Leave the engine."""


class _Made(threading.local):
    """The steps of the calling thread that are still alive."""

    def __init__(self) -> None:
        self.steps: weakref.WeakSet[Closable] = weakref.WeakSet()

    def add(self, step: Closable) -> None:
        """Register a step that the calling thread has made; the reference is weak."""
        self.steps.add(step)
        with _guard:
            _all.add(step)

    def discard(self, step: Closable) -> None:
        """Remove a step that has been closed, by this or another thread."""
        self.steps.discard(step)
        with _guard:
            _all.discard(step)


_guard = threading.Lock()
_all: weakref.WeakSet[Any] = weakref.WeakSet()
made_here = _Made()


def steps_of(engine: object) -> list[Any]:
    """Return the steps of all threads that are alive in ``engine``."""
    with _guard:
        return [step for step in _all if step.engine is engine]


def cancel_steps(steps: Iterable[Any], reason: str) -> None:
    """End the steps of another thread at their next group boundary; their later calls raise JobCancelled."""
    for step in copied(steps):
        if step.engine is not None and step.job is not None:
            with contextlib.suppress(ValueError):  # the job has left the engine meanwhile
                step.engine.cancel(step.job, reason)


def copied(steps: Iterable[Any]) -> list[Any]:
    """Return the steps of a set that another thread may change."""
    while True:
        with contextlib.suppress(RuntimeError):  # changed during the iteration, as its thread has made another step
            return list(steps)


def close_steps_of_thread() -> None:
    """Close every step that the calling thread made inside an engine, so that a trial's end releases all of its memory."""
    for step in list(made_here.steps):
        step.close()
    made_here.steps.clear()


# The optimizers of Steps that are alive, and the threads that made these. Each Step clears ``.grad`` of its parameters before its own
# backward pass.
_optimizers: weakref.WeakKeyDictionary[Optimizer, object] = weakref.WeakKeyDictionary()


def add(optimizer: Optimizer) -> None:
    """Register the optimizer of a Step that the calling thread makes."""
    _optimizers[optimizer] = _this.token


def discard(optimizer: Optimizer) -> None:
    """Remove the optimizer of a Step that was closed."""
    _optimizers.pop(optimizer, None)


def optimizers_here() -> list[Optimizer]:
    """Return the optimizers of Steps that the calling thread has made."""
    return [one for one, owner in [*_optimizers.items()] if owner is _this.token]


def optimizer_of(tensors: Iterable[torch.Tensor]) -> Optimizer | None:
    """Return the optimizer of a Step that has any of ``tensors`` as a parameter, or None."""
    ids = set(map(id, tensors))
    found = (one for one in [*_optimizers] for group in one.param_groups for p in group["params"] if id(p) in ids)
    return next(found, None)


def check(reached: Iterable[GraphInput], owner: Owner) -> None:
    """Raise CaptureError if the step would leave gradients that the user may read: a captured step leaves none."""
    # Gradients of a Step's parameters are never seen, as that Step clears them.
    reached = list(reached)
    if not reached:
        return
    cleared = {id(p) for optimizer in [*_optimizers] for group in optimizer.param_groups for p in group["params"]}
    for given in reached:
        if given.kind in ("batch", "buffer") or id(owner.tensor(given)) not in cleared:
            raise CaptureError(_reason(given))


def _reason(given: GraphInput) -> str:
    if given.kind == "parameter":
        what = f"the parameter {given.name} requires gradients, but the optimizer does not have it"
    elif given.kind == "buffer":
        what = f"the buffer {given.name} requires gradients"
    else:
        what = "a tensor of the batch" if given.kind == "batch" else "a tensor from outside of the model"
        what += " requires gradients, and the backward pass reaches it"
    return f"{what}: they would add up in its .grad. Freeze it with requires_grad_(False), or give it to an optimizer of a Step"
