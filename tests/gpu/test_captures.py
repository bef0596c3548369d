"""Captures beside the rest of the process: what would spoil them waits, and what has spoiled one costs a step its graphs."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from waterflow.allocator import cuda

STEPS = 12
Batch = tuple[torch.Tensor, torch.Tensor]


def job(engine: wf.Engine, seed: int = 0, **settings: Any) -> tuple[wf.Step, list[Batch]]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    batches = [(torch.randn(32, 64).cuda(), torch.randint(0, 10, (32,)).cuda()) for _ in range(STEPS)]
    return wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine, name=f"job {seed}"), batches


def plainly(seed: int = 0) -> list[float]:
    with wf.Engine("cuda", memory="1GiB", lanes=1, device_graphs=False) as engine:
        step, batches = job(engine, seed)
        return [float(step(batch)) for batch in batches * 2]


def capturing() -> bool:
    # torch asks for its current stream, which is the one that is captured.
    return bool(torch.cuda.is_current_stream_capturing())


@contextmanager
def relu_is(relu: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("relu", relu, "CUDA", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


@contextmanager
def in_each_capture(call: Callable[[], None]) -> Iterator[None]:
    """Calls ``call`` where a capture comes to the ReLU; on a stream that is captured."""

    def relu(x: torch.Tensor) -> torch.Tensor:
        if capturing():
            call()
        return torch.clamp_min(x, 0)

    with relu_is(relu):
        yield


def test_a_synchronize_waits_for_a_capture_that_is_under_way() -> None:
    ended: list[bool] = []
    failed: list[Exception] = []
    threads: list[threading.Thread] = []

    def synchronize(began: threading.Event, done: threading.Event, wait: Callable[[], None]) -> None:
        began.set()
        try:
            wait()
        except Exception as error:
            failed.append(error)
        done.set()

    def beside() -> None:
        for wait in (torch.cuda.synchronize, torch.accelerator.synchronize, torch.cuda.empty_cache):
            began, done = threading.Event(), threading.Event()
            threads.append(threading.Thread(target=synchronize, args=(began, done, wait)))
            threads[-1].start()
            began.wait(60)
            ended.append(done.wait(0.05) and wait is not torch.cuda.empty_cache)

    with in_each_capture(beside), wf.Engine("cuda", memory="1GiB", lanes=1) as engine:
        step, batches = job(engine)
        for batch in batches:
            step(batch)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert threads and not failed and not any(ended)
        counts = engine.stats().graphs
        assert counts["captured"] > 0 and counts["launched"] > counts["captured"]


def test_a_capture_that_was_spoiled_is_made_again() -> None:
    expected = plainly()
    runtime, left = ctypes.CDLL(None), [1, 1]

    def spoil() -> None:
        if left:
            thread = threading.Thread(target=runtime.cudaDeviceSynchronize)
            thread.start()
            thread.join()
            left.pop()

    with in_each_capture(spoil), wf.Engine("cuda", memory="1GiB", lanes=1) as engine:
        step, batches = job(engine)
        assert [float(step(batch)) for batch in batches * 2] == expected
        assert not left, "nothing was captured"
        assert engine.stats().graphs["launched"] > 0


def test_no_capture_beside_a_step_that_is_none() -> None:
    """It may load kernels, which spoils captures."""
    inside, gate = threading.Event(), threading.Event()

    def block() -> None:
        inside.set()
        gate.wait(60)

    with wf.Engine("cuda", memory="1GiB", lanes=2, mode="lanes") as engine:
        step, batches = job(engine)
        step(batches[0]), step(batches[1])
        thread = threading.Thread(target=engine.run_eager, args=(engine.add_job("other"), block, None))
        thread.start()
        inside.wait(60)
        before = engine.stats().graphs["captured"]
        for batch in batches:
            step(batch)
        assert engine.stats().graphs["captured"] == before
        gate.set()
        thread.join()
        for batch in batches:
            step(batch)
        assert engine.stats().graphs["launched"] > 0


def test_the_end_of_a_users_graph_does_not_spoil_a_capture() -> None:
    """Its memory goes back to the device, which waits for what still uses it."""
    graphs: list[torch.cuda.CUDAGraph] = []
    for _ in range(8):
        graph, source = torch.cuda.CUDAGraph(), torch.zeros(1 << 20, device="cuda")
        with torch.cuda.graph(graph):
            source * 2
        graphs.append(graph)
        del graph

    def drop() -> None:
        if graphs:
            graphs.pop()

    with in_each_capture(drop), wf.Engine("cuda", memory="1GiB", lanes=1) as engine:
        step, batches = job(engine)
        for batch in batches:
            step(batch)
        assert len(graphs) < 8 and engine.stats().graphs["launched"] > 0
    graphs.clear()
    held = torch.cuda.memory_reserved()
    cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= held


def test_a_workspace_that_a_capture_has_asked_for_stays_its_own() -> None:
    """Libraries keep one for each stream, and see the stream of a capture there for the first time."""
    expected = [plainly(seed) for seed in range(2)]
    workspaces: dict[int, torch.Tensor] = {}

    def relu(x: torch.Tensor) -> torch.Tensor:
        workspace = workspaces.setdefault(torch.cuda.current_stream().cuda_stream, torch.empty_like(x))
        return torch.clamp_min(workspace.copy_(x), 0)

    with relu_is(relu), wf.Engine("cuda", memory="1GiB", lanes=1) as engine:
        for seed in range(2):
            step, batches = job(engine, seed)
            assert [float(step(batch)) for batch in batches * 2] == expected[seed]
        assert engine.native.detached > 0 and engine.stats().graphs["launched"] > 0
        engine.native.check()


@pytest.mark.parametrize("threads", [1, 3])
def test_the_caller_runs_its_step_however_many_threads_it_has(threads: int) -> None:
    """It has nothing else to do, and a GPU's kernels are not its threads'."""
    ran: list[int] = []

    def relu(x: torch.Tensor) -> torch.Tensor:
        ran.append(threading.get_ident())
        return torch.clamp_min(x, 0)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with relu_is(relu), wf.Engine("cuda", memory="1GiB", lanes=1, device_graphs=False) as engine:
            step, batches = job(engine)
            for batch in batches:
                step(batch)
    finally:
        torch.set_num_threads(before)
    assert ran[-1] == threading.get_ident()
