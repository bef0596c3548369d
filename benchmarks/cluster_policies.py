"""AntMan and Gandiva against the schedulers that their papers compare with, on public workloads, in virtual time.

AntMan, section 5.2: 64 devices on 8 servers, nine models (table 3), tenant A with a quota of all devices, tenant B with
none. Gandiva, section 6.3: 1,000 jobs over two hours on 45 servers of 4 devices. All is a model, no measurement.
"""

from __future__ import annotations

import random
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks import report
from waterflow import cluster

TRACES = Path(__file__).parent / "traces"
PICTURE = report.RESULTS / "cluster_policies.png"
OVER_CAPACITY, OVER_PACKING, EARLY = 2.05, 1.84, -0.77  # the papers' figures
LOADS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
# The paper gives no load. Its makespan became 1.76 times shorter, so the capacity scheduler took at least 1.76 times as
# long as jobs arrived: the first of our loads above that.
PAPER_LOAD = 2.0
PAIR = 6.6  # queueing, from the one pair without control that AntMan published
QUEUEING = (("queueing", PAIR),)
SEEDS = 5
# Gandiva, section 6.3: chances of the models of its table 1, and how many devices they ask for.
GANDIVA_MIX = {
    "VAE": 0.15, "SuperResolution": 0.15, "RHN": 0.25 / 3, "SCRNN": 0.25 / 3, "MI-LSTM": 0.25 / 3, "LSTM": 0.15,
    "ResNet-50": 0.15, "ResNext-50": 0.15,
}  # fmt: skip
LARGE = ("ResNet-50", "ResNext-50")  # ask for 2 or 4 devices
MINI_BATCHES = 100


@dataclass(frozen=True)
class Setup:
    """A workload of two tenants and what it meets. The paper leaves open all but M, the quotas and the mix of models.

    ``load``: device-seconds asked for over those there are until the last arrival. ``share`` of jobs that are tenant
    A's. ``auto``: whether A's may turn opportunistic; the paper says that all of them are guaranteed.
    """

    trace: str = "philly_480"
    load: float = PAPER_LOAD
    share: float = 0.5
    auto: bool = False
    changed: tuple[tuple[str, float], ...] = ()  # fields of Interference
    gavel: bool = False  # Gavel's models, evenly, with the speeds that it measured of pairs

    @property
    def models(self) -> cluster.Interference:
        """How those who share a device slow each other down."""
        return _interference(self.changed, self.gavel)

    def jobs(self, seed: int) -> list[cluster.Submission]:
        """The workload; ``seed`` draws models and tenants where the trace names none, and nothing else."""
        given = cluster.read_workload(TRACES / f"{self.trace}.csv").submissions
        work = sum((job.duration or 0.0) * job.devices for job in given)
        offered = work / 64 / max(job.submitted for job in given)
        rng = random.Random(seed)
        jobs = []
        mix = dict.fromkeys(self.models.models, 1.0) if self.gavel else cluster.ANTMAN_MIX
        for job in cluster.draw_models(given, mix, seed):
            if self.trace.startswith("philly"):
                first = rng.random() < self.share
                job = replace(job, tenant="AB"[not first], priority="guaranteed" if first else "opportunistic")
            memory = self.models.memory(job.model)
            at = job.submitted * offered / self.load
            jobs.append(replace(job, submitted=at, auto=self.auto, memory=memory))
        return jobs

    def run(self, policy: str, seed: int, **parameters: Any) -> cluster.Simulated:
        """All jobs under a policy; under antman devices have coordinators."""
        nodes = [cluster.Node(f"server{i}", 8, self.models.device_memory) for i in range(8)]
        tenants = [cluster.Tenant("A", 64), cluster.Tenant("B", 0)]
        scheduler = cluster.Scheduler(nodes, cluster.POLICIES[policy](**parameters), tenants)
        speeds = self.models.of(scheduler.policy.sharing)
        simulator = cluster.Simulator(scheduler, speeds=speeds, utilization=self.models.utilization_of)
        return simulator.run(self.jobs(seed))


@cache
def _interference(changed: tuple[tuple[str, float], ...], gavel: bool) -> cluster.Interference:
    if not gavel:
        return cluster.Interference(**dict(changed))
    pairs = cluster.read_gavel_pairs(TRACES / "gavel_colocation.csv")
    return cluster.Interference(models=cluster.gavel_models(pairs), pairs=pairs, **dict(changed))


def average(run: cluster.Simulated, tenant: str = "AB") -> float:
    """Seconds from submission to end."""
    return statistics.mean(job.completion for job in run.jobs if job.tenant in tenant)


def makespan(run: cluster.Simulated) -> float:
    """Seconds to the last end."""
    return max(job.ended for job in run.jobs)


class Ratio(list[float]):
    """One figure for each seed."""

    def __str__(self) -> str:
        return f"{statistics.mean(self):.2f} ({min(self):.1f}-{max(self):.1f})" if len(self) > 1 else f"{self[0]:.2f}"


def over(setup: Setup, policy: str, seeds: int, of: Callable[[cluster.Simulated], float] = average,
         antman: dict[str, Any] | None = None, **parameters: Any) -> Ratio:  # fmt: skip
    """How many times more a policy takes than antman."""
    ratios = Ratio()
    for seed in range(seeds):
        ours = ran(setup, "antman", seed, **(antman or {}))
        ratios.append(of(ran(setup, policy, seed, **parameters)) / of(ours))
    return ratios


@cache
def _ran(setup: Setup, policy: str, seed: int, parameters: tuple[tuple[str, Any], ...]) -> cluster.Simulated:
    return setup.run(policy, seed, **dict(parameters))


def ran(setup: Setup, policy: str, seed: int, **parameters: Any) -> cluster.Simulated:
    """One run, once."""
    return _ran(setup, policy, seed, tuple(sorted(parameters.items())))


def by_load(trace: str, loads: Sequence[float], seeds: int) -> list[dict[str, Any]]:
    """Everything against load."""
    rows = []
    for load in loads:
        setup = Setup(trace, load)
        queued = replace(setup, changed=QUEUEING)
        preempted = [
            statistics.mean(job.preemptions > 0 for job in ran(setup, "capacity", seed, preempt=True).jobs)
            for seed in range(seeds)
        ]
        a = lambda run: average(run, "A")  # noqa: E731
        rows.append({
            "load": load,
            "antman": f"{statistics.mean(average(ran(setup, 'antman', seed)) for seed in range(seeds)):,.0f} s",
            "capacity": str(over(setup, "capacity", seeds)),
            "makespan": str(over(setup, "capacity", seeds, makespan)),
            "backfill": str(over(setup, "capacity", seeds, backfill=True)),
            "packing": str(over(setup, "gandiva-packing", seeds)),
            "packing, queueing": str(over(queued, "gandiva-packing", seeds)),
            "A, preempt": str(over(setup, "capacity", seeds, a, preempt=True)),
            "preempted": f"{statistics.mean(preempted):.0%}",
            "A, packing": str(over(setup, "gandiva-packing", seeds, a)),
        })  # fmt: skip
    return rows


def sensitivity(seeds: int) -> list[dict[str, Any]]:
    """One assumption changed at a time, at the load taken for the paper's."""
    changes: list[tuple[str, Setup, dict[str, Any], dict[str, Any], dict[str, Any]]] = []

    def add(
        what: str, setup: Setup, antman: dict[str, Any] | None = None, capacity: dict[str, Any] | None = None,
        packing: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        changes.append((what, setup, antman or {}, capacity or {}, packing or {}))

    add("as stated", Setup())
    for share in (0.25, 0.75):
        add(f"{share:.0%} of the jobs are tenant A's", Setup(share=share))
    for busy in (0.5, 0.65, 0.95, 1.0):
        add(f"M = {busy:.0%}", Setup(), {"busy": busy})
    for window in (0.0, 60.0):
        add(f"utilization of the last {window:g} s", Setup(), {"window": window})
    for patience in (0.0, 600.0, 3600.0, 86400.0):
        add(f"A's jobs turn opportunistic after {patience:g} s", Setup(auto=True), {"patience": patience})
    add("A's jobs wait for one server", Setup(), {"one_node": True})
    for name, values in {
        "queueing": (1.0, 3.0, PAIR), "utilization_scale": (0.5, 0.75, 1.25), "least_leftover": (0.05, 0.5),
        "contention": (0.0, 0.2), "allowed_slowdown": (0.01, 0.1), "packing_efficiency": (0.7, 1.0),
        "device_memory": (40 << 30, 80 << 30),
    }.items():  # fmt: skip
        for value in values:
            shown = f"{value / (1 << 30):g} GiB" if name == "device_memory" else f"{value:g}"
            add(f"{name} = {shown}", Setup(changed=((name, value),)))
    add("Gavel's models and measured pairs", Setup(gavel=True))
    add("whoever fits overtakes, in both others", Setup(), None, {"backfill": True}, {"backfill": True})
    add("at most 2 packed", Setup(), None, None, {"limit": 2})
    add("packing undone by throughput", Setup(), None, None, {"undo": True})
    add("at most 2 packed, undone", Setup(), None, None, {"limit": 2, "undo": True})
    return [
        {
            "change": what,
            "over capacity": str(over(setup, "capacity", seeds, antman=antman, **capacity)),
            "over packing": str(over(setup, "gandiva-packing", seeds, antman=antman, **packing)),
        }
        for what, setup, antman, capacity, packing in changes
    ]


def gandiva_jobs(seed: int, device_time: bool = True) -> list[cluster.Submission]:
    """Section 6.3. ``device_time``: 30 to 45 minutes are shared by a job's devices; otherwise each works for so long."""
    rng = random.Random(seed)
    jobs = []
    for number in range(1000):
        model = rng.choices(list(GANDIVA_MIX), list(GANDIVA_MIX.values()))[0]
        devices = rng.choice((2, 4)) if model in LARGE else 1
        seconds = rng.uniform(30, 45) * 60 / (devices if device_time else 1)
        jobs.append(cluster.Submission(
            str(number), devices=devices, model=model, duration=seconds, submitted=rng.uniform(0, 7200), memory=4 << 30,
        ))  # fmt: skip
    return jobs


def first_batches(policy: str, seed: int, device_time: bool = True, resume: float = 0.1, **parameters: Any) -> list[float]:
    """Seconds from submission to the first 100 mini-batches, of each job."""
    table = cluster.read_gandiva_models(TRACES / "gandiva_table1_packing.csv")
    models = cluster.Interference(models=table, device_memory=24 << 30)  # a P40
    rates = dict(line.split(",")[::2][:2] for line in (TRACES / "gandiva_table1_packing.csv").read_text().splitlines()[1:])
    nodes = [cluster.Node(f"server{i}", 4, models.device_memory) for i in range(45)]
    simulator = cluster.Simulator(
        cluster.Scheduler(nodes, cluster.POLICIES[policy](**parameters)),
        cluster.Overheads(resume=resume, move=1.0),
        speeds=models.packed,
        utilization=models.utilization_of,
        milestone=lambda job: MINI_BATCHES / float(rates[job.model or ""]),
    )
    run = simulator.run(gandiva_jobs(seed, device_time))
    return [(job.milestone or job.ended) - job.submitted for job in run.jobs]


GANDIVA = {"migration": False}  # section 6.3 disallows it


def early_feedback(seeds: int) -> list[dict[str, Any]]:
    """The papers' set-up first, then one change at a time."""
    rows = []
    for what, both, ours, theirs in (
        ("as stated", {}, {}, {}),
        ("quantum 30 s", {}, {"quantum": 30.0}, {}),
        ("quantum 120 s", {}, {"quantum": 120.0}, {}),
        ("newcomers at the end of the round", {}, {"newest_first": False}, {}),
        ("the same, quantum 120 s", {}, {"newest_first": False, "quantum": 120.0}, {}),
        ("without packing", {}, {"packing": False}, {}),
        ("with migration", {}, {"migration": True}, {}),
        ("each resume costs 1 s", {"resume": 1.0}, {}, {}),
        ("each resume costs 6 s", {"resume": 6.0}, {}, {}),
        ("whoever fits overtakes in the baseline", {}, {}, {"backfill": True}),
        ("30 to 45 minutes on each device", {"device_time": False}, {}, {}),
    ):
        before = [statistics.mean(first_batches("capacity", seed, **both, **theirs)) for seed in range(seeds)]
        after = [statistics.mean(first_batches("gandiva", seed, **both, **(GANDIVA | ours))) for seed in range(seeds)]
        change = Ratio(b / a - 1 for a, b in zip(before, after))
        rows.append({
            "change": what, "capacity": f"{statistics.mean(before):,.0f} s", "gandiva": f"{statistics.mean(after):,.0f} s",
            "less": f"{statistics.mean(change):+.1%} ({min(change):+.1%} .. {max(change):+.1%})", "changes": list(change),
        })  # fmt: skip
    return rows


def draw(seeds: int) -> None:
    """Ratios against load; distributions of completion times, and of the time to the first mini-batches."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(16, 4.5), layout="constrained")
    lines = (
        ("capacity", {}, (), "over capacity"),
        ("capacity", {"backfill": True}, (), "over capacity with backfill"),
        ("gandiva-packing", {}, (), "over packing"),
        ("gandiva-packing", {}, QUEUEING, f"over packing, queueing = {PAIR}"),
    )
    for policy, parameters, changed, label in lines:
        ratios = [over(Setup(load=load, changed=changed), policy, seeds, **parameters) for load in LOADS]
        left.plot(LOADS, [statistics.mean(ratio) for ratio in ratios], marker="o", label=label)
        left.fill_between(LOADS, [min(ratio) for ratio in ratios], [max(ratio) for ratio in ratios], alpha=0.15)
    for goal in (OVER_CAPACITY, OVER_PACKING):
        left.axhline(goal, color="black", lw=0.6, ls="--")
    left.set(xlabel="offered load", ylabel="average completion time over antman's", title="antman against others")
    left.legend()
    for policy in ("antman", "capacity", "gandiva-packing"):
        _cumulative(middle, [job.completion for job in ran(Setup(), policy, 0).jobs], policy)
    middle.set(xscale="log", xlabel="completion time (s)", ylabel="share of jobs", title=f"load {PAPER_LOAD:g}, seed 0")
    middle.legend()
    for policy, parameters in (("gandiva", GANDIVA), ("capacity", {})):
        _cumulative(right, first_batches(policy, 0, **parameters), policy)
    right.set(xscale="log", xlabel="time to 100 mini-batches (s)", ylabel="share of jobs", title="gandiva, section 6.3")
    right.legend()
    PICTURE.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(PICTURE, dpi=110)
    pyplot.close(figure)


def _cumulative(axes: Any, values: list[float], label: str) -> None:
    axes.plot(sorted(values), [(number + 1) / len(values) for number in range(len(values))], label=label)


def main() -> int:
    """Command line."""
    parser = report.parser(__doc__ or "")
    parser.set_defaults(repeats=SEEDS)
    arguments = parser.parse_args()
    seeds = arguments.repeats
    setup = Setup()
    queued = Setup(changed=QUEUEING)
    rows: list[dict[str, Any]] = []

    def goal(what: str, ratio: Ratio, at_least: float) -> None:
        holds = statistics.mean(ratio) >= at_least
        rows.append({"what": what, "figure": f"{ratio}", "goal": at_least, "holds": holds, "by seed": list(ratio)})

    goal("antman over capacity", over(setup, "capacity", seeds), OVER_CAPACITY)
    goal("antman over gandiva's packing, as public measurements interfere", over(setup, "gandiva-packing", seeds), OVER_PACKING)
    goal(
        f"antman over gandiva's packing, queueing = {PAIR} (AntMan's pair)", over(queued, "gandiva-packing", seeds), OVER_PACKING
    )
    early = early_feedback(seeds)
    less = statistics.mean(early[0]["changes"])
    rows.append({"what": "gandiva to the first 100 mini-batches, over capacity", "figure": early[0]["less"], "goal": EARLY,
                 "holds": less <= EARLY, "by seed": early[0]["changes"]})  # fmt: skip
    before = {
        "philly_480: average completion time over antman's, by load": by_load("philly_480", LOADS, seeds),
        "muri_testbed_400 (its own models and tenants): the same": by_load("muri_testbed_400", (0.5, 1.0, 1.58, 2.0), 1),
        f"one assumption changed, philly_480, load {PAPER_LOAD:g}": sensitivity(seeds),
        "gandiva's section 6.3: seconds to the first 100 mini-batches": early,
    }
    if arguments.save:
        draw(seeds)
    note = (
        f"Mean (lowest .. highest) of seeds 0 to {seeds - 1}. A model, no measurement. {setup.models.parameters()}; "
        f"antman: {dict(cluster.POLICIES['antman']().parameters)}; capacity: {dict(cluster.POLICIES['capacity']().parameters)}; "
        f"gandiva-packing: {dict(cluster.POLICIES['gandiva-packing']().parameters)}; A's share {setup.share}, auto {setup.auto}. "
        f"Load {PAPER_LOAD:g}: the first above 1.76, by which the paper's makespan shrank. No overheads but gandiva's resume 0.1 s."
    )
    return report.finish("cluster_policies", arguments, rows, note, before)


if __name__ == "__main__":
    sys.exit(main())
