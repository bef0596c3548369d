"""The comparison of the table of jobs with what devices tell, and the requests that bring the two together.

The scheduler's book says where jobs are to run, a job's row where its run is, and a device's state what it has of it. No list of
requests is kept: a request is a difference, and the next state says whether it is still there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from waterflow.cluster.backend import Backend, DeviceState, How, Part, Request
from waterflow.cluster.book import Entry
from waterflow.cluster.losses import MOST_LOSSES as MOST_LOSSES, Losses
from waterflow.cluster.scheduler import Scheduler
from waterflow.cluster.store import ENDED, NOT_NOW, JobRecord, State, Store
from waterflow.cluster.stuck import Ask, Stuck
from waterflow.cluster.submission import Node, Place, Report
from waterflow.errors import BackendError
from waterflow.units import format_seconds

logger = logging.getLogger("waterflow")

MOST_HELD = 8  # jobs on a device that wait there for their next turn
AGAIN_SECONDS = 10.0  # before what went wrong with one job is tried again
LEAVE_SECONDS = 60.0  # for which one that must run alone waits for another that leaves, and may hang
NOBODY_SAW = "its process ended while no scheduler ran"


class JobFault(Exception):
    """An error about one job, behind which the book may be ahead of its rows: the turn is taken again without the job."""


def _place(job: JobRecord) -> Place:
    assert job.node is not None and job.device is not None, f"{job.id!r} is nowhere"
    return job.node, job.device


class Reconciler:
    """Brings scheduler and store up to what devices tell, and makes requests of what differs. Its caller holds the lock.

    ``now`` is the caller's time. ``see``, ``cancel`` and ``settle`` belong to a transaction of the store, which the caller
    opens. Once that has failed, ``begin_again`` comes before anything else. ``over`` is set once a job has ended.

    Raises JobFault.
    """

    def __init__(self, store: Store, backend: Backend, scheduler: Scheduler) -> None:
        self.store = store
        self.backend = backend
        self.over = False
        self.devices: dict[str, DeviceState] = {}  # the newest state of each process that the table knows
        self.live: dict[str, Part] = {}  # what was seen last of each job that is on a device
        self._kept: dict[str, Part] = {}  # the same, as of the last commit
        self._leaving: dict[str, float] = {}  # jobs that are to leave, and since when
        self._trouble: dict[str, tuple[float, str]] = {}  # of jobs: until when it is left alone, and why
        self._first = True  # nothing was seen yet
        self._losses = Losses(store)
        self._stuck = Stuck(store, backend)
        self._now = 0.0
        self.begin_again(scheduler)

    def begin_again(self, scheduler: Scheduler) -> None:
        """Take up the table as it is, with a scheduler of its rows."""
        self.scheduler = scheduler
        self.live = dict(self._kept)
        self._taken: dict[str, Part] = {}  # parts that the table is up to
        self._epochs: dict[str, int] = self.store.meta("epochs") or {}  # of the nodes that the scheduler knows
        self._losses.read()
        self._stuck.read()
        for job in self.store.placed():
            if (entry := scheduler.book.entries.get(job.id)) is not None:
                entry.held_at = _place(job) if entry.state == "waiting" and job.state != "stopping" else None

    def committed(self) -> None:
        """Note that the turn's transaction is written."""
        self._first, self._kept = False, dict(self.live)

    def trouble(self) -> str | None:
        """Return what went wrong with a job, and is tried again; None if nothing did."""
        return next((f"job {id!r}: {why}" for id, (_, why) in self._trouble.items()), None)

    # -- what is

    def see(self, now: float, states: Sequence[DeviceState]) -> None:
        """Bring the table and the book up to what devices tell, and to the processes that are alive."""
        self._now = now
        heard = [self._hear(state) for state in states]
        nodes = {node.name: node for node in self.backend.nodes()}
        alive = {name: node.epoch for name, node in nodes.items() if node.alive}
        # If no process of the last time is left when this one begins, the machine went down, and no job is to blame.
        blame = not self._first or any(alive.get(name) == epoch for name, epoch in self._epochs.items())
        why = {name: node.lost or NOBODY_SAW for name, node in nodes.items()}
        for name, epoch in list(self._epochs.items()):
            if alive.get(name) != epoch:
                self._node_lost(name, epoch, blame)
        for job in self.store.placed():
            if self._epochs.get(job.node or "") != job.epoch:
                self._try(job.id, self._left_behind, job, why.get(job.node or "", NOBODY_SAW))
        for name, epoch in alive.items():
            if name not in self._epochs:
                self._epochs[name] = epoch
                self.store.set_meta("epochs", self._epochs)
                self.scheduler.node_joined(now, Node(name, 1, nodes[name].memory), decide=False)
        for state, known in zip(states, heard):
            if not known:
                self._hear(state)

    def part(self, job: JobRecord) -> Part | None:
        """Return what its device has of the run that a job's row is about; None if it has not told of it."""
        state = self.devices.get(job.node or "")
        if state is None or state.epoch != job.epoch:
            return None
        return next((part for part in state.parts if (part.id, part.run) == (job.id, job.attempts)), None)

    def _hear(self, state: DeviceState) -> bool:
        # Returns False for the state of a process that the table does not know yet.
        if self._epochs.get(state.node) != state.epoch:
            return False
        self.devices[state.node] = state
        for part in state.parts:
            if self._taken.get(part.id) == part:
                continue
            job = self.store.job(part.id)
            if job is not None and not job.over and self.part(job) == part:
                self._try(job.id, self._take, job, part, state)
        return True

    def _take(self, job: JobRecord, part: Part, state: DeviceState) -> None:
        if part.phase == "ended":
            assert part.how is not None
            self.live[job.id] = self._taken[job.id] = part
            self._ended(job, part.how, part.reason, part.steps)
            return
        if part.phase == "training":
            if job.state == "starting":
                started = job.started if job.started is not None else self._now
                self.store.change(job.id, state="running", started=started)
                self._losses.began(job.id, self._now, start=True)
            entry = self.scheduler.book.entries.get(job.id)
            if entry is not None and entry.places == (_place(job),):  # else it is to run elsewhere
                # A device tells its utilization once, for all; the shares of those there must add up to it.
                share = state.utilization / len(entry.devices[0].residents)
                report = Report(part.fraction, part.rate, share, part.memory or None)
                self.scheduler.report(self._now, job.id, report, decide=False)
        if part.saved is not None and part.saved != job.steps:
            self.store.change(job.id, steps=part.saved)
            self._losses.began(job.id, self._now, start=False)
            self.store.say(job.id, self._now, f"checkpoint after {part.saved} steps")
        self.live[job.id] = self._taken[job.id] = part
        if self._losses.known(job.id):
            self._clear(job)
        self._limit(job, part)

    def _limit(self, job: JobRecord, part: Part) -> None:
        # To the scheduler it has failed now; its device only cancels it, which ``_end`` turns into a failure.
        limit = job.submission.get("time_limit")
        if limit is not None and not job.reason and job.ran + part.seconds >= limit:
            reason = f"it ran for {format_seconds(job.ran + part.seconds)}, and its time limit is {format_seconds(limit)}"
            self.store.change(job.id, reason=reason)
            self.store.say(job.id, self._now, f"is ended: {reason}")
            self.scheduler.ended(self._now, job.id, decide=False)

    def _node_lost(self, node: str, epoch: int, blame: bool) -> None:
        blame = blame and not self._stuck.ended(node, epoch)
        del self._epochs[node]
        self.store.set_meta("epochs", self._epochs)
        self.devices.pop(node, None)
        self.scheduler.node_lost(self._now, node, decide=False)
        if blame:
            there = [job for job in self.store.placed() if (job.node, job.epoch) == (node, epoch)]
            idle = {id for id, part in self.live.items() if part.held}
            lost = [j for j in there if j.id not in idle and not self.backend.folder.has_ended(j.id, j.attempts)]
            reached = {job.id: self.live[job.id].steps if job.id in self.live else 0 for job in lost}
            for id in self._losses.lost(self._now, lost, reached, alone=len(there) == 1):
                self._alone(id, True, "may be the reason that devices are lost: it runs alone, until that is known")

    def _left_behind(self, job: JobRecord, why: str) -> None:
        if not self._ended_unheard(job):
            self._gone(job, f"node {job.node!r}: {why}", "lost")

    def _ended_unheard(self, job: JobRecord) -> bool:
        # Its device does not tell of it. It may have ended, and nobody has heard of it.
        end = self.backend.folder.end_of(job.id, job.attempts)
        if end is not None:
            self._ended(job, end["how"], end["reason"], end["steps"])
        return end is not None

    def _clear(self, job: JobRecord) -> None:
        others = any(other.id != job.id and other.node == job.node for other in self.store.placed())
        if self._losses.calm(job.id, self._now, not others, max(job.steps, self.live[job.id].steps)):
            self._losses.forget(job.id)
            self._alone(job.id, False, "is not the reason that devices were lost")

    def _alone(self, id: str, alone: bool, why: str) -> None:
        entry = self.scheduler.book.entries.get(id)
        if entry is not None and entry.alone != alone:
            self.scheduler.run_alone(self._now, id, alone, decide=False)
            self.store.say(id, self._now, why)

    def _ended(self, job: JobRecord, how: How, reason: str, steps: int) -> None:
        if how in ENDED:
            self.scheduler.ended(self._now, job.id, decide=False)
            self.store.change(job.id, results=str(self.backend.folder.job(job.id)))
            self._end(job, how, reason, steps)  # type: ignore[arg-type]
        elif how == "suspended":
            self._gone(job, reason or "suspended", how, steps)
        else:
            self._gone(job, reason, how)
            self._trouble[job.id] = self._now + AGAIN_SECONDS, reason

    def _gone(self, job: JobRecord, why: str, how: str, steps: int | None = None) -> None:
        # No device has anything left of a job that has not ended: it waits until it is started again.
        part = self.live.pop(job.id, None)
        self._left(job.id)
        self.store.change(job.id, state="waiting", ran=job.ran + (part.seconds if part is not None else 0.0))
        if steps is not None:
            self.store.change(job.id, steps=steps)
        self.store.say(job.id, self._now, f"{how}: {why}")
        if job.id not in self.scheduler.book.entries:
            self._end(job, "cancelled", "")
            return
        if how != "lost":
            return
        self.store.change(job.id, losses=job.losses + (part is None or not part.held))
        reason = self._losses.reason(job.id)
        if reason is not None:
            freed = self._losses.explained(job.id)
            self.scheduler.ended(self._now, job.id, decide=False)
            self._end(job, "failed", f"{reason}; the last time: {why}")
            for id in freed:
                self._alone(id, False, f"runs beside others again: job {job.id!r} was the reason that devices were lost")

    def _end(self, job: JobRecord, how: State, reason: str, steps: int | None = None) -> None:
        self.over = True
        part = self.live.pop(job.id, None)
        self._left(job.id)
        self._losses.forget(job.id)
        self._trouble.pop(job.id, None)
        if how == "cancelled" and job.reason:  # this cluster ended it, for that reason
            how, reason = "failed", job.reason
        if part is not None:
            self.store.change(job.id, ran=job.ran + part.seconds)
        self.store.change(job.id, state=how, ended=self._now, reason=reason, steps=job.steps if steps is None else steps)
        self.store.forget_payload(job.id)
        self.store.say(job.id, self._now, f"{how}{f': {reason}' if reason else ''}")

    def _left(self, id: str) -> None:
        self._taken.pop(id, None)
        self._leaving.pop(id, None)
        self._stuck.left(id)
        self.store.place(id, None)
        if (entry := self.scheduler.book.entries.get(id)) is not None:
            entry.held_at = None

    # -- what is to be

    def cancel(self, now: float, job: JobRecord) -> None:
        """End a job on request: at once if it is on no device."""
        self._now = now
        self.scheduler.cancel(now, job.id, decide=False)
        if job.node is None:
            self._end(job, "cancelled", "")
        else:
            self.store.say(job.id, now, "is to be cancelled")

    def settle(self, now: float, leave: bool = False) -> list[Ask]:
        """Return what to ask of the backend, behind the commit, to bring devices nearer to the book.

        Nothing is asked of a device that has not answered the requests before: what it told is older than they are. ``leave``:
        all jobs are to be suspended.
        """
        self._now = now
        self._asks: list[tuple[str, Request]] = []
        residents = () if leave else [entry for device in self.scheduler.book.devices for entry in device.residents]
        wanted = {entry.id: entry for entry in residents}
        placed = {job.id: job for job in self.store.placed()}
        held = {} if leave else self._held(placed.values())
        for job in placed.values():
            self._try(job.id, self._settle, job, wanted.get(job.id) or held.get(job.id))
        for job in self.store.jobs([id for id in wanted if id not in placed]):
            self._try(job.id, self._start, job, wanted[job.id], list(placed.values()), changes_book=False)
        for node, state in self.devices.items():
            known = {(job.id, job.attempts) for job in placed.values() if (job.node, job.epoch) == (node, state.epoch)}
            for part in state.parts if self._ready(node) else ():
                if (part.id, part.run) not in known:
                    self._not_known(node, part)
        self._trouble = {id: trouble for id, trouble in self._trouble.items() if id in placed or id in wanted}
        return [*(partial(self.backend.request, node, request) for node, request in self._asks), *self._stuck.settle(now)]

    def _held(self, placed: Iterable[JobRecord]) -> dict[str, Entry]:
        # The entries that wait, and may do so where they are. Of too many those leave that have waited longest.
        entries = self.scheduler.book.entries
        crowded = {d.place for d in self.scheduler.book.devices if any(one.alone for one in d.residents)}
        waiting: dict[Place, list[Entry]] = {}
        for job in placed:
            entry, place = entries.get(job.id), _place(job)
            if entry is not None and entry.state == "waiting" and not entry.alone and place not in crowded:
                waiting.setdefault(place, []).append(entry)
        newest = [sorted(each, key=lambda one: (one.waiting_since, one.order))[-MOST_HELD:] for each in waiting.values()]
        return {entry.id: entry for each in newest for entry in each}

    def _settle(self, job: JobRecord, entry: Entry | None) -> None:
        assert job.node is not None
        held = entry is not None and entry.state == "waiting"
        stays = job.state != "stopping" and entry is not None and (held or entry.places == (_place(job),))
        if stays and (job.state == "held") != held and job.state != "starting":
            self.store.change(job.id, state="held" if held else "running")
            self.store.say(job.id, self._now, "is held until its next turn" if held else "goes on")
            self._losses.began(job.id, self._now, start=False)  # the time in which it was held says nothing
        in_book = self.scheduler.book.entries.get(job.id)
        known = in_book is not None
        if in_book is not None:
            in_book.held_at = _place(job) if stays and held else None
        if known:  # also after a cancellation that was undone
            self._stuck.left(job.id)
        if not stays:
            self._leaving.setdefault(job.id, self._now)
            self.store.change(job.id, state="stopping")
        if self._epochs.get(job.node) != job.epoch or not self._ready(job.node):
            return
        part, ask = self.part(job), None
        if part is None and self._ended_unheard(job):
            return
        if stays:
            assert entry is not None
            quota = entry.submission.quota
            if part is None:
                ask = Request("start", job.id, job.attempts, entry.priority, held=held, quota=quota)
            elif part.phase != "ended":
                priority = part.priority if held else entry.priority  # one that is held has none in the book
                if priority != part.priority:
                    self.store.say(job.id, self._now, f"goes on as {priority}")
                if (part.priority, part.held, part.quota) != (priority, held, quota):
                    ask = Request("set", job.id, job.attempts, priority, held=held, quota=quota)
        elif part is None:
            self._gone(job, "its start came to nothing", "stopped")
        elif part.phase != "ended":
            # A job that left the book was cancelled or has failed; any other one stops in order to run elsewhere.
            if not known:
                self._stuck.asked(job.id, self._now)
            if part.stopping not in ("cancelled", "suspended" if known else "cancelled"):
                ask = Request("stop", job.id, job.attempts, suspend=known)
        if ask is not None:
            self._asks.append((job.node, ask))

    def _start(self, job: JobRecord, entry: Entry, placed: list[JobRecord]) -> None:
        ((node, device),) = entry.places
        # One that leaves may be there still, or for ever.
        since = {other.id: self._leaving.get(other.id, self._now) for other in placed if other.node == node}
        beside = [id for id, at in since.items() if self._now - at < LEAVE_SECONDS]
        apart = beside and (entry.alone or any(map(self._losses.suspect, beside)))
        parts = [part for state in self.devices.values() for part in state.parts]
        # An older table may not know of a run that is still there.
        if not self._ready(node) or apart or any(part.id == job.id and part.phase != "ended" for part in parts):
            return
        folder = self.backend.folder
        run = 1 + max(job.attempts, folder.last_run(job.id))
        checkpoint = Path(job.checkpoint) if job.checkpoint is not None else None
        folder.prepare(job.id, run, self.store.payload(job.id), not job.attempts, checkpoint)
        self.store.place(job.id, (node, device, self._epochs[node]))
        self.store.change(job.id, state="starting", attempts=run)
        self.store.say(job.id, self._now, f"starts at {node}:{device} as {entry.priority}, attempt {run}")
        self._losses.began(job.id, self._now, start=True)
        self._asks.append((node, Request("start", job.id, run, entry.priority, quota=entry.submission.quota)))

    def _not_known(self, node: str, part: Part) -> None:
        # The row is about another run, or there is none.
        if part.phase == "ended":
            self._asks.append((node, Request("forget", part.id, part.run)))
        elif part.stopping != "cancelled":
            logger.warning("run %d of job %r is on %s and should not be: it is stopped", part.run, part.id, node)
            self._asks.append((node, Request("stop", part.id, part.run)))

    def _ready(self, node: str) -> bool:
        state = self.devices.get(node)
        return state is not None and self._epochs.get(node) == state.epoch and self.backend.answered(state)

    def _try(self, id: str, act: Callable[..., None], *arguments: Any, changes_book: bool = True) -> None:
        """Act for one job. An error is told, undone, and keeps the job alone waiting for a while; the others go on.

        What ``changes_book`` only the turn as a whole undoes. A BackendError comes before anything has changed.
        """
        until, before = self._trouble.get(id, (0.0, ""))
        if self._now < until:
            return
        self._trouble.pop(id, None)
        try:
            with self.store.part():
                act(*arguments)
        except NOT_NOW:
            raise
        except Exception as error:
            known = isinstance(error, BackendError)
            why = str(error) if known else f"{type(error).__name__}: {error}"
            self._trouble[id] = self._now + AGAIN_SECONDS, why
            if changes_book and not known:
                raise JobFault(f"job {id!r}: {why}") from error
            if why != before:
                logger.warning("job %r: %s", id, why, exc_info=None if known else error)
                self.store.say(id, self._now, why)
