"""How long nothing was heard of somebody."""

from __future__ import annotations

import time


class Silence:
    """For how long nothing was heard, in seconds in which somebody listened.

    Who did not listen, as it was stopped itself or had other things to do, knows nothing of that time.
    """

    LONGEST = 0.5  # seconds that count between two looks

    def __init__(self) -> None:
        self._passed, self._looked = 0.0, time.monotonic()

    def passed(self) -> float:
        """The length so far; somebody listens now, and heard nothing."""
        now = time.monotonic()
        self._passed += min(now - self._looked, self.LONGEST)
        self._looked = now
        return self._passed

    def broken(self) -> None:
        """Something was heard."""
        self._passed, self._looked = 0.0, time.monotonic()
