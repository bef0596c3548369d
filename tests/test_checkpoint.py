"""A job that was copied, written, suspended or moved ends with the bits of the one that nobody touched."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import waterflow as wf
from tests.support import Net, images, same_bits
from waterflow.executor.engine import Engine
from waterflow.runner import JobRunner

Make = Callable[[], wf.Job]


class Noisy(Dataset):
    """Draws from torch's default generator for each entry."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(6, generator=generator) + 0.1 * torch.randn(6), index % 4


class Stateful:
    """Knows its place, as torchdata's loaders do."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.at = self.passes = 0
        self.read = 0  # in this process

    def __iter__(self) -> Iterator[Any]:
        if self.at >= len(self.batches):
            self.at = 0
        while self.at < len(self.batches):
            self.at += 1
            self.read += 1
            x, y = self.batches[self.at - 1]
            yield x + 0.1 * torch.randn(x.shape), y

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Extra(nn.Module):
    """Keeps a number beside its tensors, and a buffer that is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.told = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.net(x) * (1 + 0.01 * self.seen)

    def get_extra_state(self) -> Any:
        return {"told": self.told}

    def set_extra_state(self, state: Any) -> None:
        self.told = state["told"]


def accuracy(model: nn.Module) -> dict[str, float]:
    x = torch.linspace(-1, 1, 24).reshape(4, 6)
    return {"mean": float(model(x).mean()), "max": float(model(x).max())}


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def base(**changes: Any) -> Make:
    """A job of 3 epochs with 10 steps each."""

    def make() -> wf.Job:
        settings: dict[str, Any] = {
            "name": "net", "model": lambda: Net(dropout=0.3), "data": lambda: images(10), "optimizer": adamw,
            "loss": F.cross_entropy, "evaluate": accuracy, "epochs": 3, "seed": 3,
        }  # fmt: skip
        return wf.Job(**{**settings, **{k: v() if k in ("data",) else v for k, v in changes.items()}})

    return make


def item_step(model: nn.Module, batch: Any) -> torch.Tensor:
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return loss * (2.0 if loss.item() > 0.5 else 1.0)


def function_of_iterators() -> Any:
    return lambda: (((torch.randn(8, 6), torch.randint(4, (8,)))) for _ in range(10))


def drawn_loader() -> Any:
    return lambda: DataLoader(TensorDataset(torch.randn(80, 6), torch.randint(4, (80,))), batch_size=8, shuffle=True)


JOBS: dict[str, Make] = {
    "list": base(),
    "sgd": base(optimizer=lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)),
    "no_evaluate": base(evaluate=None),
    "per_epoch": base(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5)),
    "plateau": base(scheduler=lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0)),
    "per_step": base(
        scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 30), scheduler_interval="step"
    ),
    "chained": base(
        scheduler=lambda o: torch.optim.lr_scheduler.SequentialLR(
            o, [torch.optim.lr_scheduler.LinearLR(o), torch.optim.lr_scheduler.MultiStepLR(o, [6, 9])], [4]
        ),
        scheduler_interval="step",
    ),
    "accumulate": base(accumulate=3),
    "opaque": base(step=item_step, loss=None),
    "opaque_accumulate": base(step=item_step, loss=None, accumulate=4),
    "opaque_optimizer": base(optimizer=lambda p: torch.optim.RMSprop(p, lr=1e-3)),
    "loader": base(data=lambda: DataLoader(Noisy(), batch_size=4, shuffle=True)),
    "drawn_loader": base(data=drawn_loader),
    "iterators": base(data=function_of_iterators),
    "stateful": base(data=lambda: Stateful(images(10))),
    "shared": base(data=lambda: wf.SharedData(DataLoader(Noisy(), batch_size=4, shuffle=True), seed=5)),
    "extra": base(model=Extra),
    "recompute": base(recompute="auto"),
    "held_loss": base(loss=nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 1.0]))),
    "autocast": base(autocast=torch.bfloat16, clip_grad_norm=1.0),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(memory="1GiB", lanes=2) as made:
        yield made


def assert_equal(one: JobRunner, other: JobRunner, results: tuple[wf.JobResult, wf.JobResult]) -> None:
    mine, theirs = results
    assert mine.status == theirs.status == "completed", (mine.error, theirs.error)
    assert mine.losses == theirs.losses
    assert mine.metrics == theirs.metrics
    assert one.step is not None and other.step is not None
    left, right = one.step, other.step
    for name, tensor in left.model.state_dict().items():
        if isinstance(tensor, torch.Tensor):
            assert same_bits(tensor, right.model.state_dict()[name]), name
    for (name, tensor), (_, buffer) in zip(left.model.named_buffers(), right.model.named_buffers(), strict=True):
        assert same_bits(tensor, buffer), name
    mine_state, their_state = left.optimizer.state_dict(), right.optimizer.state_dict()
    assert mine_state["param_groups"] == their_state["param_groups"]
    assert mine_state["state"].keys() == their_state["state"].keys()
    for number, entries in mine_state["state"].items():
        for key, value in entries.items():
            other_value = their_state["state"][number][key]
            same = same_bits(value, other_value) if isinstance(value, torch.Tensor) else value == other_value
            assert same, (number, key)


def ask_at(runner: JobRunner, at: int, what: Callable[[], Any]) -> tuple[list[Any], Callable[[], None]]:
    """Ask before step ``at`` (counted over all epochs): exactly there, whatever the speed of threads."""
    boundary, answers = runner._boundary, []
    looks = itertools.count(1)
    kind = type(boundary)
    thread: list[threading.Thread] = []

    class Counting(kind):  # type: ignore[misc, valid-type]
        @property
        def wished(self) -> bool:
            # One look a step and one at the end of each epoch, of 10 steps each here.
            if not thread and next(looks) - 1 == at + at // 10:
                thread.append(threading.Thread(target=lambda: answers.append(_outcome(what))))
                thread[0].start()
                while not self._wishes:
                    time.sleep(0.001)
            return bool(self._wishes)

    boundary.__class__ = Counting

    def join() -> None:
        assert thread, "the job did not come that far"
        thread[0].join(timeout=30)
        assert not thread[0].is_alive()

    return answers, join


def _outcome(what: Callable[[], Any]) -> Any:
    try:
        return what()
    except Exception as error:
        return error


def snapshot_at(make: Make, at: int, engine: Engine | None) -> tuple[Any, JobRunner, wf.JobResult]:
    runner = JobRunner(make(), engine)
    answers, join = ask_at(runner, at, lambda: runner.snapshot(timeout=30))
    result = runner.run()
    join()
    return answers[0], runner, result


@pytest.mark.parametrize("at", [0, 7, 10, 20, 24])
@pytest.mark.parametrize("name", JOBS)
def test_goes_on_from_a_file(name: str, at: int, engine: Engine, tmp_path: Path) -> None:
    make = JOBS[name]
    undisturbed = JobRunner(make(), engine)
    expected = undisturbed.run()
    checkpoint, disturbed, result = snapshot_at(make, at, engine)
    assert isinstance(checkpoint, wf.Checkpoint), checkpoint
    assert (checkpoint.job, checkpoint.steps) == ("net", at)
    assert_equal(disturbed, undisturbed, (result, expected))  # it was only looked at
    checkpoint.save(tmp_path / "net.state")
    again = JobRunner(make(), engine, resume=wf.Checkpoint.load(tmp_path / "net.state"))
    assert_equal(again, undisturbed, (again.run(), expected))


@pytest.mark.parametrize("at", [0, 13])
@pytest.mark.parametrize("name", JOBS)
def test_suspended_and_resumed(name: str, at: int, engine: Engine) -> None:
    make = JOBS[name]
    undisturbed = JobRunner(make(), engine)
    expected = undisturbed.run()
    runner = JobRunner(make(), engine)
    claimed = engine.claimed()

    def pause() -> wf.Checkpoint:
        held = runner.suspend(timeout=30)
        assert runner.suspended and engine.claimed() == claimed
        assert all(p.numel() == 0 for p in runner.step.model.parameters())
        runner.resume()
        return held

    answers, join = ask_at(runner, at, pause)
    result = runner.run()
    join()
    assert isinstance(answers[0], wf.Checkpoint), answers
    assert_equal(runner, undisturbed, (result, expected))
