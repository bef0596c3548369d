"""The benchmark of what captures cost runs, and tells whether its limits hold."""

from __future__ import annotations

import json
import os

import pytest

from benchmarks import capture_cost


@pytest.mark.needs_time("it measures first steps, and asserts none")
def test_rows_say_how_long_a_first_step_takes_and_of_what(capsys: pytest.CaptureFixture[str]) -> None:
    before = os.environ.get("WATERFLOW_AUDIT")
    words = ["--repeats", "1", "--nets", "mlp1", "cnn1", "--asked", "20 modules", "--json"]
    code = capture_cost.main([*words, "--threads", "1"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["what"].rpartition(",")[0] for row in rows] == [
        "first step, mlp of depth 1", "first step, cnn of depth 1", "first step, all of them", "asked before a step, 20 modules",
    ]  # fmt: skip
    assert all(row["median"] > 0 for row in rows)
    assert code == int(any(row.get("holds") is False for row in rows))
    parts = dict(part.rsplit(" ", 1) for part in rows[0]["parts"].split(", ") if part[-1].isdigit())
    assert float(parts["trace"]) > 0 and float(parts["audit"]) > 0
    assert os.environ.get("WATERFLOW_AUDIT") == before


def test_a_limit_that_does_not_hold_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_cost, "MOST_FIRST_STEP", 0.0)
    assert capture_cost.main(["--repeats", "1", "--nets", "mlp1", "--asked", "--threads", "1"]) == 1
