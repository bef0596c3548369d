"""Requests to the backend, from the difference between the wanted state of each job and what was requested before.

The scheduler has the wanted state: where a job runs, and with which priority. The store has the requested state, written
before the request is made. So there is no list of actions that could be carried out twice: after a restart the same
comparison goes on, with the jobs that the backend reports as running.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from pathlib import Path
from typing import Any

from waterflow.cluster.backend import Backend, BackendEvent, Checkpointed, Ended, NodeJoined, NodeLost, Progress, Started
from waterflow.cluster.journal import JournaledScheduler
from waterflow.cluster.losses import MOST_LOSSES as MOST_LOSSES, Losses
from waterflow.cluster.store import ENDED, NOT_NOW, JobRecord, Store
from waterflow.cluster.stuck import Ask, Stuck
from waterflow.cluster.submission import Action, Node, Place, Report
from waterflow.units import format_seconds

logger = logging.getLogger("waterflow")

RETRY_SECONDS = 0.5  # after a start that the backend refused; twice as long after each more
LONGEST_RETRY = 30.0
LET_GO_SECONDS = 10.0  # for which a job waits for another one to leave its device


class Reconciler:
    """Applies the backend's events to scheduler and store, and returns the requests to make. Its caller holds the lock.

    ``now`` is the caller's time. All methods but ``not_asked`` belong to a transaction of the store, which the caller opens.
    """

    def __init__(self, store: Store, backend: Backend, scheduler: JournaledScheduler) -> None:
        self.store = store
        self.backend = backend
        self.scheduler = scheduler
        self.live: dict[str, dict[str, Progress]] = {}  # the last report of each running job, by node
        self._epochs: dict[str, int] = store.meta("epochs") or {}  # of the nodes that the scheduler knows
        self._unsettled: set[str] = set()
        self._retry_at: dict[str, float] = {}
        self._leaving: dict[str, tuple[float, frozenset[Place]]] = {}  # until when others wait for it, and where
        self._held_up: set[str] = set()  # jobs that wait for places of leaving ones
        self._unheard: set[str] = set()  # jobs whose priority was written, but perhaps never requested
        self._refused: dict[str, tuple[int, str]] = {}  # how often the backend refused what a job needs, and why
        self._failed: dict[str, str] = {}  # jobs that could not be settled, and why
        self._losses = Losses(store)
        self._stuck = Stuck(store, backend)
        self._now = 0.0

    def trouble(self) -> str | None:
        """Return the reason why a job could not be settled, which is tried again; None if there is none."""
        return next((f"job {id!r}: {why}" for id, why in self._failed.items()), None)

    def due(self, now: float) -> bool:
        """Return whether there is something to settle without a new event."""
        late = any(until <= now for until, _ in self._leaving.values()) if self._held_up else False
        return late or bool(self._unsettled) or any(at <= now for at in [*self._retry_at.values(), *self._stuck.times])

    def touch(self, *ids: str, actions: list[Action] | None = None) -> None:
        """Settle these jobs, and the jobs of the scheduler's ``actions``, at the next ``settle``."""
        self._unsettled |= {*ids, *(action.id for action in actions or ())}

    def take_up(self, now: float) -> None:
        """Compare the store with the running backend: nodes first, then events that were not yet processed, then jobs."""
        self._now = now
        alive = {node.name: node for node in self.backend.nodes() if node.alive}
        # If no process is left, the machine itself went down, and no job is to blame.
        blame = any(self._epochs.get(node.name) == node.epoch for node in alive.values())
        for name in [name for name in self.scheduler.book.devices.nodes if name not in alive]:
            self._node_lost(name, blame)
        for node in alive.values():
            self._node_joined(NodeJoined(node.name, node.epoch, node.devices, node.memory), blame)
        events = self.backend.poll(0.0)
        for event in events:
            self.take(now, event)
        self.compare(now, {event.id for event in events if isinstance(event, Ended)})

    def compare(self, now: float, told: Collection[str]) -> None:
        """Compare the store's jobs with the running ones, once all events are processed except those of the ids in ``told``."""
        self._now = now
        running = set(self.backend.running())
        known = [job for job in self.store.jobs() if not job.over]
        for job in known:
            if job.state == "stopping":
                self._leave(job)
            if job.places and job.id not in running and job.id not in told:
                if job.state == "starting":
                    # The start was stored, and perhaps never requested: this is no loss of a node.
                    self._gone(job, "its start came to nothing", "stopped")
                else:
                    self._gone(job, "its node ended while no scheduler ran")
        # A priority is stored before it is requested, and the request may not have been made.
        self._unheard = {job.id for job in known if job.id in running}
        for id in running - {job.id for job in known}:
            logger.warning("job %r runs and should not: it is stopped", id)
            self.backend.stop(id, suspend=False)
        self.touch(*(job.id for job in known))

    # -- asking

    def settle(self, now: float) -> list[tuple[str, Ask]]:
        """Return the requests that bring jobs nearer to their wanted state, with the jobs' ids; the store records them first."""
        self._now = now
        for id in [id for id, (until, _) in self._leaving.items() if until <= now]:
            self._let_go(id)
        ids = self._unsettled | {id for id, at in self._retry_at.items() if at <= now}
        self._unsettled = set()
        asks = self._stuck.settle(now)
        # Jobs that leave are settled before jobs that may have to wait for their devices.
        for job in sorted(self.store.jobs(sorted(ids)), key=lambda job: job.state == "waiting"):
            self._retry_at.pop(job.id, None)
            try:
                with self.store.part():
                    ask = self._settle(job)
                self._failed.pop(job.id, None)
            except NOT_NOW:
                raise
            except Exception as error:  # one job must not keep the others from being settled
                logger.exception("job %r: no request could be made from its wanted state", job.id)
                self._failed[job.id] = f"{type(error).__name__}: {error}"
                self._retry_at[job.id] = now + LONGEST_RETRY
                continue
            if ask is not None:
                asks.append((job.id, ask))
        return asks

    def _settle(self, job: JobRecord) -> Ask | None:
        if job.over:
            return None
        if job.state == "stopping":  # repeated: the request may have been lost, and a suspension may have become a cancellation
            return self._stop(job)
        places, priority = self._wanted(job.id)
        if job.state == "waiting":
            if job.id not in self.scheduler.book.entries:
                self._end(job, "cancelled", "")
            # A job that leaves one of these devices still has its memory there.
            elif any(where.intersection(places) for _, where in self._leaving.values()):
                self._held_up.add(job.id)
            elif places:
                return self._start(job, places, priority)
            return None
        if places != _where(job):
            self.store.change(job.id, state="stopping")
            self._leave(job)
            return self._stop(job)
        if priority != job.priority:
            self.store.change(job.id, priority=priority)
            self.store.say(job.id, self._now, f"goes on as {priority}")
        elif job.id not in self._unheard:
            return None
        self._unheard.discard(job.id)
        return lambda: self.backend.set_priority(job.id, priority)

    def _stop(self, job: JobRecord) -> Ask:
        # A job that left the scheduler was cancelled or has failed; any other one stops in order to run elsewhere.
        suspend = job.id in self.scheduler.book.entries
        if not suspend:
            self._stuck.asked(job.id, self._now)
        return lambda: self.backend.stop(job.id, suspend)

    def _leave(self, job: JobRecord) -> None:
        # Others wait for its devices only so long: it may hang, and a device can run several jobs.
        self._leaving[job.id] = self._now + LET_GO_SECONDS, frozenset(_where(job))

    def _let_go(self, id: str) -> None:
        if self._leaving.pop(id, None) is not None:
            self._unsettled |= self._held_up
            self._held_up = set()

    def _wanted(self, id: str) -> tuple[tuple[Place, ...], Any]:
        # No place: the scheduler has it waiting, or no longer knows it.
        entry = self.scheduler.book.entries.get(id)
        if entry is None or entry.state != "running":
            return (), "guaranteed"
        return tuple((node, device) for node, device in entry.places), entry.priority

    def _start(self, job: JobRecord, places: tuple[Place, ...], priority: Any) -> Ask:
        self.store.place(job.id, [(node, device, self._epochs[node]) for node, device in places])
        self.store.change(job.id, state="starting", attempts=job.attempts + 1, priority=priority)
        where = ", ".join(f"{node}:{device}" for node, device in places)
        self.store.say(job.id, self._now, f"starts at {where} as {priority}, attempt {job.attempts + 1}")
        self._losses.began(job.id, self._now, start=True)

        def ask() -> None:
            # Before the first attempt, the only checkpoint that counts is the submitted one.
            known = self.backend.checkpoints(job.id) if job.attempts else None
            if known is None and job.checkpoint is not None:
                known = self.backend.adopt(job.id, Path(job.checkpoint))
            self.backend.start(job.id, self.store.payload(job.id), places, priority, known)

        return ask

    def not_asked(self, now: float, id: str, why: str) -> None:
        """Record that the backend refused a request for a job, which is made again after a growing pause."""
        job = self.store.job(id)
        if job is None or job.over:
            return
        times, before = self._refused.get(id, (0, ""))
        with self.store.transaction():
            if job.state == "starting":
                self.store.place(id, ())
                self.store.change(id, state="waiting")
            else:
                self._unheard.add(id)
            if why != before:
                what = "is not started" if job.state == "starting" else "cannot be reached"
                self.store.say(id, now, f"{what}: {why}")
        self._refused[id] = times + 1, why
        self._retry_at[id] = now + min(RETRY_SECONDS * 2**times, LONGEST_RETRY)

    # -- events

    def take(self, now: float, event: BackendEvent) -> None:
        """Apply an event to the scheduler and the store; an event of an earlier run of its job is ignored."""
        self._now = now
        if isinstance(event, NodeLost):
            logger.warning("node %s is lost: %s", event.node, event.reason)
            if self._epochs.get(event.node) == event.epoch:
                self._node_lost(event.node, blame=not self._stuck.ended(event.node, event.epoch))
            return
        if isinstance(event, NodeJoined):
            self._node_joined(event)
            return
        job = self.store.job(event.id)
        if job is None or job.over or not self._current(job, event):
            return
        if isinstance(event, Started):
            if job.state == "starting":
                # Only from ``starting``: a stop that is under way by now goes on.
                self.store.change(job.id, state="running", started=job.started if job.started is not None else now)
                self._losses.began(job.id, now, start=True)
            self._refused.pop(job.id, None)
            self.scheduler.started(now, job.id)
        elif isinstance(event, Progress):
            self.live.setdefault(job.id, {})[event.node] = event
            report = Report(event.fraction, event.steps, None, self._part(event), event.memory or None)
            self.scheduler.report(now, job.id, report)
            if self._losses.known(job.id):
                self._clear(job)
            self._limit(job, event)
        elif isinstance(event, Checkpointed):
            self.store.change(job.id, checkpoint=str(event.path), steps=event.steps)
            self._losses.began(job.id, now, start=False)
            self.store.say(job.id, now, f"checkpoint after {event.steps} steps")
        elif event.how in ENDED:
            self.scheduler.ended(now, job.id, event.how)
            self.store.change(job.id, results=str(event.results))
            self._end(job, event.how, event.reason, event.steps)
        elif job.state != "starting" or event.how == "lost":  # otherwise it is the end of the start before
            why = event.reason or ("its node was lost" if event.how == "lost" else "suspended")
            self._gone(job, why, event.how, event.steps)

    def _limit(self, job: JobRecord, event: Progress) -> None:
        # To the scheduler it has failed now; the backend only cancels it, which ``_end`` turns into a failure.
        limit = job.submission.get("time_limit")
        if limit is not None and not job.reason and job.ran + event.seconds >= limit:
            reason = f"it ran for {format_seconds(job.ran + event.seconds)}, and its time limit is {format_seconds(limit)}"
            self.store.change(job.id, reason=reason)
            self.store.say(job.id, self._now, f"is ended: {reason}")
            self.scheduler.ended(self._now, job.id, "failed")
            self.touch(job.id)

    def _part(self, event: Progress) -> float:
        # Each job on a device reports the utilization of the whole device; the parts must add up to it once.
        entry = self.scheduler.book.entries.get(event.id)
        there = [len(device.residents) for device in entry.devices] if entry is not None else []
        return event.utilization * len(there) / sum(there) if there else event.utilization

    def _node_lost(self, node: str, blame: bool = True) -> None:
        epoch = self._epochs.pop(node, None)
        self.store.set_meta("epochs", self._epochs)
        self.touch(actions=self.scheduler.node_lost(self._now, node))
        if blame:
            self._suspect([job for job in self.store.jobs() if (node, epoch) in {(n, e) for n, _, e in job.places}])

    def _node_joined(self, event: NodeJoined, blame: bool = True) -> None:
        # A node that was taken over joins again with the epoch it had: nothing has changed.
        if self._epochs.get(event.node) != event.epoch:
            if event.node in self._epochs:
                self._node_lost(event.node, blame)
            self._epochs[event.node] = event.epoch
            self.store.set_meta("epochs", self._epochs)
            node = Node(event.node, event.devices, event.memory)
            self.touch(actions=self.scheduler.node_joined(self._now, node))

    def _suspect(self, jobs: list[JobRecord]) -> None:
        for id in self._losses.lost(self._now, jobs, {job.id: self._reported(job.id) for job in jobs}):
            self._alone(id, True, "may be the reason that devices are lost: it runs alone, until that is known")

    def _reported(self, id: str) -> int:
        return sum(report.steps for report in self.live.get(id, {}).values())

    def _clear(self, job: JobRecord) -> None:
        nodes = {node for node, _, _ in job.places}
        others = any(
            other.id != job.id and nodes.intersection(node for node, _, _ in other.places)
            for other in self.store.jobs(states=["starting", "running", "stopping"])
        )
        if self._losses.calm(job.id, self._now, not others, max(job.steps, self._reported(job.id))):
            self._losses.forget(job.id)
            self._alone(job.id, False, "is not the reason that devices were lost")

    def _alone(self, id: str, alone: bool, why: str) -> None:
        entry = self.scheduler.book.entries.get(id)
        if entry is not None and entry.alone != alone:
            self.scheduler.run_alone(self._now, id, alone)
            self.store.say(id, self._now, why)

    def _current(self, job: JobRecord, event: Any) -> bool:
        # A node that came back has a higher epoch than its placements: events of its old process are late.
        epochs = [epoch for node, _, epoch in job.places if node == event.node]
        if not event.node:  # the backend read it from the shared folder
            return True
        if not epochs or event.epoch < max(epochs):
            logger.info("an event of job %r from node %s, epoch %d, comes too late", job.id, event.node, event.epoch)
            return False
        return True

    def _gone(self, job: JobRecord, why: str, how: str = "lost", steps: int | None = None) -> None:
        # The backend has nothing left of a job that has not ended: it waits until it is started again.
        self._let_go(job.id)
        self._stuck.left(job.id)
        self.store.place(job.id, ())
        reports = self.live.pop(job.id, {})
        self.store.change(job.id, ran=job.ran + _seconds(reports))
        if how == "suspended":  # with a checkpoint of all its steps
            reported = sum(report.steps for report in reports.values())
            self.store.change(job.id, steps=steps if steps is not None else max(job.steps, reported))
        self.store.say(job.id, self._now, f"{how}: {why}")
        reason = self._losses.reason(job.id) if how == "lost" else None
        if reason is not None:
            freed = self._losses.explained(job.id)
            self.scheduler.ended(self._now, job.id, "failed")
            self._end(job, "failed", f"{reason}; the last time: {why}")
            for id in freed:
                self._alone(id, False, f"runs beside others again: job {job.id!r} was the reason that devices were lost")
            return
        self.store.change(job.id, state="waiting", losses=job.losses + (how == "lost"))
        self._unsettled.add(job.id)

    def _end(self, job: JobRecord, how: Any, reason: str, steps: int | None = None) -> None:
        self._let_go(job.id)
        self._losses.forget(job.id)
        self._refused.pop(job.id, None)
        self._stuck.left(job.id)
        if how == "cancelled" and job.reason:  # this cluster ended it, for that reason
            how, reason = "failed", job.reason
        reports = self.live.pop(job.id, {})
        steps = steps if steps is not None else max(job.steps, sum(report.steps for report in reports.values()))
        self.store.place(job.id, ())
        self.store.change(job.id, state=how, ended=self._now, reason=reason, steps=steps)
        if reports:
            self.store.change(job.id, ran=job.ran + _seconds(reports))
        self.store.forget_payload(job.id)
        self.store.say(job.id, self._now, f"{how}{f': {reason}' if reason else ''}")


def _seconds(reports: dict[str, Progress]) -> float:
    # Its nodes report the same run: the longest report is its length.
    return max((report.seconds for report in reports.values()), default=0.0)


def _where(job: JobRecord) -> tuple[Place, ...]:
    return tuple((node, device) for node, device, _ in job.places)
