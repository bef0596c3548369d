"""Lost devices, and the jobs that were on them: suspects run alone until the cause is found, or they are cleared."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from waterflow.cluster.store import JobRecord, Store


class Silence:
    """The length of a silence, in seconds in which this process listened.

    Time in which this process was itself stopped, or busy elsewhere, does not count: it says nothing of the other side.
    """

    LONGEST = 0.5  # seconds that count at most between two calls

    def __init__(self) -> None:
        self._passed, self._looked = 0.0, time.monotonic()

    def passed(self) -> float:
        """Return the length so far; the caller listened just now, and heard nothing."""
        now = time.monotonic()
        self._passed += min(now - self._looked, self.LONGEST)
        self._looked = now
        return self._passed

    def broken(self) -> None:
        """Begin again at zero: something was heard."""
        self._passed, self._looked = 0.0, time.monotonic()


SUSPECT = 2  # losses after which a job runs alone
LEAST_ALONE = 3  # so many of its losses must come while it was alone on the device before a job is the cause
MOST_LOSSES = 4  # with more losses than this, and enough of them alone, a job is the cause
# A job is cleared after these seconds, and 1.5 times its longest run before a loss, past the step it had reached then.
AFTER_SECONDS = 2.0
WARM_SECONDS = 10.0  # the same for a job that counts no steps, from its start: it may take longer to begin
CALM_SECONDS = 600.0  # at least, for a job that runs beside others


@dataclass(frozen=True)
class Loss:
    """The part of one job in the loss of a device.

    ``ran`` is the seconds since it began or wrote a checkpoint, whichever was later; ``saved`` the steps in its last
    checkpoint; ``reached`` the steps that it had reported.
    """

    number: int
    id: str
    alone: bool
    ran: float
    saved: int
    reached: int


class Losses:
    """The losses without a known cause, kept in the store. Each change belongs to a transaction of the caller.

    Every job on a device that is lost may be the cause. A job with ``SUSPECT`` losses runs alone, and only losses of a device
    on which it was alone can make it fail. A job is cleared when it got further than where devices were lost and ran on for a
    while, or when another job is found to be the cause of its losses.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.read()
        self._running_since: dict[str, float] = {}  # as far as this process knows
        self._further_since: dict[str, float] = {}  # than where devices were lost

    def read(self) -> None:
        """Take up what the store has, after a transaction that was undone."""
        self._by_job: dict[str, list[Loss]] = {}
        for row in self._store.losses():
            self._note(Loss(*row))

    def began(self, id: str, now: float, start: bool) -> None:
        """Record that a job was started (``start``), or has a new checkpoint."""
        if start:
            self._running_since[id] = now
            self._further_since.pop(id, None)
        self._store.change(id, unsaved_since=now)

    def lost(self, now: float, jobs: Sequence[JobRecord], reached: Mapping[str, int], alone: bool) -> list[str]:
        """Record that a device was lost under ``jobs``; return the ids of those that must run alone from now on.

        ``reached`` are the steps that each had reported, ``alone`` says that nobody else was there, held or not.
        """
        # One number for all jobs on the device: when one of them is the cause, the loss is explained for all.
        number = 1 + max((loss.number for losses in self._by_job.values() for loss in losses), default=0)
        for job in jobs:
            ran = max(0.0, now - job.unsaved_since) if job.unsaved_since is not None else 0.0
            loss = Loss(number, job.id, alone, ran, job.steps, max(job.steps, reached.get(job.id, 0)))
            self._store.add_loss(*astuple(loss))
            self._note(loss)
            self._running_since.pop(job.id, None)
        return [job.id for job in jobs if self.suspect(job.id)]

    def suspect(self, id: str) -> bool:
        """Return whether a job must run alone."""
        return len(self._by_job.get(id, ())) >= SUSPECT

    def reason(self, id: str) -> str | None:
        """Return why a job has failed as the cause of lost devices; None unless that is certain."""
        losses = self._by_job.get(id, [])
        alone = sum(loss.alone for loss in losses)
        # Losses beside others prove nothing, as each job there may be the cause.
        if len(losses) <= MOST_LOSSES or alone < LEAST_ALONE:
            return None
        unsaved = " without a checkpoint in between" if len({loss.saved for loss in losses}) == 1 else ""
        company = "" if alone == len(losses) else f", {alone} of them with nothing else on it"
        return f"its node was lost {len(losses)} times{unsaved}{company}"

    def calm(self, id: str, now: float, alone: bool, steps: int) -> bool:
        """Return whether a job that has done ``steps`` steps is cleared. Beside others it takes longer, as that proves less."""
        losses = self._by_job.get(id)
        if not losses:
            return False
        longest = 1.5 * max(loss.ran for loss in losses)
        reached = max(loss.reached for loss in losses)
        # Past the step at which devices were lost, the code that may have caused it has run without harm.
        if steps > reached:
            since, needed = self._further_since.setdefault(id, now), AFTER_SECONDS + longest
        elif steps == 0:
            since, needed = self._running_since.setdefault(id, now), WARM_SECONDS + longest
        else:
            return False
        return now - since > (needed if alone else max(needed, CALM_SECONDS))

    def known(self, id: str) -> bool:
        """Return whether a job has losses without a known cause."""
        return id in self._by_job

    def forget(self, id: str) -> None:
        """Forget the losses of a job that has ended, or is cleared."""
        self._store.forget_losses(ids=[id])
        self._by_job.pop(id, None)
        self._further_since.pop(id, None)

    def explained(self, id: str) -> list[str]:
        """Forget the losses that a job has caused, for all jobs; return the ids that need no longer run alone."""
        numbers = {loss.number for loss in self._by_job.get(id, ())}
        self._store.forget_losses(numbers=sorted(numbers))
        # A job without other losses need no longer run alone.
        freed = []
        for other, losses in list(self._by_job.items()):
            before = self.suspect(other)
            left = [loss for loss in losses if loss.number not in numbers]
            self._by_job[other] = left
            if not left:
                del self._by_job[other]
            if before and not self.suspect(other):
                freed.append(other)
        return freed

    def _note(self, loss: Loss) -> None:
        self._by_job.setdefault(loss.id, []).append(loss)
