"""One of the processes of a study: an engine, and a ``StudyRunner`` whose trials are asked for, and told of, over a pipe."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import queue
import sys
import threading
import time
from collections.abc import Collection
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Literal

from waterflow.by_value import pickled
from waterflow.errors import StudyError, sendable
from waterflow.executor.engine import Engine
from waterflow.executor.program.capture_budget import TrialLengths
from waterflow.results import pack_result
from waterflow.study.coordinator import Objective, StudyRunner
from waterflow.study.optuna_compat import Trial, set_verbosity, stopped, trial_of
from waterflow.study.remote_storage import Remote
from waterflow.study.run import StudyRun
from waterflow.study.values import KeepWeights, KeptResults
from waterflow.training.progress import ProgressLine
from waterflow.units import Mode


@dataclass
class Start:
    """The first message to a process. ``study`` has a ``Remote`` storage; ``seed`` is the base of its trials' seeds.

    ``cores`` are those that it may run on, ``memory`` is in bytes, ``deadline`` on the clock of ``time.monotonic()``, which all
    processes share.
    """

    study: Any
    objective: Objective
    seed: int
    cores: list[int]
    memory: int
    lanes: int | None
    threads_per_lane: int
    exact: bool
    mode: Mode
    max_concurrent: int | Literal["auto"]
    gc_after_trial: bool
    keep_weights: KeepWeights
    trial_timeout: float | None
    catch: tuple[type[Exception], ...]
    deadline: float | None
    verbosity: int  # of Optuna's log
    arguments: list[str]  # ``sys.argv`` of the caller, which objectives may read


class Link:
    """Messages to the caller, and its answers. Thread-safe. The process ends with the pipe, as the caller has died then."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, queue.SimpleQueue[tuple[Any, BaseException | None]]] = {}
        threading.Thread(target=self._receive, daemon=True).start()

    def tell(self, *message: Any) -> None:
        """Send a message."""
        content = pickled(message)
        with self._sending:
            try:
                self._connection.send_bytes(content)
            except OSError:
                os._exit(1)

    def ask(self, what: str, *given: Any, **more: Any) -> Any:
        """Send a question, and return the answer, or raise it."""
        number, answer = next(self._numbers), queue.SimpleQueue[tuple[Any, BaseException | None]]()
        self._waiting[number] = answer
        self.tell("asked", number, what, given, more)
        value, error = answer.get()
        if error is not None:
            raise error
        return value

    def _receive(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, *answer = pickle.loads(self._connection.recv_bytes())
                self._waiting.pop(number).put((answer[0], answer[1]))
        os._exit(1)


class LinkedRun(StudyRun):
    """Trials that the caller asks for, as many as it wants, and is told of."""

    def __init__(self, study: Any, seed: int, link: Link) -> None:
        super().__init__(study, seed)
        self._link, self._reserved = link, False
        self.results: KeptResults | None = None

    def wanted(self) -> bool:
        """See StudyRun."""
        self._reserved = self._reserved or self._link.ask("reserve")
        return self._reserved

    def ask(self) -> Trial:
        """See StudyRun."""
        self._reserved = False
        self.begun += 1
        return trial_of(self._study, self._link.ask("trial"))

    def told(self, trial: Trial, with_weights: Collection[int]) -> None:
        """See StudyRun."""
        result = self.results.of(trial.number) if self.results is not None else None
        self._link.tell("told", trial.number, None if result is None else pack_result(result), stopped(self._study))

    def leave(self, trial: Trial) -> None:
        """See StudyRun."""
        super().leave(trial)
        self.told(trial, ())


def main() -> None:
    """Run trials until the caller wants no more."""
    connection = Connection(int(sys.argv[1]))
    try:
        start: Start = pickle.loads(connection.recv_bytes())
    except Exception as error:
        why = f"the objective cannot be read in a process of the study: {error}. Define what it needs in a module that processes can import"
        connection.send_bytes(pickled(("failed", StudyError(why))))
        os._exit(0)
    sys.argv = start.arguments
    os.sched_setaffinity(0, start.cores)
    set_verbosity(start.verbosity)
    link = Link(connection)
    storage: Any = start.study._storage
    assert isinstance(storage, Remote)
    storage.call = lambda *given, **more: link.ask("storage", *given, **more)
    start.study.sampler.reseed_rng()
    run = LinkedRun(start.study, start.seed, link)
    try:
        limits = start.memory, start.lanes, start.threads_per_lane
        with Engine("cpu", *limits, exact=start.exact, mode=start.mode) as engine, engine.reservations.retain_pages():
            engine.lengths = TrialLengths()
            left = None if start.deadline is None else start.deadline - time.monotonic()
            about = start.max_concurrent, False, start.gc_after_trial, start.keep_weights, start.trial_timeout
            runner = StudyRunner(start.study, start.objective, engine, *about, run, None, left)
            run.results = runner.results
            made = runner.run(None, None, start.catch, [], ProgressLine(None, "trials", False))
        link.tell("done", made.steps, made.captures, made.lane_busy, made.run_again)
    except BaseException as error:
        link.tell("failed", sendable(error))
    sys.stdout.flush()
    os._exit(0)  # threads of trials that were left behind are not waited for
