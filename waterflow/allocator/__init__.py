"""Devices and their memory; what torch's allocators are asked for."""

from __future__ import annotations

from waterflow import _C
from waterflow.allocator import cuda
from waterflow.partition.plan.plan import Plan

__all__ = ["cuda", "time_planned_requests"]


def time_planned_requests(plan: Plan) -> list[float]:
    """Nanoseconds of one request with its release, through torch's allocator: the mean of each of 100 batches of 1,000.

    Raises ValueError for a plan without planned requests.
    """
    if plan.requests is None:
        raise ValueError(f"the plan of {plan.name!r} has no planned requests: profile the step first, by three calls")
    return _C.time_planned_requests(plan.requests.native())
