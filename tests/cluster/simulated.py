"""Workloads, clusters and runs that tests of the cluster share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from waterflow.cluster.policies.base import Policy
from waterflow.cluster.scheduler import Scheduler
from waterflow.cluster.simulator import Overheads, Simulated, Simulator
from waterflow.cluster.submission import Action, Node, Report, Submission, Tenant
from waterflow.cluster.workload import read_workload

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"


def cluster(devices: int, per_node: int = 8) -> list[Node]:
    """Nodes that have so many devices together."""
    return [Node(f"n{i}", min(per_node, devices - per_node * i)) for i in range(-(-devices // per_node))]


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


__all__ = ["TRACES", "Checked", "Overheads", "Report", "Submission", "cluster", "simulate"]
