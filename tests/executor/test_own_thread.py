"""All code of a job's or a trial's that is not captured runs on its own thread, with what that thread has set there."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Iterator
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.support import MiB
from waterflow.executor.audit import BothWays
from waterflow.executor.engine import Engine

LOCAL = threading.local()
CONTEXT: contextvars.ContextVar[float] = contextvars.ContextVar("weight", default=5.0)
BATCHES = [torch.ones(2, 4)] * 6
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "read ahead": {"read_ahead": True},
    "opportunistic": {"priority": "opportunistic"},
    "with a limit": {"timeout": 60.0},
}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def begin(number: int) -> nn.Module:
    LOCAL.weight = 0.5 + number
    CONTEXT.set(0.25)
    return nn.Linear(4, 1)


def found() -> float:
    return float(getattr(LOCAL, "weight", 5.0)) + CONTEXT.get()


def step(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(batch).mean() * 0 + found()


@pytest.mark.parametrize("jobs", [1, 3])
@pytest.mark.parametrize("how", SETTINGS)
def test_a_jobs_eager_steps_and_its_evaluation(how: str, jobs: int) -> None:
    made = [
        wf.Job(
            f"job{n}", model=lambda n=n: begin(n), data=BATCHES, step=step, optimizer=sgd, evaluate=lambda model: found(),
            epochs=2, seed=0, **SETTINGS[how],
        )
        for n in range(jobs)
    ]  # fmt: skip
    for number, result in enumerate(wf.train(made, memory="1GiB", lanes=2)):
        assert "threading.local" in str(result.opaque_reason)
        assert set(result.losses) == {0.75 + number}
        assert [metrics["value"] for metrics in result.metrics] == [0.75 + number] * 2


@pytest.mark.parametrize("submits", [False, True])
def test_a_trials_eager_steps(submits: bool) -> None:
    def objective(trial: optuna.Trial) -> float:
        model = begin(trial.number)
        made = wf.Step(model, step=step, optimizer=sgd(model.parameters()))
        losses = [float(made.submit(batch).result() if submits else made(batch)) for batch in BATCHES]
        assert losses == [0.75 + trial.number] * len(BATCHES)
        return losses[-1]

    study = optuna.create_study()
    wf.optimize(study, objective, n_trials=3, memory="1GiB", lanes=2, show_progress_bar=False)
    assert [trial.value for trial in study.trials] == [0.75 + n for n in range(3)]


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("submits", [False, True])
@pytest.mark.parametrize("priority", ["guaranteed", "opportunistic"])
def test_in_a_loop_beside_an_engine(submits: bool, priority: Any, three_threads: None) -> None:
    """As the engine's own threads do, with a lane's number of intra-op threads; a lane does what a thread with another number hands in.

    An opportunistic job's work waits for its lane, and takes over that number meanwhile.
    """
    seen = []

    def looking(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append((threading.get_ident(), torch.get_num_threads()))
        return model(batch).mean()

    with Engine(memory=256 * MiB, lanes=2) as engine:
        model = nn.Linear(4, 1)
        made = wf.Step(model, step=looking, optimizer=sgd(model.parameters()), engine=engine)
        engine.set_priority(made, priority)
        for batch in BATCHES:
            assert (made.submit(batch).result() if submits else made(batch)).isfinite()
            assert torch.get_num_threads() == 3
    assert made.opaque_reason is not None
    assert {threads for _, threads in seen[-len(BATCHES) :]} == {1}
    assert ({thread for thread, _ in seen[-len(BATCHES) :]} == {threading.get_ident()}) is (priority == "opportunistic")


def test_in_a_loop_with_as_many_threads_as_a_lane(three_threads: None) -> None:
    seen = []

    def looking(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(threading.get_ident())
        return model(batch).mean()

    with Engine(memory=256 * MiB, lanes=2, threads_per_lane=3) as engine:
        model = nn.Linear(4, 1)
        made = wf.Step(model, step=looking, optimizer=sgd(model.parameters()), engine=engine)
        for batch in BATCHES:
            made(batch)
    assert set(seen[-len(BATCHES) :]) == {threading.get_ident()}


@pytest.mark.parametrize("how", SETTINGS)
def test_an_audit(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, begun = [], []
    difference = BothWays.difference

    def looking(ways: BothWays) -> Any:
        seen.append(threading.get_ident())
        return difference(ways)

    def model() -> nn.Module:
        begun.append(threading.get_ident())
        return nn.Linear(4, 3)

    monkeypatch.setenv("WATERFLOW_AUDIT", "all")
    monkeypatch.setattr(BothWays, "difference", looking)
    data = [(torch.ones(2, 4), torch.tensor([0, 1]))] * 4
    job = wf.Job("audited", model=model, data=data, loss=F.cross_entropy, optimizer=sgd, seed=0, **SETTINGS[how])
    (result,) = wf.train(job, memory="1GiB")
    assert result.opaque_reason is None
    assert set(seen) == set(begun) and seen


@pytest.mark.parametrize("how", SETTINGS)
def test_what_an_evaluation_may_do(how: str) -> None:
    """It may train with a Step of its own, evaluate, and end the job; nothing waits for itself."""
    runners, probed = [], []

    class Started(wf.Callback):
        def on_job_start(self, job: wf.Job, runner: Any) -> None:
            runners.append(runner)

    def evaluate(model: nn.Module) -> float:
        probe = nn.Linear(4, 3)
        with torch.enable_grad():
            made = wf.Step(probe, loss=F.cross_entropy, optimizer=sgd(probe.parameters()))
            probed.append(float(made((torch.ones(2, 4), torch.tensor([0, 1])))))
        runners[0].stop("enough")
        return wf.evaluate(probe, [(torch.ones(2, 4), torch.tensor([0, 1]))], metrics={"loss": F.cross_entropy})["loss"]

    job = wf.Job(
        "probed", model=lambda: begin(0), data=BATCHES, step=step, optimizer=sgd, evaluate=evaluate, epochs=3, seed=0,
        **SETTINGS[how],
    )  # fmt: skip
    (result,) = wf.train(job, memory="1GiB", callbacks=[Started()], on_error="continue")
    assert result.status == "cancelled" and len(probed) == 1


@pytest.mark.parametrize("how", ["plain", "opportunistic", "with a limit"])
def test_a_step_that_closes_itself(how: str) -> None:
    """The lane that waits for it does not wait for ever."""
    runners, calls = [], []

    class Started(wf.Callback):
        def on_job_start(self, job: wf.Job, runner: Any) -> None:
            runners.append(runner)

    def closing(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = model(batch).mean() * found()
        calls.append(loss)
        if len(calls) == 4:
            runners[0].step.close()
        return loss

    job = wf.Job("closed", model=lambda: begin(0), data=BATCHES, step=closing, optimizer=sgd, seed=0, **SETTINGS[how])
    (result,) = wf.train(job, memory="1GiB", callbacks=[Started()], on_error="continue")
    assert result.status == "cancelled"
