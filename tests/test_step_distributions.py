"""Steps with torch.distributions are captured, and an argument that is not valid is an error as in eager training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributions import Bernoulli, Categorical, Distribution, MultivariateNormal, Normal, kl_divergence
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

import waterflow as wf
from tests.support import Net, Trained, assert_same, compare, images
from waterflow.executor.engine import Engine, within
from waterflow.executor.program.capture_cache import CaptureCache


def made(model: Callable[[], nn.Module] = Net) -> tuple[nn.Module, Optimizer]:
    network = model()
    return network, AdamW(network.parameters(), lr=1e-2, fused=True)


def policy(model: nn.Module, batch: Any) -> torch.Tensor:
    return -(Categorical(logits=model(batch[0])).log_prob(batch[1]) * batch[0][:, 0]).sum()


def entropy(model: nn.Module, batch: Any) -> Any:
    actions = Categorical(probs=model(batch[0]).softmax(1))
    drawn = actions.sample()
    return -actions.log_prob(drawn).mean() - 0.01 * actions.entropy().mean(), {"drawn": drawn.float().mean()}


def autoencoder(model: nn.Module, batch: Any) -> torch.Tensor:
    mean, raw = model(batch[0]).chunk(2, 1)
    code = Normal(mean, F.softplus(raw))
    rebuilt = Normal(code.rsample().repeat(1, 3), 1.0).log_prob(batch[0]).sum(1)
    return (kl_divergence(code, Normal(0.0, 1.0)).sum(1) - rebuilt).mean()


def bits(model: nn.Module, batch: Any) -> torch.Tensor:
    return -Bernoulli(logits=model(batch[0])).log_prob((batch[0][:, :4] > 0).float()).mean()


def thorough(model: nn.Module, batch: Any) -> torch.Tensor:
    """A step that only the thorough way of tracing takes."""
    return policy(model, batch) * torch.tensor(2.0)


@pytest.mark.parametrize("step", [policy, entropy, autoencoder, bits, thorough], ids=lambda one: one.__name__)
def test_is_captured(no_captures: CaptureCache, step: Any) -> None:
    compare(lambda: made(lambda: Net(dropout=0.2)), images(6), step=step)
    assert no_captures.captures == 1


def test_in_an_engine(no_captures: CaptureCache) -> None:
    with Engine(memory=256 << 20, lanes=2) as engine:
        compare(made, images(6), step=entropy, engine=engine)
    assert no_captures.captures == 1


def test_a_check_that_goes_another_way_runs_eagerly() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        return -MultivariateNormal(out, out.T @ out + 9 * torch.eye(4)).log_prob(torch.zeros(4)).mean()

    compare(made, images(3), step=step, opaque="torch's MultivariateNormal checks values")


def test_errors_that_the_step_catches_are_looked_for_eagerly() -> None:
    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        out = model(batch[0])
        try:
            return -Categorical(probs=out).log_prob(batch[1]).mean()
        except ValueError:
            return F.cross_entropy(out, batch[1])

    compare(made, images(3), step=step, opaque="torch's Categorical checks values")


# -- arguments that are not valid


def spoiled() -> Iterator[Any]:
    """Batches, of which the third has a number that is none, and the fifth a class that there is not."""
    for number, (x, y) in enumerate(images(7)):
        if number == 2:
            x[1, 2] = float("nan")
        if number == 4:
            y[3] = 7
        yield x, y


def trained(engine: Engine | None, step: Any) -> tuple[Trained, list[tuple[type, str]]]:
    """A loop that goes on behind errors; eager without an engine and ``wf.Step`` in one, which draws from the same seed."""
    torch.manual_seed(5)
    model, optimizer = made(lambda: Net(dropout=0.2))
    numbers = torch.Generator().manual_seed(5)
    job = wf.Step(model, step=step, optimizer=optimizer, generator=numbers) if engine is not None else None
    torch.manual_seed(5)
    losses, errors = [], []
    for batch in spoiled():
        try:
            if job is not None:
                losses.append(job(batch))
                continue
            losses.append(step(model, batch))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        except ValueError as error:
            errors.append(str(error))
    return Trained(losses, model, optimizer, job), errors


@pytest.mark.parametrize("step", [policy, thorough], ids=lambda one: one.__name__)
def test_an_argument_that_is_not_valid(no_captures: CaptureCache, step: Any) -> None:
    eager, theirs = trained(None, step)
    with Engine(memory=256 << 20, lanes=1) as engine, within(engine):
        ours, errors = trained(engine, step)
        assert_same(ours, eager)
    assert ours.step is not None and ours.step.opaque_reason is None and no_captures.captures == 1
    assert len(theirs) == len(errors) == 2
    for one, other in zip(errors, theirs):
        start = "Expected " + other.removeprefix("Expected ").split(" of distribution")[0].split(" to be")[0]
        assert start in one and "in policy: return" in one


def test_the_first_step_has_one() -> None:
    model, optimizer = made()
    before = {name: one.clone() for name, one in model.named_parameters()}
    step = wf.Step(model, step=policy, optimizer=optimizer)
    x, y = images(1)[0]
    for _ in range(2):
        with pytest.raises(ValueError, match=r"Expected parameter logits \(Tensor of shape \(6, 4\)\)"):
            step((x[:6] * float("nan"), y[:6]))
    assert all(torch.equal(one, before[name]) for name, one in model.named_parameters()) and not optimizer.state
    step((x, y))
    assert step.opaque_reason is None and step.steps == 1


def test_checks_that_are_off_are_another_capture(no_captures: CaptureCache) -> None:
    model, optimizer = made()
    step = wf.Step(model, step=policy, optimizer=optimizer)
    x, y = images(1)[0]
    step((x, y))
    try:
        Distribution.set_default_validate_args(False)
        assert step((x * float("nan"), y)).isnan()
    finally:
        Distribution.set_default_validate_args(True)
    with pytest.raises(wf.StepValueError, match="to satisfy the constraint IndependentConstraint"):
        step((x, y))  # whose parameters are NaN
    assert no_captures.captures == 2
