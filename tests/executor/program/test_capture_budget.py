"""Batches of ever new kinds: captures take a share of a job's time, and the rest runs eagerly, with the same bits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from waterflow.executor.program import capture_cache
from waterflow.executor.program.capture_cache import CaptureBudget, NewKind, captures

SIZES = [3, 5, 3, 7, 5, 9, 3, 11, 7, 13, 5, 15]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def batches(sizes: list[int] = SIZES) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for rows in sizes:
        yield torch.randn(rows, 8, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def trained(make: Callable[[Any], torch.optim.Optimizer], **options: Any) -> tuple[wf.Step, list[float], list[torch.Tensor]]:
    model = network()
    step = wf.Step(model, loss=F.cross_entropy, optimizer=make(model.parameters()),
                   generator=torch.Generator().manual_seed(3), **options)  # fmt: skip
    losses = [step(batch).item() for batch in batches()]
    return step, losses, [parameter.detach().clone() for parameter in model.parameters()]


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Two captures, and no more."""
    captures.clear()
    monkeypatch.setattr(capture_cache, "FREE_CAPTURES", 2)
    monkeypatch.setattr(capture_cache, "MOST_OF_TIME", 0.0)
    return monkeypatch


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make", [
    lambda p: torch.optim.AdamW(p, lr=1e-2), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
], ids=["AdamW", "SGD"])  # fmt: skip
def test_what_runs_eagerly_has_the_bits_of_its_capture(
    few: pytest.MonkeyPatch, make: Callable[[Any], torch.optim.Optimizer], accumulate: int
) -> None:
    bounded, losses, parameters = trained(make, accumulate=accumulate)
    few.setattr(capture_cache, "FREE_CAPTURES", 100)
    free, same_losses, same_parameters = trained(make, accumulate=accumulate)
    assert bounded.eager_steps > 0 and free.eager_steps == 0 and bounded.opaque_reason is None
    assert losses == same_losses and all(map(torch.equal, parameters, same_parameters))


def test_kinds_that_come_back_stay_captured(few: pytest.MonkeyPatch) -> None:
    step, *_ = trained(lambda p: torch.optim.AdamW(p, lr=1e-2))
    assert step.eager_steps == sum(rows not in SIZES[:2] for rows in SIZES)


def test_a_job_among_others_has_its_bits(few: pytest.MonkeyPatch) -> None:
    def jobs() -> list[wf.Job]:
        return [
            wf.Job(name=f"job-{i}", model=network, data=lambda: list(batches()), loss=F.cross_entropy, epochs=2,
                   optimizer=lambda p, i=i: torch.optim.AdamW(p, lr=1e-2 * (1 + i)), seed=i)
            for i in range(3)
        ]  # fmt: skip

    together = wf.train(jobs())
    for i, job in enumerate(jobs()):
        assert wf.train([job])[0].losses == together[i].losses


@pytest.mark.parametrize("change, told", [
    (lambda i: {"x": torch.ones(2 + i, 8)}, "batch['x'] was of shape (3, 8) and is of shape (4, 8)"),
    (lambda i: {"x": torch.ones(2, 8), "lam": 0.5 + i}, "batch['lam'] was 1.5 and is 2.5"),
    (lambda i: {"x": torch.ones(2, 8), "k": (1, i)}, "batch['k'][1] was 1 and is 2"),
])  # fmt: skip
def test_it_is_told_once_with_the_leaf_that_changes(
    few: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, change: Callable[[int], Any], told: str
) -> None:
    model = network()
    step = wf.Step(model, step=lambda m, b: m(b["x"]).square().mean() * b.get("lam", 1.0) * b.get("k", (1, 1))[1],
                   optimizer=torch.optim.SGD(model.parameters(), lr=0.1), name="it")  # fmt: skip
    with caplog.at_level(logging.WARNING, "waterflow"):
        for i in range(6):
            step(change(i))
    said = [record.getMessage() for record in caplog.records if "new kinds" in record.getMessage()]
    assert len(said) == 1 and told in said[0] and "'it'" in said[0], said


def spent(budget: CaptureBudget, now: list[float]) -> None:
    for kind in range(capture_cache.FREE_CAPTURES):
        budget.check(kind, lambda: (1,))
        with budget.spending():
            now[0] += 1.0
        budget.add_kind()


def test_captures_of_kinds_that_come_back_take_a_tenth_of_the_time() -> None:
    now = [0.0]
    budget = CaptureBudget(now=lambda: now[0])
    spent(budget, now)
    now[0] = 90.0  # 8 of 90 seconds, and the next one makes 9
    with pytest.raises(NewKind):
        budget.check("new", lambda: (1,))
    budget.check("new", lambda: (1,))
    now[0] = 89.0
    with pytest.raises(NewKind):
        budget.check("new", lambda: (1,))


def test_in_a_deterministic_study_steps_decide() -> None:
    steps = 0
    budget = CaptureBudget(lambda: steps)
    spent(budget, [0.0])
    for _ in range(2):
        with pytest.raises(NewKind):
            budget.check("new", lambda: (1,))
    steps = capture_cache.STEPS_PER_CAPTURE
    budget.check("new", lambda: (1,))


def test_in_a_deterministic_study_captures_of_other_jobs_are_no_reason(few: pytest.MonkeyPatch) -> None:
    """What a job captures follows from its own steps, whoever was there before."""
    few.setattr(capture_cache, "STEPS_PER_CAPTURE", 10**6)

    def objective(trial: optuna.Trial) -> float:
        step, *_ = trained(lambda p: torch.optim.AdamW(p, lr=1e-2))
        trial.set_user_attr("eager", step.eager_steps)
        return 0.0

    study = optuna.create_study()
    wf.optimize(study, objective, n_trials=3, deterministic=True, max_concurrent=2)
    assert {trial.user_attrs["eager"] for trial in study.trials} == {sum(rows not in SIZES[:2] for rows in SIZES)}


def test_kinds_that_never_come_back_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_cache, "KINDS_REMEMBERED", 3)
    budget = CaptureBudget(lambda: 10**6)
    spent(budget, [0.0])
    for kind in "abcda":
        with pytest.raises(NewKind):
            budget.check(kind, lambda: (1,))
    budget.check("a", lambda: (1,))
