"""Recorded learning curves: 300 random trials of each of two spaces, and how they are recorded.

    python -m benchmarks.curves {digits,table} [--trials 300]

Each trial has its values, the metric after each epoch, and the steps of an epoch. ``benchmarks.time_to_target`` replays them.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Recorded:
    """A trial's values, its metric after each epoch, and the training steps of an epoch."""

    params: dict[str, Any]
    curve: list[float]
    steps: float


def load(space: str) -> list[Recorded]:
    """Return the recorded trials of a space."""
    with gzip.open(FOLDER / f"{space}.json.gz", "rt") as file:
        return [Recorded(**trial) for trial in json.load(file)]


def save(space: str, trials: list[Recorded]) -> None:
    """Write them."""
    text = json.dumps([vars(trial) for trial in trials])
    (FOLDER / f"{space}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
