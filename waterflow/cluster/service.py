"""The live cluster: a loop between the scheduler and the backend, and what users ask of it."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from waterflow.cluster.backend import (
    Backend,
    BackendError,
)
from waterflow.cluster.intake import checked
from waterflow.cluster.journal import JournaledScheduler
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.reconciler import Reconciler
from waterflow.cluster.status import cluster_status, job_status
from waterflow.cluster.store import JobRecord, Store
from waterflow.cluster.submission import Tenant
from waterflow.errors import ClusterError, InvalidJobError, SubmissionError

logger = logging.getLogger("waterflow")

LONGEST_POLL = 0.25  # seconds; the backend watches its nodes inside of polls
SUSPEND_SECONDS = 30.0  # that ``down`` gives jobs to write their checkpoints


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
        clock: Callable[[], float] = time.time,
    ) -> None:  # fmt: skip
        self.store = store
        self.backend = backend
        self._clock = clock
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._over = threading.Event()
        self._closing = self._ended = False
        self._loop: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.scheduler = JournaledScheduler(store, policy, tenants)
        self._same_tenants(tenants)
        self.jobs = Reconciler(store, backend, self.scheduler)
        self._now = max(clock(), self.scheduler.book.now)
        with self._turn():
            self.jobs.take_up(self.now())

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
            if checkpoint is not None and not Path(checkpoint).is_file():
                raise SubmissionError(
                    f"job {asked.id!r}: the machine of the cluster has no file {checkpoint}; copy it there"
                )
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
            return told | {"jobs_not_shown": ended_before, "waiting_not_shown": wait_behind}

    def told(self, job: JobRecord) -> dict[str, Any]:
        """What ``status`` says of one job."""
        with self._lock:
            return job_status(self.now(), job, self.jobs.live.get(job.id, {}))

    # -- the loop

    def run(self) -> None:
        """Turn until it is closed. What goes wrong in the store or the backend ends it, and is its ``failure``."""
        while not self._over.is_set():
            try:
                self.turn()
            except ClosedError:
                break
            except BaseException as error:
                logger.exception("the scheduler ends; jobs that run are untouched")
                with self._lock:
                    self._fail(error)

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
        """Hear the backend once, and do what follows."""
        tick = self.scheduler.next_tick
        if tick is not None:
            timeout = max(0.0, min(timeout, tick - self.now()))
        events = self.backend.poll(timeout)
        tick = self.scheduler.next_tick
        late = tick is not None and tick <= self.now()
        if events or late or self.jobs.due(self.now()):
            with self._turn():
                for event in events:
                    self.jobs.take(self.now(), event)

    @contextlib.contextmanager
    def _turn(self) -> Iterator[None]:
        """Events of the scheduler inside are written down, with what follows from them; then that is asked for."""
        with self._lock:
            self._check_open()
            try:
                with self.store.transaction():
                    yield
                    self.jobs.touch(actions=self.scheduler.tick(self.now()))
                    asks = [] if self._closing else self.jobs.settle(self.now())
                    self.scheduler.save()
            except (SubmissionError, InvalidJobError, BusyError):  # nothing was changed
                raise
            except BaseException as error:  # the scheduler may be ahead of what is written: what is written counts
                self._fail(error)
                raise
            for id, ask in asks:
                try:
                    ask()
                except (BackendError, OSError) as error:
                    self.jobs.not_asked(self.now(), id, str(error))
            self._changed.notify_all()

    def _check_open(self) -> None:
        if self._over.is_set():
            raise ClosedError("the scheduler has ended; start it again: waterflow cluster up")

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._over.set()
        self._changed.notify_all()

    def now(self) -> float:
        """Seconds since 1970; never less than before, whatever the system's clock does."""
        self._now = max(self._now, self._clock())
        return self._now
