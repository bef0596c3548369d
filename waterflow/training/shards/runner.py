"""ElasticRunner: trains one job on several devices; starts a process for each, and says who is a member."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from waterflow.by_value import pickled
from waterflow.errors import InvalidJobError, JobCancelled, WaterflowError
from waterflow.executor.cancel import UserCode, limited
from waterflow.executor.data.digest import digest
from waterflow.executor.data.loader import why_not_again
from waterflow.executor.engine import Engine
from waterflow.executor.memory_limit import free_memory, parse_memory
from waterflow.executor.stats import Account
from waterflow.job import Job, JobResult, Metrics
from waterflow.results import over_limit, result_of
from waterflow.training.checkpoint import Checkpoint
from waterflow.training.runner import OnEpoch, StopJob
from waterflow.training.safepoint import JobEnded
from waterflow.training.shards.agreement import check_unchanged
from waterflow.training.shards.group import HOST
from waterflow.training.shards.member import Start
from waterflow.units import check_device

logger = logging.getLogger("waterflow")

LOOK_AGAIN = 0.05
# A process that is stopped, as by SIGSTOP, is left out after so many seconds, and so many of its longest steps; a silent one later.
SILENT_SECONDS, SILENT_STEPS, MOST_SILENT = 1.0, 3.0, 60.0
MOST_RESTARTS = 3  # of all members, without a step in between
ENDING_SECONDS = 5.0  # for a result of a job that was stopped


@dataclass(eq=False)
class _Member:
    """One process, as its caller sees it."""

    number: int
    device: str
    process: subprocess.Popen[bytes]
    connection: Connection
    outbox: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    alive: bool = True
    warm: bool = False  # it has made its job, and can enter a group
    steps: int = 0
    longest: float = 0.0
    silent: float = 0.0  # seconds
    beats: bool = False
    ready: int = -1  # the newest epoch whose group it has built
    entered: int = -1  # the epoch in which it trains
    lost: int = -1  # the last epoch whose group has failed for it

    def tell(self, *message: Any) -> None:
        """Send a message behind those before; a process that has died gets none."""
        self.outbox.put(pickle.dumps(message))

    def send_all(self) -> None:
        """Send what is told, for as long as the process lives."""
        with contextlib.suppress(OSError):
            while (message := self.outbox.get()) is not None:
                self.connection.send_bytes(message)


def check_devices(job: Job, devices: Sequence[str]) -> tuple[str, ...]:
    """Return the names of devices. Raises InvalidJobError for a name twice, a device that is none, or more than there are shards."""
    if not isinstance(devices, (list, tuple)) or not devices:
        raise InvalidJobError(f'devices is a list of names, such as ["cpu:0", "cpu:1"]; got {devices!r}')
    names = tuple(map(str, devices))
    for name in names:
        kind, _, number = name.partition(":")
        if kind not in ("cpu", "cuda") or not number.isdigit():
            raise InvalidJobError(f"a device is 'cpu:0', 'cuda:0' and so on, each with its number; got {name!r}")
        if kind == "cuda":
            check_device(name)
    if len(set(names)) < len(names) or len({name.partition(":")[0] for name in names}) > 1:
        raise InvalidJobError(f"each device can be named once, and all are of one kind; got {list(names)}")
    if len(names) > job.shards:
        raise InvalidJobError(
            f"job {job.name!r} has {job.shards} shards, and each of {len(names)} devices needs one at least; pass shards={len(names)} or "
            "more (which changes the bits), or fewer devices"
        )
    return names


def memory_of_each(
    jobs: Sequence[Job], devices: Sequence[str] | None, memory: int | float | str | None, at_once: int | None
) -> tuple[int | float | str | None, int]:
    """Return a limit, and of how many parts it one is what each of ``at_once`` jobs has on each device. ``memory`` is a device's.

    A process on a GPU asks that one what is free there. Raises InvalidJobError if no job can train on several devices.
    """
    if devices is None:
        return memory, 1
    sharded = [job for job in jobs if job.shards > 1]
    if not sharded:
        raise InvalidJobError("devices= is for jobs whose batches are cut: give them shards, as in wf.Job(..., shards=2)")
    names = check_devices(min(sharded, key=lambda job: job.shards), devices)
    parts, others = min(len(sharded), at_once or len(sharded)), len(sharded) < len(jobs)
    if names[0].startswith("cuda"):
        return memory, parts
    limit = parse_memory(memory, free_memory())
    return (limit // (len(names) + others) if memory is None else limit) // parts, 1


def packed(start: Start) -> bytes:
    """Return the first message to a process. Raises InvalidJobError that names what cannot be pickled."""
    try:
        return pickled(start)
    except Exception as error:
        name, why = "the job", error
        for key, value in vars(start.job).items():
            try:
                pickled(value)
            except Exception as reason:
                name, why = key, reason
        raise InvalidJobError(
            f"job {start.job.name!r}: {name} cannot be sent to the processes of its devices: {why}. Make it inside of a function, which "
            "runs where the job does"
        ) from error


class ElasticRunner:
    """Trains one job on several devices, with the methods of ``JobRunner`` but ``snapshot``, ``suspend`` and ``resume``.

    Each device has a process, a member of the job. Members are numbered in the order in which they started; the lowest alive leads.
    Who is a member is decided here alone, by epochs of membership: all members build the group of a new epoch while they train, and
    enter it at the step that the leader names, or at once if the present group has lost one. ``last_checkpoint`` is called when all
    members have died, and returns the state to go on from, None for the beginning.
    """

    def __init__(
        self,
        job: Job,
        engine: Engine,
        devices: Sequence[str],
        memory: int | float | str | None,
        parts: int,
        on_epoch: OnEpoch | None = None,
        *,
        seed: int,
        resume: Checkpoint | None = None,
        last_checkpoint: Callable[[], Checkpoint | None] = lambda: None,
    ) -> None:
        job.check()
        self.job, self.engine = job, engine
        self._on_epoch, self._seed, self._resume, self._last_checkpoint = on_epoch, seed, resume, last_checkpoint
        self._memory, self._parts = memory, parts
        if (why := why_not_again(f"data of job {job.name!r}", job.data, job.data)) is not None:
            raise InvalidJobError(f"{why}. Every device reads the data")
        self._asked = self._wanted = check_devices(job, devices)  # those that have not died of the ones that were asked for
        self._inbox: queue.SimpleQueue[tuple[_Member | None, tuple[Any, ...]]] = queue.SimpleQueue()
        self._members: list[_Member] = []  # all that ever were, by number
        self._epoch, self._now = -1, list[_Member]()  # the newest epoch and its members
        self._entered = -1  # the newest epoch in which members train
        self._thread: int | None = None  # while it runs
        self._looked = 0.0
        self._copies: list[Future[Checkpoint]] = []
        self._answers = dict.fromkeys(range(resume.epoch if resume is not None else 0), "go on")  # to what epochs' ends were told
        self._failure: BaseException | None = None
        self._stopped: str | None = None
        self._ended = threading.Event()
        self._code = UserCode()
        self._account = Account(job.name)
        engine.accounts.append(self._account)
        self._failed = (-1, 0)  # at which step a group failed of which nobody had died, and how often
        # When all members died last: the step from which they went on, the most steps that any had done, and how often without more.
        self._restarts = (-1, -1, 0)
        self._began = time.perf_counter()

    # -- for any thread

    def set_devices(self, devices: Sequence[str]) -> None:
        """Train on these devices from now on; returns at once, and the job goes on meanwhile.

        A new device's process starts, makes the model, captures, and comes in between two steps with the state of the others; one
        that is not named any more leaves between two steps. The job's bits do not change. Raises InvalidJobError.
        """
        self._inbox.put((None, ("devices", check_devices(self.job, devices))))

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices that train now."""
        return tuple(self.pids)

    @property
    def pids(self) -> dict[str, int]:
        """The processes of the devices that train now."""
        return {
            member.device: member.process.pid for member in self._members if member.alive and member.entered == self._entered >= 0
        }

    @property
    def steps(self) -> int:
        """The number of completed steps, or a few less."""
        return max((member.steps for member in self._now), default=0)

    begun = steps

    def stop(self, reason: str = "stopped") -> None:
        """End the job after its present step, or at once if its code goes on for ``ENDING_SECONDS``; wait for that."""
        self._inbox.put((None, ("stop", reason)))
        if self._thread not in (None, threading.get_ident()) and not self._ended.wait(ENDING_SECONDS):
            self.break_off()

    def break_off(self) -> None:
        """End the job now."""
        self._inbox.put((None, ("break off",)))

    def ask_for_snapshot(self) -> Future[Checkpoint]:
        """Request a copy of the job's state between two steps, without waiting; the future has it, or its error."""
        made: Future[Checkpoint] = Future()
        self._copies.append(made)
        self._inbox.put((None, ("copy",)))
        if self._ended.is_set():
            self._settle_copies()
        return made

    # -- the job

    def run(self) -> JobResult:
        """Train to the end, or to ``Job.timeout``. Returns errors of the job in its result."""
        with self._account.spending("jobs"):
            about = self.job.timeout, f"job {self.job.name!r}", "Job.timeout"
            return limited(*about, self._run, self._code, self.stop, lambda: f", after {self.steps} steps", over_limit)

    def _run(self) -> JobResult:
        self._thread = threading.get_ident()
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        try:
            with self._code.here():
                self._start(self._wanted)
                while (result := self._look()) is None:
                    pass
            return result
        except BaseException as error:
            return result_of(self.job.name, "failed", error, None, (), (), time.perf_counter() - self._began)
        finally:
            self._thread = None
            for member in self._members:
                member.tell("end")
                member.process.kill()
            for member in self._members:
                member.process.wait()
                member.outbox.put(None)
            del self._store  # its thread ends
            self._ended.set()
            self._settle_copies()

    def _look(self) -> JobResult | None:
        # One message, or a look at who is silent. Returns the result once there is one.
        self._kill_the_silent()
        try:
            member, (what, *given) = self._inbox.get(timeout=LOOK_AGAIN)
        except queue.Empty:
            return None
        if member is None:
            return self._ordered(what, *given)
        member.silent = 0.0
        if what == "beat":
            member.beats = True
            member.steps, member.longest = given
        elif what == "warm":
            member.warm = True
            self._publish()
        elif what == "ready":
            member.ready = max(member.ready, given[0])
            if given[0] == self._epoch and all(other.ready == self._epoch for other in self._now):
                for other in self._alive():
                    other.tell("go", self._epoch)
        elif what == "entered":
            self._entered = max(self._entered, given[0])
            member.entered, member.steps = given
            self._publish()  # who has stayed for those that come can leave
            if self._copies and member is self._leading():  # the one who was asked may have died
                member.tell("copy")
        elif what == "lost":
            self._lost(member, *given)
        elif what == "epoch":
            member.tell("answer", given[0], self._answer(*given))
        elif what == "copy":
            self._settle_copies(*given)
        elif what == "done":
            self._done(member, *given)
        elif what == "result":
            return self._result(*given)
        elif what == "died":
            return self._gone(member)
        elif what == "unreadable":
            raise WaterflowError(f"device {member.device} of job {self.job.name!r} sent what cannot be read here: {given[0]}")
        return None

    def _ordered(self, what: str, *given: Any) -> JobResult | None:
        if what == "devices":
            self._asked = self._wanted = given[0]
            here = {member.device for member in self._alive()}
            self._start([name for name in self._wanted if name not in here])
            self._publish()
        elif what == "copy":
            if self._copies and self._entered >= 0 and (leading := self._leading()) is not None:
                leading.tell("copy")
        elif what == "stop":
            self._stopped = given[0]
            if self._entered < 0:
                return self._cancelled()
            for member in self._alive():
                member.tell("stop", given[0])
        elif what == "break off":
            return self._cancelled()
        return None

    def _cancelled(self) -> JobResult:
        error = JobCancelled(self._stopped or "interrupted")
        return result_of(self.job.name, "cancelled", error, None, (), (), time.perf_counter() - self._began)

    def _result(self, content: bytes, spent: dict[str, float]) -> JobResult:
        result: JobResult = pickle.loads(content)
        self._account |= {what: spent.get(what, 0) for what in ("eager steps", "captures", "captures anew")}
        self._account["steps"] = result.steps
        if isinstance(self.job.model, nn.Module) and result.state_dict is not None:  # the caller expects it trained
            self.job.model.load_state_dict(result.state_dict)
            result = replace(result, state_dict=self.job.model.state_dict())
        if result.error is not None and result.traceback:
            result.error.__cause__ = WaterflowError(f"on its device:\n{result.traceback}")
        if self._failure is not None:
            return replace(result, status="failed", error=self._failure)
        return result

    def _answer(self, epoch: int, metrics: Metrics) -> str:
        # A new leader tells again what the one before may have told.
        if epoch not in self._answers:
            self._answers[epoch] = "go on"
            try:
                if self._on_epoch is not None:
                    before = _copied_to_devices(self.job)
                    self._on_epoch(epoch, metrics)
                    check_unchanged(self.job.name, before, _copied_to_devices(self.job))
            except StopJob:
                self._answers[epoch] = "prune"
            except BaseException as error:
                self._failure, self._answers[epoch] = error, "prune"
        return self._answers[epoch]

    def _done(self, member: _Member, status: str, why: str) -> None:
        # All who end have the same result: the first answer counts. Others may wait for a failed one for ever.
        if member.entered >= 0 or self._entered < 0 or status != "failed":
            member.tell("result")
        else:
            logger.warning("device %s could not join job %r, which goes on without it: %s", member.device, self.job.name, why)
            member.process.kill()

    # -- members

    def _alive(self) -> list[_Member]:
        return [member for member in self._members if member.alive]

    def _leading(self) -> _Member | None:
        return next((member for member in self._now if member.alive), None)

    def _start(self, devices: Sequence[str]) -> None:
        for device in devices:
            ours, theirs = Pipe()
            number = len(self._members)
            start = Start(
                job=replace(self.job, timeout=None, seed=self._seed),
                member=number,
                device=device,
                cores=_cores(device, self.engine.threads_per_lane),
                threads=self.engine.threads_per_lane,
                memory=self._memory,
                parts=self._parts,
                exact=self.engine.exact,
                port=self._store.port,
                joins=self._entered >= 0,
                resume=self._resume,
            )
            first = packed(start)
            process = subprocess.Popen(
                [sys.executable, "-m", "waterflow.training.shards.member", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # signals from the caller's terminal do not reach it
                env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            )
            theirs.close()
            member = _Member(number, device, process, ours)
            self._members.append(member)
            member.outbox.put(first)
            threading.Thread(target=member.send_all, daemon=True).start()
            for work in (self._receive, self._await_end):
                threading.Thread(target=work, args=(member,), daemon=True).start()

    def _receive(self, member: _Member) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                content = member.connection.recv_bytes()
                try:
                    self._inbox.put((member, pickle.loads(content)))
                except Exception as error:  # of the user's classes; the process would wait for an answer
                    self._inbox.put((member, ("unreadable", error)))

    def _await_end(self, member: _Member) -> None:
        member.process.wait()
        self._inbox.put((member, ("died",)))

    def _publish(self) -> None:
        # A new epoch of those that are wanted and warm, if they are others than now. Nobody starts before all can.
        alive = self._alive()
        if self._epoch < 0 and not all(member.warm for member in alive):
            return
        members = [member for member in alive if member.warm and member.device in self._wanted]
        if members and self._entered >= 0 and all(member.entered < 0 for member in members):
            # One who has the state stays until they have it, too.
            members = [one for one in self._now if one.entered >= 0][:1] + members
        if members and members != self._now:
            leaving = [member for member in self._now if member not in members]
            self._now = members
            self._tell_members(leaving)

    def _gone(self, member: _Member) -> JobResult | None:
        member.alive, code = False, member.process.returncode
        left = code == 0
        self._wanted = tuple(name for name in self._wanted if name != member.device or left)
        if left and member.device in self._wanted:  # asked for again while it left
            self._start([member.device])
        if member in self._now:
            self._now = [one for one in self._now if one is not member]
            if self._now:
                self._tell_members()
        if not self._now and self._stopped is not None:
            return self._cancelled()
        if not self._now:
            self._restart(code)
        elif not left and member.device in self._asked:
            logger.warning(
                "device %s of job %r has died (%s); the job goes on with %s and the same bits. Its runner's set_devices() brings it back",
                member.device, self.job.name, _how(code), ", ".join(one.device for one in self._now),
            )  # fmt: skip
        return None

    def _lost(self, member: _Member, epoch: int, why: str) -> None:
        # A group of which nobody has died is made anew, a few times.
        member.lost = epoch
        if epoch == self._epoch and all(one.alive and one.lost == epoch for one in self._now):
            self._failed = (self.steps, self._failed[1] + 1 if self._failed[0] == self.steps else 1)
            if self._failed[1] > MOST_RESTARTS:
                raise WaterflowError(f"the devices of job {self.job.name!r} cannot exchange their gradients: {why}")
            self._tell_members()

    def _tell_members(self, leaving: Sequence[_Member] = ()) -> None:
        self._epoch += 1
        for one in [*self._now, *leaving]:
            one.tell("members", self._epoch, [other.number for other in self._now])

    def _restart(self, code: int) -> None:
        if self._alive():
            self._publish()  # others are on their way, or wait for this one
            return
        before, steps, times = self._restarts
        self._resume = self._last_checkpoint() or self._resume
        now = self._resume.steps if self._resume is not None else 0
        most = max(member.steps for member in self._members)
        times = 1 if most > steps or now > before else times + 1
        if not any(member.warm for member in self._members):
            raise WaterflowError(
                f"the processes of job {self.job.name!r} ended ({_how(code)}) before they had made the job; what they have printed says why"
            )
        if times > MOST_RESTARTS:
            raise WaterflowError(
                f"the processes of job {self.job.name!r} died {times} times ({_how(code)}) without a step beyond {steps} in "
                "between. If they were killed for memory, lower memory= or the batch size; if they crash, try the job without devices="
            )
        self._restarts, self._entered = (max(now, before), max(most, steps), times), -1
        logger.warning("all devices of job %r have died (%s); it goes on from step %d", self.job.name, _how(code), now)
        self._wanted = self._asked
        self._start(self._wanted)

    def _kill_the_silent(self) -> None:
        # Not the time in which this process stood still, or was in a callback.
        before, self._looked = self._looked, time.monotonic()
        for member in self._alive():
            member.silent += min(self._looked - before, LOOK_AGAIN)
            stopped = member.silent > max(SILENT_SECONDS, SILENT_STEPS * member.longest) and _is_stopped(member.process.pid)
            if member.beats and (stopped or member.silent > MOST_SILENT):
                logger.warning("device %s of job %r stands still, and is taken from it", member.device, self.job.name)
                member.process.send_signal(signal.SIGKILL)

    def _settle_copies(self, checkpoint: Checkpoint | None = None, error: BaseException | None = None) -> None:
        ended = JobEnded(f"job {self.job.name!r} has ended: its result has what it trained")
        with contextlib.suppress(IndexError):  # other threads settle or add some, too
            while made := self._copies.pop():
                made.set_result(checkpoint) if checkpoint is not None else made.set_exception(error or ended)


def _copied_to_devices(job: Job) -> dict[str, Any]:
    # What callbacks change here on purpose, and without effect: tensors of the model, and the epoch of a sampler. Numbers in other
    # objects may be counts and caches, and other threads may change them.
    owners = {f"the data's {name}": getattr(job.data, name, None) for name in ("sampler", "batch_sampler")}
    tensors = dict[str, bytes]()
    if isinstance(job.model, nn.Module):
        tensors = {name: digest(tensor) for name, tensor in (*job.model.named_parameters(), *job.model.named_buffers())}
    simple = {
        where: {
            key: value
            for key, value in getattr(owner, "__dict__", {}).items()
            if key[0] != "_" and isinstance(value, int | float | str)
        }
        for where, owner in owners.items()
    }
    return simple | {"the model": tensors}


def _cores(device: str, threads: int) -> list[int] | None:
    # The cores of the CPU device with this number: ``threads`` of those that this process may run on. None: all of them.
    kind, _, number = device.partition(":")
    if kind != "cpu" or not hasattr(os, "sched_getaffinity"):
        return None
    cores = sorted(os.sched_getaffinity(0))
    mine = cores[int(number) * threads : (int(number) + 1) * threads]
    return mine if len(mine) == threads else None


def _is_stopped(pid: int) -> bool:
    # On Linux, where the state follows the name. User code may hold the interpreter for as long: it is not interrupted.
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def _how(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
