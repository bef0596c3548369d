"""A job's own random numbers in the place of the process's: nothing lost, nothing mixed."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW

from tests.support import MiB, Trained, assert_same, images, run_steps, same_bits, train_eager
from waterflow.executor.engine import Engine
from waterflow.executor.rng import own_numbers


def draws(count: int, size: int = 3000) -> list[torch.Tensor]:
    """Draws of several kinds; an odd number of normal ones leaves half a pair behind."""
    made = []
    for number in range(count):
        made.append(torch.rand(size + number))
        made.append(torch.randn(3 + number % 20))
        made.append(torch.randn((), dtype=torch.float64))
    return made


def alone(seed: int, count: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return draws(count)


def test_one_sequence_goes_on_and_the_other_waits() -> None:
    torch.manual_seed(1)
    expected = [*draws(3), torch.rand(5)]
    outer = alone(2, 2)
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    with own_numbers(generator):
        seen = draws(3)
    between = draws(2)
    with own_numbers(generator):
        seen.append(torch.rand(5))
    assert all(map(same_bits, seen, expected)) and len(seen) == len(expected)
    assert all(map(same_bits, between, outer))


def test_an_exception_puts_both_back() -> None:
    generator = torch.Generator().manual_seed(1)
    torch.manual_seed(2)
    expected = torch.rand(5)
    torch.manual_seed(2)
    with pytest.raises(KeyError), own_numbers(generator):
        torch.rand(7)
        raise KeyError
    assert torch.equal(torch.rand(5), expected)
    own = torch.Generator().manual_seed(1)
    torch.rand(7, generator=own)
    assert torch.equal(own.get_state(), generator.get_state())


def test_threads_that_swap_at_the_same_time() -> None:
    """Without one lock for all, more than half of such draws were spoiled."""
    references = [alone(seed, 100) for seed in range(4)]
    torch.manual_seed(9)
    before = torch.get_rng_state()
    ends: list[Any] = [None] * 4

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        made = []
        for number in range(100):
            with own_numbers(generator):
                made.append(torch.rand(3000 + number))
            with own_numbers(generator):
                made.append(torch.randn(3 + number % 20))
                made.append(torch.randn((), dtype=torch.float64))
        ends[seed] = made

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for made, reference in zip(ends, references):
        assert all(map(same_bits, made, reference))
    assert torch.equal(torch.get_rng_state(), before)


class Drawing(nn.Module):
    """Draws with an operation that takes no generator, many times a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 64), nn.Linear(64, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(10):
            x = torch.native_dropout(x, 0.1, True)[0]
            x = F.dropout(x, 0.1) + 0.01 * torch.rand_like(x)
        return self.last(x)


def test_jobs_that_draw_without_a_generator() -> None:
    def make() -> Any:
        model = Drawing()
        return model, AdamW(model.parameters(), lr=0.01)

    batches = images(60, size=64)
    references = [train_eager(make, batches, seed=seed) for seed in range(3)]
    made = []
    for seed in range(3):
        torch.manual_seed(seed)
        made.append(make())
    ends: list[Any] = [None] * 3
    with Engine(memory=64 * MiB, lanes=3) as engine:

        def work(seed: int) -> None:
            ends[seed] = run_steps(*made[seed], batches, seed=seed, engine=engine)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    for end, reference in zip(ends, references):
        assert isinstance(end, Trained)
        assert_same(end, reference)


def test_only_generators() -> None:
    with pytest.raises(TypeError):
        own_numbers(None)
