"""One line of progress."""

from __future__ import annotations

import sys
from typing import Any


class ProgressLine:
    """Counts ``what`` on one line of the terminal; silent where ``show`` is false or there is no terminal.

    It appears after ``delay`` seconds.
    """

    def __init__(self, total: int | None, what: str, show: bool, delay: float = 0.0) -> None:
        visible = show and sys.stderr.isatty()
        self._line: Any = None
        if visible:
            from tqdm.auto import tqdm  # slow to import

            self._line = tqdm(total=total, unit=f" {what}", dynamic_ncols=True, delay=delay)

    def advance(self, note: str = "") -> None:
        """One more is done; ``note`` is shown behind the count."""
        if self._line is not None:
            if note:
                self._line.set_postfix_str(note, refresh=False)
            self._line.update()

    def __enter__(self) -> ProgressLine:
        return self

    def __exit__(self, *_: object) -> None:
        if self._line is not None:
            self._line.close()
