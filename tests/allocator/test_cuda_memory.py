"""The functions that torch calls for a GPU's memory, on the stand-in for the driver; each test in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.allocator.fake_cuda import FakeCuda

ROOT = Path(__file__).parents[2]

# What every one of these programs begins with: the process has one memory of each device, for good.
HEAD = """
import ctypes, sys, threading
from pathlib import Path
import pytest
import torch
from waterflow import _C
from tests.allocator.fake_cuda import PAGE, FakeCuda

fake = FakeCuda(Path(sys.argv[1]))
import os
os.environ["WATERFLOW_CUDA_LIBRARY"] = fake.path
libc = ctypes.CDLL(None)
libc.setenv(b"WATERFLOW_CUDA_LIBRARY", fake.path.encode(), 1)
abi = ctypes.CDLL(_C.__file__)
malloc, free = abi.waterflow_malloc, abi.waterflow_free
malloc.argtypes, malloc.restype = [ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
free.argtypes, free.restype = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p], None
record = abi.waterflow_record_stream
record.argtypes, record.restype = [ctypes.c_void_p, ctypes.c_void_p], None
"""


def run(folder: Path, body: str) -> str:
    """Run a program; its output."""
    code = HEAD + textwrap.dedent(body)
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        capture_output=True, text=True, cwd=ROOT, timeout=100, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(autouse=True, scope="module")
def _built(tmp_path_factory: pytest.TempPathFactory) -> None:
    FakeCuda(tmp_path_factory.mktemp("built"))


@pytest.mark.slow
def test_without_a_pool_the_driver_serves(tmp_path: Path) -> None:
    run(tmp_path, """
        at = malloc(1000, 0, None)
        assert at and fake.count("cuMemAlloc") == 1 and fake.held() == {"plain": 1, "contexts": 1}
        ctypes.memset(at, 1, 1000)
        assert _C.cuda_stats(0)["allocated"] == 1000 and _C.cuda_stats(0)["reserved"] == 1000
        free(at, 1000, 0, None)
        assert fake.held() == {"contexts": 1} and _C.cuda_stats(0)["allocated"] == 0
        assert malloc(0, 0, None) is None
        free(None, 0, 0, None)
        record(None, None)
        other = malloc(10, 1, None)
        assert fake.held() == {"plain": 1, "contexts": 2}
        free(other, 10, 1, None)
        _C.cuda_pool(0, 0)
        before = malloc(10, 0, None)
        assert fake.count("cuMemAlloc") == 2 and before % 512 == 0
        with pytest.raises(ValueError, match="there is no CUDA device 9"):
            _C.cuda_malloc(10, 9, 0)
    """)  # fmt: skip


@pytest.mark.slow
def test_blocks_from_before_the_pool_go_back_to_the_driver(tmp_path: Path) -> None:
    run(tmp_path, """
        early = malloc(1000, 0, None)
        _C.cuda_pool(0, 100 * PAGE)
        late = malloc(1000, 0, None)
        free(early, 1000, 0, None)
        assert fake.held().get("plain") is None
        free(late, 1000, 0, None)
        assert _C.cuda_give_back(0) > 0 and fake.held() == {"contexts": 1, "streams": 0} or fake.used == 0
    """)  # fmt: skip


@pytest.mark.needs_time("it runs in a process of its own, which imports torch")
def test_streams_take_from_each_other_only_behind_a_wait(tmp_path: Path) -> None:
    run(tmp_path, """
        _C.cuda_pool(0, 40 * PAGE)
        a, b = fake.new_stream(), fake.new_stream()
        first = malloc(30 * PAGE, 0, a)
        fake.stall(a)
        free(first, 30 * PAGE, 0, a)
        again = malloc(30 * PAGE, 0, a)
        assert again == first, "its own stream needs no wait"
        free(again, 30 * PAGE, 0, a)
        fake.forget_calls()
        other = malloc(30 * PAGE, 0, b)
        assert other == first and fake.count("cuStreamWaitEvent") == 1 and fake.count("cuEventSynchronize") == 0
        waits = [call for call in fake.calls() if call.startswith("cuStreamWaitEvent")]
        assert waits[0].startswith(f"cuStreamWaitEvent({b},")
        free(other, 30 * PAGE, 0, b)
    """)  # fmt: skip


@pytest.mark.slow
def test_record_stream_keeps_a_block_from_others(tmp_path: Path) -> None:
    run(tmp_path, """
        _C.cuda_pool(0, 40 * PAGE)
        a, b = fake.new_stream(), fake.new_stream()
        block = malloc(30 * PAGE, 0, a)
        record(block, b)
        fake.stall(b)
        free(block, 30 * PAGE, 0, a)
        fake.forget_calls()
        again = malloc(30 * PAGE, 0, a)
        waits = [call for call in fake.calls() if call.startswith("cuStreamWaitEvent")]
        assert again == block and waits and waits[0].startswith(f"cuStreamWaitEvent({a},"), fake.calls()
    """)  # fmt: skip


@pytest.mark.slow
def test_a_handle_that_comes_back_is_another_stream(tmp_path: Path) -> None:
    run(tmp_path, """
        _C.cuda_pool(0, 40 * PAGE)
        fake.reuse_streams()
        a = fake.new_stream()
        block = malloc(30 * PAGE, 0, a)
        free(block, 30 * PAGE, 0, a)
        fake.destroy_stream(a)
        assert fake.new_stream() == a
        device = _C.cuda_device(0)
        assert device.adopt_stream(a) == device.adopt_stream(a) == 1
    """)  # fmt: skip


@pytest.mark.slow
def test_no_memory_left_is_an_error_with_the_numbers(tmp_path: Path) -> None:
    run(tmp_path, """
        fake.memory(8 * PAGE)
        with pytest.raises(RuntimeError, match="device 0 has no 18.0 MiB left beside the 0 bytes"):
            _C.cuda_malloc(9 * PAGE, 0, 0)
        _C.cuda_pool(0, 4 * PAGE)
        held = _C.cuda_malloc(3 * PAGE, 0, 0)
        with pytest.raises(RuntimeError) as error:
            _C.cuda_malloc(5 * PAGE, 0, 0)
        assert "10.0 MiB" in str(error.value) and _C.cuda_stats(0)["allocated"] == 3 * PAGE, error.value
        _C.cuda_free(held, 3 * PAGE, 0, 0)
        _C.cuda_memory_fraction(0.25, 0)
        with pytest.raises(RuntimeError):
            _C.cuda_malloc(3 * PAGE, 0, 0)
    """)  # fmt: skip


@pytest.mark.needs_time("it runs in a process of its own, which imports torch")
def test_the_step_on_a_thread_is_served_at_its_planned_addresses(tmp_path: Path) -> None:
    run(tmp_path, """
        _C.cuda_pool(0, 0)
        device = _C.cuda_device(0)
        arena = _C.CudaArena(device, 4 * PAGE)
        arena.resize(4 * PAGE)
        arena.back(0, PAGE)
        plan = _C.RequestPlan([(1000, 512, 0, 4), (2000, 2048, 1, 4)], [0, 1, 2], [3, 5], 512)
        arena.begin(0, plan)
        at = arena.malloc_within(0, 0, 1000, 0, 0)
        assert at == arena.base(0) + 512
        missed = arena.malloc_within(0, 1, 77, 0, 0)
        assert not arena.base(0) <= missed < arena.base(0) + arena.most, "not as planned: the pool's"
        held = torch.empty(10)  # memory of the host is not the step's
        figures = _C.cuda_stats(0)
        assert (figures["planned"], figures["others"], figures["allocated"]) == (1, 1, 1077)
        thread = threading.Thread(target=free, args=(at, 1000, 0, None))
        thread.start(), thread.join()
        free(missed, 77, 0, None)
        assert arena.finish(0) and _C.cuda_stats(0)["allocated"] == 0
    """)  # fmt: skip


@pytest.mark.slow
def test_a_graphs_memory_is_its_own_until_it_is_released(tmp_path: Path) -> None:
    run(tmp_path, """
        _C.cuda_pool(0, 0)
        captured, other, pool = fake.new_stream(), fake.new_stream(), (0, 1)
        outside = _C.cuda_malloc(1000, 0, captured)
        _C.cuda_begin_pool(0, pool, [captured])
        fake.forget_calls()
        a = _C.cuda_malloc(1000, 0, captured)
        b = _C.cuda_malloc(1000, 0, captured)
        elsewhere = _C.cuda_malloc(1000, 0, other)
        _C.cuda_free(a, 1000, 0, captured)
        assert _C.cuda_malloc(1000, 0, captured) == a, "the same stream, in its order"
        assert abs(a - b) < 32 << 20 and not abs(a - elsewhere) < 32 << 20
        for call in ("cuEventRecord", "cuEventQuery", "cuStreamWaitEvent", "cuEventSynchronize"):
            assert fake.count(call) == 0 or call == "cuEventRecord", (call, "inside of a capture")
        _C.cuda_end_pool(0, pool)
        after = _C.cuda_malloc(1000, 0, captured)
        assert not a <= after < a + (32 << 20)
        _C.cuda_free(a, 1000, 0, captured)
        assert _C.cuda_malloc(1000, 0, captured) != a, "the graph will write there again"
        _C.cuda_release_pool(0, pool)
        reserved = _C.cuda_stats(0)["reserved"]
        _C.cuda_free(b, 1000, 0, captured)
        assert _C.cuda_stats(0)["reserved"] == reserved - (32 << 20), "the last block was the pool's last"
        assert _C.cuda_stats(0)["pooled"] == 3
    """)  # fmt: skip


@pytest.mark.slow
def test_a_foreign_block_is_refused_without_an_exception(tmp_path: Path) -> None:
    out = run(tmp_path, """
        _C.cuda_pool(0, 0)
        free(12345, 10, 0, None)
        block = malloc(10, 0, None)
        free(block, 10, 0, None)
        free(block, 10, 0, None)
        assert _C.cuda_stats(0)["allocated"] == 0
    """)  # fmt: skip
    assert "could not be given back" in out


@pytest.mark.slow
def test_many_threads(tmp_path: Path) -> None:
    run(tmp_path, """
        import random
        _C.cuda_pool(0, 200 * PAGE)
        streams = [fake.new_stream() for _ in range(4)]
        wrong = []
        def work(seed):
            chance, held = random.Random(seed), []
            for _ in range(400):
                if held and chance.random() < 0.5:
                    at, size, mark = held.pop(chance.randrange(len(held)))
                    if ctypes.string_at(at, size) != bytes([mark]) * size: wrong.append(at)
                    free(at, size, 0, streams[seed])
                else:
                    size, mark = int(2 ** chance.uniform(0, 18)), chance.randrange(256)
                    at = malloc(size, 0, streams[seed])
                    ctypes.memset(at, mark, size)
                    held.append((at, size, mark))
            for at, size, mark in held: free(at, size, 0, streams[seed])
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert not wrong and _C.cuda_stats(0)["allocated"] == 0
        _C.cuda_give_back(0)
        assert fake.used == 0
    """)  # fmt: skip


@pytest.mark.needs_time("it runs in a process of its own, which imports torch")
def test_putting_it_into_torch(tmp_path: Path) -> None:
    """With a torch that claims to have CUDA; what it is told is written down."""
    run(tmp_path, """
        from types import SimpleNamespace
        from waterflow.allocator import cuda
        from waterflow.errors import InvalidJobError
        import logging
        said = []
        logging.getLogger("waterflow").addHandler(SimpleNamespace(level=0, handle=lambda r: said.append(r.getMessage())))
        with pytest.raises(InvalidJobError, match="was built without CUDA; use 'cpu'"):
            cuda.install()
        torch.version.cuda = "13.0"
        with pytest.raises(InvalidJobError, match="finds no GPU"):
            cuda.install()
        torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1
        torch.cuda.is_initialized = lambda: True
        own = torch.cuda.memory_allocated
        assert not cuda.install(0) and "To do better call waterflow.allocator.cuda.install()" in said[-1]
        assert torch.cuda.memory_allocated is own and not cuda.installed()

        told = {}
        class Hooks:
            def __getattr__(self, name):
                return lambda address: told.__setitem__(name, address)
        class Allocator:
            def __init__(self, path, malloc, free):
                library = ctypes.CDLL(path)
                for name in (malloc, free):
                    address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
                    assert address == _C.cuda_hooks()[name]
            def allocator(self):
                return Hooks()
        changed = []
        torch.cuda.memory.CUDAPluggableAllocator = Allocator
        torch.cuda.memory.change_current_allocator = changed.append
        torch.cuda.is_initialized = lambda: False
        torch.backends.cudnn.benchmark = True
        assert cuda.install(limit=100 * PAGE) and len(changed) == 1 and cuda.installed()
        assert not torch.backends.cudnn.benchmark and "cudnn.benchmark is switched off" in said[-1]
        assert set(told) == {"set_record_stream_fn", "set_reset_fn", "set_memory_fraction_fn",
                             "set_begin_allocate_to_pool", "set_end_allocate_to_pool_fn", "set_release_pool"}
        # They are methods of torch's own class.
        assert cuda.install(limit=50 * PAGE) and len(changed) == 1, "a second time"
        block = malloc(PAGE, 0, None)
        assert torch.cuda.memory_allocated() == PAGE == torch.cuda.memory.max_memory_allocated("cuda:0")
        assert torch.cuda.memory_reserved() >= PAGE
        assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == PAGE
        free(block, PAGE, 0, None)
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0 and fake.used == 0
        assert "allocated_bytes.all.peak" in torch.cuda.memory_summary()
        with pytest.raises(RuntimeError, match=r"torch.cuda.memory_snapshot\\(\\) asks torch's own allocator"):
            torch.cuda.memory_snapshot()
        cuda.check_settings()
        torch.backends.cudnn.benchmark = True
        with pytest.raises(InvalidJobError, match="Set torch.backends.cudnn.benchmark = False"):
            cuda.check_settings()
        cuda._put_back()
        assert torch.cuda.memory_allocated is own
    """)  # fmt: skip


@pytest.mark.slow
def test_a_broken_driver_changes_nothing_in_torch(tmp_path: Path) -> None:
    run(tmp_path, """
        from waterflow.allocator import cuda
        torch.version.cuda, torch.cuda.is_available, torch.cuda.is_initialized = "13.0", lambda: True, lambda: False
        torch.cuda.device_count = lambda: 1
        changed = []
        torch.cuda.memory.change_current_allocator = changed.append
        fake.library.cuInit(0)
        fake.fail("cuDeviceGetCount", 1, 100)
        with pytest.raises(_C.CudaError, match="cuDeviceGetCount"):
            cuda.install()
        assert not changed and not cuda.installed()
    """)  # fmt: skip
