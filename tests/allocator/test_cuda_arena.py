"""Arenas in a GPU's memory, on the stand-in for its driver: real bytes behind both ends' addresses."""

from __future__ import annotations

import ctypes
import gc
import random
from pathlib import Path

import pytest

from tests.allocator.fake_cuda import PAGE, FakeCuda
from waterflow import _C

ALIGNMENT = 512


def plan(*requests: tuple[int, int]) -> _C.RequestPlan:
    """(bytes, offset) of requests that all live until the end; one instruction each."""
    rows = [(count, offset, tick, 2 * len(requests)) for tick, (count, offset) in enumerate(requests)]
    return _C.RequestPlan(rows, list(range(len(requests) + 1)), [2 * len(requests) + 1] * len(requests), ALIGNMENT)


@pytest.fixture
def fake(tmp_path: Path) -> FakeCuda:
    return FakeCuda(tmp_path)


@pytest.fixture
def arena(fake: FakeCuda) -> _C.CudaArena:
    made = _C.CudaArena(_C.CudaDevice(0, 16 * PAGE, fake.path), 8 * PAGE, PAGE)
    made.resize(8 * PAGE)
    return made


def read(at: int, count: int = 1) -> bytes:
    return ctypes.string_at(at, count)


def high(arena: _C.CudaArena, distance: int) -> int:
    """The address so far below the top of end 1."""
    return int(arena.base(1)) + arena.most - distance


@pytest.mark.needs_time("the module builds a stand-in for the driver")
def test_memory_comes_with_the_steps(arena: _C.CudaArena, fake: FakeCuda) -> None:
    assert arena.size == 8 * PAGE and fake.used == 0
    assert arena.back(0, 3 * PAGE - 1) and fake.used == 3 * PAGE
    assert arena.back(1, 2 * PAGE) and fake.used == 5 * PAGE
    assert arena.back(0, 2 * PAGE) and fake.used == 5 * PAGE, "what is there stays"
    ctypes.memset(arena.base(0), 1, 3 * PAGE)
    ctypes.memset(high(arena, 2 * PAGE), 2, 2 * PAGE)
    assert read(arena.base(0) + 3 * PAGE - 1) == b"\1"
    arena.check()


def test_both_ends_see_the_same_pages_from_opposite_sides(arena: _C.CudaArena, fake: FakeCuda) -> None:
    assert arena.back(0, 8 * PAGE) and arena.back(1, 8 * PAGE)
    assert arena.pages == 8 and fake.used == 8 * PAGE
    for i in range(8):
        ctypes.memset(arena.base(0) + i * PAGE, 10 + i, PAGE)
    assert [read(high(arena, (8 - i) * PAGE + 0))[0] for i in range(8)] == [10 + i for i in range(8)]
    arena.check()


def test_resizing_changes_no_address_and_no_byte_that_end_0_stands_on(arena: _C.CudaArena, fake: FakeCuda) -> None:
    assert arena.back(0, 2 * PAGE) and arena.back(1, 6 * PAGE)
    bases = arena.base(0), arena.base(1)
    ctypes.memset(arena.base(0), 5, 2 * PAGE)
    arena.resize(4 * PAGE)
    assert fake.used == 4 * PAGE or fake.used == 2 * PAGE
    assert (arena.base(0), arena.base(1)) == bases and read(arena.base(0), 2 * PAGE) == b"\5" * (2 * PAGE)
    assert arena.back(1, 4 * PAGE)
    assert read(high(arena, 4 * PAGE)) == b"\5", "end 0's first page is now four pages from the top"
    arena.resize(8 * PAGE)
    assert arena.back(1, 8 * PAGE) and read(high(arena, 8 * PAGE)) == b"\5"
    arena.check()
    for wrong in (-1, 9 * PAGE):
        with pytest.raises(ValueError, match="cannot have"):
            arena.resize(wrong)


def test_discarded_pages_go_from_both_ends(arena: _C.CudaArena, fake: FakeCuda) -> None:
    assert arena.back(0, 8 * PAGE) and arena.back(1, 8 * PAGE)
    arena.discard(0, 3 * PAGE + 1, 7 * PAGE - 1)
    assert fake.used == 6 * PAGE and arena.pages == 6, "only whole pages"
    arena.discard(1, 0, 2 * PAGE)
    assert fake.used == 4 * PAGE
    arena.discard(1, 0, 100 * PAGE)
    assert fake.used == 0 and fake.held() == {"contexts": 1, "reservations": 2}
    assert arena.back(1, 8 * PAGE) and arena.back(0, PAGE)
    arena.check()


def test_no_memory_left(fake: FakeCuda) -> None:
    fake.memory(3 * PAGE)
    arena = _C.CudaArena(_C.CudaDevice(0, 0, fake.path), 8 * PAGE, PAGE)
    arena.resize(8 * PAGE)
    assert not arena.back(0, 4 * PAGE) and fake.used == 3 * PAGE
    ctypes.memset(arena.base(0), 1, 3 * PAGE)
    assert arena.back(0, 2 * PAGE)
    arena.discard(0, 0, 8 * PAGE)
    assert arena.back(1, 3 * PAGE)
    arena.check()


def test_requests_lie_where_they_are_planned(arena: _C.CudaArena) -> None:
    requests = plan((1000, 0), (PAGE, 1024), (8, 1024 + PAGE))
    for end in (0, 1):
        assert arena.back(end, 2 * PAGE)
        arena.begin(end, requests)
        low = [arena.request(end, i, count) for i, count in enumerate((1000, PAGE, 8))]
        if end == 0:
            assert [at - arena.base(0) for at in low] == [0, 1024, 1024 + PAGE]
        else:
            assert [high(arena, 0) - at for at in low] == [1024, 1024 + PAGE, 1024 + PAGE + 512]
        for at, count in zip(low, (1000, PAGE, 8)):
            ctypes.memset(at, 3, count)
        assert not arena.finish(end)
        assert all(_C.release_planned(at) for at in low) and arena.finish(end)


@pytest.mark.parametrize("end", [0, 1])
def test_what_a_step_leaves_behind_keeps_its_bytes(arena: _C.CudaArena, fake: FakeCuda, end: int) -> None:
    assert arena.back(end, 4 * PAGE) and arena.back(1 - end, 6 * PAGE)
    arena.begin(end, plan((PAGE, 0), (700, 3 * PAGE)))
    gone, kept = arena.request(end, 0, PAGE), arena.request(end, 1, 700)
    ctypes.memset(kept, 9, 700)
    # Who stands at the other end has bytes on the same page, beside those that were left behind.
    beside = arena.base(0) + 4 * PAGE + 1 if end == 1 else high(arena, 4 * PAGE + 1)
    ctypes.memset(beside, 8, 1)
    assert _C.release_planned(gone) and not arena.finish(end)
    base = arena.base(end)
    arena.detach(end)
    assert arena.base(end) != base and read(kept, 700) == b"\x09" * 700 and read(beside) == b"\x08"
    arena.check()
    # The next step there writes everywhere that it may, and more.
    assert arena.back(end, 8 * PAGE)
    ctypes.memset(arena.base(end) + (0 if end == 0 else arena.most - 8 * PAGE), 1, 8 * PAGE)
    assert read(kept, 700) == b"\x09" * 700
    assert _C.detached_bytes() == 700
    assert _C.release_planned(kept) and _C.detached_bytes() == 0
    # The page that both had is whole again once the other end has stood up anew.
    assert arena.back(1 - end, 8 * PAGE)
    assert arena.pages == 8 and fake.used == 8 * PAGE
    arena.check()


def test_everything_is_given_back_in_the_end(fake: FakeCuda) -> None:
    arena = _C.CudaArena(_C.CudaDevice(0, 0, fake.path), 10 * PAGE, PAGE)
    arena.resize(10 * PAGE)
    arena.back(0, 7 * PAGE), arena.back(1, 7 * PAGE)
    del arena
    gc.collect()
    assert fake.held() == {} and fake.used == 0


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap"])
def test_a_failing_driver_leaks_nothing(fake: FakeCuda, call: str) -> None:
    arena = _C.CudaArena(_C.CudaDevice(0, 0, fake.path), 8 * PAGE, PAGE)
    arena.resize(8 * PAGE)
    assert arena.back(0, 2 * PAGE)
    fake.fail(call, 1 if call in ("cuMemSetAccess", "cuMemUnmap") else 2)
    with pytest.raises(_C.CudaError, match=call):
        if call == "cuMemUnmap":
            arena.discard(0, 0, 8 * PAGE)
        else:
            arena.back(0, 6 * PAGE)
    assert arena.back(1, 8 * PAGE) or True
    del arena
    gc.collect()
    assert fake.held() == {} and fake.used == 0


def test_pages_fit_the_arena(fake: FakeCuda) -> None:
    device = _C.CudaDevice(0, 1 << 40, fake.path)
    for most, unit in [(1, PAGE), (1 << 30, PAGE), (40 << 30, 20 * PAGE), (1 << 39, 32 * PAGE)]:
        assert _C.CudaArena(device, most).unit == unit
    with pytest.raises(ValueError, match="multiples of"):
        _C.CudaArena(device, PAGE, PAGE + 1)


@pytest.mark.parametrize("seed", range(5))
def test_random_lives(fake: FakeCuda, seed: int) -> None:
    """Two ends grow and fall beside each other; each finds the bytes that it wrote."""
    chance = random.Random(seed)
    arena = _C.CudaArena(_C.CudaDevice(0, 12 * PAGE, fake.path), 12 * PAGE, PAGE)
    arena.resize(12 * PAGE)
    heights = [0, 0]
    for step in range(200):
        end = chance.randrange(2)
        match chance.randrange(4):
            case 0 | 1:
                heights[end] = chance.randint(0, arena.size - heights[1 - end])
                assert arena.back(end, heights[end])
                start = arena.base(0) if end == 0 else high(arena, heights[1])
                ctypes.memset(start, 1 + end, heights[end])
            case 2:
                heights[end] = 0
                arena.discard(end, 0, arena.size - heights[1 - end])
            case 3:
                heights[1] = 0
                least = -(-max(heights[0], 1) // PAGE)
                arena.resize(chance.randint(least, 12) * PAGE)
        arena.check()
        assert fake.used <= 12 * PAGE and fake.used == arena.pages * PAGE
        for other in (0, 1):
            start = arena.base(0) if other == 0 else high(arena, heights[1])
            assert read(start, heights[other]) == bytes([1 + other]) * heights[other], (seed, step)
