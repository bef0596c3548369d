"""What a process really takes while it trains, beside the limit that it was given."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import MiB

PROGRAM = """
from benchmarks.memory_limit import MODELS, TABLE, planned, trained
MODELS["one"] = TABLE, 24_000
print(*{call})
"""


def told(call: str) -> list[int]:
    command = [sys.executable, "-c", PROGRAM.format(call=call)]
    return [int(word) for word in subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()]


@pytest.mark.needs_time("each process imports torch; steps are long enough for samples of the memory")
def test_first_steps_and_planned_ones_stay_below_the_limit() -> None:
    plan, limit = told("planned('one')")
    assert 190 * MiB < plan < limit < 1.5 * plan
    (most,) = told(f"[trained('one', {limit}, steps=6)]")
    assert most <= 1.03 * limit
