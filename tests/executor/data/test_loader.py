"""Batches come in the job's own order, whoever else reads the same data."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from waterflow.errors import InvalidJobError
from waterflow.executor.data.loader import Batches

ROWS = 12
ROW = TensorDataset(torch.arange(float(ROWS)))


class Noisy(Dataset):
    """Rows with a random transform, drawn from the default generator."""

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> torch.Tensor:
        return index + torch.rand(())


class Stream(IterableDataset):
    """An endless source cut short, with numbers of its own making."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.rand(2) for _ in range(ROWS))


def numbers(seed: int = 3) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else [plain(entry) for entry in batch]


def epochs(data: Any, seed: int = 3, count: int = 3) -> list[Any]:
    batches = Batches("job", data, numbers(seed))
    try:
        return [[plain(batch) for batch in batches.epoch()] for _ in range(count)]
    finally:
        batches.close()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_seeded_job_shuffles_as_a_loader_with_a_seeded_generator(workers: int) -> None:
    seeded = DataLoader(ROW, batch_size=4, shuffle=True, generator=numbers())
    expected = [[plain(batch) for batch in seeded] for _ in range(3)]
    assert epochs(DataLoader(ROW, batch_size=4, shuffle=True, num_workers=workers)) == expected
    assert expected[0] != expected[1] != expected[2]


SAMPLERS = {
    "random": lambda own: {"batch_size": 5, "sampler": RandomSampler(ROW, generator=own)},
    "with replacement": lambda own: {"batch_size": 5, "sampler": RandomSampler(ROW, True, 20, generator=own)},
    "subset": lambda own: {"batch_size": 5, "sampler": SubsetRandomSampler(range(0, ROWS, 2), generator=own)},
    "weighted": lambda own: {"batch_size": 5, "sampler": WeightedRandomSampler([1.0] * ROWS, 9, generator=own)},
    "batches": lambda own: {"batch_sampler": BatchSampler(RandomSampler(ROW, generator=own), 5, False)},
    "shuffle": lambda own: {"batch_size": 5, "shuffle": True, "generator": own},
}


@pytest.mark.parametrize("own", [False, True], ids=["shared numbers", "numbers of its own"])
@pytest.mark.parametrize("kind", SAMPLERS)
def test_jobs_that_share_a_loader_read_it_as_if_alone(kind: str, own: bool) -> None:
    loader = DataLoader(Noisy(), **SAMPLERS[kind](numbers(9) if own else None))
    before = torch.get_rng_state()
    alone = [epochs(loader, seed) for seed in range(3)]
    assert alone[0] != alone[1]
    jobs = [Batches("job", loader, numbers(seed)) for seed in range(3)]
    together: list[Any] = [[] for _ in jobs]
    for _ in range(3):
        for passes in together:
            passes.append([])
        for turn in itertools.zip_longest(*(job.epoch() for job in jobs)):
            for passes, batch in zip(together, turn):
                if batch is not None:
                    passes[-1].append(plain(batch))
    assert together == alone
    assert torch.equal(torch.get_rng_state(), before)


def test_the_given_loader_stays_as_it_was() -> None:
    loader = DataLoader(ROW, batch_size=4, shuffle=True, generator=numbers(9))
    inside = loader.generator, loader.sampler, loader.batch_sampler, loader.sampler.generator
    state = loader.generator.get_state()
    epochs(loader)
    assert (loader.generator, loader.sampler, loader.batch_sampler, loader.sampler.generator) == inside
    assert torch.equal(loader.generator.get_state(), state)


def test_shuffling_does_not_depend_on_what_transforms_draw() -> None:
    order = epochs(DataLoader(ROW, batch_size=4, shuffle=True))
    noisy = epochs(DataLoader(Noisy(), batch_size=4, shuffle=True))
    assert [[[int(x) for x in batch] for batch in epoch] for epoch in noisy] == [
        [[int(x) for x in batch[0]] for batch in epoch] for epoch in order
    ]


@pytest.mark.needs_time("a loader starts worker processes")
@pytest.mark.parametrize("workers", [0, 2])
def test_transforms_and_streams_repeat(workers: int) -> None:
    for loader in (
        DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=workers),
        DataLoader(Stream(), batch_size=4, num_workers=workers),
    ):
        once = epochs(loader, count=2)
        torch.rand(7)
        assert epochs(loader, count=2) == once
        assert epochs(loader, seed=4, count=2) != once
        assert once[0] != once[1]


def test_threads_that_draw_at_the_same_time() -> None:
    loader = DataLoader(Noisy(), batch_size=3, shuffle=True)
    alone = [epochs(loader, seed) for seed in range(4)]
    together: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda seed: together.update({seed: epochs(loader, seed)}), args=(seed,)) for seed in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert [together[seed] for seed in range(4)] == alone


def test_functions_and_other_iterables() -> None:
    def fresh() -> Iterator[torch.Tensor]:
        return iter([torch.rand(2), torch.rand(2)])

    assert epochs(fresh, count=1) == epochs(fresh, count=1) == [[plain(torch.rand(2, generator=g)) for _ in "ab"]
                                                               for g in [numbers()]]  # fmt: skip
    assert [len(epoch) for epoch in epochs(fresh)] == [2, 2, 2]
    assert epochs(fresh)[0] != epochs(fresh)[1]
    rows = [torch.ones(2), torch.zeros(3)]
    assert epochs(rows, count=2) == [[[1.0, 1.0], [0.0, 0.0, 0.0]]] * 2
    assert epochs(lambda: DataLoader(ROW, batch_size=4, shuffle=True)) == epochs(DataLoader(ROW, batch_size=4, shuffle=True))
    assert len(Batches("job", rows, numbers())) == 2
    with pytest.raises(TypeError):
        len(Batches("job", fresh, numbers()))


def test_nothing_to_read() -> None:
    with pytest.raises(InvalidJobError, match="data of job 'job' is empty"):
        epochs([])
    with pytest.raises(InvalidJobError, match=r"no batch in epoch 2: it can be read only once\..*function that makes"):
        epochs(iter([torch.ones(1)]), count=2)
    with pytest.raises(InvalidJobError, match="made a TensorDataset, which cannot be iterated; make a list"):
        epochs(lambda: ROW)


def test_what_the_data_raises_comes_through_and_frees_the_numbers() -> None:
    def broken() -> Iterator[torch.Tensor]:
        yield torch.ones(1)
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        epochs(broken)
    assert len(epochs(DataLoader(Noisy(), batch_size=4), count=1)) == 1


@pytest.mark.parametrize("persistent", [False, True])
def test_close_ends_worker_processes_in_mid_pass(persistent: bool) -> None:
    loader = DataLoader(ROW, batch_size=2, num_workers=1, persistent_workers=persistent)
    batches = Batches("job", loader, numbers())
    passing = batches.epoch()
    next(passing)
    workers = list(batches._reading._workers)
    assert all(worker.is_alive() for worker in workers)
    batches.close()
    assert not any(worker.is_alive() for worker in workers)
    batches.close()
