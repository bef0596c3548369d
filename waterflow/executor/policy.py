"""On which policy a job is in an engine: guaranteed or opportunistic, and how much memory is its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from waterflow.errors import InvalidJobError
from waterflow.executor.memory_limit import parse_memory
from waterflow.partition.plan.plan import Plan
from waterflow.units import Priority


@dataclass(eq=False)
class ResourcePolicy:
    """``quota`` in bytes: of a guaranteed job what is kept for it, used or not; of an opportunistic one the most it may hold.

    ``preempt`` asks the job to leave the device at its next step boundary and to come back when there is room; it does not
    wait. None: it cannot, as ``stays`` tells. ``at_boundary`` is the thread that stands between two steps of the job: where that
    waits for memory, it can leave from there.
    """

    priority: Priority = "guaranteed"
    quota: int | None = None
    preempt: Callable[[], None] | None = None
    stays: str = (
        "it trains in a loop of its own; end that loop, or hand it in as a Job, whose state can go to host memory"
    )
    at_boundary: int | None = None
    quota_changed: bool = False  # while the job was there: what is above it then waits, and is not refused

    @property
    def opportunistic(self) -> bool:
        """Whether it takes what guaranteed jobs leave."""
        return self.priority == "opportunistic"

    @property
    def limit(self) -> int | None:
        """The most bytes that the job may hold; None: what there is."""
        return self.quota if self.opportunistic else None

    def allow(self, held: int) -> bool:
        """Whether the job may hold so many bytes."""
        return self.limit is None or held <= self.limit


class Preempted(Exception):
    """Instead of waiting for the memory of ``plan``, the job is to make way; what it was about to do has not begun."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        super().__init__(f"job {plan.name!r} makes way")


GUARANTEED = ResourcePolicy()  # of all that nobody has set


def parse_quota(what: str, quota: int | float | str | None, limit: int | None = None) -> int | None:
    """Bytes of a quota: a number of bytes, text like "4GiB", or a share of the engine's ``limit``."""
    if quota is None:
        return None
    try:
        bytes_ = parse_memory(quota, limit)
    except InvalidJobError:
        raise InvalidJobError(
            f"{what}: quota must be bytes as a whole number, a share in (0, 1] of the memory limit, or text like '4GiB'; got {quota!r}"
        ) from None
    if limit is not None and bytes_ > limit:
        raise InvalidJobError(
            f"{what}: its quota of {bytes_} bytes exceeds the engine's limit of {limit}; lower quota= or raise memory="
        )
    return bytes_
