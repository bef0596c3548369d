"""Jobs whose batches are cut into shards: the bits of a loop by hand, whatever else they use."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, get_worker_info

import waterflow as wf
from waterflow.executor.data.digest import digest
from waterflow.executor.data.sharded import ShardedBatches, sizes, stream_seed
from waterflow.training.shards.step import middle


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Dropout(0.3), nn.Linear(32, 4))


def normed() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(8 * 36, 4))


def rows(kind: str, count: int = 37) -> TensorDataset:
    numbers = torch.Generator().manual_seed(5)
    shape = (count, 12) if kind == "mlp" else (count, 3, 8, 8)
    return TensorDataset(torch.randn(shape, generator=numbers), torch.randint(4, (count,), generator=numbers))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


MODELS = {"mlp": mlp, "normed": normed}
OPTIMIZERS = {
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),  # runs eagerly
}


def by_hand(job: wf.Job, batches: list[list[Any]], seed: int) -> tuple[nn.Module, list[float]]:
    """The loop that a job with shards equals: one gradient for each part, and their sum along the tree."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = job.model()
    optimizer = job.optimizer(model.parameters())
    for group in optimizer.param_groups:
        group["fused"] = type(optimizer) is not torch.optim.Adagrad or None
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    named = dict(model.named_parameters())
    buffers = [copy.deepcopy(dict(model.named_buffers())) for _ in range(job.shards)]
    losses, total, calls = [], {}, 0

    def load(shard: int) -> None:
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[shard][name])

    def part(shard: int, batch: Any, weight: float) -> tuple[dict[str, torch.Tensor], float]:
        load(shard)
        torch.manual_seed(stream_seed(seed, shard, calls))
        loss = job.loss(model(batch[0]), batch[1]) * torch.tensor(weight)
        (loss / job.accumulate if job.accumulate > 1 else loss).backward()
        found = {name: p.grad for name, p in named.items() if p.grad is not None}
        model.zero_grad(set_to_none=True)
        buffers[shard] = copy.deepcopy(dict(model.named_buffers()))
        return found, float(loss.detach())

    def add(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        both = {name: one[name] + other[name] for name in one.keys() & other.keys()}
        return {**one, **other, **both}

    def node(low: int, high: int, parts: dict[int, Any], weights: list[float]) -> tuple[dict[str, torch.Tensor], float]:
        if high - low == 1:
            return part(low, parts[low], weights[low]) if low in parts else ({}, -0.0)
        left, one = node(low, middle(low, high), parts, weights)
        right, other = node(middle(low, high), high, parts, weights)
        return add(left, right), one + other

    with torch.random.fork_rng(devices=[]):
        for batch in batches:
            counts = sizes(len(batch[0]), job.shards)
            begins = [sum(counts[:shard]) for shard in range(job.shards)]
            parts = {s: [t[b : b + n] for t in batch] for s, (b, n) in enumerate(zip(begins, counts)) if n}
            found, loss = node(0, job.shards, parts, [n / sum(counts) for n in counts])
            losses.append(loss)
            total, calls = add(total, found), calls + 1
            if calls % job.accumulate == 0:
                for name, gradient in total.items():
                    named[name].grad = gradient
                if job.clip_grad_norm is not None:
                    nn.utils.clip_grad_norm_([p for p in named.values() if p.grad is not None], job.clip_grad_norm)
                optimizer.step()
                model.zero_grad(set_to_none=True)
                total = {}
            load(0)
            if scheduler is not None:
                scheduler.step()
    return model, losses


def order(data: TensorDataset, size: int, seed: int, epochs: int) -> list[list[torch.Tensor]]:
    """The batches of a shuffled loader, in the job's order."""
    numbers = torch.Generator().manual_seed(seed)
    loader = DataLoader(data, size, shuffle=True, generator=numbers)
    return [batch for _ in range(epochs) for batch in loader]


def same(result: wf.JobResult, model: nn.Module, losses: list[float]) -> bool:
    assert result.state_dict is not None
    equal = all(torch.equal(value, result.state_dict[name]) for name, value in model.state_dict().items())
    return equal and list(result.losses) == losses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("shards", [2, 3, 4])
def test_the_bits_of_a_loop_by_hand(shards: int, kind: str, optimizer: str) -> None:
    job = wf.Job(
        "job", MODELS[kind], DataLoader(rows(kind), 10, shuffle=True), OPTIMIZERS[optimizer], loss=F.cross_entropy, epochs=2,
        shards=shards, seed=3, clip_grad_norm=1.0, scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5),
        scheduler_interval="step",
    )  # fmt: skip
    result = wf.train([job])[0]
    assert (result.opaque_reason is None) == (optimizer != "adagrad")
    assert same(result, *by_hand(job, order(rows(kind), 10, 3, 2), 3))


def test_accumulating(shards: int = 4) -> None:
    batches = [list(batch) for batch in DataLoader(rows("normed", 36), 6)]
    job = wf.Job("job", normed, batches, OPTIMIZERS["adamw"], loss=F.cross_entropy, epochs=2, shards=shards, seed=3, accumulate=3)
    assert same(wf.train([job])[0], *by_hand(job, batches * 2, 3))


def test_parts_of_fewer_rows_than_shards_take_no_part() -> None:
    batches = [list(batch) for batch in DataLoader(rows("mlp", 11), 3)]  # the last one has two rows
    job = wf.Job("job", mlp, batches, OPTIMIZERS["adamw"], loss=F.cross_entropy, shards=4, seed=3)
    assert same(wf.train([job])[0], *by_hand(job, batches, 3))


def test_loss_weight_weighs_the_parts() -> None:
    weighed: list[int] = []

    def weight(part: Any) -> float:
        weighed.append(len(part[1]))
        return 2.0 * len(part[1])

    job = wf.Job("job", mlp, DataLoader(rows("mlp"), 8), OPTIMIZERS["sgd"], loss=F.cross_entropy, shards=4, seed=3)
    by_rows, by_weight = wf.train([job])[0], wf.train([replace(job, loss_weight=weight)])[0]
    assert by_rows.losses == by_weight.losses and weighed[:4] == [2] * 4


def test_parts_without_weight_take_no_part() -> None:
    targets = torch.tensor([1, 2, 3, 0, -100, -100])
    job = wf.Job(
        "job", mlp, [(torch.randn(6, 12), targets)], OPTIMIZERS["sgd"], loss=F.cross_entropy, shards=3, seed=3,
        loss_weight=lambda part: (part[1] >= 0).sum(),
    )  # fmt: skip
    result = wf.train(job)[0]
    assert result.status == "completed" and math.isfinite(result.losses[0])


def test_bad_settings_and_data_are_told() -> None:
    def job(**settings: Any) -> wf.Job:
        return wf.Job(
            "job", mlp, **{"data": [batch], "optimizer": OPTIMIZERS["sgd"], "loss": F.cross_entropy, "shards": 2, **settings}
        )

    batch = torch.randn(4, 12), torch.zeros(4, dtype=torch.int64)
    with pytest.raises(wf.InvalidJobError, match="shards must be a positive integer; got 0"):
        wf.train([job(shards=0)])
    with pytest.raises(wf.InvalidJobError, match="needs shards of 2 or more"):
        wf.train([job(shards=1, loss_weight=len)])
    with pytest.raises(wf.InvalidJobError, match="shards=2 cuts them"):
        wf.train([job(data=wf.SharedData([batch]))])
    with pytest.raises(wf.InvalidJobError, match=r"have \[3, 4\] rows"):
        wf.train([job(data=[(torch.randn(3, 12), batch[1])])])
    with pytest.raises(wf.InvalidJobError, match="loss_weight must return positive numbers"):
        wf.train([job(loss_weight=lambda part: 0)])


class Noisy(Dataset[Any]):
    """Rows with random numbers of their own, as augmentation draws them."""

    def __init__(self, rows: TensorDataset) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Any:
        value, target = self.rows[index]
        return value + torch.randn(value.shape) + random.random() * (get_worker_info() is not None), target


def test_random_rows_do_not_depend_on_what_reads_them() -> None:
    def read(mine: range, workers: int, epochs: int = 2) -> list[dict[int, Any]]:
        loader = DataLoader(Noisy(rows("mlp", 23)), 7, shuffle=True, num_workers=workers)
        batches = ShardedBatches("job", loader, torch.Generator().manual_seed(3), shards=3, seed=3)
        batches.mine = mine
        return [one.parts for _ in range(epochs) for one in batches.epoch()]

    def equal(some: list[dict[int, Any]], all_: list[dict[int, Any]], mine: range) -> bool:
        return len(some) == len(all_) and all(
            one.keys() == other.keys() & set(mine) and all(torch.equal(one[s][0], other[s][0]) for s in one)
            for one, other in zip(some, all_)
        )

    for workers in (0, 2):
        whole = read(range(3), workers)
        assert len(whole) == 8 and [sum(len(p[1]) for p in one.values()) for one in whole] == [7, 7, 7, 2] * 2
        assert all(equal(read(mine, workers), whole, mine) for mine in (range(1), range(1, 3)))


class Own(Sampler[Any]):
    """Batches in an order that is drawn from torch's numbers, row by row, or from a generator of its own."""

    def __init__(self, numbers: torch.Generator | None) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(4):
            yield torch.randint(23, (6,), generator=self.numbers).tolist()


@pytest.mark.parametrize("own", [False, True])
def test_a_sampler_of_the_users_draws_the_same_whatever_is_read(own: bool) -> None:
    def read(mine: range, from_place: bool = False) -> list[list[float]]:
        def made() -> ShardedBatches:
            sampler = Own(torch.Generator().manual_seed(8) if own else None)
            loader = DataLoader(Noisy(rows("mlp", 23)), batch_sampler=sampler)
            return ShardedBatches("job", loader, torch.Generator().manual_seed(3), shards=3, seed=3)

        batches = made()
        batches.mine, found = mine, list[Any]()
        for _ in range(2):
            for one in batches.epoch():
                found.append(one.parts[0][0].tolist())
                if from_place and len(found) == 6:
                    place, batches = batches.place(), made()
                    batches.go_on_from(place)
                    break
        return found + [one.parts[0][0].tolist() for _ in range(from_place) for one in batches.epoch()]

    assert read(range(3)) == read(range(1)) == read(range(3), from_place=True)


def test_data_that_comes_in_another_order_when_it_is_read_again_is_told() -> None:
    class ByPython(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(random.sample(range(23), 23))

    def made() -> ShardedBatches:
        loader = DataLoader(rows("mlp", 23), 5, sampler=ByPython())
        return ShardedBatches("job", loader, torch.Generator().manual_seed(3), shards=2, seed=3)

    batches = made()
    reading = batches.epoch()
    first = [next(reading) for _ in range(3)]
    batches.put_back(first[-1])
    assert batches.place()["read"] == 2
    again = made()
    again.go_on_from(batches.place())
    with pytest.raises(wf.InvalidJobError, match="read up to batch 2 of a pass is read again.*other indices"):
        next(again.epoch())


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_devices_compare_batches_and_read_the_same(workers: int) -> None:
    def read(mine: range, compared: bool, data: Any = None) -> list[Any]:
        loader = data or DataLoader(Noisy(rows("mlp", 23)), 7, shuffle=True, num_workers=workers)
        batches = ShardedBatches("job", loader, torch.Generator().manual_seed(3), shards=2, seed=3)
        batches.mine, batches.compared = mine, compared
        return [one for _ in range(2) for one in batches.epoch()]

    first, last, all_ = read(range(1), True), read(range(1, 2), True), read(range(2), False)
    assert [sorted(one.alike) for one in first[:4]] == [["indices", "rows"]] * 3 + [["indices"]]
    for one, other, plain in zip(first, last, all_, strict=True):
        assert digest(one.alike) == digest(other.alike) and plain.alike == {}
        assert torch.equal(one.parts[0][0], plain.parts[0][0]) and torch.equal(other.parts[1][0], plain.parts[1][0])
    assert len({digest(one.alike) for one in first}) == len(first)
    batches = [(torch.randn(6, 2), np.arange(6), "text")]
    [whole] = read(range(1), True, batches)[:1]
    assert digest(whole.alike) != digest(read(range(1), True, [(batches[0][0] + 1, *batches[0][1:])])[0].alike)


def test_what_an_evaluation_changes_in_buffers_counts_for_all_shards() -> None:
    def evaluate(model: Any) -> int:
        count = int(model[1].num_batches_tracked)
        model[1].reset_running_stats()
        return count

    loader = DataLoader(rows("normed", 40), 10)
    job = wf.Job("job", normed, loader, OPTIMIZERS["sgd"], loss=F.cross_entropy, evaluate=evaluate, epochs=3, shards=2, seed=3)
    assert [metrics["value"] for metrics in wf.train(job)[0].metrics] == [4, 4, 4]


@pytest.mark.parametrize("data", ["list", "loader"])
def test_goes_on_from_a_checkpoint_with_the_same_bits(data: str) -> None:
    batches = [list(batch) for batch in DataLoader(rows("normed", 36), 6)]
    given = batches if data == "list" else DataLoader(rows("normed", 36), 6, shuffle=True)
    taken: list[Any] = []

    class Asking(torch.optim.lr_scheduler.StepLR):
        def step(self, epoch: int | None = None) -> None:
            super().step(epoch)
            if self.last_epoch == 9 and not taken:  # in the middle of an update's batches
                taken.append(runner.ask_for_snapshot())

    job = wf.Job(
        "job", normed, given, OPTIMIZERS["adamw"], loss=F.cross_entropy, epochs=3, shards=4, seed=3, accumulate=2,
        scheduler=lambda o: Asking(o, 3, 0.5), scheduler_interval="step",
    )  # fmt: skip
    with wf.Engine("cpu", memory="1GiB") as engine:
        runner = wf.JobRunner(job, engine)
        whole = runner.run()
        checkpoint = taken[0].result()
        assert checkpoint.steps == 9
        rest = wf.JobRunner(job, engine, resume=checkpoint).run()
    assert whole.status == rest.status == "completed", (whole.error, rest.error)
    assert whole.state_dict is not None and same(rest, *_model_of(whole))


def _model_of(result: wf.JobResult) -> tuple[nn.Module, list[float]]:
    model = normed()
    assert result.state_dict is not None
    model.load_state_dict(result.state_dict)
    return model, list(result.losses)


def test_suspended_and_resumed_with_the_same_bits() -> None:
    job = wf.Job(
        "job", normed, DataLoader(rows("normed", 60), 6), OPTIMIZERS["adamw"], loss=F.cross_entropy, epochs=4, shards=4, seed=3
    )
    alone = wf.train([job])[0]
    with wf.Engine("cpu", memory="1GiB") as engine, ThreadPoolExecutor(1) as pool:
        runner = wf.JobRunner(job, engine)
        running = pool.submit(runner.run)
        runner.suspend(timeout=60)
        runner.resume()
        assert same(running.result(), *_model_of(alone))
