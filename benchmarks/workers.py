"""Processes that train jobs when they are told to, and the ways of sharing jobs out among them.

Every way runs in processes of its own, forked from one that has imported all and trained nothing: no way inherits
another's memory, threads or compiled code. They build, compile and warm up once; then each measured round is one
message. Idle ones wait for the next message without a step of work.
"""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.ways import RUNNERS, Track
from benchmarks.workloads import SATURATING, JobSet, JobSpec, MadeJob

WARM_STEPS, WARM_LARGE_STEPS = 6, 3  # of each job, of saturating ones; waterflow profiles its first two
READY_SECONDS = 600.0  # how long building, compiling and warming up may take
ROUND_SECONDS = 300.0

Shares = list[list[int]]  # which jobs each process has


def _all_in_one(count: int) -> Shares:
    return [list(range(count))]


def _one_each(count: int) -> Shares:
    return [[number] for number in range(count)]


def _two(count: int) -> Shares:
    return [list(range(0, count, 2)), list(range(1, count, 2))]


def _default_threads(busy: int) -> int | None:
    return None


def _one_thread(busy: int) -> int:
    return 1


def _fair_threads(busy: int) -> int:
    """Cores shared out among those that work at the same time: faster here than torch's default for each."""
    return max(1, (os.cpu_count() or 1) // busy)


def _several(jobs: JobSet) -> bool:
    return len(jobs.jobs) > 1


def _one(jobs: JobSet) -> bool:
    return len(jobs.jobs) == 1


def _more_than_two(jobs: JobSet) -> bool:
    return len(jobs.jobs) > 2


def _compilable(jobs: JobSet) -> bool:
    """Not in large sets of large models, which would be compiled again for each round."""
    return _several(jobs) and jobs.kept


def _stackable(jobs: JobSet) -> bool:
    return _several(jobs) and jobs.same_shape and jobs.kept


def _worth_compiling(jobs: JobSet) -> bool:
    """Stacking saves launches, which large kernels hide; compiling large ensembles takes minutes."""
    return _stackable(jobs) and jobs.kind != SATURATING


@dataclass(frozen=True)
class Way:
    """A way to train a set of jobs: what runs in each process, which jobs it has, and who the way is for.

    ``threads`` maps the number of jobs that run at the same time to the intra-op threads of each; None: torch's default.
    ``environment`` is set in its processes before they do anything.
    """

    name: str
    runner: str
    shares: Callable[[int], Shares] = _all_in_one
    threads: Callable[[int], int | None] = _default_threads
    fits: Callable[[JobSet], bool] = _several
    peer: bool = True
    takes_turns: bool = False
    compiles: bool = False
    environment: tuple[tuple[str, str], ...] = ()

    def threads_for(self, jobs: JobSet) -> int | None:
        """Intra-op threads in each of its processes."""
        shares = self.shares(len(jobs.jobs))
        return self.threads(len(jobs.jobs) if len(shares) == 1 else len(shares))


SOLO = "one after the other"
WAYS: dict[str, Way] = {
    way.name: way
    for way in (
        Way(SOLO, "eager", fits=lambda jobs: True, takes_turns=True),
        Way("one after the other, compiled", "compiled", fits=_compilable, takes_turns=True, compiles=True),
        Way("n_jobs threads", "threads", threads=_fair_threads),
        Way("process per job", "eager", shares=_one_each, threads=_fair_threads),
        Way("two processes", "eager", shares=_two, threads=_fair_threads, fits=_more_than_two),
        Way("ensemble", "ensemble", fits=_stackable),
        Way("ensemble, compiled", "compiled ensemble", fits=_worth_compiling, compiles=True),
        Way("one thread, eager", "eager", threads=_one_thread, fits=_one, takes_turns=True),
        Way("one thread, captured", "captured", threads=_one_thread, fits=_one, peer=False,
            takes_turns=True),
        Way("waterflow", "steps", threads=_one_thread, peer=False),
        Way("waterflow, train()", "train", peer=False),
        Way("waterflow, exact=False", "inexact steps", threads=_one_thread, peer=False),
        Way("waterflow, exact=False, train()", "inexact train", peer=False),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Round:
    """One measured round of a way: the tracks in the order of the set's jobs, and bytes at the highest so far.

    ``begin`` and ``end`` are the first track's begin and the last step's end.
    """

    tracks: list[Track]
    peak_bytes: int

    @property
    def begin(self) -> float:
        """When the first job began."""
        return min(track.begin for track in self.tracks)

    @property
    def end(self) -> float:
        """When the last step ended."""
        return max(track.ends[-1] for track in self.tracks)

    @property
    def seconds(self) -> float:
        """From the first begin to the last end."""
        return self.end - self.begin

    @property
    def steps(self) -> int:
        """Of all jobs together."""
        return sum(len(track.ends) for track in self.tracks)


class WayError(RuntimeError):
    """A way cannot train these jobs; the message is its own error."""


class Crew:
    """The processes of one way for one set of jobs, ready to run rounds.

    ``warm`` holds the tracks of the warm-up, ``ready_seconds`` what building and warming up took; compiling is in it.

    Raises:
        WayError: A process could not build or warm up.
    """

    def __init__(self, way: Way, jobs: JobSet, exact: bool = False) -> None:
        self.way, self.jobs = way, jobs
        self.shares = way.shares(len(jobs.jobs))
        warm_steps = WARM_LARGE_STEPS if jobs.kind == SATURATING else WARM_STEPS
        if exact:
            warm_steps = -(-warm_steps // 2)  # nothing is timed
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["benchmarks.workers", "benchmarks.report"])
        self.members: list[tuple[Any, Connection]] = []
        try:
            for share in self.shares:
                ours, theirs = context.Pipe()
                specs = [jobs.jobs[number] for number in share]
                arguments = (theirs, way.runner, way.environment, specs, way.threads_for(jobs), exact, warm_steps)
                process = context.Process(target=_serve, args=arguments, daemon=False)
                process.start()
                theirs.close()
                self.members.append((process, ours))
            begin = time.perf_counter()
            warm = self._gather(READY_SECONDS)
        except BaseException:
            self.close()
            raise
        self.warm = warm.tracks
        self.ready_seconds = time.perf_counter() - begin

    def run(self, steps: Sequence[int]) -> Round:
        """One round: ``steps`` of each job, in the order of the set."""
        for share, (_, connection) in zip(self.shares, self.members, strict=True):
            connection.send([steps[number] for number in share])
        return self._gather(ROUND_SECONDS)

    def _gather(self, limit: float) -> Round:
        tracks: dict[int, Track] = {}
        peak = 0
        for share, (_, connection) in zip(self.shares, self.members, strict=True):
            if not connection.poll(limit):
                raise WayError(f"no answer within {limit:.0f} seconds")
            try:
                answer = connection.recv()
            except EOFError:
                raise WayError("its process ended; was memory short?") from None
            if isinstance(answer, str):
                raise WayError(answer)
            tracks |= dict(zip(share, answer[0], strict=True))
            peak += answer[1]
        return Round([tracks[number] for number in range(len(tracks))], peak)

    def close(self) -> None:
        """End the processes."""
        for _, connection in self.members:
            connection.close()
        for process, _ in self.members:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()
        self.members.clear()


def _serve(
    connection: Connection, runner_name: str, environment: Sequence[tuple[str, str]], specs: Sequence[JobSpec],
    threads: int | None, exact: bool, warm_steps: int,
) -> None:  # fmt: skip
    """A process's life: build, warm up, run rounds until the other end closes."""
    os.environ.update(environment)
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        before = _memory("VmRSS")
        runner = RUNNERS[runner_name]([MadeJob(spec, exact) for spec in specs])
        tracks = runner.run([warm_steps] * len(specs))
        while True:
            connection.send((tracks, _memory("VmHWM") - before))
            tracks = runner.run(connection.recv())
    except (EOFError, BrokenPipeError):
        runner.close()
    except BaseException as error:
        last = traceback.format_exception_only(error)[-1].strip()
        connection.send(f"{last[:300]}")


def _memory(field: str) -> int:
    """Bytes of this process by the kernel's count: VmRSS resident now, VmHWM at the highest."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))
