"""The status of a cluster, as JSON types: memory in bytes, times in seconds since 1970."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from waterflow.cluster.backend import NodeInfo, Progress
from waterflow.cluster.journal import JournaledScheduler
from waterflow.cluster.store import JobRecord

Live = Mapping[str, Mapping[str, Progress]]  # the last report of each running job, by node


def cluster_status(
    now: float, scheduler: JournaledScheduler, nodes: Sequence[NodeInfo], jobs: Sequence[JobRecord], live: Live
) -> dict[str, Any]:
    """Return the status of nodes, tenants and jobs."""
    return {
        "policy": scheduler.policy.name,
        "now": now,
        "nodes": [_node(node, jobs, live) for node in nodes],
        "tenants": [
            {"name": tenant.name, "quota": tenant.quota, "used": _used(scheduler, tenant.name)}
            for tenant in scheduler.book.tenants.values()
        ],
        "jobs": [job_status(now, job, live.get(job.id, {})) for job in jobs],
    }


def job_status(now: float, job: JobRecord, live: Mapping[str, Progress]) -> dict[str, Any]:
    """Return the status of one job, with the last reports of its nodes. ``waited`` is the time before its first start."""
    reports = list(live.values())
    # A job that was cancelled before it started has waited until its end.
    until = job.started if job.started is not None else job.ended if job.ended is not None else now
    return {
        "id": job.id,
        "tenant": job.tenant,
        "state": job.state,
        "priority": job.priority,
        "devices": job.submission["devices"],
        "places": [[node, device] for node, device, _ in job.places],
        "submitted": job.submitted,
        "started": job.started,
        "ended": job.ended,
        "waited": until - job.submitted,
        "attempts": job.attempts,
        "ran": job.ran + max((report.seconds for report in reports), default=0.0),
        "time_limit": job.submission.get("time_limit"),
        "reason": job.reason,
        "steps": max(job.steps, sum(report.steps for report in reports)),
        "fraction": 1.0 if job.state == "completed" else _mean(report.fraction for report in reports),
        "step_seconds": _mean(report.step_seconds for report in reports if report.step_seconds > 0),
        "memory": max((report.memory for report in reports), default=None),
    }


def _node(node: NodeInfo, jobs: Sequence[JobRecord], live: Live) -> dict[str, Any]:
    reports = [by_node[node.name] for by_node in live.values() if node.name in by_node]
    return {
        "name": node.name,
        "machine": node.machine,
        "devices": node.devices,
        "memory": node.memory,
        "alive": node.alive,
        "epoch": node.epoch,
        "jobs": [job.id for job in jobs if any(name == node.name for name, _, _ in job.places)],
        "utilization": max((report.utilization for report in reports), default=0.0),
        "held": sum(report.memory for report in reports),
    }


def _used(scheduler: JournaledScheduler, tenant: str) -> int:
    return sum(
        len(entry.places)
        for entry in scheduler.book.entries.values()
        if entry.submission.tenant == tenant and entry.state == "running" and entry.priority == "guaranteed"
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
