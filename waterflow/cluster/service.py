"""The live cluster: the loop between the scheduler and the backend, and the requests of users."""

from __future__ import annotations

import contextlib
import copy
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from waterflow.cluster.backend import Backend, DeviceState
from waterflow.cluster.intake import check_file, checked
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.reconciler import JobFault, Reconciler
from waterflow.cluster.scheduler import Scheduler
from waterflow.cluster.status import cluster_status, job_status
from waterflow.cluster.store import NOT_NOW, JobRecord, Store
from waterflow.cluster.submission import Priority, Submission, Tenant
from waterflow.errors import ClusterError, InvalidJobError, SubmissionError
from waterflow.executor.memory_limit import parse_quota
from waterflow.units import format_bytes

logger = logging.getLogger("waterflow")

LONGEST_POLL = 0.25  # seconds; the backend watches its nodes only inside ``listen``
SUSPEND_SECONDS = 30.0  # for jobs to write their checkpoints in ``down``
AGAIN_SECONDS = 0.5  # before a failed turn is tried again
MOST_FAULTS = 20  # errors of one job each, behind which devices are listened to again


class ClosedError(ClusterError):
    """The cluster has ended, or is ending."""


class BusyError(ClusterError):
    """The request cannot be served now, and can be soon."""


class Service:
    """A running cluster: a scheduler, its store and its backend. Thread-safe; ``start()`` begins its loop.

    If the store has a state, the service continues from it: ``policy`` must then be of the same class, and ``tenants`` may not
    differ.
    ``clock`` returns seconds; default: the system's time since boot.
    """

    def __init__(
        self,
        store: Store,
        backend: Backend,
        policy: Policy,
        tenants: Sequence[Tenant] = (),
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.store = store
        self.backend = backend
        self._clock = clock or boot_seconds
        self._clock_lock = threading.Lock()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._over = threading.Event()
        self._closing = self._ended = False
        self._loop: threading.Thread | None = None
        self.failure: BaseException | None = None
        self._error: str | None = None  # of the last turn
        self._behind = False  # the book must be made again from its rows
        self._policy, self._tenants = policy, tenants
        self.scheduler = self._from_rows()
        self._same_tenants(tenants)
        self.jobs = Reconciler(store, backend, self.scheduler)
        self._last = self._clock()
        self._now = max(self._last if clock is not None else self._begin(), self.scheduler.book.now)
        try:
            self.turn(0.0)
        except Exception as error:  # ``status`` says so, and the loop tries again
            self._went_wrong(error)

    def _from_rows(self) -> Scheduler:
        # The policy that was given keeps no state: this may be called again, after an error.
        self._notes: dict[str, Any] | None = None  # as written last
        notes, policy = self.store.meta("scheduler"), copy.deepcopy(self._policy)
        if notes is None:
            return Scheduler([], policy, self._tenants)
        rows = [(Submission(**given), number, columns) for given, number, columns in self.store.entries()]
        return Scheduler.restored(notes, rows, policy)

    def _write_book(self) -> None:
        book = self.scheduler.book
        for id in sorted(book.changed):  # equal turns write equal rows, one after the other
            entry = book.entries.get(id)
            self.store.write_entry(id, entry.columns() if entry is not None else None)
        book.changed.clear()
        notes = self.scheduler.notes()
        if notes != self._notes:  # a turn without news writes nothing
            self.store.set_meta("scheduler", notes)
            self._notes = notes

    def _same_tenants(self, tenants: Sequence[Tenant]) -> None:
        known = self.scheduler.book.tenants
        if tenants and {t.name: t.quota for t in tenants} != {t.name: t.quota for t in known.values()}:
            there = ", ".join(f"{t.name}={t.quota}" for t in known.values()) or "none"
            raise SubmissionError(
                f"the cluster in {self.store.path.parent} has the tenants {there}; leave out --tenant, or start another "
                "cluster with another --state folder"
            )

    # -- requests of users

    def submit(self, submission: dict[str, Any], payload: bytes, checkpoint: str | None = None) -> bool:
        """Accept a job; return False if this very job is known already.

        Raises SubmissionError or InvalidJobError, with the reason, for a job that can never run, and BusyError while its
        devices restart; nothing is stored then.
        """
        asked = checked(submission)
        with self._turn():
            asked.submitted = self.now()
            if not self.store.add(asked.to_dict(), payload, checkpoint):
                return False
            if not self.scheduler.book.devices.total:
                # They count again in a moment: the job is told to wait, not refused for good.
                names = ", ".join(node.name for node in self.backend.nodes())
                raise BusyError(f"job {asked.id!r}: {names} are being started again; try it in some seconds")
            if checkpoint is not None:
                check_file(asked.id, checkpoint)
            self.scheduler.submit(self.now(), asked, decide=False)
            self.store.say(asked.id, self.now(), f"submitted, {asked.priority}")
        return True

    def cancel(self, id: str) -> bool:
        """End a job; return False if it has ended already. Raises SubmissionError for an unknown id."""
        with self._turn():
            job = self.record(id)
            if job.over:
                return False
            self.jobs.cancel(self.now(), job)
        return True

    def set(self, id: str, quota: int | float | str | None = None, priority: Priority | None = None) -> None:
        """Change the quota of each of a job's jobs, or its priority, from now on; None leaves either as it is.

        Raises SubmissionError or InvalidJobError, and changes nothing, if neither is given, the job is unknown or has ended, the
        quota is above the memory of its device, or ``Scheduler.set_priority`` refuses.
        """
        with self._turn():
            job = self.record(id)
            entry = self.scheduler.book.entries.get(id)
            if entry is None:
                raise SubmissionError(f"job {id!r} has ended, or is about to: only one that waits or runs can be changed")
            if quota is None and priority is None:
                raise SubmissionError(f"job {id!r}: nothing is to be changed; give a quota, a priority, or both")
            memory = max((node.memory for node in self.backend.nodes() if job.node in (None, node.name)), default=0)
            parsed = parse_quota(f"job {id!r}", quota, memory or None)
            if priority is not None:
                self.scheduler.set_priority(self.now(), id, priority, decide=False)
            if parsed is not None:
                entry.submission = replace(entry.submission, quota=parsed)
            self.store.change(id, submission=json.dumps(entry.submission.to_dict()))
            told = [priority or entry.priority, *([f"quota {format_bytes(parsed)}"] if parsed is not None else [])]
            self.store.say(id, self.now(), f"is to be {', '.join(told)}")

    def record(self, id: str) -> JobRecord:
        """Return a job's record. Raises SubmissionError for an unknown id."""
        job = self.store.job(id)
        if job is None:
            raise SubmissionError(f"no job is called {id!r}; waterflow cluster status lists those that are")
        return job

    def wait(self, ids: Sequence[str], seconds: float) -> list[str]:
        """Return the ids that have ended; wait at most ``seconds`` until there is one.

        Raises SubmissionError for an unknown id, and ClosedError if the cluster ends meanwhile.
        """
        until = time.monotonic() + seconds
        with self._lock:
            self._check_open()
            for id in self.store.unknown(ids):
                self.record(id)
            while True:
                over = self.store.over(ids)
                left = until - time.monotonic()
                if over or left <= 0:
                    return over
                self._changed.wait(left)
                self._check_open()

    def status(self, ended: int | None = None, waiting: int | None = None) -> dict[str, Any]:
        """Return nodes, tenants and jobs; see ``cluster_status``.

        ``ended`` limits the ended jobs to the last so many, ``waiting`` the waiting jobs to the first so many.
        """
        with self._lock:
            jobs, ended_before, wait_behind = self.store.page(ended, waiting)
            told = cluster_status(self.now(), self.scheduler, self.backend.nodes(), jobs, self.jobs.devices, self.jobs.live)
            not_shown = {"jobs_not_shown": ended_before, "waiting_not_shown": wait_behind}
            return told | not_shown | {"trouble": self.trouble}

    def told(self, job: JobRecord) -> dict[str, Any]:
        """Return the status of one job."""
        with self._lock:
            return job_status(self.now(), job, self.jobs.live.get(job.id))

    # -- the loop

    def run(self) -> None:
        """Take turns until it is closed. An error in a turn is logged, shown by ``status``, and the turn is tried again."""
        while not self._over.is_set():
            try:
                self.turn()
            except ClosedError:
                break
            except Exception as error:
                with self._lock:
                    self._went_wrong(error)
                self._over.wait(AGAIN_SECONDS)
            except BaseException as error:
                with self._lock:
                    self._fail(error)
                raise

    @property
    def trouble(self) -> str | None:
        """The error of the last turn, which is tried again; None if there is none."""
        return self._error or self.jobs.trouble()

    @property
    def over(self) -> bool:
        """True once it has ended, by itself or by ``close`` or ``down``."""
        return self._over.is_set()

    def start(self) -> None:
        """Call ``run()`` on a thread of its own, until ``close()`` or ``down()``."""
        self._loop = threading.Thread(target=self.run, name="scheduler", daemon=True)
        self._loop.start()

    def close(self) -> None:
        """End the service and leave the nodes running; a new service on the same store and folder continues."""
        if self._end_loop():
            self.backend.detach()
            self.store.close()

    def down(self, seconds: float = SUSPEND_SECONDS) -> None:
        """Suspend running jobs, with checkpoints, and end all nodes; the jobs stay known and resume at the next ``up``."""
        until = time.monotonic() + seconds
        with self._lock:
            self._closing = True  # from the next turn on, no job is wanted anywhere
            while self.store.placed() and time.monotonic() < until and not self.over:
                self._changed.wait(0.1)
        if self._end_loop():
            self.backend.close()
            self.store.close()

    def _end_loop(self) -> bool:
        # Returns True for the first caller only, which alone closes backend and store.
        with self._lock:
            self._over.set()
            self._changed.notify_all()
            first, self._ended = not self._ended, True
        if self._loop is not None:
            self._loop.join()
        return first

    def turn(self, timeout: float = LONGEST_POLL) -> None:
        """Wait for what devices tell, and take it up."""
        with self._lock:
            tick = self.scheduler.next_tick
        if tick is not None:
            timeout = max(0.0, min(timeout, tick - self.now()))
        # Outside the lock: requests are answered while the loop waits for states.
        states = self.backend.listen(timeout)
        for _ in range(MOST_FAULTS):  # again at once, without the job whose error has undone the turn
            try:
                with self._turn(states):
                    return
            except JobFault as fault:
                logger.warning("%s", fault, exc_info=fault.__cause__)

    @contextlib.contextmanager
    def _turn(self, states: Sequence[DeviceState] | None = None) -> Iterator[None]:
        """Take a turn: what devices tell, what is done inside, the decision, and the requests of what differs.

        All that changes is written in one transaction; only then requests are made, and those that a crash in between loses
        are found again by the next comparison. After an error the book is made again from its rows, when states come next.
        """
        with self._lock:
            self._check_open()
            if self._behind and states is None:
                raise BusyError(f"the cluster tries again what went wrong: {self.trouble}")
            try:
                with self.store.transaction():
                    if self._behind:
                        self.scheduler = self._from_rows()
                        self.jobs.begin_again(self.scheduler)
                    if states is not None:
                        self.jobs.see(self.now(), states)
                    yield
                    tick = self.scheduler.next_tick
                    if self.scheduler.book.changed or (tick is not None and tick <= self.now()):
                        self.scheduler.tick(self.now())
                    asks = self.jobs.settle(self.now(), leave=self._closing)
                    self._write_book()
            except (SubmissionError, InvalidJobError, BusyError):  # nothing was changed
                raise
            except JobFault as fault:
                self._behind = True
                if states is None:  # a user's turn, about another job
                    raise BusyError(f"the cluster tries again what went wrong: {fault}") from fault
                raise
            except Exception as error:  # the book in memory may be ahead of its rows, which decide
                self._went_wrong(error)
                if isinstance(error, NOT_NOW):
                    raise BusyError(f"the cluster cannot write down its state, and tries again: {error}") from error
                raise
            except BaseException as error:
                self._fail(error)
                raise
            if states is not None:
                self._behind, self._error = False, None
            self.jobs.committed()
            for ask in asks:
                ask()
            if self.jobs.over:
                self.jobs.over = False
                self._changed.notify_all()

    def _went_wrong(self, error: Exception) -> None:
        # All that is written is kept: the next turn starts again from the store.
        said = f"{type(error).__name__}: {error}"
        if said != self._error:
            logger.error("a turn of the scheduler failed, and is tried again: %s", said, exc_info=error)
        self._error, self._behind = said, True

    def _check_open(self) -> None:
        if self._over.is_set():
            raise ClosedError("the scheduler has ended; start it again: waterflow cluster up")

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._over.set()
        self._changed.notify_all()

    def now(self) -> float:
        """Return seconds since 1970 that never jump, even if the system's clock is set."""
        with self._clock_lock:
            there = self._clock()
            # The scheduler raises an error for a time that goes back.
            self._now += max(0.0, there - self._last)
            self._last = there
            return self._now

    def _begin(self) -> float:
        # Until the machine restarts, time continues from the first service's offset: a clock that is set meanwhile
        # changes nothing.
        known, boot = self.store.meta("clock"), boot_id()
        if known is None or known["boot"] != boot:
            known = {"boot": boot, "offset": max(time.time(), self.scheduler.book.now) - self._last}
            self.store.set_meta("clock", known)
        return float(known["offset"] + self._last)


def boot_seconds() -> float:
    """Return the seconds since the machine was started, which no clock setting changes."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return an identifier that differs after each start of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
