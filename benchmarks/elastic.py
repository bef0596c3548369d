"""One job on several devices that join, leave and die while it trains: its bits, its speed, and its pauses.

    python -m benchmarks.elastic [bits apart kills speed pauses stragglers overhead] [--save]

Each part takes at most ten minutes on two cores, all of them about a quarter of an hour. Devices are cores, with a process each.
Steps are counted from outside: each process appends a line to a file after every step (``benchmarks.elastic_jobs``).

``bits``: the same on any number of devices, and while that changes. ``apart``: jobs whose members begin apart, or whose evaluation
changes the model. ``kills``: devices killed at drawn moments. ``speed``: two
devices against one, and against DistributedDataParallel over gloo. ``pauses``: the longest step around a change, against stopping
and starting again. ``stragglers``: one core is shared with a busy loop. ``overhead``: parts of batches on one device against
accumulation by hand; and jobs without parts are what they were.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import waterflow as wf
from benchmarks import elastic_jobs, report
from benchmarks.cluster_kills import same
from benchmarks.elastic_jobs import BERT, MLP, RESNET, SEED, SMALL_BERT, SMALL_RESNET, WIDE, Done, Workload, first_times, gaps

ONE, BOTH = ["cpu:0"], ["cpu:0", "cpu:1"]
PATIENCE = 120.0  # seconds that any wait may take
Row = dict[str, Any]


def cores() -> list[int]:
    """Numbers of the cores that this process may use: cpu:0, cpu:1 and so on are pinned to them in this order."""
    return sorted(os.sched_getaffinity(0))


# -- a job that is driven while it trains


class Ended(Exception):
    """The job has ended."""


class Live(wf.Callback):
    """A running job, and a function that is called with this on a thread of its own meanwhile."""

    def __init__(self, drive: Callable[[Live], None] | None) -> None:
        self.runner: Any = None
        self.error: BaseException | None = None
        self._drive, self.over = drive, threading.Event()
        self._thread: threading.Thread | None = None

    def on_job_start(self, job: wf.Job, runner: Any) -> None:
        """Begin to drive it."""
        self.runner = runner
        if self._drive is not None and self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True)
            self._thread.start()

    def _run(self) -> None:
        assert self._drive is not None
        try:
            self._drive(self)
        except Ended:
            pass
        except BaseException as error:
            self.error = error

    def end(self) -> None:
        """Wait for the function. Raises its error, and RuntimeError if it was never called; the job's end is none."""
        self.over.set()
        if self._drive is not None:
            if self._thread is None:
                raise RuntimeError("no job has begun")
            self._thread.join(PATIENCE)
            if self.error is not None:
                raise self.error

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait. Raises Ended if the job ends before."""
        latest = time.monotonic() + PATIENCE
        while not holds():
            if self.over.wait(0.002):
                raise Ended(f"at step {self.runner.steps}")
            if time.monotonic() > latest:
                raise TimeoutError(
                    f"nothing for {PATIENCE:.0f} s; the job is at step {self.runner.steps} on {self.runner.devices}"
                )

    def steps(self, count: int) -> None:
        """Wait for so many steps more."""
        begin = self.runner.steps
        self.until(lambda: self.runner.steps >= begin + count)

    def change(self, devices: Sequence[str]) -> None:
        """Train on these, and wait until it does."""
        self.runner.set_devices(list(devices))
        self.until(lambda: set(self.runner.devices) == set(devices))


def _row(what: str, figure: float | str, asked: str, holds: bool, unit: str = "", more: str = "", *all_: list[float]) -> Row:
    # ``all_``: what the figure is made of. The first list's spread is shown.
    row = {"what": what, "figure": figure, "unit": unit, "asked": asked, "holds": holds, "more": more}
    return row | ({"spread": report.spread(all_[0]), "all": list(all_)} if all_ else {})


def run(job: wf.Job, devices: Sequence[str], drive: Callable[[Live], None] | None = None, **settings: Any) -> wf.JobResult:
    """Train one job on devices."""
    live = Live(drive)
    try:
        result = wf.train([job], devices=list(devices), threads_per_lane=1, callbacks=[live], **settings)[0]
    except BaseException:
        live.over.set()
        raise
    live.end()
    return result


# -- bits


def bits(folder: Path, repeats: int, steps: int = 12, changes: int = 4) -> list[Row]:
    """Every number of devices, and one run on a number that changes."""
    alike: Row = {"shards": 4, "batch": 16, "halve": True, "accumulate": 2, "clip_grad_norm": 1.0}
    rows = []
    for what in (MLP, SMALL_RESNET, SMALL_BERT):
        job = elastic_jobs.job(what, folder / "bits", steps=steps, **alike)
        alone = wf.train([job])[0]
        for count in (1, 2, 3, 4):
            rows.append(_equal(f"{what.name}, on {count}", run(job, [f"cpu:{n}" for n in range(count)]), alone))
    return [*rows, _grown_and_shrunk(folder, alike, changes)]


def _grown_and_shrunk(folder: Path, alike: Row, changes: int, steps: int = 120, pause: float = 0.01) -> Row:
    chance, made = random.Random(SEED), list[int]()

    def drive(live: Live) -> None:
        count = 1
        while len(made) < changes:
            live.steps(chance.randrange(3, 12))
            count = chance.choice([n for n in (1, 2, 3, 4) if n != count])
            live.change([f"cpu:{n}" for n in range(count)])
            made.append(count)

    still = elastic_jobs.job(SMALL_RESNET, folder / "still", steps=steps, **alike)
    slow = elastic_jobs.job(SMALL_RESNET, folder / "changed", steps=steps, pause=pause, **alike)
    alone, changed = wf.train([still])[0], run(slow, ONE, drive)
    row = _equal(f"{SMALL_RESNET.name}, on 1, then {', then '.join(map(str, made))}", changed, alone)
    return row | {"holds": row["holds"] and len(made) >= changes // 2}


def _equal(what: str, one: wf.JobResult, other: wf.JobResult) -> Row:
    equal = same(one, other)
    return _row(what, "equal bits" if equal else "OTHER BITS", "equal bits", equal)


# -- apart


def apart(folder: Path, repeats: int, count: int = 10) -> list[Row]:
    """Drawn jobs: each ends with the bits of one process that begins with the leader's state, or is refused with a reason."""
    chance, ends = random.Random(SEED), list[str]()
    for _ in range(count):
        job, odd, alone = elastic_jobs.drawn_apart(chance)
        result = run(job, BOTH, on_error="continue")
        if any(odd.startswith(what) for what in elastic_jobs.REFUSED):
            told = isinstance(result.error, wf.InvalidJobError) and "is not the same on its devices" in str(result.error)
            ends.append("refused" if told else "OTHER")
        else:
            equal = result.status == "completed" and same(result, wf.train([alone(result)])[0])
            ends.append("equal" if equal else "OTHER")
        print(f"{ends[-1]}: {odd}: {result.error or ''}"[:200], file=sys.stderr)
    many = Counter(ends)
    more = f"{many['equal']} with equal bits, {many['refused']} refused with a reason, {many['OTHER']} else"
    return [
        _row(
            f"{count} drawn jobs whose members begin apart, or whose evaluation changes the model",
            more,
            "0 else",
            not many["OTHER"],
        )
    ]


# -- kills


def kills(folder: Path, repeats: int, steps: int = 2000, count: int = 10) -> list[Row]:
    """Ten each: of a worker, of the leader, of both. Rows all differ, so that a lost or repeated one shows in the losses."""
    job = partial(elastic_jobs.job, MLP, shards=2, batch=16, steps=steps)
    alone = wf.train([job(folder / "alone")])[0]
    chance = random.Random(SEED)
    return [_killed(who, folder, job, alone, chance, count) for who in ("worker", "leader", "both")]


@dataclass(frozen=True)
class Kill:
    """When it was, and the processes."""

    when: float
    pids: frozenset[int]


def _killed(who: str, folder: Path, job: Callable[..., wf.Job], alone: wf.JobResult, chance: random.Random, count: int) -> Row:
    chosen = {"worker": BOTH[1:], "leader": BOTH[:1], "both": BOTH}[who]
    waits: list[float] = []
    equal, twice, lost, runs = True, 0, 0, 0
    while len(waits) < count:
        runs += 1
        log = folder / f"killed-{who}-{runs}"
        made: list[Kill] = []
        drive = partial(_kill, chosen=chosen, chance=chance, made=made, most=count - len(waits), last=alone.steps - 250)
        settings: Row = {"checkpoint": wf.Checkpoints(folder / f"{who}-{runs}", steps=5)} if who == "both" else {}
        equal &= same(run(job(log, pause=0.002), BOTH, drive, **settings), alone)
        if not made:
            raise RuntimeError("a run ended before its first kill")
        done = elastic_jobs.read_log(log)
        waits += [_wait(done, kill, beyond_a_step=who != "both") for kill in made]
        twice += sum(often - 1 for often in Counter((one.pid, one.number) for one in done).values())
        lost += alone.steps - len({one.number for one in done})
    both, well = who == "both", equal and not twice and not lost
    what = f"{count} kills of {'both devices' if both else 'the ' + who}, in {runs} runs"
    unit = "s until a step, at most" if both else "s beyond a step, at most"
    more = f"{'equal' if equal else 'OTHER'} bits, {lost} steps lost, {twice} twice"
    return _row(
        what, max(waits), "equal bits, 0, 0" if both else "<= 0.5, equal bits, 0, 0", well and (both or max(waits) <= 0.5), unit,
        f"{more}; median {report.median(waits):.3g} s", waits,
    )  # fmt: skip


def _kill(live: Live, chosen: list[str], chance: random.Random, made: list[Kill], most: int, last: int) -> None:
    gone: set[int] = set()

    def whole() -> bool:
        pids = live.runner.pids
        return set(live.runner.devices) == set(BOTH) and set(pids) >= set(BOTH) and not gone & set(pids.values())

    while len(made) < most:
        live.until(whole)
        live.steps(chance.randrange(5, 40))
        time.sleep(chance.uniform(0.0, 0.05))
        if live.runner.steps > last:
            return
        pids = frozenset(live.runner.pids[device] for device in chosen)
        made.append(Kill(time.time(), pids))
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        gone |= pids
        if len(chosen) == 1:  # after both the call itself starts them again
            live.until(lambda: not set(chosen) & set(live.runner.devices))
            live.steps(30)
            live.runner.set_devices(BOTH)


def _wait(done: list[Done], kill: Kill, beyond_a_step: bool, near: int = 3) -> float:
    # The longest wait for one of the next steps that others do, less a step as they then take.
    if not beyond_a_step:
        return min(one.when for one in done if one.when > kill.when and one.pid not in kill.pids) - kill.when
    before = max((one.number for one in done if one.when <= kill.when), default=0)
    later = [one for one in done if one.when > kill.when and one.number > before and one.pid not in kill.pids]
    times = {before: kill.when, **first_times(later)}
    waits = gaps({number: when for number, when in times.items() if number <= before + 25})
    return max(list(waits.values())[:near]) - report.median(list(waits.values())[near:])


# -- speed


def speed(folder: Path, repeats: int, batch: int = 128, steps: int = 12, warm: int = 4, limit: float = 280.0) -> list[Row]:
    """One, two and DistributedDataParallel in turn, for each model."""
    rows = []
    for what in (RESNET, BERT):
        began, times = time.monotonic(), {"one": list[float](), "two": list[float](), "ddp": list[float]()}
        for number in range(repeats):
            if number and (time.monotonic() - began) * (number + 1) / number > limit:
                break
            for way, found in times.items():
                log = folder / f"{what.name}-{way}-{number}"
                if way == "ddp":
                    by_ddp(what, log, batch, steps)
                else:
                    job = elastic_jobs.job(what, log, shards=2, batch=batch, steps=steps, different=2 * batch)
                    run(job, ONE if way == "one" else BOTH)
                found.append(elastic_jobs.seconds_a_step(log, warm))
        for against, name, asked in (("one", "one device", 1.6), ("ddp", "DistributedDataParallel", 0.95)):
            ratios = [slow / fast for slow, fast in zip(times[against], times["two"])]
            more = (
                f"{report.median(times['two']):.3g} s against {report.median(times[against]):.3g} s a step, {len(ratios)} rounds"
            )
            rows.append(_row(
                f"{what.name}, batch {batch}: two devices against {name}", report.median(ratios), f">= {asked}",
                report.median(ratios) >= asked, "x", more, ratios, times["two"], times[against],
            ))  # fmt: skip
    return rows


def by_ddp(what: Workload, log: Path, batch: int, steps: int) -> None:
    """Train in two processes without waterflow. Raises RuntimeError if one fails."""
    given = cores()[:2], what.name, str(log), batch, steps, 2 * batch
    # Not by multiprocessing, which imports this module, and so all of waterflow.
    code = "from benchmarks.elastic_jobs import ddp\nddp({}, *{!r})"
    commands = [[sys.executable, "-c", code.format(rank, given)] for rank in range(2)]
    processes = [subprocess.Popen(command, cwd=Path(__file__).parents[1]) for command in commands]
    try:
        ended = [process.wait(10 * PATIENCE) for process in processes]
    finally:
        for process in processes:
            process.kill()
    if any(ended):
        raise RuntimeError(f"DistributedDataParallel ended with {ended}")


# -- pauses


def pauses(folder: Path, repeats: int, steps: int = 160, batch: int = 256) -> list[Row]:
    """The longest pause of growing and shrinking, and what stopping and starting again takes."""
    job = partial(elastic_jobs.job, WIDE, shards=2, batch=batch, different=2 * batch)
    found: dict[str, list[float]] = {"grow": [], "shrink": []}
    again: dict[str, list[float]] = {"grow": [], "shrink": []}
    for number in range(min(repeats, 3)):
        for way, pause in _changed(job(folder / f"changed-{number}", steps=steps), folder / f"changed-{number}").items():
            found[way].append(pause)
        for way, first, second in (("grow", ONE, BOTH), ("shrink", BOTH, ONE)):
            name = folder / f"again-{way}-{number}"
            again[way].append(_again(job(name, steps=40), name, first, second))
    rows = []
    for way, asked in (("grow", 0.3), ("shrink", 0.1)):
        longest, restart = max(found[way]), report.median(again[way])
        rows += [
            _row(f"{way}: longest step beyond a step", longest, f"<= {asked}", longest <= asked, "s", "", found[way]),
            _row(f"{way}: that, over stopping and starting again", longest / restart, "<= 0.1", longest <= 0.1 * restart, "x",
                 f"of {restart:.3g} s", again[way]),
        ]  # fmt: skip
    return rows


def _changed(job: wf.Job, log: Path) -> dict[str, float]:
    # From each change's begin until ten steps after it was made: the longest step, less one on a single device.
    when: dict[str, float] = {}

    def drive(live: Live) -> None:
        live.steps(15)
        for way, devices in (("grow", BOTH), ("shrink", ONE)):
            when[f"{way} begins"] = time.time()
            live.change(devices)
            live.steps(10)
            when[f"{way} ends"] = time.time()
            live.steps(5)

    run(job, ONE, drive)
    if "shrink ends" not in when:
        raise RuntimeError(f"the job ended before it was grown and shrunk: {sorted(when)}")
    times = first_times(elastic_jobs.read_log(log))
    took = gaps(times)
    one = report.median([gap for number, gap in took.items() if number > 4 and times[number] < when["grow begins"]])

    def longest(way: str) -> float:
        begin, end = when[f"{way} begins"], when[f"{way} ends"]
        return max(gap for number, gap in took.items() if times[number] > begin and times[number - 1] < end)

    return {way: longest(way) - one for way in ("grow", "shrink")}


def _again(job: wf.Job, log: Path, first: list[str], second: list[str]) -> float:
    # From the last step before Ctrl-C, which writes a checkpoint, to the first one of another call.
    def drive(live: Live) -> None:
        live.steps(20)
        os.kill(os.getpid(), signal.SIGINT)

    checkpoints = log.with_suffix(".checkpoints")
    try:
        run(job, first, drive, checkpoint=checkpoints)
    except KeyboardInterrupt:
        stopped = time.time()
    else:
        raise RuntimeError("the job ended before it was stopped")
    run(job, second, checkpoint=checkpoints)
    done = [one.when for one in elastic_jobs.read_log(log)]
    return min(when for when in done if when > stopped) - max(when for when in done if when <= stopped)


# -- stragglers


def stragglers(folder: Path, repeats: int, steps: int = 60, batch: int = 36) -> list[Row]:
    """A run whose second device has half a core: its first steps, in even shares, against the last half of its steps."""
    even, moved = [], []
    for number in range(min(repeats, 3)):
        log = folder / f"straggler-{number}"
        loop = f"import os\nos.sched_setaffinity(0, {{{cores()[1]}}})\nwhile True:\n    pass"
        busy = subprocess.Popen([sys.executable, "-c", loop])
        try:
            run(elastic_jobs.job(BERT, log, shards=6, batch=batch, steps=steps), BOTH)
        finally:
            busy.kill()
            busy.wait()
        took = gaps(first_times(elastic_jobs.read_log(log)))
        even.append(report.median([took[n] for n in range(3, 9)]))
        moved.append(report.median([took[n] for n in range(steps // 2, steps + 1)]))
    ratios = [slow / fast for slow, fast in zip(even, moved)]
    return [_row(
        f"{BERT.name}, batch {batch}, 6 shards: after shares have moved", report.median(ratios), ">= 1.3",
        report.median(ratios) >= 1.3, "x", f"{report.median(moved):.3g} s against {report.median(even):.3g} s a step", ratios, even,
        moved,
    )]  # fmt: skip


# -- overhead


def overhead(folder: Path, repeats: int, steps: int = 10, warm: int = 3, batch: int = 64) -> list[Row]:
    """Four parts of a batch in this process, with one thread."""
    alike: Row = {"shards": 4, "batch": batch, "steps": steps, "different": 2 * batch}
    names = iter(range(2 * repeats))

    def timed(work: Callable[[Path], Any]) -> float:
        log = folder / f"overhead-{next(names)}"
        work(log)
        return elastic_jobs.seconds_a_step(log, warm)

    ways = {
        "by hand": lambda: timed(lambda log: elastic_jobs.by_hand(RESNET, log, **alike)),
        "shards": lambda: timed(lambda log: wf.train([elastic_jobs.job(RESNET, log, **alike)], lanes=1)),
    }
    times = report.interleaved(ways, repeats)
    ratios = [ours / hand for ours, hand in zip(times["shards"], times["by hand"])]
    more = f"{report.median(times['shards']):.3g} s against {report.median(times['by hand']):.3g} s a step"
    row = _row(
        f"{RESNET.name}, batch {batch}, 4 shards: time of accumulation by hand", report.median(ratios), "<= 1.1",
        report.median(ratios) <= 1.1, "x", more, ratios, times["shards"], times["by hand"],
    )  # fmt: skip
    return [row, *_without_shards()]


def _without_shards(batch: int = 16, steps: int = 20) -> list[Row]:
    # A job with shards=1 is run by the same class, from the captured program of one that says nothing of shards.
    data = DataLoader(MLP.rows(batch * steps, batch * steps), batch)
    plain = wf.Job("job", MLP.model, data, MLP.optimizer, step=MLP.loss, seed=SEED)
    one = replace(plain, shards=1)
    kinds: list[type] = []
    with wf.Engine("cpu", memory="1GiB", lanes=1) as engine:
        first = wf.train([plain], engine=engine)[0]
        second = wf.train([one], engine=engine)
        runner = wf.JobRunner(one, engine, lambda epoch, metrics: kinds.append(type(runner.step)))
        runner.run()
    captures = second.stats.captures if second.stats is not None else None
    torch.manual_seed(SEED)
    model = MLP.model()
    optimizer, losses = MLP.optimizer(model.parameters()), []
    for rows in DataLoader(data.dataset, batch, generator=torch.Generator()):  # a loader draws a number of its own
        loss = MLP.loss(model, rows)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    by_hand = wf.JobResult("by hand", "completed", losses=tuple(losses), state_dict=model.state_dict())
    program = _row(
        "shards=1: class of its step, and captures after a job without shards", f"{kinds[0].__name__}, {captures}", "Step, 0",
        kinds == [wf.Step] and captures == 0,
    )  # fmt: skip
    return [
        _equal("shards=1 and a job without", second[0], first),
        _equal("shards=1 and a loop by hand", second[0], by_hand),
        program,
    ]


PARTS: dict[str, Callable[[Path, int], list[Row]]] = {
    "bits": bits, "apart": apart, "kills": kills, "speed": speed, "pauses": pauses, "stragglers": stragglers, "overhead": overhead,
}  # fmt: skip


def main() -> int:
    """Command line."""
    parser = report.parser((__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all if none is named")
    parser.set_defaults(repeats=2)  # all parts together then take fifteen minutes
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"no part {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background lets it be ignored
    torch.set_num_threads(1)
    rows: list[Row] = []
    for name in arguments.parts or PARTS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="elastic-") as folder:
            found = [{"part": name, **row} for row in PARTS[name](Path(folder), arguments.repeats)]
        for row in found:
            print(f"{row['what']}: {row['figure']} {row['unit']} (asked: {row['asked']})", file=sys.stderr)
        print(f"{name} took {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        rows += found
    return report.finish("_".join(["elastic", *arguments.parts]), arguments, rows)


if __name__ == "__main__":
    sys.exit(main())
