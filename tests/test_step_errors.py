"""A failing operation ends its own step, says which it was, and changes nothing else."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Optimizer

import waterflow as wf
from tests.support import MiB, Net, Trained, assert_same, fuse, images, run_steps, train_eager, train_step
from waterflow.executor.engine import Engine


@pytest.fixture(params=["alone", "engine"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine | None]:
    if request.param == "alone":
        yield None
        return
    with Engine(memory=256 * MiB, lanes=2) as made:
        yield made


class Words(nn.Module):
    """Indexes into something in the middle of forward; ``how`` says with which operation."""

    def __init__(self, how: str = "embedding", dropout: float = 0.2) -> None:
        super().__init__()
        self.how = how
        self.first, self.norm, self.drop = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Dropout(dropout)
        self.table = nn.Embedding(10, 6)
        self.last = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.first(x)))
        table = self.table.weight
        found = {
            "embedding": lambda: self.table(index),
            "embedding bag": lambda: F.embedding_bag(index[:, None], table),
            "index": lambda: table[index],
            "index select": lambda: table.index_select(0, index),
            "gather": lambda: table.gather(0, index[:, None].expand(-1, 6)),
            "one hot": lambda: F.embedding(index, table * 1.0),
        }[self.how]()
        return self.last(torch.tanh(hidden + found))


INDEXING = {
    "embedding": "aten.embedding",
    "embedding bag": "embedding_bag",
    "index": "aten.index",
    "index select": "aten.index_select",
    "gather": "aten.gather",
    "one hot": "aten.embedding",
}
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "adamw": lambda p: AdamW(p, lr=0.01),
}


def words(count: int, size: int = 8, bad: int = 0) -> list[Any]:
    """Batches of inputs, indices and classes; ``bad`` says which of the last two is out of range."""
    batches = []
    for number, (x, y) in enumerate(images(count, size=size)):
        index = (torch.arange(size) + number) % 10
        index[size // 2] += 100 * (bad == 1)
        y[size // 2] += 100 * (bad == 2)
        batches.append((x, index, y))
    return batches


def mixed(pattern: str) -> list[Any]:
    """A batch for each letter: ``g`` is good, ``i`` has a bad index, ``t`` a bad target."""
    good, index, target = words(len(pattern)), words(len(pattern), bad=1), words(len(pattern), bad=2)
    return [{"g": good, "i": index, "t": target}[letter][number] for number, letter in enumerate(pattern)]


def making(optimizer: str = "adamw", **options: Any) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(3)
    model = Words(**options)
    return model, OPTIMIZERS[optimizer](model.parameters())


def eager_that_goes_on(batches: list[Any], accumulate: int = 1, **options: Any) -> Trained:
    """The loop of a user who catches what a batch raises, and takes the next one."""
    model, optimizer = making(**options)
    fuse(optimizer)
    results = []
    torch.manual_seed(5)
    for batch in batches:
        try:
            loss = F.cross_entropy(model(*batch[:-1]), batch[-1])
        except (IndexError, RuntimeError):
            continue
        (loss / accumulate).backward()
        results.append(loss.detach())
        if len(results) % accumulate == 0:
            optimizer.step()
            optimizer.zero_grad()
    return Trained(results, model, optimizer)


def steps_that_go_on(batches: list[Any], engine: Engine | None, accumulate: int = 1, **options: Any) -> Trained:
    model, optimizer = making(**options)
    torch.manual_seed(5)
    generator = torch.Generator().manual_seed(5) if engine else None
    job = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine, accumulate=accumulate, generator=generator)
    results = []
    for batch in batches:
        try:
            results.append(job(batch))
        except wf.StepError:
            if engine:
                assert engine.native.held == 0
                engine.native.check()
            continue
    return Trained(results, model, optimizer, job)


@pytest.mark.parametrize("how", INDEXING)
def test_the_message_names_the_operation(how: str, engine: Engine | None) -> None:
    model, optimizer = making(how=how)
    job = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine, name="wordy")
    job(words(1)[0])
    with pytest.raises(wf.StepError, match=INDEXING[how]) as caught:
        job(words(1, bad=1)[0])
    text = str(caught.value)
    assert "'wordy'" in text and "forward" in text and any(w in text for w in ("out of", "valid range"))
    assert isinstance(caught.value, RuntimeError)
    with pytest.raises((IndexError, RuntimeError)) as eager:
        model(*words(1, bad=1)[0][:-1])
    assert isinstance(caught.value, IndexError) == isinstance(eager.value, IndexError)
    assert job.opaque_reason is None


def test_the_message_names_a_target_out_of_range(engine: Engine | None) -> None:
    model, optimizer = making()
    job = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
    with pytest.raises(wf.StepError, match=r"nll_loss.*out of bounds") as caught:
        job(words(1, bad=2)[0])
    assert isinstance(caught.value, IndexError)


def test_the_message_is_for_people(engine: Engine | None) -> None:
    """No stack of C++ frames."""
    model, optimizer = making()
    job = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
    for bad in (1, 2):
        with pytest.raises(wf.StepError) as caught:
            job(words(1, bad=bad)[0])
        assert "frame #" not in str(caught.value) and len(str(caught.value)) < 500


def test_the_message_names_the_users_line(engine: Engine | None) -> None:
    model, optimizer = making()
    job = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
    with pytest.raises(wf.StepError, match=r"test_step_errors.py:\d+.*self.table\(index\)"):
        job(words(1, bad=1)[0])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("pattern", ["gigg", "gtgg", "gggiitg"])
def test_training_goes_on(pattern: str, optimizer: str, engine: Engine | None) -> None:
    mine = steps_that_go_on(mixed(pattern), engine, optimizer=optimizer)
    assert_same(mine, eager_that_goes_on(mixed(pattern), optimizer=optimizer))
    assert mine.step is not None and mine.step.steps == pattern.count("g")


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("pattern", ["igg", "tgg", "itg"])
def test_the_first_step_fails(pattern: str, optimizer: str, engine: Engine | None) -> None:
    mine = steps_that_go_on(mixed(pattern), engine, optimizer=optimizer)
    assert_same(mine, eager_that_goes_on(mixed(pattern), optimizer=optimizer))


@pytest.mark.parametrize("pattern", ["igggg", "gigggg", "ggtgg", "ggigg", "gigtgig"])
def test_a_failure_while_gradients_gather(pattern: str, engine: Engine | None) -> None:
    """A failed call is as if it had not been made: the next one takes its place."""
    mine = steps_that_go_on(mixed(pattern), engine, accumulate=2)
    assert_same(mine, eager_that_goes_on(mixed(pattern), accumulate=2))


def test_every_step_fails(engine: Engine | None) -> None:
    model, optimizer = making()
    before = {name: value.clone() for name, value in model.named_parameters()}
    job = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
    for batch in mixed("ititititit"):
        with pytest.raises(wf.StepError):
            job(batch)
    assert all(torch.equal(before[name], value) for name, value in model.named_parameters())
    assert job.steps == 0 and all(p.grad is None for p in model.parameters())


def test_queued_steps_fall_with_a_failed_one() -> None:
    with Engine(memory=256 * MiB, lanes=1) as engine:
        model, optimizer = making()
        job = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
        job(words(1)[0])
        pending = [job.submit(batch) for batch in mixed("giggg")]
        assert pending[0].result().isfinite()
        with pytest.raises(wf.StepError):
            pending[1].result()
        fallen = 0
        for each in pending[2:]:
            # Those that were handed in after the failure was known are run as ever.
            try:
                each.result()
            except wf.JobCancelled as error:
                assert "earlier step" in str(error)
                fallen += 1
        assert job(words(1)[0]).isfinite()
        assert engine.native.held == 0
        engine.native.check()


def test_other_jobs_do_not_notice() -> None:
    """Three jobs train while a fourth fails in every other step, at several operations."""

    def make() -> tuple[nn.Module, Optimizer]:
        model = Net(dropout=0.3, width=32)
        return model, AdamW(model.parameters(), lr=0.01)

    batches = [images(40, seed=seed) for seed in range(3)]
    references = [train_eager(make, batches[seed], seed=seed) for seed in range(3)]
    made = []
    for seed in range(3):
        torch.manual_seed(seed)
        made.append(make())
    ends: list[Any] = [None] * 3
    failures = 0
    with Engine(memory=256 * MiB, lanes=2) as engine:

        def work(seed: int) -> None:
            try:
                ends[seed] = run_steps(*made[seed], batches[seed], seed=seed, engine=engine)
            except BaseException as error:
                ends[seed] = error

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for how in INDEXING:
            model, optimizer = making(how=how)
            job = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
            for batch in mixed("gigtgigtgt"):
                try:
                    job(batch)
                except wf.StepError:
                    failures += 1
            job.close()
        for thread in threads:
            thread.join(60)
        for end, reference in zip(ends, references):
            assert isinstance(end, Trained), end
            assert_same(end, reference)
            assert end.step is not None
            end.step.close()
        assert failures == 5 * len(INDEXING)
        assert engine.native.held == 0 and engine.reservations.claimed() == 0
        engine.native.check()


def test_error_of_the_step_function_is_raised_once(engine: Engine | None) -> None:
    """A batch that the user's own code refuses raises the user's error, and spoils nothing for the next."""

    def step(model: Net, batch: Any) -> torch.Tensor:
        x, y = batch
        if x.shape[0] != 8:
            raise ValueError("eight, please")
        return F.cross_entropy(model(x), y)

    torch.manual_seed(0)
    model = Net()
    job = wf.Step(model, step=step, optimizer=AdamW(model.parameters(), lr=0.01), engine=engine)
    for batch, fine in [(images(1)[0], True), (images(1, size=5)[0], False), (images(1)[0], True)]:
        if fine:
            assert job(batch).isfinite()
        else:
            with pytest.raises(ValueError, match="eight, please"):
                job(batch)
    assert job.opaque_reason is None, "one bad batch must not make the job opaque for ever"


def test_shape_error_is_raised_once(engine: Engine | None) -> None:
    torch.manual_seed(0)
    model = Net()
    job = wf.Step(model, loss=F.cross_entropy, optimizer=AdamW(model.parameters(), lr=0.01), engine=engine)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        job(images(1, shape=(7,))[0])
    assert job(images(1)[0]).isfinite()
    assert job.opaque_reason is None


WRONG_SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "loss class": ({"loss": nn.CrossEntropyLoss}, r"pass an object of it: CrossEntropyLoss\(\)"),
    "clip": ({"loss": F.cross_entropy, "clip_grad_norm": -1}, "clip_grad_norm must be a positive number or None; got -1"),
    "clip text": ({"loss": F.cross_entropy, "clip_grad_value": "1"}, "clip_grad_value must be a positive number"),
    "autocast": ({"loss": F.cross_entropy, "autocast": "bf16"}, "must be a data type such as torch.bfloat16"),
    "other optimizer": (
        {"loss": F.cross_entropy, "optimizer": torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)},
        "trains none of the model's parameters",
    ),
}


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_wrong_settings(name: str) -> None:
    settings, text = WRONG_SETTINGS[name]
    model = Net()
    with pytest.raises(wf.InvalidJobError, match=text):
        wf.Step(model, **{"optimizer": torch.optim.AdamW(model.parameters())} | settings)


@pytest.mark.parametrize("kind", [nn.LazyLinear, nn.LazyConv1d])
def test_a_lazy_model(kind: Any) -> None:
    model = nn.Sequential(kind(4, *([1] if kind is nn.LazyConv1d else [])))
    with pytest.raises(wf.InvalidJobError, match=r"'0\.weight' of the model has no shape yet: call the model once"):
        wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.AdamW(model.parameters()))


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyBatchNorm1d(affine=False), nn.Linear(6, 4))


def lazy_and_called() -> nn.Module:
    model = lazy()
    model(images(1)[0][0])
    return model


def test_a_lazy_model_of_a_job() -> None:
    settings: dict[str, Any] = {"loss": F.cross_entropy, "optimizer": torch.optim.AdamW, "data": images(3)}
    with pytest.raises(wf.InvalidJobError, match="'0.running_mean' of the model has no shape yet.*function that makes"):
        wf.train([wf.Job(name="lazy", model=lazy, **settings)])
    result = wf.train([wf.Job(name="called", model=lazy_and_called, **settings)])[0]
    assert result.opaque_reason is None and len(result.losses) == 3


def test_an_optimizer_that_calls_a_closure() -> None:
    told = r"LBFGS calls a closure several times in each update.*AdamW, or call optimizer\.step\(closure\) in a loop"
    model = Net()
    with pytest.raises(wf.InvalidJobError, match=told):
        wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.LBFGS(model.parameters()))
    made: list[int] = []
    settings: dict[str, Any] = {"model": lambda: made.append(1) or Net(), "loss": F.cross_entropy, "data": images(1)}
    for optimizer in (torch.optim.LBFGS, partial(torch.optim.LBFGS, lr=0.1)):
        with pytest.raises(wf.InvalidJobError, match=told):
            wf.train([wf.Job(name="a", optimizer=optimizer, **settings)])
    assert not made
    with pytest.raises(wf.InvalidJobError, match=told):
        wf.train([wf.Job(name="a", optimizer=lambda p: torch.optim.LBFGS(p), **settings)])


def test_a_forgotten_loss() -> None:
    model = Net()
    step = wf.Step(model, optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(wf.InvalidJobError, match=r"Net does not take it .* Pass loss=, a function of \(output, target\)"):
        step(images(1)[0])


def plainly() -> tuple[nn.Module, Optimizer]:
    model = Net()
    return model, SGD(model.parameters(), lr=0.1, fused=True)


def both_parts(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(torch.as_tensor(batch["x"])), torch.as_tensor(batch["y"])) * batch["scale"]


@pytest.mark.parametrize("opaque", [False, True])
def test_models_that_waterflow_calls_get_arrays_as_tensors(opaque: bool) -> None:
    """Over the memory of the arrays, and NumPy's numbers as Python's, also in a step that runs eagerly."""

    class Scaled(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: Any, scale: Any) -> Any:
            assert isinstance(x, torch.Tensor) and type(scale) in (float, bool)
            return self.model(x) * scale + (x.sum().item() * 0 if opaque else 0)

    def scaled() -> Any:
        model, _ = plainly()
        return (model := Scaled(model)), torch.optim.SGD(model.parameters(), lr=0.1)

    scales = (np.float32(0.5), np.float64(0.5), np.bool_(True), np.float32(0.25))
    of_numpy: list[Any] = [[x.numpy(), scale, y.numpy()] for (x, y), scale in zip(images(4), scales)]
    of_numpy[1][0] = np.ascontiguousarray(of_numpy[1][0][::-1])[::-1]
    of_numpy[2][0].flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mine = train_step(scaled, of_numpy, loss=F.cross_entropy)
    of_torch = [(torch.from_numpy(np.array(x)), scale.item(), torch.from_numpy(y)) for x, scale, y in of_numpy]
    assert_same(mine, train_eager(scaled, of_torch, loss=F.cross_entropy))
    assert mine.step is not None and (mine.step.opaque_reason is not None) == opaque


def test_a_step_function_gets_arrays_as_they_are() -> None:
    """A plain loop's code, which makes tensors of them itself; NumPy's numbers are what they are in a captured step, too."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        assert type(batch["x"]) is np.ndarray and type(batch["scale"]) is np.float32
        return F.cross_entropy(model(torch.from_numpy(batch["x"])), torch.as_tensor(batch["y"])) * float(batch["scale"])

    def of_tensors(model: nn.Module, batch: Any) -> torch.Tensor:
        assert type(batch["scale"]) is np.float32
        return F.cross_entropy(model(batch["x"]), batch["y"]) * float(batch["scale"])

    batches = [{"x": x.numpy(), "y": y.numpy(), "scale": np.float32(0.5)} for x, y in images(4)]
    mine, plain = train_step(plainly, batches, step=step), train_eager(plainly, batches, step=step)
    assert_same(mine, plain)
    assert (
        mine.step is not None and "NumPy array" in str(mine.step.opaque_reason) and "from_numpy" in str(mine.step.opaque_reason)
    )
    batches = [{name: torch.from_numpy(v) if name != "scale" else v for name, v in batch.items()} for batch in batches]
    mine = train_step(plainly, batches, step=of_tensors)
    assert_same(mine, plain)
    assert mine.step is not None and mine.step.opaque_reason is None


@pytest.mark.parametrize("way", ["alone", "of a job"])
def test_a_step_changes_an_array_of_its_batch(way: str) -> None:
    """In place, as a loop does; of a job, whose list others may read, too, only its own copy is changed."""

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        batch[0][:] *= 0.5
        return F.cross_entropy(model(torch.from_numpy(batch[0])), torch.from_numpy(batch[1]))

    ((x, y),) = images(1)
    array = x.numpy().copy()

    def made() -> Any:
        torch.manual_seed(3)
        return plainly()

    plain = train_eager(made, [(x.numpy().copy(), y.numpy())] * 3, step=step)
    if way == "alone":
        assert_same(train_step(made, [(array, y.numpy())] * 3, step=step), plain)
        assert np.array_equal(array, x.numpy() / 8)
        return
    job = wf.Job("j", model=lambda: made()[0], data=[(array, y.numpy())], step=step, optimizer=sgd, epochs=3)
    [result] = wf.train([job])
    assert [*result.losses] == [float(loss) for loss in plain.results] and np.array_equal(array, x.numpy())


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def test_a_model_changes_an_array_of_its_batch() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = plainly()[0]

        def forward(self, x: torch.Tensor) -> Any:
            return self.model(x.mul_(0.5))

    (x, y), array = images(1)[0], images(1)[0][0].numpy().copy()
    job = wf.Step(model := Halves(), loss=F.cross_entropy, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(3):
        job((array, y.numpy()))
    assert job.opaque_reason is None and np.array_equal(array, x.numpy() / 8)


@pytest.mark.parametrize("odd", [np.array(["a", "b"]), np.datetime64("2020-01-01"), np.ma.masked_array([1.0, 2.0], [0, 1])])
def test_what_torch_has_no_type_for_stays_what_it_is(odd: Any) -> None:
    seen = []

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        seen.append(batch[2])
        return F.cross_entropy(model(batch[0]), batch[1])

    model, optimizer = plainly()
    job = wf.Step(model, step=step, optimizer=optimizer)
    job((*images(1)[0], odd))
    assert seen == [odd] or seen[0] is odd
    assert "into which a capture cannot look" in str(job.opaque_reason)


@pytest.mark.needs_time("torch's first error of a trace imports sympy")
def test_a_batch_of_wrong_shape_is_told_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(8, 4)
    step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.AdamW(model.parameters()))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught:
        step((torch.randn(4, 9), torch.zeros(4, dtype=torch.int64)))
    assert caught.value.__context__ is None
    assert not [record for record in caplog.records if "fake_tensor" in record.pathname]


@pytest.mark.parametrize("do", [copy.deepcopy, pickle.dumps])
def test_a_step_cannot_be_copied(do: Callable[[Any], Any]) -> None:
    model = nn.Linear(8, 4)
    step = wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.AdamW(model.parameters()), name="it")
    with pytest.raises(TypeError, match="step 'it' cannot be copied or pickled: copy its model, and the optimizer's state_dict"):
        do(step)


def test_the_line_of_an_error_is_one_of_the_step() -> None:
    """Not of whoever called the step that was captured first."""
    made = []
    for _ in range(2):
        model = nn.Linear(8, 4)
        made.append(wf.Step(model, loss=F.cross_entropy, optimizer=torch.optim.AdamW(model.parameters())))
    made[0]((torch.randn(4, 8), torch.zeros(4, dtype=torch.int64)))
    with pytest.raises(wf.StepError, match=r"Target 9 is out of bounds\.$"):
        made[1]((torch.randn(4, 8), torch.full((4,), 9)))


def test_a_step_function_that_trains_by_itself_is_told_what_it_is_for() -> None:
    model = nn.Linear(6, 4)
    optimizer = SGD(model.parameters(), lr=0.1)

    def trains(model: nn.Module, batch: Any) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(batch[0]), batch[1])
        loss.backward()
        return loss

    with pytest.raises(RuntimeError) as raised:
        wf.Step(model, step=trains, optimizer=optimizer)(images(1)[0])
    assert "a step function returns its loss: leave out backward() and update" in raised.value.__notes__[0]
