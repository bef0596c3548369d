"""When a batch is read: ahead of steps only where it cannot depend on them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW
from torch.utils.data import ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, Subset, TensorDataset

import waterflow as wf
from tests.support import images
from waterflow.executor.data.loader import may_read_ahead
from waterflow.training import step_queue

ROWS = TensorDataset(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)), torch.arange(64) % 4)
BATCHES = images(40, size=64, shape=(64,))
Made = dict[str, nn.Module]


def perceptron(made: Made) -> nn.Module:
    torch.manual_seed(1)
    made["model"] = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4))
    return made["model"]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return AdamW(parameters, lr=1e-2, fused=True)


def eager_losses(data: Callable[[Made], Any]) -> list[float]:
    made: Made = {}
    model = perceptron(made)
    optimizer, losses = adamw(model.parameters()), []
    for x, y in data(made):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def job_of(name: str, data: Callable[[Made], Any], **settings: Any) -> wf.Job:
    made: Made = {}
    settings = {"loss": F.cross_entropy, "seed": 0, **settings}
    return wf.Job(name, model=lambda: perceptron(made), data=lambda: data(made), optimizer=adamw, **settings)


class Refilled:
    """Every batch lies in the memory of the one before."""

    def __init__(self, made: Made) -> None:
        self.x, self.y = torch.empty(64, 64), torch.empty(64, dtype=torch.long)

    def __iter__(self) -> Iterator[Any]:
        for x, y in BATCHES:
            self.x.copy_(x)
            self.y.copy_(y)
            yield self.x, self.y


class Mining:
    """Each batch is of the rows that the model does worst."""

    def __init__(self, made: Made) -> None:
        self.made = made

    def __iter__(self) -> Iterator[Any]:
        for x, y in BATCHES:
            with torch.no_grad():
                worst = F.cross_entropy(self.made["model"](x), y, reduction="none").topk(32)[1]
            yield x[worst], y[worst]


class Clipping(Mining):
    """Weights are clipped between two batches."""

    def __iter__(self) -> Iterator[Any]:
        for batch in BATCHES:
            with torch.no_grad():
                for parameter in self.made["model"].parameters():
                    parameter.clamp_(-0.05, 0.05)
            yield batch


class HardestFirst(Sampler[int]):
    """Looks at the model for each index."""

    def __init__(self, made: Made) -> None:
        self.made = made

    def __len__(self) -> int:
        return 256

    def __iter__(self) -> Iterator[int]:
        for _ in range(256):
            yield int(next(self.made["model"].parameters()).detach().abs().sum() * 1000) % 64


def sampled(made: Made) -> DataLoader[Any]:
    return DataLoader(ROWS, batch_size=8, sampler=HardestFirst(made))


KINDS = {"refilled": Refilled, "mining": Mining, "clipping": Clipping, "sampled": sampled}


@pytest.mark.parametrize("opaque", [False, True], ids=["captured", "opaque"])
@pytest.mark.parametrize("kind", KINDS)
def test_data_that_depends_on_the_step_before(kind: str, opaque: bool) -> None:
    """Beside another job, and as often as it takes for steps to be queued."""

    def read(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss if loss.item() < 1e9 else loss * 2

    settings: dict[str, Any] = {"loss": None, "step": read} if opaque else {}
    jobs = [job_of(f"{kind}-{n}", KINDS[kind], **settings) for n in range(2)]
    expected = eager_losses(KINDS[kind])
    for result in wf.train(jobs, memory="1GiB", lanes=2):
        assert (result.opaque_reason is not None) == opaque
        assert list(result.losses) == expected


class Counting(wf.Callback):
    """Data that counts the batches that it gave, and the steps at each reading whose results were not taken."""

    def __init__(self) -> None:
        self.read, self.under_way = 0, list[int]()

    def on_job_start(self, job: wf.Job, runner: Any) -> None:
        self.runner = runner

    def __iter__(self) -> Iterator[Any]:
        for batch in images(30):
            self.read += 1
            self.under_way.append(self.runner.begun - self.runner.steps)
            yield batch


@pytest.mark.parametrize("ahead", [None, False, True])
def test_a_job_can_say_that_its_data_may_be_read_ahead(ahead: bool | None) -> None:
    data = Counting()
    settings: dict[str, Any] = {"optimizer": adamw, "loss": F.cross_entropy, "seed": 0, "read_ahead": ahead}
    wf.train(wf.Job("one", model=lambda: nn.Linear(6, 4), data=data, **settings), memory="1GiB", callbacks=[data])
    assert (max(data.under_way) > 0) is (ahead is True)


@pytest.mark.parametrize("ahead", [None, True])
def test_nothing_is_read_beside_an_eager_step(ahead: bool | None) -> None:
    """It runs on the job's own thread, which reads the data."""
    data, read = Counting(), []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        read.append(data.read)
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return loss * (1 if loss.item() < 1e9 else 2)

    job = wf.Job("one", model=lambda: nn.Linear(6, 4), data=data, step=step, optimizer=adamw, seed=0, read_ahead=ahead)
    wf.train(job, memory="1GiB", callbacks=[data])
    assert read[-30:] == [*range(1, 31)]


def test_read_ahead_is_checked() -> None:
    job = wf.Job("one", model=lambda: nn.Linear(6, 4), data=[], optimizer=adamw, read_ahead="yes")  # type: ignore[arg-type]
    with pytest.raises(wf.InvalidJobError, match="read_ahead must be True, False or None; got 'yes'"):
        job.check()


class Own(Dataset[Any]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return ROWS[index]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        yield from ROWS


class OwnLoader(DataLoader[Any]):
    pass


def collate(rows: Any) -> Any:
    return torch.utils.data.default_collate(rows)


@pytest.mark.parametrize(
    ("make", "may"),
    [
        (lambda: images(2), True),
        (lambda: tuple(images(2)), True),
        (lambda: torch.randn(4, 3), True),
        (lambda: DataLoader(ROWS, batch_size=8, shuffle=True), True),
        (lambda: DataLoader(Subset(ConcatDataset([ROWS, ROWS]), range(9)), batch_size=8), True),
        (lambda: DataLoader(list(ROWS), batch_size=8), True),
        (lambda: DataLoader(Own(), batch_size=8, num_workers=1), True),
        (lambda: DataLoader(ROWS, batch_size=None), False),
        (lambda: DataLoader(Own(), batch_size=8), False),
        (lambda: DataLoader(Subset(Own(), range(4)), batch_size=8), False),
        (lambda: DataLoader(Stream(), batch_size=8), False),
        (lambda: DataLoader(ROWS, batch_size=8, collate_fn=collate), False),
        (lambda: DataLoader(ROWS, batch_size=8, sampler=HardestFirst({})), False),
        (lambda: OwnLoader(ROWS, batch_size=8), False),
        (lambda: iter(images(2)), False),
        (lambda: Counting(), False),
    ],
)
def test_what_is_known_of_data(make: Callable[[], Any], may: bool) -> None:
    assert may_read_ahead(make()) is may


def test_shared_data_that_refills_its_memory() -> None:
    data = wf.SharedData(Refilled({}))
    jobs = [job_of(f"job-{n}", lambda made: None) for n in range(3)]
    for job in jobs:
        job.data = data
    expected = eager_losses(Refilled)
    for result in wf.train(jobs, memory="1GiB", lanes=2):
        assert list(result.losses) == expected


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
def test_who_waits_for_data_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_queue, "_told", threading.Lock())
    monkeypatch.setattr(step_queue, "TOLD_SECONDS", 0.05)
    caplog.set_level("WARNING", logger="waterflow")

    def slow(made: Made) -> Iterator[Any]:
        for batch in BATCHES[:8]:
            time.sleep(0.03)
            yield batch

    wf.train([job_of("slow", slow), job_of("other", slow)], memory="1GiB")
    (told,) = [message for message in caplog.messages if "read_ahead" in message]
    assert "between its steps" in told
    caplog.clear()
    monkeypatch.setattr(step_queue, "_told", threading.Lock())
    wf.train([job_of("slow", slow, read_ahead=True)], memory="1GiB")
    assert not [message for message in caplog.messages if "read_ahead" in message]


class Hanging:
    """Waits in the middle of a pass until it is let go."""

    def __init__(self) -> None:
        self.hangs, self.go = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(images(6)):
            if number == 3:
                self.hangs.set()
                assert self.go.wait(60)
            yield batch


def test_a_loader_that_hangs_holds_nobody_up() -> None:
    """Others read, draw from generators or without one, build models and evaluate meanwhile."""
    hanging = Hanging()
    done = threading.Semaphore(0)

    def model() -> nn.Module:
        assert hanging.hangs.wait(60)
        return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4))

    def noisy() -> Iterator[Any]:
        for x, y in images(6):
            yield x + torch.randn(x.shape), y

    settings: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": adamw, "epochs": 2}
    # Its model is there already: functions that make models are called one at a time, and the others' wait for its data.
    jobs = [wf.Job("hangs", model=nn.Linear(6, 4), data=hanging, seed=0, **{**settings, "epochs": 1})]
    jobs += [wf.Job(f"goes-{n}", model=model, data=noisy, seed=n, **settings) for n in range(3)]

    def ended(result: wf.JobResult) -> None:
        done.release()
        if result.name.startswith("goes") and sum(r.startswith("goes") for r in names) == 2:
            hanging.go.set()
        names.append(result.name)

    names: list[str] = []
    results = wf.train(jobs, memory="1GiB", lanes=2, max_concurrent=4, callbacks=[ended])
    assert names[-1] == "hangs" and [r.status for r in results] == ["completed"] * 4
    logging.getLogger("waterflow").debug("ended in the order %s", names)


class Lumpy(Dataset[Any]):
    """One file, and one place in it: two readers at the same time would spoil each other's rows."""

    def __init__(self) -> None:
        self.at = 0

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Any:
        self.at = index
        time.sleep(0.0005)
        return torch.full((6,), float(self.at)), torch.tensor(self.at % 4)


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
def test_a_data_set_that_jobs_share_is_read_by_one_at_a_time() -> None:
    loader = DataLoader(Lumpy(), batch_size=4, shuffle=True)
    make = partial(wf.Job, model=lambda: nn.Linear(6, 4), loss=F.cross_entropy, optimizer=adamw, data=loader, epochs=3)
    alone = [wf.train([make(name="alone", seed=seed)], memory="1GiB")[0].losses for seed in range(3)]
    together = wf.train([make(name=f"{seed}", seed=seed) for seed in range(3)], memory="1GiB", lanes=2, max_concurrent=3)
    assert [result.losses for result in together] == alone
