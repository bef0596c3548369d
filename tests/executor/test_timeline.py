"""Timelines: what was held adds up and stays within the books; pictures and traces can be opened."""

from __future__ import annotations

import gzip
import heapq
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

import waterflow as wf
from tests.native import Admission
from waterflow.executor.engine import Engine, within
from waterflow.executor.timeline import END, HELD_BY_JOB, JOB, MOST_EVENTS, START, Timeline
from waterflow.executor.tuning import Decision

MiB = 1 << 20
GiB = 1 << 30
STARTED = 1_000_000_000


def simulated(
    jobs: int, lanes: int, steps: int, groups: int, seed: int, limit: int = 3 * GiB
) -> tuple[Timeline, list[tuple[int, dict[int, int]]]]:
    """Random jobs under the real admission, and what it said each of them held, from each of its changes on."""
    random = np.random.default_rng(seed)
    reserve, claim = limit // 16, limit // (8 * jobs)
    capacity = limit - reserve - claim * jobs
    admission = Admission(capacity)
    heights = []
    for _ in range(jobs):
        rise = np.sort(random.integers(0, int(capacity * random.uniform(0.3, 0.9)), groups))
        after = np.concatenate([rise[::2], rise[1::2][::-1]])
        after[-1] = 0
        peak = np.minimum(np.maximum(after, np.append(0, after[:-1])) + random.integers(0, 9 * MiB, groups), capacity)
        heights.append((peak.tolist(), after.tolist()))
    spans: list[tuple[int, ...]] = []
    truth: list[tuple[int, dict[int, int]]] = []
    left, lane_of, at = dict.fromkeys(range(jobs), steps), dict[int, int](), dict[int, int]()
    running: list[tuple[int, int, int, int, int]] = []
    now = STARTED + 56
    claims = [(now, job, f"job-{job}", claim) for job in range(jobs)]

    def note() -> None:
        truth.append((now, {job: admission.held_by(job) for job in range(jobs)}))

    def issue() -> None:
        free = [lane for lane in range(lanes) if lane not in lane_of.values()]
        idle = [job for job in left if job not in lane_of and left[job]]
        idle.sort(key=lambda job: -left[job])
        in_flight = {entry[1] for entry in running}
        for job in [*(job for job in lane_of if job not in in_flight), *idle]:
            if job not in lane_of and not free:
                return
            if admission.try_issue(job, *heights[job]):
                if job not in lane_of:
                    lane_of[job], at[job] = free.pop(0), 0
                end = (now // 8 + int(random.integers(1, 1000))) * 8 + lane_of[job]  # no two lanes end a group at once
                heapq.heappush(running, (end, job, now, admission.held, admission.held_by(job)))
                note()

    issue()
    while running:
        now, job, start, held, own = heapq.heappop(running)
        spans.append((job, steps - left[job], at[job], lane_of[job], start, now, held, own))
        at[job] += 1
        if admission.complete(job):
            left[job] -= 1
            del lane_of[job]
        note()
        issue()
    assert not any(left.values())
    names = {job: f"job-{job}" for job in range(jobs)}
    table = np.array(spans, dtype=np.int64)
    return Timeline(table, names, tuple(claims), limit, reserve, STARTED, lanes), truth


def study(jobs: int, lanes: int, groups_each: int, groups: int = 32) -> Timeline:
    """A long study, made quickly: each lane trains one job after the other, its steps rising and falling."""
    random = np.random.default_rng(0)
    rows, claims, clock = [], [], dict.fromkeys(range(lanes), STARTED)
    wave = np.minimum(np.arange(1, groups + 1), np.arange(groups, 0, -1)) / groups * 2
    for job in range(jobs):
        lane = min(clock, key=lambda lane: clock[lane])
        height = random.integers(400, 1200) * MiB
        lengths = random.integers(50_000, 400_000, groups_each) * (1 + job % 3)
        ends = clock[lane] + np.cumsum(lengths)
        numbers = np.arange(groups_each)
        held = (wave[numbers % groups] * height).astype(np.int64)
        row = np.stack([np.full(groups_each, job), numbers // groups, numbers % groups, np.full(groups_each, lane),
                        ends - lengths, ends - 500, held, held], axis=1)  # fmt: skip
        rows.append(row)
        claims += [(clock[lane], job, "", (60 + job) * MiB), (int(ends[-1]), job, "", 0)]
        clock[lane] = int(ends[-1])
    names = {job: f"trial-{job} lr=3.0e-04 width=$256" for job in range(jobs)}
    return Timeline(np.concatenate(rows), names, tuple(sorted(claims)), 3 * GiB, 200 * MiB, STARTED, lanes)


def small(**changes: Any) -> Timeline:
    """Two jobs on two lanes: job 0 rises to 50, gives back 40 at the end of its group, and waits for 60."""
    spans = [
        # job, step, group, lane, start, end, held, held_by_job
        (0, 0, 0, 0, 100, 200, 50, 50),
        (1, 0, 0, 1, 220, 300, 90, 80),
        (0, 0, 1, 0, 310, 400, 60, 60),
        (0, 1, 0, 0, 450, 500, 50, 50),
    ]
    settings: dict[str, Any] = {
        "names": {0: "a", 1: "b"}, "persistent": ((0, 0, "a", 5), (250, 1, "b", 7), (420, 1, "b", 0)),
        "limit": 110, "reserve": 8, "started_ns": 0, "lanes": 2,
    }  # fmt: skip
    return Timeline(np.array(spans, dtype=np.int64), **(settings | changes))


# -- numbers


def test_memory_of_a_small_timeline() -> None:
    memory = small().memory_over_time()
    assert memory.jobs == (0, 1)
    assert memory.seconds.tolist() == pytest.approx([t * 1e-9 for t in (100, 200, 220, 250, 300, 310, 400, 420, 450, 500)])
    # Between 200 and 310 job 0 waits; when job 1 starts the books leave it 10.
    assert memory.in_step[0].tolist() == [50, 10, 10, 10, 10, 60, 0, 0, 50, 0]
    assert memory.in_step[1].tolist() == [0, 0, 80, 80, 0, 0, 0, 0, 0, 0]
    assert memory.persistent.tolist() == [[5] * 10, [0, 0, 0, 7, 7, 7, 7, 0, 0, 0]]
    assert memory.total.tolist() == [55, 15, 95, 102, 22, 72, 12, 5, 55, 5]


def test_a_waiting_job_holds_no_more_than_it_will_next() -> None:
    spans = np.array([(0, 0, 0, 0, 100, 200, 50, 50), (0, 0, 1, 0, 250, 300, 30, 30)], dtype=np.int64)
    memory = Timeline(spans, {}, (), 100, 0, 0, 1).memory_over_time()
    assert memory.total.tolist() == [50, 30, 30, 0]


def test_summary_of_a_small_timeline() -> None:
    summary = small().summary()
    assert summary == {
        "wall_seconds": pytest.approx(400e-9),
        "busy_share": [pytest.approx(240 / 400), pytest.approx(80 / 400)],
        "overlap": 0.0,
        "peak_bytes": 102,
        "limit_bytes": 110,
        "steps": {"a": 2, "b": 1},
        "decisions": [],
    }
    spans = small().spans
    spans[1, [START, END]] = 150, 350
    both = Timeline(spans, {}, (), 200, 0, 0, 3).summary()
    assert both["overlap"] == pytest.approx((50 + 40) / 400)
    assert both["busy_share"][2] == 0.0
    assert both["steps"] == {"job 0": 2, "job 1": 1}


def test_decisions_are_in_summary_trace_and_picture(tmp_path: Path) -> None:
    made = small(decisions=(Decision(250e-9, "taking turns on one lane", False, (1.9, 1.0)),))
    said = "taking turns on one lane: not kept (speed 1, 1.9 before)"
    assert made.summary()["decisions"] == [said]
    made.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    (mark,) = [event for event in events if event["ph"] == "i"]
    assert mark["name"] == said and mark["ts"] == pytest.approx((250 - small().started_ns) / 1e3)
    made.save_png(tmp_path / "with.png")
    small().save_png(tmp_path / "without.png")
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


@given(st.integers(0, 10**6), st.integers(1, 7), st.integers(1, 4), st.integers(1, 9))
def test_memory_stays_within_the_books(seed: int, jobs: int, lanes: int, groups: int) -> None:
    line, truth = simulated(jobs, lanes, steps=3, groups=groups, seed=seed)
    memory = line.memory_over_time(10**6)
    claimed = sum(count for _, _, _, count in line.persistent)
    assert memory.total.max() <= line.limit - line.reserve
    assert (memory.persistent.sum(axis=0) == claimed).all()
    assert (memory.in_step >= 0).all()
    nanoseconds = np.rint(memory.seconds * 1e9).astype(np.int64) + STARTED
    column = {int(t): memory.in_step[:, i] for i, t in enumerate(nanoseconds)}
    booked = dict(truth)  # the last word of each moment
    for job, _, _, _, start, _, _, own in line.spans.tolist():
        assert column[start][memory.jobs.index(job)] == own
    if lanes <= 2:
        for start in line.spans[:, START].tolist():
            assert column[start].sum() == sum(booked[start].values())
    for moment, held in booked.items():
        for row, job in enumerate(memory.jobs):
            if any((line.spans[:, JOB] == job) & (line.spans[:, START] <= moment) & (line.spans[:, END] > moment)):
                assert column[moment][row] == held[job]
    assert line.summary()["peak_bytes"] == max(sum(held.values()) for _, held in truth) + claimed


@given(st.integers(0, 10**6), st.integers(2, 60))
def test_a_column_is_the_fullest_moment_of_its_stretch(seed: int, columns: int) -> None:
    line, _ = simulated(jobs=4, lanes=2, steps=4, groups=6, seed=seed)
    exact, coarse = line.memory_over_time(10**6), line.memory_over_time(columns)
    assert len(coarse.seconds) == columns + 1
    for i in range(columns):
        inside = (exact.seconds >= coarse.seconds[i]) & (exact.seconds < coarse.seconds[i + 1])
        entered = np.searchsorted(exact.seconds, coarse.seconds[i], side="right") - 1
        assert coarse.total[i] == max([exact.total[entered], *exact.total[inside]])
    assert coarse.total[-1] == exact.total[-1]


@pytest.mark.campaign
def test_it_is_quick_for_a_million_groups() -> None:
    line = study(jobs=24, lanes=2, groups_each=42_000)
    began = time.process_time()
    memory = line.memory_over_time()
    assert time.process_time() - began < 15
    assert len(memory.seconds) == 2001
    assert memory.total.max() == line.summary()["peak_bytes"]


@pytest.mark.parametrize("what", ["memory_over_time", "summary", "save_png", "save_trace"])
def test_nothing_recorded(what: str, tmp_path: Path) -> None:
    line = Timeline(np.zeros((0, 8), dtype=np.int64), {}, (), GiB, 0, 0, 2)
    with pytest.raises(ValueError, match=r"nothing was recorded: .*record_spans\(True\)"):
        getattr(line, what)(*([tmp_path / "file"] if what.startswith("save") else []))


# -- files


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    return int.from_bytes(data[16:20]), int.from_bytes(data[20:24])


@pytest.mark.slow
def test_png_of_a_study_is_quick(tmp_path: Path) -> None:
    line = study(jobs=24, lanes=2, groups_each=8400)
    assert len(line.spans) > 200_000
    began = time.process_time()
    line.save_png(tmp_path / "study.png")
    assert time.process_time() - began < 5
    width, height = png_size(tmp_path / "study.png")
    assert width == 1875 and 700 < height < 1000


@pytest.mark.parametrize(
    "line",
    [
        small(),
        small(limit=100 * GiB),
        small(persistent=()),
        small(names={0: "_hidden $x", 1: "$\\frac{"}, lanes=40),
        Timeline(np.array([[3, 0, 0, 0, 7, 7, 0, 0]]), {}, (), GiB, 0, 0, 1),
        simulated(jobs=5, lanes=4, steps=3, groups=8, seed=1)[0],
    ],
    ids=["small", "far limit", "no claims", "names", "one moment", "four lanes"],
)
def test_png_and_trace_of_odd_timelines(line: Timeline, tmp_path: Path) -> None:
    line.save_png(tmp_path / "line.png")
    png_size(tmp_path / "line.png")
    line.save_trace(tmp_path / "line.json")
    assert json.loads((tmp_path / "line.json").read_text())["otherData"]["dropped_groups"] == 0


def test_pyplot_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # importing it would fail
    small().save_png(tmp_path / "line.png")


def test_trace_of_a_small_timeline(tmp_path: Path) -> None:
    line = small(names={0: "same", 1: "same"})
    line.save_trace(tmp_path / "trace.json.gz")
    trace = json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))
    events = trace["traceEvents"]
    named = {(e["name"], e.get("tid")): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert named == {
        ("process_name", None): "waterflow", ("thread_name", 0): "lane 0", ("thread_name", 1): "lane 1",
    }  # fmt: skip
    groups = [e for e in events if e["ph"] == "X"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in groups] == [
        ("same #0", 0, 0.1, 0.1), ("same #1", 1, 0.22, 0.08), ("same #0", 0, 0.31, 0.09), ("same #0", 0, 0.45, 0.05),
    ]  # fmt: skip
    assert groups[2]["args"] == {"group": 1, "step": 0, "held MiB": 60 / MiB, "held by job MiB": 60 / MiB}
    counters = [e for e in events if e["ph"] == "C"]
    assert [round(sum(e["args"].values()) * MiB) for e in counters] == small().memory_over_time().total.tolist()
    assert trace["otherData"] == {"dropped_groups": 0, "limit_bytes": 110}


@pytest.mark.slow
def test_a_long_trace_says_what_it_dropped(tmp_path: Path) -> None:
    line = study(jobs=24, lanes=2, groups_each=9000)
    line = Timeline(**(vars(line) | {"dropped": 11}))
    line.save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    groups = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert len(trace["traceEvents"]) <= MOST_EVENTS
    assert len(groups) > 180_000
    assert trace["otherData"]["dropped_groups"] == len(line.spans) - len(groups) + 11
    assert max(e["ts"] for e in groups) < line.spans[:, END].max() / 1e3


# -- a real engine


def test_of_an_engine(tmp_path: Path) -> None:
    engine = Engine(memory="256MiB", lanes=2)
    engine.native.record_spans(True)
    finished = threading.Barrier(2)

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
        with within(engine):
            step = wf.Step(model, loss=nn.functional.mse_loss, optimizer=torch.optim.Adam(model.parameters()), name=f"mlp-{seed}")
            for _ in range(10):
                step((torch.randn(128, 64, generator=generator), torch.randn(128, 1, generator=generator)))
            finished.wait()
            step.close()

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    line = Timeline.of(engine)
    engine.close()

    summary = line.summary()
    assert summary["steps"] == {"mlp-0": 10, "mlp-1": 10}
    assert len(summary["busy_share"]) == 2 and 0 < sum(summary["busy_share"]) <= 2
    memory = line.memory_over_time()
    assert 0 < line.spans[:, HELD_BY_JOB].max() <= memory.total.max() <= line.limit - line.reserve
    assert memory.total.max() <= summary["peak_bytes"] <= line.limit - line.reserve
    assert (memory.persistent.max(axis=1) > 0).all()
    assert (memory.seconds >= 0).all()
    line.save_png(tmp_path / "line.png")
    line.save_trace(tmp_path / "line.json")
    trace = json.loads((tmp_path / "line.json").read_text())
    assert sum(e["ph"] == "X" for e in trace["traceEvents"]) == len(line.spans)
    with pytest.raises(ValueError, match="nothing was recorded"):
        Timeline.of(engine).summary()
