"""Cancelled jobs that do not end: their devices' processes are ended, after the jobs beside them are saved."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from waterflow.cluster.backend import Backend, Request
from waterflow.cluster.store import Store

CANCEL_SECONDS = 30.0  # for a cancelled job to leave its device; then the device's process is ended
SAVE_SECONDS = 3.0  # before that, for the jobs beside it to write checkpoints
MOST_ENDED = 20  # processes that are remembered as ended here

Ask = Callable[[], None]  # of the backend, behind the commit


class Stuck:
    """The cancelled jobs that still run, and the requests that end them. Its caller holds the lock, in an open transaction."""

    def __init__(self, store: Store, backend: Backend) -> None:
        self._store = store
        self._backend = backend
        self._until: dict[str, float] = {}
        self.read()

    def read(self) -> None:
        """Take up what the store has, after a transaction that was undone."""
        self._beside_saved: set[str] = set()  # the ids for which the jobs beside them were asked for checkpoints
        # Nodes and epochs of the processes that were ended.
        self._processes = [(node, epoch) for node, epoch in self._store.meta("processes_ended") or ()]

    def asked(self, id: str, now: float) -> None:
        """Record that a job was asked to end. Repeating it gives the job no more time."""
        self._until.setdefault(id, now + CANCEL_SECONDS)

    def left(self, id: str) -> None:
        """Record that the job no longer runs."""
        self._until.pop(id, None)
        self._beside_saved.discard(id)

    def ended(self, node: str, epoch: int) -> bool:
        """Return whether this process was ended here; then none of its jobs is to blame for the loss."""
        return (node, epoch) in self._processes

    def settle(self, now: float) -> list[Ask]:
        """Return what is to be asked of the backend now."""
        late = [id for id, until in self._until.items() if until <= now]
        return [ask for id in late for ask in self._break_off(id, now)]

    def _break_off(self, id: str, now: float) -> list[Ask]:
        job = self._store.job(id)
        if job is None or job.node is None or job.epoch is None:
            self.left(id)
            return []
        beside = [other for other in self._store.placed() if other.id != id and other.node == job.node]
        # Only user code that hangs blocks its job; its neighbours can still write checkpoints, and get some seconds for
        # it.
        if beside and id not in self._beside_saved:
            self._beside_saved.add(id)
            self._until[id] = now + SAVE_SECONDS
            saves = [Request("checkpoint", other.id, other.attempts) for other in beside]
            return [partial(self._backend.request, job.node, *saves)]
        self._beside_saved.discard(id)
        self._until[id] = now + CANCEL_SECONDS
        self._processes = [*self._processes[-MOST_ENDED:], (job.node, job.epoch)]
        self._store.set_meta("processes_ended", self._processes)
        self._store.say(id, now, f"did not leave within {CANCEL_SECONDS:g} s: its device's process is ended")
        for other in beside:
            self._store.say(other.id, now, f"{id} beside it did not leave: its device's process is ended")
        why = f"{id!r} was cancelled, and did not come to its end"
        return [partial(self._backend.end_process, job.node, job.epoch, why)]
