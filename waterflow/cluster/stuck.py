"""Cancelled jobs that do not end: their devices' processes are ended, after the jobs beside them are saved."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from waterflow.cluster.backend import Backend
from waterflow.cluster.store import Store

CANCEL_SECONDS = 30.0  # for a cancelled job to leave its device; then the device's process is ended
SAVE_SECONDS = 3.0  # before that, for the jobs beside it to write checkpoints

Ask = Callable[[], None]


class Stuck:
    """The cancelled jobs that still run, and the requests that end them. Its caller holds the lock, in an open transaction."""

    def __init__(self, store: Store, backend: Backend) -> None:
        self._store = store
        self._backend = backend
        self._until: dict[str, float] = {}
        self._beside_saved: set[str] = set()  # the ids for which the jobs beside them were asked for checkpoints
        self._processes: set[tuple[str, int]] = set()  # nodes and epochs of the processes that were ended

    @property
    def times(self) -> Iterable[float]:
        """The times at which ``settle`` has something to do."""
        return self._until.values()

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

    def settle(self, now: float) -> list[tuple[str, Ask]]:
        """Return the requests to make to the backend now, with the jobs' ids."""
        late = [id for id, until in self._until.items() if until <= now]
        return [ask for id in late for ask in self._break_off(id, now)]

    def _break_off(self, id: str, now: float) -> list[tuple[str, Ask]]:
        job = self._store.job(id)
        if job is None or job.state != "stopping":
            self.left(id)
            return []
        processes = {(node, epoch) for node, _, epoch in job.places}
        beside = [
            other.id
            for other in self._store.jobs(states=["starting", "running", "stopping"])
            if other.id != id and any((node, epoch) in processes for node, _, epoch in other.places)
        ]
        # Only user code that hangs blocks its job; its neighbours can still write checkpoints, and get some seconds for
        # it.
        if beside and id not in self._beside_saved:
            self._beside_saved.add(id)
            self._until[id] = now + SAVE_SECONDS
            return [(other, partial(self._backend.checkpoint, other)) for other in beside]
        self._beside_saved.discard(id)
        self._until[id] = now + CANCEL_SECONDS
        self._processes |= processes
        self._store.say(id, now, f"did not leave within {CANCEL_SECONDS:g} s: its device's process is ended")
        for other in beside:
            self._store.say(other, now, f"{id} beside it did not leave: its device's process is ended")
        return [(id, partial(self._backend.break_off, id))]
