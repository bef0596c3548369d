"""Figures in Prometheus' format: of one engine, and of a cluster."""

from __future__ import annotations

import urllib.error
import urllib.request
from typing import Any

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from waterflow.errors import ClusterError
from waterflow.executor import metrics


def read(text: bytes) -> dict[str, dict[tuple[str, ...], float]]:
    """Values by name, then by labels, in the order of their names; the format is checked by the library's own parser."""
    found: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            found.setdefault(sample.name, {})[tuple(sample.labels[name] for name in sorted(sample.labels))] = sample.value
    return found


def test_of_one_engine() -> None:
    with wf.Engine(memory="64MiB", lanes=1) as engine, wf.within(engine), metrics.MetricsServer(engine) as server:
        model = nn.Linear(4, 2)
        step = wf.Step(model, loss=F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), name="mine")
        other = nn.Linear(4, 2)
        idle = wf.Step(other, loss=F.mse_loss, optimizer=torch.optim.SGD(other.parameters(), lr=0.1))
        for _ in range(5):
            step((torch.zeros(8, 4), torch.zeros(8, 2)))
        assert server.address.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(server.address, timeout=5) as answer:
            told = read(answer.read())
        assert told == read(metrics.engine_text(engine)) | {
            name: told[name] for name in told if name.startswith(("waterflow_device_waits", "waterflow_device_busy"))
        }
        ((name,), steps) = next(item for item in told["waterflow_job_steps_total"].items() if item[0][0].startswith("mine"))
        assert steps == 5 and told["waterflow_device_steps_total"][()] == 5
        assert told["waterflow_device_memory_limit_bytes"][()] == 64 << 20
        plan = step.plan
        assert told["waterflow_job_memory_held_bytes"][name,] == plan.persistent + plan.batch
        assert told["waterflow_job_step_seconds"][name,] == plan.seconds > 0
        assert told["waterflow_device_memory_held_bytes"][()] == engine.reservations.claimed() > 0
        assert len(told["waterflow_job_steps_total"]) == 2 and len(told["waterflow_job_step_seconds"]) == 1
        idle.close()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(server.address, timeout=1)


def job(**values: Any) -> dict[str, Any]:
    return {
        "id": "a", "tenant": "us", "state": "running", "priority": "guaranteed", "places": [["one", 0]], "steps": 7,
        "step_seconds": 0.5, "memory": 100, "waited": 2.0, "attempts": 1, "ended": None, "rate": 0.5,
    } | values  # fmt: skip


def test_of_a_cluster() -> None:
    node = {"name": "one", "alive": True, "memory": 1000, "held": 100, "utilization": 0.25, "jobs": ["a"]}
    told = read(metrics.cluster_text({
        "nodes": [node, node | {"name": 'odd "name"\n', "alive": False, "jobs": []}],
        "tenants": [{"name": "us", "quota": 2, "used": 1}],
        "jobs": [job(), job(id="b", state="waiting", places=[], step_seconds=None, memory=None),
                 job(id="c", state="completed", ended=3.0)],
    }))  # fmt: skip
    assert told["waterflow_node_up"] == {("one",): 1.0, ('odd "name"\n',): 0.0}
    assert told["waterflow_device_utilization_ratio"]["one",] == 0.25
    assert told["waterflow_tenant_used_devices"] == {("us",): 1.0}
    assert told["waterflow_job_rate"] == {("a", "one", "guaranteed", "us"): 2.0}
    assert told["waterflow_job_relative_rate"]["a", "one", "guaranteed", "us"] == 0.5
    assert set(told["waterflow_job_wait_seconds"]) == {("a", "one", "guaranteed", "us"), ("b", "", "guaranteed", "us")}
    assert told["waterflow_jobs"]["completed",] == 1 and told["waterflow_jobs"]["failed",] == 0


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "available", lambda: False)
    with pytest.raises(ClusterError, match=r"pip install waterflow\[metrics\]"):
        metrics.cluster_text({})
