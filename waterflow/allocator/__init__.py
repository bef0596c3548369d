"""The allocator: serves torch's requests for device memory, by plan or from a pool."""

from __future__ import annotations

from waterflow import _C
from waterflow.allocator import cuda
from waterflow.partition.plan.plan import Plan

__all__ = ["cuda", "time_planned_requests"]


def time_planned_requests(plan: Plan) -> list[float]:
    """Return nanoseconds of a planned request with its release, through torch: the means of 100 batches of 1,000.

    Raises ValueError for a plan without planned requests.
    """
    if plan.requests is None:
        raise ValueError(f"the plan of {plan.name!r} has no planned requests: profile the step first, by three calls")
    return _C.time_planned_requests(plan.requests.native())
