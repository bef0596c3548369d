"""First updates of parameters: the optimizer's state is laid out before them, and SGD's momentum begins as the gradient itself."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from waterflow import _C
from waterflow.errors import CaptureError, InvalidJobError, MemoryLimitError, WaterflowError
from waterflow.executor.cancel import doing
from waterflow.executor.data.copies import Ranges, copies_of
from waterflow.executor.program import ownership
from waterflow.executor.program.binding import Owner, bind
from waterflow.executor.program.capture_cache import (
    CaptureBudget,
    CapturedStep,
    Code,
    NewKind,
    PlannedStep,
    assemble,
    build,
    captures,
    codes,
)
from waterflow.executor.program.ownership import Hold, holders
from waterflow.partition.capture.fake_rules import surprises
from waterflow.partition.capture.leaks import LeavesTensors
from waterflow.partition.capture.optimizers import FIRST_STEP_FLAG, parameters_of
from waterflow.partition.capture.spec import StepSpec
from waterflow.partition.capture.substitution import ChangesItself
from waterflow.partition.capture.trace import Capture
from waterflow.partition.guards.batch_reads import Answers, LeafRead, answers_of, free_places, values_known, with_values
from waterflow.partition.guards.cache_key import Fingerprint
from waterflow.partition.guards.settings import ambient_key
from waterflow.partition.guards.step_key import state_of, structure_key
from waterflow.partition.passes.offload import Offloading, choose_spilled, spill
from waterflow.partition.passes.rematerialize import Recomputation, choose, lowest, repeat
from waterflow.partition.passes.storages import StorageTable
from waterflow.partition.plan.liveness import lifetimes
from waterflow.partition.plan.offsets import MOST_WORK, place
from waterflow.partition.plan.plan import Plan, format_bytes

if TYPE_CHECKING:
    from waterflow.executor.engine import Engine


Members = tuple[tuple[torch.Tensor, ...], ...]  # of each group the parameters whose state a step's update reads
Begun = dict[torch.Tensor, dict[str, torch.Tensor]]  # entries of the state by parameter
_KEY = "momentum_buffer"


class HalfBegun(CaptureError):
    """One update has parameters that were updated before and others that were not, whose rule is another one."""


def members_of(captured: CapturedStep, optimizer: Optimizer, tensors: dict[str, torch.Tensor]) -> Members:
    """The parameters, of ``tensors`` by name, whose state an update of a captured step reads."""
    nodes = (node for node in captured.capture.graph.nodes if node.op == "placeholder")
    moved = {
        id(tensors[given.name])
        for node, given in zip(nodes, captured.capture.inputs)
        if given.kind == "state" and node.users
    }
    return tuple(tuple(p for p in group["params"] if id(p) in moved) for group in optimizer.param_groups)


class FirstUpdates:
    """A captured step lays state out before it begins; until its update was handed in it counts as missing."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._laid_out: Begun = {}  # that no update has reached
        self._told: dict[Hashable, tuple[Members, dict[str, bool]]] = {}

    def flags(self, members: Members) -> dict[str, bool]:
        """The flag that each group's update reads, kept up to date. Raises HalfBegun where fused updates have none that is right."""
        if (group := self.half_begun(members)) is not None:
            raise HalfBegun(
                f"some parameters of group {group} are updated for the first time, beside others that have momentum"
            )
        key = tuple(tuple(map(id, group)) for group in members)
        self._told[key] = members, (flags := self._told[key][1] if key in self._told else {})
        self.look_again()
        return flags

    def half_begun(self, members: Members) -> int | None:
        """A group of which some parameters have momentum, and others have not."""
        if not isinstance(self._optimizer, torch.optim.SGD):
            return None
        return next((n for n, group in enumerate(members) if len(set(map(self._has_begun, group))) > 1), None)

    @contextlib.contextmanager
    def laying_out(self, members: Members) -> Iterator[None]:
        """Within, entries of the state come to be for ``members``."""
        state = self._optimizer.state
        before = {p: {k for k, v in state.get(p, {}).items() if v is not None} for group in members for p in group}
        yield
        for parameter, there in before.items():
            if new := {key: value for key, value in state[parameter].items() if key not in there}:
                self._laid_out.setdefault(parameter, {}).update(new)

    def begin(self, members: Members) -> Begun:
        """An update of ``members`` was handed in: returns those that begin by it."""
        begun = {p: self._laid_out.pop(p) for group in members for p in group if p in self._laid_out}
        if begun:
            self.look_again()
        return begun

    def undo(self, begun: Begun, ended: bool) -> None:
        """That update failed. Where it has ``ended``, state that it has not reached is taken back, as if it had not been laid out."""
        self._laid_out.update(begun)
        if ended:
            self.take_back(begun)
        if begun:
            self.look_again()

    def take_back(self, begun: Begun | None = None) -> None:
        """What was laid out, for ``begun`` or for all, and no update has reached, is no longer there."""
        for parameter, laid in [*(self._laid_out if begun is None else begun).items()]:
            entries = self._optimizer.state.get(parameter, {})
            same = all(entries.get(key) is value for key, value in laid.items())
            if same and not any(value.count_nonzero() for value in laid.values()):
                self._laid_out.pop(parameter, None)
                for key in laid:
                    del entries[key]
                if not entries:
                    del self._optimizer.state[parameter]

    def look_again(self) -> None:
        """Bring the flags up to date, as behind an update of the optimizer's own."""
        for members, flags in self._told.values():
            for number, group in enumerate(members):
                flags[f"{FIRST_STEP_FLAG}:{number}"] = bool(group) and not any(map(self._has_begun, group))

    def _has_begun(self, parameter: torch.Tensor) -> bool:
        if not isinstance(self._optimizer, torch.optim.SGD):
            return True
        buffer = self._optimizer.state.get(parameter, {}).get(_KEY)
        return buffer is not None and buffer is not self._laid_out.get(parameter, {}).get(_KEY)


# The batch, whether the step updates, settings of the process, the parameters that have gradients from earlier calls, and
# what the batch answers to what the step asks of its values.
Key = tuple[Hashable, bool, Hashable, frozenset[str], Answers]


@dataclass
class Whole:
    """A step on batches of one kind as it is where there is room; ``plain`` is what was captured, and no form is below ``lowest``."""

    key: Hashable
    plain: CapturedStep
    planned: PlannedStep
    lowest: int = 0


@dataclass
class BoundStep:
    """The step for batches of one shape: what was captured for it, bound to this job.

    ``plain`` is what was captured, ``captured`` the same or a lower form of it; ``whole`` is the step where there is room.
    """

    key: Key
    plain: CapturedStep
    captured: CapturedStep
    planned: PlannedStep
    binding: _C.Binding
    slots: list[int]
    leaves: list[int]
    structure: tuple[Hashable, int]  # what the step is made of, and which capture of it this is
    code: Code
    owner: Owner
    moved: Members
    whole: Whole
    seen: int | None = None  # of its engine's changes
    # Memory of which a batch is copied, as it may change before the batch is read for the last time; and of which no batch
    # may be, as operations that are made again would read it when it has changed.
    changed_early: Ranges = field(default_factory=lambda: Ranges(()))
    changed_between: Ranges = field(default_factory=lambda: Ranges(()))
    guarded: bool = False  # whether there is such memory
    asked_not: Ranges = field(default_factory=lambda: Ranges(()))  # where values of a batch may not be asked for
    claimed: Plan | None = None

    def settled(self, engine: Engine) -> bool:
        """Whether there is memory for it, and nothing has changed since."""
        return self.claimed is self.planned.plan and self.seen == engine.reservations.changes

    def answers(self, leaves: list[Any]) -> Answers:
        """Those of its key, where it is for this batch. Raises CaptureError for a batch that the step may change."""
        questions = self.plain.capture.questions
        asked = (leaves[leaf] for question in questions for leaf in question.leaves)
        if questions and (self.plain.changed_leaves or any(map(self.asked_not.have, asked))):
            raise CaptureError("the step asks for values of a batch that lies in what it changes; pass a copy of it")
        return answers_of(questions, self.key[4], leaves)

    def given(self, leaves: list[Any], before_copies: Callable[[], None] | None) -> list[Any]:
        """The batch's tensors, in the order of ``slots``; copies of those that lie where the step changes something.

        ``before_copies`` is called before any is made: a step that still runs may change them, too.
        """
        given = [leaves[i] for i in self.leaves]
        if not self.guarded:
            return given
        inside = [i for i, tensor in enumerate(given) if self.changed_early.have(tensor)]
        if any(map(self.changed_between.have, given)):
            raise InvalidJobError(
                "a step that recomputes must find its batch as it was: a tensor of this one lies in a buffer that the step "
                "changes; pass a copy of it, or recompute=None"
            )
        if not inside:
            return given
        if before_copies is not None:
            before_copies()
        for i, copy in zip(inside, copies_of([given[i] for i in inside])):
            given[i] = copy
        return given


Chosen = TypeVar("Chosen", Recomputation, Offloading)
_ATTEMPTS = 3
_LOOK = MOST_WORK // 20  # a placement to look at; plans are searched longer, and come out no higher


def form_for(captured: CapturedStep, height: int, *, offload: bool = False) -> CapturedStep:
    """The same step with a height of at most ``height`` bytes, as far as the graph knows it: ``captured`` itself if it has.

    It makes activations again; with ``offload`` it holds them in host memory where that is not enough, or cannot be done. The
    height is that of the placed memory; temporaries inside kernels come on top. Raises MemoryLimitError, whose ``needed`` is
    the lowest height that was found.
    """
    needed = whole = placed_height(captured)
    if whole <= height:
        return captured
    table = StorageTable(captured.capture.graph)
    # Made again first: by the model of time ResNet-50 at 0.9 of its height takes 0.12 ms for that, 0.68 ms for copies by PCIe 3.
    ways: list[Callable[[], CapturedStep]] = []
    if captured.capture.apart:
        ways.append(lambda: _lowered(captured, table, height, choose, lowest, _repeating))
    if offload:
        ways.append(
            lambda: _lowered(captured, table, height, choose_spilled, lambda t: choose_spilled(t, 0), _offloading)
        )
    for way in ways:
        made = way()
        reached = placed_height(made)
        if reached <= height:
            return made
        needed = min(needed, reached)
    done = "can be recomputed or held in host memory" if offload else "can be recomputed"
    remedy = "raise the quota" if offload else "allow more with recompute="
    raise MemoryLimitError(
        f"step {captured.predicted.name!r} cannot be brought to a height of {format_bytes(height)}: it is "
        f"{format_bytes(whole)} high, and {format_bytes(needed)} with all that {done}. Lower the batch size, or {remedy}.",
        needed=needed, limit=height,
    )  # fmt: skip


def _lowered(
    captured: CapturedStep, table: StorageTable, height: int, choose: Callable[[StorageTable, int], Chosen],
    lowest: Callable[[StorageTable], Chosen], make: Callable[[CapturedStep, StorageTable, Chosen], CapturedStep],
) -> CapturedStep:  # fmt: skip
    """One at most so high, or as low as it becomes this way."""
    target = height
    for _ in range(_ATTEMPTS):
        chosen = choose(table, target)
        if chosen.peak > target:
            break
        made = make(captured, table, chosen)
        beyond = placed_height(made) - height
        if beyond <= 0:
            return made
        target -= beyond
    return make(captured, table, lowest(table))


def _repeating(captured: CapturedStep, table: StorageTable, chosen: Recomputation) -> CapturedStep:
    made = _assembled(captured, repeat(captured.capture, table, chosen))
    # First calls that only the backward pass had a use for have gone: a little more may be free than was counted on.
    made.recomputed = replace(chosen.cost(), freed=captured.predicted.height - made.predicted.height)
    return made


def _offloading(captured: CapturedStep, table: StorageTable, chosen: Offloading) -> CapturedStep:
    made = _assembled(captured, spill(captured.capture, table, chosen))
    made.offloaded = replace(chosen.cost(), freed=captured.predicted.height - made.predicted.height)
    made.predicted = replace(made.predicted, offloaded=made.offloaded.held)
    return made


def _assembled(captured: CapturedStep, capture: Capture) -> CapturedStep:
    return assemble(capture, captured.predicted.name, captured.keep, captured.exact)


def placed_height(captured: CapturedStep) -> int:
    """The furthest byte of a step, what it hands out included."""
    instructions = captured.lowered.instructions
    lives = lifetimes(captured.capture.graph, instructions)
    kept = sum(life.size for life in lives if life.kept)
    return max(captured.predicted.height, place(lives, len(instructions), work=_LOOK).height + kept)


logger = logging.getLogger("waterflow")

_T = TypeVar("_T")
Recompute = int | Literal["auto"] | None
MOST_SHAPES = 64
# A step that is captured anew more often than this, for batches of one shape, computes with something that changes.
MOST_CAPTURES = 8
MOST_CHANGES = 3  # of the step's own objects, after each of which it is captured anew
MOST_READ = 16  # leaves of a batch that are found one by one: a step that reads more counts as reading all
MOST_SURPRISES = 8  # each capture by what kernels have told of their layouts may ask others


@contextlib.contextmanager
def as_refusal() -> Iterator[None]:
    """Within, an error of the capture's own, which no user has made, refuses the step: it then runs eagerly.

    What users can mend, and memory that there is not, are raised as they are. The user's code raises nothing here.
    """
    try:
        yield
    except (WaterflowError, MemoryError, torch.OutOfMemoryError, _C.Cancelled):
        raise
    except Exception as error:
        logger.debug("a step could not be captured", exc_info=True)
        text = str(error).strip().splitlines()
        raise CaptureError(f"capturing it failed with {type(error).__name__}: {text[0] if text else ''}") from error


@contextlib.contextmanager
def _state_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within, an error leaves the optimizer's state as it was: entries that are there in part would stop its own ``step()``."""
    before = {parameter: dict(entries) for parameter, entries in optimizer.state.items()}
    try:
        yield
    except BaseException:
        for parameter, entries in [*optimizer.state.items()]:
            if parameter in before:
                entries.clear()
                entries.update(before[parameter])
            else:
                del optimizer.state[parameter]
        raise


def _form(plain: CapturedStep, height: int | None, offload: bool = False) -> CapturedStep:
    """The form of a captured step that is at most ``height`` bytes high; found, or made."""
    if height is None or not (plain.capture.apart or offload):
        return plain
    key = plain.capture.number, plain.exact, height, offload
    return captures.get(key, lambda: form_for(plain, height, offload=offload))


@doing("capturing its step", interruptible=False)  # from some functions of a trace an exception would end the process
class BoundSteps:
    """All captured forms of one job's step, with what they share: sums of gradients, and flags of first updates.

    ``threads`` is the number of intra-op threads that the step's operations run on. With ``own_plans`` other jobs'
    profiles do not improve this job's plans. ``hold`` is the job's hold on its modules. With ``recompute`` in bytes steps
    are brought to that height. Where they need not be ``exact`` they may round otherwise than the user's operations.
    """

    def __init__(
        self, spec: StepSpec, generator: torch.Generator | None, threads: int, name: str, own_plans: bool,
        hold: Hold | None, recompute: Recompute = None, exact: bool = True, budget: CaptureBudget | None = None,
    ) -> None:  # fmt: skip
        self._spec = spec
        self._generator = generator
        self._threads = threads
        self._name = name
        self._own_plans = own_plans
        self._hold = hold
        self._recompute = recompute
        self._exact = exact
        self._heights: dict[Hashable, int] = {}  # to which steps of a kind of batch had to be brought
        # Of steps that have less room than they need: the whole form, the room, and the form that was made for it.
        self._reduced: dict[Hashable, tuple[CapturedStep, int, CapturedStep]] = {}
        self._last: Whole | None = None
        self._bound_steps: dict[Hashable, BoundStep] = {}
        self._accumulators: dict[str, torch.Tensor] = {}
        self._gathered: frozenset[str] = frozenset()  # whose sums have been added to since the last update
        self.first = FirstUpdates(spec.optimizer)
        self._captures: dict[Hashable, int] = {}
        self._read: dict[Key, tuple[int, ...]] = {}  # places of leaves that steps have read, by keys without them
        self._budget = budget or CaptureBudget()
        self._kinds: set[Key] = set()  # of batches that this job's steps have been captured for
        self._tried_again = 0

    def find(
        self, leaves: list[Any], batch_spec: pytree.TreeSpec | None, batch_key: Hashable, update: bool
    ) -> BoundStep:
        """The bound_step for such a batch, bound to the tensors as they are now. Raises CaptureError."""

        def at(key: Key) -> tuple[BoundStep, Answers]:
            bound_step = self._bound_steps.get(key)
            if bound_step is None or not bound_step.binding.current():
                if key not in self._kinds and (self._budget.own or not captures.know(key)):
                    self._check_budget(key, leaves, batch_spec)
                with as_refusal():
                    bound_step = self._make(key, leaves, batch_spec)
            bound_step.code.check()
            return bound_step, bound_step.answers(leaves)

        gathered = self._gathered if update else frozenset()
        base: Key = (batch_key, update, ambient_key(self._spec.device.type), gathered, ())
        return self._answering(base, leaves, batch_spec, at)

    def _answering(
        self, base: Key, leaves: list[Any], batch_spec: pytree.TreeSpec | None, at: Callable[[Key], tuple[_T, Answers]]
    ) -> _T:
        """What lies ``at`` the key that the batch's answers lead to; ``at`` also says what they are by what lies there."""
        while True:
            places = self._read.get(base, ()) if self._read else ()
            key: Key = (*base[:4], with_values(base[4], places, leaves))
            try:
                found, answers = at(key)
            except LeafRead as read:
                more = {*places, *read.places} if len(places) < MOST_READ else free_places(leaves, batch_spec, base[4])
                self._read[base] = tuple(sorted(more))
                continue
            if answers == key[4]:
                return found
            base = (*key[:4], answers)

    def _check_budget(self, key: Key, leaves: list[Any], batch_spec: pytree.TreeSpec | None) -> None:
        def batch() -> Any:
            free = free_places(leaves, batch_spec, key[4])
            read = [None if n in free else leaf for n, leaf in enumerate(leaves)]
            return tuple(read) if batch_spec is None else pytree.tree_unflatten(read, batch_spec)

        self._budget.check(key, batch)

    def lowered(
        self, bound_step: BoundStep, leaves: list[Any], batch_spec: pytree.TreeSpec | None, height: int
    ) -> BoundStep | None:
        """The bound_step in a form that is at most ``height`` bytes high; None for steps that are not to, or cannot.

        What profiles have shown to come on top of the graph's memory counts. Raises MemoryLimitError where there is none.
        """
        if self._recompute != "auto" or not bound_step.plain.capture.apart:
            return None
        before = self._heights.get(bound_step.key)
        beyond = bound_step.planned.plan.height - height
        wanted = bound_step.planned.graph_height(height) if before is None else before - max(1, beyond)
        _form(bound_step.plain, max(0, wanted))
        self._heights[bound_step.key] = wanted
        return self._make(bound_step.key, leaves, batch_spec)

    def _make(self, key: Key, leaves: list[Any], batch_spec: pytree.TreeSpec | None) -> BoundStep:
        spec = replace(self._spec, update=key[1], gathered=key[3])
        plain, structure, fingerprint = self._capture(spec, key, leaves, batch_spec, runs=True)
        (code := codes.of(structure[0])).check()
        form = captured = _form(plain, self._height(key))
        if (reduced := self._reduced.get(key)) is not None and reduced[0] is form:
            captured = reduced[2]
        if self._hold is not None:
            trained = parameters_of(spec.optimizer)
            holders.check(self._hold, spec.model, trained, captured.written_buffers)
            written = [
                fingerprint.external_tensors[one.leaf] for one in captured.changed_inputs if one.kind == "external"
            ]
            holders.check_tensors(self._hold, fingerprint.external_tensors, written)
        moved = members_of(plain, spec.optimizer, dict(spec.model.named_parameters()))
        owner = Owner(spec, self._accumulators, self.first.flags(moved), fingerprint)
        ownership.check(plain.capture.reached, owner)
        with _state_kept(spec.optimizer), self.first.laying_out(moved):
            binding, slots, positions = bind(captured, owner)
        binding.set_generator(self._generator)
        if key not in self._bound_steps and len(self._bound_steps) >= MOST_SHAPES:
            self._bound_steps.pop(next(iter(self._bound_steps)))
        planned = self._planned(key, captured)
        self._last = whole = Whole(key, plain, planned if form is captured else self._planned(key, form))
        made = BoundStep(key, plain, captured, planned, binding, slots, positions, structure, code, owner, moved, whole)
        if captured.capture.early_updates or captured.recomputed is not None:
            buffers = dict(spec.model.named_buffers())
            written = [buffers[name] for name in captured.written_buffers]
            made.guarded = True
            made.changed_early = Ranges([*spec.trained().values(), *state_of(spec.optimizer)])
            made.changed_between = Ranges(written if captured.recomputed is not None else ())
        if plain.capture.questions:
            made.asked_not = Ranges([*owner.tensors.values(), *fingerprint.external_tensors, *state_of(spec.optimizer)])
        self._bound_steps[key] = made
        if key not in self._kinds:
            self._kinds.add(key)
            self._budget.add_kind()
        return made

    def _planned(self, key: Hashable, captured: CapturedStep) -> PlannedStep:
        if not self._own_plans:
            return captured.planned(self._threads)
        old = self._bound_steps.get(key)
        known = (old.planned, old.whole.planned) if old is not None else ()
        return next((one for one in known if one.captured is captured), None) or PlannedStep(captured)

    # -- below what the step needs

    def within(
        self, bound_step: BoundStep, leaves: list[Any], batch_spec: pytree.TreeSpec | None, room: int
    ) -> BoundStep | None:
        """The bound_step at most ``room`` bytes high: whole where it is, else in a reduced form; None where there is none."""
        whole = bound_step.whole.planned.captured
        known = self._reduced.get(bound_step.key)  # goes on with what its own profile has shown
        start = bound_step.captured if known is not None and known[0] is whole and known[1] == room else whole
        form = self._brought(bound_step.whole, start, room)
        if form is bound_step.captured:
            return bound_step
        if form is None:
            return None
        self._reduced[bound_step.key] = whole, room, form
        if form is not whole:
            logger.info("step %r goes on below its need: %s", self._name, form.offloaded or form.recomputed)
        return self._make(bound_step.key, leaves, batch_spec)

    def least_plan(self, wanted: Plan | None, quota: int | None, batches: int) -> Plan | None:
        """What is to be claimed to go on, also behind ``clear``: ``wanted``, where that is more than the last step takes.

        Else what that takes, in the form that ``quota`` has room for if there is one.
        """
        last = self._last
        if last is None or (wanted is not None and wanted.peak > last.planned.plan.peak):
            return wanted
        plan = last.planned.plan
        if quota is None:
            return plan
        form = self._brought(last, last.planned.captured, quota - plan.persistent - batches * plan.batch)
        return plan if form is None else self._planned(last.key, form).plan

    def _brought(self, whole: Whole, form: CapturedStep, room: int) -> CapturedStep | None:
        """``form``, or one that is low enough for ``room`` by the profiles that there are."""
        while (planned := self._planned(whole.key, form)).plan.height > room:
            height = planned.graph_height(room)
            if height < whole.lowest:
                return None
            try:
                form = _form(whole.plain, height, offload=True)
            except MemoryLimitError as error:
                whole.lowest = error.needed
                return None
        return form

    def plan(
        self, leaves: list[Any], batch_spec: pytree.TreeSpec | None, batch_key: Hashable, height: int | None = None
    ) -> Plan:
        """The plan of a step on such a batch, bound to nothing. Raises as ``captured`` does."""
        return self.captured(leaves, batch_spec, batch_key, height).planned(self._threads).plan

    def captured(
        self, leaves: list[Any], batch_spec: pytree.TreeSpec | None, batch_key: Hashable, height: int | None = None
    ) -> CapturedStep:
        """A step on such a batch, found or captured, bound to nothing; brought to ``height`` bytes if they are given.

        Raises CaptureError, and MemoryLimitError for a height that it cannot be brought to.
        """
        gathered = frozenset(self._spec.trained()) if self._spec.accumulate > 1 else frozenset()
        base: Key = (batch_key, True, ambient_key(self._spec.device.type), gathered, ())

        def at(key: Key) -> tuple[tuple[CapturedStep, tuple[Hashable, int], Key], Answers]:
            plain, structure, _ = self._capture(replace(self._spec, gathered=gathered), key, leaves, batch_spec)
            return (plain, structure, key), answers_of(plain.capture.questions, key[4], leaves)

        with as_refusal():
            plain, structure, key = self._answering(base, leaves, batch_spec, at)
            codes.of(structure[0]).check()
            return _form(plain, self._height(key) if height is None else height)

    def _height(self, key: Hashable) -> int | None:
        return self._recompute if isinstance(self._recompute, int) else self._heights.get(key)

    def _capture(
        self, spec: StepSpec, key: Key, leaves: list[Any], batch_spec: pytree.TreeSpec | None, runs: bool = False
    ) -> tuple[CapturedStep, tuple[Hashable, int], Fingerprint]:
        structure, fingerprint = structure_key(spec)
        old = self._bound_steps.get(key)
        if old is not None and old.structure[0] == structure and old.plain.capture.holds():
            return old.plain, old.structure, fingerprint
        before = self._captures.get(counted := (*key[:3], values_known(key[4])), 0)
        if before >= MOST_CAPTURES:
            raise CaptureError(f"what the step uses changed {MOST_CAPTURES} times; pass what changes in the batch")

        def make() -> CapturedStep:
            if runs and key not in self._kinds and not self._budget.own:  # there it was checked
                self._check_budget(key, leaves, batch_spec)
            self._captures[counted] = before + 1
            with self._budget.spending() if runs else contextlib.nullcontext():
                made = build(spec, leaves, batch_spec, fingerprint, self._name, free_places(leaves, batch_spec, key[4]))
            self._budget.account["captures"] += 1
            self._budget.account["captures anew"] += before > 0
            return made

        found = captures.get((structure, key), make)
        for _ in range(MOST_SURPRISES if runs and not found.layouts_hold else 0):
            if not surprises(found.capture.graph):
                break
            found = captures.renew((structure, key), found, make)
        if not found.capture.holds():
            found = captures.renew((structure, key), found, make)
        found.layouts_hold |= runs
        if not self._exact:
            found = captures.get((structure, key, "inexact", self._threads), found.inexact)
        return found, (structure, found.capture.number), fingerprint

    # -- what the bound_steps share

    def may_try_again(self, refused: CaptureError) -> bool:
        """Whether a step that has run eagerly may be captured at its next call.

        Its batch was of a new kind, momentum has begun, a cache was filled, or settings were, as models do in their first calls.
        """
        if isinstance(refused, NewKind):
            return True
        most = 1 if isinstance(refused, LeavesTensors) else MOST_CHANGES if isinstance(refused, ChangesItself) else 0
        again = self._tried_again < most
        self._tried_again += again
        return self._spec.accumulate == 1 and (again or isinstance(refused, HalfBegun))

    def begin_update(self, bound_step: BoundStep) -> Begun:
        """An update was handed in: returns the parameters that have their first one by it."""
        if begun := self.first.begin(bound_step.moved):
            self._drop_half_begun()
        return begun

    def undo_update(self, begun: Begun, gathered: frozenset[str] | None = None, ended: bool = False) -> None:
        """It failed: the next one is the first again; ``gathered`` have sums of gradients. ``ended``: nothing of it runs."""
        self.first.undo(begun, ended)
        if begun:
            self._drop_half_begun()
        self._gathered = self._gathered if gathered is None else gathered

    def before_eager(self) -> dict[str, torch.Tensor]:
        """A step runs eagerly: returns the gradients that it goes on from. State that no update has reached is taken back."""
        self.first.take_back()
        return self.sums

    def after_eager(self, sums: Mapping[str, torch.Tensor]) -> None:
        """A step has run eagerly and the next may be captured: go on from the gradients that it has left."""
        self.first.look_again()
        self._drop_half_begun()
        self._gathered = frozenset(sums)
        for name, bound in self._accumulators.items():  # captured steps are bound to these, and add to what is there
            bound.copy_(sums[name]) if name in sums else bound.zero_()
        self._accumulators.update({name: one for name, one in sums.items() if name not in self._accumulators})

    def _drop_half_begun(self) -> None:
        for key, bound_step in [*self._bound_steps.items()]:
            if self.first.half_begun(bound_step.moved) is not None:
                del self._bound_steps[key]

    def claim_again(self) -> None:
        """Memory that was claimed for the bound_steps is not enough any more."""
        for bound_step in self._bound_steps.values():
            bound_step.claimed = None

    def gather(self, bound_step: BoundStep) -> frozenset[str]:
        """A step was handed in, which adds to sums of gradients or updates by them: returns those that there were before it."""
        before = self._gathered
        if self._spec.accumulate > 1:
            self._gathered = frozenset() if bound_step.key[1] else before.union(bound_step.plain.capture.gradients)
            for name in before.difference(bound_step.owner.spec.updated()) if bound_step.key[1] else ():
                self._accumulators.pop(name)  # the optimizer trains it no more
        return before

    @property
    def sums(self) -> dict[str, torch.Tensor]:
        """The gradients gathered since the last update, by parameter."""
        return {name: self._accumulators[name] for name in sorted(self._gathered)}

    def put_sums(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Go on from gradients that were gathered elsewhere; before the first step."""
        self._accumulators, self._gathered = dict(sums), frozenset(sums)

    def clear(self) -> None:
        """Let go of everything."""
        self._bound_steps.clear()
        self.put_sums({})
