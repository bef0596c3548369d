"""Reasons: why a step cannot be captured, the user's line that causes it, and what helps."""

from __future__ import annotations

import functools
import linecache
import os
import re
import traceback
import types
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

_INSIDE = (torch.__path__[0] + os.sep, str(Path(__file__).parents[2]) + os.sep)
_INSTALLED = (os.path.dirname(os.__file__) + os.sep, "site-packages", "dist-packages")


@functools.lru_cache(maxsize=4096)
def is_users_file(name: str) -> bool:
    """Return whether code of this file is neither torch's nor waterflow's."""
    return not name.startswith(_INSIDE) and "<frozen" not in name


def shown_line(line: tuple[str, int, str]) -> str:
    """Format a line as ``file:line, in function: code``."""
    file, number, function = line
    return f"{file}:{number}, in {function}: {linecache.getline(file, number).strip()}"


def user_place(trace: types.TracebackType | None, model: nn.Module) -> list[str]:
    """Return the innermost module of ``model`` that a traceback passed, by its path, and the innermost line of user code."""
    paths = {id(module): f"module {path!r} ({type(module).__name__})" for path, module in model.named_modules() if path}
    passed = [paths.get(id(frame.f_locals.get("self")), "") for frame, _ in traceback.walk_tb(trace)]
    return list(filter(None, [next(filter(None, reversed(passed)), ""), user_line(trace)]))


def user_line(trace: types.TracebackType | None) -> str:
    """Return the innermost line of user code in a traceback whose source can be read; empty if there is none.

    Behind a line of an installed library stands the innermost of the user's own.
    """
    found = [one for one in reversed(traceback.extract_tb(trace)) if is_users_file(one.filename) and one.line]
    own = [one for one in found if not any(place in one.filename for place in _INSTALLED)]
    lines = (f"{one.filename}:{one.lineno}, in {one.name}: {one.line}" for one in (*found[:1], *own[:1]))
    return ", from ".join(dict.fromkeys(lines))


class ReadsValues(RuntimeError):
    """A step asks for the values of a tensor, of which a trace has none."""


DRAWN = "draw before the step, and pass what was drawn in the batch, as a tensor"
_TOLD = "return the tensor as a metric, and read it after the step"
_SIZE = "compute a size (the number of classes, of segments) before the step, and pass it in the batch as a number"
_LENGTHS = "reads the lengths; give the layer the padded batch, and leave out what is beyond the lengths by a product with a mask"
_CHECKS = "checks values; pass validate_args=False, and check them before the step"
# By the function of torch's that reads values: what it does with them, and what helps.
_READERS = {
    "_detect_is_causal_mask": "compares mask= with a causal mask; pass is_causal=True, else False (decoders: tgt_is_causal=)",
    "_BatchNorm.forward": "computes with the value of num_batches_tracked; give it a number as momentum=",
    "FakeQuantize.forward": "reads its switches; torch.ao.quantization.FusedMovingAvgObsFakeQuantize does not",
    **dict.fromkeys(("pack_padded_sequence", "LSTM.forward", "GRU.forward", "RNN.forward"), _LENGTHS),
    **dict.fromkeys(("Distribution.__init__", "Distribution._validate_sample"), _CHECKS),
    "ctc_loss": "reads the lengths and targets, and runs only eagerly",
    "gaussian_nll_loss": "looks for negative variances; write out 0.5 * (var.log() + (input - target) ** 2 / var)",
    "one_hot": "reads the largest class; pass num_classes=",
    "repeat_interleave": "sums up the repeats; pass output_size=",
}
_MASKED = (
    "the shape of x[mask] depends on the values of the mask; make the indices (mask.nonzero()) before the step, take the "
    'loss\'s ignore_index=, or reduction="none" and (loss * mask).sum() / mask.sum()'
)
_BETWEEN = ("/", "fx", "_subclasses", "overrides.py", "utils/_", "_tensor.py")  # tracing, and methods that the user called
# By a word of a reason.
_ADVICE = {
    **dict.fromkeys(("draws", "random"), DRAWN),
    **dict.fromkeys(("print", "TensorBase", "logging", "tensorboard", "tensorboardX", "wandb", "mlflow", "tqdm"), _TOLD),
    **dict.fromkeys(("evaluates", "dynamo_tls"), "take torch.compile (or a debugger) away: pass model and functions as they are"),
}


def advised(reason: str, otherwise: str = "") -> str:
    """Return a reason with what helps, where that is known; ``otherwise`` is what helps in other cases."""
    words = re.findall(r"\w+", reason)
    advice = next((advice for word, advice in _ADVICE.items() if word in words), otherwise)
    return f"{reason}; {advice}" if advice else reason


def reason_of(error: BaseException) -> str:
    """Return one line that says why an error stops a capture, and what helps."""
    dynamic = type(error).__name__ == "DynamicOutputShapeException"
    if not dynamic and type(error).__name__ not in ("DataDependentOutputException", "GuardOnDataDependentSymNode", "ReadsValues"):
        return ": ".join((type(error).__name__, str(error).strip().partition("\n")[0]))
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = max((n for n, frame in enumerate(frames) if is_users_file(frame.f_code.co_filename)), default=-1)
    frames = frames[last + 1 :]
    names = [frame.f_code.co_qualname for frame in frames]
    asked = names.index("Substitution.__torch_function__") if "Substitution.__torch_function__" in names else 0
    found = frames[asked].f_locals
    name = getattr(found.get("func"), "__name__", "an operation")
    reader = _reader(frames[:asked])
    if (what := next((text for key, text in _READERS.items() if key in (name, *names)), None)) is not None:
        return f"torch's {reader or name} {what}"
    if reader:
        return f"torch's {reader} reads the values of its tensors, and runs only eagerly"
    if dynamic and name in ("__getitem__", "masked_select"):
        return _MASKED
    if dynamic:
        return f"the shape of what {name}() returns depends on values; compute it before the step, and pass it in the batch"
    if name == "__bool__":
        return f"the step reads the values of its tensors by if, while or assert; choose by torch.where, or {_TOLD}"
    if name in ("__index__", "__getitem__"):
        return f"the step reads the values of its tensors for an index or a size; {_SIZE}"
    whole = isinstance(given := next(iter(found.get("args", ())), None), torch.Tensor) and not given.is_floating_point()
    advice = f"{_SIZE}, or {_TOLD}" if whole else f"compute with the tensor itself, or {_TOLD}"
    return f"the step reads the values of its tensors by {name.strip('_')}(); {advice}"


def _reader(frames: Sequence[types.FrameType]) -> str:
    # The class or function of torch's that asks for values: the innermost object, else the function that the user called.
    torchs = [one for one in frames if not one.f_code.co_filename.removeprefix(_INSIDE[0]).startswith(_BETWEEN)]
    names = [type(one.f_locals["self"]).__name__ for one in reversed(torchs) if "self" in one.f_locals]
    return next((name for name in (*names, *(one.f_code.co_name for one in torchs)) if name[0] != "_"), "")
