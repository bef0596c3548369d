"""torch's default generators, as a step sees them while it is traced.

``torch.get_rng_state``, ``set_rng_state`` and ``manual_seed`` (also inside ``fork_rng`` and ``checkpoint``) speak to a default
generator. While a step is traced each such call becomes an operation of the graph: so the graph reads, restores and draws in
the order of the eager step, and a mask that ``checkpoint`` computes again has the bits of the first one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

import torch
from torch import fx
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from waterflow import _C  # noqa: F401  # defines the operators
from waterflow.errors import CaptureError
from waterflow.partition.passes.operators import is_random, tensors_in

_own = torch.ops.waterflow
READ, WRITE, SEED = _own.random_state.default, _own.set_random_state.default, _own.seed_random.default


@runtime_checkable
class ShowsGenerators(Protocol):
    """A dispatch mode that tells what stands for a default generator on the threads that it is active on."""

    def default_generator(self, real: torch.Generator) -> Any:
        """What calls to ``real`` go to."""


class Traced:
    """A default generator of a step that is traced: calls become operations. ``refuse`` raises why others stop the trace."""

    def __init__(self, device: torch.device, refuse: Any) -> None:
        self.device = device
        self._refuse = refuse

    def get_state(self) -> torch.Tensor:
        """The state at this place of the step, as a fake tensor."""
        return READ(self.device)

    def set_state(self, state: torch.Tensor) -> Traced:
        """Later operations draw from this state."""
        WRITE(state, self.device)
        return self

    def manual_seed(self, seed: int) -> Traced:
        """Later operations draw as from a generator with this seed."""
        number = int(seed) % 2**64
        SEED(number - 2**64 if number >= 2**63 else number, self.device)
        return self

    def __getattr__(self, name: str) -> Any:
        return self._refuse(CaptureError(f"the step asks a default generator for its {name}"))


class _StandIn:
    """Passes on what is asked of a default generator: to what the calling thread's mode shows, or to the generator."""

    def __init__(self, real: torch.Generator) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        for mode in reversed(_get_current_dispatch_mode_stack()):
            if isinstance(mode, ShowsGenerators):
                return getattr(mode.default_generator(self._real), name)
        return getattr(self._real, name)


@contextlib.contextmanager
def shown() -> Iterator[None]:
    """Within, torch's functions speak to what the calling thread's mode shows. Other threads see no difference.

    One at a time in a process.
    """
    of_cpu, of_cuda = torch.random.default_generator, torch.cuda.default_generators
    torch.random.default_generator = _StandIn(of_cpu)  # type: ignore[assignment]
    if of_cuda:  # there are none before CUDA is initialized, which sets them
        torch.cuda.default_generators = tuple(map(_StandIn, of_cuda))  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.random.default_generator = of_cpu
        if of_cuda:
            torch.cuda.default_generators = of_cuda


def touches_state(target: Any) -> bool:
    """Whether an operation reads or sets the state of a default generator, and draws nothing."""
    return target in (READ, WRITE, SEED)


def drop_idle(graph: fx.Graph) -> None:
    """Drop reads and writes of states that change nothing: most of ``checkpoint``'s, around layers without dropout."""
    touching = [node for node in graph.nodes if node.op == "call_function" and touches_state(node.target)]
    for device in set(map(_device_of, touching)):
        _share_reads(graph, device)
        _drop_overwritten(graph, device)
        _share_reads(graph, device)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and node.target is READ and not node.users:
            graph.erase_node(node)


def _share_reads(graph: fx.Graph, device: torch.device | None) -> None:
    """One read of each state, and no write of the state that the generator is in."""
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
    """A state that is set and then set anew, and neither read nor drawn from in between, need not be set."""
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
    """Whose default generator an operation concerns; None where that is not known."""
    if touches_state(node.target):
        return node.args[0 if node.target is READ else 1]  # type: ignore[return-value]
    values = (node.meta.get("val"), *(source.meta.get("val") for source in node.all_input_nodes))
    return next((tensor.device for value in values for tensor in tensors_in(value)), None)
