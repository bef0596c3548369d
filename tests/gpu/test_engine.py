"""Jobs on the lanes of a real GPU end with the bits that they have alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import waterflow as wf

STEPS = 12
Result = tuple[list[float], dict[str, torch.Tensor]]


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
        nn.MaxPool2d(2), nn.Dropout(0.2), nn.Flatten(), nn.Linear(32 * 64, 10),
    )  # fmt: skip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(48, 64)
        self.layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.outward = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outward(self.layer(self.inward(x.flatten(2).reshape(x.shape[0], 16, 48))).mean(1))


def multilayer() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(768, 512), nn.GELU(), nn.Dropout(0.5), nn.Linear(512, 10))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "convolutions": convolutions, "attention": Attention, "multilayer": multilayer,
}  # fmt: skip


def job(name: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer, list[Any], torch.Generator]:
    torch.manual_seed(seed)
    model = MODELS[name]().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True)
    numbers = torch.Generator().manual_seed(seed)
    batches = [
        (torch.randn(32, 3, 16, 16, generator=numbers).cuda(), torch.randint(0, 10, (32,), generator=numbers).cuda())
        for _ in range(STEPS)
    ]
    return model, optimizer, batches, torch.Generator("cuda").manual_seed(1000 + seed)


def together(names: list[str], lanes: int, memory: str = "2GiB") -> list[Result]:
    jobs = [job(name, seed) for seed, name in enumerate(names)]
    results: list[Any] = [None] * len(jobs)
    with wf.Engine("cuda", memory=memory, lanes=lanes) as engine:

        def work(index: int) -> None:
            try:
                model, optimizer, batches, generator = jobs[index]
                step = wf.Step(
                    model, loss=F.cross_entropy, optimizer=optimizer, engine=engine, generator=generator, name=names[index]
                )
                losses = [step(batch) for batch in batches]
                values = [float(loss) for loss in losses]
                results[index] = values, {k: v.clone() for k, v in model.state_dict().items()}
            except BaseException as error:
                results[index] = error

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(jobs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in results:
            if isinstance(result, BaseException):
                raise result
        torch.cuda.synchronize()
        engine.native.check()
        planned = engine.native.placed[0]
    assert planned > 0, "no request was planned"
    return results


def same(one: Result, other: Result) -> bool:
    return one[0] == other[0] and all(torch.equal(one[1][key], other[1][key]) for key in one[1])


@pytest.mark.parametrize("lanes", [2, 3, 4])
def test_bitwise_as_alone(lanes: int) -> None:
    names = [list(MODELS)[i % len(MODELS)] for i in range(lanes)]
    mine = together(names, lanes)
    for seed, name in enumerate(names):
        jobs = [n if s == seed else None for s, n in enumerate(names)]
        del jobs
        alone = _alone(name, seed)
        assert same(mine[seed], alone), f"{name} with seed {seed} differs: {mine[seed][0]} and alone {alone[0]}"


def _alone(name: str, seed: int) -> Result:
    model, optimizer, batches, generator = job(name, seed)
    with wf.Engine("cuda", memory="2GiB", lanes=1) as engine:
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine, generator=generator)
        losses = [float(step(batch)) for batch in batches]
    return losses, {k: v.clone() for k, v in model.state_dict().items()}


@pytest.mark.parametrize("name", list(MODELS))
def test_device_graphs_are_bitwise_as_without(name: str) -> None:
    """Random numbers, a rate that changes in each step and a number that changes once included."""

    def run(graphs: bool) -> tuple[Result, torch.Tensor, dict[str, int]]:
        model, optimizer, batches, generator = job(name, 5)
        with wf.Engine("cuda", memory="2GiB", lanes=2, device_graphs=graphs) as engine:
            step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine, generator=generator)
            losses = []
            for index, batch in enumerate(batches * 3):
                optimizer.param_groups[0]["lr"] = 1e-3 / (1 + index)
                optimizer.param_groups[0]["weight_decay"] = 0.01 if index > STEPS * 2 else 0.0
                losses.append(step(batch))
            values = [float(loss) for loss in losses]
            counts = engine.stats().graphs
        return (values, {k: v.clone() for k, v in model.state_dict().items()}), generator.get_state(), counts

    (mine, numbers, counts), (plain, expected, none) = run(True), run(False)
    assert same(mine, plain) and torch.equal(numbers, expected)
    assert counts["launched"] > 0 and not any(none.values())


@pytest.mark.parametrize("rate", ["of a tensor", "constant", "schedule"])
def test_bitwise_as_eager_without_random_numbers(rate: str) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer, list[Any]]:
        model, _, batches, _ = job("convolutions", 3)
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        given = torch.tensor(1e-3, device="cuda") if rate == "of a tensor" else 1e-3
        return model, torch.optim.Adam(model.parameters(), lr=given, fused=True), batches

    def schedule(optimizer: torch.optim.Optimizer, index: int) -> None:
        if rate == "schedule":
            optimizer.param_groups[0]["lr"] = 1e-3 / (1 + index)

    model, optimizer, batches = make()
    expected = []
    for index, (images, labels) in enumerate(batches):
        schedule(optimizer, index)
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        expected.append(float(loss))
    other, optimizer, batches = make()
    with wf.Engine("cuda", memory="2GiB", lanes=2) as engine:
        step = wf.Step(other, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
        got = []
        for index, batch in enumerate(batches):
            schedule(optimizer, index)
            got.append(float(step(batch)))
        assert engine.stats().graphs["launched"] > 0
    assert got == expected
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values()))


def test_the_step_waits_for_its_caller_and_the_caller_for_the_step() -> None:
    """The caller's stream is stalled in front of the batch; the step must not read it before."""
    model, optimizer, batches, generator = job("multilayer", 0)
    with wf.Engine("cuda", memory="2GiB", lanes=2) as engine:
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine, generator=generator)
        plain = [float(step(batch)) for batch in batches]
    model, optimizer, batches, generator = job("multilayer", 0)
    side = torch.cuda.Stream()
    stalled = []
    with wf.Engine("cuda", memory="2GiB", lanes=2) as engine:
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine, generator=generator)
        for images, labels in batches:
            late = torch.zeros_like(images)
            torch.cuda.synchronize()
            with torch.cuda.stream(side):
                torch.cuda._sleep(30_000_000)
                late.copy_(images)
                loss = step((late, labels))
                stalled.append(loss * 1.0)
    torch.cuda.synchronize()
    assert [float(one) for one in stalled] == plain


def test_memory_stays_within_the_limit() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    held = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    together(["convolutions"] * 4, 4, memory="1GiB")
    assert torch.cuda.max_memory_reserved() - held <= 1 << 30


def test_an_opaque_step_runs_on_a_lane() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(768, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x.flatten(1))
            return y * 2 if y.sum().item() > 0 else y

    torch.manual_seed(0)
    model = Branches().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, _, batches, _ = job("multilayer", 0)
    with wf.Engine("cuda", memory="1GiB", lanes=2) as engine:
        step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
        losses = [float(step(batches[0])) for _ in range(6)]
    assert losses[-1] < losses[0]
