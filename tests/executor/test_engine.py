"""The engine while jobs come and go, fail, are cancelled, and the limit moves."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

import waterflow as wf
from tests.support import MiB, Net, Trained, assert_same, images, run_steps, same_bits, train_eager
from waterflow import _C
from waterflow.executor.engine import Engine, current_engine, within
from waterflow.executor.memory_limit import free_memory, parse_memory
from waterflow.partition.plan.plan import opaque_plan

Work = Callable[[], Any]


@pytest.fixture
def native() -> Iterator[_C.Engine]:
    engine = _C.Engine(lanes=2, threads_per_lane=1, capacity=100)
    yield engine
    engine.check()


def run_of(work: Work, peak: int = 1) -> _C.StepRun:
    return _C.opaque_run(peak, work)


def do(engine: _C.Engine, job: int, work: Work = lambda: None, peak: int = 1) -> _C.StepRun:
    run = run_of(work, peak)
    engine.submit(job, run)
    return run


def finish(engine: _C.Engine, *runs: _C.StepRun) -> None:
    for run in runs:
        engine.wait(run)
        run.outputs()


def in_threads(*works: Work, seconds: float = 60) -> list[Any]:
    """Run them at the same time; what they return, or raise."""
    ends: list[Any] = [None] * len(works)

    def call(number: int) -> None:
        try:
            ends[number] = works[number]()
        except BaseException as error:
            ends[number] = error

    threads = [threading.Thread(target=call, args=(number,), daemon=True) for number in range(len(works))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads), "some wait for ever"
    return ends


def raise_first(ends: list[Any]) -> None:
    for end in ends:
        if isinstance(end, BaseException):
            raise end


# -- lanes


def test_lanes_work_at_the_same_time(native: _C.Engine) -> None:
    meeting = threading.Barrier(2, timeout=20)
    runs = [do(native, native.add_job(), meeting.wait) for _ in range(2)]
    finish(native, *runs)


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
def test_a_lane_does_one_thing_at_a_time_and_a_job_its_steps_in_order(native: _C.Engine) -> None:
    busy, most, order = [], [], []

    def work(job: int, number: int) -> None:
        busy.append(job)
        most.append((len(busy), busy.count(job)))
        time.sleep(0.001)
        order.append((job, number))
        busy.remove(job)

    jobs = [native.add_job() for _ in range(4)]
    runs = [do(native, job, lambda j=job, n=n: work(j, n)) for n in range(6) for job in jobs]
    finish(native, *runs)
    assert max(most)[0] == 2 and max(own for _, own in most) == 1
    for job in jobs:
        assert [number for each, number in order if each == job] == list(range(6))
    assert native.steps_done == 24 and native.held == 0


@pytest.mark.slow
def test_a_newcomer_is_not_owed_the_time_before_it_came() -> None:
    engine = _C.Engine(lanes=1, threads_per_lane=1, capacity=100)
    first, second = engine.add_job(), engine.add_job()
    finish(engine, *(do(engine, first, lambda: time.sleep(0.05)) for _ in range(10)))  # half a second
    busy = [do(engine, second, lambda: time.sleep(0.002)) for _ in range(150)]
    finish(engine, do(engine, first))
    assert not busy[-1].done  # 40 ms are what it may be ahead
    finish(engine, *busy)
    engine.close()


@pytest.mark.slow
def test_a_lane_that_is_kept_in_vain_goes_to_whoever_is_ready() -> None:
    def by_caller(engine: _C.Engine, job: int, *seconds: float, after: float = 0.0) -> float:
        time.sleep(after)
        for each in seconds:
            run = run_of(functools.partial(time.sleep, each))
            run.by_caller = True
            engine.submit(job, run)
            engine.wait(run)
        return run.waited_ns * 1e-9

    waited = []
    for trial in range(12):
        engine = _C.Engine(lanes=2, threads_per_lane=1, capacity=100)
        long, gone, ready = (functools.partial(by_caller, engine, engine.add_job()) for _ in range(3))
        ends = in_threads(
            functools.partial(long, 0.004, 0.25),
            functools.partial(gone, 0.006 + trial % 4 * 0.0007),
            functools.partial(ready, 0.001, after=0.002),
        )
        raise_first(ends)
        waited.append(ends[2])
        engine.close()
    assert max(waited) < 0.2, waited  # not for the end of the long step


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
def test_memory_decides_who_runs_beside_whom(native: _C.Engine) -> None:
    holding, most = [], []

    def work(peak: int) -> None:
        holding.append(peak)
        most.append(sum(holding))
        time.sleep(0.001)
        holding.remove(peak)

    peaks = [60, 50, 40, 100, 30]
    runs = [do(native, native.add_job(), lambda p=p: work(p), p) for p in peaks for _ in range(5)]
    finish(native, *runs)
    assert max(most) == native.peak_held == 100


def test_a_step_that_can_never_fit(native: _C.Engine) -> None:
    job = native.add_job()
    with pytest.raises(ValueError, match="101 bytes cannot run in 100 bytes"):
        do(native, job, peak=101)
    finish(native, do(native, job, peak=100))


def test_threads_inside_operations() -> None:
    """Each lane keeps its number; neither the caller's nor that of threads to come changes."""
    before = torch.get_num_threads()
    engine = _C.Engine(lanes=2, threads_per_lane=2, capacity=10)
    seen: list[int] = []
    jobs = [engine.add_job() for _ in range(2)]
    finish(engine, *(do(engine, job, lambda: seen.append(torch.get_num_threads())) for job in jobs * 5))
    assert set(seen) == {2} and torch.get_num_threads() == before
    assert in_threads(torch.get_num_threads) == [before]


def test_engines_that_cannot_be() -> None:
    for options in ({"lanes": 0}, {"threads_per_lane": 0}, {"capacity": -1}):
        with pytest.raises(ValueError):
            _C.Engine(**({"lanes": 1, "threads_per_lane": 1, "capacity": 1} | options))
    engine = _C.Engine(lanes=1, threads_per_lane=1, capacity=1)
    for job in (0, -1, 7):
        for call in (engine.remove_job, engine.queued, lambda j: engine.cancel(j, ""), lambda j: do(engine, j)):
            with pytest.raises(ValueError, match=f"job {job} is not in this engine"):
                call(job)


# -- failures


def test_callables_that_raise(native: _C.Engine) -> None:
    def fail() -> None:
        raise ZeroDivisionError("mine")

    job, other = native.add_job(), native.add_job()
    beside = [do(native, other) for _ in range(5)]
    run = do(native, job, fail)
    native.wait(run)
    with pytest.raises(ZeroDivisionError, match="mine"):
        run.outputs()
    finish(native, *beside, do(native, job))
    assert native.held == 0


def test_system_exit_in_a_callable_ends_nobody(native: _C.Engine) -> None:
    job = native.add_job()
    for error in (SystemExit, KeyboardInterrupt, GeneratorExit):
        run = do(native, job, lambda e=error: (_ for _ in ()).throw(e))
        native.wait(run)
        with pytest.raises(BaseException):  # noqa: B017
            run.outputs()
    finish(native, do(native, job))


def test_what_is_queued_falls_with_a_failure(native: _C.Engine) -> None:
    gate = threading.Event()
    job = native.add_job()

    def fail() -> None:
        gate.wait(20)
        raise ValueError

    first, *rest = [do(native, job, fail), do(native, job), do(native, job)]
    gate.set()
    for run in rest:
        native.wait(run)
        with pytest.raises(_C.Cancelled, match="an earlier step"):
            run.outputs()
    with pytest.raises(ValueError):
        first.outputs()
    finish(native, do(native, job))


def test_a_callable_is_let_go_when_its_step_is_done(native: _C.Engine) -> None:
    class Something:
        def __call__(self) -> None:
            pass

    things = [Something() for _ in range(3)]
    alive = [weakref.ref(thing) for thing in things]
    job = native.add_job()
    runs = [do(native, job, thing) for thing in things]
    things.clear()
    finish(native, *runs)
    gc.collect()
    assert [each() for each in alive] == [None] * 3


# -- cancelling


@pytest.mark.needs_time("it looks for a moment that nothing happens")
def test_cancel_waits_for_what_runs_and_drops_the_rest(native: _C.Engine) -> None:
    gate, begun = threading.Event(), threading.Event()
    done: list[str] = []
    job = native.add_job()

    def work() -> None:
        begun.set()
        gate.wait(20)
        done.append("work")

    runs = [do(native, job, work), do(native, job, lambda: done.append("more"))]
    begun.wait(20)

    def cancel() -> None:
        native.cancel(job, "pruned")
        done.append("cancelled")

    thread = threading.Thread(target=cancel)
    thread.start()
    time.sleep(0.02)
    assert done == []
    gate.set()
    thread.join(20)
    assert done == ["work", "cancelled"] and native.queued(job) == 0 and native.held == 0
    native.wait(runs[1])
    with pytest.raises(_C.Cancelled, match="pruned"):
        runs[1].outputs()
    finish(native, do(native, job))


def test_cancel_of_a_job_that_waits_for_room(native: _C.Engine) -> None:
    gate = threading.Event()
    large = do(native, native.add_job(), lambda: gate.wait(20), peak=100)
    job = native.add_job()
    waiting = do(native, job, peak=50)
    native.cancel(job, "")
    native.wait(waiting)
    with pytest.raises(_C.Cancelled, match="cancelled"):
        waiting.outputs()
    native.remove_job(job)
    gate.set()
    finish(native, large)


@pytest.mark.slow
def test_cancel_at_a_group_boundary() -> None:
    """A captured step of many groups stops in its middle, and the job can go on."""
    engine = Engine(memory=256 * MiB, lanes=1)
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(40)], nn.Linear(256, 4))
    optimizer = AdamW(model.parameters())
    job = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
    batch = images(1, size=512, shape=(256,))[0]
    for _ in range(3):
        job(batch)
    assert len(job.plan.groups) > 8
    number = job.job
    cancelled = 0
    for attempt in range(20):
        pending = job.submit(batch)
        time.sleep(0.0005 * attempt)
        engine.native.cancel(number, "enough")
        try:
            pending.result()
        except wf.JobCancelled as error:
            assert "enough" in str(error)
            cancelled += 1
        assert engine.native.held == 0
        engine.native.check()
    assert cancelled > 0
    assert job(batch).isfinite()
    engine.close()


@pytest.mark.slow
def test_several_threads_stop_remove_and_submit_at_once(native: _C.Engine) -> None:
    """Nobody waits for ever, and nothing is touched that another thread has removed."""
    jobs = [native.add_job() for _ in range(3)]
    done: list[_C.StepRun] = []
    until = time.monotonic() + 1

    def act(seed: int) -> None:
        draw = random.Random(seed)
        while time.monotonic() < until:
            place = draw.randrange(len(jobs))
            with contextlib.suppress(ValueError, _C.Cancelled):  # it has left already
                action = draw.choice(["submit", "submit", "submit", "submit", "cancel", "cancel", "remove"])
                if action == "submit":
                    pause = draw.choice([0, 1e-4])
                    done.append(do(native, jobs[place], lambda: time.sleep(pause), draw.choice([10, 60, 100])))  # noqa: B023
                elif action == "cancel":
                    native.cancel(jobs[place], "stopped")
                else:
                    native.remove_job(jobs[place])
                    jobs[place] = native.add_job()

    raise_first(in_threads(*(lambda seed=seed: act(seed) for seed in range(6)), seconds=20))
    raise_first(in_threads(*(lambda job=job: native.remove_job(job) for job in jobs), seconds=20))
    assert len(done) > 20 and all(run.done for run in done)
    assert native.held == 0 and native.peak_held <= 100
    for run in done:
        with contextlib.suppress(_C.Cancelled):
            run.outputs()


@pytest.mark.parametrize("way", ["cancel", "remove", "close", "limit", "failure"])
def test_what_is_let_go_may_call_the_engine(way: str, native: _C.Engine) -> None:
    """A step in the queue may be the last hold on a job whose end removes it from the engine."""
    job, other = native.add_job(), native.add_job()
    gate, ends = threading.Event(), []

    class Holder:
        def __del__(self) -> None:
            native.remove_job(other)
            ends.append(way)

    def first() -> None:
        gate.wait(20)
        if way == "failure":
            raise RuntimeError

    def queue() -> None:
        do(native, job, first)
        holder = Holder()
        do(native, job, lambda: holder, 90)

    queue()
    stop = {
        "cancel": lambda: native.cancel(job, "stopped"), "remove": lambda: native.remove_job(job),
        "close": native.close, "limit": lambda: native.set_capacity(50), "failure": lambda: None,
    }[way]  # fmt: skip
    threading.Timer(0.05, gate.set).start()
    raise_first(in_threads(stop, seconds=20))
    until = time.monotonic() + 10
    while not ends and time.monotonic() < until:
        time.sleep(0.001)
    assert ends == [way]


@pytest.mark.needs_time("it looks for a moment that nothing happens")
def test_remove_job_with_work_in_its_queue(native: _C.Engine) -> None:
    gate = threading.Event()
    job = native.add_job()
    runs = [do(native, job, lambda: gate.wait(20)) for _ in range(3)]
    thread = threading.Thread(target=native.remove_job, args=(job,))
    thread.start()
    time.sleep(0.01)
    gate.set()
    thread.join(20)
    assert not thread.is_alive()
    for run in runs[1:]:
        native.wait(run)
        with pytest.raises(_C.Cancelled, match="removed"):
            run.outputs()
    with pytest.raises(ValueError):
        native.queued(job)


def test_engine_let_go_with_work_in_its_queue() -> None:
    engine = _C.Engine(lanes=2, threads_per_lane=1, capacity=100)
    begun, gate = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        gate.wait(0.05)

    runs = [do(engine, engine.add_job(), work, peak) for peak in (60, 60, 10, 100)]
    begun.wait(20)
    del engine
    gc.collect()
    assert all(run.done for run in runs)
    ends = []
    for run in runs:
        try:
            ends.append(run.outputs())
        except _C.Cancelled as error:
            assert "shutting down" in str(error)
    assert ends


@pytest.mark.slow
def test_engine_let_go_on_its_own_lane() -> None:
    """A step is the last to hold the engine: a lane that ended it would wait for itself, and the process abort."""
    code = """
import os, threading, time
from waterflow import _C
threads = lambda: len(os.listdir("/proc/self/task"))
before = threads()
gate = threading.Event()
def hand_in():
    engine = _C.Engine(lanes=2, threads_per_lane=1, capacity=1)
    engine.submit(engine.add_job(), _C.opaque_run(1, lambda: (gate.wait(20), engine)))
hand_in()
gate.set()
until = time.monotonic() + 20
while threads() > before and time.monotonic() < until: time.sleep(0.01)
print(threads() - before)
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (0, "0\n", "")


# -- coming and going


def come_and_go(engine: _C.Engine, draw: random.Random, jobs: int) -> int:
    """One thread's life: jobs with a few steps each, some of which fail or are cancelled. The steps that ran."""
    ran: list[int] = []
    for _ in range(jobs):
        job = engine.add_job()
        runs = []
        for _ in range(draw.randint(1, 8)):
            seconds = draw.choice([0.0, 0.0, 0.0005])

            def work(seconds: float = seconds, fails: bool = draw.random() < 0.1) -> None:
                time.sleep(seconds)
                ran.append(1)
                if fails:
                    raise ArithmeticError

            runs.append(do(engine, job, work, peak=draw.randint(0, 100)))
            if draw.random() < 0.1:
                engine.cancel(job, "at random")
        if draw.random() < 0.7:
            for run in runs:
                engine.wait(run)
                with contextlib.suppress(ArithmeticError, _C.Cancelled):
                    run.outputs()
        engine.remove_job(job)
        for run in runs:
            assert run.done
    return len(ran)


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
@pytest.mark.parametrize("seed", range(4))
def test_threads_come_and_go(seed: int, full: bool) -> None:
    """Barriers are made and removed while others run; whatever happens, nobody hangs and nothing is held."""
    lanes = seed % 3 + 1
    engine = _C.Engine(lanes=lanes, threads_per_lane=1, capacity=100)
    jobs = 200 if full else 25
    draws = [random.Random(100 * seed + number) for number in range(5)]
    ends = in_threads(*(lambda d=draw: come_and_go(engine, d, jobs) for draw in draws), seconds=200)
    raise_first(ends)
    assert engine.held == 0 and engine.peak_held <= 100
    assert len(engine.lane_busy_ns) == lanes and engine.steps_done >= sum(ends) > 0
    engine.check()


def spans_of(engine: _C.Engine) -> list[dict[str, int]]:
    names = ("job", "step", "group", "lane", "start", "end", "held", "own")
    return [dict(zip(names, row)) for row in engine.take_spans().tolist()]


def test_spans_tell_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    """In every lane one group after the other, in every job one step after the other, never above the limit."""
    monkeypatch.setenv("WATERFLOW_AUDIT", "off")  # audits have spans, too
    engine = Engine(memory=64 * MiB, lanes=2)
    engine.native.record_spans(True)

    def train(seed: int) -> None:
        torch.manual_seed(seed)
        model = Net(width=64 * (seed + 1))
        job = wf.Step(model, loss=F.cross_entropy, optimizer=AdamW(model.parameters()), engine=engine)
        for batch in images(6, size=64):
            job(batch)

    raise_first(in_threads(*(lambda s=s: train(s) for s in range(4))))
    spans = spans_of(engine.native)
    for key in ("lane", "job"):
        for which in {span[key] for span in spans}:
            own = sorted((s for s in spans if s[key] == which), key=lambda s: s["start"])
            assert all(one["end"] <= other["start"] for one, other in pairwise(own))
            if key == "job":
                assert [(s["step"], s["group"]) for s in own] == sorted((s["step"], s["group"]) for s in own)
    assert {s["step"] for s in spans} == set(range(6))
    assert max(s["held"] for s in spans) <= engine.native.peak_held <= engine.native.capacity
    assert all(0 <= s["own"] <= s["held"] for s in spans)
    assert spans_of(engine.native) == []
    engine.native.record_spans(False)
    engine.close()


# -- the limit moves


def test_limit_lowered_and_raised_while_jobs_train(full: bool) -> None:
    """Training goes on bit by bit the same, and what is held never exceeds the limit once it holds."""

    def make() -> Any:
        model = Net(width=32, dropout=0.2)
        return model, AdamW(model.parameters(), lr=0.01)

    count = 400 if full else 60
    batches = [images(count, size=32, seed=seed) for seed in range(4)]
    references = [train_eager(make, batches[seed], seed=seed) for seed in range(4)]
    engine = Engine(memory=64 * MiB, lanes=3)
    made = []
    for seed in range(4):
        torch.manual_seed(seed)
        made.append(make())
    stop = threading.Event()
    above: list[str] = []

    def move() -> None:
        draw = random.Random(1)
        while not stop.wait(0.0005):
            limits = [e.height for e in list(engine.reservations._claims.values())]
            if len(limits) < 4:
                continue
            largest = max(limits)
            wanted = int(largest * draw.uniform(1.0, 4.0))
            if engine.native.set_capacity(wanted) and engine.native.held > wanted:
                above.append(f"{engine.native.held} above {wanted}")
            engine.native.check()
        engine.native.set_capacity(engine.reservations.room)

    mover = threading.Thread(target=move)
    mover.start()
    ends = in_threads(*(lambda s=s: run_steps(*made[s], batches[s], seed=s, engine=engine) for s in range(4)), seconds=100)
    stop.set()
    mover.join()
    raise_first(ends)
    assert not above
    for end, reference in zip(ends, references):
        assert isinstance(end, Trained)
        assert_same(end, reference)
    assert engine.native.capacity == engine.reservations.room
    engine.close()


def test_limit_lowered_below_what_is_queued(native: _C.Engine) -> None:
    gate = threading.Event()
    first = do(native, native.add_job(), lambda: gate.wait(20), peak=80)
    job = native.add_job()
    queued = do(native, job, peak=60)
    small = do(native, native.add_job(), peak=10)
    assert not native.set_capacity(50)
    native.wait(queued)
    with pytest.raises(RuntimeError, match=r"the memory limit was lowered .* reaches 60 bytes, 50 are left"):
        queued.outputs()
    assert native.capacity == 100
    gate.set()
    finish(native, first, small)
    assert native.capacity == 50
    with pytest.raises(ValueError):
        do(native, job, peak=60)
    assert native.set_capacity(100)
    finish(native, do(native, job, peak=60))


@pytest.mark.parametrize("beside", [False, True])
def test_limit_lowered_below_what_is_queued_behind(beside: bool, native: _C.Engine) -> None:
    """Also behind a smaller step, that runs or waits: it would wait for ever, and the others for it."""
    gate, begun = threading.Event(), threading.Event()
    job = native.add_job()

    def work() -> None:
        begun.set()
        gate.wait(20)

    blocker = [do(native, native.add_job(), work, peak=95)] if beside else []
    small = do(native, job, (lambda: None) if beside else work, peak=10)
    large, last = do(native, job, peak=60), do(native, job, peak=1)
    begun.wait(20)
    native.set_capacity(50)
    gate.set()
    if not beside:
        finish(native, small)
    finish(native, *blocker)
    deadline = time.monotonic() + 5
    while not (large.done and last.done):
        assert time.monotonic() < deadline, "the large step waits for ever"
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="lowered"):
        large.outputs()
    finish(native, do(native, job, peak=50), do(native, native.add_job(), peak=50))


def test_nothing_starts_until_a_lower_limit_holds(native: _C.Engine) -> None:
    gate = threading.Event()
    first = do(native, native.add_job(), lambda: gate.wait(20), peak=80)
    native.set_capacity(70)
    started = threading.Event()
    second = do(native, native.add_job(), started.set, peak=5)
    assert not started.wait(0.05), "it would fit, but the lower limit must be reached first"
    gate.set()
    finish(native, first, second)


# -- the engine's Python side


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
def test_close_while_threads_train() -> None:
    """Nobody hangs; every thread is told that the engine is closed."""
    for seed in range(3):
        engine = Engine(memory=64 * MiB, lanes=2)
        torch.manual_seed(seed)
        begun = threading.Barrier(4, timeout=20)

        def train(engine: Engine = engine, begun: threading.Barrier = begun) -> int:
            model = Net()
            job = wf.Step(model, loss=F.cross_entropy, optimizer=AdamW(model.parameters()), engine=engine)
            batch = images(1)[0]
            job(batch)
            begun.wait()
            for _ in range(100_000):
                job(batch)
            return 0

        def close(engine: Engine = engine, begun: threading.Barrier = begun) -> None:
            begun.wait()
            time.sleep(0.02)
            engine.close()

        *ends, closed = in_threads(train, train, train, close)
        assert closed is None
        for end in ends:
            assert isinstance(end, wf.WaterflowError) and not isinstance(end, wf.MemoryLimitError), repr(end)


RACE = """
import random, sys, threading
from waterflow import _C
seed = int(sys.argv[1])
engine = _C.Engine(lanes=2, threads_per_lane=1, capacity=100)
def submit(job, draw):
    for _ in range(400):
        run = _C.opaque_run(draw.randint(0, 100), lambda: None)
        try:
            engine.submit(job, run)
        except _C.Cancelled:
            return
jobs = [engine.add_job() for _ in range(300)]
for first in range(0, len(jobs), 6):
    group = jobs[first:first + 6]
    threads = [threading.Thread(target=submit, args=(job, random.Random(seed + job))) for job in group]
    threads += [threading.Thread(target=engine.remove_job, args=(job,)) for job in group]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
engine.check()
assert engine.held == 0, engine.held
last = engine.add_job()
run = _C.opaque_run(100, lambda: None)
engine.submit(last, run)
engine.wait(run)
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_removing_a_job_while_another_thread_hands_it_work(seed: int) -> None:
    """In a process of its own, for what could go wrong there is a use of freed memory, or a wait without end."""
    script = [sys.executable, "-c", RACE, str(seed)]
    result = subprocess.run(script, capture_output=True, text=True, timeout=100)
    assert result.returncode == 0 and result.stdout.endswith("done\n"), result.stderr[-2000:]


@pytest.mark.needs_time("it looks for a moment that nothing happens")
def test_claims_wait_for_others_to_leave() -> None:
    engine = Engine(memory=1000, reserve=0, lanes=1)
    one, other = engine.add_job("one"), engine.add_job("other")
    plan = opaque_plan("p", 100, persistent=600, batch=0)
    engine.reservations.claim(one, plan)
    assert not engine.reservations.would_fit(plan) and engine.reservations.claimed() == 600 and engine.native.capacity == 400
    begun = threading.Event()

    def second() -> str:
        begun.set()
        engine.reservations.claim(other, plan)
        return "claimed"

    def leave() -> int:
        begun.wait()
        time.sleep(0.05)
        claimed = engine.reservations.claimed()
        engine.remove_job(one)
        return claimed

    assert in_threads(second, leave) == ["claimed", 600]
    assert engine.reservations.claimed() == 600
    engine.remove_job(other)
    assert engine.reservations.claimed() == 0 and engine.native.capacity == 1000
    assert [count for _, _, _, count in engine.reservations.persistent_log] == [600, 0, 600, 0]


def test_claims_that_wait_for_each_other() -> None:
    """One thread that holds memory for one job and wants more for another would wait for itself."""
    engine = Engine(memory=1000, reserve=0, lanes=1)
    engine.reservations.claim(engine.add_job("one"), opaque_plan("one", 100, persistent=600, batch=0))
    with pytest.raises(wf.MemoryLimitError, match=r"every job that has memory .* waits for more"):
        engine.reservations.claim(engine.add_job("two"), opaque_plan("two", 100, persistent=600, batch=0))
    with pytest.raises(wf.MemoryLimitError, match="'huge' does not fit"):
        engine.reservations.claim(engine.add_job("huge"), opaque_plan("huge", 500, persistent=600, batch=0))


@pytest.mark.needs_time("it looks for a moment that nothing happens")
def test_a_claim_that_waits_and_may_go_on_is_no_dead_end() -> None:
    """Room comes, and before the one who waits has taken it another asks for more than there is."""
    engine = Engine(memory=1000, reserve=0, lanes=1)
    first, second, third = (engine.add_job(name) for name in ("first", "second", "third"))
    engine.reservations.claim(second, opaque_plan("second", 0, persistent=400, batch=0))
    taken = threading.Event()

    def grow() -> None:
        engine.reservations.claim(first, opaque_plan("first", 0, persistent=400, batch=0))
        engine.reservations.claim(first, opaque_plan("first", 0, persistent=700, batch=0))
        taken.set()
        time.sleep(0.05)
        engine.remove_job(first)

    def leave_and_ask() -> None:
        while not engine.reservations._waiting:
            time.sleep(0.001)
        with engine.reservations._changed:
            engine.remove_job(second)
            engine.reservations.claim(third, opaque_plan("third", 0, persistent=700, batch=0))
        assert taken.is_set()

    raise_first(in_threads(grow, leave_and_ask, seconds=20))
    assert engine.reservations.claimed() == 700
    engine.close()


def test_claims_leave_room_for_the_largest_step() -> None:
    engine = Engine(memory=1000, reserve=100, lanes=2)
    engine.reservations.claim(engine.add_job("deep"), opaque_plan("deep", 500, persistent=100, batch=50))
    assert engine.native.capacity == 750
    assert engine.reservations.would_fit(opaque_plan("p", 500, persistent=250, batch=0))
    assert not engine.reservations.would_fit(opaque_plan("p", 500, persistent=251, batch=0))
    assert not engine.reservations.would_fit(opaque_plan("p", 750, persistent=1, batch=0))


@pytest.mark.needs_time("it looks for a moment that nothing happens")
def test_close_while_a_claim_waits() -> None:
    engine = Engine(memory=1000, reserve=0, lanes=1)
    plan = opaque_plan("p", 100, persistent=600, batch=0)
    engine.reservations.claim(engine.add_job("one"), plan)
    begun = threading.Event()

    def second() -> None:
        begun.set()
        engine.reservations.claim(engine.add_job("other"), plan)

    def close() -> None:
        begun.wait()
        time.sleep(0.02)
        engine.close()

    end, _ = in_threads(second, close)
    assert isinstance(end, wf.WaterflowError) and "closed" in str(end)
    engine.close()


class Odd(Net):
    """Cannot be captured; stays in its step until the gate opens."""

    gate: threading.Event | None = None
    begun: threading.Event | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.sum().item()
        if self.gate is not None and self.begun is not None:
            self.begun.set()
            self.gate.wait(20)
        return super().forward(x)


@pytest.mark.slow
def test_first_look_at_an_opaque_job_while_another_arrives() -> None:
    """The first step of an unknown job takes all that is left; a job that claims meanwhile must not fail it."""
    engine = Engine(memory=64 * MiB, lanes=2)
    batch = images(1)[0]

    def job_of(model: nn.Module) -> wf.Step:
        return wf.Step(model, loss=F.cross_entropy, optimizer=AdamW(model.parameters()), engine=engine)

    busy = Odd()
    blocker, unknown = job_of(busy), job_of(Odd())
    blocker(batch)  # its height is known now: others may run beside it
    busy.begun, busy.gate = threading.Event(), threading.Event()

    def look() -> torch.Tensor:
        busy.begun.wait(20)
        return unknown(batch)

    def arrive() -> torch.Tensor:
        busy.begun.wait(20)
        time.sleep(0.1)  # the unknown one is in the queue by now
        threading.Timer(0.2, busy.gate.set).start()
        return job_of(Net())(batch)

    ends = in_threads(lambda: blocker(batch), look, arrive)
    raise_first(ends)
    assert all(end.isfinite() for end in ends)
    engine.close()


def test_eager_work_in_the_engine() -> None:
    engine = Engine(memory=64 * MiB, lanes=1)
    job = engine.add_job("eager")
    result, height = engine.run_eager(job, lambda: torch.ones(1000).sum().item(), None)
    assert result == 1000.0 and 4000 <= height <= 5000
    with pytest.raises(KeyError):
        engine.run_eager(job, lambda: {}["missing"], None)
    assert engine.run_eager(job, lambda: 3, height)[0] == 3
    engine.close()


def test_within_is_of_the_thread() -> None:
    engine, other = Engine(memory=MiB, lanes=1), Engine(memory=MiB, lanes=1)
    with within(engine):
        assert current_engine() is engine
        assert in_threads(current_engine) == [None]
        with within(other):
            assert current_engine() is other
        assert current_engine() is engine
    assert current_engine() is None


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (1000, 1000), ("4GiB", 4 << 30), ("4 gib", 4 << 30), ("1.5GB", 1_500_000_000), ("800MB", 800_000_000),
        ("64k", 64_000), ("512", 512), ("512B", 512), (0.5, 500), ("0.5", 500), (1.0, 1000), (2000.0, 2000),
        (None, 800),
    ],
)  # fmt: skip
def test_memory_as_people_write_it(memory: Any, expected: int) -> None:
    assert parse_memory(memory, available=1000) == expected


@pytest.mark.parametrize(
    "memory",
    [0, -1, 0.0, -0.5, "", "four", "4XB", "GiB", "0", True, [1], "nan", "inf", float("nan"), float("inf"), 1.5, "1.5", 1e9 + 0.5],
)
def test_memory_that_cannot_be_read(memory: Any) -> None:
    with pytest.raises(wf.InvalidJobError, match="memory"):
        parse_memory(memory, available=1000)


def test_a_share_above_one_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        wf.InvalidJobError, match=r"whole number of bytes; got 1\.5: did you mean '1\.5GiB'\? .* share in \(0, 1\]"
    ):
        parse_memory(1.5, available=1000)


def test_free_memory_is_plausible() -> None:
    assert 1 << 20 < free_memory() < 1 << 45


def test_other_devices_are_refused() -> None:
    with pytest.raises(wf.InvalidJobError, match="'mps' is not supported"):
        Engine("mps")


# -- the default generator


class Drawing(nn.Module):
    """Draws with operations that take a generator and with some that take none, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x + torch.rand_like(x) * torch.randn_like(x))
        query = x[:, None, :]
        return self.last(F.dropout(F.scaled_dot_product_attention(query, query, query)[:, 0], 0.3))


def test_the_callers_own_draws_and_the_jobs_do_not_meet() -> None:
    """Threads of the user draw from the process's generator while lanes show jobs' generators to operations."""

    def make() -> Any:
        model = Drawing()
        return model, AdamW(model.parameters(), lr=0.01)

    batches = images(150)
    reference = train_eager(make, batches)
    torch.manual_seed(11)
    expected = [torch.rand(2000) for _ in range(300)]
    torch.manual_seed(5)
    made = make()
    with Engine(memory=64 * MiB, lanes=2) as engine:
        torch.manual_seed(11)
        ends: list[Any] = []
        thread = threading.Thread(target=lambda: ends.append(run_steps(*made, batches, engine=engine)))
        thread.start()
        drawn = [torch.rand(2000) for _ in range(300)]
        thread.join()
    assert all(map(same_bits, drawn, expected)), "the caller's own draws were disturbed"
    assert_same(ends[0], reference)
