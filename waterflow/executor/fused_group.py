"""Jobs whose equal steps run as one step, a round at a time.

A group has a seat for each of its jobs. Parameters and buffers of all seats lie in stacks, of which each model's own tensors
are slices, so that any job can go on alone at any time. A round begins when every job of the group has handed in its
batch, or when one of them has waited for it long enough; those that are missing then take no part, and nothing of them
changes.
"""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from waterflow import _C
from waterflow.errors import CaptureError, MemoryLimitError
from waterflow.executor.binding import Owner, bind_readings, bind_stacked
from waterflow.executor.captured import CapturedStep, assemble, captures
from waterflow.executor.first_updates import Begun
from waterflow.executor.pending import Pending
from waterflow.executor.variants import Variant, Variants
from waterflow.partition.plan import Plan
from waterflow.partition.profile import StepProfile
from waterflow.partition.stacking import stack

if TYPE_CHECKING:
    from waterflow.executor.fusing import Fusing

PATIENCE = 2.0  # steps' times that a round waits for a missing job, and ...
LEAST_PATIENCE, MOST_PATIENCE = 2e-3, 50e-3
TRIED_STEPS, TRIED_SECONDS = 16, 0.25  # over which a pace is measured, at least
PAUSE_SECONDS, PAUSE_STEPS = 0.5, 8.0  # longer than this, and than so many steps, nobody takes for a step


def weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method, by which its object is not kept."""
    found = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        bound = found()
        assert bound is not None
        return bound(*args)

    return call


@dataclass(eq=False)
class Pace:
    """Steps a second on the clock of the wall, counted from the first step on until it is ``known``; anew after a pause.

    ``seconds`` is what all steps took since the first, pauses left out.
    """

    per_second: float = 0.0
    seconds: float = 0.0
    _steps: int = -1
    _began: float = 0.0
    _last: float = 0.0

    @property
    def known(self) -> bool:
        """Whether it has been measured for long enough."""
        return self.per_second > 0

    def note(self) -> None:
        """A step has ended."""
        now = time.perf_counter()
        paused = now - self._last > max(PAUSE_SECONDS, PAUSE_STEPS * (self._last - self._began) / max(self._steps, 1))
        if self._steps < 0 or paused:  # what the job does beside steps is not their pace
            self._began, self._steps = now, -1
        else:
            self.seconds += now - self._last
        self._steps, self._last = self._steps + 1, now
        if self._steps >= TRIED_STEPS and now - self._began >= TRIED_SECONDS:
            self.per_second = self._steps / (now - self._began)


@dataclass(eq=False)
class Member:
    """A step that may run together with others if it ``suits``, and is not kept by it.

    ``submit_alone`` hands a batch in past its group, ``under_way`` has all that was handed in so, and ``ended`` takes note of
    a step that its group has done.
    """

    fusing: Fusing
    name: str
    generator: torch.Generator | None
    optimizer: torch.optim.Optimizer
    variants: Variants
    suits: bool
    submit_alone: Callable[[list[Any], Any, Hashable], Pending]
    under_way: Callable[[], Iterable[Pending]]
    ended: Callable[[CapturedStep], None]
    alone: Pace = field(default_factory=Pace)  # beside other jobs, before it joins one of their groups
    busy_ns: float = math.inf  # of its shortest step alone

    def submit(self, variant: Variant, leaves: list[Any], form: Any, step: Any) -> FusedPending | None:
        """Hand a batch to the member's group; None where it is to run alone. ``step`` is kept until it has its result."""
        return self.fusing.submit(self, variant, leaves, form, step)

    @property
    def in_group(self) -> list[FusedPending]:
        """What was handed to the member's group and not asked for since."""
        return list(self.fusing.queue_of(self))

    def numbers(self) -> list[dict[str, Any]]:
        """Learning rates and all else that may change from step to step."""
        groups = self.optimizer.param_groups
        return [{name: value for name, value in group.items() if name != "params"} for group in groups]

    def go_alone(self, pending: FusedPending) -> Pending:
        """Hand in alone what was handed to the group, with the numbers of that time."""
        now = self.numbers()
        self.variants.undo_update(pending.first)
        try:
            self._set(pending.numbers)
            return self.submit_alone(pending.leaves, pending.form, pending.seat.variant.key[0])
        finally:
            self._set(now)

    def _set(self, numbers: list[dict[str, Any]]) -> None:
        for group, values in zip(self.optimizer.param_groups, numbers):
            group.update(values)


@dataclass(eq=False)
class FusedPending:
    """A step that was handed to a group; as ``Pending``."""

    seat: Seat
    leaves: list[Any]
    form: Any  # of the batch that they are the leaves of
    readings: _C.Readings
    numbers: list[dict[str, Any]]  # of the optimizer's groups, as they were then
    first: Begun
    step: Any  # which stays until then
    round: Round | None = None  # None before it is handed in
    alone: Pending | None = None  # the step's own, where the group could not do it

    def wait(self) -> None:
        """Until the step has ended, well or not."""
        self.seat.group.fusing.await_run(self)

    def result(self) -> Any:
        """The loss, or ``(loss, metrics)``. Raises what the step raised."""
        return self.seat.group.fusing.finish(self)


@dataclass(eq=False)
class Round:
    """One step of a group: what has been handed in, by seat, and the run that it becomes, waited for from the beginning."""

    given: dict[int, FusedPending] = field(default_factory=dict)
    since: float = field(default_factory=time.perf_counter)
    run: _C.StepRun = field(default_factory=_C.StepRun)
    begun: bool = False
    profiled: bool = False
    judged: bool = False


@dataclass(eq=False)
class Seat:
    """A job's place in a group. ``queue`` has what it has handed in and not got back, in order."""

    group: Group
    number: int
    member: Member
    variant: Variant
    readings: _C.Binding | None = None
    checked: Variant | None = None  # whose binding watches the very tensors that sit here
    queue: deque[FusedPending] = field(default_factory=deque)

    @property
    def owner(self) -> Owner:
        """Whose tensors sit here."""
        return self.variant.owner


class Group:
    """Jobs of one structure that run as one."""

    def __init__(self, fusing: Fusing, members: list[tuple[Member, Variant]]) -> None:
        self.fusing, self.engine = fusing, fusing.engine
        self.plain = members[0][1].plain
        self.size = len(members)
        self.captured = stacked(self.plain, self.size)
        self.planned = self.captured.planned(self.engine.intra_op)
        self.seats: list[Seat | None] = [None] * self.size
        self.rounds: deque[Round] = deque()  # not begun
        self.over = False
        self.last: _C.StepRun | None = None
        self.tried = Pace()  # of whole rounds
        phases = [node.meta["phase"] for node in self.captured.lowered.instructions]
        self.first_update = phases.index("update") if "update" in phases else len(phases)
        self._claimed: tuple[Plan, int] | None = None
        self.seat_bytes = 0  # of stacks, for each seat
        self.job = self.engine.add_job(f"{self.size} jobs as one, {members[0][0].name} and others")
        try:
            self.claim()
            for number, (member, variant) in enumerate(members):
                self.seats[number] = Seat(self, number, member, variant)
            self.bind()
        except BaseException:
            self.engine.remove_job(self.job)
            raise

    # -- memory

    def claim(self) -> None:
        """Claim memory for rounds, and for empty seats. Raises CaptureError where others would have to leave for it."""
        plan, empty = self.planned.plan, self.seats.count(None) * self.seat_bytes
        if self._claimed is not None and plan is self._claimed[0] and empty == self._claimed[1]:
            return
        own = replace(plan, persistent=empty, batch=2 * plan.batch)  # its jobs have claimed the rest
        try:  # others cannot leave, and give memory back, while this waits: it holds their lock
            self.engine.claim(self.job, own, patient=False)
        except MemoryLimitError:
            raise CaptureError("there is no memory for the steps of several jobs at once") from None
        self._claimed = plan, empty

    def bind(self) -> None:
        """Lay the tensors of all seats into new stacks. No round may be under way."""
        live = self.live()
        tensors = [t.data_ptr() for seat in live for t in seat.owner.tensors.values() if t.numel()]
        if len(set(tensors)) < len(tensors):
            raise CaptureError("jobs that share parameters or buffers are not fused")
        owners = [(seat or live[0]).owner for seat in self.seats]
        stacks: dict[str, torch.Tensor] = {}
        for given in self.captured.capture.inputs:
            if given.kind in ("parameter", "buffer") and given.job < 0:
                stacks[given.name] = _stack([owner.tensors[given.name].detach() for owner in owners])
                for seat in live:
                    seat.owner.tensors[given.name].data = stacks[given.name][seat.number]
        self.seat_bytes = sum(each.nbytes for each in stacks.values()) // self.size
        self.binding, self.slots, self.leaves = bind_stacked(self.captured, owners, stacks)
        self.binding.set_generators([seat.member.generator if seat is not None else None for seat in self.seats])
        for seat in live:
            seat.readings = bind_readings(self.captured, seat.owner, seat.number)

    def live(self) -> list[Seat]:
        """The seats that are taken."""
        return [seat for seat in self.seats if seat is not None]

    # -- rounds; under the lock of ``fusing``

    def hand_in(self, pending: FusedPending) -> None:
        """Into the first round that has nothing of this job."""
        number = pending.seat.number
        for one in self.rounds:
            if number not in one.given:
                break
        else:
            one = Round()
            self.rounds.append(one)
        one.given[number] = pending
        pending.round = one
        while self.rounds and len(self.rounds[0].given) == len(self.live()):
            self.begin()

    def begin(self) -> None:
        """Run the first round with what it has."""
        one = self.rounds.popleft()
        given = one.given
        template = next(iter(given.values()))
        present = [given.get(number, template) for number in range(self.size)]
        tensors = [torch.stack([p.leaves[leaf] for p in present]) for leaf in self.leaves]
        whole = len(given) == self.size
        one.profiled = whole and self.planned.wants_profile
        self.claim()
        readings = [pending.readings for pending in given.values()]
        run = self.binding.run(self.planned.native, tensors, self.slots, one.profiled, readings, one.run)
        if not whole:
            run.left_out = [number not in given for number in range(self.size)]
        before, self.last, one.begun = self.last, run, True
        try:
            self.engine.native.submit(self.job, run, before)
        except BaseException:  # an order to break off may come when it has been handed in
            self.engine.native.call_off(run)
            self.last = before if run.failed else run
            raise

    def patience(self) -> float:
        """Seconds that a round waits for who is missing."""
        return min(max(PATIENCE * self.planned.plan.seconds, LEAST_PATIENCE), MOST_PATIENCE)

    def ended(self, one: Round) -> None:
        """A round ran well: learn from it."""
        if one.judged:
            return
        one.judged = True
        if one.profiled:
            self.planned.add_profile(StepProfile.of(one.run, self.engine.device))
        elif len(one.given) == self.size and not self.tried.known:
            self.tried.note()
            if self.tried.known and not self.fusing.forced:
                self.fusing.judge(self)


def _stack(tensors: list[torch.Tensor]) -> torch.Tensor:
    """In one memory, in which each lies as before: kernels of updates walk it side by side with the optimizer's state."""
    one = tensors[0]
    sizes, strides = [len(tensors), *one.shape], [one.numel(), *one.stride()]
    return torch.stack(tensors, out=one.new_empty_strided(sizes, strides))


def result_of(outputs: list[torch.Tensor], plain: CapturedStep) -> Any:
    """What a step of one job returns."""
    names = plain.capture.metrics
    return (outputs[0], dict(zip(names, outputs[1:]))) if names else outputs[0]


def stacked(plain: CapturedStep, jobs: int) -> CapturedStep:
    """The step of so many jobs, found or made. Raises CaptureError."""

    def make() -> CapturedStep:
        made = stack(plain.capture, jobs)
        return assemble(made, f"{jobs} x {plain.predicted.name}", [*plain.keep, plain], plain.exact)

    return captures.get(("stacked", plain.capture.graph, jobs, plain.exact), make)
