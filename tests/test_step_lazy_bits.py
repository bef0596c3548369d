"""Conjugate and negative views, whose memory torch reads otherwise than it stands there, in captured steps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import waterflow as wf
from tests.support import same_bits
from waterflow.executor.data.copies import copies_of

Compute = Callable[[nn.Module, Tensor], Tensor]


def written(view: Callable[[Tensor], Tensor]) -> Compute:
    """Changes a tensor through a view of it."""

    def step(model: nn.Module, x: Tensor) -> Tensor:
        spectrum = torch.fft.fft(model(x)).clone()
        view(spectrum).mul_(2).add_(0.5)
        return torch.view_as_real(spectrum).tanh().sum()

    return step


STEPS: dict[str, Compute] = {
    "imag of conj": lambda model, x: model(torch.fft.fft(x).conj().imag).tanh().sum(),
    "real of conj": lambda model, x: model(torch.fft.fft(x).conj().real).tanh().sum(),
    "imag in backward": lambda model, x: torch.fft.fft(model(x)).conj().imag.tanh().sum(),
    "imag of a product": lambda model, x: (torch.fft.fft(model(x)) * torch.fft.fft(x[:, :4]).conj()).imag.tanh().sum(),
    "resolve_neg": lambda model, x: model(torch.fft.fft(x).conj().imag.resolve_neg()).tanh().sum(),
    "resolve_conj": lambda model, x: torch.view_as_real(torch.fft.fft(model(x)).conj().resolve_conj()).tanh().sum(),
    "physical": lambda model, x: torch.view_as_real(torch.fft.fft(model(x)).conj_physical()).tanh().sum(),
    "contiguous": lambda model, x: model(torch.fft.fft(x).conj().imag.contiguous().view(-1, 8)).tanh().sum(),
    "views of it": lambda model, x: model(torch.fft.fft(x).conj().imag[1:].t().reshape(-1, 8)).tanh().sum(),
    "its negative": lambda model, x: model(torch._neg_view(torch.fft.fft(x).conj().imag)).tanh().sum(),
    "product of conj": lambda model, x: (torch.fft.fft(model(x)).conj() @ torch.fft.fft(x[:, :4]).mH.mT.mT).abs().sum(),
    "adjoint": lambda model, x: (torch.fft.fft(model(x)).mH @ torch.fft.fft(x)).abs().sum(),
    "written, conj": written(lambda spectrum: spectrum.conj()),
    "written, negative": written(lambda spectrum: spectrum.conj().imag),
    "copied into": written(lambda spectrum: spectrum.conj().imag[:, 1:].copy_(spectrum.real[:, 1:])),
    "a parameter's": lambda model, x: (model(x) * torch._neg_view(model.weight)[:, 0]).tanh().sum(),  # type: ignore[index,operator]
    "metric": lambda model, x: (model(x).sum(), {"imag": torch.fft.fft(x).conj().imag}),  # type: ignore[dict-item,return-value]
}


def compare(compute: Any, batches: list[Any], model: nn.Module | None = None) -> wf.Step:
    torch.manual_seed(0)
    model = nn.Linear(8, 4) if model is None else model
    other = copy.deepcopy(model)
    optimizer, its_optimizer = (SGD(m.parameters(), lr=0.1, fused=True) for m in (model, other))
    step = wf.Step(other, optimizer=its_optimizer, step=compute)
    for batch in batches:
        given = copies_of([batch])[0]
        result = compute(model, batch)
        loss = result[0] if isinstance(result, tuple) else result
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mine = step(given)
        if isinstance(mine, tuple):
            assert same_bits(mine[1]["imag"].resolve_neg(), result[1]["imag"].resolve_neg())
            mine = mine[0]
        assert same_bits(loss, mine)
        assert same_bits(batch.resolve_conj().resolve_neg(), given.resolve_conj().resolve_neg())
        assert all(map(same_bits, model.parameters(), other.parameters()))
    return step


def batches() -> list[Tensor]:
    numbers = torch.Generator().manual_seed(2)
    return [torch.randn(9, 8, generator=numbers) for _ in range(4)]


@pytest.mark.parametrize("kind", STEPS)
def test_signs_are_kept(kind: str, no_captures: Any) -> None:
    assert compare(STEPS[kind], batches()).opaque_reason is None


BATCHES: dict[str, Compute] = {
    "read": lambda model, x: model(x.real + x.imag).tanh().sum(),
    "as real numbers": lambda model, x: torch.view_as_real(x.resolve_conj()).mul(model.weight[0, :1]).sum(),  # type: ignore[index,operator]
    "written": lambda model, x: model(x.mul_(2).imag).tanh().sum(),
}


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_arrive_as_views_now_and_then(kind: str, no_captures: Any) -> None:
    """A plain batch and a conjugate of equal shape are not the same step."""
    given = [torch.complex(one, two) for one, two in zip(batches(), reversed(batches()))]
    step = compare(BATCHES[kind], [given[0], given[1].conj(), given[2], given[3].conj()])
    assert step.opaque_reason is None


def test_negative_batches_arrive_now_and_then(no_captures: Any) -> None:
    given = [one if n % 2 else torch._neg_view(one) for n, one in enumerate(batches())]
    assert compare(lambda model, x: model(x).tanh().sum() * x[0, 0], given).opaque_reason is None


def test_parameters_and_buffers_that_are_negative_views(no_captures: Any) -> None:
    class Negative(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))
            self.register_buffer("shift", torch._neg_view(torch.randn(4)))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.t() + self.shift  # type: ignore[no-any-return]

    model = Negative()
    compare(lambda model, x: model(x).tanh().sum(), batches(), model)


def test_copies_of_a_batch_stay_views() -> None:
    one = torch.randn(4, 6, dtype=torch.complex64).conj()[:, ::2]
    two = torch._neg_view(torch.randn(4))
    for given, copied in zip((one, two), copies_of([one, two])):
        assert (given.is_conj(), given.is_neg(), given.stride()) == (copied.is_conj(), copied.is_neg(), copied.stride())
        assert torch.equal(given, copied) and given.data_ptr() != copied.data_ptr()
