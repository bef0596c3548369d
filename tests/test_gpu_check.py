"""The parts of the GPU check that need no GPU: running parts, time limits, and what is written down."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import MARK, NOT_MEASURED, Ran

pytestmark = pytest.mark.slow

ALL_GOOD = {
    "device": {"gpu": "H", "memory_bytes": 10, "torch": "2", "cuda": "13"},
    "requests": {"planned_ns": 40.0, "unplanned_ns": 900.0, "torch_ns": 800.0},
    "graphs": {"bitwise": True, "plain_steps_per_second": 400.0, "graph_steps_per_second": 900.0, "graphs_launched": 70},
    "jobs 1": {"samples_per_second": 100.0, "reserved_bytes": 5, "limit_bytes": 10},
    "jobs 2": {"samples_per_second": 150.0, "reserved_bytes": 8, "limit_bytes": 10},
    "jobs 4": {"samples_per_second": 180.0, "reserved_bytes": 9, "limit_bytes": 10},
}


def good(command: Sequence[str], limit: float) -> Ran:
    if "pytest" in command:
        return Ran(0, "noise\n18 passed, 1 skipped in 3.1s\n", 3.0)
    if "setup.py" in command:
        return Ran(0, "copying\n", 100.0)
    return Ran(0, "noise\n" + MARK + json.dumps(ALL_GOOD[" ".join(command[3:])]), 2.0)


def check(tmp_path: Path, runner: object, *arguments: str) -> tuple[int, dict[str, dict], dict, str]:
    status = gpu_check.main(["--out", str(tmp_path), *arguments], runner)  # type: ignore[arg-type]
    document = json.loads((tmp_path / "gpu_check.json").read_text())
    parts = {part["name"]: part for part in document["parts"]}
    return status, parts, document["conclusions"], (tmp_path / "gpu_check.md").read_text()


def test_all_good(tmp_path: Path) -> None:
    status, parts, conclusions, text = check(tmp_path, good)
    assert status == 0 and all(part["status"] == "done" for part in parts.values())
    assert parts["tests"]["figures"] == {"passed": 18, "failed": 0, "skipped": 1}
    assert conclusions["two jobs against one after the other"] == 1.5
    assert conclusions["memory of four jobs over its limit"] == 0.9
    assert NOT_MEASURED not in text and "| planned_ns | 40 |" in text


def test_one_part_that_fails_or_hangs_loses_nothing_else(tmp_path: Path) -> None:
    def runner(command: Sequence[str], limit: float) -> Ran:
        if "2" in command:
            return Ran(None, "it hangs here", limit)
        if "requests" in command:
            return Ran(1, "Traceback: no such thing", 1.0)
        if "device" in command:
            return Ran(0, MARK + "{ not json", 1.0)
        if "4" in command:
            return Ran(0, MARK + '{"samples_per_second": 7.0}', 1.0)
        return good(command, limit)

    status, parts, conclusions, text = check(tmp_path, runner)
    assert status == 1 and parts["tests"]["status"] == "done" and parts["solo"]["status"] == "done"
    assert parts["two jobs"]["status"] == "stopped" and parts["two jobs"]["reason"] == "it took longer than 60 s"
    assert parts["two jobs"]["figures"]["samples_per_second"] == NOT_MEASURED
    assert parts["requests"]["status"] == "failed" and "Traceback: no such thing" in text
    assert parts["device"]["status"] == "incomplete" and "cannot be read" in parts["device"]["reason"]
    assert parts["four jobs"]["figures"] == {
        "samples_per_second": 7.0, "reserved_bytes": NOT_MEASURED, "limit_bytes": NOT_MEASURED,
    }  # fmt: skip
    assert conclusions["two jobs against one after the other"] == NOT_MEASURED
    assert "| two jobs against one after the other | not measured |" in text


def test_the_time_for_all_is_kept(tmp_path: Path) -> None:
    limits = []

    def slow(command: Sequence[str], limit: float) -> Ran:
        limits.append(limit)
        return Ran(None, "", limit)

    _, parts, _, text = check(tmp_path, slow, "--seconds", "100")
    assert sum(limits) <= 100 and limits == [60, 40]
    assert parts["four jobs"]["status"] == NOT_MEASURED and "no time was left of 100 s" in text


def test_a_real_command_ends_at_its_limit_with_all_that_it_started() -> None:
    code = "import subprocess, sys; print('begun', flush=True); subprocess.run(['sleep', '60'])"
    ran = gpu_check.run([sys.executable, "-c", code], 1.5)
    assert ran.status is None and "begun" in ran.output and ran.seconds < 10
    assert gpu_check.run([sys.executable, "-c", "print(1); exit(3)"], 20).status == 3


def test_the_limits_fit_into_ten_minutes() -> None:
    assert gpu_check.TOTAL_SECONDS < 600
    assert len({part.name for part in gpu_check.parts()}) == len(gpu_check.parts())


def test_without_a_gpu_everything_is_written_as_not_measured(tmp_path: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    status, parts, _, text = check(tmp_path, gpu_check.run, "--only", "device")
    assert status == 1 and parts["device"]["status"] == "failed"
    assert set(parts["device"]["figures"].values()) == {NOT_MEASURED} and "not measured" in text
