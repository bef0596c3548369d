"""Waterflow's memory under torch, on a real GPU: what torch asks of it, and what torch is told."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

from benchmarks.gpu_check import MARK
from waterflow import _C

MiB = 1 << 20


class Bytes:
    """Device memory at an address, as torch takes it without a copy."""

    def __init__(self, at: int, count: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (count,), "typestr": "|u1", "data": (at, False), "version": 3, "strides": None,
        }  # fmt: skip


def view(at: int, count: int) -> torch.Tensor:
    return torch.as_tensor(Bytes(at, count), device="cuda")


def grown_without_the_pool(device: _C.CudaDevice) -> int:
    """Return the bytes of the device, when the pool has given back what it served meanwhile."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return device.grown


def test_both_addresses_of_a_page_agree_behind_an_event() -> None:
    """An arena's ends have their pages at two addresses; each change there is seen here by what waits for it."""
    device = _C.cuda_device(0)
    arena = _C.CudaArena(device, device.granularity)
    arena.resize(device.granularity)
    assert arena.back(0, device.granularity) and arena.back(1, device.granularity)
    one, other = (view(arena.base(end), device.granularity) for end in (0, 1))
    writer, reader = torch.cuda.Stream(), torch.cuda.Stream()
    half = device.granularity // 2
    other.zero_()
    torch.cuda.synchronize()
    same = True
    for number in range(1, 101):
        with torch.cuda.stream(writer):
            one[:half].add_(1)
        reader.wait_stream(writer)
        with torch.cuda.stream(reader):
            other[half:].add_(1)
            seen = other.clone()
        for stream in (writer, torch.cuda.current_stream()):
            stream.wait_stream(reader)
        same = same and bool((seen == number).all())
    print(f"\n{MARK}{json.dumps({'granularity_bytes': device.granularity, 'two_addresses': same})}")
    assert same
    torch.cuda.synchronize()
    del one, other


def test_memory_grows_and_shrinks_and_keeps_its_bytes() -> None:
    device = _C.cuda_device(0)
    unit = device.granularity
    assert unit >= 2 * MiB and unit % (64 << 10) == 0
    before = grown_without_the_pool(device)
    base = device.reserve(64 * unit)
    assert device.grow(base, 20 * unit) and device.grow(base + 20 * unit, 4 * unit)
    view(base, 24 * unit).fill_(7)
    torch.cuda.synchronize()
    device.shrink(base + 20 * unit, 4 * unit)
    assert bool((view(base, 20 * unit) == 7).all())
    torch.cuda.synchronize()
    device.shrink(base, 20 * unit)
    device.unreserve(base, 64 * unit)
    assert grown_without_the_pool(device) == before


def test_both_ends_of_an_arena_see_the_same_bytes_from_opposite_sides() -> None:
    device = _C.cuda_device(0)
    unit = device.granularity
    arena = _C.CudaArena(device, 8 * unit, unit)
    arena.resize(8 * unit)
    assert arena.back(0, 8 * unit) and arena.back(1, 8 * unit)
    for page in range(8):
        view(arena.base(0) + page * unit, unit).fill_(page + 1)
    torch.cuda.synchronize()
    top = arena.base(1) + arena.most
    assert [int(view(top - (8 - page) * unit, 1)[0]) for page in range(8)] == list(range(1, 9))
    arena.resize(4 * unit)
    assert arena.back(1, 4 * unit)
    assert [int(view(top - (4 - page) * unit, 1)[0]) for page in range(4)] == [1, 2, 3, 4]
    torch.cuda.synchronize()
    arena.discard(0, 0, 8 * unit)
    arena.check()


def test_events_and_streams() -> None:
    device = _C.cuda_device(0)
    slow, quick = torch.cuda.Stream(), torch.cuda.Stream()
    a, b = device.adopt_stream(slow.cuda_stream), device.adopt_stream(quick.cuda_stream)
    with torch.cuda.stream(slow):
        torch.cuda._sleep(200_000_000)
    event = device.record(a)
    assert not device.complete(event)
    device.wait(b, event)
    behind = device.record(b)
    assert not device.complete(behind)
    device.synchronize(behind)
    assert device.complete(event)
    device.forget(event), device.forget(behind)
    assert device.adopt_stream(slow.cuda_stream) == a


def test_the_figures_that_torch_gives() -> None:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    held = torch.empty(100 * MiB, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() == before + 100 * MiB
    assert torch.cuda.max_memory_allocated() >= before + 100 * MiB
    assert torch.cuda.memory_reserved() >= 100 * MiB
    assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == before + 100 * MiB
    del held
    reserved = torch.cuda.memory_reserved()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved - 100 * MiB and torch.cuda.memory_allocated() == before
    with pytest.raises(RuntimeError, match="asks torch's own allocator"):
        torch.cuda.memory_snapshot()


def test_too_much_is_torchs_out_of_memory_error() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_a_block_that_another_stream_reads_is_not_given_away() -> None:
    """The reader is stalled; without record_stream, or where it does nothing, it would see what was written since."""
    side = torch.cuda.Stream()
    wrong = 0
    for _ in range(5):
        block = torch.full((16 * MiB,), 1, dtype=torch.uint8, device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            total = block.sum()
        block.record_stream(side)
        del block
        other = torch.full((16 * MiB,), 2, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        wrong += int(total.item() != 16 * MiB)
        del other
    assert wrong == 0


def test_streams_that_take_each_others_memory_do_so_in_order() -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    sums, sizes = [], [5 * MiB, 9 * MiB, 17 * MiB]
    for turn in range(30):
        with torch.cuda.stream(streams[turn % 3]):
            block = torch.full((sizes[turn % 3],), turn % 250 + 1, dtype=torch.uint8, device="cuda")
            if turn % 5 == 0:
                torch.cuda._sleep(20_000_000)
            sums.append((block.sum(), (turn % 250 + 1) * sizes[turn % 3]))
            del block
    torch.cuda.synchronize()
    assert all(int(got.item()) == expected for got, expected in sums)


def test_a_captured_graph_keeps_its_memory() -> None:
    source = torch.zeros(1024, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        (source * 2 + 1).sum()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = source * 2
        result = (inside + 1).sum()
    for value in (1.0, 2.0, 3.0):
        source.fill_(value)
        others = [torch.full((1024,), 9.0, device="cuda") for _ in range(50)]
        graph.replay()
        torch.cuda.synchronize()
        assert result.item() == 1024 * (2 * value + 1)
        del others
    del inside, result, graph


def test_where_cuda_runs_already_torchs_own_allocator_stays() -> None:
    code = """
import logging, torch, torch.nn.functional as F
logging.basicConfig()
torch.ones(1, device="cuda")
import waterflow as wf
model = torch.nn.Linear(8, 4).cuda()
with wf.Engine("cuda", memory="1GiB", lanes=2) as engine:
    step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), engine=engine)
    batch = torch.randn(4, 8).cuda(), torch.randint(0, 4, (4,)).cuda()
    losses = [float(step(batch)) for _ in range(6)]
assert losses[-1] < losses[0], losses
print("memory", torch.cuda.memory_stats()["allocated_bytes.all.peak"] > 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "CUDA was already running" in done.stderr and "memory True" in done.stdout
