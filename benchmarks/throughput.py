"""Training together against every way people share a machine, in one run.

Each way trains the same jobs (models, batches, optimizer settings, steps) in processes of its own, which have built,
compiled and warmed up before the clock. Rounds are interleaved, the order of ways is drawn anew in each. Without
``--only`` or ``--all``: the sets of jobs that a goal is about, and the demo's study.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from benchmarks import agreement, goals, report
from benchmarks.chart import draw
from benchmarks.ways import Track
from benchmarks.workers import SOLO, WAYS, Crew, Round, Way, WayError
from benchmarks.workloads import SETS, JobSet

STUDY = "study"
PAUSE = 0.1  # between rounds: threads of the last way stop spinning
QUICK_SHARE, QUICK_SETS = 0.25, ("mlp x2",)


@dataclass
class Measured:
    """What one way did with one set of jobs; ``failure`` says why it could not."""

    rounds: list[Round]
    ready_seconds: float = 0.0
    failure: str | None = None

    @property
    def speeds(self) -> list[float]:
        """Steps per second of all jobs together, for each round."""
        return [one.steps / one.seconds for one in self.rounds]


class Comparison:
    """All ways that fit a set of jobs, measured in rounds.

    Crews stay from round to round; in sets that cannot be kept they are made and warmed up again for each round.
    ``close`` ends their processes.
    """

    def __init__(self, jobs: JobSet, steps: Sequence[int]) -> None:
        self.jobs, self.steps = jobs, steps
        self.measured = {way.name: Measured([]) for way in WAYS.values() if way.fits(jobs)}
        self.crews: dict[str, Crew] = {}
        self.eager: list[Track] | None = None  # what the jobs' first steps look like; known when eager jobs are ready

    def run(self, repeats: int) -> None:
        """Rounds in a new random order each; kept crews are made ready before, as many at once as there are cores."""
        if self.jobs.kept:
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(self._ready, self.measured))
            for name, crew in self.crews.items():
                self._check(name, crew.warm)
                crew.run(self.steps)  # not counted
        report.interleaved({name: lambda name=name: self._round(name) for name in self.measured}, repeats)

    def close(self) -> None:
        """End all processes."""
        while self.crews:
            self.crews.popitem()[1].close()

    def _ready(self, name: str) -> None:
        done = self.measured[name]
        if name in self.crews or done.failure is not None:
            return
        try:
            crew = self.crews[name] = Crew(WAYS[name], self.jobs)
        except WayError as error:
            done.failure = str(error)
            return
        done.ready_seconds = done.ready_seconds or crew.ready_seconds
        if name == SOLO:
            self.eager = self.eager or crew.warm

    def _check(self, name: str, warm: Sequence[Track]) -> None:
        if self.eager is not None:
            agreement.check_warm_up(self.jobs, WAYS[name], warm, self.eager)

    def _round(self, name: str) -> float:
        self._ready(name)
        crew, done = self.crews.get(name), self.measured[name]
        if crew is None:
            return 0.0
        if not self.jobs.kept:
            self._check(name, crew.warm)
        time.sleep(PAUSE)
        try:
            done.rounds.append(crew.run(self.steps))
        except WayError as error:
            done.failure, done.rounds = str(error), []
        if not self.jobs.kept or done.failure is not None:
            self.crews.pop(name).close()
        return 0.0


def measure(jobs: JobSet, steps: Sequence[int], repeats: int) -> dict[str, Measured]:
    """Every way that fits the set, ``steps`` of each job in each round."""
    comparison = Comparison(jobs, steps)
    try:
        comparison.run(repeats)
    finally:
        comparison.close()
    return comparison.measured


def job_seconds(way: Way, one: Round) -> list[float]:
    """How long each job had to wait for its last step; where jobs take turns, all wait for the whole round."""
    return [one.seconds if way.takes_turns else track.ends[-1] - one.begin for track in one.tracks]


def solo_speeds(alone: Measured) -> list[float]:
    """Steps per second of each job alone, eager, torch's default threads: its own part of the rounds that take turns."""
    jobs = range(len(alone.rounds[0].tracks))
    tracks = [[one.tracks[job] for one in alone.rounds] for job in jobs]
    return [report.median([len(t.ends) / (t.ends[-1] - t.begin) for t in of_job]) for of_job in tracks]


def step_seconds(rounds: Sequence[Round]) -> list[float]:
    """Of all steps of all jobs; sorted."""
    tracks = [track for one in rounds for track in one.tracks]
    return sorted(end - begin for t in tracks for begin, end in zip([t.begin, *t.ends], t.ends))


def percentile(values: Sequence[float], share: float) -> float:
    """The lowest of sorted values that ``share`` of them do not exceed; of few values the highest."""
    return values[min(len(values) - 1, int(share * len(values)))]


def row(jobs: JobSet, way: Way, done: Measured, solo: Sequence[float] | None) -> dict[str, Any]:
    """One way's line in the table of a set."""
    if not done.rounds:
        return {"jobs": jobs.name, "way": way.name, "why not": done.failure}
    made: dict[str, Any] = {
        "jobs": jobs.name, "way": way.name, "steps/s": report.median(done.speeds), "spread": report.spread(done.speeds),
    }  # fmt: skip
    if solo is not None:
        alone = [[len(t.ends) / speed for t, speed in zip(one.tracks, solo, strict=True)] for one in done.rounds]
        in_sum = [sum(seconds) / one.seconds for seconds, one in zip(alone, done.rounds, strict=True)]
        by_round = [
            [s / taken for s, taken in zip(seconds, job_seconds(way, one), strict=True)]
            for seconds, one in zip(alone, done.rounds, strict=True)
        ]
        by_job = [report.median(list(of_job)) for of_job in zip(*by_round, strict=True)]
        made |= {"normalized": report.median(in_sum), "of": report.spread(in_sum), "per job": report.spread(by_job)}
        made["normalized by job"] = by_job
    durations = step_seconds(done.rounds)
    return made | {
        "p99 ms": percentile(durations, 0.99) * 1e3,
        "peak MiB": round(max(one.peak_bytes for one in done.rounds) / 2**20),
        "ready s": done.ready_seconds,
    }


def table(jobs: JobSet, measured: dict[str, Measured]) -> list[dict[str, Any]]:
    """A row for each way."""
    alone = measured[SOLO]
    solo = solo_speeds(alone) if alone.rounds else None
    return [row(jobs, WAYS[name], done, solo) for name, done in measured.items()]


def study_row(repeats: int) -> dict[str, Any]:
    """The demo's study, trials per hour against the best of its peers; its own doors as in ``benchmarks.study``."""
    from benchmarks import study  # which imports Optuna: the processes of ways, which import this file again, need not

    times, _ = study.measure(24, repeats)
    speeds = {way: [1 / taken for taken in of_way] for way, of_way in times.items()}
    peer = goals.best_of(speeds, study.PEERS)
    ours = goals.best_of(speeds, [way for way in speeds if way not in study.PEERS])
    assert peer is not None and ours is not None
    return goals.row("the demo's study", ours, f"best peer: {peer}", speeds[ours], speeds[peer], goals.STUDY_GOAL)


def chosen(arguments: argparse.Namespace) -> list[JobSet]:
    """Sets by the command line, in the order of their table.

    Raises:
        SystemExit: No set of jobs matches.
    """
    with_goals = dict.fromkeys(goal.jobs for goal in goals.GOALS)
    if arguments.only:
        sets = [made for name, made in SETS.items() if any(fnmatch(name, pattern) for pattern in arguments.only)]
        if not sets and not any(fnmatch(STUDY, pattern) for pattern in arguments.only):
            raise SystemExit(
                f"--only {' '.join(arguments.only)} matches no set of jobs; there are {', '.join((*SETS, STUDY))}. "
                "Patterns take * for anything: --only 'mlp*'"
            )
        return sets
    if arguments.quick:
        return [SETS[name] for name in QUICK_SETS]
    return list(SETS.values()) if arguments.all else [SETS[name] for name in with_goals]


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = report.parser(__doc__ or "")
    parser.set_defaults(repeats=None)
    parser.add_argument("--quick", action="store_true", help="one set, two short rounds: does it work here")
    parser.add_argument("--all", action="store_true", help="all sets: 2, 4 and 8 jobs of each workload, and mixed ones")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="sets by name, such as 'mlp x2' or '* x8'; 'study'")
    parser.add_argument("--chart", type=Path, help="where the bar chart goes; with --save beside the JSON")
    parser.add_argument("--share", type=float, help="of a round's steps, where the machine is slow [default: 1]")
    arguments = parser.parse_args(words)
    if arguments.share is None:
        arguments.share = QUICK_SHARE if arguments.quick else 1.0
    if not 0 < arguments.share <= 1:
        raise SystemExit(f"--share must be above 0 and at most 1; got {arguments.share}")
    if arguments.repeats is None:
        arguments.repeats = 2 if arguments.quick else 3
    if arguments.repeats < 1:
        raise SystemExit(f"--repeats must be 1 or more; got {arguments.repeats}")
    if arguments.chart is None and arguments.save:
        arguments.chart = report.RESULTS / "throughput.png"
    return arguments


def main(words: Sequence[str] | None = None) -> int:
    """Command line."""
    arguments = parse(words)
    sets = chosen(arguments)
    begin = time.perf_counter()

    def tell(what: str) -> None:
        print(f"{time.perf_counter() - begin:5.0f} s  {what}", file=sys.stderr, flush=True)

    rows: list[dict[str, Any]] = []
    speeds: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as compiled:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = compiled  # what is compiled first is compiled in full
        agreed = []
        for workload in dict.fromkeys(name for made in sets for name in made.workloads):
            tell(f"agreement of all ways on {workload}")
            agreed += agreement.rows(workload)
        for jobs in sets:
            tell(jobs.name)
            measured = measure(jobs, jobs.steps(arguments.share), arguments.repeats)
            rows += table(jobs, measured)
            speeds[jobs.name] = {name: done.speeds for name, done in measured.items() if done.rounds}
            for one in goals.rows({jobs.name: speeds[jobs.name]}):
                tell(f"{one['what']}, {jobs.name}: {one.get('ratio', 0.0):.2f} times {one['against']}, goal {one['at least']}")
    reached = goals.rows(speeds)
    with_study = any(fnmatch(STUDY, pattern) for pattern in arguments.only or ()) or not (arguments.only or arguments.quick)
    if with_study:
        tell(STUDY)
        reached.append(study_row(arguments.repeats))
    tell("done")
    if arguments.chart is not None and rows:
        draw(rows, arguments.chart)
    return report.finish(
        "throughput", arguments, reached, NOTE.format(repeats=arguments.repeats, threads=torch.get_num_threads()),
        {"the same losses (2 jobs, float64, no dropout)": agreed, "speed": rows},
    )  # fmt: skip


NOTE = (
    "medians and lowest .. highest of {repeats} rounds, {threads} intra-op threads by default. normalized: time of all "
    "jobs alone (eager, default threads) over the time together; per job: its speed over that alone. p99 of all steps of "
    "all jobs. peak MiB: highest resident memory (VmHWM) less that before the first model, in sum of the way's processes, "
    "warm-up and compiling included, Inductor's own processes not. ready s: build, compile or capture, warm up, "
    "as many ways at once as there are cores; not counted in speeds. tie: the spreads of both speeds overlap"
)

if __name__ == "__main__":
    sys.exit(main())
