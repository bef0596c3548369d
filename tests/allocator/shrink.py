"""Failing tables of operations, made small (ddmin, after Zeller and Hildebrandt 2002) and kept as files."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.native import FuzzSetup

CASES = Path(__file__).parent / "cases"
Table = npt.NDArray[np.int64]


def shrink(table: Table, fails: Callable[[Table], bool], most_runs: int = 2000) -> Table:
    """Rows of a failing table, of which none can be left out (unless ``most_runs`` ends the search before)."""
    parts, runs = 2, 0
    while len(table) > 1 and runs < most_runs:
        length = -(-len(table) // parts)
        for begin in range(0, len(table), length):
            less = np.concatenate([table[:begin], table[begin + length :]])
            runs += 1
            if len(less) and fails(less):
                table, parts = less, max(parts - 1, 2)
                break
        else:
            if length == 1:
                break
            parts = min(len(table), 2 * parts)
    return table


def save(name: str, table: Table, setup: FuzzSetup, error: str) -> Path:
    """A case that tests run again from now on."""
    CASES.mkdir(exist_ok=True)
    path = CASES / f"{name}.json"
    path.write_text(json.dumps({"error": error, "setup": asdict(setup), "table": table.tolist()}) + "\n")
    return path


def load(path: Path) -> tuple[Table, FuzzSetup]:
    """What ``save`` wrote."""
    case = json.loads(path.read_text())
    return np.array(case["table"], dtype=np.int64).reshape(-1, 4), FuzzSetup(**case["setup"])
