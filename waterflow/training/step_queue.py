"""The queue of one job's submitted steps, and their losses."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from waterflow import _C
from waterflow.executor.engine import Engine
from waterflow.executor.program.step_future import Done, StepFuture
from waterflow.executor.stats import Account
from waterflow.job import Job
from waterflow.step import Step
from waterflow.training.shards.step import ShardedStep

logger = logging.getLogger("waterflow")
_told = threading.Lock()  # the first job to warn of slow data keeps it: one warning per process

# Steps handed to the engine before the first of them is done, and batches held: one runs, one waits or is being loaded.
STEPS_AHEAD = 2
# Short steps are queued deeper where their batches are small: so much work bridges a wait for the interpreter lock.
BRIDGE_SECONDS = 5e-3
MOST_STEPS_AHEAD = 16
MOST_RUN = 32  # short steps that a job runs without a look at what others ask of it
TOLD_SECONDS, TOLD_SHARE = 3.0, 0.2  # warn a job that spent this share of at least so long on its data
BATCH_SHARE = 1 / 32  # of the engine's reserve, for the batches that one job queues beyond its claim


def steps_ahead(step: Step, engine: Engine | None) -> int:
    """Return the number of steps to have queued or running."""
    # Batches beyond those that are reserved are in the engine's reserve: a job that fits must not fail, or wait, for a
    # deeper queue.
    if engine is None or not step.steps or not step.plan.measured:
        return STEPS_AHEAD
    plan = step.plan
    by_time = int(BRIDGE_SECONDS / max(plan.seconds, 1e-6)) + 1
    by_memory = STEPS_AHEAD + int(engine.reservations.reserve * BATCH_SHARE / max(plan.batch, 1))
    return max(STEPS_AHEAD, min(by_time, by_memory, MOST_STEPS_AHEAD))


def step_of(
    job: Job, model: nn.Module, optimizer: torch.optim.Optimizer, numbers: torch.Generator, engine: Engine | None, seed: int = 0
) -> Step:
    """Return a step for the job, whose batches are submitted ahead."""
    kind = Step if job.shards == 1 else partial(ShardedStep, shards=job.shards, loss_weight=job.loss_weight, seed=seed)
    step = kind(
        model,
        optimizer=optimizer,
        loss=job.loss,
        step=job.step,
        accumulate=job.accumulate,
        clip_grad_norm=job.clip_grad_norm,
        clip_grad_value=job.clip_grad_value,
        autocast=job.autocast,
        recompute=job.recompute,
        generator=numbers,
        name=job.name,
        engine=engine,
    )
    step.batches_ahead = STEPS_AHEAD
    return step


class StepQueue:
    """Submitted steps in order, and the losses of completed ones, which are read from the device all at once."""

    def __init__(self) -> None:
        self._under_way: deque[StepFuture | Done] = deque()
        self._ended: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._under_way)

    @property
    def ended(self) -> int:
        """The number of completed steps whose losses were not read yet."""
        return len(self._ended)

    def add(self, future: StepFuture | Done) -> None:
        """Append a submitted step."""
        self._under_way.append(future)

    def run(self, step: Step, batches: Sequence[Any], flag: _C.Flag) -> None:
        """``step.run_ahead``; all that were added have completed."""
        step.run_ahead(batches, flag, self._ended)

    def take_half(self) -> None:
        """Wait until half of the queue has completed."""
        # One wait for many steps, as they end in order and each wait costs two thread switches.
        half = (len(self._under_way) + 1) // 2
        self._under_way[half - 1].wait()
        for _ in range(half):
            self._take()

    def take_all(self) -> None:
        """Wait for all steps. Raises the first one's error; steps after it are dropped."""
        while self._under_way:
            self._take()

    def losses(self) -> list[float]:
        """Return the losses of the steps that completed since the last call."""
        ended, self._ended = self._ended, []
        # One transfer from the device.
        return torch.stack([loss.reshape(()).to(torch.float64) for loss in ended]).tolist() if ended else []

    def _take(self) -> None:
        try:
            self._ended.append(_loss_of(self._under_way.popleft().result()))
        except BaseException:
            for future in self._under_way:
                with contextlib.suppress(Exception):
                    future.result()
            self._under_way.clear()
            raise


def between_steps(batches: Iterator[Any], steps: StepQueue, name: str, account: Account) -> Iterator[Any]:
    """Yield ``batches``, each read only after all ``steps`` have completed; warn job ``name`` once if that takes long.

    For data that may depend on the model, or write a batch to the memory of the one before.
    """
    began, before = time.perf_counter(), account["loading"]
    steps.take_all()
    for batch in batches:
        seconds, reading = time.perf_counter() - began, account["loading"] - before
        if seconds > TOLD_SECONDS and reading > TOLD_SHARE * seconds and _told.acquire(blocking=False):
            logger.warning(
                "job %r has spent %.0f %% of its time reading batches between its steps, as its data runs code that may depend on "
                "the model, or write batches to the memory of earlier ones. If it does neither, Job(read_ahead=True) reads "
                "while captured steps run",
                name,
                100 * reading / seconds,
            )
        yield batch
        steps.take_all()


def _loss_of(result: Any) -> torch.Tensor:
    return result[0] if isinstance(result, tuple) else result
