"""optimize(order=, deadline=): which trials run, and what becomes of those that do not."""

from __future__ import annotations

import contextlib
import pickle
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from hypothesis import given, strategies as st
from optuna.trial import TrialState
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.leftovers import nothing_left  # noqa: F401
from tests.study.test_paused import X, Y, assert_equal, job, model, run
from waterflow.study import coordinator
from waterflow.study.history import History
from waterflow.study.order import Fifo, Policy, Promising, TrialOrder, TrialProgress
from waterflow.study.run import LastingRun

optuna.logging.set_verbosity(optuna.logging.ERROR)


def trials_of(*entries: tuple[str, list[float]]) -> list[TrialProgress]:
    return [TrialProgress(number, reports, state) for number, (state, reports) in enumerate(entries)]  # type: ignore[arg-type]


def chosen(policy: Policy, trials: Sequence[TrialProgress], lanes: int) -> list[int]:
    return [trial.number for trial in policy.choose(trials, lanes)]


# -- policies


def test_fifo_takes_what_waits_before_what_is_new() -> None:
    trials = trials_of(("new", []), ("ready", [0.1]), ("running", [0.5]), ("ready", [0.9]))
    assert chosen(Fifo(), trials, 3) == [1, 3, 0]


def test_promising_prefers_high_rungs_good_values_late_trials() -> None:
    low = [("ready", [value]) for value in (0.1, 0.2, 0.3, 0.3, 0.2, 0.1)]  # two of six go on: the best, later ones first
    assert chosen(Promising(), trials_of(*low, ("new", [])), 9) == [3, 2, 6, 4, 1, 5, 0]
    high = [("ended", [0.1, 0.1, 0.1]), ("ready", [0.2, 0.2, 0.2]), ("ended", [0.1, 0.1, 0.0])]
    assert chosen(Promising(), trials_of(*low, *high), 1) == [7]
    between = ("ready", [0.0, 0.0])  # on its way to the next rung, whatever it promises
    assert chosen(Promising(), trials_of(*low, *high, between), 2) == [9, 7]


def test_promising_opens_new_trials_until_a_third_can_be_told() -> None:
    assert chosen(Promising(), trials_of(("ready", [0.9]), ("running", []), ("new", [])), 1) == [2]
    assert chosen(Promising(), trials_of(("ready", [0.9]), ("running", [])), 1) == [0]
    assert chosen(Promising(reduction=2), trials_of(("ready", [0.9]), ("ended", [0.1]), ("new", [])), 1) == [0]
    with pytest.raises(wf.StudyError, match=r"reduction must be a whole number, 2 or more; got 1"):
        Promising(reduction=1)


def test_a_report_that_is_no_number_is_the_worst() -> None:
    trials = trials_of(("ready", [float("nan")]), ("ready", [-5.0]), ("ended", [-9.0]), ("new", []))
    assert chosen(Promising(), trials, 3) == [1, 3, 0]


states = st.sampled_from(["ready", "running", "ended"])
reports = st.lists(st.integers(0, 5).map(float), max_size=10)


@given(st.lists(st.tuples(states, reports), max_size=20), st.integers(0, 2), st.integers(1, 6))
def test_promising_against_the_rule(entries: list[tuple[str, list[float]]], new: int, lanes: int) -> None:
    """Each ready trial has a place: on its way, promoted, new, waiting; within one the rung, the value and the number count."""
    trials = trials_of(*entries, *[("new", [])] * new)

    def place(trial: TrialProgress) -> tuple[Any, ...]:
        count = len(trial.reports)
        rung = max(rung for rung in (1, 3, 9, 27) if rung <= max(1, count))
        if trial.state == "new":
            return (2, trial.number)
        if count != rung:
            return (0, trial.number)
        there = [one for one in trials if len(one.reports) >= rung]
        better = sum(one.reports[rung - 1] > trial.reports[rung - 1] for one in there)
        return (1 if better < len(there) // 3 else 3, -rung, -trial.reports[rung - 1], -trial.number)

    expected = sorted((trial for trial in trials if trial.state in ("new", "ready")), key=place)
    assert chosen(Promising(), trials, lanes) == [trial.number for trial in expected][:lanes]


# -- the table


class Chooses(Policy):
    """Chooses what a function says."""

    def __init__(self, choose: Callable[[Sequence[TrialProgress], int], list[TrialProgress]]) -> None:
        self._choose = choose

    def choose(self, trials: Sequence[TrialProgress], lanes: int) -> list[TrialProgress]:
        return self._choose(trials, lanes)


def test_a_lane_that_is_free_for_a_better_trial_is_given_once() -> None:
    order = TrialOrder(Promising(), maximize=True)
    for number in range(9):
        order.add(number, {0: float(number)})
    order.runs(0), order.runs(1)
    assert not order.goes_on(0, slots=2, new=0) and not order.goes_on(1, slots=2, new=0)  # for 8 and 7
    found = []
    for _ in range(2):
        trial = order.next(slots=2, new=0, running=True)
        assert trial is not None
        found.append(trial.number)
        order.runs(trial.number)
    assert found == [8, 7]
    order.stands(0), order.stands(1)
    order.runs(0)
    assert not order.goes_on(0, slots=2, new=0)


def test_less_is_better_where_a_study_minimizes() -> None:
    order = TrialOrder(Promising(), maximize=False)
    for number in range(3):
        order.add(number, {0: float(number)})
    trial = order.next(1, 0, running=False)
    assert trial is not None and trial.number == 0 and trial.reports == [-0.0]


def test_a_policy_that_is_wrong_is_told() -> None:
    order = TrialOrder(Chooses(lambda trials, lanes: []), maximize=True)
    order.add(0, {})
    assert order.next(1, 1, running=True) is None
    with pytest.raises(wf.StudyError, match=r"Chooses.choose\(\) chose none of 1 new trials and of trials \[0\], which wait"):
        order.next(1, 1, running=False)
    with pytest.raises(wf.StudyError, match=r"chose none of 2 new trials and of trials \[\]"):
        TrialOrder(Chooses(lambda trials, lanes: []), maximize=True).next(1, 2, running=False)
    order = TrialOrder(Chooses(lambda trials, lanes: [*trials]), maximize=True)
    order.add(3, {}, ended=True)
    with pytest.raises(wf.StudyError, match=r"may return trials that are new or ready; trials 3 are ended"):
        order.next(1, 0, running=True)


# -- studies of jobs


@pytest.fixture
def at_any_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let small jobs be paused, too."""
    monkeypatch.setattr(coordinator, "PAUSING", float("inf"))


@pytest.mark.usefixtures("at_any_cost")
def test_jobs_keep_their_bits() -> None:
    """Dropout, BatchNorm, accumulation, a scheduler, a shuffled loader: as if no trial had been paused."""
    longer = {"epochs": 5}
    once = run(lambda trial: job(trial, **longer), order="promising", max_concurrent=1)
    assert once[1].pauses >= 2
    assert_equal(once, run(lambda trial: job(trial, **longer)))
    history = once[1].timeline()
    assert (
        len(history.paused) >= 2 and history.steps == dict.fromkeys(range(4), 30) and {*history.states.values()} == {"complete"}
    )
    assert f"{once[1].pauses} pauses" in repr(once[1]) and f"trial {history.winner} led since second" in str(once[1])


def scripted(curves: dict[int, list[float]], ran: list[int]) -> Callable[[optuna.Trial], wf.Job]:
    """Jobs whose evaluations return these values; their numbers are noted as they report."""

    def objective(trial: optuna.Trial) -> wf.Job:
        trial.suggest_float("lr", 0, 1)
        curve, number = curves[trial.number], trial.number

        def evaluate(model: nn.Module) -> float:
            ran.append(number)
            return curve[ran.count(number) - 1]

        data = [(X[:8], Y[:8])]
        return wf.Job(
            "job", lambda: nn.Sequential(nn.Linear(6, 2)), data, lambda p: torch.optim.SGD(p, 0.1), loss=F.cross_entropy,
            evaluate=evaluate, epochs=len(curve),
        )  # fmt: skip

    return objective


@pytest.mark.usefixtures("at_any_cost")
@pytest.mark.parametrize("deterministic", [False, True])
def test_time_goes_to_what_promises_most(deterministic: bool) -> None:
    ran: list[int] = []
    curves = {0: [0.1] * 4, 1: [0.5] * 4, 2: [0.3] * 4, 3: [0.9] * 4}
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.NopPruner())
    wf.optimize(study, scripted(curves, ran), 4, order="promising", max_concurrent=1, lanes=1, deterministic=deterministic)
    # Of three the best goes on to its third report, and waits there for two others; the fourth is the best of four then.
    assert ran == [0, 1, 2, 1, 1, 3, 3, 3, 3, 1, 2, 2, 2, 0, 0, 0]
    assert [trial.value for trial in study.trials] == [0.1, 0.5, 0.3, 0.9]


@pytest.mark.usefixtures("at_any_cost")
def test_a_deterministic_study_is_the_same_twice() -> None:
    def once() -> Any:
        study = optuna.create_study(sampler=optuna.samplers.TPESampler(seed=1, n_startup_trials=3))
        torch.manual_seed(0)
        done = wf.optimize(
            study, lambda trial: job(trial, epochs=4), 12, order="promising", max_concurrent=2, lanes=2, deterministic=True
        )
        assert done.pauses
        return [(t.number, t.params, t.state, t.intermediate_values) for t in study.trials]

    assert once() == once()


def test_a_pause_that_costs_too_much_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coordinator, "PAUSING", 0.0)
    # The first pause, whose cost nobody knows, is made.
    assert run(order="promising", max_concurrent=1)[1].pauses <= 1


class NoState:
    """A scheduler that cannot be copied."""

    def step(self) -> None:
        pass


@pytest.mark.usefixtures("at_any_cost")
def test_a_job_that_cannot_be_paused_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="waterflow"):
        done = run(lambda trial: job(trial, scheduler=lambda optimizer: NoState()), order="promising", max_concurrent=1)[1]
    assert done.pauses == 0 and done.states == {"complete": 4}
    (told,) = [line for line in caplog.messages if "cannot be paused" in line]
    assert "NoState, has no state_dict" in told


@pytest.mark.usefixtures("at_any_cost")
def test_a_policy_of_the_users() -> None:
    numbers = random.Random(0)

    def choose(trials: Sequence[TrialProgress], lanes: int) -> list[TrialProgress]:
        found = [trial for trial in trials if trial.state in ("new", "ready")]
        numbers.shuffle(found)
        return found[:lanes]

    mine = run(order=Chooses(choose), max_concurrent=1)
    assert mine[1].pauses
    assert_equal(mine, run())


def test_pruners_still_end_trials() -> None:
    study = optuna.create_study(direction="maximize", pruner=optuna.pruners.ThresholdPruner(lower=0.4))
    curves = {0: [0.1] * 3, 1: [0.5] * 3, 2: [0.3] * 3}
    done = wf.optimize(study, scripted(curves, []), 3, order="promising", max_concurrent=1, lanes=1)
    assert done.states == {"pruned": 2, "complete": 1} and done.timeline().states[0] == "pruned"


# -- loops of their own


def loop(trial: optuna.Trial) -> float:
    lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    torch.manual_seed(3)
    net = model()
    step = wf.Step(net, loss=F.cross_entropy, optimizer=torch.optim.AdamW(net.parameters(), lr=lr))
    value = 0.0
    for epoch in range(4):
        for rows in torch.randperm(48).split(8):
            value = float(step((X[rows], Y[rows])))
        trial.report(value, epoch)
    return value


@pytest.mark.parametrize("deterministic", [False, True])
def test_loops_wait_in_their_step(deterministic: bool) -> None:
    mine = run(loop, order="promising", max_concurrent=2, deterministic=deterministic)
    assert mine[1].pauses and mine[0] == run(loop)[0]
    if deterministic:
        assert mine[0] == run(loop, order="promising", deterministic=True)[0]


def test_loops_that_wait_give_way_to_hunger(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where those that run wait for the memory of those that stand aside, one of these goes on."""

    def large(trial: optuna.Trial) -> float:
        trial.suggest_float("lr", 1e-3, 1e-1, log=True)
        net = nn.Sequential(nn.Linear(6, 2), nn.Linear(2, 2), nn.Flatten(), nn.Linear(2, 1 << 20), nn.Linear(1 << 20, 2))
        step = wf.Step(net, loss=F.cross_entropy, optimizer=torch.optim.SGD(net.parameters(), lr=0.01))
        for epoch in range(3):
            trial.report(float(step((X[:2], Y[:2]))), epoch)
        return 0.0

    monkeypatch.setattr(coordinator.StudyRunner, "_one_more_fits", lambda self: True)  # as if nobody knew what a trial needs
    done = run(large, order="promising", memory="90MiB", keep_weights="none")[1]
    assert done.states == {"complete": 4} and done.pauses


def test_a_study_that_is_interrupted_leaves_no_loop_waiting() -> None:
    def interrupt(study: optuna.Study, trial: Any) -> None:
        raise KeyboardInterrupt

    study = optuna.create_study()
    with pytest.raises(KeyboardInterrupt):
        wf.optimize(study, loop, 8, order="promising", max_concurrent=2, lanes=2, callbacks=[interrupt])
    assert all(trial.state.is_finished() for trial in study.trials)


def test_loops_that_wait_are_left_to_the_next_call(tmp_path: Path) -> None:
    def stop(study: optuna.Study, trial: Any) -> None:
        study.stop()

    for callbacks in ([stop], []):
        study = optuna.create_study(
            study_name="one", storage=f"sqlite:///{tmp_path / 's'}", load_if_exists=True, pruner=optuna.pruners.NopPruner()
        )
        given: dict[str, Any] = {"max_concurrent": 2, "lanes": 2, "checkpoint": tmp_path / "c", "callbacks": callbacks}
        wf.optimize(study, loop, 6, order="promising", **given)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 6


def test_an_error_ends_the_study_and_its_waiting_trials() -> None:
    def objective(trial: optuna.Trial) -> float:
        if trial.number == 3:
            raise ValueError("mine")
        return loop(trial)

    study = optuna.create_study()
    with pytest.raises(ValueError, match="mine"):
        wf.optimize(study, objective, 8, order="promising", max_concurrent=2, lanes=2)
    assert all(trial.state.is_finished() for trial in study.trials)


# -- the end


def endless(trial: optuna.Trial) -> wf.Job:
    return job(trial, epochs=1_000_000, evaluate=lambda model: F.cross_entropy(model(X), Y).item())


@pytest.mark.parametrize("order", ["fifo", "promising"])
@pytest.mark.usefixtures("at_any_cost")
@pytest.mark.needs_time("a deadline has to pass")
def test_a_deadline(order: str) -> None:
    """Trials under way, and paused ones, count with their last report; the best one's weights are kept."""
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0), pruner=optuna.pruners.NopPruner())
    done = wf.optimize(study, endless, deadline=4.0, order=order, max_concurrent=2, lanes=2)
    reported = [trial for trial in study.trials if trial.intermediate_values]
    assert reported and all(trial.state == TrialState.COMPLETE for trial in reported)
    for trial in reported:
        assert trial.value == trial.intermediate_values[max(trial.intermediate_values)]
        assert trial.user_attrs == {"waterflow:unfinished": True}
    assert {done.timeline().states[trial.number] for trial in reported} == {"unfinished"}
    best = [result for result in done.results if result.state_dict is not None]
    assert [result.value for result in best] == [study.best_value]
    if order == "promising":
        assert done.pauses


@pytest.mark.needs_time("a deadline has to pass")
def test_a_deadline_ends_loops() -> None:
    def objective(trial: optuna.Trial) -> float:
        net = model()
        step = wf.Step(
            net, loss=F.cross_entropy, optimizer=torch.optim.SGD(net.parameters(), lr=trial.suggest_float("lr", 0, 0.1))
        )
        for epoch in range(1_000_000):
            trial.report(float(step((X, Y))), epoch)
        return 0.0

    study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    done = wf.optimize(study, objective, deadline="3s", order="promising", max_concurrent=2, lanes=2)
    assert done.states["complete"] == len([trial for trial in study.trials if trial.intermediate_values])
    assert all(trial.state.is_finished() for trial in study.trials)


@pytest.mark.needs_time("code that hangs is interrupted behind the deadline")
def test_a_deadline_interrupts_code_that_hangs() -> None:
    def objective(trial: optuna.Trial) -> float:
        while True:
            time.sleep(0.001)

    study = optuna.create_study()
    done = wf.optimize(study, objective, deadline=0.5, max_concurrent=1)
    assert [trial.state.name for trial in study.trials] == ["FAIL"] and done.states == {"fail": 1}


def test_no_trial_begins_that_would_not_report_in_time() -> None:
    made = coordinator.StudyRunner.__new__(coordinator.StudyRunner)
    made._began, made._deadline, made._to_first = time.monotonic(), 1_000.0, []
    assert not made._too_late()
    made._to_first = [1_000.0, 1_200.0]
    assert made._too_late()
    made._deadline = None
    assert not made._too_late()


@pytest.mark.usefixtures("at_any_cost")
def test_paused_trials_count_with_their_last_report_behind_a_stop() -> None:
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(0), pruner=optuna.pruners.NopPruner())

    def stop(study: optuna.Study, trial: Any) -> None:
        study.stop()

    done = wf.optimize(
        study, lambda trial: job(trial, epochs=4), 12, order="promising", max_concurrent=2, lanes=2, callbacks=[stop]
    )
    assert "unfinished" in done.timeline().states.values() and done.states == {"complete": len(study.trials)}
    assert len(study.trials) < 12 + 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # an order may strike in a finalizer
@pytest.mark.needs_time("a deadline has to pass")
def test_loops_that_catch_everything_are_told_once() -> None:
    """One that stands aside at the end, and returns instead of raising, is told; so is one that was just to stand aside."""

    def catches(trial: optuna.Trial) -> float:
        try:
            return loop(trial)
        except Exception:
            return 7.0

    def stop(study: optuna.Study, trial: Any) -> None:
        study.stop()

    for settings in ({"callbacks": [stop], "n_trials": 8}, {"deadline": 3.0}):
        study = optuna.create_study(pruner=optuna.pruners.NopPruner())
        done = wf.optimize(study, catches, order="promising", max_concurrent=2, lanes=2, **settings)  # type: ignore[arg-type]
        assert sum(done.states.values()) == len(study.trials) and all(trial.state.is_finished() for trial in study.trials)


@pytest.mark.usefixtures("at_any_cost")
@pytest.mark.parametrize("objective", [loop, lambda trial: job(trial, epochs=4)], ids=["loops", "jobs"])
@pytest.mark.parametrize("how", ["stop", "error"])
def test_a_deterministic_study_that_ends_early_is_the_same_twice(objective: Any, how: str) -> None:
    def once() -> Any:
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(1))
        torch.manual_seed(0)

        def stop(study: optuna.Study, trial: Any) -> None:
            study.stop()

        def act(trial: optuna.Trial) -> Any:
            if how == "error" and trial.number == 5:
                raise ValueError("mine")
            return objective(trial)

        settings: dict[str, Any] = {"order": "promising", "max_concurrent": 3, "lanes": 2, "deterministic": True}
        settings |= {"callbacks": [stop]} if how == "stop" else {}
        with pytest.raises(ValueError, match="mine") if how == "error" else contextlib.nullcontext():
            wf.optimize(study, act, 12, **settings)
        assert all(trial.state.is_finished() for trial in study.trials)
        return [(t.number, t.params, t.state, t.intermediate_values, t.values) for t in study.trials]

    assert once() == once()


def test_a_trial_can_be_pickled() -> None:
    def objective(trial: optuna.Trial) -> float:
        copied.append(pickle.loads(pickle.dumps(trial)))
        return float(trial.suggest_float("lr", 0, 1))

    copied: list[Any] = []
    study = optuna.create_study()
    wf.optimize(study, objective, 1)
    assert type(copied[0]) is optuna.trial.Trial and copied[0].number == 0


def test_a_trial_that_gives_up_before_it_trains_needs_no_report() -> None:
    def objective(trial: optuna.Trial) -> float:
        return 9.0 if trial.number == 0 else loop(trial)

    study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    assert wf.optimize(study, objective, 3, order="promising", max_concurrent=1).states == {"complete": 3}


# -- survival


@pytest.mark.usefixtures("at_any_cost")
@pytest.mark.parametrize("how", ["stop", "interrupt"])
def test_goes_on_in_the_next_call(tmp_path: Path, how: str) -> None:
    storage = f"sqlite:///{tmp_path / 'study.sqlite3'}"

    def call(callbacks: Any = ()) -> optuna.Study:
        study = optuna.create_study(
            study_name="one", storage=storage, load_if_exists=True, pruner=optuna.pruners.NopPruner(),
            sampler=optuna.samplers.RandomSampler(0),
        )  # fmt: skip
        if not study.trials:
            for number in range(6):
                study.enqueue_trial({"lr": 0.01 * (number + 1)})
        torch.manual_seed(0)
        done = wf.optimize(
            study, lambda trial: job(trial, epochs=4), 6, order="promising", checkpoint=tmp_path / "c", callbacks=callbacks,
            max_concurrent=1, lanes=1,
        )  # fmt: skip
        steps.append(sum(done.timeline().steps.values()))
        return study

    steps: list[int] = []

    def end(study: optuna.Study, trial: Any) -> None:
        if how == "interrupt":
            raise KeyboardInterrupt
        study.stop()

    if how == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            call([end])
    else:
        call([end])
    left = [trial.state.name for trial in optuna.load_study(study_name="one", storage=storage).trials]
    assert left.count("COMPLETE") == 1 and left.count("WAITING") == 5
    study = call()
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 6
    if how == "stop":  # no step of a paused trial is done twice
        assert sum(steps) == 6 * 4 * 6
    assert [len(trial.intermediate_values) for trial in study.trials] == [4] * 6


def test_what_stood_aside_is_not_at_fault(tmp_path: Path) -> None:
    """Deaths of the process count for the trials that ran."""
    for _ in range(4):
        study = optuna.create_study(study_name="one", storage=f"sqlite:///{tmp_path / 's'}", load_if_exists=True)
        with LastingRun(study, wf.Checkpoints(tmp_path / "c")).opened() as lasting:
            alone = {*lasting.alone}
            ran, stood = lasting.ask(), lasting.ask()
            lasting.under_way([ran.number])
    assert alone == {ran.number} and [ran.number, stood.number] == [0, 1]


# -- what is refused


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"order": "best"}, r"order must be 'fifo' or 'promising', or a waterflow.study.order.Policy; got 'best'"),
        ({"order": Promising}, r"order must be 'fifo' or 'promising'"),
        ({"order": "promising", "n_trials": None}, r"order= needs an end.*deadline='2h'"),
        ({"deadline": "soon"}, r"deadline must be a positive number of seconds, or text like .* got 'soon'"),
        ({"deadline": 0}, r"deadline must be a positive number"),
        ({"deadline": 5, "timeout": 5}, r"deadline= and timeout= are two ways to end a study"),
        ({"deadline": 5, "deterministic": True, "max_concurrent": 2}, r"deterministic=True and deadline= contradict"),
    ],
)
def test_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(wf.StudyError, match=said):
        wf.optimize(optuna.create_study(), job, **({"n_trials": 1} | settings))


def test_several_objectives_are_refused() -> None:
    study = optuna.create_study(directions=["minimize", "maximize"])
    with pytest.raises(wf.StudyError, match=r"Optuna allows none in a study with 2 objectives; leave order= out"):
        wf.optimize(study, job, 1, order="promising")


def test_an_error_of_the_first_trial_is_its_own() -> None:
    def fails(model: nn.Module) -> float:
        raise ValueError("mine")

    study = optuna.create_study()
    with pytest.raises(ValueError, match="mine"):
        wf.optimize(study, lambda trial: job(trial, evaluate=fails), 3, order="promising", max_concurrent=1)
    study = optuna.create_study()
    done = wf.optimize(study, lambda trial: job(trial, evaluate=fails), 3, order="promising", max_concurrent=1, catch=ValueError)
    assert done.states == {"fail": 3}


def test_trials_without_reports_are_refused() -> None:
    def objective(trial: optuna.Trial) -> float:
        net = model()
        step = wf.Step(net, loss=F.cross_entropy, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
        return float(step((X, Y)))

    study = optuna.create_study()
    with pytest.raises(wf.StudyError, match=r"trial 0 has ended without a report, and order= ranks trials by their reports"):
        wf.optimize(study, objective, 5, order="promising", max_concurrent=1)
    assert study.trials[0].value is not None


# -- what happened when


def test_who_led_since_when(tmp_path: Path) -> None:
    history = History(lambda: 10)
    for trial, value in [(0, 0.5), (1, 0.6), (0, 0.7), (2, 0.9), (1, 0.8)]:
        history.runs(trial)
        history.report(trial, value)
        history.stands(trial, "pruned" if trial == 2 else "waiting")
    for trial in (0, 1):
        history.stands(trial, "complete")
    seen = history.timeline(True, {0: 30, 1: 60, 2: 10}, winner=1)
    assert [(lead.trial, lead.value) for lead in seen.leads()] == [(0, 0.5), (1, 0.6), (0, 0.7), (1, 0.8)]
    assert seen.paused == {0, 1}
    assert "after 100% of all steps; steps: 60% on it, 90% on the ten best, 90% on trials that were paused" in str(seen)
    seen.save_png(tmp_path / "study.png")
    assert (tmp_path / "study.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="no trial ran"):
        History(lambda: 0).timeline(True, {}, None).save_png(tmp_path / "none.png")
