"""optimize(checkpoint=): the same call again goes on where the one before was killed, interrupted or failed."""

from __future__ import annotations

import contextlib
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.pruners import BasePruner, NopPruner
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, Trial, TrialState
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.leftovers import nothing_left  # noqa: F401
from tests.support import Net, images
from waterflow.study.run import LastingRun
from waterflow.training import checkpoint_dir
from waterflow.training.runner import JobRunner

optuna.logging.set_verbosity(optuna.logging.ERROR)
EPOCHS, STEPS, TRIALS = 3, 6, 5
Act = Callable[[int, int], None]


def study_in(folder: Path, kind: str = "journal", pruner: BasePruner | None = None, **settings: Any) -> optuna.Study:
    """The study of this folder, made at the first call."""
    if kind == "journal":
        storage: Any = optuna.storages.JournalStorage(JournalFileBackend(str(folder / "journal")))
    else:
        storage = f"sqlite:///{folder / 'study.sqlite3'}"
    study = optuna.create_study(
        study_name="one", storage=storage, load_if_exists=True, pruner=pruner or NopPruner(),
        sampler=optuna.samplers.RandomSampler(7), **settings,
    )  # fmt: skip
    if not study.get_trials(deepcopy=False):
        for number in range(TRIALS):
            study.enqueue_trial({"lr": 0.01 * (number + 1), "dropout": 0.1 * number})
    return study


def objective_of(act: Act = lambda number, step: None) -> Callable[[Trial], wf.Job]:
    """Trials that return jobs with dropout, momentum and shuffled data; ``act`` is called with a number and a count of reads."""

    def objective(trial: Trial) -> wf.Job:
        lr, dropout = trial.suggest_float("lr", 1e-3, 1.0), trial.suggest_float("dropout", 0.0, 0.9)
        read = [0]

        class Data:
            def __iter__(self) -> Iterator[Any]:
                for batch in images(STEPS):
                    act(trial.number, read[0])
                    read[0] += 1
                    yield batch

        return wf.Job(
            "job", lambda: Net(dropout=dropout), Data(), lambda p: torch.optim.SGD(p, lr=lr, momentum=0.9), loss=F.cross_entropy,
            evaluate=lambda model: float(model(torch.ones(2, 6)).sum()), epochs=EPOCHS,
        )  # fmt: skip

    return objective


def files(folder: Path, **settings: Any) -> wf.Checkpoints:
    return wf.Checkpoints(folder / "checkpoints", **({"every": None, "steps": 2} | settings))


def optimize(folder: Path, objective: Any = None, study: optuna.Study | None = None, **settings: Any) -> wf.StudySummary:
    torch.manual_seed(0)
    given = {"n_trials": TRIALS, "max_concurrent": 3, "lanes": 2, "checkpoint": files(folder)} | settings
    return wf.optimize(study or study_in(folder), objective or objective_of(), **given)


def curves(study: optuna.Study) -> list[Any]:
    return [(t.number, t.state.name, t.params, t.values, t.intermediate_values) for t in study.get_trials()]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], wf.StudySummary]:
    folder = tmp_path_factory.mktemp("undisturbed")
    summary = optimize(folder, checkpoint=None)
    return curves(study_in(folder)), summary


def assert_equal(folder: Path, summary: wf.StudySummary, undisturbed: tuple[list[Any], wf.StudySummary]) -> None:
    """The study has the curves of an undisturbed one, and the summary its best weights."""
    assert curves(study_in(folder)) == undisturbed[0]
    expected = next(result for result in undisturbed[1].results if result.state_dict is not None)
    (best,) = (result for result in summary.results if result.state_dict is not None)
    assert best.losses == expected.losses and best.metrics == expected.metrics
    assert all(torch.equal(tensor, best.state_dict[name]) for name, tensor in expected.state_dict.items())
    left = sorted(path.name for path in (folder / "checkpoints").glob("*/*"))
    assert left == ["result.state"]  # of the best one


def states(folder: Path) -> list[str]:
    return [trial.state.name for trial in study_in(folder).get_trials()]


class Fault(Exception):
    """What ends a study on purpose."""


# -- killed

KILLED = """
import os, pathlib, signal, sys, threading
from tests.study import test_lasting as t

folder, kind, count = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
reads, lock = [0], threading.Lock()

def act(number, step):
    with lock:
        reads[0] += 1
        if reads[0] == count:
            os.kill(os.getpid(), signal.SIGKILL)

t.optimize(folder, t.objective_of(act), t.study_in(folder, kind))
"""


def killed(folder: Path, kind: str, count: int) -> None:
    """Run the study in another process, which is killed as it reads so many batches."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", KILLED, str(folder), kind, str(count)]
    ended = subprocess.run(command, cwd=root, stderr=subprocess.PIPE, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr


@pytest.mark.needs_time("a process is killed, and another goes on: the README promises its bits")
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("journal", marks=pytest.mark.slow)])
def test_goes_on_behind_a_kill(kind: str, tmp_path: Path, undisturbed: Any, caplog: pytest.LogCaptureFixture) -> None:
    killed(tmp_path, kind, 40)
    study = study_in(tmp_path, kind)
    assert "RUNNING" in [trial.state.name for trial in study.get_trials()]
    with caplog.at_level("WARNING", logger="waterflow"):
        summary = optimize(tmp_path, study=study)
    assert sum(line.startswith("the study goes on from") for line in caplog.messages) == 1
    assert curves(study) == undisturbed[0]
    if kind == "journal":
        assert_equal(tmp_path, summary, undisturbed)


# -- ended in this process


def test_goes_on_behind_an_error(tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trial that raised has failed; the others wait, and go on from what was written."""
    begun: dict[int, int] = {}
    both = threading.Barrier(2)

    def act(number: int, step: int) -> None:
        begun[number] = step
        if number in (1, 2) and step == 10:
            both.wait()
        if number == 1 and step == 12:
            raise Fault
        if number == 2 and step == 12:
            assert over.wait(20)

    over = threading.Event()
    last = LastingRun.last
    monkeypatch.setattr(LastingRun, "last", lambda run: (over.set(), last(run))[1])
    with pytest.raises(Fault):
        optimize(tmp_path, objective_of(act), max_concurrent=2)
    assert states(tmp_path) == ["COMPLETE", "FAIL", "WAITING", "WAITING", "WAITING"]
    assert begun.keys() == {0, 1, 2}
    begun.clear()
    summary = optimize(tmp_path, objective_of(lambda number, step: begun.update({number: step})))
    assert begun.keys() == {2, 3, 4}
    assert states(tmp_path) == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE", "COMPLETE"] and summary.trials == 3
    ours, theirs = curves(study_in(tmp_path)), undisturbed[0]
    assert [*ours[:1], *ours[2:]] == [*theirs[:1], *theirs[2:]]
    assert optimize(tmp_path, lambda trial: pytest.fail("all have ended")).trials == 0


def test_goes_on_behind_an_interruption(tmp_path: Path, undisturbed: Any) -> None:
    def interrupt(study: optuna.Study, trial: FrozenTrial) -> None:
        raise KeyboardInterrupt

    for _ in range(TRIALS - 1):
        with pytest.raises(KeyboardInterrupt):
            optimize(tmp_path, callbacks=[interrupt], max_concurrent=2)
        assert "RUNNING" not in states(tmp_path) and "FAIL" not in states(tmp_path)
    assert_equal(tmp_path, optimize(tmp_path), undisturbed)


def test_steps_are_not_trained_again(tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path, monkeypatch)
    ((at,),) = [(int(path.stem.removeprefix("step-")),) for path in (tmp_path / "checkpoints").glob("*/step-*")]
    assert at >= 8
    steps: list[int] = []
    submit = wf.Step.submit
    monkeypatch.setattr(wf.Step, "submit", lambda step, batch: (steps.append(1), submit(step, batch))[1])
    assert_equal(tmp_path, optimize(tmp_path), undisturbed)
    assert len(steps) == TRIALS * EPOCHS * STEPS - at


def test_the_best_weights_of_before(tmp_path: Path, undisturbed: Any) -> None:
    summary = optimize(tmp_path, n_trials=TRIALS)
    assert_equal(tmp_path, summary, undisturbed)
    assert_equal(tmp_path, optimize(tmp_path), undisturbed)
    assert not list(optimize(tmp_path, keep_weights="none").results)
    (kept,) = (tmp_path / "checkpoints").glob("*/result.state")
    kept.write_bytes(kept.read_bytes()[:-9])
    assert not list(optimize(tmp_path).results)


def test_n_trials_counts_all_calls(tmp_path: Path) -> None:
    assert [optimize(tmp_path, n_trials=count).trials for count in (2, 2, 4, 3)] == [2, 0, 2, 0]
    assert states(tmp_path) == ["COMPLETE"] * 4 + ["WAITING"]


# -- reports


class Judge(BasePruner):
    """Remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int | None]] = []

    def prune(self, study: optuna.Study, trial: FrozenTrial) -> bool:
        self.asked.append((trial.number, trial.last_step))
        return False


def left_running(folder: Path, objective: Callable[[Trial], Any]) -> None:
    """Leave a trial as a process leaves it that dies inside of the objective."""
    torch.manual_seed(0)
    with LastingRun(study_in(folder), files(folder)).opened() as run, contextlib.suppress(Fault):
        objective(run.ask())


def test_reports_stand(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What the storage has is not reported again, and only the last report is judged again. The trial keeps its numbers."""

    def loop(trial: Trial, until: int) -> float:
        lr = trial.suggest_float("lr", 1e-3, 1.0)
        for epoch in range(5):
            trial.report(lr * (epoch + seen["factor"]), epoch)
            if epoch < until and trial.should_prune():
                raise optuna.TrialPruned
            if epoch == until:
                raise Fault
        numbers.append(torch.rand(()).item())
        return lr

    seen, numbers = {"factor": 1}, []
    left_running(tmp_path, lambda trial: loop(trial, 2))
    seen["factor"] = 2  # would be seen if it were reported again
    judge = Judge()
    with caplog.at_level("WARNING", logger="waterflow"):
        optimize(tmp_path, lambda trial: loop(trial, 9), study_in(tmp_path, pruner=judge), n_trials=1, max_concurrent=1)
    (trial, *_) = study_in(tmp_path).get_trials()
    assert trial.state == TrialState.COMPLETE
    assert trial.intermediate_values == pytest.approx({0: 0.01, 1: 0.02, 2: 0.03, 3: 0.05, 4: 0.06})
    assert judge.asked == [(0, 2), (0, 3), (0, 4)]
    assert sum("begins anew" in line for line in caplog.messages) == 1
    again = tmp_path / "again"
    again.mkdir()
    optimize(again, lambda trial: loop(trial, 9), study_in(again), n_trials=1, max_concurrent=1)
    assert numbers[0] == numbers[1]


# -- trials whose process dies


def test_a_trial_at_the_death_of_its_process(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At two deaths it runs alone; at the fourth it has failed. Progress between counts from one again."""

    def deaths(times: int) -> None:
        for _ in range(times):
            with LastingRun(study_in(tmp_path), files(tmp_path)).opened() as run:
                alone.append(bool(run.alone))
                trial = run.ask()
                run.under_way([trial.number])
                trial.suggest_float("lr", 1e-3, 1.0)

    alone: list[bool] = []
    deaths(2)
    beside: list[int] = []
    names: set[int] = set()

    def act(number: int, step: int) -> None:
        names.add(number)
        beside.append(len(names - ended))

    ended: set[int] = set()
    optimize(tmp_path, objective_of(act), n_trials=3, callbacks=[lambda study, trial: ended.add(trial.number)])
    assert states(tmp_path)[:3] == ["COMPLETE"] * 3
    assert beside[: EPOCHS * STEPS] == [1] * (EPOCHS * STEPS)
    deaths(4)
    with caplog.at_level("WARNING", logger="waterflow"):
        optimize(tmp_path)
    assert states(tmp_path) == ["COMPLETE"] * 3 + ["FAIL", "COMPLETE"]
    (told,) = [line for line in caplog.messages if line.startswith("trial 3 is told as FAIL")]
    assert "{'lr': 0.04}" in told
    assert alone == [False, False, False, False, True, True]


# -- heartbeats, and Optuna's own retries


@pytest.mark.slow
def test_a_trial_that_beats_is_taken_up_when_its_heartbeats_end(tmp_path: Path) -> None:
    def study() -> optuna.Study:
        with warnings.catch_warnings(action="ignore"):  # heartbeats are experimental
            storage = optuna.storages.RDBStorage(f"sqlite:///{tmp_path / 'study.sqlite3'}", heartbeat_interval=1)
        return optuna.create_study(study_name="one", storage=storage, load_if_exists=True)

    with LastingRun(study(), files(tmp_path)).opened() as run, warnings.catch_warnings(action="ignore"):
        left = run.ask()
        left.suggest_float("lr", 1e-3, 1.0), left.suggest_float("dropout", 0.0, 0.9)
    summary = optimize(tmp_path, study=study(), n_trials=2)
    assert summary.trials == 2 and [trial.state.name for trial in study().get_trials()] == ["COMPLETE"] * 2
    assert study().trials[0].params == left.params


def test_a_retried_trial_goes_on_from_its_predecessor(tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path, monkeypatch)
    study = study_in(tmp_path)
    failed = study.ask()  # as another process does that finds it stale
    study.tell(failed, state=TrialState.FAIL)
    with warnings.catch_warnings(action="ignore"):
        retry = optuna.storages.RetryHeartbeatStaleTrialCallback()
    retry(study, study.get_trials()[failed.number])
    steps: list[int] = []
    submit = wf.Step.submit
    monkeypatch.setattr(wf.Step, "submit", lambda step, batch: (steps.append(1), submit(step, batch))[1])
    assert optimize(tmp_path).trials == TRIALS
    ours, theirs = curves(study_in(tmp_path)), undisturbed[0]
    assert ours[0][1] == "FAIL" and ours[1:TRIALS] == theirs[1:] and ours[TRIALS][1:] == theirs[0][1:]
    assert len(steps) <= TRIALS * EPOCHS * STEPS - 8


# -- what cannot go on


def interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt trial 0 in the middle of its second epoch; its state is written as the study ends."""
    asked = threading.Event()
    ask = JobRunner.ask_for_snapshot
    monkeypatch.setattr(checkpoint_dir, "LAST_SECONDS", 20.0)  # a busy machine takes its time
    monkeypatch.setattr(JobRunner, "ask_for_snapshot", lambda runner: (ask(runner), asked.set())[0])

    def act(number: int, step: int) -> None:
        if step == 10:
            signal.raise_signal(signal.SIGINT)
            assert asked.wait(20)

    with pytest.raises(KeyboardInterrupt):
        optimize(folder, objective_of(act), max_concurrent=1, checkpoint=files(folder, steps=None))
    assert states(folder) == ["WAITING"] * TRIALS


def test_another_model(tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Edited code: an error that names trial and file; nothing is removed, and the code of before goes on."""
    interrupted(tmp_path, monkeypatch)
    before = sorted((tmp_path / "checkpoints").glob("trial-0-*/*"))
    assert before

    def edited(trial: Trial) -> wf.Job:
        made = objective_of()(trial)
        made.model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(6, 4))
        return made

    with pytest.raises(wf.StudyError, match="(?s)trial 0 cannot go on from its checkpoint in .*trial-0-.*Nothing was removed"):
        optimize(tmp_path, edited, catch=(Exception,), max_concurrent=1)
    assert sorted((tmp_path / "checkpoints").glob("trial-0-*/*")) == before
    assert states(tmp_path) == ["WAITING"] * TRIALS
    assert_equal(tmp_path, optimize(tmp_path), undisturbed)


def test_a_lost_folder(
    tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Trials that were under way begin anew, which is said once, with the same random numbers: also in another folder."""
    interrupted(tmp_path, monkeypatch)
    shutil.rmtree(tmp_path / "checkpoints")
    torch.manual_seed(1)
    with caplog.at_level("WARNING", logger="waterflow"):
        given: dict[str, Any] = {"max_concurrent": 2, "lanes": 2}
        wf.optimize(study_in(tmp_path), objective_of(), 3, checkpoint=files(tmp_path), **given)
    assert sum("begins anew" in line for line in caplog.messages) == 1
    assert curves(study_in(tmp_path))[:3] == undisturbed[0][:3]
    interrupted_again = tmp_path / "checkpoints" / "study.json"
    interrupted_again.unlink()
    (tmp_path / "checkpoints" / "trial-3-x").mkdir()
    with pytest.raises(wf.CheckpointError, match="has checkpoints of trials and no study.json"):
        optimize(tmp_path)


def test_another_run_of_the_same_trials(tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial that waits keeps its seed where another folder, or none, takes it up."""
    interrupted(tmp_path, monkeypatch)
    torch.manual_seed(1)
    wf.optimize(study_in(tmp_path), objective_of(), 1, lanes=1, max_concurrent=1)
    assert curves(study_in(tmp_path))[0] == undisturbed[0][0]


class Unreadable(torch.optim.lr_scheduler.StepLR):
    """A scheduler whose state cannot be put back."""

    def load_state_dict(self, state: Any) -> None:
        raise KeyError("lr_lambdas")


@pytest.mark.parametrize("how", ["scheduler", "file"])
def test_what_cannot_be_read_is_not_removed(how: str, tmp_path: Path, undisturbed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    interrupted(tmp_path, monkeypatch)
    before = sorted((tmp_path / "checkpoints").glob("trial-0-*/*"))

    def edited(trial: Trial) -> wf.Job:
        made = objective_of()(trial)
        if how == "scheduler":
            made.scheduler = lambda optimizer: Unreadable(optimizer, 1)
        return made

    with monkeypatch.context() as only:
        if how == "file":
            only.setattr(
                checkpoint_dir.Checkpoint, "load", lambda *given, **settings: (_ for _ in ()).throw(OSError(5, "I/O error"))
            )
        with pytest.raises(wf.StudyError, match="trial 0 cannot go on from its checkpoint"):
            optimize(tmp_path, edited, catch=Exception, max_concurrent=1)
    assert before and sorted((tmp_path / "checkpoints").glob("trial-0-*/*")) == before
    assert_equal(tmp_path, optimize(tmp_path), undisturbed)


@pytest.mark.parametrize(
    "settings, told",
    [
        ({"deterministic": True}, "deterministic=True and checkpoint= contradict each other.*leave checkpoint= out"),
        ({"study": optuna.create_study()}, "this one is in memory.*sqlite:///"),
    ],
    ids=["deterministic", "in memory"],
)
def test_refused(settings: Any, told: str, tmp_path: Path) -> None:
    with pytest.raises(wf.StudyError, match=told):
        optimize(tmp_path, **settings)
    assert not (tmp_path / "checkpoints").exists()


def test_folders_of_others(tmp_path: Path) -> None:
    def own(name: str) -> Path:
        (tmp_path / name).mkdir()
        return tmp_path / name

    folder, other = own("one"), own("other")
    optimize(folder, n_trials=1)
    with pytest.raises(wf.CheckpointError, match="of another study than 'one'; give this one a folder of its own"):
        optimize(other, checkpoint=files(folder))
    with files(folder).opened(()), pytest.raises(wf.CheckpointError, match="in use by another call"):
        optimize(folder)
    (folder / "checkpoints" / "study.json").write_text("{")
    with pytest.raises(wf.CheckpointError, match="study.json is damaged.*Remove .*begin anew"):
        optimize(folder)
    wf.train(
        [Net()], data=images(2), optimizer=lambda p: torch.optim.SGD(p, lr=0.1), loss=F.cross_entropy, checkpoint=other / "c"
    )
    with pytest.raises(wf.CheckpointError, match="has the checkpoints of jobs of train"):
        optimize(other, checkpoint=other / "c")
