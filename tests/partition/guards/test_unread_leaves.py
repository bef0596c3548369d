"""Leaves of a batch that a step does not read are no part of a capture's key; those that it reads in any way are."""

from __future__ import annotations

import collections
import collections.abc
import dataclasses
import functools
import json
import logging
import operator
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

import waterflow as wf
from tests.support import MiB, Net, Trained, assert_same, compare, images, same_bits, train_eager, train_step
from waterflow.errors import CaptureError
from waterflow.executor.program.capture_cache import CaptureCache
from waterflow.partition.capture.spec import StepSpec
from waterflow.partition.capture.trace import capture_step
from waterflow.partition.guards.batch_reads import LeafRead, free_places

NAMES = ["a.png", "b.png", "ccc.png"]


@pytest.fixture(autouse=True)
def _nobody_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit would end captures with other bits."""
    monkeypatch.setenv("WATERFLOW_AUDIT", "off")


def make() -> tuple[nn.Module, Optimizer]:
    model = Net(dropout=0.2)
    return model, AdamW(model.parameters(), lr=1e-2, fused=True)


def batches(count: int = 7, new: bool = False) -> list[Any]:
    """Batches of a few values, or of ever new ones."""
    return [
        {"x": x, "y": y, "name": f"{i}.png" if new else NAMES[i % 3], "id": i if new else i % 3 + 1, "raw": b"ab"[i % 2 :],
         "lam": [0.5, -0.0, 0.0][i % 3], "files": [f"{i}", NAMES[(i + 1) % 3]], "pair": (1.5 + i % 2, [7])}
        for i, (x, y) in enumerate(images(count))
    ]  # fmt: skip


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


# -- moved, and not read


def unpacks(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y, *_ = batch.values()
    return F.cross_entropy(model(x), y)


def copies(model: nn.Module, batch: Any) -> torch.Tensor:
    given = dict(batch)
    given["again"] = [given.pop("name"), batch.get("id"), *batch["files"]]
    name, number, *_ = tuple(given["again"])
    kept = {key: (value * 1 if torch.is_tensor(value) else value) for key, value in given.items()}
    return loss_of(model, {**kept, "name": name, "number": number})


def asks_for_classes(model: nn.Module, batch: Any) -> torch.Tensor:
    def to(value: Any) -> Any:
        if isinstance(value, collections.abc.Mapping):
            return {key: to(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)) and not isinstance(value, str):
            return type(value)([to(one) for one in value]) if type(value) is list else value
        return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

    scale = 2 if isinstance(batch["name"], str) and not isinstance(batch["id"], (str, bool)) and batch["lam"] is not None else 3
    return loss_of(model, {**batch, "x": to(batch["x"]), "pair": to(batch["pair"])}) * scale * len(batch["files"])


class Whole(nn.Module):
    """A model that is given the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net(dropout=0.2)

    def forward(self, x: Any, y: Any, name: str, id: int, **rest: Any) -> Any:
        return F.cross_entropy(self.net(x), y)


@pytest.mark.parametrize("step", [loss_of, unpacks, copies, asks_for_classes])
def test_what_is_not_read_is_no_part_of_the_key(no_captures: CaptureCache, step: Any) -> None:
    trained = compare(make, batches(30, new=True), step=step)
    assert no_captures.captures == 1 and trained.step is not None and trained.step.eager_steps == 0


def test_a_model_is_given_the_whole_batch(no_captures: CaptureCache) -> None:
    trained = compare(whole_model, batches(12, new=True), step=lambda model, batch: model(**batch))
    assert no_captures.captures == 1 and trained.step is not None and trained.step.eager_steps == 0


@pytest.mark.parametrize("options", [{}, {"loss": lambda output, target: output}], ids=["no loss", "a loss"])
def test_what_is_called_without_a_step_of_the_users(options: Any) -> None:
    """Then all leaves count as read."""
    torch.manual_seed(5)
    model, optimizer = whole_model()
    torch.manual_seed(5)
    step = wf.Step(model, optimizer=optimizer, **options)
    whole = [(batch["x"], batch["y"], batch["name"], batch["id"], *[batch["y"]] * len(options)) for batch in batches()]
    mine = Trained([step(batch) for batch in whole], model, optimizer)
    assert_same(mine, train_eager(whole_model, whole, step=lambda model, batch: model(*batch[:4])))


def whole_model() -> tuple[nn.Module, Optimizer]:
    model = Whole()
    return model, AdamW(model.parameters(), lr=1e-2, fused=True)


def test_two_thousand_steps(no_captures: CaptureCache) -> None:
    model, optimizer = make()
    step = wf.Step(model, step=lambda m, b: F.cross_entropy(m(b[0]), b[1]), optimizer=optimizer)
    ((x, y),) = images(1)
    for number in range(2000):
        step((x, y, [f"{number}.png", str(random.random())], number))
    assert no_captures.captures == 1 and step.eager_steps == 0 and step.opaque_reason is None


def test_in_an_engine_and_ahead(no_captures: CaptureCache) -> None:
    with wf.Engine(memory=256 * MiB, lanes=2) as engine:
        compare(make, batches(12, new=True), step=loss_of, engine=engine, accumulate=3)
    assert no_captures.captures == 2


# -- read


class Point(NamedTuple):
    name: str


@dataclasses.dataclass
class Record:
    name: str


class Odd:
    """Comes to a name by ways of Python's own."""

    def __init__(self, say: Callable[[], Any]) -> None:
        self.say = say

    def __len__(self) -> int:
        return len(self.say())

    def __index__(self) -> int:
        return len(self.say())

    def __format__(self, spec: str) -> str:
        return self.say()


def swallows(batch: Any) -> float:
    try:
        return float(len(batch["name"]))
    except:  # noqa: E722
        return -1.0


def swallows_type_errors(batch: Any) -> float:
    names = (name for name in batch["files"])
    try:
        return float(len("".join(names)))
    except (TypeError, BaseException):
        return -1.0


def tries_again(batch: Any) -> float:
    found = []
    for _ in range(3):
        try:
            found.append(batch["name"] + "x")
        except BaseException:
            found.append("nothing")
    return float(len("".join(found)))


def matches(batch: Any) -> float:
    match batch["name"]:
        case "a.png":
            return 2.0
        case str() as name if name.startswith("b"):
            return 3.0
    return 4.0


def matches_inside(batch: Any) -> float:
    match batch:
        case {"name": "a.png", **rest}:
            return 2.0 + len(rest)
        case {"id": 2 | 3 as number}:
            return float(number)
    return 7.0


def late_closure(batch: Any) -> float:
    """A function that is handed on before the variable it reads has its value."""
    lengths = map(lambda i: name[i:], range(2))  # noqa: C417
    name = batch["name"]
    return float(len("".join(lengths)))


def class_of_a_call(batch: Any) -> float:
    late = type("Late", (), {"__index__": lambda self: number})
    number = batch["id"]
    try:
        return float(range(10)[late()])
    except TypeError:
        return -1.0


def late_default(batch: Any) -> float:
    table = collections.defaultdict(lambda: name)
    name = batch["name"]
    try:
        return float(len("%(a)s" % table))  # noqa: UP031
    except TypeError:
        return -1.0


def yields_from(batch: Any) -> float:
    def generate() -> Iterator[Any]:
        yield from (batch["name"],)

    try:
        return float(len("".join(generate())))
    except TypeError:
        return -1.0


def hook_before_its_value(batch: Any) -> torch.Tensor:
    held: list[Any] = [None]
    x = batch["x"].clone().requires_grad_()
    y = x * x
    y.register_hook(lambda gradient: gradient * held[0])
    held[0] = batch["lam"]
    return torch.autograd.grad(y.sum(), x)[0].sum() + 1


class Asking(type):
    def __instancecheck__(cls, one: Any) -> bool:
        return bool(one == "a.png")


class Asked(metaclass=Asking):
    pass


def class_in_the_step(batch: Any) -> float:
    class Late:
        def __index__(self) -> int:
            return number

    number = batch["id"]
    return float(range(10)[Late()])


def sends(batch: Any) -> float:
    def receives() -> Iterator[Any]:
        name = yield 0
        yield len(name)

    generator = receives()
    next(generator)
    return float(generator.send(batch["name"]))  # type: ignore[attr-defined]


def through_a_list(batch: Any) -> float:
    held: list[Any] = [None]
    odd = Odd(lambda: held[0])
    held[0] = batch["name"]
    return float(len(odd))


def bisects(batch: Any) -> float:
    held = {"a.png": 1.0}
    held.setdefault(batch["name"], 2.0)
    return float(len(held)) + held.get(batch["name"], 0.0)


@functools.singledispatch
def dispatched(value: Any) -> float:
    return 1.0


@dispatched.register
def _(value: str) -> float:
    return 2.0 + len(value)


TABLE = {"a.png": 2.0, "b.png": 3.0, "ccc.png": 4.0}
LOG: list[Any] = []
READS: dict[str, Callable[[Any], Any]] = {
    "equal": lambda b: 2.0 if b["name"] == "a.png" else 3.0,
    "equal containers": lambda b: 2.0 if [b["name"], 1] == ["a.png", 1] else 3.0,
    "in a tuple": lambda b: 2.0 if b["name"] in ("a.png", "q") else 3.0,
    "in a list of the batch": lambda b: 2.0 if "b.png" in b["files"] else 3.0,
    "in a dict": lambda b: TABLE[b["name"]],
    "in a set": lambda b: float(len({b["name"], "b.png"})),
    "as a key": lambda b: {b["name"]: 2.0}.get("a.png", 3.0),
    "formatted": lambda b: float(len(f"{b['name']}")),
    "formatted by %": lambda b: float(len("%s %d" % (b["name"], b["id"]))),  # noqa: UP031
    "formatted by format": lambda b: float(len("{}".format(Odd(lambda: b["name"])))),
    "shown": lambda b: float(len(repr(b["files"]))),
    "length": lambda b: len(b["name"]),
    "truth": lambda b: 2.0 if b["lam"] else 3.0,
    "sign": lambda b: str(b["lam"]).count("-") + 1.0,
    "arithmetic": lambda b: (b["id"] * 2 + 1) / 3,
    "negative": lambda b: -b["lam"],
    "slice": lambda b: len("abcdef"[: b["id"]]),
    "slice of a tensor": lambda b: b["x"][:, : b["id"]].sum(),
    "entries of a tensor": lambda b: b["x"][[0, b["id"]]].sum(),
    "times a tensor": lambda b: (b["x"] * b["lam"]).sum() + 1,
    "filled": lambda b: torch.full((2,), b["lam"]).sum() + 1,
    "filled by name": lambda b: torch.full((2,), fill_value=b["lam"]).sum() + 1,
    "a tensor": lambda b: torch.tensor([b["id"], 2.0]).sum(),
    "an array": lambda b: float(np.asarray([b["id"], 2.0]).sum()),
    "clamped": lambda b: b["x"].clamp(max=b["lam"]).sum(),
    "range": lambda b: sum(range(b["id"])) + 1.0,
    "type": lambda b: 2.0 if type(b["name"]) is str else 3.0,
    "class": lambda b: 2.0 if b["name"].__class__ is str else 3.0,
    "protocol": lambda b: 2.0 if isinstance(b["name"], (collections.abc.Sized, dict)) else 3.0,
    "a class that compares": lambda b: 2.0 if isinstance(b["name"], Asked) else 3.0,
    "identity": lambda b: 2.0 if b["name"] is NAMES[0] else 3.0,
    "sorted": lambda b: float(sorted([b["name"], "b"])[0] == "b") + 1,
    "max": lambda b: max(b["id"], 2),
    "sum": lambda b: sum(n for n in [b["id"], b["lam"]]) + 1,
    "join": lambda b: float(len(",".join(b["files"]))),
    "join of a generator": lambda b: float(len(",".join(n for n in b["files"]))),
    "join of a map": lambda b: float(len("".join(map(lambda i: b["name"], range(2))))),  # noqa: C417
    "int": lambda b: int(b["lam"]) + 2,
    "int of a text": lambda b: int(b["files"][0]) % 2 + 1,
    "bytes": lambda b: float(b["raw"][0]),
    "bytes formatted": lambda b: float(len(b"%b|" % b["raw"])),
    "number in a tuple": lambda b: b["pair"][0] * b["pair"][1][0],
    "zip": lambda b: sum(2.0 * n for n, _ in zip([b["id"]], [1])),
    "unpacked call": lambda b: operator.mul(*[b["id"], 2.0]),
    "named call": lambda b: pow(**{"base": b["id"], "exp": 2}),  # noqa: PIE804
    "partial": lambda b: functools.partial(operator.add, b["id"])(1.0),
    "key of a sort": lambda b: sorted([1.0, 2.0], key=lambda one: one * b["lam"])[0],
    "replaced": lambda b: len("abc".replace("b", b["name"])),
    "attribute of an object": lambda b: float(len(Record(b["name"]).name)),
    "by setattr": lambda b: setattr(record := Odd(len), "say", b["name"]) or float(len(record.say)),  # type: ignore[arg-type, func-returns-value]
    "named tuple": lambda b: float(len(Point(b["name"]).name)),
    "attribute": lambda b: float(b["name"].endswith("a.png")) + 1,
    "by getattr": lambda b: float(getattr(b["name"], "count")("c")) + 1,  # noqa: B009
    "hasattr": lambda b: 2.0 if hasattr(b["name"], "upper") else 3.0,
    "a walk over text": lambda b: float(sum(one == "c" for one in b["name"])) + 1,
    "unpacked text": lambda b: float(len([*b["name"]])),
    "mapped": lambda b: sum(map(float, (b["id"], b["lam"]))) + 1,
    "a tree": lambda b: float(len(pytree.tree_map(lambda one: one, b["files"])[0])),
    "dispatched": lambda b: dispatched(b["name"]),
    "checkpoint": lambda b: checkpoint(lambda x, lam: (x * lam).sum() + 1, b["x"], b["lam"], use_reentrant=False),
    "hook": lambda b: (x := b["x"].clone().requires_grad_(), x.register_hook(lambda g: g * b["lam"]), x.sum())[2] * 2,
    "json": lambda b: float(len(json.dumps([b["name"], b["id"]]))),
    "printed": lambda b: print(b["name"]) or 2.0,  # type: ignore[func-returns-value]
    "logged": lambda b: logging.getLogger("unread").debug("%s", b["name"]) or 2.0,  # type: ignore[func-returns-value]
    "kept in a list": lambda b: LOG.append(b["name"]) or 2.0,  # type: ignore[func-returns-value]
    "kept in a place": lambda b: operator.setitem(PLACES, "last", b["name"]) or LOG.append(PLACES["last"]) or 2.0,  # type: ignore[func-returns-value]
    "random": lambda b: random.Random(b["id"]).random() + 1,
    **{one.__name__: one for one in (
        swallows, swallows_type_errors, tries_again, matches, matches_inside, late_closure, class_in_the_step, sends, through_a_list,
        bisects, class_of_a_call, late_default, yields_from, hook_before_its_value,
    )},
}  # fmt: skip
PLACES: dict[str, Any] = {"last": None}


@pytest.mark.parametrize("way", READS)
def test_what_is_read_is_part_of_the_key(
    no_captures: CaptureCache, way: str, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    read = READS[way]
    given = batches()

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return loss_of(model, batch) * read(batch)

    def run(train: Any) -> tuple[Any, Any]:
        LOG.clear()
        PLACES["last"] = None
        capsys.readouterr()
        with caplog.at_level(logging.DEBUG, "unread"):
            trained = train(make, given, step=step)
        said = [record.getMessage() for record in caplog.records if record.name == "unread"]
        caplog.clear()
        return trained, ([*LOG], dict(PLACES), capsys.readouterr().out, said)

    eager, left = run(train_eager)
    mine, same = run(train_step)
    assert_same(mine, eager)
    assert left == same


@pytest.mark.parametrize(
    "way", ["equal", "truth", "times a tensor", "filled", "formatted", "matches", "swallows", "late_closure"]
)
def test_such_steps_stay_captured(no_captures: CaptureCache, way: str) -> None:
    trained = compare(make, batches(9), step=lambda model, batch: loss_of(model, batch) * READS[way](batch))
    assert no_captures.captures <= 3 and trained.step is not None and trained.step.eager_steps == 0


def test_a_number_that_is_read_beside_names_that_are_not(no_captures: CaptureCache) -> None:
    given = batches(20, new=True)
    for number, batch in enumerate(given):
        batch["lam"] = [0.25, 0.5, 0.75][number % 3]
    trained = compare(make, given, step=lambda model, batch: loss_of(model, batch) * batch["lam"])
    assert no_captures.captures == 3 and trained.step is not None and trained.step.eager_steps == 0


def test_leaves_are_found_one_by_one(no_captures: CaptureCache) -> None:
    given = batches(12)
    for number, batch in enumerate(given):
        batch["file"] = f"{number}"

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        scale = batch["lam"] + 1
        return loss_of(model, batch) * (batch["id"] if batch["id"] > 1 else len(batch["name"])) * scale

    compare(make, given, step=step)
    assert no_captures.captures <= 6


def test_the_capture_of_another_job(no_captures: CaptureCache) -> None:
    """Whose values were others."""
    given = batches(6)
    step = READS["truth"]
    for some in (given[:1], given[1:], given):
        compare(make, some, step=lambda model, batch: loss_of(model, batch) * step(batch))


def test_metrics_are_of_the_batch(no_captures: CaptureCache) -> None:
    """A step that returns a leaf runs eagerly, as ever."""
    model, optimizer = make()
    step = wf.Step(model, step=lambda m, b: (loss_of(m, b), {"name": b["name"]}), optimizer=optimizer)
    with pytest.raises(CaptureError, match="metric 'name' is a str"):
        step.plan_for(batches(1)[0])
    assert [step(batch)[1]["name"] for batch in batches(4)] == [*NAMES, NAMES[0]]


class Notes(Net):
    """Notes what it is given, and draws random numbers."""

    said: Any = None

    def forward(self, x: Any, name: Any = None) -> Any:  # type: ignore[override]
        self.said = name
        return super().forward(x)


def test_as_an_attribute_of_the_model() -> None:
    given = [(batch["x"], batch["name"], batch["y"]) for batch in batches()]
    torch.manual_seed(5)
    model = Notes()
    step = wf.Step(model, loss=F.cross_entropy, optimizer=AdamW(model.parameters()))
    for batch in given:
        step(batch)
        assert model.said is batch[1]


def test_a_trace_that_is_broken_off_leaves_nothing() -> None:
    model = Notes(dropout=0.5)
    model.seen, model.count = [], 0  # type: ignore[assignment]
    optimizer = AdamW(model.parameters())
    held: list[Any] = []

    def step(m: Any, batch: Any) -> torch.Tensor:
        m.seen, m.count = ["of the trace"], 1
        held.append(3)
        loss = loss_of(m, batch)
        random.random()
        m.first.bias.requires_grad_(False)
        return loss * batch["lam"]

    batch = batches(1)[0]
    leaves, form = pytree.tree_flatten(batch)
    spec = StepSpec(
        model=model, compute_loss=lambda m, b: loss_of(m, b) * torch.rand(()) * b["lam"], optimizer=optimizer, update=True,
        accumulate=1, clip_norm=None, clip_value=None, autocast=None, device=torch.device("cpu"))  # fmt: skip
    before = {name: (one, one.clone()) for name, one in model.state_dict(keep_vars=True).items()}
    states = torch.get_rng_state(), random.getstate()
    for compute in (spec.compute_loss, step):
        with pytest.raises((LeafRead, CaptureError)):
            capture_step(dataclasses.replace(spec, compute_loss=compute), leaves, form, None, free_places(leaves, form))
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is one and same_bits(one, copy) for name, (one, copy) in before.items())
    assert (model.seen, model.count, held, model.said) == ([], 0, [], None) and not optimizer.state
    assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
    assert all(p.grad is None and p.requires_grad for p in model.parameters())


def test_unread_names_are_not_blamed(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, no_captures: Any) -> None:
    monkeypatch.setattr("waterflow.executor.program.capture_budget.FREE_CAPTURES", 2)
    given = batches(6, new=True)
    for number, batch in enumerate(given):
        batch["lam"] = 0.5 + number
    model, optimizer = make()
    step = wf.Step(model, step=lambda m, b: loss_of(m, b) * b["lam"], optimizer=optimizer)
    with caplog.at_level(logging.WARNING, "waterflow"):
        for batch in given:
            step(batch)
    said = [record.getMessage() for record in caplog.records if "new kinds" in record.getMessage()]
    assert len(said) == 1 and "batch['lam'] was 1.5 and is 2.5" in said[0] and step.eager_steps == 4
