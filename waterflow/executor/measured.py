"""Which of two ways to call an operator takes less time here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch

REPEATS = 5
GAIN = 1.1

_found: dict[Hashable, bool] = {}
_one_at_a_time = threading.Lock()


def is_faster(like: Hashable, ways: Callable[[], tuple[Callable[[], Any], Callable[[], Any]]]) -> bool:
    """Whether the second of ``ways()`` is, by more than noise: measured once for all that are ``like`` it, interleaved."""
    key = (like, torch.get_num_threads())
    with _one_at_a_time:
        if key not in _found:
            _found[key] = measure(*ways())
        return _found[key]


def measure(first: Callable[[], Any], second: Callable[[], Any]) -> bool:
    """Whether the second is faster, now."""
    best = [float("inf")] * 2
    for _ in range(REPEATS):
        for number, way in enumerate((first, second)):
            begin = time.perf_counter()
            way()
            best[number] = min(best[number], time.perf_counter() - begin)
    return best[1] * GAIN < best[0]
