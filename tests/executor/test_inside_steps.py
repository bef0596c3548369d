"""What a step may ask of the engine that runs it, and callers that vanish. Each test has a process of its own: a mistake
shows as one that waits for ever."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD

import waterflow as wf
from tests.support import MiB, Net, images
from waterflow import _C
from waterflow.executor.engine import Engine, within

SECONDS = 90
ROOT = Path(__file__).parents[2]


def in_child(*cases: dict[str, Any]) -> Callable[[Callable[..., None]], Callable[[], None]]:
    """Run all cases of a test in a process of its own, which is killed after a while."""

    def wrap(test: Callable[..., None]) -> Callable[[], None]:
        def parent() -> None:
            calls = f"for case in {cases or ({},)!r}: print(case, flush=True); test.apart(**case)"
            code = f"from {test.__module__} import {test.__name__} as test\n{calls}"
            child = subprocess.Popen(
                [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
            )
            try:
                _, errors = child.communicate(timeout=SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                pytest.fail(f"waits for ever: {child.communicate()}")
            assert child.returncode == 0, errors[-4000:]

        setattr(parent, "apart", test)  # noqa: B010
        return parent

    return wrap


class Asking:
    """An operator that calls ``ask`` once, where there is one."""

    ask: Callable[[], None] | None = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        ask, self.ask = self.ask, None
        if ask is not None:
            ask()
        return x * 2


asking = Asking()


@torch.library.custom_op("inside_steps::ask", mutates_args=())
def ask_op(x: torch.Tensor) -> torch.Tensor:
    return asking(x)


ask_op.register_fake(lambda x: torch.empty_like(x))
ask_op.register_autograd(lambda ctx, gradient: gradient * 2)


class AskingNet(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(ask_op(x))


class Opaque(Net):
    """Cannot be captured, and calls ``ask``."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.sum().item()
        asking(x)
        return super().forward(x)


BATCH = images(1)[0]


def step_of(engine: Engine, model: nn.Module, warm: int = 4) -> wf.Step:
    with within(engine):
        step = wf.Step(model, loss=F.cross_entropy, optimizer=SGD(model.parameters(), lr=1e-3))
    for _ in range(warm):
        step(BATCH)
    return step


def native_run(work: Callable[[], Any], by_caller: bool = False) -> _C.StepRun:
    run = _C.opaque_run(1, work)
    run.by_caller = by_caller
    return run


def go_on(engine: _C.Engine, job: int | None = None) -> None:
    """It still runs steps, and holds nothing."""
    run = native_run(lambda: None)
    engine.submit(engine.add_job() if job is None else job, run)
    engine.wait(run)
    run.outputs()
    assert engine.held == 0
    engine.check()


def asked(ends: list[Any], ask: Callable[[], Any]) -> Callable[[], None]:
    """Keeps what ``ask`` returns or raises."""

    def call() -> None:
        try:
            ends.append(ask())
        except Exception as error:
            ends.append(error)

    return call


# -- closing


@pytest.mark.slow
@in_child({"by_caller": False}, {"by_caller": True})
def test_a_step_cannot_close_its_engine(by_caller: bool) -> None:
    engine = _C.Engine(lanes=1, threads_per_lane=1, capacity=10)
    run = native_run(engine.close, by_caller)
    engine.submit(engine.add_job(), run)
    engine.wait(run)
    with pytest.raises(RuntimeError, match="cannot be closed"):
        run.outputs()
    go_on(engine)
    engine.close()


@pytest.mark.slow
@in_child(*({"asynchronous": seed, "by_caller": by_caller} for seed in (None, 1) for by_caller in (False, True)))
def test_a_captured_step_closes_its_engine_and_itself(asynchronous: int | None, by_caller: bool) -> None:
    torch.set_num_threads(1 if by_caller else 2)  # with other threads than a lane's a caller leaves its step to that
    ends: list[Any] = []
    with Engine(memory=256 * MiB, lanes=1, asynchronous=asynchronous) as engine:
        step = step_of(engine, AskingNet())
        asking.ask = asked(ends, engine.close)
        assert step(BATCH).isfinite()
        assert isinstance(ends.pop(), RuntimeError) and not engine.over()
        job = step.job
        asking.ask = asked(ends, step.close)
        # Behind the host all of its groups may have been issued.
        with pytest.raises(wf.JobCancelled, match="removed") if asynchronous is None else contextlib.suppress(wf.JobCancelled):
            step(BATCH)
        assert ends == [None] and engine.reservations.claimed() == 0
        with pytest.raises(wf.JobCancelled, match="closed"):
            step(BATCH)
        with pytest.raises(ValueError, match="not in this engine"):
            engine.native.queued(job)
        step_of(engine, Net())
        go_on(engine.native)


@pytest.mark.slow
@in_child({"by_caller": False}, {"by_caller": True})
def test_a_step_stops_its_own_job(by_caller: bool) -> None:
    engine = _C.Engine(lanes=1, threads_per_lane=1, capacity=10)
    job = engine.add_job()
    begun = threading.Event()

    def stop() -> None:
        begun.wait(20)
        engine.cancel(job, "enough")

    first, second = native_run(stop), native_run(lambda: None, by_caller)
    engine.submit(job, first)
    engine.submit(job, second)
    begun.set()
    engine.wait(second)
    first.outputs()
    with pytest.raises(_C.Cancelled, match="enough"):
        second.outputs()
    go_on(engine, job)
    engine.close()


@pytest.mark.slow
@in_child()
def test_jobs_remove_each_other_in_their_steps() -> None:
    engine = _C.Engine(lanes=2, threads_per_lane=1, capacity=10)
    jobs = [engine.add_job() for _ in range(2)]
    meeting = threading.Barrier(2, timeout=20)

    def remove(other: int) -> None:
        meeting.wait()
        engine.remove_job(other)

    runs = [native_run(lambda other=other: remove(other)) for other in reversed(jobs)]
    for job, run in zip(jobs, runs):
        engine.submit(job, run)
    for run in runs:
        engine.wait(run)
        run.outputs()
    for job in jobs:
        with pytest.raises(ValueError, match="not in this engine"):
            engine.queued(job)
    go_on(engine)
    engine.close()


@pytest.mark.slow
@in_child(*({"inside": one, "outside": other} for one in ("cancel", "remove") for other in ("cancel", "remove")))
def test_a_job_is_stopped_from_inside_and_outside_at_once(inside: str, outside: str) -> None:
    engine = _C.Engine(lanes=1, threads_per_lane=1, capacity=10)
    job = engine.add_job()
    begun, gate = threading.Event(), threading.Event()

    def stop(how: str) -> None:
        try:
            engine.cancel(job, how) if how == "cancel" else engine.remove_job(job)
        except ValueError:
            assert inside == outside == "remove"

    def work() -> None:
        begun.set()
        gate.wait(20)
        stop(inside)

    run = native_run(work)
    engine.submit(job, run)
    begun.wait(20)
    other = threading.Thread(target=stop, args=(outside,))
    other.start()
    time.sleep(0.05)
    gate.set()
    other.join()
    engine.wait(run)
    run.outputs()
    if "remove" in (inside, outside):
        with pytest.raises(ValueError, match="not in this engine"):
            engine.queued(job)
        go_on(engine)
    else:
        go_on(engine, job)
    engine.close()


@pytest.mark.slow
@in_child({"asynchronous": None}, {"asynchronous": 1})
def test_a_forgotten_step_is_collected_on_its_lane(asynchronous: int | None) -> None:
    gc.disable()
    gate, begun, collected = threading.Event(), threading.Event(), threading.Event()

    def collect() -> None:
        begun.set()
        gate.wait(20)
        gc.collect()
        collected.set()

    with Engine(memory=256 * MiB, lanes=1, asynchronous=asynchronous) as engine:
        step = step_of(engine, AskingNet())
        step.myself = step  # type: ignore[attr-defined]
        job = step.job
        asking.ask = collect
        pending = step.submit(BATCH)
        assert begun.wait(20)
        del step, pending
        gate.set()
        assert collected.wait(20)
        other = step_of(engine, Net())
        assert list(engine.reservations._claims) == [other.job]
        with pytest.raises(ValueError, match="not in this engine"):
            engine.native.queued(job)
        go_on(engine.native)


# -- callers that vanish


@pytest.mark.slow
@in_child({"where": "_hand_in"}, {"where": "_finish"})
def test_ctrl_c_between_handing_in_and_waiting(where: str) -> None:
    torch.set_num_threads(1)
    with Engine(memory=256 * MiB, lanes=1) as engine:
        step, other = step_of(engine, Net()), step_of(engine, Net())
        before = getattr(wf.Step, where)

        def interrupted(*arguments: Any) -> Any:
            if where == "_hand_in":
                before(*arguments)
            raise KeyboardInterrupt

        setattr(wf.Step, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(BATCH)
        setattr(wf.Step, where, before)
        assert other(BATCH).isfinite()
        assert step(BATCH).isfinite()
        assert not step._under_way
        go_on(engine.native)


# -- steps within steps


@pytest.mark.needs_time("it runs in a process of its own, which imports torch")
@in_child(
    {"lanes": 1, "warm": 0, "captured": False},  # its first look holds all memory
    {"lanes": 2, "warm": 0, "captured": False},
    {"lanes": 1, "warm": 2, "captured": False},
    {"lanes": 2, "warm": 2, "captured": True},
)
def test_a_step_within_a_step_is_refused(lanes: int, warm: int, captured: bool) -> None:
    ends: list[Any] = []
    with Engine(memory=256 * MiB, lanes=lanes) as engine:
        inner, fresh = step_of(engine, Net()), step_of(engine, Net(), warm=0)
        waiting = step_of(engine, Net())
        outer = step_of(engine, AskingNet() if captured else Opaque(), warm)
        alone = wf.Step(alone_model := Net(), loss=F.cross_entropy, optimizer=SGD(alone_model.parameters(), lr=0.1))

        def ask() -> None:
            for call in (inner, fresh, inner.submit, alone):
                asked(ends, lambda call=call: call(BATCH))()
            asked(ends, lambda: engine.run_eager(waiting.job, lambda: None, None))()

        asking.ask = ask
        assert outer(BATCH).isfinite()
        assert [type(end) for end in ends] == [wf.InvalidJobError] * 3 + [torch.Tensor, wf.InvalidJobError]
        assert "inside of a step of its own engine" in str(ends[0])
        for step in (inner, fresh, outer):
            assert step(BATCH).isfinite()
        go_on(engine.native)


@pytest.mark.slow
@in_child()
def test_a_step_cannot_wait_for_one_that_is_queued() -> None:
    engine = _C.Engine(lanes=1, threads_per_lane=1, capacity=10)
    handed_in = threading.Event()
    queued = native_run(lambda: None)

    def wait() -> None:
        handed_in.wait(20)
        engine.wait(queued)

    run = native_run(wait)
    engine.submit(engine.add_job(), run)
    engine.submit(engine.add_job(), queued)
    handed_in.set()
    engine.wait(run)
    with pytest.raises(RuntimeError, match="inside of a step"):
        run.outputs()
    engine.wait(queued)
    queued.outputs()
    done = native_run(lambda: engine.wait(queued))  # that is over: nothing to wait for
    engine.submit(engine.add_job(), done)
    engine.wait(done)
    done.outputs()
    engine.close()
