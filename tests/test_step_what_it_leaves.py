"""What a step leaves in the objects around it, beside the tensors that it trains: a captured one leaves the same, or runs eagerly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import waterflow as wf
from tests.support import Net, images, same_bits


@pytest.fixture(autouse=True)
def _afresh(no_captures: Any) -> None:
    """No verdict is taken over from an earlier test."""


def eagerly(model: nn.Module, optimizer: Any, step: Callable[..., Any]) -> Callable[[Any], torch.Tensor]:
    def call(batch: Any) -> torch.Tensor:
        loss: torch.Tensor = step(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return call


def taking_out(model: nn.Module, batch: Any) -> torch.Tensor:
    labels = batch.pop("y") if "y" in batch else None
    logits = model(batch["x"])
    return logits.square().mean() if labels is None else F.cross_entropy(logits, labels)


def putting_in(model: nn.Module, batch: Any) -> torch.Tensor:
    batch["logits"] = model(batch["x"]) + batch["logits"].detach() if "logits" in batch else model(batch["x"])
    return F.cross_entropy(batch["logits"], batch["y"])


def replacing(model: nn.Module, batch: Any) -> torch.Tensor:
    batch["x"] = batch["x"] * 2
    return F.cross_entropy(model(batch["x"]), batch["y"])


def reordering(model: nn.Module, batch: Any) -> torch.Tensor:
    batch["x"] = batch.pop("x")
    return F.cross_entropy(model(batch["x"]), batch["y"]) * (1 + [*batch].index("x"))


def appending(model: nn.Module, batch: Any) -> torch.Tensor:
    batch["more"].append(model(batch["x"]).detach())
    return F.cross_entropy(model(batch["x"]), batch["y"]) * len(batch["more"])


@pytest.mark.parametrize("step", [taking_out, putting_in, replacing, reordering, appending])
def test_a_step_that_changes_the_containers_of_its_batch_runs_eagerly(step: Callable[..., Any]) -> None:
    def train(captured: bool) -> tuple[list[torch.Tensor], list[Any], Any]:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        batches: list[Any] = [{"x": x, "y": y, "more": [x]} for x, y in images(12)][:2]
        one: Any = wf.Step(model, optimizer=optimizer, step=step) if captured else eagerly(model, optimizer, step)
        losses = [one(batch) for _ in range(3) for batch in batches]
        return losses, [[(key, type(value)) for key, value in batch.items()] for batch in batches], one

    expected, found = train(False), train(True)
    assert all(map(same_bits, expected[0], found[0]))
    assert expected[1] == found[1]
    assert "changes what its batch consists of" in str(found[2].opaque_reason)


class Count(nn.Module):
    """A metric beside the model, with a buffer that is assigned, and one that adds up in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("right", torch.zeros((), dtype=torch.long))
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))


def assigned(count: Count, right: torch.Tensor) -> None:
    count.right = count.right + right


def in_place(count: Count, right: torch.Tensor) -> None:
    count.right += right
    count.seen += 4


@pytest.mark.parametrize(("update", "captured"), [(assigned, False), (in_place, True)])
def test_buffers_of_a_module_beside_the_model(update: Callable[..., None], captured: bool) -> None:
    def train(make: Callable[..., Any]) -> tuple[list[int], Any]:
        torch.manual_seed(0)
        model, count = Net(), Count()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            logits = model(batch[0])
            update(count, (logits.argmax(1) == batch[1]).sum())
            return F.cross_entropy(logits, batch[1])

        one = make(model, optimizer=optimizer, step=step)
        seen: list[int] = []
        for number, batch in enumerate(images(24)):
            if number == 3:
                count.right = torch.zeros((), dtype=torch.long)
            one(batch)
            seen += int(count.right), int(count.seen)
        return seen, one

    expected, found = train(eagerly), train(wf.Step)
    assert expected[0] == found[0]
    assert (found[1].opaque_reason is None) is captured


class Total:
    """A plain object that adds up in a tensor of its own."""

    def __init__(self) -> None:
        self.total = torch.zeros(())
        self.parts = [torch.zeros(())]


def test_what_adds_up_in_its_place_is_put_back_by_the_step_itself() -> None:
    def train(make: Callable[..., Any]) -> tuple[Total, Any]:
        torch.manual_seed(0)
        model, total = Net(), Total()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)

        def step(model: nn.Module, batch: Any) -> torch.Tensor:
            loss = F.cross_entropy(model(batch[0]), batch[1])
            total.total += loss.detach()
            total.parts[0] += 1
            return loss

        one = make(model, optimizer=optimizer, step=step)
        for batch in images(24):
            one(batch)
        return total, one

    expected, found = train(eagerly), train(wf.Step)
    assert found[1].opaque_reason is None
    assert same_bits(expected[0].total, found[0].total) and same_bits(expected[0].parts[0], found[0].parts[0])


WAYS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "twice": lambda buffer, y: buffer.add_(y).mul_(0.5),
    "out": lambda buffer, y: torch.add(buffer, y, out=buffer),
    "outs": lambda buffer, y: torch.sort(y, out=(buffer, torch.empty(4, dtype=torch.long))),
    "out_of_a_view": lambda buffer, y: torch.add(buffer[:2], 1.0, out=buffer[2:]),
    "view": lambda buffer, y: buffer[1:].add_(1.0),
    "item": lambda buffer, y: buffer.__setitem__(0, 1.0),
    "detached": lambda buffer, y: buffer.detach().mul_(2.0),
    "data": lambda buffer, y: buffer.data.add_(1.0),
    "list": lambda buffer, y: torch._foreach_mul_([buffer[:2], buffer[2:]], 2.0),
    "not": lambda buffer, y: buffer + y,
}


class Writing(nn.Module):
    """Changes a buffer of its own by each way of writing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
        for name in WAYS:
            self.register_buffer(name, torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layers(torch.cumsum(x.mul_(0.5), 0, out=x))
        with torch.no_grad():
            for name, write in WAYS.items():
                write(getattr(self, name), y.mean(0))
        return y.square().mean()


def test_what_a_step_changes_has_its_version_raised_as_in_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WATERFLOW_AUDIT", "off")  # audits do steps twice

    def train(captured: bool) -> tuple[list[dict[str, int]], list[torch.Tensor], Any]:
        torch.manual_seed(0)
        model = Writing()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        one: Any = wf.Step(model, optimizer=optimizer) if captured else eagerly(model, optimizer, lambda m, batch: m(*batch))
        versions = []
        for x, _ in images(3):
            one((x,))
            versions.append({name: tensor._version for name, tensor in [*model.named_buffers(), ("batch", x)]})
        return versions, [buffer.clone() for buffer in model.buffers()], one

    expected, found = train(False), train(True)
    assert found[2].opaque_reason is None and found[0] == expected[0]
    assert all(map(same_bits, expected[1], found[1]))
