"""The CUDA device on a stand-in for the driver: memory, order, errors, and that nothing is left behind."""

from __future__ import annotations

import ctypes
import gc
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.allocator.fake_cuda import PAGE, FakeCuda
from tests.allocator.native import same_interface
from waterflow import _C

OUT_OF_MEMORY = 2


@pytest.fixture
def fake(tmp_path: Path) -> FakeCuda:
    return FakeCuda(tmp_path)


@pytest.fixture
def device(fake: FakeCuda) -> Iterator[_C.CudaDevice]:
    yield _C.CudaDevice(0, 64 * PAGE, fake.path)


def write(at: int, count: int, value: int) -> None:
    ctypes.memset(at, value, count)


@pytest.mark.needs_time("a compiler reads the header")
def test_the_table_is_what_the_header_declares(tmp_path: Path) -> None:
    headers = sorted(Path("/usr/local").glob("cuda*/include/cuda.h"))
    if not headers:
        pytest.skip("no cuda.h on this machine")
    source = tmp_path / "same.cpp"
    include = ["-I", str(headers[-1].parent), "-I", str(same_interface.OURS.parent)]
    for text, right in [
        (same_interface.source(), True),
        (same_interface.source().replace("decltype(&::cuMemMap)", "decltype(&::cuMemUnmap)"), False),
        (same_interface.source().replace("cuEventDestroy_v2", "cuEventDestroy_v3"), False),
    ]:
        source.write_text(text)
        done = subprocess.run(["g++", "-std=c++20", "-fsyntax-only", *include, str(source)], capture_output=True)
        assert (done.returncode == 0) is right, done.stderr.decode()[:2000]


def test_all_functions_are_in_the_stand_in(fake: FakeCuda) -> None:
    assert all(hasattr(fake.library, name) for _, name in same_interface.functions())


# -- memory


def test_memory_is_counted_and_can_be_used(device: _C.CudaDevice, fake: FakeCuda) -> None:
    base = device.reserve(100 * PAGE)
    assert base % PAGE == 0 and device.grown == 0 and fake.used == 0
    assert device.grow(base, 60 * PAGE)
    assert device.grown == fake.used == 60 * PAGE
    write(base, 60 * PAGE, 1)
    assert not device.grow(base + 60 * PAGE, 5 * PAGE), "beyond what it may take"
    assert device.grown == fake.used == 60 * PAGE
    device.shrink(base, 16 * PAGE)
    assert device.grown == fake.used == 44 * PAGE
    assert device.grow(base, 2 * PAGE)
    write(base, 2 * PAGE, 1)
    with pytest.raises(ValueError, match="still have memory behind them"):
        device.unreserve(base, 100 * PAGE)
    device.shrink(base, 2 * PAGE)
    device.shrink(base + 16 * PAGE, 44 * PAGE)
    device.unreserve(base, 100 * PAGE)
    assert fake.held() == {"contexts": 1}


def test_small_ranges_shrink_granule_by_granule_and_large_ones_by_pieces(device: _C.CudaDevice, fake: FakeCuda) -> None:
    base = device.reserve(64 * PAGE)
    assert device.grow(base, 4 * PAGE)
    device.shrink(base + PAGE, 2 * PAGE)
    assert device.grow(base + PAGE, PAGE)
    assert device.grow(base + 8 * PAGE, 33 * PAGE)
    assert fake.count("cuMemCreate") == 4 + 1 + 3, "two pieces of 32 MiB and a granule"
    with pytest.raises(ValueError, match="piece by piece; the pieces meet at"):
        device.shrink(base + 8 * PAGE, 8 * PAGE)
    device.shrink(base + 8 * PAGE, 16 * PAGE)


def test_bad_ranges_change_nothing(device: _C.CudaDevice) -> None:
    base = device.reserve(8 * PAGE)
    assert device.grow(base, 4 * PAGE)
    for call, error in [
        (lambda: device.grow(base + 2 * PAGE, 4 * PAGE), "have memory behind them already"),
        (lambda: device.grow(base + 1, PAGE), "whole multiples of"),
        (lambda: device.grow(base + 8 * PAGE, PAGE), "within a reserved range"),
        (lambda: device.shrink(base, 5 * PAGE), "not what was grown"),
        (lambda: device.unreserve(base, PAGE), "no reserved range"),
        (lambda: device.reserve(-1), "whole multiples of"),
        (lambda: _C.CudaDevice(7, 0, device.library), "there is no CUDA device 7; the driver sees 2"),
    ]:
        with pytest.raises(ValueError, match=error):
            call()
    assert device.grown == 4 * PAGE


def test_a_device_without_memory_left_says_so_and_changes_nothing(device: _C.CudaDevice, fake: FakeCuda) -> None:
    fake.memory(10 * PAGE)
    base = device.reserve(64 * PAGE)
    assert not device.grow(base, 12 * PAGE)
    assert device.grown == fake.used == 0 and fake.held() == {"contexts": 1, "reservations": 1}
    assert device.grow(base, 10 * PAGE)


@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemMap", "cuMemSetAccess"])
@pytest.mark.parametrize("nth", [1, 2])
def test_a_failure_while_growing_takes_back_what_was_there(fake: FakeCuda, call: str, nth: int) -> None:
    device = _C.CudaDevice(0, 64 * PAGE, fake.path)
    base = device.reserve(64 * PAGE)
    if call == "cuMemSetAccess" and nth == 2:
        assert device.grow(base + 32 * PAGE, PAGE)
        device.shrink(base + 32 * PAGE, PAGE)
        nth = 1
    fake.fail(call, nth, 999)
    with pytest.raises(_C.CudaError, match=rf"{call}\(2097152 bytes|{call}\(6291456 bytes"):
        device.grow(base, 3 * PAGE)
    assert device.grown == fake.used == 0 and fake.held() == {"contexts": 1, "reservations": 1}
    assert device.grow(base, 3 * PAGE)


def test_everything_is_given_back_in_the_end(fake: FakeCuda) -> None:
    device = _C.CudaDevice(1, 0, fake.path)
    assert device.capacity == 1 << 30
    base = device.reserve(32 * PAGE)
    device.grow(base, 20 * PAGE)
    stream = device.add_stream()
    device.record(stream)
    device.forget(device.record(stream))
    device.adopt_stream(0)
    del device
    gc.collect()
    assert fake.held() == {} and fake.used == 0


# -- order


def test_events_in_their_order(device: _C.CudaDevice, fake: FakeCuda) -> None:
    handle = fake.new_stream()
    a, b = device.adopt_stream(handle), device.add_stream()
    before = device.record(b)
    fake.stall(handle)
    first = device.record(a)
    device.wait(b, first)
    behind = device.record(b)
    assert device.complete(before) and not device.complete(first) and not device.complete(behind)
    fake.stall(handle, False)
    assert device.complete(first) and device.complete(behind)
    fake.stall(handle)
    last = device.record(a)
    device.synchronize(last)
    assert device.complete(last)


def test_events_are_named_once_and_their_handles_serve_again(device: _C.CudaDevice, fake: FakeCuda) -> None:
    stream = device.add_stream()
    events = set()
    for _ in range(50):
        event = device.record(stream)
        assert event not in events
        events.add(event)
        device.forget(event)
    assert fake.count("cuEventCreate") == 1 and "cuEventCreate(2)" in fake.calls(), "without timing"
    with pytest.raises(ValueError, match="no event"):
        device.complete(min(events))


def test_a_wait_stands_when_its_event_is_recorded_anew(device: _C.CudaDevice, fake: FakeCuda) -> None:
    handle = fake.new_stream()
    slow, quick, waiting = device.adopt_stream(handle), device.add_stream(), device.add_stream()
    fake.stall(handle)
    event = device.record(slow)
    device.wait(waiting, event)
    device.forget(event)
    again = device.record(quick)
    assert device.complete(again) and fake.count("cuEventCreate") == 1
    assert not device.complete(device.record(waiting))


def test_streams_are_named_once_though_their_handles_come_back(device: _C.CudaDevice, fake: FakeCuda) -> None:
    fake.reuse_streams()
    handle = fake.new_stream()
    first = device.adopt_stream(handle)
    assert device.adopt_stream(handle) == first
    fake.destroy_stream(handle)
    assert fake.new_stream() == handle, "another stream with the same handle"
    second = device.adopt_stream(handle)
    assert second != first and device.adopt_stream(handle) == second
    own = device.add_stream()
    device.remove_stream(own)
    assert device.add_stream() != own
    with pytest.raises(ValueError, match="was removed"):
        device.record(own)
    with pytest.raises(ValueError, match="does not exist"):
        device.record(99)
    assert "cuStreamCreate(1)" in fake.calls(), "it does not wait for the default stream"


def test_a_failed_call_names_itself_and_the_remedy(device: _C.CudaDevice, fake: FakeCuda) -> None:
    stream = device.add_stream()
    fake.fail("cuEventRecord", 1, 700)
    with pytest.raises(_C.CudaError, match=r"cuEventRecord\(stream 0\) failed: .*700\).*end this process"):
        device.record(stream)
    assert device.complete(device.record(stream)) and fake.count("cuEventCreate") == 1


def test_a_driver_that_is_not_there_or_lacks_a_function(tmp_path: Path) -> None:
    with pytest.raises(_C.CudaError, match="cannot load the CUDA driver .*no_such.*Install NVIDIA's driver"):
        _C.CudaDevice(0, 0, str(tmp_path / "no_such.so"))
    source = tmp_path / "half.cpp"
    source.write_text('extern "C" int cuInit(unsigned) { return 0; }')
    half = tmp_path / "libhalf.so"
    subprocess.run(["g++", "-shared", "-fPIC", str(source), "-o", str(half)], check=True)
    with pytest.raises(_C.CudaError, match="has no cuGetErrorString"):
        _C.CudaDevice(0, 0, str(half))
