"""Which jobs of an engine were told to make way, whose priority was lent for that, and who cannot."""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from waterflow import _C
from waterflow.executor.terms import GUARANTEED, Terms

logger = logging.getLogger("waterflow")

ASK_AGAIN = 30.0  # seconds after a job could not make way


class MakingWay:
    """The terms of an engine's jobs, and what was asked of them. What begins with a dash is called under the guard."""

    def __init__(self, native: _C.Engine) -> None:
        self.native = native
        self.names: dict[int, str] = {}
        # Entered directly: an exception from outside (Ctrl-C, breaking off) may strike inside of Condition.__enter__, which
        # is Python code, and would leave the lock behind.
        self._guard = threading.RLock()
        self._changed = threading.Condition(self._guard)
        self._terms: dict[int, Terms] = {}
        self._waiting: dict[int, tuple[int, int, int]] = {}  # by owner: the job, and the bytes and height it wants
        self._told: set[int] = set()  # to make way, and have not yet
        self._lent: set[int] = set()  # opportunistic jobs that count as guaranteed while one of those waits for them
        self._stay: dict[int, float] = {}  # could not make way, and are not asked again before
        self._known_to_stay: set[int] = set()  # of whom the user was told

    def terms_of(self, job: int) -> Terms:
        """Those of a job; nobody's are guaranteed."""
        return self._terms.get(job, GUARANTEED)

    def take_back_priority(self) -> None:
        """What was lent, where no guaranteed job waits any more."""
        with self._guard:
            if self._lent and all(self.terms_of(job).opportunistic for job, _, _ in self._waiting.values()):
                for job in self._lent:
                    self._set_priority(job, self.terms_of(job).opportunistic)
                self._lent.clear()

    def cannot_make_way(self, job: int, why: str) -> None:
        """A job that was told to make way stays where it is; it is asked again on other terms, or after a while."""
        with self._guard:
            if job not in self._told:
                return
            self._told.discard(job)
            self._lent.discard(job)
            self._set_priority(job, self.terms_of(job).opportunistic)
            self._stay[job] = time.monotonic() + ASK_AGAIN
            self._warn_of(job, why)
            self._changed.notify_all()

    def _can_make_way(self, job: int) -> bool:
        return self.terms_of(job).make_way is not None and time.monotonic() >= self._stay.get(job, 0.0)

    def _tell(self, job: int) -> None:
        make_way = self.terms_of(job).make_way
        if job not in self._told and make_way is not None and self._can_make_way(job):
            self._told.add(job)
            make_way()
            self._changed.notify_all()

    def _lend_priority(self, job: int) -> None:
        """A guaranteed job waits for steps that this one has queued: no other guaranteed one is to hold them up."""
        self._lent.add(job)
        self._set_priority(job, False)

    def _set_priority(self, job: int, opportunistic: bool) -> None:
        with contextlib.suppress(ValueError):  # it has left
            self.native.set_opportunistic(job, opportunistic)

    def _warn_of(self, job: int, why: str) -> None:
        """Once: a job that is to make way cannot."""
        if job not in self._known_to_stay:
            self._known_to_stay.add(job)
            logger.warning(
                "job %r cannot make way, so that others that need its memory wait for its end: %s",
                self.names.get(job, job), why,
            )  # fmt: skip

    def _forget(self, job: int) -> None:
        self._terms.pop(job, None)
        self._stay.pop(job, None)
        for known in (self._told, self._lent, self._known_to_stay):
            known.discard(job)
