"""Who comes first: guaranteed jobs, or those that take what they leave."""

from __future__ import annotations

from typing import Literal, get_args

from waterflow.errors import InvalidJobError

Priority = Literal["guaranteed", "opportunistic"]


def check_priority(what: str, priority: object) -> None:
    """Raise InvalidJobError for a word that is no priority."""
    if priority not in get_args(Priority):
        raise InvalidJobError(f"{what}: priority must be 'guaranteed' or 'opportunistic'; got {priority!r}")
