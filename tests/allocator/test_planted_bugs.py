"""Mistakes that an allocator for streams can make, put in on purpose: each is found."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.native import Fault, FuzzSetup, Race, SimulatedDevice, StreamAllocator, fuzz_table, run_fuzz

MiB = 1 << 20
PAGE = 2 * MiB
# What random runs say of each; the first row is what they say where nothing was planted.
SIGNS = {
    "none": "",
    "dropped_wait": "nothing orders",
    "no_rerecord": "nothing orders",
    "free_under_allocator": "nothing orders",
    "free_under_last_user": "nothing orders",
    "synchronized_too_soon": "nothing orders",
    "reused_handle": "nothing orders",
    "split_off_by_one": "overlap",
    "merge_across_sets": "nothing orders",
}


@pytest.mark.parametrize("fault", SIGNS)
def test_random_runs_find_it(fault: str) -> None:
    errors = []
    for seed in range(1, 7):  # in table 0 the device meets the two bytes of split_off_by_one first, as a race
        setup = FuzzSetup(streams=4, seed=seed, fault=fault, check_every=1 << 40)
        errors.append(run_fuzz(fuzz_table(setup, 6000, seed), setup).error)
    if fault == "none":
        assert not any(errors)
        return
    signs = [SIGNS[fault], "given back while", "overlap", "free sets", "stream allocator", "was removed"]
    assert all(errors), f"{fault} was missed by {errors.count('')} of {len(errors)} runs"
    assert all(any(sign in error for sign in signs) for error in errors), errors
    assert any(SIGNS[fault] in error for error in errors), errors


CONTENTS = """
from tests.native import FuzzSetup, fuzz_table, run_fuzz
for seed in range(8):
    setup = FuzzSetup(simulated=False, streams=8, capacity=24 << 20, seed=seed, stall_share=0.05,
                      stall_us=500, fault="dropped_wait", check_every=1 << 40)
    print(run_fuzz(fuzz_table(setup, 3000, seed, largest=8 << 20), setup).error, flush=True)
"""


@pytest.mark.needs_time("it runs in a process of its own, which imports torch")
def test_contents_on_the_cpu_show_it() -> None:
    """With real memory and stalled threads, a missing order spoils what is read, or memory is gone before that."""
    ran = subprocess.run([sys.executable, "-c", CONTENTS], capture_output=True, text=True, timeout=100)
    assert "overwritten" in ran.stdout or ran.returncode < 0, ran.stdout + ran.stderr


# -- each by the shortest way to it


class World:
    """Three streams, and a device without room for more than one block."""

    def __init__(self, fault: str, pages: int = 1) -> None:
        self.device = SimulatedDevice(pages * PAGE)
        self.allocator = StreamAllocator(
            self.device, small_segment=PAGE, medium_segment=pages * PAGE, fault=getattr(Fault, fault)
        )
        self.streams = [self.allocator.add_stream() for _ in range(3)]

    def write(self, stream: int, size: int = PAGE) -> int:
        """A block that the stream asks for and writes."""
        address = self.allocator.allocate(size, stream)
        self.device.access(stream, address, size)
        return address


def two_streams(world: World) -> None:
    """A dropped wait."""
    a, b, _ = world.streams
    world.allocator.release(world.write(a))
    world.write(b)


def three_streams(world: World) -> None:
    """b takes over from a; c has waited for a alone."""
    a, b, c = world.streams
    world.allocator.release(world.write(a))
    world.allocator.wait(c, world.allocator.mark(a))
    world.allocator.release(world.write(b))
    world.write(c)


def chain(world: World) -> None:
    """The same along a chain of eight, whose last one has waited for the first alone."""
    first, *_ = world.streams
    chain = [first, *(world.allocator.add_stream() for _ in range(7))]
    world.allocator.release(world.write(first))
    world.allocator.wait(chain[-1], world.allocator.mark(first))
    for stream in chain[1:-1]:
        world.allocator.release(world.write(stream))
    world.write(chain[-1])


def another_reads(world: World) -> None:
    """a asks and writes, b reads; then a asks again."""
    a, b, _ = world.streams
    block = world.write(a)
    world.allocator.wait(b, world.allocator.mark(a))
    world.allocator.use(block, b)
    world.device.access(b, block, PAGE, False)
    world.allocator.release(block)
    world.write(a)


def a_longer_read(world: World) -> None:
    """b reads for long, c reads last; then c asks."""
    a, b, c = world.streams
    block = world.write(a)
    written = world.allocator.mark(a)
    for reader in (b, c):
        world.allocator.wait(reader, written)
        world.allocator.use(block, reader)
        world.device.access(reader, block, PAGE, False)
    world.allocator.end_use(block, a)
    world.allocator.release(block)
    world.write(c)


def one_has_waited(world: World) -> None:
    """b has waited for a, c has not."""
    a, b, c = world.streams
    world.allocator.release(world.write(a))
    world.allocator.wait(b, world.allocator.mark(a))
    world.write(c)


def a_new_stream(world: World) -> None:
    """A removed stream still works when a new one comes."""
    a, _, _ = world.streams
    world.allocator.release(world.write(a))
    world.allocator.remove_stream(a)
    world.write(world.allocator.add_stream())


def a_split(world: World) -> None:
    """Two blocks of one piece."""
    a, b, _ = world.streams
    world.allocator.release(world.write(a))
    world.write(a, 1024)
    world.allocator.wait(b, world.allocator.mark(a))
    first = world.write(a, 1024)
    world.device.access(a, first, 1024)
    world.allocator.check()


def neighbours(world: World) -> None:
    """Two halves, freed by two streams; a asks for both."""
    a, b, _ = world.streams
    whole = world.write(a)
    world.allocator.release(whole)
    left, right = world.write(a, PAGE // 2), world.write(a, PAGE // 2)
    mark = world.allocator.mark(a)
    world.allocator.wait(b, mark)
    world.allocator.use(right, b)
    world.allocator.end_use(right, a)
    world.device.access(b, right, PAGE // 2)
    world.allocator.mark(b)
    world.allocator.release(right)
    world.allocator.release(left)
    world.write(a)


DIRECT = [
    ("dropped_wait", two_streams),
    ("no_rerecord", three_streams),
    ("no_rerecord", chain),
    ("free_under_allocator", another_reads),
    ("free_under_last_user", a_longer_read),
    ("synchronized_too_soon", one_has_waited),
    ("reused_handle", a_new_stream),
    ("split_off_by_one", a_split),
    ("merge_across_sets", neighbours),
]


@pytest.mark.parametrize("fault, case", DIRECT, ids=[f"{fault}-{case.__name__}" for fault, case in DIRECT])
def test_the_shortest_way_to_it(fault: str, case: object) -> None:
    assert callable(case)
    case(World("none"))
    with pytest.raises((Race, RuntimeError), match="nothing orders|stream allocator:"):
        case(World(fault))
