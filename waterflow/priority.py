"""Who comes first: guaranteed jobs, or those that take what they leave; and what those do with less memory than they need."""

from __future__ import annotations

from typing import Literal, get_args

from waterflow.errors import InvalidJobError

Priority = Literal["guaranteed", "opportunistic"]
BelowNeed = Literal["wait", "spill", "recompute"]


def check_priority(what: str, priority: object) -> None:
    """Raise InvalidJobError for a word that is no priority."""
    if priority not in get_args(Priority):
        raise InvalidJobError(f"{what}: priority must be 'guaranteed' or 'opportunistic'; got {priority!r}")


def check_below_need(what: str, below_need: object) -> None:
    """Raise InvalidJobError for what no job can do below its need."""
    if below_need not in get_args(BelowNeed):
        raise InvalidJobError(f"{what}: below_need must be 'wait', 'spill' or 'recompute'; got {below_need!r}")
