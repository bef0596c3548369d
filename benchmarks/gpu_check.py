"""Everything on one GPU, in one command of nine minutes: bits first, then speed; three files, whole after each part.

``python -m benchmarks.gpu_check --out FOLDER --seconds 530``. A part has cases, each a process, several at once where
nothing is timed. Behind the truths (parts 1 to 4) stands a gate: where the card, the plain network's bits or jobs side by
side fail, nothing is timed, so that the fault can be mended within the time that a GPU is there. ``--again`` runs what
has failed or had no time, and keeps all that it prints.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SECONDS = 530.0
NOT_MEASURED = "not measured"
MARK = "GPU_CHECK_RESULT "
DONE, FAILED, STOPPED, NO_TIME, NOT_RUN = "done", "failed", "stopped", "no time", "not run"
TO_END = 15.0  # seconds that cases which are under way have when the gate closes
MOST_LOG = 200_000  # characters of a case's output that are kept


@dataclass(frozen=True)
class Case:
    """One process. ``owes``: the figures that it must print."""

    name: str
    command: tuple[str, ...]
    owes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Part:
    """Cases with one time limit in seconds for all of them. ``gate``: whether nothing is timed where this case fails."""

    number: int
    name: str
    cases: Callable[[], Iterable[Case]]
    limit: float
    at_once: int = 1
    timed: bool = False
    gate: Callable[[str], bool] = lambda case: False


@dataclass
class Outcome:
    """What came of a case; ``reason`` where something is missing, ``log`` the end of what it printed."""

    part: int
    case: str
    status: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    log: str = ""


def own(name: str, *arguments: str) -> tuple[str, ...]:
    """The command of a case that is measured by this package."""
    return (sys.executable, "-m", "benchmarks.gpu_parts", name, *arguments)


def test(name: str, *options: str) -> tuple[str, ...]:
    """The command of a test of tests/gpu."""
    return (sys.executable, "-m", "pytest", "--all", "-p", "no:cacheprovider", *options, f"tests/gpu/{name}")


def tests() -> Iterable[Case]:
    """Each test of tests/gpu, by name; those of captures, streams and memory first."""
    told = subprocess.run(test("", "--collect-only"), cwd=ROOT, env=environment(), capture_output=True, text=True).stdout
    first = ("captures", "streams", "limit", "memory", "engine", "results", "forms", "front_door")
    found = [line.strip().removeprefix("tests/gpu/") for line in told.splitlines() if "::" in line]
    if not found:
        yield Case("tests/gpu", test("", "--collect-only"), ("tests",))  # says why there is none
    for name in first:
        for one in found:
            if one.startswith(f"test_{name}.py::"):
                yield Case(one, test(one))


BITS = ("as_torch", "graphs_as_plain", "graphs_launched")
NETWORKS = ("mlp", "cnn", "attention", "attention dropout", "attention bf16", "attention bf16 dropout", "lstm")
ONE = ("torch", "whole_step_graph", "plain", "graphs", "graphs_launched")
SPEED = ("one_after_the_other", "a_process_each", "vmap", "ours_2_lanes", "ours_4_lanes", "reserved_bytes")


def parts() -> list[Part]:
    """All of them, in order of value."""
    together = [Case(f"{count} jobs, {kind}", test(f"test_together.py::test_bits_as_alone_where_lanes_meet[{count}-dropout-{on}]"))
                for kind, on in (("plain", False), ("graphs", True)) for count in (2, 4, 8)]  # fmt: skip
    together += [Case("memory", own("memory"), ("device_bytes", "ours_bytes", "limit_bytes", "within_limit"))]
    fast = [Case(name, own("one", name), ONE) for name in ("deep mlp", "tiny transformer", "resnet-18", "bert bf16")]
    many = [Case(f"{count} jobs", own("many", str(count)), SPEED) for count in (2, 4, 8)]
    card = Case("card", own("card"), ("gpu", "driver", "torch", "allocator"))
    page = Case("one page, two addresses", test("test_memory.py::test_both_addresses_of_a_page_agree_behind_an_event", "-s"),
                ("granularity_bytes", "two_addresses"))  # fmt: skip
    networks = [Case(name, own("bits", name), BITS) for name in NETWORKS]
    return [
        Part(1, "the card", lambda: [card, page], 30, 2, gate=lambda case: True),
        Part(2, "one job each", lambda: networks, 70, 6, gate=lambda case: case == "mlp"),
        Part(3, "tests", tests, 80, 6),
        Part(4, "jobs side by side", lambda: together, 80, 3, gate=lambda case: True),
        Part(5, "one job, timed", lambda: fast, 60, timed=True),
        Part(6, "several jobs, timed", lambda: many, 100, timed=True),
        Part(7, "the planned largest batch", lambda: [Case("resnet-50", own("largest"), ("batch", "predicted_bytes", "peak_bytes"))],
             30, timed=True),
        Part(8, "guaranteed beside opportunistic", lambda: [Case("mlp", own("guaranteed"), ("p50_alone_ms", "p50_beside_ms",
             "p99_alone_ms", "p99_beside_ms"))], 30, timed=True),
        Part(9, "the demo's study", lambda: [Case("study", own("study"), ("ours_seconds", "optuna_seconds"))], 50, timed=True),
        Part(10, "tools", lambda: [Case("memcheck", own("memcheck"), ("errors",)), Case("host time", own("host_time"),
             ("python_us", "issue_us"))], 150, 2),
    ]  # fmt: skip


def shows_of(network: str) -> str:
    """The timed case that a network's bits stand for."""
    return {"attention": "tiny transformer", "attention bf16": "bert bf16", "cnn": "resnet-18"}.get(network, "")


def environment() -> dict[str, str]:
    """Of each process: the clone comes first among what can be imported, and nothing that was carried along is lost."""
    carried = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([str(ROOT), *([carried] if carried else [])])
    return {**os.environ, "PYTHONUNBUFFERED": "1", "PYTHONPATH": path, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def run(part: int, case: Case, left: Callable[[], float], most_log: int | None = MOST_LOG) -> Outcome:
    """Run a case for as long as ``left()`` is above 0 seconds; it and all that it started are gone afterwards."""
    start = time.monotonic()
    made = Outcome(part, case.name, DONE, figures=dict.fromkeys(case.owes, NOT_MEASURED))
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        try:
            process = subprocess.Popen(
                case.command, cwd=ROOT, env=environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            made.status, made.reason = FAILED, f"cannot start: {error}"
            return made
        while process.poll() is None and left() > 0:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(0.5, max(left(), 0.01)))
        if process.poll() is None:
            made.status, made.reason = STOPPED, f"it was stopped after {time.monotonic() - start:.0f} s"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the session that it began
        process.wait()
        output.seek(0)
        printed = output.read()
    made.seconds, made.log = time.monotonic() - start, printed if most_log is None else printed[-most_log:]
    for line in printed.splitlines():
        if line.startswith(MARK):
            try:
                made.figures |= json.loads(line[len(MARK) :])
            except (ValueError, TypeError) as error:
                made.status, made.reason = FAILED, f"its figures cannot be read: {error}"
    return judged(made, process.returncode)


def judged(made: Outcome, code: int) -> Outcome:
    """The outcome with its status: a case has failed that ends badly, owes a figure, or has found something to be wrong."""
    wrong = [name for name, value in made.figures.items() if value is False or (name == "graphs_launched" and value == 0)]
    missing = [name for name, value in made.figures.items() if value == NOT_MEASURED]
    if made.status != DONE:
        return made
    if code != 0:
        made.reason = f"exit status {code}" if code > 0 else f"it died of signal {-code}"
    elif missing:
        made.reason = f"it did not print {', '.join(missing)}"
    elif wrong:
        made.reason = f"wrong: {', '.join(wrong)}"
    if made.reason:
        made.status = FAILED
    return made


@dataclass
class Check:
    """One run of the command: what has come of each case so far, written after each part."""

    folder: Path
    seconds: float
    runner: Callable[..., Outcome] = run
    most_log: int | None = MOST_LOG
    outcomes: list[Outcome] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    has_gate: bool = True
    closed: str = ""  # why
    closed_at: float = math.inf

    @property
    def left(self) -> float:
        """Seconds."""
        return self.seconds - (time.monotonic() - self.began)

    def part(self, part: Part, wanted: Callable[[int, str], bool]) -> None:
        """Run a part's cases within its limit, and write the files."""
        if self.closed:
            self.outcomes.append(Outcome(part.number, "all", NOT_RUN, reason=self.closed))
            return self.write()
        end = time.monotonic() + min(part.limit, self.left)
        wrong = {shows_of(one.case) for one in self.outcomes if one.part == 2 and one.status != DONE}

        def left() -> float:
            return min(end, self.closed_at + TO_END) - time.monotonic()

        def one(case: Case) -> Outcome:
            owed = dict.fromkeys(case.owes, NOT_MEASURED)
            if self.closed:
                return Outcome(part.number, case.name, NOT_RUN, 0.0, owed, self.closed)
            if part.timed and case.name in wrong:
                return Outcome(part.number, case.name, NOT_RUN, 0.0, owed, "bits that it stands on were wrong")
            if left() < 1:
                return Outcome(part.number, case.name, NO_TIME, 0.0, owed, f"no time was left of {part.limit:.0f} s")
            made = self.runner(part.number, case, left, self.most_log)
            if made.status != DONE and self.has_gate and part.gate(case.name) and not self.closed:
                self.closed, self.closed_at = f"part {part.number} has failed: {case.name}: {made.reason}", time.monotonic()
            return made

        with ThreadPoolExecutor(part.at_once) as pool:
            self.outcomes += pool.map(one, [case for case in part.cases() if wanted(part.number, case.name)])
        self.write()

    def document(self) -> dict[str, Any]:
        """All that is known so far."""
        return {
            "benchmark": "gpu_check",
            "command": "python -m benchmarks.gpu_check",
            "date": time.strftime("%Y-%m-%d"),
            "seconds": round(time.monotonic() - self.began, 1),
            "gate": self.closed or "open",
            "cases": [{k: v for k, v in asdict(one).items() if k != "log"} for one in self.outcomes],
        }

    def write(self) -> None:
        """The three files, each whole at any time."""
        self.folder.mkdir(parents=True, exist_ok=True)
        logs = [f"==== {one.part} {one.case}: {one.status} {one.reason}\n{one.log}\n" for one in self.outcomes]
        document = self.document()
        for name, text in (
            ("gpu_check.json", json.dumps(document, indent=2) + "\n"),
            ("gpu_check.md", markdown(document)),
            ("log.txt", "".join(logs)),
        ):
            fresh = self.folder / f".{name}"
            fresh.write_text(text)
            fresh.replace(self.folder / name)


def text_of(value: Any) -> str:
    """For a table."""
    if isinstance(value, dict):
        return f"{text_of(value['median'])} ({text_of(value['least'])} to {text_of(value['most'])})"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def markdown(document: dict[str, Any]) -> str:
    """The document for people."""
    names = {part.number: part.name for part in parts()}
    card = next((one["figures"].get("gpu", NOT_MEASURED) for one in document["cases"] if one["part"] == 1), NOT_MEASURED)
    lines = ["# One GPU, everything", "", f"{document['date']}, `{document['command']}`; {card}; {document['seconds']:.0f} s. Gate: "
             f"{document['gate']}.", "", "| part | case | outcome | seconds | figures | card |", "|---|---|---|---|---|---|"]  # fmt: skip
    for one in document["cases"]:
        status = one["status"] + (f": {one['reason']}" if one["reason"] else "")
        figures = "; ".join(f"{name} {text_of(value)}" for name, value in one["figures"].items())
        cells = [f"{one['part']} {names[one['part']]}", one["case"], status, f"{one['seconds']:.0f}", figures, str(card)]
        lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None, runner: Callable[..., Outcome] = run) -> int:
    """Command line; 0 where every case has done what it should."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu_check", help="folder of the three files")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for all parts together")
    parser.add_argument("--only", nargs="*", type=int, help="numbers of parts; without it 1 to 9")
    parser.add_argument("--again", type=Path, help="a gpu_check.json: what failed there, or had no time")
    given = parser.parse_args(arguments)
    partly = bool(given.again or given.only)
    check = Check(given.out, given.seconds, runner, None if given.again else MOST_LOG, has_gate=not partly)
    before = json.loads(given.again.read_text())["cases"] if given.again else []
    again = {(one["part"], one["case"]) for one in before if one["status"] != DONE}
    numbers = given.only or ([part for part, _ in again] if given.again else range(1, 10))
    for part in parts():
        if part.number in numbers:
            check.part(part, lambda number, case: not again or (number, case) in again or (number, "all") in again)
    print((given.out / "gpu_check.md").read_text() if check.outcomes else "there was nothing to run")
    return int(any(outcome.status != DONE for outcome in check.outcomes))


if __name__ == "__main__":
    sys.exit(main())
