"""The eager reference, and comparing with it bit by bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

import waterflow as wf
from waterflow.executor.engine import Engine, within

MiB = 1 << 20
Compute = Callable[[nn.Module, Any], Any]
# Called with (model, optimizer) once; what it returns is called with the step's number before each step.
During = Callable[[nn.Module, Optimizer], Callable[[int], None]]


@dataclass
class Trained:
    """What a training run ends with: all that must be equal between two ways of running it."""

    results: list[Any]
    model: nn.Module
    optimizer: Optimizer
    step: wf.Step | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Losses and metrics, parameters, buffers and optimizer state by name."""
        found = {f"loss {i} {n}": v for i, r in enumerate(self.results) for n, v in enumerate(pytree.tree_leaves(r))}
        found |= {f"parameter {name}": p.detach() for name, p in self.model.named_parameters()}
        found |= {f"buffer {name}": b for name, b in self.model.named_buffers()}
        for number, parameter in enumerate(p for g in self.optimizer.param_groups for p in g["params"]):
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if value is not None:
                    found[f"state {number} {key}"] = value
        return found


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal types, shapes and bits; NaN is equal to itself."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    if (one.layout, one.is_quantized) != (other.layout, other.is_quantized):
        return False
    pair = [_plain(t.detach()).contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
    return torch.equal(*pair)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_quantized:
        return tensor.int_repr()
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def assert_same(one: Trained, other: Trained) -> None:
    """Both runs ended with the same bits everywhere."""
    mine, theirs = one.tensors(), other.tensors()
    assert mine.keys() == theirs.keys(), f"only one run has {sorted(mine.keys() ^ theirs.keys())}"
    differing = [name for name in mine if not same_bits(mine[name], theirs[name])]
    first = {n: (mine[n].double() - theirs[n].double()).abs().max().item() for n in differing[:5]}
    assert not differing, f"{len(differing)} of {len(mine)} tensors differ, the first by {first}"


def fuse(optimizer: Optimizer) -> Optimizer:
    """The reference's optimizer in the form that captured steps use."""
    for group in optimizer.param_groups:
        if group.get("foreach") is None and "fused" in group:
            group["fused"] = True
    return optimizer


def of_target(loss: Callable[..., torch.Tensor]) -> Compute:
    """``loss(output, target)`` as a function of (model, batch)."""
    return lambda model, batch: loss(model(*batch[:-1]), batch[-1])


def train_eager(
    make: Callable[[], tuple[nn.Module, Optimizer]],
    batches: Sequence[Any],
    *,
    loss: Callable[..., torch.Tensor] | None = None,
    step: Compute | None = None,
    during: During | None = None,
    seed: int = 5,
    accumulate: int = 1,
    clip_grad_norm: float | None = None,
    clip_grad_value: float | None = None,
    autocast: torch.dtype | None = None,
) -> Trained:
    """The loop that everybody writes, drawing from the default generator."""
    torch.manual_seed(seed)
    model, optimizer = make()
    fuse(optimizer)
    act = during(model, optimizer) if during else lambda number: None
    compute = step or of_target(loss or F.cross_entropy)
    results = []
    torch.manual_seed(seed)
    for number, batch in enumerate(batches):
        act(number)
        with torch.autocast("cpu", dtype=autocast) if autocast else contextlib.nullcontext():
            result = compute(model, batch)
        value = result[0] if isinstance(result, tuple) else result
        (value / accumulate if accumulate > 1 else value).backward()
        results.append(pytree.tree_map(lambda t: t.detach().clone(), result))
        if (number + 1) % accumulate == 0:
            if clip_grad_norm is not None:
                norm = nn.utils.clip_grad_norm_(model.parameters(), clip_grad_norm)
                if isinstance(result, tuple):
                    results[-1][1].setdefault("grad_norm", norm)
            if clip_grad_value is not None:
                nn.utils.clip_grad_value_(model.parameters(), clip_grad_value)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return Trained(results, model, optimizer)


def train_step(
    make: Callable[[], tuple[nn.Module, Optimizer]], batches: Sequence[Any], *, seed: int = 5, **options: Any
) -> Trained:
    """The same through a ``Step``; options as for ``run_steps``."""
    torch.manual_seed(seed)
    model, optimizer = make()
    torch.manual_seed(seed)
    return run_steps(model, optimizer, batches, seed=seed, **options)


def run_steps(
    model: nn.Module,
    optimizer: Optimizer,
    batches: Sequence[Any],
    *,
    loss: Any = None,
    step: Compute | None = None,
    during: During | None = None,
    seed: int = 5,
    engine: Engine | None = None,
    **options: Any,
) -> Trained:
    """A loop over a ``Step``: alone, drawing from the default generator; in an engine, from one with this seed."""
    act = during(model, optimizer) if during else lambda number: None
    if step is None and loss is None:
        loss = F.cross_entropy
    if engine:
        options["generator"] = torch.Generator().manual_seed(seed)
    with within(engine) if engine else contextlib.nullcontext():
        job = wf.Step(model, loss=loss, step=step, optimizer=optimizer, **options)
        results = []
        for number, batch in enumerate(batches):
            act(number)
            results.append(job(batch))
    return Trained(results, model, optimizer, job)


def compare(
    make: Callable[[], tuple[nn.Module, Optimizer]],
    batches: Sequence[Any],
    *,
    engine: Engine | None = None,
    opaque: str | None = None,
    name: str | None = None,
    **options: Any,
) -> Trained:
    """Train both ways and demand equal bits. ``opaque``: what the reason for running eagerly must say."""
    eager = train_eager(make, batches, **options)
    mine = train_step(make, batches, engine=engine, name=name, **options)
    assert_same(mine, eager)
    assert mine.step is not None and mine.step.steps == len(batches)
    assert all(p.grad is None for p in mine.model.parameters())
    if opaque is None:
        assert mine.step.opaque_reason is None, mine.step.opaque_reason
    else:
        assert mine.step.opaque_reason is not None and opaque in mine.step.opaque_reason, mine.step.opaque_reason
    if engine:
        engine.native.check()
        mine.step.close()
    return mine


def images(count: int, size: int = 8, shape: Sequence[int] = (6,), classes: int = 4, seed: int = 1) -> list[Any]:
    """Batches of random inputs with classes."""
    random = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(size, *shape, generator=random), torch.randint(classes, (size,), generator=random)) for _ in range(count)
    ]


class Net(nn.Module):
    """A small network with a normalization, and dropout where asked for."""

    def __init__(self, width: int = 16, dropout: float = 0.0, inputs: int = 6, classes: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(inputs, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))
