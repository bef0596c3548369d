"""Job(timeout=) and optimize(trial_timeout=): what runs too long ends with an error that says where; others never notice."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import waterflow as wf
from tests.support import Net, images, same_bits
from waterflow.executor.engine import Engine
from waterflow.training.runner import JobRunner

optuna.logging.set_verbosity(optuna.logging.ERROR)
BATCHES = images(3)
LIMIT = 1.0
over = threading.Event()  # what hangs comes back at the end of its test, and finds everything gone


@pytest.fixture(autouse=True, scope="module")
def warm() -> None:
    """What is imported at the first step of a process takes seconds."""
    wf.train([job(), job("opaque", **in_step(lambda: None))], lanes=1, memory="1GiB")


@pytest.fixture(autouse=True)
def comes_back() -> Iterator[None]:
    over.clear()
    yield
    over.set()


def sleeping() -> None:
    while not over.is_set():
        time.sleep(0.01)


def waiting() -> None:
    """Outside of the interpreter: nothing reaches it."""
    over.wait()


def stubborn() -> None:
    while not over.is_set():
        try:
            time.sleep(0.01)
        except Exception:
            continue


WAYS: dict[str, Callable[[], None]] = {"sleeping": sleeping, "waiting": waiting, "stubborn": stubborn}


def job(name: str = "job", **changes: Any) -> wf.Job:
    settings: dict[str, Any] = {
        "model": lambda: Net(dropout=0.3), "data": BATCHES, "loss": F.cross_entropy, "epochs": 3, "seed": 1,
        "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "evaluate": lambda model: float(model(BATCHES[0][0]).sum()),
    }  # fmt: skip
    return wf.Job(name, **(settings | changes))


class Loader(DataLoader[Any]):
    """One with workers, of whose batches nothing is drawn in this process."""

    def __init__(self, hang: Callable[[], None]) -> None:
        super().__init__(BATCHES, num_workers=1)
        object.__setattr__(self, "hang", hang)

    def __iter__(self) -> Any:
        yield from BATCHES[:2]
        self.hang()
        yield BATCHES[2]


def in_data(hang: Callable[[], None]) -> dict[str, Any]:
    return {"data": Loader(hang)}


def in_generator(hang: Callable[[], None]) -> dict[str, Any]:
    return {"data": lambda: iter(Loader(hang))}


def in_evaluate(hang: Callable[[], None]) -> dict[str, Any]:
    return {"evaluate": lambda model: hang() or 0.0}


def in_step(hang: Callable[[], None]) -> dict[str, Any]:
    """One that runs eagerly, on a lane."""
    called = [0]

    def step(model: nn.Module, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        if loss.item() > -1:  # not captured
            called[0] += 1
        if called[0] == 3:
            hang()
        return loss

    return {"step": step, "loss": None}


PLACES = {"data": in_data, "evaluate": in_evaluate, "step": in_step}
SAID = {"data": "reading its data", "evaluate": "evaluating", "step": "in a step"}
HANGS = [("data", "waiting"), ("evaluate", "waiting"), *(
    pytest.param(place, way, marks=pytest.mark.slow)
    for place in PLACES for way in ("waiting", "stubborn") if place == "step" or way == "stubborn"
)]  # fmt: skip


def assert_unharmed(result: wf.JobResult, expected: wf.JobResult) -> None:
    assert result.status == "completed" and result.losses == expected.losses and result.metrics == expected.metrics
    assert all(same_bits(value, result.state_dict[name]) for name, value in expected.state_dict.items())


@pytest.mark.needs_time("the README promises that what hangs ends with an error which names the line, and others go on")
@pytest.mark.parametrize("place, lanes", [("data", 1), *(pytest.param(place, 2, marks=pytest.mark.slow) for place in PLACES)])
def test_what_hangs_ends_and_others_go_on(place: str, lanes: int) -> None:
    hung = job("hung", timeout=LIMIT, **PLACES[place](sleeping))
    others = [job(f"near{n}", seed=n, epochs=8, model=Net(dropout=0.3)) for n in range(3)]
    expected = [JobRunner(replace(other, model=copy.deepcopy(other.model))).run() for other in others]
    began = time.monotonic()
    results = wf.train([hung, *others], lanes=lanes, memory="1GiB", on_error="continue", max_concurrent=3)
    assert time.monotonic() - began < LIMIT + 12
    result = results[0]
    assert result.status == "failed" and isinstance(result.error, wf.JobTimeoutError)
    assert isinstance(result.error, TimeoutError) and result.traceback
    text = str(result.error)
    assert "job 'hung' ran longer than its limit Job.timeout=1 s" in text and SAID[place] in text
    assert f"{__file__}:" in text and "in sleeping" in text and "in epoch 1 of 3" in text and "raise the limit" in text
    assert len(result.losses) >= (3 if place == "evaluate" else 1) and result.seconds < LIMIT + 6
    for alone, mine in zip(expected, results[1:]):
        assert_unharmed(mine, alone)


class Told(logging.Handler):
    """What is told of code that hangs, and whether anything was."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self.any = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if "waterflow waits for it" in (text := record.getMessage()):
            self.text = text
            self.any.set()


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Iterator[Told]:
    caplog.set_level(logging.WARNING, logger="waterflow")
    handler, logger = Told(), logging.getLogger("waterflow")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


class Behind(threading.Thread):
    """A call on a thread of its own, as something hangs in it; it ends once that comes back."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.call, self.returned = call, None
        self.start()

    def run(self) -> None:
        self.returned = self.call()

    def after(self, *held: threading.Event) -> Any:
        """What the call returns, which it does not before all of these are, and what hangs has come back."""
        assert all(event.wait(60) for event in held) and self.is_alive()
        over.set()
        self.join(30)
        assert not self.is_alive()
        return self.returned


class Ended(wf.Callback):
    """Set when so many jobs have ended well."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.all = threading.Event()

    def on_job_end(self, job: wf.Job, result: wf.JobResult) -> None:
        self.count -= result.status == "completed"
        if self.count == 0:
            self.all.set()


@pytest.mark.needs_time("the README promises that others finish beside what hangs, and that its line is told")
@pytest.mark.parametrize("place, way", HANGS)
def test_others_finish_beside_what_hangs_and_its_line_is_told(place: str, way: str, told: Told) -> None:
    """Also on one lane."""
    hung = job("hung", timeout=LIMIT, **PLACES[place](WAYS[way]))
    others = [job(f"near{n}", seed=n, epochs=8) for n in range(2)]
    expected = [JobRunner(other).run() for other in others]
    ended = Ended(2)
    settings: dict[str, Any] = {"lanes": 1, "memory": "1GiB", "on_error": "continue", "callbacks": [ended]}
    train = Behind(lambda: wf.train([hung, *others], **settings))
    result, *found = train.after(told.any, ended.all)
    for text in (told.text, str(result.error)):
        assert "job 'hung' ran longer than its limit Job.timeout=1 s" in text and SAID[place] in text
        assert f"{__file__}:" in text and f"in {way}" in text and "in epoch 1 of 3" in text
    assert result.status == "failed" and isinstance(result.error, wf.JobTimeoutError)
    for alone, mine in zip(expected, found):
        assert_unharmed(mine, alone)


def press() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def pressing() -> None:
    """Hangs, and is interrupted there."""
    press()
    waiting()


@pytest.mark.needs_time("the README promises that Ctrl-C ends what hangs")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("place, late", [("data", False), ("evaluate", False), *(
    pytest.param(place, late, marks=pytest.mark.slow) for place in PLACES for late in (False, True)
)])  # fmt: skip
def test_ctrl_c_ends_what_hangs(place: str, late: bool, told: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its limit, and behind it (``late``), when it is waited for."""
    if late:
        monkeypatch.setattr(told.any, "set", press)
    hung = job("hung", timeout=LIMIT if late else 600, **PLACES[place](waiting if late else pressing))
    with pytest.raises(KeyboardInterrupt):
        wf.train([hung, *(job(f"near{n}") for n in range(2))], lanes=1, memory="1GiB", on_error="continue")


class Rows(Dataset[Any]):
    """A data set of the user's own; the job that is called "hung" hangs at row 5."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 5 and threading.current_thread().name == "hung":
            waiting()
        return BATCHES[0][0][index], BATCHES[0][1][index]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["data", "model"])
def test_what_a_thread_holds_that_hangs_is_free(what: str, told: Told) -> None:
    """A data set that others read too, and the turn to make a model."""

    def make() -> nn.Module:
        waiting()
        return Net(dropout=0.3)

    shared = {"data": DataLoader(Rows(), batch_size=2)} if what == "data" else {}
    expected = JobRunner(job(**shared)).run()
    hung = job("hung", **({"model": make} if what == "model" else {}), **shared, timeout=LIMIT)
    jobs = [hung, *(job(f"near{n}", **shared, timeout=20) for n in range(2))]
    ended = Ended(2)
    settings: dict[str, Any] = {"lanes": 2, "memory": "1GiB", "on_error": "continue", "callbacks": [ended]}
    train = Behind(lambda: wf.train(jobs, **settings))
    hung, *others = train.after(told.any, ended.all)
    assert isinstance(hung.error, wf.JobTimeoutError)
    for result in others:
        assert_unharmed(result, expected)


@pytest.mark.slow
def test_a_generator_that_hangs() -> None:
    results = wf.train([job("hung", timeout=LIMIT, **in_generator(sleeping)), job("near")], memory="1GiB", on_error="continue")
    assert isinstance(results[0].error, wf.JobTimeoutError) and "reading its data" in str(results[0].error)
    assert_unharmed(results[1], JobRunner(job("near")).run())


@pytest.mark.slow
def test_a_job_that_is_slow_ends_at_a_boundary_of_its_steps() -> None:
    """Nothing of it is broken off, and its result has what it trained."""

    def data() -> Any:
        for _ in range(1000):
            time.sleep(0.02)
            yield BATCHES[0]

    with pytest.raises(wf.JobTimeoutError, match=r"job 'job' ran longer than its limit Job.timeout=1 s"):
        wf.train([job(data=data, timeout=LIMIT)], lanes=2, memory="1GiB")
    (result,) = wf.train([job(data=data, timeout=LIMIT)], lanes=2, memory="1GiB", on_error="continue")
    assert result.losses and result.state_dict is not None and "left behind" not in str(result.error)


@pytest.mark.parametrize("lanes", [None, 2])
def test_a_job_within_its_limit_is_as_without(lanes: int | None) -> None:
    for changes in ({}, in_step(lambda: None)):
        expected = JobRunner(job(**changes)).run()
        limited = job(timeout=60, **changes)
        result = JobRunner(limited).run() if lanes is None else wf.train([limited], lanes=lanes, memory="1GiB")[0]
        assert_unharmed(result, expected)
        assert result.opaque_reason == expected.opaque_reason
        assert result.measured_peak or result.opaque_reason


@pytest.mark.slow
def test_its_memory_is_given_back() -> None:
    with Engine(lanes=2, memory="1GiB") as engine:
        room = engine.reservations.room
        for place in PLACES.values():
            wf.train([job("hung", timeout=LIMIT, **place(sleeping))], engine=engine, on_error="continue")
        assert not engine.reservations._claims and engine.reservations.room == room
        assert_unharmed(wf.train([job()], engine=engine)[0], JobRunner(job()).run())


@pytest.mark.slow
def test_time_that_it_is_suspended_does_not_count() -> None:
    reached = threading.Event()

    def data() -> Any:
        for batch in BATCHES:
            reached.set()
            time.sleep(0.02)
            yield batch

    with Engine(lanes=2, memory="1GiB") as engine:
        runner = JobRunner(job(data=data, timeout=3.0), engine)
        box: list[wf.JobResult] = []
        thread = threading.Thread(target=lambda: box.append(runner.run()))
        thread.start()
        assert reached.wait(20)
        runner.suspend(20)
        time.sleep(4)
        assert runner.suspended
        runner.resume()
        thread.join(20)
        assert_unharmed(box[0], JobRunner(job(data=data)).run())


@pytest.mark.parametrize("wrong", [0, -1, True, "1", float("nan"), float("inf")])
def test_limits_that_cannot_be(wrong: Any) -> None:
    with pytest.raises(wf.InvalidJobError, match="job 'job': timeout must be a positive number of seconds, or None"):
        job(timeout=wrong).check()
    with pytest.raises(wf.StudyError, match="trial_timeout must be a positive number of seconds, or None"):
        wf.optimize(optuna.create_study(), lambda trial: 0.0, 1, trial_timeout=wrong)
    with pytest.raises(wf.StudyError, match=r"deterministic=True and trial_timeout= contradict"):
        wf.optimize(optuna.create_study(), lambda trial: 0.0, 1, trial_timeout=1, deterministic=True, max_concurrent=1)
    with pytest.raises(wf.StudyError, match=r"timeout=5, which follows the clock"):
        wf.optimize(optuna.create_study(), lambda trial: job(timeout=5), 1, deterministic=True, max_concurrent=1)


def test_the_error_can_be_sent() -> None:
    error = pickle.loads(pickle.dumps(wf.JobTimeoutError("too long")))
    assert isinstance(error, wf.JobTimeoutError) and str(error) == "too long"


# -- studies


def looping(hang: Callable[[], None]) -> Callable[[optuna.Trial], Any]:
    def objective(trial: optuna.Trial) -> float:
        model = Net()
        step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                       generator=torch.Generator())  # fmt: skip
        loss = sum(float(step(batch)) for batch in BATCHES)
        if trial.number == 1:
            hang()
        return loss

    return objective


@pytest.mark.needs_time("the README promises that a trial which hangs fails, and the study goes on")
@pytest.mark.parametrize(
    "door, way",
    [
        ("loop", "sleeping"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("data", "sleeping"), ("evaluate", "sleeping"), ("step", "sleeping"))
        ),
    ],
)
def test_a_trial_that_hangs_fails_and_the_study_goes_on(door: str, way: str) -> None:
    def objective(trial: optuna.Trial) -> Any:
        if door == "loop":
            return looping(WAYS[way])(trial)
        return job(f"trial-{trial.number}", **(PLACES[door](WAYS[way]) if trial.number == 1 else {}))

    study = optuna.create_study(pruner=optuna.pruners.NopPruner())
    summary = wf.optimize(study, objective, 4, max_concurrent=2, lanes=2, memory="1GiB", trial_timeout=LIMIT * 3)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    if door != "loop":
        assert isinstance(summary.results["trial-1"].error, wf.JobTimeoutError)
        assert "trial 1 ran longer than its limit trial_timeout=3 s" in str(summary.results["trial-1"].error)


@pytest.mark.needs_time("the README promises that other trials finish beside an objective that hangs")
@pytest.mark.parametrize("door, way", [("loop", "waiting"), *(
    pytest.param(*each, marks=pytest.mark.slow)
    for each in (("loop", "stubborn"), ("data", "waiting"), ("evaluate", "waiting"))
)])  # fmt: skip
def test_other_trials_finish_beside_one_that_hangs(door: str, way: str, told: Told) -> None:
    def objective(trial: optuna.Trial, hangs: bool = True) -> Any:
        hang = WAYS[way] if hangs and trial.number == 1 else lambda: None
        return looping(hang)(trial) if door == "loop" else job(f"trial-{trial.number}", **PLACES[door](hang))

    def studied(objective: Callable[[optuna.Trial], Any], **more: Any) -> list[Any]:
        study = optuna.create_study(pruner=optuna.pruners.NopPruner())
        settings: dict[str, Any] = {"max_concurrent": 2, "lanes": 2, "memory": "1GiB", **more}
        wf.optimize(study, objective, 4, **settings)
        return [(trial.state.name, trial.value) for trial in study.trials]

    ended: list[int] = []
    near = threading.Event()

    def count(study: optuna.Study, trial: Any) -> None:
        ended.append(trial.number)
        if len(ended) == 3:
            near.set()

    torch.manual_seed(1)
    expected = studied(lambda trial: objective(trial, hangs=False))
    torch.manual_seed(1)
    run = Behind(lambda: studied(objective, trial_timeout=LIMIT * 3, callbacks=[count]))
    found = run.after(told.any, near)
    assert found == [expected[0], ("FAIL", None), *expected[2:]] and ended[:3] == [0, 2, 3]
    assert f"{__file__}:" in told.text and f"in {way}" in told.text


@pytest.mark.slow
@pytest.mark.timeout(60)
def test_ctrl_c_ends_an_objective_that_hangs() -> None:
    study = optuna.create_study()
    with pytest.raises(KeyboardInterrupt):
        wf.optimize(study, looping(pressing), 4, max_concurrent=2, lanes=2, memory="1GiB", trial_timeout=600)
    assert not any(trial.state == optuna.trial.TrialState.RUNNING for trial in study.trials)


@pytest.mark.slow
@pytest.mark.parametrize("trial_timeout", [None, 60])
def test_the_limit_of_a_job_in_a_study(trial_timeout: float | None) -> None:
    study = optuna.create_study(pruner=optuna.pruners.NopPruner())

    def objective(trial: optuna.Trial) -> wf.Job:
        return job(f"trial-{trial.number}", **({"timeout": LIMIT, **in_data(sleeping)} if trial.number == 1 else {}))

    summary = wf.optimize(study, objective, 3, max_concurrent=2, lanes=1, memory="1GiB", trial_timeout=trial_timeout)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE"]
    assert "job 'trial-1' ran longer than its limit Job.timeout=1 s" in str(summary.results["trial-1"].error)


def test_errors_of_a_trial_with_a_limit_are_its_own() -> None:
    def objective(trial: optuna.Trial) -> float:
        raise LookupError("on purpose")

    with pytest.raises(LookupError, match="on purpose"):
        wf.optimize(optuna.create_study(), objective, 1, trial_timeout=60)
    study = optuna.create_study()

    def pruned(trial: optuna.Trial) -> float:
        raise optuna.TrialPruned

    wf.optimize(study, pruned, 1, trial_timeout=60)
    assert study.trials[0].state.name == "PRUNED"
