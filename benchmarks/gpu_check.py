"""Everything on one GPU, in one command and under ten minutes: build, tests, figures; one JSON and one Markdown file.

``python -m benchmarks.gpu_check``. Each part runs in a process of its own with a time limit, so that one which fails or
hangs loses nothing but itself. What was not measured is written as not measured, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TOTAL_SECONDS = 570.0
NOT_MEASURED = "not measured"
MARK = "GPU_CHECK_RESULT "


@dataclass(frozen=True)
class Part:
    """One command: what it is for, its time limit in seconds, and the figures that it owes."""

    name: str
    command: tuple[str, ...]
    limit: float
    figures: tuple[str, ...]
    read: Callable[[str], dict[str, Any]]


@dataclass(frozen=True)
class Ran:
    """How a command ended: its exit status (None: it was stopped), what it printed, and how long it took."""

    status: int | None
    output: str
    seconds: float


@dataclass
class Outcome:
    """What came of a part; ``reason`` where something is missing."""

    name: str
    status: str
    seconds: float
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    tail: str = ""


def read_result(output: str) -> dict[str, Any]:
    """The figures that a part of ours has printed."""
    lines = [line for line in output.splitlines() if line.startswith(MARK)]
    return dict(json.loads(lines[-1][len(MARK) :])) if lines else {}


def read_tests(output: str) -> dict[str, Any]:
    """Counts from pytest's last line."""
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)s?\b", output)}
    if not counts:
        return {}
    return {"passed": counts.get("passed", 0), "failed": counts.get("failed", 0) + counts.get("error", 0),
            "skipped": counts.get("skipped", 0)}  # fmt: skip


def own(name: str, *arguments: str) -> tuple[str, ...]:
    """The command of a part that is measured by this package."""
    return (sys.executable, "-m", "benchmarks.gpu_parts", name, *arguments)


def parts() -> list[Part]:
    """All of them, in order: what the others stand on comes first."""
    build = (sys.executable, "setup.py", "build_ext", "--inplace")
    tests = (sys.executable, "-m", "pytest", "tests/gpu", "-q", "-rs", "--timeout=60", "-p", "no:cacheprovider")
    return [
        Part("device", own("device"), 60, ("gpu", "memory_bytes", "torch", "cuda"), read_result),
        Part("build", build, 280, (), lambda output: {}),
        Part("tests", tests, 170, ("passed", "failed", "skipped"), read_tests),
        Part("requests", own("requests"), 40, ("planned_ns", "unplanned_ns", "torch_ns"), read_result),
        Part("device graphs", own("graphs"), 60, ("bitwise", "plain_steps_per_second", "graph_steps_per_second",
                                                  "graphs_launched"), read_result),
        Part("solo", own("jobs", "1"), 50, ("samples_per_second", "reserved_bytes", "limit_bytes"), read_result),
        Part("two jobs", own("jobs", "2"), 60, ("samples_per_second", "reserved_bytes", "limit_bytes"), read_result),
        Part("four jobs", own("jobs", "4"), 70, ("samples_per_second", "reserved_bytes", "limit_bytes"), read_result),
    ]  # fmt: skip


def run(command: Sequence[str], limit: float) -> Ran:
    """Run a command; it and all that it started end at the limit."""
    start = time.monotonic()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        list(command), cwd=ROOT, env=environment, text=True, errors="replace", start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = process.communicate(timeout=limit)
        return Ran(process.returncode, output, time.monotonic() - start)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the session that it began
        output, _ = process.communicate()
        return Ran(None, output, time.monotonic() - start)


def check(all_parts: Sequence[Part], runner: Callable[[Sequence[str], float], Ran], total: float) -> list[Outcome]:
    """Run the parts one after the other within ``total`` seconds."""
    outcomes: list[Outcome] = []
    left = total
    for part in all_parts:
        missing = dict.fromkeys(part.figures, NOT_MEASURED)
        if left < 5:
            reason = f"no time was left of {total:.0f} s"
            outcomes.append(Outcome(part.name, NOT_MEASURED, 0.0, missing, reason))
            continue
        limit = min(part.limit, left)
        try:
            ran = runner(part.command, limit)
        except OSError as error:
            ran = Ran(-1, f"cannot start: {error}", 0.0)
        left -= ran.seconds
        outcome = Outcome(part.name, "done", ran.seconds, missing, tail=ran.output[-2000:])
        try:
            found = part.read(ran.output)
        except (ValueError, TypeError) as error:
            found, outcome.reason = {}, f"its output cannot be read: {error}"
        outcome.figures = missing | found
        if ran.status is None:
            outcome.status, outcome.reason = "stopped", f"it took longer than {limit:.0f} s"
        elif ran.status != 0:
            outcome.status, outcome.reason = "failed", f"exit status {ran.status}"
        elif any(outcome.figures[name] == NOT_MEASURED for name in part.figures):
            outcome.status, outcome.reason = "incomplete", outcome.reason or "it did not print all of its figures"
        outcomes.append(outcome)
    return outcomes


def conclusions(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Figures that follow from several parts."""
    by_name = {outcome.name: outcome.figures for outcome in outcomes}

    def figure(part: str, name: str) -> float | None:
        value = by_name.get(part, {}).get(name)
        return float(value) if isinstance(value, (int, float)) else None

    found: dict[str, Any] = {}
    solo = figure("solo", "samples_per_second")
    for part in ("two jobs", "four jobs"):
        together = figure(part, "samples_per_second")
        found[f"{part} against one after the other"] = together / solo if solo and together else NOT_MEASURED
    for part in ("solo", "two jobs", "four jobs"):
        reserved, limit = figure(part, "reserved_bytes"), figure(part, "limit_bytes")
        found[f"memory of {part} over its limit"] = reserved / limit if reserved and limit else NOT_MEASURED
    return found


def text_of(value: Any) -> str:
    """For a table."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def markdown(document: dict[str, Any]) -> str:
    """The document for people."""
    lines = ["# One GPU, everything", "", f"{document['date']}, `{document['command']}`", ""]
    lines += ["| part | outcome | seconds | figure | value |", "|---|---|---|---|---|"]
    for part in document["parts"]:
        status = part["status"] + (f": {part['reason']}" if part["reason"] else "")
        head = f"| {part['name']} | {status} | {part['seconds']:.0f} |"
        rows = [f" {name} | {text_of(value)} |" for name, value in part["figures"].items()] or ["  |  |"]
        lines += [(head if i == 0 else "| | | |") + row for i, row in enumerate(rows)]
    lines += ["", "| from several parts | |", "|---|---|"]
    lines += [f"| {name} | {text_of(value)} |" for name, value in document["conclusions"].items()]
    troubled = [part for part in document["parts"] if part["status"] not in ("done", NOT_MEASURED)]
    for part in troubled:
        lines += ["", f"## The end of what `{part['name']}` printed", "", "```", part["tail"].strip(), "```"]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None, runner: Callable[[Sequence[str], float], Ran] = run) -> int:
    """Command line; 0 where every part has done what it should."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu_check.json and gpu_check.md")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="for all parts together")
    parser.add_argument("--only", nargs="*", default=None, help="names of parts to run; the others are not measured")
    given = parser.parse_args(arguments)
    wanted = [part for part in parts() if given.only is None or part.name in given.only]
    outcomes = check(wanted, runner, given.seconds)
    document = {
        "benchmark": "gpu_check",
        "command": "python -m benchmarks.gpu_check",
        "date": time.strftime("%Y-%m-%d"),
        "parts": [asdict(outcome) for outcome in outcomes],
        "conclusions": conclusions(outcomes),
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gpu_check.json").write_text(json.dumps(document, indent=2) + "\n")
    (given.out / "gpu_check.md").write_text(markdown(document))
    print(markdown(document))
    return int(any(outcome.status != "done" for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
