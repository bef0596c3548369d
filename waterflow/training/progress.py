"""A line of progress on the terminal."""

from __future__ import annotations

import sys
from typing import Any


class ProgressLine:
    """Counts ``what`` on one line of the terminal, from ``delay`` seconds on.

    Prints nothing if ``show`` is false or stderr is no terminal.
    """

    def __init__(self, total: int | None, what: str, show: bool, delay: float = 0.0) -> None:
        visible = show and sys.stderr.isatty()
        self._line: Any = None
        if visible:
            from tqdm.auto import tqdm  # slow to import

            self._line = tqdm(total=total, unit=f" {what}", dynamic_ncols=True, delay=delay)

    def advance(self, note: str = "") -> None:
        """Count one more; ``note`` is shown after the count."""
        if self._line is not None:
            if note:
                self._line.set_postfix_str(note, refresh=False)
            self._line.update()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._line is not None:
            self._line.close()
