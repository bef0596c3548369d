"""Guaranteed and opportunistic jobs on the lanes of one engine."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tests.executor.test_turns import Load, blocked
from tests.native import Admission
from waterflow import _C

WAIT = 10.0  # seconds


def wait(engine: _C.Engine, run: _C.StepRun) -> None:
    engine.wait(run)
    run.outputs()


@pytest.fixture
def engine() -> Iterator[_C.Engine]:
    made = _C.Engine(lanes=2, threads_per_lane=1, capacity=1 << 20, arenas=False)
    yield made
    made.close()


@pytest.mark.slow
def test_guaranteed_steps_go_first() -> None:
    engine = _C.Engine(lanes=1, threads_per_lane=1, capacity=1 << 20, arenas=False)
    load = Load(engine)
    go = blocked(engine, load)
    first, second = load.add(), load.add()
    engine.set_opportunistic(first, True)
    runs = [load.submit(first, 0.01), load.submit(second, 0.01)]
    go.set()
    for run in runs:
        wait(engine, run)
    assert [job for job, *_ in load.ran] == [second, first]
    engine.close()


@pytest.mark.slow
def test_a_lane_is_left_for_a_guaranteed_job(engine: _C.Engine) -> None:
    load = Load(engine)
    guaranteed = load.add()
    wait(engine, load.submit(guaranteed, 0.001))  # it is there
    others = [load.add() for _ in range(2)]
    for job in others:
        engine.set_opportunistic(job, True)
    runs = [load.submit(job, 0.3) for job in others]
    time.sleep(0.05)
    began = time.perf_counter()
    wait(engine, load.submit(guaranteed, 0.001))
    assert time.perf_counter() - began < 0.1  # no opportunistic step was in its way
    for run in runs:
        wait(engine, run)


@pytest.mark.slow
def test_lanes_of_a_guaranteed_job_that_left_are_open(engine: _C.Engine) -> None:
    load = Load(engine)
    guaranteed = load.add()
    wait(engine, load.submit(guaranteed, 0.001))
    engine.remove_job(guaranteed)
    others = [load.add() for _ in range(2)]
    for job in others:
        engine.set_opportunistic(job, True)
    runs = [load.submit(job, 0.2) for job in others]
    for run in runs:
        wait(engine, run)
    (_, begin, end), (_, begin2, end2) = load.ran[1:]
    assert begin2 < end and begin < end2  # side by side


@pytest.mark.needs_time("it looks for a moment that nothing happens")
def test_an_opportunistic_step_must_fit_beside_the_largest_guaranteed_one() -> None:
    engine = _C.Engine(lanes=2, threads_per_lane=1, capacity=100, arenas=False)
    begun: list[str] = []

    def run(job: int, name: str, height: int, go: threading.Event | None = None) -> _C.StepRun:
        def work() -> None:
            begun.append(name)
            if go is not None:
                go.wait(WAIT)

        made = _C.opaque_run(height, work)
        engine.submit(job, made)
        return made

    guaranteed, other = int(engine.add_job()), int(engine.add_job())
    engine.set_opportunistic(other, True)
    wait(engine, run(guaranteed, "guaranteed", 60))
    late = run(other, "opportunistic", 50)
    time.sleep(0.1)
    assert begun == ["guaranteed"]  # it would fit now, and the next guaranteed step then would not
    wait(engine, run(guaranteed, "again", 60))
    assert begun == ["guaranteed", "again"]
    engine.remove_job(guaranteed)
    wait(engine, late)
    small = int(engine.add_job())
    wait(engine, run(small, "small", 50))
    wait(engine, run(other, "beside", 50))  # 50 + 50 fit
    engine.close()


def test_waiting_opportunistic_jobs_do_not_hold_up_guaranteed_ones() -> None:
    admission = Admission(100)
    assert admission.try_issue(1, [60], [0])
    assert not admission.try_issue(2, [60], [0], opportunistic=True)
    admission.wait(2, opportunistic=True)
    admission.complete(1)
    assert admission.try_issue(3, [60], [0])  # overtakes it
    admission.complete(3)
    assert not admission.must_yield(1)
    assert admission.try_issue(1, [60], [0])


def test_waiting_within_a_class_has_its_turn() -> None:
    admission = Admission(100)
    assert admission.try_issue(1, [60], [0], opportunistic=True)
    admission.wait(2, opportunistic=True)
    admission.complete(1)
    assert admission.try_issue(3, [30], [0], opportunistic=True)  # overtakes 2, once
    assert admission.must_yield(1, opportunistic=True) and not admission.must_yield(1)


def share_of_time(engine: _C.Engine, seconds: float) -> float:
    """How much of the time an opportunistic job's short steps ran, while a guaranteed one is in a long step."""
    load = Load(engine)
    guaranteed, other = load.add(), load.add()
    engine.set_opportunistic(other, True)
    long = load.submit(guaranteed, seconds)
    while engine.held < 0 or not engine.queued(guaranteed):
        time.sleep(0.001)
    began = time.perf_counter()
    count = 0
    while not long.done:
        engine.wait(load.submit(other, 0.005))
        count += 1
    return sum(end - begin for job, begin, end in load.ran if job == other) / (time.perf_counter() - began)


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.2, 0.5])
def test_opportunistic_work_keeps_to_its_rate(engine: _C.Engine, rate: float) -> None:
    engine.set_rates(rate, rate)
    assert share_of_time(engine, 1.0) == pytest.approx(rate, rel=0.35)


@pytest.mark.slow
def test_without_a_limit_it_runs_all_the_time(engine: _C.Engine) -> None:
    assert share_of_time(engine, 0.3) > 0.8


@pytest.mark.slow
def test_a_rate_of_nothing_stops_it_and_a_cancelled_job_does_not_wait_for_it(engine: _C.Engine) -> None:
    load = Load(engine)
    guaranteed, other = load.add(), load.add()
    engine.set_opportunistic(other, True)
    engine.set_rates(0.0, 0.0)
    long = load.submit(guaranteed, 0.5)
    time.sleep(0.05)
    run = load.submit(other, 0.001)
    time.sleep(0.1)
    assert not run.done
    began = time.perf_counter()
    engine.cancel(other, "stopped")
    assert time.perf_counter() - began < 0.2 and not long.done
    wait(engine, long)


@pytest.mark.parametrize("rate", [-0.1, 1.1, float("nan")])
def test_rates_are_shares(engine: _C.Engine, rate: float) -> None:
    with pytest.raises(ValueError, match="share of time"):
        engine.set_rates(rate, 1.0)


@pytest.mark.slow
def test_only_guaranteed_steps_are_timed_where_there_are_others(engine: _C.Engine) -> None:
    load = Load(engine)
    guaranteed, other = load.add(), load.add()
    wait(engine, load.submit(guaranteed, 0.001))
    assert engine.take_step_times() == []  # nobody asks
    engine.set_opportunistic(other, True)
    wait(engine, load.submit(other, 0.001))
    wait(engine, load.submit(guaranteed, 0.02))
    ((job, ready, ended, busy),) = engine.take_step_times()
    assert job == guaranteed and 0.02 <= (ended - ready) * 1e-9 < 0.5 and busy <= ended - ready
    assert engine.take_step_times() == []


@pytest.mark.slow
def test_how_long_opportunistic_steps_were_under_way_is_known_while_they_are(engine: _C.Engine) -> None:
    load = Load(engine)
    guaranteed, other = load.add(), load.add()
    engine.set_opportunistic(other, True)
    wait(engine, load.submit(guaranteed, 0.01))
    assert engine.opportunistic_ns == 0  # nobody was
    engine.set_rates(0.0, 0.0)
    long = load.submit(guaranteed, 1.0)
    time.sleep(0.02)
    began = time.perf_counter()
    run = load.submit(other, 0.05)
    time.sleep(0.1)
    asleep = engine.opportunistic_ns
    assert asleep > 0 and not long.done and not run.done
    wait(engine, run)
    ended = engine.opportunistic_ns
    assert asleep + 0.05e9 <= ended <= (time.perf_counter() - began) * 1e9
    wait(engine, load.submit(guaranteed, 0.01))
    assert engine.opportunistic_ns == ended


@pytest.mark.slow
def test_a_step_that_sleeps_ends_soon_where_a_guaranteed_one_waits_for_its_lane(engine: _C.Engine) -> None:
    load = Load(engine)
    guaranteed, late, other = load.add(), load.add(), load.add()
    engine.set_opportunistic(other, True)
    engine.set_rates(0.0, 0.0)
    long = load.submit(guaranteed, 1.0)
    time.sleep(0.05)
    sleeps = load.submit(other, 0.001)
    time.sleep(0.05)
    assert not sleeps.done
    wait(engine, load.submit(late, 0.001))
    assert sleeps.done and not long.done
    again = load.submit(other, 0.001)  # from here on it sleeps as before
    time.sleep(0.1)
    assert not again.done and not long.done
    wait(engine, long)


@pytest.mark.slow
def test_a_sleeping_step_does_not_hold_back_memory_that_is_claimed(engine: _C.Engine) -> None:
    load = Load(engine)
    guaranteed, other = load.add(), load.add()
    engine.set_opportunistic(other, True)
    engine.set_rates(0.0, 0.0)
    long = load.submit(guaranteed, 1.0)
    time.sleep(0.05)
    run = _C.opaque_run(1 << 19, lambda: None)
    engine.submit(other, run)
    time.sleep(0.05)
    assert engine.held == 1 << 19
    engine.set_capacity(1 << 10)
    until = time.monotonic() + 0.5
    while not run.done and time.monotonic() < until:
        time.sleep(0.005)
    assert run.done and not long.done and engine.capacity == 1 << 10
    wait(engine, long)


SLICED = """
import signal, sys, threading, time
import torch
from torch import nn
from torch.nn import functional as F
import waterflow as wf
from waterflow import _C

torch.set_num_threads(1)


@torch.library.custom_op("test_priorities::slow", mutates_args=())
def slow(x: torch.Tensor) -> torch.Tensor:
    sum(range(2_000_000))  # keeps the interpreter
    return x.clone()


slow.register_fake(torch.empty_like)
torch.library.register_autograd("test_priorities::slow", lambda ctx, grad: grad)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(slow(x) if sys.argv[1] == "interpreter" else x.exp())


def stalls() -> float:
    worst, over = 0.0, time.perf_counter() + 1.0
    while time.perf_counter() < over:
        began = time.perf_counter()
        time.sleep(0.001)
        worst = max(worst, time.perf_counter() - began)
    return worst


with wf.Engine(lanes=2) as engine:
    model = Model()
    step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), engine=engine)
    batch = torch.randn(20000, 64), torch.randint(8, (20000,))
    for _ in range(3):
        step(batch)
    assert step.opaque_reason is None
    engine.set_priority(step, "opportunistic")
    engine.interference.look = lambda: None
    job, go = int(engine.native.add_job()), threading.Event()

    def train() -> None:
        while not go.is_set():
            step(batch)

    found, hits = {}, []
    for rate in (1.0, 0.1, 0.1):
        engine.native.set_rates(rate, rate)
        if sys.argv[1] == "handlers" and found.get(0.1):
            for number in range(signal.SIGRTMAX - 8, signal.SIGRTMAX):
                signal.signal(number, lambda *given: hits.append(given))
        go.clear()
        guaranteed = _C.opaque_run(0, lambda: go.wait(20))
        engine.native.submit(job, guaranteed)
        thread = threading.Thread(target=train)
        thread.start()
        found[rate] = stalls()
        go.set()
        thread.join()
        engine.native.wait(guaranteed)
    print(found, len(hits))
    if sys.argv[1] == "interpreter":
        assert found[0.1] < 3 * found[1.0] + 0.05, found
    assert not hits
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["interpreter", "handlers"])
def test_slices_leave_others_alone(what: str) -> None:
    done = subprocess.run([sys.executable, "-c", SLICED, what], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


INTERRUPTED = """
import os, signal, threading, time
import torch
from torch import nn
from torch.nn import functional as F
import waterflow as wf
from waterflow import _C

torch.set_num_threads(1)  # steps run on the thread that calls them
with wf.Engine(lanes=2) as engine:
    model = nn.Linear(64, 8)
    step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), engine=engine)
    batch = torch.randn(16, 64), torch.randint(8, (16,))
    step(batch)
    engine.set_priority(step, "opportunistic")
    engine.interference.look = lambda: None
    engine.native.set_rates(0.0, 0.0)
    long = _C.opaque_run(0, lambda: time.sleep(4))
    engine.native.submit(int(engine.native.add_job()), long)
    time.sleep(0.1)
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    began = time.perf_counter()
    try:
        step(batch)
    except KeyboardInterrupt:
        assert time.perf_counter() - began < 2, time.perf_counter() - began
        print("interrupted")
"""


@pytest.mark.slow
def test_a_loop_of_its_own_can_be_interrupted_while_its_step_sleeps() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0 and "interrupted" in done.stdout, done.stdout + done.stderr
