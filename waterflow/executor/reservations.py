"""Reservations: the memory that jobs claim between steps, the jobs that wait for it, and preemption."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator

from waterflow import _C
from waterflow.errors import JobCancelled, MemoryLimitError
from waterflow.executor.cancel import time_does_not_count
from waterflow.executor.memory_limit import Claim, Need, needed as needed_by
from waterflow.executor.policy import GUARANTEED, Preempted, ResourcePolicy
from waterflow.executor.virtual_clock import VirtualClock, current_worker
from waterflow.partition.plan.plan import Plan, format_bytes

logger = logging.getLogger("waterflow")

ASIDE = -2  # in the place of a job's number: states of jobs that stand aside
ASK_AGAIN = 30.0  # seconds before a job that could not be preempted is asked again


class Reservations:
    """The claims of jobs on an engine's memory, in bytes. Thread-safe.

    Opportunistic jobs claim only what leaves room for the largest guaranteed step beside their own largest one. If a
    guaranteed job finds no room, they are preempted at their next step boundary. Jobs that are held are preempted first, for any
    job. With a ``quantum`` (seconds) jobs of one priority take turns if not all of them fit: a job that has waited so long is
    given the memory of jobs that have had theirs for so long.
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
        self._told: set[int] = set()  # jobs that were asked to leave, and have not yet
        # Opportunistic jobs that count as guaranteed while a guaranteed job waits for their memory: else the lanes might
        # never give them the step at whose end they leave (priority inversion).
        self._lent: set[int] = set()
        self._stay: dict[int, float] = {}  # jobs that could not be preempted, and the time before which none asks again
        self._known_to_stay: set[int] = set()  # jobs that a warning has named
        self.limit, self.reserve = limit, reserve
        self.changes = 0  # of claims and policies: what ``covers`` was true stays so until the next one
        self.clock: VirtualClock | None = None  # set where the order of events must not follow the wall clock
        self.persistent_log: list[tuple[int, int, str, int]] = []
        self.highest = 0  # bytes of the highest step that was claimed
        self.most_claimed = 0  # bytes that jobs could hold at a time: all between steps, and in steps on each lane
        self.quantum: float | None = None
        self._claims: dict[int, Claim] = {}
        self._asked: dict[int, tuple[int, int]] = {}  # by worker: the most bytes and height it claimed, or wanted
        self._looking: list[int] = []  # jobs in ``looking``, during which no other job's claim is granted
        self.closed = False
        self._keep_pages = 0
        self._give_way: Callable[[], None] = lambda: None

    def __len__(self) -> int:
        """The number of jobs that have a claim."""
        return len(self._claims)

    def policies(self) -> list[tuple[int, ResourcePolicy]]:
        """Return (job, policy) for all policies that were set."""
        return list(self._policies.items())

    @property
    def room(self) -> int:
        """The bytes that jobs may claim: the limit without the reserve."""
        return self.limit - self.reserve

    def covers(self, job: int, plan: Plan, batches: int) -> bool:
        """Return True if ``job`` has claimed what such a step needs, and its policy allows what it has claimed."""
        mine = self._claims.get(job)
        if mine is None or not mine.has(plan.persistent + plan.batch * batches, plan.height):
            return False
        return self.policy_of(job).allow(mine.bytes + mine.height)

    def claim(self, job: int, plan: Plan, *, batches: int = 1, last: _C.StepRun | None = None) -> None:
        """Claim the persistent bytes of ``job`` and of ``batches`` batches before a step of it; wait until they fit.

        They fit if the rest of the memory has room for the largest step of any job with a claim. A claim that has room for the
        plan already returns at once. The claim is for all kinds of steps that the job has claimed for, if they fit together;
        else for this one, once ``last``, the last of its steps under way, has ended.

        Raises:
            MemoryLimitError: The job does not fit on an empty device or in its quota, or every job that has memory waits for
                more.
            Preempted: The job must leave first, or is held; raised on the thread at its boundary (``ResourcePolicy.at_boundary``).
            JobCancelled: The engine was closed meanwhile.
        """
        policy = self.policy_of(job)
        needed, height = plan.persistent + plan.batch * batches, plan.height
        mine = self._claims.get(job)
        if mine is not None and mine.has(needed, height):
            if self.above_quota(job):
                self._leave(job, plan)
            return
        if needed + height > self.room:
            raise too_large(plan, needed, self.limit, self.room)
        if mine is not None:
            both = max(needed, mine.needed), max(height, mine.height)
            if sum(both) <= self.room and policy.allow(self._wanted(policy, *both) + both[1]):
                needed, height = both
            elif last is not None:
                self.native.wait(last)
        wanted = self._wanted(policy, needed, height)
        if policy.limit is not None and wanted + height > policy.limit:
            if policy.quota_changed and mine is not None and policy.at_boundary == threading.get_ident():
                self._leave(job, plan)
            raise self._quota_refused(plan, wanted, policy.limit)
        if not self.has_room(job, wanted, height):
            gc.collect()  # steps in cycles of objects, as one of a method is, have their claims until then
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
                    if not policy.held and self._fits(job, wanted, height):
                        since = mine.since if mine is not None else time.monotonic()
                        opportunistic = self.policy_of(job).opportunistic
                        self._claims[job] = Claim(plan.name, owner, worker, wanted, height, opportunistic, needed, since)
                        self.changes += 1
                        highest = sorted(c.height for c in self._claims.values())[-self.native.lanes :]
                        claimed = self.room - self._capacity() + min(sum(highest), self._capacity())
                        self.most_claimed = max(self.most_claimed, claimed)
                        self._set_capacity()
                        # Steps under way may still use these addresses of the arena; they finish, and no group is admitted
                        # until the native capacity has come down.
                        while self.native.capacity > self._capacity() and not self.closed:
                            self._changed.wait(timeout=0.001)
                        self._book(job, plan.name, wanted)
                        return
                    if policy.held:
                        if policy.at_boundary == owner:
                            raise Preempted(plan)
                        self._waiting.pop(owner, None)
                        with time_does_not_count():
                            self._changed.wait(timeout=0.1)
                        continue
                    self._waiting[owner] = (job, wanted, height)
                    making_way = self._ask_for_room(job, wanted, height, policy)
                    making_way |= self._ask_for_turn(job, wanted, height, policy, began)
                    stuck = not making_way and self._nobody_goes_on(job)
                    if mine is not None and policy.at_boundary == owner:
                        comes_back = policy.opportunistic and self._fits(job, wanted, height, without=self._claims)
                        if (stuck and comes_back) or not policy.allow(wanted + height):  # it leaves rather than fails
                            self._tell(job)
                        if job in self._told:
                            raise Preempted(plan)
                    if stuck:
                        raise self._stuck(job, plan, wanted)
                    if not making_way:
                        self._tell_who_stays(job, wanted, height)
                    if self.clock is None or worker is None or not self.clock.suspend(worker):
                        self._changed.wait(timeout=0.1)  # Ctrl-C and cancellation reach the thread in between
        finally:
            with self._guard:
                self._waiting.pop(owner, None)
            self.take_back_priority()

    @contextlib.contextmanager
    def looking(self, job: int) -> Iterator[int]:
        """Yield the bytes that steps can have at most, for a step of unknown height; no claim of another job lowers it inside."""
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
        worker = current_worker()
        # Under a virtual clock memory changes hands in its order. Not inside of a step, where the garbage collector may release
        # a job: the worker whose turn it is may wait for this very lane.
        if self.clock is None or worker is None or self.native.on_a_lane:
            return contextlib.nullcontext()
        return self.clock.turn(worker)

    def _nobody_goes_on(self, job: int) -> bool:
        # A deadlock: every other job with a claim waits itself, and none of the waiting ones fits.
        holders = {c.owner for j, c in self._claims.items() if j != job}
        return holders <= self._waiting.keys() and not any(self._fits(*wish) for wish in self._waiting.values())

    def _stuck(self, job: int, plan: Plan, wanted: int) -> MemoryLimitError:
        highest = max([plan.height, *(c.height for j, c in self._claims.items() if j != job)])
        return MemoryLimitError(
            f"job {plan.name!r} needs {format_bytes(wanted)} for its state beside steps of {format_bytes(highest)}, and every job that "
            f"has memory of the {format_bytes(self.limit)} waits for more. Train fewer jobs at once or raise memory=.",
            needed=wanted + plan.height,
            limit=self.limit,
            others_hold=True,
        )

    def _quota_refused(self, plan: Plan, wanted: int, quota: int) -> MemoryLimitError:
        return MemoryLimitError(
            f"job {plan.name!r} needs {format_bytes(wanted)} for its state and a step of {format_bytes(plan.height)}, more than "
            f"its quota of {format_bytes(quota)}. Lower the batch size or raise quota=.",
            needed=wanted + plan.height,
            limit=quota,
        )

    def _note(self, job: int, wanted: int, height: int) -> None:
        self.highest = max(self.highest, height)
        if (worker := current_worker()) is None:
            return
        with self._guard:
            held = wanted + sum(c.bytes for j, c in self._claims.items() if j != job and c.worker == worker)
            before = self._asked.get(worker, (0, 0))
            self._asked[worker] = max(before[0], held), max(before[1], height)

    def needs(self, worker: int) -> tuple[int, int] | None:
        """Return the most bytes that a worker's jobs claimed together, or wait for, and their largest height; None before a claim."""
        return self._asked.get(worker)

    def waits(self, thread: int | None) -> bool:
        """Return True if ``thread`` waits for memory that other jobs have."""
        return thread in self._waiting

    def would_fit(self, plan: Plan, policy: ResourcePolicy = GUARANTEED, batches: int = 1) -> bool:
        """Return True if a further job with this plan could claim its memory now."""
        with self._guard:
            wanted = self._wanted(policy, plan.persistent + plan.batch * batches, plan.height)
            return self._fits(-1, wanted, plan.height, policy)

    def has_room(self, job: int, needed: int, height: int) -> bool:
        """Return True if ``job`` has, or could claim now, ``needed`` bytes between steps and a step of ``height`` bytes."""
        with self._guard:
            mine = self._claims.get(job)
            if mine is not None and mine.has(needed, height):
                return True
            return self._fits(job, max(needed, mine.needed if mine is not None else 0), height)

    def hold(self, held: int, give_way: Callable[[], None]) -> bool:
        """Hold so many bytes in all for states of jobs that stand aside; False if they do not fit, or a job waits for memory.

        ``give_way`` is called, with locks held, when a job waits for memory, until less is held. Less than before always fits.
        """
        with self._guard:
            mine = self._claims.get(ASIDE)
            more = held > (mine.bytes if mine is not None else 0)
            if more and (self._waiting or self.closed or not self._fits(ASIDE, held, 0)):
                return False
            self._give_way = give_way
            self._claims.pop(ASIDE, None)
            if held:
                self._claims[ASIDE] = Claim("jobs that stand aside", 0, None, held, 0, False, held, time.monotonic())
            self._set_capacity()
            # As in claim(): no group begins that would need what is held now.
            while more and self.native.capacity > self._capacity() and not self.closed:
                self._changed.wait(timeout=0.001)
            self._book(ASIDE, "jobs that stand aside", held)
            self._changed.notify_all()
            return True

    def release(self, job: int) -> None:
        """Release the claim of ``job``, and forget its policy."""
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
        """Keep unused pages of the arena for the jobs to come inside the context, and return them to the system after it."""
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
        """Return the bytes that the jobs now in the engine have claimed between steps."""
        with self._guard:
            return sum(claim.bytes for claim in self._claims.values())

    # -- policy

    def set_policy(self, job: int, policy: ResourcePolicy) -> None:
        """Set the policy of ``job`` from its next step on. Does nothing for a job that has left the engine."""
        with self._guard:
            try:
                self.native.set_opportunistic(job, policy.opportunistic)
            except ValueError:  # the job has left; it brings its policy when it returns
                return
            self._policies[job] = policy
            self.changes += 1
            self._stay.pop(job, None)
            if (claim := self._claims.get(job)) is not None:
                claim.opportunistic = policy.opportunistic
            self._changed.notify_all()

    def look_again(self) -> None:
        """Let jobs that wait for memory look again: one of them goes on, or is held."""
        with self._guard:
            self._changed.notify_all()

    # -- quotas that are lowered

    def most_height(self, job: int, needed: int) -> int | None:
        """Return the bytes that the quota of ``job`` leaves for its steps, with ``needed`` between them; None without such a quota."""
        with self._guard:
            limit, mine = self.policy_of(job).limit, self._claims.get(job)
            return None if limit is None else limit - max(needed, mine.needed if mine is not None else 0)

    def above_quota(self, job: int) -> bool:
        """Return True if ``job`` has claimed more than its quota, which was lowered."""
        with self._guard:
            mine = self._claims.get(job)
            return mine is not None and not self.policy_of(job).allow(mine.bytes + mine.height)

    def lower(self, job: int, height: int) -> None:
        """Lower the claimed step height of ``job``; no higher step of it is under way. Does not wait."""
        with self._turn(), self._guard:
            if (claim := self._claims.get(job)) is not None and height < claim.height:
                claim.height = height
                self.changes += 1
                self._changed.notify_all()

    def _leave(self, job: int, plan: Plan) -> None:
        # A job above its quota is preempted: at once if this thread is at its boundary, else at its next one.
        with self._guard:
            self._tell(job)
            if job in self._told and self.policy_of(job).at_boundary == threading.get_ident():
                raise Preempted(plan)

    def _wanted(self, policy: ResourcePolicy, needed: int, height: int) -> int:
        # A guaranteed job claims its whole quota, less its step, whether it uses that or not.
        if policy.quota is None or policy.opportunistic:
            return needed
        return max(needed, min(policy.quota, self.room) - height)

    def _ask_for_room(self, job: int, wanted: int, height: int, policy: ResourcePolicy) -> bool:
        # Preempts jobs that are held, and opportunistic ones for a guaranteed one, the largest first, so that few have to leave;
        # none at all if their leaving would not be enough. States that stand aside leave for anybody.
        if ASIDE in self._claims:
            self._give_way()
            return True
        leaving = sorted(
            (self.policy_of(j).yields, c.bytes + c.height, j)
            for j, c in self._claims.items()
            if j != job
            and (self.policy_of(j).yields or (c.opportunistic and not policy.opportunistic))
            and self._can_be_preempted(j)
        )
        gone = self._enough_of((each for _, _, each in reversed(leaving)), job, wanted, height, policy) if leaving else None
        for each in gone or ():
            self._tell(each)
            self._lend_priority(each)
        return gone is not None

    def _enough_of(
        self, leaving: Iterable[int], job: int, wanted: int, height: int, policy: ResourcePolicy | None = None
    ) -> set[int] | None:
        # The first of these jobs that would leave enough room, or None if all of them would not.
        gone: set[int] = set()
        for each in leaving:
            if self._fits(job, wanted, height, policy, gone):
                return gone
            gone.add(each)
        return gone if self._fits(job, wanted, height, policy, gone) else None

    def ask_for_turn(self, plan: Plan, policy: ResourcePolicy, batches: int, since: float) -> None:
        """Ask for room for a preempted job that has waited ``since`` then, in seconds of ``time.monotonic``."""
        with self._guard:
            wanted = self._wanted(policy, plan.persistent + plan.batch * batches, plan.height)
            if not self._ask_for_room(-1, wanted, plan.height, policy) and not policy.opportunistic:
                self._tell_who_stays(-1, wanted, plan.height)
            self._ask_for_turn(-1, wanted, plan.height, policy, since)

    def _ask_for_turn(self, job: int, wanted: int, height: int, policy: ResourcePolicy, since: float) -> bool:
        # After a quantum of waiting, preempts jobs of the same priority that have had their memory for a quantum, the longest
        # first, if that is enough.
        now = time.monotonic()
        if self.quantum is None or now - since < self.quantum:
            return False
        had = sorted(
            (c.since, j)
            for j, c in self._claims.items()
            if j != job
            and c.opportunistic == policy.opportunistic
            and now - c.since >= self.quantum
            and self._can_be_preempted(j)
        )
        gone = self._enough_of((each for _, each in had), job, wanted, height, policy)
        for each in gone or ():
            self._tell(each)
        return bool(gone)

    def _tell_who_stays(self, job: int, wanted: int, height: int) -> None:
        # A guaranteed job waits for opportunistic ones that cannot be preempted: a warning names them.
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

    # -- preemption

    def policy_of(self, job: int) -> ResourcePolicy:
        """Return the policy of ``job``; a job without one is guaranteed."""
        return self._policies.get(job, GUARANTEED)

    def take_back_priority(self) -> None:
        """Make jobs that were lent priority opportunistic again, if no guaranteed job waits any more."""
        with self._guard:
            if self._lent and all(self.policy_of(job).opportunistic for job, _, _ in self._waiting.values()):
                for job in self._lent:
                    self._set_priority(job, self.policy_of(job).opportunistic)
                self._lent.clear()

    def cannot_be_preempted(self, job: int, why: str) -> None:
        """Note that a job that was asked to leave cannot; it is asked again after ``ASK_AGAIN`` seconds, or with another policy."""
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
        # A guaranteed job waits for the steps that this one has queued, so no other guaranteed job may delay them.
        self._lent.add(job)
        self._set_priority(job, False)

    def _set_priority(self, job: int, opportunistic: bool) -> None:
        with contextlib.suppress(ValueError):  # it has left
            self.native.set_opportunistic(job, opportunistic)

    def _warn_of(self, job: int, why: str) -> None:
        if job not in self._known_to_stay:
            self._known_to_stay.add(job)
            logger.warning(
                "job %r cannot be preempted, so jobs that need its memory wait for its end: %s", self.names.get(job, job), why
            )

    def close(self) -> bool:
        """Drop all claims and wake all jobs that wait, which raise JobCancelled; return False if already closed."""
        with self._guard:
            if self.closed:
                return False
            self.closed = True
            self.changes += 1
            self._claims.clear()
            self._changed.notify_all()
            return True

    def _forget(self, job: int) -> None:
        self._policies.pop(job, None)
        self._stay.pop(job, None)
        for known in (self._told, self._lent, self._known_to_stay):
            known.discard(job)


def too_large(
    plan: Plan,
    held: int,
    limit: int,
    room: int,
    largest_batch: int | None = None,
    told: str = ". Lower the batch size or raise memory=.",
) -> MemoryLimitError:
    """Return the error for a job that does not fit even alone.

    ``held`` are its bytes between steps, ``room`` those of the ``limit`` that jobs may claim; ``told`` ends the message.
    """
    return MemoryLimitError(
        f"job {plan.name!r} does not fit: its state and batch take {format_bytes(held)} and its step reaches "
        f"{format_bytes(plan.height)} above them; the limit of {format_bytes(limit)} leaves "
        f"{format_bytes(room)} (the rest is the reserve){told}",
        needed=held + plan.height,
        limit=limit,
        largest_batch=largest_batch,
    )
