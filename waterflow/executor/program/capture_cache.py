"""What audits have found: which captured steps they have looked at, and code whose captures have ended in this process."""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from waterflow import _C
from waterflow.errors import CaptureError
from waterflow.executor.program.lowering import Lowered, lower
from waterflow.executor.rng import redirect
from waterflow.executor.stats import Account
from waterflow.partition.capture.leaks import LeavesTensors
from waterflow.partition.capture.spec import GraphInput, StepSpec
from waterflow.partition.capture.substitution import no_collections
from waterflow.partition.capture.trace import Capture, capture_step
from waterflow.partition.guards.batch_reads import LeafRead
from waterflow.partition.guards.cache_key import Fingerprint
from waterflow.partition.passes.offload import Offloaded
from waterflow.partition.passes.operators import running_statistics, storage_id, written_by
from waterflow.partition.passes.rematerialize import Recomputed
from waterflow.partition.plan.costs import operation_cost
from waterflow.partition.plan.liveness import OperationMemory, follow, operation_memory
from waterflow.partition.plan.offsets import Footprint
from waterflow.partition.plan.plan import Plan, make_plan
from waterflow.partition.plan.profile import StepProfile


@dataclass(eq=False)
class Code:
    """Steps of one structure, whatever their batches. ``fault`` tells how their captured form differed from the eager one."""

    fault: str = ""
    told: set[str] = field(default_factory=set)  # why audits of it proved nothing

    def check(self) -> None:
        """Raise Faulty where captured steps of this code are not to run any more."""
        if self.fault:
            raise Faulty(self)


class Faulty(CaptureError):
    """The code's captured steps have differed from its eager ones."""

    def __init__(self, code: Code) -> None:
        self.code = code
        super().__init__(f"an audit found that the captured step is not the eager one: {code.fault}")


class _Codes:
    """Codes by structure, as long as somebody has them; those with a fault stay. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._codes: weakref.WeakValueDictionary[Hashable, Code] = weakref.WeakValueDictionary()
        self._faulty: list[Code] = []

    def of(self, structure: Hashable) -> Code:
        """The one code of this structure."""
        with self._lock:
            code = self._codes.get(structure)
            if code is None:
                code = self._codes[structure] = Code()
            return code

    def end(self, code: Code, fault: str) -> bool:
        """From now on steps of this code run eagerly; whether nobody has said so before."""
        with self._lock:
            if code.fault:
                return False
            code.fault = fault
            self._faulty.append(code)
            return True


codes = _Codes()


@dataclass(eq=False)
class Audited:
    """The audits of one captured step, which jobs share: its first step, and one at a later place of a job."""

    later: int = 0  # a job's step; 0 before the first audit, -1 behind the second one
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def begins(self) -> bool:
        """Whether nobody has begun the first audit; the caller then does."""
        with self._lock:
            if self.later:
                return False
            self.later = 1 << 62
            return True

    def ends(self, step: int) -> bool:
        """Whether a job's step is at the later place, or behind it, and nobody has begun that audit; the caller then does."""
        with self._lock:
            if not 0 < self.later <= step:
                return False
            self.later = -1
            return True


FREE_CAPTURES = 8
MOST_OF_TIME = 0.1
KINDS_REMEMBERED = 10_000
STEPS_PER_CAPTURE = 400  # where no clock may decide, as in deterministic studies; a capture takes some 40 to 110 steps


class NewKind(CaptureError):
    """A batch of a kind that is not captured now, for captures have taken their share. Other kinds stay captured."""


class CaptureBudget:
    """The captures of one job: the first eight, and then those of kinds that come back, a tenth of its time at most.

    ``steps`` counts the job's steps, which stand for its time in deterministic studies, where all that counts is the job's own:
    kinds, also where another job has made the capture. None elsewhere. Time goes to ``account``.
    """

    def __init__(self, steps: Callable[[], int] | None = None, now: Callable[[], float] = time.monotonic) -> None:
        self.own = steps is not None
        self.account = Account("")
        self._steps, self._now = steps, now
        self._began = now()
        self._made = 0
        self._last: dict[str, str] = {}
        self._seen: dict[int, None] = {}  # hashes of kinds that are not captured

    @contextlib.contextmanager
    def spending(self) -> Iterator[None]:
        """A capture is made within."""
        before = self._now()
        try:
            yield
            self._made += not self.own
        finally:
            self.account["capturing"] += self._now() - before

    def add_kind(self) -> None:
        """Batches of one more kind are captured."""
        self._made += self.own

    def check(self, kind: Hashable, batch: Callable[[], Any]) -> None:
        """Raise NewKind where a batch of a new kind is not to be captured now. It has None for leaves that are no part of its kind."""
        if self._made < FREE_CAPTURES:
            self._last = described(batch())
            return
        if hash(kind) not in self._seen:
            self._seen[hash(kind)] = None
            if len(self._seen) > KINDS_REMEMBERED:
                del self._seen[next(iter(self._seen))]
            allowed = False
        elif self._steps is not None:
            allowed = self._made < FREE_CAPTURES + self._steps() // STEPS_PER_CAPTURE
        else:
            spent = self.account["capturing"]
            allowed = spent + spent / self._made <= MOST_OF_TIME * (self._now() - self._began)
        if not allowed:
            raise NewKind(self._why(batch))

    def _why(self, batch: Callable[[], Any]) -> str:
        if not self._last:
            return ""  # said before
        now, before, self._last = described(batch()), self._last, {}
        changed = next((path for path in now if before.get(path, now[path]) != now[path]), None)
        if changed is None:
            return "each would be captured anew"
        number = "make a number that the step reads a tensor, as torch.tensor(x) does"
        never = "pad batches to a few sizes" if "shape" in now[changed] else number
        return (
            f"batch{changed} was {before[changed]} and is {now[changed]}, and a capture takes longer than a step. Kinds that come "
            f"back are captured by and by; for those that never do, {never}"
        )


def described(batch: Any) -> dict[str, str]:
    """What tells kinds of batches apart, by the path of each leaf."""
    return {pytree.keystr(path): _one(leaf) for path, leaf in pytree.tree_flatten_with_path(batch)[0]}


def _one(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"of shape {tuple(leaf.shape)}"
    text = repr(leaf)
    return text if len(text) <= 40 else text[:37] + "..."


# A step whose requests differ from time to time is planned by the highest of this many.
MOST_PROFILES = 4
# After this many steps in a row with requests that were not planned a step is profiled anew, this often at most.
MOST_MISSES = 4
MOST_PROFILED_AGAIN = 3
NODE_BYTES = 3 << 10  # what a capture holds in host memory for each node, as measured: docs/experiments/capture.md


class PlannedStep:
    """The plan of a captured step on lanes with a given number of intra-op threads; improves by profiles.

    Thread-safe: several jobs may bring profiles at once.
    """

    def __init__(self, captured: CapturedStep) -> None:
        self.captured = captured
        self._lock = threading.Lock()
        self._profiles: list[StepProfile] = []
        self.plan = captured.predicted
        self.native = _native(self.plan)
        self.wants_profile = True
        self.measured_height = 0
        self._missed = 0  # steps in a row that did not ask as planned
        self._again = 0

    def graph_height(self, height: int) -> int:
        """What the graph may have for the step to be ``height`` high: what profiles have shown to come on top of it counts."""
        return height - max(0, self.plan.height - self.captured.predicted.height)

    def add_profile(self, profile: StepProfile) -> None:
        """Take in the record of one profiled step. Two consecutive equal ones, or several unequal, make the plan.

        Only equal ones give memory its places: a step that asks differently from time to time has none that hold.
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
                memory = [
                    OperationMemory(max(m.peak for m in c), max(m.after for m in c), c[0].traffic) for c in columns
                ]
            predicted = self.captured.predicted
            self.plan = make_plan(
                predicted.name, memory, persistent=predicted.persistent, batch=predicted.batch, seconds=seconds,
                requests=requests, forward=predicted.forward, offloaded=predicted.offloaded,
            )  # fmt: skip
            self.native = _native(self.plan)
            self.measured_height = self.plan.height
            self.wants_profile = False
            self._profiles.clear()

    def count_misses(self, missed: int) -> None:
        """A step made ``missed`` requests otherwise than planned. Where that goes on, the step is profiled again."""
        with self._lock:
            self._missed = self._missed + 1 if missed else 0
            if self._missed >= MOST_MISSES and self._again < MOST_PROFILED_AGAIN:
                self._again += 1
                self._missed = 0
                self.wants_profile = True


def _native(plan: Plan) -> _C.GroupPlan:
    return _C.GroupPlan(
        ends=[g.end for g in plan.groups],
        peak=[g.peak for g in plan.groups],
        after=[g.after for g in plan.groups],
        expected_ns=int(plan.seconds * 1e9),
        requests=plan.requests.native() if plan.requests is not None else None,
    )


@dataclass
class CapturedStep:
    """A capture with its program and its predicted plan, shared by all jobs whose key is equal."""

    capture: Capture
    lowered: Lowered
    memory: list[OperationMemory]
    predicted: Plan
    keep: list[Any]  # what the key counts by identity
    exact: bool = True  # the bits of the captured operations
    recomputed: Recomputed | None = None  # what it makes again in its backward pass
    offloaded: Offloaded | None = None  # what it holds in host memory from its forward to its backward pass
    layouts_hold: bool = False  # kernels were asked, and return the layouts that the capture says
    exactly: CapturedStep | None = (
        None  # the same with the bits of the captured operations, where this one rounds otherwise
    )
    audited: Audited = field(default_factory=Audited)
    _planned: dict[int, PlannedStep] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @functools.cached_property
    def written_buffers(self) -> tuple[str, ...]:
        """The model's buffers that a step changes."""
        given = self.capture.inputs
        return tuple(given[slot].name for slot in self.lowered.written if given[slot].kind == "buffer")

    @functools.cached_property
    def changed_inputs(self) -> tuple[GraphInput, ...]:
        """What a step changes in place, through views, too."""
        changed = {
            storage_id(source.meta["val"])
            for node in self.capture.graph.nodes
            for source in (*written_by(node), *running_statistics(node))
        }
        given = zip(self.capture.graph.nodes, self.capture.inputs)  # placeholders come first
        return tuple(one for node, one in given if storage_id(node.meta["val"]) in changed)

    @functools.cached_property
    def changed_leaves(self) -> frozenset[int]:
        """The leaves of the batch that a step changes in place."""
        return frozenset(one.leaf for one in self.changed_inputs if one.kind == "batch")

    @functools.cached_property
    def host_bytes(self) -> int:
        """About what graph, program and constants hold in host memory."""
        return NODE_BYTES * len(self.capture.graph.nodes) + storage_bytes(self.capture.constants.values())

    def footprint(self) -> Footprint:
        """What the step asks of memory, as far as the graph knows it."""
        instructions = self.lowered.instructions
        followed = follow(self.capture.graph, instructions)
        return Footprint(
            tuple(followed.lives()), tuple(map(operation_cost, instructions)), self.predicted.persistent,
            self.predicted.batch, self.predicted.forward, tuple(map(line_of, instructions)),
        )  # fmt: skip

    def inexact(self) -> CapturedStep:
        """The same by operations that are measured to be faster, and may round otherwise."""
        made = assemble(self.capture, self.predicted.name, self.keep, exact=False)
        made.exactly = self
        return made

    def planned(self, threads: int) -> PlannedStep:
        """The plan for operations on ``threads`` threads: kernels' temporaries depend on their number."""
        with self._lock:
            if threads not in self._planned:
                self._planned[threads] = PlannedStep(self)
            return self._planned[threads]


def build(
    spec: StepSpec, leaves: Sequence[Any], batch_spec: pytree.TreeSpec | None, fingerprint: Fingerprint | None = None,
    name: str = "step", unread: Collection[int] = (),
) -> CapturedStep:  # fmt: skip
    """Capture, lower and plan one step; ``fingerprint`` is what its key was made from. Raises CaptureError as ``capture_step``."""
    redirect()  # a trace puts stand-ins in the same places, and what was there back
    with no_collections():
        capture = capture_step(spec, leaves, batch_spec, fingerprint, unread)
        return assemble(capture, name, fingerprint.keep if fingerprint is not None else [])


def assemble(capture: Capture, name: str, keep: list[Any], exact: bool = True) -> CapturedStep:
    """Lower and plan a capture. Raises CaptureError."""
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
    """The user's line; the module, or else the operator, of a node that has none."""
    file, number, _ = node.meta.get("line", ("", 0, ""))
    return f"{file}:{number}" if file else node.meta.get("module") or f"{_short_name(node)}, {node.meta['phase']}"


def _short_name(node: fx.Node) -> str:
    return str(node.target).removesuffix(".default")


def input_bytes(capture: Capture) -> tuple[int, int]:
    """Bytes of what persists and of one batch, each storage once.

    Tensors that the step reads and the model does not hold (a teacher, a data set) are not the job's own.
    """
    placeholders = [node for node in capture.graph.nodes if node.op == "placeholder"]
    persistent: dict[int, int] = {}
    batch: dict[int, int] = {}
    for node, given in zip(placeholders, capture.inputs):
        value = node.meta["val"]
        storage = value.untyped_storage()
        if given.kind == "batch":
            batch[storage._cdata] = storage.nbytes()
        elif given.kind in ("parameter", "buffer", "accumulator") or (given.kind == "state" and node.users):
            persistent[storage._cdata] = storage.nbytes()
    return sum(persistent.values()), sum(batch.values())


def persistent_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """What persists of a job that is not captured, from the tensors themselves."""
    state = (value for entries in optimizer.state.values() for value in entries.values())
    return storage_bytes([*model.parameters(), *model.buffers(), *state])


def storage_bytes(values: Iterable[Any]) -> int:
    """Bytes behind those of ``values`` that are tensors, each storage once."""
    storages = {}
    for tensor in values:
        if isinstance(tensor, torch.Tensor):
            with contextlib.suppress(RuntimeError, NotImplementedError):  # sparse ones, and others without one storage
                storage = tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


class CaptureCache:
    """Captures by key: ``size`` at most, of ``most_bytes`` of host memory together, or a single one; least recently used go first.

    Thread-safe; equal keys wait for the one that captures first.
    """

    def __init__(self, size: int = 256, most_bytes: int = 256 << 20) -> None:
        self._size, self._most_bytes = size, most_bytes
        self.bytes = 0
        self._entries: OrderedDict[tuple[Hashable, ...], CapturedStep | CaptureError] = OrderedDict()
        self._kinds: Counter[Hashable] = Counter()  # of batches, the second part of keys
        self._lock = threading.Lock()
        self._building: dict[Hashable, threading.Event] = {}
        self.captures = 0
        self.hits = 0

    def get(self, key: tuple[Hashable, ...], make: Callable[[], CapturedStep]) -> CapturedStep:
        """The entry of ``key``, built by ``make`` if there is none. A CaptureError that is lasting is remembered, too."""
        while True:
            with self._lock:
                entry = self._entries.get(key)
                if entry is not None:
                    self._entries.move_to_end(key)
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
            except (LeavesTensors, NewKind):
                raise  # the next time may be another: what it fills is filled, or there is time for it
            except CaptureError as error:
                entry = copy.copy(error)  # without its frames
            return entry
        finally:
            with self._lock:
                if entry is not None:
                    self._entries[key] = entry
                    self._kinds[key[1]] += 1
                    self.captures += not isinstance(entry, LeafRead)  # but those behind which another comes
                    self.bytes += getattr(entry, "host_bytes", 0)
                    while len(self._entries) > (self._size if self.bytes <= self._most_bytes else 1):
                        self._forget(next(iter(self._entries)))
                self._building.pop(key).set()

    def know(self, kind: Hashable) -> bool:
        """Whether some step has a capture for batches of this kind: then it is worth while to look for one's own."""
        return self._kinds[kind] > 0

    def renew(self, key: tuple[Hashable, ...], old: CapturedStep, make: Callable[[], CapturedStep]) -> CapturedStep:
        """The entry of ``key`` built anew, unless it is another than ``old`` already."""
        with self._lock:
            if self._entries.get(key) is old:
                self._forget(key)
        return self.get(key, make)

    def _forget(self, key: tuple[Hashable, ...]) -> None:
        self.bytes -= getattr(self._entries.pop(key), "host_bytes", 0)
        self._kinds[key[1]] -= 1
        if not self._kinds[key[1]]:
            del self._kinds[key[1]]

    def clear(self) -> None:
        """Forget everything; captures in use live on with their jobs."""
        with self._lock:
            self._entries.clear()
            self._kinds.clear()
            self.captures = self.hits = self.bytes = 0


captures = CaptureCache()
