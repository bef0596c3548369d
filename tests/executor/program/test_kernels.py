"""Kernels of our own against torch's: every bit of the results, their layout, and the generator afterwards."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from tests.support import Trained, assert_same as assert_same_runs, train_eager, train_step
from waterflow.executor.engine import Engine
from waterflow.executor.program.kernel_selection import aliases, bypassed, masks, short_form

aten, ours = torch.ops.aten, torch.ops.waterflow
INF, NAN = float("inf"), float("nan")
SPECIAL = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, -NAN, 1e-45, -1e-45, 1.17549435e-38, 3.4028234e38, -3.4028234e38]


def assert_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.dtype == expected.dtype and got.shape == expected.shape and got.stride() == expected.stride()
    if got.is_floating_point():
        bits = {8: torch.int64, 4: torch.int32, 2: torch.int16}[got.element_size()]
        got, expected = (t.reshape(-1).clone().view(bits) for t in (got, expected))
    assert torch.equal(got, expected)


def layouts(*sizes: int, seed: int = 0) -> list[torch.Tensor]:
    """One shape in many layouts: dense in several orders, with gaps, shifted, repeated."""
    torch.manual_seed(seed)
    dims = len(sizes)
    made = []
    for order in itertools.permutations(range(dims)):
        back = [order.index(i) for i in range(dims)]
        made.append(torch.randn([sizes[i] for i in order]).permute(back))
    made.append(torch.randn([2 * s for s in sizes])[tuple(slice(None, None, 2) for _ in sizes)])
    made.append(torch.randn(1 + torch.Size(sizes).numel())[1:].view(sizes))
    made.append(torch.randn([1, *sizes[1:]]).expand(sizes))
    assert all(t.shape == torch.Size(sizes) for t in made)
    return made


def special(numel: int, seed: int) -> torch.Tensor:
    """Ordinary numbers, and all special values at places drawn at random."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator)
    chosen = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (numel,), generator=generator)]
    return torch.where(torch.rand(numel, generator=generator) < 0.6, chosen, values)


SHAPES = [(0,), (1,), (7,), (3, 5), (4, 1, 6), (1, 3, 1), (2, 3, 4), (2, 3, 4, 5), (2, 3, 1, 5), (40000,), (200, 170)]


# -- random masks


def generators(seed: int, drawn: int, normals: bool) -> tuple[torch.Generator, torch.Generator]:
    made = []
    for _ in range(2):
        generator = torch.Generator().manual_seed(seed)
        if normals:
            torch.randn(3, generator=generator)  # leaves a number for the next call
        torch.randint(10, (drawn,), generator=generator)
        made.append(generator)
    return made[0], made[1]


@settings(max_examples=150, deadline=None)
@given(
    numel=st.integers(0, 3000),
    drawn=st.integers(0, 1300),
    seed=st.integers(0, 2**40),
    p=st.sampled_from([0.0, 1.0, 0.5, 5e-324, 1e-300, 2.0**-53, 2.0**-54, 1 - 2.0**-53]) | st.floats(0, 1),
    normals=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_masks_are_those_of_torch(numel: int, drawn: int, seed: int, p: float, normals: bool, dtype: torch.dtype) -> None:
    mine, theirs = generators(seed, drawn, normals)
    for _ in range(2):
        got = ours.bernoulli_(torch.empty(numel, dtype=dtype), p, generator=mine)
        assert_same(got, torch.empty(numel, dtype=dtype).bernoulli_(p, generator=theirs))
        assert torch.equal(mine.get_state(), theirs.get_state())
    got = ours.dropout_mask(torch.empty(numel, dtype=dtype), p, generator=mine)
    assert_same(got, torch.empty(numel, dtype=dtype).bernoulli_(p, generator=theirs).div_(p))
    assert torch.equal(mine.get_state(), theirs.get_state())
    assert_same(torch.randn(5, generator=mine), torch.randn(5, generator=theirs))


def test_a_share_near_one_number_is_decided_as_by_torch() -> None:
    drawn = torch.rand(64, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for p in (value.item() for value in drawn):
        for near in (p, p + 2.0**-53, p - 2.0**-53):
            mine, theirs = generators(3, 0, False)
            got = ours.bernoulli_(torch.empty(64), near, generator=mine)
            assert_same(got, torch.empty(64).bernoulli_(near, generator=theirs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.int64, torch.bool])
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_masks_of_any_layout(sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    for like in layouts(*sizes):
        like = like.to(dtype) if 0 not in like.stride() else like
        mine, theirs = generators(5, 17, False)
        if 0 not in like.stride():
            got, expected = (torch.empty_strided(like.shape, like.stride(), dtype=dtype) for _ in range(2))
            assert_same(ours.bernoulli_(got, 0.6, generator=mine), expected.bernoulli_(0.6, generator=theirs))
        if like.is_floating_point():
            got = ours.dropout_mask(like, 0.6, generator=mine)
            assert_same(got, torch.empty_like(like).bernoulli_(0.6, generator=theirs).div_(0.6))
        assert torch.equal(mine.get_state(), theirs.get_state())


def test_without_a_generator_masks_come_from_the_process_s_own() -> None:
    torch.manual_seed(11)
    got, after = ours.bernoulli_(torch.empty(100), 0.4), torch.rand(3)
    torch.manual_seed(11)
    assert_same(got, torch.empty(100).bernoulli_(0.4))
    assert_same(after, torch.rand(3))


@pytest.mark.parametrize("p", [-0.1, 1.5, NAN])
def test_a_share_that_is_none_is_torch_s_error(p: float) -> None:
    for call in (lambda: ours.bernoulli_(torch.empty(3), p), lambda: ours.dropout_mask(torch.empty(3), p)):
        with pytest.raises(RuntimeError, match=r"expects p to be in \[0, 1\]"):
            call()


# -- elementwise, copies


ONE_TENSOR = {
    "relu": (ours.relu, aten.relu.default),
    "clone": (
        lambda x: ours.clone(x, memory_format=torch.contiguous_format),
        lambda x: aten.clone.default(x, memory_format=torch.contiguous_format),
    ),
    "clone as it is": (ours.clone, aten.clone.default),
    **{
        f"times {number}": (
            lambda x, number=number: ours.mul_number(x, number),
            lambda x, number=number: aten.mul.Tensor(x, number),
        )
        for number in (0.5946035575013605, 3, -0.0, 1e300, INF, NAN, 2**62 + 1)
    },
}  # fmt: skip
TWO_TENSORS = {
    "mul": (ours.mul, aten.mul.Tensor),
    "add": (ours.add, aten.add.Tensor),
    "add twice": (lambda x, y: ours.add(x, y, alpha=2), lambda x, y: aten.add.Tensor(x, y, alpha=2)),
    "threshold_backward": (
        lambda x, y: ours.threshold_backward(x, y, 0.0),
        lambda x, y: aten.threshold_backward.default(x, y, 0.0),
    ),
    "threshold_backward at 0.1": (
        lambda x, y: ours.threshold_backward(x, y, 0.1),
        lambda x, y: aten.threshold_backward.default(x, y, 0.1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ONE_TENSOR)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_one_tensor_of_any_layout(name: str, sizes: tuple[int, ...]) -> None:
    mine, theirs = ONE_TENSOR[name]
    for x in layouts(*sizes):
        for given_ in (x, x.double(), x.half()):
            assert_same(mine(given_).float(), theirs(given_).float())
        assert_same(mine(x), theirs(x))


@pytest.mark.parametrize("name", ONE_TENSOR)
def test_special_values_at_every_place(name: str) -> None:
    mine, theirs = ONE_TENSOR[name]
    for numel in range(1, 101):
        x = special(numel, numel)
        if name == "times nan":  # which of two NaNs goes on is left to the compiler, torch's too
            x = x.nan_to_num(7.0)
        assert_same(mine(x), theirs(x))
    for value, place in itertools.product(SPECIAL, range(40)):
        x = torch.ones(40)
        x[place] = 7.0 if name == "times nan" and value != value else value
        assert_same(mine(x), theirs(x))


@pytest.mark.parametrize("name", TWO_TENSORS)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_two_tensors_of_any_layouts(name: str, sizes: tuple[int, ...]) -> None:
    mine, theirs = TWO_TENSORS[name]
    for x, y in itertools.product(layouts(*sizes), layouts(*sizes, seed=1)):
        assert_same(mine(x, y), theirs(x, y))
    if len(sizes) > 1:
        x, y = torch.randn(sizes), torch.randn(sizes[1:])
        assert_same(mine(x, y), theirs(x, y))
    x, y = torch.randn(sizes), torch.randn(sizes).double()
    assert_same(mine(x, y), theirs(x, y))


@pytest.mark.parametrize("name", TWO_TENSORS)
def test_special_values_in_pairs(name: str) -> None:
    mine, theirs = TWO_TENSORS[name]
    for numel in range(1, 101):
        x, y = special(numel, numel), special(numel, 1000 + numel)
        if "backward" not in name:  # which of two NaNs goes on is left to the compiler, torch's too
            y = torch.where(x.isnan() & y.isnan(), torch.ones(()), y)
        assert_same(mine(x, y), theirs(x, y))


# -- softmax, pooling


@pytest.mark.parametrize("sizes", [(5,), (3, 4), (2, 3, 4, 16), (1, 4, 4), (4, 1), (2, 100), (0, 3), (3, 0)], ids=str)
@pytest.mark.parametrize("dim", [-1, 0])
def test_softmax_of_masked_rows(sizes: tuple[int, ...], dim: int) -> None:
    for seed, share in itertools.product(range(10), (0.0, 0.1, 0.8)):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(sizes, generator=generator)
        x = torch.where(torch.rand(sizes, generator=generator) < share, torch.tensor(-INF), x)
        x = torch.where(torch.rand(sizes, generator=generator) < 0.02 * share, torch.tensor(NAN), x)
        for given_ in (x, x.double(), x.transpose(0, -1).contiguous().transpose(0, -1)):
            assert_same(ours._safe_softmax(given_, dim), aten._safe_softmax.default(given_, dim))
    whole = torch.full(sizes, -INF)
    assert_same(ours._safe_softmax(whole, dim), aten._safe_softmax.default(whole, dim))
    half = ours._safe_softmax(whole, dim, dtype=torch.float64)
    assert_same(half, aten._safe_softmax.default(whole, dim, dtype=torch.float64))


def assert_pools_alike(x: torch.Tensor, *arguments: Any) -> None:
    got, expected = ours.max_pool2d_with_indices(x, *arguments), aten.max_pool2d_with_indices.default(x, *arguments)
    for mine, theirs in zip(got, expected):
        assert_same(mine, theirs)


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, n) for n in (3, 4, 40, 40)]),
    seed=st.integers(0, 1000),
    ceil_mode=st.booleans(),
    channels_last=st.booleans(),
)
def test_pooling_of_pairs(sizes: tuple[int, ...], seed: int, ceil_mode: bool, channels_last: bool) -> None:
    if min(sizes[2:]) < 2:
        sizes = (*sizes[:2], max(sizes[2], 2), max(sizes[3], 2))
    x = special(torch.Size(sizes).numel(), seed).view(sizes)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    assert_pools_alike(x, [2, 2], [2, 2], [0, 0], [1, 1], ceil_mode)
    assert_pools_alike(x, [2, 2], [], [0, 0], [1, 1], ceil_mode)


@pytest.mark.parametrize(
    "arguments",
    [([3, 3], [2, 2], [1, 1], [1, 1]), ([2, 2], [1, 1], [0, 0], [1, 1]), ([2, 2], [2, 2], [1, 1], [1, 1]),
     ([2, 2], [2, 2], [0, 0], [2, 2]), ([2, 3], [2, 2], [0, 0], [1, 1]), ([2, 2], [2, 3], [0, 0], [1, 1])],
    ids=str,
)  # fmt: skip
def test_other_pooling_is_torch_s(arguments: Any) -> None:
    for x in (torch.randn(2, 3, 9, 12), torch.randn(2, 3, 9, 12).double(), torch.randn(2, 9, 12, 3).permute(0, 3, 1, 2)):
        for ceil_mode in (False, True):
            assert_pools_alike(x, *arguments, ceil_mode)
    assert_pools_alike(torch.randn(3, 8, 8), [2, 2], [2, 2])


# -- in a step


class Mixed(nn.Module):
    """Convolution, pooling, attention; dropout with a rate of a module's, and with a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(1, 4, 3, padding=1)
        self.dropout = nn.Dropout(0.3)
        self.attention = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True)
        self.out = nn.Linear(4, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.dropout(F.max_pool2d(F.relu(self.convolution(x)), 2))
        return self.out(self.attention(x.flatten(2).transpose(1, 2)).mean(1))


class OwnMask(nn.Module):
    """A mask that is written in the model's own code; ``rule`` makes it from an empty tensor."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        self.linear, self.rule = nn.Linear(6, 10), rule

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        return x * self.rule(torch.empty_like(x))


def batches(*shape: int, count: int = 8) -> list[Any]:
    generator = torch.Generator().manual_seed(2)
    return [(torch.randn(shape, generator=generator), torch.randint(10, shape[:1], generator=generator)) for _ in range(count)]


def calls_of(trained: Trained) -> list[Any]:
    assert trained.step is not None
    captured = next(iter(trained.step._bound_steps._bound_steps.values())).captured  # type: ignore[attr-defined]
    return [n for n in captured.capture.graph.nodes if isinstance(n.target, torch._ops.OpOverload)]


def make_mixed() -> Any:
    model = Mixed()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("lanes", [None, 1, 2])
def test_a_step_of_our_kernels_ends_with_the_same_bits(lanes: int | None) -> None:
    data = batches(8, 1, 12, 12)
    expected = train_eager(make_mixed, data)
    if lanes is None:
        trained = train_step(make_mixed, data)
    else:
        with Engine(memory="256MiB", lanes=lanes) as engine:
            trained = train_step(make_mixed, data, engine=engine)
            assert trained.step is not None
            assert trained.step.planned_requests > 0 and trained.step.missed_requests == 0
    assert_same_runs(trained, expected)
    calls = calls_of(trained)
    assert len(masks(calls)) == 5
    used = set()
    for node in calls:
        values = [dict(node.kwargs).get(a.name, a.default_value) for a in node.target._schema.arguments]
        values[: len(node.args)] = node.args
        form = short_form(node.target, values)
        used |= {str(form)} if form.namespace == "waterflow" else set()
    expected_forms = {"relu", "threshold_backward", "_safe_softmax", "max_pool2d_with_indices", "mul", "add", "clone"}
    assert {f"waterflow.{name}.default" for name in expected_forms} <= used


@pytest.mark.parametrize(
    "rule, made",
    [
        (lambda empty: empty.bernoulli_(0.5).div_(0.5), 1),
        (lambda empty: empty.bernoulli_(0.5).div_(0.25), 0),
        (lambda empty: empty.bernoulli_(0.5), 0),
        (lambda empty: empty.bernoulli_(0.5).div_(0.5) + empty.sum(), None),
        (lambda empty: (empty.bernoulli_(0.5) * 1.0).div_(0.5), 0),
        (lambda empty: (empty.bernoulli_(0.5), torch.rand(3))[0].div_(0.5), 0),
        (lambda empty: empty.double().bernoulli_(0.5).div_(0.5).float(), None),
    ],
)
def test_what_is_no_mask_stays_as_it_is(rule: Any, made: int | None) -> None:
    def make() -> Any:
        model = OwnMask(rule)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    data = batches(4, 6)
    trained = train_step(make, data)
    assert_same_runs(trained, train_eager(make, data))
    assert made is None or len(masks(calls_of(trained))) == made


# -- called without the dispatcher


class Clipped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(F.relu(x) * x + x)


def test_batches_whose_memory_holds_other_values() -> None:
    """The dispatcher would resolve them; kernels that are called without it look at the memory."""
    generator = torch.Generator().manual_seed(4)
    data = [(torch.randn(8, 16, dtype=torch.complex64, generator=generator).conj().imag, torch.arange(8)) for _ in range(5)]
    assert data[0][0].is_neg()

    def make() -> Any:
        model = Clipped()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    with Engine(memory="64MiB", lanes=1) as engine:
        assert_same_runs(train_step(make, data, engine=engine), train_eager(make, data))


def graph_of(code: Any, *given: torch.Tensor) -> list[Any]:
    return [node for node in make_fx(code, tracing_mode="fake")(*given).graph.nodes if node.op == "call_function"]


def test_what_is_written_later_is_a_direct_view_if_nobody_else_sees_it() -> None:
    def alone(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        seen = aten.view.default(aten.sum.dim_IntList(x, [0], True), [4])
        aten.add_.Tensor(seen, y)
        return aten.view.default(seen, [2, 2])

    calls = graph_of(alone, torch.randn(3, 4), torch.randn(4))
    total, seen, written, later = calls
    assert aliases(calls, ()) == {seen: total, later: written}
    later.args = (seen, [2, 2])
    found = aliases(calls, ())
    assert found == {seen: total, later: seen}  # not of the sum: what was written stands in the view
    assert not bypassed(found, [later])

    def shared(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total = aten.sum.dim_IntList(x, [0], True)
        aten.add_.Tensor(aten.view.default(total, [4]), y)
        return total

    assert aliases(graph_of(shared, torch.randn(3, 4), torch.randn(4)), ()) == {}
