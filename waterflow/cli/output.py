"""Output of all commands: tables or JSON, errors, pictures, and exit codes."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from waterflow.cli.references import ConfigError, one_line

if TYPE_CHECKING:
    from waterflow.executor.timeline import Timeline

FAILED, WRONG_USE = 1, 2  # exit codes
_ENDLESS = 10_000  # columns


class Pictures:
    """Saves a run's timeline as pictures in a folder, at the end of the run."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.files: dict[str, str] = {}

    def __call__(self, timeline: Timeline) -> None:
        """Save both pictures, unless nothing was recorded."""
        if len(timeline.spans) == 0:  # no trial or job came as far as a step
            return
        for name, file, save in (("memory", "memory.png", timeline.save_png), ("trace", "trace.json", timeline.save_trace)):
            path = self._folder / file
            save(path)
            self.files[name] = str(path)


def check_picture(path: Path) -> None:
    """Raise ConfigError if a picture cannot be written to this path."""
    # Checked before the search, which takes a while.
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--report: pictures are PNG files; call it {path.with_suffix('.png').name!r}, got {path.name!r}")
    if not path.parent.is_dir():
        raise ConfigError(f"--report: there is no folder {path.parent}; make it, or name another")


def table(title: str, columns: Iterable[str], left: Container[str] = (), wraps: Container[str] = ()) -> Table:
    """Return a table without rows. Columns are right-justified and do not wrap, except those in ``left`` and ``wraps``."""
    made = Table(title=title, title_justify="left", box=None)
    for column in columns:
        made.add_column(column, justify="left" if column in left else "right", no_wrap=column not in wraps)
    return made


class Terminal(contextlib.AbstractContextManager["Terminal"]):
    """A command's output: tables for people, or JSON, on stdout; errors as lines on stderr.

    Leaving it ends the command: with exit code 1 if something failed, 2 if the command or its config is wrong.
    """

    def __init__(self, as_json: bool, debug: bool) -> None:
        self.failures: dict[int, str] = {}  # of trials, by number
        self._as_json = as_json
        self._debug = debug
        self._failed = False
        # Without a terminal rich assumes 80 columns, which would wrap tables in logs.
        width = None if sys.stdout.isatty() else 160
        self._console = Console(width=width, highlight=False)
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Terminal:
        if self._as_json:  # what the user's code prints must not spoil it
            self._stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._stack.close()
        # 130 is 128 + SIGINT, as shells report it.
        if isinstance(error, KeyboardInterrupt):
            typer.echo("waterflow: interrupted", err=True)
            raise typer.Exit(130) from None
        if isinstance(error, Exception) and not isinstance(error, typer.Exit):
            if self._debug:
                return
            line = one_line(error)
            typer.echo(f"waterflow: {line}", err=True)
            if self._as_json:
                # Programs read stdout: it has JSON after a failure, too.
                typer.echo(json.dumps({"error": line}))
            raise typer.Exit(WRONG_USE if isinstance(error, ConfigError) else FAILED) from None
        if error is None and self._failed:
            raise typer.Exit(FAILED)

    def say(self, what: str | Table | Text) -> None:
        """Print a line, a table, or text as it is; nothing with --json."""
        if not self._as_json:
            # In a pipe or a file no column is cut.
            wide = isinstance(what, Table) and not self._console.is_terminal and not self.holds(what)
            self._console.print(what, width=_ENDLESS if wide else None, soft_wrap=isinstance(what, Text))

    @property
    def live(self) -> bool:
        """True if output goes to a terminal, and is not JSON."""
        return self._console.is_terminal and not self._as_json

    def holds(self, table: Table) -> bool:
        """Return True if the table fits the width without being cut."""
        endless = self._console.options.update(max_width=_ENDLESS)
        return self._console.measure(table, options=endless).maximum <= self._console.width

    def files(self, pictures: Pictures | None) -> None:
        """Print the paths of the pictures."""
        if pictures is not None and pictures.files:
            self.say(f"memory over time: {pictures.files['memory']}")
            self.say(f"trace:            {pictures.files['trace']} (open it at https://ui.perfetto.dev)")

    def fail(self, line: str, trace: str | None = None) -> None:
        """Print a failure, with ``trace`` under --debug, and let the command continue; it will exit with code 1."""
        self._failed = True
        typer.echo(f"waterflow: {line}", err=True)
        if self._debug and trace:
            typer.echo(trace, err=True)

    @contextlib.contextmanager
    def studies(self) -> Iterator[None]:
        """Inside, replace Optuna's log line per trial by tables and progress; failures are still printed."""
        import optuna  # sets up its logger

        terminal = self

        class Handler(logging.Handler):
            def emit(self, record: logging.LogRecord) -> None:
                said = str(record.msg)
                # Optuna has no callback for errors: its log record has the trial's number, and record.error is the
                # error.
                if "failed with parameters" in said and isinstance(record.args, tuple):
                    error = getattr(record, "error", None)
                    number, why = int(str(record.args[0])), one_line(error) if error else str(record.args[-1])
                    terminal.failures[number] = why
                    terminal.fail(f"trial {number} failed: {why}", "".join(format_exception(error)) if error else None)
                elif "failed with value" not in said:  # Optuna's second line on the same failure
                    typer.echo(f"optuna: {' '.join(record.getMessage().split())}", err=True)

        # A line per trial would tear the progress line apart; warnings still get through.
        log, level = logging.getLogger("optuna"), optuna.logging.get_verbosity()
        handler = Handler(logging.WARNING)
        optuna.logging.disable_default_handler()
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        log.addHandler(handler)
        try:
            yield
        finally:
            log.removeHandler(handler)
            optuna.logging.set_verbosity(level)
            optuna.logging.enable_default_handler()

    def result(self, report: dict[str, Any]) -> None:
        """Print the JSON report, with --json."""
        if self._as_json:
            self._stack.close()
            typer.echo(json.dumps(report, indent=2, default=str))
