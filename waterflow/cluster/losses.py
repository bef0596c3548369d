"""Devices that were lost, and who was there: jobs that may be the reason run alone, until one is found or they are cleared."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

from waterflow.cluster.store import JobRecord, Store


class Silence:
    """For how long nothing was heard, in seconds in which somebody listened.

    Who did not listen, as it was stopped itself or had other things to do, knows nothing of that time.
    """

    LONGEST = 0.5  # seconds that count between two looks

    def __init__(self) -> None:
        self._passed, self._looked = 0.0, time.monotonic()

    def passed(self) -> float:
        """The length so far; somebody listens now, and heard nothing."""
        now = time.monotonic()
        self._passed += min(now - self._looked, self.LONGEST)
        self._looked = now
        return self._passed

    def broken(self) -> None:
        """Something was heard."""
        self._passed, self._looked = 0.0, time.monotonic()


SUSPECT = 2  # losses after which a job runs alone
LEAST_ALONE = 3  # of its losses must have come while nothing else was there before a job is taken to be the reason
MOST_LOSSES = 4  # one more, and a job is taken to be the reason, where enough of them came while it was alone
AFTER_SECONDS = (
    2.0  # and half as long again as before its longest loss, that a job runs on where it got further than then
)
WARM_SECONDS = 10.0  # the same for one that counts no steps, from its start: it may take longer to begin
CALM_SECONDS = 600.0  # the least of both for a job that runs beside others


@dataclass(frozen=True)
class Loss:
    """One job's part in the loss of a device.

    ``ran``: seconds since it began or wrote a checkpoint, whichever was later; ``saved``: steps in its last checkpoint;
    ``reached``: steps that were heard of.
    """

    number: int
    id: str
    alone: bool
    ran: float
    saved: int
    reached: int


class Losses:
    """The losses that are not explained yet, kept in the store. Each change stands in a transaction of its caller.

    Every job that was on a device when it was lost may have been the reason. A job with ``SUSPECT`` losses runs alone, and
    only losses of a device on which it was alone can make it fail. A job is cleared when it got further than where devices
    were lost, and ran on for a while, or when the reason of its losses was found in another job.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._by_job: dict[str, list[Loss]] = {}
        for row in store.losses():
            self._note(Loss(*row))
        self._running_since: dict[str, float] = {}  # as far as this process knows
        self._further_since: dict[str, float] = {}  # than where devices were lost

    def began(self, id: str, now: float, start: bool) -> None:
        """The job was started (``start``), or has a new checkpoint."""
        if start:
            self._running_since[id] = now
            self._further_since.pop(id, None)
        self._store.set_since(id, now)

    def lost(self, now: float, jobs: Sequence[JobRecord], reached: Mapping[str, int]) -> list[str]:
        """A device was lost on which these jobs were, with so many steps; returns those that must run alone from now on."""
        number = 1 + max((loss.number for losses in self._by_job.values() for loss in losses), default=0)
        for job in jobs:
            since = self._store.since(job.id)
            ran = max(0.0, now - since) if since is not None else 0.0
            loss = Loss(number, job.id, len(jobs) == 1, ran, job.steps, max(job.steps, reached.get(job.id, 0)))
            self._store.add_loss(*astuple(loss))
            self._note(loss)
            self._running_since.pop(job.id, None)
        return [job.id for job in jobs if self.suspect(job.id)]

    def suspect(self, id: str) -> bool:
        """Whether a job has to run alone."""
        return len(self._by_job.get(id, ())) >= SUSPECT

    def reason(self, id: str) -> str | None:
        """Why a job has failed: it ends its devices; None unless that is certain."""
        losses = self._by_job.get(id, [])
        alone = sum(loss.alone for loss in losses)
        if len(losses) <= MOST_LOSSES or alone < LEAST_ALONE:
            return None
        unsaved = " without a checkpoint in between" if len({loss.saved for loss in losses}) == 1 else ""
        company = "" if alone == len(losses) else f", {alone} of them with nothing else on it"
        return f"its node was lost {len(losses)} times{unsaved}{company}"

    def calm(self, id: str, now: float, alone: bool, steps: int) -> bool:
        """Whether a job that has so many steps by now is cleared. Beside others it takes longer, for that says less."""
        losses = self._by_job.get(id)
        if not losses:
            return False
        longest = 1.5 * max(loss.ran for loss in losses)
        reached = max(loss.reached for loss in losses)
        if steps > reached:
            since, needed = self._further_since.setdefault(id, now), AFTER_SECONDS + longest
        elif steps == 0:
            since, needed = self._running_since.setdefault(id, now), WARM_SECONDS + longest
        else:
            return False
        return now - since > (needed if alone else max(needed, CALM_SECONDS))

    def known(self, id: str) -> bool:
        """Whether a job has losses that are not explained."""
        return id in self._by_job

    def forget(self, id: str) -> None:
        """The job has ended, or is cleared."""
        self._store.forget_losses(ids=[id])
        self._by_job.pop(id, None)
        self._further_since.pop(id, None)

    def explained(self, id: str) -> list[str]:
        """The job was the reason of all of its losses; returns those who need no longer run alone."""
        numbers = {loss.number for loss in self._by_job.get(id, ())}
        self._store.forget_losses(numbers=sorted(numbers))
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
