"""Several jobs read one data set: every batch once, and each job what it would read alone."""

from __future__ import annotations

import contextlib
import copy
import multiprocessing
import pickle
import random
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import optuna
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

import waterflow as wf
from waterflow.executor import cancel
from waterflow.executor.data.copies import OwnBatches, copies_of
from waterflow.executor.data.shared import Reader

ROWS, BATCH = 24, 4
BATCHES = ROWS // BATCH


class Rows(Dataset):
    """Rows with a random transform; counts how often each is made."""

    def __init__(self, broken: int | None = None, error: Callable[[], Exception] | None = None) -> None:
        self.made: Counter[int] = Counter()
        self.broken, self.error = broken, error

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.made[index] += 1
        if index == self.broken:
            raise self.error() if self.error else OSError("the disk is gone")
        return torch.full((4,), float(index)) / ROWS + torch.rand(4), torch.rand(2)


class Stream(IterableDataset):
    """A source with numbers of its own making."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (torch.rand(2) for _ in range(ROWS))


def loader(rows: Dataset | None = None, **settings: Any) -> DataLoader:
    return DataLoader(rows or Rows(), batch_size=BATCH, **{"shuffle": True, **settings})


def job(name: str, data: Any, **settings: Any) -> wf.Job:
    given = {"epochs": 3, "seed": 1, "loss": F.mse_loss, "model": lambda: nn.Linear(4, 2)}
    given |= {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1)}
    if "step" in settings:
        del given["loss"]
    return wf.Job(name=name, data=data, **{**given, **settings})


def losses(jobs: list[wf.Job], **settings: Any) -> list[tuple[float, ...]]:
    return [result.losses for result in wf.train(jobs, **settings)]


def plain(batch: Any) -> Any:
    return batch.tolist() if isinstance(batch, torch.Tensor) else [plain(entry) for entry in batch]


def read(reader: Reader, pause: Any = None) -> list[Any]:
    """All that a reader gets, epoch by epoch."""
    epochs = []
    try:
        for _ in range(reader.epochs):
            epochs.append([])
            for batch in reader.epoch():
                epochs[-1].append(plain(batch))
                if pause is not None:
                    pause()
    finally:
        reader.close()
    return epochs


def in_threads(*works: Any) -> list[Any]:
    """What functions return, or raise, each called on a thread of its own; fails where one does not end."""
    found: dict[int, Any] = {}

    def run(number: int, work: Any) -> None:
        try:
            found[number] = work()
        except BaseException as error:
            found[number] = error

    threads = [threading.Thread(target=run, args=each, daemon=True) for each in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert not any(thread.is_alive() for thread in threads), "a reader hangs"
    return [found[number] for number in range(len(works))]


def in_rings(data: wf.SharedData) -> list[Reader]:
    return [reader for reader in data._readers if reader.ring is not None]


# -- what jobs get


@pytest.mark.parametrize("workers", [0, 2])
def test_each_batch_is_read_once_and_each_job_ends_as_alone(workers: int) -> None:
    rows = Rows()
    alone = losses([job("alone", wf.SharedData(loader(rows, num_workers=workers)))])
    assert len(set(alone[0])) == 3 * BATCHES
    rows.made.clear()
    data = wf.SharedData(loader(rows, num_workers=workers))
    together = losses([job(f"j{i}", data) for i in range(4)], max_concurrent=4)
    assert together == alone * 4
    assert rows.made == ({} if workers else dict.fromkeys(range(ROWS), 3))  # workers count in their own processes


def test_epochs_differ_and_follow_the_seed() -> None:
    first, second = read(wf.SharedData(loader()).reader(2))
    assert first != second
    assert [first, second] == read(wf.SharedData(loader()).reader(2))
    assert [first, second] != read(wf.SharedData(loader(), seed=1).reader(2))
    stream = DataLoader(Stream(), batch_size=BATCH)
    assert read(wf.SharedData(stream).reader(2)) == read(wf.SharedData(stream).reader(2))


def test_what_jobs_draw_does_not_reach_the_data() -> None:
    data = wf.SharedData(loader())
    expected = read(data.reader(2))
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert read(data.reader(2), lambda: torch.rand(3)) == expected
    torch.set_rng_state(state)
    read(data.reader(2))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
@pytest.mark.parametrize("ahead", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_readers_of_any_speed_that_come_and_go(seed: int, ahead: int) -> None:
    chance = random.Random(seed)
    data = wf.SharedData(loader(), ahead=ahead, patience=0.03)
    expected = read(wf.SharedData(loader()).reader(4))

    def work(epochs: int, late: float, slow: float, leaves: int) -> Any:
        def run() -> Any:
            time.sleep(late)
            reader = data.reader(epochs)
            if not leaves:
                return read(reader, lambda: time.sleep(chance.random() * slow)) == expected[:epochs]
            passing = reader.epoch()
            got = [plain(next(passing)) for _ in range(leaves)]
            reader.close()
            return got == expected[0][:leaves]

        return run

    works = [
        work(chance.randint(1, 4), chance.choice([0, 0, 0.02, 0.1]), chance.choice([0, 0.002, 0.05]), leaves)
        for leaves in (0, 0, 0, 0, 3)
    ]
    assert in_threads(*works) == [True] * len(works)
    assert not in_rings(data)


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
def test_jobs_with_epochs_of_their_own_that_evaluate() -> None:
    rows = Rows()
    data = wf.SharedData(loader(rows))

    def evaluate(model: nn.Module) -> float:
        time.sleep(0.02)
        return float(model.weight.sum())

    jobs = [job(f"j{epochs}", data, epochs=epochs, evaluate=evaluate) for epochs in (1, 2, 4)]
    together = losses(jobs, max_concurrent=3)
    assert rows.made == dict.fromkeys(range(ROWS), 4)
    assert together[0] == together[2][:BATCHES] and together[1] == together[2][: 2 * BATCHES]


def test_jobs_that_begin_later_read_for_themselves() -> None:
    rows = Rows()
    data = wf.SharedData(loader(rows))
    found = losses([job(f"j{i}", data) for i in range(3)], max_concurrent=1)
    assert found[0] == found[1] == found[2]
    assert rows.made == dict.fromkeys(range(ROWS), 9)
    assert losses([job(f"j{i}", data) for i in range(3)], max_concurrent=3) == found
    assert rows.made == dict.fromkeys(range(ROWS), 12)


def test_who_was_left_behind_finds_the_others_again() -> None:
    rows = Rows()
    data = wf.SharedData(loader(rows, shuffle=False), patience=0.05)
    fast, slow = data.reader(1), data.reader(1)
    passing = slow.epoch()
    got = [plain(next(passing))]
    first = fast.epoch()
    expected = [plain(next(first)) for _ in range(4)]  # waits, and goes on without the slow one
    assert rows.made[0] == 1
    got += [plain(next(passing)) for _ in range(3)]
    assert rows.made[0] == 2
    assert slow.ring is not None and slow.ring is fast.ring  # it came to a batch that the others had kept
    for one, other in zip(passing, first):
        got.append(plain(one))
        expected.append(plain(other))
    assert got == expected and len(got) == BATCHES
    assert rows.made[ROWS - 1] == 1
    fast.close(), slow.close()


# -- the window


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
def test_nobody_is_further_in_front_than_the_window_and_no_more_is_kept() -> None:
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def batches() -> Iterator[torch.Tensor]:
        for _ in range(20):
            batch = torch.rand(3)
            alive.add(batch)
            yield batch
            del batch

    data = wf.SharedData(batches, ahead=3)
    fast, slow = data.reader(1), data.reader(1)
    went: list[Any] = []
    thread = threading.Thread(target=lambda: went.extend(iter(fast.epoch())), daemon=True)
    counts = []
    thread.start()
    for _ in slow.epoch():
        time.sleep(0.005)
        counts.append((fast.place[1] or 21) - slow.place[1])  # behind its end it is at the beginning of the next epoch
        went.clear()
        assert len(alive) <= 3 + 3
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert max(counts) == 3
    fast.close(), slow.close()
    went.clear()
    assert not in_rings(data)


@pytest.mark.slow
def test_a_job_that_waits_for_others_can_be_stopped() -> None:
    data = wf.SharedData(loader(), ahead=1)
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise wf.JobCancelled("enough")

    still, fast = data.reader(1), data.reader(1, check)
    threading.Timer(0.1, stop.set).start()
    began = time.monotonic()
    (error,) = in_threads(lambda: read(fast))
    assert isinstance(error, wf.JobCancelled) and 0.05 < time.monotonic() - began < data.patience / 2
    still.close()


@pytest.mark.slow
def test_nobody_waits_for_one_that_waits_for_memory() -> None:
    def wide() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 20_000), nn.ReLU(), nn.Linear(20_000, 2))

    data = wf.SharedData(loader())
    jobs = [job(f"j{i}", data, model=wide, optimizer=torch.optim.AdamW) for i in range(2)]
    (alone,) = wf.train(jobs[:1], memory="256MiB")
    with wf.Engine(memory=int(1.4 * alone.measured_peak), reserve=0) as engine:  # room for one
        began = time.monotonic()
        found = losses(jobs, engine=engine)
    assert found == [alone.losses] * 2
    assert time.monotonic() - began < data.patience / 2


def test_nobody_waits_for_a_job_that_has_read_all() -> None:
    data = wf.SharedData(loader(), patience=1000.0)
    short, long = data.reader(1), data.reader(2)
    once, twice = in_threads(lambda: list(short.epoch()), lambda: read(long))
    assert len(once) == BATCHES and list(map(len, twice)) == [BATCHES] * 2
    short.close()


def test_a_job_that_comes_when_its_first_batch_is_about_to_go() -> None:
    reading, go = threading.Event(), threading.Event()

    def batches() -> Iterator[torch.Tensor]:
        for number in range(4):
            if number == 1:
                reading.set()
                assert go.wait(timeout=30)
            yield torch.rand(2)

    data = wf.SharedData(batches, ahead=1, patience=1000.0)
    found: list[Any] = []
    first = threading.Thread(target=lambda: found.append(read(data.reader(1))), daemon=True)
    first.start()
    assert reading.wait(timeout=30)
    late = data.reader(1)
    go.set()
    assert late.ring is not None
    while (0, 0) in late.ring.kept:
        time.sleep(0.001)
    (got,) = in_threads(lambda: read(late))
    first.join(timeout=30)
    assert [got] == found and len(got[0]) == 4


def test_a_job_that_was_never_run_holds_nobody_up_for_ever() -> None:
    data = wf.SharedData(loader(), patience=0.1)
    ghost = data.reader(1)
    assert len(in_threads(lambda: read(data.reader(1)))[0][0]) == BATCHES
    data.patience, ghost = 1000.0, data.reader(1)
    del ghost
    assert len(in_threads(lambda: read(data.reader(1)))[0][0]) == BATCHES


# -- failures


class Awkward(Exception):
    def __init__(self, code: int, what: str) -> None:
        super().__init__(f"{what} failed with {code}")
        self.code = code


@pytest.mark.parametrize("error", [None, lambda: Awkward(7, "decoding"), lambda: FileNotFoundError(2, "no file", "a.png")])
def test_every_job_gets_what_the_data_raises(error: Callable[[], Exception] | None) -> None:
    rows = Rows(broken=9, error=error)
    data = wf.SharedData(loader(rows, shuffle=False))
    results = wf.train([job(f"j{i}", data) for i in range(3)], on_error="continue", max_concurrent=3)
    errors = [result.error for result in results]
    assert len({id(each) for each in errors}) == 3 and rows.made[9] == 3  # each reads for itself what another could not
    expected = OSError("the disk is gone") if error is None else error()
    for result in results:
        assert type(result.error) is type(expected)
        assert str(result.error) == str(expected)
        assert getattr(result.error, "code", None) == getattr(expected, "code", None)
        assert "in __getitem__" in result.traceback and "_train_epoch" in result.traceback
        assert len(result.losses) == 2


def test_an_error_that_comes_once_fails_one_job_alone() -> None:
    class Once(Rows):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            row = super().__getitem__(index)
            if index == 9 and self.made[9] == 1:
                raise OSError("the disk is gone for a moment")
            return row

    (alone,) = losses([job("alone", wf.SharedData(loader()))])
    rows = Once()
    data = wf.SharedData(loader(rows))
    results = wf.train([job(f"j{i}", data) for i in range(3)], on_error="continue", max_concurrent=3)
    assert sorted(result.status for result in results) == ["completed", "completed", "failed"]
    assert all(result.losses == alone[: len(result.losses)] for result in results)
    assert rows.made[9] == 1 + 3  # the others went on together


@pytest.mark.timeout(60)
def test_a_reader_that_could_not_read_may_try_again() -> None:
    rows = Rows(broken=2)
    with contextlib.closing(wf.SharedData(loader(rows, shuffle=False)).reader()) as reader:
        for _ in range(2):
            with pytest.raises(OSError, match="the disk is gone"):
                list(reader.epoch())
        rows.broken = None
        assert len(list(reader.epoch())) == BATCHES


def test_a_job_that_fails_or_stops_holds_nobody_up() -> None:
    def fails(model: nn.Module) -> float:
        raise ValueError("no")

    class Stop(wf.Callback):
        def on_epoch_end(self, of: wf.Job, epoch: int, metrics: Any) -> None:
            from waterflow.training.runner import StopJob

            if of.name == "stops":
                raise StopJob

    rows = Rows()
    data = wf.SharedData(loader(rows))
    jobs = [job("goes on", data), job("fails", data, evaluate=fails), job("stops", data)]
    results = wf.train(jobs, on_error="continue", callbacks=[Stop()], max_concurrent=3)
    assert [result.status for result in results] == ["completed", "failed", "pruned"]
    assert rows.made == dict.fromkeys(range(ROWS), 3)
    assert results[0].losses[:BATCHES] == results[1].losses == results[2].losses
    assert not in_rings(data)


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
def test_breaking_one_job_off_while_it_reads_spoils_nothing() -> None:
    expected = read(wf.SharedData(loader()).reader(1))
    broken: list[int] = []

    class Broken(Rows):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            if threading.current_thread().name == "victim" and sum(self.made.values()) > 2 * BATCH:
                broken.append(index)
                try:
                    raise wf.JobCancelled("broken off")
                except wf.JobCancelled:
                    raise RuntimeError("code of the user's that changes errors")  # noqa: B904
            return super().__getitem__(index)

    data = wf.SharedData(loader(Broken()), ahead=1)
    readers = [data.reader(1) for _ in range(3)]

    def victim() -> Any:
        threading.current_thread().name = "victim"
        return read(readers[0])

    def other(reader: Reader) -> Any:
        return lambda: read(reader, lambda: None if broken else time.sleep(0.05))

    error, *others = in_threads(victim, *map(other, readers[1:]))
    assert broken and isinstance(error, RuntimeError)
    assert others == [expected, expected]


def test_nobody_waits_for_a_reader_that_was_left_behind_in_the_data() -> None:
    hangs, go = threading.Event(), threading.Event()

    class Hangs(Rows):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            row = super().__getitem__(index)
            if index == 9 and self.made[9] == 1:
                hangs.set()
                assert go.wait(timeout=30)
            return row

    expected = read(wf.SharedData(loader(shuffle=False)).reader(1))
    data = wf.SharedData(loader(Hangs(), shuffle=False))
    hung, others = data.reader(1), [data.reader(1) for _ in range(2)]
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(read(hung)), daemon=True)
    thread.start()
    assert others[0].ring is hung.ring
    while (0, 1) not in hung.ring.kept:
        time.sleep(0.001)
    for reader in others:  # it takes no more than two before they do
        next(reader.epoch())
    assert hangs.wait(timeout=30)
    cancel.left_behind.add(thread)  # as is done with one that is not broken off
    hung.close()
    assert in_threads(*(lambda reader=reader: read(reader) for reader in others)) == [[expected[0][1:]]] * 2
    go.set()  # it comes back, and finds its place
    thread.join(timeout=30)
    assert found == [expected] and not in_rings(data)


@pytest.mark.parametrize("fails", [False, True])
def test_no_worker_process_is_left(fails: bool) -> None:
    before = {process.pid for process in multiprocessing.active_children()}
    data = wf.SharedData(loader(Rows(broken=13 if fails else None), num_workers=2, persistent_workers=True))
    results = wf.train([job(f"j{i}", data) for i in range(2)], on_error="continue")
    assert {result.status for result in results} == {"failed" if fails else "completed"}
    assert {process.pid for process in multiprocessing.active_children()} <= before


def test_the_last_to_leave_ends_the_workers_of_its_pass() -> None:
    data = wf.SharedData(loader(num_workers=1))
    one, other = data.reader(1), data.reader(1)
    next(one.epoch())
    assert one.ring is not None and one.ring is other.ring
    source = one.ring.source  # held here: nothing ends by being forgotten
    workers = list(source.gi_frame.f_locals["batches"]._reading._workers)
    one.close()
    assert all(worker.is_alive() for worker in workers)
    other.close()
    other.close()
    assert workers and not any(worker.is_alive() for worker in workers)


def test_nothing_to_read_and_what_cannot_be_shared() -> None:
    results = wf.train([job(f"j{i}", wf.SharedData([])) for i in range(2)], on_error="continue")
    assert all("shared data is empty: there is nothing to train on" in str(result.error) for result in results)

    class Once:
        passes = iter([[torch.ones(1)]])

        def __iter__(self) -> Iterator[torch.Tensor]:
            return iter(next(self.passes, []))

    with pytest.raises(wf.InvalidJobError, match="shared data gave no batch in epoch 2: it can be read only once"):
        read(wf.SharedData(Once()).reader(2))
    with pytest.raises(wf.InvalidJobError, match="shared data made a Rows, which cannot be iterated"):
        read(wf.SharedData(lambda: Rows()).reader(1))
    with pytest.raises(wf.InvalidJobError, match="list_iterator gives each batch only once. Pass a list, a DataLoader"):
        wf.SharedData(iter([torch.ones(1)]))
    with pytest.raises(wf.InvalidJobError, match=r"or a function that makes an iterable; got SharedData"):
        wf.SharedData(wf.SharedData([torch.ones(1)]))
    for settings, message in (
        ({"seed": 0.5}, "seed of shared data must be an integer; got 0.5"),
        ({"ahead": 0}, "ahead of shared data must be a positive integer; got 0"),
        ({"patience": 0}, "patience of shared data must be a positive number of seconds; got 0"),
    ):
        with pytest.raises(wf.InvalidJobError, match=message):
            wf.SharedData([torch.ones(1)], **settings)


# -- functions, copies, length


def test_functions_that_make_loaders_are_called_once_and_those_of_iterators_for_each_epoch() -> None:
    calls: list[int] = []

    def make() -> DataLoader:
        calls.append(1)
        torch.rand(5)
        return loader()

    data = wf.SharedData(make)
    assert read(data.reader(2)) == read(wf.SharedData(loader()).reader(2)) == read(data.reader(2))
    assert len(calls) == 1

    def fresh() -> Iterator[torch.Tensor]:
        calls.append(1)
        return iter([torch.rand(2), torch.rand(2)])

    data = wf.SharedData(fresh)
    first, second = data.reader(2), data.reader(2)
    assert in_threads(lambda: read(first), lambda: read(second)) == [read(wf.SharedData(fresh).reader(2))] * 2
    assert len(calls) == 1 + 2 + 2


def test_copies_have_readers_of_their_own() -> None:
    data = wf.SharedData([torch.ones(2), torch.zeros(2)], seed=3, ahead=4, patience=5.0)
    waiting = data.reader(1)
    for other in (copy.copy(data), copy.deepcopy(data), pickle.loads(pickle.dumps(data))):
        assert (other.seed, other.ahead, other.patience) == (3, 4, 5.0)
        assert in_threads(lambda other=other: read(other.reader(1))) == [[[[1.0, 1.0], [0.0, 0.0]]]]
    waiting.close()


def test_length() -> None:
    assert len(wf.SharedData(loader())) == len(wf.SharedData(lambda: loader())) == BATCHES
    with pytest.raises(TypeError):
        len(wf.SharedData(lambda: iter([torch.ones(1)])))


@pytest.mark.timeout(60)
def test_a_function_that_makes_a_model_may_ask_for_the_length() -> None:
    data = wf.SharedData(loader())
    with torch.random.fork_rng():
        made = [wf.Job(name=str(n), model=lambda: nn.Linear(len(data), 1), data=data, optimizer=torch.optim.SGD,
                       step=lambda model, batch: model.weight.sum()) for n in range(3)]  # fmt: skip
        assert [result.status for result in wf.train(made, memory="1GiB")] == ["completed"] * 3


# -- steps that change their batch


def changes(model: nn.Module, batch: Any) -> torch.Tensor:
    batch[0].mul_(0.5)
    return F.mse_loss(model(batch[0]), batch[1])


def changes_a_view(model: nn.Module, batch: Any) -> torch.Tensor:
    batch[0][:, 1:].t().add_(1.0)
    return F.mse_loss(model(batch[0]), batch[1])


def changes_eagerly(model: nn.Module, batch: Any) -> torch.Tensor:
    batch[0].mul_(0.5)
    if float(batch[0].sum()) < -1e9:
        batch[0].zero_()
    return F.mse_loss(model(batch[0]), batch[1])


def in_model(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(F.relu(batch[0] - 0.5, inplace=True)), batch[1].clamp_(max=0.5))


@pytest.mark.parametrize("step", [changes, changes_a_view, changes_eagerly, in_model])
def test_a_step_that_changes_its_batch_changes_no_other_jobs(step: Any) -> None:
    batches = [(torch.rand(BATCH, 4), torch.rand(BATCH, 2)) for _ in range(4)]
    before = copy.deepcopy(batches)
    fine = losses([job("fine", copy.deepcopy(batches))])[0]
    first = losses([job("alone", copy.deepcopy(batches), step=step, epochs=1)])[0]
    data = wf.SharedData(batches)
    jobs = [job("a", data, step=step), job("b", data), job("c", data, step=step), job("d", data)]
    a, b, c, d = losses(jobs, max_concurrent=4)
    assert plain(batches) == plain(before)
    assert b == d == fine
    assert a == c and a[:4] == first and a[4:8] != first
    assert (wf.train([job("x", data, step=step)])[0].opaque_reason is not None) == (step is changes_eagerly)


def only_reads(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def takes_out(model: nn.Module, batch: Any) -> torch.Tensor:
    scale = batch[2].pop() if batch[2] else 1.0
    return F.mse_loss(model(batch[0]), scale * batch[1])


def eagerly(batches: list[Any], step: Any, epochs: int) -> tuple[float, ...]:
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    found = []
    for batch in batches * epochs:
        loss = step(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return tuple(found)


@pytest.mark.parametrize("step", [changes, changes_a_view, changes_eagerly, in_model, takes_out])
def test_jobs_that_share_a_list_and_change_its_batches_end_as_alone(step: Any) -> None:
    """Also where batches lie on one another's memory, and where one comes twice: a job finds there what it wrote."""
    rows = torch.rand(4 * BATCH, 4)
    batches = [(rows[i * BATCH // 2 :][:BATCH], torch.rand(BATCH, 2), [0.5, 0.9]) for i in range(4)]
    batches.append(batches[1])
    before = copy.deepcopy(batches)
    fine = losses([job("fine", copy.deepcopy(batches), step=only_reads, epochs=2)])[0]
    alone = losses([job("alone", copy.deepcopy(batches), step=step, epochs=2)])[0]
    expected = eagerly(copy.deepcopy(batches), step, 2)
    jobs = [job(name, batches, step=step, epochs=2) for name in "abc"] + [job("d", batches, step=only_reads, epochs=2)]
    a, b, c, d = losses(jobs, max_concurrent=4)
    assert str(batches) == str(before) and a == b == c == alone and d == fine
    if step is not changes_eagerly:  # which sees the first batch apart from the others' memory
        assert alone == expected


@pytest.mark.parametrize("at", range(0, 8, 3))
def test_a_step_that_falls_back_finds_the_batches_that_it_wrote(at: int) -> None:
    batches = [(torch.rand(BATCH, 4), torch.rand(BATCH, 2)) for _ in range(4)]
    before = copy.deepcopy(batches)
    expected = eagerly(copy.deepcopy(batches), changes, 2)
    torch.manual_seed(1)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = wf.Step(model, step=changes, optimizer=optimizer)
    step.own_batches = OwnBatches(kept=True)
    found = []
    for number, batch in enumerate(batches * 2):
        if number == at:
            optimizer.register_step_post_hook(lambda *_: None)
        found.append(step(batch).item())
    assert tuple(found) == expected and step.opaque_reason is not None and str(batches) == str(before)


def test_a_step_that_only_reads_its_batch_is_given_no_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("of", "run"):
        monkeypatch.setattr(OwnBatches, name, lambda *_: pytest.fail("a copy was made"))
    losses([job("a", wf.SharedData(loader())), job("b", [(torch.rand(BATCH, 4), torch.rand(BATCH, 2))] * 2)])


def test_copies_lie_to_one_another_as_what_they_are_copies_of() -> None:
    base = torch.arange(40.0)
    far = torch.arange(100_000)
    given = [
        base[3:13].view(2, 5), base[5:9], base[20:].view(4, 5).t(), torch.ones(1).expand(6), torch.empty(0, 3),
        far[10:20], far[-20:-10], base[8:16].view(torch.int64), torch.eye(3).to_sparse(),
    ]  # fmt: skip
    made = copies_of(given)
    for old, new in zip(given, made):
        assert torch.equal(old.to_dense(), new.to_dense()) and old.dtype == new.dtype
        if not old.is_sparse:
            assert old.stride() == new.stride() and (not old.numel() or old.data_ptr() != new.data_ptr())
    assert made[5].untyped_storage().nbytes() < 200
    made[0][0, 2] = -1.0
    assert made[1][0] == -1.0 and base.min() == 0.0 and made[2].min() == 20.0


# -- elsewhere


@pytest.mark.slow
@pytest.mark.parametrize("deterministic", [False, True])
def test_trials_of_a_study(deterministic: bool) -> None:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rows = Rows()

    def values(data: Any) -> list[float]:
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=1), pruner=optuna.pruners.NopPruner())
        wf.optimize(
            study, lambda trial: job(f"t{trial.number}", data, seed=trial.number), n_trials=6, max_concurrent=3,
            deterministic=deterministic,
        )  # fmt: skip
        return [trial.value for trial in study.trials]

    data = wf.SharedData(loader(rows))
    began = time.monotonic()
    together = values(data)
    assert time.monotonic() - began < data.patience
    alone = [wf.train([job("alone", wf.SharedData(loader()), seed=seed)])[0].value for seed in range(6)]
    assert together == alone


def test_plans_read_one_batch_and_hold_nobody_up() -> None:
    data = wf.SharedData(loader())
    assert wf.max_batch_size(job("j", data), memory="1GiB").size > 0
    assert not in_rings(data)
    assert len(losses([job("j", data)])[0]) == 3 * BATCHES
