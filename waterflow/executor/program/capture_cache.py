"""The process's captured steps, by key: what audits found of them, and their plans."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from waterflow import _C
from waterflow.errors import CaptureError
from waterflow.executor.program.capture_budget import NewKind
from waterflow.executor.program.lowering import Lowered, lower
from waterflow.executor.rng import redirect
from waterflow.partition.capture.leaks import LeavesTensors
from waterflow.partition.capture.spec import GraphInput, StepSpec
from waterflow.partition.capture.substitution import ChangesPackage, no_collections
from waterflow.partition.capture.trace import Capture, capture_step
from waterflow.partition.guards.batch_reads import LeafRead
from waterflow.partition.guards.beside_leaves import NOTHING, Beside
from waterflow.partition.guards.cache_key import Fingerprint
from waterflow.partition.passes.offload import Offloaded
from waterflow.partition.passes.operators import may_resize, running_statistics, storage_id, written_by
from waterflow.partition.passes.rematerialize import Recomputed
from waterflow.partition.plan.costs import operation_cost
from waterflow.partition.plan.liveness import OperationMemory, follow, operation_memory
from waterflow.partition.plan.offsets import Footprint
from waterflow.partition.plan.plan import Plan, make_plan
from waterflow.partition.plan.profile import StepProfile


@dataclass(eq=False)
class Code:
    """All steps of one structure, for any batch. ``fault`` says how their captured form differed from the eager one."""

    fault: str = ""
    told: set[str] = field(default_factory=set)  # logged reasons why audits of it proved nothing

    def check(self) -> None:
        """Raise Faulty if an audit has found a fault, so that captured steps of this code must not run."""
        if self.fault:
            raise Faulty(self)


class ChangedMeanwhile(NewKind):
    """Another thread changed what the step's key was made from while the step was captured."""


class Faulty(CaptureError):
    """The code's captured steps have differed from its eager ones."""

    def __init__(self, code: Code) -> None:
        self.code = code
        super().__init__(f"an audit found that the captured step is not the eager one: {code.fault}")


class _Codes:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codes: weakref.WeakValueDictionary[Hashable, Code] = weakref.WeakValueDictionary()
        self._faulty: list[Code] = []  # kept alive, so that a fault is remembered to the end of the process

    def of(self, structure: Hashable) -> Code:
        """Return the one code of this structure."""
        with self._lock:
            code = self._codes.get(structure)
            if code is None:
                code = self._codes[structure] = Code()
            return code

    def end(self, code: Code, fault: str) -> bool:
        """Make all steps of this code run eagerly from now on; return False if they already do."""
        with self._lock:
            if code.fault:
                return False
            code.fault = fault
            self._faulty.append(code)
            return True


codes = _Codes()


_BEGUN = 1 << 62


@dataclass(eq=False)
class Audited:
    """The two audits of one captured step, which all of its jobs share: at its first step, and at a later step of a job."""

    later: int = 0  # the number of that step in its job; 0 before the first audit, -1 after the second
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def known(self) -> bool:
        """True once the step of the second audit is known, or that has begun."""
        return self.later < 0 or 0 < self.later < _BEGUN

    def begins(self) -> bool:
        """Return True if the first audit has not begun; the caller must then make it."""
        with self._lock:
            if self.later:
                return False
            self.later = _BEGUN
            return True

    def ends(self, step: int) -> bool:
        """Return True if the second audit is due at a job's ``step`` and has not begun; the caller must then make it."""
        with self._lock:
            if not 0 < self.later <= step:
                return False
            self.later = -1
            return True


# A step whose requests differ from time to time is planned by the maximum of this many profiles.
MOST_PROFILES = 4
# After this many steps in a row with requests that were not planned a step is profiled anew, this often at most.
MOST_MISSES = 4
MOST_PROFILED_AGAIN = 3
NODE_BYTES = 3 << 10  # host memory of a capture for each node, as measured: docs/experiments/capture.md


@dataclass(frozen=True)
class PlannedStep:
    """A plan, and the same as the engine's lanes read it."""

    plan: Plan
    native: _C.GroupPlan

    @classmethod
    def of(cls, plan: Plan) -> PlannedStep:
        """Return ``plan`` with its twin."""
        groups = plan.groups
        native = _C.GroupPlan(
            ends=[g.end for g in groups],
            peak=[g.peak for g in groups],
            after=[g.after for g in groups],
            expected_ns=int(plan.seconds * 1e9),
            requests=plan.requests.native() if plan.requests is not None else None,
        )
        return cls(plan, native)


class StepPlans:
    """The plan of a captured step for a number of intra-op threads, first predicted, then made from profiles.

    Thread-safe: several jobs may add profiles at once. ``now`` is then another object, whose parts belong together.
    """

    def __init__(self, captured: CapturedStep) -> None:
        self._captured = weakref.ref(captured)  # which has these plans
        self._lock = threading.Lock()
        self._profiles: list[StepProfile] = []
        self.now = PlannedStep.of(captured.predicted)
        self.wants_profile = True
        self.measured_height = 0
        self._missed = 0  # steps in a row with requests that were not planned
        self._again = 0

    @property
    def captured(self) -> CapturedStep:
        """The step that is planned."""
        captured = self._captured()
        assert captured is not None
        return captured

    @property
    def plan(self) -> Plan:
        """The plan as it is now."""
        return self.now.plan

    def graph_height(self, height: int) -> int:
        """Return the height in bytes by the graph with which the whole step is ``height`` high, by the profiles so far."""
        return height - max(0, self.plan.height - self.captured.predicted.height)

    def add_profile(self, profile: StepProfile) -> None:
        """Add the profile of one step. Two equal ones in a row make the plan, and so do ``MOST_PROFILES`` unequal ones.

        Only equal profiles give requests their offsets: a step that asks differently from time to time has none that last.
        """
        with self._lock:
            if not self.wants_profile:
                return
            self._profiles.append(profile)
            equal = len(self._profiles) >= 2 and profile.same_requests(self._profiles[-2])
            if not equal and len(self._profiles) < MOST_PROFILES:
                return
            given = self.captured.memory
            memory, seconds = profile.memory(given)
            requests = None
            if equal:
                memory, requests = profile.place(given)
            else:
                columns = zip(*(one.memory(given)[0] for one in self._profiles))
                memory = [OperationMemory(max(m.peak for m in c), max(m.after for m in c), c[0].traffic) for c in columns]
            predicted = self.captured.predicted
            plan = make_plan(
                predicted.name,
                memory,
                persistent=predicted.persistent,
                batch=predicted.batch,
                seconds=seconds,
                requests=requests,
                forward=predicted.forward,
                offloaded=predicted.offloaded,
            )
            self.now = PlannedStep.of(plan)
            self.measured_height = self.plan.height
            self.wants_profile = False
            self._profiles.clear()

    def count_misses(self, missed: int) -> None:
        """Count a step with ``missed`` requests that were not planned; after several in a row the step is profiled again."""
        with self._lock:
            self._missed = self._missed + 1 if missed else 0
            if self._missed >= MOST_MISSES and self._again < MOST_PROFILED_AGAIN:
                self._again += 1
                self._missed = 0
                self.wants_profile = True


@dataclass
class CapturedStep:
    """A capture with its program and its predicted plan, shared by all jobs with an equal key."""

    capture: Capture
    lowered: Lowered
    memory: list[OperationMemory]
    predicted: Plan
    keep: list[Any]  # objects that the key compares by identity: kept alive, so that no id is used again
    exact: bool = True  # it computes the bits of the captured operations
    recomputed: Recomputed | None = None  # activations that the backward pass computes again
    offloaded: Offloaded | None = None  # activations that are in host memory from forward to backward pass
    layouts_hold: bool = False  # kernels were asked, and return the layouts that the capture has
    exactly: CapturedStep | None = None  # the same with the bits of the captured operations, where this one rounds otherwise
    seconds: float = 0.0  # of the processor, that its capture took
    audited: Audited = field(default_factory=Audited)
    _plans: dict[int, StepPlans] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @functools.cached_property
    def written_buffers(self) -> tuple[str, ...]:
        """The names of the model's buffers that a step changes."""
        return tuple(given.name for given in self.changed_inputs if given.kind == "buffer")

    @functools.cached_property
    def changed_inputs(self) -> tuple[GraphInput, ...]:
        """The inputs that a step changes in place, directly or through a view."""
        changed = {
            storage_id(source.meta["val"])
            for node in self.capture.graph.nodes
            for source in (*written_by(node), *running_statistics(node))
        }
        given = zip(self.capture.graph.nodes, self.capture.inputs)  # placeholders come first
        return tuple(one for node, one in given if storage_id(node.meta["val"]) in changed)

    @functools.cached_property
    def resized_inputs(self) -> tuple[GraphInput, ...]:
        """The inputs, beside those of the batch, to which a step may give another size."""
        nodes = self.capture.graph.nodes
        changed = {storage_id(source.meta["val"]) for n in nodes if may_resize(n.target) for source in written_by(n)}
        given = (one for node, one in zip(nodes, self.capture.inputs) if one.resized or storage_id(node.meta["val"]) in changed)
        return tuple(one for one in given if one.kind in ("parameter", "buffer", "external"))

    @functools.cached_property
    def changed_leaves(self) -> frozenset[int]:
        """The leaves of the batch that a step changes in place."""
        return frozenset(one.leaf for one in self.changed_inputs if one.kind == "batch")

    @functools.cached_property
    def host_bytes(self) -> int:
        """The approximate bytes of host memory of graph, program and constants."""
        return NODE_BYTES * len(self.capture.graph.nodes) + storage_bytes(self.capture.constants.values())

    def footprint(self) -> Footprint:
        """Return the step's memory by its graph: the lifetimes and sizes of its pieces, and the cost of each operation."""
        instructions = self.lowered.instructions
        followed = follow(self.capture.graph, instructions)
        return Footprint(
            tuple(followed.lives()),
            tuple(map(operation_cost, instructions)),
            self.predicted.persistent,
            self.predicted.batch,
            self.predicted.forward,
            tuple(map(line_of, instructions)),
        )

    def inexact(self) -> CapturedStep:
        """Return a form of the step that uses operations measured to be faster, which may round otherwise."""
        made = assemble(self.capture, self.predicted.name, self.keep, exact=False)
        made.exactly = self
        return made

    def plans(self, threads: int) -> StepPlans:
        """Return the plan for operations on ``threads`` threads, on whose number the temporaries of kernels depend."""
        with self._lock:
            if threads not in self._plans:
                self._plans[threads] = StepPlans(self)
            return self._plans[threads]


def build(
    spec: StepSpec,
    leaves: Sequence[Any],
    batch_spec: pytree.TreeSpec | None,
    fingerprint: Fingerprint | None = None,
    name: str = "step",
    unread: Collection[int] = (),
    beside: Beside = NOTHING,
) -> CapturedStep:
    """Capture, lower and plan one step; ``fingerprint`` is what its key was made from. Raises CaptureError as ``capture_step``."""
    redirect()  # before the trace, which replaces the same generators, and afterwards restores what it found
    with no_collections():
        capture = capture_step(spec, leaves, batch_spec, fingerprint, unread, beside)
        return owning(assemble(capture, name, fingerprint.keep if fingerprint is not None else []))


def owning(captured: CapturedStep) -> CapturedStep:
    """Return the step, whose graph is taken apart when it goes: no other has it."""
    # A graph's nodes refer to each other: the garbage collector would find them late, and only after a long search.
    weakref.finalize(captured, _take_apart, captured.capture.graph).atexit = False
    return captured


def _take_apart(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        node.meta.clear()
        graph.erase_node(node)
    vars(graph).clear()  # it keeps the names of nodes that were erased


def assemble(capture: Capture, name: str, keep: list[Any], exact: bool = True) -> CapturedStep:
    """Lower and plan a capture. Raises CaptureError if the step computes nothing, or cannot be lowered."""
    lowered = lower(capture, exact)
    memory = operation_memory(capture.graph, lowered.instructions)
    if not memory:
        raise CaptureError("the step computes nothing")
    persistent, batch = input_bytes(capture)
    phases = [node.meta.get("phase") for node in lowered.instructions]
    forward = next((i for i, phase in enumerate(phases) if phase != "forward"), len(phases))
    predicted = make_plan(name, memory, persistent=persistent, batch=batch, forward=forward)
    return CapturedStep(capture, lowered, memory, predicted, keep, exact)


def line_of(node: fx.Node) -> str:
    """Return the user's line of a node; if it has none, its module, or else its operator."""
    file, number, _ = node.meta.get("line", ("", 0, ""))
    return f"{file}:{number}" if file else node.meta.get("module") or f"{_short_name(node)}, {node.meta['phase']}"


def _short_name(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")


def input_bytes(capture: Capture) -> tuple[int, int]:
    """Return the bytes that persist and the bytes of one batch, each storage counted once.

    Tensors that the step reads and the model does not contain (a teacher, a data set) are not the job's own.
    """
    placeholders = [node for node in capture.graph.nodes if node.op == "placeholder"]
    persistent: dict[int, int] = {}
    batch: dict[int, int] = {}
    sums = 0
    for node, given in zip(placeholders, capture.inputs):
        value = node.meta["val"]
        storage = value.untyped_storage()
        if given.kind == "batch":
            batch[storage._cdata] = storage.nbytes()
        elif given.kind in ("parameter", "buffer", "accumulator") or (given.kind == "state" and node.users):
            persistent[storage._cdata] = storage.nbytes()
            sums += storage.nbytes() if given.kind == "accumulator" else 0
    return sum(persistent.values()) + capture.more_sums * sums, sum(batch.values())


def persistent_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of parameters, buffers and optimizer state, from the tensors themselves; for jobs without a capture."""
    state = (value for entries in optimizer.state.values() for value in entries.values())
    return storage_bytes([*model.parameters(), *model.buffers(), *state])


def storage_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of the storages of all tensors among ``values``, each storage counted once."""
    storages = {}
    for tensor in values:
        if isinstance(tensor, torch.Tensor):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse ones, and others without one storage
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class CaptureCache:
    """Captured steps by key, least recently used dropped first: at most ``size``, of at most ``most_bytes`` of host memory.

    A single one may be larger. Of those that were never found again, as in a search over architectures, at most ``most_new`` are kept
    (a segmented cache: Karedla, Love and Wherry 1994). Thread-safe; threads with equal keys wait for the first of them to capture.
    """

    def __init__(self, size: int = 256, most_bytes: int = 256 << 20, most_new: int = 96) -> None:
        self._size, self._most_bytes, self._most_new = size, most_bytes, most_new
        self._new: OrderedDict[tuple[Hashable, ...], None] = OrderedDict()  # keys that were not found again
        self.bytes = 0
        self._entries: OrderedDict[tuple[Hashable, ...], CapturedStep | CaptureError] = OrderedDict()
        self._kinds: Counter[Hashable] = Counter()  # of batches, the second part of keys
        self._hashes: set[int] = set()  # of keys
        self._lock = threading.Lock()
        self._building: dict[Hashable, threading.Event] = {}
        self.captures = 0
        self.hits = 0

    def get(self, key: tuple[Hashable, ...], make: Callable[[], CapturedStep]) -> CapturedStep:
        """Return the entry of ``key``, made by ``make`` if there is none. A lasting CaptureError is remembered and raised again."""
        while True:
            with self._lock:
                entry = self._entries.get(key)
                if entry is not None:
                    self._entries.move_to_end(key)
                    self._new.pop(key, None)
                    self.hits += 1
                    break
                waiting = self._building.get(key)
                if waiting is None:
                    self._building[key] = threading.Event()
            if waiting is None:
                entry = self._build(key, make)
                break
            waiting.wait()
        if isinstance(entry, CaptureError):
            raise copy.copy(entry)
        return entry

    def _build(self, key: tuple[Hashable, ...], make: Callable[[], CapturedStep]) -> CapturedStep | CaptureError:
        entry: CapturedStep | CaptureError | None = None
        try:
            try:
                entry = make()
            except (ChangesPackage, LeavesTensors, NewKind):
                raise  # not lasting: the next time the step's cache is filled, or there is time for the capture
            except CaptureError as error:
                entry = copy.copy(error)  # without its frames
            return entry
        finally:
            with self._lock:
                if entry is not None:
                    self._entries[key] = entry
                    self._new[key] = None
                    self._hashes.add(hash(key))
                    self._kinds[key[1]] += 1
                    self.captures += not isinstance(entry, LeafRead)  # such a trace is repeated with the leaf's value
                    self.bytes += getattr(entry, "host_bytes", 0)
                    while len(self._entries) > (self._size if self.bytes <= self._most_bytes else 1):
                        self._forget(next(iter(self._entries)))
                    if len(self._new) > self._most_new:
                        self._forget(next(iter(self._new)))
                self._building.pop(key).set()

    def know(self, kind: Hashable) -> bool:
        """Return True if any step has a capture for this kind of batch, so that this step's may be found without the budget."""
        return self._kinds[kind] > 0

    def have(self, kind: int) -> bool:
        """Return True if there is a capture whose key has this hash."""
        return kind in self._hashes

    def renew(self, key: tuple[Hashable, ...], old: CapturedStep, make: Callable[[], CapturedStep]) -> CapturedStep:
        """Return the entry of ``key``, made anew if it still is ``old``."""
        with self._lock:
            if self._entries.get(key) is old:
                self._forget(key)
        return self.get(key, make)

    def _forget(self, key: tuple[Hashable, ...]) -> None:
        self.bytes -= getattr(self._entries.pop(key), "host_bytes", 0)
        self._new.pop(key, None)
        self._hashes.discard(hash(key))
        self._kinds[key[1]] -= 1
        if not self._kinds[key[1]]:
            del self._kinds[key[1]]

    def clear(self) -> None:
        """Drop all entries; captures in use live on with their jobs."""
        with self._lock:
            self._entries.clear()
            for one in (self._kinds, self._hashes, self._new):
                one.clear()
            self.captures = self.hits = self.bytes = 0


captures = CaptureCache()
