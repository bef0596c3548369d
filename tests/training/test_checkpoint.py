"""A job that was copied, written, suspended or moved ends with the bits of the one that nobody touched."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

import waterflow as wf
from tests.support import Net, images, same_bits
from waterflow.executor.engine import Engine
from waterflow.executor.virtual_clock import VirtualClock
from waterflow.training.checkpoint import write
from waterflow.training.runner import JobRunner
from waterflow.training.safepoint import State

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


def deep() -> nn.Module:
    """Its gradients are larger than its activations."""
    return nn.Sequential(nn.Linear(6, 128), *[nn.Linear(128, 128) for _ in range(5)], nn.Linear(128, 4))


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
    "early": base(model=lambda: deep()),
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


@pytest.fixture(autouse=True)
def each_step_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waterflow.training.runner.MOST_RUN", 1)


def ask_at(runner: JobRunner, at: int, what: Callable[[], Any]) -> tuple[list[Any], Callable[[], None]]:
    """Ask before step ``at`` (counted over all epochs): exactly there, whatever the speed of threads."""
    safepoint, answers = runner._safepoint, []
    looks = itertools.count(1)
    kind = type(safepoint)
    thread: list[threading.Thread] = []

    class Counting(kind):  # type: ignore[misc, valid-type]
        @property
        def state(self) -> State:
            # One look a step and one at the end of each epoch, of 10 steps each here.
            if not thread and next(looks) - 1 == at + at // 10:
                thread.append(threading.Thread(target=lambda: answers.append(_outcome(what))))
                thread[0].start()
                while not self._requests:
                    time.sleep(0.001)
            return super().state

    safepoint.__class__ = Counting

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


@pytest.mark.parametrize("at", [0, 7, 10, 24])
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
    claimed = engine.reservations.claimed()

    def pause() -> wf.Checkpoint:
        held = runner.suspend(timeout=30)
        assert runner.suspended and engine.reservations.claimed() == claimed
        assert all(p.numel() == 0 for p in runner.step.model.parameters())
        runner.resume()
        return held

    answers, join = ask_at(runner, at, pause)
    result = runner.run()
    join()
    assert isinstance(answers[0], wf.Checkpoint), answers
    assert_equal(runner, undisturbed, (result, expected))


# -- other ways to stand still


def test_the_engine_runs_behind(tmp_path: Path) -> None:
    make = JOBS["loader"]
    with Engine(memory="1GiB", lanes=2, asynchronous=7) as engine:
        undisturbed = JobRunner(make(), engine)
        expected = undisturbed.run()
        checkpoint, _, _ = snapshot_at(make, 16, engine)
        again = JobRunner(make(), engine, resume=checkpoint)
        assert_equal(again, undisturbed, (again.run(), expected))
        engine.native.check()


def test_parameters_that_change_early(engine: Engine) -> None:
    """What the job called "early" stands for."""
    model = deep()
    step = wf.Step(model, loss=F.cross_entropy, optimizer=adamw(model.parameters()), engine=engine)
    step(images(1)[0])
    assert all(variant.captured.capture.early_updates for variant in step._bound_steps._bound_steps.values())
    step.close()


def test_a_checkpoint_can_be_gone_on_from_twice(engine: Engine) -> None:
    make = JOBS["accumulate"]
    checkpoint, undisturbed, expected = snapshot_at(make, 7, engine)
    for _ in range(2):  # the first one changes nothing of it
        again = JobRunner(make(), engine, resume=checkpoint)
        assert_equal(again, undisturbed, (again.run(), expected))


def test_a_suspended_checkpoint_goes_on_elsewhere(engine: Engine) -> None:
    make = JOBS["drawn_loader"]
    undisturbed = JobRunner(make(), engine)
    expected = undisturbed.run()
    runner = JobRunner(make(), engine)

    def move() -> wf.JobResult:
        checkpoint = runner.suspend(timeout=30)
        assert runner.snapshot(timeout=30) is checkpoint  # nothing has changed since
        other = JobRunner(make(), engine, resume=checkpoint)
        result = other.run()
        assert_equal(other, undisturbed, (result, expected))
        runner.stop("moved")
        return result

    answers, join = ask_at(runner, 17, move)
    result = runner.run()
    join()
    assert isinstance(answers[0], wf.JobResult), answers
    assert (result.status, result.steps) == ("cancelled", 17)
    # What it had trained is back in its model.
    assert result.state_dict is not None and result.state_dict["first.weight"].shape == (16, 6)


def test_memory_is_given_back_while_a_job_is_suspended() -> None:
    def make(name: str) -> wf.Job:
        model = lambda: nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 4))  # noqa: E731
        return wf.Job(name, model, images(4, shape=(512,)), adamw, loss=F.cross_entropy, epochs=3, seed=1)

    alone = JobRunner(make("alone"))
    expected = alone.run()
    assert expected.predicted_peak is not None
    with Engine(memory=int(1.6 * expected.predicted_peak), reserve=0, lanes=1) as engine:
        first = JobRunner(make("first"), engine)

        def pause() -> wf.JobResult:
            first.suspend(timeout=30)
            assert engine.reservations.claimed() == 0
            result = JobRunner(make("second"), engine).run()  # beside the first one it has no room
            first.resume()
            return result

        answers, join = ask_at(first, 3, pause)
        result = first.run()
        join()
        assert isinstance(answers[0], wf.JobResult), answers
        assert answers[0].losses == result.losses == expected.losses
        engine.native.check()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="tells no resident memory")
def test_pages_go_back_to_the_system() -> None:
    job = wf.Job("wide", lambda: nn.Sequential(*[nn.ReLU() for _ in range(6)], nn.Linear(512, 4)),
                 images(20, size=4096, shape=(512,)), adamw, loss=F.cross_entropy, epochs=2, seed=1)  # fmt: skip
    with Engine(memory="1GiB", lanes=1) as engine:
        runner = JobRunner(job, engine)
        before: list[int] = []

        def pause() -> int:
            runner.suspend(timeout=30)
            now = resident()
            runner.resume()
            return before[0] - now

        boundary = JobRunner._serve
        runner._serve = lambda: (before.append(resident()), boundary(runner))  # type: ignore[assignment, method-assign]
        answers, join = ask_at(runner, 12, pause)
        assert runner.run().status == "completed"
        join()
        assert runner.step is not None
        assert answers[0] > runner.step.plan.height / 2 > 8e6, answers


def test_a_deterministic_study_goes_on(engine: Engine) -> None:
    """Its other jobs would wait for one that is suspended."""
    runner = JobRunner(base()(), engine)
    engine.reservations.clock = VirtualClock()
    try:
        with pytest.raises(wf.CheckpointError, match="deterministic study"):
            runner.suspend()
    finally:
        engine.reservations.clock = None
    assert runner.run().status == "completed"


def test_others_do_not_wait_for_a_suspended_reader(engine: Engine) -> None:
    data = wf.SharedData(images(10), patience=60.0)
    slow, quick = (JobRunner(base(name=name, data=lambda: data)(), engine) for name in ("slow", "quick"))
    results: list[wf.JobResult] = []

    def pause() -> None:
        slow.suspend(timeout=30)
        thread.join(timeout=30)
        slow.resume()

    thread = threading.Thread(target=lambda: results.append(quick.run()))
    thread.start()
    _, join = ask_at(slow, 4, pause)
    results.append(slow.run())
    join()
    assert not thread.is_alive()
    assert [result.status for result in results] == ["completed"] * 2
    assert results[0].losses == results[1].losses


def test_what_is_written_at_an_epochs_end(engine: Engine) -> None:
    """``on_epoch`` may ask for the state of its own job."""
    made: list[wf.Checkpoint] = []
    undisturbed = JobRunner(JOBS["per_epoch"](), engine, lambda epoch, metrics: made.append(undisturbed.snapshot()))
    expected = undisturbed.run()
    assert [(one.epoch, one.batch, one.steps) for one in made] == [(1, 0, 10), (2, 0, 20), (3, 0, 30)]
    for checkpoint in made:
        again = JobRunner(JOBS["per_epoch"](), engine, resume=checkpoint)
        assert_equal(again, undisturbed, (again.run(), expected))


def test_more_epochs(engine: Engine) -> None:
    """A job that has ended may be given more."""
    longer = JobRunner(base(epochs=4)(), engine)
    expected = longer.run()
    made: list[wf.Checkpoint] = []
    short = JobRunner(base(epochs=3)(), engine, lambda epoch, metrics: made.append(short.snapshot()))
    short.run()
    again = JobRunner(base(epochs=4)(), engine, resume=made[-1])
    assert_equal(again, longer, (again.run(), expected))


@pytest.mark.needs_time("a loader starts worker processes")
def test_workers_of_a_loader(engine: Engine) -> None:
    make = base(data=lambda: DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=2), epochs=2)
    checkpoint, undisturbed, expected = snapshot_at(make, 13, engine)
    again = JobRunner(make(), engine, resume=checkpoint)
    assert_equal(again, undisturbed, (again.run(), expected))


def test_data_with_a_state_is_not_read_again(engine: Engine) -> None:
    make = JOBS["stateful"]
    checkpoint, undisturbed, expected = snapshot_at(make, 28, engine)
    job = make()
    again = JobRunner(job, engine, resume=checkpoint)
    assert_equal(again, undisturbed, (again.run(), expected))
    assert job.data.read == 2  # type: ignore[union-attr]


# -- what cannot be


def one_pass() -> Iterator[Any]:
    return iter(images(300))  # many: the job must not end before it was asked twice


def test_data_that_can_be_read_only_once(engine: Engine) -> None:
    make = base(data=one_pass, epochs=1)
    undisturbed = JobRunner(make(), engine)
    expected = undisturbed.run()
    runner = JobRunner(make(), engine)
    held: list[wf.Checkpoint] = []

    def look() -> None:
        with pytest.raises(wf.CheckpointError, match="gives each batch only once.*state_dict"):
            runner.snapshot(timeout=30)
        held.append(runner.suspend(timeout=30))  # its iterator stays where it is
        runner.resume()

    answers, join = ask_at(runner, 6, look)
    result = runner.run()
    join()
    assert answers == [None]
    assert_equal(runner, undisturbed, (result, expected))
    with pytest.raises(wf.CheckpointError, match="only that job can go on"):
        JobRunner(make(), engine, resume=held[0])


@pytest.mark.parametrize(
    "make, message",
    [
        (
            base(data=lambda: DataLoader(Noisy(), batch_size=4, num_workers=1, persistent_workers=True)),
            "persistent_workers=False",
        ),
        (base(scheduler=lambda optimizer: StepOnly()), "StepOnly, has no state_dict"),
        (base(optimizer=lambda p: adamw([*p, torch.zeros(3, requires_grad=True)])), r"tensor of shape (3,) that is no"),
    ],
    ids=["persistent workers", "scheduler", "a stranger"],
)
def test_jobs_that_nobody_could_go_on_with(make: Make, message: str, engine: Engine) -> None:
    checkpoint, _, result = snapshot_at(make, 3, engine)
    assert isinstance(checkpoint, wf.CheckpointError) and message in str(checkpoint)
    assert result.status == "completed"


class StepOnly:
    """A scheduler that cannot tell where it stands."""

    def step(self) -> None:
        pass


def test_state_that_is_not_plain_data(engine: Engine, tmp_path: Path) -> None:
    class Odd(Extra):
        def get_extra_state(self) -> Any:
            return {"told": Path("x")}

    checkpoint, _, _ = snapshot_at(base(model=Odd), 3, engine)
    (tmp_path / "net.state").write_bytes(b"old")
    with pytest.raises(wf.CheckpointError, match=r"Path in state\.job\.extra\.\.told cannot be written"):
        checkpoint.save(tmp_path / "net.state")
    assert [path.name for path in tmp_path.iterdir()] == ["net.state"]
    assert (tmp_path / "net.state").read_bytes() == b"old"


@pytest.mark.parametrize(
    "make, message",
    [
        (base(name="other"), "was made from 'net'"),
        (base(seed=4), "its seed is 4, the checkpoint's is 3"),
        (base(epochs=1), "it has 1 epochs, the checkpoint is in epoch 2"),
        (base(data=lambda: wf.SharedData(images(10))), "data is shared"),
        (base(model=lambda: Net(width=8)), r"first.weight is \[8, 6\] of float32 in the model and \[16, 6\]"),
        (base(model=Extra), "only the checkpoint has first.bias"),
        (base(optimizer=lambda p: torch.optim.SGD(p, lr=0.1)), "trains with SGD.*AdamW"),
        (base(optimizer=lambda p: adamw(list(p)[:3])), "AdamW has other parameters"),
        (base(scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 1)), "it has a scheduler"),
        (base(data=lambda: images(2)), "ended after 2 batches"),
        (base(data=lambda: Stateful(images(10))), "has the methods state_dict"),
    ],
)  # fmt: skip
def test_another_job(make: Make, message: str, engine: Engine) -> None:
    checkpoint, _, _ = snapshot_at(base(), 13, engine)
    with pytest.raises(wf.CheckpointError, match=message):
        result = JobRunner(make(), engine, resume=checkpoint).run()
        assert result.status == "failed" and result.error is not None
        raise result.error


def test_other_settings_of_the_optimizer_are_told(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    def decayed(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    caplog.set_level("WARNING", logger="waterflow")
    for scheduler in (None, decayed):
        caplog.clear()
        checkpoint, _, _ = snapshot_at(base(scheduler=scheduler), 13, engine)
        assert JobRunner(base(scheduler=scheduler)(), engine, resume=checkpoint).run().status == "completed"
        assert "goes on" not in caplog.text
        other = base(scheduler=scheduler, optimizer=lambda p: torch.optim.AdamW(p, lr=0.5))
        JobRunner(other(), engine, resume=checkpoint).run()
        name = "lr" if scheduler is None else "initial_lr"
        assert f"job 'net' goes on with {name}=0.01, as its checkpoint has it" in caplog.text


def test_when_there_is_no_state(engine: Engine) -> None:
    def evaluate(model: nn.Module) -> float:
        with pytest.raises(wf.CheckpointError, match="in the middle"):
            alone.snapshot()
        return 0.0

    alone = JobRunner(base(evaluate=evaluate)())
    assert alone.run().status == "completed"
    with pytest.raises(wf.CheckpointError, match="has ended"):
        alone.snapshot()
    with pytest.raises(wf.CheckpointError, match="not suspended"):
        alone.resume()
    waiting = JobRunner(base()(), engine)
    with pytest.raises(wf.CheckpointError, match=r"within 0.01 s"):
        waiting.snapshot(timeout=0.01)
    assert waiting.run().status == "completed"


# -- files


@pytest.fixture
def written(engine: Engine, tmp_path: Path) -> Path:
    checkpoint, _, _ = snapshot_at(base(), 13, engine)
    checkpoint.save(tmp_path / "net.state")
    return tmp_path / "net.state"


@pytest.mark.parametrize("where", [0.0, 0.3, 0.6, 0.9, 0.999, "description", "end"])
def test_a_damaged_file(where: float | str, written: Path) -> None:
    content = bytearray(written.read_bytes())
    at = {"description": -60, "end": -3}.get(where) if isinstance(where, str) else int(where * len(content))  # type: ignore[call-overload]
    content[at] ^= 4
    written.write_bytes(content)
    with pytest.raises(wf.CheckpointError, match="damaged|is no checkpoint"):
        wf.Checkpoint.load(written)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_file_that_ends_too_early(share: float, written: Path) -> None:
    content = written.read_bytes()
    written.write_bytes(content[: int(share * len(content))])
    with pytest.raises(wf.CheckpointError, match="is no checkpoint.*Take an older"):
        wf.Checkpoint.load(written)


def test_a_file_of_something_else(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(wf.CheckpointError, match="is of job 'net', not of 'other'"):
        wf.Checkpoint.load(written, job="other")
    with pytest.raises(FileNotFoundError):
        wf.Checkpoint.load(written.with_name("none"))
    monkeypatch.setattr("waterflow.training.checkpoint._torch", lambda: "9.0")
    with pytest.raises(wf.CheckpointError, match="written with torch 2.*any_torch=True"):
        wf.Checkpoint.load(written)
    assert wf.Checkpoint.load(written, any_torch=True).steps == 13
    monkeypatch.setattr("waterflow.training.checkpoint.FORMAT", 2)
    with pytest.raises(wf.CheckpointError, match="has format 1, and this version of waterflow reads format 2"):
        wf.Checkpoint.load(written)


class Evil:
    """Runs code when it is unpickled."""

    ran: ClassVar[list[int]] = []

    def __reduce__(self) -> Any:
        return self.ran.append, (1,)


def test_a_file_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("waterflow.training.checkpoint._check_plain", lambda value, where: None)
    write(tmp_path / "evil.state", {"job": Evil()}, {"job": "net"})
    Evil.ran.clear()
    with pytest.raises(wf.CheckpointError, match="cannot be read"):
        wf.Checkpoint.load(tmp_path / "evil.state")
    assert not Evil.ran


def test_a_save_that_fails_leaves_the_old_file(written: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = written.read_bytes()
    loaded = wf.Checkpoint.load(written)

    def full(content: Any, file: Any) -> None:
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr("torch.save", full)
    with pytest.raises(OSError, match="no space"):
        loaded.save(written)
    assert written.read_bytes() == before
    assert [path.name for path in written.parent.iterdir()] == ["net.state"]
