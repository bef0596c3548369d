"""The largest batch of a step that fits: captured at smaller sizes, no memory used."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from waterflow.errors import CaptureError
from waterflow.partition.plan import Plan

_MOST_CAPTURES = 6


def largest_batch(leaves: Sequence[Any], plan_of: Callable[[list[Any]], Plan], room: int) -> int | None:
    """The largest first dimension at which the step's peak stays within ``room`` bytes.

    Searches between known plans, guided by a straight line through the last two; None where even the smallest
    batch does not fit or the step cannot be captured at other sizes.
    """
    sizes = Counter(t.shape[0] for t in leaves if isinstance(t, torch.Tensor) and t.dim() > 0)
    if not sizes:
        return None
    full = sizes.most_common(1)[0][0]

    def peak(size: int) -> int:
        cut = [
            leaf[:size] if isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and leaf.shape[0] == full else leaf
            for leaf in leaves
        ]
        return plan_of([c.contiguous() if isinstance(c, torch.Tensor) else c for c in cut]).peak

    try:
        (low, least), high = _smallest(peak), full
        known = {low: least, high: peak(high)}
        if known[low] > room:
            return None
        for _ in range(_MOST_CAPTURES):
            if high - low <= 1:
                break
            slope = (known[high] - known[low]) / (high - low)
            guess = low + int((room - known[low]) / slope) if slope > 0 else (low + high) // 2
            guess = min(max(guess, low + 1), high - 1)
            known[guess] = peak(guess)
            if known[guess] <= room:
                low = guess
            else:
                high = guess
        return low
    except (CaptureError, RuntimeError):
        return None


def _smallest(peak: Callable[[int], int]) -> tuple[int, int]:
    """The smallest size and its peak: 1, or 2 where normalization over the batch allows no single one."""
    try:
        return 1, peak(1)
    except (CaptureError, RuntimeError):
        return 2, peak(2)
