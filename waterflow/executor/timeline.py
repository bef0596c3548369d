"""Timelines: the record of the node groups that an engine ran and of the memory of its jobs, with pictures and traces of it."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from waterflow.partition.plan.plan import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from waterflow.executor.engine import Engine
    from waterflow.executor.tuning import Decision

Ints = npt.NDArray[np.int64]
JOB, STEP, GROUP, LANE, START, END, HELD, HELD_BY_JOB = range(8)  # columns of `Span` in csrc/engine/engine.h
MOST_EVENTS = 200_000
_MIB, _FOREVER = 1 << 20, np.iinfo(np.int64).max
_PIXELS = 700  # of a picture's axes, each two real ones wide
# Twelve hues that stay apart from their neighbours; further jobs share the grey.
_HUES = ("#3b6fb6", "#f0a83c", "#d9544d", "#4fa89b", "#8a63b8", "#7fb04f",
         "#e58ab0", "#8c6748", "#5bb7dd", "#c9b22f", "#a3375f", "#47806a")  # fmt: skip
_GREY = "#a9adb3"
_CRISP: dict[str, Any] = {"step": "post", "lw": 0, "aa": False}


@dataclass(frozen=True, eq=False)
class MemoryOverTime:
    """Bytes by job over time. Column ``i`` is valid from ``seconds[i]`` to ``seconds[i + 1]``.

    If there are more changes than columns, a column shows the instant of its interval at which all jobs together had the most
    memory: the bytes of all jobs at that one instant, so that their sum is one that really occurred.

    Attributes:
        seconds: Since the engine started, [columns].
        jobs: The job of each row.
        persistent: Bytes claimed for parameters, optimizer state and batches, [jobs, columns].
        in_step: Bytes held by the step that a job is in the middle of, [jobs, columns].
    """

    seconds: npt.NDArray[np.float64]
    jobs: tuple[int, ...]
    persistent: Ints
    in_step: Ints

    @property
    def total(self) -> Ints:
        """Bytes of all jobs, [columns]."""
        return np.asarray(self.persistent.sum(axis=0) + self.in_step.sum(axis=0), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Timeline:
    """The groups that an engine ran while it recorded, and the persistent bytes of its jobs.

    The methods raise ValueError when nothing was recorded.

    Attributes:
        spans: One row a group, [groups, 8]: job, step, group, lane, start_ns, end_ns, held (bytes of all
            steps when the group was issued, its peak included), held_by_job (bytes of its own step).
        names: Job number to name.
        persistent: (time_ns, job, name, bytes) in order of time: what a job has claimed from then on.
        limit: Bytes that the engine may hold; ``reserve`` of them are kept for work beside the steps.
        started_ns: When the engine started, on the clock of the spans.
        dropped: Groups that ran and were not recorded.
        decisions: What the engine tried, and what it kept.
        audits: (job, begin_ns, end_ns): when a job did nothing but an audit, whose group counts for no step.
    """

    spans: Ints
    names: dict[int, str]
    persistent: tuple[tuple[int, int, str, int], ...]
    limit: int
    reserve: int
    started_ns: int
    lanes: int
    dropped: int = 0
    decisions: tuple[Decision, ...] = ()
    audits: tuple[tuple[int, int, int], ...] = ()

    @classmethod
    def of(cls, engine: Engine, dropped: int = 0) -> Timeline:
        """Take what ``engine`` has recorded; it is gone from the engine then. Thread-safe."""
        return cls(
            engine.native.take_spans().numpy(),
            dict(engine.names),
            tuple(engine.reservations.persistent_log),
            engine.limit,
            engine.reservations.reserve,
            engine.started_ns,
            engine.lanes,
            dropped,
            tuple(engine.decisions),
            tuple(engine.audits),
        )

    def memory_over_time(self, columns: int = 2000) -> MemoryOverTime:
        """Return the bytes of each job between the first recorded group and the last, in at most ``columns`` + 1 columns.

        While a group runs, its job has the bytes with which the group was issued. Between two groups of a step it has at most
        the lesser of the two, and at most the rest of what admission had booked whenever a group of another job started; so
        the sum never exceeds what was admitted.
        """
        spells, claims, times, total = self._held()
        seconds = moments = times
        if len(times) > columns + 1:
            seconds = times[0] + np.linspace(0, times[-1] - times[0], columns + 1).astype(np.int64)
            # Each interval begins with the level at its left edge, which may be its highest.
            where = np.searchsorted(times, seconds)
            total = np.insert(total, where, total[np.searchsorted(times, seconds, side="right") - 1])
            times, first = np.insert(times, where, seconds), where + np.arange(len(seconds))
            fullest = np.repeat(np.maximum.reduceat(total, first), np.diff(first, append=len(total)))
            candidates = np.flatnonzero(total == fullest)
            moments = times[candidates[np.searchsorted(candidates, first)]]
        jobs = np.unique(np.concatenate([spells[:, 0], claims[:, 0]]))
        persistent, in_step = np.zeros((2, len(jobs), len(moments)), dtype=np.int64)
        for table, held in ((claims, persistent), (spells, in_step)):
            of_job = np.split(table, np.searchsorted(table[:, 0], jobs[1:]))
            held[:] = [_level(moments, rows) for rows in of_job]
        return MemoryOverTime((seconds - self.started_ns) / 1e9, tuple(jobs.tolist()), persistent, in_step)

    def summary(self) -> dict[str, Any]:
        """Return the recording in a few numbers.

        ``wall_seconds`` from the first recorded group to the last; ``busy_share`` of it for each lane;
        ``overlap``, the share of it with at least two lanes busy; ``peak_bytes`` and ``limit_bytes``, persistent
        state included; ``steps``, how many of each job were recorded; ``decisions`` of the engine, in words.
        """
        _, claims, _, total = self._held()
        (begin, end), labels = self._extent(), self._labels()
        start, stop, wall = self.spans[:, START], self.spans[:, END], max(end - begin, 1)
        busy = np.bincount(self.spans[:, LANE], weights=stop - start, minlength=self.lanes)
        times = np.concatenate([start, stop])
        order = np.argsort(times, kind="stable")
        lanes_busy = np.cumsum(np.repeat([1, -1], len(start))[order])[:-1]
        booked = self.spans[:, HELD] + _level(start, claims)  # with groups that had not begun to run
        steps = Counter(np.unique(self.spans[~self._audited()][:, [JOB, STEP]], axis=0)[:, 0].tolist())
        return {
            "wall_seconds": wall / 1e9,
            "busy_share": (busy / wall).tolist(),
            "overlap": float(np.diff(times[order])[lanes_busy >= 2].sum() / wall),
            "peak_bytes": int(max(booked.max(), total.max())),
            "limit_bytes": self.limit,
            "steps": {labels[job]: count for job, count in sorted(steps.items())},
            "decisions": [str(decision) for decision in self.decisions],
        }

    def _audited(self) -> npt.NDArray[np.bool_]:
        found = np.zeros(len(self.spans), dtype=bool)
        for job in {audit[0] for audit in self.audits}:
            begins, ends = np.array(sorted(audit[1:] for audit in self.audits if audit[0] == job)).T
            at = np.searchsorted(begins, self.spans[:, START], side="right") - 1
            found |= (self.spans[:, JOB] == job) & (at >= 0) & (self.spans[:, END] <= ends[at])
        return found

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for ui.perfetto.dev or chrome://tracing, compressed where ``path`` ends in ``.gz``.

        At most 200,000 events: the earliest groups are kept, and ``otherData`` tells how many were dropped.
        """
        memory, labels = self.memory_over_time(10_000), self._labels()
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": lane, "name": "thread_name", "args": {"name": f"lane {lane}"}}
            for lane in range(self.lanes)
        ]
        events.append({"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "waterflow"}})
        most = MOST_EVENTS - len(events) - len(memory.seconds)
        kept = self.spans[np.argsort(self.spans[:, START], kind="stable")][:most]
        for job, step, group, lane, start, end, held, own in kept.tolist():
            args = {"group": group, "step": step, "held MiB": held / _MIB, "held by job MiB": own / _MIB}
            events.append(
                {
                    "ph": "X",
                    "pid": 1,
                    "tid": lane,
                    "name": labels[job],
                    "cat": "group",
                    "args": args,
                    "ts": (start - self.started_ns) / 1e3,
                    "dur": (end - start) / 1e3,
                }
            )
        series = np.stack([memory.persistent.sum(axis=0), memory.in_step.sum(axis=0)], axis=1) / _MIB
        for seconds, (state, steps) in zip(memory.seconds.tolist(), series.tolist()):
            args = {"persistent": state, "steps": steps}
            events.append({"ph": "C", "pid": 1, "name": "held MiB", "ts": seconds * 1e6, "args": args})
        for decision in self.decisions:
            events.append({"ph": "i", "pid": 1, "name": str(decision), "s": "p", "ts": self._seconds(decision) * 1e6})
        other = {"dropped_groups": len(self.spans) - len(kept) + self.dropped, "limit_bytes": self.limit}
        with (gzip.open if os.fspath(path).endswith(".gz") else open)(path, "wt", encoding="utf-8") as file:
            file.write(json.dumps({"traceEvents": events, "otherData": other}, separators=(",", ":")))

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draw memory by job above the work of the lanes, as a PNG 1875 pixels wide."""
        from matplotlib.figure import Figure  # slow to import

        memory, labels, facts = self.memory_over_time(_PIXELS), self._labels(), self.summary()
        area = (memory.persistent + memory.in_step)[:, :-1] @ np.diff(memory.seconds)
        largest = sorted(np.argsort(-area, kind="stable")[: len(_HUES)].tolist())
        hues = {memory.jobs[row]: hue for row, hue in zip(largest, _HUES)}
        names = {hue: labels[job].lstrip("_")[:28].replace("$", r"\$") for job, hue in hues.items()}
        if len(memory.jobs) > len(hues):
            names[_GREY] = f"{len(memory.jobs) - len(hues)} others"
        low = 0.2 + max(0.42 * min(self.lanes, 8), 0.15 * self.lanes)
        figure = Figure(figsize=(12.5, 4.6 + low), dpi=150, layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3.8, low])
        self._draw_held(top, memory, hues, names)
        self._draw_lanes(bottom, hues, facts["busy_share"])
        text = f"peak {format_bytes(facts['peak_bytes'])}, lanes overlap {facts['overlap']:.0%} of the time"
        top.set_title(f"{sum(facts['steps'].values()):,} steps, {text}", loc="left", fontsize=10.5)
        paper = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1}
        for number, decision in enumerate(self.decisions):
            kept = f": {'kept' if decision.kept else 'not kept'}" if decision.speeds else ""
            label = decision.tried.partition(",")[0] + kept
            bottom.axvline(self._seconds(decision), color="#333333", linestyle=":", lw=1)
            height = 1.02 - 0.14 * (number % 3)  # neighbours stand at different heights
            bottom.text(
                self._seconds(decision),
                height,
                label,
                va="top",
                fontsize=7,
                bbox=paper,
                clip_on=True,
                transform=bottom.get_xaxis_transform(),
            )
        figure.legend(
            loc="outside right upper",
            frameon=False,
            fontsize=9,
            title_fontsize=9,
            alignment="left",
            title="dark: persistent state\nlight: running step",
        )
        figure.savefig(path, format="png")

    def _draw_held(self, ax: Axes, held: MemoryOverTime, hues: dict[int, str], names: dict[str, str]) -> None:
        peak = max(int(held.total.max()), 1)
        size, unit = (1024 * _MIB, "GiB") if peak >= 1024 * _MIB else (_MIB, "MiB")
        hue_of_row = np.array([hues.get(job, _GREY) for job in held.jobs])
        base = np.zeros(len(held.seconds))
        for layer, alpha in ((held.persistent, 1.0), (held.in_step, 0.55)):
            for hue, name in names.items():
                above, label = base + layer[hue_of_row == hue].sum(axis=0) / size, name * (alpha == 1.0)
                ax.fill_between(held.seconds, base, above, color=hue, alpha=alpha, label=label, **_CRISP)
                base = above
        near = self.limit < 1.7 * peak  # else its line would squash the picture
        ceiling = (self.limit if near else peak) / size * 1.1
        ax.axhline(self.limit / size, color="#333333", linestyle=(0, (5, 3)), lw=1.1)
        ax.text(
            0.995,
            self.limit / size if near else 0.985 * ceiling,
            ha="right",
            va="bottom" if near else "top",
            s=f"limit {format_bytes(self.limit)}, {format_bytes(self.reserve)} of it reserve",
            transform=ax.get_yaxis_transform(),
        )
        ax.set(ylim=(0, ceiling), ylabel=f"memory ({unit})")

    def _draw_lanes(self, ax: Axes, hues: dict[int, str], busy_share: list[float]) -> None:
        # A bar for each uninterrupted run of a job on a lane. Where these are more than pixels, bars would hide each other:
        # each pixel is then divided by the jobs' shares of its time.
        begin, end = self._extent()
        edges = np.linspace(0, max(end - begin, 1), _PIXELS + 1)
        seconds = (edges + (begin - self.started_ns)) / 1e9
        spans = self.spans[np.argsort(self.spans[:, START], kind="stable")]
        for lane in range(self.lanes):
            mine = spans[spans[:, LANE] == lane]
            breaks = (np.diff(mine[:, JOB]) != 0) | (mine[1:, START] - mine[:-1, END] > edges[1] / 4)
            if len(mine) and np.count_nonzero(breaks) < _PIXELS:
                runs = np.split(mine, np.flatnonzero(breaks) + 1)
                bars = [(run[0, START] - self.started_ns, run[-1, END] - run[0, START]) for run in runs]
                colours = [hues.get(run[0, JOB], _GREY) for run in runs]
                ax.broken_barh((np.array(bars) / 1e9).tolist(), (lane - 0.4, 0.8), facecolors=colours, lw=0)
                continue
            base = np.full(len(edges), lane + 0.4)
            hue_of_span = np.array([hues.get(job, _GREY) for job in mine[:, JOB].tolist()])
            for hue in np.unique(hue_of_span).tolist():
                times = mine[hue_of_span == hue][:, [START, END]] - begin
                worked = np.cumsum((times - times[:, :1]).ravel())
                share = np.diff(np.interp(edges, times.ravel(), worked)) / edges[1]
                above = base - 0.8 * np.append(share, 0.0)
                ax.fill_between(seconds, base, above, color=hue, **_CRISP)
                base = above
        ticks = [f"lane {lane}, {share:.0%} busy" for lane, share in enumerate(busy_share)]
        ax.set_yticks(range(self.lanes), ticks, fontsize=9 if self.lanes <= 12 else 6)
        ax.set(ylim=(self.lanes - 0.5, -0.5), xlim=seconds[[0, -1]], xlabel="seconds since the engine started")

    def _seconds(self, decision: Decision) -> float:
        return decision.at - self.started_ns / 1e9  # perf_counter is the clock of the spans

    def _extent(self) -> tuple[int, int]:
        if len(self.spans) == 0:
            raise ValueError("nothing was recorded: pass timeline=, or call engine.native.record_spans(True) first")
        return int(self.spans[:, START].min()), int(self.spans[:, END].max())

    def _labels(self) -> dict[int, str]:
        jobs = {*self.spans[:, JOB].tolist(), *(job for _, job, _, _ in self.persistent)}
        names = {job: self.names.get(job, f"job {job}") for job in jobs}
        used = Counter(names.values())
        return {job: name if used[name] == 1 else f"{name} #{job}" for job, name in names.items()}

    def _claims(self) -> Ints:
        # Each change of a job's persistent bytes as a spell without end, whose bytes are the difference to the level before.
        before: Counter[int] = Counter()
        rows = []
        for time, job, _, count in self.persistent:
            rows.append((job, time, _FOREVER, count - before[job]))
            before[job] = count
        return np.array(sorted(rows), dtype=np.int64).reshape(-1, 4)

    def _held(self) -> tuple[Ints, Ints, Ints, Ints]:
        # Returns the spells of steps and of claims, all times of change while groups ran, and the bytes held from each time on.
        begin, end = self._extent()
        spells, claims = _spells(self.spans), self._claims()
        table = np.concatenate([spells, claims])
        times = np.unique(np.clip(table[:, 1:3], begin, end))
        return spells, claims, times, _level(times, table)


def _level(moments: Ints, spells: Ints) -> Ints:
    # The sum of bytes at each moment over ``spells``, rows of (job, from_ns, until_ns, bytes): what has begun by then, less
    # what has ended, by two sorted prefix sums instead of a walk over all spells for each moment.
    level = np.zeros(len(moments), dtype=np.int64)
    for column, sign in ((1, 1), (2, -1)):
        order = np.argsort(spells[:, column], kind="stable")
        sums = np.append(0, np.cumsum(spells[order, 3]))
        level += sign * sums[np.searchsorted(spells[order, column], moments, side="right")]
    return level


def _spells(spans: Ints) -> Ints:
    # The bytes of steps, sorted by job: a spell for each group, and one for each wait between two groups of a step.
    spans = spans[np.lexsort((spans[:, START], spans[:, JOB]))]
    same = (spans[1:, [JOB, STEP]] == spans[:-1, [JOB, STEP]]).all(axis=1)
    waits = np.flatnonzero(same & (spans[1:, START] > spans[:-1, END]))
    before, behind = spans[waits], spans[waits + 1]
    least = np.minimum(before[:, HELD_BY_JOB], behind[:, HELD_BY_JOB])
    waiting = np.stack([before[:, JOB], before[:, END], behind[:, START], least], axis=1)
    running = spans[:, [JOB, START, END, HELD_BY_JOB]]
    # A group may give memory back when it ends. No record is made of that, and only the books at the next start
    # of any group show it: lower what waits until it fits into them.
    order = np.argsort(spans[:, START], kind="stable")
    starts, first = np.unique(spans[order, START], return_index=True)
    room = np.maximum.reduceat(spans[order, HELD], first) - _level(starts, running)
    share = np.minimum(1.0, np.maximum(room, 0) / np.maximum(_level(starts, waiting), 1))
    # The least share in each wait. Sorted, so that reduceat's stretches between them add up to one pass.
    low, high = np.searchsorted(starts, waiting[:, 1]), np.searchsorted(starts, waiting[:, 2])
    seen = np.flatnonzero(low < high)[np.argsort(low[low < high], kind="stable")]
    ranges = np.stack([low[seen], high[seen]], axis=1).ravel()
    shares = np.minimum.reduceat(np.append(share, 1.0), ranges)[::2]
    waiting[seen, 3] = np.floor(waiting[seen, 3] * shares + 1e-3)  # against rounding down what is exact
    table = np.concatenate([running, waiting])
    return table[np.argsort(table[:, 0], kind="stable")]
