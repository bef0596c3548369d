"""Two versions of this project, measured in turns: whether the new one trains as fast as the old one.

OLD and NEW are folders of checkouts, each with its extension built in place, or git revisions of this repository, which
are checked out and built in a temporary folder. Every measurement is a new process that imports waterflow from one
checkout and what is measured from *this* one's ``benchmarks`` and ``examples``: rows are sets of jobs of ``benchmarks.throughput``, and the
demo's study, each trained waterflow's way. Pairs of measurements begin with OLD and with NEW in turn. A ratio is
NEW's speed over OLD's in the same pair; above 1, NEW is faster.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.workloads import SATURATING, SETS, JobSet

ROOT = Path(__file__).resolve().parents[1]
ROWS = ("study", "mlp x2", "lenet x4")
STUDIES = {"study": "waterflow, job", "study, own loop": "waterflow, own loop"}  # the doors of ``benchmarks.study``
WAY, WAY_OF_ONE = "waterflow", "one thread, captured"

AS_FAST = 0.97  # a median ratio from here on holds
NARROW = 0.10  # and so does an interval around 1 that is no wider
LEVEL = 0.95
FEWEST_ROUNDS = 3
LIMIT_SECONDS = 600.0  # for one measurement, importing and warming up included


@dataclass(frozen=True)
class Version:
    """One of the two: what it was called on the command line, its folder, and the commit there."""

    name: str
    folder: Path
    commit: str


class MeasurementError(RuntimeError):
    """A version cannot train this row; the message is the end of what its process said."""


# -- figures


def interval_of_median(values: Sequence[float], level: float = LEVEL) -> tuple[float, float] | None:
    """What holds the median with at least ``level``, whatever the distribution; None where there are too few values.

    By order statistics: of n independent values, the number below the median is binomial (n, 1/2), so the k-th
    smallest and the k-th largest enclose it but with probability 2 P(fewer than k). k is the largest that ``level`` allows.
    """
    ordered, count = sorted(values), len(values)
    outside, rank = 0.0, 0
    while rank < count // 2:
        outside += 2 * math.comb(count, rank) / 2**count
        if outside > 1 - level:
            break
        rank += 1
    return (ordered[rank - 1], ordered[-rank]) if rank else None


def holds(ratios: Sequence[float]) -> bool:
    """Whether NEW is as fast as OLD: by the median, or because a narrow interval has 1 in it."""
    if report.median(list(ratios)) >= AS_FAST:
        return True
    interval = interval_of_median(ratios)
    return interval is not None and interval[0] <= 1 <= interval[1] and interval[1] - interval[0] <= NARROW


def row(name: str, old: Sequence[float], new: Sequence[float]) -> dict[str, Any]:
    """A row's line in the table, from the speeds of each pair."""
    ratios = [n / o for o, n in zip(old, new, strict=True)]
    interval = interval_of_median(ratios)
    return {
        "row": name, "old": report.median(list(old)), "new": report.median(list(new)),
        "new / old": report.median(ratios), "95 %": f"{interval[0]:.3f} .. {interval[1]:.3f}" if interval else "too few pairs",
        "spread": report.spread(ratios), "pairs": len(ratios), "at least": AS_FAST, "holds": holds(ratios),
        "ratios": ratios, "speeds of old": list(old), "speeds of new": list(new),
    }  # fmt: skip


# -- one measurement, in the process that is made for it


def measure_here(name: str, way: str, seconds: float, trials: int) -> dict[str, Any]:
    """The speed of one row in this process: trials per hour of a study, steps per second of all jobs together."""
    if name in STUDIES:
        from benchmarks import study

        study.optuna.logging.set_verbosity(study.optuna.logging.WARNING)
        ran = study.run_here(STUDIES[name], trials)
        return {"speed": trials / ran["seconds"] * 3600}
    return {"speed": speed_of_jobs(SETS[name], way, seconds)}


def speed_of_jobs(jobs: JobSet, name: str, seconds: float) -> float:
    """The median round of those that begin within ``seconds``, after a warm-up as in ``benchmarks.throughput``."""
    import torch

    from benchmarks.ways import RUNNERS
    from benchmarks.workers import WARM_LARGE_STEPS, WARM_STEPS, WAYS, Round
    from benchmarks.workloads import MadeJob

    if name not in WAYS:
        raise SystemExit(f"--way knows no {name!r}; there are {', '.join(WAYS)}")
    way = WAYS[name if WAYS[name].fits(jobs) else WAY_OF_ONE]
    threads = way.threads_for(jobs)
    if threads is not None:
        torch.set_num_threads(threads)
    runner = RUNNERS[way.runner]([MadeJob(spec) for spec in jobs.jobs])
    runner.run([WARM_LARGE_STEPS if jobs.kind == SATURATING else WARM_STEPS] * len(jobs.jobs))
    steps = jobs.steps()
    runner.run(steps)  # not counted
    speeds: list[float] = []
    end = time.perf_counter() + seconds
    while len(speeds) < FEWEST_ROUNDS or time.perf_counter() < end:
        one = Round(runner.run(steps), 0)
        speeds.append(one.steps / one.seconds)
    runner.close()
    return report.median(speeds)


def imported_from() -> dict[str, str]:
    """Where this process has waterflow and its extension from."""
    modules = {"package": "waterflow", "extension": "waterflow._C"}
    return {what: str(importlib.import_module(name).__file__) for what, name in modules.items()}


# -- processes, checkouts

# The zoo's models, with which benchmarks are defined, are this tree's for both.
BEGIN = """
import importlib.util, sys, waterflow
spec = importlib.util.spec_from_file_location("waterflow.zoo", {zoo!r})
waterflow.zoo = sys.modules["waterflow.zoo"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(waterflow.zoo)
from benchmarks import versions
sys.exit(versions.main())
"""


class Bench:
    """Starts a process for each measurement. ``definitions`` is a folder that holds this tree's benchmarks and examples alone."""

    def __init__(self, definitions: Path, way: str = WAY, seconds: float = 3.0, trials: int = 24) -> None:
        for name in ("benchmarks", "examples"):
            (definitions / name).symlink_to(ROOT / name, target_is_directory=True)
        self.definitions = definitions
        self.settings = ["--way", way, "--seconds", str(seconds), "--trials", str(trials)]

    def measure(self, version: Version, name: str) -> dict[str, Any]:
        """One measurement.

        Raises:
            MeasurementError: The process failed, or had waterflow from elsewhere.
        """
        paths = [str(self.definitions), str(version.folder), os.environ.get("PYTHONPATH", "")]
        # A safe path: neither the process nor those that it starts import from their working folder first.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-c", BEGIN.format(zoo=str(ROOT / "waterflow/zoo.py")), "--measure", name, *self.settings]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, cwd=version.folder, env=environment, timeout=LIMIT_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise MeasurementError(f"{version.name}: no answer within {LIMIT_SECONDS:.0f} seconds") from None
        if done.returncode != 0:
            raise MeasurementError(f"{version.name}: {last_line(done.stderr)}")
        answer: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
        for what, path in answer["from"].items():
            if not Path(path).resolve().is_relative_to(version.folder):
                raise MeasurementError(f"{version.name}: the {what} came from {path}, not from {version.folder}")
        return answer

    def compare(self, old: Version, new: Version, name: str, pairs: int) -> dict[str, Any]:
        """All pairs of one row, told on stderr as they come."""
        speeds: dict[str, list[float]] = {"old": [], "new": []}
        sides = [("old", old), ("new", new)]
        try:
            for number in range(pairs):
                for side, version in sides if number % 2 == 0 else sides[::-1]:
                    speeds[side].append(self.measure(version, name)["speed"])
                was, now = speeds["old"][-1], speeds["new"][-1]
                tell(f"{name}, pair {number + 1} of {pairs}: old {was:.4g}, new {now:.4g}, new / old {now / was:.3f}")
        except MeasurementError as error:
            tell(f"{name}: {error}")
            return {"row": name, "why not": str(error), "holds": False}
        return row(name, speeds["old"], speeds["new"])


def tell(what: str) -> None:
    """For whoever waits: results go to stdout."""
    print(what, file=sys.stderr, flush=True)


def last_line(said: str) -> str:
    """The end of a traceback: the error itself."""
    return (said.strip().splitlines() or ["its process ended and said nothing; was memory short?"])[-1][:300]


def git(folder: Path, *words: str) -> str:
    """What git answers there.

    Raises:
        subprocess.CalledProcessError: It answers with an error.
    """
    done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@contextmanager
def version(name: str) -> Iterator[Version]:
    """A checkout by its folder, or one made and built from a revision, which goes again at the end.

    Raises:
        SystemExit: It is neither, or it is not built.
    """
    folder = Path(name).expanduser().resolve()
    if (folder / "waterflow" / "__init__.py").is_file():
        if not list((folder / "waterflow").glob("_C*.so")):
            raise SystemExit(
                f"a checkout must hold its built extension; {folder}/waterflow has no _C*.so. "
                f"Build it: cd {folder} && python setup.py build_ext --inplace"
            )
        try:
            commit = git(folder, "describe", "--always", "--dirty")
        except subprocess.CalledProcessError:
            commit = "not under git"
        yield Version(name, folder, commit)
        return
    try:
        commit = git(ROOT, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
    except subprocess.CalledProcessError:
        raise SystemExit(
            f"OLD and NEW are folders of checkouts or git revisions; {name!r} is no folder with waterflow/__init__.py, "
            f"and git in {ROOT} knows no such revision. See: git log --oneline"
        ) from None
    with tempfile.TemporaryDirectory(prefix="waterflow-version-") as temporary:
        folder = Path(temporary).resolve() / "waterflow"
        git(ROOT, "worktree", "add", "--detach", str(folder), commit)
        try:
            tell(f"{name} ({commit[:9]}): building the extension, which takes minutes")
            built = subprocess.run(
                [sys.executable, "setup.py", "build_ext", "--inplace"], cwd=folder, capture_output=True, text=True
            )
            if built.returncode != 0:
                raise SystemExit(f"{name} ({commit[:9]}) does not build: {last_line(built.stderr)}")
            yield Version(name, folder, commit[:9])
        finally:
            git(ROOT, "worktree", "remove", "--force", str(folder))


# -- the command


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line.

    Raises:
        SystemExit: A row has no such name, or there are no pairs.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", nargs="?", metavar="OLD", help="a folder with a built checkout, or a git revision")
    parser.add_argument("new", nargs="?", metavar="NEW", help="the same; '.' for this tree")
    parser.add_argument("--pairs", type=int, default=10, help="measurements of each version in each row [10]")
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="ROW", help=f"what is trained {list(ROWS)}")
    parser.add_argument("--way", default=WAY, help=f"of 'python -m benchmarks.throughput', for sets of jobs ['{WAY}']")
    parser.add_argument("--seconds", type=float, default=3.0, help="of steps in one measurement [3]")
    parser.add_argument("--trials", type=int, default=24, help="of a study [24]")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--save", type=Path, metavar="FILE", help="where the JSON goes, all speeds in it")
    parser.add_argument("--measure", metavar="ROW", help=argparse.SUPPRESS)
    arguments = parser.parse_args(words)
    rows = [arguments.measure] if arguments.measure else arguments.rows
    unknown = [name for name in rows if name not in SETS and name not in STUDIES]
    if unknown:
        raise SystemExit(f"--rows knows no {', '.join(map(repr, unknown))}; there are {', '.join((*STUDIES, *SETS))}")
    if arguments.pairs < 1:
        raise SystemExit(f"--pairs must be 1 or more; got {arguments.pairs}")
    if not arguments.measure and (arguments.old is None or arguments.new is None):
        parser.error("OLD and NEW are needed: python -m benchmarks.versions HEAD~1 .")
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Command line; 1 where a row misses."""
    arguments = parse(words)
    if arguments.measure:
        measured = measure_here(arguments.measure, arguments.way, arguments.seconds, arguments.trials)
        print(json.dumps(measured | {"from": imported_from()}))
        return 0
    with ExitStack() as stack:
        old, new = (stack.enter_context(version(name)) for name in (arguments.old, arguments.new))
        definitions = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="waterflow-benchmarks-")))
        bench = Bench(definitions, arguments.way, arguments.seconds, arguments.trials)
        rows = [bench.compare(old, new, name, arguments.pairs) for name in arguments.rows]
    note = NOTE.format(old=f"{old.name} ({old.commit})", new=f"{new.name} ({new.commit})")
    return report.finish("versions", arguments, rows, note)


NOTE = (
    f"old: {{old}}; new: {{new}}. Speeds are medians, in trials per hour (study) or steps per second of all jobs; new / old is "
    f"the median of ratios within pairs, 95 % its interval by order statistics (binomial). A row holds with a median of "
    f"{AS_FAST} or more, or with 1 in an interval no wider than {NARROW}"
)

if __name__ == "__main__":
    sys.exit(main())
