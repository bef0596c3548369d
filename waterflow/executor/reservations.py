"""Who holds how much of an engine's memory between steps, who waits for it, and who makes way."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Collection, Iterator

from waterflow import _C
from waterflow.errors import JobCancelled, MemoryLimitError
from waterflow.executor.memory_limit import Claim, Need
from waterflow.executor.memory_limit import needed as needed_by
from waterflow.executor.policy import GUARANTEED, Preempted, ResourcePolicy
from waterflow.executor.virtual_clock import VirtualClock, current_worker
from waterflow.partition.plan.plan import Plan, format_bytes

logger = logging.getLogger("waterflow")

ASK_AGAIN = 30.0  # seconds after a job could not make way


class Reservations:
    """The book of an engine's memory. Thread-safe.

    Opportunistic jobs claim only what leaves room for the largest guaranteed step beside their own largest one. Where a
    guaranteed job finds no room, they make way for it at their next step boundary.
    With a ``quantum`` (seconds) jobs of one class take turns where not all of them fit: who has waited so long is given the memory of
    those who have had it for so long.
    """

    def __init__(self, native: _C.Engine, limit: int, reserve: int) -> None:
        self.native = native
        self.names: dict[int, str] = {}
        # Entered directly: an exception from outside (Ctrl-C, breaking off) may strike inside of Condition.__enter__, which
        # is Python code, and would leave the lock behind.
        self._guard = threading.RLock()
        self._changed = threading.Condition(self._guard)
        self._policies: dict[int, ResourcePolicy] = {}
        self._waiting: dict[int, tuple[int, int, int]] = {}  # by owner: the job, and the bytes and height it wants
        self._told: set[int] = set()  # to make way, and have not yet
        self._lent: set[int] = set()  # opportunistic jobs that count as guaranteed while one of those waits for them
        self._stay: dict[int, float] = {}  # could not make way, and are not asked again before
        self._known_to_stay: set[int] = set()  # of whom the user was told
        self.limit, self.reserve = limit, reserve
        self.clock: VirtualClock | None = None  # set where the order of events must not follow the wall clock
        self.persistent_log: list[tuple[int, int, str, int]] = []
        self.most_claimed = 0  # bytes, the height of each with them
        self.changes = 0  # of claims and policy: steps then look at what they claim
        self.quantum: float | None = None
        self._claims: dict[int, Claim] = {}
        self._asked: dict[int, tuple[int, int]] = {}  # by worker: the most bytes and height it claimed, or wanted
        self._looking: list[int] = []
        self.closed = False
        self._keep_pages = 0

    def __len__(self) -> int:
        """Jobs that hold memory."""
        return len(self._claims)

    def policies(self) -> list[tuple[int, ResourcePolicy]]:
        """All that were set, by job."""
        return list(self._policies.items())

    @property
    def room(self) -> int:
        """Bytes for jobs: the limit without the reserve."""
        return self.limit - self.reserve

    def claim(self, job: int, plan: Plan, *, batches: int = 1) -> None:
        """Claim what persists for ``job`` before its first step; wait for others to leave where it does not fit.

        What is left must hold the largest step of any job that has a claim. Raises MemoryLimitError when the job
        does not fit into an empty device, or when everyone who holds memory waits for more. Raises
        Preempted on the thread that stands at a boundary of the job (``ResourcePolicy.at_boundary``) where it is to leave first.
        """
        policy = self.policy_of(job)
        needed, height = plan.persistent + plan.batch * batches, plan.height
        mine = self._claims.get(job)
        if mine is not None and needed <= mine.needed and height <= mine.height:
            if self.above_quota(job):
                self._leave(job, plan)
            return
        if needed + height > self.room:
            raise too_large(plan, needed, self.limit, self.room)
        if mine is not None and max(needed, mine.needed) + max(height, mine.height) <= self.room:
            needed, height = max(needed, mine.needed), max(height, mine.height)  # its other steps go on
        wanted = self._wanted(policy, needed, height)
        if policy.limit is not None and wanted + height > policy.limit:
            if policy.quota_changed and mine is not None and policy.at_boundary == threading.get_ident():
                self._leave(job, plan)
            raise self._quota_refused(plan, wanted, policy.limit)
        owner, worker, began = threading.get_ident(), current_worker(), time.monotonic()
        self._note(job, wanted, height)
        try:
            while True:
                with self._turn(), self._guard:
                    while self._looking and not self.closed:
                        for other in [] if policy.opportunistic else self._looking:
                            self._lend_priority(other)
                        self._changed.wait(timeout=0.1)
                    if self.closed:
                        raise JobCancelled("the engine was closed while a job waited for memory")
                    if self._fits(job, wanted, height):
                        since = mine.since if mine is not None else time.monotonic()
                        self._claims[job] = Claim(
                            plan.name, owner, worker, wanted, height, policy.opportunistic, needed, since
                        )
                        claimed = sum(c.bytes + c.height for c in self._claims.values())
                        self.most_claimed = max(self.most_claimed, claimed)
                        self._set_capacity()
                        self.changes += 1
                        # Steps under way may still stand on this ground; they finish, and none starts before.
                        while self.native.capacity > self._capacity() and not self.closed:
                            self._changed.wait(timeout=0.001)
                        self._book(job, plan.name, wanted)
                        return
                    self._waiting[owner] = (job, wanted, height)
                    making_way = self._ask_for_room(job, wanted, height)
                    making_way |= self._ask_for_turn(job, wanted, height, policy, began)
                    stuck = not making_way and self._nobody_goes_on(job)
                    if mine is not None and policy.at_boundary == owner:
                        comes_back = policy.opportunistic and self._fits(job, wanted, height, without=self._claims)
                        if (stuck and comes_back) or not policy.allow(wanted + height):  # rather than fail
                            self._tell(job)
                        if job in self._told:
                            raise Preempted(plan)
                    if stuck:
                        raise self._stuck(job, plan, wanted)
                    if not making_way:
                        self._tell_who_stays(job, wanted, height)
                    if self.clock is None or worker is None or not self.clock.suspend(worker):
                        self._changed.wait(timeout=0.1)  # Ctrl-C reaches it in between
        finally:
            with self._guard:
                self._waiting.pop(owner, None)
            self.take_back_priority()

    @contextlib.contextmanager
    def looking(self, job: int) -> Iterator[int]:
        """For a step whose height is not known: what steps can have at most. Inside, nobody's claim lessens it."""
        with self._guard:
            self._looking.append(job)
            capacity = self._capacity()
        try:
            yield capacity
        finally:
            with self._guard:
                self._looking.remove(job)
                self._changed.notify_all()
            with contextlib.suppress(ValueError):
                self.native.set_opportunistic(job, self.policy_of(job).opportunistic)

    def _turn(self) -> contextlib.AbstractContextManager[None]:
        """Under a virtual clock memory changes hands in its order."""
        worker = current_worker()
        # Inside of a step a job may be collected; those whose turn it is may wait for this lane.
        if self.clock is None or worker is None or self.native.on_a_lane:
            return contextlib.nullcontext()
        return self.clock.turn(worker)

    def _nobody_goes_on(self, job: int) -> bool:
        """Whether everyone who holds memory beside ``job`` waits, and for more than there is."""
        holders = {c.owner for j, c in self._claims.items() if j != job}
        return holders <= self._waiting.keys() and not any(self._fits(*wish) for wish in self._waiting.values())

    def _stuck(self, job: int, plan: Plan, wanted: int) -> MemoryLimitError:
        highest = max([plan.height, *(c.height for j, c in self._claims.items() if j != job)])
        return MemoryLimitError(
            f"job {plan.name!r} needs {format_bytes(wanted)} for its state beside steps of {format_bytes(highest)}, and everyone who "
            f"holds memory of the {format_bytes(self.limit)} waits for more. Train fewer jobs at once or raise memory=.",
            needed=wanted + plan.height, limit=self.limit,
        )  # fmt: skip

    def _quota_refused(self, plan: Plan, wanted: int, quota: int) -> MemoryLimitError:
        return MemoryLimitError(
            f"job {plan.name!r} needs {format_bytes(wanted)} for its state and a step of {format_bytes(plan.height)}, more than "
            f"its quota of {format_bytes(quota)}. Lower the batch size or raise quota=.",
            needed=wanted + plan.height, limit=quota,
        )  # fmt: skip

    def _note(self, job: int, wanted: int, height: int) -> None:
        if (worker := current_worker()) is None:
            return
        with self._guard:
            held = wanted + sum(c.bytes for j, c in self._claims.items() if j != job and c.worker == worker)
            before = self._asked.get(worker, (0, 0))
            self._asked[worker] = max(before[0], held), max(before[1], height)

    def needs(self, worker: int) -> tuple[int, int] | None:
        """The most that a worker's jobs held together, or wait to hold, and their largest height; None before a claim."""
        return self._asked.get(worker)

    def waits(self, thread: int | None) -> bool:
        """Whether a thread waits for memory that others hold."""
        return thread in self._waiting

    def would_fit(self, plan: Plan, policy: ResourcePolicy = GUARANTEED, batches: int = 1) -> bool:
        """Whether a further job with this plan could claim its memory now."""
        with self._guard:
            wanted = self._wanted(policy, plan.persistent + plan.batch * batches, plan.height)
            return self._fits(-1, wanted, plan.height, policy)

    def has_room(self, job: int, needed: int, height: int) -> bool:
        """Whether ``job`` has memory for so high a step, with ``needed`` bytes between its steps, or could claim it now."""
        with self._guard:
            mine = self._claims.get(job)
            if mine is not None and needed <= mine.needed and height <= mine.height:
                return True
            return self._fits(job, max(needed, mine.needed if mine is not None else 0), height)

    def release(self, job: int) -> None:
        """Give back what a job claimed, and forget its policy."""
        with self._turn(), self._guard:
            self._forget(job)
            claim = self._claims.pop(job, None)
            self.changes += 1
            if claim is not None:
                self._book(job, claim.name, 0)
                self._give_back_pages()
                self._set_capacity()
            self._changed.notify_all()

    @contextlib.contextmanager
    def retain_pages(self) -> Iterator[None]:
        """Inside, pages that nobody uses stay for the jobs to come; behind it they go back to the system."""
        with self._guard:
            self._keep_pages += 1
        try:
            yield
        finally:
            with self._guard:
                self._keep_pages -= 1
                if not self.closed:
                    self._give_back_pages()
                    self._set_capacity()

    def _give_back_pages(self) -> None:
        if not self._claims and not self._keep_pages:
            self.native.set_capacity(0)

    def claimed(self) -> int:
        """Bytes that persist for the jobs now in the engine."""
        with self._guard:
            return sum(claim.bytes for claim in self._claims.values())

    # -- policy

    def set_policy(self, job: int, policy: ResourcePolicy) -> None:
        """From its next step on ``job`` is in the engine on these policy, which may be changed and set again."""
        with self._guard:
            try:
                self.native.set_opportunistic(job, policy.opportunistic)
            except ValueError:  # it has left, and comes back on these policy
                return
            self._policies[job] = policy
            self._stay.pop(job, None)
            self.changes += 1
            if (claim := self._claims.get(job)) is not None:
                claim.opportunistic = policy.opportunistic
            self._changed.notify_all()

    # -- quotas that are lowered

    def most_height(self, job: int, needed: int) -> int | None:
        """What the quota of ``job`` leaves for its steps, with ``needed`` bytes between them; None: what there is."""
        with self._guard:
            limit, mine = self.policy_of(job).limit, self._claims.get(job)
            return None if limit is None else limit - max(needed, mine.needed if mine is not None else 0)

    def above_quota(self, job: int) -> bool:
        """Whether a job holds more than it may."""
        with self._guard:
            mine = self._claims.get(job)
            return mine is not None and not self.policy_of(job).allow(mine.bytes + mine.height)

    def lower(self, job: int, height: int) -> None:
        """The steps of ``job`` are at most so high from now on; none of the others is under way. Does not wait."""
        with self._turn(), self._guard:
            if (claim := self._claims.get(job)) is not None and height < claim.height:
                claim.height = height
                self.changes += 1
                self._changed.notify_all()

    def _leave(self, job: int, plan: Plan) -> None:
        """A job that holds more than its quota is to make way: at once where it stands at a boundary, if it can."""
        with self._guard:
            self._tell(job)
            if job in self._told and self.policy_of(job).at_boundary == threading.get_ident():
                raise Preempted(plan)

    def _wanted(self, policy: ResourcePolicy, needed: int, height: int) -> int:
        """Bytes to claim between steps: what a guaranteed job's quota leaves beside its step is kept for it."""
        if policy.quota is None or policy.opportunistic:
            return needed
        return max(needed, min(policy.quota, self.room) - height)

    def _ask_for_room(self, job: int, wanted: int, height: int) -> bool:
        """Tell opportunistic jobs to make way for a guaranteed one, the largest first; whether that will be enough."""
        if self.policy_of(job).opportunistic:
            return False
        held = sorted((c.bytes + c.height, j) for j, c in self._claims.items() if c.opportunistic and j != job)
        gone: set[int] = set()
        for _, each in reversed(held):
            if self._fits(job, wanted, height, without=gone):
                break
            if self._can_be_preempted(each):
                gone.add(each)
        if not self._fits(job, wanted, height, without=gone):
            return False
        for each in gone:
            self._tell(each)
            self._lend_priority(each)
        return True

    def ask_for_turn(self, plan: Plan, policy: ResourcePolicy, batches: int, since: float) -> None:
        """For a job that has made way, and waits since then (on the clock of ``time.monotonic``)."""
        with self._guard:
            wanted = self._wanted(policy, plan.persistent + plan.batch * batches, plan.height)
            if not policy.opportunistic and not self._ask_for_room(-1, wanted, plan.height):
                self._tell_who_stays(-1, wanted, plan.height)
            self._ask_for_turn(-1, wanted, plan.height, policy, since)

    def _ask_for_turn(self, job: int, wanted: int, height: int, policy: ResourcePolicy, since: float) -> bool:
        """After a quantum of waiting, tell those who have had theirs to make way, the longest first; whether some will."""
        now = time.monotonic()
        if self.quantum is None or now - since < self.quantum:
            return False
        had = sorted(
            (c.since, j) for j, c in self._claims.items()
            if j != job and c.opportunistic == policy.opportunistic and now - c.since >= self.quantum
            and self._can_be_preempted(j)
        )  # fmt: skip
        gone: set[int] = set()
        for _, each in had:
            if self._fits(job, wanted, height, policy, gone):
                break
            gone.add(each)
        if not gone or not self._fits(job, wanted, height, policy, gone):
            return False
        for each in gone:
            self._tell(each)
        return True

    def _tell_who_stays(self, job: int, wanted: int, height: int) -> None:
        """A guaranteed job waits for opportunistic ones that were not asked, or in vain."""
        others = {j for j, c in self._claims.items() if c.opportunistic and j != job}
        if not self.policy_of(job).opportunistic and self._fits(job, wanted, height, without=others):
            for each in others:
                if self.policy_of(each).preempt is None:
                    self._warn_of(each, self.policy_of(each).stays)

    def _fits(
        self, job: int, wanted: int, height: int, policy: ResourcePolicy | None = None, without: Collection[int] = ()
    ) -> bool:
        policy = policy if policy is not None else self.policy_of(job)
        others = [c for j, c in self._claims.items() if j != job and j not in without]
        lower = [Need("", wanted, height), *(c.need for c in others if c.opportunistic)]
        guaranteed = [c.need for c in others if not c.opportunistic]
        if not policy.opportunistic:
            return needed_by([*lower, *guaranteed]) <= self.room
        # Its steps run beside those of guaranteed jobs, who also come first where both wait.
        if any(not self.policy_of(j).opportunistic for j, _, _ in self._waiting.values()):
            return False
        return policy.allow(wanted + height) and needed_by(lower) + needed_by(guaranteed) <= self.room

    def _set_capacity(self) -> None:
        self.native.set_capacity(self._capacity())

    def _capacity(self) -> int:
        return self.room - sum(c.bytes for c in self._claims.values())

    def _book(self, job: int, name: str, count: int) -> None:
        self.persistent_log.append((_C.Engine.now_ns(), job, name, count))

    # -- who makes way

    def policy_of(self, job: int) -> ResourcePolicy:
        """Those of a job; nobody's are guaranteed."""
        return self._policies.get(job, GUARANTEED)

    def take_back_priority(self) -> None:
        """What was lent, where no guaranteed job waits any more."""
        with self._guard:
            if self._lent and all(self.policy_of(job).opportunistic for job, _, _ in self._waiting.values()):
                for job in self._lent:
                    self._set_priority(job, self.policy_of(job).opportunistic)
                self._lent.clear()

    def cannot_be_preempted(self, job: int, why: str) -> None:
        """A job that was told to make way stays where it is; it is asked again on other policy, or after a while."""
        with self._guard:
            if job not in self._told:
                return
            self._told.discard(job)
            self._lent.discard(job)
            self._set_priority(job, self.policy_of(job).opportunistic)
            self._stay[job] = time.monotonic() + ASK_AGAIN
            self._warn_of(job, why)
            self._changed.notify_all()

    def _can_be_preempted(self, job: int) -> bool:
        return self.policy_of(job).preempt is not None and time.monotonic() >= self._stay.get(job, 0.0)

    def _tell(self, job: int) -> None:
        preempt = self.policy_of(job).preempt
        if job not in self._told and preempt is not None and self._can_be_preempted(job):
            self._told.add(job)
            preempt()
            self._changed.notify_all()

    def _lend_priority(self, job: int) -> None:
        """A guaranteed job waits for steps that this one has queued: no other guaranteed one is to hold them up."""
        self._lent.add(job)
        self._set_priority(job, False)

    def _set_priority(self, job: int, opportunistic: bool) -> None:
        with contextlib.suppress(ValueError):  # it has left
            self.native.set_opportunistic(job, opportunistic)

    def _warn_of(self, job: int, why: str) -> None:
        """Once: a job that is to make way cannot."""
        if job not in self._known_to_stay:
            self._known_to_stay.add(job)
            logger.warning(
                "job %r cannot make way, so that others that need its memory wait for its end: %s",
                self.names.get(job, job), why,
            )  # fmt: skip

    def close(self) -> bool:
        """Nobody waits any more; returns whether that is new."""
        with self._guard:
            if self.closed:
                return False
            self.closed = True
            self._claims.clear()
            self._changed.notify_all()
            return True

    def _forget(self, job: int) -> None:
        self._policies.pop(job, None)
        self._stay.pop(job, None)
        for known in (self._told, self._lent, self._known_to_stay):
            known.discard(job)


def too_large(
    plan: Plan, held: int, limit: int, room: int, largest_batch: int | None = None,
    told: str = ". Lower the batch size or raise memory=.",
) -> MemoryLimitError:  # fmt: skip
    """The error for a job that does not fit even alone, with what is ``told`` of it; a memory ``limit`` has ``room`` for jobs."""
    return MemoryLimitError(
        f"job {plan.name!r} does not fit: its state and batch take {format_bytes(held)} and its step reaches "
        f"{format_bytes(plan.height)} above them; the limit of {format_bytes(limit)} leaves "
        f"{format_bytes(room)} (the rest is the reserve){told}",
        needed=held + plan.height, limit=limit, largest_batch=largest_batch,
    )  # fmt: skip
