"""train(): results in order, every job as if alone, and nothing left behind."""

from __future__ import annotations

import copy
import gc
import logging
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset

import waterflow as wf
from tests.leftovers import nothing_left  # noqa: F401
from tests.support import Net, images, same_bits
from waterflow.executor.engine import Engine
from waterflow.training.runner import JobRunner

BATCHES = [*images(3), *images(1, size=5, seed=2)]  # the last one is shorter
ROWS = TensorDataset(torch.cat([x for x, _ in BATCHES]), torch.cat([y for _, y in BATCHES]))
KEEP_GOING: dict[str, Any] = {"on_error": "continue", "lanes": 2}


def accuracy(model: nn.Module) -> dict[str, float]:
    assert not model.training and not torch.is_grad_enabled()
    x, y = BATCHES[0]
    return {"accuracy": (model(x).argmax(1) == y).double().mean().item(), "loss": F.cross_entropy(model(x), y).item()}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def make(name: str = "job", **changes: Any) -> wf.Job:
    """A small job with dropout; the name's last digit is its seed."""
    seed = int(name[-1]) if name[-1].isdigit() else 0
    settings: dict[str, Any] = {
        "model": lambda: Net(dropout=0.3), "data": BATCHES, "optimizer": sgd, "loss": F.cross_entropy,
        "evaluate": accuracy, "epochs": 2, "seed": seed,
    }  # fmt: skip
    return wf.Job(name, **(settings | changes))


def adam(name: str) -> wf.Job:
    return make(name, model=lambda: Net(32, 0.5), optimizer=lambda p: torch.optim.Adam(p, lr=0.01))


def alone(job: wf.Job) -> wf.JobResult:
    return JobRunner(job).run()


def assert_same_result(one: wf.JobResult, other: wf.JobResult) -> None:
    assert (one.name, one.status, one.steps) == (other.name, other.status, other.steps)
    assert one.losses == other.losses
    assert one.metrics == other.metrics
    assert one.state_dict is not None and other.state_dict is not None
    assert one.state_dict.keys() == other.state_dict.keys()
    assert all(same_bits(one.state_dict[key], other.state_dict[key]) for key in one.state_dict)


@pytest.fixture(scope="module")
def bystanders() -> dict[str, wf.JobResult]:
    """What two jobs end with alone."""
    return {job.name: alone(job) for job in (make("near1"), adam("near2"))}


def assert_unharmed(results: wf.Results, bystanders: dict[str, wf.JobResult]) -> None:
    for name, expected in bystanders.items():
        assert_same_result(results[name], expected)


# -- results


def test_results_in_order_as_alone() -> None:
    jobs = [make("a1"), adam("b2"), make("c3", epochs=1), adam("d4")]
    results = wf.train(jobs, lanes=2)
    assert [result.name for result in results] == ["a1", "b2", "c3", "d4"]
    for job, result in zip(jobs, results):
        assert_same_result(result, alone(job))
    assert results["c3"] is results[2] and results.failed == [] and isinstance(results.failed, wf.Results)
    with pytest.raises(KeyError, match="no job is called 'x'; there are 'a1', 'b2', 'c3', 'd4'"):
        results["x"]


@pytest.mark.parametrize("options", [{"max_concurrent": 1}, {"max_concurrent": 3}, {"lanes": 1}, {"lanes": 3}], ids=str)
def test_the_order_of_work_changes_nothing(options: dict[str, int], bystanders: dict[str, wf.JobResult]) -> None:
    assert_unharmed(wf.train([make("near1"), make("other"), adam("near2")], **options), bystanders)


def test_twice_the_same_study_of_jobs_without_seeds() -> None:
    def run() -> wf.Results:
        torch.manual_seed(11)
        return wf.train([make(f"job{i}", seed=None) for i in range(5)], lanes=2)

    first, second = run(), run()
    for one, other in zip(first, second):
        assert_same_result(one, other)
    assert len({result.losses for result in first}) == 5
    torch.manual_seed(11)
    assert_same_result(alone(make("job0", seed=None)), first[0])


def test_plain_modules_with_shared_settings() -> None:
    torch.manual_seed(3)
    models = [Net(8), Net(8), nn.Linear(6, 4)]
    copies = copy.deepcopy(models)
    shared: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": sgd, "data": BATCHES, "epochs": 2, "seed": 1}
    results = wf.train(models, **shared)
    assert [result.name for result in results] == ["Net-0", "Net-1", "Linear-2"]
    for model, twin, result in zip(models, copies, results):
        assert_same_result(result, alone(wf.Job(result.name, model=twin, **shared)))
        assert all(same_bits(value, model.state_dict()[key]) for key, value in result.state_dict.items())
        assert result.value == result.metrics[-1]["loss"] == pytest.approx(sum(result.losses[4:]) / 4)


def test_no_job_no_result() -> None:
    assert wf.train([]) == wf.Results() == []


def test_an_engine_that_is_open_already(bystanders: dict[str, wf.JobResult]) -> None:
    with Engine(lanes=2) as engine:
        for _ in range(2):
            assert_unharmed(wf.train([make("near1"), adam("near2")], engine=engine), bystanders)
            assert engine.reservations.claimed() == engine.native.held == 0
            assert 0 < engine.native.peak_held <= engine.native.capacity
            engine.native.check()


def test_what_a_result_tells() -> None:
    result = wf.train([make("a1")])[0]
    assert (result.status, result.steps, len(result.losses), len(result.metrics)) == ("completed", 8, 8, 2)
    assert result.value == result.metrics[-1]["accuracy"]
    assert result.predicted_peak and result.measured_peak and result.seconds > 0
    assert result.error is None and result.traceback is None and result.opaque_reason is None


# -- callbacks


class Recorder(wf.Callback):
    def __init__(self) -> None:
        self.epochs: list[tuple[str, int, float]] = []
        self.ends: list[str] = []

    def on_epoch_end(self, job: wf.Job, epoch: int, metrics: dict[str, float]) -> None:
        self.epochs.append((job.name, epoch, metrics["accuracy"]))

    def on_job_end(self, job: wf.Job, result: wf.JobResult) -> None:
        assert result.name == job.name
        self.ends.append(job.name)


def test_callbacks_hear_every_epoch_and_every_end() -> None:
    recorder, ends = Recorder(), []
    results = wf.train([make("a1"), make("b2")], callbacks=[recorder, ends.append], lanes=2)
    assert sorted(recorder.ends) == ["a1", "b2"] and sorted(ends, key=lambda r: r.name) == results
    expected = [(r.name, epoch, m["accuracy"]) for r in results for epoch, m in enumerate(r.metrics)]
    assert sorted(recorder.epochs) == expected


@pytest.mark.needs_time("what lasts a moment lets others run beside it")
def test_calls_never_overlap() -> None:
    inside = []

    def slow(result: wf.JobResult) -> None:
        inside.append(result.name)
        time.sleep(0.01)
        assert inside.pop() == result.name and not inside

    wf.train([make(f"job{i}", epochs=1) for i in range(4)], callbacks=[slow], lanes=2)


def test_a_callback_that_raises_ends_the_call() -> None:
    def broken(result: wf.JobResult) -> None:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        wf.train([make("a1"), make("b2", epochs=200)], callbacks=[broken], on_error="continue")


# -- failures


class Broken(Exception):
    pass


def raising(*_: Any) -> Any:
    raise Broken("broken on purpose")


def breaks_at(batch: int) -> Iterator[Any]:
    yield from BATCHES[:batch]
    raise Broken("broken on purpose")


def exits() -> Iterator[Any]:
    yield BATCHES[0]
    sys.exit(3)


class BrokenScheduler(StepLR):
    def step(self, *_: Any) -> None:
        if self.last_epoch >= 0:
            raise Broken("broken on purpose")
        super().step()


def second_time() -> Callable[[Any], float]:
    calls: list[int] = []

    def evaluate(model: nn.Module) -> float:
        calls.append(1)
        return 1.0 if len(calls) == 1 else raising()

    return evaluate


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.embedding(x).mean(1))


def out_of_range() -> list[Any]:
    batches = [(torch.randint(6, (8, 3)), torch.randint(4, (8,))) for _ in range(4)]
    batches[2][0][4, 1] = 6
    return batches


FAILURES: dict[str, tuple[dict[str, Any], type[BaseException], str, int]] = {
    # what is wrong with it, the error, its text, the steps it takes before
    "data function": ({"data": raising}, Broken, "on purpose", 0),
    "data in mid-epoch": ({"data": lambda: breaks_at(3)}, Broken, "on purpose", 3),
    "data that exits": ({"data": exits}, SystemExit, "3", 1),
    "empty data": ({"data": []}, wf.InvalidJobError, "data of job 'bad' is empty", 0),
    "data read once": ({"data": iter(BATCHES)}, wf.InvalidJobError, "can be read only once", 4),
    "data without tensors": ({"data": [(1, 2)]}, wf.InvalidJobError, "at least one tensor", 0),
    "a batch that does not fit": ({"data": [*BATCHES, images(1, shape=(5,))[0]]}, RuntimeError, "8x5 and 6x16", 4),
    "a target out of range": ({"data": [*BATCHES, (BATCHES[0][0], BATCHES[0][1] + 9)]}, wf.StepIndexError, "Target .* out of", 4),
    "an index out of range": ({"model": Embedded, "data": out_of_range(), "evaluate": None}, wf.StepIndexError,
                              "embedding.* of step 'bad' failed: index out of range", 2),
    "loss": ({"loss": raising}, Broken, "on purpose", 0),
    "evaluate": ({"evaluate": raising}, Broken, "on purpose", 4),
    "evaluate in the second epoch": ({"evaluate": second_time()}, Broken, "on purpose", 8),
    "evaluate without a number": ({"evaluate": lambda model: "good"}, wf.InvalidJobError, "must return a number", 4),
    "optimizer": ({"optimizer": raising}, Broken, "on purpose", 0),
    "no optimizer": ({"optimizer": list}, wf.InvalidJobError, "made a list, not an optimizer", 0),
    "scheduler": ({"scheduler": raising}, Broken, "on purpose", 0),
    "scheduler's step": ({"scheduler": lambda o: BrokenScheduler(o, 1)}, Broken, "on purpose", 4),
    "model": ({"model": raising}, Broken, "on purpose", 0),
    "no model": ({"model": dict}, wf.InvalidJobError, "made a dict, not a module", 0),
    "a model without values": ({"model": lambda: nn.Linear(6, 4, device="meta")}, wf.InvalidJobError, "meta device", 0),
    "nothing to train": ({"model": lambda: Net().requires_grad_(False)}, wf.InvalidJobError, "nothing to train", 0),
    "a loss that is not finite": ({"optimizer": lambda p: torch.optim.SGD(p, lr=1e30)}, wf.NonFiniteLossError,
                                  "the loss of job 'bad' became nan in epoch 0, step ", 4),
}  # fmt: skip


@pytest.mark.parametrize("kind", FAILURES)
def test_a_job_that_fails_fails_alone(kind: str, bystanders: dict[str, wf.JobResult]) -> None:
    changes, error, text, steps = FAILURES[kind]
    results = wf.train([make("near1"), make("bad", **changes), adam("near2")], **KEEP_GOING)
    assert_unharmed(results, bystanders)
    bad = results["bad"]
    assert bad.status == "failed" and results.failed == [bad]
    assert isinstance(bad.error, error)
    with pytest.raises(error, match=text):
        raise bad.error
    assert text.split(".*")[0] in bad.traceback
    assert bad.steps == steps and len(bad.losses) == steps
    assert f"{error.__name__}: " in bad.to_dict()["error"]


def test_a_failure_is_raised_when_nobody_asks_otherwise() -> None:
    with pytest.raises(Broken):  # the first one would go on for minutes
        wf.train([make("a1", epochs=10_000), make("bad", evaluate=raising), make("waiting")], lanes=2, max_concurrent=2)


def test_losses_that_are_not_finite_where_they_are_allowed() -> None:
    diverging = make("bad", optimizer=lambda p: torch.optim.SGD(p, lr=1e30), allow_non_finite=True, evaluate=None)
    result = wf.train([diverging])[0]
    assert result.status == "completed" and result.steps == 8 and result.losses[-1] != result.losses[-1]


def test_a_failed_job_frees_its_memory(no_captures: Any) -> None:
    class Watched(Net):
        alive = 0

        def __init__(self) -> None:
            super().__init__()
            type(self).alive += 1

        def __del__(self) -> None:
            type(self).alive -= 1

    results = wf.train([make("bad", model=Watched, evaluate=raising)], on_error="continue")
    no_captures.clear()
    gc.collect()  # captures hold themselves
    assert results[0].traceback is not None and "raising" in results[0].traceback
    assert Watched.alive == 0


# -- jobs that cannot be right


def one_module() -> list[wf.Job]:
    model = Net()
    return [make("a", model=model), make("b", model=model)]


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "one model": (lambda: wf.train(Net(), data=BATCHES, optimizer=sgd), "put the one you have into brackets"),
    "no job": (lambda: wf.train([("a", Net())]), "entry 0 must be a Job or a module; got tuple"),
    "one iterator": (
        lambda: wf.train([Net(), Net()], loss=F.cross_entropy, optimizer=sgd, data=iter(BATCHES)), "read one iterator"
    ),
    "no threads": (lambda: wf.train([make()], threads_per_lane=0), "threads_per_lane must be a positive integer; got 0"),
    "nothing": (lambda: wf.train(None), "takes a Job, or a list of jobs or models; got None"),  # type: ignore[arg-type]
    "no device": (lambda: wf.train([make()], device="tpu"), "'tpu' is not supported; waterflow trains on 'cpu' and 'cuda'"),
    "too many lanes": (lambda: wf.train([make()], lanes=100_000), "lanes is at most 256; got 100000"),
    "one module twice": (lambda: wf.train(one_module()), r"'a' and 'b' share a module.*copy\.deepcopy"),
    "one name twice": (lambda: wf.train([make(), make()]), "two jobs are called 'job'; give each a name"),
    "nothing shared": (lambda: wf.train([Net()], loss=F.cross_entropy), "pass data= and optimizer= to train"),
    "a misspelt setting": (lambda: wf.train([Net()], data=[], optimiser=sgd), "no setting optimiser; .*optimizer"),
    "a shared name": (lambda: wf.train([Net()], data=[], optimizer=sgd, name="x"), "no setting name"),
    "shared by a job": (lambda: wf.train([make()], epochs=3), "epochs: settings for plain modules, but entry 0"),
    "on_error": (lambda: wf.train([make()], on_error="ignore"), "'raise' or 'continue'; got 'ignore'"),
    "max_concurrent": (lambda: wf.train([make()], max_concurrent="auto"), "positive integer.*got 'auto'"),
    "one callback": (lambda: wf.train([make()], callbacks=print), "callbacks takes a list"),
    "device": (lambda: wf.train([make()], device="mps"), "is not supported"),
    "memory": (lambda: wf.train([make()], memory="4 gigs"), "cannot read '4 gigs' as memory; write '4GiB'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MISTAKES)
def test_mistakes_are_explained(kind: str) -> None:
    call, text = MISTAKES[kind]
    with pytest.raises(wf.InvalidJobError, match=text):
        call()


# -- data


@pytest.mark.parametrize("workers", [0, 2])
def test_one_shuffled_loader_for_all(workers: int) -> None:
    loader = DataLoader(ROWS, batch_size=6, shuffle=True, num_workers=workers)
    jobs = [make(f"job{seed}", data=loader) for seed in range(3 if workers == 0 else 2)]
    results = wf.train(jobs, lanes=2)
    for job, result in zip(jobs, results):
        job.data = DataLoader(ROWS, batch_size=6, shuffle=True)
        assert_same_result(result, alone(job))


def looking(model: nn.Module, batch: Any) -> torch.Tensor:
    """A step that cannot be captured."""
    loss = F.cross_entropy(model(batch[0]), batch[1])
    return loss if loss.item() > 0 else -loss


def by_name(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    output = model(batch["x"])
    return F.cross_entropy(output, batch["y"]), {"largest": output.detach().max()}


@pytest.mark.parametrize(
    "changes",
    [
        {"data": BATCHES[:1]},
        {"data": lambda: iter(BATCHES)},
        {"data": lambda: (pair for pair in images(3, seed=7))},
        {"data": lambda: ((torch.randn(4, 6), torch.randint(4, (4,))) for _ in range(3))},
        {"data": [{"x": x, "y": y} for x, y in BATCHES], "loss": None, "step": by_name},
        {"accumulate": 2, "clip_grad_norm": 0.1},
        {"scheduler": lambda o: ExponentialLR(o, 0.5)},
        {"scheduler": lambda o: StepLR(o, 3), "scheduler_interval": "step"},
        {"scheduler": lambda o: ReduceLROnPlateau(o, patience=0), "epochs": 4},
        {"evaluate": lambda model: model(BATCHES[0][0]).mean()},
        {"loss": None, "step": looking},
    ],
    ids=["one batch", "fresh iterators", "generators", "numbers drawn", "dicts", "accumulated", "schedule by epoch",
         "schedule by step", "plateau", "a tensor as value", "opaque"],
)  # fmt: skip
@pytest.mark.filterwarnings("error:Detected call")
def test_many_kinds_of_jobs_as_alone(changes: dict[str, Any], bystanders: dict[str, wf.JobResult]) -> None:
    results = wf.train([make("near1"), make("job3", **changes), adam("near2")], lanes=2)
    assert_unharmed(results, bystanders)
    assert_same_result(results["job3"], alone(make("job3", **changes)))


# -- memory


def wide(batch: int, name: str = "wide") -> wf.Job:
    return make(name, model=lambda: Net(64), data=images(2, size=batch), evaluate=None, epochs=1)


def test_a_job_of_which_no_batch_fits_is_told_what_its_state_needs() -> None:
    with pytest.raises(wf.MemoryLimitError, match=r"not even a batch of [12] fits: it needs at least (.*) KiB, ") as caught:
        wf.train([wide(16)], memory=10_000)
    assert "of it for parameters, buffers and optimizer state" in str(caught.value) and caught.value.largest_batch is None
    assert "Make the model smaller" in str(caught.value) and "Lower the batch size" not in str(caught.value)


@pytest.mark.parametrize("limit", [100_000, 1_000_000])
def test_a_job_that_is_too_large_is_told_what_fits(limit: int) -> None:
    with pytest.raises(wf.MemoryLimitError, match=r"job 'wide' does not fit.*step reaches .*MiB.*limit of") as caught:
        wf.train([wide(4096)], memory=limit)
    error = caught.value
    assert error.needed > error.limit == limit
    fits = error.largest_batch
    assert fits is not None and f"the largest batch that fits is {fits}" in str(error)
    assert wf.train([wide(fits)], memory=limit)[0].status == "completed"
    with pytest.raises(wf.MemoryLimitError, match=f"largest batch that fits is {fits}"):
        wf.train([wide(fits + 1)], memory=limit)


def test_a_job_that_is_too_large_stops_no_other(bystanders: dict[str, wf.JobResult]) -> None:
    results = wf.train([make("near1"), wide(4096, "bad"), adam("near2")], memory=1_000_000, **KEEP_GOING)
    assert_unharmed(results, bystanders)
    assert isinstance(results["bad"].error, wf.MemoryLimitError)


def pictured(width: int) -> nn.Module:
    """Kernels with temporaries that the graph does not show: measured heights lie above predicted ones."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, 2, 1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4),
    )  # fmt: skip


def any_job(draw: random.Random, number: int) -> wf.Job:
    kind = draw.choice(["dense", "dense", "pictured", "opaque", "bad"])
    width, size = draw.choice([4, 16, 64]), draw.choice([4, 16])
    shape = (3, 12, 12) if kind == "pictured" else (6,)
    data = [*images(draw.randint(1, 3), size, shape, seed=number), *images(1, size // 2, shape, seed=number)]
    return make(
        f"{kind}{number}", model=lambda: pictured(width) if kind == "pictured" else Net(width, 0.2), data=data,
        evaluate=raising if kind == "bad" else draw.choice([None, lambda model: model(data[0][0]).sum()]),
        optimizer=draw.choice([sgd, torch.optim.Adam]), epochs=draw.randint(1, 2),
        **({"loss": None, "step": looking} if kind == "opaque" else {}),
    )  # fmt: skip


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(n, marks=pytest.mark.campaign) for n in range(5, 60))])
def test_random_mixes_stay_within_the_limit(seed: int) -> None:
    draw = random.Random(seed)
    jobs = [any_job(draw, number) for number in range(7)]
    expected = [alone(job) for job in jobs]
    largest = max(max(r.predicted_peak or 0, r.measured_peak or 0) for r in expected)
    # Steps must wait for each other, and at times whole jobs.
    limit = int(largest * draw.choice([1.4, 2.0, 4.0])) + 100_000
    with Engine(memory=limit, lanes=draw.randint(1, 3), reserve=0) as engine:
        results = wf.train(jobs, engine=engine, max_concurrent=draw.randint(1, 7), on_error="continue")
        assert engine.native.peak_held <= limit
        assert engine.reservations.claimed() == engine.native.held == 0
        engine.native.check()
    for one, other in zip(results, expected):
        assert_same_result(one, other)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_jobs_that_just_fit_train_to_their_end(count: int) -> None:
    data = images(20, size=2)
    jobs = [make(f"job{n}", model=lambda: nn.Linear(6, 4), data=data, evaluate=None) for n in range(count)]
    result = alone(jobs[0])
    batch = sum(tensor.nbytes for tensor in data[0])
    state = 2 * sum(tensor.nbytes for tensor in result.state_dict.values())  # with momentum
    step = result.measured_peak - state - batch
    with Engine(memory=count * (state + 2 * batch) + step, lanes=2, reserve=0) as engine:
        results = wf.train(jobs, engine=engine, max_concurrent=count)
        assert engine.native.peak_held <= engine.limit
    assert [r.status for r in results] == ["completed"] * count


# -- from outside


def test_silent_but_for_logging(capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="waterflow")
    wf.train([make("a1"), make("bad", evaluate=raising)], **KEEP_GOING)
    assert capfd.readouterr() == ("", "")
    assert "job 'bad' failed: broken on purpose" in caplog.text


INTERRUPTED = """
import signal, sys, time, torch, waterflow as wf
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in a shell's background
from torch.nn import functional as F
from tests.support import Net, images
torch.set_num_threads(1)
def busy(model):
    print("under way", flush=True)
    while True: pass
jobs = [wf.Job(f"job{i}", model=Net, data=images(2), optimizer=torch.optim.SGD, loss=F.cross_entropy, epochs=10**6,
               evaluate=busy if i == 0 and sys.argv[1] == "busy" else None) for i in range(3)]
class Say(wf.Callback):
    def on_epoch_end(self, job, epoch, metrics):
        if epoch == 0 and job.name == "job0" and sys.argv[1] == "training": print("under way", flush=True)
try:
    wf.train(jobs, lanes=2, callbacks=[Say()])
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.needs_time("Ctrl-C ends a call within two seconds")
@pytest.mark.parametrize("doing", ["training", pytest.param("busy", marks=pytest.mark.slow)])
def test_interrupted_within_two_seconds(doing: str) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, doing], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout.readline() == "under way\n"
            started = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted\n"
            assert time.monotonic() - started < 2
            assert process.wait(timeout=5) == 0 and process.stderr.read() == ""
        finally:
            process.kill()
