"""What a study's summary and the results of train() say when they are printed."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _MultiProcessingDataLoaderIter

import waterflow as wf
from waterflow.executor.program import capture_budget
from waterflow.executor.program.capture_cache import captures
from waterflow.executor.stats import JOBS_LOADING, LOADING
from waterflow.run_stats import FIRST, LOCK, MOST_CAUSES, OWN, RunStats

BATCHES = [(torch.randn(4, 3), torch.randint(2, (4,))) for _ in range(5)]


class Rows(Dataset[Any]):
    """A data set of the user's."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return BATCHES[0][0][index], BATCHES[0][1][index]


def looking(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = F.cross_entropy(output, target)
    assert loss.item() < 1e9
    return loss


def objective(trial: optuna.Trial) -> float:
    """Of each four trials two run eagerly, each for a cause of its own; the last fails behind its steps."""
    model = nn.Linear(3, 2)
    kind: Any = torch.optim.Adagrad if trial.number % 4 == 1 else torch.optim.SGD
    loss = looking if trial.number % 4 == 2 else F.cross_entropy
    step = wf.Step(model, loss=loss, optimizer=kind(model.parameters(), lr=0.1))
    for batch in BATCHES:
        value = step(batch)
    if trial.number == 7:
        raise optuna.TrialPruned
    return float(value)


def test_a_summary_says_how_trials_ended_and_why_some_ran_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="waterflow")
    summary = wf.optimize(optuna.create_study(), objective, n_trials=8, max_concurrent=2)
    figures = summary.stats
    assert figures is not None and summary.states == {"complete": 7, "pruned": 1}
    assert (figures.jobs, figures.steps, figures.eager_steps) == (8, 40, 20)
    assert sorted(figures.eager.values()) == [2, 2] and 0 < figures.peak < figures.limit
    assert sum(figures.shares.values()) == pytest.approx(1.0, abs=0.05) and figures.shares["steps"] > 0
    first, steps, *causes = str(summary).splitlines()
    assert first == repr(summary) and "7 complete, 1 pruned; best" in first
    assert steps.startswith("40 steps, 50 % of them eager; ")
    assert "  2 of 8 trials ran eagerly: the update of Adagrad is not captured; Adam, AdamW, SGD are" in causes
    [looks] = [line for line in causes if "in looking: assert loss.item()" in line]
    assert looks.startswith("  2 of 8 trials ran eagerly: the step reads the values")
    assert len(str(summary).splitlines()) <= 10
    assert sum("runs eagerly" in record.getMessage() for record in caplog.records) == 2


def test_a_study_that_trains_nothing_is_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="waterflow")
    wf.optimize(optuna.create_study(), objective, n_trials=1)
    assert "no trial trained" not in caplog.text
    wf.optimize(optuna.create_study(), lambda trial: 1.0, n_trials=2)
    assert caplog.text.count("no trial trained through waterflow") == 1


def test_kinds_of_batches_that_run_eagerly_are_a_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_budget, "FREE_CAPTURES", 1)
    captures.clear()
    batches = [(torch.randn(rows, 3), torch.randint(2, (rows,))) for rows in (2, 3, 4)]
    job = {"loss": F.cross_entropy, "data": batches, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}
    results = wf.train([nn.Linear(3, 2)], **job)
    assert results[0].opaque_reason is None and results[0].eager_steps == results.stats.eager_steps == 2
    assert "1 of 1 jobs ran eagerly: batches of ever new kinds; pad them" in str(results)


def test_results_say_it_of_jobs_those_that_failed_first() -> None:
    captures.clear()
    jobs = [
        wf.Job(f"job-{n}", lambda: nn.Linear(3, 2), BATCHES, lambda p: torch.optim.SGD(p, lr=0.1), loss=F.cross_entropy)
        for n in range(9)
    ]
    jobs[8].loss = lambda output, target: output.no_such_thing
    results = wf.train(jobs, on_error="continue", lanes=1)
    first, failed, second, *rest = str(results).splitlines()
    assert first == repr(results) == "9 jobs: 8 completed, 1 failed"
    assert failed.startswith("  job-8: failed, 0 steps") and "AttributeError" in failed
    assert second.startswith("  job-0: completed, 5 steps in ") and "value" in second
    assert "  ..." in rest and "40 steps, 0 % of them eager; 1 captures" in rest and len(rest) <= 10
    with wf.Engine() as engine:  # of each call what it has done
        for _ in range(2):
            assert wf.train(jobs[:2], engine=engine).stats.steps == 10


@pytest.mark.parametrize(
    ("shares", "eager_steps", "said"),
    [
        ({"loading": 0.6}, 0, "loading, 60 % of the time, most of it at a.py:3 (for batch in loader:): Job(read_ahead=True)"),
        ({"loading batches": 0.6, "loading": 0.35}, 0, "loading batches, 60 % of the time, most of it at a.py:3"),
        (
            {"loading tensors": 0.5, OWN: 0.5},
            0,
            "loading tensors, 50 % of the time, most of it at a.py:3 (for batch in loader:): wf.DataLoader",
        ),
        (
            {"loading rows": 0.5},
            0,
            "(for batch in loader:): make whole batches: wf.DataLoader(TensorDataset(...), batch_transform=",
        ),
        ({OWN: 0.5}, 0, "your code between steps, 50 % of the time: see what your code does beside step(batch)"),
        ({OWN: 0.4, LOCK: 0.2}, 0, "your code between steps, 60 % of the time: pass processes= to wf.optimize"),
        ({"steps": 0.8}, 50, "eager steps, 40 % of the time: mend"),
        ({"capturing": 0.4, "loading": 0.3}, 0, "capturing, 40 % of the time"),
        ({"waiting for memory": 0.3}, 0, "raise memory="),
        ({"steps": 0.9}, 5, None),
    ],
)
def test_one_thing_to_change_first(shares: dict[str, float], eager_steps: int, said: str | None) -> None:
    all_ = dict.fromkeys((*FIRST, "steps"), 0.0)
    causes = Counter({f"cause {n}": 9 - n for n in range(5)})
    lock, at = {OWN: shares.get(LOCK, 0.0)}, {"loading": "a.py:3 (for batch in loader:)"}
    figures = RunStats(9, 100, eager_steps, 4, 2, causes, all_ | shares, 2**20, 2**30, lock, at)
    lines = figures.lines_for("jobs")
    assert lines[0].endswith("; 4 captures, 2 of them anew") and lines[1].endswith("9 of 9 jobs ran eagerly: cause 0")
    assert lines[1 + MOST_CAUSES] == "  and others for other causes"
    last = lines[-1]
    assert last == "memory: at most 1.0 MiB of 1.0 GiB claimed" if said is None else said in last


@pytest.mark.parametrize(
    ("data", "part", "of_job"),
    [(TensorDataset(*BATCHES[0]), "loading tensors", "loading ahead"),
     (Subset(TensorDataset(*BATCHES[0]), [0, 1]), "loading tensors", "loading ahead"),
     (list(zip(*BATCHES[0])), "loading batches", "loading ahead"), (Rows(), "loading rows", "loading")],
)  # fmt: skip
def test_loaders_of_own_loops_are_no_rest(data: Any, part: str, of_job: str) -> None:
    def train(trial: optuna.Trial) -> Any:
        loader = DataLoader(data, batch_size=2)
        if trial.number == 2:
            return wf.Job("job", lambda: nn.Linear(3, 2), loader, lambda p: torch.optim.SGD(p, lr=0.1), loss=F.cross_entropy)
        assert _BaseDataLoaderIter.__next__ is not reads[1]
        list(loader)
        return 0.0

    reads = _MultiProcessingDataLoaderIter.__init__, _BaseDataLoaderIter.__next__
    for first, found in ((0, {part}), (2, {of_job})):  # two loops side by side; a job, whose loading counts once
        study = optuna.create_study()
        for _ in range(first):
            study.tell(study.ask(), 0.0)
        stats = wf.optimize(study, train, n_trials=2 - first // 2, max_concurrent=2).stats
        assert stats is not None
        assert {what for what in (*JOBS_LOADING, *LOADING) if stats.shares[what]} == found
        assert sum(stats.shares.values()) == pytest.approx(1.0, abs=0.05)
        assert (_MultiProcessingDataLoaderIter.__init__, _BaseDataLoaderIter.__next__) == reads


def test_no_more_is_claimed_than_there_is() -> None:
    """Two jobs of the largest batch that fits twice: one step has the memory, and the other waits for it."""

    class Data:
        def __init__(self, size: int) -> None:
            self.batch = torch.randn(size, 3), torch.randint(2, (size,))

        def __iter__(self) -> Iterator[Any]:
            for _ in range(6):  # more than are read ahead of a step: neither job ends before the other has had steps
                yield self.batch
                both.wait(60)

    def job(size: int, name: str) -> wf.Job:
        data = Data(size)
        return wf.Job(name, lambda: nn.Linear(3, 2), data=data, loss=F.cross_entropy, optimizer=torch.optim.SGD, seed=0)

    both = threading.Barrier(2)
    size = wf.max_batch_size(job(64, "one"), copies=2, memory="2MiB").jobs[0].size
    for lanes in (1, 2):
        stats = wf.train([job(size, "one"), job(size, "other")], memory="2MiB", lanes=lanes).stats
        assert stats is not None and stats.limit // 2 < stats.peak <= stats.limit
