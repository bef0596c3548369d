"""Opportunistic jobs alone in an engine that does not hold all of them whole: who has its memory is tried, and no bit differs."""

from __future__ import annotations

import threading

import pytest
from torch.nn import functional as F

import waterflow as wf
from tests.support import MiB
from tests.test_below_need import alone, batches, job, optimized, quota_of
from tests.test_priorities import WAIT, assert_same, in_thread, needs, until
from waterflow.executor import memory_control
from waterflow.executor.engine import Engine, within
from waterflow.executor.terms import Terms
from waterflow.runner import JobRunner

pytestmark = pytest.mark.slow

EPOCHS = 60


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials come soon, and each is kept."""
    for name, value in {
        "LOOK_SECONDS": 0.0,
        "WINDOW_SECONDS": 0.02,
        "FIRST_SECONDS": 0.02,
        "REST": 0,
        "GAIN": 0.0,
    }.items():
        monkeypatch.setattr(memory_control, name, value)


def room_for(count: int, share: float = 0.5) -> int:
    """Memory for so many jobs at once with steps that high between the lowest and whole ones."""
    _, plan, low = alone("mlp")
    height = low["spill"].height + int(share * (plan.height - low["spill"].height))
    return quota_of(plan, height) + (count - 1) * quota_of(plan, 0)


def jobs(count: int, **more: object) -> list[wf.Job]:
    settings = {"priority": "opportunistic", "below_need": "spill", "epochs": EPOCHS} | more
    return [job(seed=number, **settings) for number in range(count)]


@pytest.mark.parametrize("count", [2, 3])
def test_bits_and_the_limit(count: int, quick: None) -> None:
    together = jobs(count)
    for number, each in enumerate(together):
        each.name = f"job-{number}"
    with Engine(lanes=2, memory=room_for(count), reserve=0) as engine:
        results = wf.train(together, engine=engine, max_concurrent=count)
        assert engine.native.peak_held <= engine.room
        engine.native.check()
        assert engine.claimed() == 0 and not engine._away and not engine._whole
    for number, (result, each) in enumerate(zip(results, jobs(count, priority="guaranteed", below_need="wait"))):
        each.name = f"job-{number}"
        assert_same(result, wf.train([each], lanes=1)[0])
    told = " ".join(results.decisions)
    assert "none for" in told and "lower, 'job-" in told
    assert any(result.spilled > 0 for result in results)


def test_guaranteed_jobs_take_the_shares_back(quick: None) -> None:
    alones = [wf.train([each], lanes=1)[0] for each in jobs(2, priority="guaranteed", below_need="wait")]
    with Engine(lanes=2, memory=room_for(2), reserve=0) as engine:
        runners = [JobRunner(each, engine) for each in jobs(2)]
        ends = [in_thread(engine, runner) for runner in runners]
        until(lambda: any(runner.residence.terms.share is not None for runner in runners))
        large = engine.add_job("large")
        claimed = threading.Thread(
            target=engine.claim, args=(large, needs("large", engine.room - room_for(1), 0)), daemon=True
        )
        claimed.start()
        until(lambda: all(runner.residence.terms.share is None for runner in runners))
        claimed.join(WAIT)
        assert large in engine._claims
        engine.remove_job(large)
        for each, result in zip(ends, alones):
            assert_same(each(), result)


def test_the_users_quota_stays(quick: None) -> None:
    quota = room_for(1, 0.3)
    with Engine(lanes=2, memory=room_for(2), reserve=0) as engine:
        runners = [JobRunner(each, engine) for each in jobs(2, quota=quota)]
        for end in [in_thread(engine, runner) for runner in runners]:
            assert end().status == "completed"
        assert engine.native.peak_held <= engine.room
    for runner in runners:
        assert runner.residence.terms.quota == quota
        assert runner.step is not None and runner.step.plan.height <= quota


def test_whoever_could_not_go_on_takes_the_shares_back() -> None:
    with Engine(lanes=2, memory="1GiB", reserve=0) as engine:
        one, other = (engine.add_job(name) for name in ("one", "other"))
        terms = [Terms("opportunistic", make_way=lambda: None, below_need="spill") for _ in range(2)]
        for number, on in zip((one, other), terms):
            engine.set_terms(number, on)
        engine.give_shares({one: 0, other: 0})
        assert not engine.would_fit(needs("one", MiB, MiB), terms[0])
        assert engine.height_for(one, MiB, MiB) < 0
        engine.claim(one, needs("one", MiB, MiB))
        assert all(on.share is None for on in terms) and one in engine._claims


def test_terms_that_change_while_the_job_is_away_give_its_share_back() -> None:
    with Engine(lanes=2, memory="1GiB", reserve=0) as engine:
        one, other = (engine.add_job(name) for name in ("one", "other"))
        terms = Terms("opportunistic", make_way=lambda: None, below_need="spill")
        engine.set_terms(one, terms)
        engine.claim(one, needs("one", MiB, MiB))
        engine.note_need(one, MiB, MiB)
        engine.give_shares({one: 0})
        assert engine.leave(one)
        engine.remove_job(one)
        terms.quota = 3 * MiB
        engine.set_terms(one, terms)
        assert not engine.would_fit(needs("one", MiB, MiB), terms)
        assert engine.take_back_shares() and engine.would_fit(needs("one", MiB, MiB), terms)
        assert one not in engine._whole and engine.claimed() == 0 and other in engine.names


def test_a_loop_of_its_own_has_no_share(quick: None) -> None:
    with Engine(lanes=2, memory=room_for(2), reserve=0) as engine, within(engine):
        model, optimizer = optimized("mlp")
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer)
        engine.set_priority(step, "opportunistic", None, "spill")
        (ends,) = [in_thread(engine, JobRunner(each, engine)) for each in jobs(1, epochs=20)]
        for batch in batches("mlp", 50):
            step(batch)
            assert engine.terms_of(step.job).share is None
        step.close()
        assert ends().status == "completed"
        assert not engine.decisions
