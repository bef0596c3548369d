"""Captured steps compute with the layouts that kernels return, also where shape rules predict others."""

from __future__ import annotations

import copy
from types import FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD

import waterflow as wf
from tests.support import same_bits
from waterflow.executor.program.capture_cache import captures
from waterflow.partition.capture import fake_rules
from waterflow.partition.capture.fake_rules import TracingMode

aten = torch.ops.aten


class Permuted(nn.Module):
    """A LayerNorm over the channels of an image: its kernel's gradient lies otherwise than its shape rule says."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(512, 512, kernel, padding=kernel // 2)
        self.norm, self.out = nn.LayerNorm(512), nn.Linear(512, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm((x + self.conv(x)).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.out(x.mean((2, 3)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("size", [2, 3])
def test_sums_over_gradients_have_the_order_of_kernels(kernel: int, size: int, no_captures: Any) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        model = Permuted(kernel)
        other = copy.deepcopy(model)
        batch = torch.randn(4, 512, size, size), torch.randint(0, 10, (4,))
        optimizer, its_optimizer = (SGD(m.parameters(), lr=0.1, fused=True) for m in (model, other))
        step = wf.Step(other, optimizer=its_optimizer, loss=F.cross_entropy)
        for _ in range(2):
            optimizer.zero_grad()
            F.cross_entropy(model(batch[0]), batch[1]).backward()
            optimizer.step()
            step(batch)
        assert step.opaque_reason is None
        assert all(map(same_bits, model.parameters(), other.parameters()))
    finally:
        torch.set_num_threads(threads)


def nodes_of(step: wf.Step) -> list[Any]:
    (variant,) = step._bound_steps._bound_steps.values()
    return list(variant.plain.capture.graph.nodes)


def wrong_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the shape rule of ``tanh`` say that results lie row by row, which no kernel does for a transposed operand."""
    original = TracingMode._dispatch_impl

    def dispatch(self: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if func is aten.tanh.default and not fake_rules.is_corrected(func):
            with self:
                return torch.empty_like(args[0], memory_format=torch.contiguous_format)
        return original(self, func, types, args, kwargs)

    # As if torch said so: what the user's own code does there would be no part of a capture.
    code = dispatch.__code__.replace(co_filename=torch.__file__)
    theirs = FunctionType(code, {**globals(), "__name__": torch.__name__}, "dispatch", None, dispatch.__closure__)
    monkeypatch.setattr(TracingMode, "_dispatch_impl", theirs)
    monkeypatch.setattr(fake_rules, "_answers", {})
    monkeypatch.setattr(fake_rules, "_corrections", {})


def test_a_wrong_rule_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch, no_captures: Any) -> None:
    torch._subclasses.fake_tensor.FakeTensorMode.cache_clear()
    wrong_rule(monkeypatch)

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        return model(x.t().tanh().contiguous().view(-1, 8)).sum()  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model, x = nn.Linear(8, 4), torch.randn(8, 6)
    expected = compute(model, x)
    step = wf.Step(model, optimizer=SGD(model.parameters(), lr=0.1), step=compute)
    assert same_bits(step(x), expected)
    assert captures.captures == 2  # by the rule, and by what the kernel said
    assert aten.clone.default in [node.target for node in nodes_of(step)]  # the rule saw nothing to copy
    torch._subclasses.fake_tensor.FakeTensorMode.cache_clear()


def test_nothing_is_asked_about_what_lies_row_by_row(monkeypatch: pytest.MonkeyPatch, no_captures: Any) -> None:
    monkeypatch.setattr(fake_rules, "_answers", {})
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    step = wf.Step(model, optimizer=SGD(model.parameters(), lr=0.1), loss=F.cross_entropy)
    step((torch.randn(4, 8), torch.zeros(4, dtype=torch.long)))
    assert captures.captures == 1 and not fake_rules._answers


def test_questions_draw_no_random_numbers_and_change_nothing(monkeypatch: pytest.MonkeyPatch, no_captures: Any) -> None:
    monkeypatch.setattr(fake_rules, "_answers", {})
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Flatten(), nn.Linear(288, 4))
    model = model.to(memory_format=torch.channels_last)
    step = wf.Step(model, optimizer=SGD(model.parameters(), lr=0.0), loss=F.cross_entropy)
    before, numbers = model[1].running_mean.clone(), torch.get_rng_state()  # type: ignore[union-attr,operator]
    plan = step.plan_for((torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)))
    assert plan.height and not fake_rules._answers  # plans run nothing
    torch.set_rng_state(numbers)
    batch = torch.zeros(2, 3, 8, 8), torch.zeros(2, dtype=torch.long)
    step._bound_steps.find(list(batch), None, "a batch", True)
    assert fake_rules._answers
    assert torch.equal(torch.get_rng_state(), numbers) and torch.equal(model[1].running_mean, before)  # type: ignore[arg-type]
