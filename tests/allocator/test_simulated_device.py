"""The simulated device: memory without memory, and the check of every access."""

from __future__ import annotations

import random
import time

import pytest

from tests.native import Race, SimulatedDevice

PAGE = 1 << 21


@pytest.fixture
def device() -> SimulatedDevice:
    return SimulatedDevice(64 * PAGE)


@pytest.fixture
def at(device: SimulatedDevice) -> int:
    base = device.reserve(4 * PAGE)
    assert device.grow(base, 4 * PAGE)
    return base


def test_memory_is_counted_and_ends(device: SimulatedDevice) -> None:
    base = device.reserve(100 * PAGE)
    assert base % PAGE == 0 and device.grown == 0
    assert device.grow(base, 60 * PAGE)
    assert not device.grow(base + 60 * PAGE, 5 * PAGE) and device.grown == 60 * PAGE
    device.shrink(base + 10 * PAGE, 20 * PAGE)
    assert device.grown == 40 * PAGE
    device.check()
    assert device.grow(base + 10 * PAGE, 20 * PAGE)
    with pytest.raises(ValueError, match="still has memory behind it"):
        device.unreserve(base, 100 * PAGE)
    device.shrink(base, 60 * PAGE)
    device.unreserve(base, 100 * PAGE)
    device.check()


def test_terabytes() -> None:
    device = SimulatedDevice(1 << 45)
    base = device.reserve(1 << 45)
    assert device.grow(base, 1 << 45)
    device.access(device.add_stream(), base + (1 << 44), 1 << 43)


def test_bad_ranges_change_nothing(device: SimulatedDevice, at: int) -> None:
    for call, error in [
        (lambda: device.grow(at, PAGE), "has memory behind it already"),
        (lambda: device.grow(at + 1, PAGE), "whole multiples of"),
        (lambda: device.grow(at + 8 * PAGE, PAGE), "not reserved"),
        (lambda: device.shrink(at, 5 * PAGE), "not reserved"),
        (lambda: device.unreserve(at, PAGE), "not a reserved range"),
        (lambda: device.reserve(-1), "whole multiples of"),
    ]:
        with pytest.raises(ValueError, match=error):
            call()
    assert device.grown == 4 * PAGE
    device.check()


def test_unordered_writes_are_a_race_that_names_both(device: SimulatedDevice, at: int) -> None:
    a, b = device.add_stream(), device.add_stream()
    device.access(a, at + 64, 64)
    device.record(a)
    with pytest.raises(Race, match=rf"stream {b} at tick 1 writes .*\(1 bytes\).* stream {a} at tick 1, which wrote it"):
        device.access(b, at + 127, 10)
    device.access(b, at + 128, 10)
    device.check()


def test_an_event_orders_what_lies_before_it_and_no_more(device: SimulatedDevice, at: int) -> None:
    a, b = device.add_stream(), device.add_stream()
    device.access(a, at, 64)
    event = device.record(a)
    device.access(a, at + 64, 64)
    device.wait(b, event)
    device.access(b, at, 64)
    with pytest.raises(Race):
        device.access(b, at + 64, 64)


def test_order_is_transitive(device: SimulatedDevice, at: int) -> None:
    a, b, c = (device.add_stream() for _ in range(3))
    device.access(a, at, 64)
    device.wait(b, device.record(a))
    early = device.record(b)
    device.access(b, at, 64)
    device.wait(c, early)
    with pytest.raises(Race):
        device.access(c, at, 64)
    device.wait(c, device.record(b))
    device.access(c, at, 64)


def test_an_event_keeps_the_clock_that_its_stream_had(device: SimulatedDevice, at: int) -> None:
    a, b, c = (device.add_stream() for _ in range(3))
    device.access(a, at, 64)
    before = device.record(b)
    device.wait(b, device.record(a))
    device.wait(c, before)
    with pytest.raises(Race):
        device.access(c, at, 64)


def test_reads_go_beside_reads(device: SimulatedDevice, at: int) -> None:
    a, b, c = (device.add_stream() for _ in range(3))
    device.access(a, at, 64)
    written = device.record(a)
    for stream in (b, c):
        device.wait(stream, written)
        device.access(stream, at, 64, write=False)
    device.wait(a, device.record(c))
    with pytest.raises(Race, match=f"stream {b} .*which read it"):
        device.access(a, at, 64)
    device.wait(a, device.record(b))
    device.access(a, at, 64)
    device.check()


def test_nothing_is_behind_an_address(device: SimulatedDevice, at: int) -> None:
    stream = device.add_stream()
    for where, size in [(at - 1, 1), (at + 4 * PAGE - 1, 2), (0, 1)]:
        with pytest.raises(IndexError, match="no memory behind"):
            device.access(stream, where, size)
    device.access(stream, 0, 0)


def test_completion_is_told_and_seen(device: SimulatedDevice, at: int) -> None:
    a, b = device.add_stream(), device.add_stream()
    device.access(a, at, 64)
    first = device.record(a)
    device.wait(b, first)
    second = device.record(b)
    assert not device.complete(first)
    device.advance(second)  # and with it what it waited for
    with pytest.raises(Race):
        device.access(device.add_stream(), at, 64)  # done, and the host does not know
    assert device.complete(first) and device.complete(second)
    device.access(device.add_stream(), at, 64)


def test_the_host_blocks_until_work_is_done(device: SimulatedDevice, at: int) -> None:
    a, b = device.add_stream(), device.add_stream()
    device.access(a, at, 64)
    event = device.record(a)
    device.synchronize(event)
    device.access(b, at, 64)
    later = device.record(a)
    assert not device.complete(later)
    device.advance_stream(a)
    assert device.complete(later) and not device.complete(device.record(b))
    device.finish_all()
    device.check()


def test_memory_in_use_is_not_given_back(device: SimulatedDevice, at: int) -> None:
    a = device.add_stream()
    device.access(a, at + PAGE, 64)
    event = device.record(a)
    device.shrink(at, PAGE)
    with pytest.raises(Race, match="given back while stream"):
        device.shrink(at + PAGE, PAGE)
    device.synchronize(event)
    device.shrink(at + PAGE, PAGE)
    assert device.grow(at + PAGE, PAGE)
    device.check()


def test_streams_are_never_numbered_again(device: SimulatedDevice, at: int) -> None:
    a = device.add_stream()
    device.access(a, at, 64)
    last = device.record(a)
    device.remove_stream(a)
    with pytest.raises(ValueError, match="was removed"):
        device.access(a, at, 64)
    b = device.add_stream()
    assert b != a
    with pytest.raises(Race):
        device.access(b, at, 64)
    device.wait(b, last)  # events outlive their stream
    device.access(b, at, 64)
    with pytest.raises(ValueError, match="no stream 99"):
        device.record(99)


def test_forgotten_events(device: SimulatedDevice) -> None:
    event = device.record(device.add_stream())
    device.forget(event)
    for call in (device.forget, device.complete, device.synchronize, device.advance):
        with pytest.raises(ValueError, match="forgotten"):
            call(event)


def test_accesses_against_an_obvious_check(device: SimulatedDevice, at: int) -> None:
    """Every pair of conflicting accesses, byte by byte, with an explicit graph of what lies before what."""
    rng = random.Random(0)
    streams = [device.add_stream() for _ in range(4)]
    seen: dict[int, set[int]] = {stream: set() for stream in streams}  # numbers of the accesses that lie before
    events: list[tuple[int, set[int]]] = []
    done: list[tuple[int, int, bool]] = []
    races = 0
    for _ in range(4000):
        stream = rng.choice(streams)
        kind = rng.random()
        if kind < 0.2:
            events.append((device.record(stream), set(seen[stream])))
        elif kind < 0.5 and events:
            event, before = rng.choice(events[-6:])
            device.wait(stream, event)
            seen[stream] |= before
        else:
            begin = rng.randrange(40)
            end, write = begin + rng.randrange(1, 12), rng.random() < 0.5
            wrong = any(i not in seen[stream] and begin < e and b < end and (write or w) for i, (b, e, w) in enumerate(done))
            if wrong:
                races += 1
                with pytest.raises(Race):
                    device.access(stream, at + begin, end - begin, write)
            else:
                device.access(stream, at + begin, end - begin, write)
                seen[stream].add(len(done))
                done.append((begin, end, write))
    assert races > 300 and len(done) > 300
    device.check()


@pytest.mark.slow
def test_a_million_accesses_take_seconds(device: SimulatedDevice, at: int) -> None:
    stream = device.add_stream()
    start = time.perf_counter()
    for i in range(100_000):
        device.access(stream, at + 64 * (i % 4096), 64)
    assert time.perf_counter() - start < 2
    assert device.accesses == 100_000
