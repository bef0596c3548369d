"""The simulator against the live cluster: thirty short jobs on two made-up devices, and the same in virtual time.

    python -m benchmarks.cluster_simulated [--backend ray|local] [--repeats 5] [--save]

Each device is a process with one core of its own and one lane; all jobs are guaranteed and ask for one device. The steps:

- Each device trains one short job of each kind, so that no later job is the first of its kind there.
- A job of each kind and length alone: "start" is the time from its submission until the service hears that it trains.
- Every job while the other device trains, too: all are handed in at once, last ones first. "duration" is the time from when the
  service hears that a job trains until it hears that it has ended.
- Live: the jobs are handed in at their times, spread so that they ask for ``--load`` of what the devices can do by those durations;
  scheduler, store, service and backend are those of ``waterflow cluster up``.
- Simulated: the same scheduler and policy, the median start as the overhead of each start, and as the duration of each job what the
  service can tell once a fifth of its steps is done: the time until then, and the rest at that pace. How long jobs train in the end
  does not go into it, nor when they begin.

The goal: the average completion times (from submission to end) differ by 5 % at most, in the median of the trials. Of each trial the
last columns say how busy the machine was with other work, and what other durations lead to: "told": how much longer than
live the told durations are, by their sum; "measured before": those with both devices busy before the live run, where a machine that
is shared with others had another speed; "beside": how much longer than those the jobs train live; "with live durations": those that
the jobs have in the end, which leaves what scheduler, service and backend add.
"""

from __future__ import annotations

import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import waterflow as wf
from benchmarks import report
from benchmarks.loopback import LoopbackCluster
from waterflow import cluster

GOAL = 0.05
TOLD_BY = 0.2  # the part of its steps by which a job's duration is told
DEVICES = 2
PATIENCE = 120.0  # seconds for one job
STEPS = {"mlp": (1000, 2000, 3500), "cnn": (350, 700, 1200), "attention": (220, 450, 800)}


# -- the jobs


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
    return nn.Sequential(layer, nn.Flatten(), nn.Linear(32 * 64, 10))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (64,)), "cnn": (cnn, (1, 28, 28)), "attention": (attention, (32, 64)),
}  # fmt: skip


class Batches:
    """As many as there are steps; they follow from a seed."""

    def __init__(self, steps: int, shape: tuple[int, ...], seed: int) -> None:
        self.steps, self.shape, self.seed = steps, shape, seed

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        numbers = torch.Generator().manual_seed(self.seed)
        for _ in range(self.steps):
            yield torch.randn(32, *self.shape, generator=numbers), torch.randint(10, (32,), generator=numbers)


@dataclass(frozen=True)
class Asked:
    """One job, handed in so long after the first."""

    id: str
    kind: str
    steps: int
    submitted: float
    seed: int

    def payload(self) -> bytes:
        """For the backend."""
        model, shape = MODELS[self.kind]
        data = Batches(self.steps, shape, self.seed)
        return cluster.pack(
            wf.Job(
                self.id, model, data, lambda p: torch.optim.SGD(p, lr=0.01, momentum=0.9),
                loss=nn.functional.cross_entropy, seed=self.seed,
            )
        )  # fmt: skip


def workload(jobs: int, seed: int) -> list[Asked]:
    """Kinds in turn, in an order, of lengths and at times (shares of the whole) that follow from the seed; the first at once."""
    draw = random.Random(seed)
    kinds = [list(MODELS)[number % len(MODELS)] for number in range(jobs)]
    draw.shuffle(kinds)
    times = [0.0, *sorted(draw.random() for _ in range(jobs - 1))]
    return [
        Asked(f"{number:02}-{kind}", kind, draw.choice(STEPS[kind]), at, seed=number)
        for number, (kind, at) in enumerate(zip(kinds, times, strict=True))
    ]


def spread(jobs: Sequence[Asked], ran: dict[str, Ran], load: float) -> list[Asked]:
    """The jobs at times in seconds, between the first and the last of which they ask for so much of what the devices can do."""
    seconds = sum(ran[asked.id].duration for asked in jobs) / DEVICES / load
    return [replace(asked, submitted=asked.submitted * seconds) for asked in jobs]


# -- live


@dataclass(frozen=True)
class Ran:
    """One job as the service tells of it; seconds."""

    start: float  # from its submission until it trains
    duration: float  # from then to its end

    @property
    def completion(self) -> float:
        """From submission to end."""
        return self.start + self.duration


class Listening:
    """A backend; and what it told of each job's steps, with seconds since the job trains."""

    def __init__(self, backend: cluster.LocalBackend | cluster.RayBackend) -> None:
        self._backend = backend
        self._began: dict[str, float] = {}
        self.reports: dict[str, list[tuple[float, cluster.Part]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def listen(self, timeout: float) -> list[cluster.DeviceState]:
        """As the backend's."""
        states, now = self._backend.listen(timeout), time.monotonic()
        for told in [part for state in states for part in state.parts if part.phase == "training"]:
            began, reports = self._began.setdefault(told.id, now), self.reports.setdefault(told.id, [])
            if told.steps and (not reports or reports[-1][1].seconds != told.seconds):  # it was measured anew
                reports.append((now - began, told))
        return states


def foretold(reports: Sequence[tuple[float, cluster.Part]], part: float = TOLD_BY) -> float:
    """The duration by the first report with this part of the steps done, and the pace since the first one of all; seconds."""
    first_at, first = reports[0]
    for at, now in reports[1:]:
        if now.fraction and now.fraction >= part and now.steps > first.steps:
            left = now.steps / now.fraction - now.steps
            return at + left * (at - first_at) / (now.steps - first.steps)
    raise SystemExit(f"{first.id} ended before two reports told its pace: it needs more steps")


class Live:
    """A cluster of made-up devices, each on a core of its own, in this process."""

    def __init__(self, backend: str, policy: str, folder: Path) -> None:
        settings = cluster.WorkerSettings(memory="512MiB", lanes=1)
        cores = [(core,) for core in sorted(os.sched_getaffinity(0))[:DEVICES]]
        if len(cores) < DEVICES:
            raise SystemExit(f"{DEVICES} devices need as many cores; this process may use {len(cores)}")
        self._ray: LoopbackCluster | None = None
        work = folder / "work"
        if backend == "ray":
            self._ray = LoopbackCluster([DEVICES])
            self.backend: cluster.LocalBackend | cluster.RayBackend = cluster.RayBackend(
                self._ray.address, work, devices=DEVICES, settings=settings, cores=cores, token=self._ray.token
            )
        else:
            self.backend = cluster.LocalBackend(DEVICES, work, settings=settings, cores=cores)
        try:
            self.nodes = [cluster.Node(node.name, 1, node.memory) for node in self.backend.nodes()]
            self._store = cluster.Store(folder / "state.db")
            self._listening = Listening(self.backend)
            self._service = cluster.Service(self._store, cast("Any", self._listening), cluster.POLICIES[policy]())
        except BaseException:
            self.backend.close()
            raise
        self._service.start()
        self._warm_up()

    def _warm_up(self) -> None:
        """One short job of each kind on each device: as many at once as there are devices, each on one of its own."""
        for kind in MODELS:
            warm = [Asked(f"warm-{kind}-{number}", kind, 20, 0.0, seed=0) for number in range(DEVICES)]
            for asked in warm:
                self.submit(asked.id, asked.payload())
            for asked in warm:
                self.ended(asked.id)

    def submit(self, id: str, payload: bytes) -> None:
        """Hand in a guaranteed job for one device."""
        self._service.submit({"id": id, "devices": 1, "priority": "guaranteed", "auto": False}, payload)

    def ended(self, id: str) -> Ran:
        """Wait for its end."""
        if not self._service.wait([id], PATIENCE):
            raise SystemExit(f"{id} did not end within {PATIENCE:g} s")
        told = self._service.record(id)
        if told.state != "completed" or told.attempts != 1 or told.started is None or told.ended is None:
            raise SystemExit(f"{id} is {told.state} after {told.attempts} attempts: {told.reason}")
        return Ran(told.started - told.submitted, told.ended - told.started)

    def starts(self, trial: int) -> list[float]:
        """Of one job of each kind and length while nothing else is there; seconds."""
        found = []
        for kind, lengths in STEPS.items():
            for steps in lengths:
                id = f"alone-{trial}-{kind}-{steps}"
                self.submit(id, Asked(id, kind, steps, 0.0, seed=0).payload())
                found.append(self.ended(id).start)
        return found

    def crowded(self, jobs: Sequence[Asked], name: str) -> dict[str, Ran]:
        """Each job while others train on the other devices: all at once, in this order."""
        for asked in jobs:
            self.submit(f"{name}-{asked.id}", asked.payload())
        return {asked.id: self.ended(f"{name}-{asked.id}") for asked in jobs}

    def together(self, jobs: Sequence[Asked], trial: int) -> dict[str, Ran]:
        """Each job at its time."""
        payloads = [(f"live-{trial}-{asked.id}", asked.submitted, asked.payload()) for asked in jobs]
        began = time.monotonic()
        for id, at, payload in payloads:
            time.sleep(max(0.0, began + at - time.monotonic()))
            self.submit(id, payload)
        return {asked.id: self.ended(id) for asked, (id, _, _) in zip(jobs, payloads, strict=True)}

    def told(self, ran: dict[str, Ran], trial: int) -> dict[str, Ran]:
        """What ran in this trial, with the durations that could be told early."""
        reports = self._listening.reports
        return {id: replace(one, duration=foretold(reports[f"live-{trial}-{id}"])) for id, one in ran.items()}

    def close(self) -> None:
        """End all of it."""
        self._service.down()
        if self._ray is not None:
            self._ray.close()


# -- simulated


def simulated(
    jobs: Sequence[Asked], ran: dict[str, Ran], start: float, policy: str, nodes: Sequence[cluster.Node]
) -> dict[str, float]:
    """Completion times by id: the same submissions, with the durations that ran and the overhead of each start."""
    scheduler = cluster.Scheduler(nodes, cluster.POLICIES[policy]())
    submissions = [
        cluster.Submission(asked.id, auto=False, duration=ran[asked.id].duration, submitted=asked.submitted) for asked in jobs
    ]
    done = cluster.Simulator(scheduler, cluster.Overheads(start=start)).run(submissions)
    return {record.id: record.completion for record in done.jobs}


# -- the table


def busy_cores(seconds: float = 1.0) -> float:
    """How many cores work now, while this program does not."""

    def ticks() -> tuple[int, int]:
        numbers = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
        return sum(numbers), numbers[3] + numbers[4]

    (all_before, idle_before) = ticks()
    time.sleep(seconds)
    (all_after, idle_after) = ticks()
    return (os.cpu_count() or 1) * (1 - (idle_after - idle_before) / max(1, all_after - all_before))


def average(values: Iterable[float]) -> float:
    """The mean."""
    return statistics.fmean(values)


def longer(ran: dict[str, Ran], other: dict[str, Ran]) -> float:
    """How much longer the jobs trained than another time, by their sum; percent."""
    return 100 * (sum(ran[id].duration for id in other) / sum(one.duration for one in other.values()) - 1)


def apart(live: dict[str, Ran], virtual: dict[str, float]) -> float:
    """How far the simulated average completion time is from the live one; percent of the live one."""
    return 100 * (average(virtual.values()) / average(ran.completion for ran in live.values()) - 1)


def compared(live: dict[str, Ran], virtual: dict[str, float]) -> dict[str, Any]:
    """Averages over all jobs, and how far they are apart."""
    each = [abs(virtual[id] - ran.completion) for id, ran in live.items()]
    return {
        "live, s": average(ran.completion for ran in live.values()), "simulated, s": average(virtual.values()),
        "difference, %": apart(live, virtual), "per job, median, s": report.median(each), "most, s": max(each),
    }  # fmt: skip


def per_job(
    jobs: Sequence[Asked], before: dict[str, Ran], told: dict[str, Ran], live: dict[str, Ran], virtual: dict[str, float]
) -> list[dict[str, Any]]:
    """A row for each."""
    return [
        {
            "job": asked.id, "steps": asked.steps, "submitted, s": asked.submitted, "before, s": before[asked.id].duration,
            "told, s": told[asked.id].duration, "live, s": live[asked.id].duration,
            "completion live, s": live[asked.id].completion, "simulated, s": virtual[asked.id],
            "difference, s": virtual[asked.id] - live[asked.id].completion,
        }
        for asked in jobs
    ]  # fmt: skip


def judged(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The median of the trials, and their spread."""
    row: dict[str, Any] = {"trials": len(trials)}
    for column in ("difference, %", "measured before, %", "with live durations, %"):
        values = [trial[column] for trial in trials]
        row |= {column: report.median(values), column.replace(", %", ", spread"): report.spread(values)}
    return row | {"at most, %": 100 * GOAL, "holds": abs(row["difference, %"]) <= 100 * GOAL}


def main() -> int:
    """Print all jobs of each trial, the trials, and their median; 1 if that misses the goal."""
    made = report.parser(__doc__.splitlines()[0])
    made.set_defaults(repeats=5)
    made.add_argument("--backend", choices=("ray", "local"), default="ray", help="who runs the devices")
    made.add_argument("--policy", default="fifo_backfill", help="who decides, in both")
    made.add_argument("--jobs", type=int, default=30, help="how many jobs")
    made.add_argument("--load", type=float, default=0.8, help="what the jobs ask for of what the devices can do")
    made.add_argument("--seed", type=int, default=0, help="of the workload")
    arguments = made.parse_args()
    torch.set_num_threads(1)
    drawn = workload(arguments.jobs, arguments.seed)
    trials: list[dict[str, Any]] = []
    tables = {}
    with tempfile.TemporaryDirectory(prefix="wf-") as folder:
        made_up = Live(arguments.backend, arguments.policy, Path(folder))
        try:
            for trial in range(1, arguments.repeats + 1):
                load, busy = os.getloadavg()[0], [busy_cores()]
                starts = made_up.starts(trial)
                before = made_up.crowded(drawn[::-1], f"before-{trial}")
                busy.append(busy_cores())
                jobs = spread(drawn, before, arguments.load)
                live = made_up.together(jobs, trial)
                busy.append(busy_cores())
                start, told = report.median(starts), made_up.told(live, trial)
                virtual, earlier, known = (
                    simulated(jobs, ran, start, arguments.policy, made_up.nodes) for ran in (told, before, live)
                )
                trials.append(
                    {"trial": trial, "start, s": start, **compared(live, virtual), "told, %": longer(told, live)}
                    | {"measured before, %": apart(live, earlier), "beside, %": longer(live, before)}
                    | {"with live durations, %": apart(live, known)}
                    | {"load before": load, "after": os.getloadavg()[0]}
                    | {"cores busy with others": " ".join(f"{b:.1f}" for b in busy)}
                )
                tables[f"trial {trial}"] = per_job(jobs, before, told, live, virtual)
        finally:
            made_up.close()
    note = (
        f"{len(drawn)} jobs, load {arguments.load:g}, {DEVICES} devices of one core, {arguments.backend} backend, policy "
        f"{arguments.policy}; averages of completion times. Cores busy with others: at first, before the live run, after it."
    )
    return report.finish(f"cluster_simulated_{arguments.backend}", arguments, [judged(trials)], note, tables | {"trials": trials})


if __name__ == "__main__":
    raise SystemExit(main())
