"""The live cluster: events of the backend go to the scheduler, and the backend does what the scheduler then wants.

What is wanted of each job (where it runs, and how) stands in the scheduler; what was asked of the backend stands in the
store. Whatever differs is settled by one more request, which is written down before it is made. So there is no list of
actions that could be carried out twice: after a restart the same comparison goes on, with what the backend says runs.
"""

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
    BackendEvent,
    Checkpointed,
    Ended,
    NodeJoined,
    NodeLost,
    Progress,
    Started,
)
from waterflow.cluster.intake import checked
from waterflow.cluster.policies.base import Policy
from waterflow.cluster.scheduler import Scheduler
from waterflow.cluster.status import cluster_status, job_status
from waterflow.cluster.store import ENDED, JobRecord, Store
from waterflow.cluster.submission import Node, Place, Report, SubmissionError, Tenant
from waterflow.errors import ClusterError, InvalidJobError

logger = logging.getLogger("waterflow")

LONGEST_POLL = 0.25  # seconds; the backend watches its nodes inside of polls
SAVE_SECONDS = 5.0  # how often the scheduler is written down where only reports came in
RETRY_SECONDS = 0.5  # after a start that the backend refused
MOST_LOSSES = 4  # a job whose node is lost so often without a checkpoint in between is taken to be the reason
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
        self._saved = 0.0
        self._live: dict[str, dict[str, Progress]] = {}  # the last report of each running job, by node
        self._unsettled: set[str] = set()
        self._retry_at: dict[str, float] = {}
        self._closing = self._ended = False
        self._loop: threading.Thread | None = None
        self.failure: BaseException | None = None
        state = store.meta("scheduler")
        if state is None:
            self.scheduler = Scheduler([], policy, tenants)
        else:
            self.scheduler = Scheduler.from_dict(state, policy)
            self._same_tenants(tenants)
        self._epochs: dict[str, int] = store.meta("epochs") or {}  # of the nodes that the scheduler knows
        self._now = max(clock(), self.scheduler.book.now)
        self._take_up()

    def _same_tenants(self, tenants: Sequence[Tenant]) -> None:
        known = self.scheduler.book.tenants
        if tenants and {t.name: t.quota for t in tenants} != {t.name: t.quota for t in known.values()}:
            there = ", ".join(f"{t.name}={t.quota}" for t in known.values()) or "none"
            raise SubmissionError(
                f"the cluster in {self.store.path.parent} has the tenants {there}; leave out --tenant, or start another "
                "cluster with another --state folder"
            )

    def _take_up(self) -> None:
        """Compare what the store says with what runs: nodes first, then events that nobody heard, then jobs."""
        with self._turn():
            alive = {node.name: node for node in self.backend.nodes() if node.alive}
            for name in [name for name in self.scheduler.book.devices.nodes if name not in alive]:
                self._node_lost(name)
            for node in alive.values():
                self._node_joined(NodeJoined(node.name, node.epoch, node.devices, node.memory))
            events = self.backend.poll(0.0)
            for event in events:
                self._take(event)
            running = set(self.backend.running())
            told = {event.id for event in events if isinstance(event, Ended)}
            known_jobs = [job for job in self.store.jobs() if not job.over]
            for job in known_jobs:
                if job.places and job.id not in running and job.id not in told:
                    asked = job.state == "starting"
                    self._gone(job, "its start came to nothing" if asked else "its node ended while no scheduler ran",
                               "stopped" if asked else "lost")  # fmt: skip
            for id in running - {job.id for job in known_jobs}:
                logger.warning("job %r runs and should not: it is stopped", id)
                self.backend.stop(id, suspend=False)
            self._unsettled |= {job.id for job in known_jobs}
            self.scheduler.tick(self.now())

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
            actions = self.scheduler.submit(self.now(), asked)
            self._unsettled |= {asked.id, *(action.id for action in actions)}
            self.store.say(asked.id, self.now(), f"submitted: {asked.devices} device(s), {asked.priority}")
        return True

    def cancel(self, id: str) -> bool:
        """End a job; False where it has ended already. Raises SubmissionError for one that nobody knows."""
        with self._turn():
            job = self.record(id)
            if job.over:
                return False
            actions = self.scheduler.cancel(self.now(), id)
            self._unsettled |= {id, *(action.id for action in actions)}
            self.store.say(id, self.now(), "cancelled")
        return True

    def record(self, id: str) -> JobRecord:
        """One job. Raises SubmissionError where nobody knows it."""
        job = self.store.job(id)
        if job is None:
            raise SubmissionError(f"no job is called {id!r}; waterflow cluster status lists those that are")
        return job

    def wait(self, ids: Sequence[str], seconds: float) -> list[str]:
        """Those of ``ids`` that have ended; waits at most so long until there is one."""
        until = time.monotonic() + seconds
        with self._lock:
            for id in ids:
                self.record(id)
            while True:
                over = [job.id for job in self.store.jobs(ids, states=ENDED)]
                left = until - time.monotonic()
                if over or left <= 0 or self._over.is_set():
                    return over
                self._changed.wait(left)

    def status(self) -> dict[str, Any]:
        """Nodes, tenants and jobs; see ``cluster_status``."""
        with self._lock:
            return cluster_status(self.now(), self.scheduler, self.backend.nodes(), self.store.jobs(), self._live)

    def told(self, job: JobRecord) -> dict[str, Any]:
        """What ``status`` says of one job."""
        with self._lock:
            return job_status(self.now(), job, self._live.get(job.id, {}))

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
        retry = any(at <= self.now() for at in self._retry_at.values())
        if events or late or retry or self._unsettled:
            with self._turn(save=late or not all(isinstance(event, Progress) for event in events)):
                for event in events:
                    self._take(event)
                self._unsettled |= {action.id for action in self.scheduler.tick(self.now())}

    @contextlib.contextmanager
    def _turn(self, save: bool = True) -> Iterator[None]:
        """Changes of the scheduler inside are written down, with what follows from them; then that is asked for."""
        with self._lock:
            if self._over.is_set():
                raise ClosedError("the scheduler has ended; start it again: waterflow cluster up")
            try:
                with self.store.transaction():
                    yield
                    asks = self._settle_all()
                    if save or asks or self.now() - self._saved >= SAVE_SECONDS:
                        self.store.set_meta("scheduler", self.scheduler.to_dict())
                        self.store.set_meta("epochs", self._epochs)
                        self._saved = self.now()
            except (SubmissionError, InvalidJobError, BusyError):  # nothing was changed
                raise
            except BaseException as error:  # the scheduler may be ahead of what is written: what is written counts
                self._fail(error)
                raise
            for id, ask in asks:
                try:
                    ask()
                except BackendError as error:
                    self._not_started(id, str(error))
            self._changed.notify_all()

    def _settle_all(self) -> list[tuple[str, Callable[[], None]]]:
        now = self.now()
        ids = self._unsettled | {id for id, at in self._retry_at.items() if at <= now}
        self._unsettled = set()
        asks = []
        for job in self.store.jobs(sorted(ids)):
            self._retry_at.pop(job.id, None)
            ask = None if self._closing else self._settle(job)
            if ask is not None:
                asks.append((job.id, ask))
        return asks

    def _fail(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._over.set()
        self._changed.notify_all()

    def _settle(self, job: JobRecord) -> Callable[[], None] | None:
        """Note the request that brings a job nearer to what is wanted of it; returns what makes it."""
        if job.over or job.state == "stopping":
            return None
        places, priority = self._wanted(job.id)
        if job.state == "waiting":
            if job.id not in self.scheduler.book.entries:
                self._end(job, "cancelled", "")
            elif places:
                return self._start(job, places, priority)
            return None
        if places != tuple((node, device) for node, device, _ in job.places):
            self.store.change(job.id, state="stopping")
            suspend = job.id in self.scheduler.book.entries
            return lambda: self.backend.stop(job.id, suspend)
        if priority != job.priority:
            self.store.change(job.id, priority=priority)
            self.store.say(job.id, self.now(), f"goes on as {priority}")
            return lambda: self.backend.set_priority(job.id, priority)
        return None

    def _wanted(self, id: str) -> tuple[tuple[Place, ...], Any]:
        """Where the scheduler has a job now, and how; no place where it waits or has ended."""
        entry = self.scheduler.book.entries.get(id)
        if entry is None or entry.state != "running":
            return (), "guaranteed"
        return tuple((node, device) for node, device in entry.places), entry.priority

    def _start(self, job: JobRecord, places: tuple[Place, ...], priority: Any) -> Callable[[], None]:
        self.store.place(job.id, [(node, device, self._epochs[node]) for node, device in places])
        self.store.change(job.id, state="starting", attempts=job.attempts + 1, priority=priority)
        where = ", ".join(f"{node}:{device}" for node, device in places)
        self.store.say(job.id, self.now(), f"starts at {where} as {priority}, attempt {job.attempts + 1}")

        def ask() -> None:
            written = self.backend.checkpoints(job.id) if job.attempts else None
            given = Path(job.checkpoint) if job.checkpoint is not None else None
            self.backend.start(job.id, self.store.payload(job.id), places, priority, written or given)

        return ask

    def _not_started(self, id: str, why: str) -> None:
        with self.store.transaction():
            self.store.place(id, ())
            self.store.change(id, state="waiting")
            self.store.say(id, self.now(), f"is not started: {why}")
        self._retry_at[id] = self.now() + RETRY_SECONDS

    # -- events

    def _take(self, event: BackendEvent) -> None:
        now = self.now()
        if isinstance(event, NodeLost):
            logger.warning("node %s is lost: %s", event.node, event.reason)
            if self._epochs.get(event.node) == event.epoch:
                self._node_lost(event.node)
            return
        if isinstance(event, NodeJoined):
            self._node_joined(event)
            return
        job = self.store.job(event.id)
        if job is None or job.over or not self._current(job, event):
            return
        if isinstance(event, Started):
            if job.state == "starting":
                self.store.change(job.id, state="running", started=job.started if job.started is not None else now)
            self._unsettled |= {a.id for a in self.scheduler.started(now, job.id, decide=False)}
        elif isinstance(event, Progress):
            self._live.setdefault(job.id, {})[event.node] = event
            report = Report(event.fraction, event.steps, None, event.utilization, event.memory)
            self._unsettled |= {a.id for a in self.scheduler.report(now, job.id, report, decide=False)}
        elif isinstance(event, Checkpointed):
            self.store.change(job.id, checkpoint=str(event.path), steps=event.steps, losses=0)
            self.store.say(job.id, now, f"checkpoint after {event.steps} steps")
        elif event.how in ENDED:
            self._unsettled |= {a.id for a in self.scheduler.ended(now, job.id, event.how, decide=False)}
            self.store.change(job.id, results=str(event.results))
            self._end(job, event.how, event.reason)
        elif job.state != "starting" or event.how == "lost":  # else: news of the start before
            self._gone(job, event.reason or ("its node was lost" if event.how == "lost" else "suspended"), event.how)

    def _node_lost(self, node: str) -> None:
        self._epochs.pop(node, None)
        self._unsettled |= {a.id for a in self.scheduler.node_lost(self.now(), node, decide=False)}

    def _node_joined(self, event: NodeJoined) -> None:
        """A node with a process that is new; one that a backend takes over is told of again, and nothing has changed."""
        if self._epochs.get(event.node) != event.epoch:
            self._epochs[event.node] = event.epoch
            node = Node(event.node, event.devices, event.memory)
            self._unsettled |= {a.id for a in self.scheduler.node_joined(self.now(), node, decide=False)}

    def _current(self, job: JobRecord, event: Any) -> bool:
        """Whether an event comes from where the job was started last; a node that came back since has a higher epoch."""
        epochs = [epoch for node, _, epoch in job.places if node == event.node]
        if not epochs or event.epoch < max(epochs):
            logger.info("an event of job %r from node %s, epoch %d, comes too late", job.id, event.node, event.epoch)
            return False
        return True

    def _gone(self, job: JobRecord, why: str, how: str = "lost") -> None:
        """Nothing of a job that has not ended is left on the backend: it waits until it is started again."""
        self.store.place(job.id, ())
        self._live.pop(job.id, None)
        losses = job.losses + (how == "lost")
        self.store.say(job.id, self.now(), f"{how}: {why}")
        if losses > MOST_LOSSES:
            self.scheduler.ended(self.now(), job.id, "failed", decide=False)
            self._end(
                job, "failed", f"its node was lost {losses} times without a checkpoint in between; the last time: {why}"
            )
            return
        self.store.change(job.id, state="waiting", losses=losses)
        self._unsettled.add(job.id)

    def _end(self, job: JobRecord, how: Any, reason: str) -> None:
        steps = max(job.steps, sum(report.steps for report in self._live.pop(job.id, {}).values()))
        self.store.place(job.id, ())
        self.store.change(job.id, state=how, ended=self.now(), reason=reason, steps=steps)
        self.store.say(job.id, self.now(), f"{how}{f': {reason}' if reason else ''}")

    def now(self) -> float:
        """Seconds since 1970; never less than before, whatever the system's clock does."""
        self._now = max(self._now, self._clock())
        return self._now
