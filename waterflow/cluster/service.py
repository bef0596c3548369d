"""The live cluster: the loop between the scheduler and the backend, and the requests of users."""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from waterflow.cluster.backend import Backend, BackendError, BackendEvent, Progress
from waterflow.cluster.intake import check_file, checked
from waterflow.cluster.journal import JournaledScheduler
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.reconciler import Reconciler
from waterflow.cluster.status import cluster_status, job_status
from waterflow.cluster.store import NOT_NOW, JobRecord, Store
from waterflow.cluster.submission import Tenant
from waterflow.errors import ClusterError, InvalidJobError, SubmissionError

logger = logging.getLogger("waterflow")

PUT_OFF_SECONDS = 10.0  # before an event that could not be applied is tried again


class PutOff:
    """Postpones an event that raises an error of its own, and all later events of the same job or node.

    Times are the caller's. The events that ``to_take`` returned count as applied once ``written`` is called.
    """

    def __init__(self) -> None:
        self._waiting: list[BackendEvent] = []
        self._held: list[BackendEvent] = []  # postponed by the last ``to_take``
        self._tried: set[Any] = set()
        self._blocked: dict[Any, tuple[float, str]] = {}  # until when, and why

    def due(self, now: float) -> bool:
        """Return whether a postponed event is to be tried again."""
        return any(until <= now for until, _ in self._blocked.values())

    @property
    def ids(self) -> set[str]:
        """The jobs of the postponed events."""
        return {event.id for event in self._held if hasattr(event, "id")}

    def trouble(self) -> str | None:
        """Return why an event is postponed; None if none is."""
        return next((why for _, why in self._blocked.values()), None)

    def to_take(self, now: float, events: Sequence[BackendEvent]) -> list[BackendEvent]:
        """Return the events to apply now, in order; ``events`` are the newest."""
        self._tried = {key for key, (until, _) in self._blocked.items() if until <= now}
        # A later event of the same job must not overtake one that is postponed. Progress is dropped: a newer report
        # replaces it.
        held = self._blocked.keys() - self._tried
        everything = [*self._waiting, *events]
        self._held = [event for event in everything if _key(event) in held and not isinstance(event, Progress)]
        return [event for event in everything if _key(event) not in held]

    def failed(self, now: float, event: BackendEvent, error: Exception) -> None:
        """Record that ``event`` could not be applied. An error that is not the event's fault postpones nothing."""
        if not isinstance(error, NOT_NOW):
            what = f"{type(event).__name__} of {getattr(event, 'id', '') or event.node!r}"
            self._blocked[_key(event)] = now + PUT_OFF_SECONDS, f"{what}: {type(error).__name__}: {error}"

    def written(self) -> None:
        """Forget the events that ``to_take`` returned: they are applied."""
        self._waiting, self._held = self._held, []
        for key in self._tried:
            self._blocked.pop(key, None)
        self._tried = set()


def newest(events: Sequence[BackendEvent]) -> list[BackendEvent]:
    """Return the events, with only the last progress of each job and node."""
    last = {(event.id, event.node): number for number, event in enumerate(events) if isinstance(event, Progress)}
    return [
        event for number, event in enumerate(events) if not isinstance(event, Progress) or last[event.id, event.node] == number
    ]


def _key(event: BackendEvent) -> Any:
    return getattr(event, "id", None) or ("node", event.node)


LONGEST_POLL = 0.25  # seconds; the backend watches its nodes only inside ``poll``
SUSPEND_SECONDS = 30.0  # for jobs to write their checkpoints in ``down``
AGAIN_SECONDS = 0.5  # before a failed turn is tried again


class ClosedError(ClusterError):
    """The cluster has ended, or is ending."""


class BusyError(ClusterError):
    """The request cannot be served now, and can be soon."""


class Service:
    """A running cluster: a scheduler, its store and its backend. Thread-safe; ``start()`` begins its loop.

    If the store has a state, the service continues from it: ``policy`` must then be the same, and ``tenants`` may not differ.
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
        self._behind = False  # scheduler and reconciler must be made again from the store
        self._heard: list[BackendEvent] = []  # events that the store does not have yet
        self._put_off = PutOff()
        # A policy without state, from which ``_hear`` restores the stored one after an error.
        self._policy, self._tenants = copy.deepcopy(policy), tenants
        self.scheduler = JournaledScheduler(store, policy, tenants)
        self._same_tenants(tenants)
        self.jobs = Reconciler(store, backend, self.scheduler)
        self._last = self._clock()
        self._now = max(self._last if clock is not None else self._begin(), self.scheduler.book.now)
        with self._turn():
            self.jobs.take_up(self.now())
        self._save()  # before any event: events are replayed with these tenants and this policy

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
            down = [node for node in self.backend.nodes() if not node.alive]
            # Devices of a node that restarts count again in a moment: a job that needs them is told to wait, not
            # refused for good.
            there = self.scheduler.book.devices.total
            if there < asked.devices <= there + sum(node.devices for node in down):
                raise BusyError(
                    f"job {asked.id!r} asks for {asked.devices} devices, and {', '.join(node.name for node in down)} "
                    "is being started again; try it in some seconds"
                )
            if checkpoint is not None:
                check_file(asked.id, checkpoint)
            self.scheduler.submit(self.now(), asked)
            self.jobs.touch(asked.id)
            self.store.say(asked.id, self.now(), f"submitted: {asked.devices} device(s), {asked.priority}")
        return True

    def cancel(self, id: str) -> bool:
        """End a job; return False if it has ended already. Raises SubmissionError for an unknown id."""
        with self._turn():
            job = self.record(id)
            if job.over:
                return False
            self.scheduler.cancel(self.now(), id)
            self.jobs.touch(id)
            self.store.say(id, self.now(), "cancelled")
        return True

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
            told = cluster_status(self.now(), self.scheduler, self.backend.nodes(), jobs, self.jobs.live)
            not_shown = {"jobs_not_shown": ended_before, "waiting_not_shown": wait_behind}
            return told | not_shown | {"trouble": self.trouble}

    def told(self, job: JobRecord) -> dict[str, Any]:
        """Return the status of one job."""
        with self._lock:
            return job_status(self.now(), job, self.jobs.live.get(job.id, {}))

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
        return self._error or self._put_off.trouble() or self.jobs.trouble()

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
            self._closing = True
            for job in self.store.jobs(states=["starting", "running"]):
                with contextlib.suppress(*NOT_NOW):  # otherwise they count as lost, and resume from their checkpoints
                    self.store.change(job.id, state="stopping")
                with contextlib.suppress(BackendError):
                    self.backend.stop(job.id, suspend=True)
            while self.store.jobs(states=["stopping"]) and time.monotonic() < until and not self.over:
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
        """Poll the backend once, and apply its events. An event is kept until its consequences are written to the store."""
        tick = self.scheduler.next_tick
        if tick is not None:
            timeout = max(0.0, min(timeout, tick - self.now()))
        # Outside the lock: requests are answered while the loop waits for events.
        events = self.backend.poll(timeout)
        with self._lock:
            self._heard = newest(self._heard + events)
            tick = self.scheduler.next_tick
            late = tick is not None and tick <= self.now()
            if self._heard or late or self._behind or self._put_off.due(self.now()) or self.jobs.due(self.now()):
                with self._turn(heard=True):
                    pass
        self._save()

    @contextlib.contextmanager
    def _turn(self, heard: bool = False) -> Iterator[None]:
        # Changes inside are written with their consequences in one transaction; only then are requests made to the
        # backend, so that a crash in between repeats a request, and never forgets one. With ``heard`` the backend's
        # events come first: after an error only they can tell what runs.
        with self._lock:
            self._check_open()
            if self._behind and not heard:
                raise BusyError(f"the cluster tries again what went wrong: {self.trouble}")
            try:
                with self.store.transaction():
                    if heard:
                        self._hear()
                    yield
                    self.jobs.touch(actions=self.scheduler.tick(self.now()))
                    asks = [] if self._closing else self.jobs.settle(self.now())
            except (SubmissionError, InvalidJobError, BusyError):  # nothing was changed
                raise
            except Exception as error:  # the scheduler in memory may be ahead of the store, which decides
                self._went_wrong(error)
                if isinstance(error, NOT_NOW):
                    raise BusyError(f"the cluster cannot write down its state, and tries again: {error}") from error
                raise
            except BaseException as error:
                self._fail(error)
                raise
            if heard:
                self._heard, self._behind = [], False
                self._put_off.written()
                self._error = None
            try:
                for id, ask in asks:
                    self._ask(id, ask)
            except Exception as error:  # the store has the request as made, and it may not have been
                self._went_wrong(error)
            self._changed.notify_all()

    def _save(self) -> None:
        # With thousands of jobs writing the state takes long: it happens outside the lock, while other turns go on.
        with self._lock:
            finish = None if self._behind else self.scheduler.save()
        if finish is not None:
            finish()

    def _hear(self) -> None:
        # After an error the state is read from the store again, as after a restart, before events are applied.
        if self._behind:
            live = self.jobs.live
            self.scheduler = JournaledScheduler(self.store, copy.deepcopy(self._policy), self._tenants)
            self.jobs = Reconciler(self.store, self.backend, self.scheduler)
            self.jobs.live = live
        for event in self._put_off.to_take(self.now(), self._heard):
            try:
                self.jobs.take(self.now(), event)
            except Exception as error:
                self._put_off.failed(self.now(), event, error)
                raise
        if self._behind:
            self.jobs.compare(self.now(), told=self._put_off.ids)

    def _ask(self, id: str, ask: Callable[[], None]) -> None:
        try:
            ask()
        except Exception as error:
            if not isinstance(error, (BackendError, OSError)):
                logger.exception("job %r: a request to the backend failed", id)
            self.jobs.not_asked(self.now(), id, str(error))

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
