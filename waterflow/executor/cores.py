"""The cores that this process may use."""

from __future__ import annotations

import contextlib
import math
import os

MOST_THREADS = 256  # one for each lane, more of which would have no arena; or inside one operation


def usable_cores() -> int:
    """Return the number of cores that this process may run on, within the quota of its control group (``cpu.max``)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with contextlib.suppress(OSError, ValueError), open("/sys/fs/cgroup/cpu.max") as limit:  # "400000 100000", or "max 100000"
        quota, period = map(int, limit.read().split())
        cores = min(cores, math.ceil(quota / period))
    return max(1, cores)


def lanes_of(cores: int, threads_per_lane: int) -> int:
    """Return as many lanes as so many cores feed."""
    return min(max(1, cores // threads_per_lane), MOST_THREADS)
