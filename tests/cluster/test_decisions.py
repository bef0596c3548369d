"""Decisions stay quick when many wait."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Iterator

import pytest

from tests.cluster.simulated import cluster
from waterflow.cluster.policies import POLICIES
from waterflow.cluster.scheduler import Scheduler
from waterflow.cluster.submission import Node, Report, Submission, Tenant

WAITING, DEVICES, EVENTS = 10_000, 1_000, 40
LIMIT = 0.05  # seconds of processor time


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """As the service does when it starts: what was there before is not walked over in a decision."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("tenants", [0, 5])
def test_each_decision_is_quick(name: str, tenants: int) -> None:
    rng = random.Random(1)
    quotas = [Tenant(f"t{i}", DEVICES // tenants) for i in range(tenants)]
    nodes = [Node(node.name, node.devices, 16) for node in cluster(DEVICES)]
    scheduler = Scheduler(nodes, POLICIES[name](), quotas)

    def submission(number: int) -> Submission:
        tenant = f"t{rng.randrange(tenants)}" if tenants else "default"
        return Submission(
            str(number), tenant, rng.choice((1, 1, 1, 2, 4, 8, 16)), rng.choice(("guaranteed", "opportunistic")),
            duration=rng.uniform(60, 1e5), memory=rng.choice((8, 12, 16)),
        )  # fmt: skip

    number = 0
    while (waiting := sum(entry.state == "waiting" for entry in scheduler.book.entries.values())) < WAITING:
        assert number < 2 * WAITING
        for _ in range(WAITING - waiting):
            scheduler.submit(float(number), submission(number), decide=False)
            number += 1
        scheduler.tick(float(number))
    scheduler.book.check()
    seconds = []
    now = float(number)
    for event in range(EVENTS):
        now += 30.0
        running = [entry for entry in scheduler.book.entries.values() if entry.state == "running"]
        for entry in running:
            report = Report(utilization=rng.choice((0.1, 0.5, 0.9)), rate=rng.uniform(0.4, 1.0))
            scheduler.report(now, entry.id, report, decide=False)
        begin = time.thread_time()
        if event % 5 == 0:
            scheduler.submit(now, submission(number + event))
        elif event % 5 == 1:
            scheduler.ended(now, rng.choice(running).id)
        elif event % 5 == 2:
            scheduler.node_lost(now, nodes[event].name)
        elif event % 5 == 3:
            scheduler.node_joined(now, nodes[event - 1])
        else:
            scheduler.tick(now)
        seconds.append(time.thread_time() - begin)
    scheduler.book.check()
    assert statistics.median(seconds) < LIMIT
    assert sorted(seconds)[-3] < LIMIT  # the machine may pause twice
