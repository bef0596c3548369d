"""The live cluster: a loop between the scheduler and the backend, and what users ask of it."""

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

PUT_OFF_SECONDS = 10.0  # before an event that could not be taken is tried again


class PutOff:
    """Holds back an event that raises an error of its own, and all later ones of the same job or node.

    Times are those of the caller. What ``to_take`` returns counts as taken once ``written`` is called.
    """

    def __init__(self) -> None:
        self._waiting: list[BackendEvent] = []
        self._held: list[BackendEvent] = []  # of those that ``to_take`` was asked about last
        self._tried: set[Any] = set()
        self._blocked: dict[Any, tuple[float, str]] = {}  # until when, and why

    def due(self, now: float) -> bool:
        """Whether an event is to be tried again."""
        return any(until <= now for until, _ in self._blocked.values())

    @property
    def ids(self) -> set[str]:
        """The jobs of the events that are held back."""
        return {event.id for event in self._held if hasattr(event, "id")}

    def trouble(self) -> str | None:
        """Why an event is held back; None where there is none."""
        return next((why for _, why in self._blocked.values()), None)

    def to_take(self, now: float, events: Sequence[BackendEvent]) -> list[BackendEvent]:
        """The events to take now, with ``events`` as the newest."""
        self._tried = {key for key, (until, _) in self._blocked.items() if until <= now}
        held = self._blocked.keys() - self._tried
        everything = [*self._waiting, *events]
        self._held = [event for event in everything if _key(event) in held and not isinstance(event, Progress)]
        return [event for event in everything if _key(event) not in held]

    def failed(self, now: float, event: BackendEvent, error: Exception) -> None:
        """``event`` could not be taken. Where it is not the event's fault, nothing is held back."""
        if not isinstance(error, NOT_NOW):
            what = f"{type(event).__name__} of {getattr(event, 'id', '') or event.node!r}"
            self._blocked[_key(event)] = now + PUT_OFF_SECONDS, f"{what}: {type(error).__name__}: {error}"

    def written(self) -> None:
        """All that ``to_take`` returned is taken."""
        self._waiting, self._held = self._held, []
        for key in self._tried:
            self._blocked.pop(key, None)
        self._tried = set()


def newest(events: Sequence[BackendEvent]) -> list[BackendEvent]:
    """The same events, of reports only the last of each job and node."""
    last = {(event.id, event.node): number for number, event in enumerate(events) if isinstance(event, Progress)}
    return [
        event
        for number, event in enumerate(events)
        if not isinstance(event, Progress) or last[event.id, event.node] == number
    ]


def _key(event: BackendEvent) -> Any:
    return getattr(event, "id", None) or ("node", event.node)


logger = logging.getLogger("waterflow")

LONGEST_POLL = 0.25  # seconds; the backend watches its nodes inside of polls
SUSPEND_SECONDS = 30.0  # that ``down`` gives jobs to write their checkpoints
AGAIN_SECONDS = 0.5  # before what went wrong is tried again


class ClosedError(ClusterError):
    """The cluster has ended, or ends."""


class BusyError(ClusterError):
    """What was asked for can be done soon, and not now."""


class Service:
    """One running cluster: a scheduler, its store and its backend. Thread-safe; ``start()`` begins its loop.

    The state is taken up from the store where there is one: ``policy`` must then be the same, and ``tenants`` may not differ.
    """

    def __init__(
        self, store: Store, backend: Backend, policy: Policy, tenants: Sequence[Tenant] = (),
        clock: Callable[[], float] | None = None,
    ) -> None:  # fmt: skip
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
        self._error: str | None = None  # what went wrong in the last turn
        self._behind = False  # scheduler and reconciler are to be made again from the store
        self._heard: list[BackendEvent] = []  # events that the store does not have yet
        self._put_off = PutOff()
        self._policy, self._tenants = copy.deepcopy(policy), tenants
        self.scheduler = JournaledScheduler(store, policy, tenants)
        self._same_tenants(tenants)
        self.jobs = Reconciler(store, backend, self.scheduler)
        self._last = self._clock()
        self._now = max(self._last if clock is not None else self._begin(), self.scheduler.book.now)
        with self._turn():
            self.jobs.take_up(self.now())
        self._save()  # before anything is taken in: later events mean something with these tenants and this policy

    def _same_tenants(self, tenants: Sequence[Tenant]) -> None:
        known = self.scheduler.book.tenants
        if tenants and {t.name: t.quota for t in tenants} != {t.name: t.quota for t in known.values()}:
            there = ", ".join(f"{t.name}={t.quota}" for t in known.values()) or "none"
            raise SubmissionError(
                f"the cluster in {self.store.path.parent} has the tenants {there}; leave out --tenant, or start another "
                "cluster with another --state folder"
            )

    # -- what users ask

    def submit(self, submission: dict[str, Any], payload: bytes, checkpoint: str | None = None) -> bool:
        """Take in a job; False where this very job is there already.

        Raises SubmissionError or InvalidJobError for what can never run, with the reason; nothing is kept of it then.
        """
        asked = checked(submission)
        with self._turn():
            asked.submitted = self.now()
            if not self.store.add(asked.to_dict(), payload, checkpoint):
                return False
            down = [node for node in self.backend.nodes() if not node.alive]
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
        """End a job; False where it has ended already. Raises SubmissionError for one that nobody knows."""
        with self._turn():
            job = self.record(id)
            if job.over:
                return False
            self.scheduler.cancel(self.now(), id)
            self.jobs.touch(id)
            self.store.say(id, self.now(), "cancelled")
        return True

    def record(self, id: str) -> JobRecord:
        """One job. Raises SubmissionError where nobody knows it."""
        job = self.store.job(id)
        if job is None:
            raise SubmissionError(f"no job is called {id!r}; waterflow cluster status lists those that are")
        return job

    def wait(self, ids: Sequence[str], seconds: float) -> list[str]:
        """Those of ``ids`` that have ended; waits at most so long until there is one.

        Raises SubmissionError for one that nobody knows, and ClosedError where the cluster ends meanwhile.
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
        """Nodes, tenants and jobs; see ``cluster_status``.

        If given, only the last ``ended`` of the jobs that have ended, and the first ``waiting`` of those that wait.
        """
        with self._lock:
            jobs, ended_before, wait_behind = self.store.page(ended, waiting)
            told = cluster_status(self.now(), self.scheduler, self.backend.nodes(), jobs, self.jobs.live)
            not_shown = {"jobs_not_shown": ended_before, "waiting_not_shown": wait_behind}
            return told | not_shown | {"trouble": self.trouble}

    def told(self, job: JobRecord) -> dict[str, Any]:
        """What ``status`` says of one job."""
        with self._lock:
            return job_status(self.now(), job, self.jobs.live.get(job.id, {}))

    # -- the loop

    def run(self) -> None:
        """Turn until it is closed. What goes wrong in a turn is logged, told by ``status``, and tried again."""
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
        """What could not be done the last time, and is tried again; None where there is nothing."""
        return self._error or self._put_off.trouble() or self.jobs.trouble()

    @property
    def over(self) -> bool:
        """Whether it has ended, by itself or by ``close`` or ``down``."""
        return self._over.is_set()

    def start(self) -> None:
        """``run()`` on a thread of its own, until ``close()`` or ``down()``."""
        self._loop = threading.Thread(target=self.run, name="scheduler", daemon=True)
        self._loop.start()

    def close(self) -> None:
        """Leave the nodes running, and end; a service that is made on the same store and folder goes on."""
        if self._end_loop():
            self.backend.detach()
            self.store.close()

    def down(self, seconds: float = SUSPEND_SECONDS) -> None:
        """Suspend what runs, with checkpoints, and end all nodes; the jobs stay known and go on when it is up again."""
        until = time.monotonic() + seconds
        with self._lock:
            self._closing = True
            for job in self.store.jobs(states=["starting", "running"]):
                with contextlib.suppress(*NOT_NOW):  # then they are taken for lost, and go on from their checkpoints
                    self.store.change(job.id, state="stopping")
                with contextlib.suppress(BackendError):
                    self.backend.stop(job.id, suspend=True)
            while self.store.jobs(states=["stopping"]) and time.monotonic() < until and not self.over:
                self._changed.wait(0.1)
        if self._end_loop():
            self.backend.close()
            self.store.close()

    def _end_loop(self) -> bool:
        """Whether it had not ended before."""
        with self._lock:
            self._over.set()
            self._changed.notify_all()
            first, self._ended = not self._ended, True
        if self._loop is not None:
            self._loop.join()
        return first

    def turn(self, timeout: float = LONGEST_POLL) -> None:
        """Hear the backend once, and do what follows. An event is kept until what follows from it is written down."""
        tick = self.scheduler.next_tick
        if tick is not None:
            timeout = max(0.0, min(timeout, tick - self.now()))
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
        """What is done inside is written down, with what follows from it; then that is asked for.

        With ``heard``: first what the backend told; only then can it be known what runs, if something went wrong before.
        """
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
            except Exception as error:  # the scheduler may be ahead of what is written: what is written counts
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
            except Exception as error:  # nobody knows that it was not asked for
                self._went_wrong(error)
            self._changed.notify_all()

    def _save(self) -> None:
        """Write the scheduler's state down where it is time to. With thousands of jobs it takes long: nobody waits for it."""
        with self._lock:
            finish = None if self._behind else self.scheduler.save()
        if finish is not None:
            finish()

    def _hear(self) -> None:
        """Take what was heard. Where something went wrong before, take up first what is written, as after a restart."""
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
                logger.exception("job %r: what is wanted of it could not be asked for", id)
            self.jobs.not_asked(self.now(), id, str(error))

    def _went_wrong(self, error: Exception) -> None:
        """Nothing of what is written is lost: the rest is done again from there."""
        said = f"{type(error).__name__}: {error}"
        if said != self._error:
            logger.error("something went wrong, and is tried again: %s", said, exc_info=error)
        self._error, self._behind = said, True

    def _check_open(self) -> None:
        if self._over.is_set():
            raise ClosedError("the scheduler has ended; start it again: waterflow cluster up")

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._over.set()
        self._changed.notify_all()

    def now(self) -> float:
        """Seconds since 1970, as they pass: whatever somebody sets the system's clock to, none are left out and none come twice."""
        with self._clock_lock:
            there = self._clock()
            self._now += max(0.0, there - self._last)
            self._last = there
            return self._now

    def _begin(self) -> float:
        """The time now: where the machine was not started since, as it passed since a service was there for the first time."""
        known, boot = self.store.meta("clock"), boot_id()
        if known is None or known["boot"] != boot:
            known = {"boot": boot, "offset": max(time.time(), self.scheduler.book.now) - self._last}
            self.store.set_meta("clock", known)
        return float(known["offset"] + self._last)


def boot_seconds() -> float:
    """Since the machine was started; nobody can set it."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Another one each time that the machine is started."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
