"""The status of a cluster, as JSON types: memory in bytes, times in seconds since 1970."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from waterflow.cluster.backend import DeviceState, NodeInfo, Part
from waterflow.cluster.scheduler import Scheduler
from waterflow.cluster.store import JobRecord


def cluster_status(
    now: float,
    scheduler: Scheduler,
    nodes: Sequence[NodeInfo],
    jobs: Sequence[JobRecord],
    devices: Mapping[str, DeviceState],
    live: Mapping[str, Part],
) -> dict[str, Any]:
    """Return the status of nodes, tenants and jobs; ``devices`` and ``live`` are those of the ``Reconciler``."""
    return {
        "policy": scheduler.policy.name,
        "parameters": dict(scheduler.policy.parameters),
        "now": now,
        "nodes": [_node(node, devices.get(node.name), jobs) for node in nodes],
        "tenants": [
            {"name": tenant.name, "quota": tenant.quota, "used": _used(scheduler, tenant.name)}
            for tenant in scheduler.book.tenants.values()
        ],
        "jobs": [job_status(now, job, live.get(job.id)) for job in jobs],
    }


def job_status(now: float, job: JobRecord, part: Part | None) -> dict[str, Any]:
    """Return the status of one job, with what its device told last. ``waited`` is the time before its first start."""
    # A job that was cancelled before it started has waited until its end.
    until = job.started if job.started is not None else job.ended if job.ended is not None else now
    return {
        "id": job.id,
        "tenant": job.tenant,
        "state": job.state,
        "priority": job.priority,
        "quota": job.submission.get("quota"),
        "devices": job.submission["devices"],
        "places": [[job.node, job.device]] if job.node is not None else [],
        "submitted": job.submitted,
        "started": job.started,
        "ended": job.ended,
        "waited": until - job.submitted,
        "attempts": job.attempts,
        "ran": job.ran + (part.seconds if part is not None else 0.0),
        "time_limit": job.submission.get("time_limit"),
        "reason": job.reason,
        "steps": max(job.steps, part.steps if part is not None else 0),
        "fraction": 1.0 if job.state == "completed" else part.fraction if part is not None else None,
        "step_seconds": 1 / part.pace if part is not None and part.pace else None,
        "rate": part.rate if part is not None else None,
        "waits_for_memory": part.waited if part is not None else None,
        "memory": part.memory if part is not None else None,
    }


def _node(node: NodeInfo, state: DeviceState | None, jobs: Sequence[JobRecord]) -> dict[str, Any]:
    return {
        "name": node.name,
        "machine": node.machine,
        "devices": 1,
        "memory": node.memory,
        "alive": node.alive,
        "epoch": node.epoch,
        "jobs": [job.id for job in jobs if job.node == node.name],
        "utilization": state.utilization if state is not None and state.parts else 0.0,
        "held": sum(part.memory for part in state.parts) if state is not None else 0,
    }


def _used(scheduler: Scheduler, tenant: str) -> int:
    return sum(
        len(entry.places)
        for entry in scheduler.book.entries.values()
        if entry.submission.tenant == tenant and entry.state == "running" and entry.priority == "guaranteed"
    )
