"""Resource policies of jobs in an engine: priority, quota, whether they are held, and whether they can be preempted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from waterflow.executor.cancel import doing, time_does_not_count
from waterflow.partition.plan.plan import Plan
from waterflow.units import Priority

POLL_SECONDS = 0.1


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass(eq=False)
class ResourcePolicy:
    """The priority and quota of one job, and the way to preempt it.

    ``quota`` is in bytes: for a guaranteed job the memory that is kept for it, used or not; for an opportunistic one the most
    that it may claim. ``preempt()`` asks the job to leave the device at its next step boundary, and to return when there is
    room; it does not wait. None means that the job cannot be preempted, for the reason in ``stays``. ``at_boundary`` is the
    thread that is between two steps of the job: if it waits for memory, it can leave from there. A job that is ``held`` begins no
    step, and claims no memory, until it ``goes_on``; if it ``yields``, what it has is the first to be given to others.
    """

    priority: Priority = "guaranteed"
    quota: int | None = None
    preempt: Callable[[], None] | None = None
    stays: str = "it trains in a loop of its own; end that loop, or hand it in as a Job, whose state can go to host memory"
    at_boundary: int | None = None
    quota_changed: bool = False  # after the job began: a step above its quota then waits, and is not refused
    goes_on: threading.Event = field(default_factory=_set_event)
    yields: bool = False

    @property
    def opportunistic(self) -> bool:
        """True if the job takes only what guaranteed jobs leave."""
        return self.priority == "opportunistic"

    @property
    def held(self) -> bool:
        """True if the job is to begin no step."""
        return not self.goes_on.is_set()

    @doing("held by the scheduler of its cluster", interruptible=True)
    def wait_while_held(self) -> None:
        """Wait, on the job's thread between two steps, until the job goes on."""
        with time_does_not_count():
            while not self.goes_on.wait(POLL_SECONDS):  # an interrupt reaches the thread in between
                pass

    @property
    def limit(self) -> int | None:
        """The most bytes that the job may claim; None if only the engine's limit bounds it."""
        return self.quota if self.opportunistic else None

    def allow(self, held: int) -> bool:
        """Return True if the job may claim ``held`` bytes in all."""
        return self.limit is None or held <= self.limit


class Preempted(Exception):
    """The job must leave the device instead of waiting for the memory of ``plan``; the step has not begun."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        super().__init__(f"job {plan.name!r} is preempted")


GUARANTEED = ResourcePolicy()  # the policy of jobs that have none set
