"""Small products and sums of our own: torch's bits, whatever the layout."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from waterflow import _C

ours = torch.ops.waterflow
SIZES = (1, 2, 3, 4, 7, 16, 33, 64, 100)


def same_bits(mine: torch.Tensor, reference: torch.Tensor) -> None:
    assert mine.shape == reference.shape and mine.stride() == reference.stride() and mine.dtype == reference.dtype
    assert torch.equal(mine.reshape(-1).view(torch.uint8), reference.reshape(-1).view(torch.uint8))


def matrices(rows: int, columns: int) -> list[torch.Tensor]:
    """By rows, by columns, parts of larger ones, repeated rows, every second column."""
    return [
        torch.randn(rows, columns),
        torch.randn(columns, rows).t(),
        torch.randn(rows + 2, columns + 3)[1:-1, 2:-1],
        torch.randn(columns + 3, rows + 1)[3:, 1:].t(),
        torch.randn(1, columns).expand(rows, columns),
        torch.randn(rows, 2 * columns)[:, ::2],
    ]


def compare(rows: int, inner: int, columns: int) -> None:
    """Products of this shape, each side by rows and by columns, with a bias and without."""
    for turned in itertools.product((False, True), repeat=2):
        a = torch.randn(inner, rows).t() if turned[0] else torch.randn(rows, inner)
        b = torch.randn(columns, inner).t() if turned[1] else torch.randn(inner, columns)
        bias = torch.randn(columns)
        same_bits(ours.small_mm(a, b), torch.mm(a, b))
        same_bits(ours.small_addmm(bias, a, b), torch.addmm(bias, a, b))


@pytest.mark.parametrize("inner", SIZES)
def test_products_of_all_sizes(inner: int) -> None:
    for rows, columns in itertools.product(SIZES, repeat=2):
        compare(rows, inner, columns)


@pytest.mark.parametrize("inner", [5, 64, 191, 192, 193, 256, 257, 400])
def test_long_products(inner: int) -> None:
    for rows, columns in itertools.product((2, 5, 64), (16, 48, 128)):
        compare(rows, inner, columns)


def test_products_without_blas() -> None:
    """Shapes that were not met before: else the tests above would compare BLAS with itself."""
    before = _C.short_products()
    for rows, inner in itertools.product((3, 4, 5, 6), (24, 40, 56)):
        compare(rows, inner, 80)
    processors = Path("/proc/cpuinfo")
    known = processors.exists() and "AuthenticAMD" in processors.read_text()
    if not (known and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and torch.backends.mkl.is_available()):
        pytest.skip("seen with MKL on AMD's processors with AVX2")
    assert _C.short_products() > before


def test_products_of_all_layouts() -> None:
    for columns in (9, 48):
        for a, b in itertools.product(matrices(5, 12), matrices(12, columns)):
            same_bits(ours.small_mm(a, b), torch.mm(a, b))
            for bias in (torch.randn(columns), torch.randn(2 * columns)[::2], torch.randn(5, columns), torch.randn(())):
                same_bits(ours.small_addmm(bias, a, b), torch.addmm(bias, a, b))


def test_special_values() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -1.0, float("inf"), -float("inf"), float("nan"), 1e-42, 3e38])
    for columns in (9, 16, 32):
        a, b = values.repeat(9, 1), values.repeat(columns, 1).t().contiguous()
        same_bits(ours.small_mm(a, b).nan_to_num(7.0), torch.mm(a, b).nan_to_num(7.0))
        for one, other, added in itertools.product((0.0, -0.0), (1.0, -1.0), (0.0, -0.0)):
            a, b, bias = torch.full((6, 24), one), torch.full((24, columns), other), torch.full((columns,), added)
            same_bits(ours.small_mm(a, b), torch.mm(a, b))
            same_bits(ours.small_addmm(bias, a, b), torch.addmm(bias, a, b))
    zeros = torch.full((3, 64), -0.0)
    same_bits(ours.sum_of_few_rows(zeros, [0]), zeros.sum(0))


def test_factors_and_other_kinds_go_to_torch() -> None:
    a, b, bias = torch.randn(4, 5), torch.randn(5, 6), torch.randn(6)
    same_bits(ours.small_addmm(bias, a, b, beta=0.5, alpha=2), torch.addmm(bias, a, b, beta=0.5, alpha=2))
    for dtype in (torch.float64, torch.bfloat16):
        x, y, z = a.to(dtype), b.to(dtype), bias.to(dtype)
        same_bits(ours.small_mm(x, y), torch.mm(x, y))
        same_bits(ours.small_addmm(z, x, y), torch.addmm(z, x, y))
    empty = torch.randn(4, 0)
    same_bits(ours.small_mm(empty, torch.randn(0, 6)), torch.zeros(4, 6))
    with pytest.raises(RuntimeError, match="cannot be multiplied"):
        ours.small_mm(a, a)
    with pytest.raises(RuntimeError):
        ours.small_addmm(torch.randn(5), a, b)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 8, 15, 16, 17, 40])
@pytest.mark.parametrize("columns", [1, 8, 63, 64, 65, 96, 128, 192, 4096])
def test_sums_of_rows(rows: int, columns: int) -> None:
    for matrix in (torch.randn(rows, columns), torch.randn(columns, rows).t(), torch.randn(rows, columns) * 1e20):
        for keep in (False, True):
            same_bits(ours.sum_of_few_rows(matrix, [0], keep), matrix.sum([0], keep))
        same_bits(ours.sum_of_few_rows(matrix, [1]), matrix.sum([1]))
        same_bits(ours.sum_of_few_rows(matrix, [0, 1]), matrix.sum([0, 1]))
        same_bits(ours.sum_of_few_rows(matrix, [0], dtype=torch.float64), matrix.sum([0], dtype=torch.float64))


def test_the_short_way_is_taken() -> None:
    """Else the tests above would compare torch with itself."""
    a, b, bias = torch.randn(4, 64), torch.randn(64, 64), torch.randn(64)
    ours.small_mm(a, b)  # of the first product of a shape the bits are compared with BLAS's
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        ours.small_mm(a, b)
        ours.small_addmm(bias, a, b)
        ours.sum_of_few_rows(a, [0])
    # A profile has the operators of all threads.
    here = {event.thread for event in profile.events() if event.name == "waterflow::small_mm"}
    called = {event.name for event in profile.events() if event.thread in here}
    assert "waterflow::small_mm" in called and not called & {"aten::mm", "aten::addmm", "aten::sum"}
