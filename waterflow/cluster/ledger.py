"""The part that all backends share: the nodes, the runs on them, and which of a node's events still count."""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from waterflow.cluster.backend import (
    BackendError,
    BackendEvent,
    Checkpointed,
    Ended,
    How,
    NodeInfo,
    NodeJoined,
    NodeLost,
    Progress,
    Started,
)
from waterflow.cluster.shared_folder import SharedFolder
from waterflow.cluster.submission import Place, Priority
from waterflow.cluster.worker import Hello, Numbered

logger = logging.getLogger("waterflow")


@dataclass
class _Share:
    """The part of a run that one node has."""

    node: str
    epoch: int
    started: bool = False
    progress: Progress | None = None
    checkpointed: int | None = None  # steps
    ended: Ended | None = None


@dataclass
class _Run:
    """One start of an id, with its parts."""

    number: int
    priority: Priority
    shares: list[_Share]
    stopping: How | None = None  # how it will have ended, once a stop was sent
    started: bool = False
    next: tuple[bytes, Sequence[Place], Priority, Path | None] | None = (
        None  # a start that was requested while this run is being stopped
    )
    next_stopped: How | None = None  # that one was stopped before it could start

    @property
    def open(self) -> list[_Share]:
        return [share for share in self.shares if share.ended is None]


@dataclass
class Known:
    """A node as its backend knows it. ``heard`` is the number of the last event taken from it."""

    info: NodeInfo
    heard: int = 0
    acknowledged: int = 0


class Ledger(ABC):
    """The part of a backend that does not depend on how its nodes are reached.

    A subclass finds out which nodes are alive and receives their events, and calls ``_joined``, ``_lost`` and ``_take`` from
    ``_listen``.
    """

    def __init__(self, folder: SharedFolder) -> None:
        self.folder = folder
        self._known: dict[str, Known] = {}
        self._runs: dict[str, _Run] = {}
        self._news: list[BackendEvent] = []
        self._guard = threading.RLock()

    # -- for subclasses to implement

    @abstractmethod
    def _send(self, node: str, name: str, arguments: dict[str, Any]) -> None:
        """Send a request to the worker of ``node``. Sending to a node that cannot be reached does nothing: it will be lost."""

    @abstractmethod
    def _listen(self, timeout: float) -> None:
        """Watch all nodes; wait at most ``timeout`` seconds for events, and not at all if there are some."""

    def _end_process(self, node: str, epoch: int, why: str) -> None:
        # Without a way to end it, declaring it lost suffices: it ends itself once it finds that it is fenced.
        self._lost(node, epoch, why)

    # -- Backend

    def nodes(self) -> list[NodeInfo]:
        """See ``Backend``."""
        with self._guard:
            return [self._known[name].info for name in sorted(self._known)]

    def running(self) -> list[str]:
        """See ``Backend``."""
        with self._guard:
            return sorted(self._runs)

    def start(
        self, id: str, payload: bytes, places: Sequence[Place], priority: Priority = "guaranteed", checkpoint: Path | None = None
    ) -> None:
        """See ``Backend``."""
        with self._guard:
            self._check_places(id, places)
            if checkpoint is not None and checkpoint != self.folder.job(id):
                raise BackendError(f"{checkpoint} is no checkpoint of {id!r}: take what checkpoints({id!r}) or an event says")
            run = self._runs.get(id)
            if run is None:
                self._start(id, payload, places, priority, checkpoint)
            elif run.stopping is None or run.next is not None:
                raise BackendError(f"{id!r} runs on {run.shares[0].node!r}; stop it before it is started again")
            else:
                run.next = (payload, tuple(places), priority, checkpoint)

    def poll(self, timeout: float) -> list[BackendEvent]:
        """See ``Backend``."""
        with self._guard:
            for name, known in self._known.items():
                if known.info.alive and known.acknowledged < known.heard:
                    known.acknowledged = known.heard
                    self._send(name, "acknowledge", {"number": known.heard})
        self._listen(timeout)
        with self._guard:
            news, self._news = self._news, []
            return news

    def checkpoint(self, id: str) -> None:
        """See ``Backend``."""
        self._ask(id, "checkpoint", {})

    def checkpoints(self, id: str) -> Path | None:
        """See ``Backend``."""
        return self.folder.job(id) if self.folder.has_state(id) else None

    def adopt(self, id: str, checkpoint: Path) -> Path:
        """See ``Backend``."""
        self.folder.adopt(id, checkpoint)
        return self.folder.job(id)

    def stop(self, id: str, suspend: bool) -> None:
        """See ``Backend``."""
        with self._guard:
            run = self._runs.get(id)
            if run is None:
                return
            how: How = "suspended" if suspend else "cancelled"
            if run.next is not None:
                run.next_stopped = how
            elif run.stopping is None or (run.stopping == "suspended" and not suspend):
                run.stopping = how
                self._ask(id, "stop", {"suspend": suspend})

    def break_off(self, id: str) -> None:
        """See ``Backend``."""
        with self._guard:
            run = self._runs.get(id)
            if run is not None and run.stopping == "cancelled":
                for node, epoch in {(share.node, share.epoch) for share in run.open}:
                    self._end_process(node, epoch, f"{id!r} was cancelled, and did not come to its end")

    def set_priority(self, id: str, priority: Priority) -> None:
        """See ``Backend``."""
        with self._guard:
            if id in self._runs:
                self._runs[id].priority = priority
        self._ask(id, "set_priority", {"priority": priority})

    # -- for subclasses to call

    def _joined(self, hello: Hello) -> None:
        # A node joins at its first start, again after a loss, or when this backend takes it over with its runs.
        with self._guard:
            info = NodeInfo(hello.node, 1, hello.memory, hello.epoch, True, hello.machine)
            self._known[hello.node] = Known(info)
            self._news.append(NodeJoined(hello.node, hello.epoch, 1, hello.memory))
            for part in hello.parts:
                run = self._runs.get(part.id)
                # A run that was started again elsewhere while this node was out of reach: its events no longer count.
                if part.run != self.folder.last_run(part.id):
                    continue
                if run is None or run.number != part.run:
                    # The other parts are filled in as their nodes join; ``_all_joined`` settles the rest.
                    shares = [_Share("", 0) for _ in range(part.shares)]
                    run = self._runs[part.id] = _Run(part.run, part.priority, shares)
                share = run.shares[part.share]
                share.node, share.epoch, share.started = hello.node, hello.epoch, part.started

    def _all_joined(self) -> None:
        # All nodes that outlived another backend have joined: a part of a run that none of them has ended, or was lost.
        with self._guard:
            for id, run in list(self._runs.items()):
                for number, share in enumerate(run.shares):
                    if share.node:
                        continue
                    path = self.folder.ended(id, run.number, number)
                    said: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"how": "lost", "reason": ""}
                    how: How = said["how"]
                    share.ended = Ended(id, "", 0, how, self.folder.job(id), said["reason"], said.get("steps"))
                    if how == "lost":
                        self._stop_rest(id, run)
                self._close(id, run)

    def _lost(self, node: str, epoch: int, reason: str) -> None:
        with self._guard:
            known = self._known.get(node)
            if known is None or known.info.epoch != epoch or not known.info.alive:
                return
            # Before the loss is reported: from then on the jobs may start elsewhere, and the old process must not
            # publish.
            self.folder.fence(epoch)
            known.info = replace(known.info, alive=False)
            self._news.append(NodeLost(node, epoch, reason))
            for id, run in list(self._runs.items()):
                for share in run.open:
                    if share.node == node and share.epoch == epoch:
                        share.ended = Ended(id, node, epoch, "lost", self.folder.job(id), f"node {node!r}: {reason}")
                        self._stop_rest(id, run)
                self._close(id, run)

    def _take(self, node: str, epoch: int, events: Sequence[Numbered]) -> None:
        # Events of a lost process, or of a run that is over, are dropped; those heard before have lower numbers.
        with self._guard:
            known = self._known.get(node)
            if known is None or known.info.epoch != epoch or not known.info.alive:
                return
            for number, run_number, event in events:
                # A worker repeats events that were not acknowledged when a backend connects.
                if number <= known.heard:
                    continue
                known.heard = number
                assert not isinstance(event, (NodeJoined, NodeLost))
                run = self._runs.get(event.id)
                if run is None and isinstance(event, Ended) and run_number == self.folder.last_run(event.id):
                    self._news.append(event)  # it ended between two backends, and was never reported
                elif run is not None and run.number == run_number:
                    for share in run.open:
                        if share.node == node and share.epoch == epoch:
                            self._combine(run, share, event)

    # -- inside

    def _check_places(self, id: str, places: Sequence[Place]) -> None:
        if not places:
            raise BackendError(f"{id!r} needs at least one place; got none")
        if len(set(places)) < len(places):
            raise BackendError(f"{id!r}: one device twice among the places {list(places)}; name each once")
        for node, device in places:
            known = self._known.get(node)
            if known is None:
                raise BackendError(f"{id!r}: there is no node {node!r}; there are {', '.join(sorted(self._known))}")
            if not known.info.alive:
                raise BackendError(f"{id!r}: node {node!r} was lost and is being started again; wait for NodeJoined")
            if not 0 <= device < known.info.devices:
                raise BackendError(f"{id!r}: node {node!r} has {known.info.devices} devices; there is no {device}")

    def _start(self, id: str, payload: bytes, places: Sequence[Place], priority: Priority, checkpoint: Path | None) -> None:
        if checkpoint is None:
            self.folder.forget(id)
        number = self.folder.new_run(id)
        self.folder.send(id, number, payload)
        shares = [_Share(node, self._known[node].info.epoch) for node, _ in places]
        run = self._runs[id] = _Run(number, priority, shares)
        for share, (node, _) in enumerate(places):
            self._send(
                node,
                "start",
                {
                    "id": id,
                    "run": number,
                    "share": share,
                    "shares": len(places),
                    "priority": priority,
                    "resume": checkpoint is not None,
                },
            )
            if not self._known[node].info.alive:  # its node was lost between the request and this start
                why = f"node {node!r} was lost before it started"
                shares[share].ended = Ended(id, node, shares[share].epoch, "lost", self.folder.job(id), why)
                self._stop_rest(id, run)
        self._close(id, run)

    def _ask(self, id: str, name: str, arguments: dict[str, Any]) -> None:
        with self._guard:
            run = self._runs.get(id)
            for share in run.open if run is not None else ():
                assert run is not None
                self._send(share.node, name, {"id": id, "run": run.number, **arguments})

    def _stop_rest(self, id: str, run: _Run) -> None:
        # A group runs as a whole: when one part is lost, the others are suspended, and resume with it in the next run.
        if run.stopping is None:
            run.stopping = "lost"
            self._ask(id, "stop", {"suspend": True})

    def _combine(self, run: _Run, share: _Share, event: BackendEvent) -> None:
        """Merge an event of one node's part into the events of the whole run."""
        if isinstance(event, Started):
            share.started = True
            if not run.started and all(s.started for s in run.shares):
                run.started = True
                self._news.append(event)
        elif isinstance(event, Progress):
            share.progress = event
            self._news.append(event if len(run.shares) == 1 else _together(run))
        elif isinstance(event, Checkpointed):
            share.checkpointed = event.steps
            self.folder.drop_states(event.id)
            self._news.append(replace(event, steps=sum(s.checkpointed or 0 for s in run.shares)))
        elif isinstance(event, Ended):
            share.ended = event
            self._close(event.id, run)

    def _close(self, id: str, run: _Run) -> None:
        if run.open:
            return
        ends = [share.ended for share in run.shares if share.ended is not None]
        # The worst end of a part is the end of the run.
        order: tuple[How, ...] = ("lost", "failed", "cancelled", "suspended", "completed")
        worst = min(ends, key=lambda end: order.index(end.how))
        reasons = "; ".join(dict.fromkeys(end.reason for end in ends if end.reason))
        counts = [end.steps for end in ends if end.steps is not None]
        steps = sum(counts) if len(counts) == len(ends) else None
        del self._runs[id]
        self._news.append(replace(worst, reason=reasons, steps=steps))
        if worst.how == "completed":
            # A completed run is never resumed.
            self.folder.drop_states(id, keep=0)
        if run.next_stopped is not None:
            self._news.append(replace(worst, how=run.next_stopped, reason="stopped before it could start"))
        elif run.next is not None:
            try:
                self._start(id, *run.next)
            except OSError as error:  # ``start`` has returned long ago: only an event can report it
                logger.warning("%r could not be started: %s", id, error)
                self._news.append(Ended(id, "", 0, "lost", self.folder.job(id), f"it could not be started: {error}"))


def _together(run: _Run) -> Progress:
    """Return the progress of a run from that of its parts, in the name of the first node."""
    parts = [share.progress for share in run.shares if share.progress is not None]
    shares, node, epoch = len(run.shares), run.shares[0].node, run.shares[0].epoch
    fractions = [part.fraction for part in parts if part.fraction is not None]
    moving = [part.step_seconds for part in parts if part.step_seconds > 0]
    return replace(
        parts[0],
        node=node,
        epoch=epoch,
        steps=sum(part.steps for part in parts),
        fraction=sum(fractions) / shares if len(fractions) == len(parts) else None,
        step_seconds=sum(moving) / len(moving) if moving else 0.0,
        memory=max(part.memory for part in parts),
        utilization=sum(part.utilization for part in parts) / len(parts),
        seconds=max(part.seconds for part in parts),
    )


class OwnLedger(Ledger):
    """A ``Ledger`` that has its folder to itself: the one it is given, or a temporary one, which goes at the end."""

    def __init__(self, folder: str | Path | None) -> None:
        self._temporary = folder is None
        super().__init__(SharedFolder(Path(folder or tempfile.mkdtemp(prefix="waterflow-")).absolute()))
        self.folder.make()
        self._lock_file = self.folder.lock()
        self._closed = False

    @abstractmethod
    def _leave(self, end: bool) -> None:
        """Let go of all nodes. ``end``: their processes end; else they wait for another backend."""

    def close(self) -> None:
        """See ``Backend``."""
        self._end_all(end=True)
        if self._temporary:
            shutil.rmtree(self.folder.path, ignore_errors=True)

    def detach(self) -> None:
        """See ``Backend``."""
        self._end_all(end=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _end_all(self, end: bool) -> None:
        with self._guard:
            if self._closed:
                return
            self._closed = True
            self._runs.clear()
            self._leave(end)
            os.close(self._lock_file)
