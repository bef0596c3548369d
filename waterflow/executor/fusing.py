"""Which jobs run as one: groups of equal jobs are formed, joined, left, judged, and dissolved.

A job that leaves takes its tensors with it, and its seat goes to the next one of the same structure. What a group cannot do, its
jobs do alone, in their order.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from waterflow import _C
from waterflow.errors import InvalidJobError, JobCancelled, StepError, WaterflowError
from waterflow.executor.captured import CapturedStep
from waterflow.executor.fused_group import FusedPending, Group, Member, Seat, result_of
from waterflow.executor.lanes_in_use import Decision
from waterflow.executor.variants import Variant

if TYPE_CHECKING:
    from waterflow.executor.engine import Engine

logger = logging.getLogger("waterflow")

GATHERING_SECONDS = 0.3  # that a job waits for others like it; for those that are expected a capture's time at least
FORCED_SECONDS = 5.0  # that it does where groups are asked for: who goes on without one may be over when the next comes
SHORT_SECONDS = 20e-6  # operations that take longer on average gain nothing from being launched together
PAID_BACK = 1.0  # captures' times that a job works alone before a group is made for it: it may be over soon
WORTH = 0.95  # of a group's pace: one that is not faster than its jobs were before by that is not kept


class Fusing:
    """The groups of an engine. Thread-safe. ``forced``: groups are kept even where they are slower."""

    def __init__(self, engine: Engine, forced: bool = False) -> None:
        self.engine, self.forced = engine, forced
        self.lock = threading.RLock()
        self._changed = threading.Condition(self.lock)  # who sits where
        self._expected = 0
        self._seats: dict[Member, Seat] = {}
        self._gone: deque[Member] = deque()  # whose steps were collected
        self._settled: set[Member] = set()  # on their own for good
        self._waiting: dict[int, list[tuple[Member, Variant]]] = {}  # by capture
        self._groups: list[Group] = []
        self._refused: dict[int, CapturedStep] = {}

    def expect(self, jobs: int) -> None:
        """See ``expect``."""
        with self._changed:
            self._expected += jobs
            self._changed.notify_all()

    def forget(self, member: Member) -> None:
        """Its step is gone. May be called wherever objects are collected: what cannot be done there is done soon."""
        self._gone.append(member)
        if self.engine.native.on_a_lane or self.lock._is_owned():  # type: ignore[attr-defined]
            return
        if self.lock.acquire(blocking=False):
            try:
                self._let_go()
            finally:
                self.lock.release()

    def _let_go(self) -> None:
        while self._gone:
            self.leave(self._gone.popleft())

    def submit(self, member: Member, variant: Variant, leaves: list[Any], form: Any, step: Any) -> FusedPending | None:
        """Hand a batch to the step's group; None where it is to run alone."""
        self._let_go()
        if not member.suits:  # not told when it is made: that may be on a lane, where no lock may be waited for
            self.settle(member)
        if member in self._settled:
            return None
        seat = self._seat(member, variant)
        if seat is None:
            return None
        with self._changed:
            assert seat.readings is not None
            seat.readings.clear_gradients()
            pending = FusedPending(
                seat, leaves, form, seat.readings.look(), member.numbers(), member.variants.begin_update(variant), step
            )
            seat.queue.append(pending)
            with self._or_alone(seat.group):
                seat.group.hand_in(pending)
        return pending

    @contextlib.contextmanager
    def _or_alone(self, group: Group) -> Iterator[None]:
        """Where a round cannot begin, its jobs do it alone. Orders to break off go on to the caller."""
        try:
            yield
        except BaseException as error:
            self._dissolve(group, error)
            if not isinstance(error, Exception):
                raise

    # -- who sits where

    def _seat(self, member: Member, variant: Variant) -> Seat | None:
        seat = self._seats.get(member)
        if seat is not None and seat.group.plain is variant.plain:  # what it did alone meanwhile comes first
            _await_steps(member)
        with self._changed:
            seat = self._seats.get(member)
            if seat is not None:
                fits = not seat.group.over and seat.group.plain is variant.plain
                if fits and seat.readings is not None and (variant is seat.checked or seat.readings.current()):
                    seat.checked = variant
                    return seat
                if fits:  # something of it was replaced
                    self._dissolve(seat.group, None)
                self._drain(seat)
                if seat.group.over:
                    self.leave(member)
                return None
            # Alone first, to know what that takes, and to claim it.
            if variant.planned.wants_profile or variant.claimed is None:
                return None
            if not self.forced and not self._has_worked(member, variant):
                member.alone.note()
                return None
            if id(variant.plain) in self._refused or not self._worth_a_trial(member, variant):
                self._settle(member)
                return None
        _await_steps(member)
        with self._changed:
            return self._take_seat(id(variant.plain), member, variant)

    def _has_worked(self, member: Member, variant: Variant) -> bool:
        """For long enough to know its pace, and to make a group that would have to be captured first."""
        alone = member.alone
        return alone.known and (
            alone.seconds >= PAID_BACK * variant.plain.capture.seconds or self._vacant(variant) is not None
        )

    def _vacant(self, variant: Variant) -> Group | None:
        """A group with a seat for such a step."""
        for group in self._groups:
            if not group.over and group.plain is variant.plain and None in group.seats:
                return group
        return None

    def _worth_a_trial(self, member: Member, variant: Variant) -> bool:
        short = member.busy_ns < SHORT_SECONDS * 1e9 * variant.planned.plan.operations
        return (short or self.forced) and _can_be_stacked(variant)

    def queue_of(self, member: Member) -> Iterable[FusedPending]:
        """What it has handed to its group, and not got back."""
        seat = self._seats.get(member)
        return seat.queue if seat is not None else ()

    def settle(self, member: Member) -> None:
        """It does all steps alone: nobody waits for it."""
        if member not in self._settled:
            with self._changed:
                self._settle(member)

    def _settle(self, *members: Member) -> None:
        self._settled.update(members)
        self._changed.notify_all()

    def _take_seat(self, key: int, member: Member, variant: Variant) -> Seat | None:
        group = self._vacant(variant)
        if group is not None:
            return self._join(group, member, variant)
        waiting = self._waiting.setdefault(key, [])
        waiting.append((member, variant))
        until = time.perf_counter() + self._patience(variant)
        try:
            while member not in self._seats and member not in self._settled:
                left = until - time.perf_counter()
                if self._all_here() or left <= 0:
                    self._form(key)
                    break
                self._changed.wait(timeout=left)
        finally:
            if (member, variant) in self._waiting.get(key, []):
                self._waiting[key].remove((member, variant))
        return self._seats.get(member)

    def _patience(self, variant: Variant) -> float:
        """Seconds that a job waits for others like it, where not all are here before."""
        if self._expected == 0:
            return GATHERING_SECONDS
        return max(GATHERING_SECONDS, variant.plain.capture.seconds, FORCED_SECONDS if self.forced else 0.0)

    def _all_here(self) -> bool:
        if self._expected == 0:  # nobody has said who comes
            return False
        waiting = sum(map(len, self._waiting.values()))
        return waiting + len(self._seats) + len(self._settled) >= self._expected

    def _form(self, key: int) -> None:
        """Groups of those that wait for one another, spread over the lanes."""
        waiting = self._waiting.pop(key, [])
        groups = max(1, min(self.engine.lanes, len(waiting) // 2))
        for number in range(groups):
            together = waiting[number::groups]
            members = [member for member, _ in together]
            if len(together) < 2:
                self._settle(*members)
                continue
            try:
                group = Group(self, together)
            except WaterflowError as error:
                logger.info("jobs like %r are not fused: %s", members[0].name, error)
                self._refused[key] = together[0][1].plain
                self._settle(*members)
                continue
            self._groups.append(group)
            self._seats.update({seat.member: seat for seat in group.live()})
        self._changed.notify_all()

    def _join(self, group: Group, member: Member, variant: Variant) -> Seat:
        while group.rounds:
            group.begin()
        self._await(group.last)
        number = group.seats.index(None)
        seat = group.seats[number] = Seat(group, number, member, variant)
        group.bind()
        self._seats[member] = seat
        return seat

    def leave(self, member: Member) -> None:
        """The job goes its own way, and takes its tensors along."""
        with self._changed:
            self._settled.discard(member)
            seat = self._seats.pop(member, None)
            if seat is None or self.engine.over():
                return
            group = seat.group
            self._drain(seat)
            self._await(group.last)
            _await_steps(member)
            with torch.no_grad():
                for tensor in seat.owner.tensors.values():
                    if tensor.untyped_storage().nbytes() > tensor.nbytes:
                        tensor.data = tensor.detach().clone()
            group.seats[seat.number] = None
            if len(group.live()) < 2:
                self._dissolve(group, None)
            else:
                with self._or_alone(group):
                    group.claim()
            self._changed.notify_all()

    def _dissolve(self, group: Group, error: BaseException | None) -> None:
        if error is not None and not isinstance(error, JobCancelled):
            logger.info("%s go on alone: %s", self.engine.names.get(group.job, "fused jobs"), error)
        if error is None:  # what was handed in is done together
            with contextlib.suppress(Exception):
                while group.rounds:
                    group.begin()
        group.over = True
        for one in group.rounds:
            self.engine.native.call_off(one.run)
        group.rounds.clear()
        if group in self._groups:
            self._groups.remove(group)
        self._await(group.last)
        self.engine.remove_job(group.job)
        self._changed.notify_all()

    def judge(self, group: Group) -> None:
        """Keep a group only where its jobs make more steps in sum than each did before, beside the others."""
        members = [seat.member for seat in group.live()]
        alone, together = sum(member.alone.per_second for member in members), group.tried.per_second * len(members)
        kept = together * WORTH >= alone
        self.engine.decisions.append(
            Decision(time.perf_counter(), self.engine.names[group.job], kept, (alone, together))
        )
        logger.info("%s", self.engine.decisions[-1])
        if not kept:
            self._refused[id(group.plain)] = group.plain
            self._dissolve(group, None)

    # -- waiting for rounds

    def await_run(self, pending: FusedPending) -> None:
        """Until a step has ended in its group, or alone."""
        group, one = pending.seat.group, pending.round
        while pending.alone is None and one is not None and not group.over and not one.run.done:
            if one.begun:
                self._await(one.run)
            elif not self.engine.native.wait_for(one.run, max(0.0, one.since + group.patience() - time.perf_counter())):
                with self._changed:
                    while not group.over and not one.begun:  # with who is there
                        with self._or_alone(group):
                            group.begin()
        if group.over:
            with self._changed:
                self._go_alone(pending.seat)
        if pending.alone is not None:
            pending.alone.wait()
        elif one is not None:
            self._await(one.run)

    def finish(self, pending: FusedPending) -> Any:
        """Its result; steps that the group could not do are done alone, in their order."""
        seat, group = pending.seat, pending.seat.group
        self.await_run(pending)
        if pending.alone is None:
            assert pending.round is not None
            try:
                outputs = pending.round.run.outputs()
            except (_C.NodeError, _C.Cancelled) as error:
                with self._changed:
                    if not group.over:
                        self._dissolve(group, error)
                if pending.round.run.failed_node >= group.first_update:
                    raise StepError(f"the update of {self.engine.names[group.job]} failed: {error}") from None
            else:
                with self._changed:
                    group.ended(pending.round)
                    if pending in seat.queue:
                        seat.queue.remove(pending)
                seat.member.ended(group.captured)
                self.engine.look()
                each = len(outputs) // group.size
                return result_of(outputs[seat.number * each : (seat.number + 1) * each], group.plain)
            with self._changed:
                self._go_alone(pending.seat)
        assert pending.alone is not None
        return pending.alone.result()

    def _go_alone(self, seat: Seat) -> None:
        """Hand all that the group has not done to the engine, step by step."""
        for pending in seat.queue:
            done = pending.round is not None and pending.round.begun and not pending.round.run.failed
            if pending.alone is None and not done:
                pending.alone = seat.member.go_alone(pending)
        while seat.queue and seat.queue[0].alone is not None:
            seat.queue.popleft()

    def _drain(self, seat: Seat) -> None:
        """Until all that the job has handed in is done; with it what others have handed in."""
        while seat.queue and not seat.group.over and seat.queue[-1].round in seat.group.rounds:
            with self._or_alone(seat.group):
                seat.group.begin()
        if seat.group.over:
            self._go_alone(seat)
        self._await(seat.group.last)

    def _await(self, run: _C.StepRun | None) -> None:
        if run is not None:
            self.engine.native.wait(run)


def _await_steps(member: Member) -> None:
    """Until all that the member has handed in alone is done: its tensors are about to move."""
    for pending in member.under_way():
        pending.wait()


def _can_be_stacked(variant: Variant) -> bool:
    """Whether a model's tensors are its own, each with memory for itself."""
    if variant.captured is not variant.plain:
        return False
    tensors = [t for t in variant.owner.tensors.values() if t.numel()]
    storages = {t.untyped_storage().data_ptr() for t in tensors}
    return len(storages) == len(tensors) and all(t.untyped_storage().nbytes() == t.nbytes for t in tensors)


def fusing_of(engine: Engine, exact: bool, mode: str) -> Fusing | None:
    """The groups of an engine whose equal jobs share operations where ``exact=False`` and ``mode`` let them; else None.

    Raises InvalidJobError for settings that contradict each other.
    """
    if not isinstance(exact, bool):
        raise InvalidJobError(f"exact must be True or False; got {exact!r}")
    if mode not in ("auto", "lanes", "turns", "fused"):
        raise InvalidJobError(f"mode is 'auto', 'lanes', 'turns' or 'fused'; got {mode!r}")
    if mode == "fused" and exact:
        raise InvalidJobError(
            "jobs that run as one do not keep the bits that they have alone, and exact=True promises those; pass exact=False "
            "beside mode='fused'"
        )
    return None if exact or mode in ("lanes", "turns") else Fusing(engine, mode == "fused")


def expect(engine: Engine, jobs: int) -> None:
    """So many more jobs will come to the engine, or fewer: others of their kind wait a little for them."""
    if engine.fusing is not None:
        engine.fusing.expect(jobs)
