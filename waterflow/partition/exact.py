"""Keys that tell values apart by type and bits, where ``==`` does not: 0.0 from -0.0, 1 from 1.0 and from True."""

from __future__ import annotations

import dataclasses
import struct
from typing import Any

import numpy as np


def exact(value: Any) -> Any:
    """A key that equals that of another value only if both have the same type and bits; NaN is equal to itself.

    Looks into plain containers and dataclasses. Objects of other kinds are equal if they say so and look alike. The key can be
    hashed if all that it was made of can be, or is a list or a dict.
    """
    kind = type(value)
    if kind is str or kind is int or kind is bool or value is None:
        return kind, value
    if isinstance(value, float):
        return kind, struct.pack("d", value)
    if isinstance(value, complex):
        return kind, struct.pack("dd", value.real, value.imag)
    if isinstance(value, np.generic):
        return kind, value.dtype.str, value.tobytes()
    if isinstance(value, (list, tuple)):
        return kind, tuple(map(exact, value))
    if isinstance(value, (set, frozenset)):
        return kind, frozenset(map(exact, value))
    if isinstance(value, dict):
        return kind, tuple((exact(key), exact(entry)) for key, entry in value.items())
    if isinstance(value, (range, slice)):
        return kind, exact((value.start, value.stop, value.step))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return kind, tuple(exact(getattr(value, one.name)) for one in dataclasses.fields(value))
    return kind, value, repr(value)
