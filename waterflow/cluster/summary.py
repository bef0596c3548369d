"""Statistics and pictures of simulated runs. Times are seconds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from waterflow.cluster.simulator import Simulated

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HUES = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB", "#EE7733")
_MOST_POINTS = 400  # of a line of devices over time


@dataclass(frozen=True)
class Summary:
    """Statistics of a workload under a policy.

    Completion is the time from submission to end, queueing the part of it without devices. A percentile is the value of the
    job at that place of the sorted jobs. Utilization is the share of device time with a job on the device, from the first
    submission to the last end. ``unfair`` is the share of jobs that took longer than under an equal share of the cluster,
    ``worst_share`` the 99th percentile of how many times longer: see ``share_ratios``.
    """

    jobs: int
    average: float
    p50: float
    p99: float
    makespan: float
    queueing: float
    queueing_p99: float
    utilization: float
    unfair: float
    worst_share: float
    preemptions: int

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by name."""
        return asdict(self)


def summarize(run: Simulated) -> Summary:
    """Return the statistics of a run of at least one job."""
    completion = sorted(job.completion for job in run.jobs)
    waited = sorted(job.waited for job in run.jobs)
    first, last = min(job.submitted for job in run.jobs), max(job.ended for job in run.jobs)
    busy = sum((after - at) * count for (at, count), (after, _) in zip(run.occupied, run.occupied[1:]))
    ratios = np.sort(share_ratios(run))
    return Summary(
        jobs=len(run.jobs),
        average=sum(completion) / len(completion),
        p50=completion[len(completion) // 2],
        p99=completion[int(0.99 * len(completion))],
        makespan=last - first,
        queueing=sum(waited) / len(waited),
        queueing_p99=waited[int(0.99 * len(waited))],
        utilization=busy / (run.devices * (last - first)) if last > first else 0.0,
        # A tolerance for rounding: a job that always had its devices is not unfair.
        unfair=float(np.mean(ratios > 1 + 1e-9)),
        worst_share=float(ratios[int(0.99 * len(ratios))]),
        preemptions=sum(job.preemptions for job in run.jobs),
    )


def share_ratios(run: Simulated) -> NDArray[np.float64]:
    """Return each job's finish-time fairness (Themis, NSDI 2020): its completion time over that under an equal share.

    Under an equal share every job runs all the time, at the speed 1 / max(1, asked / devices), where asked counts the devices
    of all jobs in the system at the time, under the policy. A ratio above 1 means that the job would have done better so.
    """
    times = np.array([job.submitted for job in run.jobs] + [job.ended for job in run.jobs])
    change = np.array([job.devices for job in run.jobs] + [-job.devices for job in run.jobs], dtype=np.float64)
    order = np.argsort(times, kind="stable")
    times, asked = times[order], np.cumsum(change[order])
    slow = np.maximum(1.0, asked / run.devices)
    # The integral of the slowness over time: a job's mean slowness needs only its values at two times.
    area = np.concatenate(([0.0], np.cumsum(np.diff(times) * slow[:-1])))
    submitted = np.array([job.submitted for job in run.jobs])
    ended = np.array([job.ended for job in run.jobs])
    duration = np.array([job.duration for job in run.jobs])
    life = ended - submitted
    with np.errstate(divide="ignore", invalid="ignore"):
        slowness = np.where(life > 0, (np.interp(ended, times, area) - np.interp(submitted, times, area)) / life, 1.0)
        ratio = life / (duration * slowness)
    return np.where(duration > 0, ratio, 1.0)


def save_pictures(path: str | os.PathLike[str], runs: Mapping[str, Simulated], title: str) -> None:
    """Save a PNG 1875 pixels wide: distributions of completion, queueing and fairness, and occupied devices over time."""
    from matplotlib.figure import Figure  # slow to import

    figure = Figure(figsize=(12.5, 8.2), dpi=150, layout="constrained")
    figure.suptitle(title, fontsize=13, fontweight="bold")
    (completion, queueing), (occupied, fairness) = figure.subplots(2, 2)
    for (name, run), hue in zip(runs.items(), _HUES * (len(runs) // len(_HUES) + 1)):
        _distribution(completion, np.array([job.completion for job in run.jobs]), name, hue)
        _distribution(queueing, np.array([job.waited for job in run.jobs]), name, hue)
        _distribution(fairness, share_ratios(run), name, hue)
        _over_time(occupied, run, name, hue)
    for axes, what in ((completion, "completion time"), (queueing, "time without devices")):
        axes.set_title(f"{what}: share of jobs with at most this", loc="left", fontsize=10)
        axes.set_xscale("symlog", linthresh=60)
        axes.set_xlim(left=0)
        ticks = {0: "0", 60: "1 min", 600: "10 min", 3600: "1 h", 36_000: "10 h", 360_000: "100 h", 3_600_000: "1,000 h"}
        longest = axes.get_xlim()[1]
        shown = {at: text for at, text in ticks.items() if at <= longest}
        axes.set_xticks(list(shown), labels=list(shown.values()))
        axes.minorticks_off()
    fairness.set_title("completion time over that under an equal share (above 1: unfair)", loc="left", fontsize=10)
    fairness.set_xscale("log")
    fairness.axvline(1.0, color="#888888", linewidth=0.8, linestyle=":")
    occupied.set_title("occupied devices over time, means of equal spans", loc="left", fontsize=10)
    occupied.set_xlabel("days")
    occupied.set_ylim(0, max(run.devices for run in runs.values()) * 1.04)
    for axes in (completion, queueing, fairness):
        axes.set_ylim(0, 1.01)
        axes.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    for axes in (completion, queueing, occupied, fairness):
        axes.grid(color="#DDDDDD", linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
    completion.legend(fontsize=9, frameon=False, loc="upper left")
    figure.savefig(path)


def _distribution(axes: Axes, values: NDArray[np.float64], name: str, hue: str) -> None:
    values = np.sort(values)
    axes.step(values, np.arange(1, len(values) + 1) / len(values), where="post", label=name, color=hue, linewidth=1.6)


def _over_time(axes: Axes, run: Simulated, name: str, hue: str) -> None:
    times = np.array([at for at, _ in run.occupied])
    counts = np.array([count for _, count in run.occupied], dtype=np.float64)
    if times[-1] == times[0]:
        return
    area = np.concatenate(([0.0], np.cumsum(np.diff(times) * counts[:-1])))
    edges = np.linspace(times[0], times[-1], _MOST_POINTS + 1)
    means = np.diff(np.interp(edges, times, area)) / np.diff(edges)
    axes.stairs(means, edges / 86_400, label=name, color=hue, linewidth=1.2, baseline=None)
