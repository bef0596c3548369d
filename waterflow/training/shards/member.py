"""The process of one member: trains its shards of a job, in step with the other members, and takes part in every change."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections import Counter
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from waterflow import _C
from waterflow.allocator import cuda
from waterflow.executor.data.sharded import ShardedBatches
from waterflow.executor.engine import Engine, within
from waterflow.executor.memory_limit import parse_memory
from waterflow.executor.program.step_future import Done, StepFuture
from waterflow.job import Job, Metrics
from waterflow.training.checkpoint import Checkpoint
from waterflow.training.runner import JobRunner, StopJob
from waterflow.training.shards.exchange import Exchange
from waterflow.training.shards.group import MemberLost
from waterflow.training.shards.link import Left, Link
from waterflow.training.shards.step import ShardedStep


@dataclass
class Start:
    """The first message to a new process. ``cores`` are the ones that it may run on; ``joins`` others that train already.

    Its limit is one of ``parts`` of ``memory``.
    """

    job: Job
    member: int
    device: str
    cores: list[int] | None
    threads: int
    memory: int | float | str | None
    parts: int
    exact: bool
    port: int
    joins: bool
    resume: Checkpoint | None


class _Change(Exception):
    """All members leave their group at this step: for the next group, or as shards have moved."""


class MemberRunner(JobRunner):
    """Trains the shards of one member. After a change it goes on from its own state, or from that of a member who is ahead."""

    def __init__(self, start: Start, engine: Engine, link: Link) -> None:
        super().__init__(start.job, engine, self._tell_epoch, resume=start.resume)
        self._link, self._joins = link, start.joins
        self._exchange: Exchange | None = None

    def _build(self) -> None:
        super()._build()
        if self._joins:  # captures the steps, on a state that is replaced when the member enters a group
            assert self._batches is not None and self.step is not None
            self.step.submit(next(iter(self._batches.epoch())))
        self._link.tell("warm")

    # -- training in groups

    def _train(self) -> None:
        while True:
            try:
                if self._exchange is None or self._exchange.changes:
                    self._enter()
                    if self._epoch:  # the leader who was to tell the caller may have died
                        self._tell_epoch(self._epoch - 1, self._metrics[-1])
                self._deal()
                super()._train()
                return
            except (MemberLost, _Change) as change:
                if lost := isinstance(change, MemberLost):
                    self._link.lost(change)
            self._leave_group(lost)

    def _leave_group(self, lost: bool) -> None:
        assert isinstance(self._batches, ShardedBatches) and isinstance(self.step, ShardedStep)
        if lost:
            self.step.peers = self._exchange = None
        self._batches.go_on_from(self._batches.place(in_pass=len(self._losses) > self._epoch_began))

    def _enter(self) -> None:
        while True:
            self.step.peers = self._exchange = None  # type: ignore[union-attr]
            group = self._link.next_group(self._check_stop)
            try:
                place = (-1, 0) if self._joins else (self._epoch, len(self._losses))
                places = group.gather(place)
                if (best := max(places)) < (0, 0):
                    os._exit(1)  # the last who had the state has died
                if place < best:
                    self._take_over(group.receive(places.index(best)))
                elif places.index(best) == group.rank and min(places) < best:
                    state = self._checkpoint()
                    for rank in (rank for rank, other in enumerate(places) if other < best):
                        group.send(state, rank)
                self._exchange = Exchange(group, self.job.shards, self._link.wants_change)
                self._joins = False
                self._link.tell("entered", group.epoch, len(self._losses))
                return
            except MemberLost as lost:
                self._link.lost(lost)
                del group

    def _take_over(self, state: Checkpoint) -> None:
        old = self.step
        assert old is not None
        old.close()
        self._started = time.perf_counter()
        self._set_seed(self._start_at(state))
        self._resume = None
        self._make_step(old.model, old.optimizer)
        assert self.step is not None
        self.step.opaque_reason = old.opaque_reason
        self._go_on_from(state)

    def _deal(self) -> None:
        assert self._exchange is not None and isinstance(self.step, ShardedStep)
        self.step.peers = self._exchange
        assert isinstance(self._batches, ShardedBatches)
        self.step.mine = self._batches.mine = self._exchange.deal()

    def _submit(self, batch: Any) -> StepFuture | Done | None:
        assert self._exchange is not None and isinstance(self._batches, ShardedBatches)
        try:
            if self._exchange.changes or self._exchange.dealt is not None:
                raise _Change
            began = time.perf_counter()
            made = super()._submit(batch)
            self._link.longest = max(self._link.longest, time.perf_counter() - began)
            return made
        except (MemberLost, _Change):
            self._batches.put_back(batch)
            raise

    # -- epochs

    def _evaluate(self) -> Metrics | None:
        assert self._exchange is not None and isinstance(self.step, ShardedStep)
        self.step.seed_evaluation()
        group = self._exchange.group
        return group.gather(super()._evaluate() if group.rank == 0 else None)[0]  # type: ignore[no-any-return]

    def _tell_epoch(self, epoch: int, metrics: Metrics) -> None:
        assert self._exchange is not None
        group = self._exchange.group
        answer = self._link.ask(epoch, "epoch", epoch, metrics) if group.rank == 0 else None
        if group.gather(answer)[0] == "prune":
            raise StopJob


def main() -> None:
    """Train until the job ends, or its device is taken from it."""
    connection = Connection(int(sys.argv[1]))
    start: Start = pickle.loads(connection.recv_bytes())
    if start.cores:
        os.sched_setaffinity(0, start.cores)
    torch.set_num_threads(start.threads)
    device = torch.device(start.device if start.device.startswith("cuda") else "cpu")
    link = Link(connection, start.member, start.port, device)
    memory = start.memory
    if start.parts > 1:
        memory = parse_memory(memory, cuda.prepare(device).free) // start.parts
    with Engine(device, memory, 1, start.threads, exact=start.exact, mode="turns") as engine, within(engine):
        _C.set_threads_here(start.threads)
        runner = link.runner = MemberRunner(start, engine, link)
        result = runner.run()
        if isinstance(result.error, Left):
            os._exit(0)
        spent: Counter[str] = Counter()
        for account in engine.accounts:
            spent.update(dict(account))  # type: ignore[arg-type]  # numbers, whole or not
        link.finish(result, spent)


if __name__ == "__main__":
    main()
