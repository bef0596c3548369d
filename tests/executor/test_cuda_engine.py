"""An engine whose lanes are a GPU's, on the stand-in for its driver: streams, events and arenas are the GPU's, and the
numbers the CPU's, whose memory is planned in those arenas. So a wrong address or a page that is missing shows."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf
from tests.allocator.fake_cuda import FakeCuda
from waterflow import _C
from waterflow.executor import engine as engines

STEPS = 8


@pytest.fixture
def fake(tmp_path: Path) -> FakeCuda:
    return FakeCuda(tmp_path)


@pytest.fixture
def on_cuda(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Engines that are made now have their lanes on the stand-in."""
    made: list[Any] = []

    def native(settings: dict[str, Any], arenas: bool) -> Any:
        handles = [fake.new_stream() for _ in range(settings["lanes"])]
        device = _C.CudaDevice(0, 0, fake.path)
        settings = {**settings, "async_host": None}
        made.append(_C.Engine(**settings, arenas=arenas, cuda=device, handles=handles))
        return made[-1]

    monkeypatch.setattr(engines, "_native", native)
    yield made


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.ReLU(), nn.Dropout(0.3),
        nn.Flatten(), nn.Linear(16 * 144, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def batches(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    numbers = torch.Generator().manual_seed(seed)
    return [(torch.randn(16, 3, 16, 16, generator=numbers), torch.randint(0, 10, (16,), generator=numbers)) for _ in range(STEPS)]


def train(copies: int, engine: wf.Engine, kept: list[wf.Step] | None = None) -> list[tuple[list[float], dict[str, torch.Tensor]]]:
    import threading

    models = [model(seed) for seed in range(copies)]
    losses: list[list[float]] = [[] for _ in range(copies)]
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            optimizer = torch.optim.Adam(models[index].parameters(), lr=1e-3)
            numbers = torch.Generator().manual_seed(100 + index)
            step = wf.Step(models[index], loss=F.cross_entropy, optimizer=optimizer, engine=engine, generator=numbers)
            if kept is not None:
                kept.append(step)
            for batch in batches(index):
                losses[index].append(float(step(batch)))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(copies)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    return [(losses[i], {k: v.clone() for k, v in models[i].state_dict().items()}) for i in range(copies)]


@pytest.mark.parametrize("lanes", [1, 2, 4])
def test_bitwise_as_on_the_cpu(lanes: int, on_cuda: list[Any], fake: FakeCuda) -> None:
    with wf.Engine(memory="512MiB", lanes=lanes) as engine:
        kept: list[wf.Step] = []  # with the last job its pages go
        mine = train(lanes, engine, kept)
        native = engine.native
        assert native is on_cuda[0]
        planned = native.placed[0]
        assert planned > 0 and fake.used > 0, "steps stood in the GPU's arenas"
        assert fake.count("cuEventRecord") > lanes * STEPS
        peak = fake.used
    engines._native, back = _cpu_native, engines._native
    try:
        with wf.Engine(memory="512MiB", lanes=lanes, arenas=False) as plain:
            theirs = train(lanes, plain)
    finally:
        engines._native = back
    assert [one[0] for one in mine] == [one[0] for one in theirs]
    for (_, got), (_, expected) in zip(mine, theirs):
        assert all(torch.equal(got[key], expected[key]) for key in expected)
    assert peak <= 512 << 20


_cpu_native = engines._native


def test_nothing_is_left_when_the_engine_is_closed(on_cuda: list[Any], fake: FakeCuda) -> None:
    engine = wf.Engine(memory="512MiB", lanes=2)
    train(2, engine)
    engine.close()
    on_cuda.clear()
    del engine
    gc.collect()
    assert fake.used == 0
    held = fake.held()
    assert held.pop("streams") == 2 and held == {}, "torch's streams stay torch's"


def test_two_lanes_wait_for_each_others_ground_and_the_host_runs_ahead_by_two_groups(on_cuda: list[Any], fake: FakeCuda) -> None:
    """In an arena in which two steps do not fit side by side at their highest."""
    with wf.Engine(memory="512MiB", lanes=2) as engine:
        train(2, engine)
        height = max(claim.height for claim in engine.reservations._claims.values()) if engine.reservations._claims else 4 << 20
    del engine
    fake.forget_calls()
    on_cuda.clear()
    with wf.Engine(memory="96MiB", lanes=2) as engine:
        train(2, engine)
        engine.native.check()
    assert height > 0
    assert fake.count("cuEventSynchronize") > 0


def test_a_device_that_fails_ends_the_job_and_not_the_process(on_cuda: list[Any], fake: FakeCuda) -> None:
    with wf.Engine(memory="512MiB", lanes=1) as engine:
        network = model(0)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        step = wf.Step(network, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
        data = batches(0)
        for batch in data[:5]:
            step(batch)
        fake.fail("cuEventRecord", 3, 700)
        with pytest.raises(Exception, match="cuEventRecord"):
            step(data[5])


def test_no_memory_for_an_arena_falls_back_to_the_pool(on_cuda: list[Any], fake: FakeCuda) -> None:
    fake.memory(2 << 20)
    with wf.Engine(memory="512MiB", lanes=2) as engine:
        train(2, engine)
        assert fake.used <= 2 << 20


def test_streams_and_lanes_must_be_as_many(fake: FakeCuda) -> None:
    with pytest.raises(ValueError, match="an engine of 2 lanes needs as many streams"):
        _C.Engine(lanes=2, threads_per_lane=1, capacity=1 << 20, cuda=_C.CudaDevice(0, 0, fake.path), handles=[1])


def test_streams_are_lent_to_one_engine_after_the_other(fake: FakeCuda) -> None:
    device = _C.CudaDevice(0, 0, fake.path)

    def opened() -> Any:
        return _C.Engine(lanes=2, threads_per_lane=1, capacity=1 << 20, cuda=device)

    def made() -> int:
        return fake.count("cuStreamCreate")

    fake.fail("cuStreamGetId", 2)
    with pytest.raises(_C.CudaError, match="cuStreamGetId"):
        opened()
    first = opened()
    assert made() == 4, "one for each lane, and one for its captures; an engine that failed has given them back"
    second = opened()
    assert made() == 8, "the first engine still has its own"
    first.close()
    third = opened()
    assert made() == 8
    del second
    gc.collect()
    fourth = opened()
    assert made() == 8, "one that was not closed has given them back, too"
    third.close()
    fourth.close()
    assert fake.count("cuStreamDestroy") == 0 and fake.held()["streams"] == made()


def test_without_cuda_the_engine_says_so() -> None:
    with pytest.raises(wf.InvalidJobError, match="device 'cuda' cannot be used: this torch .* use 'cpu'"):
        wf.Engine("cuda")
    with pytest.raises(wf.InvalidJobError, match="device 'mps' is not supported"):
        wf.Engine("mps")
