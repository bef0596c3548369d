"""The garbage collector finds all that native objects hold, and steps go with their last user."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Adam

import waterflow as wf
from waterflow import _C

HAVE_GC = 1 << 14  # Py_TPFLAGS_HAVE_GC
NUMBERS, TEXT, NATIVE = "numbers alone", "numbers and text", "objects of C++ that Python code cannot reach"
HOLDS_NO_PYTHON = {
    "Binding.Kind": NUMBERS,
    "CudaArena": NATIVE,
    "CudaDevice": NATIVE,
    "CudaLimit": NATIVE,
    "Flag": NUMBERS,
    "Engine": "its jobs' steps, as long as they are to be run: what they hold must live until then",
    "GroupPlan": NUMBERS,
    "OrderFault": NUMBERS,
    "Placement": NUMBERS,
    "PlacementOrder": NUMBERS,
    "Program": "names of operators, numbers and text: it refuses tensors",
    "RequestPlan": NUMBERS,
    "SimulatedSpan": NUMBERS,
    "SimulatedStep": NUMBERS,
    "SimulationResult": NUMBERS,
    "ThreadGenerators": "generators as C++ has them, which their Python objects hold, and not the other way round",
    "Walk": NUMBERS,
}


class Anchor:
    """An object for native ones to hold. It holds them, too, and so is in a cycle with each."""

    def __init__(self) -> None:
        self.held: list[Any] = []
        self.key = self
        self.tensor = torch.zeros(2)
        self.tensor.anchor = self  # type: ignore[attr-defined]

    def raises(self) -> None:
        raise ValueError(self)


def of_guards(anchor: Anchor) -> _C.Guards:
    guards = _C.Guards()
    guards.object(anchor)
    return guards


def of_themselves(anchor: Anchor) -> _C.Guards:
    guards = _C.Guards()
    guards.items([guards, anchor], list)
    return guards


def binding() -> _C.Binding:
    return _C.Binding(_C.Program(inputs=1, fixed=1, slots=1))


def of_input(anchor: Anchor) -> _C.Binding:
    made = binding()
    made.set_input(0, anchor.tensor)
    return made


def of_form(anchor: Anchor) -> list[_C.Binding]:
    made = [binding(), binding()]  # both have the tensor
    for one in made:
        one.set_input(0, anchor.tensor)
        one.watch_form(anchor.tensor)
    return made


def of_gradient(anchor: Anchor) -> _C.Binding:
    made = binding()
    made.own_gradient(anchor.tensor)
    return made


def of_number(anchor: Anchor) -> _C.Binding:
    made = binding()
    made.read(0, vars(anchor), "key", -1, _C.Binding.Kind.flag)
    return made


def of_a_binding(anchor: Anchor) -> _C.Guards:
    guards = binding().guards
    guards.object(anchor)
    return guards


def of_bytes(anchor: Anchor) -> _C.StateBytes:
    made = _C.StateBytes([anchor.tensor])
    made.keep()
    return made


def run_of(work: Callable[[], Any]) -> _C.StepRun:
    return _C.opaque_run(0, work)


def of_error(anchor: Anchor) -> _C.StepRun:
    run = run_of(anchor.raises)
    run.run_alone()
    for _ in range(2):
        with pytest.raises(ValueError) as raised:
            run.outputs()
        assert raised.value.args == (anchor,)
    return run


def of_outputs(anchor: Anchor) -> _C.StepRun:
    program = _C.Program(inputs=1, fixed=1, slots=2)
    program.add("aten::clone", "", [("slot", 0, False), ("constant", None)], [1], [], [], False, False, False)
    program.set_outputs([1], [False])
    made = _C.Binding(program)
    made.set_input(0, torch.zeros(2))
    run = made.run(_C.GroupPlan(ends=[1], peak=[0], after=[0]), [], [], False)
    run.run_alone()
    assert run.outputs()[0] is run.outputs()[0]
    run.outputs()[0].anchor = anchor  # type: ignore[attr-defined]
    return run


def of_call(anchor: Anchor) -> _C.StepCall:
    plan = _C.GroupPlan(ends=[1], peak=[0], after=[0])
    return _C.StepCall(of_input(anchor), plan, [], [], (torch.zeros(2),), b"", [], 1)


def of_event(anchor: Anchor) -> _C.ObservedEvent:
    return _C.ObservedEvent((0, anchor, 0, 0, 0))  # type: ignore[call-arg]


CYCLES: dict[str, list[Callable[[Anchor], Any]]] = {
    "Binding": [of_input, of_form, of_gradient, of_number],
    "Guards": [of_guards, of_themselves, of_a_binding],
    "StateBytes": [of_bytes],
    "StepCall": [of_call],
    "StepRun": [run_of, of_error, of_outputs],
    "Observation": [
        lambda anchor: _C.Observation(None, None, anchor, ()),  # type: ignore[arg-type]
        lambda anchor: _C.Observation(anchor, anchor, None, (anchor,)),  # type: ignore[arg-type]
    ],
    "ObservedEvent": [of_event],
    **{name: [getattr(_C, name)] for name in ("Cancelled", "CannotObserve", "CudaError", "NodeError", "NodeIndexError")},
}


def types_of(space: Any, within: str = "") -> Iterator[tuple[str, type]]:
    for name, value in vars(space).items():
        if isinstance(value, type) and not name.startswith("__"):
            yield within + name, value
            yield from types_of(value, f"{within}{name}.")


def test_every_native_type_says_if_it_holds_python_objects() -> None:
    found = dict(types_of(_C))
    assert sorted([*HOLDS_NO_PYTHON, *CYCLES]) == sorted(found)
    assert {name for name, kind in found.items() if kind.__flags__ & HAVE_GC} == CYCLES.keys()


def test_cycles_through_native_objects_are_collected() -> None:
    anchors = {(name, n): Anchor() for name, makers in CYCLES.items() for n in range(len(makers))}
    for (name, n), anchor in anchors.items():
        anchor.held.append(CYCLES[name][n](anchor))
    gc.collect()
    assert all(anchor.held and anchor.tensor.anchor is anchor for anchor in anchors.values())  # type: ignore[attr-defined]
    gone = {which: weakref.ref(anchor) for which, anchor in anchors.items()}
    del anchors, anchor
    gc.collect()
    assert not [which for which, one in gone.items() if one() is not None]


def test_what_a_running_step_holds_is_kept() -> None:
    engine = _C.Engine(lanes=1, threads_per_lane=1, capacity=100)
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def work(anchor: Anchor) -> None:
        begun.set()
        go_on.wait()
        if anchor.tensor.anchor is anchor:  # type: ignore[attr-defined]
            ended.set()

    anchor = Anchor()
    gone = weakref.ref(anchor)
    anchor.held.append(run_of(partial(work, anchor)))
    engine.submit(engine.add_job(), anchor.held[0])
    del anchor
    begun.wait()
    gc.collect()
    assert gone() is not None
    go_on.set()
    assert ended.wait(60)
    engine.close()
    gc.collect()
    assert gone() is None


# -- steps of methods


class Trainer:
    """The most usual shape of a loop of one's own: its step is a method of the object that holds it."""

    width = 16
    given: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.model = nn.Linear(self.width, self.width)
        self.optimizer = Adam(self.model.parameters())
        self.prepare()
        self.step = wf.Step(self.model, step=self.loss, optimizer=self.optimizer, **self.given)

    def prepare(self) -> None:
        """Called before the step is made."""

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return model(batch).square().mean()

    def fit(self) -> None:
        for _ in range(4):
            self.step(torch.ones(4, self.width))


class OnAParameter(Trainer):
    """As loaders of weights hang methods on parameters; and its steps have several shapes."""

    def prepare(self) -> None:
        self.model.weight.load = self.loss  # type: ignore[attr-defined]

    def fit(self) -> None:
        for rows in (4, 4, 4, 3, 3, 2):
            self.step(torch.ones(rows, self.width))


class OfAHook(Trainer):
    def prepare(self) -> None:
        self.model.register_forward_hook(lambda module, given, out: out * len(self.given))


class KeepsResults(Trainer):
    def fit(self) -> None:
        super().fit()
        self.read, self.unread = (self.step.submit(torch.ones(4, self.width)) for _ in range(2))
        self.last = self.read.result()
        self.last.trainer = self


class Audits(Trainer):
    given = {"audit": 1, "accumulate": 2}  # noqa: RUF012


class RunsEagerly(Trainer):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        loss = super().loss(model, batch)
        return loss if loss.item() < 1e9 else 2 * loss

    def fit(self) -> None:
        super().fit()
        self.unread = self.step.submit(torch.ones(4, self.width))


class Fails(RunsEagerly):
    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        if batch.shape[0] == 3:
            raise ValueError(self)
        return super().loss(model, batch)

    def fit(self) -> None:
        super().fit()
        self.failed = self.step.submit(torch.ones(3, self.width))
        with pytest.raises(ValueError) as raised:
            self.failed.result()
        self.error = raised.value


EVERY: list[type[Trainer]] = [Trainer, OnAParameter, OfAHook, KeepsResults, Audits, RunsEagerly, Fails]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("kind", EVERY)
def test_a_step_of_a_method_goes_with_its_object(kind: type[Trainer], inside: bool) -> None:
    def lives() -> list[weakref.ref[Any]]:
        trainer = kind()
        trainer.fit()
        assert (trainer.step.opaque_reason is not None) == issubclass(kind, RunsEagerly)
        return [weakref.ref(one) for one in (trainer, trainer.model, trainer.optimizer, trainer.step)]

    with wf.Engine(memory="64MiB", lanes=1) as engine:
        if inside:
            with wf.within(engine):
                alive = lives()
        else:
            alive = lives()
        gc.collect()
        assert [one() for one in alive] == [None] * 4
        assert engine.reservations.claimed() == 0


@pytest.mark.parametrize(("width", "trainers"), [(1024, 5), pytest.param(256, 200, marks=pytest.mark.slow)])
def test_one_trainer_after_the_other_finds_room(width: int, trainers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "width", width)
    with wf.Engine(memory="64MiB", lanes=1) as engine, wf.within(engine):
        for _ in range(trainers):
            Trainer().fit()
        assert engine.steps == 4 * trainers
