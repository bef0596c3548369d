"""Batches of ever new kinds: those are captured that come back, and the rest runs eagerly, with the same bits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import optuna
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from waterflow.executor.program import bound_step, capture_budget
from waterflow.executor.program.capture_budget import CaptureBudget, CaptureCosts, NewKind
from waterflow.executor.program.capture_cache import CaptureCache, captures
from waterflow.partition.guards.cache_key import Fingerprint
from waterflow.partition.guards.step_key import structure_key, what_changed

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
    monkeypatch.setattr(capture_budget, "FREE_CAPTURES", 2)
    pay_after(monkeypatch, float("inf"))
    return monkeypatch


def pay_after(monkeypatch: pytest.MonkeyPatch, steps: float) -> None:
    monkeypatch.setattr(CaptureCosts, "pays_after", steps)
    monkeypatch.setattr(capture_budget, "PAYS_AFTER", steps)  # in a deterministic study


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("make", [
    lambda p: torch.optim.AdamW(p, lr=1e-2), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
], ids=["AdamW", "SGD"])  # fmt: skip
def test_what_runs_eagerly_has_the_bits_of_its_capture(
    few: pytest.MonkeyPatch, make: Callable[[Any], torch.optim.Optimizer], accumulate: int
) -> None:
    bounded, losses, parameters = trained(make, accumulate=accumulate)
    few.setattr(capture_budget, "FREE_CAPTURES", 100)
    free, same_losses, same_parameters = trained(make, accumulate=accumulate)
    assert bounded.eager_steps > 0 and free.eager_steps == 0 and bounded.opaque_reason is None
    assert losses == same_losses and all(map(torch.equal, parameters, same_parameters))


def test_kinds_that_come_back_stay_captured(few: pytest.MonkeyPatch) -> None:
    step, *_ = trained(lambda p: torch.optim.AdamW(p, lr=1e-2))
    assert step.eager_steps == sum(rows not in SIZES[:2] for rows in SIZES)


def test_one_that_was_dropped_is_captured_again_once_that_pays(few: pytest.MonkeyPatch) -> None:
    pay_after(few, 3)
    few.setattr(bound_step, "MOST_SHAPES", 1)
    few.setattr(bound_step, "captures", CaptureCache(most_new=1))
    model = network()
    step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    eager = []
    for batch in batches([3, 5, *[3] * 6]):
        before = step.eager_steps
        step(batch)
        eager.append(step.eager_steps - before)
    assert eager == [0, 0, 1, 1, 1, 0, 0, 0]


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


class Annealed(nn.Module):
    """Weighs a penalty by an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.beta = network(), 0.0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.net(x)
        return y, self.beta * y.square().mean()


def penalized(model: nn.Module, batch: Any) -> torch.Tensor:
    y, penalty = model(batch[0])
    return F.cross_entropy(y, batch[1]) + penalty


def annealed(
    betas: list[float], accumulate: int = 1, rows: Sequence[int] = (4,), **options: Any
) -> tuple[wf.Step, list[float], list[int]]:
    """Trains with these values of the attribute, one a step; returns the losses, and the steps that ran eagerly."""
    model = Annealed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    step = wf.Step(model, step=penalized, optimizer=optimizer, generator=generator, accumulate=accumulate, name="it", **options)
    losses, eager = [], []
    for number, (beta, batch) in enumerate(zip(betas, batches([*rows] * len(betas)))):
        model.beta, before = beta, step.eager_steps
        losses.append(step(batch).item())
        eager += [number] * (step.eager_steps - before)
    return step, losses, eager


STANDS = [0.0] * 2 + [0.1] * 2 + [0.2] * 3 + [0.3] * 6


@pytest.mark.parametrize("accumulate", [1, 3])
def test_what_changes_is_captured_again_once_it_stands_still(few: pytest.MonkeyPatch, accumulate: int) -> None:
    few.setattr(capture_budget, "FREE_CAPTURES", 3)
    pay_after(few, 1)
    step, losses, eager = annealed(STANDS, accumulate)
    assert step.opaque_reason is None and eager and STANDS[eager[-1]] == 0.3 and eager[-1] < len(STANDS) - 2
    few.setattr(capture_budget, "FREE_CAPTURES", 100)
    _, same, none = annealed(STANDS, accumulate)
    assert none == [] and losses == same


def test_one_that_stands_still_is_not_captured_before_that_would_have_paid(few: pytest.MonkeyPatch) -> None:
    step, _, eager = annealed(STANDS)
    assert eager == [number for number, beta in enumerate(STANDS) if beta > 0.1] and step.opaque_reason is None


def test_in_a_deterministic_study_steps_decide_when_what_changed_is_captured(few: pytest.MonkeyPatch) -> None:
    few.setattr(capture_budget, "PAYS_AFTER", 3)

    def objective(trial: optuna.Trial) -> float:
        trial.set_user_attr("eager", annealed(STANDS)[2])
        return 0.0

    study = optuna.create_study()
    wf.optimize(study, objective, n_trials=3, deterministic=True, max_concurrent=2)
    assert [trial.user_attrs["eager"] for trial in study.trials] == [[4, 5, 6, 7, 8, 9]] * 3


def test_what_never_stands_still_is_looked_at_ever_more_rarely(few: pytest.MonkeyPatch) -> None:
    """A look makes the key of all that the step reads, which takes longer than a small step."""
    looks: list[int] = []
    few.setattr(bound_step, "structure_key", lambda spec: looks.append(1) or structure_key(spec))
    step, _, eager = annealed([float(number) for number in range(300)])
    assert len(eager) == 298 and step.opaque_reason is None and len(looks) < 15


@pytest.mark.parametrize("rows", [(4,), (4, 4, 4, 3)], ids=["one shape", "a smaller batch now and then"])
def test_what_changes_is_told_once_by_its_name(
    few: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, rows: tuple[int, ...]
) -> None:
    with caplog.at_level(logging.WARNING, "waterflow"):
        annealed([0.1 * number for number in range(20)], rows=rows)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("step 'it' runs eagerly for now") and "beta was" in said and "is 0.2, and a capture" in said, said


def test_new_shapes_are_told_beside_a_change_that_took_no_capture(
    few: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "waterflow"):
        annealed([0.0, 0.0, 0.5, 0.5, 0.5, 0.5], rows=(4, 3, 4, 5, 6, 7))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "beta was 0.0 and is 0.5" in said[0] and "was of shape (3," in said[1], said


def test_changes_are_found_by_their_names() -> None:
    settings, weights = {"alpha": 0.5, "deep": [1, 2]}, [1.0]
    model = nn.Sequential(Annealed(), nn.Dropout(0.2))

    def compute(model: nn.Module, batch: Any) -> torch.Tensor:
        return model(batch) * settings["alpha"] * weights[0]

    def key() -> Any:
        found = Fingerprint(model)
        return found.of(model), found.of(compute)

    changes: list[tuple[Callable[[], None], str]] = [
        (lambda: setattr(model[0], "beta", 0.5), "0.beta was 0.0 and is 0.5"),
        (lambda: setattr(model[1], "p", 0.3), "1.p was 0.2 and is 0.3"),
        (lambda: model.eval(), "training was True and is False"),
        (lambda: settings.update(alpha=2), "alpha was 0.5 and is 2"),
        (lambda: settings["deep"].append(3), "deep has changed"),
        (lambda: weights.append(2.0), "something that the step reads beside its batch has changed"),
    ]
    for change, told in changes:
        before = key()
        change()
        assert what_changed(before, key()) == told


def spent() -> CaptureBudget:
    """A job that has captured as many kinds as are free."""
    budget = CaptureBudget()
    for kind in range(capture_budget.FREE_CAPTURES):
        budget.count(kind, [], lambda known: False, lambda: (1,))
        budget.check(kind, kind, lambda: (1,))
        with budget.spending():
            budget.add_kind()
    return budget


def refused(budget: CaptureBudget, kind: Any) -> bool:
    try:
        budget.count(kind, [], lambda known: False, lambda: (1,))
    except NewKind:
        return True
    return False


def test_kinds_that_come_back_are_captured_once_that_would_have_paid(monkeypatch: pytest.MonkeyPatch) -> None:
    pay_after(monkeypatch, 3)
    budget = spent()
    assert [refused(budget, "new") for _ in range(5)] == [True] * 3 + [False] * 2
    assert refused(budget, "other")


def test_in_a_deterministic_study_captures_of_other_jobs_are_no_reason(few: pytest.MonkeyPatch) -> None:
    """What a job captures follows from its own steps, whoever was there before."""

    def objective(trial: optuna.Trial) -> float:
        step, *_ = trained(lambda p: torch.optim.AdamW(p, lr=1e-2))
        trial.set_user_attr("eager", step.eager_steps)
        return 0.0

    study = optuna.create_study()
    wf.optimize(study, objective, n_trials=3, deterministic=True, max_concurrent=2)
    assert {trial.user_attrs["eager"] for trial in study.trials} == {sum(rows not in SIZES[:2] for rows in SIZES)}


def test_kinds_that_never_come_back_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_budget, "KINDS_REMEMBERED", 3)
    pay_after(monkeypatch, 1)
    budget = spent()
    assert all(refused(budget, kind) for kind in "abcda")
    assert not refused(budget, "a")
