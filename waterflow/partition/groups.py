"""Cutting a step into node groups: always at its peak, elsewhere evenly."""

from __future__ import annotations

from collections.abc import Sequence

DEFAULT_GROUPS = 32
# A group shorter than this costs more to admit than it can win.
FEWEST_OPERATIONS = 8
SHORTEST_SECONDS = 40e-6


def cut(
    peaks: Sequence[int], afters: Sequence[int], weights: Sequence[float], groups: int = DEFAULT_GROUPS
) -> list[int]:
    """Where the groups end (exclusive), given each operation's peak and height after it, in bytes.

    ``weights`` is what shall be equal among groups: seconds where they were measured, else bytes moved. Where
    heights change fast, groups are finer: half of the weight is the change of height. One group ends behind the
    operation with the highest peak, so that every group either gains memory or gives it back.
    """
    count = len(peaks)
    if count == 0:
        return []
    groups = max(1, min(groups, count // FEWEST_OPERATIONS or 1))
    top = max(range(count), key=lambda i: (peaks[i], -i))
    # The peak's operation closes the rise only if it keeps what it took.
    summit = top + 1 if top + 1 < count else count
    if groups == 1:
        return [count] if summit == count else [summit, count]
    total = sum(weights) or 1.0
    steps = [abs(afters[i] - (afters[i - 1] if i else 0)) for i in range(count)]
    climb = sum(steps) or 1
    mixed = [w / total + s / climb + 1e-9 for w, s in zip(weights, steps)]
    ends: list[int] = []
    for begin, end in ((0, summit), (summit, count)):
        if begin == end:
            continue
        share = sum(mixed[begin:end])
        pieces = max(1, round(groups * share / sum(mixed)))
        pieces = min(pieces, max(1, (end - begin) // (FEWEST_OPERATIONS // 2)))
        ends.extend(_even(mixed, begin, end, pieces))
    return ends


def _even(weights: Sequence[float], begin: int, end: int, pieces: int) -> list[int]:
    share = sum(weights[begin:end]) / pieces
    ends: list[int] = []
    gathered = 0.0
    for i in range(begin, end):
        gathered += weights[i]
        if gathered >= share * (len(ends) + 1) - 1e-12 and len(ends) < pieces - 1 and i + 1 < end:
            ends.append(i + 1)
    ends.append(end)
    return ends
