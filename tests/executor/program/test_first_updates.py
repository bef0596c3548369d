"""Parameters whose first update comes later than that of others, and steps that fail before there was any."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Adam, Optimizer

import waterflow as wf
from tests.support import MiB, Trained, assert_same
from waterflow.executor.engine import Engine


@pytest.fixture(params=["alone", "engine"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine | None]:
    if request.param == "alone":
        yield None
        return
    with Engine(memory=256 * MiB, lanes=2) as made:
        yield made


class Heads(nn.Module):
    """Two layers, of which ``used`` take part."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(6, 4), nn.Linear(6, 4)])
        self.used = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum((self.heads[i](x) for i in self.used), 0.0 * x[:, :4])


def _batches(*sizes: int) -> list[Any]:
    random = torch.Generator().manual_seed(1)
    return [(torch.randn(n, 6, generator=random), torch.randint(4, (n,), generator=random)) for n in sizes]


def _train(engine: Engine | None, captured: bool, used: list[list[int]], sizes: list[int], **options: Any) -> Trained:
    """Train with those heads in each step; an error that eager training raises, too, is a result."""
    torch.manual_seed(2)
    model = Heads()
    optimizer = SGD(model.parameters(), lr=0.1, **options)
    step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine) if captured else None
    results: list[Any] = []
    for heads, (x, y) in zip(used, _batches(*sizes)):
        model.used = heads
        try:
            results.append(step((x, y)) if step is not None else _eagerly(model, optimizer, x, y))
        except TypeError as error:
            results.append(torch.tensor(len(str(error).splitlines()[0])))
    return Trained(results, model, optimizer, step)


def _eagerly(model: nn.Module, optimizer: Optimizer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


@pytest.mark.parametrize("sizes", [[5] * 6, [5, 3, 5, 3, 4, 5]])
@pytest.mark.parametrize("used", [[[0], [0], [1], [1], [0], [1]], [[0], [1], [0, 1], [0], [1], [0, 1]]])
def test_momentum_of_each_parameter_begins_with_its_first_gradient(
    used: list[list[int]], sizes: list[int], engine: Engine | None
) -> None:
    options: dict[str, Any] = {"momentum": 0.9, "dampening": 0.5, "fused": True}
    mine = _train(engine, True, used, sizes, **options)
    assert_same(mine, _train(None, False, used, sizes, **options))
    assert mine.step is not None and mine.step.opaque_reason is None


def test_a_first_update_beside_others_fails_where_the_fused_form_was_asked_for(engine: Engine | None) -> None:
    used, options = [[0], [0], [0, 1], [0, 1], [0]], {"momentum": 0.9, "fused": True}
    mine = _train(engine, True, used, [5] * 5, **options)
    theirs = _train(None, False, used, [5] * 5, **options)
    assert_same(mine, theirs)
    assert theirs.results[2].dtype == torch.int64, "an error"


def test_a_first_update_beside_others_is_done_eagerly_once(engine: Engine | None) -> None:
    used = [[0], [0], [0, 1], [0, 1], [0]]
    mine = _train(engine, True, used, [5] * 5, momentum=0.9, dampening=0.5)
    theirs = _train(None, False, used, [5] * 5, momentum=0.9, dampening=0.5)
    for one, other in zip(mine.model.parameters(), theirs.model.parameters()):
        torch.testing.assert_close(one, other)
    assert mine.step is not None and mine.step.opaque_reason is None


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_a_first_step_that_fails_leaves_no_state(kind: Any, engine: Engine | None) -> None:
    model = nn.Linear(6, 4)
    optimizer = kind(model.parameters(), **({"momentum": 0.9} if kind is SGD else {}))
    step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
    x, y = _batches(5)[0]
    for _ in range(2):
        with pytest.raises(wf.StepError):
            step((x, y + 4))
        assert not optimizer.state
    before = [p.detach().clone() for p in model.parameters()]
    step((x, y))
    assert len(optimizer.state) == 2
    with pytest.raises(wf.StepError):
        step((x, y + 4))
    assert len(optimizer.state) == 2 and step.opaque_reason is None
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before))
