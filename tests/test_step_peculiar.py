"""Tensors, modules and batches that a capture cannot look into: the step runs eagerly, says why, and gives eager bits."""

from __future__ import annotations

import dataclasses
from collections import UserDict, namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim import SGD, AdamW, Optimizer

import waterflow as wf
from tests.support import MiB, Net, compare, images
from waterflow.executor.engine import Engine
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


class Doubling(torch.Tensor):
    """Its sums are twice as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})
        return made * 2 if func is torch.Tensor.sum else made


class Scaled(nn.Module):
    """A parameter of its own kind, beside a plain layer."""

    def __init__(self, weight: torch.Tensor, use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 4)
        self.weight = nn.Parameter(weight) if weight.is_floating_point() or weight.is_complex() else weight
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.layer(x), self.weight)


class WithBuffer(nn.Module):
    def __init__(self, buffer: torch.Tensor, use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.use = nn.Linear(6, 4), use
        self.register_buffer("table", buffer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.use(self.layer(x), self.get_buffer("table"))


def making(model: Callable[[], nn.Module], optimizer: Any = SGD) -> Callable[[], tuple[nn.Module, Optimizer]]:
    def make() -> tuple[nn.Module, Optimizer]:
        made = model()
        complex_ones = any(p.is_complex() for p in made.parameters())
        return made, optimizer(made.parameters(), lr=0.05, **{"foreach": False} if complex_ones else {"fused": True})

    return make


def square(side: int = 4) -> torch.Tensor:
    return torch.randn(side, side, generator=torch.Generator().manual_seed(3))


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(square(), 0.1, 0, torch.qint8)


MODELS: dict[str, tuple[Callable[[], nn.Module], str | None]] = {
    "complex parameter": (
        lambda: Scaled(torch.complex(square()[0], square()[1]), lambda x, w: (x * w).abs()),
        "no fused form for complex parameters",
    ),
    "parameter of a class": (
        lambda: Scaled(square().as_subclass(Doubling), lambda x, w: (x @ w) * w.sum().as_subclass(torch.Tensor)),
        "parameter 'weight' is a Doubling",
    ),
    "buffer of a class": (
        lambda: WithBuffer(square().as_subclass(Doubling), lambda x, b: (x @ b).as_subclass(torch.Tensor) * b.sum()),
        "buffer 'table' is a Doubling",
    ),
    "sparse buffer": (
        lambda: WithBuffer(square().relu().to_sparse(), lambda x, b: torch.sparse.mm(b, x.T).T),
        "buffer 'table' has the layout torch.sparse_coo",
    ),
    "quantized buffer": (
        lambda: WithBuffer(quantized(), lambda x, b: x @ b.dequantize()), "buffer 'table' is quantized",
    ),
    "mkldnn buffer": (
        lambda: WithBuffer(square().to_mkldnn(), lambda x, b: x @ b.to_dense()), "layout torch._mkldnn",
    ),
    "scripted": (
        lambda: nn.Sequential(nn.Linear(6, 8), torch.jit.script(nn.Dropout(0.5)), nn.Linear(8, 4)), "torch.jit",
    ),
    "traced": (
        lambda: nn.Sequential(nn.Linear(6, 8), torch.jit.trace(nn.Linear(8, 8), torch.randn(2, 8)), nn.Linear(8, 4)),
        "torch.jit",
    ),
    "weight norm by a hook": (
        lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 8)), nn.Linear(8, 4)),
        "the hook WeightNorm sets an attribute of a Linear in each step; use torch.nn.utils.parametrizations.weight_norm",
    ),
    "spectral norm by a hook": (
        lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 4)), "parametrizations.spectral_norm",
    ),
    "pruned": (
        lambda: nn.Sequential(prune.l1_unstructured(nn.Linear(6, 8), "weight", amount=0.4), nn.Linear(8, 4)),
        "the hook L1Unstructured sets an attribute of a Linear in each step; torch.nn.utils.prune.remove",
    ),
    "scripted with parameters": (lambda: torch.jit.script(nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4))), "torch.jit"),
}  # fmt: skip


@pytest.mark.parametrize("kind", MODELS)
def test_models(kind: str, engine: Engine | None) -> None:
    model, reason = MODELS[kind]

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).as_subclass(torch.Tensor), batch[1])

    compare(making(model), images(4), engine=engine, opaque=reason, step=step)


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass(frozen=True)
class FrozenPair:
    x: torch.Tensor
    y: torch.Tensor


class Object:
    def __init__(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.x, self.y = x, y


Named = namedtuple("Named", ("x", "y"))


def _nested(x: torch.Tensor, y: torch.Tensor) -> Any:
    return {"x": torch.nested.nested_tensor([x[:3], x[3:]]), "y": y}


BATCHES: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], Callable[[Any], Any], str | None]] = {
    "tensor of a class": (
        lambda x, y: (x.as_subclass(Doubling), y), lambda b: (b[0] / b[0].sum(), b[1]), "of the batch is a Doubling"
    ),
    "dict with a tensor of a class": (
        lambda x, y: {"x": x.as_subclass(Doubling), "y": y}, lambda b: (b["x"] / b["x"].sum(), b["y"]), "is a Doubling"
    ),
    "sparse": (lambda x, y: (x.to_sparse(), y), lambda b: (b[0].to_dense(), b[1]), "layout torch.sparse_coo"),
    "compressed": (lambda x, y: (x.to_sparse_csr(), y), lambda b: (b[0].to_dense(), b[1]), "layout torch.sparse_csr"),
    "nested": (_nested, lambda b: (torch.cat(b["x"].unbind()), b["y"]), "is nested"),
    "mkldnn": (lambda x, y: (x.to_mkldnn(), y), lambda b: (b[0].to_dense(), b[1]), "layout torch._mkldnn"),
    "quantized": (
        lambda x, y: (torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), y), lambda b: (b[0].dequantize(), b[1]),
        "is quantized",
    ),
    "dataclass": (Pair, lambda b: (b.x, b.y), "holds a Pair"),
    "frozen dataclass": (FrozenPair, lambda b: (b.x, b.y), "holds a FrozenPair"),
    "object": (Object, lambda b: (b.x, b.y), "holds a Object"),
    "object in a tuple": (lambda x, y: (x, Object(x, y)), lambda b: (b[0], b[1].y), "holds a Object"),
    "mapping": (lambda x, y: UserDict(x=x, y=y), lambda b: (b["x"], b["y"]), "holds a UserDict"),
    "named tuple": (Named, lambda b: (b.x, b.y), None),
    "text": (lambda x, y: (x, y, ["a", "b"]), lambda b: (b[0] * len(b[2][0]), b[1]), None),
}  # fmt: skip


@pytest.mark.parametrize("kind", BATCHES)
def test_batches(kind: str, engine: Engine | None) -> None:
    made, read, reason = BATCHES[kind]

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        x, y = read(batch)
        loss = F.cross_entropy(model(x), y)
        return loss.as_subclass(torch.Tensor) if isinstance(loss, Doubling) else loss

    batches = [made(x, y) for x, y in images(4)]
    compare(making(Net, AdamW if reason is None else SGD), batches, engine=engine, opaque=reason, step=step)


def turned_result(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(batch[0])
    output.t_()
    output.mul_(2)
    return (output * torch.arange(len(batch[0]))).mean()


def turned_parameter(model: nn.Module, batch: Any) -> torch.Tensor:
    weight = model.weight.detach()
    weight.t_()
    weight.unsqueeze_(0)
    return (model(batch[0]) @ weight[0] * torch.arange(4)).mean()


def turned_for_good(model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.no_grad():
        model.weight.t_()
    return (model(batch[0]) @ model.weight * torch.arange(4)).mean()


def turned_batch(model: nn.Module, batch: Any) -> torch.Tensor:
    batch[1].unsqueeze_(0)
    return F.cross_entropy(model(batch[0]), batch[1].flatten())


def turned_beside_a_view(model: nn.Module, batch: Any) -> torch.Tensor:
    output = model(batch[0]) * 2
    first = output[:2]
    output.t_()
    first.mul_(3)
    return (output * torch.arange(len(batch[0]))).mean() + first.sum()


def turned_view(model: nn.Module, batch: Any) -> torch.Tensor:
    column = model(batch[0])[:, 0]
    column.unsqueeze_(1)
    column.mul_(2)
    return (column * torch.arange(4)).mean()


TURNED = {
    turned_result: None, turned_parameter: None, turned_for_good: "a step changes the shape of a tensor that it was given",
    turned_batch: "let it make a view, as x.t() does", turned_beside_a_view: "a step writes into a tensor with views",
    turned_view: "a step writes into a tensor with views",
}  # fmt: skip


@pytest.mark.parametrize("step", TURNED, ids=lambda step: step.__name__)
def test_shapes_that_are_changed_in_place(step: Callable[..., torch.Tensor]) -> None:
    compare(making(lambda: Scaled(square(), lambda x, w: x @ w)), images(3, size=4), step=step, opaque=TURNED[step])


def test_a_plain_batch_first(engine: Engine | None) -> None:
    """What was captured for plain tensors is not taken for others of the same shape."""
    batches = [(x.as_subclass(Doubling) if number > 1 else x, y) for number, (x, y) in enumerate(images(4))]

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        loss = F.cross_entropy(model(batch[0]), batch[1]) * batch[0].sum()
        return loss.as_subclass(torch.Tensor) if isinstance(loss, Doubling) else loss

    compare(making(Net), batches, engine=engine, opaque="is a Doubling", step=step)


def test_batches_without_memory() -> None:
    """Eager code fails on these, too, and the error is its own."""
    model = Net()
    job = wf.Step(model, loss=F.cross_entropy, optimizer=SGD(model.parameters(), lr=0.1))
    x, y = images(1)[0]
    for _ in range(2):
        with pytest.raises(Exception) as caught:
            job((x.to("meta"), y.to("meta")))
        assert not isinstance(caught.value, wf.WaterflowError)
        assert job((x, y)).isfinite() and job.opaque_reason is None


@pytest.mark.parametrize("where", ["structure_key", "bind", "build"])
def test_an_error_of_the_capture_itself(where: str, engine: Engine | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step runs eagerly in the place of failing, and the optimizer starts from nothing."""
    real = getattr(bound_step, where)

    def fails(*args: Any, **kwargs: Any) -> Any:
        real(*args, **kwargs)
        raise KeyError("something unforeseen")

    monkeypatch.setattr(bound_step, where, fails)
    reason = "capturing it failed with KeyError: 'something unforeseen'"
    make = making(Net, AdamW)
    compare(make, images(4), engine=engine, opaque=reason)
    model, optimizer = make()
    with pytest.raises(wf.CaptureError, match="capturing it failed") if where != "bind" else pytest.raises(KeyError):
        job = wf.Step(model, loss=F.cross_entropy, optimizer=optimizer)
        job.plan_for(images(1)[0])
        raise KeyError("bound to nothing")


def test_errors_of_the_user_stay_what_they_are(engine: Engine | None) -> None:
    model = Net()

    def step(model: nn.Module, batch: Any) -> torch.Tensor:
        if batch[0].shape[0] != 8:
            raise KeyError("eight, please")
        return F.cross_entropy(model(batch[0]), batch[1])

    job = wf.Step(model, step=step, optimizer=SGD(model.parameters(), lr=0.1), engine=engine)
    with pytest.raises(KeyError, match="eight"):
        job(images(1, size=5)[0])
    assert job(images(1)[0]).isfinite() and job.opaque_reason is None
