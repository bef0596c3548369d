"""Jobs that are too short to pay for a capture train eagerly, with the same bits; longer ones are captured once that pays."""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import optuna
import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from waterflow.executor.program.capture_budget import CaptureCosts, Horizon, TrialLengths, costs
from waterflow.executor.program.capture_cache import captures
from waterflow.executor.stats import Account

PAYS_AFTER = 10


@pytest.fixture
def captured_at_once() -> None:
    """Not here."""


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(CaptureCosts, "pays_after", PAYS_AFTER)
    captures.clear()
    yield
    captures.clear()


def network(width: int = 16) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Dropout(0.2), nn.Linear(width, 4))


def batches(count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(5, 8, generator=generator), torch.randint(0, 4, (5,), generator=generator)) for _ in range(count)]


def job(steps: int, width: int = 16, epochs: int = 1, **options: Any) -> wf.Job:
    settings = {
        "data": lambda: batches(steps), "optimizer": lambda p: torch.optim.AdamW(p, lr=1e-2), "loss": F.cross_entropy, "seed": 3,
        **options,
    }  # fmt: skip
    return wf.Job(f"width {width}", lambda: network(width), epochs=epochs, **settings)


def eager_steps(*jobs: wf.Job, **options: Any) -> list[int]:
    return [result.eager_steps for result in wf.train(jobs, lanes=1, **options)]


@pytest.mark.parametrize("steps, eager", [(PAYS_AFTER - 1, PAYS_AFTER - 1), (PAYS_AFTER, 0)])
def test_a_job_is_captured_if_its_length_pays_for_it(steps: int, eager: int) -> None:
    assert eager_steps(job(steps)) == [eager]


def test_epochs_count() -> None:
    assert eager_steps(job(3, epochs=4)) == [0]


def test_the_first_job_of_a_process_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known before."""
    monkeypatch.setattr(CaptureCosts, "pays_after", None)
    assert eager_steps(job(2)) == [0]


def test_equal_short_jobs_are_captured_once_they_are_many() -> None:
    jobs = [job(4) for _ in range(5)]
    for number, one in enumerate(jobs):
        one.name = f"job {number}"
    eager = sorted(eager_steps(*jobs))
    assert eager[0] == 0 and eager[-1] == 4 and PAYS_AFTER <= sum(eager) <= 2 * PAYS_AFTER


@pytest.mark.parametrize("options", [
    {"recompute": 1 << 20}, {"recompute": "auto"}, {"priority": "opportunistic"}, {"quota": "1MiB"},
], ids=str)  # fmt: skip
def test_where_memory_must_be_planned_it_is_captured_at_once(options: dict[str, Any]) -> None:
    assert eager_steps(job(2, **options)) == [0]


def test_a_large_one_is_captured_at_once() -> None:
    wide = job(2, width=1 << 17)
    assert eager_steps(wide, memory="64MiB") == [0]
    captures.clear()
    assert eager_steps(wide, memory="1GiB") == [2]


def test_a_large_batch_is_captured_at_once() -> None:
    images = [(torch.zeros(4_000, 8), torch.zeros(4_000, dtype=torch.int64))] * 2
    assert eager_steps(job(2, data=images), memory="16MiB") == [0]
    captures.clear()
    assert eager_steps(job(2, data=images), memory="1GiB") == [2]


@pytest.mark.parametrize("make, copies", [
    (lambda p: torch.optim.AdamW(p), 2), (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 1),
    (lambda p: torch.optim.SGD(p, lr=0.1), 0),
], ids=["AdamW", "momentum", "SGD"])  # fmt: skip
def test_state_that_the_first_update_makes_is_claimed_before(make: Callable[[Any], torch.optim.Optimizer], copies: int) -> None:
    with wf.Engine(lanes=1) as engine:
        model = network(1_000)
        step = wf.Step(model, loss=F.cross_entropy, optimizer=make(model.parameters()), engine=engine)
        step.expect(lambda: 2)
        weights = sum(p.nbytes for p in model.parameters())
        for batch in batches(2):
            step(batch)
            assert (1 + copies) * weights <= step.plan.persistent < (1 + copies) * weights + 1_000
        assert step.eager_steps == 2


def test_only_a_graph_predicts_a_peak() -> None:
    (result,) = wf.train([job(2)], lanes=1)
    assert result.predicted_peak is None and result.measured_peak


def test_ever_new_shapes_are_told_in_loops_of_unknown_length(caplog: pytest.LogCaptureFixture) -> None:
    def objective(trial: optuna.Trial) -> float:
        model = network()
        step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        for rows in range(2, 40):
            step((torch.zeros(rows, 8), torch.zeros(rows, dtype=torch.int64)))
        return 0.0

    with caplog.at_level(logging.WARNING, "waterflow"):
        summary = wf.optimize(optuna.create_study(), objective, 1)
    assert "batches of new kinds eagerly" in caplog.text and "too short" not in str(summary)


def test_one_that_may_round_otherwise_is_captured_at_once() -> None:
    costs._steps.clear()
    assert eager_steps(job(20), exact=False) == [0]
    assert costs._steps and min(costs._steps) > 0


def test_it_is_told_in_the_summary_and_nowhere_else(caplog: pytest.LogCaptureFixture) -> None:
    study = optuna.create_study()
    with caplog.at_level(logging.INFO, "waterflow"):
        summary = wf.optimize(study, lambda trial: job(3, width=8 + trial.number), 4)
    assert "4 of 4 trials were too short to pay for a capture" in str(summary)
    assert "eager" not in caplog.text and "to change first: eager" not in str(summary)


def looping(lengths: list[int]) -> list[int]:
    """The eager steps of each trial of a study whose trials are loops of these lengths, each of another model."""

    def objective(trial: optuna.Trial) -> float:
        model = network(8 + trial.number)
        step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        for batch in batches(lengths[trial.number]):
            step(batch)
        trial.set_user_attr("eager", step.eager_steps)
        return 0.0

    study = optuna.create_study()
    wf.optimize(study, objective, len(lengths), max_concurrent=1)
    return [trial.user_attrs["eager"] for trial in study.trials]


@pytest.mark.parametrize("lengths, eager", [
    ([30], [PAYS_AFTER]),  # nobody knows: once it has been as long as would have paid
    ([30, 30], [PAYS_AFTER, 0]),  # as the one before
    ([3, 3, 30], [3, 3, PAYS_AFTER]),  # it outlasts them
    ([40, 5, 5, 40], [PAYS_AFTER, 0, 0, 5]),
])  # fmt: skip
def test_loops_are_expected_to_be_as_long_as_those_that_ended(lengths: list[int], eager: list[int]) -> None:
    assert looping(lengths) == eager


def known_lengths(lengths: list[int], of: Callable[[int], Hashable] = lambda number: number) -> TrialLengths:
    known = TrialLengths()
    for number, length in enumerate(lengths):
        account = Account("")
        account["steps"] = length
        known.ended(of(number), account)
    return known


def test_a_trial_that_stood_aside_counts_all_its_steps() -> None:
    lengths = known_lengths([4, 5], of=lambda number: "one")
    assert lengths.of("one") == 9 and lengths.best_wait(3) == 0


def cost(wait: float, pays_after: float, lengths: list[int]) -> float:
    return sum(length if length <= wait else wait + pays_after for length in lengths)


@given(st.integers(5, 20_000), st.integers(5, 500), st.floats(0.05, 0.75), st.booleans())
def test_near_the_best_in_hindsight(steps: int, pays_after: int, saved: float, known: bool) -> None:
    """``saved`` of each eager step, which costs 1: a captured one is at most four times as fast."""
    account = Account("")
    account["steps"] = 0
    horizon = Horizon(account, "mine", known_lengths([steps] * 3 if known else []), Counter())
    while account["steps"] < steps and not horizon.lasts(pays_after):
        account["steps"] += 1
    captured = steps - account["steps"]
    taken = steps + (pays_after * saved - captured * saved if captured else 0)
    assert taken <= (1.3 if known else 1.8) * min(steps, pays_after * saved + steps * (1 - saved))


@given(st.lists(st.integers(1, 500), min_size=1, max_size=20), st.integers(1, 200))
def test_no_other_wait_would_have_cost_less(lengths: list[int], pays_after: int) -> None:
    wait = known_lengths(lengths).best_wait(pays_after)
    assert wait is not None
    best = min(cost(other, pays_after, lengths) for other in [0, *lengths])
    assert cost(wait, pays_after, lengths) == best or (wait == pays_after and best == sum(lengths))


@pytest.mark.parametrize("make", [
    lambda p: torch.optim.AdamW(p, lr=1e-2), lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
], ids=["AdamW", "SGD"])  # fmt: skip
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("clip", [None, 0.1])
def test_captured_at_any_step_it_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], torch.optim.Optimizer], accumulate: int, clip: float | None
) -> None:
    def jobs(epochs: int = 3) -> list[wf.Job]:
        return [
            job(7, 8 + n, epochs, optimizer=make, accumulate=accumulate, clip_grad_norm=clip, evaluate=lambda model: model[0].bias.sum())
            for n in range(4)
        ]  # fmt: skip

    at_once = [wf.train([one]) for one in jobs(epochs=3)]
    draws, first = random.Random(accumulate), dict[int, int]()
    monkeypatch.setattr(
        Horizon, "lasts", lambda horizon, pays_after: horizon.done() >= first.setdefault(id(horizon), draws.randint(1, 15))
    )
    monkeypatch.setattr(CaptureCosts, "pays_after", float("inf"))
    captures.clear()
    together = wf.train(jobs())
    assert any(0 < one.eager_steps < one.steps for one in together)
    for (alone,), one in zip(at_once, together):
        assert alone.eager_steps == 0 and alone.losses == one.losses and alone.metrics == one.metrics
        assert alone.state_dict is not None and one.state_dict is not None
        assert all(torch.equal(value, one.state_dict[name]) for name, value in alone.state_dict.items())
