"""What users hand in over the wire, checked before anything is kept of it."""

from __future__ import annotations

import re
from typing import Any

from waterflow.cluster.submission import Submission
from waterflow.errors import SubmissionError

_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_KINDS: dict[str, tuple[type, ...]] = {
    "id": (str,), "tenant": (str,), "devices": (int,), "priority": (str,), "auto": (bool,), "memory": (int,),
    "model": (str, type(None)), "duration": (int, float, type(None)),
}  # fmt: skip


def check_text(key: str, value: str) -> None:
    """Raise SubmissionError for characters that can be in no name of a file and in no database."""
    if "\0" in value or value != value.encode(errors="replace").decode():
        raise SubmissionError(f"{key} of a submission has characters that are no text: {value!r}")


def checked(given: dict[str, Any]) -> Submission:
    """What came over the wire, as a submission. Raises SubmissionError."""
    for key, value in given.items():
        kinds = _KINDS.get(key)
        if kinds is None:
            raise SubmissionError(f"a submission has no {key!r}; it has {', '.join(_KINDS)}")
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise SubmissionError(f"{key} of a submission cannot be {value!r}")
        if isinstance(value, str):
            check_text(key, value)
    if not _ID.fullmatch(given.get("id", "")):
        raise SubmissionError(
            f"a job's id is 1 to 100 letters, digits, dots, dashes and underscores, the first a letter or a digit; "
            f"got {given.get('id')!r}"
        )
    if given.get("memory", 0) < 0:
        raise SubmissionError(f"job {given['id']!r}: memory must be a number of bytes; got {given['memory']}")
    return Submission.from_dict(given)
