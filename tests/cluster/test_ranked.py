"""Incremental walks against a slow one that sorts everything at each event; and what keeps true under all policies."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, strategies as st

from tests.cluster.simulated import Checked, cluster, restarted, simulate
from waterflow.cluster.policies import POLICIES, FifoBackfill, Las, Srsf, Srtf
from waterflow.cluster.policies.ranked import Ranked
from waterflow.cluster.scheduler import Scheduler
from waterflow.cluster.submission import Action, Node, Submission, Tenant

DEVICES = 12
JOBS = st.lists(
    st.tuples(st.integers(0, 60), st.integers(1, 40), st.sampled_from((1, 1, 2, 3, 4, 8, 12)), st.integers(0, 1)),
    min_size=1, max_size=40,
)  # fmt: skip


def submissions(jobs: list[tuple[int, int, int, int]]) -> list[Submission]:
    return [
        Submission(str(i), f"t{tenant}", size, duration=float(seconds), submitted=float(at))
        for i, (at, seconds, size, tenant) in enumerate(jobs)
    ]


class Walked(Scheduler):
    """Each decision is also taken by sorting all that there are."""

    def _decide(self, now: float) -> list[Action]:
        book, policy = self.book, self.policy
        assert isinstance(policy, Ranked)
        choose = policy._choose

        def both(now: float) -> Any:
            running = [(*item[:3], item[3], True) for item in policy._ranked(now)] if policy.preempts else []
            waiting = [(*item[:3], item[3], False) for items in policy._waiting.values() for item in items]
            free = book.devices.total if policy.preempts else book.devices.free
            quotas = {name: tenant.quota for name, tenant in book.tenants.items()}
            if not policy.preempts:
                quotas = {name: book.quota_left(name) for name in quotas}
            stops, starts = [], []
            for *_, entry, runs in sorted(running + waiting, key=lambda item: item[:3]):
                if entry.wanted <= free and entry.wanted <= quotas.get(entry.tenant, free):
                    free -= entry.wanted
                    if quotas:
                        quotas[entry.tenant] -= entry.wanted
                    if not runs:
                        starts.append(entry)
                elif runs:
                    stops.append(entry)
            found = choose(now)
            assert found == (stops, starts)
            return found

        policy._choose = both  # type: ignore[method-assign]
        try:
            actions = super()._decide(now)
        finally:
            del policy._choose  # type: ignore[misc]
        book.check()
        return actions


@pytest.mark.parametrize("make", [FifoBackfill, Srtf, Srsf, lambda: Las((20.0, 60.0)), lambda: Las((5.0, 15.0), by="time")])
@pytest.mark.parametrize("tenants", [(), (Tenant("t0", 12), Tenant("t1", 12)), (Tenant("t0", 12), Tenant("t1", 13))])
@given(jobs=JOBS)
def test_walks_agree(make: Any, tenants: tuple[Tenant, ...], jobs: list[tuple[int, int, int, int]]) -> None:
    from waterflow.cluster.simulator import Simulator

    simulator = Simulator(Walked(cluster(DEVICES), make(), tenants))
    result = simulator.run(submissions(jobs))
    assert len(result.jobs) == len(jobs)
    for job in result.jobs:
        assert job.ran == pytest.approx(job.duration) and job.completion >= job.duration - 1e-9


@pytest.mark.parametrize("name", POLICIES)
@given(jobs=JOBS, lost=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 2)), max_size=4))
def test_nodes_that_come_and_go_and_restarts(name: str, jobs: list[tuple[int, int, int, int]], lost: Any) -> None:
    nodes = [Node(f"n{i}", 4) for i in range(3)]
    scheduler: Scheduler = Checked(nodes, POLICIES[name]())
    moments = sorted([(each.submitted, 0, each) for each in submissions(jobs)] + [(float(at), 1, n) for at, n in lost],
                     key=lambda moment: moment[:2])  # fmt: skip
    places: dict[str, tuple[object, ...]] = {}

    def carry_out(actions: list[Action]) -> None:
        for action in actions:
            kind = type(action).__name__
            if kind == "Start":
                assert action.id not in places
                places[action.id] = action.places  # type: ignore[union-attr]
            elif kind == "Stop":
                del places[action.id]
            else:
                places[action.id] = action.places  # type: ignore[union-attr]

    now = 0.0
    for now, kind, what in moments:
        if kind == 0:
            carry_out(scheduler.submit(now, what))
            assert scheduler.submit(now, what) == []  # twice is once
        else:
            gone = f"n{what}"
            on_it_alone = [id for id, at in places.items() if all(node == gone for node, _ in at)]  # type: ignore[misc]
            for id in on_it_alone:
                del places[id]
            carry_out(scheduler.node_lost(now, gone))
            carry_out(scheduler.node_joined(now, nodes[what]))
        tick = scheduler.next_tick
        if tick is not None and tick <= now:
            carry_out(scheduler.tick(now))
        again = restarted(scheduler, POLICIES[name]())
        assert again.notes() == scheduler.notes() and again.next_tick == scheduler.next_tick
        if now % 2:
            scheduler = again
        running = {entry.id: entry.places for entry in scheduler.book.entries.values() if entry.state == "running"}
        assert running == places
    for _ in range(len(jobs)):
        now += 1.0
        for id in list(places):
            if places.pop(id, None) is None:
                continue  # the one before made it wait
            carry_out(scheduler.ended(now, id))
    assert not scheduler.book.entries, "every submission gets its turn"
    assert scheduler.book.devices.free == 12


@pytest.mark.parametrize("name", POLICIES)
@given(jobs=JOBS)
def test_every_job_ends(name: str, jobs: list[tuple[int, int, int, int]]) -> None:
    result = simulate(POLICIES[name](), submissions(jobs), DEVICES, check=True)
    assert {job.id for job in result.jobs} == {str(i) for i in range(len(jobs))}
    assert result == simulate(POLICIES[name](), submissions(jobs), DEVICES), "equal input gives equal runs"
