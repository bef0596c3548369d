"""Runs a training program eagerly and with ``waterflow.Step``, and compares all that both runs leave behind, byte by byte.

The file needs nothing of its folder, so that a program that fails can be printed together with it.
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import dataclasses
import enum
import io
import logging
import random
import struct
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

import waterflow as wf

Item = tuple[str, Any]  # a path, and what stands there in a form that ``==`` compares exactly
Make = Callable[..., Callable[[Any], Any]]
Main = Callable[..., dict[str, Any]]  # program(make, trial): what it returns is compared


class Eager:
    """The step that everybody writes; ``watch`` has the same for the step under test."""

    def __init__(self) -> None:
        self.steps = 0

    def __call__(
        self, model: nn.Module, *, optimizer: torch.optim.Optimizer, step: Callable[..., Any], accumulate: int = 1
    ) -> Callable[[Any], Any]:
        """A function that trains on one batch, as ``waterflow.Step`` does."""
        done = 0

        def train(batch: Any) -> Any:
            nonlocal done
            self.steps += 1
            with torch.enable_grad():
                result = step(model, batch)
                loss, metrics = result if isinstance(result, tuple) else (result, None)
                with _no_autocast():
                    (loss / accumulate if accumulate > 1 else loss).backward()
            done += 1
            if done % accumulate == 0:
                try:
                    optimizer.step()
                finally:  # a call that fails leaves no gradients
                    optimizer.zero_grad(set_to_none=True)
            if metrics is None:
                return loss.detach()
            return loss.detach(), {name: metric.detach() for name, metric in metrics.items()}

        return train


@contextlib.contextmanager
def _no_autocast() -> Iterator[None]:
    """Backward passes stand behind the region that casts."""
    before = torch.is_autocast_enabled("cpu")
    torch.set_autocast_enabled("cpu", False)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cpu", before)


class Captured:
    """The step under test; counts the steps that were not opaque."""

    def __init__(self) -> None:
        self.steps = self.captured = 0
        self.reasons: list[str] = []

    def __call__(self, model: nn.Module, **arguments: Any) -> Callable[[Any], Any]:
        """A ``waterflow.Step``."""
        step = wf.Step(model, **arguments)

        def train(batch: Any) -> Any:
            self.steps += 1
            done = step(batch)
            if step.opaque_reason is None:
                self.captured += 1
            elif step.opaque_reason not in self.reasons:
                self.reasons.append(step.opaque_reason)
            return done

        return train


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns, or the type of what it raises: of an error of waterflow's own the first type that is not."""
    try:
        return function(*arguments)
    except Exception as error:
        kinds = (kind for kind in type(error).__mro__ if kind.__module__.partition(".")[0] != "waterflow")
        return ("raised", next(kinds).__name__)


# -- what a run leaves behind


def items_of(value: Any, path: str = "") -> Iterator[Item]:
    """Every number, tensor and structure of a value, copied."""
    if isinstance(value, FakeTensor):
        yield path, ("fake tensor",)
    elif isinstance(value, torch.Tensor):
        yield path, (tuple(value.shape), str(value.dtype), value.requires_grad, bytes_of(value))
        yield from items_of(_more(value), f"{path}.attributes")
    elif isinstance(value, nn.Module):
        yield from _items_of_module(value, path)
    elif isinstance(value, torch.optim.Optimizer):
        yield from _items_of_optimizer(value, path)
    elif isinstance(value, torch.Generator):
        yield path, value.get_state().numpy().tobytes()
    elif isinstance(value, np.ndarray):
        yield path, (value.shape, str(value.dtype), value.tobytes())
    elif isinstance(value, (list, tuple, collections.deque)):
        yield path, (type(value).__name__, len(value))
        for number, one in enumerate(value):
            yield from items_of(one, f"{path}[{number}]")
    elif isinstance(value, dict):
        yield path, (type(value).__name__, len(value))
        for key, one in value.items():
            yield from items_of(one, f"{path}[{key!r}]")
    elif isinstance(value, (set, frozenset)):
        yield path, sorted(map(repr, value))
    elif isinstance(value, float):
        yield path, (type(value).__name__, struct.pack("d", value))
    elif value is None or isinstance(value, (bool, int, str, bytes, bytearray, complex, torch.dtype, np.generic)):
        yield path, (type(value).__name__, repr(value))
    else:
        yield from _items_of_object(value, path)


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor's entries, row by row."""
    plain = tensor.detach().to_dense() if tensor.layout != torch.strided else tensor.detach()
    plain = plain.resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def _more(tensor: torch.Tensor) -> dict[str, Any]:
    return {name: one for name, one in tensor.__dict__.items() if name not in ("backward", "__getstate__")}


def _items_of_module(module: nn.Module, path: str) -> Iterator[Item]:
    for name, child in module.named_modules():
        plain = {k: v for k, v in vars(child).items() if isinstance(v, (bool, int, float, str, list, dict, torch.Tensor))}
        public = {k: v for k, v in plain.items() if not k.startswith("_")}
        yield from items_of(public, f"{path}.{name}")
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        yield from items_of(tensor, f"{path}.{name}")


def _items_of_optimizer(optimizer: torch.optim.Optimizer, path: str) -> Iterator[Item]:
    for number, group in enumerate(optimizer.param_groups):
        numbers = {key: value for key, value in group.items() if key not in ("params", "fused", "foreach")}
        yield from items_of(numbers, f"{path}.groups[{number}]")
        for which, parameter in enumerate(group["params"]):
            state = {k: v for k, v in sorted(optimizer.state.get(parameter, {}).items()) if v is not None}
            yield from items_of(state, f"{path}.state[{number}][{which}]")


def _items_of_object(value: Any, path: str) -> Iterator[Item]:
    yield path, type(value).__name__
    if isinstance(value, (type, types.FunctionType, types.ModuleType, enum.Enum)):
        return
    state = dict(getattr(value, "__dict__", {}))
    if dataclasses.is_dataclass(value):
        state |= {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    yield from items_of(state, path)


# -- fake tensors


def fakes_within(roots: list[Any], space: dict[str, Any]) -> list[str]:
    """Where a fake tensor can be reached from ``roots`` or from the current context, through code of ``space``'s."""
    import gc

    waiting = [(root, "") for root in (*roots, *contextvars.copy_context().values())]
    seen: set[int] = {id(space)}
    found = []
    while waiting:
        value, path = waiting.pop()
        if id(value) in seen or issubclass(type(value), _ELSEWHERE):
            continue
        seen.add(id(value))
        if issubclass(type(value), FakeTensor):
            found.append(path)
            continue
        code = issubclass(type(value), (type, types.FunctionType))
        owner = str(getattr(value if code else type(value), "__module__", ""))
        if owner.startswith(("waterflow", "torch._")) or (code and owner != space.get("__name__")):
            continue
        waiting += [(one, f"{path} {type(value).__name__}") for one in gc.get_referents(value)]
    return found


_ELSEWHERE = (str, bytes, int, float, types.ModuleType, types.CodeType, types.FrameType, types.BuiltinFunctionType)


# -- two runs


@dataclasses.dataclass
class Comparison:
    """What differs between an eager run and ours; no entry where nothing does."""

    differences: list[str] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)  # that the program itself raised, eagerly
    steps: int = 0
    captured: int = 0
    reasons: list[str] = dataclasses.field(default_factory=list)


def run(main: Main, make: Make, trial: int) -> dict[str, Any]:
    """What the program leaves behind: its result, its prints, and where the random numbers stand."""
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        result = attempt(main, make, trial)
    drawn = [torch.get_rng_state(), repr(random.getstate()), list(np.random.get_state())]
    return {"result": result, "printed": printed.getvalue(), "random numbers": drawn}


def compare(main: Main, trials: int = 1) -> Comparison:
    """Run each trial both ways, one after the other, and compare."""
    made = Comparison()
    for trial in range(trials):
        theirs = run(main, Eager(), trial)
        expected = dict(items_of(theirs))
        captured = Captured()
        ours = run(main, captured, trial)
        got = dict(items_of(ours))
        made.errors += [f"{path} {value}" for path, value in expected.items() if "raised" in str(value)[:60]]
        where = f"trial {trial}: " if trials > 1 else ""
        for path in {**expected, **got}:
            if path not in got or path not in expected:
                made.differences.append(f"{where}{path} is there {'with waterflow' if path in got else 'eagerly'} only")
            elif expected[path] != got[path]:
                made.differences.append(f"{where}{path}: {_shown(expected[path])} is {_shown(got[path])}")
        made.differences += [f"{where}fake tensor in{path}" for path in fakes_within([ours], main.__globals__)]
        made.steps += captured.steps
        made.captured += captured.captured
        made.reasons += captured.reasons
    return made


def _shown(item: Any) -> str:
    """A number where it is one."""
    if isinstance(item, tuple) and len(item) == 4 and item[1] == "torch.float32" and isinstance(item[3], bytes):
        return str(np.frombuffer(item[3], np.float32)[:3])
    return str(item)[:80]


def quiet() -> None:
    """One thread, and no warnings of steps that run eagerly."""
    logging.getLogger("waterflow").setLevel(logging.ERROR)
    torch.set_num_threads(1)
