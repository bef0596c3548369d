"""The proof of benchmarks.cluster_kills: random kills under many jobs, one of which ends its device each time that it runs."""

from __future__ import annotations

import pytest

from benchmarks import cluster_kills


@pytest.mark.campaign
@pytest.mark.parametrize(("jobs", "kills", "devices", "seed"), [(20, 4, 2, 1), (200, 40, 3, 0)], ids=["short", "long"])
def test_only_the_crasher_fails(jobs: int, kills: int, devices: int, seed: int) -> None:
    """With 200 jobs this takes some minutes."""
    counts = cluster_kills.run(jobs, kills, devices, seed, print)
    assert counts.good(), counts
    assert counts.kills_of_devices + counts.kills_of_schedulers >= kills
