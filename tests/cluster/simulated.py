"""Workloads, clusters and runs that tests of the cluster share."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from waterflow.cluster.policies.base import Policy
from waterflow.cluster.scheduler import Scheduler
from waterflow.cluster.simulator import Overheads, Simulated, Simulator
from waterflow.cluster.submission import Action, Node, Report, Submission, Tenant
from waterflow.cluster.workload import read_workload

S = TypeVar("S", bound=Scheduler)
TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"


def cluster(devices: int, per_node: int = 8) -> list[Node]:
    """Nodes that have so many devices together."""
    return [Node(f"n{i}", min(per_node, devices - per_node * i)) for i in range(-(-devices // per_node))]


class Rows:
    """The rows of a scheduler's jobs, as a store would have them: written are the entries that the book says have changed."""

    def __init__(self) -> None:
        self.rows: dict[str, tuple[Submission, int, str]] = {}
        self.notes = ""

    def write(self, scheduler: Scheduler) -> None:
        """Write what has changed."""
        book = scheduler.book
        for id in book.changed:
            self.rows.pop(id, None)
            entry = book.entries.get(id)
            if entry is not None:
                self.rows[id] = entry.submission, entry.order, json.dumps(entry.columns())
        book.changed.clear()
        self.notes = json.dumps(scheduler.notes())

    def check(self, scheduler: Scheduler) -> None:
        """Compare all that there is with the book."""
        book = scheduler.book
        there = {id: (entry.submission, entry.order, json.dumps(entry.columns())) for id, entry in book.entries.items()}
        assert self.rows == there, "a change of an entry was not noted"

    def read(self, policy: Policy) -> Scheduler:
        """Return the scheduler that goes on from the rows."""
        rows = [(submission, order, json.loads(columns)) for submission, order, columns in self.rows.values()]
        return Scheduler.restored(json.loads(self.notes), rows, policy)


def restarted(scheduler: S, policy: Policy) -> S:
    """Return the scheduler that goes on from what is written down of this one."""
    rows = [(entry.submission, entry.order, json.loads(json.dumps(entry.columns()))) for entry in scheduler.book.entries.values()]
    return type(scheduler).restored(json.loads(json.dumps(scheduler.notes())), rows, policy)


class Checked(Scheduler):
    """A scheduler whose book is walked after each event."""

    def _decide(self, now: float) -> list[Action]:
        actions = super()._decide(now)
        self.book.check()
        return actions


def simulate(policy: Policy, jobs: Sequence[Submission] | str, devices: int, check: bool = False, **more: object) -> Simulated:
    """The jobs, or those of a public trace, under a policy."""
    tenants: Sequence[Tenant] = more.pop("tenants", ())  # type: ignore[assignment]
    submissions = read_workload(TRACES / f"{jobs}.csv").submissions if isinstance(jobs, str) else jobs
    scheduler = (Checked if check else Scheduler)(cluster(devices), policy, tenants)
    return Simulator(scheduler, **more).run(submissions)  # type: ignore[arg-type]


__all__ = ["TRACES", "Checked", "Overheads", "Report", "Rows", "Submission", "cluster", "restarted", "simulate"]
