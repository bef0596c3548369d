"""Audits: one step is run twice from the same state, captured and eagerly, and the results are compared bit by bit."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import random
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from waterflow import _C
from waterflow.errors import AuditError, CaptureError, InvalidJobError, JobCancelled, WaterflowError
from waterflow.executor.data.copies import Ranges
from waterflow.executor.engine import Engine
from waterflow.executor.memory_limit import free_memory
from waterflow.executor.program.binding import Owner, bind
from waterflow.executor.program.bound_step import BoundStep
from waterflow.executor.program.capture_budget import costs
from waterflow.executor.program.capture_cache import Audited, CapturedStep, Code, Faulty, codes, line_of
from waterflow.executor.program.eager import EagerStep
from waterflow.partition.capture.optimizers import FIRST_STEP_FLAG
from waterflow.partition.capture.substitution import surrounding_autocast
from waterflow.partition.capture.trace import no_gradient
from waterflow.partition.passes.operators import storage_id
from waterflow.partition.plan.plan import Plan, format_bytes

logger = logging.getLogger("waterflow")

LARGE = 64 << 10  # bytes of a frozen tensor from which on there is a checksum of it, and no copy


@dataclass(frozen=True)
class Difference:
    """The first result in which a captured and an eager step differ, and the user's line that computes it."""

    what: str
    how: str
    line: str = ""
    lost: bool = False  # the value before the audit was not kept, so it cannot be restored

    def __str__(self) -> str:
        return f"{self.what}: {self.how}" + (f" ({self.line})" if self.line else "")


class ProvesNothing(Exception):
    """The audit of a step cannot be made, or its result means nothing; the message gives the reason, logged at ``level``."""

    def __init__(self, message: str, level: int = logging.INFO) -> None:
        self.level = level
        super().__init__(message)


@dataclass
class _Outcome:
    tensors: dict[str, torch.Tensor]  # what the step returns
    numbers: torch.Tensor  # the generator's state
    versions: dict[str, int]  # how often each tensor that the step reads was changed meanwhile
    odd: str = ""  # something that no step with a captured form does


@dataclass
class BothWays:
    """Runs a step of ``owner`` captured and eagerly, the latter with the optimizer's fused kernels, and compares the two.

    The constructor runs on the job's own thread while no step of the job is under way; ``difference()`` may run on a lane. It
    changes the job's tensors and restores them. With ``keep``, if the two agree, the step stays done, and ``done`` is its
    captured run, with a profile if ``profiled``. ``sums`` are the gradients accumulated since the last update, by parameter
    name; ``surrounding`` is the data type of the autocast around the caller. ``bytes`` is the memory that an audit needs.
    """

    name: str
    captured: CapturedStep
    binding: _C.Binding
    slots: list[int]
    given: list[torch.Tensor]  # the batch's tensors, in this order
    owner: Owner
    sums: Mapping[str, torch.Tensor]
    generator: torch.Generator | None
    batch: Any
    surrounding: torch.dtype | None
    keep: bool = False
    profiled: bool = False
    done: _C.StepRun | None = field(default=None, init=False)
    seconds: dict[str, float] = field(default_factory=dict, init=False)  # of the processor, that each way took last

    def __post_init__(self) -> None:
        spec = self.owner.spec
        held = dict(self._held())
        self.shared = min((name for name, tensor in held.items() if tensor.untyped_storage().is_shared()), default=None)
        every = dict(held)
        self._unchanged = {name: _C.StateBytes([held.pop(name)]) for name in self._frozen()}
        leaves = pytree.tree_leaves(self.batch)
        changed = Ranges([*held.values(), *(leaves[i] for i in self.captured.changed_leaves)])
        self._read: dict[str, torch.Tensor] = {}  # of the batch
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                into = held if changed.have(leaf) else self._read
                into[f"tensor {number} of the batch"] = leaf
        self._changed = held
        self._counted = {name: one for name, one in (every | held | self._read).items() if not one.is_inference()}
        self._before = _C.StateBytes([*held.values(), *self._read.values()])
        kind: Any = type(spec.optimizer)
        self._twin = kind.__new__(kind)
        self._numbers = torch.Generator()
        self._eager = EagerStep(replace(spec, optimizer=self._twin), [self._numbers], self.name)
        gradients = sum(p.nbytes for p in spec.updated().values())
        # Two copies of the state, and the higher of both steps; an eager one has all gradients at once.
        self.bytes = 2 * self._before.bytes + self.captured.predicted.height * 9 // 8 + gradients

    def _held(self) -> Iterator[tuple[str, torch.Tensor]]:
        owner = self.owner
        names = {id(tensor): name for name, tensor in owner.tensors.items()}
        for name, tensor in owner.tensors.items():
            yield _of_model(name, tensor), tensor
        for parameter, entries in owner.spec.optimizer.state.items():
            for key, value in entries.items():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer state {key!r} of {names.get(id(parameter), '?')!r}", value
        for name, tensor in owner.accumulators.items():
            yield f"sum of gradients of {name!r}", tensor
        for given in self.captured.changed_inputs:
            if given.kind == "external":
                yield f"tensor {given.leaf} from outside", owner.fingerprint.external_tensors[given.leaf]

    def _frozen(self) -> list[str]:
        # Large tensors that the captured step does not write: a checksum replaces two copies of them. A storage that
        # also holds a trained or written tensor is copied, as a step may change it through that one.
        written = {given.name for given in self.captured.changed_inputs}
        frozen, storages = {}, set()
        for name, tensor in self.owner.tensors.items():
            if tensor.requires_grad or name in written or tensor.nbytes < LARGE:
                storages.add(storage_id(tensor))
            else:
                frozen[_of_model(name, tensor)] = tensor
        return [name for name, tensor in frozen.items() if storage_id(tensor) not in storages]

    # -- the two ways

    def difference(self) -> Difference | None:
        """Run the step both ways; return the first difference, or None if every bit is equal. A NaN equals a NaN.

        A difference is looked at twice: threads and processes of the user's may change what a step reads, and code may read a
        clock. Raises ProvesNothing if it does not come back, or the comparison means nothing, and JobCancelled if the job is
        cancelled meanwhile.
        """
        generator = self.generator if self.generator is not None else torch.default_generator
        numbers = generator.get_state()
        self._before.keep()
        sums = self._checksums()
        try:
            run, captured = self._run_captured(numbers)
            after = self._kept()
            self._before.put()
            eager = self._run_eagerly(numbers)
            found = self._compare(captured, after, eager) or self._lost(sums)
            if found is None:
                # Random numbers come from the job's generator, which others may draw from: a step that takes any runs anew.
                self.done = run if self.keep and torch.equal(numbers, captured.numbers) else None
                return None
            differs = (
                self._lost_again(numbers) if found.lost else self._differs_from_itself(found, captured, after, eager, numbers)
            )
            if differs:
                raise ProvesNothing(f"done twice from the same state, the {differs} step differs from itself")
            return found
        finally:
            if self.done is None:
                self._before.put()

    def _differs_from_itself(
        self, found: Difference, captured: _Outcome, after: _C.StateBytes, eager: _Outcome, numbers: torch.Tensor
    ) -> str:
        # Empty if both ways, done once more, end as they did.
        before = self._before.checksum()
        self._before.put()
        again = self._run_captured(numbers)[1]
        if self._compare(captured, after, again) or again.versions != captured.versions:
            return "captured"
        self._before.put()
        again = self._run_eagerly(numbers)
        same = again.versions == eager.versions and self._returned(eager, again) is None and self._before.checksum() == before
        return "" if same and self._compare(captured, after, again) == found else "eager"

    def _lost_again(self, numbers: torch.Tensor) -> str:
        # The same for a tensor without a copy: empty if the eager step alone changes it once more.
        sums = self._checksums()
        self._before.put()
        self._run_captured(numbers)
        if self._lost(sums):
            return "captured"
        self._before.put()
        return "" if self._lost(sums, self._run_eagerly(numbers).versions) else "eager"

    def _checksums(self) -> dict[str, int]:
        return {name: one.checksum() for name, one in self._unchanged.items()}

    def _lost(self, sums: dict[str, int], versions: Mapping[str, int] | None = None) -> Difference | None:
        # The first tensor without a copy that was changed, or written to by the versions, since ``sums`` were taken.
        written = (name for name, now in self._checksums().items() if now != sums[name] or (versions and versions.get(name)))
        name = next(written, None)
        return None if name is None else Difference(name, "only one of the two steps changes it", self._line(name), lost=True)

    def _kept(self) -> _C.StateBytes:
        kept = _C.StateBytes([*self._changed.values()])
        kept.keep()
        return kept

    def _run_captured(self, numbers: torch.Tensor) -> tuple[_C.StepRun, _Outcome]:
        all_of_it = _C.GroupPlan(ends=[len(self.captured.lowered.instructions)], peak=[0], after=[0])
        self._numbers.set_state(numbers)
        self.binding.set_generator(self._numbers)
        try:
            versions = self._versions()
            run = self.binding.run(all_of_it, self.given, self.slots, self.profiled)
            with self._timed("captured"):
                run.run_alone()
        finally:
            self.binding.set_generator(self.generator)
        try:
            outputs = run.outputs()
        except Exception as error:  # the step fails, and will say so
            raise ProvesNothing(f"the captured step fails: {error}") from None
        tensors = dict(zip(("the loss", *map(_metric, self.captured.capture.metrics or ())), outputs))
        return run, _Outcome(tensors, self._numbers.get_state(), self._since(versions))

    @contextlib.contextmanager
    def _timed(self, way: str) -> Iterator[None]:
        began = time.thread_time()
        yield
        self.seconds[way] = time.thread_time() - began

    def _versions(self) -> list[int]:
        # Of all that the step reads. Each change in place counts one more, whoever makes it.
        return [tensor._version for tensor in self._counted.values()]

    def _since(self, versions: list[int]) -> dict[str, int]:
        return {name: now - then for name, now, then in zip(self._counted, self._versions(), versions)}

    def _run_eagerly(self, numbers: torch.Tensor) -> _Outcome:
        spec = self.owner.spec
        self._numbers.set_state(numbers)
        versions = self._versions()
        self._become_twin()
        self._eager.put_sums(self.sums)
        odd = ""
        result: Any = torch.empty(0)
        with _gradients_kept([*self.owner.tensors.values(), *self.owner.fingerprint.external_tensors]):
            with _modules_kept(spec.model) as replaced:
                try:
                    with self._timed("eager"):
                        result = self._eager(self.batch, spec.update, self.surrounding)
                except (WaterflowError, MemoryError, torch.OutOfMemoryError):
                    raise
                except Exception as error:
                    if "allocate memory" in str(error):
                        raise ProvesNothing("there was no memory for the eager step") from None
                    odd = f"the eager step raises {type(error).__name__}: {error}"
                moved = list(replaced())
            odd = odd or self._gather(moved)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        tensors = {"the loss": loss} | {_metric(name): value for name, value in metrics.items()}
        for name, leaf in self._read.items():
            if not odd and _differing(self._before.kept(leaf), _raw(leaf)):
                odd = f"only the eager step changes {name}"
        return _Outcome(tensors, self._numbers.get_state(), self._since(versions), odd)

    def _become_twin(self) -> None:
        # The user's optimizer keeps its own settings: the twin shares its state, and differs in what a captured step has
        # otherwise. That is the fused kernels, whose bits captures have, and no momentum before the first update.
        real, twin = self.owner.spec.optimizer, self._twin
        twin.__dict__.update(real.__dict__)
        twin.__dict__.pop("step", None)  # schedulers wrap the instance's
        twin.param_groups = [dict(group, fused=True, foreach=None) for group in real.param_groups]
        twin.state = defaultdict(dict, {p: dict(entries) for p, entries in real.state.items()})
        for number, group in enumerate(twin.param_groups):
            if self.owner.first_step.get(f"{FIRST_STEP_FLAG}:{number}"):
                for parameter in group["params"]:
                    twin.state.get(parameter, {}).pop("momentum_buffer", None)
        twin._need_device_dtype_check_for_fused = False

    def _gather(self, moved: list[tuple[torch.Tensor, torch.Tensor]]) -> str:
        # An eager step may put results into new tensors, where the captured one writes in place. They are copied to that place
        # to be compared; returned is the description of one that has no such place.
        optimizer, owner = self.owner.spec.optimizer, self.owner
        for parameter, entries in self._twin.state.items():
            real = optimizer.state.get(parameter, {})
            for key, value in entries.items():
                if value is None or value is (old := real.get(key)):
                    continue
                if not isinstance(old, torch.Tensor) or not isinstance(value, torch.Tensor):
                    return f"only the eager step keeps the optimizer state {key!r} of a parameter"
                moved.append((old, value))
        sums = self._eager.named_sums() if owner.spec.has_sums else {}
        for name, tensor in owner.accumulators.items():
            if name in sums:
                moved.append((tensor, sums[name]))
            elif owner.spec.update:
                moved.append((tensor, torch.full_like(tensor, no_gradient(tensor))))
        if missing := sums.keys() - owner.accumulators.keys():
            return f"only the eager step has a gradient of {min(missing)!r}"
        # All are cloned before any is copied: one's source may be another's destination.
        for old, new in (values := [(old, new.detach().clone()) for old, new in moved]):
            if (old.shape, old.dtype) != (new.shape, new.dtype):
                return f"the eager step changes a tensor's shape or type to {tuple(new.shape)} of {new.dtype}"
        for old, new in values:
            _raw(old).copy_(_raw(new))
        return ""

    # -- comparing

    def _compare(self, one: _Outcome, then: _C.StateBytes, other: _Outcome) -> Difference | None:
        # ``then`` is the memory after ``one``; the memory after ``other`` is the present one.
        if one.odd != other.odd:
            return Difference("what the step does", other.odd or one.odd)
        if one.odd:
            return None
        if (found := self._returned(one, other)) is not None:
            return found
        if not then.is_as():
            for name, tensor in self._changed.items():
                if how := _differing(then.kept(tensor), _raw(tensor)):
                    return Difference(name, how, self._line(name))
        if how := _differing(one.numbers, other.numbers):
            return Difference("the state of the random generator", how)
        return None

    def _returned(self, one: _Outcome, other: _Outcome) -> Difference | None:
        if one.tensors.keys() != other.tensors.keys():
            return Difference("what the step returns", f"{sorted(one.tensors)} and {sorted(other.tensors)}")
        for name in one.tensors:
            if how := _differing(one.tensors[name], other.tensors[name]):
                return Difference(name, how, self._line(name))
        return None

    def _line(self, name: str) -> str:
        capture = self.captured.capture
        nodes = list(capture.graph.nodes)
        results = ("the loss", *map(_metric, capture.metrics or ()))
        if name in results:
            node = nodes[-1].args[0][results.index(name)]
            return line_of(node) if isinstance(node, fx.Node) and "phase" in node.meta else ""
        for node, given in zip(nodes, capture.inputs):
            user = next(iter(node.users), None)
            if given.name and repr(given.name) in name and user is not None and "phase" in user.meta:
                return line_of(user)
        return ""


def _metric(name: str) -> str:
    return f"metric {name!r}"


def _of_model(name: str, tensor: torch.Tensor) -> str:
    return f"{'parameter' if isinstance(tensor, nn.Parameter) else 'buffer'} {name!r}"


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    # Without the lazy bits (conjugate, negative): the elements as they lie in memory.
    return tensor.detach().new_empty(0).set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _differing(one: torch.Tensor, other: torch.Tensor) -> str:
    """Describe how two tensors differ: in type, shape, or the first element with other bits; empty if they do not."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return f"captured {one!r}, eager {other!r}" if one is not other else ""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return f"captured {one.dtype} {tuple(one.shape)}, eager {other.dtype} {tuple(other.shape)}"
    flat = [t.detach().resolve_conj().resolve_neg().contiguous().reshape(-1) for t in (one, other)]
    parts = [torch.view_as_real(t).reshape(-1) if t.is_complex() else t for t in flat]
    raw = [t.view(torch.uint8) for t in parts]  # bytes: 0.0 is not -0.0
    if torch.equal(*raw):
        return ""
    differ = (raw[0] != raw[1]).reshape(parts[0].numel(), -1).any(1)
    # Which of two NaNs an operation passes on is undefined, and so are a NaN's bits.
    differ &= ~(_nan(parts[0]) & _nan(parts[1]))
    if not differ.any():
        return ""
    at = int(differ.nonzero()[0]) * one.numel() // parts[0].numel()
    place = f" at {at} of {one.numel()}" if one.numel() > 1 else ""
    values = (f"{t[at].item()!r} (0x{bytes(t[at : at + 1].view(torch.uint8).tolist()[::-1]).hex()})" for t in flat)
    return "captured {}, eager {}{}".format(*values, place)


def _nan(flat: torch.Tensor) -> torch.Tensor:
    return torch.isnan(flat if flat.element_size() > 1 else flat.float())  # there are no kernels for floats of one byte


@contextlib.contextmanager
def _gradients_kept(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    held = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf and tensor.requires_grad]
    for tensor, _ in held:
        tensor.grad = None
    try:
        yield
    finally:
        for tensor, gradient in held:
            tensor.grad = gradient


@contextlib.contextmanager
def _modules_kept(model: nn.Module) -> Iterator[Any]:
    # Restores all attributes of the modules. Yields a function that lists the tensors replaced since, as pairs (old, new).
    spaces = [m.__dict__ for m in model.modules()]
    tensors = [(space[kind], dict(space[kind])) for space in spaces for kind in ("_parameters", "_buffers")]
    attributes = [(space, dict(space)) for space in spaces] + [(s["_modules"], dict(s["_modules"])) for s in spaces]

    def replaced() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for entries, before in [*tensors, *attributes]:
            for name, old in before.items():
                new = entries.get(name)
                if new is not old and isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor):
                    yield old, new

    try:
        yield replaced
    finally:
        for entries, before in [*tensors, *attributes]:
            for name in [name for name in entries if name not in before]:
                del entries[name]
            for name, old in before.items():
                if name not in entries or entries[name] is not old:
                    entries[name] = old


NEVER = 1 << 62
EARLIEST, LATEST = 2, 50  # a job's steps, between which the second audit of a captured step lies
RARE = 100, 500  # the same for the job's next audit; each later one lies ten times further
SMALL = 16 << 20  # bytes that any machine has
SHARE_OF_FREE = 0.5  # of the machine's free memory that an audit outside of an engine may take
_DEFAULT = "first"
_OPERATORS = frozenset(
    {"aten", "prims", "quantized", "mkldnn", "torchvision", "torchaudio", "waterflow"}
)  # namespaces of libraries', and of our own


def how_often(audit: int | None) -> int | str:
    """Return the setting of ``audit=``, or else of ``WATERFLOW_AUDIT``: a number of steps, "all", "first" or "off".

    Raises InvalidJobError for any other value.
    """
    if audit is None:
        said = os.environ.get("WATERFLOW_AUDIT") or _DEFAULT
        if said not in ("all", "first", "off"):
            raise InvalidJobError(f"WATERFLOW_AUDIT must be 'all', 'first' or 'off'; got {said!r}")
        return said
    if isinstance(audit, bool) or not isinstance(audit, int) or audit < 1:
        raise InvalidJobError(f"audit must be a positive integer: every so many steps are audited; got {audit!r}")
    return audit


class Audit:
    """The audits of one job: decides which steps are audited, and records which code ran without an audit. Not thread-safe."""

    def __init__(self, audit: int | None, name: str, generator: torch.Generator | None, device: torch.device) -> None:
        self._how_often = how_often(audit) if device.type == "cpu" else "off"
        self._name = name
        self._generator = generator
        self._own: dict[int, Audited] = {}  # by number of the capture; for "all", where jobs do not share audits
        self._rare: dict[int, int] = {}  # by number of the capture, the step at which the job's next rare audit is due
        self._trusted: set[Code] = set()
        self.steps = self.passed = 0  # captured steps that were submitted; audits that found no difference
        self.seconds = 0.0  # time that audits took

    def due(self, bound_step: BoundStep) -> bool:
        """Count a step that is about to be submitted; return True if it must be audited first."""
        self.steps += 1
        if self._is_due(bound_step):
            return True
        self._trusted.add(bound_step.code)
        return False

    def quiet_until(self, bound_step: BoundStep) -> int:
        """Return the number of a captured step before which none of this kind is due, as far as it is known now."""
        how_often = self._how_often
        if how_often == "off":
            return NEVER
        if bound_step.code not in self._trusted:  # its first step without an audit is to be noted
            return 0
        if isinstance(how_often, int):
            return self.steps + how_often - (self.steps - 1) % how_often
        exact = bound_step.plain.exactly or bound_step.plain
        number = exact.capture.number
        audited = exact.audited if how_often == "first" else self._own.get(number)
        if number not in self._rare or audited is None or not audited.known:
            return 0
        return self._rare[number] if audited.later < 0 else min(self._rare[number], audited.later)

    def _is_due(self, bound_step: BoundStep) -> bool:
        how_often = self._how_often
        if how_often == "off":
            return False
        if isinstance(how_often, int):
            return (self.steps - 1) % how_often == 0
        exact = bound_step.plain.exactly or bound_step.plain
        number = exact.capture.number
        if (rare := self._rare.get(number)) is None:
            rare = self._rare[number] = self._rarely()
        if rare <= self.steps:
            self._rare[number] = self._rarely()
            return True
        audited = exact.audited if how_often == "first" else self._own.setdefault(number, Audited())
        if audited.later < 0:
            return False
        if audited.begins():
            # Drawn from the job's seed, so that equal seeds give equal runs.
            audited.later = self.steps - 1 + random.Random(self._seed()).randint(EARLIEST, LATEST)
            return True
        return audited.ends(self.steps)

    def _rarely(self) -> int:
        # The next of the ever rarer audits: one within each decade of steps, whatever the length of the job.
        first, last = RARE
        while (place := random.Random(self._seed() + first).randint(first, last)) <= self.steps:
            first, last = 10 * first, 10 * last
        return place

    def _seed(self) -> int:
        return torch.initial_seed() if self._generator is None else self._generator.initial_seed()

    def refused(self, error: CaptureError) -> CaptureError:
        """Return ``error``, the reason why a step must run eagerly.

        Raises AuditError instead if earlier captured steps of the same faulty code ran without an audit: no state of the job
        is then known to be right.
        """
        if isinstance(error, Faulty) and error.code in self._trusted:
            raise AuditError(
                f"step {self._name!r} cannot go on: {error}. Steps before this one were not compared, so its state may be wrong, "
                "and there is none that is known to be right. Begin again: in this process the code now runs eagerly. "
                "Step(audit=1) or WATERFLOW_AUDIT=off say how much is compared"
            ) from None
        return error

    def compare(
        self,
        bound_step: BoundStep,
        leaves: list[Any],
        batch: Any,
        sums: Mapping[str, torch.Tensor],
        engine: Engine | None,
        job: int | None,
        batches: int,
        keep: bool,
    ) -> tuple[_C.StepRun, bool] | None:
        """Run the job's next step captured and eagerly, while no other is under way; the job keeps ``batches`` batches in memory.

        If the two agree and ``keep`` is set, the step stays done: returns its captured run, and whether it was profiled. In
        every other case the job's state is restored and None is returned. Raises Faulty if the two differ; all captures of
        this code then end in this process.
        """
        start = time.perf_counter()
        ways = self._both_ways(bound_step, leaves, batch, sums, keep)
        try:
            found = _admitted(ways, engine, job, bound_step.plans.plan, batches)
        except ProvesNothing as error:
            if (why := str(error)) not in bound_step.code.told:
                bound_step.code.told.add(why)
                logger.log(error.level, "step %r was not audited: %s", self._name, why)
            self._trusted.add(bound_step.code)
            return None
        finally:
            self.seconds += time.perf_counter() - start
        if found is None:
            self.passed += 1
            captured = None if ways.profiled else ways.seconds["captured"]  # with a profile it takes longer
            costs.add((bound_step.plain.exactly or bound_step.plain).seconds, ways.seconds["eager"], captured)
            return None if ways.done is None else (ways.done, ways.profiled)
        if codes.end(bound_step.code, str(found)):
            logger.error(_report(self._name, bound_step, found))
        if found.lost:
            self._trusted.add(bound_step.code)
        raise Faulty(bound_step.code)

    def _both_ways(
        self, bound_step: BoundStep, leaves: list[Any], batch: Any, sums: Mapping[str, torch.Tensor], keep: bool
    ) -> BothWays:
        captured, binding, slots = bound_step.captured, bound_step.binding, bound_step.slots
        given = bound_step.given(leaves, None)
        exact = bound_step.plain.exactly or bound_step.plain
        if not captured.exact:
            captured = exact
            binding, slots, positions = bind(exact, bound_step.owner)
            binding.set_generator(self._generator)
            given, keep = [leaves[i] for i in positions], False
        surrounding = surrounding_autocast(bound_step.owner.spec.device.type)
        return BothWays(
            self._name,
            captured,
            binding,
            slots,
            given,
            bound_step.owner,
            sums,
            self._generator,
            batch,
            surrounding,
            keep,
            keep and bound_step.plans.wants_profile,
        )


def _admitted(ways: BothWays, engine: Engine | None, job: int | None, plan: Plan, batches: int) -> Difference | None:
    # On a lane, if there is an engine, once the memory is admitted.
    if (operator := _users_operator(ways.captured)) is not None:
        raise ProvesNothing(f"it calls the operator {operator}, which might count its calls")
    if not _gradients_here():
        raise ProvesNothing("it is called inside of an operator, below autograd")
    if ways.shared is not None:
        raise ProvesNothing(f"{ways.shared} lies in shared memory, which another process may change meanwhile", logging.WARNING)
    if engine is None or job is None:
        if ways.bytes > SMALL and ways.bytes > SHARE_OF_FREE * free_memory():
            raise ProvesNothing(f"the machine has no {format_bytes(ways.bytes)} free for it")
        return ways.difference()
    with engine.reservations.looking(job):  # no other job claims memory between the check and the admission
        if not engine.reservations.has_room(job, plan.persistent + batches * plan.batch, ways.bytes):
            raise ProvesNothing(f"it takes {format_bytes(ways.bytes)} of memory, more than there is for it")
        try:
            return engine.run_audit(job, ways)
        except _C.Cancelled as error:
            raise JobCancelled(str(error)) from None
        except ValueError as error:
            raise ProvesNothing(str(error)) from None


def _users_operator(captured: CapturedStep) -> str | None:
    # The user's own operators may keep state (a counter), which both runs would change and no restore brings back.
    targets = {node.target for node in captured.capture.graph.nodes if node.op == "call_function"}
    names = [target.name() for target in targets if isinstance(target, torch._ops.OpOverload)]
    return min((name for name in names if name.partition("::")[0] not in _OPERATORS), default=None)


def _gradients_here() -> bool:
    return not torch._C._dispatch_tls_is_dispatch_key_excluded(torch._C.DispatchKey.AutogradFunctionality)


def _report(name: str, bound_step: BoundStep, found: Difference) -> str:
    spec, captured = bound_step.owner.spec, bound_step.captured
    settings = {
        "accumulate": spec.accumulate,
        "clip_grad_norm": spec.clip_norm,
        "clip_grad_value": spec.clip_value,
        "autocast": spec.autocast,
        "early_updates": spec.early_updates,
    }
    given = ", ".join(f"{name}={value}" for name, value in settings.items())
    held = zip(captured.capture.graph.nodes, captured.capture.inputs)  # placeholders come first
    forms = [node.meta["val"] for node, one in held if one.kind == "batch"]
    batch = [(*one.shape, one.stride(), str(one.dtype).removeprefix("torch.")) for one in forms]
    return (
        f"the audit of step {name!r} found that its captured form is not the eager one. The first difference is in {found}. "
        "This is a fault of waterflow. From now on steps of this code run eagerly in this process, in all of its jobs. "
        f"Please report it, if you can with the model, the step function and a batch, and with this: {type(spec.model).__name__} "
        f"of {captured.capture.nodes} operations, {type(spec.optimizer).__name__}, batch {batch}, {given}, "
        f"{torch.get_num_threads()} threads; waterflow {sys.modules['waterflow'].__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()} on {platform.machine()}"
    )
