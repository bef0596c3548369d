"""What a process really takes while it trains, beside the limit that it was given."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import MiB

LIMIT = 268 * MiB  # for a plan of 196 MiB and a reserve of 64
PROGRAM = f"""
from benchmarks.memory_limit import MODELS, TABLE, trained
MODELS["one"] = TABLE, 24_000
print(trained("one", {LIMIT}, steps=6))
"""


@pytest.mark.slow
def test_first_steps_and_planned_ones_stay_below_the_limit() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    assert 150 * MiB < int(done.stdout) <= 1.03 * LIMIT
