"""Random states in a graph: calls to torch's default generators become operations while a step is traced.

``torch.get_rng_state``, ``set_rng_state`` and ``manual_seed`` (also inside ``fork_rng`` and ``checkpoint``) go to a
default generator. As operations they read, restore and draw in the order of the eager step: a mask that ``checkpoint``
computes again has the bits of the first one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from waterflow import _C
from waterflow.errors import CaptureError
from waterflow.partition.passes.operators import is_random, tensors_in

_own = torch.ops.waterflow
READ, WRITE, SEED = _own.random_state.default, _own.set_random_state.default, _own.seed_random.default


@runtime_checkable
class ShowsGenerators(Protocol):
    """A dispatch mode that replaces default generators on the threads that it is active on."""

    def default_generator(self, real: torch.Generator) -> Any:
        """Return the object that receives the calls to ``real``."""


class Traced:
    """Stands for a default generator in a trace: calls become operations. Other calls go to ``refuse``, which ends the trace."""

    def __init__(self, device: torch.device, refuse: Any) -> None:
        self.device = device
        self._refuse = refuse

    def get_state(self) -> torch.Tensor:
        """Add a read of the state at this point of the step; returns it as a fake tensor."""
        return READ(self.device)

    def set_state(self, state: torch.Tensor) -> Traced:
        """Add a write of the state, from which later operations draw."""
        WRITE(state, self.device)
        return self

    def manual_seed(self, seed: int) -> Traced:
        """Add a seeding; later operations draw as from a generator with this seed."""
        number = int(seed) % 2**64
        SEED(number - 2**64 if number >= 2**63 else number, self.device)
        return self

    def __getattr__(self, name: str) -> Any:
        return self._refuse(CaptureError(f"the step asks a default generator for its {name}"))


class _StandIn(torch.Generator):
    # Another name for a default generator, which other threads may use as that one. Methods are resolved at each call, by
    # thread: only the thread that traces is in a mode that replaces generators.
    _real: torch.Generator


def _by_thread(name: str) -> Callable[..., Any]:
    def call(self: _StandIn, *given: Any, **named: Any) -> Any:
        modes = (mode for mode in reversed(_get_current_dispatch_mode_stack()) if isinstance(mode, ShowsGenerators))
        shown = next((mode.default_generator(self._real) for mode in modes), self._real)
        return getattr(shown, name)(*given, **named)

    return call


for _name in dir(torch.Generator):
    if not _name.startswith("_") and callable(getattr(torch.Generator, _name)):
        setattr(_StandIn, _name, _by_thread(_name))

_stand_ins: dict[int, _StandIn] = {}  # kept: torch takes the end of one for the end of the generator itself


def _stand_in(real: torch.Generator) -> _StandIn:
    if (known := _stand_ins.get(id(real))) is None or known._real is not real:
        known = _stand_ins[id(real)] = _StandIn()
        known._real = real
        _C.alias_generator(known, real)
    return known


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Route calls to torch's default generators through the calling thread's dispatch mode, for the block.

    Other threads see no difference. One thread of a process may do so at a time.
    """
    of_cpu, of_cuda = torch.random.default_generator, torch.cuda.default_generators
    torch.random.default_generator = _stand_in(of_cpu)
    if of_cuda:  # there are none before CUDA is initialized, which sets them
        torch.cuda.default_generators = tuple(map(_stand_in, of_cuda))
    try:
        yield
    finally:
        torch.random.default_generator = of_cpu
        if of_cuda:
            torch.cuda.default_generators = of_cuda


def touches_state(target: Any) -> bool:
    """Return whether an operation reads or sets the state of a default generator, and draws nothing."""
    return target in (READ, WRITE, SEED)


def drop_idle(graph: fx.Graph) -> None:
    """Drop reads and writes of random states that change nothing; ``checkpoint`` makes many around layers without dropout."""
    touching = [node for node in graph.nodes if node.op == "call_function" and touches_state(node.target)]
    for device in set(map(_device_of, touching)):
        _share_reads(graph, device)
        _drop_overwritten(graph, device)
        _share_reads(graph, device)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.target is READ and not node.users:
            graph.erase_node(node)


def _share_reads(graph: fx.Graph, device: torch.device | None) -> None:
    # ``now`` names the state that the generator is in. Each state is read once, and no state is written over itself.
    now: object = object()
    read: dict[object, fx.Node] = {}  # by state
    states: dict[fx.Node, object] = {}  # that nodes hold
    for node in list(graph.nodes):
        if not _concerns(node, device):
            continue
        if node.target is READ:
            first = read.setdefault(now, node)
            states[first] = now
            if first is not node:
                node.replace_all_uses_with(first)
                graph.erase_node(node)
        elif node.target is WRITE:
            given = node.args[0]
            assert isinstance(given, fx.Node)
            # Bytes that an operation has made, or may change, are a state of their own each time.
            state = states.get(given, object())
            if state is now:
                graph.erase_node(node)
            now = state
        else:
            now = object()


def _drop_overwritten(graph: fx.Graph, device: torch.device | None) -> None:
    # A state need not be set if another is set before anything reads it or draws from it.
    pending: fx.Node | None = None
    for node in list(graph.nodes):
        if not _concerns(node, device):
            continue
        sets = node.target in (WRITE, SEED)
        if sets and pending is not None:
            graph.erase_node(pending)
        pending = node if sets else None


def _concerns(node: fx.Node, device: torch.device | None) -> bool:
    if node.op != "call_function" or not is_random(node.target):
        return False
    return _device_of(node) in (device, None)


def _device_of(node: fx.Node) -> torch.device | None:
    if touches_state(node.target):
        return node.args[0 if node.target is READ else 1]  # type: ignore[return-value]
    values = (node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes))
    # None: the device is not known, and the operation counts for every generator.
    return next((tensor.device for value in values for tensor in tensors_in(value)), None)
