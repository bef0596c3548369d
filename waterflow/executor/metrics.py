"""Metrics of an engine or a cluster in Prometheus' text format. Needs ``pip install waterflow[metrics]``."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from waterflow.errors import ClusterError
from waterflow.executor.engine import Engine
from waterflow.executor.program.ownership import steps_of

if TYPE_CHECKING:
    from prometheus_client.core import Metric

Status = dict[str, Any]  # what a cluster's ``status`` returns


def available() -> bool:
    """Return True if the library ``prometheus_client`` is installed."""
    return importlib.util.find_spec("prometheus_client") is not None


def engine_text(engine: Engine) -> bytes:
    """Return the metrics of one engine: of its device, and of each step that is alive in it."""
    return _text(lambda: _of_engine(engine))


def cluster_text(status: Status) -> bytes:
    """Return the metrics of a cluster from its ``status``: nodes, tenants, jobs that have not ended, and counts of jobs by state."""
    return _text(lambda: _of_cluster(status))


class MetricsServer:
    """Serves the metrics of an engine over HTTP at ``address``, on the loopback interface alone, until ``close()``.

    ``port`` 0 takes a free port. Raises ClusterError if the library is not installed.
    """

    def __init__(self, engine: Engine, port: int = 0) -> None:
        registry = _registry(lambda: _of_engine(engine))
        from prometheus_client import start_http_server

        self._server, self._thread = start_http_server(port, "127.0.0.1", registry)
        self.address = f"http://127.0.0.1:{self._server.server_port}/metrics"

    def close(self) -> None:
        """Stop the server."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> MetricsServer:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _of_engine(engine: Engine) -> Iterator[Metric]:
    stats = engine.stats()
    yield _one("gauge", "device_memory_limit_bytes", "Limit for all jobs together", engine.limit)
    yield _one("gauge", "device_memory_held_bytes", "State and batches of the jobs now there", engine.reservations.claimed())
    yield _one("gauge", "device_memory_steps_peak_bytes", "The most that steps held at once", stats.peak_held)
    yield _one("gauge", "device_lanes", "Steps that can run at the same time", engine.lanes)
    yield _one("counter", "device_steps", "Steps of all jobs", stats.steps)
    yield _one("counter", "device_busy_seconds", "Work of all lanes", stats.busy_seconds)
    yield _one("counter", "device_waits_seconds", "Inside admission and barriers", stats.scheduling_seconds)
    steps = _family("counter", "job_steps", "Steps since the job was made", ["job"])
    seconds = _family("gauge", "job_step_seconds", "A step as it was profiled", ["job"])
    held = _family("gauge", "job_memory_held_bytes", "State and one batch", ["job"])
    height = _family("gauge", "job_memory_step_bytes", "What a step reaches above that", ["job"])
    host = _family(
        "gauge", "job_memory_host_bytes", "What a step holds in host memory, as it may hold less than it needs", ["job"]
    )
    spills = _family("counter", "job_unplanned_requests", "Requests for memory that went past the plan", ["job"])
    for step in sorted(steps_of(engine), key=lambda step: (step.name, id(step))):
        name = step.name if step.job is None else f"{step.name}#{step.job}"  # names may repeat
        steps.add_metric([name], step.steps)
        spills.add_metric([name], step.missed_requests)
        try:
            plan = step.plan
        except RuntimeError:  # the step has no plan before its first call
            continue
        seconds.add_metric([name], plan.seconds)
        held.add_metric([name], plan.persistent + plan.batch)
        height.add_metric([name], plan.height)
        host.add_metric([name], plan.offloaded)
    yield from (steps, seconds, held, height, host, spills)


def _of_cluster(status: Status) -> Iterator[Metric]:
    up = _family("gauge", "node_up", "1 while the node is alive", ["node"])
    limit = _family("gauge", "device_memory_limit_bytes", "Limit for all jobs on a device", ["node"])
    held = _family("gauge", "device_memory_held_bytes", "What the jobs there hold", ["node"])
    busy = _family("gauge", "device_utilization_ratio", "The part of the last report in which it worked", ["node"])
    there = _family("gauge", "node_jobs", "Jobs that run there", ["node"])
    for node in status["nodes"]:
        for family, value in (
            (up, node["alive"]),
            (limit, node["memory"]),
            (held, node["held"]),
            (busy, node["utilization"]),
            (there, len(node["jobs"])),
        ):
            family.add_metric([node["name"]], float(value))
    yield from (up, limit, held, busy, there)
    quota = _family("gauge", "tenant_quota_devices", "Devices that a tenant may hold", ["tenant"])
    used = _family("gauge", "tenant_used_devices", "Devices that its guaranteed jobs hold", ["tenant"])
    for tenant in status["tenants"]:
        quota.add_metric([tenant["name"]], tenant["quota"])
        used.add_metric([tenant["name"]], tenant["used"])
    yield from (quota, used)
    labels = ["job", "tenant", "priority", "node"]
    families = {
        "steps": _family("counter", "job_steps", "Steps from its beginning", labels),
        "step_seconds": _family("gauge", "job_step_seconds", "Between two ends of its steps", labels),
        "pace": _family("gauge", "job_rate", "Steps each second", labels),
        "rate": _family("gauge", "job_relative_rate", "Its pace as a share of its pace alone on the device", labels),
        "memory": _family("gauge", "job_memory_held_bytes", "What it holds on a device", labels),
        "waited": _family("gauge", "job_wait_seconds", "Before it was first started", labels),
        "attempts": _family("counter", "job_starts", "How often it was started", labels),
    }
    states = dict.fromkeys(("waiting", "starting", "running", "held", "stopping", "completed", "failed", "cancelled"), 0)
    for job in status["jobs"]:
        states[job["state"]] += 1
        if job["ended"] is not None:  # else the series of all jobs that ever were would be kept for ever
            continue
        values = job | {"pace": 1.0 / job["step_seconds"] if job["step_seconds"] else None}
        where = ",".join(node for node, _ in job["places"])
        for key, family in families.items():
            if values.get(key) is not None:  # missing if an older version started the cluster
                family.add_metric([job["id"], job["tenant"], job["priority"], where], values[key])
    yield from families.values()
    count = _family("gauge", "jobs", "Jobs by what has become of them", ["state"])
    for state, number in states.items():
        count.add_metric([state], number)
    yield count


def _family(kind: str, name: str, about: str, labels: list[str]) -> Any:
    # Imported here and below, as the library is an extra.
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    made = CounterMetricFamily if kind == "counter" else GaugeMetricFamily
    return made(f"waterflow_{name}", about, labels=labels)


def _one(kind: str, name: str, about: str, value: float) -> Any:
    family = _family(kind, name, about, [])
    family.add_metric([], value)
    return family


def _registry(collect: Callable[[], Iterator[Metric]]) -> Any:
    if not available():
        raise ClusterError("metrics need a library: pip install waterflow[metrics]")
    from prometheus_client import CollectorRegistry
    from prometheus_client.registry import Collector

    class Figures(Collector):
        def collect(self) -> Iterator[Metric]:
            return collect()

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Figures())
    return registry


def _text(collect: Callable[[], Iterator[Metric]]) -> bytes:
    registry = _registry(collect)
    from prometheus_client import generate_latest

    return bytes(generate_latest(registry))
