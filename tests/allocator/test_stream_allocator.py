"""The multi-stream allocator: each tier, each rule of order, limits, accounts, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from tests.native import CpuDevice, RequestLog, SimulatedDevice, StreamAllocator, record_requests
from tests.native.request_log import END_USE, MARK, RELEASE, REQUEST, USE, WAIT
from waterflow.errors import MemoryLimitError

MiB = 1 << 20
PAGE = 2 * MiB


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice(64 * MiB)


@pytest.fixture
def allocator(device: SimulatedDevice) -> StreamAllocator:
    return StreamAllocator(device, small_segment=PAGE, medium_segment=PAGE)


class Tiers:
    """Which tier served what was asked for inside of the block."""

    def __init__(self, allocator: StreamAllocator) -> None:
        self.allocator = allocator

    def __enter__(self) -> dict[str, int]:
        self.before = self.allocator.report().tiers
        self.found: dict[str, int] = {}
        return self.found

    def __exit__(self, *_: object) -> None:
        after = self.allocator.report().tiers
        self.found.update({tier: n - self.before[tier] for tier, n in after.items() if n != self.before[tier]})
        self.allocator.check()


def fill(allocator: StreamAllocator, stream: int, size: int = PAGE) -> list[int]:
    """Everything that is left, in blocks."""
    made = []
    while True:
        try:
            made.append(allocator.allocate(size, stream))
        except MemoryLimitError:
            return made


# -- the tiers


def test_what_a_stream_freed_is_its_own_without_a_wait(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a = allocator.add_stream()
    first = allocator.allocate(1000, a)
    allocator.release(first)
    with Tiers(allocator) as tiers:
        assert allocator.allocate(1000, a) == first
    assert tiers == {"own": 1} and device.waits == 0


def test_what_all_have_waited_for_is_for_everyone(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a, b, c = (allocator.add_stream() for _ in range(3))
    blocks = fill(allocator, a)
    allocator.release(blocks[0])
    mark = allocator.mark(a)
    allocator.wait(b, mark)
    assert allocator.report().synchronized == 0
    allocator.wait(c, mark)
    assert allocator.report().synchronized == PAGE
    waits = device.waits
    with Tiers(allocator) as tiers:
        assert allocator.allocate(PAGE, b) == blocks[0]
    assert tiers == {"synchronized": 1} and device.waits == waits


def test_what_is_complete_is_for_everyone(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a, b = allocator.add_stream(), allocator.add_stream()
    blocks = fill(allocator, a)
    allocator.release(blocks[0])
    allocator.mark(a)
    device.advance_stream(a)
    with Tiers(allocator) as tiers:
        assert allocator.allocate(PAGE, b) == blocks[0]
    assert tiers == {"synchronized": 1} and device.waits == 0


def test_anothers_goes_behind_a_wait_and_the_rest_comes_with_it(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a, b, _ = (allocator.add_stream() for _ in range(3))
    blocks = fill(allocator, a)
    for block in blocks[:4]:
        device.access(a, block, PAGE)
        allocator.release(block)
    with Tiers(allocator) as tiers:
        taken = allocator.allocate(PAGE, b)
    device.access(b, taken, PAGE)
    assert tiers == {"others": 1} and device.waits == 1
    assert allocator.report().unsynchronized == {a: 0, b: 3 * PAGE, 2: 0}
    with Tiers(allocator) as tiers:
        device.access(b, allocator.allocate(PAGE, b), PAGE)
    assert tiers == {"own": 1} and device.waits == 1


def test_an_event_that_is_there_is_taken(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a, b = allocator.add_stream(), allocator.add_stream()
    blocks = fill(allocator, a)
    allocator.release(blocks[0])
    allocator.mark(a)
    allocator.mark(a)
    device.access(a, blocks[1], PAGE)
    events = allocator.report().events
    allocator.allocate(PAGE, b)
    assert allocator.report().events == events
    with pytest.raises(RuntimeError):  # the earliest event was enough, so b is not behind a's later work
        device.access(b, blocks[1], PAGE)


def test_the_giver_that_needs_no_wait_comes_first(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a, b, c, _ = (allocator.add_stream() for _ in range(4))
    blocks = fill(allocator, a)
    theirs = blocks.pop()
    allocator.release(theirs)
    taken = allocator.allocate(PAGE, b)
    assert taken == theirs
    allocator.release(taken)
    allocator.release(blocks[0])
    allocator.wait(c, allocator.mark(b))
    waits = device.waits
    assert allocator.allocate(PAGE, c) == taken and device.waits == waits


def test_growing_by_segments(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a = allocator.add_stream()
    with Tiers(allocator) as tiers:
        allocator.allocate(100, a)
        allocator.allocate(100, a)
        allocator.allocate(3 * PAGE - 5, a)
    assert tiers == {"own": 1, "grow": 2} and device.grown == 4 * PAGE
    assert allocator.report().segments == 2


def test_free_neighbours_of_several_streams_are_put_together(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a, b = allocator.add_stream(), allocator.add_stream()
    whole = allocator.allocate(64 * MiB, a)
    allocator.release(whole)
    blocks = [allocator.allocate(16 * MiB, a) for _ in range(4)]
    mark = allocator.mark(a)
    for block in blocks[1:3]:
        allocator.wait(b, mark)
        allocator.use(block, b)
        allocator.end_use(block, a)
    for block in blocks[:3]:
        device.access(b if block in blocks[1:3] else a, block, 16 * MiB)
        allocator.release(block)
    allocator.check()
    with Tiers(allocator) as tiers:
        large = allocator.allocate(48 * MiB, a)
    assert tiers == {"coalesce": 1} and large == whole
    device.access(a, large, 48 * MiB)


def test_segments_of_the_wrong_size_are_exchanged(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a, b = allocator.add_stream(), allocator.add_stream()
    for block in fill(allocator, a):
        device.access(a, block, PAGE)
        allocator.release(block)
    with Tiers(allocator) as tiers:
        device.access(b, allocator.allocate(63 * MiB, b), 63 * MiB)
    assert tiers == {"coalesce": 1} and device.grown == 64 * MiB


def test_failing_tells_the_rule_and_shows_the_map(allocator: StreamAllocator) -> None:
    a = allocator.add_stream()
    allocator.allocate(60 * MiB, a)
    before = allocator.report()
    with pytest.raises(MemoryLimitError, match=r"(?s)no room for 10.0 MiB on stream 0; 60.0 MiB are held.*\n\[#"):
        allocator.allocate(10 * MiB, a)
    after = allocator.report()
    assert (after.held, after.grown, after.requests) == (before.held, before.grown, before.requests)
    assert after.tiers["fail"] == 1
    allocator.check()
    with pytest.raises(MemoryLimitError):
        allocator.allocate(2**62, a)


# -- the rules


def test_a_chunk_belongs_to_those_who_used_it_not_to_who_asked(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a, b, _ = (allocator.add_stream() for _ in range(3))
    block = fill(allocator, a)[0]
    device.access(a, block, PAGE)
    allocator.wait(b, allocator.mark(a))
    allocator.end_use(block, a)
    allocator.use(block, b)
    device.access(b, block, PAGE)
    allocator.release(block)
    report = allocator.report()
    # a's use is over at its present tick, which b has not waited for: nobody owns the chunk.
    assert report.apart == PAGE
    other = fill(allocator, a)  # takes it, behind b
    assert other == [block]
    device.access(a, block, PAGE)


def test_a_chunk_belongs_to_the_stream_that_waited_for_all_others(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a, b, _ = (allocator.add_stream() for _ in range(3))
    block = fill(allocator, a)[0]
    allocator.end_use(block, a)
    allocator.wait(b, allocator.mark(a))
    allocator.use(block, b)
    allocator.release(block)
    assert allocator.report().unsynchronized[b] == PAGE
    with Tiers(allocator) as tiers:
        assert allocator.allocate(PAGE, b) == block
    assert tiers == {"own": 1}


def test_several_unordered_uses_are_waited_for_one_by_one(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a, b, c, d = (allocator.add_stream() for _ in range(4))
    block = fill(allocator, a)[0]
    device.access(a, block, PAGE)
    written = allocator.mark(a)
    for reader in (b, c):
        allocator.wait(reader, written)
        allocator.use(block, reader)
        device.access(reader, block, PAGE, False)
    allocator.release(block)
    assert allocator.report().apart == PAGE
    waits = device.waits
    assert allocator.allocate(PAGE, d) == block
    device.access(d, block, PAGE)
    assert device.waits == waits + 3


def test_a_third_stream_waits_for_who_took_it_over(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a, b, c = (allocator.add_stream() for _ in range(3))
    block = fill(allocator, a)[0]
    device.access(a, block, PAGE)
    allocator.release(block)
    allocator.wait(c, allocator.mark(a))  # c knows all of a
    assert allocator.allocate(PAGE, b) == block
    device.access(b, block, PAGE)
    allocator.release(block)
    assert allocator.allocate(PAGE, c) == block
    device.access(c, block, PAGE)


def test_a_removed_streams_work_stays_in_order(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a, b = allocator.add_stream(), allocator.add_stream()
    freed, held = fill(allocator, a)[:2]
    for block in (freed, held):
        device.access(a, block, PAGE)
    allocator.release(freed)
    allocator.remove_stream(a)
    c = allocator.add_stream()
    assert c not in (a, b)
    allocator.check()
    device.access(c, allocator.allocate(PAGE, c), PAGE)
    allocator.release(held)
    device.access(c, allocator.allocate(PAGE, c), PAGE)
    device.finish_all()
    allocator.check()
    for _ in range(50):  # the places of streams pass on, their numbers do not
        stream = allocator.add_stream()
        allocator.mark(stream)
        allocator.remove_stream(stream)
        device.finish_all()
        allocator.check()


def test_a_new_stream_knows_what_all_others_do(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a, b = allocator.add_stream(), allocator.add_stream()
    block = fill(allocator, a)[0]
    device.access(a, block, PAGE)
    allocator.release(block)
    allocator.wait(b, allocator.mark(a))
    c = allocator.add_stream()
    with Tiers(allocator) as tiers:
        assert allocator.allocate(PAGE, c) == block
    assert tiers == {"synchronized": 1}
    device.access(c, block, PAGE)


def test_waits_that_others_made_are_told(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a, b, _ = (allocator.add_stream() for _ in range(3))
    block = fill(allocator, a)[0]
    allocator.release(block)
    allocator.waited(b, allocator.mark(a))
    assert allocator.allocate(PAGE, b) == block and device.waits == 0


# -- sizes, splits and merges


def test_neighbours_become_one_again(allocator: StreamAllocator) -> None:
    a = allocator.add_stream()
    blocks = [allocator.allocate(size, a) for size in (1, 64, 65, 1000, 0)]
    assert [later - earlier for earlier, later in pairwise(blocks)] == [64, 64, 128, 1024]
    assert allocator.report().held == 64 + 64 + 128 + 1024 + 64
    for block in (blocks[1], blocks[3], blocks[0], blocks[4], blocks[2]):
        allocator.release(block)
        allocator.check()
    report = allocator.report()
    assert report.largest_free == report.grown == PAGE and report.fragmentation == 0


def test_the_smallest_that_fits_is_taken(allocator: StreamAllocator) -> None:
    a = allocator.add_stream()
    blocks = [allocator.allocate(64 * n, a) for n in (9, 1, 5, 1, 7, 1, 300, 1, 290, 1)]
    for block in blocks[::2]:
        allocator.release(block)
    for size, expected in [(5, 2), (6, 4), (8, 0), (289, 8), (299, 6)]:
        assert allocator.allocate(64 * size, a) == blocks[expected]
        allocator.check()


def test_alignment_is_the_devices(device: SimulatedDevice) -> None:
    allocator = StreamAllocator(device, alignment=512)
    a = allocator.add_stream()
    assert all(allocator.allocate(size, a) % 512 == 0 for size in (1, 513, 3))
    assert allocator.report().held == 512 + 1024 + 512


# -- limits


def test_the_hard_limit(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a = allocator.add_stream()
    block = allocator.allocate(3 * PAGE, a)
    other = allocator.allocate(PAGE, a)
    assert allocator.limit is None
    with pytest.raises(ValueError, match=r"a limit of 5.0 MiB is below the 8.0 MiB in segments that are in use"):
        allocator.set_limit(5 * MiB)
    assert allocator.limit is None and device.grown == 4 * PAGE
    allocator.set_limit(4 * PAGE)
    with pytest.raises(MemoryLimitError, match=r"the limit is 8.0 MiB"):
        allocator.allocate(1, a)
    allocator.release(block)
    allocator.mark(a)
    device.finish_all()
    allocator.set_limit(PAGE)
    assert device.grown == PAGE
    allocator.release(other)
    allocator.check()


def test_trim_gives_back_what_is_free_and_complete(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a, b = allocator.add_stream(), allocator.add_stream()
    one, two = allocator.allocate(PAGE, a), allocator.allocate(PAGE, b)
    small = allocator.allocate(64, a)
    for stream, block in ((a, one), (b, two)):
        device.access(stream, block, PAGE)
        allocator.release(block)
    assert allocator.trim() == 0  # neither is complete
    device.advance_stream(a)
    assert allocator.trim() == PAGE
    device.advance_stream(b)
    assert allocator.trim() == PAGE and device.grown == PAGE
    allocator.release(small)
    allocator.check()


# -- what is refused


def test_what_is_wrong_is_refused_and_changes_nothing(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a, gone = allocator.add_stream(), allocator.add_stream()
    allocator.remove_stream(gone)
    block, freed = allocator.allocate(1000, a), allocator.allocate(64, a)
    allocator.release(freed)
    before = (allocator.report(), allocator.map())
    wrong: list[tuple[Callable[[], object], str]] = [
        (lambda: allocator.allocate(-1, a), "at least 0 bytes; -1"),
        (lambda: allocator.allocate(8, 99), "stream 99 is not known here"),
        (lambda: allocator.allocate(8, -1), "stream -1 is not known here"),
        (lambda: allocator.allocate(8, gone), f"stream {gone} was removed"),
        (lambda: allocator.release(12345), "0x3039 is not from this allocator"),
        (lambda: allocator.release(block + 64), "lies inside of a block"),
        (lambda: allocator.release(freed), "released already"),
        (lambda: allocator.use(block, gone), "was removed"),
        (lambda: allocator.use(freed, a), "released already"),
        (lambda: allocator.end_use(block + 1, a), "inside of a block"),
        (lambda: allocator.mark(gone), "was removed"),
        (lambda: allocator.wait(a, 1 << 40), "there is no mark"),
        (lambda: allocator.wait(a, -5), "there is no mark"),
        (lambda: allocator.waited(gone, 0), "was removed"),
        (lambda: allocator.native.add_stream(a), "a number is given to one stream, once"),
        (lambda: allocator.native.add_stream(gone), "a number is given to one stream, once"),
        (lambda: allocator.remove_stream(gone), "was removed"),
        (lambda: allocator.set_limit(-1), "at least 0"),
        (lambda: allocator.set_limit(5), "release memory first"),
        (lambda: allocator.map(0), "at least one character"),
    ]
    for call, message in wrong:
        with pytest.raises(ValueError, match=message):
            call()
        allocator.check()
    assert (allocator.report(), allocator.map()) == before
    other = allocator.add_stream()
    with pytest.raises(ValueError, match=f"stream {other} does not use"):
        allocator.end_use(block, other)


@pytest.mark.parametrize("options", [{"alignment": 48}, {"limit": -1}, {"alignment": 1 << 22}])
def test_settings_that_cannot_be(device: SimulatedDevice, options: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        StreamAllocator(device, **options)  # type: ignore[arg-type]


def test_a_map_shows_who_may_have_what(allocator: StreamAllocator, device: SimulatedDevice) -> None:
    a, b, _ = (allocator.add_stream() for _ in range(3))
    blocks = [allocator.allocate(PAGE // 4, a) for _ in range(4)]
    allocator.release(blocks[1])
    mark = allocator.mark(a)
    allocator.use(blocks[2], b)
    allocator.release(blocks[2])
    assert allocator.map(8).splitlines()[1] == "[##00??##] 2.0 MiB"
    allocator.wait(b, mark)
    allocator.wait(2, mark)
    assert allocator.map(8).splitlines()[1] == "[##..??##] 2.0 MiB"
    assert allocator.map(8).startswith("1 segments, 2.0 MiB (1.0 MiB held)")


def test_an_allocator_that_ends_gives_everything_back(device: SimulatedDevice) -> None:
    allocator = StreamAllocator(device)
    a = allocator.add_stream()
    device.access(a, allocator.allocate(1000, a), 1000)
    allocator.remove_stream(a)
    b = allocator.add_stream()
    device.access(b, allocator.allocate(10 * MiB, b), 10 * MiB)
    del allocator
    assert device.grown == 0
    device.check()


# -- logs


@pytest.mark.parametrize("kind", ["simulated", "cpu"])
def test_a_log_is_replayed_on_any_device(kind: str) -> None:
    a, b, mark = 4, 7, 11
    log = RequestLog([
        [REQUEST, 2, a, 1000], [REQUEST, 3, b, 3 * MiB], [MARK, mark, a, 0], [WAIT, mark, b, 0],
        [USE, 2, b, 0], [END_USE, 2, b, 0], [RELEASE, 2, -1, 0],
    ])  # fmt: skip
    assert log.requests == 2 and log.peak == 1000 + 3 * MiB
    target = StreamAllocator(SimulatedDevice(1 << 40) if kind == "simulated" else CpuDevice(64 * MiB))
    assert log.replay(target, 3) > 0 and log.replay_malloc(3) > 0
    assert target.report().requests == 6 and target.report().held == 0
    target.check()
    with pytest.raises(MemoryLimitError):
        log.replay(StreamAllocator(SimulatedDevice(PAGE)))
    own = [target.add_stream(), target.add_stream()]
    log.replay(target, 1, own)
    with pytest.raises(ValueError, match="the log has 2 streams, and 1 were given"):
        log.replay(target, 1, own[:1])


@pytest.mark.parametrize(
    "rows, message",
    [
        ([[9, 0, 0, 0]], "unknown kind"),
        ([[0, 1, 0, -1]], "less than nothing"),
        ([[0, 1, 0, 1], [0, 1, 0, 1]], "makes again the request 1"),
        ([[1, 1, 0, 0]], "row 0 of the request log names what is not held"),
        ([[5, 3, 0, 0]], "waits for an unknown mark, 3"),
    ],
)
def test_logs_that_cannot_be(rows: list[list[int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RequestLog(rows)


def test_a_log_of_a_real_step(tmp_path: object) -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))
    _, log = record_requests(lambda: model(torch.randn(8, 32)).sum().backward())
    assert log.requests > 8 and log.peak >= 8 * 64 * 4
    log.save(f"{tmp_path}/log.npz")
    again = RequestLog.load(f"{tmp_path}/log.npz")
    assert (again.table == log.table).all()
    allocator = StreamAllocator(SimulatedDevice(1 << 30))
    again.replay(allocator)
    assert allocator.report().peak >= log.peak
