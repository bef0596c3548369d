"""Settings of the process and the calling thread that change what a trace records."""

from __future__ import annotations

from collections.abc import Hashable

from torch.distributions import Distribution
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext

from waterflow import _C
from waterflow.errors import CaptureError


def ambient_key(device_type: str) -> Hashable:
    """The key of these settings, read before each step.

    Raises CaptureError for a thread that is in a function mode, a dispatch mode, or hooks for saved tensors: code of its user's
    that would run only while a step is traced. A default device is none.
    """
    settings = _C.ambient(device_type), Distribution._validate_args
    if not _C.modes_here():
        return settings
    modes = _get_current_function_mode_stack()
    for mode in modes:
        if type(mode) is not DeviceContext:
            raise CaptureError(f"the step is called in a {type(mode).__name__}, which must see every step")
    if _C.modes_here() > len(modes):
        raise CaptureError(
            "the step is called in a dispatch mode or with hooks for saved tensors, which must see every step"
        )
    return settings, tuple(str(mode.device) for mode in modes)
