"""A trial that lacks memory runs once more: with recomputing, and alone if others had what it lacked."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import optuna
import pytest
import torch
from optuna.pruners import NopPruner
from torch import nn

import waterflow as wf
from tests.leftovers import nothing_left  # noqa: F401
from tests.support import images
from tests.test_recompute import Deep
from waterflow.executor.reservations import Reservations
from waterflow.study.run import LastingRun

optuna.logging.set_verbosity(optuna.logging.ERROR)
TRIALS, LIMIT = 4, 600_000


def job(trial: optuna.Trial, sizes: dict[int, int], **changes: Any) -> wf.Job:
    settings: dict[str, Any] = {
        "data": images(2, size=sizes.get(trial.number, 8), shape=(32,)), "loss": nn.functional.cross_entropy, "seed": trial.number,
    }  # fmt: skip
    return wf.Job("job", Deep, optimizer=lambda p: torch.optim.AdamW(p, lr=1e-2), **(settings | changes))


def run(objective: Any, **settings: Any) -> tuple[optuna.Study, wf.StudySummary]:
    study = optuna.create_study(pruner=NopPruner())
    given = {"max_concurrent": 2, "lanes": 2, "memory": LIMIT, "catch": wf.MemoryLimitError, "keep_weights": "all"} | settings
    return study, wf.optimize(study, objective, TRIALS, **given)


def largest(**options: Any) -> int:
    """The largest batch that fits alone."""
    found: list[int] = []

    def objective(trial: optuna.Trial) -> wf.Job:
        return job(trial, {0: 1 << 14}, **options)

    study = optuna.create_study()
    try:
        wf.optimize(study, objective, 1, memory=LIMIT, lanes=2)
    except wf.MemoryLimitError as error:
        assert error.largest_batch is not None
        found.append(error.largest_batch)
    return found[0]


@pytest.mark.parametrize("deterministic", [False, True], ids=["", "deterministic"])
def test_recomputes(deterministic: bool, caplog: pytest.LogCaptureFixture) -> None:
    """One trial fits with recomputing, with its own bits; another does not, and names the largest batch that would."""
    most = largest()
    sizes = {1: most - 16, 2: 1 << 14}  # it depends a little on how many batches lie ready
    with caplog.at_level("WARNING", logger="waterflow"):
        study, summary = run(lambda trial: job(trial, sizes), deterministic=deterministic)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "COMPLETE", "FAIL", "COMPLETE"]
    result, failed = summary.results[1], summary.results[2]
    assert result.recomputed is not None and isinstance(failed.error, wf.MemoryLimitError)
    assert failed.error.largest_batch == most
    assert summary.run_again == 2 and "2 ran twice for lack of memory" in repr(summary)
    assert sum("runs once more with recompute='auto': job 'job' does not fit" in line for line in caplog.messages) == 2
    alone = wf.train([job(study.trials[1], sizes)], memory="1GiB", lanes=1)[0]  # type: ignore[arg-type]
    assert alone.losses == result.losses


def test_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where others had what it lacked it waits for their end, and needs no recomputing."""
    beside: list[set[int]] = []
    under_way: set[int] = set()
    once: list[int] = []
    both, met = threading.Barrier(2), set[int]()
    claim = Reservations.claim

    def refuses(self: Reservations, job: int, plan: Any, **given: Any) -> None:
        if under_way == {1, 2} and not once:
            once.append(job)
            raise self._stuck(job, plan, plan.persistent)
        claim(self, job, plan, **given)

    monkeypatch.setattr(Reservations, "claim", refuses)

    def objective(trial: optuna.Trial) -> wf.Job:
        def data() -> Any:
            under_way.add(trial.number)
            if trial.number in (1, 2) and trial.number not in met:
                met.add(trial.number)
                both.wait()
            beside.append({*under_way})
            yield from images(2, size=8, shape=(32,))

        def evaluate(model: nn.Module) -> float:
            under_way.discard(trial.number)
            return 1.0

        return job(trial, {}, data=data, evaluate=evaluate)

    study, summary = run(objective)
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * TRIALS
    assert summary.run_again == 1 and len(once) == 1
    assert {1} in beside[-3:] or {2} in beside[-3:]


def test_a_trial_that_was_taken_up_runs_again(tmp_path: Path) -> None:
    """Its reports of the call before stand, and those of its first attempt."""
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "journal")))
    study = optuna.create_study(storage=storage, pruner=NopPruner())
    with LastingRun(study, wf.Checkpoints(tmp_path / "c")).opened() as lasting:
        lasting.ask().report(1.0, 0)
    most = largest()
    wf.optimize(study, lambda trial: job(trial, {0: most - 16}), 1, memory=LIMIT, lanes=2, checkpoint=tmp_path / "c")
    assert study.trials[0].state.name == "COMPLETE" and study.trials[0].intermediate_values == {0: 1.0}


def test_a_job_that_recomputes_already_fails_at_once() -> None:
    study, summary = run(lambda trial: job(trial, {1: 1 << 14}, recompute="auto"))
    assert [trial.state.name for trial in study.trials] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert summary.run_again == 0
