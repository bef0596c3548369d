"""Parse and format bytes, times, devices and priorities; words that settings take. Needs no torch."""

from __future__ import annotations

import math
import re
from typing import Literal, get_args

from waterflow.errors import InvalidJobError

DEVICE = re.compile(r"cpu|cuda(:(0|[1-9][0-9]*))?")


def missing(device: str, count: int = 1) -> str | None:
    """Return why this machine lacks ``count`` devices of that name, with a remedy; None if it has them.

    ``device`` matches ``DEVICE``. CUDA is not initialized, as a process that forks must not do that.
    """
    if device == "cpu":
        return None
    import torch

    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not there:
        built = "was built without CUDA" if torch.version.cuda is None else "finds no GPU (see nvidia-smi)"
        return f"device {device!r} cannot be used: this torch ({torch.__version__}) {built}; use 'cpu'"
    last = int(device.partition(":")[2]) if ":" in device else count - 1
    if last >= there:
        asked = f"{device!r}" if ":" in device else f"{count} devices"
        return f"{asked} of {there} GPU(s) on this machine cannot be; ask for at most {there}, the last is 'cuda:{there - 1}'"
    return None


def check_device(device: object) -> None:
    """Raise InvalidJobError unless ``device``, a ``torch.device`` or its name, can be trained on, on this machine."""
    if DEVICE.fullmatch(str(device)) is None:
        raise InvalidJobError(f"device {str(device)!r} is not supported; waterflow trains on 'cpu' and 'cuda': pass device='cpu'")
    if (why := missing(str(device))) is not None:
        raise InvalidJobError(why)


RULE = "must be a positive number of seconds, or text like '90s', '30min' or '2h'"
_UNITS = {"": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(given: float | str, what: str = "a limit of time") -> float:
    """Return seconds from a positive number or text like ``90s``, ``30min``, ``2h``, ``1.5d``. Raises InvalidJobError."""
    text = given.strip().lower() if isinstance(given, str) else given
    try:
        if isinstance(text, str):
            number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
            seconds = float(number) * _UNITS[text[len(number) :].strip()]
        else:
            # A bool is a number in Python: timeout=True is a mistake, not one second.
            seconds = math.nan if isinstance(text, bool) else float(text)
    except (ValueError, KeyError, TypeError):
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidJobError(f"{what} {RULE}; got {given!r}")
    return seconds


def format_seconds(seconds: float) -> str:
    """Return text like ``1.5 min``, in the largest unit of which there is at least one."""
    for unit in ("d", "h", "min"):
        if seconds >= _UNITS[unit]:
            return f"{seconds / _UNITS[unit]:.3g} {unit}"
    return f"{seconds:.3g} s"


def format_bytes(count: float) -> str:
    """Return text like ``412.0 MiB``; exact below one KiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{int(count)} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError


Priority = Literal["guaranteed", "opportunistic"]
Mode = Literal["auto", "lanes", "turns"]  # of an engine; see there


def check_priority(what: str, priority: object) -> None:
    """Raise InvalidJobError if ``priority`` is no priority; ``what`` names its owner in the message."""
    if priority not in get_args(Priority):
        raise InvalidJobError(f"{what}: priority must be 'guaranteed' or 'opportunistic'; got {priority!r}")
