"""Timeline: which job ran on which lane, and what each held, drawn or written down afterwards."""

from __future__ import annotations

import gzip
import json
import os
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from waterflow.partition.plan import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from waterflow.executor.engine import Engine

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

JOB, STEP, GROUP, LANE, START, END, HELD, HELD_BY_JOB = range(8)  # columns of `Span` in csrc/engine.h
MOST_EVENTS = 200_000
_COUNTER_EVENTS = 10_000
_MIB = 1 << 20
# Twelve hues that stay apart from their neighbours; further jobs share the grey.
_HUES = ("#3b6fb6", "#f0a83c", "#d9544d", "#4fa89b", "#8a63b8", "#7fb04f",
         "#e58ab0", "#8c6748", "#5bb7dd", "#c9b22f", "#a3375f", "#47806a")  # fmt: skip
_GREY = "#a9adb3"
_FOREVER = np.iinfo(np.int64).max


@dataclass(frozen=True, eq=False)
class MemoryOverTime:
    """Bytes by job over time. Column ``i`` holds from ``seconds[i]`` until ``seconds[i + 1]``.

    Where there is more to show than columns, a column is the fullest moment of its stretch of time: the bytes of
    all jobs at that one instant, so that they add up to what was really held. The last column is the end.

    Attributes:
        seconds: Since the engine started, [columns].
        jobs: The job of each row.
        persistent: Bytes claimed for parameters, optimizer state and batches, [jobs, columns].
        in_step: Bytes held by the step that a job is in the middle of, [jobs, columns].
    """

    seconds: Floats
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

    All methods raise ValueError when nothing was recorded.

    Attributes:
        spans: One row a group, [groups, 8]: job, step, group, lane, start_ns, end_ns, held (bytes of all steps
            when the group was issued, its peak included), held_by_job (bytes of its own step).
        names: Job number to name.
        persistent: (time_ns, job, name, bytes) in order of time: what a job has claimed from then on.
        limit: Bytes that the engine may hold; ``reserve`` of them are kept for work beside the steps.
        started_ns: When the engine started, on the clock of the spans.
        lanes: Number of lanes.
        dropped: Groups that ran and were not recorded.
    """

    spans: Ints
    names: dict[int, str]
    persistent: tuple[tuple[int, int, str, int], ...]
    limit: int
    reserve: int
    started_ns: int
    lanes: int
    dropped: int = 0

    def __post_init__(self) -> None:
        if self.spans.ndim != 2 or self.spans.shape[1] != 8:
            raise ValueError(f"spans must have the shape [groups, 8]; got {list(self.spans.shape)}")

    @classmethod
    def of(cls, engine: Engine, dropped: int = 0) -> Timeline:
        """Take what ``engine`` has recorded; it is gone from the engine then. Thread-safe."""
        spans = np.array(engine.native.take_spans().numpy(), dtype=np.int64)
        return cls(
            spans=spans, names=dict(engine.names), persistent=tuple(engine.persistent_log), limit=engine.limit,
            reserve=engine.reserve, started_ns=engine.started_ns, lanes=engine.lanes, dropped=dropped,
        )  # fmt: skip

    def memory_over_time(self, columns: int = 2000) -> MemoryOverTime:
        """What each job held from the first recorded group to the last, in at most ``columns`` + 1 columns.

        A job in mid-step holds what its group was issued with while that group runs. Until its next group starts
        it holds no more than for either, and no more than what the books leave it at the start of each group of
        another; so the sum never exceeds what was admitted.
        """
        begin, end = self._extent()
        spells, claims = _spells(self.spans), self._claims()
        times, total = _total(spells, claims, begin, end)
        seconds = moments = times
        if len(times) > columns + 1:
            seconds = np.linspace(begin, end, columns + 1).astype(np.int64)
            # Every stretch begins with what it is entered with.
            where = np.searchsorted(times, seconds)
            total = np.insert(total, where, total[np.searchsorted(times, seconds, side="right") - 1])
            times, first = np.insert(times, where, seconds), where + np.arange(len(seconds))
            fullest = np.repeat(np.maximum.reduceat(total, first), np.diff(first, append=len(total)))
            candidates = np.flatnonzero(total == fullest)
            moments = times[candidates[np.searchsorted(candidates, first)]]
        jobs = np.unique(np.concatenate([spells[:, 0], claims[:, 0]]))
        persistent, in_step = np.zeros((2, len(jobs), len(moments)), dtype=np.int64)
        for table, held in ((claims, persistent), (spells, in_step)):
            rows = np.searchsorted(table[:, 0], [jobs, jobs + 1])
            for row, (low, high) in enumerate(rows.T):
                held[row] = _level(moments, table[low:high])
        return MemoryOverTime((seconds - self.started_ns) / 1e9, tuple(jobs.tolist()), persistent, in_step)

    def summary(self) -> dict[str, Any]:
        """The recording in a few numbers.

        ``wall_seconds`` from the first recorded group to the last; ``busy_share`` of it for each lane; ``overlap``,
        the share of it with at least two lanes busy; ``peak_bytes`` and ``limit_bytes``, persistent state included;
        ``steps``, how many steps of each job were recorded.
        """
        begin, end = self._extent()
        spells, claims = _spells(self.spans), self._claims()
        times = np.concatenate([self.spans[:, START], self.spans[:, END]])
        order = np.argsort(times, kind="stable")
        busy = np.cumsum(np.repeat([1, -1], len(self.spans))[order])[:-1]
        # The books also count groups that were issued and had not begun.
        booked = self.spans[:, HELD] + _level(self.spans[:, START], claims)
        steps = Counter(np.unique(self.spans[:, [JOB, STEP]], axis=0)[:, 0].tolist())
        labels = self._labels()
        return {
            "wall_seconds": (end - begin) / 1e9,
            "busy_share": self._busy_share(),
            "overlap": float(np.diff(times[order])[busy >= 2].sum() / max(end - begin, 1)),
            "peak_bytes": int(max(booked.max(), _total(spells, claims, begin, end)[1].max())),
            "limit_bytes": self.limit,
            "steps": {labels[job]: count for job, count in sorted(steps.items())},
        }

    def save_trace(self, path: str | os.PathLike[str]) -> None:
        """Write a trace for ui.perfetto.dev or chrome://tracing, compressed where ``path`` ends in ``.gz``.

        At most 200,000 events: the earliest groups are kept, and ``otherData`` tells how many were dropped.
        """
        memory, labels = self.memory_over_time(_COUNTER_EVENTS), self._labels()
        named = [("process_name", 0, "waterflow"), *(("thread_name", i, f"lane {i}") for i in range(self.lanes))]
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": 1, "tid": tid, "name": what, "args": {"name": name}} for what, tid, name in named
        ]
        room = MOST_EVENTS - len(events) - len(memory.seconds)
        kept = self.spans[np.argsort(self.spans[:, START], kind="stable")][:room]
        for job, step, group, lane, start, end, held, own in kept.tolist():
            events.append({
                "ph": "X", "pid": 1, "tid": lane, "name": labels[job], "cat": "group",
                "ts": (start - self.started_ns) / 1e3, "dur": (end - start) / 1e3,
                "args": {"group": group, "step": step, "held MiB": held / _MIB, "held by job MiB": own / _MIB},
            })  # fmt: skip
        last = (int(kept[:, END].max()) - self.started_ns) / 1e9
        by_kind = memory.persistent.sum(axis=0) / _MIB, memory.in_step.sum(axis=0) / _MIB
        for seconds, state, steps in zip(memory.seconds.tolist(), by_kind[0].tolist(), by_kind[1].tolist()):
            if seconds <= last:
                args = {"persistent": state, "steps": steps}
                events.append({"ph": "C", "pid": 1, "name": "held MiB", "ts": seconds * 1e6, "args": args})
        other = {"dropped_groups": len(self.spans) - len(kept) + self.dropped, "recorded_groups": len(self.spans),
                 "limit_bytes": self.limit, "reserve_bytes": self.reserve}  # fmt: skip
        trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}
        opener = gzip.open if os.fspath(path).endswith(".gz") else open
        with opener(path, "wt", encoding="utf-8") as file:
            file.write(json.dumps(trace, separators=(",", ":")))

    def save_png(self, path: str | os.PathLike[str]) -> None:
        """Draw memory by job above the work of the lanes, as a PNG of about 1900 pixels' width."""
        from matplotlib.figure import Figure  # slow to import
        from matplotlib.patches import Patch

        memory = self.memory_over_time()
        area = np.diff(memory.seconds) @ (memory.persistent + memory.in_step)[:, :-1].T
        chosen = sorted(np.argsort(-area, kind="stable")[: len(_HUES)].tolist())
        labels = self._labels()
        hue_of = {memory.jobs[row]: hue for row, hue in zip(chosen, _HUES)}
        figure = Figure(figsize=(12.5, 4.6 + 0.45 * min(self.lanes, 12)), dpi=150, layout="constrained")
        ratios = [3.6, 0.2 + 0.45 * min(self.lanes, 12)]
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=ratios)
        self._draw_memory(top, memory, hue_of)
        self._draw_lanes(bottom, hue_of)
        patches = [Patch(color=hue, label=labels[job][:28]) for job, hue in hue_of.items()]
        if len(memory.jobs) > len(chosen):
            patches.append(Patch(color=_GREY, label=f"{len(memory.jobs) - len(chosen)} others"))
        figure.legend(handles=patches, loc="outside right upper", frameon=False, fontsize=8.5,
                      title="dark: persistent state\nlight: its running step", title_fontsize=8)  # fmt: skip
        figure.savefig(path, format="png")

    def _draw_memory(self, axes: Axes, memory: MemoryOverTime, hue_of: dict[int, str]) -> None:
        peak = max(int(memory.total.max()), 1)
        unit, size = next((u, s) for u, s in (("GiB", 1 << 30), ("MiB", _MIB), ("KiB", 1 << 10), ("B", 1)) if peak >= s)
        layers = [([memory.jobs.index(job)], hue) for job, hue in hue_of.items()]
        layers.append(([row for row, job in enumerate(memory.jobs) if job not in hue_of], _GREY))
        base = np.zeros(len(memory.seconds))
        for held, towards, part in ((memory.persistent, 0.0, 0.15), (memory.in_step, 1.0, 0.4)):
            for rows, hue in layers:
                above = base + held[rows].sum(axis=0) / size
                axes.fill_between(memory.seconds, base, above, step="post", lw=0, color=_mixed(hue, towards, part))
                base = above
        limit = f"limit {format_bytes(self.limit)}, {format_bytes(self.reserve)} of it reserve"
        if self.limit < 1.7 * peak:
            axes.axhline(self.limit / size, color="#333333", linestyle=(0, (5, 3)), lw=1.1)
            axes.text(0.995, self.limit / size, limit, transform=axes.get_yaxis_transform(), ha="right", va="bottom")
        else:
            axes.text(0.995, 0.985, limit, transform=axes.transAxes, ha="right", va="top")
        axes.set_ylim(0, (self.limit if self.limit < 1.7 * peak else peak) / size * 1.12)
        axes.set_ylabel(f"memory ({unit})")

    def _draw_lanes(self, axes: Axes, hue_of: dict[int, str]) -> None:
        """A bar for each run of one job on a lane; where there are too many, the share of each job by pixel."""
        begin, end = self._extent()
        edges = np.linspace(begin, end, 1501 if self.lanes <= 4 else 401)
        seconds = (edges - self.started_ns) / 1e9
        spans = self.spans[np.argsort(self.spans[:, START], kind="stable")]
        for lane in range(self.lanes):
            mine = spans[spans[:, LANE] == lane]
            breaks = (np.diff(mine[:, JOB]) != 0) | (mine[1:, START] - mine[:-1, END] > edges[1] - edges[0])
            first = np.flatnonzero(np.append(True, breaks)[: len(mine)])
            if len(first) <= len(edges):
                ends = np.maximum.reduceat(mine[:, END], first) if len(first) else first
                starts = mine[first, START]
                bars = np.stack([starts - self.started_ns, ends - starts], axis=1) / 1e9
                hues = [hue_of.get(job, _GREY) for job in mine[first, JOB].tolist()]
                axes.broken_barh(bars.tolist(), (lane - 0.4, 0.8), facecolors=hues, lw=0)
                continue
            base = np.full(len(edges), lane + 0.4)
            for hue in (*hue_of.values(), _GREY):
                rows = mine[[hue_of.get(job, _GREY) == hue for job in mine[:, JOB].tolist()]]
                if len(rows) == 0: continue
                busy = np.cumsum(np.stack([np.zeros(len(rows)), rows[:, END] - rows[:, START]], axis=1))
                share = np.diff(np.interp(edges, rows[:, [START, END]].ravel(), busy)) / (edges[1] - edges[0])
                above = base - 0.8 * np.append(share, share[-1])
                axes.fill_between(seconds, base, above, step="post", lw=0, color=hue)
                base = above
        axes.set_yticks(
            range(self.lanes), [f"lane {i}\n{share:.0%} busy" for i, share in enumerate(self._busy_share())]
        )
        axes.set_ylim(self.lanes - 0.5, -0.5)
        axes.set_xlabel("seconds since the engine started")

    def _extent(self) -> tuple[int, int]:
        if len(self.spans) == 0:
            raise ValueError(
                "nothing was recorded: no step ran in the engine while it recorded. Call "
                "engine.native.record_spans(True) before the first step, and make the steps inside the engine"
            )
        return int(self.spans[:, START].min()), int(self.spans[:, END].max())

    def _busy_share(self) -> list[float]:
        begin, end = self._extent()
        nanoseconds = self.spans[:, END] - self.spans[:, START]
        busy = np.bincount(self.spans[:, LANE], weights=nanoseconds, minlength=self.lanes)
        return [float(share) for share in busy / max(end - begin, 1)]

    def _labels(self) -> dict[int, str]:
        """A name for each job; its number is added where two jobs have the same."""
        jobs = {*np.unique(self.spans[:, JOB]).tolist(), *(job for _, job, _, _ in self.persistent)}
        names = {job: self.names.get(job, f"job {job}") for job in jobs}
        used = Counter(names.values())
        return {job: name if used[name] == 1 else f"{name} #{job}" for job, name in names.items()}

    def _claims(self) -> Ints:
        """The persistent bytes as spells without end, each with what it adds to its job's."""
        before: dict[int, int] = {}
        rows = []
        for time, job, _, count in self.persistent:
            rows.append((job, time, _FOREVER, count - before.get(job, 0)))
            before[job] = count
        return np.array(sorted(rows), dtype=np.int64).reshape(-1, 4)


# Spells: a table of job, from_ns, until_ns, bytes; a job holds the sum of the spells that it is in.


def _spells(spans: Ints) -> Ints:
    """What steps hold, sorted by job: a spell for each group, and one for each wait for the group behind it."""
    spans = spans[np.lexsort((spans[:, START], spans[:, JOB]))]
    same = (spans[1:, [JOB, STEP]] == spans[:-1, [JOB, STEP]]).all(axis=1)
    waits = np.flatnonzero(same & (spans[1:, START] > spans[:-1, END]))
    own = spans[:, HELD_BY_JOB]
    running = spans[:, [JOB, START, END, HELD_BY_JOB]]
    until, between = spans[waits + 1, START], np.minimum(own[waits], own[waits + 1])
    waiting = np.stack([spans[waits, JOB], spans[waits, END], until, between], axis=1)
    # A group may give memory back when it ends. No record is made of that, only the books at the next start of a
    # group show it: lower what waits until it fits into them.
    order = np.argsort(spans[:, START], kind="stable")
    starts, first = np.unique(spans[order, START], return_index=True)
    room = np.maximum.reduceat(spans[order, HELD], first) - _level(starts, running)
    share = np.minimum(1.0, np.maximum(room, 0) / np.maximum(_level(starts, waiting), 1))
    # The least share in each wait. Sorted, so that reduceat's stretches between them add up to one pass.
    low, high = np.searchsorted(starts, waiting[:, 1]), np.searchsorted(starts, waiting[:, 2])
    seen = np.flatnonzero(low < high)
    seen = seen[np.argsort(low[seen], kind="stable")]
    if len(seen):
        ranges = np.stack([low[seen], high[seen]], axis=1).ravel()
        least = np.minimum.reduceat(np.append(share, 1.0), ranges)[::2]
        waiting[seen, 3] = np.floor(waiting[seen, 3] * least + 1e-3)  # against rounding down what is exact
    table = np.concatenate([running, waiting])
    return table[np.argsort(table[:, 0], kind="stable")]


def _total(spells: Ints, claims: Ints, begin: int, end: int) -> tuple[Ints, Ints]:
    """Times of all changes from ``begin`` to ``end``, and the bytes held from each of them on."""
    table = np.concatenate([spells, claims])
    times = np.unique(np.append(table[:, 1:3], (begin, end)))
    times = times[(times >= begin) & (times <= end)]
    return times, _level(times, table)


def _level(moments: Ints, spells: Ints) -> Ints:
    """The bytes held at each moment, in spells that are on."""
    level = np.zeros(len(moments), dtype=np.int64)
    for column, sign in ((1, 1), (2, -1)):
        order = np.argsort(spells[:, column], kind="stable")
        sums = np.append(0, np.cumsum(spells[order, 3]))
        level += sign * sums[np.searchsorted(spells[order, column], moments, side="right")]
    return level


def _mixed(hue: str, towards: float, part: float) -> tuple[float, float, float]:
    """The colour with a part of black (0.0) or white (1.0) in it."""
    red, green, blue = (int(hue[i : i + 2], 16) / 255 * (1 - part) + towards * part for i in (1, 3, 5))
    return red, green, blue
