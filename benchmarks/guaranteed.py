"""What a guaranteed job loses beside an opportunistic one, and what that one keeps.

A guaranteed job trains in a loop, in turn with and without an opportunistic job that never pauses. Each pair has two windows
without it and one with it between them, so that what drifts on the machine is seen as the difference of the first two.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

import waterflow as wf
from benchmarks import report
from benchmarks.workloads import JobSpec, MadeJob

MEDIAN_GOAL, TAIL_GOAL, KEPT_GOAL = 0.03, 0.08, 0.5


class Loop:
    """Trains one job on a thread, while it is let; keeps when its steps began and ended."""

    def __init__(self, workload: str, number: int, engine: wf.Engine) -> None:
        self.made = MadeJob(JobSpec(workload, number))
        loss = self.made.workload.loss
        optimizer = self.made.optimizer(self.made.model.parameters())
        self.step = wf.Step(self.made.model, optimizer=optimizer, step=lambda model, batch: loss(model, batch), engine=engine)
        self.ended: list[tuple[float, float]] = []
        self._go, self._idle, self._over = threading.Event(), threading.Event(), False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        torch.set_num_threads(1)
        count = 0
        while True:
            if not self._go.is_set():
                self._idle.set()
                self._go.wait()
                self._idle.clear()
            if self._over:
                return
            began = time.perf_counter()
            self.step(self.made.batches[count % len(self.made.batches)])
            self.ended.append((began, time.perf_counter()))
            count += 1

    def go(self, on: bool, wait: bool = True) -> None:
        """Begin, or stop behind the step under way."""
        if on:
            self._go.set()
            return
        self._go.clear()
        if wait:
            self._idle.wait()

    def end(self) -> None:
        """Stop for good."""
        self._over = True
        self._go.set()
        self._thread.join()
        self.step.close()

    def steps(self, begin: float, end: float) -> list[float]:
        """Seconds of the steps that lie between two times."""
        return [ended - began for began, ended in self.ended if began >= begin and ended <= end]

    def speed(self, begin: float, end: float) -> float:
        """Steps a second between two times; the one under way counts with its share."""
        done = 0.0
        for began, ended in self.ended:
            done += max(0.0, min(ended, end) - max(began, begin)) / (ended - began)
        return done / (end - begin)


@dataclass
class Pairs:
    """One figure for each pair of windows; slowdowns as shares."""

    median: list[float] = field(default_factory=list)
    tail: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    alone_median: list[float] = field(default_factory=list)  # of one window without against the other
    alone_tail: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)  # of the guaranteed job's steps alone


def tail(seconds: Sequence[float]) -> float:
    """The 99th percentile."""
    return sorted(seconds)[min(len(seconds) - 1, int(0.99 * len(seconds)))]


def measure(guaranteed: str, opportunistic: str, pairs: int, window: float, settle: float) -> Pairs:
    """Both jobs in one engine with two lanes; ``window`` and ``settle`` in seconds."""
    with wf.Engine(lanes=2) as engine:
        first, second = Loop(guaranteed, 0, engine), Loop(opportunistic, 1, engine)
        engine.set_priority(second.step, "opportunistic")
        for loop in (first, second):  # captured, profiled
            loop.go(True)
            while len(loop.ended) < 12:
                time.sleep(0.02)
            loop.go(False)
        first.go(True)
        second.go(True)
        time.sleep(settle)
        found = Pairs()
        for _ in range(pairs):
            _pair(engine, first, second, window, found)
        first.end()
        second.end()
    return found


def _pair(engine: wf.Engine, first: Loop, second: Loop, window: float, found: Pairs) -> None:
    spans = []
    for beside in (False, True, False):
        if beside:
            second.go(True)
        else:
            first.go(False)  # its end would be long in coming at a low rate
            second.go(False)
            first.go(True)
        time.sleep(0.1)
        begin = time.perf_counter()
        time.sleep(window * (2 if beside else 1))
        spans.append((begin, time.perf_counter()))
    first.go(False)
    second.go(True)
    time.sleep(1.2)  # from then on the guaranteed job counts as gone
    begin = time.perf_counter()
    time.sleep(window)
    alone = second.speed(begin, time.perf_counter())
    before, beside_, after = (first.steps(*span) for span in spans)
    pooled = before + after
    found.median.append(statistics.median(beside_) / statistics.median(pooled) - 1)
    found.tail.append(tail(beside_) / tail(pooled) - 1)
    found.alone_median.append(abs(statistics.median(after) / statistics.median(before) - 1))
    found.alone_tail.append(abs(tail(after) / tail(before) - 1))
    found.kept.append(second.speed(*spans[1]) / alone)
    found.busy.append(sum(beside_) / (spans[1][1] - spans[1][0]) / engine.lanes)
    found.seconds.append(statistics.median(pooled))
    first.go(True)


def row(guaranteed: str, opportunistic: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Medians over the pairs, the differences of both windows alone, and whether the goals hold."""
    found = measure(guaranteed, opportunistic, arguments.repeats, arguments.window, arguments.settle)
    median, p99, spread, spread99, kept, busy = map(
        statistics.median, (found.median, found.tail, found.alone_median, found.alone_tail, found.kept, found.busy)
    )
    left = kept / (1 - busy)
    return {
        "guaranteed": guaranteed, "opportunistic": opportunistic,
        "its step alone, ms": report.median(found.seconds) * 1e3,
        "median slower": f"{median:+.1%}", "alone against alone": f"{spread:.1%}",
        "p99 slower": f"{p99:+.1%}", "p99 alone against alone": f"{spread99:.1%}",
        "opportunistic keeps": f"{kept:.0%}", "device left": f"{1 - busy:.0%}", "keeps of that": f"{left:.0%}",
        "pairs": [found.median, found.tail, found.alone_median, found.alone_tail, found.kept, found.busy],
        "holds": median - spread <= MEDIAN_GOAL and p99 - spread99 <= TAIL_GOAL and left >= KEPT_GOAL,
    }  # fmt: skip


def main() -> int:
    """Print slowdowns of guaranteed jobs, and what the opportunistic one keeps of what they leave."""
    parser = report.parser(__doc__ or "")
    parser.set_defaults(repeats=20)
    parser.add_argument("--guaranteed", nargs="+", default=["mlp", "lenet", "lstm", "resnet8"], help="workloads")
    parser.add_argument("--opportunistic", default="resnet50", help="a workload")
    parser.add_argument("--window", type=float, default=1.0, help="seconds of each window alone")
    parser.add_argument("--settle", type=float, default=20.0, help="seconds before the first pair")
    arguments = parser.parse_args()
    rows = [row(name, arguments.opportunistic, arguments) for name in arguments.guaranteed]
    note = (
        f"at most {MEDIAN_GOAL:.0%} and {TAIL_GOAL:.0%} beyond what one window alone differs from the other; at least "
        f"{KEPT_GOAL:.0%} of what the guaranteed job leaves of the lanes"
    )
    return report.finish("guaranteed", arguments, rows, note)


if __name__ == "__main__":
    sys.exit(main())
