"""Trials whose jobs are paused between two epochs and taken up by another thread, in any order: the bits of trials that never were."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf
from tests.leftovers import nothing_left  # noqa: F401
from waterflow.executor.engine import Engine, within
from waterflow.study import coordinator, paused
from waterflow.study.coordinator import StudyRunner
from waterflow.study.order import Policy, TrialProgress
from waterflow.study.paused import PausedStates
from waterflow.training import checkpoint_dir
from waterflow.training.checkpoint import Checkpoint
from waterflow.training.runner import JobRunner, PauseJob

optuna.logging.set_verbosity(optuna.logging.ERROR)
EPOCHS, TRIALS = 3, 4
X = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 2))


def job(trial: optuna.Trial, workers: int = 0, **changes: Any) -> wf.Job:
    lr = trial.suggest_float("lr", 1e-3, 1e-1, log=True)
    settings: dict[str, Any] = {
        "model": model, "data": DataLoader(TensorDataset(X, Y), 8, shuffle=True, num_workers=workers), "loss": F.cross_entropy,
        "optimizer": lambda p: torch.optim.AdamW(p, lr=lr), "accumulate": 2,
        "scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        "evaluate": lambda model: F.cross_entropy(model(X), Y).item(), "epochs": EPOCHS,
    }  # fmt: skip
    return wf.Job("job", **(settings | changes))


class Drawn(Policy):
    """Takes up trials that wait in drawn order, and then begins new ones."""

    def __init__(self) -> None:
        self._numbers = random.Random(1)

    def choose(self, trials: Sequence[TrialProgress], lanes: int) -> list[TrialProgress]:
        ready = [trial for trial in trials if trial.state == "ready"]
        self._numbers.shuffle(ready)
        return [*ready, *(trial for trial in trials if trial.state == "new")][:lanes]


class Pauses:
    """Pauses every job after each epoch, and remembers the threads that trained each trial."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.threads: dict[int, set[int]] = {}
        self.order: list[int] = []
        real = coordinator.reporting

        def reporting(study: optuna.Study, trial: optuna.Trial, *given: Any) -> Any:
            report = real(study, trial, *given)

            def on_epoch(epoch: int, metrics: Any) -> None:
                report(epoch, metrics)
                self.order.append(trial.number)
                self.threads.setdefault(trial.number, set()).add(threading.get_ident())
                raise PauseJob

            return on_epoch

        monkeypatch.setattr(coordinator, "reporting", reporting)
        made = StudyRunner.__init__

        def init(self: StudyRunner, *given: Any) -> None:
            made(self, *given)
            self._order._policy = Drawn()

        monkeypatch.setattr(StudyRunner, "__init__", init)


def enqueued(study: optuna.Study) -> optuna.Study:
    if not study.get_trials(deepcopy=False):
        for number in range(TRIALS):
            study.enqueue_trial({"lr": 0.01 * (number + 1)})
    return study


def run(objective: Callable[[optuna.Trial], Any] = job, **settings: Any) -> tuple[list[Any], wf.StudySummary]:
    study = enqueued(optuna.create_study(pruner=optuna.pruners.NopPruner()))
    torch.manual_seed(0)
    done = wf.optimize(study, objective, TRIALS, **({"max_concurrent": 2, "lanes": 2, "keep_weights": "all"} | settings))
    return [(t.number, t.params, t.values, t.intermediate_values) for t in study.trials], done


def assert_equal(one: tuple[list[Any], wf.StudySummary], other: tuple[list[Any], wf.StudySummary]) -> None:
    assert one[0] == other[0]
    for mine, theirs in zip(one[1].results, other[1].results, strict=True):
        assert mine.losses == theirs.losses and mine.metrics == theirs.metrics
        assert all(torch.equal(tensor, mine.state_dict[name]) for name, tensor in theirs.state_dict.items())


@pytest.mark.parametrize("where", ["memory", "disk", pytest.param("workers", marks=pytest.mark.slow)])
def test_paused_after_each_epoch(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    objective = (lambda trial: job(trial, workers=1)) if where == "workers" else job
    expected = run(objective)
    if where == "disk":
        monkeypatch.setattr(paused, "SHARE", 0.0)
    written: list[str] = []
    write = PausedStates._write
    monkeypatch.setattr(PausedStates, "_write", lambda states, name: (written.append(name), write(states, name))[1])
    pauses = Pauses(monkeypatch)
    assert_equal(run(objective), expected)
    assert sorted(pauses.order) == sorted([*range(TRIALS)] * EPOCHS) and pauses.order != sorted(pauses.order)
    assert len(written) == (TRIALS * EPOCHS if where == "disk" else 0)


def test_a_deterministic_study_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = run(deterministic=True)
    first = Pauses(monkeypatch)
    once = run(deterministic=True)
    order = [*first.order]
    first.order.clear()
    twice = run(deterministic=True)
    assert order == first.order and len(order) == TRIALS * EPOCHS
    assert_equal(once, twice)
    assert_equal(once, expected)


def test_goes_on_behind_an_interruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States in memory are written as the study ends."""
    expected = run()
    for module in (checkpoint_dir, coordinator):  # a busy machine takes its time
        monkeypatch.setattr(module, "LAST_SECONDS", 20.0)
    pauses = Pauses(monkeypatch)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal")))

    def call(callbacks: Any = ()) -> Any:
        study = enqueued(
            optuna.create_study(study_name="one", storage=storage, load_if_exists=True, pruner=optuna.pruners.NopPruner())
        )
        torch.manual_seed(0)
        given: dict[str, Any] = {"max_concurrent": 2, "lanes": 2, "checkpoint": tmp_path / "c", "callbacks": callbacks}
        wf.optimize(study, job, TRIALS, **given)
        return [(t.number, t.params, t.values, t.intermediate_values) for t in study.trials]

    def interrupt(study: optuna.Study, trial: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call([interrupt])
    epochs = len(pauses.order)
    assert call() == expected[0]
    assert len(pauses.order) <= TRIALS * EPOCHS + 2 and epochs >= EPOCHS


# -- one job


def runner_of(on_epoch: Any = None, resume: Checkpoint | None = None, engine: Engine | None = None, **changes: Any) -> JobRunner:
    return JobRunner(job(optuna.trial.FixedTrial({"lr": 0.01}), **changes), engine, on_epoch, seed=1, resume=resume)


def pause(epoch: int, metrics: Any) -> None:
    raise PauseJob


def test_nothing_of_a_paused_job_is_left() -> None:
    with wf.Engine("cpu", memory="1GiB", lanes=1) as engine:
        before = threading.active_count()
        runner = runner_of(pause, engine=engine)
        result = runner.run()
        assert result.status == "paused" and result.state_dict is None and len(result.metrics) == 1
        assert len(engine.reservations) == 0 and threading.active_count() == before
        assert runner.paused is not None and (runner.paused.epoch, runner.paused.batch) == (1, 0)
        again = runner_of(resume=runner.paused, engine=engine).run()
        alone = runner_of(engine=engine).run()
    assert again.losses == alone.losses and again.state_dict is not None
    assert all(torch.equal(tensor, again.state_dict[name]) for name, tensor in alone.state_dict.items())


def test_a_module_of_the_callers_keeps_its_tensors() -> None:
    module = model()
    runner = runner_of(pause, model=module)
    assert runner.run().status == "paused"
    assert all(tensor.numel() for tensor in module.state_dict().values())
    assert runner_of(resume=runner.paused, model=module).run().status == "completed"


class NoState:
    """A scheduler that cannot be copied."""

    def step(self) -> None:
        pass


@pytest.mark.parametrize(
    "changes", [{"data": iter([(X, Y)] * 2), "epochs": 1}, {"scheduler": lambda optimizer: NoState()}], ids=["data", "scheduler"]
)
def test_what_cannot_be_resumed_goes_on(changes: Any) -> None:
    runner = runner_of(pause, **changes)
    assert runner.run().status == "completed" and runner.paused is None


# -- states


def state(bytes_: int) -> Checkpoint:
    return Checkpoint("job", 1, 0, 1, {"seed": 0, "tensor": torch.zeros(bytes_, dtype=torch.uint8)})


def test_states_in_memory_are_claimed_and_make_way(tmp_path: Path) -> None:
    with wf.Engine("cpu", memory=100 << 20, lanes=1) as engine, PausedStates(engine, None).opened() as states:
        room = engine.reservations.room
        states.put("a", state(10 << 20))
        states.put("b", state(20 << 20))  # together more than a quarter
        assert engine.reservations.claimed() == 10 << 20
        assert states.take("b").nbytes == 20 << 20 and states.take("a").nbytes == 10 << 20
        assert engine.reservations.claimed() == 0
        states.put("a", state(10 << 20))
        assert engine.reservations.claimed() == 10 << 20
        seen: list[int] = []

        def work() -> None:
            weight = nn.Parameter(torch.zeros((room - (10 << 20)) // 8))  # with its gradient there is no room beside the state
            holder, optimizer = nn.ParameterList([weight]), torch.optim.SGD([weight], lr=1.0)
            with within(engine):
                step = wf.Step(holder, step=lambda model, batch: (model[0] * batch).sum(), optimizer=optimizer)
                step(torch.ones(1))
                seen.append(engine.reservations.claimed())
                step.close()

        thread = threading.Thread(target=work)
        thread.start()
        while thread.is_alive():
            states.make_way()
            thread.join(0.01)
        assert seen and 10 << 20 < seen[0] < room and states.take("a").nbytes == 10 << 20
