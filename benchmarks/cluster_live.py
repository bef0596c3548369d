"""What the policies' decisions do on devices of this machine: packings undone, turns, priorities, and quotas while jobs run.

    python -m benchmarks.cluster_live [undo turns antman quota bits] [--save]

Each part takes at most ten minutes on two cores. The scheduler runs in this process, each device in one of its own. Jobs note
when they ask for batches (``benchmarks.live_jobs``); these are not read ahead, so that such a time is the end of the step before.

``undo``: pairs of jobs on one device with two lanes, under gandiva with turns of 2 s. The steps of the first pair take turns at a
lock, and who waits there loses time; the second pair waits for its data. A spell is a time in which both ran. The steps of both,
over ``--seconds`` from the first submission, against the better of two choices by hand: turns alone (no packing), and both at once
(gandiva-packing).

``turns``: twelve jobs that compute, as long as ``--alone`` seconds each, on two devices of one core each; gandiva with turns of 2 s
and no packing against one after the other (fifo), alternately: ``--rounds`` times gandiva, fifo in between. The simulator is told
how long each job took on its device under fifo, when it was submitted, and what a turn costs: that is measured first, in this
process, with two jobs of 100 MB, as the time from the end of the steps under way at the hand-over to the end of the first step of
the other one, less a step of that. Where one must leave, it goes to host memory, and the other one comes back from there.

``antman``: two opportunistic jobs on a device with two lanes, then guaranteed ones. "begins to be built": from the submission to the
call of the model's function, of several that come one after the other, and of one that stays. Its steps in windows in which the
opportunistic ones train are compared with the windows before and after it, in which their data stands still. Then another one is
submitted, which runs as opportunistic for the time being; the first doubles its batch, and ends; "upgraded" is from the last step of
the first one until the status of the other is guaranteed. The device's memory is so small that the opportunistic jobs do not both
fit beside doubled batches.

``quota``: an opportunistic job with 500 MB of activations is lowered to half, raised again, and so on; both forms were captured
before. By its lease: from the end of the step under way at the change until its claim is within the quota, or its step is whole
again. By ``Cluster.set``, where only the ends of steps are seen: what the first step behind the one under way takes longer than the
median of those that follow it. Until the status shows other memory a step, and the time between two reports, pass as well.

``bits``: jobs with dropout, momentum or AdamW, evaluation and shared data, on two devices without a scheduler. At moments that follow
from ``--seed`` they are held, let go on, moved to the other device, and opportunistic ones lowered to 0.6 of their step and raised.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import waterflow as wf
from benchmarks import report
from benchmarks.cluster_kills import same
from benchmarks.cluster_service import waterflow
from benchmarks.live_jobs import ENDLESS, Batches, InTurns, adamw, held, job, momentum, noted, plan, total
from benchmarks.suspend import Running, job_of
from waterflow import cluster

Row = dict[str, Any]
QUANTUM, TURNS = 2.0, 3  # seconds of a turn; turns after which a bad packing is undone
KEPT_SHARE = 0.95  # of the steps of the better choice
JOBS, FIRST_STEPS, SOONER, LATER, OFF = 12, 100, 0.7, 0.03, 0.1
FIT_SECONDS, LEAVE_SECONDS = 0.02, 0.2  # for handing over
BUILT_SECONDS, SLOWER, UPGRADED_SECONDS = 1.0, 0.05, 1.0
LOWERED_SECONDS, RAISED_SECONDS = 0.1, 0.2
LOWERED_SHARE, ROOM = 0.6, 0.6  # of a step that is lowered; of what all jobs need, that their devices have
PAUSE = 0.04  # seconds between two changes of jobs, on average
PATIENCE = 300.0  # seconds that any wait may take


def row(what: str, measured: float, goal: float, most: bool = True, told: str = "") -> Row:
    """A row of the table; ``goal`` is the most, or else the least."""
    return {
        "what": what,
        "measured": measured,
        "goal": goal,
        "holds": measured <= goal if most else measured >= goal,
        "told": told,
    }


def until(condition: Callable[[], Any], what: str, pause: float = 0.002) -> Any:
    """Wait for the condition, and return what it returned."""
    end = time.monotonic() + PATIENCE
    while not (found := condition()):
        if time.monotonic() > end:
            raise SystemExit(f"not within {PATIENCE:g} s: {what}")
        time.sleep(pause)
    return found


class Live:
    """A scheduler in this process over devices of this machine."""

    def __init__(self, folder: Path, policy: cluster.Policy, devices: int, lanes: int, memory: int, cores: bool) -> None:
        self.folder = folder
        own = [(core,) for core in sorted(os.sched_getaffinity(0))[:devices]] if cores else None
        settings = cluster.WorkerSettings(memory=memory, lanes=lanes)
        backend = cluster.LocalBackend(devices, folder / "work", settings=settings, cores=own)
        self.service = cluster.Service(cluster.Store(folder / "state.db"), backend, policy)
        self.service.start()

    def submit(self, made: wf.Job, **asked: Any) -> float:
        """Hand in a job under its name; return when, on the clock of its notes."""
        began = time.monotonic()
        self.service.submit({"id": made.name, **asked}, cluster.pack(made))
        return began

    def status(self, id: str) -> dict[str, Any]:
        """What is known of a job."""
        return self.service.told(self.service.record(id))

    def asked(self, id: str) -> list[float]:
        """The beginning of its first step, and the ends of all."""
        return noted(self.folder, id, "asked")

    def tell(self, ids: Sequence[str], what: str, on: bool = True) -> None:
        """What the data of these jobs is to do; see ``Batches``."""
        for id in ids:
            path = self.folder / f"{id}.{what}"
            path.touch() if on else path.unlink(missing_ok=True)

    def end(self, *ids: str) -> list[dict[str, Any]]:
        """Wait for the ends of jobs."""
        for id in ids:
            if not self.service.wait([id], PATIENCE):
                raise SystemExit(f"{id} does not end: {self.status(id)}")
        return [self.status(id) for id in ids]


@contextlib.contextmanager
def live(
    policy: str, devices: int = 1, lanes: int = 1, memory: int = 1 << 30, cores: bool = False, **chosen: Any
) -> Iterator[Live]:
    """A cluster whose jobs are cancelled at the end. ``chosen`` are parameters of the policy."""
    with tempfile.TemporaryDirectory(prefix="wf-") as folder:
        made = Live(Path(folder), cluster.POLICIES[policy](**chosen), devices, lanes, memory, cores)
        try:
            yield made
            ids = [told["id"] for told in made.service.status()["jobs"]]
            for id in ids:
                made.service.cancel(id)
            made.end(*ids)
        finally:
            made.service.down()


# -- undo


def undo(given: argparse.Namespace) -> list[Row]:
    """A packing that hurts, and one that does not."""
    rows: list[Row] = []
    for pair, kind in (("lock", InTurns), ("waiting", Batches)):
        with live("gandiva", lanes=2, quantum=QUANTUM) as there:
            spells, steps = together(there, kind, given.seconds)
        with live("gandiva", lanes=2, quantum=QUANTUM, packing=False) as there:
            _, in_turns = together(there, kind, given.seconds)
        with live("gandiva-packing", lanes=2) as there:
            _, at_once = together(there, kind, given.seconds)
        told = f"spells: {', '.join(f'{begin:.1f} to {end:.1f} s' for begin, end in spells) or 'none'}"
        if pair == "lock":
            rows.append(row(f"{pair}: packed how often", len(spells), 1, told=told))
            longest = max((end - begin for begin, end in spells), default=0.0)
            rows.append(row(f"{pair}: turns until it is undone", longest / QUANTUM, TURNS))
        else:
            share = sum(end - begin for begin, end in spells) / (given.seconds - spells[0][0]) if spells else 0.0
            rows.append(row(f"{pair}: share of the time since in which it is packed", share, 1.0, False, told))
        told = f"{steps:.1f} steps/s; in turns {in_turns:.1f}, at once {at_once:.1f}"
        rows.append(row(f"{pair}: share of the better choice's steps", steps / max(in_turns, at_once), KEPT_SHARE, False, told))
    return rows


def together(there: Live, kind: type[Batches], seconds: float) -> tuple[list[tuple[float, float]], float]:
    """Two jobs for so long: the spells in which both ran, from the first submission, and the steps a second of both."""
    jobs = [kind(f"job-{n}", there.folder, seconds=0.02, seed=n) for n in range(2)]
    began, _ = (there.submit(job(one), memory=16 << 20) for one in jobs)
    spells: list[tuple[float, float]] = []
    going_on = False
    while (now := time.monotonic() - began) < seconds:
        both = all(told["state"] == "running" for told in there.service.status()["jobs"])
        if both:
            spells.append((spells.pop()[0] if going_on else now, now))
        going_on = both
        time.sleep(0.02)
    if going_on:
        spells.append((spells.pop()[0], seconds))
    done = sum(began < at <= began + seconds for one in jobs for at in there.asked(one.name)[1:])
    return spells, done / seconds


# -- turns


def turns(given: argparse.Namespace) -> list[Row]:
    """Turns against one after the other, and what a turn costs."""
    rows, cost = hand_over(given.repeats)
    with live("fifo", 2, cores=True) as there:
        steps = round(given.alone / warmed_up(there))
    taken, queued = [], []
    for number in range(given.rounds):
        taken.append(all_of_them(steps, "gandiva", quantum=QUANTUM, packing=False))
        if number < max(1, given.rounds - 1):
            queued.append(all_of_them(steps, "fifo"))
    alone = [statistics.median(each) for each in zip(*(one["ran"] for one in queued))]
    off = [abs(predicted(one["submitted"], alone, cost) / one["completion"] - 1) for one in taken]
    soon, late = (statistics.median(one["first"] for one in some) for some in (taken, queued))
    last, last_of_queue = (statistics.median(one["last"] for one in some) for some in (taken, queued))
    told = f"{len(taken)} rounds, {len(queued)} of fifo; {steps} steps in {statistics.median(alone):.1f} s each alone"
    return [
        *rows,
        row(f"first {FIRST_STEPS} steps sooner", 1 - soon / late, SOONER, False, f"{soon:.2f} s instead of {late:.2f}; {told}"),
        row("all done later", last / last_of_queue - 1, LATER, told=f"{last:.1f} s instead of {last_of_queue:.1f}"),
        row(
            "simulator off",
            statistics.median(off),
            OFF,
            told=f"{', '.join(f'{one:.3f}' for one in off)}; a turn costs {cost:.4f} s",
        ),
    ]


def computing(name: str, there: Live, steps: int, seed: int = 0) -> wf.Job:
    """A job that computes all the time, milliseconds a step."""
    return job(Batches(name, there.folder, steps, rows=128, width=384, seed=seed), layers=3)


def warmed_up(there: Live) -> float:
    """Seconds of a step while both devices work, each of which has trained then."""
    names = ["warm-0", "warm-1"]
    for name in names:
        there.submit(computing(name, there, 300))
    there.end(*names)
    return statistics.median(after - before for name in names for before, after in pairwise(there.asked(name)[100:]))


def all_of_them(steps: int, policy: str, **chosen: Any) -> dict[str, Any]:
    """All jobs, handed in at once; seconds.

    ``first`` is the average time until each has done its first steps, ``completion`` that until its end, ``last`` when all have
    ended, ``ran`` each job's time since its start, and ``submitted`` when, since the first one.
    """
    with live(policy, 2, cores=True, **chosen) as there:
        warmed_up(there)
        ids = [f"job-{number}" for number in range(JOBS)]
        began = [there.submit(computing(id, there, steps, number)) for number, id in enumerate(ids)]
        told = there.end(*ids)
        first = [there.asked(id)[FIRST_STEPS] - at for id, at in zip(ids, began)]
        starts = [next(at for _, at, line in there.service.store.log(id) if line.startswith("starts at ")) for id in ids]
    if failed := [one["id"] for one in told if one["state"] != "completed"]:
        raise SystemExit(f"{policy}: {failed} have not completed")
    submitted = [one["submitted"] for one in told]
    return {
        "first": statistics.fmean(first),
        "completion": statistics.fmean(one["ended"] - one["submitted"] for one in told),
        "last": max(one["ended"] for one in told) - min(submitted),
        "ran": [one["ended"] - at for one, at in zip(told, starts)],
        "submitted": [at - min(submitted) for at in submitted],
    }


def predicted(submitted: Sequence[float], alone: Sequence[float], cost: float) -> float:
    """The average completion that the simulator tells. What a start takes is part of the durations."""
    nodes = [cluster.Node(f"device-{number}", 1) for number in range(2)]
    scheduler = cluster.Scheduler(nodes, cluster.POLICIES["gandiva"](quantum=QUANTUM, packing=False))  # type: ignore[call-arg]
    jobs = [cluster.Submission(f"job-{n}", duration=d, submitted=at) for n, (at, d) in enumerate(zip(submitted, alone))]
    done = cluster.Simulator(scheduler, cluster.Overheads(resume=cost)).run(jobs)
    return statistics.fmean(one.completion for one in done.jobs)


def hand_over(times: int) -> tuple[list[Row], float]:
    """Two jobs of 100 MB that take turns in one engine: rows, and seconds where both fit."""
    both, needed = handed_over(times)
    one, _ = handed_over(times, needed)
    rows = []
    for what, seconds, goal in (("both fit", both, FIT_SECONDS), ("one leaves", one, LEAVE_SECONDS)):
        told = f"{len(seconds)} times, {min(seconds):.4f} to {max(seconds):.4f}"
        rows.append(row(f"hold and go on, 100 MB, {what}, s", statistics.median(seconds), goal, told=told))
    return rows, max(0.0, statistics.median(both))


def handed_over(times: int, needed: int | None = None) -> tuple[list[float], int]:
    """Seconds from the end of the last step of one job to that of the first step of the other, less that step; what a job needs.

    With ``needed`` only one of them fits.
    """
    # Of so small a limit a quarter is the reserve.
    with wf.Engine(memory="2GiB" if needed is None else 2 * needed, lanes=1) as engine:
        jobs = [Running(wf.JobRunner(job_of(100.0), engine)) for _ in range(2)]
        seconds = []
        for number in range(2 * times + 2):
            here, there = jobs[::-1] if number % 2 else jobs
            first = first_step(here.runner, there.runner)
            began = time.monotonic()
            step = (here.await_steps(here.runner.steps + 20) - began) / 20
            if number > 1:  # before, they are captured
                seconds.append(first - step)
        assert here.runner.step is not None and any(each.runner.lease.times_left for each in jobs) == (needed is not None)
        made = here.runner.step.plan
        for each in jobs:
            each.stop()
    return seconds, held(made) + made.height


def first_step(here: wf.JobRunner, there: wf.JobRunner) -> float:
    """Let ``here`` go on in the place of ``there``; seconds from the last end of a step there to the first one here."""
    steps, others, last = here.steps, there.steps, time.monotonic()
    there.lease.hold(True)
    here.lease.hold(False)
    while here.steps == steps:
        if there.steps != others:
            others, last = there.steps, time.monotonic()
        time.sleep(2e-4)
    return time.monotonic() - last


# -- antman


def low(id: str, folder: Path | None = None, seed: int = 0) -> wf.Job:
    """A job that is to run as opportunistic."""
    return job(Batches(id, folder, rows=16, width=256, seed=seed), layers=4)


def high(id: str, folder: Path | None = None, steps: int = ENDLESS) -> wf.Job:
    """A guaranteed one, whose steps are higher."""
    return job(Batches(id, folder, steps, rows=512, width=256), layers=3)


def crowded() -> int:
    """Bytes of a device on which ``high`` trains beside two of ``low``, but not with batches twice as large."""
    small, whole, twice = plan(low("low")), plan(high("high")), plan(high("high"), double=True)
    least = 2 * held(small) + held(whole) + small.height + whole.height
    most = 2 * held(small) + held(twice) + max(small.height, twice.height)
    assert least < most, "the batches are too small to crowd a device"
    return (least + most) // 2 * 4 // 3  # of so small a limit a quarter is the reserve


def antman(given: argparse.Namespace) -> list[Row]:
    """Guaranteed jobs beside opportunistic ones."""
    lows = ["low-0", "low-1"]
    with live("antman", lanes=2, memory=crowded(), window=1.0, patience=1.0) as there:
        for seed, id in enumerate(lows):
            there.submit(low(id, there.folder, seed), priority="opportunistic")
            until(lambda: len(there.asked(id)) > 100, f"{id} trains")  # noqa: B023
        built = []
        for number in range(given.repeats):
            built.append(built_after(there, high(f"short-{number}", there.folder, 20)))
            there.end(f"short-{number}")
        built.append(built_after(there, high("high", there.folder)))
        pairs = windows(there, lows, given)
        upgraded = upgrade(there, lows)
        there.tell([*lows, "second"], "end")
        there.end("high", "second", *lows)
        failed = [told for told in there.service.status()["jobs"] if told["state"] != "completed"]
    longer, apart, kept, alone = (statistics.median(each) for each in zip(*pairs))
    told = f"{given.pairs} pairs, {alone * 1e3:.1f} ms alone; one window alone against the other {apart:.1%}; the others {kept:.0f} steps/s"
    return [
        row("begins to be built, most, s", max(built), BUILT_SECONDS, told=f"median {statistics.median(built):.3f}"),
        row("steps longer beside others", longer, SLOWER, told=told),
        row("upgraded, s", upgraded, UPGRADED_SECONDS),
        row("jobs that failed", len(failed), 0, told="; ".join(f"{one['id']} {one['state']}: {one['reason']}" for one in failed)),
    ]


def built_after(there: Live, made: wf.Job) -> float:
    """Seconds from the submission to the call of the model's function."""
    began = there.submit(made)
    return float(until(lambda: noted(there.folder, made.name, "built"), f"{made.name} is built")[0] - began)


def windows(there: Live, lows: Sequence[str], given: argparse.Namespace) -> list[tuple[float, float, float, float]]:
    """Of each pair: by how much steps are longer beside others, and alone against alone; steps a second of the others; a step alone."""
    time.sleep(given.settle)
    found, middle = [], statistics.median
    for _ in range(given.pairs):
        spans = []
        for beside in (False, True, False):
            there.tell(lows, "pause", not beside)
            time.sleep(0.1)
            begin = time.monotonic()
            time.sleep(2.0 if beside else 1.0)
            spans.append((begin, time.monotonic()))
        ends = there.asked("high")
        before, among, after = ([b - a for a, b in pairwise(ends) if a >= begin and b <= end] for begin, end in spans)
        begin, end = spans[1]
        kept = sum(begin < at <= end for id in lows for at in there.asked(id)) / (end - begin)
        alone = middle(before + after)
        found.append((middle(among) / alone - 1, abs(middle(after) / middle(before) - 1), kept, alone))
    return found


def upgrade(there: Live, lows: Sequence[str]) -> float:
    """Seconds until a guaranteed job that runs as opportunistic is what it was submitted as, once the other one has ended."""
    there.tell(lows, "pause")  # only a calm device takes another one
    there.submit(high("second", there.folder))
    wanted = {"state": "running", "priority": "opportunistic"}.items()
    until(lambda: wanted <= there.status("second").items(), "the second guaranteed job runs as opportunistic", 0.1)
    there.tell(lows, "pause", False)
    there.tell(["high"], "double")
    steps = len(there.asked("high")) + 100
    until(lambda: len(there.asked("high")) > steps, "doubled batches are trained on", 0.1)
    there.tell(["high"], "end")
    until(lambda: there.status("second")["priority"] == "guaranteed", "the second job is guaranteed")
    return time.monotonic() - there.asked("high")[-1]


# -- quota


def roomy(folder: Path | None, megabytes: float, steps: int = ENDLESS) -> wf.Job:
    """A job with so many megabytes (10^6 bytes) of activations."""
    rows, width = 1 << 16, 32
    return job(Batches("roomy", folder, steps, rows=rows, width=width), layers=round(megabytes * 1e6 / (rows * width * 4)))


def quota(given: argparse.Namespace) -> list[Row]:
    """A step that is lowered and raised."""
    rows: list[Row] = []
    for where, change in (("by the lease", by_lease), ("by Cluster.set", by_cluster)):
        with tempfile.TemporaryDirectory(prefix="wf-") as folder:
            seconds, told, result = change(Path(folder), given)
        for what, goal in (("lowered", LOWERED_SECONDS), ("raised", RAISED_SECONDS)):
            each = seconds[what]
            many = f"{len(each)} times, {min(each):.3f} to {max(each):.3f}; {told[what]}"
            rows.append(row(f"{what} {where}, s beyond the step under way", statistics.median(each), goal, told=many))
        alone = wf.train([roomy(None, given.megabytes, result.steps)], lanes=1)[0]
        rows.append(row(f"other bits {where}", not same(result, alone), 0, told=f"{result.status} after {result.steps} steps"))
    return rows


Seconds = dict[str, list[float]]


def changes(given: argparse.Namespace, change: Callable[[str], float]) -> Seconds:
    """Lower and raise again and again, anywhere in a step; without the first time, when both forms are captured."""
    seconds: Seconds = {"lowered": [], "raised": []}
    for number in range(given.repeats + 1):
        for what in seconds:
            time.sleep(0.1 * number % 0.5)
            took = change(what)
            if number:
                seconds[what].append(took)
    return seconds


def by_lease(folder: Path, given: argparse.Namespace) -> tuple[Seconds, dict[str, str], wf.JobResult]:
    """In this process: seconds from the end of the step under way until the claim is another one."""
    with wf.Engine(memory="4GiB", lanes=2) as engine, ThreadPoolExecutor() as threads:
        runner = wf.JobRunner(roomy(folder, given.megabytes), engine)
        runner.lease.set("opportunistic")
        result = threads.submit(runner.run)
        until(lambda: runner.steps >= 4, "it trains")
        assert runner.step is not None
        step, whole = runner.step, runner.step.plan
        quotas = {"lowered": held(whole) + whole.height // 2, "raised": engine.limit}

        def changed(what: str) -> bool:
            if what == "lowered":
                return not engine.reservations.above_quota(step.job)  # type: ignore[arg-type]
            return step.recomputed is None and step.plan.height >= whole.height

        def change(what: str) -> float:
            began = time.monotonic()
            runner.lease.set(quota=quotas[what])
            until(lambda: changed(what), what, 0.001)
            at = time.monotonic()
            ends = until(lambda: len(ends := after(folder, began)) >= 4 and ends, "it goes on")
            return float(at - ends[0])

        seconds = changes(given, change)
        (folder / "roomy.end").touch()
        told = f"a step of {whole.height / 1e6:.0f} MB, quota {quotas['lowered'] / 1e6:.0f} MB"
        return seconds, dict.fromkeys(seconds, told), result.result()


def by_cluster(folder: Path, given: argparse.Namespace) -> tuple[Seconds, dict[str, str], wf.JobResult]:
    """On a cluster: what the first step behind the one under way takes longer than those that follow it."""
    state = "--state", str(folder)
    waterflow("up", "--devices", "1", "--memory", "4GiB", "--lanes", "2", *state)
    client, shown = wf.Cluster(folder), dict[str, float]()
    try:
        id = client.submit(roomy(folder, given.megabytes), priority="opportunistic")
        until(lambda: client.status(id)["steps"] >= 4, "it trains")
        whole = client.status(id)["memory"]

        def change(what: str) -> float:
            began = time.monotonic()
            client.set(id, quota=whole // 2 if what == "lowered" else 2 * whole)
            answered = time.monotonic()
            until(lambda: (client.status(id)["memory"] <= whole // 2) == (what == "lowered"), what, 0.01)
            shown[what] = time.monotonic() - began
            ends = until(lambda: len(ends := after(folder, answered)) >= 6 and ends, "it goes on")
            first, *others = (b - a for a, b in pairwise(ends))
            return first - statistics.median(others)

        seconds = changes(given, change)
        (folder / "roomy.end").touch()
        (result,) = client.result(id, timeout=PATIENCE)
    finally:
        waterflow("down", *state)
    return seconds, {what: f"its status shows it {at:.2f} s after the call" for what, at in shown.items()}, result


def after(folder: Path, since: float) -> list[float]:
    """The ends of steps since then."""
    return [end for end in noted(folder, "roomy", "asked") if end > since]


# -- bits


@dataclass
class Group:
    """Jobs that are driven together, and what they are to do."""

    id: str
    jobs: list[wf.Job]
    priority: cluster.Priority
    low: int | None  # a quota below their need
    node: str = ""
    run: int = 0
    held: bool = False
    quota: int | None = None
    moves: bool = False
    how: str = ""

    def request(self, kind: Any, **more: Any) -> cluster.Request:
        """A request with all that holds now."""
        return cluster.Request(kind, self.id, self.run, self.priority, held=self.held, quota=self.quota, **more)


def group(number: int, seconds: float) -> list[wf.Job]:
    """The jobs of a group: every fourth one has two, which share their data; those of every third one have high steps."""
    tall, shares = number % 3 == 0, number % 4 == 1
    rows, seeds = 256 if tall else 16, range(10 * number, 10 * number + 1 + shares)
    data = [Batches(f"job-{seed}", None, 30, seconds, rows, 32, seed) for seed in seeds]
    more: dict[str, Any] = {"epochs": 10, "evaluate": total if number % 2 else None, "layers": 12 if tall else 2}
    more |= {"data": wf.SharedData(data[0], seed=number)} if shares else {}
    return [job(one, optimizer=momentum if one.seed % 2 else adamw, **more) for one in data]


class Devices:
    """Two local devices, and groups of jobs that go from one to the other."""

    def __init__(self, backend: cluster.LocalBackend, groups: Sequence[Group], chance: random.Random) -> None:
        self.backend, self.groups, self.chance = backend, {each.id: each for each in groups}, chance
        self.done: Counter[str] = Counter()

    def start(self, group: Group, node: str) -> None:
        """A new run, which goes on from the checkpoint of the last one."""
        group.node, group.run, group.moves = node, group.run + 1, False
        self.backend.folder.prepare(group.id, group.run, cluster.pack(group.jobs), group.run == 1)
        self.backend.request(node, group.request("start"))

    def listen(self) -> None:
        """Take up what has ended; what was suspended begins on the other device."""
        for state in self.backend.listen(0.02):
            for part in state.parts:
                group = self.groups[part.id]
                if (part.run, state.node, part.phase) != (group.run, group.node, "ended") or group.how:
                    continue
                self.backend.request(state.node, group.request("forget"))
                if part.how == "suspended":
                    self.start(group, next(node.name for node in self.backend.nodes() if node.name != state.node))
                else:
                    group.how = f"{part.how}{f': {part.reason}' if part.reason else ''}"

    def change(self, group: Group) -> None:
        """Hold it or let it go on, move it, or change its quota."""
        kinds = ["go on"] if group.held else ["hold"]
        kinds += ["move"] + (["lower" if group.quota != group.low else "raise"] if group.low is not None else [])
        kind = self.chance.choice(kinds)
        self.done[kind] += 1
        if kind == "move":
            group.moves = True
            self.backend.request(group.node, group.request("stop", suspend=True))
            return
        if kind in ("hold", "go on"):
            group.held = kind == "hold"
        else:
            group.quota = group.low if kind == "lower" else self.backend.nodes()[0].memory
        self.backend.request(group.node, group.request("set"))

    def let_go(self) -> None:
        """From now on nobody is held or lowered any more."""
        for group in self.groups.values():
            group.held, group.quota = False, group.quota and self.backend.nodes()[0].memory
            if not group.how and not group.moves:
                self.backend.request(group.node, group.request("set"))

    def drive(self, seconds: float) -> None:
        """Change groups at drawn moments for so long; wait until all have ended."""
        for group in self.groups.values():
            self.start(group, self.chance.choice(self.backend.nodes()).name)
        began = again = time.monotonic()
        calm = False
        while any(not group.how for group in self.groups.values()) and time.monotonic() < began + seconds + PATIENCE:
            self.listen()
            now = time.monotonic()
            there = [group for group in self.groups.values() if not group.how and not group.moves]
            if now >= began + seconds and not calm:
                self.let_go()
                calm = True
            elif now >= again and there and not calm:
                again = now + self.chance.expovariate(1 / PAUSE)
                self.change(self.chance.choice(there))


def bits(given: argparse.Namespace) -> list[Row]:
    """Jobs that are held, moved and lowered have the bits that they have alone."""
    tall, small = (plan(group(number, 0.0)[0]) for number in (0, 2))
    groups: list[Group] = []
    while sum(len(each.jobs) for each in groups) < given.jobs:
        number = len(groups)
        lowered = held(tall) + int(LOWERED_SHARE * tall.height) if number % 3 == 0 else None
        groups.append(
            Group(f"group-{number}", group(number, 0.03), "guaranteed" if lowered is None else "opportunistic", lowered)
        )
    alone = [[wf.train([one], lanes=1)[0] for one in group(number, 0.0)] for number in range(len(groups))]
    # Not all of them fit on their device: who is held leaves. Of so small a limit a quarter is the reserve.
    claimed = sum(len(each.jobs) * held(small if each.low is None else tall) for each in groups)
    settings = cluster.WorkerSettings(memory=int(ROOM * claimed / 2 + tall.height + small.height) * 4 // 3, lanes=2)
    with cluster.LocalBackend(2, settings=settings) as backend:
        devices = Devices(backend, groups, random.Random(given.seed))
        devices.drive(given.changes)
        ended = {each.id: each.how or "does not end" for each in groups if each.how != "completed"}
        results = [list(cluster.load_results(backend.folder.job(each.id))) for each in groups]
    pairs = [(one, other) for each, others in zip(results, alone) for one, other in zip(each, others)]
    told = ", ".join(f"{kind} {count}" for kind, count in sorted(devices.done.items()))
    return [
        row("jobs with the bits of alone", sum(same(one, other) for one, other in pairs), given.jobs, False, told=told),
        row("groups not completed", len(ended), 0, told="; ".join(f"{id} {how}" for id, how in ended.items())),
    ]


PARTS: dict[str, Callable[[argparse.Namespace], list[Row]]] = {
    "undo": undo, "turns": turns, "antman": antman, "quota": quota, "bits": bits,
}  # fmt: skip


def main() -> int:
    """Command line."""
    parser = report.parser((__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all if none is named")
    parser.set_defaults(repeats=5)
    parser.add_argument("--seconds", type=float, default=75.0, help="undo: of each choice")
    parser.add_argument("--alone", type=float, default=15.0, help="turns: seconds of a job alone")
    parser.add_argument("--rounds", type=int, default=3, help="turns: of all jobs under gandiva; one less under fifo")
    parser.add_argument("--pairs", type=int, default=20, help="antman: windows beside others, each with one alone on either side")
    parser.add_argument("--settle", type=float, default=15.0, help="antman: seconds before the first pair")
    parser.add_argument("--megabytes", type=float, default=500.0, help="quota: of activations")
    parser.add_argument("--jobs", type=int, default=30, help="bits")
    parser.add_argument("--changes", type=float, default=30.0, help="bits: seconds in which jobs are held, moved and lowered")
    parser.add_argument("--seed", type=int, default=0, help="bits")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    return report.finish_parts(
        "cluster_live", parser, arguments, {name: partial(part, arguments) for name, part in PARTS.items()}
    )


if __name__ == "__main__":
    sys.exit(main())
