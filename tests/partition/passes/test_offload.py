"""What moves to host memory meanwhile: against liveness of the graph that comes of it, and bit by bit against the plain one."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from tests.partition.graphs import capture_of, instructions_of
from tests.partition.passes.test_rematerialize import X, bits_stay, captured, peak_of, random_programs, run, targets
from tests.support import same_bits
from waterflow.partition.capture.trace import Capture
from waterflow.partition.passes.offload import choose_spilled, spill
from waterflow.partition.passes.operators import lies_in_host
from waterflow.partition.passes.storages import StorageTable
from waterflow.partition.plan.liveness import lifetimes

aten = torch.ops.aten


def check_choice(capture: Capture, limit: int) -> Capture:
    """Spill down to a limit; what the search believes must be what liveness finds in the graph that comes of it."""
    table = StorageTable(capture.graph)
    chosen = choose_spilled(table, limit)
    before = str(capture.graph)
    made = spill(capture, table, chosen)
    assert str(capture.graph) == before
    assert chosen.peak_before == peak_of(capture.graph)
    assert peak_of(made.graph) <= chosen.peak <= chosen.peak_before
    calls = instructions_of(made.graph)
    away = [node for node in calls if lies_in_host(node)]
    back = [node for node in calls if node.target is torch.ops.waterflow.from_host.default]
    assert len(away) == len(back) == len(chosen.moves)
    assert sum(node.meta["val"].untyped_storage().nbytes() for node in away) == chosen.moved >= chosen.held
    assert {node.args[0] for node in back} == set(away)
    copies = {torch.ops.waterflow.to_host.default, torch.ops.waterflow.from_host.default}
    operations = [node.target for node in StorageTable(made.graph).operations]
    assert Counter(o for o in operations if o not in copies) <= Counter(node.target for node in table.operations)  # none twice
    return made


@pytest.mark.needs_time("the bits of real models")
@pytest.mark.parametrize("name", ["cnn_bn", "resnet50", "vit", "bert", "gpt2", "lstm", "lstm_cell", "mamba"])
@pytest.mark.parametrize("share", [0.0, 0.5, 0.8])
def test_zoo(name: str, share: float) -> None:
    capture = capture_of(name, early_updates=False)
    check_choice(capture, int(share * peak_of(capture.graph)))


def test_what_is_within_the_limit_stays_as_it_is() -> None:
    capture = capture_of("cnn_bn")
    table = StorageTable(capture.graph)
    chosen = choose_spilled(table, peak_of(capture.graph))
    assert not chosen.moves and chosen.moved == chosen.held == 0
    assert str(spill(capture, table, chosen).graph) == str(capture.graph)


def test_no_more_than_is_needed() -> None:
    capture = capture_of("vit", early_updates=False)
    table = StorageTable(capture.graph)
    before = peak_of(capture.graph)
    some, more = choose_spilled(table, int(0.9 * before)), choose_spilled(table, int(0.7 * before))
    assert some.peak <= 0.9 * before and more.peak <= 0.7 * before
    assert 0 < some.moved < more.moved
    for number, (behind, need) in some.moves.items():  # each of them is needed
        without = {n: m for n, m in some.moves.items() if n != number}
        memory = [m.peak for m in _memory_of(table, without)]
        assert max(memory[behind + 1 : need]) > int(0.9 * before)


def _memory_of(table: StorageTable, moves: dict[int, tuple[int, int]]) -> Any:
    from waterflow.partition.plan.liveness import Lifetime, held_by

    lives = []
    for number, storage in enumerate(table.storages):
        if storage.birth < 0:
            continue
        end = len(table.operations) - 1 if storage.kept else storage.death
        if number in moves:
            behind, need = moves[number]
            lives += [Lifetime(storage.birth, behind, storage.size), Lifetime(need, end, storage.size)]
        else:
            lives.append(Lifetime(storage.birth, end, storage.size))
    lives += [Lifetime(at, at, size) for at, size in enumerate(table.temporary) if size]
    return held_by(lives, [0] * len(table.operations))


# -- by hand


def both(step: Any, *inputs: torch.Tensor, backward: str = "neg") -> Capture:
    """The lowest form of a step, which must compute the same."""
    plain = captured(step, *inputs, backward=backward)
    low = check_choice(plain, 0)
    for one, other in zip(run(plain, *inputs), run(low, *inputs)):
        assert same_bits(one, other)
    return low


def test_an_activation_goes_and_comes_back() -> None:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        a = x.exp()
        b = torch.cat([a.sin(), a.cos()])  # the peak is here
        return [b.sum().neg() * a]

    low = both(step, X)
    assert targets(low, "forward") == ["exp", "sin", "cos", "to_host", "cat", "sum"]
    assert targets(low) == ["neg", "from_host", "mul"]


def test_it_takes_no_memory_of_the_device() -> None:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        a = x.exp()
        b = torch.cat([a.sin(), a.cos()])
        return [b.sum().neg() * a]

    low = both(step, X)
    calls = instructions_of(low.graph)
    at = next(i for i, node in enumerate(calls) if lies_in_host(node))
    (life,) = [life for life in lifetimes(low.graph, calls) if life.birth == at]
    assert life.size == 0 and life.death > at


def test_random_numbers_move_too() -> None:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        a = torch.bernoulli(x.abs())
        b = torch.cat([a.sin(), a.cos()])
        return [b.sum().neg() * a]

    low = check_choice(captured(step, X, backward="neg"), 0)
    assert targets(low) == ["neg", "from_host", "mul"]


def test_views_are_looked_at_anew() -> None:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        a = x.exp().view(10, 100)
        seen = a.t()
        b = torch.cat([a.sin(), a.cos()])
        return [b.sum().neg() * seen * a[3:4].t()]

    low = both(step, X)
    assert "t" not in targets(low, "forward") and targets(low).count("from_host") == 1


def test_what_changes_in_place_goes_as_it_is_then() -> None:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        a = x.exp()
        part = a.view(10, 100)[2:7]
        part.mul_(3)
        again = a.relu_()
        b = torch.cat([a.sin(), a.cos()])
        return [b.sum().neg() * again * part.sum() * a]

    assert "from_host" in targets(both(step, X))


def test_one_of_several_results_moves() -> None:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        values, order = x.sort()
        b = torch.cat([values.sin(), values.cos()]).repeat(4)
        return [b.sum().neg() * values, order]

    assert targets(both(step, X)).count("from_host") == 1


def test_what_the_backward_pass_changes_stays() -> None:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        a = x.exp()
        b = torch.cat([a.sin(), a.cos()])
        return [b.sum().neg() * a.mul_(2)]

    assert "from_host" not in targets(both(step, X))


# -- random programs


@pytest.mark.slow
@random_programs
def test_random_programs(choices: list[Any], back: list[Any], share: float) -> None:
    bits_stay(check_choice, choices, back, share)
