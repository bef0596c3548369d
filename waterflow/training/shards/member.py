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
from waterflow.executor.data.digest import digest
from waterflow.executor.data.sharded import ShardedBatches
from waterflow.executor.engine import Engine, within
from waterflow.executor.memory_limit import parse_memory
from waterflow.executor.program.step_future import Done, StepFuture
from waterflow.job import Job, Metrics
from waterflow.training.checkpoint import Checkpoint
from waterflow.training.job_state import copied
from waterflow.training.runner import JobRunner, StopJob
from waterflow.training.shards.agreement import MODEL, check_alike
from waterflow.training.shards.exchange import Exchange
from waterflow.training.shards.group import Group, MemberLost
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
    """Trains the shards of one member. After a change it goes on from its own state, or from that of a member who is ahead.

    The first state is that of the first leader.
    """

    def __init__(self, start: Start, engine: Engine, link: Link) -> None:
        super().__init__(start.job, engine, self._tell_epoch, resume=start.resume)
        self._link, self._joins, self._device_name = link, start.joins, start.device
        self._exchange: Exchange | None = None
        self._in_common = False  # its state is that of a group
        self._evaluated: tuple[int, Metrics | None] = -1, None  # the last epoch that was evaluated

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
                self._meet(group)
                return
            except MemberLost as lost:
                self._link.lost(lost)
                del group

    def _place(self) -> tuple[int, int, bool, bool]:
        # How far it is: epochs, steps, whether the present epoch is evaluated, and whether others have had this state.
        if self._joins:
            return -1, 0, False, False
        return self._epoch, len(self._losses), self._evaluated[0] == self._epoch, self._in_common

    def _meet(self, group: Group) -> None:
        assert self._state is not None
        told = group.gather((self._place(), self._device_name, self._state.structure()))
        places, devices, structures = map(list, zip(*told))
        first = places.index(best := max(places))
        if best < (0,):
            os._exit(1)  # the last who had the state has died
        if any(other != structures[first] for other in structures):
            if structures[group.rank] == structures[first] and best[-1]:
                raise MemberLost("the model of a member that joins is another one")  # which ends with an error
            found, on = ([one[first], *one] for one in (structures, devices))
            check_alike(self.job.name, "the model", found, on, MODEL)
        new = [rank for rank, place in enumerate(places) if rank != first and (place < best or not place[-1])]
        if group.rank in new:
            self._take_over(*group.receive(first))
        elif group.rank == first and new:
            state = self._checkpoint(), self._evaluated, copied(self._state.attributes())
            for rank in new:
                group.send(state, rank)
        self._exchange = Exchange(group, self.job.name, self.job.shards, devices, self._link.wants_change)
        self._joins, self._in_common = False, True
        self._link.tell("entered", group.epoch, len(self._losses))

    def _take_over(
        self, state: Checkpoint, evaluated: tuple[int, Metrics | None], attributes: dict[tuple[str, str], Any]
    ) -> None:
        old = self.step
        assert old is not None and self._state is not None
        old.close()
        self._started = time.perf_counter()
        self._set_seed(self._start_at(state))
        self._resume = None
        self._make_step(old.model, old.optimizer)
        assert self.step is not None
        self.step.opaque_reason = old.opaque_reason
        self._go_on_from(state)
        self._state.put_attributes(attributes)
        self._evaluated = evaluated

    def _deal(self) -> None:
        assert self._exchange is not None and isinstance(self.step, ShardedStep)
        self.step.peers = self._exchange
        assert isinstance(self._batches, ShardedBatches)
        self.step.mine = self._batches.mine = self._exchange.deal()
        self._batches.compared = self._exchange.group.size > 1

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
        # The leader evaluates, once: after a death others may be given the state that has the changes already.
        assert self._exchange is not None and isinstance(self.step, ShardedStep) and self._state is not None
        exchange, group = self._exchange, self._exchange.group
        if self._evaluated[0] != self._epoch:
            if self.engine is not None and self.engine.exact and group.size > 1:
                of_shards = {"gradient sums and buffers of shards": digest(self.step.progress())}
                exchange.check_state(self._state.digests() | of_shards)
            self.step.seed_evaluation()
            changes = self._evaluate_first() if group.rank == 0 else None
            metrics, changed = exchange.gather("the metrics", (self._evaluated[1], changes is not None))[0]
            if changed and group.rank == 0:
                for rank in range(1, group.size):
                    group.send(changes, rank)
            elif changed:
                self._state.put_changes(group.receive(0))
                self.step.take_over_buffers()
            self._evaluated = self._epoch, metrics
        return self._evaluated[1]

    def _evaluate_first(self) -> dict[str, Any] | None:
        assert self._state is not None and self._exchange is not None
        alone = self.job.evaluate is None or self._exchange.group.size == 1
        before = None if alone else self._state.seen()
        self._evaluated = self._epoch, super()._evaluate()
        return self._state.changes(before) if before is not None else None

    def _tell_epoch(self, epoch: int, metrics: Metrics) -> None:
        assert self._exchange is not None
        leads = self._exchange.group.rank == 0
        answer = self._link.ask(epoch, "epoch", epoch, metrics) if leads else None
        if self._exchange.gather("the callbacks' answer", answer)[0] == "prune":
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
