"""Guaranteed and opportunistic jobs, from Job to result: bits, memory, making way and coming back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.support import MiB, same_bits
from waterflow.errors import InvalidJobError, MemoryLimitError
from waterflow.executor.engine import Engine, within
from waterflow.executor.terms import Terms
from waterflow.partition.plan import Plan, opaque_plan
from waterflow.runner import JobRunner

WAIT = 30.0  # seconds


def batches(count: int = 24, rows: int = 16) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(rows, 64, generator=generator), torch.randint(4, (rows,), generator=generator))
            for _ in range(count)]  # fmt: skip


def job(name: str, width: int = 64, **more: Any) -> wf.Job:
    def model() -> nn.Module:
        return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 4))

    settings = {"data": batches(), "epochs": 2, "seed": 1} | more
    return wf.Job(name=name, model=model, loss=F.cross_entropy,
                  optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), **settings)  # fmt: skip


def assert_same(one: wf.JobResult, other: wf.JobResult) -> None:
    assert one.status == other.status == "completed", (one.traceback, other.traceback)
    assert one.losses == other.losses
    assert one.state_dict is not None and other.state_dict is not None
    assert all(same_bits(one.state_dict[key], other.state_dict[key]) for key in one.state_dict)


def needs(name: str, persistent: int, height: int) -> Plan:
    return opaque_plan(name, height, persistent=persistent, batch=0)


def in_thread(engine: Engine, runner: JobRunner) -> Callable[[], wf.JobResult]:
    """Starts it; what is returned waits for its result."""
    found: list[wf.JobResult] = []

    def run() -> None:
        with within(engine):
            found.append(runner.run())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> wf.JobResult:
        thread.join(WAIT)
        assert found, "the job did not end"
        return found[0]

    return result


def until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.002)


@pytest.mark.parametrize("exact", [True, False])
def test_jobs_of_both_priorities_end_as_alone(exact: bool) -> None:
    jobs = [job(f"{priority}-{n}", seed=n, priority=priority)
            for priority in ("guaranteed", "opportunistic") for n in range(2)]  # fmt: skip
    together = wf.train(jobs, lanes=2, exact=exact)
    for each in jobs:
        alone = wf.train([each], lanes=1)[0]
        if exact or each.priority == "opportunistic":
            assert_same(together[each.name], alone)
        else:
            assert together[each.name].losses == pytest.approx(alone.losses, rel=1e-3, abs=1e-4)


def test_opportunistic_jobs_are_not_fused_with_others() -> None:
    jobs = [job(f"job-{n}", seed=n, epochs=6, priority="opportunistic") for n in range(3)]
    assert not any(result.fused_steps for result in wf.train(jobs, lanes=2, exact=False, mode="fused"))


def test_an_opportunistic_job_makes_way_and_comes_back() -> None:
    alone = wf.train([job("small", epochs=6)], lanes=1)[0]
    with Engine(lanes=2, memory="200MiB") as engine:
        go, reached = threading.Event(), threading.Event()

        def slow() -> Any:
            for number, batch in enumerate(batches()):
                if number == 6:
                    reached.set()
                    go.wait(WAIT)
                yield batch

        runner = JobRunner(job("small", epochs=6, data=slow, priority="opportunistic"), engine)
        result = in_thread(engine, runner)
        assert reached.wait(WAIT)
        held = engine.claimed()
        assert held > 0
        large = engine.add_job("large")
        claimed = threading.Thread(
            target=engine.claim, args=(large, needs("large", engine.room // 2, engine.room // 2 - held // 2)),
            daemon=True,
        )  # fmt: skip
        claimed.start()
        time.sleep(0.2)
        assert claimed.is_alive()  # it waits for the end of a step
        go.set()
        claimed.join(WAIT)
        assert not claimed.is_alive()
        until(lambda: runner.suspended)
        assert engine.claimed() == engine._claims[large].bytes
        engine.remove_job(large)
        assert_same(result(), alone)
        assert runner.residence.times_left >= 1


def test_guaranteed_jobs_do_not_make_way() -> None:
    with Engine(lanes=2, memory="200MiB") as engine:
        runner = JobRunner(job("first", epochs=1), engine)
        result = in_thread(engine, runner)
        until(lambda: engine.claimed() > 0)
        late = engine.add_job("late")
        plan = needs("late", engine.room // 2, engine.room // 2)
        assert not engine.would_fit(plan)
        engine.claim(late, plan)  # waits for its end
        assert result().status == "completed" and runner.residence.times_left == 0


def test_an_opportunistic_claim_leaves_room_for_a_guaranteed_step() -> None:
    with Engine(lanes=2, memory="1GiB", reserve=0) as engine:
        guaranteed, other = engine.add_job("guaranteed"), engine.add_job("other")
        engine.set_terms(other, Terms("opportunistic"))
        engine.claim(guaranteed, needs("guaranteed", 600 * MiB, 100 * MiB))
        with pytest.raises(MemoryLimitError):
            engine.claim(other, needs("other", 400 * MiB, 100 * MiB), patient=False)
        engine.claim(other, needs("other", 200 * MiB, 100 * MiB), patient=False)


def test_a_limit_for_all_opportunistic_jobs() -> None:
    with Engine(lanes=2, memory="1GiB", reserve=0) as engine:
        engine.opportunistic_limit = 300 * MiB
        first, second = engine.add_job("first"), engine.add_job("second")
        for each in (first, second):
            engine.set_terms(each, Terms("opportunistic"))
        engine.claim(first, needs("first", 100 * MiB, 100 * MiB), patient=False)
        with pytest.raises(MemoryLimitError):
            engine.claim(second, needs("second", 100 * MiB, 150 * MiB), patient=False)
        engine.claim(second, needs("second", 100 * MiB, 50 * MiB), patient=False)


def test_a_lowered_quota_suspends_a_job_until_it_is_raised() -> None:
    alone = wf.train([job("job", epochs=40)], lanes=1)[0]
    with Engine(lanes=2, memory="1GiB") as engine:
        runner = JobRunner(job("job", epochs=40, priority="opportunistic", quota="500MiB"), engine)
        result = in_thread(engine, runner)
        until(lambda: runner.steps > 3)
        runner.residence.set(quota=1)
        until(lambda: runner.suspended)
        steps = runner.steps
        assert engine.claimed() == 0
        time.sleep(0.2)
        assert runner.steps == steps
        runner.residence.set(quota="1GiB")
        assert_same(result(), alone)


@pytest.mark.parametrize("priority", ["guaranteed", "opportunistic"])
def test_jobs_that_do_not_fit_together_take_turns(priority: str) -> None:
    jobs = [job(f"job-{n}", width=2048, seed=n, epochs=40, priority=priority) for n in range(2)]
    alone = [wf.train([each], lanes=1)[0] for each in jobs]
    most = max(result.measured_peak or 0 for result in alone)
    with Engine(lanes=2, memory=int(1.5 * most), reserve=0, quantum=0.05) as engine:
        runners = [JobRunner(each, engine) for each in jobs]
        results = [in_thread(engine, runner) for runner in runners]
        for result, reference in zip(results, alone, strict=True):
            assert_same(result(), reference)
        assert sum(runner.residence.times_left for runner in runners) >= 2


@pytest.mark.parametrize("quantum", [0, -1.0])
def test_a_quantum_is_positive(quantum: float) -> None:
    with pytest.raises(InvalidJobError, match="quantum must be positive"):
        Engine(quantum=quantum)


def test_the_priority_of_a_running_job_changes() -> None:
    alone = wf.train([job("job", epochs=20)], lanes=1)[0]
    with Engine(lanes=2, memory="1GiB") as engine:
        runner = JobRunner(job("job", epochs=20), engine)
        result = in_thread(engine, runner)
        for priority in ("opportunistic", "guaranteed", "opportunistic"):
            until(lambda: runner.steps > 2)
            runner.residence.set(priority)  # type: ignore[arg-type]
            time.sleep(0.05)
        assert_same(result(), alone)


def test_a_quota_is_kept_for_a_guaranteed_job() -> None:
    with Engine(lanes=2, memory="1GiB", reserve=0) as engine:
        job_ = engine.add_job("guaranteed")
        engine.set_terms(job_, Terms("guaranteed", quota=800 * MiB))
        engine.claim(job_, needs("guaranteed", 100 * MiB, 50 * MiB))
        assert engine.claimed() == 750 * MiB
        assert not engine.would_fit(needs("other", 50 * MiB, 300 * MiB))


def test_more_than_its_quota_is_refused() -> None:
    with pytest.raises(MemoryLimitError, match=r"quota of 1\.0 KiB.*raise quota="):
        wf.train([job("job", priority="opportunistic", quota=1024)])


@pytest.mark.parametrize(
    ("settings", "told"),
    [({"priority": "high"}, "'guaranteed' or 'opportunistic'; got 'high'"),
     ({"quota": "much"}, "quota must be bytes"),
     ({"quota": "4TiB"}, "exceeds the engine's limit")],
)  # fmt: skip
def test_bad_settings_are_refused(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidJobError, match=told):
        wf.train([job("job", **settings)])


def test_a_step_in_a_loop_of_its_own() -> None:
    with Engine(lanes=2) as engine:
        model = nn.Linear(64, 4)
        step = wf.Step(
            model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), engine=engine
        )
        engine.set_priority(step, "opportunistic")
        for batch in batches(4):
            step(batch)
        assert engine.coordinator is not None
        with pytest.raises(InvalidJobError, match="priority must be"):
            engine.set_priority(step, "low")  # type: ignore[arg-type]
        other = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        with pytest.raises(InvalidJobError, match="a Step of this engine"):
            engine.set_priority(other, "opportunistic")
