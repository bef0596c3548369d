"""Agreement: members make model and data each for itself, and an error names what is not the same on all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from waterflow.errors import InvalidJobError
from waterflow.executor.data.digest import digest

MODEL = (
    "Each device makes the model for itself, and only numbers are sent to others: make modules and parameters in an order, and of sizes, "
    "that are the same in each process; sorted(names) is, and the order of a set is not"
)
DATA = (
    "Each device reads the data for itself: let what decides on it follow from the job's seed. Samplers and rows draw from torch's "
    "numbers, not from Python's or NumPy's, and labels are numbered in the order of sorted(names), not in that of a set"
)
STATE = (
    "Each device has the whole state, and changes it by the same gradients: let schedulers and optimizers draw from torch's numbers, not "
    "from Python's or NumPy's, and steps change no state that get_extra_state returns"
)


def check_alike(job: str, what: str, found: Sequence[Any], devices: Sequence[str], remedy: str) -> None:
    """Raise InvalidJobError, with the first difference, if what was found on ``devices`` is not the same on all of them."""
    for device, other in zip(devices, found):
        if digest(other) != digest(found[0]):
            where, *values = _first_difference(what, found[0], other)
            one, another = (value.hex() if isinstance(value, bytes) else repr(value) for value in values)
            raise InvalidJobError(
                f"job {job!r} is not the same on its devices: {where} is {one} on {devices[0]} and {another} on {device}. {remedy}"
            )


def check_unchanged(job: str, before: dict[str, Any], now: dict[str, Any]) -> None:
    """Raise InvalidJobError if a callback has changed objects of which the devices have copies."""
    for where, state in before.items():
        if digest(state) != digest(now[where]):
            what = _first_difference(where, state, now[where])[0]
            raise InvalidJobError(
                f"a callback has changed {what} in this process, and the devices of job {job!r} train copies, on which that has no effect. "
                "Change the model in evaluate=, whose changes all devices are given; data follows from the seed and the epoch"
            )


def _first_difference(where: str, one: Any, other: Any) -> tuple[str, Any, Any]:
    one, other = (value.tolist() if isinstance(value, torch.Tensor) else value for value in (one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        for key in (*one, *other):
            if digest(one.get(key)) != digest(other.get(key)):
                return _first_difference(f"{key} of {where}", one.get(key), other.get(key))
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        for number, (mine, theirs) in enumerate(zip(one, other)):
            if digest(mine) != digest(theirs):
                return _first_difference(f"entry {number} of {where}", mine, theirs)
        if len(one) != len(other):
            return f"the length of {where}", len(one), len(other)
    return where, one, other
