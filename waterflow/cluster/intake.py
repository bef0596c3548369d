"""Validation of submissions that arrive over the network, before anything is stored."""

from __future__ import annotations

import math
import os
import re
from pathlib import Path
from typing import Any

from waterflow.cluster.submission import Submission
from waterflow.errors import SubmissionError

# An id becomes a part of file names and addresses.
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_KINDS: dict[str, tuple[type, ...]] = {
    "id": (str,), "tenant": (str,), "devices": (int,), "priority": (str,), "auto": (bool,), "memory": (int,),
    "model": (str, type(None)), "duration": (int, float, type(None)), "time_limit": (int, float, type(None)),
}  # fmt: skip


MOST = 2**63 - 1  # the largest integer of SQLite


def check_file(id: str, path: str) -> None:
    """Raise SubmissionError unless ``path`` is a file that this process can read."""
    try:
        there = Path(path).is_file()
    except (OSError, ValueError) as error:  # too long, or of characters that no path has
        raise SubmissionError(f"job {id!r}: {path!r} can be no checkpoint: {error}") from None
    if not there:
        raise SubmissionError(f"job {id!r}: the machine of the cluster has no file {path}; copy it there")
    if not os.access(path, os.R_OK):
        raise SubmissionError(f"job {id!r}: the cluster may not read {path}; give its user the right to")


def check_text(key: str, value: str) -> None:
    """Raise SubmissionError for text that neither a file name nor the database can contain."""
    if "\0" in value or value != value.encode(errors="replace").decode():
        raise SubmissionError(f"{key} of a submission has characters that are no text: {value!r}")


def checked(given: dict[str, Any]) -> Submission:
    """Return the submission that a request describes. Raises SubmissionError."""
    for key, value in given.items():
        kinds = _KINDS.get(key)
        if kinds is None:
            raise SubmissionError(f"a submission has no {key!r}; it has {', '.join(_KINDS)}")
        # bool is a subclass of int: ``devices: true`` must not count as one device.
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise SubmissionError(f"{key} of a submission cannot be {value!r}")
        if isinstance(value, str):
            check_text(key, value)
    if not _ID.fullmatch(given.get("id", "")):
        raise SubmissionError(
            f"a job's id is 1 to 100 letters, digits, dots, dashes and underscores, the first a letter or a digit; "
            f"got {given.get('id')!r}"
        )
    if not 0 <= given.get("memory", 0) <= MOST:
        raise SubmissionError(f"job {given['id']!r}: memory must be a number of bytes; got {given['memory']}")
    if given.get("devices", 1) != 1:
        raise SubmissionError(
            f"job {given['id']!r}: devices must be 1, as a job runs on one device; got {given['devices']}. Submit several jobs "
            "each by itself, or the members of one with submit_apart"
        )
    duration = given.get("duration")
    if duration is not None and not (0 <= duration <= MOST and math.isfinite(duration)):
        raise SubmissionError(f"job {given['id']!r}: duration must be a number of seconds, 0 or more; got {duration}")
    limit = given.get("time_limit")
    if limit is not None and not (math.isfinite(limit) and limit > 0):
        raise SubmissionError(f"job {given['id']!r}: time_limit must be a positive number of seconds; got {limit}")
    return Submission(**given)
