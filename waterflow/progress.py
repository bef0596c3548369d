"""One line of progress, and a table at the end."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from waterflow.partition.byte_counts import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

    from waterflow.job import JobResult


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


def results_table(results: list[JobResult]) -> Table:
    """A table for people: one row per job."""
    from rich.table import Table

    table = Table(title="jobs")
    for column in ("job", "status", "value", "loss", "steps", "peak", "time"):
        table.add_column(column, justify="left" if column in ("job", "status") else "right")
    colours = {"completed": "green", "failed": "red", "pruned": "yellow", "cancelled": "yellow"}
    for result in results:
        peak = result.measured_peak or result.predicted_peak
        table.add_row(
            result.name,
            f"[{colours[result.status]}]{result.status}[/]",
            "" if result.value is None else f"{result.value:.4f}",
            f"{result.losses[-1]:.4f}" if result.losses else "",
            str(result.steps),
            "" if peak is None else format_bytes(peak),
            f"{result.seconds:.1f} s",
        )
    return table
