"""Draw a plan: an arena's two stacks over time, the steps on each lane, and the lines that make up the highest peak."""

from __future__ import annotations

import linecache
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from waterflow import _C
from waterflow.partition.plan.offsets import ALIGNMENT, planned
from waterflow.partition.plan.plan import format_bytes
from waterflow.planner.simulate import Clock, prepare, run
from waterflow.planner.step_sizes import SizedStep

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HUES = ("#4477AA", "#EE6677", "#228833", "#CCBB44", "#66CCEE", "#AA3377", "#BBBBBB", "#EE7733")
_STEPS = 3
_MOST_LINES = 14
_SMALLEST = 200  # a line with less than 1/200 of the peak has no bar of its own
_WIDEST_CODE, _WIDEST_TITLE = 44, 120
_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_TIMES = (("milliseconds", 1e6), ("microseconds", 1e3))


def lines_at_peak(step: SizedStep) -> list[tuple[str, int]]:
    """Return (line, bytes) of all memory that is live at the step's highest point, the largest first.

    A line is the user's source line, or the module or operator where no line is known.
    """
    resident = step.offsets.resident
    at = max(range(len(resident)), key=resident.__getitem__)
    made: Counter[str] = Counter()
    for life in planned(step.footprint.lives):
        if life.birth <= at <= life.death:
            lines = step.footprint.lines
            made[(lines[life.birth] if lines else "") or "(not known)"] += life.size
    return made.most_common()


def save_report(
    path: str | os.PathLike[str],
    jobs: Sequence[tuple[str, SizedStep]],
    *,
    limit: int,
    reserve: int = 0,
    gpu: str | None = None,
    clock: Clock | None = None,
) -> None:
    """Simulate a few steps of the named jobs in ``limit - reserve`` bytes and draw them as a PNG, 1875 pixels wide.

    A single job that does not fit is drawn in as much memory as it needs, with a line at the limit. Names must differ. Times
    are a model. Raises the errors of ``simulate``.
    """
    from matplotlib.figure import Figure  # slow to import

    clock = clock or Clock()
    room, memory = limit - reserve, limit - reserve
    # A job that does not fit is drawn all the same: the reader asks what makes it too high. simulate() would refuse it,
    # so it gets the memory it needs and _draw_limit marks where the limit is.
    if len(jobs) == 1:
        ((_, only),) = jobs
        memory = max(room, only.held + only.offsets.height + ALIGNMENT)
    native, arena = prepare([step.job(name, _STEPS) for name, step in jobs], memory, clock)
    spans = run(native, arena, clock=clock).spans
    named = [name for name, _ in jobs]
    highest = max(jobs, key=lambda job: job[1].offsets.height)
    made = lines_at_peak(highest[1])
    bars = min(len(made), _MOST_LINES + 1)
    heights = (4.4, 0.5 + 0.35 * max(2, 0.6 * len(named)), 0.9 + 0.24 * bars)
    figure = Figure(figsize=(12.5, sum(heights) + 1.6), dpi=150, layout="constrained")
    stacks, lanes, lines = figure.subplots(3, 1, height_ratios=heights)
    # One time axis, so that a peak in the stacks can be read off against the lanes below it.
    lanes.sharex(stacks)
    figure.suptitle(_plain(_short(f"{gpu + ': ' if gpu else ''}{_listed(jobs)}", _WIDEST_TITLE)), fontsize=12)
    unit = _unit(_UNITS, arena)
    time = _unit(_TIMES, max((span.end for span in spans), default=0))
    _draw_stacks(stacks, spans, arena, len(named), unit, time)
    _draw_limit(stacks, room - (memory - arena), arena, unit)
    stacks.set_title(
        f"{format_bytes(limit)}: {format_bytes(reserve)} reserve, {format_bytes(memory - arena)} held all the time "
        f"(parameters, optimizer state, batches), {format_bytes(max(0, room - memory + arena))} for steps",
        loc="left",
        fontsize=10.5,
    )
    _draw_lanes(lanes, spans, named, time)
    lanes.set_xlabel(f"{time[0]}, by a model of the rates of a {clock.gpu.name}")
    _draw_lines(lines, *highest, made)
    figure.savefig(path, format="png")


def _listed(jobs: Sequence[tuple[str, SizedStep]]) -> str:
    named = ", ".join(f"{name} with batches of {step.size}" for name, step in jobs)
    return named if len(jobs) == 1 else f"{len(jobs)} jobs: {named}"


def _unit(units: Sequence[tuple[str, float]], largest: float) -> tuple[str, float]:
    # Units are sorted from the largest; values below the smallest unit are shown in it, too.
    return next((each for each in units if largest >= each[1]), units[-1])


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 2].rsplit(" ", 1)[0] + " …"


def _plain(text: str) -> str:
    # matplotlib takes text between dollar signs for a formula.
    return text.replace("$", r"\$")


def _label(line: str) -> str:
    file, _, number = line.rpartition(":")
    code = linecache.getline(file, int(number)).strip() if number.isdecimal() else ""
    return f"{_short(code, _WIDEST_CODE)}   {os.sep.join(line.split(os.sep)[-2:])}" if code else line


def _hue(job: int) -> str:
    return _HUES[job % len(_HUES)]


def _draw_stacks(
    ax: Axes, spans: Sequence[_C.SimulatedSpan], arena: int, jobs: int, unit: tuple[str, float], time: tuple[str, float]
) -> None:
    # Lane 0 places memory upwards from the bottom of the arena, lane 1 downwards from its top: so it is drawn.
    top_of_all = arena / unit[1]
    for lane in (0, 1):
        for job in range(jobs):
            mine = [span for span in spans if span.lane == lane and span.job == job]
            if not mine:
                continue
            starts, ends = (np.array([getattr(span, name) for span in mine]) / time[1] for name in ("start", "end"))
            peaks, afters = (np.array([getattr(span, name) for span in mine]) / unit[1] for name in ("peak", "after"))
            # A group's remaining memory stays until the next group of its step begins; after a step's last group it is 0.
            times = np.stack([starts, ends, ends, np.append(starts[1:], ends[-1])], axis=1).ravel()
            heights = np.stack([peaks, peaks, afters, afters], axis=1).ravel()
            bottom = np.zeros_like(heights) if lane == 0 else top_of_all - heights
            top = heights if lane == 0 else np.full_like(heights, top_of_all)
            ax.fill_between(times, bottom, top, color=_hue(job), alpha=0.75, lw=0)
    ax.set(ylim=(0, top_of_all * 1.06), ylabel=f"memory of steps ({unit[0]})")
    ax.margins(x=0.01)
    ax.tick_params(labelbottom=False)


def _draw_limit(ax: Axes, left: int, arena: int, unit: tuple[str, float]) -> None:
    # left < 0: the jobs already hold more than the limit without any step; the line is drawn at the bottom.
    said = "the limit" if left >= 0 else f"the limit: {format_bytes(-left)} less than is held without a step"
    at = min(max(left, 0), arena) / unit[1]
    ax.axhline(at, color="#333333", linestyle=(0, (5, 3)), lw=1.1)
    ax.annotate(
        said,
        (1, at),
        xycoords=("axes fraction", "data"),
        xytext=(-4, 3),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=9,
        color="#333333",
        bbox={"fc": "w", "lw": 0, "pad": 1},
    )


def _draw_lanes(ax: Axes, spans: Sequence[_C.SimulatedSpan], named: Sequence[str], time: tuple[str, float]) -> None:
    for job, name in enumerate(named):
        for lane in (0, 1):
            mine = [span for span in spans if span.lane == lane and span.job == job]
            bars = [(span.start / time[1], (span.end - span.start) / time[1]) for span in mine]
            ax.broken_barh(bars, (lane - 0.4, 0.8), facecolors=_hue(job), lw=0)
        # matplotlib leaves labels that begin with an underscore out of the legend.
        ax.plot([], [], color=_hue(job), lw=6, label=_plain(_short(name, 30)).lstrip("_"))
    ax.set_yticks([0, 1], ["lane 0 (from below)", "lane 1 (from above)"], fontsize=9)
    ax.set(ylim=(1.5, -0.5))
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=9)


def _draw_lines(ax: Axes, name: str, step: SizedStep, made: list[tuple[str, int]]) -> None:
    total = sum(size for _, size in made)
    shown = [entry for entry in made[:_MOST_LINES] if entry[1] * _SMALLEST >= total]
    rest = made[len(shown) :]
    if rest:
        others = "1 other" if len(rest) == 1 else f"{len(rest)} others"
        shown = [*shown, (others, sum(size for _, size in rest))]
    unit = _unit(_UNITS, max((size for _, size in shown), default=0))
    ax.barh(range(len(shown)), [size / unit[1] for _, size in shown], color="#4477AA")
    ax.set_yticks(range(len(shown)), [_plain(_label(line)) for line, _ in shown], fontsize=8)
    ax.set_ylim(len(shown) - 0.4, -0.6)
    title = f"live at the peak of {name} with batches of {step.size}, by what made it: {format_bytes(total)}"
    ax.set_title(_plain(_short(title, _WIDEST_TITLE)), loc="left", fontsize=10.5)
    ax.set_xlabel(unit[0])
