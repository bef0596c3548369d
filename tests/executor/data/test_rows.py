"""Rows that are taken at once are torch's: the same rows, order, types, layouts, and states of all generators behind them."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import data as torch_data
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    Dataset,
    RandomSampler,
    SequentialSampler,
    StackDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
    random_split,
)

import waterflow as wf
from waterflow.errors import InvalidJobError
from waterflow.executor.data import loader, rows
from waterflow.executor.data.loader import Batches, may_read_ahead
from waterflow.executor.data.sharded import ShardedBatches

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64]


class Drawn:
    """Data sets, loaders and their arguments by chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.count = self.chance.randrange(3, 40)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = (torch.rand(self.count, *shape) * 9).to(dtype)
        if made.dim() == 4 and self.chance.random() < 0.3:
            return made.contiguous(memory_format=torch.channels_last)
        if made.dim() > 4 and self.chance.random() < 0.6:  # of pictures, or of volumes, with channels last
            return made.movedim(-1, 2 if self.chance.random() < 0.5 else 1).contiguous().movedim(2, -1)
        if made.dim() > 1 and self.chance.random() < 0.2:
            return made.transpose(0, -1).contiguous().transpose(0, -1)
        return made

    def shapes(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        shapes = [(), (5,), (0,), (1,), (3, 4), (3, 4, 4), (1, 4, 4), (3, 1, 1), (1, 2, 2, 2), (2, 2, 3, 4), (2, 2, 3, 2, 3)]
        return [(self.chance.choice(shapes), self.chance.choice(TYPES)) for _ in range(self.chance.randrange(1, 4))]

    def data(self, shapes: list[tuple[tuple[int, ...], torch.dtype]], depth: int = 2) -> Any:
        kind = self.chance.choice(["tensors", "tensors", "tensor", *(["subset", "split", "concat", "stack"] if depth else [])])
        if kind == "tensors":
            return TensorDataset(*(self.tensor(*shape) for shape in shapes))
        if kind == "tensor":
            return self.tensor(*shapes[0])
        if kind == "concat":
            seed = self.chance.random()
            parts = [self.like(seed, shapes, depth) for _ in range(self.chance.randrange(1, 4))]
            return ConcatDataset(parts)
        if kind == "stack":
            count = self.count
            parts = []
            for _ in range(self.chance.randrange(1, 3)):
                self.count = count
                parts.append(Subset(self.data(shapes, 0), range(count)))
            self.count = count
            return StackDataset(*parts) if self.chance.random() < 0.5 else StackDataset(**dict(zip("ab", parts)))
        inner = self.data(shapes, depth - 1)
        if kind == "split":
            first = self.chance.randrange(1, max(2, len(inner)))
            return random_split(inner, [first, len(inner) - first], torch.Generator().manual_seed(0))[0]
        picked = [self.chance.randrange(len(inner)) for _ in range(self.chance.randrange(1, 2 * len(inner) + 1))]
        return Subset(inner, self.chance.choice([list, tuple, np.array, torch.tensor])(picked))

    def like(self, seed: float, shapes: list[tuple[tuple[int, ...], torch.dtype]], depth: int) -> Any:
        # Parts of one form, with other numbers of rows; now and then one of another form.
        here, self.chance = self.chance, random.Random(seed if self.chance.random() < 0.9 else seed + 1)
        made = self.data(shapes, depth - 1)
        self.chance = here
        return made

    def arguments(self, data: Any) -> dict[str, Any]:
        size, drop = self.chance.randrange(1, 9), self.chance.random() < 0.5
        kind = self.chance.choice(["shuffle", "shuffle", "plain", "sampler", "batches", "generator"])
        if kind == "sampler":
            weights = [self.chance.random() for _ in range(len(data))]
            sampler = self.chance.choice(
                [
                    SequentialSampler(data),
                    RandomSampler(data, replacement=True, num_samples=2 * len(data)),
                    RandomSampler(data, num_samples=len(data) + 3),
                    SubsetRandomSampler(np.arange(len(data))),
                    SubsetRandomSampler(range(0, len(data), 2)),
                    WeightedRandomSampler(weights, len(data)),
                ]
            )
            return {"batch_size": size, "sampler": sampler, "drop_last": drop}
        if kind == "batches":
            return {"batch_sampler": BatchSampler(RandomSampler(data), size, drop)}
        made = {"batch_size": size, "shuffle": kind != "plain", "drop_last": drop}
        return {**made, "generator": torch.Generator().manual_seed(5)} if kind == "generator" else made


def seen(batch: Any) -> Any:
    leaves, form = tree_flatten(batch)
    return str(form), [(t.dtype, t.shape, t.stride(), t.contiguous().view(-1).tolist()) for t in leaves]


def plain_passes(seed: int, kind: Any) -> Iterator[Any]:
    torch.manual_seed(seed)
    drawn = Drawn(seed)
    data = drawn.data(drawn.shapes())
    arguments = drawn.arguments(data)
    loader = kind(data, **arguments)
    for _ in range(2):
        try:
            yield from map(seen, loader)
        except Exception as error:  # of parts that are no batch together
            yield type(error), str(error)
        own = loader.generator
        yield torch.get_rng_state().tolist(), None if own is None else own.get_state().tolist()


@pytest.mark.parametrize("seeds", [range(start, start + 25) for start in range(0, 150, 25)], ids=str)
def test_loaders_as_torchs(seeds: range) -> None:
    for seed in seeds:
        assert [*plain_passes(seed, wf.DataLoader)] == [*plain_passes(seed, torch_data.DataLoader)], seed


def of_a_job(seed: int, kind: Any, shards: int) -> list[Any]:
    torch.manual_seed(seed)
    drawn = Drawn(seed)
    data = drawn.data(drawn.shapes())
    source = kind(data, **drawn.arguments(data))

    def batches() -> Any:
        numbers = torch.Generator().manual_seed(seed)
        return Batches("a", source, numbers) if shards == 1 else ShardedBatches("a", source, numbers, shards=shards, seed=seed)

    found: list[Any] = []
    try:
        first = batches()
        middle = seed % max(1, len(source))
        for number, batch in enumerate(first.epoch()):
            found.append(told(batch))
            if number == middle:
                place = first.place()
        found += map(told, first.epoch())
        again = batches()
        again.go_on_from(place)
        found += map(told, again.epoch())
        found += [{**again.place(), "began": None}, first._generators[0].get_state().tolist(), first._order.get_state().tolist()]
    except Exception as error:
        found.append((type(error), str(error)))
    return [str(one) for one in found]


def told(batch: Any) -> Any:
    return seen(batch) if not hasattr(batch, "parts") else (batch.rows, {n: seen(part) for n, part in batch.parts.items()})


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("seeds", [range(start, start + 25) for start in (1000, 1025, 1050)], ids=str)
def test_jobs_as_torchs(monkeypatch: pytest.MonkeyPatch, seeds: range, shards: int) -> None:
    """Shuffled with the job's numbers, in shards too, and resumed in the middle of an epoch."""
    ours = [of_a_job(seed, kind, shards) for seed in seeds for kind in (torch_data.DataLoader, wf.DataLoader)]
    for module in (loader, rows):
        monkeypatch.setattr(module, "at_once", lambda reading: reading)
    theirs = [of_a_job(seed, torch_data.DataLoader, shards) for seed in seeds]
    assert ours[::2] == theirs == ours[1::2]


TABLE = TensorDataset(torch.arange(12.0), torch.arange(12))


class OfRows:
    """Counts rows that are fetched one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        fetch = TensorDataset.__getitem__

        def counted(data: TensorDataset, index: int) -> Any:
            self.count += 1
            return fetch(data, index)

        monkeypatch.setattr(TensorDataset, "__getitem__", counted)


@pytest.mark.parametrize("data", [TABLE, Subset(TABLE, range(9)), ConcatDataset([TABLE, TABLE]), StackDataset(a=TABLE, b=TABLE)])
def test_no_row_is_fetched_by_itself(monkeypatch: pytest.MonkeyPatch, data: Any) -> None:
    fetched = OfRows(monkeypatch)
    [*wf.DataLoader(data, 4, shuffle=True)]
    [*Batches("a", torch_data.DataLoader(data, 4), torch.Generator()).epoch()]
    [*ShardedBatches("a", torch_data.DataLoader(data, 4), torch.Generator(), shards=2, seed=0).epoch()]
    assert fetched.count == 0


class Tables(TensorDataset):
    """A subclass, which may do anything."""


def another_getitems() -> TensorDataset:
    made = TensorDataset(torch.arange(4.0))
    made.__getitems__ = lambda indices: [made[0] for _ in indices]  # type: ignore[attr-defined]
    return made


ODD = {
    "a subclass": Tables(torch.arange(4.0)),
    "rows of its own": another_getitems(),
    "gradients": TensorDataset(torch.arange(4.0, requires_grad=True)),
    "lazy bits": TensorDataset(torch.randn(4, dtype=torch.complex64).conj()),
    "parts of unlike types": ConcatDataset([TensorDataset(torch.arange(2.0)), TensorDataset(torch.arange(2))]),
    "parts of unlike shapes": ConcatDataset([TensorDataset(torch.zeros(2, 3)), TensorDataset(torch.zeros(2, 4))]),
    "negative indices": Subset(TABLE, [-1, 3, -2, 0]),
    "indices out of range": Subset(TABLE, [0, 1, 12, 2]),
    "bools": Subset(TABLE, [True, 0, 1, 0]),
    "tensors as indices": Subset(TABLE, [*torch.arange(4)]),
    "objects": StackDataset(TABLE, [str(number) for number in range(12)]),
    "rows whose channels are last": TensorDataset(torch.randn(4, 2, 3, 4, 5).permute(0, 1, 4, 2, 3)),
    "volumes whose channels are last": TensorDataset(torch.randn(4, 2, 2, 3, 4, 5).permute(0, 1, 5, 2, 3, 4)),
    "a parameter": torch.nn.Parameter(torch.zeros(4), requires_grad=False),
}


def shape_of(leaf: Any) -> Any:
    return (leaf.shape, leaf.stride()) if isinstance(leaf, torch.Tensor) else None


class Asked(list[int]):
    """Indices that count how often they are asked."""

    asked = 0

    def __getitem__(self, index: Any) -> Any:
        self.asked += 1
        return super().__getitem__(index)


def test_indices_of_the_users_kind_are_asked_as_often_as_by_torch() -> None:
    counts = []
    for kind in (wf.DataLoader, torch_data.DataLoader):
        indices = Asked(range(8))
        [*kind(Subset(TABLE, indices), 4)]
        counts.append(indices.asked)
    assert counts[0] == counts[1] == 8


class Slim(wf.DataLoader[Any]):
    """Leaves its data out of what is pickled, and transforms by a method."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "dataset"}

    def batch_transform(self, batch: Any) -> Any:  # type: ignore[override]
        return doubled(batch)


def test_a_subclass_is_read_as_torchs_are() -> None:
    assert [batch[0].tolist() for batch in Slim(TABLE, 6)] == [[2.0 * n for n in range(6)], [2.0 * n for n in range(6, 12)]]
    assert pickle.loads(pickle.dumps(wf.DataLoader(TABLE, 6))).batch_size == 6


@pytest.mark.parametrize("what", ODD)
def test_what_is_not_sure_goes_torchs_way(what: str) -> None:
    def passes(kind: Any) -> Any:
        found = []
        try:
            for batch in kind(ODD[what], 4):
                leaves, form = tree_flatten(batch)
                found.append(
                    (
                        str(form),
                        [(type(leaf), getattr(leaf, "requires_grad", None), shape_of(leaf), str(leaf)) for leaf in leaves],
                    )
                )
        except Exception as error:
            return type(error), str(error)
        return found

    assert passes(wf.DataLoader) == passes(torch_data.DataLoader)


def test_a_changed_way_of_collating(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(batch: Any, *, collate_fn_map: Any = None) -> torch.Tensor:
        return torch.stack(batch) * 2

    monkeypatch.setitem(rows.default_collate_fn_map, torch.Tensor, twice)
    [batch] = wf.DataLoader(torch.ones(3), 3)
    assert batch.tolist() == [2.0, 2.0, 2.0]


def test_rows_that_change_between_batches() -> None:
    """What is read is what the tensors hold at that time."""
    data = TensorDataset(torch.zeros(4))
    found = []
    for batch in wf.DataLoader(data, 2):
        found.append(batch[0].tolist())
        data.tensors = (torch.ones(4),)
    assert found == [[0.0, 0.0], [1.0, 1.0]]


def doubled(batch: Any) -> Any:
    """A transform for workers."""
    return [2 * batch[0], batch[1]]


def jittered(batch: Any) -> Any:
    return [batch[0] + torch.rand_like(batch[0]), batch[1]]


def nothing(batch: Any) -> None:
    batch[0] += 1


class Slow(Dataset[Any]):
    """A data set of the user's."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(index)), index


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("data", [TABLE, Slow()], ids=["tensors", "rows"])
def test_batches_are_transformed(data: Any, workers: int) -> None:
    calls = wf.DataLoader(data, 4, num_workers=workers, batch_transform=doubled)
    assert [batch[0].tolist() for batch in calls] == [(2 * batch[0]).tolist() for batch in torch_data.DataLoader(data, 4)]
    if workers:
        return
    whole = wf.DataLoader(Slow(), batch_size=None, batch_transform=lambda row: row[1])
    assert [*whole] == [0, 1, 2, 3]


def test_a_transform_draws_from_the_jobs_numbers() -> None:
    def drawn(seed: int) -> Any:
        source = wf.DataLoader(TABLE, 4, shuffle=True, batch_transform=jittered)
        return [tree_leaves(batch)[0].tolist() for batch in Batches("a", source, torch.Generator().manual_seed(seed)).epoch()]

    first = drawn(1)
    torch.manual_seed(77)
    assert drawn(1) == first != drawn(2)


@pytest.mark.parametrize("transform, ahead", [(None, True), (doubled, False)])
def test_what_may_be_read_ahead(transform: Callable[[Any], Any] | None, ahead: bool) -> None:
    assert may_read_ahead(wf.DataLoader(TABLE, 4, batch_transform=transform)) is ahead


def test_a_loader_says_what_is_wrong() -> None:
    with pytest.raises(InvalidJobError, match="batch_transform must be a function of a batch; got int"):
        wf.DataLoader(TABLE, 4, batch_transform=3)  # type: ignore[arg-type]


# Behind an error in a worker torch waits for five seconds.
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_transform_that_returns_nothing(workers: int) -> None:
    with pytest.raises(InvalidJobError, match="batch_transform nothing returned None; return the batch"):
        [*wf.DataLoader(TABLE, 4, batch_transform=nothing, num_workers=workers)]  # type: ignore[arg-type]


def test_a_part_keeps_its_rows() -> None:
    source = wf.DataLoader(TABLE, 4, batch_transform=lambda batch: [torch.cat([part, part]) for part in batch])
    with pytest.raises(InvalidJobError, match="data of job 'a': batch_transform made 4 rows of 2. A job with shards= weighs"):
        [*ShardedBatches("a", source, torch.Generator(), shards=2, seed=0).epoch()]
    [first, *_] = Batches("a", source, torch.Generator()).epoch()
    assert len(first[0]) == 8


@pytest.mark.parametrize("wrong", [{"batch_sise": 4}, {"batch_size": -1}, {"shuffle": True, "sampler": range(12)}])
def test_torch_refuses_in_its_words(wrong: dict[str, Any]) -> None:
    def refusal(kind: Any) -> Any:
        with pytest.raises((TypeError, ValueError)) as caught:
            kind(TABLE, **wrong)
        return caught.type, str(caught.value)

    assert refusal(wf.DataLoader) == refusal(torch_data.DataLoader)


def test_its_own_collate_is_kept() -> None:
    def first(batch: Any) -> Any:
        return default_collate(batch)[0]

    [batch] = wf.DataLoader(TABLE, 12, collate_fn=first)
    assert batch.tolist() == list(range(12))


def test_jobs_over_such_data_are_as_alone_and_as_with_torchs_fetcher(monkeypatch: pytest.MonkeyPatch) -> None:
    data = TensorDataset(torch.randn(70, 6), torch.randint(3, (70,)))
    loaders = [
        torch_data.DataLoader(data, 16, shuffle=True),
        wf.DataLoader(ConcatDataset([Subset(data, range(30)), data]), 16, shuffle=True, batch_transform=jittered),
        wf.DataLoader(random_split(data, [50, 20], torch.Generator().manual_seed(0))[0], 10, shuffle=True, drop_last=True),
    ]

    def job(number: int) -> wf.Job:
        return wf.Job(
            f"job-{number}", lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.3), nn.Linear(8, 3)), loaders[number % 3],
            lambda parameters: torch.optim.AdamW(parameters), loss=F.cross_entropy, epochs=2, seed=number, shards=1 + number // 3,
        )  # fmt: skip

    def bits(result: wf.JobResult) -> Any:
        assert result.state_dict is not None and result.status == "completed"
        return result.losses, {name: value.tolist() for name, value in result.state_dict.items()}

    together = [bits(result) for result in wf.train([job(number) for number in range(6)], lanes=2)]
    assert together == [bits(wf.train(job(number))[0]) for number in range(6)]
    for module in (loader, rows):
        monkeypatch.setattr(module, "at_once", lambda reading: reading)
    assert together == [bits(wf.train(job(number))[0]) for number in range(6)]
