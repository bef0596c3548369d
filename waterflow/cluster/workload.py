"""Workloads, logs of jobs submitted to a cluster, read from CSV files. Times are seconds."""

from __future__ import annotations

import csv
import math
from dataclasses import dataclass, field
from pathlib import Path

from waterflow.cluster.submission import Submission
from waterflow.errors import WorkloadError

COLUMNS = ("job_id", "submit_s", "duration_s", "num_gpus")  # tenant, model and priority may be there, too
_MOST_SHOWN = 3


@dataclass(frozen=True)
class Workload:
    """Submissions in the order of their times; ``notes`` say which rows of the file were left out."""

    name: str
    submissions: list[Submission]
    notes: list[str] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.submissions)


def read_workload(path: Path | str) -> Workload:
    """Read the workload of a CSV file with at least the columns ``COLUMNS``. Raises WorkloadError.

    Rows without a duration cannot be simulated and are left out, with a note that counts them. Rows of equal times keep the
    order of the file. A column ``priority`` has 0 or "guaranteed", 1 or "opportunistic".
    """
    path = Path(path)
    if not path.is_file():
        raise WorkloadError(f"there is no file {path}")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise WorkloadError(
                f"{path} lacks the columns {', '.join(missing)}; a workload has {', '.join(COLUMNS)}, and may have "
                "tenant, model and priority"
            )
        found, empty, wrong, seen = [], [], [], set[str]()
        for line, row in enumerate(reader, start=2):
            if not (row["duration_s"] or "").strip():
                empty.append(line)
                continue
            try:
                found.append(_submission(row))
            except (ValueError, TypeError) as error:
                # Collected, so that the user can correct several lines at once.
                wrong.append(f"line {line}: {error}")
                continue
            if found[-1].id in seen:
                wrong.append(f"line {line}: job_id {found[-1].id!r} appears twice")
            seen.add(found[-1].id)
    if wrong:
        more = f"; and {len(wrong) - _MOST_SHOWN} more" if len(wrong) > _MOST_SHOWN else ""
        raise WorkloadError(f"{path}: {'; '.join(wrong[:_MOST_SHOWN])}{more}. Correct these lines, or take them out")
    if not found:
        raise WorkloadError(f"{path} has no job with a duration ({len(empty)} rows without one)")
    notes = []
    if empty:
        lines = ", ".join(map(str, empty[:_MOST_SHOWN])) + (", ..." if len(empty) > _MOST_SHOWN else "")
        notes.append(f"{len(empty)} of {len(empty) + len(found)} jobs have no duration_s and are left out (lines {lines})")
    found.sort(key=lambda submission: submission.submitted)
    return Workload(path.stem, found, notes)


def _submission(row: dict[str, str]) -> Submission:
    devices = int(row["num_gpus"])
    if devices < 1:
        raise ValueError(f"num_gpus is {devices}; at least 1 is needed")
    priority = (row.get("priority") or "guaranteed").strip()
    priority = {"0": "guaranteed", "1": "opportunistic"}.get(priority, priority)
    if priority not in ("guaranteed", "opportunistic"):
        raise ValueError(f"priority is {priority!r}; it is 0 or guaranteed, 1 or opportunistic")
    return Submission(
        id=row["job_id"],
        tenant=row.get("tenant") or "default",
        devices=devices,
        priority=priority,  # type: ignore[arg-type]
        model=row.get("model") or None,
        duration=_seconds(row, "duration_s"),
        submitted=_seconds(row, "submit_s"),
    )


def _seconds(row: dict[str, str], column: str) -> float:
    value = float(row[column])
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{column} is {row[column]}; it is a number of seconds, 0 or more")
    return value
