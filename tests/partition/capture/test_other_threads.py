"""Other threads of a program while a step is traced: they see no difference, and what they change stays."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import optuna
import pytest
import torch
from torch import nn

import waterflow as wf
from waterflow.partition.capture.trace import _StepTracer


@pytest.fixture
def meanwhile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Callable[[], Any], int], None]]:
    """Call a function on another thread in the middle of the next traces, this often at most."""
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()  # the thread is there before the trace
        mark, waiting = _StepTracer._mark, list[Callable[[], Any]]()

        def also(tracer: _StepTracer) -> None:
            mark(tracer)
            if waiting and len(tracer._marks) == 1:
                pool.submit(waiting.pop()).result()

        monkeypatch.setattr(_StepTracer, "_mark", also)
        yield lambda change, times: waiting.extend([change] * times)


class Net(nn.Module):
    registry: dict[str, Any]
    names: list[str]
    best = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 1)
        self.seen: dict[str, int] = {}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(x) * self.registry["scale"] * self.best * len(self.names[:1])


def fresh(kind: type = dict) -> type[Net]:
    return type("Fresh", (Net,), {"registry": kind(scale=1.0), "names": ["a"]})


def step_of(model: nn.Module, step: Any = lambda m, b: m(b).mean()) -> wf.Step:
    return wf.Step(model, step=step, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))


@pytest.mark.parametrize("kind", [dict, OrderedDict])
def test_what_other_threads_register_stays(meanwhile: Any, kind: type) -> None:
    """In a dict, a list, an attribute of the class and one of the object: the step is captured from what is there now."""
    cls = fresh(kind)
    model = cls()

    def change() -> None:
        cls.registry["other"], cls.registry["scale"], cls.best = cls, 0.5, 3.0
        cls.names.append("b")
        model.seen["other"] = 1

    meanwhile(change, 1)
    step, x = step_of(model), torch.ones(2, 4)
    expected = model.l(x).mean().detach() * 1.5
    assert float(step(x)) == pytest.approx(float(expected))
    assert (
        cls.registry == {"scale": 0.5, "other": cls}
        and cls.best == 3.0
        and cls.names == ["a", "b"]
        and model.seen == {"other": 1}
    )
    assert step.opaque_reason is None
    assert float(step(x)) == pytest.approx(float(expected))


def test_one_that_changes_all_the_time_runs_eagerly_for_now(meanwhile: Any) -> None:
    cls, numbers = fresh(), iter(range(1000))
    meanwhile(lambda: cls.registry.update({str(next(numbers)): 0}), 2)
    step, x = step_of(cls()), torch.ones(2, 4)
    step(x)
    assert (step.eager_steps, step.opaque_reason) == (1, None)
    step(x)
    assert (step.eager_steps, step.steps) == (1, 2) and len(cls.registry) == 3


def assigned(model: Any) -> None:
    model.registry["own"] = 1


READS: dict[str, Callable[[Any], Any]] = {
    "get": lambda model: model.registry.get("scale"),
    "getattr": lambda model: getattr(model.registry, "get")("scale"),  # noqa: B009
    "hasattr": lambda model: hasattr(model, "registry"),
    "len": lambda model: len(model.registry) and len(model.names),
    "min": lambda model: min(model.names),
    "isinstance": lambda model: isinstance(model, Net) and isinstance(model.names, list),
    "items": lambda model: [*model.registry.items()],
    "sorted": lambda model: sorted(model.names),
}


@pytest.mark.parametrize("what", READS)
def test_what_a_step_only_reads_is_nobodys_loss(meanwhile: Any, what: str) -> None:
    cls = fresh()

    def step(m: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = m(batch).mean()
        READS[what](m)
        return loss

    def change() -> None:
        cls.registry["other"] = 1
        cls.names.append("b")
        cls.late = 1  # type: ignore[attr-defined]

    meanwhile(change, 1)
    step_of(cls(), step)(torch.ones(2, 4))
    assert cls.registry == {"scale": 1.0, "other": 1} and cls.names == ["a", "b"] and vars(cls)["late"] == 1


def unbound(model: Any) -> None:
    append = model.names.append
    append("own")


BOUND: dict[str, Callable[[Any], Any]] = {
    "by its name": unbound,
    "unpacked": lambda model: model.names.append(*["own"]),
    "mapped": lambda model: list(map(model.names.append, ["own"])),
    "as a key": lambda model: sorted("a", key=model.names.append),
}


@pytest.mark.parametrize("what", BOUND)
def test_methods_of_a_list_write_to_it(meanwhile: Any, what: str) -> None:
    cls = fresh()

    def step(m: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = m(batch).mean()
        BOUND[what](m)
        return loss

    made = step_of(cls(), step)
    for _ in range(5):
        made(torch.ones(2, 4))
    assert len(cls.names) == 6 and made.opaque_reason is not None and "names" in made.opaque_reason


WRITES: dict[str, Callable[[Any], Any]] = {
    "an entry": lambda model: model.registry.update({"own": 1}),
    "an entry, by its key": assigned,
    "a list": lambda model: model.names.append("own"),
    "an attribute": lambda model: setattr(model, "own", 1),
    "the class's": lambda model: setattr(type(model), "best", 1.5),
    "in a list that the step made": lambda model: [model.registry][0].update({"own": 1}),
}


@pytest.mark.parametrize("what", WRITES)
def test_what_the_trace_wrote_is_put_back_all_the_same(meanwhile: Any, what: str) -> None:
    """The step runs once, eagerly, with its own effect once; the other thread's entry is not lost."""
    cls = fresh()
    model = cls()

    def step(m: Any, batch: torch.Tensor) -> torch.Tensor:
        loss = m(batch).mean()
        WRITES[what](m)
        return loss

    meanwhile(lambda: setattr(cls, "mine", cls.registry.setdefault("other", 1)), 1)
    made = step_of(model, step)
    made(torch.ones(2, 4))
    assert made.eager_steps == 1
    if what != "a list":
        assert cls.registry.get("other") == 1
    assert cls.names.count("own") <= 1 and ("own" in cls.registry) == ("entry" in what or "list that" in what)


def test_a_generator_that_other_threads_draw_from() -> None:
    """As generator= of an operator, while steps of ever new shapes are traced."""
    errors: list[BaseException] = []
    stop = threading.Event()

    def draw() -> None:
        while not stop.is_set():
            try:
                torch.empty(4).uniform_(generator=torch.random.default_generator)
            except BaseException as error:
                errors.append(error)
                return

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        for width in range(4, 12):
            step_of(nn.Linear(4, width))(torch.ones(2, 4))
    finally:
        stop.set()
        thread.join()
    assert not errors


def test_draws_of_other_threads_follow_from_the_seed(meanwhile: Any) -> None:
    """A draw by the generator's name in the middle of a trace is the process's next one."""
    drawn: list[torch.Tensor] = []
    step = step_of(nn.Linear(4, 3))
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    meanwhile(lambda: drawn.append(torch.empty(4).uniform_(generator=torch.random.default_generator)), 1)
    step(torch.ones(2, 4))
    assert torch.equal(drawn[0], expected)


class Base(nn.Module):
    """Every trial's class enters itself, and each of its models, while steps of other trials are captured."""

    table: ClassVar[dict[str, Any]] = {"scale": 0.5}
    made: ClassVar[list[str]] = []

    def __init_subclass__(cls, trial: int) -> None:
        Base.table[f"class of {trial}"] = cls

    def __init__(self, width: int, key: str) -> None:
        super().__init__()
        self.hidden, self.last = nn.Linear(4, width), nn.Linear(width, 1)
        Base.table[key] = width
        Base.made.append(key)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.hidden(x))) * self.table["scale"]


def objective(trial: Any) -> float:
    class Own(Base, trial=trial.number):
        pass

    torch.manual_seed(trial.number)
    rates = [trial.suggest_float(f"rate {number}", 0.01, 0.1) for number in range(2)]
    losses = torch.zeros(())
    for number, rate in enumerate(rates):
        model = Own(3 + trial.number % 5, f"{number} of {trial.number}")
        step = wf.Step(model, step=lambda m, b: m(b).square().mean(), optimizer=torch.optim.SGD(model.parameters(), lr=rate))
        for rows in range(2, 6):
            losses += step(torch.randn(rows, 4))
        step.close()
    return float(losses)


def test_eight_trials_with_registries_of_their_own() -> None:
    """No entry is lost, and each trial has the bits that it has alone."""

    def values(beside: int) -> list[float]:
        Base.table.clear()
        Base.table["scale"] = 0.5
        Base.made.clear()
        study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
        for trial in range(16):
            study.enqueue_trial({"rate 0": 0.01 + trial / 200, "rate 1": 0.1 - trial / 200})
        wf.optimize(study, objective, n_trials=16, max_concurrent=beside, memory="64MiB")
        entered = {f"{number} of {trial}" for number in range(2) for trial in range(16)}
        assert {*Base.made} == entered and len(Base.made) == 32
        assert Base.table.keys() == {"scale", *entered, *(f"class of {trial}" for trial in range(16))}
        return [trial.value for trial in study.trials]

    assert values(8) == values(1)
