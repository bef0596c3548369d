"""The engine of one device: lanes, the memory limit, and what each job may hold of it."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from numbers import Integral
from typing import Any, Literal

import torch

from waterflow import _C
from waterflow.errors import InvalidJobError, JobCancelled, MemoryLimitError
from waterflow.executor import cuda_lanes
from waterflow.executor.figures import EngineFigures
from waterflow.executor.fusing import fusing_of
from waterflow.executor.lanes_in_use import Decision, LanesInUse
from waterflow.executor.memory_limit import Claim, parse_memory, reserve_of
from waterflow.executor.switching import shorten_switches
from waterflow.executor.virtual_clock import VirtualClock
from waterflow.partition.plan import Plan, format_bytes

logger = logging.getLogger("waterflow")

Mode = Literal["auto", "lanes", "turns", "fused"]


class Engine:
    """Runs the steps of many jobs on one device under one memory limit.

    Thread-safe. ``memory`` bounds persistent state, steps and a reserve together; memory that libraries take for
    themselves (thread pools, workspaces inside oneDNN) is outside it.

    ``mode="auto"`` uses as many lanes as are measured to get the most work done, ``"lanes"`` all of them, ``"turns"`` one.
    With ``exact=False`` jobs that differ only in values may run as one batched step, and results then differ from those
    alone by rounding: with ``"auto"`` where that is measured to be faster, with ``"fused"`` wherever it can be done.
    ``decisions`` has what was tried, and what was kept.

    On a GPU the node groups of a step are captured as CUDA graphs and launched again, unless ``device_graphs=False`` or
    ``WATERFLOW_DEVICE_GRAPHS=0`` is set.

    For comparisons and tests: without ``arenas`` steps ask torch's own allocator for memory; with ``asynchronous``, the
    seed of random stalls, the CPU runs behind its host, as a GPU would: node groups are booked when they are issued, and
    run later. ``WATERFLOW_ASYNCHRONOUS`` in the environment sets it.
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",
        memory: int | float | str | None = None,
        lanes: int | None = None,
        intra_op: int = 1,
        reserve: int | None = None,
        exact: bool = True,
        mode: Mode = "auto",
        arenas: bool = True,
        asynchronous: int | None = None,
        device_graphs: bool = True,
    ) -> None:
        self.device = torch.device(device)
        if self.device.type not in ("cpu", "cuda"):
            raise InvalidJobError(
                f"device {str(self.device)!r} is not supported; waterflow trains on 'cpu' and 'cuda': pass device='cpu'"
            )
        for name, count in (("lanes", lanes), ("intra_op", intra_op)):
            if count is not None and (not isinstance(count, Integral) or count < 1):
                raise InvalidJobError(f"{name} must be a positive integer; got {count!r}")
        gpu = cuda_lanes.prepare(self.device) if self.device.type == "cuda" else None
        self.device = gpu.device if gpu is not None else self.device
        self.limit = parse_memory(memory, gpu.free if gpu is not None else None)
        self.reserve = reserve_of(self.limit) if reserve is None else reserve
        self.intra_op = intra_op
        default_lanes = cuda_lanes.DEFAULT_LANES if gpu is not None else max(1, (os.cpu_count() or 1) // intra_op)
        self.lanes = lanes if lanes is not None else default_lanes
        if asynchronous is None and os.environ.get("WATERFLOW_ASYNCHRONOUS"):
            asynchronous = int(os.environ["WATERFLOW_ASYNCHRONOUS"])
        graphs = self.reserve // 4 if device_graphs and os.environ.get("WATERFLOW_DEVICE_GRAPHS") != "0" else 0
        settings = {"lanes": self.lanes, "intra_op": intra_op, "capacity": self.room, "behind": asynchronous,
                    "graphs": graphs}  # fmt: skip
        if gpu is not None:
            settings |= {"behind": None, **cuda_lanes.native_settings(gpu, self.lanes, self.limit)}
            arenas = arenas and gpu.planned
        self.native = _native(settings, arenas)
        self._claims: dict[int, Claim] = {}
        # Entered directly: an exception from outside (Ctrl-C, breaking off) may strike inside of Condition.__enter__, which
        # is Python code, and would leave the lock behind.
        self._guard = threading.RLock()
        self._changed = threading.Condition(self._guard)
        self._waiting: dict[int, tuple[int, int, int]] = {}  # by owner: the job, and the bytes and height it wants
        self._asked: dict[int, tuple[int, int]] = {}  # by worker: the most bytes and height it claimed, or wanted
        self._looks = 0
        self._eager = threading.Lock()
        self._closed = False
        self.exact = exact
        self.fusing = fusing_of(self, exact, mode)
        self.clock: VirtualClock | None = None  # set where the order of events must not follow the wall clock
        shorten_switches(+1)
        self.started_ns = _C.Engine.now_ns()
        self.decisions: list[Decision] = []
        self._lanes_in_use: LanesInUse | None = None
        if mode == "turns":
            self.native.set_active_lanes(1)
        elif mode == "auto" and self.lanes > 1:
            self._lanes_in_use = LanesInUse(self.native, self.decisions)
        self.names: dict[int, str] = {}
        self.persistent_log: list[tuple[int, int, str, int]] = []

    @property
    def room(self) -> int:
        """Bytes for jobs: the limit without the reserve."""
        return self.limit - self.reserve

    # -- jobs

    def add_job(self, name: str) -> int:
        """Make room in the book for a job; returns its number in this engine."""
        job = int(self.native.add_job())
        self.names[job] = name
        return job

    def remove_job(self, job: int) -> None:
        """Cancel what the job has queued and give back all that it claimed.

        Inside of a step that this engine runs it does not wait for the job's own step to reach its next group boundary.
        """
        with contextlib.suppress(ValueError):
            self.native.remove_job(job)
        self._tell_refusals()
        self.release(job)

    def submit(self, job: int, run: _C.StepRun, plan: Plan, before: _C.StepRun | None) -> None:
        """Queue a step behind ``before``, the job's last. Raises JobCancelled, or MemoryLimitError if it never fits."""
        try:
            self.native.submit(job, run, before)
        except _C.Cancelled as error:
            raise JobCancelled(f"step {self.names[job]!r}: {error}") from None
        except ValueError as error:
            raise self.too_large(plan, plan.persistent + plan.batch) from error

    def claim(self, job: int, plan: Plan, *, batches: int = 1, patient: bool = True) -> None:
        """Claim what persists for ``job`` before its first step; wait for others to leave where it does not fit.

        What is left must hold the largest step of any job that has a claim. Raises MemoryLimitError when the job
        does not fit into an empty device, or when everyone who holds memory waits for more; at once if not ``patient``.
        """
        wanted = plan.persistent + plan.batch * batches
        mine = self._claims.get(job)
        if mine is not None and wanted <= mine.bytes and plan.height <= mine.height:
            return
        if wanted + plan.height > self.room:
            raise self.too_large(plan, wanted)
        owner = threading.get_ident()
        self._note(job, wanted, plan.height)
        try:
            while True:
                with self._turn(), self._guard:
                    while self._looks and not self._closed:
                        self._changed.wait(timeout=0.1)
                    if self._closed:
                        raise JobCancelled("the engine was closed while a job waited for memory")
                    if self._fits(job, wanted, plan.height):
                        self._claims[job] = Claim(plan.name, owner, current_worker(), wanted, plan.height)
                        self._set_capacity()
                        # Steps under way may still stand on this ground; they finish, and none starts before.
                        while self.native.capacity > self._capacity() and not self._closed:
                            self._changed.wait(timeout=0.001)
                        self._book(job, plan.name, wanted)
                        return
                    self._waiting[owner] = (job, wanted, plan.height)
                    if not patient or self._nobody_goes_on(job):
                        raise self._stuck(job, plan, wanted)
                    worker = current_worker()
                    if self.clock is None or worker is None or not self.clock.suspend(worker):
                        self._changed.wait(timeout=0.1)  # Ctrl-C reaches it in between
        finally:
            with self._guard:
                self._waiting.pop(owner, None)

    @contextlib.contextmanager
    def looking(self) -> Iterator[int]:
        """For a step whose height is not known: what steps can have at most. Inside, nobody's claim lessens it."""
        with self._guard:
            self._looks += 1
            capacity = self._capacity()
        try:
            yield capacity
        finally:
            with self._guard:
                self._looks -= 1
                self._changed.notify_all()

    def _turn(self) -> contextlib.AbstractContextManager[None]:
        """Under a virtual clock memory changes hands in its order."""
        worker = current_worker()
        # Inside of a step a job may be collected; those whose turn it is may wait for this lane.
        if self.clock is None or worker is None or self.native.on_a_lane:
            return contextlib.nullcontext()
        return self.clock.turn(worker)

    def _nobody_goes_on(self, job: int) -> bool:
        """Whether everyone who holds memory beside ``job`` waits, and for more than there is."""
        holders = {c.owner for j, c in self._claims.items() if j != job}
        return holders <= self._waiting.keys() and not any(self._fits(*wish) for wish in self._waiting.values())

    def _stuck(self, job: int, plan: Plan, wanted: int) -> MemoryLimitError:
        return MemoryLimitError(
            f"job {plan.name!r} needs {format_bytes(wanted)} for its state beside steps of "
            f"{format_bytes(self._largest(job, plan.height))}, and everyone who holds memory of the "
            f"{format_bytes(self.limit)} waits for more. Train fewer jobs at once or raise memory=.",
            needed=wanted + plan.height, limit=self.limit,
        )  # fmt: skip

    def _note(self, job: int, wanted: int, height: int) -> None:
        if (worker := current_worker()) is None:
            return
        with self._guard:
            held = wanted + sum(c.bytes for j, c in self._claims.items() if j != job and c.worker == worker)
            before = self._asked.get(worker, (0, 0))
            self._asked[worker] = max(before[0], held), max(before[1], height)

    def needs(self, worker: int) -> tuple[int, int] | None:
        """The most that a worker's jobs held together, or wait to hold, and their largest height; None before a claim."""
        return self._asked.get(worker)

    def waits(self, thread: int | None) -> bool:
        """Whether a thread waits for memory that others hold."""
        return thread in self._waiting

    def would_fit(self, plan: Plan) -> bool:
        """Whether a further job with this plan could claim its memory now."""
        with self._guard:
            return self._fits(-1, plan.persistent + plan.batch, plan.height)

    def release(self, job: int) -> None:
        """Give back what a job claimed."""
        with self._turn(), self._guard:
            claim = self._claims.pop(job, None)
            if claim is not None:
                self._book(job, claim.name, 0)
                if not self._claims:  # pages that nobody uses go back to the system
                    self.native.set_capacity(0)
                self._set_capacity()
            self._changed.notify_all()

    def claimed(self) -> int:
        """Bytes that persist for the jobs now in the engine."""
        with self._guard:
            return sum(claim.bytes for claim in self._claims.values())

    def too_large(
        self, plan: Plan, wanted: int, largest_batch: int | None = None, told: str = ". Lower the batch size or raise memory=.",
    ) -> MemoryLimitError:  # fmt: skip
        """The error for a job that does not fit even alone, with what is ``told`` of it."""
        return MemoryLimitError(
            f"job {plan.name!r} does not fit: its state and batch take {format_bytes(wanted)} and its step reaches "
            f"{format_bytes(plan.height)} above them; the limit of {format_bytes(self.limit)} leaves "
            f"{format_bytes(self.room)} (the rest is the reserve){told}",
            needed=wanted + plan.height, limit=self.limit, largest_batch=largest_batch,
        )  # fmt: skip

    def _fits(self, job: int, wanted: int, height: int) -> bool:
        others = sum(c.bytes for j, c in self._claims.items() if j != job)
        return others + wanted + self._largest(job, height) <= self.room

    def _largest(self, job: int, height: int) -> int:
        return max([height, *(c.height for j, c in self._claims.items() if j != job)])

    def _set_capacity(self) -> None:
        self.native.set_capacity(self._capacity())

    def _capacity(self) -> int:
        return self.room - sum(c.bytes for c in self._claims.values())

    def _book(self, job: int, name: str, count: int) -> None:
        self.persistent_log.append((_C.Engine.now_ns(), job, name, count))

    def figures(self) -> EngineFigures:
        """What the lanes have done so far."""
        busy = [ns * 1e-9 for ns in self.native.lane_busy_ns]
        self._tell_refusals()
        return EngineFigures(
            steps=self.native.steps_done,
            groups=self.native.groups_done,
            busy_seconds=sum(busy),
            busy_by_lane=tuple(busy),
            scheduling_seconds=self.native.scheduling_ns * 1e-9,
            peak_held=self.native.peak_held,
            graphs=self.native.graphs,
        )

    def look(self) -> None:
        """Look at how the lanes do, where it is time to; a step has ended."""
        in_use = self._lanes_in_use
        if in_use is not None and in_use.now() >= in_use.next_look:
            in_use.look(len(self._claims))

    def _tell_refusals(self) -> None:
        for job, why in self.native.take_graph_refusals():
            logger.info("steps of job %r run without device graphs: %s", self.names.get(job, job), why)

    # -- work that is not captured

    def refuse_inside(self, what: str) -> None:
        """Raise InvalidJobError where the calling thread runs a step of this engine; ``what`` would be another."""
        if self.native.on_a_lane:
            raise InvalidJobError(
                f"{what} cannot run inside of a step of its own engine: it would wait for the lane and the memory that "
                "this one holds; call it before or after that step, or make it outside of the engine"
            )

    def run_eager(self, job: int, work: Callable[[], Any], plan: _C.GroupPlan | None) -> tuple[Any, int]:
        """Run ``work`` on a lane as one group; returns its result and its measured height in bytes.

        Without a plan the height is not known yet: it then runs in the reserve, one at a time.
        """
        self.refuse_inside(f"eager work of job {self.names[job]!r}")
        box: list[Any] = []

        def task() -> None:
            box.append(_C.metered(work, self.device.type == "cuda"))

        with contextlib.nullcontext() if plan is not None else self._eager:
            run = _C.opaque_run(plan or _C.GroupPlan(ends=[1], peak=[0], after=[0]), task)
            self.native.submit(job, run)
            self.native.wait(run)
            run.outputs()
        result, height = box[0]
        return result, height

    def over(self) -> bool:
        """Whether it has been closed."""
        return self._closed

    def close(self) -> None:
        """End the lanes. Steps that are queued fail; nothing waits for ever.

        Raises RuntimeError inside of a step that this engine runs.
        """
        if self.native.on_a_lane:
            raise RuntimeError(
                "an engine cannot be closed inside of a step that it runs, because it would wait for the end of "
                "that step; close it after the step"
            )
        with self._guard:
            if self._closed:
                return
            self._closed = True
            self._claims.clear()
            shorten_switches(-1)
            self._changed.notify_all()
        self.native.close()
        self._tell_refusals()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _native(settings: dict[str, Any], arenas: bool) -> _C.Engine:
    try:
        return _C.Engine(**settings, arenas=arenas)
    except RuntimeError as error:
        logger.warning("memory of steps is not planned, but left to torch's own allocator: %s", error)
        return _C.Engine(**settings, arenas=False)


_local = threading.local()


def current_engine() -> Engine | None:
    """The engine that work of the calling thread belongs to; None outside of any."""
    return getattr(_local, "engine", None)


@contextlib.contextmanager
def within(engine: Engine, worker: int | None = None) -> Iterator[None]:
    """Steps that the calling thread makes inside belong to ``engine``, and to its clock as ``worker``."""
    before = current_engine(), current_worker()
    _local.engine, _local.worker = engine, worker
    try:
        yield
    finally:
        _local.engine, _local.worker = before


def current_worker() -> int | None:
    """The number under which the calling thread's work is known to its engine's virtual clock."""
    return getattr(_local, "worker", None)


def current_device() -> torch.device:
    """The device of the engine that the calling thread belongs to; ``cpu`` outside of any."""
    engine = current_engine()
    return engine.device if engine is not None else torch.device("cpu")
