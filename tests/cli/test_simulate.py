"""``waterflow simulate``: what it prints, draws and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from waterflow.cli.main import app

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"
SMALL = str(TRACES / "tiresias_60.csv")


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["simulate", *words])
    return result.exit_code, result.output


def test_several_policies_in_one_table(tmp_path: Path) -> None:
    code, text = run(SMALL, "--policy", "fifo", "--policy", "las", "--gpus", "16", "--set", "limits=[100, 200]",
                     "--overhead", "resume=0.5", "--out", str(tmp_path / "out"))  # fmt: skip
    assert code == 0, text
    rows = {line.split("│")[1].strip(): line for line in text.splitlines() if line.startswith("│")}
    assert set(rows) == {"fifo", "las"} and " 200.82 " in rows["fifo"] and " 3,335 " in rows["fifo"]
    assert "las: limits=(100.0, 200.0), by=service" in text and "'resume': 0.5" in text and "scaling: linear" in text
    assert (tmp_path / "out" / "simulate.png").read_bytes().startswith(b"\x89PNG")


def test_machines_read_json() -> None:
    code, text = run(SMALL, "--policy", "elastic_tiresias", "--gpus", "16", "--gpus-per-node", "4", "--json", "--scaling",
                     str(TRACES / "elasticflow_scaling_a100.csv"), "--scaling-seed", "3", "--overhead", "grow=1.1")  # fmt: skip
    found = json.loads(text)
    assert code == 0 and found["parameters"]["devices per node"] == 4
    policy = found["policies"]["elastic_tiresias"]
    assert policy["jobs"] == 60 and policy["parameters"]["pending"] == 0
    assert policy["parameters"]["scaling"].endswith("elasticflow_scaling_a100.csv (14 curves, seed 3)")


def test_what_is_left_out_is_counted(tmp_path: Path) -> None:
    (tmp_path / "w.csv").write_text("job_id,submit_s,duration_s,num_gpus\na,0,5,1\nb,1,,1\n")
    code, text = run(str(tmp_path / "w.csv"), "--policy", "fifo", "--gpus", "1")
    assert code == 0 and "1 of 2 jobs have no duration_s and are left out (lines 3)" in text


def test_policies_that_share_devices() -> None:
    code, text = run(SMALL, "--policy", "antman", "--policy", "capacity", "--gpus", "16", "--json", "--model-seed", "2",
                     "--colocation", str(TRACES / "gavel_colocation.csv"), "--quota", "default=16")  # fmt: skip
    found = json.loads(text)
    assert code == 0 and found["parameters"]["sharing"]["measured pairs"] == 318
    assert found["policies"]["antman"]["jobs"] == 60 and found["policies"]["antman"]["parameters"]["busy"] == 0.8
    philly = str(TRACES / "philly_480.csv")
    code, text = run(philly, "--policy", "antman", "--gpus", "64", "--model-seed", "2")
    assert code == 0 and "480 of 480 jobs name no model: drawn from AntMan's mix, seed 2" in text
    code, text = run(SMALL, "--policy", "antman", "--gpus", "16", "--colocation", "nowhere.csv")
    assert code == 2 and "there is no file nowhere.csv" in text


def test_quotas() -> None:
    muri = str(TRACES / "muri_testbed_400.csv")
    code, text = run(muri, "--policy", "las", "--gpus", "64", "--quota", "A=32", "--quota", "B=32")
    assert code == 0 and "quotas: {'A': 32, 'B': 32}" in text
    code, text = run(muri, "--policy", "las", "--gpus", "64", "--quota", "A=64")
    assert code == 1 and "unknown tenant 'B'" in text


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("nowhere.csv", "--policy", "fifo", "--gpus", "4"), 1, "there is no file nowhere.csv"),
        ((str(TRACES / "gavel_colocation.csv"), "--policy", "fifo", "--gpus", "4"), 1, "lacks the columns job_id"),
        ((SMALL, "--policy", "fifa", "--gpus", "16"), 2, "there is no policy 'fifa'; did you mean 'fifo'?"),
        ((SMALL, "--policy", "fifo", "--gpus", "4"), 1, "10 of 60 jobs ask for more than the 4 devices"),
        ((SMALL, "--policy", "las", "--gpus", "16", "--set", "limit=3"), 2, "did you mean 'limits'?"),
        ((SMALL, "--policy", "las", "--gpus", "16", "--set", "limits"), 2, "write it as NAME=VALUE"),
        ((SMALL, "--policy", "las", "--gpus", "16", "--set", "limits=[3, 2]"), 2, "they are above 0 and rise"),
        ((SMALL, "--policy", "las", "--gpus", "16", "--set", "by=luck"), 2, "not by 'luck'"),
        ((SMALL, "--policy", "las", "--gpus", "16", "--overhead", "resume=soon"), 2, "a number of 0 or more"),
        ((SMALL, "--policy", "las", "--gpus", "16", "--overhead", "stop=1"), 2, "--overhead knows no 'stop'"),
    ],
)
def test_wrong_use(words: tuple[str, ...], code: int, says: str) -> None:
    found, text = run(*words)
    assert found == code and says in " ".join(text.split())
