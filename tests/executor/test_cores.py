"""How many lanes an engine has that is not told."""

from __future__ import annotations

import builtins
import io
import os
from typing import Any

import pytest

from waterflow.executor.cores import usable_cores
from waterflow.executor.engine import Engine


def of_machine(monkeypatch: pytest.MonkeyPatch, cores: int, quota: str | None) -> None:
    """Make it a machine of so many cores, with this ``cpu.max``."""
    known = builtins.open

    def opened(name: Any, *args: Any, **more: Any) -> Any:
        if name != "/sys/fs/cgroup/cpu.max":
            return known(name, *args, **more)
        if quota is None:
            raise FileNotFoundError(name)
        return io.StringIO(quota)

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(builtins, "open", opened)


@pytest.mark.parametrize(
    ("cores", "quota", "usable"),
    [
        (4, None, 4),
        (64, "max 100000\n", 64),
        (64, "400000 100000\n", 4),
        (8, "150000 100000\n", 2),
        (2, "50000 100000", 1),
        (2, "?", 2),
    ],
)
def test_affinity_and_quota(monkeypatch: pytest.MonkeyPatch, cores: int, quota: str | None, usable: int) -> None:
    of_machine(monkeypatch, cores, quota)
    assert usable_cores() == usable


@pytest.mark.parametrize(("cores", "threads", "lanes"), [(4, 1, 4), (8, 1, 8), (16, 4, 4), (64, 1, 64), (2, 4, 1)])
def test_a_lane_for_each_core(monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, lanes: int) -> None:
    of_machine(monkeypatch, cores, None)
    with Engine(memory="1GiB", threads_per_lane=threads) as engine:
        assert engine.lanes == engine.native.lanes == lanes
