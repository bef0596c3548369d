"""Lengths of time as people write them."""

from __future__ import annotations

import math

from waterflow.errors import InvalidJobError

RULE = "must be a positive number of seconds, or text like '90s', '30min' or '2h'"
_UNITS = {"": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def parse_seconds(given: float | str, what: str = "a limit of time") -> float:
    """Seconds: a positive number, or text like ``90s``, ``30min``, ``2h``, ``1.5d``. Raises InvalidJobError."""
    text = given.strip().lower() if isinstance(given, str) else given
    try:
        if isinstance(text, str):
            number = text.rstrip("abcdefghijklmnopqrstuvwxyz ")
            seconds = float(number) * _UNITS[text[len(number) :].strip()]
        else:
            seconds = math.nan if isinstance(text, bool) else float(text)
    except (ValueError, KeyError, TypeError):
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise InvalidJobError(f"{what} {RULE}; got {given!r}")
    return seconds


def format_seconds(seconds: float) -> str:
    """For people, in the largest unit of which there is one at least."""
    for unit in ("d", "h", "min"):
        if seconds >= _UNITS[unit]:
            return f"{seconds / _UNITS[unit]:.3g} {unit}"
    return f"{seconds:.3g} s"
