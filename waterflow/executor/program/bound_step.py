"""Bound steps: the captured forms of one job's step, bound to its tensors, with the state that they share.

A step is captured once for each kind of batch. If memory is short, it is used in a form that recomputes or offloads.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.utils import _pytree as pytree

from waterflow import _C
from waterflow.errors import CaptureError, InvalidJobError, MemoryLimitError, WaterflowError
from waterflow.executor.cancel import doing
from waterflow.executor.data.copies import Ranges, copies_of
from waterflow.executor.program import ownership
from waterflow.executor.program.binding import Owner, bind
from waterflow.executor.program.capture_budget import CaptureBudget, NewKind
from waterflow.executor.program.capture_cache import (
    CapturedStep,
    ChangedMeanwhile,
    Code,
    PlannedStep,
    StepPlans,
    build,
    captures,
    codes,
)
from waterflow.executor.program.first_updates import Begun, FirstUpdates, HalfBegun, Members, members_of
from waterflow.executor.program.forms import form_of
from waterflow.executor.program.ownership import Hold, holders
from waterflow.partition.capture.fake_rules import surprises
from waterflow.partition.capture.leaks import LeavesTensors
from waterflow.partition.capture.optimizers import parameters_of
from waterflow.partition.capture.spec import StepSpec
from waterflow.partition.capture.substitution import ChangesItself
from waterflow.partition.capture.trace import no_gradient
from waterflow.partition.guards import node_hooks
from waterflow.partition.guards.batch_reads import Answers, LeafRead, answers_of, free_places, with_values
from waterflow.partition.guards.beside_leaves import Beside
from waterflow.partition.guards.cache_key import Fingerprint
from waterflow.partition.guards.settings import ambient_key
from waterflow.partition.guards.step_key import state_of, structure_key, what_changed
from waterflow.partition.guards.trace_writes import others_run
from waterflow.partition.plan.plan import Plan

logger = logging.getLogger("waterflow")


# A kind of batch: its form, whether the step updates, settings of the process, the parameters with gradients from earlier
# calls, and the answers of the batch to the questions that the step asks of its values.
Key = tuple[Hashable, bool, Hashable, frozenset[str], Answers]


@dataclass
class Whole:
    """The whole step for one kind of batch, as it runs if there is room for it."""

    key: Hashable
    plain: CapturedStep  # as captured
    form: CapturedStep
    plans: StepPlans
    lowest: int = 0  # bytes below which no form of it was found


@dataclass
class BoundStep:
    """A captured step for one kind of batch, bound to the tensors of one job.

    ``plain`` is the step as captured, ``captured`` the same or a lower form of it, which runs; ``whole`` is the form that runs
    if there is room.
    """

    key: Key
    plain: CapturedStep
    captured: CapturedStep
    plans: StepPlans
    binding: _C.Binding
    slots: list[int]
    leaves: list[int]
    structure: tuple[Hashable, int]  # the key of the step's code and modules, and the number of the capture
    code: Code
    owner: Owner
    moved: Members
    whole: Whole
    # A batch in ``changed_early`` is copied, as this memory may change before the batch is read for the last time; one in
    # ``changed_between`` is refused, as operations that are recomputed would read it after it has changed.
    changed_early: Ranges = field(default_factory=lambda: Ranges(()))
    changed_between: Ranges = field(default_factory=lambda: Ranges(()))
    guarded: bool = False  # there is such memory
    asked_not: Ranges = field(default_factory=lambda: Ranges(()))  # memory that the step changes: no answers from there
    call: tuple[PlannedStep, type, _C.StepCall] | None = None  # of its plan and type of batch: see ``Settled``
    on_data: tuple[object, bool] | None = None  # the memory of the job's data as last seen, and if the step writes there

    @property
    def reduced(self) -> bool:
        """True if it runs in less memory than it needs."""
        return self.plans is not self.whole.plans

    def written(self) -> Iterator[torch.Tensor]:
        """Yield the tensors beside its batch that the step may change, and that others can read."""
        spec, inside = self.owner.spec, self.owner.tensors
        yield from spec.updated().values()
        yield from state_of(spec.optimizer)
        for given in self.captured.changed_inputs:
            if given.kind in ("parameter", "buffer"):
                yield inside[given.name]
            elif given.kind == "external":
                yield self.owner.fingerprint.external_tensors[given.leaf]

    def answers(self, leaves: list[Any]) -> Answers:
        """Return the answers in the step's own key if the batch gives the same; else those of the key to look under next.

        Raises CaptureError if the step asks for values of a batch that it changes, or goes over more than ``MOST_WAYS`` ways.
        """
        questions = self.plain.capture.questions
        asked = (leaves[leaf] for question in questions for leaf in question.leaves)
        if questions and (self.plain.changed_leaves or any(map(self.asked_not.have, asked))):
            raise CaptureError("the step asks for values of a batch that lies in what it changes; pass a copy of it")
        return answers_of(questions, self.key[4], leaves)

    def given(self, leaves: list[Any], before_copies: Callable[[], None] | None) -> list[Any]:
        """Return the batch's tensors in the order of ``slots``; those in memory that the step changes early are copied.

        ``before_copies`` waits for a running step that may change them. Raises InvalidJobError if recomputing would read a
        tensor of the batch after the step has changed it.
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


@dataclass
class Changing:
    """A kind of batch whose step is not captured for now, as what it reads beside the batch has changed.

    ``guards`` tell whether that is still as it was at the last look; else there are ever longer pauses before the next one, as a
    look takes longer than a small step.
    """

    kind: int
    guards: _C.Binding
    changes: Callable[[], str]
    pause: int = 1  # calls
    calls: int = 0

    def rests(self) -> bool:
        """Return True if what the step reads is as at the last look. Raises NewKind if it is too early for the next one."""
        if self.guards.current():
            return True
        self.calls += 1
        if self.calls < self.pause:
            raise NewKind("", changed=True)
        return False


_T = TypeVar("_T")
Recompute = int | Literal["auto"] | None
MOST_SHAPES = 64
MOST_CHANGES = 3  # of the step's own objects, after each of which it is captured anew
MOST_READ = 16  # leaves of a batch that are found one by one: a step that reads more counts as reading all
MOST_SURPRISES = 8  # each capture by what kernels have told of their layouts may ask others
MOST_UNLOOKED = 64  # eager steps in a row that are not asked whether what changes has come to rest


@contextlib.contextmanager
def as_refusal() -> Iterator[None]:
    """Turn an error of the capture itself inside the context into CaptureError: the step then runs eagerly."""
    # Errors that users can correct, and missing memory, are raised as they are. The user's code raises nothing here.
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
    # After an error the state is as before: the optimizer's own ``step()`` fails where a parameter has only some entries.
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


def _described(key: Key, leaves: list[Any], batch_spec: pytree.TreeSpec | None) -> Any:
    # The batch, with None for leaves that are no part of its kind.
    free = free_places(leaves, batch_spec, key[4])
    read = [None if n in free else leaf for n, leaf in enumerate(leaves)]
    return tuple(read) if batch_spec is None else pytree.tree_unflatten(read, batch_spec)


def _kind_of(structure: Hashable, key: Key) -> int:
    return hash((structure, key))


@doing("capturing its step", interruptible=False)  # in some callbacks of a trace an exception would end the process
class BoundSteps:
    """All bound steps of one job, with the state that they share: gradient sums, and flags of first updates.

    ``threads`` is the number of intra-op threads of the step's operations. With ``own_plans`` other jobs' profiles do not
    change this job's plans. ``hold`` is the job's hold on its modules. With ``recompute`` in bytes steps are brought to that
    height. Without ``exact`` they may round otherwise than the user's operations. ``budget`` bounds the time for captures.
    """

    def __init__(
        self,
        spec: StepSpec,
        generator: torch.Generator | None,
        threads: int,
        name: str,
        own_plans: bool,
        hold: Hold | None,
        recompute: Recompute = None,
        exact: bool = True,
        budget: CaptureBudget | None = None,
    ) -> None:
        self._spec = spec
        self._generator = generator
        self._threads = threads
        self._name = name
        self._own_plans = own_plans
        self._hold = hold
        self._recompute = recompute
        self._exact = exact
        self._heights: dict[Hashable, int] = {}  # by kind of batch: the height to which its step had to be brought
        # By kind of batch, for steps with less room than they need: the whole form, the room, and the form made for it.
        self._reduced: dict[Hashable, tuple[CapturedStep, int, CapturedStep]] = {}
        self._last: Whole | None = None
        self._bound_steps: dict[Hashable, BoundStep] = {}
        self._accumulators: dict[str, torch.Tensor] = {}
        self._gathered: frozenset[str] = frozenset()  # whose sums have been added to since the last update
        self.first = FirstUpdates(spec.optimizer)
        self._changing: dict[Key, Changing] = {}
        self._resized: set[int] = set()  # ids of tensors to which a step gives another size
        self._read: dict[Key, tuple[int, ...]] = {}  # places of leaves that steps have read, by keys without them
        self._budget = budget or CaptureBudget()
        # Kinds of batches that this job's steps have been captured for, and of all that these steps are made from.
        self._kinds: set[Hashable] = set()
        self._tried_again = 0
        node_hooks.observe()
        self._looked_at = -1  # the last hook of any node at the last look whether one is a parameter's

    def find(self, leaves: list[Any], batch_spec: pytree.TreeSpec | None, batch_key: Hashable, update: bool) -> BoundStep:
        """Return the step for a batch of this kind, bound to the tensors as they are now; capture it if there is none.

        Raises CaptureError if the step must run eagerly, and InvalidJobError if another thread's step shares what it trains.
        """

        def at(key: Key) -> tuple[BoundStep, Answers]:
            bound_step = self._bound_steps.get(key)
            if bound_step is None or not bound_step.binding.current():
                changing = self._changing.get(key)
                if changing is not None and changing.rests():
                    self._budget.check_change(changing.kind, changing.changes)
                if key not in self._kinds:
                    self._budget.count(key, leaves, partial(self._elsewhere, key), partial(_described, key, leaves, batch_spec))
                with as_refusal():
                    bound_step = self._make(key, leaves, batch_spec)
            bound_step.code.check()
            if node_hooks.Registered.last != self._looked_at:
                self._check_nodes(bound_step.owner)
            return bound_step, bound_step.answers(leaves)

        gathered = self._gathered if update else frozenset()
        base: Key = (batch_key, update, ambient_key(self._spec.device.type), gathered, ())
        return self._answering(base, leaves, batch_spec, at)

    def keeps(self, bound_step: BoundStep) -> bool:
        """Return True if ``find`` returns it for the next batch of its kind, and does not go by values of batches."""
        return not self._read and self._bound_steps.get(bound_step.key) is bound_step

    def _elsewhere(self, key: Key, kind: int | None) -> bool:
        return not self._budget.own and (captures.know(key) if kind is None else captures.have(kind))

    def _check_nodes(self, owner: Owner) -> None:
        registered = node_hooks.Registered.last
        if node_hooks.hooked((*owner.tensors.values(), *owner.fingerprint.external_tensors)):
            raise CaptureError(
                "the AccumulateGrad node of a parameter has hooks, as those of distributed optimizers, which must run every step; "
                "take them off"
            )
        self._looked_at = registered

    def _answering(
        self, base: Key, leaves: list[Any], batch_spec: pytree.TreeSpec | None, at: Callable[[Key], tuple[_T, Answers]]
    ) -> _T:
        # A captured step knows its questions, and the key has the batch's answers: from a first guess of the key, the answers
        # to the questions of the step found there lead to the next key, until they are those of its key.
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

    def lowered(
        self, bound_step: BoundStep, leaves: list[Any], batch_spec: pytree.TreeSpec | None, height: int
    ) -> BoundStep | None:
        """Return a form of at most ``height`` bytes, None without recomputing. Raises MemoryLimitError if none is so low."""
        if self._recompute != "auto" or not bound_step.plain.capture.apart:
            return None
        before = self._heights.get(bound_step.key)
        beyond = bound_step.plans.plan.height - height
        wanted = bound_step.plans.graph_height(height) if before is None else before - max(1, beyond)
        form_of(bound_step.plain, max(0, wanted))
        self._heights[bound_step.key] = wanted
        return self._make(bound_step.key, leaves, batch_spec)

    def _make(self, key: Key, leaves: list[Any], batch_spec: pytree.TreeSpec | None) -> BoundStep:
        spec = replace(self._spec, update=key[1], gathered=key[3])
        plain, structure, fingerprint = self._capture(spec, key, leaves, batch_spec, runs=True)
        (code := codes.of(structure[0])).check()
        form = captured = form_of(plain, self._height(key))
        if (reduced := self._reduced.get(key)) is not None and reduced[0] is form:
            captured = reduced[2]
        if self._hold is not None:
            trained = parameters_of(spec.optimizer)
            holders.check(self._hold, spec.model, trained, captured.written_buffers)
            written = [fingerprint.external_tensors[one.leaf] for one in captured.changed_inputs if one.kind == "external"]
            holders.check_tensors(self._hold, fingerprint.external_tensors, written)
        moved = members_of(plain, spec.optimizer, fingerprint.parameters)
        owner = Owner(spec, self._accumulators, self.first.flags(moved), fingerprint, self._resized)
        self._note_resized(plain, owner)
        ownership.check(plain.capture.reached, owner)
        with _state_kept(spec.optimizer), self.first.laying_out(moved):
            binding, slots, positions = bind(captured, owner)
        binding.set_generator(self._generator)
        if key not in self._bound_steps and len(self._bound_steps) >= MOST_SHAPES:
            self._bound_steps.pop(next(iter(self._bound_steps)))
        plans = self._plans(key, captured)
        self._last = whole = Whole(key, plain, form, plans if form is captured else self._plans(key, form))
        made = BoundStep(key, plain, captured, plans, binding, slots, positions, structure, code, owner, moved, whole)
        if captured.capture.early_updates or captured.recomputed is not None:
            written = [owner.tensors[name] for name in captured.written_buffers]
            made.guarded = True
            made.changed_early = Ranges([*spec.trained().values(), *state_of(spec.optimizer)])
            made.changed_between = Ranges(written if captured.recomputed is not None else ())
        if plain.capture.questions:
            made.asked_not = Ranges([*owner.tensors.values(), *fingerprint.external_tensors, *state_of(spec.optimizer)])
        self._looked_at = -1
        self._bound_steps[key] = made
        self._changing.pop(key, None)
        if (kind := _kind_of(structure[0], key)) not in self._kinds:
            self._kinds |= {key, kind}
            self._budget.add_kind(key, kind)
        return made

    def _note_resized(self, captured: CapturedStep, owner: Owner) -> None:
        if found := {id(owner.tensor(one)) for one in captured.resized_inputs} - self._resized:
            self._resized |= found
            self._bound_steps.clear()  # queued behind this step, they need the sizes that it leaves

    def _plans(self, key: Hashable, captured: CapturedStep) -> StepPlans:
        if not self._own_plans:
            return captured.plans(self._threads)
        old = self._bound_steps.get(key)
        known = (old.plans, old.whole.plans) if old is not None else ()
        return next((one for one in known if one.captured is captured), None) or StepPlans(captured)

    # -- below what the step needs

    def within(self, bound_step: BoundStep, leaves: list[Any], batch_spec: pytree.TreeSpec | None, room: int) -> BoundStep | None:
        """Return the step whole if it is at most ``room`` bytes high, else in a reduced form; None if no form is so low."""
        whole = bound_step.whole.form
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
        """Return the plan that a job must claim to go on: ``wanted``, if it takes more than the last step, else that step's.

        The last step, which is known also after ``clear``, counts in the form that fits in ``quota`` bytes, if there is one.
        """
        last = self._last
        if last is None or (wanted is not None and wanted.peak > last.plans.plan.peak):
            return wanted
        plan = last.plans.plan
        if quota is None:
            return plan
        form = self._brought(last, last.form, quota - plan.persistent - batches * plan.batch)
        return plan if form is None else self._plans(last.key, form).plan

    def _brought(self, whole: Whole, form: CapturedStep, room: int) -> CapturedStep | None:
        # Until a form's plan, which its own profile may have raised, fits. None if no form does.
        while (plans := self._plans(whole.key, form)).plan.height > room:
            height = plans.graph_height(room)
            if height < whole.lowest:
                return None
            try:
                form = form_of(whole.plain, height, offload=True)
            except MemoryLimitError as error:
                whole.lowest = error.needed
                return None
        return form

    def captured(
        self, leaves: list[Any], batch_spec: pytree.TreeSpec | None, batch_key: Hashable, height: int | None = None
    ) -> CapturedStep:
        """Return the captured step for such a batch, unbound, at most ``height`` bytes high. Raises Capture- and MemoryLimitError."""
        update = self._spec.shards == 1  # else the gradients of a part are the larger step
        gathered = frozenset(self._spec.trained()) if self._spec.has_sums and update else frozenset()
        base: Key = (batch_key, update, ambient_key(self._spec.device.type), gathered, ())

        def at(key: Key) -> tuple[tuple[CapturedStep, tuple[Hashable, int], Key], Answers]:
            plain, structure, _ = self._capture(replace(self._spec, update=update, gathered=gathered), key, leaves, batch_spec)
            return (plain, structure, key), answers_of(plain.capture.questions, key[4], leaves)

        with as_refusal():
            plain, structure, key = self._answering(base, leaves, batch_spec, at)
            codes.of(structure[0]).check()
            return form_of(plain, self._height(key) if height is None else height)

    def _height(self, key: Hashable) -> int | None:
        return self._recompute if isinstance(self._recompute, int) else self._heights.get(key)

    def _capture(
        self, spec: StepSpec, key: Key, leaves: list[Any], batch_spec: pytree.TreeSpec | None, runs: bool = False
    ) -> tuple[CapturedStep, tuple[Hashable, int], Fingerprint]:
        try:
            return self._capture_once(spec, key, leaves, batch_spec, runs)
        except ChangedMeanwhile:
            return self._capture_once(spec, key, leaves, batch_spec, runs)

    def _capture_once(
        self, spec: StepSpec, key: Key, leaves: list[Any], batch_spec: pytree.TreeSpec | None, runs: bool
    ) -> tuple[CapturedStep, tuple[Hashable, int], Fingerprint]:
        structure, fingerprint = structure_key(spec)
        old = self._bound_steps.get(key)
        if old is not None and old.structure[0] == structure and old.plain.capture.holds():
            return old.plain, old.structure, fingerprint
        kind, own = _kind_of(structure, key), self._budget.own
        changed = key in self._kinds and (own or old is not None)

        def check() -> None:
            if not changed:
                batch = partial(_described, key, leaves, batch_spec)
                if key in self._kinds:  # its step was dropped, so that ``find`` has not counted it
                    self._budget.count(key, leaves, lambda kind: True, batch)
                self._budget.check(key, kind, batch)
                return
            changes = partial(what_changed, old.structure[0] if old is not None else None, structure)
            try:
                self._budget.check_change(kind, changes)
            except NewKind:
                self._note_change(spec, key, kind, fingerprint, changes)
                raise

        def make() -> CapturedStep:
            again = kind in self._kinds
            if runs and (again or not own):
                check()
            began = time.thread_time()
            with self._budget.spending() if runs else contextlib.nullcontext():
                free, beside = free_places(leaves, batch_spec, key[4]), Beside.within(key[0])
                made = build(spec, leaves, batch_spec, fingerprint, self._name, free, beside)
            made.seconds = time.thread_time() - began
            # Made from what was there before and what another thread has put there since.
            if others_run() and structure_key(spec)[0] != structure:
                raise ChangedMeanwhile("", changed=True)
            self._budget.account["captures"] += 1
            self._budget.account["captures anew"] += changed
            if again:
                self._budget.add_kind(key, kind)
            return made

        # In a deterministic study the step's own past decides, whatever other jobs have captured.
        if runs and own and changed and kind not in self._kinds:
            check()
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

    def _note_change(self, spec: StepSpec, key: Key, kind: int, fingerprint: Fingerprint, changes: Callable[[], str]) -> None:
        before = self._changing.get(key)
        guards = _C.Binding(_C.Program(inputs=0, fixed=0, slots=0))
        Owner(spec, {}, {}, fingerprint).watch(guards)
        pause = min(2 * before.pause, MOST_UNLOOKED) if before is not None else 1
        self._changing[key] = Changing(kind, guards, changes, pause)

    # -- what the bound_steps share

    def may_try_again(self, refused: CaptureError) -> bool:
        """Return True if a step that was ``refused``, and has run eagerly, may be captured at its next call."""
        # Its batch was of a new kind, momentum has begun since, or it changed objects of its own, as models do that fill a
        # cache in their first calls.
        if isinstance(refused, NewKind):
            return True
        most = 1 if isinstance(refused, LeavesTensors) else MOST_CHANGES if isinstance(refused, ChangesItself) else 0
        again = self._tried_again < most
        self._tried_again += again
        return not self._spec.has_sums and (again or isinstance(refused, HalfBegun))

    def begin_update(self, bound_step: BoundStep) -> Begun:
        """Note that an update was submitted; return the state of the parameters of which it is the first."""
        if begun := self.first.begin(bound_step.moved):
            self._drop_half_begun()
        return begun

    def undo_update(self, begun: Begun, gathered: frozenset[str] | None = None, ended: bool = False) -> None:
        """Undo ``begin_update``, as the update failed; the sums of ``gathered`` exist again. ``ended``: none of it still runs."""
        self.first.undo(begun, ended)
        if begun:
            self._drop_half_begun()
        self._gathered = self._gathered if gathered is None else gathered

    def before_eager(self) -> dict[str, torch.Tensor]:
        """Prepare for an eager step: remove optimizer state that no update has reached; return the gradient sums by name."""
        self.first.take_back()
        return self.sums

    def after_eager(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Go on from the gradient sums of an eager step, as the next step may be captured."""
        self.first.look_again()
        self._drop_half_begun()
        self._gathered = frozenset(sums)
        for name, bound in self._accumulators.items():  # captured steps are bound to these, and add to what is there
            bound.copy_(sums[name]) if name in sums else bound.fill_(no_gradient(bound))
        self._accumulators.update({name: one for name, one in sums.items() if name not in self._accumulators})

    def _drop_half_begun(self) -> None:
        for key, bound_step in [*self._bound_steps.items()]:
            if self.first.half_begun(bound_step.moved) is not None:
                del self._bound_steps[key]

    def gather(self, bound_step: BoundStep) -> frozenset[str]:
        """Note that a step was submitted, which adds to gradient sums or uses them up; return the names of those before it."""
        before = self._gathered
        if self._spec.has_sums:
            self._gathered = frozenset() if bound_step.key[1] else before.union(bound_step.plain.capture.gradients)
            for name in before.difference(bound_step.owner.spec.updated()) if bound_step.key[1] else ():
                self._accumulators.pop(name)  # the optimizer trains it no more
        return before

    @property
    def sums(self) -> dict[str, torch.Tensor]:
        """The gradient sums since the last update, by parameter name."""
        return {name: self._accumulators[name] for name in sorted(self._gathered)}

    def put_sums(self, sums: Mapping[str, torch.Tensor]) -> None:
        """Start from gradient sums of another object; only before the first step."""
        self._accumulators, self._gathered = dict(sums), frozenset(sums)

    def lay_out_sums(self, sums: Mapping[str, torch.Tensor], gathered: Iterable[str] = ()) -> None:
        """Add gradients to these tensors from the next call on; those ``gathered`` have been added to."""
        if any(self._accumulators.get(name) is not tensor for name, tensor in sums.items()):
            self._bound_steps.clear()  # they are bound to others
        self._accumulators.update(sums)
        self._gathered = frozenset(gathered)

    def clear(self) -> None:
        """Drop all bound steps and gradient sums."""
        self._bound_steps.clear()
        self._changing.clear()
        self.put_sums({})
