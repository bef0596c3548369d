"""Tables, JSON files and interleaved timing, shared by all benchmarks."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


def parser(description: str) -> argparse.ArgumentParser:
    """A command line with what all benchmarks take: --repeats, --json, --save."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    made.add_argument("--repeats", type=int, default=5, help="how often each variant is measured")
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    made.add_argument("--save", action="store_true", help="write the JSON to benchmarks/results/")
    return made


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as lines:
            model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": datetime.date.today().isoformat(),
        "command": " ".join(["python -m", _module(), *sys.argv[1:]]),
    }


def _module() -> str:
    spec = sys.modules["__main__"].__spec__
    return spec.name if spec is not None else Path(sys.argv[0]).stem


def interleaved(variants: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Measure each variant ``repeats`` times, in a new random order each round. Variants return seconds or a figure."""
    measured: dict[str, list[float]] = {name: [] for name in variants}
    order = list(variants)
    shuffle = random.Random(0)
    for _ in range(repeats):
        shuffle.shuffle(order)
        for name in order:
            measured[name].append(variants[name]())
    return measured


def seconds(work: Callable[[], Any]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def median(values: list[float]) -> float:
    """Of an even number of values, the mean of the middle two."""
    return statistics.median(values)


def spread(values: list[float]) -> str:
    """Lowest and highest value, for people."""
    return f"{min(values):.3g} .. {max(values):.3g}"


def ratio_of(slow: list[float], fast: list[float]) -> float:
    """The median ratio of values that were measured in the same rounds."""
    return median([s / f for s, f in zip(slow, fast)])


def finish_parts(
    name: str,
    parser: argparse.ArgumentParser,
    arguments: argparse.Namespace,
    parts: dict[str, Callable[[], list[dict[str, Any]]]],
) -> int:
    """Run the parts that ``arguments.parts`` names, or all, and finish; rows of named ones are saved under their names."""
    if unknown := {*arguments.parts} - parts.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}; parts are {', '.join(parts)}")
    rows: list[dict[str, Any]] = []
    for part in arguments.parts or parts:
        began = time.monotonic()
        rows += parts[part]()
        print(f"{part}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    if arguments.save and arguments.parts:
        arguments.save = RESULTS / f"{name}_{'_'.join(arguments.parts)}.json"
    return finish(name, arguments, rows)


def finish(
    name: str, arguments: argparse.Namespace, rows: list[dict[str, Any]], note: str = "",
    before: dict[str, list[dict[str, Any]]] | None = None,
) -> int:  # fmt: skip
    """Print rows as a table or JSON, save them if asked; returns 1 if a row misses its goal.

    ``before``: further tables by title, which are printed first and saved beside the rows. Lists in rows are for JSON.
    ``arguments.save`` is the file to write, or True for the benchmark's own among the results.
    """
    document = {"benchmark": name, "machine": machine(), "note": note, **(before or {}), "rows": rows}
    text = json.dumps(document, indent=2)
    if arguments.json:
        print(text)
    else:
        console = Console(width=None if sys.stdout.isatty() else 150)
        for title, part in (before or {}).items():
            console.print(_table(title, part))
        console.print(_table(name, rows, note))
    if arguments.save:
        path = arguments.save if isinstance(arguments.save, Path) else RESULTS / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return int(any(row.get("holds") is False for row in rows))


def _table(title: str, rows: list[dict[str, Any]], note: str = "") -> Table:
    table = Table(title=title, caption=note or None)
    columns = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list)))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    return table


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
