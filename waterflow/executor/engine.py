"""The engine: admits the steps of many jobs to one device under one memory limit, and runs them on lanes."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from multiprocessing import popen_fork
from numbers import Integral
from typing import Any, Protocol, get_args

import torch

from waterflow import _C
from waterflow.allocator import cuda
from waterflow.errors import InvalidJobError, JobCancelled, explained
from waterflow.executor.cancel import LentLane, Turn, has_limit, time_does_not_count
from waterflow.executor.cores import MOST_THREADS, lanes_of, usable_cores
from waterflow.executor.interference import InterferenceController, Starvation
from waterflow.executor.memory_limit import free_memory, more_than_free, parse_limit, parse_memory, parse_quota, reserve_of
from waterflow.executor.policy import ResourcePolicy
from waterflow.executor.program.capture_budget import TrialLengths
from waterflow.executor.reservations import Reservations, too_large
from waterflow.executor.stats import Account, EngineStats
from waterflow.executor.tuning import WINDOW_SECONDS, Decision, InPython, LanesInUse
from waterflow.executor.virtual_clock import current_worker as current_worker, here as here
from waterflow.partition.plan.plan import Plan
from waterflow.units import Mode, Priority, check_device, check_priority

logger = logging.getLogger("waterflow")

_open_engines = 0
_open_lock = threading.Lock()
_interval_before = 0.0
# Threads that feed lanes hand the interpreter over often: at Python's 5 ms a lane of short steps would run dry.
SWITCH_SECONDS = 1e-3


def shorten_switches(change: int) -> None:
    """Count an engine that opens (+1) or closes (-1); while any is open, threads hand the interpreter over more often."""
    global _open_engines, _interval_before
    with _open_lock:
        if _open_engines == 0 and change > 0:
            _interval_before = sys.getswitchinterval()
            sys.setswitchinterval(min(SWITCH_SECONDS, _interval_before))
        _open_engines += change
        if _open_engines == 0:
            sys.setswitchinterval(_interval_before)


_one_at_a_time = threading.RLock()
_launch = popen_fork.Popen._launch  # type: ignore[attr-defined]


def fork_in_turns() -> None:
    """Make the threads of this process fork multiprocessing's processes one at a time, from now on."""
    # A parent sees the end of a child by a pipe whose other end only the child should have. A second child that another thread
    # forks before the parent has closed that end inherits it, and joining the first child then waits for both: torch's loaders
    # wait their whole limit, 5 seconds for each worker.
    if popen_fork.Popen._launch is _launch:  # type: ignore[attr-defined]
        popen_fork.Popen._launch = _launch_alone  # type: ignore[attr-defined]


def _launch_alone(process: Any, target: Any) -> None:
    with _one_at_a_time:
        _launch(process, target)


if hasattr(os, "register_at_fork"):  # a child has one thread, and would inherit the lock as taken
    os.register_at_fork(after_in_child=_one_at_a_time._at_fork_reinit)  # type: ignore[attr-defined]


class HasJob(Protocol):
    """The part of a Step that its engine uses."""

    job: int | None
    engine: Any


class OneAudit(Protocol):
    """An audit of one step that needs ``bytes`` of memory. ``done`` is the captured run if the step stays done."""

    bytes: int
    done: _C.StepRun | None

    def difference(self) -> Any:
        """Return the difference between the captured and the eager step, or None."""


class EagerWork:
    """Work of a job that is not captured. The thread that makes this object does it, in the place of a lane, with ``do()``.

    So the user's code finds its thread-locals and context variables, as in a loop by hand. Threads of jobs and trials have as many
    intra-op threads as a lane; where a thread has another number the lane does the work, as to change it takes milliseconds.
    """

    def __init__(self, engine: Engine, job: int, height: int, work: Callable[[], object]) -> None:
        self._engine = engine
        self._lent = LentLane(work, engine.lent_to) if engine.lends_lanes(job) else None
        self.run = _C.opaque_run(height, self._lent or work)
        as_a_lane = engine.device.type != "cpu" or torch.get_num_threads() == engine.threads_per_lane
        self.run.by_caller = self._lent is None and as_a_lane

    def do(self) -> None:
        """Do the work when ``run``, which was submitted, has its turn; return at its end. Raises nothing of the work's."""
        if self._lent is not None:
            with self._engine.threads_of_a_lane():
                self._lent.use(self.run)
        self._engine.native.wait(self.run)


MOST_AUDITS = 100_000
MOST_ACCOUNTS = 64  # the newest, which are looked at while jobs run; those of jobs that have ended change no more


class Engine:
    """Runs the steps of many jobs on one device under one memory limit.

    Thread-safe. ``memory`` (bytes, text like "4GiB", or a share of what is free) bounds persistent state, steps and a reserve
    together; memory that libraries take for themselves (thread pools, workspaces inside oneDNN) is outside it.

    ``mode="auto"`` uses as many lanes as are measured to get the most work done, ``"lanes"`` all of them, ``"turns"`` one;
    ``decisions`` lists what was tried and what was kept. With ``exact=False`` operations may run in other kernels where those
    are measured to be faster, large matrix products in oneDNN; results then differ by rounding.

    With a ``quantum`` in seconds, jobs that do not all fit take turns: a job that has waited so long is given the memory of
    jobs that have had theirs for so long. Those continue later with the same bits. Without it a job keeps its memory to its end.

    On a GPU the node groups of a step are captured as CUDA graphs and launched again, unless ``device_graphs=False`` or
    ``WATERFLOW_DEVICE_GRAPHS=0`` is set.

    For comparisons and tests: without ``arenas`` steps ask torch's own allocator for memory; with ``asynchronous``, the
    seed of random stalls, the CPU runs later than its host, as a GPU does: node groups are booked when they are issued, and
    run later. The environment variable ``WATERFLOW_ASYNCHRONOUS`` sets it, too.

    Raises InvalidJobError for a setting that is not valid.
    """

    @explained("Engine", 'Engine("cpu", memory="4GiB")', InvalidJobError)
    def __init__(
        self,
        device: str | torch.device = "cpu",
        memory: int | float | str | None = None,
        lanes: int | None = None,
        threads_per_lane: int = 1,
        reserve: int | None = None,
        exact: bool = True,
        mode: Mode = "auto",
        arenas: bool = True,
        asynchronous: int | None = None,
        device_graphs: bool = True,
        quantum: float | None = None,
    ) -> None:
        fork_in_turns()
        check_device(device)
        self.device = torch.device(device)
        if not isinstance(exact, bool):
            raise InvalidJobError(f"exact must be True or False; got {exact!r}")
        if mode not in get_args(Mode):
            raise InvalidJobError(f"mode is 'auto', 'lanes' or 'turns'; got {mode!r}")
        self.exact = exact
        for name, count in (("lanes", lanes), ("threads_per_lane", threads_per_lane)):
            if count is not None and (not isinstance(count, Integral) or count < 1):
                raise InvalidJobError(f"{name} must be a positive integer; got {count!r}")
            if count is not None and count > MOST_THREADS:
                raise InvalidJobError(
                    f"{name} is at most {MOST_THREADS}; got {count!r}. As many lanes, or threads for one, as there are cores "
                    f"({usable_cores()} here) get the most work done"
                )
        gpu = cuda.prepare(self.device) if self.device.type == "cuda" else None
        self.device = gpu.device if gpu is not None else self.device
        free = gpu.free if gpu is not None else free_memory()
        limit = (parse_limit if reserve is None else parse_memory)(memory, free)
        if (warning := more_than_free(memory, limit, free)) is not None:
            logger.warning(warning)
        reserve = reserve_of(limit) if reserve is None else reserve
        self.threads_per_lane = threads_per_lane
        default_lanes = cuda.DEFAULT_LANES if gpu is not None else lanes_of(usable_cores(), threads_per_lane)
        self.lanes = lanes if lanes is not None else default_lanes
        if asynchronous is None and os.environ.get("WATERFLOW_ASYNCHRONOUS"):
            asynchronous = int(os.environ["WATERFLOW_ASYNCHRONOUS"])
        graphs = reserve // 4 if device_graphs and os.environ.get("WATERFLOW_DEVICE_GRAPHS") != "0" else 0
        settings: dict[str, Any] = {
            "lanes": self.lanes,
            "threads_per_lane": threads_per_lane,
            "capacity": limit - reserve,
            "async_host": asynchronous,
            "graphs": graphs,
        }
        if gpu is not None:
            settings |= {"async_host": None, "cuda": _C.cuda_device(gpu.device.index)}
            arenas = arenas and gpu.planned
        self.native = _native(settings, arenas)
        if gpu is not None and gpu.planned:
            self.native.limit_memory(limit)
        self.limit = limit
        self.reservations = Reservations(self.native, limit, reserve)
        self.names = self.reservations.names
        if quantum is not None and not quantum > 0:
            raise InvalidJobError(f"quantum must be positive seconds, or None; got {quantum!r}")
        self.reservations.quantum = quantum
        self._eager = Turn()
        self.lent_to: set[int] = set()  # threads that do eager work while a lane waits
        shorten_switches(+1)
        self.started_ns = _C.Engine.now_ns()
        # (job, begin_ns, end_ns) on the clock of the spans; the newest audits, for timelines.
        self.audits: deque[tuple[int, int, int]] = deque(maxlen=MOST_AUDITS)
        self._audits_done, self._counting = 0, threading.Lock()
        self.decisions: list[Decision] = []
        self.interference: InterferenceController | None = None  # once there is an opportunistic job
        self._lanes_in_use: LanesInUse | None = None
        self._eager_jobs: set[int] = set()
        self.kinds: Counter[int] = Counter()  # eager steps of kinds that are not captured
        self.lengths: TrialLengths | None = None  # of its study
        self._in_python, self._look_at_python = InPython(), 0.0
        self.told: Counter[str] = Counter()  # steps that run eagerly, by the cause; each cause is logged once
        self.accounts: list[Account] = []  # of all steps, jobs and trials that this engine has had
        self._starving = Starvation(self.decisions, self.native.queued, self.lanes)
        if mode == "turns":
            self.native.set_active_lanes(1)
        elif mode == "auto" and self.lanes > 1:
            self._lanes_in_use = LanesInUse(self.native, self.decisions)

    # -- jobs

    @contextlib.contextmanager
    def fifo_lanes(self) -> Iterator[None]:
        """Give lanes to the jobs that came first, inside the context; later ones run on the lanes that those leave free."""
        # The work done is the same, and the first jobs end sooner.
        self.native.set_fifo_lanes(True)
        try:
            yield
        finally:
            self.native.set_fifo_lanes(False)

    def add_job(self, name: str) -> int:
        """Register a job; return its number in this engine."""
        job = self.native.add_job()
        self.names[job] = name
        return job

    def remove_job(self, job: int) -> None:
        """Cancel the job's queued steps and release its claim.

        Waits for the job's running step to reach its next group boundary, except when called inside of a step of this engine.
        """
        with contextlib.suppress(ValueError):
            self._without_waiting_inside(self.native.remove_job, job)
        self._tell_refusals()
        self._eager_jobs.discard(job)
        self.reservations.release(job)

    def cancel(self, job: int, reason: str) -> None:
        """Cancel the job's steps, and wait as ``remove_job`` does. Raises ValueError if it has left the engine."""
        self._without_waiting_inside(self.native.cancel, job, reason)

    def _without_waiting_inside(self, end: Callable[..., None], *given: Any) -> None:
        # The core knows its own threads, but none that a lane waits for.
        if threading.get_ident() in self.lent_to:
            threading.Thread(target=end, args=given, daemon=True).start()
        else:
            end(*given)

    def set_policy(self, job: int, policy: ResourcePolicy) -> None:
        """Set the resource policy of ``job`` from its next step on; the first opportunistic job starts interference control."""
        if policy.opportunistic:
            if self.lanes == 1 and self.interference is None:
                logger.warning(
                    "with one lane, opportunistic jobs run only while guaranteed ones have been idle for a second; pass lanes=2"
                )
            self.interference = self.interference or InterferenceController(self.native)
            if self._lanes_in_use is not None:  # all of them: priority decides which jobs run
                self.native.set_active_lanes(self.lanes)
        self.reservations.set_policy(job, policy)

    def set_priority(self, step: HasJob, priority: Priority = "guaranteed", quota: int | float | str | None = None) -> None:
        """Set priority and quota of a ``Step`` in a loop of its own, as ``Job(priority=, quota=)`` does for a job.

        Each call sets both: without ``priority`` the step is guaranteed, without ``quota`` it has none, whatever it had before.
        Such a step cannot be preempted: its memory stays claimed while its loop runs, even if not even its reduced form fits
        in a quota that was lowered. Raises InvalidJobError for a step that is not of this engine, and for invalid values.
        """
        check_priority("set_priority()", priority)
        if step.job is None or step.engine is not self:
            raise InvalidJobError("set_priority() takes a Step of this engine: make it with Step(..., engine=engine)")
        parsed = parse_quota("set_priority()", quota, self.limit)
        self.set_policy(step.job, ResourcePolicy(priority, parsed))

    def submit(self, job: int, run: _C.StepRun, plan: Plan, before: _C.StepRun | None) -> None:
        """Queue a step of ``job`` after ``before``, the job's last one.

        Raises JobCancelled if the job was cancelled, and MemoryLimitError if the step can never fit.
        """
        try:
            self.native.submit(job, run, before)
        except _C.Cancelled as error:
            raise JobCancelled(f"step {self.names[job]!r}: {error}") from None
        except ValueError as error:
            raise too_large(plan, plan.persistent + plan.batch, self.limit, self.reservations.room) from error

    def run_audit(self, job: int, audit: OneAudit) -> Any:
        """Run an audit in the place of a lane, as one group; return the difference, or None. It counts as a step if that is done.

        Raises ValueError if it needs more memory than there is, also if the limit was lowered before it began.
        """
        box: list[Any] = []

        def begun() -> None:
            box.append(None)
            box[0] = audit.difference()

        eager = EagerWork(self, job, audit.bytes, begun)
        begin = _C.Engine.now_ns()
        self.native.submit(job, eager.run)
        try:
            eager.do()
            eager.run.outputs()
        except _C.Cancelled:
            raise
        except RuntimeError as error:
            if box:  # the audit had begun: the error is its own, not admission's
                raise
            raise ValueError(str(error)) from None
        finally:
            if audit.done is None:
                with self._counting:
                    self._audits_done += 1
                self.audits.append((job, begin, _C.Engine.now_ns()))
        return box[0]

    @property
    def steps(self) -> int:
        """The number of steps and evaluations that the lanes have done."""
        return max(0, self.native.steps_done - self._audits_done)

    def stats(self) -> EngineStats:
        """Return figures of what the lanes have done so far."""
        busy = [ns * 1e-9 for ns in self.native.lane_busy_ns]
        self._tell_refusals()
        return EngineStats(
            steps=self.steps,
            groups=self.native.groups_done,
            busy_seconds=sum(busy),
            busy_by_lane=tuple(busy),
            scheduling_seconds=self.native.scheduling_ns * 1e-9,
            peak_held=self.native.peak_held,
            graphs=self.native.graphs,
        )

    def poll(self, ended: int | None = None) -> None:
        """Adjust lanes and rates to what was measured, if a window is over. ``ended`` is the job whose step has ended, if any."""
        policy = self.reservations.policies() if self.interference is not None else []
        if self.interference is not None and any(on.opportunistic for _, on in policy):
            self.interference.poll()
            if ended is not None:
                self._starving.ended(ended)
            if self._starving.now() >= self._starving.next_look:
                waiting = {job for job, on in policy if on.opportunistic}
                self._starving.poll(waiting, self.interference.present, self.names)
            return
        in_use = self._lanes_in_use
        if in_use is None:
            return
        if (now := in_use.now()) >= self._look_at_python:
            self._look_at_python = now + WINDOW_SECONDS
            self._begin_lanes()
        if now >= in_use.next_look:
            in_use.poll(len(self.reservations))

    @property
    def lanes_in_use(self) -> int:
        """The number of lanes that take steps now."""
        return self.lanes if self._lanes_in_use is None else self._lanes_in_use.count

    def runs_eagerly(self, job: int, eagerly: bool) -> None:
        """Note whether the job's steps run eagerly from now on; where most jobs' do, they begin on one lane."""
        if (job in self._eager_jobs) is eagerly:
            return
        (self._eager_jobs.add if eagerly else self._eager_jobs.discard)(job)
        if self._lanes_in_use is not None and self.interference is None:
            self._begin_lanes()

    def _begin_lanes(self) -> None:
        assert self._lanes_in_use is not None
        between = sum(account.in_python() for account in self.accounts[-MOST_ACCOUNTS:])
        busy = sum(self.native.lane_busy_ns) * 1e-9
        self._lanes_in_use.begin(self._in_python.update(between, busy, len(self._eager_jobs), len(self.reservations)))

    def _tell_refusals(self) -> None:
        for job, why in self.native.take_graph_refusals():
            logger.info("steps of job %r run without device graphs: %s", self.names.get(job, job), why)

    # -- work that is not captured

    def lends_lanes(self, job: int) -> bool:
        """Return True if a lane must wait while the calling thread does eager work of ``job``, in place of handing itself over."""
        # It goes on without a thread that has a time limit and hangs, and sleeps for an opportunistic job, whose thread must hear
        # Ctrl-C. Not on a GPU, where a lane's work must be issued to its stream.
        return self.device.type == "cpu" and (has_limit() or self.reservations.policy_of(job).opportunistic)

    def threads_of_a_lane(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the calling thread has as many intra-op threads as a lane."""
        before = torch.get_num_threads()
        return _AS_IT_IS if before == self.threads_per_lane else _threads_here(self.threads_per_lane, before)

    @property
    def inside(self) -> bool:
        """True if the calling thread runs a step of this engine."""
        return self.native.on_a_lane or threading.get_ident() in self.lent_to

    def refuse_inside(self, what: str) -> None:
        """Raise InvalidJobError if the calling thread runs a step of this engine: ``what`` would wait for that step for ever."""
        if self.inside:
            raise InvalidJobError(
                f"{what} cannot run inside of a step of its own engine: it would wait for the lane and the memory that "
                "this one holds; call it before or after that step, or make it outside of the engine"
            )

    def run_eager(self, job: int, work: Callable[[], Any], height: int | None) -> tuple[Any, int]:
        """Run ``work`` on the calling thread, in the place of a lane, as one group; return its result and its measured height.

        Heights are in bytes; where ``height`` is not known the work runs in the reserve, one job at a time. Raises what the work
        raises, and JobCancelled.
        """
        self.refuse_inside(f"eager work of job {self.names[job]!r}")
        box: list[tuple[Any, int]] = []

        def task() -> None:
            box.append(_C.metered(work, self.device.type == "cuda"))

        with contextlib.ExitStack() as turn:
            if height is None:
                with time_does_not_count():
                    turn.enter_context(self._eager)
            eager = EagerWork(self, job, height or 0, task)
            try:
                self.native.submit(job, eager.run)
                eager.do()
                eager.run.outputs()
            except _C.Cancelled as error:
                raise JobCancelled(str(error)) from None
        return box[0]

    def over(self) -> bool:
        """Return True if the engine has been closed."""
        return self.reservations.closed

    def close(self) -> None:
        """End the lanes; queued steps fail. Closing twice is no error. Raises RuntimeError inside of a step of this engine."""
        if self.inside:
            raise RuntimeError(
                "an engine cannot be closed inside of a step that it runs, because it would wait for the end of "
                "that step; close it after the step"
            )
        if not self.reservations.close():
            return
        shorten_switches(-1)
        self.native.close()
        self._tell_refusals()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_AS_IT_IS = contextlib.nullcontext()


@contextlib.contextmanager
def _threads_here(count: int, before: int) -> Iterator[None]:
    _C.set_threads_here(count)
    try:
        yield
    finally:
        _C.set_threads_here(before)


def _native(settings: dict[str, Any], arenas: bool) -> _C.Engine:
    try:
        return _C.Engine(**settings, arenas=arenas)
    except RuntimeError as error:
        logger.warning("memory of steps is not planned, but left to torch's own allocator: %s", error)
        return _C.Engine(**settings, arenas=False)


def current_engine() -> Engine | None:
    """Return the engine that the calling thread's work belongs to (``within``), or None; None inside of a step that it runs."""
    engine: Engine | None = here.engine
    return None if engine is not None and engine.inside else engine


@contextlib.contextmanager
def within(engine: Engine, worker: int | None = None, policy: ResourcePolicy | None = None) -> Iterator[None]:
    """Make steps that the calling thread creates inside the context belong to ``engine``, and to its clock as ``worker``.

    With ``policy`` they have that one, and the thread begins no step while it is held.
    """
    before = here.engine, here.worker, here.policy, here.before_step
    here.engine, here.worker, here.policy = engine, worker, policy
    if policy is not None:
        here.before_step = policy.wait_while_held
    try:
        yield
    finally:
        here.engine, here.worker, here.policy, here.before_step = before


def current_device() -> torch.device:
    """Return the device of the engine that the calling thread's work belongs to; ``cpu`` if there is none."""
    return here.engine.device if here.engine is not None else torch.device("cpu")
