"""Random generators per thread, which stand in for the process's default generators."""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from waterflow import _C

logger = logging.getLogger("waterflow")

_METHODS = ("manual_seed", "seed", "initial_seed", "get_state", "set_state", "get_offset", "set_offset", "clone_state",
            "graphsafe_get_state", "graphsafe_set_state")  # fmt: skip
_lock = threading.Lock()


def own_numbers(*generators: torch.Generator) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the calling thread draws from ``generators``, at most one for each device.

    Every operator that would draw from a default generator draws from the thread's own one for that device, whatever module
    calls it; and ``torch.manual_seed``, ``torch.get_rng_state``, ``torch.set_rng_state``, ``torch.random.fork_rng`` and
    ``torch.default_generator`` refer to that one. Other threads are not affected. No lock is taken, on the CPU not even for a
    draw. Contexts nest; without generators the inner context uses the default ones.
    """
    redirect()
    return _C.ThreadGenerators(list(generators))


def thread_generator(device: torch.device) -> torch.Generator | None:
    """Return the calling thread's own generator on ``device``, or None if it draws from the process's."""
    return _C.thread_generator(str(device))


def generators_for(device: torch.device, seed: int) -> list[torch.Generator]:
    """Return new generators with ``seed`` for a thread whose models lie on ``device``: the CPU's, and last the device's."""
    kinds = {torch.device("cpu"), device}
    return [torch.Generator(kind).manual_seed(seed) for kind in sorted(kinds, key=str)]


def state_of(generators: Sequence[torch.Generator]) -> torch.Tensor:
    """Return the states of ``generators_for`` a device, one behind the other."""
    return torch.cat([generator.get_state() for generator in generators])


def set_state_of(generators: Sequence[torch.Generator], state: torch.Tensor) -> None:
    """Set the states that ``state_of`` returned. On another kind of device only the CPU's is there; the other stays as it is."""
    for generator in generators:
        size = generator.get_state().numel()
        if len(state) >= size:
            generator.set_state(state[:size].clone())  # torch does not mind where a slice begins
        state = state[size:]


class _DefaultGenerator(torch.Generator):
    """A stand-in for torch's default generator of the CPU; its methods use the calling thread's own, if it has one."""


def _of_thread(name: str) -> Callable[..., Any]:
    method = getattr(torch.Generator, name)

    @functools.wraps(method)
    def call(self: torch.Generator, *args: Any) -> Any:
        own = _C.thread_generator("cpu")
        return method(self if own is None else own, *args)

    return call


for _name in _METHODS:
    if hasattr(torch.Generator, _name):
        setattr(_DefaultGenerator, _name, _of_thread(_name))


def redirect() -> None:
    """Replace torch's default generators, for the life of the process, by ones that use the calling thread's own."""
    if isinstance(torch.default_generator, _DefaultGenerator):
        return
    with _lock:
        if isinstance(torch.default_generator, _DefaultGenerator):
            return
        # The replacement shares the state of the generator that it replaces, so that nothing that was seeded changes.
        name = _DefaultGenerator()
        _C.alias_generator(name, torch.default_generator)
        if torch.cuda.is_available():
            _redirect_cuda()
        torch.random.default_generator = name
        torch.default_generator = name


def _redirect_cuda() -> None:
    # Functions of torch.cuda find a GPU's default generators by themselves, so it is these functions that are wrapped.
    from torch.cuda import random as of_cuda

    def redirect(name: str, change: Callable[[torch.Generator, Any], Any], argument: int | None) -> None:
        original = getattr(of_cuda, name)

        @functools.wraps(original)
        def call(*args: Any, **named: Any) -> Any:
            own = _C.thread_generator("cuda")
            if own is None:
                return original(*args, **named)
            return change(own, None if argument is None else (*args, *named.values())[argument])

        setattr(of_cuda, name, call)
        setattr(torch.cuda, name, call)

    for name in ("manual_seed", "manual_seed_all"):
        redirect(name, lambda own, seed: own.manual_seed(int(seed)), 0)
    for name in ("seed", "seed_all"):
        redirect(name, lambda own, _: own.seed(), None)
    redirect("initial_seed", lambda own, _: own.initial_seed(), None)
    redirect("get_rng_state", lambda own, _: own.get_state(), None)
    redirect("set_rng_state", lambda own, state: own.set_state(state), 0)


# Taken for good by the thread that logs the warning, so that it comes once in a process.
_told = threading.Lock()


@contextlib.contextmanager
def telling_of_shared_numbers(what: str, among_others: Callable[[], bool]) -> Iterator[None]:
    """Warn, once in a process, if ``what`` draws inside the context from Python's or NumPy's global generators beside others."""
    if _told.locked():
        yield
        return
    before = _process_numbers()
    beside = among_others()
    try:
        yield
    finally:
        if (beside or among_others()) and not _told.locked():
            drawn = [name for name, state in _process_numbers().items() if state != before[name]]
            if drawn and _told.acquire(blocking=False):
                logger.warning(
                    "%s, or another beside it, drew from %s, which all threads of the process share: what it gets depends on "
                    "what runs beside it. Draw from generators of your own instead: random.Random(seed), "
                    "numpy.random.default_rng(seed), or torch's functions, which have one for each trial and job",
                    what,
                    " and ".join(drawn),
                )


def _process_numbers() -> dict[str, Any]:
    state: Any = np.random.get_state(legacy=False)
    of_numpy = (
        state["bit_generator"],
        state["has_gauss"],
        state["gauss"],
        str(state["state"].get("pos")),
        np.asarray(state["state"].get("key", ())).tobytes(),
    )
    return {"Python's random": hash(random.getstate()), "numpy.random": of_numpy}
