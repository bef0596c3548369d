"""Leases: a job's priority and quota in its engine, when it is held, and when it leaves its memory to others and comes back."""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any

from waterflow.executor.engine import Engine
from waterflow.executor.memory_limit import parse_quota
from waterflow.executor.policy import Preempted, ResourcePolicy
from waterflow.executor.program.ownership import copied
from waterflow.job import Job
from waterflow.partition.plan.plan import Plan
from waterflow.step import Step
from waterflow.training.checkpoint import Checkpoint
from waterflow.training.safepoint import JobEnded, Safepoint
from waterflow.units import Priority, check_priority

IN_A_STUDY = "it belongs to a deterministic study, whose other jobs would wait for it; study with deterministic=False"


class Lease(ABC):
    """The lease of steps in an engine. ``set`` and ``hold`` may be called from any thread."""

    def __init__(self, who: str, engine: Engine | None, policy: ResourcePolicy) -> None:
        self._who, self._engine, self.policy = who, engine, policy
        self._limit = engine.limit if engine is not None else None

    @abstractmethod
    def _apply(self) -> None:
        """Set the policy of the steps that there are."""

    def set(self, priority: Priority | None = None, quota: int | float | str | None = None) -> None:
        """Change priority or quota from the next step on. Raises InvalidJobError for invalid ones.

        None leaves either as it is; a quota cannot be taken away. Under a quota below its need a job continues with reduced
        steps, or is suspended; see ``Job.quota``.
        """
        if priority is not None:
            check_priority(self._who, priority)
            self.policy.priority = priority
        if quota is not None:
            self.policy.quota = parse_quota(self._who, quota, self._limit)
            self.policy.quota_changed = True
        self._apply()

    def hold(self, held: bool, yields: bool = True) -> None:
        """Let no further step begin, or with ``held=False`` go on. Does not wait for a step that has begun.

        What a held job has in memory is kept; if it ``yields``, until another job needs it: then the job leaves, and comes back once
        it goes on.
        """
        self.policy.yields = held and yields
        (self.policy.goes_on.clear if held else self.policy.goes_on.set)()
        if self._engine is not None:
            self._engine.reservations.look_again()


class LoopLease(Lease):
    """The lease of a loop of the user's own: of all ``steps`` that it makes ``within(engine, policy=lease.policy)``.

    Its memory cannot be moved. If it yields where another job needs that, ``give_up()`` is called, with the engine's locks held.
    """

    def __init__(self, who: str, engine: Engine) -> None:
        super().__init__(who, engine, ResourcePolicy())
        self.steps: Iterable[Any] = ()
        self.give_up: Callable[[], None] | None = None
        self._job: Lease | None = None
        self._lock = threading.Lock()

    def set(self, priority: Priority | None = None, quota: int | float | str | None = None) -> None:
        """See ``Lease``."""
        with self._lock:
            super().set(priority, quota)
            if self._job is not None:
                self._job.set(priority, quota)

    def hold(self, held: bool, yields: bool = True) -> None:
        """See ``Lease``."""
        with self._lock:
            self.policy.preempt = self.give_up if held and yields else None
            super().hold(held, yields)
            if self._job is not None:
                self._job.hold(held, yields)

    def hand_on(self, job: Lease) -> None:
        """Let the lease of a job have what was set, and will be: the loop has returned it."""
        with self._lock:
            job.set(self.policy.priority, self.policy.quota)
            job.hold(self.policy.held, self.policy.yields)
            self._job = job

    def _apply(self) -> None:
        for step in copied(self.steps):
            if step.engine is not None and step.job is not None:
                step.engine.set_policy(step.job, self.policy)


class EngineLease(Lease):
    """One job's lease, for as long as the job runs.

    An opportunistic job leaves if a guaranteed one needs its memory; any job leaves if its quota falls below the lowest form of
    its step. Its state moves to host memory at the next step boundary; it resumes, bitwise, when there is room.
    """

    def __init__(self, job: Job, engine: Engine | None, safepoint: Safepoint) -> None:
        self._safepoint, who = safepoint, f"job {job.name!r}"
        # In a deterministic study others wait for each job's turn: a suspended job would block them.
        stays = engine is not None and engine.reservations.clock is not None
        quota = parse_quota(who, job.quota, engine.limit if engine is not None else None)
        super().__init__(who, engine, ResourcePolicy(job.priority, quota, None if stays else self.leave, IN_A_STUDY))
        self.times_left = 0
        self._since = 0.0  # on the clock of time.monotonic()
        self._step: Step | None = None
        self._wanted: Plan | None = None  # the plan that it waited for when it left

    def enter(self, step: Step | None) -> None:
        """Apply the policy to ``step``, the job's step from now on; None when the job has ended."""
        self._step = step
        if self._engine is not None and step is not None and step.job is not None:
            self._engine.set_policy(step.job, self.policy)

    def _apply(self) -> None:
        self.enter(self._step)
        self._safepoint.look_again()

    def hold(self, held: bool, yields: bool = True) -> None:
        """See ``Lease``. The job waits at its safepoint, where it can be copied."""
        super().hold(held, yields)
        self._safepoint.look_again()

    def leave(self) -> None:
        """Request that the job leaves at its next step boundary. Does not wait for that."""
        self._since = time.monotonic()
        self._safepoint.request("make way").add_done_callback(self._left)

    def _left(self, made: Future[Checkpoint]) -> None:
        # A job whose state cannot be copied (a scheduler without state_dict, say) stays, and the engine must not ask it
        # again.
        error, step = made.exception(), self._step
        if error is None or isinstance(error, JobEnded) or self._engine is None or step is None or step.job is None:
            return
        self._engine.reservations.cannot_be_preempted(step.job, str(error))

    @contextlib.contextmanager
    def may_leave(self) -> Iterator[None]:
        """On the job's thread between two steps: a wait for memory inside is abandoned if the job is to leave."""
        self.policy.at_boundary, self._wanted = threading.get_ident(), None
        try:
            yield
        except Preempted as given_up:
            self._wanted = given_up.plan
        finally:
            self.policy.at_boundary = None

    def has_room(self) -> bool:
        """Return True if the job can come back. If not, ask other jobs to take turns with it."""
        step, engine = self._step, self._engine
        assert step is not None
        # A guaranteed job without turns comes back at once: others leave when it reserves its memory.
        if self.policy.held:
            return False
        if engine is not None and (self.policy.opportunistic or engine.reservations.quantum is not None):
            plan = step.least_plan(self._wanted, self.policy.limit)
            if not engine.reservations.would_fit(plan, self.policy, step.batches_ahead):
                engine.reservations.ask_for_turn(plan, self.policy, step.batches_ahead, self._since)
                engine.poll()
                return False
        self.times_left += 1
        return True
