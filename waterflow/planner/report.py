"""A picture of a plan: the two stacks of an arena over time, steps on their lanes, and what the highest step is made of."""

from __future__ import annotations

import linecache
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from waterflow import _C
from waterflow.executor.simulation import Clock, prepare, run
from waterflow.partition.offsets import planned
from waterflow.partition.plan import format_bytes
from waterflow.planner.sizes import SizedStep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HUES = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB", "#EE7733")
_STEPS = 3
_MOST_LINES = 14
_GIB = float(1 << 30)


def lines_at_peak(step: SizedStep) -> list[tuple[str, int]]:
    """Which of the user's lines made what is live at the step's highest point, in bytes, the largest first."""
    resident = step.offsets.resident
    at = max(range(len(resident)), key=resident.__getitem__)
    made: Counter[str] = Counter()
    for life in planned(step.footprint.lives):
        if life.birth <= at <= life.death:
            lines = step.footprint.lines
            made[(lines[life.birth] if lines else "") or "(not known)"] += life.size
    return made.most_common()


def save_report(
    path: str | os.PathLike[str], jobs: Sequence[tuple[str, SizedStep]], *, memory: int, clock: Clock | None = None
) -> None:
    """Simulate a few steps of the named jobs in ``memory`` bytes and draw them, as a PNG 1875 pixels wide.

    Raises as ``simulate`` does. Times are a model.
    """
    from matplotlib.figure import Figure  # slow to import

    clock = clock or Clock()
    native, arena = prepare([step.job(name, _STEPS) for name, step in jobs], memory, 1, clock)
    spans = run(native, arena, clock=clock).spans
    named = [name for name, _ in jobs]
    highest = max(jobs, key=lambda job: job[1].offsets.height)
    figure = Figure(figsize=(12.5, 10.5), dpi=150, layout="constrained")
    stacks, lanes, lines = figure.subplots(3, 1, height_ratios=[4.2, 1.0, 3.6])
    lanes.sharex(stacks)
    _draw_stacks(stacks, spans, arena, len(named))
    held = memory - arena
    stacks.set_title(
        f"{format_bytes(memory)}: {format_bytes(held)} held by all jobs all the time (parameters, optimizer state, a batch "
        f"each), {format_bytes(arena)} for steps",
        loc="left", fontsize=10.5,
    )  # fmt: skip
    _draw_lanes(lanes, spans, named)
    _draw_lines(lines, *highest)
    figure.savefig(path, format="png")


def _label(line: str) -> str:
    """The end of its path, and what stands there."""
    file, _, number = line.rpartition(":")
    code = linecache.getline(file, int(number)).strip() if number.isdecimal() else ""
    return f"{code[:44]}   {os.sep.join(line.split(os.sep)[-2:])}" if code else line


def _hue(job: int) -> str:
    return _HUES[job % len(_HUES)]


def _draw_stacks(ax: Axes, spans: Sequence[_C.SimulatedSpan], arena: int, jobs: int) -> None:
    """One lane's steps from the bottom, the other's from the top."""
    for lane in (0, 1):
        for job in range(jobs):
            mine = [span for span in spans if span.lane == lane and span.job == job]
            if not mine:
                continue
            starts, ends = (np.array([getattr(span, name) for span in mine]) / 1e6 for name in ("start", "end"))
            peaks, afters = (np.array([getattr(span, name) for span in mine]) / _GIB for name in ("peak", "after"))
            # What a group leaves stays until the next one of its step begins; behind a step's last group, nothing.
            times = np.stack([starts, ends, ends, np.append(starts[1:], ends[-1])], axis=1).ravel()
            heights = np.stack([peaks, peaks, afters, afters], axis=1).ravel()
            bottom = np.zeros_like(heights) if lane == 0 else arena / _GIB - heights
            top = heights if lane == 0 else np.full_like(heights, arena / _GIB)
            ax.fill_between(times, bottom, top, color=_hue(job), alpha=0.75, lw=0)
    ax.axhline(arena / _GIB, color="#333333", linestyle=(0, (5, 3)), lw=1.1)
    ax.set(ylim=(0, arena / _GIB * 1.02), ylabel="arena (GiB)")
    ax.tick_params(labelbottom=False)


def _draw_lanes(ax: Axes, spans: Sequence[_C.SimulatedSpan], named: Sequence[str]) -> None:
    for job, name in enumerate(named):
        for lane in (0, 1):
            mine = [span for span in spans if span.lane == lane and span.job == job]
            bars = [(span.start / 1e6, (span.end - span.start) / 1e6) for span in mine]
            ax.broken_barh(bars, (lane - 0.4, 0.8), facecolors=_hue(job), lw=0)
        ax.plot([], [], color=_hue(job), lw=6, label=name.replace("$", r"\$").lstrip("_"))
    ax.set_yticks([0, 1], ["lane 0 (from below)", "lane 1 (from above)"], fontsize=9)
    ax.set(ylim=(1.5, -0.5), xlabel="milliseconds, by a model of the GPU's rates")
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def _draw_lines(ax: Axes, name: str, step: SizedStep) -> None:
    """Where the highest step's peak comes from."""
    made = lines_at_peak(step)
    shown, rest = made[:_MOST_LINES], made[_MOST_LINES:]
    if rest:
        shown.append((f"{len(rest)} other lines", sum(size for _, size in rest)))
    labels = [_label(line) for line, _ in shown]
    ax.barh(range(len(shown)), [size / _GIB for _, size in shown], color="#4477AA")
    ax.set_yticks(range(len(shown)), [label.replace("$", r"\$") for label in labels], fontsize=8)
    ax.invert_yaxis()
    total = sum(size for _, size in made)
    ax.set_title(f"live at the peak of {name} with batches of {step.size}, by line: {format_bytes(total)}".replace("$", r"\$"),
                 loc="left", fontsize=10.5)  # fmt: skip
    ax.set_xlabel("GiB")
