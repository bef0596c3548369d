"""What torch.distributions checks of its arguments: a captured step goes on as if they were valid, and looks in each step."""

from __future__ import annotations

import dis
import os
import sys
from collections.abc import Iterator
from types import FrameType

import torch
from torch import distributions, fx

from waterflow.partition.surroundings import is_users_file

CHECK = torch.ops.aten._assert_async.msg
_FOLDER = os.path.dirname(distributions.__file__) + os.sep
_MAKING = distributions.Distribution.__init__.__code__
_SCORING = distributions.Distribution._validate_sample.__code__


def is_checked(graph: fx.Graph, truth: fx.Node) -> bool:
    """Whether the truth that a step asks for is such a check; the graph then fails where it does not hold, as the step does.

    On the CPU alone, where an operation that fails ends nothing but its step, and where no code of the step's would catch the error.
    """
    frames = _frames(sys._getframe(1))
    named = ((one, one.f_code.co_filename) for one in frames)
    frame = next((one for one, name in named if name.startswith(_FOLDER) or is_users_file(name)), None)
    on_cpu = truth.meta["val"].device.type == "cpu"
    if not on_cpu or frame is None or frame.f_code not in (_MAKING, _SCORING) or any(map(_may_catch, (frame, *frames))):
        return False
    found, making = frame.f_locals, frame.f_code is _MAKING
    of, what = type(found["self"]).__name__, f"(Tensor of shape {tuple(found['value'].shape)})"
    rule = type(found["constraint" if making else "support"]).__name__.lstrip("_")
    why = f"Expected value argument {what} to be within the support ({rule}) of the distribution {of}"
    if making:
        why = f"Expected parameter {found['param']} {what} of distribution {of} to satisfy the constraint {rule}"
    graph.call_function(CHECK, (truth, why))
    return True


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    """Outwards, to the trace's own."""
    while frame is not None and frame.f_code.co_qualname != "_StepTracer._step":
        yield frame
        frame = frame.f_back


def _may_catch(frame: FrameType) -> bool:
    """Whether an error that comes up here may end in this frame: in a ``try`` or in a ``with``."""
    entries = dis._parse_exception_table(frame.f_code)  # type: ignore[attr-defined]
    return any(entry.start <= frame.f_lasti < entry.end for entry in entries)
