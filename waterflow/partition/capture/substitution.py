"""Stand-ins: while a step is traced, fake tensors take the place of the model's tensors, and of all that the step reads.

A stand-in shows the attributes of the real tensor. Everything that the trace changed is put back after it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import os
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any

import numpy as np
import torch
from torch import fx, nn
from torch._higher_order_ops import utils as higher_order
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.parametrize import ParametrizationList
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from waterflow import _C
from waterflow.errors import CaptureError
from waterflow.partition.capture.formulas import IN_EAGER
from waterflow.partition.capture.reasons import DRAWN, ReadsValues, is_users_file
from waterflow.partition.capture.spec import StepSpec
from waterflow.partition.guards.cache_key import Fingerprint
from waterflow.partition.guards.guarded_places import GuardedPlace
from waterflow.partition.guards.trace_writes import TraceWrites


class Carried:
    """Copies the attributes of real tensors to their stand-ins, and notices when a step changes one."""

    def __init__(self) -> None:
        self._given: list[tuple[torch.Tensor, dict[str, Any], frozenset[str], bool]] = []

    def give(self, stand_in: torch.Tensor, real: torch.Tensor) -> None:
        """Copy attributes of ``real`` to its stand-in. Raises CaptureError for a name that the fake tensor itself needs."""
        here = vars(stand_in)
        if isinstance(real, nn.Parameter):
            # isinstance(stand_in, nn.Parameter) is then true, too.
            here["_is_param"] = True
        own = frozenset(here)
        attributes = dict(_C.attributes_of(real) or {})
        taken = own.intersection(attributes) - {"_is_param"}
        if taken:
            raise CaptureError(f"a tensor has an attribute {min(taken)}; a fake tensor has another of this name; rename it")
        here.update(attributes)
        self._given.append((stand_in, attributes, own, stand_in.requires_grad))

    def check(self) -> None:
        """Raise CaptureError where the step changed an attribute or ``requires_grad`` of a tensor that it was given."""
        for stand_in, before, own, wanted in self._given:
            if stand_in.requires_grad != wanted:
                raise CaptureError("a step changes requires_grad of a tensor that it was given")
            now = {name: value for name, value in vars(stand_in).items() if name not in own}
            for name in {**before, **now}:
                if name not in now or name not in before or now[name] is not before[name]:
                    raise CaptureError(f"a step changes the attribute {name} of a tensor")


class ChangesItself(CaptureError):
    """The step changes an object that its code reads; some do so only in their first calls, while they fill caches."""


class ChangesPackage(ChangesItself):
    """The step changes an object that an installed package holds. No key tells what it was, so the refusal is not remembered."""


@contextlib.contextmanager
def undisturbed(
    fingerprint: Fingerprint, stand_ins: Mapping[int, torch.Tensor], writes: TraceWrites
) -> Iterator[list[tuple[GuardedPlace, Any]]]:
    """Restore, on exit, every place that the step's key was made from, and the states of random number generators.

    ``stand_ins`` maps the ``id`` of a real tensor to the tensor that the step was shown for it; it must be complete by
    the end of the block. Yields the places with what was there, to which a trace adds those that it finds on its way.
    What by ``writes`` another thread has changed stays as it is. Raises ChangesItself where the step changed more than
    tensors, and CaptureError where it drew from a generator outside of torch.
    """
    before = [(look, look.contents()) for look in fingerprint.guarded_places if look.kept]
    in_key = {id(look) for look, _ in before} - {id(look) for look, _ in fingerprint.found}
    drawn: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [
        ("Python's random numbers", random.getstate, random.setstate),
        ("NumPy's random numbers", *_NUMPY_STATE),
    ]
    drawn += [(f"the random numbers in {label}", *_state_of(source)) for label, source in fingerprint.generators]
    states = [read() for _, read, _ in drawn]
    changed, refusal = "", ChangesItself
    try:
        yield before
    finally:
        for look, contents in before:
            key = look.put_back(contents, stand_ins, writes.wrote)
            if key is not None:
                refusal = ChangesItself if id(look) in in_key else ChangesPackage
                changed = ".".join(part for part in (look.label, key) if part)
        for (label, read, write), state in zip(drawn, states):
            if not _same_state(read(), state):
                write(state)
                changed = changed or label
    if changed.startswith(("Python's", "NumPy's", "the random")):
        raise CaptureError(f"a step draws from {changed}; {DRAWN}")
    if changed:
        raise refusal(f"a step changes {changed}; return a metric, make a tensor a buffer of the model, count after the step")


# Hooks of torch's that put a tensor into an attribute before each forward pass, and what does without one.
_SETTING_HOOKS: dict[type, str] = {
    WeightNorm: "use torch.nn.utils.parametrizations.weight_norm",
    SpectralNorm: "use torch.nn.utils.parametrizations.spectral_norm",
    BasePruningMethod: "torch.nn.utils.prune.remove makes what it computes a parameter",
}


def check_hooks(modules: Iterable[nn.Module]) -> None:
    """Raise CaptureError for weight norm, spectral norm and pruning by hooks, which set an attribute of a module in each step."""
    for module in modules:
        for hook in module._forward_pre_hooks.values():
            for kind, remedy in _SETTING_HOOKS.items():
                if isinstance(hook, kind):
                    raise CaptureError(
                        f"the hook {type(hook).__name__} sets an attribute of a {type(module).__name__} in each step; {remedy}"
                    )


_NUMPY_STATE = (lambda: np.random.get_state(legacy=False), np.random.set_state)


def _state_of(source: Any) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    if isinstance(source, random.Random):
        return source.getstate, source.setstate
    if isinstance(source, torch.Generator):
        return source.get_state, source.set_state
    if isinstance(source, np.random.RandomState):
        return lambda: source.get_state(legacy=False), source.set_state
    return lambda: source.bit_generator.state, lambda state: setattr(source.bit_generator, "state", state)


def _same_state(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(_same_state(one[key], other[key]) for key in one)
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


# -- while a step is traced


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Switch the garbage collector off for the block, and those of other threads that overlap it.

    A collector that was off stays off. In a child process that is forked meanwhile (a loader's worker) it is on.
    """
    # Captures and searches over sizes make many objects and little garbage: collections took a fifth of their time. And in
    # a trace what others have it call (``gc.callbacks``) would count as the step's.
    _collector.enter()
    try:
        yield
    finally:
        _collector.leave()


class _Collector:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks, self._was_on = 0, False

    def enter(self) -> None:
        with self._lock:
            if self._blocks == 0:
                self._was_on = gc.isenabled()
                gc.disable()
            self._blocks += 1

    def leave(self) -> None:
        with self._lock:
            self._blocks -= 1
            if self._blocks == 0 and self._was_on:
                gc.enable()

    def in_child(self) -> None:
        if self._blocks and self._was_on:
            gc.enable()
        self.__init__()  # type: ignore[misc]  # the thread that held the lock is not here


_collector = _Collector()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_collector.in_child)


@contextlib.contextmanager
def no_reports() -> Iterator[None]:
    """Silence the log of torch's fake tensors for the block."""
    # An operation that stops a trace is reported in one line; the fake mode would log some hundred lines before.
    log = logging.getLogger("torch._subclasses.fake_tensor")
    level = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def as_in_eager(refuse: Callable[[Exception], None]) -> Iterator[None]:
    """Make torch and libraries take the calling thread's fake tensors for plain ones; ``refuse`` stops what compiles code.

    The functions that they ask are replaced for the block. Other threads get the real answers.
    """
    # torch would remember across traces what it compiled for stand-ins.
    what = "the step calls torch.cond, or what else compiles code by itself; choose by torch.where, or by an if"
    compiles = functools.partial(refuse, CaptureError(what))
    # Hugging Face's models read values of masks only where these are no fakes, and torch's attention has a kernel of
    # its own for plain tensors without gradients: an eager step would take those branches.
    answers: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.overrides, "has_torch_function", lambda given: any(map(_has_functions, given))),
        (nn.modules.activation, "_is_make_fx_tracing", lambda: False),
        (higher_order, "setup_compilation_env", compiles),
        (sys.modules.get("torch.nn.attention.flex_attention"), "setup_compilation_env", compiles),
        (sys.modules.get("transformers.utils.import_utils"), "is_fake_tensor", lambda one: False),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, answer in answers:
            if (real := getattr(module, name, None)) is not None:
                told = functools.partial(_told, threading.get_ident(), real, answer)
                setattr(module, name, told)
                stack.callback(setattr, module, name, real)
        yield


def _told(thread: int, real: Callable[..., Any], answer: Callable[..., Any], *given: Any) -> Any:
    return (answer if threading.get_ident() == thread else real)(*given)


def _has_functions(value: Any) -> bool:
    return type(value) not in (*_PLAIN, FakeTensor) and hasattr(type(value), "__torch_function__")


@contextlib.contextmanager
def substituted(model: nn.Module, stand_ins: Mapping[int, torch.Tensor], trained: Set[int]) -> Iterator[None]:
    """Put stand-ins in the place of the model's parameters and buffers for the block; ``stand_ins`` is keyed by ``id``.

    Parts of the model in which nothing is trained keep their tensors, and ``Substitution`` replaces those at each call.
    """
    modules = list(model.modules())
    # Other threads may be running a frozen part: jobs share it.
    frozen = set(_frozen(model, trained))
    dicts = [module.__dict__[kind] for module in modules for kind in ("_parameters", "_buffers")]
    before = [dict(entries) for entries in dicts]
    shown = [(m, kind) for m in modules if m not in frozen for kind in ("_parameters", "_buffers")]
    recurrent = [(m, m.__dict__["_flat_weights"]) for m in modules if m not in frozen and isinstance(m, nn.RNNBase)]
    try:
        for module, kind in shown:
            entries = module.__dict__[kind]
            for name, tensor in entries.items():
                if tensor is not None:
                    entries[name] = stand_ins[id(tensor)]
        for module, weights in recurrent:
            module.__dict__["_flat_weights"] = [stand_ins.get(id(w), w) for w in weights]
        yield
    finally:
        for entries, held in zip(dicts, before):
            if any(tensor is not held.get(name) for name, tensor in entries.items()) or len(entries) != len(held):
                entries.clear()
                entries.update(held)
        for module, weights in recurrent:
            module.__dict__["_flat_weights"] = weights


def _frozen(module: nn.Module, trained: Set[int]) -> Iterator[nn.Module]:
    # Yields the modules of the largest subtrees that have tensors and train none. A parametrization (spectral norm)
    # belongs to the weight that it computes, and is never frozen apart from it.
    tensors = any(True for _ in (*module.parameters(), *module.buffers()))
    if tensors and not any(id(p) in trained for p in module.parameters()):
        yield from module.modules()
        return
    if isinstance(module, ParametrizationList):
        return
    for child in module.children():
        yield from _frozen(child, trained)


class Substitution(TorchFunctionMode):
    """Replaces tensors, keyed by ``id``, in the arguments of every torch function.

    Covers tensors that no module holds, and those of frozen parts. Refuses functions that hand values of tensors to
    Python: the values would become constants of the graph.
    """

    _READS = (
        torch.Tensor.tolist,
        torch.Tensor.numpy,
        torch.Tensor.__array__,
        torch.Tensor.__repr__,
        torch.Tensor.__format__,
        torch.Tensor.__reduce_ex__,
        torch.Tensor.__dlpack__,
    )
    _ASKS = (torch.Tensor.item, torch.Tensor.__bool__, torch.Tensor.__float__, torch.Tensor.__int__, torch.Tensor.__index__)

    def __init__(self, stand_ins: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._stand_ins = stand_ins
        self._refused: Exception | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self._READS:
            self._refused = ReadsValues(f"{func.__name__}() reads the values of a tensor")
            raise self._refused
        if func == torch.Tensor.data.__set__:  # type: ignore[attr-defined]
            self._refused = RuntimeError("the step gives a tensor other memory (x.data = ...)")
            raise self._refused
        kwargs = kwargs or {}
        if any(map(self._concerns, (*args, *kwargs.values()))):
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._shown, (args, kwargs))
        try:
            if (eager := IN_EAGER.get(func)) is not None and (made := eager(*args, **kwargs)) is not None:
                return made
            return func(*args, **kwargs)
        except Exception as error:
            # Some that only a trace raises: user code that goes on without the result would go another way.
            if func in self._ASKS or isinstance(error, (RuntimeError, BufferError, CaptureError)):
                self._refused = error
            raise

    def check(self) -> None:
        """Raise the error of a refused call, even if the user's code caught it."""
        if self._refused is not None:
            raise self._refused

    def _concerns(self, value: Any) -> bool:
        if isinstance(value, (list, tuple)):
            return any(map(self._concerns, value))
        return type(value) in _PLAIN and id(value) in self._stand_ins

    def _shown(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._stand_ins.get(id(tensor), tensor)


_PLAIN = frozenset({torch.Tensor, nn.Parameter, nn.Buffer})


def surrounding_autocast(device_type: str) -> torch.dtype | None:
    """Return the data type of the autocast that the calling thread is in, or None."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


@contextlib.contextmanager
def in_forward(spec: StepSpec, surrounding: torch.dtype | None = None) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Switch autocast off for the block, as the backward pass needs it; yields the context for the forward pass.

    That context casts to the step's ``autocast`` type, else to ``surrounding``, else to that of the caller's autocast.
    """
    kind = spec.device.type
    wanted = spec.autocast or surrounding or surrounding_autocast(kind)
    if wanted is not None:
        torch.clear_autocast_cache()  # of an autocast that is still open, from before the last update
    # The flags themselves: within a region, even one that is off, the user's regions would keep their casts past their end.
    before = torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
    torch.set_autocast_enabled(kind, False)
    torch.set_autocast_cache_enabled(True)  # a weight that is used twice is cast once
    try:
        yield contextlib.nullcontext() if wanted is None else torch.autocast(kind, dtype=wanted)
    finally:
        torch.set_autocast_enabled(kind, before[0])
        torch.set_autocast_cache_enabled(before[1])


@contextlib.contextmanager
def noting_lines(graph: fx.Graph, model: nn.Module) -> Iterator[None]:
    """Note the user's line in ``meta["line"]`` of each node that is made in the block: (file, number, function).

    Only lines of the step itself count, not its caller's: captures are shared among callers. Where there is none, as
    between the layers of an ``nn.Sequential``, ``meta["module"]`` has the path and class of the module that made the
    node.
    """
    create = graph.create_node
    paths = {id(module): f"{path} ({type(module).__name__})" for path, module in model.named_modules() if path}
    within: Any = sys._getframe(2)  # past contextlib's

    def create_node(*args: Any, **kwargs: Any) -> fx.Node:
        node = create(*args, **kwargs)
        frame: Any = sys._getframe(1)
        while frame is not within and not is_users_file(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is not within:
            node.meta["line"] = (frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            return node
        frame = sys._getframe(1)
        while frame is not within:
            if frame.f_code.co_name == "forward" and (path := paths.get(id(frame.f_locals.get("self")))):
                node.meta["module"] = path
                break
            frame = frame.f_back
        return node

    graph.create_node = create_node  # type: ignore[method-assign]
    try:
        yield
    finally:
        del graph.create_node
