"""What cannot be captured runs eagerly, says why, and trains as eager training does."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import random
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn
from torch.optim import SGD, Adagrad, AdamW, Optimizer, RMSprop

import waterflow as wf
from tests.support import MiB, Net, Trained, assert_same, compare, images, train_eager, train_step
from waterflow.executor.engine import Engine, within
from waterflow.executor.program import bound_step


@pytest.fixture(autouse=True)
def _afresh(no_captures: Any) -> None:
    """No verdict is taken over from an earlier test."""


@pytest.fixture(params=["alone", "engine"])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine | None]:
    if request.param == "alone":
        yield None
        return
    with Engine(memory=256 * MiB, lanes=2) as made:
        yield made


def making(model: Any, optimizer: Any = None, **options: Any) -> Any:
    def make() -> tuple[nn.Module, Optimizer]:
        made = model(**options)
        return made, (optimizer or (lambda p: AdamW(p, lr=0.02, fused=True)))(made.parameters())

    return make


class Counting(Net):
    """Counts its calls in an attribute, and computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) / self.calls


class CountingInDict(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen = {"calls": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen["calls"] += 1
        return super().forward(x) / self.seen["calls"]


class CountingInList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(self.seen))
        return super().forward(x) / len(self.seen)


class CountingInParts(Net):
    """The counter is in an object that is no module."""

    class Counter:
        def __init__(self) -> None:
            self.calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.seen = self.Counter()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.calls += 1
        return super().forward(x) / self.seen.calls


class Remembering(Net):
    """Keeps a tensor from step to step in a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.last_mean = torch.zeros(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x - self.last_mean
        self.last_mean = x.mean(0).detach()
        return super().forward(x)


class Deciding(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        if out.sum() > 0:  # the user's line
            return out
        return 2 * out


class Reading(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + x.abs().max().item())  # the user's line


class Selecting(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x[x > 0].mean()


class Unique(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + x.round().unique().sum()


class ToNumpy(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + torch.from_numpy(np.sort(x.numpy(), axis=0)).mean()


class PythonRandom(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * random.uniform(0.5, 1.5)


class NumpyRandom(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * np.random.uniform(0.5, 1.5)


class OwnPythonRandom(Net):
    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.random.uniform(0.5, 1.5)


class OwnNumpyRandom(Net):
    def __init__(self) -> None:
        super().__init__()
        self.random = np.random.default_rng(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.random.uniform(0.5, 1.5)


class LayerDrop(Net):
    """Leaves a layer out at random, decided by torch's generator on the host."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if torch.rand(()).item() < 0.5:
            x = self.norm(x)
        return self.last(x)


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.last = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        lengths = torch.arange(1, 9).clamp(max=3)
        packed = rnn.pack_padded_sequence(x[:, None].expand(8, 3, 6), lengths, batch_first=True, enforce_sorted=False)
        return self.last(self.lstm(packed)[1][0][-1])


class RandomAndReading(Net):
    """The attempt to capture it must not have moved any generator, nor counted."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        scale = random.uniform(0.5, 1.5) * np.random.uniform(0.5, 1.5) * torch.rand(()) / self.calls
        return super().forward(x) * scale * (1 + x.abs().max().item())


MODELS: dict[str, tuple[type[nn.Module], str]] = {
    "counter": (Counting, "calls"),
    "counter in a dict": (CountingInDict, "seen"),
    "counter in a list": (CountingInList, "seen"),
    "counter in an object": (CountingInParts, "seen"),
    "remembered tensor": (Remembering, "last_mean"),
    "control flow": (Deciding, "if out.sum() > 0"),
    "item": (Reading, "x.abs().max().item()"),
    "boolean index": (Selecting, "x[x > 0]"),
    "unique": (Unique, "unique()"),
    "numpy array": (ToNumpy, "x.numpy()"),
    "python random": (PythonRandom, "Python's random"),
    "numpy random": (NumpyRandom, "NumPy's random"),
    "own python random": (OwnPythonRandom, "random"),
    "own numpy random": (OwnNumpyRandom, "random"),
    "layer drop": (LayerDrop, "torch.rand(()).item()"),
    "packed sequence": (Packed, "pack_padded_sequence"),
    "random and item": (RandomAndReading, "Python's random"),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models(kind: str, engine: Engine | None) -> None:
    model, reason = MODELS[kind]

    def during(model: nn.Module, optimizer: Optimizer) -> Any:
        def act(number: int) -> None:
            if number == 0:
                random.seed(1)
                np.random.seed(1)

        return act

    trained = compare(making(model), images(5), during=during, opaque=reason, engine=engine)
    if hasattr(trained.model, "calls"):
        assert trained.model.calls == 5


@pytest.mark.parametrize("kind", ["control flow", "item", "boolean index"])
def test_the_reason_names_the_line(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="waterflow")
    trained = train_step(making(MODELS[kind][0]), images(1), name="mine")
    assert trained.step is not None
    reason = trained.step.opaque_reason
    assert reason is not None and "test_step_opaque.py:" in reason and "in forward" in reason
    told = [record.getMessage() for record in caplog.records if "'mine'" in record.getMessage()]
    assert len(told) == 1 and reason in told[0]


UPDATES = {
    "rmsprop": (lambda p: RMSprop(p, lr=0.01), "RMSprop"),
    "adagrad": (lambda p: Adagrad(p, lr=0.01), "Adagrad"),
    "not fused": (lambda p: AdamW(p, lr=0.01, fused=False), "single-tensor"),
    "foreach": (lambda p: AdamW(p, lr=0.01, foreach=True), "foreach"),
    "sub-class": (lambda p: type("Mine", (AdamW,), {})(p, lr=0.01), "Mine"),
}


@pytest.mark.parametrize("kind", UPDATES)
def test_optimizers(kind: str, engine: Engine | None) -> None:
    optimizer, reason = UPDATES[kind]
    options = {"clip_grad_norm": 0.5, "accumulate": 2}

    def train(run: Any, **more: Any) -> Trained:
        return run(making(Net, optimizer, dropout=0.2), images(6), **options, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.support.fuse", lambda optimizer: optimizer)
        eager = train(train_eager)
    mine = train(train_step, engine=engine)
    assert_same(mine, eager)
    assert mine.step is not None and reason in (mine.step.opaque_reason or "")


def test_optimizer_hooks(engine: Engine | None) -> None:
    calls: list[int] = []

    def optimizer(parameters: Any) -> Optimizer:
        made = SGD(parameters, lr=0.1, fused=True)
        made.register_step_pre_hook(lambda *_: calls.append(1))
        return made

    compare(making(Net, optimizer), images(4), opaque="hooks", engine=engine)
    assert len(calls) == 8


@pytest.mark.parametrize("kind", ["hook", "after accumulation", "node", "before the node"])
@pytest.mark.parametrize("when", ["before", "between"])
def test_gradient_hooks(kind: str, when: str, engine: Engine | None) -> None:
    nodes: list[Any] = []  # which have hooks as long as somebody holds them

    def add(model: Net, calls: list[int]) -> None:
        def scale(gradient: torch.Tensor) -> torch.Tensor:
            calls.append(1)
            return gradient * len(calls)

        if "node" in kind:
            weight = model.first.weight
            nodes.append(node := weight.expand_as(weight).grad_fn.next_functions[0][0])  # type: ignore[union-attr]
            if kind == "node":
                node.register_hook(lambda *_: setattr(weight, "grad", scale(weight.grad)))  # type: ignore[arg-type]
            else:
                node.register_prehook(lambda gradients: (scale(gradients[0]),))
        elif kind == "hook":
            model.first.weight.register_hook(scale)
        else:
            model.first.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", scale(p.grad)))

    def during(model: Net, optimizer: Optimizer) -> Any:
        calls: list[int] = []
        if when == "before":
            add(model, calls)
        return lambda number: add(model, calls) if when == "between" and number == 2 else None

    compare(making(Net), images(5), during=during, opaque="hooks, ", engine=engine)


def test_hooks_of_other_nodes_leave_a_step_as_it_is(engine: Engine | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a parameter that were taken off, or whose node has gone."""
    torch.manual_seed(0)
    model, other = Net(), nn.Linear(6, 6)
    step = wf.Step(model, loss=F.cross_entropy, optimizer=SGD(model.parameters(), lr=0.1, fused=True), engine=engine)
    batch = images(1)[0]
    step(batch)
    keys: list[Any] = []
    monkeypatch.setattr(bound_step, "structure_key", keys.append)
    for _ in range(3):
        y = other(batch[0]).relu()
        y.grad_fn.register_hook(lambda *_: None)
        loss = model(y).square().mean()  # holds the nodes of the parameters
        weight = model.first.weight
        node = weight.expand_as(weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        node.register_hook(lambda *_: None).remove()
        step(batch)
        del loss, node
        weight.expand_as(weight).grad_fn.next_functions[0][0].register_hook(lambda *_: None)  # type: ignore[union-attr]
        step(batch)
    assert step.opaque_reason is None and keys == []


def test_module_hooks_on_gradients(engine: Engine | None) -> None:
    def during(model: Net, optimizer: Optimizer) -> Any:
        model.first.register_full_backward_hook(lambda module, given, got: (None,))
        model.last.register_full_backward_pre_hook(lambda module, got: (got[0] * 2,))
        return lambda number: None

    eager = train_eager(making(Net), images(4), during=during)
    assert_same(train_step(making(Net), images(4), during=during, engine=engine), eager)


@pytest.mark.slow
def test_hook_that_collects(engine: Engine | None) -> None:
    """A hook that writes down what it sees is to see real values, in every step."""
    seen: list[float] = []

    def during(model: Net, optimizer: Optimizer) -> Any:
        model.first.register_forward_hook(lambda module, args, output: seen.append(output.mean().item()))
        return lambda number: None

    compare(making(Net), images(4), during=during, opaque="seen.append", engine=engine)
    assert len(seen) == 8 and seen[:4] == seen[4:]


@pytest.mark.parametrize("value", ["a number", None, torch.ones(3)])
def test_losses_that_are_none(value: Any, engine: Engine | None) -> None:
    model = Net()
    job = wf.Step(model, step=lambda model, batch: value, optimizer=SGD(model.parameters(), lr=0.1), engine=engine)
    with pytest.raises(wf.WaterflowError, match="the loss must be"):
        job(images(1)[0])


def test_metrics_that_are_numbers(engine: Engine | None) -> None:
    """A metric that is read by ``.item()`` needs the values: the step runs eagerly, and returns the number."""

    def step(model: nn.Module, batch: Any) -> Any:
        output = model(batch[0])
        return F.cross_entropy(output, batch[1]), {"largest": output.max().item()}

    torch.manual_seed(0)
    model = Net()
    job = wf.Step(model, step=step, optimizer=SGD(model.parameters(), lr=0.1), engine=engine)
    loss, metrics = job(images(1)[0])
    assert loss.isfinite() and isinstance(metrics["largest"], float) and job.opaque_reason


def test_each_result_is_its_own() -> None:
    """Steps handed in ahead give their results back in order, each its own."""
    reference = train_eager(making(Deciding), images(4))
    with Engine(memory=256 * MiB, lanes=2) as engine:
        torch.manual_seed(5)
        model, optimizer = making(Deciding)()
        job = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
        pending = [job.submit(batch) for batch in images(4)]
        while engine.native.steps_done < 4:
            time.sleep(0.001)
        results = [each.result() for each in pending]
        assert_same(Trained(results, model, optimizer), reference)


def test_surrounding_autocast_reaches_the_lane(engine: Engine | None) -> None:
    reference = train_eager(making(Reading), images(4), autocast=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mine = train_step(making(Reading), images(4), engine=engine)
    assert_same(mine, reference)


def test_error_in_forward_is_the_users_own(engine: Engine | None) -> None:
    """The batch is refused with the user's error, and the next one trains as if nothing had been."""

    class Picky(Deciding):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.max() > 50:
                raise KeyError("too large")
            return super().forward(x)

    batches = images(4)
    reference = train_eager(making(Picky), batches)
    torch.manual_seed(5)
    model, optimizer = making(Picky)()
    job = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
    results = []
    for x, y in batches:
        with pytest.raises(KeyError, match="too large"):
            job((x * 100, y))
        results.append(job((x, y)))
    assert_same(Trained(results, model, optimizer), reference)
    assert job.steps == len(batches)


class Odd(Net):
    """Can be captured for eight rows, and for no other number."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if len(x) == 8 else 1 + x.abs().max().item())


@pytest.mark.parametrize("sizes", [(8, 8, 8, 5, 8, 8), (8, 5, 8, 8), (5, 8, 8, 8)], ids=str)
def test_gradients_gathered_so_far_are_taken_along(sizes: tuple[int, ...], engine: Engine | None) -> None:
    """The job turns opaque in the middle of an accumulation."""
    batches = [images(1, size=size, seed=number)[0] for number, size in enumerate(sizes)]
    compare(making(Odd), batches, accumulate=2, opaque="item()", engine=engine)


def test_many_opaque_jobs_beside_captured_ones() -> None:
    kinds = [Deciding, Net, Reading, Counting, Net, LayerDrop]
    references = [train_eager(making(kind), images(8, seed=i), seed=i) for i, kind in enumerate(kinds)]
    ends: list[Any] = [None] * len(kinds)
    with Engine(memory=256 * MiB, lanes=3) as engine:
        made = []
        for i, kind in enumerate(kinds):
            torch.manual_seed(i)
            made.append(making(kind)())

        def work(i: int) -> None:
            try:
                ends[i] = run_one(i)
            except BaseException as error:
                ends[i] = error

        def run_one(i: int) -> Trained:
            model, optimizer = made[i]
            with within(engine):
                random_numbers = torch.Generator().manual_seed(i)
                job = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, generator=random_numbers)
                results = [job(batch) for batch in images(8, seed=i)]
            return Trained(results, model, optimizer, job)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(len(kinds))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for end, reference in zip(ends, references):
            assert isinstance(end, Trained), end
            assert_same(end, reference)
        engine.native.check()


def test_an_opaque_job_is_not_copied_from_another(no_captures: Any) -> None:
    """Why one model cannot be captured is remembered for its like, and for no other."""
    compare(making(Counting), images(5), opaque="calls")
    compare(making(Counting), images(5), opaque="calls")
    assert no_captures.captures == 4 and no_captures.hits == 4  # each try
    compare(making(Net), images(2))
    kept = copy.deepcopy(no_captures.captures)
    assert kept == 5


class Product(torch.autograd.Function):
    """Keeps a weight for its backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x if ctx.needs_input_grad[1] else None


class OverFrozen(nn.Module):
    """A frozen weight between two trained layers, reached in ways that no function mode sees."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.first, self.frozen, self.last = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.way == "function":
            x = Product.apply(x, self.frozen.weight)
        elif self.way == "hook":
            x.register_hook(lambda g: g * self.frozen.weight.mean())
        elif self.way == "again":
            x = torch.utils.checkpoint.checkpoint(lambda t: torch.tanh(self.frozen(t)), x, use_reentrant=False)
        elif self.way == "opaque function":
            x = Product.apply(x, self.frozen.weight) * (1.0 if x.sum().item() > -1e9 else 2.0)
        elif self.way == "swallowed":
            try:
                scale = float(x.sum().item())
            except Exception:
                scale = 1.0
            x = x * scale
        elif self.way == "data":
            x = x * 1.0
            x.data = x.data * 2
        return self.last(x)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["function", "hook", "again", "opaque function", "swallowed", "data"])
def test_frozen_parts_and_what_a_trace_cannot_see(way: str, engine: Engine | None) -> None:
    def make() -> Any:
        model = OverFrozen(way)
        return model, AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)

    batches = images(4)
    torch.manual_seed(0)
    model, optimizer = make()
    expected = []
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    torch.manual_seed(0)
    model, optimizer = make()
    step = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer, engine=engine)
    assert [step(batch).item() for batch in batches] == expected
    assert (step.opaque_reason is None) == (way in ("function", "hook", "again"))


def test_a_part_that_changes_its_mode_runs_eagerly(engine: Engine | None) -> None:
    class FirstBatch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.BatchNorm1d(6), nn.Linear(6, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x)
            self.norm.eval()
            return self.last(x)

    model = FirstBatch()
    step = wf.Step(model, loss=F.cross_entropy, optimizer=AdamW(model.parameters()), engine=engine)
    step(images(1)[0])
    assert "training" in step.opaque_reason and "self.norm.eval()" in step.opaque_reason and not model.norm.training


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("optimizer", [AdamW, RMSprop])
def test_an_optimizer_over_an_input(frozen: bool, optimizer: Any, engine: Engine | None) -> None:
    """What it trains is no parameter of the model: a leaf that the step reads."""

    def make() -> tuple[nn.Module, torch.Tensor, Optimizer]:
        torch.manual_seed(0)
        given = torch.randn(8, 6, requires_grad=True)
        settings = {"fused": True} if optimizer is AdamW else {}
        return nn.Linear(6, 4).requires_grad_(not frozen), given, optimizer([given], lr=0.1, **settings)

    targets = [y for _, y in images(4)]
    model, alone, own = make()
    losses = []
    for y in targets:
        loss = F.cross_entropy(model(alone), y)
        loss.backward()
        own.step()
        own.zero_grad()
        losses.append(loss.item())
    model, given, own = make()
    step = wf.Step(model, step=lambda m, y: F.cross_entropy(m(given), y), optimizer=own, engine=engine)
    assert [step(y).item() for y in targets] == losses and torch.equal(given, alone)
    assert "that the model does not hold" in str(step.opaque_reason)


def test_an_input_of_a_model_without_tensors() -> None:
    given = torch.ones(3, requires_grad=True)
    step = wf.Step(nn.Softmax(0), step=lambda m, y: (m(given) * y).sum(), optimizer=SGD([given], lr=0.1))
    assert step(torch.tensor([1.0, 0.0, 0.0])).item() > step(torch.tensor([1.0, 0.0, 0.0])).item()


@pytest.mark.parametrize("where", ["alone", "engine"])
def test_batches_of_arrays_are_tensors_for_the_step_behind_many_others(where: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    x, y = np.ones((4, 3), np.float32), np.zeros((4, 1), np.float32)
    with wf.Engine("cpu", memory="64MiB") if where == "engine" else contextlib.nullcontext() as engine:
        step = wf.Step(model, loss=F.mse_loss, optimizer=optimizer, engine=engine)
        losses = [float(step((x, y))) for _ in range(40)]
    assert step.eager_steps == step.steps == 40 and losses[-1] < losses[0]


def test_who_listens_to_an_optimizers_step_hears_each_eager_one() -> None:
    model, heard = nn.Linear(3, 1), []
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01)
    step = wf.Step(model, loss=F.mse_loss, optimizer=optimizer)
    batch = torch.ones(4, 3), torch.zeros(4, 1)
    step(batch)
    hook = optimizer.register_step_post_hook(lambda *_: heard.append("hook"))
    step(batch)
    hook.remove()
    optimizer.step = functools.partial(_hear, heard, optimizer.step)  # type: ignore[method-assign]
    step(batch)
    del optimizer.step
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(batch)
    assert heard == ["hook", "replaced"]
    assert any(event.key.startswith("Optimizer.step#RMSprop") for event in profile.key_averages())


def _hear(heard: list[str], step: Any) -> None:
    heard.append("replaced")
    step()
