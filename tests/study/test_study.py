"""optimize(): what study.optimize does, several trials at a time."""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.samplers import NSGAIISampler, RandomSampler, TPESampler
from optuna.study import MaxTrialsCallback
from optuna.trial import FrozenTrial, Trial, TrialState
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.leftovers import nothing_left  # noqa: F401
from tests.support import images, same_bits
from waterflow import _C
from waterflow.executor.engine import current_engine
from waterflow.executor.program.capture_cache import captures
from waterflow.executor.tuning import AutoConcurrency
from waterflow.study.coordinator import StudyRunner
from waterflow.training.runner import JobRunner

BATCHES = images(3)
EPOCHS = 3
Objective = Callable[[Trial], Any]

optuna.logging.set_verbosity(optuna.logging.ERROR)


def perceptron(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 4))


def own_numbers(model: nn.Module, generator: torch.Generator) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def choose(trial: Trial) -> tuple[int, float]:
    return trial.suggest_int("width", 4, 16, step=4), trial.suggest_float("lr", 1e-3, 1.0, log=True)


def looping(trial: Trial, pause: Callable[[], None] = lambda: None) -> float:
    """Door one: the objective trains in a loop of its own."""
    width, rate = choose(trial)
    generator = torch.Generator().manual_seed(trial.number)
    model = own_numbers(perceptron(width), generator)
    step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), rate), generator=generator)
    for epoch in range(EPOCHS):
        pause()
        loss = sum(step(batch).item() for batch in BATCHES) / len(BATCHES)
        trial.report(loss, epoch)
        if trial.should_prune():
            raise optuna.TrialPruned
    return loss


def job_of(number: int, width: int, rate: float, **changes: Any) -> wf.Job:
    settings: dict[str, Any] = {
        "model": lambda: perceptron(width), "data": BATCHES, "loss": F.cross_entropy, "epochs": EPOCHS,
        "optimizer": lambda p: torch.optim.SGD(p, lr=rate), "seed": number,
    }  # fmt: skip
    return wf.Job(f"trial-{number}", **(settings | changes))


def making(trial: Trial, pause: Callable[[], None] = lambda: None, **changes: Any) -> wf.Job:
    """Door two: the objective returns a job."""
    pause()
    return job_of(trial.number, *choose(trial), **changes)


DOORS: dict[str, Objective] = {"loop": looping, "job": making}


def hesitant(objective: Any) -> Objective:
    """The same with pauses that differ from run to run."""

    def hesitating(trial: Trial) -> Any:
        seconds = 0.01 * torch.rand((), generator=torch.Generator()).item()
        return objective(trial, pause=lambda: time.sleep(seconds))

    return hesitating


def new_study(**settings: Any) -> optuna.Study:
    defaults: dict[str, Any] = {"sampler": TPESampler(seed=3, n_startup_trials=3), "pruner": MedianPruner(n_startup_trials=2)}
    return optuna.create_study(**(defaults | settings))


def record(study: optuna.Study) -> list[tuple[Any, ...]]:
    return [(t.number, t.state, t.params, t.intermediate_values, t.values, t.user_attrs) for t in study.trials]


def states(study: optuna.Study) -> list[TrialState]:
    return [trial.state for trial in study.trials]


def run(objective: Objective, *, study: optuna.Study | None = None, **settings: Any) -> optuna.Study:
    study = study or new_study()
    torch.manual_seed(17)
    wf.optimize(study, objective, **({"n_trials": 10, "max_concurrent": 2, "lanes": 2} | settings))
    return study


def repeatable(objective: Objective, **settings: Any) -> optuna.Study:
    return run(objective, **({"deterministic": True} | settings))


# -- the same as study.optimize


def test_one_at_a_time_it_is_study_optimize() -> None:
    plain = new_study()
    plain.optimize(looping, n_trials=10)
    assert {TrialState.COMPLETE, TrialState.PRUNED} == set(states(plain))
    for deterministic in (False, True):
        mine = run(looping, max_concurrent=1, deterministic=deterministic)
        assert record(mine) == record(plain)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """What Optuna says about trials."""
    said: list[str] = []

    class Listener(logging.Handler):
        def emit(self, entry: logging.LogRecord) -> None:
            said.append(entry.getMessage())

    logger, listener = logging.getLogger("optuna"), Listener()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    try:
        yield said
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)


def returns(value: Any) -> Objective:
    def objective(trial: Trial) -> Any:
        trial.suggest_float("x", 0, 1)
        if isinstance(value, BaseException):
            raise value
        return value

    return objective


@pytest.mark.parametrize("value", [1, None, "many", float("nan"), [1.0, 2.0], torch.tensor(2.0),
                                   ValueError("caught"), optuna.TrialPruned()], ids=repr)  # fmt: skip
def test_whatever_an_objective_gives(value: Any) -> None:
    plain, mine = (new_study(sampler=RandomSampler(1)) for _ in range(2))
    with logged() as expected:
        plain.optimize(returns(value), n_trials=2, catch=ValueError)
    with logged() as said:
        run(returns(value), study=mine, n_trials=2, max_concurrent=1, catch=ValueError)
    assert record(mine) == record(plain)
    assert said == expected and len(said) >= 2


def fails_at(*numbers: int, error: type[BaseException] = ValueError) -> Objective:
    def objective(trial: Trial) -> float:
        x = trial.suggest_float("x", 0, 1)
        if trial.number in numbers:
            raise error(f"trial {trial.number}")
        return x

    return objective


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
def test_what_is_not_caught_is_raised_after_the_others() -> None:
    study, heard = new_study(), []

    def objective(trial: Trial) -> float:
        if trial.number == 0:
            time.sleep(0.1)
            return 1.0
        return fails_at(1)(trial)

    with pytest.raises(ValueError, match="trial 1"):
        run(objective, study=study, callbacks=[lambda _, trial: heard.append(trial.number)])
    assert states(study) == [TrialState.COMPLETE, TrialState.FAIL]
    assert heard == [0]  # as in study.optimize: not of the trial that ends the study


@pytest.mark.parametrize("catch", [ValueError, (ValueError, KeyError), [ValueError]])
def test_what_is_caught_fails_its_trial_alone(catch: Any) -> None:
    study = run(fails_at(1, 4), n_trials=6, catch=catch)
    assert states(study).count(TrialState.FAIL) == 2 and len(study.trials) == 6


@pytest.mark.parametrize("error", [SystemExit, wf.JobCancelled])
def test_unusual_errors_end_the_study(error: type[BaseException]) -> None:
    study = new_study()
    with pytest.raises(error):
        run(fails_at(0, error=error), study=study, max_concurrent=1)
    assert states(study) == [TrialState.FAIL]


def test_callbacks_and_the_limits_of_a_study() -> None:
    heard: list[FrozenTrial] = []
    study = run(fails_at(2), n_trials=5, catch=ValueError, callbacks=[lambda _, trial: heard.append(trial)])
    assert sorted(trial.number for trial in heard) == list(range(5))
    assert all(trial.state.is_finished() for trial in heard)
    study = run(fails_at(), n_trials=None, callbacks=[MaxTrialsCallback(4)])
    assert 4 <= len(study.trials) <= 5 and all(state.is_finished() for state in states(study))
    assert run(fails_at(), n_trials=0).trials == []
    study = run(fails_at(), n_trials=3)
    run(fails_at(), study=study, n_trials=2)
    assert len(study.trials) == 5


@pytest.mark.needs_time("a study's timeout is what it tests")
def test_a_timeout_lets_running_trials_finish() -> None:
    def objective(trial: Trial) -> float:
        time.sleep(0.2)
        return 1.0

    started = time.perf_counter()
    study = run(objective, n_trials=None, timeout=0.3)
    assert time.perf_counter() - started < 1.5
    assert len(study.trials) == 4 and set(states(study)) == {TrialState.COMPLETE}


@pytest.mark.parametrize("where", ["objective", "callback"])
def test_stop(where: str) -> None:
    study = new_study()
    stopped = threading.Event()

    def stop(here: str, number: int) -> None:
        if where == here and number == 3:
            study.stop()
            stopped.set()

    def objective(trial: Trial) -> float:
        stop("objective", trial.number)
        if trial.number > 3:  # however long the third takes
            assert stopped.wait(10)
        return 1.0

    def callback(study: optuna.Study, trial: FrozenTrial) -> None:
        stop("callback", trial.number)

    run(objective, study=study, n_trials=None, callbacks=[callback])
    assert 4 <= len(study.trials) <= 6 and all(state.is_finished() for state in states(study))
    with pytest.raises(RuntimeError, match=r"supposed to be invoked inside an objective function or a callback"):
        study.stop()


@pytest.mark.needs_time("pauses that differ from run to run change no result")
def test_a_callback_that_raises_leaves_nothing_running() -> None:
    for settings in ({}, {"deterministic": True}):
        study = new_study()

        def broken(study: optuna.Study, trial: FrozenTrial) -> None:
            raise RuntimeError("no more")

        with pytest.raises(RuntimeError, match="no more"):
            run(hesitant(looping), study=study, callbacks=[broken], max_concurrent=3, **settings)
        assert all(state.is_finished() for state in states(study))


@pytest.mark.parametrize(("kind", "door"), [("sqlite", "job"), ("journal", "loop")])
def test_storages(kind: str, door: str, empty_database: Path, tmp_path: Path) -> None:
    if kind == "sqlite":
        storage: Any = f"sqlite:///{shutil.copy(empty_database, tmp_path / 'study.db')}"
    else:
        backend = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study.log"))
        storage = optuna.storages.JournalStorage(backend)
    stored = repeatable(DOORS[door], study=new_study(storage=storage, study_name="one"), n_trials=6)
    loaded = optuna.load_study(study_name="one", storage=storage)
    assert record(loaded) == record(stored) == record(repeatable(DOORS[door], n_trials=6))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_stale_trials_are_failed_and_fresh_ones_beat(tmp_path: Path) -> None:
    storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'study.db'}", heartbeat_interval=1, grace_period=1)
    study = new_study(storage=storage)
    stale = study.ask()
    storage.record_heartbeat(stale._trial_id)
    time.sleep(2.1)
    run(fails_at(), study=study, n_trials=2)
    assert states(study) == [TrialState.FAIL, TrialState.COMPLETE, TrialState.COMPLETE]


# -- several objectives


def two_values(model: nn.Module) -> dict[str, float]:
    x, y = BATCHES[0]
    return {"loss": F.cross_entropy(model(x), y).item(), "size": float(sum(p.numel() for p in model.parameters()))}


def test_metrics_are_the_values_in_their_order() -> None:
    def both(seed: int) -> optuna.Study:
        study = new_study(directions=["minimize", "minimize"], sampler=NSGAIISampler(seed=seed, population_size=4))
        return repeatable(lambda trial: making(trial, evaluate=two_values), study=study, n_trials=8)

    study = both(1)
    assert set(states(study)) == {TrialState.COMPLETE} and record(both(1)) == record(study)
    for trial in study.trials:
        width = trial.params["width"]
        assert trial.values[1] == 6 * width + width + width * 4 + 4


def test_several_objectives_in_a_loop() -> None:
    study = new_study(directions=["minimize", "maximize"], sampler=RandomSampler(1))
    run(lambda trial: (trial.suggest_float("x", 0, 1), 2.0), study=study, n_trials=4)
    assert [trial.values for trial in study.trials] == [[trial.params["x"], 2.0] for trial in study.trials]


def test_reports_and_wrong_numbers_of_values_are_explained() -> None:
    study = new_study(directions=["minimize", "minimize"], sampler=RandomSampler(1))
    with pytest.raises(NotImplementedError, match="multi-objective"):
        run(looping, study=study)
    with pytest.raises(wf.StudyError, match=r"2 objectives and evaluate of job 'trial-.*1 number.*: loss\. Return one"):
        run(making, study=study)
    assert all(state.is_finished() for state in states(study))


# -- jobs in a study


def test_jobs_in_a_study_end_as_alone_and_as_in_train() -> None:
    torch.manual_seed(17)
    study = new_study()
    summary = wf.optimize(study, making, n_trials=10, max_concurrent=3, lanes=2, keep_weights="all")
    assert [result.name for result in summary.results] == [f"trial-{number}" for number in range(10)]
    assert {result.status for result in summary.results} == {"completed", "pruned"}
    jobs = [job_of(trial.number, trial.params["width"], trial.params["lr"]) for trial in study.trials]
    for result, trial, job, trained in zip(summary.results, study.trials, jobs, wf.train(jobs)):
        alone = JobRunner(job).run()
        assert alone.losses == trained.losses and alone.losses[: len(result.losses)] == result.losses
        assert list(trial.intermediate_values.values()) == [m["loss"] for m in result.metrics]
        if result.status == "completed":
            assert trial.value == result.value == alone.value
            for key, value in alone.state_dict.items():
                assert same_bits(value, result.state_dict[key]) and same_bits(value, trained.state_dict[key])
        else:
            assert trial.state is TrialState.PRUNED and trial.value == result.metrics[-1]["loss"]


def test_what_a_summary_tells() -> None:
    captures.clear()
    summary = wf.optimize(new_study(), making, n_trials=5, max_concurrent=2, lanes=2)
    assert (summary.trials, summary.most_at_once) == (5, 2)
    assert summary.steps == sum(result.steps for result in summary.results)
    assert 1 <= summary.captures <= 4 and len(summary.lane_busy) == 2 and summary.seconds > 0


def broken(*_: Any) -> Any:
    raise LookupError("broken on purpose")


def test_a_job_that_cannot_be_built_fails_its_trial_alone() -> None:
    def objective(trial: Trial) -> wf.Job:
        kind = ("model", "data", "optimizer", "loss", "evaluate", "scheduler", None)[trial.number % 7]
        return making(trial, **({kind: broken} if kind else {}))

    study = run(objective, n_trials=14, catch=LookupError, study=new_study(pruner=NopPruner()))
    assert [trial.number for trial in study.trials if trial.state is TrialState.COMPLETE] == [6, 13]
    assert states(study).count(TrialState.FAIL) == 12
    with pytest.raises(LookupError, match="on purpose"):
        run(lambda trial: making(trial, model=broken))


def test_a_loss_that_is_not_finite_fails_its_trial() -> None:
    def objective(trial: Trial) -> wf.Job:
        return job_of(trial.number, 4, 1e30)

    study = run(objective, n_trials=2, catch=wf.NonFiniteLossError)
    assert states(study) == [TrialState.FAIL] * 2
    with pytest.raises(wf.NonFiniteLossError, match="became nan in epoch"):
        run(objective, n_trials=1)


# -- memory


class PruneFirst(BasePruner):
    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        return trial.number == 0


@pytest.mark.filterwarnings("ignore:Inconsistent parameter")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_pruned_trial_makes_room(door: str, deterministic: bool) -> None:
    need = JobRunner(job_of(0, 16, 0.1)).run().predicted_peak
    engines, claims = set(), []

    def objective(trial: Trial) -> Any:
        engines.add(current_engine())
        trial.suggest_int("width", 16, 16)
        return DOORS[door](trial)

    def told(study: optuna.Study, trial: FrozenTrial) -> None:
        (engine,) = engines
        claims.append(
            (trial.state, engine.reservations.claimed(), engine.native.held, engine.native.peak_held, engine.reservations.room)
        )

    study = run(
        objective, study=new_study(pruner=PruneFirst()), n_trials=4, max_concurrent=1, callbacks=[told],
        deterministic=deterministic, memory=2 * need,
    )  # fmt: skip
    assert states(study)[0] is TrialState.PRUNED and set(states(study)[1:]) == {TrialState.COMPLETE}
    for _, claimed, held, peak, room in claims:
        assert claimed == held == 0 < peak <= room
    engines.clear()
    # Side by side they wait for each other.
    study = run(
        objective, study=new_study(pruner=PruneFirst()), n_trials=6, max_concurrent=3, deterministic=deterministic,
        memory=2 * need,
    )  # fmt: skip
    assert states(study)[0] is TrialState.PRUNED and set(states(study)[1:]) == {TrialState.COMPLETE}
    (engine,) = engines
    assert 0 < engine.native.peak_held <= engine.reservations.room


def test_a_trial_that_is_too_large_fails_alone() -> None:
    def objective(trial: Trial) -> wf.Job:
        return job_of(trial.number, 2048 if trial.number == 1 else 4, 0.1)

    study = run(objective, n_trials=4, memory=200_000, catch=wf.MemoryLimitError, study=new_study(pruner=NopPruner()))
    assert [state.name for state in states(study)] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]


def test_what_is_said_of_trials_that_fail_as_they_may() -> None:
    """Of our own errors, named in ``catch=``, what to change and no frames; a step of door one has its trial's number."""
    said: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = said.append  # type: ignore[method-assign]
    log = logging.getLogger("optuna.study._optimize")
    before, disabled = optuna.logging.get_verbosity(), log.disabled

    def objective(trial: Trial) -> float:
        if trial.number == 1:
            raise ValueError("the user's own")
        model = perceptron(4)
        wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters()))(images(1, size=4096)[0])
        return 0.0

    log.addHandler(handler)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        run(objective, n_trials=2, max_concurrent=1, memory=100_000, catch=(wf.MemoryLimitError, ValueError))
    finally:
        optuna.logging.set_verbosity(before)
        log.removeHandler(handler)
        log.disabled = disabled
    ours, theirs = [record for record in said if "failed with parameters" in record.msg]
    assert ours.exc_info is None and isinstance(ours.error, wf.MemoryLimitError)  # type: ignore[attr-defined]
    assert "job 'Sequential of trial 0' does not fit" in ours.getMessage()
    assert theirs.exc_info and isinstance(theirs.error, ValueError)  # type: ignore[attr-defined]


@pytest.mark.needs_time("pauses that differ from run to run change no result")
def test_as_many_as_memory_and_lanes_allow() -> None:
    study = new_study()
    summary = wf.optimize(study, hesitant(looping), n_trials=20, lanes=2)
    assert len(study.trials) == 20 and 2 <= summary.most_at_once <= 8


@pytest.mark.slow
@pytest.mark.parametrize(("lanes", "room", "most"), [(2, 3, 3), (4, 3, 3), (2, 20, 4)])
def test_auto_asks_for_no_trial_that_would_wait(lanes: int, room: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """``room`` of the trials train together; lanes are idle, so that there would always be one more."""
    monkeypatch.setattr(AutoConcurrency, "WINDOW_SECONDS", 0.05)
    monkeypatch.setattr(AutoConcurrency, "GAIN", -1.0)
    needs, under_way, seen = [], set(), []

    def objective(trial: Trial) -> float:
        under_way.add(trial.number)
        seen.append((trial.number, len(under_way)))
        model = perceptron(64)
        time.sleep(0.25)  # has begun, and claims nothing yet
        step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), 0.1))
        for batch in BATCHES * 3:
            time.sleep(0.05)
            step(batch)
        engine = current_engine()
        assert engine is not None
        needs.append(engine.reservations.needs(trial.number))
        under_way.discard(trial.number)
        return 0.0

    run(objective, n_trials=1, max_concurrent=1)
    ((held, height),) = needs
    seen.clear()
    study = new_study()
    # Of a small limit a quarter is the reserve.
    memory = int((room * held + height + held / 2) * 4 / 3)
    summary = wf.optimize(study, objective, n_trials=10, lanes=lanes, memory=memory)
    assert states(study) == [TrialState.COMPLETE] * 10
    # Nothing is known of the first ones, of which each lane has one.
    later = max(count for number, count in seen if number >= lanes)
    assert later == most if room == 3 else later >= most
    assert summary.most_at_once == max(lanes, later) if room == 3 else summary.most_at_once >= most


# -- deterministic


@pytest.mark.needs_time("pauses that differ from run to run change no result")
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_equal_seeds_give_equal_studies(door: str, at_once: int) -> None:
    captures.clear()
    first = repeatable(DOORS[door], max_concurrent=at_once, n_trials=12)
    for lanes in (1, 3):
        assert record(repeatable(hesitant(DOORS[door]), max_concurrent=at_once, n_trials=12, lanes=lanes)) == record(first)
    assert {TrialState.COMPLETE, TrialState.PRUNED} == set(states(first))


def test_jobs_without_seeds_repeat_too() -> None:
    def objective(trial: Trial) -> wf.Job:
        return making(trial, seed=None)

    first, second = (repeatable(objective, max_concurrent=3) for _ in range(2))
    assert record(first) == record(second)


@pytest.mark.needs_time("pauses that differ from run to run change no result")
@pytest.mark.parametrize("door", DOORS)
def test_failures_repeat(door: str) -> None:
    def objective(trial: Trial) -> Any:
        if trial.number % 4 == 1:
            trial.suggest_float("other", 0, 1)
            raise ValueError
        if door == "job" and trial.number % 4 == 2:
            return making(trial, evaluate=broken)
        return hesitant(DOORS[door])(trial)

    first, second = (repeatable(objective, max_concurrent=3, catch=(ValueError, LookupError)) for _ in range(2))
    assert record(first) == record(second) and TrialState.FAIL in states(first)


@pytest.mark.needs_time("pauses that differ from run to run change no result")
@pytest.mark.parametrize("where", ["objective", "callback"])
def test_stopping_repeats(where: str) -> None:
    def stopped() -> optuna.Study:
        study = new_study(pruner=NopPruner())

        def objective(trial: Trial) -> float:
            loss = hesitant(looping)(trial)
            if where == "objective" and trial.number == 4:
                study.stop()
            time.sleep(0.005 * (trial.number % 3))
            return loss

        def callback(study: optuna.Study, trial: FrozenTrial) -> None:
            if where == "callback" and trial.number == 4:
                study.stop()

        repeatable(objective, study=study, n_trials=50, max_concurrent=4, callbacks=[callback])
        return study

    first = stopped()
    assert 5 <= len(first.trials) < 12
    for _ in range(2):
        assert record(stopped()) == record(first)


@pytest.mark.needs_time("pauses that differ from run to run change no result")
def test_a_stop_far_ahead_in_virtual_time_stops_no_earlier_trial() -> None:
    """The trial that stops runs ahead of the others on the clock, and behind them in steps."""

    def stopped(pause: float) -> optuna.Study:
        study = new_study(pruner=NopPruner())

        def objective(trial: Trial) -> float:
            model = own_numbers(perceptron(4), torch.Generator().manual_seed(1))
            step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), 0.1))
            for _ in range(20 if trial.number == 0 else 2):
                step(BATCHES[0])
            if trial.number == 0:
                study.stop()
            else:
                time.sleep(pause)
            return 1.0

        repeatable(objective, study=study, n_trials=50)
        return study

    assert len(stopped(0.02).trials) == len(stopped(0.0).trials) == 11


PICTURES = images(2, shape=(3, 12, 12))


def pictured(trial: Trial, pause: Callable[[], None] = lambda: None) -> wf.Job:
    """Its measured heights lie above those predicted from the graph."""

    def model() -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(3, width, 3, 2, 1), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.AdaptiveAvgPool2d(1),
            nn.Flatten(), nn.Linear(width, 4),
        )  # fmt: skip

    width, rate = choose(trial)
    pause()
    return job_of(trial.number, width, rate, model=model, data=PICTURES)


@pytest.mark.needs_time("pauses that differ from run to run change no result")
@pytest.mark.parametrize("door", ["loop", *(pytest.param(door, marks=pytest.mark.slow) for door in ("job", "pictured"))])
@pytest.mark.parametrize("room", [1.3, pytest.param(2.0, marks=pytest.mark.slow)])
def test_waiting_for_memory_repeats(door: str, room: float) -> None:
    objective = {**DOORS, "pictured": pictured}[door]
    largest = (pictured if door == "pictured" else making)(optuna.trial.FixedTrial({"width": 16, "lr": 0.1}))
    result = JobRunner(largest).run()
    # Of a small limit a quarter is the reserve.
    memory = int(room * max(result.predicted_peak, result.measured_peak) * 4 / 3)
    studies = []
    for hesitating, forgetting in [(False, True), (True, True), (True, False)]:
        if forgetting:
            captures.clear()
        chosen = hesitant(objective) if hesitating else objective
        studies.append(record(repeatable(chosen, max_concurrent=4, n_trials=12, memory=memory)))
    assert studies[0] == studies[1] == studies[2]


@pytest.mark.filterwarnings("ignore:Inconsistent parameter")
def test_a_job_may_be_suggested_while_it_is_built() -> None:
    def objective(trial: Trial) -> wf.Job:
        def model() -> nn.Module:
            return perceptron(trial.suggest_int("width", 4, 16, step=4))

        def data() -> list[Any]:
            return BATCHES[: trial.suggest_int("batches", 2, 3)]

        return job_of(trial.number, 4, 0.1, model=model, data=data)

    first, second = (repeatable(objective, max_concurrent=4) for _ in range(2))
    assert record(first) == record(second)
    assert all({"width", "batches"} == trial.params.keys() for trial in first.trials)


def test_reporting_from_an_evaluation_is_refused_where_it_could_wait_for_ever() -> None:
    def objective(trial: Trial) -> wf.Job:
        def evaluate(model: nn.Module) -> float:
            trial.report(1.0, 0)
            return 1.0

        return making(trial, evaluate=evaluate)

    with pytest.raises(wf.StudyError, match=r"trial\.report\(\) inside evaluate of a Job: .* Return the number"):
        repeatable(objective, lanes=1)


# -- mistakes

MISTAKES: dict[str, tuple[Callable[[optuna.Study], Any], str]] = {
    "arguments the wrong way round": (lambda s: wf.optimize(looping, s), "must be an optuna.Study.*got function"),
    "a job for an objective": (lambda s: wf.optimize(s, job_of(0, 4, 0.1)), "function of a trial; got Job; return"),
    "a study for an objective": (lambda s: wf.optimize(s, s), "function of a trial; got Study"),
    "text for a number": (lambda s: wf.optimize(s, looping, n_trials="10"), "n_trials must be a whole number.*'10'"),
    "a negative number": (lambda s: wf.optimize(s, looping, n_trials=-1), "n_trials cannot be negative; got -1"),
    "no trial at a time": (lambda s: run(looping, max_concurrent=0), "'auto' or a positive integer; got 0"),
    "a name to catch": (lambda s: run(looping, catch="ValueError"), r"kinds of exceptions, such as .*; got 'ValueError'"),
    "half a trial at a time": (lambda s: run(looping, max_concurrent=1.5), "positive integer; got 1.5"),
    "one callback": (lambda s: run(looping, callbacks=print), "callbacks takes a list"),
    "deterministic and auto": (lambda s: repeatable(looping, max_concurrent="auto"), "whole number.*max_concurrent=4"),
    "deterministic and timeout": (lambda s: repeatable(looping, timeout=3), "contradict each other; limit.*n_trials="),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_explained(kind: str) -> None:
    call, text = MISTAKES[kind]
    study = new_study()
    with pytest.raises(wf.StudyError, match=text):
        call(study)
    assert study.trials == []


@pytest.mark.parametrize("outer", ["objective", "callback", "plain"])
@pytest.mark.parametrize("plain", [False, True])
def test_a_study_inside_itself_is_refused(outer: str, plain: bool) -> None:
    study = new_study()
    inner: Any = study.optimize if plain else functools.partial(wf.optimize, study)

    def nested(*_: Any) -> Any:
        inner(looping, n_trials=1)

    with pytest.raises(
        RuntimeError, match="isn't allowed" if plain else "inside an objective or a callback of the same"
    ) as caught:
        if outer == "plain":
            study.optimize(nested, n_trials=1)
        elif outer == "callback":
            run(looping, study=study, callbacks=[nested])
        else:
            run(nested, study=study)
    assert isinstance(caught.value, wf.StudyError) or plain
    assert len(study.trials) <= 2 and (outer == "callback" or states(study)[0] is TrialState.FAIL)


def test_nothing_to_catch_is_a_wrong_type_as_for_optuna() -> None:
    for catch in (None, 3, (ValueError, None)):
        with pytest.raises(
            TypeError, match=r"catch must hold kinds of exceptions, such as \(ValueError,\), or be left out"
        ) as caught:
            run(looping, catch=catch)
        assert isinstance(caught.value, wf.StudyError)


@pytest.mark.parametrize("storage", ["sqlite:///:memory:", "sqlite://"])
def test_a_database_that_threads_do_not_share_is_refused(storage: str) -> None:
    study = new_study(storage=storage)
    with pytest.raises(wf.StudyError, match="belongs to one thread.*create_study.* or name a file: storage='sqlite:///"):
        run(looping, study=study)
    assert study.trials == []


def test_a_step_in_a_plain_study_tells_of_this_one_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="waterflow")
    monkeypatch.setattr("waterflow.step._told_of_studies", False)
    run(looping)
    run(lambda trial: new_study().optimize(looping, n_trials=1) or 1.0, n_trials=1)
    wf.Step(model := perceptron(4), loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters()))
    assert "study.optimize" not in caplog.text
    for jobs in (2, 1):
        new_study().optimize(looping, n_trials=2, n_jobs=jobs)
    assert caplog.text.count("wf.optimize(study, objective, ...) in its place runs steps of several trials side by side") == 1


# -- from outside


@pytest.mark.needs_time("pauses that differ from run to run change no result")
def test_silent_but_for_logging(capfd: pytest.CaptureFixture[str]) -> None:
    handlers = logging.getLogger("optuna").handlers
    before = list(handlers)
    handlers[:] = [logging.NullHandler()]  # Optuna's own writes to the terminal, and so does Python without any
    try:
        run(hesitant(making), n_trials=4)
        run(fails_at(1), n_trials=4, catch=ValueError)
    finally:
        handlers[:] = before
    assert capfd.readouterr() == ("", "")


INTERRUPTED = """
import faulthandler, signal, sys, time, threading, optuna, torch, waterflow as wf
from torch.nn import functional as F
from tests.study import test_study as t

torch.set_num_threads(1)
faulthandler.register(signal.SIGUSR1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background

def objective_of(doing):
    said = []

    def say():
        if not said:
            said.append(True)
            print("under way", flush=True)

    def busy():
        say()
        while True:
            pass

    def looping(trial):
        model = t.perceptron(8)
        step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), 0.1))
        while True:
            trial.suggest_float("x", 0, 1)
            step(t.BATCHES[0])
            say()

    def pure(trial):
        trial.suggest_float("x", 0, 1)
        busy()

    def job(trial):
        def evaluate(model):
            say() if doing == "job" else busy()
            return 1.0

        def data():
            yield t.BATCHES[0]
            if doing == "data":
                busy()

        return t.making(trial, epochs=10**6, evaluate=evaluate, data=data)

    return {"loop": looping, "pure": pure}.get(doing, job)

for line in sys.stdin:
    doing, order, url = line.split()
    study = optuna.create_study(storage=url, study_name="one", pruner=optuna.pruners.NopPruner())
    try:
        wf.optimize(study, objective_of(doing), max_concurrent=3, lanes=2, deterministic=order == "ordered")
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    time.sleep(0.3)
    if threading.active_count() > 1:
        faulthandler.dump_traceback()
    print(threading.active_count(), flush=True)
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the child writes beside its answers."""
    return tmp_path_factory.mktemp("child") / "stderr"


@pytest.fixture(scope="module")
def child(said: Path) -> Iterator[subprocess.Popen[str]]:
    with said.open("w") as stderr, subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
    ) as process:  # fmt: skip
        yield process
        process.kill()
    assert "Traceback" not in said.read_text()


def test_a_trial_that_has_not_begun_when_its_study_ends_never_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread comes late, on a busy machine, when nobody waits for it any longer."""
    comes, begun, threads = threading.Event(), [], []
    own_numbers_of = StudyRunner._own_numbers

    @contextlib.contextmanager
    def late(coordinator: StudyRunner, worker: Any) -> Iterator[None]:
        if worker.trial.number == 1:
            threads.append(threading.current_thread())
            assert comes.wait(20)
        with own_numbers_of(coordinator, worker):
            yield

    def objective(trial: Trial) -> float:
        begun.append(trial.number)
        while not threads:
            pass
        return 1.0

    def fail(study: optuna.Study, trial: FrozenTrial) -> None:
        raise LookupError("on purpose")

    monkeypatch.setattr(StudyRunner, "_own_numbers", late)
    for name in ("STOP_SECONDS", "BREAK_OFF_SECONDS"):
        monkeypatch.setattr(f"waterflow.study.coordinator.{name}", 0.05)
    with pytest.raises(LookupError, match="on purpose"):
        wf.optimize(new_study(), objective, 2, max_concurrent=2, lanes=2, callbacks=[fail])
    comes.set()
    threads[0].join(20)
    assert begun == [0] and not threads[0].is_alive()


@pytest.fixture(scope="module")
def empty_database() -> Iterator[Path]:
    """In memory where that is a folder: how long a disk takes to write is not what is timed."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        path = Path(folder) / "empty.db"
        optuna.storages.RDBStorage(f"sqlite:///{path}")
        yield path


@pytest.mark.needs_time("the README promises that Ctrl-C ends a study within two seconds")
@pytest.mark.parametrize("order", ["any", pytest.param("ordered", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "doing", ["loop", *(pytest.param(each, marks=pytest.mark.slow) for each in ("pure", "job", "evaluate", "data"))]
)
def test_interrupted_within_two_seconds(
    doing: str, order: str, child: subprocess.Popen[str], said: Path, empty_database: Path
) -> None:
    url = f"sqlite:///{shutil.copy(empty_database, empty_database.with_name(f'{doing}-{order}.db'))}"
    print(doing, order, url, file=child.stdin, flush=True)
    assert child.stdout.readline() == "under way\n"
    late = threading.Timer(2, child.send_signal, [signal.SIGUSR1])  # where its threads stand
    late.start()
    started = time.monotonic()
    child.send_signal(signal.SIGINT)
    assert child.stdout.readline() == "interrupted\n"
    took = time.monotonic() - started
    late.cancel()
    left = child.stdout.readline()
    assert took < 2, said.read_text()
    assert left == "1\n", said.read_text()
    study = optuna.load_study(study_name="one", storage=url)
    assert len(study.trials) == 3 and set(states(study)) == {TrialState.FAIL}


def test_jobs_of_both_priorities_in_a_repeatable_study_wait_for_room() -> None:
    data = [(torch.randn(16, 64), torch.randint(4, (16,))) for _ in range(24)]

    def objective(trial: optuna.Trial) -> wf.Job:
        opportunistic = trial.number == 0
        width = 4000 if opportunistic else 6000
        return wf.Job(
            name=f"trial-{trial.number}",
            model=lambda: nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 4)),
            loss=F.cross_entropy,
            optimizer=lambda p: torch.optim.SGD(p, lr=1e-2),
            data=data,
            epochs=20 if opportunistic else 1,
            priority="opportunistic" if opportunistic else "guaranteed",
        )

    done: list[optuna.Study] = []
    settings = {"n_trials": 2, "memory": "5.4MiB"}  # not for both
    thread = threading.Thread(target=lambda: done.append(repeatable(objective, **settings)), daemon=True)
    thread.start()
    thread.join(60)
    assert done and states(done[0]) == [TrialState.COMPLETE] * 2


@pytest.mark.slow
def test_lanes_go_to_the_eldest_trials_while_they_last(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(_C.Engine, "set_fifo_lanes", lambda engine, value: told.append(value))
    run(looping, n_trials=2)
    assert told == [True, False]


def test_a_pruned_trial_holds_nothing() -> None:
    """Its loaders' worker processes end with it, and not at the study's end."""

    class Loader:
        """Of which it is known when it has gone."""

    alive: list[weakref.ref[Loader]] = []

    def objective(trial: optuna.Trial) -> float:
        assert not any(one() for one in alive)
        loader = Loader()
        alive.append(weakref.ref(loader))
        raise optuna.TrialPruned(str(loader))

    gc.disable()
    try:
        wf.optimize(optuna.create_study(), objective, n_trials=3, max_concurrent=1)
    finally:
        gc.enable()
    assert len(alive) == 3 and not any(one() for one in alive)
