"""What surrounds a trace: it must leave the user's modules and random numbers as they were."""

from __future__ import annotations

import contextlib
import gc
import random
import traceback
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from waterflow.errors import CaptureError


@contextlib.contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Puts back what tracing left in the modules; raises where a step would change more than tensors."""
    before = [(name, module, dict(module.__dict__)) for name, module in model.named_modules()]
    python_state, numpy_state = random.getstate(), _numpy_state()
    try:
        yield
    finally:
        changed = ""
        for name, module, attributes in before:
            for key in set(attributes) | set(module.__dict__):
                old, new = attributes.get(key, _MISSING), module.__dict__.get(key, _MISSING)
                if old is new:
                    continue
                if old is _MISSING:
                    del module.__dict__[key]
                else:
                    module.__dict__[key] = old
                # Recurrent layers keep lists of their own weights, and weight_norm's hook sets the weight anew.
                if isinstance(module, nn.RNNBase) or module._forward_pre_hooks:
                    continue
                if not _equal(old, new):
                    changed = f"{name or type(model).__name__}.{key}"
        drew_python = random.getstate() != python_state
        if drew_python:
            random.setstate(python_state)
        now = _numpy_state()
        drew_numpy = not (np.array_equal(now["key"], numpy_state["key"]) and now["pos"] == numpy_state["pos"])
        if drew_numpy:
            np.random.set_state({"bit_generator": "MT19937", "state": numpy_state})
    if changed:
        raise CaptureError(
            f"a step changes the model's own attribute {changed}; register it as a buffer if it is a tensor"
        )
    if drew_python:
        raise CaptureError("a step draws from Python's random numbers")
    if drew_numpy:
        raise CaptureError("a step draws from NumPy's random numbers")


@contextlib.contextmanager
def no_collections() -> Iterator[None]:
    """Tracing makes many objects and no garbage: a fifth of its time would go into looking for some."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _numpy_state() -> Any:
    return np.random.get_state(legacy=False)["state"]


_MISSING = object()


def _equal(old: Any, new: Any) -> bool:
    if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
        return False
    try:
        return bool(old == new)
    except Exception:
        return False


def user_line(trace: types.TracebackType | None) -> str:
    """``file:line, in function: code`` of the innermost frame that is neither torch's nor waterflow's."""
    inside = (torch.__path__[0], str(Path(__file__).parents[1]))
    for frame in reversed(traceback.extract_tb(trace)):
        if not frame.filename.startswith(inside) and "<frozen" not in frame.filename:
            return f"{frame.filename}:{frame.lineno}, in {frame.name}: {frame.line}"
    return ""
