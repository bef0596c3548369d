"""Ways of training several jobs inside of one process: eager, compiled, in threads, as an ensemble, and waterflow.

A way is made once, which builds what it needs; its runs go on from there. All of them return a ``Track`` for each job.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

import waterflow as wf
from benchmarks.ensembles import Ensemble
from benchmarks.workloads import MadeJob


@dataclass(frozen=True)
class Track:
    """One job's way through a run: when it began, when each of its steps ended (``perf_counter``), and its losses."""

    begin: float
    ends: list[float]
    losses: list[float]


class Runner(Protocol):
    """Trains some jobs; made from them, with all that a user would keep between steps."""

    def run(self, steps: Sequence[int]) -> list[Track]:
        """Train each job for so many steps, and return when all is done."""

    def weights(self, number: int) -> dict[str, Tensor]:
        """Parameters and buffers of one job as they are now."""

    def close(self) -> None:
        """Give back what it holds."""


def walk(step: Callable[[Any], Tensor], batches: Sequence[Any], count: int) -> tuple[float, list[float], list[Any]]:
    """The loop that is timed: a step, and one look at the clock."""
    ends, losses = [0.0] * count, [None] * count
    variety, clock = len(batches), time.perf_counter
    begin = clock()
    for number in range(count):
        losses[number] = step(batches[number % variety])
        ends[number] = clock()
    return begin, ends, losses


def told(walked: tuple[float, list[float], list[Any]]) -> Track:
    """A track of plain numbers, made when the clock has stopped."""
    begin, ends, losses = walked
    return Track(begin, ends, [float(loss) for loss in losses])


class EagerStep:
    """An ordinary training step with torch's fused optimizer; the model may be compiled."""

    def __init__(self, job: MadeJob, compiled: bool = False) -> None:
        self.model: Any = torch.compile(job.model) if compiled else job.model
        self.loss = job.workload.loss
        self.optimizer = job.optimizer(job.model.parameters(), fused=True)

    def __call__(self, batch: Any) -> Tensor:
        loss = self.loss(self.model, batch)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class OneAfterTheOther:
    """Each job runs to its end before the next one begins."""

    def __init__(self, jobs: Sequence[MadeJob], make_step: Callable[[MadeJob], Callable[[Any], Tensor]]) -> None:
        self.jobs = jobs
        self.steps = [make_step(job) for job in jobs]

    def run(self, steps: Sequence[int]) -> list[Track]:
        """One loop after the other."""
        walked = [walk(step, job.batches, n) for step, job, n in zip(self.steps, self.jobs, steps, strict=True)]
        return [told(one) for one in walked]

    def weights(self, number: int) -> dict[str, Tensor]:
        """The model's own."""
        return self.jobs[number].model.state_dict()

    def close(self) -> None:
        """Nothing is held."""


class Threads(OneAfterTheOther):
    """A thread for each job in one process, as Optuna's ``n_jobs`` has them."""

    def run(self, steps: Sequence[int]) -> list[Track]:
        """All loops at once; they begin together."""
        walked: list[Any] = [None] * len(self.jobs)
        start = threading.Barrier(len(self.jobs))

        def drive(number: int) -> None:
            start.wait()
            try:
                walked[number] = walk(self.steps[number], self.jobs[number].batches, steps[number])
            except BaseException as error:
                walked[number] = error

        threads = [threading.Thread(target=drive, args=(number,)) for number in range(len(self.jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in walked:
            if isinstance(one, BaseException):
                raise one
        return [told(one) for one in walked]


class Steps(Threads):
    """waterflow: the same threads, a ``wf.Step`` in each, one engine for all, which keeps the bits of each job alone or not."""

    def __init__(self, jobs: Sequence[MadeJob], keeps_bits: bool = True) -> None:
        self.engine = wf.Engine(exact=keeps_bits)
        super().__init__(jobs, partial(captured_step, engine=self.engine))

    def close(self) -> None:
        """Leave the engine."""
        self.steps.clear()
        self.engine.close()


def captured_step(job: MadeJob, engine: wf.Engine | None = None) -> wf.Step:
    """A ``wf.Step`` of the job; without an engine it runs alone, on the calling thread."""
    name = f"{job.spec.workload}-{job.spec.number}"
    optimizer = job.optimizer(job.model.parameters())
    return wf.Step(job.model, step=job.workload.loss, optimizer=optimizer, name=name, engine=engine)


class _Watched:
    """A job's batches, and the time at which each was asked for: steps cannot be seen from inside of ``wf.train``."""

    def __init__(self, batches: Sequence[Any], count: int) -> None:
        self.batches, self.count = batches, count
        self.asked = [0.0] * (count + 1)

    def __iter__(self) -> Iterator[Any]:
        variety, clock = len(self.batches), time.perf_counter
        for number in range(self.count):
            self.asked[number] = clock()
            yield self.batches[number % variety]
        self.asked[self.count] = clock()


class Train:
    """waterflow: one call of ``wf.train``, from its start to its end."""

    def __init__(self, jobs: Sequence[MadeJob], keeps_bits: bool = True) -> None:
        self.jobs = jobs
        self.settings: dict[str, Any] = {"exact": keeps_bits, "max_concurrent": len(jobs)}

    def run(self, steps: Sequence[int]) -> list[Track]:
        """Optimizers are made anew by each call. Step times are those between batches; the last step is the call's end."""
        watched = [_Watched(job.batches, count) for job, count in zip(self.jobs, steps, strict=True)]
        ended: dict[str, float] = {}
        jobs = [
            wf.Job(
                name=str(number), model=job.model, data=data, optimizer=job.optimizer, step=job.workload.loss,
            )
            for number, (job, data) in enumerate(zip(self.jobs, watched, strict=True))
        ]  # fmt: skip
        begin = time.perf_counter()
        told = lambda result: ended.setdefault(result.name, time.perf_counter())  # noqa: E731
        results = wf.train(jobs, callbacks=[told], **self.settings)
        end = time.perf_counter()
        tracks = []
        for number, (data, result) in enumerate(zip(watched, results, strict=True)):
            last = end if len(jobs) == 1 else ended[str(number)]
            tracks.append(Track(begin, [*data.asked[1:-1], last], list(result.losses)))
        return tracks

    def weights(self, number: int) -> dict[str, Tensor]:
        """The model's own."""
        return self.jobs[number].model.state_dict()

    def close(self) -> None:
        """Nothing is held."""


def _compiled(job: MadeJob) -> EagerStep:
    return EagerStep(job, compiled=True)


RUNNERS: dict[str, Callable[[Sequence[MadeJob]], Runner]] = {
    "eager": lambda jobs: OneAfterTheOther(jobs, EagerStep),
    "compiled": lambda jobs: OneAfterTheOther(jobs, _compiled),
    "captured": lambda jobs: OneAfterTheOther(jobs, captured_step),
    "threads": lambda jobs: Threads(jobs, EagerStep),
    "ensemble": lambda jobs: EnsembleRunner(jobs),
    "compiled ensemble": lambda jobs: EnsembleRunner(jobs, compiled=True),
    "steps": lambda jobs: Steps(jobs),
    "train": lambda jobs: Train(jobs),
    "inexact steps": lambda jobs: Steps(jobs, keeps_bits=False),
    "inexact train": lambda jobs: Train(jobs, keeps_bits=False),
}


class EnsembleRunner:
    """Jobs of one shape as one batched model: a step of it is a step of each."""

    def __init__(self, jobs: Sequence[MadeJob], compiled: bool = False) -> None:
        self.ensemble = Ensemble(jobs, compiled)

    def run(self, steps: Sequence[int]) -> list[Track]:
        """All jobs have the same number of steps."""
        if len(set(steps)) != 1:
            raise ValueError(f"an ensemble steps all jobs at once; got {list(steps)} steps")
        begin, ends, losses = walk(self.ensemble.step, self.ensemble.batches, steps[0])
        by_job = torch.stack(losses, 1).tolist()
        return [Track(begin, ends, of_job) for of_job in by_job]

    def weights(self, number: int) -> dict[str, Tensor]:
        """The job's part of the stack."""
        return self.ensemble.weights(number)

    def close(self) -> None:
        """Nothing is held."""
