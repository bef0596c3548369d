"""Every operator with a gradient that torch lists trains with the bits of the eager loop."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.imports import ROOT


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_operator_trains_as_eagerly() -> None:
    # In a process of its own: torch's list of operators forbids later changes of its settings.
    command = [sys.executable, "-m", "benchmarks.operators", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert row["operators"] > 500
