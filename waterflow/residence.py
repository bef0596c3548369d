"""A job's place in its engine: the terms on which it is there, and leaving and coming back as they ask."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from waterflow.boundary import Boundary, JobEnded
from waterflow.errors import CheckpointError
from waterflow.executor.engine import Engine
from waterflow.executor.pending import Done, Pending
from waterflow.executor.terms import MakeWay, Terms, parse_quota
from waterflow.job import Job
from waterflow.partition.plan import Plan
from waterflow.priority import Priority, check_priority
from waterflow.step import Step

IN_A_STUDY = "it belongs to a deterministic study, whose other jobs would wait for it; study with deterministic=False"


class Residence:
    """Of one job, for as long as it runs. ``set`` may be called from any thread.

    An opportunistic job makes way where a guaranteed one needs its memory, and where its quota is lowered below any form of its step: its
    state goes to host memory at the next step boundary, and it goes on, bitwise as if nothing had been, when there is room.
    """

    def __init__(self, job: Job, engine: Engine | None, boundary: Boundary) -> None:
        self._name, self._engine, self._boundary = job.name, engine, boundary
        quota = parse_quota(f"job {job.name!r}", job.quota, engine.limit if engine is not None else None)
        # Others wait for its turn in a deterministic study, which one that stands still would not take.
        stays = engine is not None and engine.clock is not None
        self.terms = Terms(job.priority, quota, None if stays else self.leave, IN_A_STUDY)
        self.times_left = 0
        self._left = self._kept_away = False
        self._since = 0.0
        self._step: Step | None = None
        self._wanted: Plan | None = None  # what it waited for when it left

    def enter(self, step: Step) -> None:
        """``step`` is the job's from now on."""
        self._step = step
        if self._engine is None or step.job is None:
            return
        self._engine.set_terms(step.job, self.terms)

    def set(self, priority: Priority | None = None, quota: int | float | str | None = None) -> None:
        """From the next step on. Below what the job needs it goes on with reduced steps, or is suspended; see ``Job.quota``."""
        if priority is not None:
            check_priority(f"job {self._name!r}", priority)
            self.terms.priority = priority
        if quota is not None:
            limit = self._engine.limit if self._engine is not None else None
            self.terms.quota = parse_quota(f"job {self._name!r}", quota, limit)
            self.terms.quota_changed = True
        if self._step is not None:
            self.enter(self._step)

    def leave(self) -> None:
        """Make way at the next step boundary. Does not wait for that."""
        self._left, self._since = True, time.monotonic()
        self._boundary.ask(True).add_done_callback(self._answered)

    def _answered(self, made: Future[Any]) -> None:
        """The state has been asked for; where there is none to be had, the job stays."""
        error, step = made.exception(), self._step
        if error is None or isinstance(error, JobEnded):
            return
        self._left = False
        if self._engine is not None and step is not None and step.job is not None:
            self._engine.cannot_make_way(step.job, str(error))

    def submit(self, batch: Any) -> Pending | Done | None:
        """Hand a batch to the job's step; None where the job is to make way first, and the batch comes again."""
        assert self._step is not None
        with self.may_leave():
            return self._step.submit(batch)
        return None

    @contextlib.contextmanager
    def may_leave(self) -> Iterator[None]:
        """On the job's thread, between two steps: what is inside is given up where it waits for memory and is to make way."""
        self.terms.at_boundary, self._wanted = threading.get_ident(), None
        try:
            yield
        except MakeWay as given_up:
            self._wanted = given_up.plan
        finally:
            self.terms.at_boundary = None

    @contextlib.contextmanager
    def kept_away(self) -> Iterator[None]:
        """Inside, the job is to stand still; then somebody else decides when it goes on."""
        self._kept_away = True
        try:
            yield
        except BaseException:
            self._kept_away = False
            raise

    @property
    def held_up(self) -> bool:
        """Whether other jobs decide when its next step may come: in a deterministic study, or as guaranteed ones."""
        return self.terms.opportunistic or (self._engine is not None and self._engine.clock is not None)

    def look(self, check: Callable[[], None]) -> None:
        """Asked now and then while the job stands still: go on where it left by itself, and there is room again."""
        check()
        step, engine = self._step, self._engine
        if not self._left or self._kept_away or step is None:
            return
        # Without turns others make way for a guaranteed one when it claims its memory.
        if engine is not None and (self.terms.opportunistic or engine.quantum is not None):
            plan = step.least_plan(self._wanted, self.terms.limit)
            if not engine.would_fit(plan, self.terms, step.batches_ahead):
                engine.ask_for_turn(plan, self.terms, step.batches_ahead, self._since)
                engine.look()
                return
        self.times_left += 1
        with contextlib.suppress(CheckpointError):  # somebody else has been quicker
            self._boundary.go()

    def end(self) -> None:
        """The job has ended: nothing of it is held here."""
        self._step = None
        if self._engine is not None:
            self._engine.take_back_priority()

    def came_back(self) -> None:
        """It goes on."""
        self._left = self._kept_away = False
        self._wanted = None
