"""Policies without overheads against an independent implementation, to the cent."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable

import pytest

from tests.cluster.simulated import TRACES, simulate
from waterflow.cluster.policies import Fifo, FifoBackfill, Las, Policy, Srsf, Srtf

ROWS = list(csv.DictReader((TRACES / "oracle_zero_overhead.csv").open()))
POLICIES: dict[str, Callable[[list[float]], Policy]] = {
    "fifo": lambda _: Fifo(),
    "fifo_backfill(fjf)": lambda _: FifoBackfill(),
    "srtf": lambda _: Srtf(),
    "srsf": lambda _: Srsf(),
    "2d-las": lambda limits: Las(limits),
    "las-time": lambda limits: Las(limits, by="time"),
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['trace']}-{row['policy']}")
def test_equal_to_the_oracle(row: dict[str, str]) -> None:
    name = re.sub(r"\[.*\]", "", row["policy"])
    limits = [float(limit) for limit in re.findall(r"[\d.]+(?=[;\]])", row["policy"])]
    result = simulate(POLICIES[name](limits), row["trace"], int(row["gpus"]), check=True)
    times = sorted(job.completion for job in result.jobs)
    assert len(times) == int(row["jobs"])
    assert round(sum(times) / len(times), 2) == float(row["avg_jct_s"])
    assert times[len(times) // 2] == float(row["p50_jct_s"])
    assert times[int(0.99 * len(times))] == float(row["p99_jct_s"])
    assert max(job.ended for job in result.jobs) == float(row["last_end_s"])
    if row["preemptions"]:
        assert sum(job.preemptions for job in result.jobs) == int(row["preemptions"])
    for job in result.jobs:
        assert job.ran == job.duration and job.service == job.duration * job.devices


def test_all_rows_are_there() -> None:
    assert len(ROWS) == 12
