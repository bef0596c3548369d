"""A study in several processes: the caller owns the study, hands out its trials, and is told of their ends.

All calls of the study's storage are made on the calling thread, whichever process needs them. So the caller knows whose trial each
is: what a process that dies had under way is told as FAIL.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from waterflow.by_value import pickled
from waterflow.errors import StudyError, sendable
from waterflow.executor.cores import usable_cores
from waterflow.executor.interrupts import remembered_interrupts, uninterrupted
from waterflow.executor.memory_limit import free_memory, parse_limit
from waterflow.study.coordinator import Objective, StudyCallback
from waterflow.study.optuna_compat import fail, loop, stopped, values_of, verbosity, with_storage
from waterflow.study.process import Start
from waterflow.study.remote_storage import News, Remote
from waterflow.study.run import StudyRun
from waterflow.study.values import KeepWeights, KeptResults, StudySummary, best_of
from waterflow.training.progress import ProgressLine

logger = logging.getLogger("waterflow")

MOST_STARTS = 4  # of each process
LOOK_SECONDS = 0.1
LEAVE_SECONDS = 5.0  # for a process that has nothing to do any more to end by itself


@dataclass(eq=False)
class _Process:
    """One process, as its caller sees it."""

    payload: bytes  # its first message
    popen: subprocess.Popen[bytes] | None = None
    connection: Connection | None = None
    alive: int = -1  # a pidfd: readable when it ends, even if a worker of its still has the pipe open
    starts: int = 0
    over: bool = False  # it runs no more trials
    reserved: bool = False  # it may ask for one more trial
    trials: set[int] = field(default_factory=set)  # numbers of its trials under way
    news: News = field(default_factory=News)


class Processes:
    """Runs a study's trials in processes, one for each of ``starts``."""

    def __init__(self, study: Any, starts: Sequence[Start], keep_weights: KeepWeights, run: StudyRun) -> None:
        self._study, self._run = study, run
        self._all = [_Process(packed(start)) for start in starts]  # before any begins
        self._results = KeptResults(study, keep_weights)
        self._states: Counter[str] = Counter()
        self._failure: BaseException | None = None
        self._most = 0
        self._made: Counter[str] = Counter()
        self._busy: list[float] = []

    def run(
        self, n_trials: int | None, timeout: float | None, callbacks: Sequence[StudyCallback], progress: ProgressLine
    ) -> StudySummary:
        """Run trials until ``n_trials`` or ``timeout`` (seconds) is reached; arguments and errors as in ``optimize``."""
        self._n_trials, self._callbacks, self._progress = n_trials, callbacks, progress
        began = time.monotonic()
        self._until = None if timeout is None else began + timeout
        with loop(self._study, None), remembered_interrupts() as check_interrupt:
            try:
                for process in self._all:
                    self._begin(process)
                while there := [process for process in self._all if not process.over]:
                    check_interrupt()
                    handles: list[Any] = [handle for process in there for handle in (process.connection, process.alive)]
                    ready = wait(handles, LOOK_SECONDS)
                    for process in there:
                        if process.connection in ready:
                            self._hear(process)
                        elif process.alive in ready:
                            self._died(process)
            finally:
                with uninterrupted():
                    self._end()
        if self._failure is not None:
            raise self._failure
        results = self._results.in_order()
        return StudySummary(
            trials=self._run.begun,
            seconds=time.monotonic() - began,
            steps=self._made["steps"],
            captures=self._made["captures"],
            most_at_once=self._most,
            lane_busy=tuple(self._busy),
            results=results,
            states=self._states,
            best=best_of(self._study),
            run_again=self._made["run_again"],
        )

    # -- processes

    def _begin(self, process: _Process) -> None:
        ours, theirs = Pipe()
        process.popen = subprocess.Popen(
            [sys.executable, "-c", "from waterflow.study.process import main; main()", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,  # Ctrl-C reaches the caller alone, which ends all
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()
        process.alive = os.pidfd_open(process.popen.pid)
        process.starts += 1
        process.connection, process.news = ours, News()
        with contextlib.suppress(OSError):  # it has died: the pipe says so
            ours.send_bytes(process.payload)

    def _hear(self, process: _Process) -> None:
        assert process.connection is not None
        try:
            what, *given = pickle.loads(process.connection.recv_bytes())
        except (EOFError, OSError):
            self._died(process)
            return
        if what == "asked":
            self._answer(process, *given)
        elif what == "told":
            self._told(process, *given)
        else:
            (self._done if what == "done" else self._failed)(*given)
            self._leave(process)

    def _answer(self, process: _Process, number: int, what: str, given: Sequence[Any], more: dict[str, Any]) -> None:
        answer, error = None, None
        try:
            served: dict[str, Callable[..., Any]]
            served = {"reserve": self._reserve, "trial": self._trial, "storage": self._storage}
            answer = served[what](process, *given, **more)
        except Exception as raised:  # the storage's, the sampler's
            error = sendable(raised)
        assert process.connection is not None
        with contextlib.suppress(OSError):
            process.connection.send_bytes(pickled((number, answer, error)))

    def _reserve(self, process: _Process) -> bool:
        late = self._until is not None and time.monotonic() >= self._until
        begun = self._run.begun + sum(one.reserved for one in self._all)
        left = self._n_trials is None or begun < self._n_trials
        process.reserved = left and not (late or self._failure is not None or stopped(self._study))
        return process.reserved

    def _trial(self, process: _Process) -> int:
        process.reserved = False
        with uninterrupted():
            number = self._run.ask().number
            process.trials.add(number)
        self._most = max(self._most, sum(len(one.trials) for one in self._all))
        return number

    def _storage(self, process: _Process, name: str, *given: Any, **more: Any) -> Any:
        with uninterrupted():
            if name == "get_all_trials":
                return process.news.of(self._study._storage.get_all_trials(self._study._study_id, deepcopy=False))
            return getattr(self._study._storage, name)(*given, **more)

    def _told(self, process: _Process, number: int, result: bytes | None, stop: bool) -> None:
        process.trials.discard(number)
        if result is not None:
            self._results.add(number, pickle.loads(result))
        if stop:
            self._study.stop()
        self._count(number)

    def _count(self, number: int) -> None:
        storage = self._study._storage
        trial = storage.get_trial(storage.get_trial_id_from_study_id_trial_number(self._study._study_id, number))
        self._states[trial.state.name.lower()] += 1
        self._results.told(number, values_of(trial))
        for callback in self._callbacks:
            callback(self._study, trial)
        self._progress.advance(best_of(self._study))

    def _done(self, steps: int, captures: int, busy: Sequence[float], again: int) -> None:
        self._made.update(steps=steps, captures=captures, run_again=again)
        self._busy += busy

    def _failed(self, error: BaseException) -> None:
        self._failure = self._failure or error

    def _died(self, process: _Process) -> None:
        assert process.popen is not None
        code = process.popen.wait()
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
        lost = sorted(process.trials)
        self._leave(process)
        for number in lost:
            logger.warning("trial %d has failed: its process ended %s", number, how)
        process.over = process.starts >= MOST_STARTS or not self._reserve(process)
        process.reserved = False
        if not process.over:
            self._begin(process)
        elif all(one.over for one in self._all) and self._reserve(process):
            self._failed(
                StudyError(f"processes of the study ended {process.starts} times, the last one {how}, and trials are left")
            )

    def _leave(self, process: _Process) -> None:
        """Close a process that runs no more trials; those that it leaves under way have failed."""
        process.over, process.reserved = True, False
        self._kill(process, LEAVE_SECONDS)
        for number in sorted(process.trials):
            process.trials.discard(number)
            fail(self._study, number)
            self._count(number)

    def _kill(self, process: _Process, seconds: float = 0.0) -> None:
        if process.popen is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.popen.wait(seconds)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.popen.pid, signal.SIGKILL)  # and the workers of its data loaders
            process.popen.wait()
        if process.connection is not None:
            process.connection.close()
            os.close(process.alive)
        process.popen = process.connection = None

    def _end(self) -> None:
        for process in self._all:
            self._kill(process)
            for number in process.trials:
                with contextlib.suppress(Exception):
                    fail(self._study, number)


def packed(start: Start) -> bytes:
    """Return the first message to a process. Raises StudyError that names what cannot be pickled."""
    for what, value in (("objective", start.objective), ("sampler", start.study.sampler), ("pruner", start.study.pruner)):
        try:
            pickled(value)
        except Exception as error:
            raise StudyError(
                f"{what} cannot be sent to the processes of the study: {error}. Let the objective make or open inside of it what belongs "
                "to a process (locks, files, connections), or leave processes= out"
            ) from error
    return pickled(start)


def starts_of(
    processes: int,
    study: Any,
    objective: Objective,
    run: StudyRun,
    memory: int | float | str | None,
    lanes: int | None,
    max_concurrent: int | Literal["auto"],
    **settings: Any,
) -> list[Start]:
    """Return the first messages to so many processes, with a share of cores, memory, lanes and trials at a time for each.

    ``settings`` are the other fields of ``Start``. Raises StudyError for fewer trials at a time than processes.
    """
    if max_concurrent != "auto" and max_concurrent < processes:
        raise StudyError(
            f"processes={processes} run a trial each at a time, and max_concurrent={max_concurrent} allows fewer; lower processes= or "
            "raise max_concurrent="
        )
    cores = sorted(os.sched_getaffinity(0))[: usable_cores()]
    if processes > len(cores):
        logger.warning("processes=%d share %d cores: more than one for each core is not faster", processes, len(cores))
    limit = parse_limit(memory, free_memory()) // processes
    there = with_storage(study, Remote())  # type: ignore[abstract]  # the methods are made below its class

    def share(count: int, number: int) -> int:
        return max(1, count // processes + (number < count % processes))

    return [
        Start(
            there,
            objective,
            run.seed,
            cores[number::processes] or [cores[number % len(cores)]],
            limit,
            None if lanes is None else share(lanes, number),
            max_concurrent=max_concurrent if max_concurrent == "auto" else share(max_concurrent, number),
            verbosity=verbosity(),
            arguments=sys.argv,
            **settings,
        )
        for number in range(processes)
    ]
